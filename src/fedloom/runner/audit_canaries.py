"""Audit by canaries: a run with clients or examples that are in or out by fair coins, and guesses about the coins."""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.algorithms.base import ClientAlgorithm
from fedloom.attacks.canary_clients import CanaryClientAlgorithm, CanarySet, sent_part, sent_size
from fedloom.attacks.canary_data import (
    CanaryExample,
    canary_names,
    canary_targets,
    draw_examples,
    write_with_clients,
    write_with_examples,
)
from fedloom.attacks.guesses import LEAST, canary_document, normal_estimate
from fedloom.attacks.membership import example_losses
from fedloom.core.keyed import make_rng
from fedloom.core.words import pluralize
from fedloom.data.federated import ClientData, FederatedDataset, Split
from fedloom.data.input_spec import input_fields
from fedloom.data.inputs import take
from fedloom.errors import ExperimentError, QuorumError, argument
from fedloom.experiment import Experiment, OwnData
from fedloom.federation.evaluator import Evaluator
from fedloom.models.predictors import Predictor, predictor_of
from fedloom.runner import assemble, loops
from fedloom.runner.assemble import RunContext
from fedloom.runner.audit import CONFIDENCE, PARTITION_FOLDER, RUN_FOLDER, claimed_delta, keep_audit
from fedloom.runner.closed_run import run_closed
from fedloom.runner.engine import Engine, write_report_if_possible
from fedloom.runner.observer import RunObserver
from fedloom.runner.options import RunOptions
from fedloom.runner.requesting_client import torch_threads
from fedloom.runner.run_data import run_dataset
from fedloom.runner.run_experiment import run_experiment
from fedloom.runner.trained import personalize_each, restore
from fedloom.runs.checkpoint import Checkpoints
from fedloom.runs.files import JOURNAL
from fedloom.runs.folder import RunFolder
from fedloom.runs.journal import DONE
from fedloom.security.files import write_private

COINS = "canaries.json"
"""File in the audit's folder with the seed, and each canary's coin."""

UNCLIPPED = 10.0
"""Norm of canaries' updates in clipping norms, so that clipping is audited, too."""


@dataclass(frozen=True)
class CanaryOptions:
    """Options of an audit by canaries, as arguments of :func:`fedloom.audit`, which describes them.

    ``count`` is the number of canaries, and ``data`` are folders of packed clients.
    """

    count: int
    of: Literal["clients", "examples"] = "clients"
    out: Path | None = None
    partition: str | None = None
    norm: float | None = None
    seed: int | None = None
    report: bool = True
    data: tuple[Path, ...] = ()


@dataclass(frozen=True)
class _WithCanaries(RunContext):
    """Parts of a run whose canaries send the updates of the audit."""

    canaries: CanarySet | None = None

    @classmethod
    def of(cls, parts: RunContext, canaries: CanarySet) -> _WithCanaries:
        """Return the parts of a run with canaries."""
        known = {field.name: getattr(parts, field.name) for field in dataclasses.fields(parts)}
        return cls(**known, canaries=canaries)

    def client_algorithm(self) -> ClientAlgorithm:
        """Return the method's client algorithm, wrapped."""
        assert self.canaries is not None
        return CanaryClientAlgorithm(super().client_algorithm(), self.canaries)


def audit_with_canaries(experiment: Experiment, options: CanaryOptions, observer: RunObserver | None = None) -> Path:
    """Run an experiment with canaries, guess which are in, and write ``audit.json`` of that run; return its folder.

    The audit's folder holds the partition with the canaries, their coins, and the run.

    Raise ExperimentError if the experiment cannot have such canaries, or the folder is in use; FedloomError as any run
    does (docs/exit-codes.md).
    """
    e = _check(experiment, options)
    out = options.out or e.runs / f"{e.name}-{e.algorithm.name}-seed{e.seed}-audit"
    if out.exists():
        raise ExperimentError(f"{argument('out')} must be a new folder, and {out} exists.", key="out", found=out)
    assemble.use_device("cpu", e.runtime.threads)
    dataset = _dataset(e, options)
    seed = secrets.randbits(62) if options.seed is None else options.seed
    coins = make_rng(seed, "audit", "coins").random(options.count) < 0.5
    run = _run_with_clients if options.of == "clients" else _run_with_examples
    with torch_threads(e.runtime.threads):
        folder, scores, method = run(_CanaryRun(e, options, dataset, out, seed, coins, observer or RunObserver()))
    delta = claimed_delta(folder)
    found = canary_document(scores, coins, delta=delta, confidence=CONFIDENCE)
    if options.of == "clients":  # sums of noise and many directions, and thus nearly normal
        found["normal_estimate"] = normal_estimate(scores, coins, delta=delta)
    keep_audit(folder, {"canaries": {"of": options.of, **method, **found}})
    if options.report:
        write_report_if_possible(folder, observer or RunObserver())
    return folder.path


