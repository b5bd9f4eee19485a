"""Run folders of tasks other than classification, from made-up results of clients that are consistent in every file."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedloom.core.words import as_csv
from fedloom.data.manifest import VERSION, ClientEntry, Manifest
from fedloom.data.spec import DataSpec, Normalization
from fedloom.runs.folder import RunFolder
from fedloom.runs.journal import Attempt, Journal
from fedloom.tasks.names import METRICS

EXPERIMENT = """\
name: {task}
seed: {seed}
data: {{dataset: made-up, partition: {{scheme: natural}}}}
model: {{name: module, factory: "mine:make"}}
algorithm: {{name: {method}, lr: {lr}}}
federation: {{rounds: 30}}
"""

METRICS_OF = {
    "multilabel": ("auroc", "macro_f1", "micro_f1", "exact_match", "log_loss"),
    "regression": ("rmse", "mae", "r2", "mse"),
    "segmentation": ("mean_iou", "dice", "pixel_accuracy"),
    "next_token": ("perplexity", "accuracy"),
}
"""Metrics of each task, the headline metric first."""


def made_up(metric: str, client: int, quality: float) -> float:
    """Return a client's value of a metric: the better, the higher ``quality`` in (0, 1) and the client's number."""
    part = quality * (0.6 + 0.04 * (client % 10))
    if metric in ("rmse", "mae"):
        return round(40 * (1.1 - part), 6)
    if metric in ("mse", "log_loss", "perplexity"):
        return round(1 + 20 * (1.1 - part), 6)
    return round(part, 6)


def statistics_of(values: Sequence[float], metric: str) -> dict[str, float]:
    """Return mean, population standard deviation, worst, worst decile and a pooled value of clients."""
    worst_first = sorted(values, reverse=not METRICS[metric].higher_is_better)
    return {
        "mean": statistics.fmean(values),
        "std": statistics.pstdev(values),
        "worst": worst_first[0],
        "worst_decile": statistics.fmean(worst_first[: math.ceil(len(values) / 10)]),
        "pooled": statistics.median(values),
    }


def group(task: str, clients: Sequence[int], quality: float) -> dict[str, Any]:
    """Return a group of clients as in ``summary.json``."""
    accuracies = ("accuracy_mean", "accuracy_std", "accuracy_worst", "accuracy_worst_decile", "accuracy_pooled")
    metrics = {m: statistics_of([made_up(m, i, quality) for i in clients], m) for m in METRICS_OF[task]}
    return {
        "clients": len(clients),
        **dict.fromkeys(accuracies),
        "loss_mean": 2 - quality,
        "metrics": metrics,
        "masked": None,
    }


def write_task_run(
    folder: Path,
    task: str,
    *,
    method: str = "ditto",
    lr: float = 0.1,
    seed: int = 1,
    quality: float = 0.8,
    rounds: Mapping[int, float] | None = None,
    n: int = 30,
    unseen: int = 6,
) -> Path:
    """Write a finished run; ``rounds`` maps evaluated rounds to their quality on validation, the last is ``quality``.

    The quality of the global model is 0.1 below that of the personalized models.
    """
    headline = METRICS[METRICS_OF[task][0]]
    rounds = rounds or {0: 0.1, 10: 0.5, 20: 0.6, 30: quality}
    seen, new = range(n - unseen), range(n - unseen, n)
    reported = {"task": task, "headline": headline._asdict()}

    def groups(level: float) -> dict[str, Any]:
        overall = group(task, range(n), level - 0.1)
        inner = {"seen": group(task, seen, level - 0.1), "unseen": group(task, new, level - 0.1)}
        return {"seen": group(task, seen, level), "unseen": group(task, new, level), "global": overall | inner}

    lines = [
        {
            "round": number,
            **groups(level),
            **reported,
            "uncertainty": {"seen": None, "unseen": None, "global": None},
            "validation_pooled": made_up(headline.name, 0, level),
            "validation_loss": None,
            "left_out": {"absent": 0, "untested": 0},
            "train": {"loss": 2 - level},
            "communication": {"payload_up": number, "payload_down": number, "wire_up": None, "wire_down": None},
            "client_steps": 10 * number,
        }
        for number, level in rounds.items()
    ]
    best = max(lines, key=lambda line: (headline.sign * line["validation_pooled"], -line["round"]))
    summary = {
        "name": task,
        "algorithm": method,
        "titles": {"personal": method.capitalize(), "global": f"{method.capitalize()} (global)"},
        "dataset": "made-up",
        "model": "module",
        **reported,
        "metrics": {name: METRICS[name]._asdict() for name in METRICS_OF[task]},
        "seed": seed,
        "rounds": max(rounds),
        "clients_per_round": 5,
        **{key: lines[-1][key] for key in ("seen", "unseen", "global")},
        "own_steps": None,
        "best": {key: best[key] for key in ("round", "seen", "unseen", "global")},
        "last_evaluations": None,
        "uncertainty": {"seen": None, "unseen": None, "global": None},
        "communication": lines[-1]["communication"],
        "duration_s": 12.5,
        "client_steps_per_s": 100.0,
        method: {},
    }
    sizes = (20, 5, 5)
    entries = tuple(
        ClientEntry(
            f"client-{i:02d}", i < n - unseen, *sizes, dict.fromkeys(("train", "validation", "test"), ()), "0" * 64
        )
        for i in range(n)
    )
    spec = DataSpec.single("features", (8,)).with_normalization(Normalization.identity(8))
    partition = Manifest(
        VERSION, "made-up", spec, {"scheme": "natural", "clients": n}, seed, unseen / n, 0.2,
        {}, entries,
    )  # fmt: skip
    last = list(rounds.values())[-1]
    rows = []
    for i, entry in enumerate(entries):
        row = {
            "id": entry.id,
            "seen": str(entry.seen).lower(),
            "train": "20",
            "validation": "5",
            "test": "5",
            "labels": "",
        }
        for predictor, level in (("personal", last), ("global", last - 0.1)):
            row |= {f"{predictor}_accuracy_unmasked": "", f"{predictor}_loss_unmasked": f"{2 - level:.6f}"}
            row |= {f"{predictor}_{m}_unmasked": f"{made_up(m, i, level):.6f}" for m in METRICS_OF[task]}
        rows.append({**row, "owner": ""})
    run = RunFolder(folder)
    folder.mkdir(parents=True)
    for name, text in {
        "experiment.yaml": EXPERIMENT.format(task=task, seed=seed, method=method, lr=lr),
        "environment.json": json.dumps({"python": "3.11", "torch": "2.0"}),
        "partition.json": partition.to_json(),
        "clients.csv": as_csv(rows),
        "summary.json": json.dumps(summary, allow_nan=False),
    }.items():
        run.write(name, text)
    run.rewrite("metrics.jsonl", lines)
    journal = Journal(run)
    for t in range(1, 31):
        journal.append(Attempt(t, 1, statistics={"loss": 1 / t, "client_steps": 10.0}, phases={"local training": 0.1}))
    return folder
