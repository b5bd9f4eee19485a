"""Run folders as ``fedloom run`` leaves them, written by the real functions from made-up counts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedloom.algorithms.base import available, find_algorithm
from fedloom.core import digests
from fedloom.core.words import as_csv
from fedloom.data.manifest import VERSION, ClientEntry, Manifest
from fedloom.data.spec import DataSpec, Normalization
from fedloom.evaluation.descriptors import descriptor_correlation, descriptor_document
from fedloom.evaluation.documents import calibration_document, client_rows, confusion_document, confusion_table
from fedloom.evaluation.plan import EvaluationPlan, EvaluationResult
from fedloom.evaluation.summary import Communication, RunCost, RunDescription, metrics_line, summary
from fedloom.evaluation.uncertainty import averaged, calibration_counts, client_document, uncertainty_counts
from fedloom.runs.folder import RunFolder

FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
ROUNDS = (0, 50, 100, 150, 200, 250, 300, 350, 400)


def manifest(
    n: int = 100,
    unseen: int = 10,
    class_names: tuple[str, ...] = FASHION,
    *,
    equal: bool = True,
    owners: Sequence[str] = (),
) -> Manifest:
    """Return a manifest with two classes per client, of 500 training examples, or of 50 to 500 if not ``equal``."""
    generator = torch.Generator().manual_seed(7)
    clients = []
    for i in range(n):
        a, b = (int(label) for label in torch.randperm(len(class_names), generator=generator)[:2])
        counts = [0] * len(class_names)
        part = 1.0 if equal else float(torch.rand((), generator=generator)) * 0.9 + 0.1
        counts[a], counts[b] = round(260 * part), round(240 * part)
        held_out = [count // 5 for count in counts]
        split = {"train": tuple(counts), "validation": tuple(held_out), "test": tuple(held_out)}
        sizes = (sum(counts), sum(held_out), sum(held_out))
        owner = owners[i] if owners else None
        clients.append(ClientEntry(f"client-{i:04d}", i < n - unseen, *sizes, split, "0" * 64, owner))
    return Manifest(
        version=VERSION,
        dataset="fashion-mnist",
        spec=DataSpec.single("pixels", (1, 28, 28), class_names, Normalization((0.286,), (0.353,))),
        scheme={"scheme": "classes", "clients": n, "classes_per_client": 2, "shares": None},
        seed=1,
        held_out_fraction=unseen / n,
        validation_fraction=1 / 6,
        source_sha256={"train-images-idx3-ubyte": "0" * 64},
        clients=tuple(clients),
    )


def confusion(partition: Manifest, predictors: int, level: float) -> Tensor:
    """Return ``[n, P, C, C]``: a fraction ``level`` of each class is right, the rest predicted as the next class."""
    c = partition.spec.classes
    of_class = torch.tensor([client.class_counts["test"] for client in partition.clients])
    right = (level * of_class).round().long()
    here, following = torch.arange(c), (torch.arange(c) + 1) % c
    found = torch.zeros(len(of_class), predictors, c, c, dtype=torch.int64)
    found[:, :, here, here] = right[:, None]
    found[:, :, here, following] = (of_class - right)[:, None]
    return found


def counts(n: int, predictors: int, level: float, generator: torch.Generator) -> Tensor:
    """Return ``[n, P, 2, 2, 3]``: about ``level`` of 100 are right, more with the label mask."""
    found = torch.zeros(n, predictors, 2, 2, 3, dtype=torch.float64)
    for p in range(predictors):
        for r, gain in enumerate((0.0, 0.5)):
            accuracy = level - 0.12 * p + gain * (1 - level)
            noise = 0.06 * torch.randn(n, 2, generator=generator).double() * (1.05 - accuracy)
            correct = (100 * (accuracy + noise).clamp(0, 1)).round()
            found[:, p, :, r] = torch.stack(
                [correct, torch.full_like(correct, 100), 100 * (1.1 - correct / 100) * 1.5], dim=-1
            )
    return found


def ensembles(n: int, classes: int, level: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Calibration ``[n, BINS, 3]`` and uncertainty ``[n, 3]`` of predictors that average three networks: 40 examples
    of each client, the surer the higher the level, and the client's number."""
    calibration, uncertainty = [], []
    for i in range(n):
        y = torch.arange(40) % classes
        logits = torch.randn(3, 40, classes, generator=generator).double()
        logits[:, torch.arange(40), y] += 6 * level * (i + 1) / n
        draws = logits.log_softmax(-1)
        calibration.append(calibration_counts(averaged(draws), y))
        uncertainty.append(uncertainty_counts(averaged(draws), draws))
    return torch.stack(calibration), torch.stack(uncertainty)