def _check(e: Experiment, options: CanaryOptions) -> Experiment:
    """Return the experiment in the form that the audit runs: canary clients train in this process, one by one."""
    if options.count < LEAST:
        raise ExperimentError(
            f"{argument('canaries')} must be at least {LEAST} (got {options.count}).",
            key="canaries",
            found=options.count,
        )
    if not e.federation.rounds:
        raise ExperimentError(
            f"federation.rounds is {e.federation.rounds}; canaries need a training.", key="federation.rounds"
        )
    if options.of == "examples" and not isinstance(e.data, OwnData):  # with data.own, workers would draw secret noise
        return e
    runtime = e.runtime.model_copy(update={"workers": 0, "clients_at_once": 1})
    return e.model_copy(update={"runtime": runtime})


def _dataset(e: Experiment, options: CanaryOptions) -> FederatedDataset:
    """Return the data to which canaries are added: a partition, or packed clients that are all on this machine."""
    if isinstance(e.data, OwnData):
        if not options.data:
            raise ExperimentError(
                f"data.own: an audit with canaries trains in this process; give the packed clients with "
                f"{argument('packed')}.",
                key="packed",
                hint="owners who do not share their data can audit the same settings on data of their own",
            )
        return run_dataset(e, RunOptions(data=options.data, partition=options.partition))
    if options.data:
        raise ExperimentError(
            f"{argument('packed')} needs an experiment with data.own, and this one has data.dataset.", key="packed"
        )
    found = assemble.make_partition(e) if options.partition is None else FederatedDataset.open(options.partition)
    found.verify()
    return found


@dataclass(frozen=True)
class _CanaryRun:
    """Run with canaries: the experiment, its data, and the coins ``[m]`` that decide which canaries are in."""

    experiment: Experiment
    options: CanaryOptions
    dataset: FederatedDataset
    out: Path
    seed: int
    coins: NDArray[np.bool_]
    observer: RunObserver


def _write_coins(audit: _CanaryRun, names: Sequence[Any]) -> None:
    """Write the coins to the audit's folder, in a file that only its owner may read."""
    rows = [{"canary": name, "in": bool(coin)} for name, coin in zip(names, audit.coins, strict=True)]
    content = {"of": audit.options.of, "seed": audit.seed, "canaries": rows}
    write_private(audit.out / COINS, json.dumps(content, indent=1) + "\n")


def _run_with_clients(audit: _CanaryRun) -> tuple[RunFolder, NDArray[np.float64], dict[str, Any]]:
    """Run with canary clients; return the run, their scores, and how they were scored."""
    e, dataset, options = audit.experiment, audit.dataset, audit.options
    roster, names = len(dataset.manifest.roster), canary_names(dataset, options.count)
    # The fraction of clients in a round, which a claim depends on, stays the same.
    cohort = max(1, round(e.federation.clients_per_round * (roster + options.count) / roster))
    e = e.model_copy(update={"federation": e.federation.model_copy(update={"clients_per_round": cohort})})
    parts = assemble.make_parts(e, dataset.manifest)
    size = sent_size(parts.server_algorithm(), parts.algorithm)
    norm = _norm(e) if options.norm is None else options.norm
    canaries = CanarySet(names, audit.coins, audit.seed, norm)
    write_with_clients(dataset, audit.out / PARTITION_FOLDER, names, audit.seed)
    _write_coins(audit, names)
    engine = Engine(e, _run_options(audit.out), audit.observer)
    engine.parts = parts = _WithCanaries.of(engine.parts, canaries)
    with engine.opened():
        run_closed(engine)
    _check_counted(engine.folder, names)
    last = Checkpoints(engine.folder.checkpoints).load("last").state["theta"]
    change = sent_part(last - parts.server_algorithm().state["theta"], size, parts.algorithm, parts.setup)
    return engine.folder, canaries.scores(change), {"score": "direction", "norm": norm, "clients_per_round": cohort}


