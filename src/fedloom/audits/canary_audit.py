"""Audit by canaries: a run with clients or examples that are in or out by fair coins, and guesses about the coins."""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.algorithms.base import ClientAlgorithm
from fedloom.attacks.canary_algorithms import (
    UPDATE,
    CanaryClientAlgorithm,
    CanaryExampleAlgorithm,
    CanaryGradients,
    CanarySet,
    sent_part,
    sent_size,
)
from fedloom.attacks.canary_data import (
    CanaryExample,
    canary_names,
    canary_targets,
    draw_examples,
    write_with_clients,
    write_with_examples,
)
from fedloom.attacks.canary_evidence import (
    GUESSES,
    LEAST,
    NOISE,
    DrawLog,
    Draws,
    PlannedAudit,
    canary_document,
    has_power,
    noise_estimate,
    normal_estimate,
    power_document,
    sampling_check,
    verdict,
)
from fedloom.attacks.membership import example_losses
from fedloom.audits.run_audit import CONFIDENCE, PARTITION_FOLDER, RUN_FOLDER, claim_of, claimed_delta, keep_audit
from fedloom.core.keyed import make_rng
from fedloom.core.words import pluralize
from fedloom.data.federated import ClientData, FederatedDataset, Split
from fedloom.data.inputs import take
from fedloom.engine import assemble, loops, run_data
from fedloom.engine.assemble import RunContext
from fedloom.engine.engine import Engine, write_report_if_possible
from fedloom.engine.observer import RunObserver
from fedloom.engine.options import RunOptions
from fedloom.engine.run_data import run_dataset
from fedloom.engine.run_experiment import run_closed, run_experiment
from fedloom.engine.trained import personalize_each, restore, torch_threads
from fedloom.engine.training_privacy import Planned, Population, noisy_steps_of
from fedloom.errors import ExperimentError, QuorumError, argument
from fedloom.experiment import Experiment, OwnData
from fedloom.federation.cohort import Summing
from fedloom.federation.evaluator import Evaluator
from fedloom.federation.releases import count_releases_about
from fedloom.federation.transport import TRAIN, ConversationKey
from fedloom.messages import Sums
from fedloom.models.predictors import Predictor, predictor_of
from fedloom.privacy.accounting import Release, epsilon_of
from fedloom.privacy.tally import largest
from fedloom.reporting.words import power_note
from fedloom.runs.checkpoint import Checkpoints
from fedloom.runs.files import JOURNAL
from fedloom.runs.folder import RunFolder
from fedloom.runs.journal import DONE
from fedloom.security.files import write_private

COINS = "canaries.json"
"""File in the audit's folder with the seed, and each canary's coin."""

UNCLIPPED = 10.0
"""Norm of canaries' updates or gradients in clipping norms, so that clipping is audited, too."""


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
class _Audited(RunContext):
    """Parts of a run with canaries, whose client algorithm is wrapped, and whose sums are recorded."""

    wrap: Callable[[ClientAlgorithm], ClientAlgorithm] = lambda inner: inner
    record: Callable[[Sequence[str], Tensor], None] | None = None

    def client_algorithm(self) -> ClientAlgorithm:
        """Return the method's client algorithm, wrapped."""
        return self.wrap(super().client_algorithm())

    @property
    def summation(self) -> Summing | None:
        """Sums of the run, recorded."""
        summation, record = super().summation, self.record
        if summation is None or record is None:
            return summation

        def observe(key: ConversationKey, clients: Sequence[str], sums: Sums[Any]) -> None:
            if key.purpose == TRAIN and hasattr(sums, UPDATE):
                record(clients, getattr(sums, UPDATE).value)

        return summation.observed_by(observe)