def write_run(
    folder: Path,
    *,
    algorithm: str = "pefll",
    predictors: tuple[str, ...] = ("personal",),
    seed: int = 1,
    n: int = 100,
    unseen: int = 10,
    rounds: tuple[int, ...] = ROUNDS,
    label_mask: bool = False,
    experiment: str = "name: two-class\nseed: 1\n",
    new_client: dict[str, Any] | None = None,
    class_names: tuple[str, ...] = FASHION,
    equal: bool = True,
    ensemble: bool = False,
    owners: Sequence[str] = (),
) -> Path:
    """Write a finished run and return its folder; ``ensemble``: from a method whose models are distributions."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    partition = manifest(n, unseen, class_names, equal=equal, owners=owners)
    pi = partition.class_proportions()
    seen = torch.tensor([client.seen for client in partition.clients])
    ids = tuple(client.id for client in partition.clients)
    projection, noise = (
        torch.randn(len(class_names), 26, generator=generator).double(),
        torch.randn(n, 26, generator=generator),
    )
    lines: list[dict[str, Any]] = []
    document = None
    plan = EvaluationPlan.of_classes(len(class_names))
    nothing = plan.nothing(n, len(predictors))
    uncertainty: dict[str, Any] | None = None
    draws = torch.Generator().manual_seed(seed)
    for number in rounds:
        level = 0.12 + 0.83 * (1 - 2.718 ** (-number / 90))
        calibration, sums = nothing.calibration, nothing.uncertainty
        if ensemble:
            calibration[:, 0], sums[:, 0] = ensembles(n, len(class_names), level, draws)
            uncertainty = client_document(
                uncertainty, number, clients=ids, seen=seen, calibration=calibration[:, 0], uncertainty=sums[:, 0]
            )
        evaluation = EvaluationResult(
            number,
            ids,
            seen,
            torch.ones(n, dtype=torch.bool),
            predictors,
            counts(n, len(predictors), level, generator) * torch.tensor([1.0, 1.0, 1.0]),
            confusion(partition, len(predictors), level),
            calibration,
            sums,
            nothing.sums,
            plan,
            {"descriptor": pi @ projection + noise * (1.2 - level)},
        )
        v = evaluation.records["descriptor"]
        correlation = descriptor_correlation(v, pi, ~seen)
        if algorithm == "pefll":
            document = descriptor_document(document, number, correlation, v=v, pi=pi, clients=ids, seen=seen)
        communication = Communication(
            5 * number * 350_000, 5 * number * 480_000, 5 * number * 350_400, 5 * number * 200_000
        )
        lines.append(
            metrics_line(
                evaluation,
                label_mask=label_mask,
                train_loss=None if number == 0 else 2.3 * (1 - level),
                communication=communication,
                client_steps=250 * number,
                extra={"pefll": {"spearman": correlation.as_json()}} if algorithm == "pefll" else None,
            )
        )
    extra: dict[str, Any] = {algorithm: {} if new_client is None else {"new_client": new_client}}
    titles = find_algorithm(algorithm).titles(find_algorithm(algorithm).settings()) if algorithm in available() else {}
    result = summary(
        evaluation,
        lines,
        RunDescription("two-class", algorithm, "fashion-mnist", "lenet", seed, titles),
        RunCost(rounds[-1], 5, communication, duration_s=312.4, client_steps=250 * rounds[-1], training_s=280.0),
        label_mask=label_mask,
        extra=extra,
    )
    journal = [
        {"round": r, "attempt": 1, "cohort": list(ids[:5]), "phases": {"descriptors": 0.06, "server model": 0.02,
         "local training": 0.43, "embedding gradient": 0.05, "server update": 0.04, "checkpoint": 0.003},
         "statistics": {"loss": 2.3 * 0.9**r, "client_steps": 250.0}}
        for r in range(1, 1 + min(rounds[-1], 20))
    ]  # fmt: skip
    environment = {
        "python": "3.11.2",
        "torch": "2.13.0",
        "cpu": {"capability": "AVX512", "threads": 1},
        "fingerprint": "ab" * 32,
    }
    files = {
        "experiment.yaml": experiment,
        "environment.json": json.dumps(environment),
        "partition.json": partition.to_json(),
        "clients.csv": as_csv(client_rows(evaluation, partition.clients)),
        "confusion.json": json.dumps(confusion_document(evaluation, class_names)),
        "confusion.csv": confusion_table(evaluation),
        "calibration.json": json.dumps(calibration_document(evaluation)),
        "summary.json": json.dumps(result, allow_nan=False, indent=2),
    }
    if document is not None:
        files["descriptors.json"] = json.dumps(document, allow_nan=False)
    if uncertainty is not None:
        files["uncertainty.json"] = json.dumps(uncertainty, allow_nan=False)
    run = RunFolder(folder)
    for name, text in files.items():
        run.write(name, text)
    run.rewrite("metrics.jsonl", lines)
    run.rewrite("journal.jsonl", journal)
    return folder


def put(path: Path, text: str) -> None:
    """Write a file of a run as FedLoom does, with its digest."""
    run = RunFolder(path.parent)
    if path.suffix == ".jsonl":
        *lines, cut_short = text.split("\n")
        was_finished = run.json_or_none("digests.json") is not None and path.name in run.json("digests.json")["files"]
        run.reopen_lines()
        run.rewrite(path.name, ({k: v for k, v in json.loads(line).items() if k != "digest"} for line in lines))
        if was_finished:
            run.close_lines()
        path.write_text(path.read_text() + cut_short)
    elif path.suffix == ".json" and path.name != "partition.json":
        run.write_json(path.name, {key: value for key, value in json.loads(text).items() if key != "digest"})
    elif path.name == "partition.json":
        value = {key: value for key, value in json.loads(text).items() if key != "digest"}
        run.write(path.name, digests.with_compact_digest(json.dumps(value, sort_keys=True, separators=(",", ":"))))
    else:
        run.write(path.name, text)