def _norm(e: Experiment) -> float | None:
    """Return the norm of canaries' updates, which is above the clipping norm; None without clipping of clients."""
    privacy = e.federation.privacy
    return UNCLIPPED * privacy.clip if privacy is not None and privacy.of == "clients" else None


def _check_counted(folder: RunFolder, names: Sequence[str]) -> None:
    """Raise QuorumError if a canary's answer was not counted: the coins would then not be those of the run."""
    canaries = set(names)
    for attempt in folder.objects(JOURNAL):
        lost = [loss for held in attempt["conversations"] for loss in held["lost"] if loss["client"] in canaries]
        if lost and attempt.get("outcome", DONE) == DONE:
            raise QuorumError(
                f"Canary {lost[0]['client']} was lost in round {attempt['round']}: {lost[0]['reason']}.",
                hint=f"a smaller {argument('norm')} may be accepted",
            )


def _run_with_examples(audit: _CanaryRun) -> tuple[RunFolder, NDArray[np.float64], dict[str, Any]]:
    """Run with canary examples; return the run, their scores, and how they were scored."""
    dataset, out = audit.dataset, audit.out
    canaries = draw_examples(dataset, audit.options.count, audit.seed)
    write_with_examples(dataset, out / PARTITION_FOLDER, canaries, audit.coins)
    _write_coins(audit, [asdict(canary) for canary in canaries])
    done = run_experiment(audit.experiment, _run_options(out), audit.observer)
    parts, last, trained_on = restore(done.folder, partition=out / PARTITION_FOLDER)
    first = loops.evaluator(parts, last.transport, last.folder)  # at the start of the run
    predictor = "global" if "global" in last.predictors else "personal"
    whole = dataset.described_by(dataclasses.replace(dataset.manifest, **input_fields(parts.manifest.specs)))
    before, after = (_canary_losses(parts, at, trained_on, whole, canaries, predictor) for at in (first, last))
    return RunFolder(done.folder), before - after, {"score": "loss", "predictor": predictor}


def _canary_losses(
    parts: RunContext,
    evaluator: Evaluator,
    trained_on: FederatedDataset,
    whole: FederatedDataset,
    canaries: Sequence[CanaryExample],
    predictor: str,
) -> NDArray[np.float64]:
    """Return the loss of each canary under its client's predictor ``[m]``.

    ``trained_on`` is the data of the run, and ``whole`` the same without canaries, where these are ordinary examples.

    Raise QuorumError if a client has no predictor.
    """
    losses = np.full(len(canaries), np.nan)
    by_client = defaultdict[str, list[int]](list)
    for i, canary in enumerate(canaries):
        by_client[canary.client].append(i)
    load = parts.examples_of(whole)

    def measure(client: ClientData, named: Mapping[str, Predictor]) -> None:
        places, train = by_client[client.id], load(client.id).train
        some = [canaries[i] for i in places]
        assert train.y is not None, "checked when they were drawn"
        y = canary_targets(train.y, some, whole.manifest.classes)
        x: Any = take(train.x, torch.tensor([canary.place for canary in some]))
        found = predictor_of(client.id, named, predictor)
        losses[places] = example_losses(found, Split(x, y), parts.plan, parts.experiment.evaluation.batch_size)

    if lost := personalize_each(parts, evaluator, trained_on, list(by_client), measure):
        client, reason = next(iter(lost.items()))
        raise QuorumError(f"{pluralize(len(lost), 'client')} with canaries got no model; client {client}: {reason}")
    return losses


def _run_options(out: Path) -> RunOptions:
    return RunOptions(out=out / RUN_FOLDER, partition=str(out / PARTITION_FOLDER), report=False, signals=True)