@dataclass(frozen=True)
class _Outcome:
    """Run with canaries, and what is known about them.

    Attributes
    ----------
    scores
        ``[m]`` score of each canary without a noisy sum.
    method
        Keys of ``audit.json`` that say how canaries were scored.
    draws
        Noisy sums with canaries; None if the run protects no such unit.
    planned
        The canaries before the training; None if the run protects no such unit.
    power
        Power of the audit before the training.
    """

    folder: RunFolder
    scores: NDArray[np.float64] | None
    method: dict[str, Any]
    draws: Draws | None = None
    planned: PlannedAudit | None = None
    power: Mapping[str, Any] = field(default_factory=dict)


def audit_with_canaries(experiment: Experiment, options: CanaryOptions, observer: RunObserver | None = None) -> Path:
    """Run an experiment with canaries, guess which are in, and write ``audit.json`` of that run; return its folder.

    The audit's folder holds the partition with the canaries, their coins, and the run.

    Raise ExperimentError if the experiment cannot have such canaries, or the folder is in use; FedloomError as any run
    does (docs/troubleshooting.md).
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
    if options.of == "examples" and e.protects_examples:
        run = _run_with_gradients
    with torch_threads(e.runtime.threads):
        outcome = run(_CanaryRun(e, options, dataset, out, seed, coins, observer or RunObserver()))
    keep_audit(outcome.folder, {"canaries": {"of": options.of, **outcome.method, **_results(outcome, coins, options)}})
    if options.report:
        write_report_if_possible(outcome.folder, observer or RunObserver())
    return outcome.folder.path


def _results(outcome: _Outcome, coins: NDArray[np.bool_], options: CanaryOptions) -> dict[str, Any]:
    """Return what the canaries show, and the verdict on the claim."""
    claim, delta = claim_of(outcome.folder), claimed_delta(outcome.folder)
    if outcome.planned is None or outcome.draws is None:
        assert outcome.scores is not None
        document = canary_document(outcome.scores, coins, delta=delta, confidence=CONFIDENCE)
        document["normal_estimate"] = normal_estimate(outcome.scores, coins, delta=delta, confidence=CONFIDENCE)
        return document | {"verdict": None}
    document = canary_document(outcome.draws.scores(len(coins)), coins, delta=delta, confidence=GUESSES)
    training = count_releases_about(outcome.folder, options.of, repeatable=True).counts
    epsilon_at = _epsilon_at(largest(training, delta), delta)
    estimate = noise_estimate(outcome.draws, coins, confidence=NOISE, epsilon_at=epsilon_at)
    power = {
        **outcome.power,
        "noise": outcome.planned.noise_found(outcome.draws.information(coins)),
    }  # it may have ended early
    tests = {"normal_estimate": estimate, "sampling": sampling_check(outcome.draws), "power": power}
    return document | tests | verdict(document | tests, None if claim is None else claim["epsilon"])


def _epsilon_at(counts: Mapping[Release, int], delta: float) -> Callable[[float], float]:
    """Return a function of a fraction of the noise that returns the ε of releases with this part of their noise."""

    def epsilon(noise: float) -> float:
        return epsilon_of(
            {replace(r, noise_multiplier=noise * r.noise_multiplier): n for r, n in counts.items()}, delta
        )

    return epsilon


def _check(e: Experiment, options: CanaryOptions) -> Experiment:
    """Return the experiment in the form that the audit runs: canaries that are recorded train in this process."""
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
    in_workers = options.of == "examples" and not e.protects_examples
    if in_workers and not isinstance(e.data, OwnData):  # with data.own, workers would draw secret noise
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
        return run_dataset(e, RunOptions(packed=options.data, partition=options.partition))
    if options.data:
        raise ExperimentError(
            f"{argument('packed')} needs an experiment with data.own, and this one has data.dataset.", key="packed"
        )
    dataset = run_data.make_partition(e) if options.partition is None else FederatedDataset.open(options.partition)
    dataset.verify()
    return dataset


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


def _run_with_clients(audit: _CanaryRun) -> _Outcome:
    """Run with canary clients."""
    e, dataset, options = audit.experiment, audit.dataset, audit.options
    roster, names = len(dataset.manifest.roster), canary_names(dataset, options.count)
    # The fraction of clients in a round, which a claim depends on, stays the same.
    cohort = max(1, round(e.federation.clients_per_round * (roster + options.count) / roster))
    e = e.model_copy(update={"federation": e.federation.model_copy(update={"clients_per_round": cohort})})
    parts = assemble.make_parts(e, dataset.manifest)
    size = sent_size(parts.server_algorithm(), parts.algorithm)
    norm = _norm(e, "clients") if options.norm is None else options.norm
    canaries, log = CanarySet(names, audit.coins, audit.seed, norm), DrawLog()
    write_with_clients(dataset, audit.out / PARTITION_FOLDER, names, audit.seed)
    _write_coins(audit, names)
    engine, record = Engine(e, _run_options(audit.out), audit.observer), None
    audit_state: tuple[Any, ...] = ()
    if _protects(e, "clients"):
        plan = _planned(engine)
        release = plan.release(plan.multiplier)
        record = partial(canaries.record, log, release=release)
        others = plan.cohort * roster / (roster + options.count)
        reach = 1.0 if norm is None else min(1.0, norm / plan.privacy.clip)
        audited = PlannedAudit(options.count, {release: plan.rounds}, others, 1, size, reach=reach)
        audit_state = (audited, _tell_power(audit, plan, audited))
    parts = _train(engine, lambda inner: CanaryClientAlgorithm(inner, canaries), record)
    _check_counted(engine.folder, names)
    last = Checkpoints(engine.folder.checkpoints).load("last").state["theta"]
    change = sent_part(last - parts.server_algorithm().state["theta"], size, parts.algorithm, parts.setup)
    method = {"score": "direction", "norm": norm, "clients_per_round": cohort}
    return _Outcome(engine.folder, canaries.scores(change), method, log.draws(), *audit_state)


def _train(
    engine: Engine,
    wrap: Callable[[ClientAlgorithm], ClientAlgorithm],
    record: Callable[[Sequence[str], Tensor], None] | None = None,
) -> RunContext:
    """Train with a wrapped client algorithm, and return the run's parts."""
    fields = {field.name: getattr(engine.parts, field.name) for field in dataclasses.fields(engine.parts)}
    engine.parts = parts = _Audited(**fields, wrap=wrap, record=record)
    with engine.opened():
        run_closed(engine)
    return parts


def _protects(e: Experiment, unit: str) -> bool:
    """Return whether an experiment's training protects a unit."""
    return e.federation.privacy is not None and e.federation.privacy.of == unit


def _planned(engine: Engine) -> Planned:
    """Return the releases of the run that is planned."""
    population = Population.from_experiment(engine.experiment, engine.parts.manifest)
    assert population is not None, "a run with canaries has a manifest"
    return Planned(engine.experiment, population)


def _tell_power(audit: _CanaryRun, plan: Planned, canaries: PlannedAudit) -> dict[str, Any]:
    """Return the power of an audit, and tell it to the observer before the training."""
    delta = plan.privacy.delta
    epsilon_at = _epsilon_at(largest(plan.counts(plan.rounds, plan.multiplier), delta), delta)
    claim = epsilon_at(1.0)
    power = power_document(canaries, epsilon_at=epsilon_at)
    audit.observer.notice(power_note(power, claim, enough=has_power(power["noise"])))
    return power


def _norm(e: Experiment, unit: str) -> float | None:
    """Return the norm of canaries' updates or gradients, above the clipping norm; None without clipping of the unit."""
    privacy = e.federation.privacy
    return UNCLIPPED * privacy.clip if privacy is not None and privacy.of == unit else None


def _check_counted(folder: RunFolder, names: Sequence[str]) -> None:
    """Raise QuorumError if a canary's answer was not counted: the coins would then not be those of the run."""
    canaries = set(names)
    for attempt in folder.objects(JOURNAL):
        losses = [
            loss
            for conversation in attempt["conversations"]
            for loss in conversation["lost"]
            if loss["client"] in canaries
        ]
        if losses and attempt.get("outcome", DONE) == DONE:
            raise QuorumError(
                f"Canary {losses[0]['client']} was lost in round {attempt['round']}: {losses[0]['reason']}.",
                hint=f"a smaller {argument('norm')} may be accepted",
            )


def _run_with_gradients(audit: _CanaryRun) -> _Outcome:
    """Run with canary examples whose gradients in noisy steps are random directions."""
    e, dataset, out, options = audit.experiment, audit.dataset, audit.out, audit.options
    examples = draw_examples(dataset, options.count, audit.seed)
    write_with_examples(dataset, out / PARTITION_FOLDER, (), audit.coins)  # unchanged
    _write_coins(audit, [asdict(canary) for canary in examples])
    engine, log = Engine(e, _run_options(out), audit.observer), DrawLog()
    releases, norm = noisy_steps_of(engine.experiment), _norm(e, "examples")
    assert releases is not None
    assert norm is not None
    plan, train_splits = _planned(engine), [client.train for client in dataset.manifest.clients if client.seen]
    size, clients = round(sum(train_splits) / len(train_splits)), len(train_splits)
    visits = max(1, round(plan.rounds * plan.cohort / plan.population.clients))
    sums = plan.steps(size, visits, plan.multiplier)
    rate = sum(r.rate * n for r, n in sums.items()) / sum(sums.values())
    others, dimension = rate * max(0.0, size - options.count / clients), engine.parts.setup.model.layout.size
    audited = PlannedAudit(options.count, sums, others, clients, dimension, sum(train_splits) // 2)
    power = _tell_power(audit, plan, audited)
    canaries = CanaryGradients(examples, audit.coins, audit.seed, norm, lambda examples: releases(examples, TRAIN), log)
    _train(engine, lambda inner: CanaryExampleAlgorithm(inner, canaries))
    return _Outcome(engine.folder, None, {"score": "gradient", "norm": norm}, log.draws(), audited, power)


def _run_with_examples(audit: _CanaryRun) -> _Outcome:
    """Run with canary examples that have wrong targets."""
    dataset, out = audit.dataset, audit.out
    canaries = draw_examples(dataset, audit.options.count, audit.seed)
    write_with_examples(dataset, out / PARTITION_FOLDER, canaries, audit.coins)
    _write_coins(audit, [asdict(canary) for canary in canaries])
    result = run_experiment(audit.experiment, _run_options(out), audit.observer)
    parts, last, trained_on = restore(result.folder, partition=out / PARTITION_FOLDER)
    first = loops.evaluator(parts, last.transport, last.folder)  # at the start of the run
    predictor = "global" if "global" in last.predictors else "personal"
    whole = dataset.described_by(dataclasses.replace(dataset.manifest, spec=parts.manifest.spec))
    losses_before, losses_after = (
        _canary_losses(parts, checkpoint, trained_on, whole, canaries, predictor) for checkpoint in (first, last)
    )
    return _Outcome(RunFolder(result.folder), losses_before - losses_after, {"score": "loss", "predictor": predictor})


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

    def measure(client: ClientData, predictors: Mapping[str, Predictor]) -> None:
        places, train = by_client[client.id], load(client.id).train
        some = [canaries[i] for i in places]
        assert train.y is not None, "checked when they were drawn"
        y = canary_targets(train.y, some, whole.manifest.spec.classes)
        x: Any = take(train.x, torch.tensor([canary.place for canary in some]))
        predictor_found = predictor_of(client.id, predictors, predictor)
        losses[places] = example_losses(
            predictor_found, Split(x, y), parts.plan, parts.experiment.evaluation.batch_size
        )

    if failures := personalize_each(parts, evaluator, trained_on, list(by_client), measure):
        client, reason = next(iter(failures.items()))
        raise QuorumError(f"{pluralize(len(failures), 'client')} with canaries got no model; client {client}: {reason}")
    return losses


def _run_options(out: Path) -> RunOptions:
    return RunOptions(out=out / RUN_FOLDER, partition=str(out / PARTITION_FOLDER), report=False, signals=True)
