"""Computation of ``metrics.jsonl`` and ``summary.json`` from the clients' counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedloom.evaluation.group_statistics import calibration_of_clients, groups, predictor_statistics, uncertainties
from fedloom.evaluation.last_evaluations import late
from fedloom.evaluation.moments import summed_group_statistics
from fedloom.evaluation.plan import READINGS, SPLITS, EvaluationPlan
from fedloom.evaluation.spread import spreads
from fedloom.tasks.base import CORRECT, LOSS, TOTAL, Counts


@dataclass(frozen=True)
class Communication:
    """Bytes of training traffic so far, over all clients.

    ``payload_*`` are tensor bytes as the papers count them, one copy per client; ``wire_*`` are measured on the wire,
    None in process. ``up`` is from the clients to the aggregator.
    """

    payload_up: int
    payload_down: int
    wire_up: int | None = None
    wire_down: int | None = None


@dataclass(frozen=True, eq=False)
class EvaluationResult:
    """Measurements of the clients after a round.

    Attributes
    ----------
    round
        Number of rounds trained before it.
    clients
        n ids, in manifest order.
    seen, present
        ``[n]`` bool: takes part in training; answered this evaluation.
    predictors
        P names, ``personal`` first, and ``global`` if the method has one.
    counts
        ``[n, P, S, R, 3]`` float64, see ``measure``; zero in the rows of absent clients.
    confusion
        ``[n, P, C, C]`` int64, see ``measure``.
    calibration, uncertainty
        ``[n, P, BINS, 3]`` and ``[n, P, 3]`` float64, see ``measure``; zero in the rows of absent clients.
    sums
        ``[n, P, S, K]`` float64, see ``measure``; zero in the rows of absent clients.
    plan
        Task, and the meaning of the sums.
    records
        Values that the server algorithm recorded, one row per client: ``[n, ...]``.
    moments
        ``[n, P, R, 2 + M, 3]`` float64, see :mod:`fedloom.evaluation.moments`, if metrics are summed securely: a row is
        then not a client, but all clients of a group, seen or unseen. None if each client's metrics are known.
    members
        ``[n, 2]``, the numbers of clients asked, and in the sums of these rows.
    models
        ``[n, 1 + SKETCH]`` float64, see :mod:`fedloom.evaluation.spread`; ``[n, 0]`` or None if not measured.
    """

    round: int
    clients: tuple[str, ...]
    seen: Tensor
    present: Tensor
    predictors: tuple[str, ...]
    counts: Tensor
    confusion: Tensor
    calibration: Tensor
    uncertainty: Tensor
    sums: Tensor
    plan: EvaluationPlan
    records: dict[str, Tensor] = field(default_factory=dict)
    moments: Tensor | None = None
    members: Tensor | None = None
    models: Tensor | None = None

    def __post_init__(self) -> None:
        """Check the shapes against each other.

        Raises
        ------
        ValueError
            If they do not agree, or there is no ``personal`` predictor.
        """
        if "personal" not in self.predictors:
            raise ValueError(f"predictors must have 'personal' (got {', '.join(self.predictors)})")
        n = len(self.clients)
        measured = self.plan.shapes(len(self.predictors))
        if self.models is None:
            del measured["models"]
        for name, trailing in {"seen": (), "present": (), **measured}.items():
            shape, expected = tuple(getattr(self, name).shape), (n, *trailing)
            if shape != expected:
                raise ValueError(f"{name} must have shape {expected} (got {shape})")
        for name, tensor in self.records.items():
            if tensor.shape[:1] != (n,):
                raise ValueError(f"record {name!r} must have shape ({n}, ...) (got {tuple(tensor.shape)})")

    @property
    def asked(self) -> int:
        """Number of clients that were asked."""
        return len(self.clients) if self.members is None else int(self.members[:, 0].sum())

    @property
    def measured(self) -> int:
        """Number of clients that are measured."""
        return int(self.present.sum()) if self.members is None else int(self.members[:, 1].sum())

    @property
    def classes(self) -> int:
        """Number C of classes; 0 for other tasks."""
        return self.plan.classes

    def of(self, predictor: str, split: str, reading: str) -> Tensor:
        """Return counts ``[n, 3]`` of one predictor, split and reading; zero for absent clients."""
        p = self.predictors.index(predictor)
        counts = self.counts[:, p, SPLITS.index(split), READINGS.index(reading)]
        return counts * self.present[:, None]

    def metrics(
        self, predictor: str, split: str, group: Tensor, *, reading: str = "unmasked", pooled: bool = False
    ) -> dict[str, Tensor]:
        """Return the metrics of one predictor on a split, ``[m]`` each, NaN where undefined.

        Accuracy and log loss of classes are of the ``reading``, all else is unmasked. Validation data have only the
        metrics that follow from counts and sums.

        Parameters
        ----------
        group
            ``[n]`` bool: the m clients. Absent ones have no metrics.
        pooled
            True for the metrics of all their examples together, m = 1.
        """
        members, p, s = group & self.present, self.predictors.index(predictor), SPLITS.index(split)
        confusion, calibration = self.confusion[members, p], self.calibration[members, p]
        if split != "test":
            confusion, calibration = torch.zeros_like(confusion), torch.zeros_like(calibration)
        rows = (self.of(predictor, split, reading)[members], confusion, calibration, self.sums[members, p, s])
        if pooled:
            rows = tuple(tensor.sum(0, keepdim=True) for tensor in rows)  # type: ignore[assignment]
        counts, confusion, calibration, sums = rows
        return self.plan.values(Counts(counts, confusion, calibration), sums, pooled=pooled)

    def by_group(self, found: Callable[[int, Tensor], Any]) -> dict[str, Any]:
        """Return, for each predictor, results of ``seen`` and ``unseen``; ``global`` is None for a method without it.

        ``found`` is called with the position of a predictor, and the present clients of a group, ``[n]`` bool.
        """
        groups = {"seen": self.seen & self.present, "unseen": ~self.seen & self.present}
        results = {
            predictor: {name: found(p, members) for name, members in groups.items()}
            for p, predictor in enumerate(self.predictors)
        }
        return {"personal": None, "global": None} | results


def validation_pooled(evaluation: EvaluationResult, *, label_mask: bool) -> float | None:
    """Return the headline of the seen clients' personal predictors over all validation examples together.

    None without validation examples, where it is undefined, and for data without targets.
    """
    counts = evaluation.of("personal", "validation", "masked" if label_mask else "unmasked")[evaluation.seen]
    total = float(counts[:, TOTAL].sum())
    if not total or not evaluation.plan.targets.outputs:
        return None
    if evaluation.classes:
        return float(counts[:, CORRECT].sum()) / total
    found = evaluation.metrics("personal", "validation", evaluation.seen, pooled=True)
    value = float(found[evaluation.plan.task.headline.name])
    return None if math.isnan(value) else value


def validation_loss(evaluation: EvaluationResult) -> float | None:
    """Return the mean validation loss of seen clients' personal predictors; None with targets or without examples."""
    counts = evaluation.of("personal", "validation", "unmasked")[evaluation.seen]
    total = float(counts[:, TOTAL].sum())
    return float(counts[:, LOSS].sum()) / total if total and not evaluation.plan.targets.outputs else None


def headline_keys(plan: EvaluationPlan) -> dict[str, Any]:
    """Return ``task`` and ``headline``, the metric that compares rounds and methods, of ``summary.json`` and lines."""
    return {"task": plan.task.name, "headline": plan.task.headline._asdict()}


def left_out(evaluation: EvaluationResult, *, label_mask: bool) -> dict[str, int]:
    """Return the numbers of clients left out of statistics: ``absent`` (no answer), ``untested`` (no test data)."""
    reading = "masked" if label_mask else "unmasked"
    if evaluation.members is not None:
        everyone = torch.ones_like(evaluation.seen)
        found = summed_group_statistics(evaluation, "personal", everyone, reading, classes=False)
        tested = 0 if found is None else found["clients"]
        return {"absent": evaluation.asked - evaluation.measured, "untested": evaluation.measured - tested}
    total = evaluation.of("personal", "test", reading)[:, TOTAL]
    present = evaluation.present.bool()
    return {"absent": int((~present).sum()), "untested": int((present & (total == 0)).sum())}


def metrics_line(
    evaluation: EvaluationResult,
    *,
    label_mask: bool,
    train_loss: float | None,
    communication: Communication,
    client_steps: int,
    extra: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return the object of one evaluated round in ``metrics.jsonl``.

    Parameters
    ----------
    train_loss
        Mean training loss since the previous line; None at round 0.
    communication, client_steps
        Cumulative over training.
    extra
        Sub-objects of methods, by the method's name.

    Raises
    ------
    ValueError
        If ``extra`` uses a key of the line itself.
    """
    line = {
        "round": evaluation.round,
        **groups(evaluation, label_mask=label_mask),
        "uncertainty": uncertainties(evaluation),
        "spread": spreads(evaluation),
        "validation_pooled": validation_pooled(evaluation, label_mask=label_mask),
        "validation_loss": validation_loss(evaluation),
        **headline_keys(evaluation.plan),
        "left_out": left_out(evaluation, label_mask=label_mask),
        "train": {"loss": train_loss},
        "communication": asdict(communication),
        "client_steps": client_steps,
    }
    return _extended(line, extra)


def best(history: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return ``best`` of ``summary.json``: the line with the best validation score, the earliest on ties.

    The score is the headline over all validation examples (of classes, accuracy), or, for data without targets, the
    lowest validation loss.

    Parameters
    ----------
    history
        Lines of ``metrics.jsonl``, in any order.

    Returns
    -------
    dict or None
        ``round``, ``seen``, ``unseen``, ``global``; None if no round was validated.
    """
    scored = ((score, line) for line in history if (score := line_score(line)) is not None)
    _, chosen = min(scored, key=lambda pair: (-pair[0], pair[1]["round"]), default=(None, None))
    if chosen is None:
        return None
    return {key: chosen[key] for key in ("round", "seen", "unseen", "global")}


def own_steps(after: Mapping[int, EvaluationResult], *, label_mask: bool) -> list[dict[str, Any]] | None:
    """Return ``own_steps`` of ``summary.json``: {``steps``, ``unseen``} for each number of a client's own steps.

    ``unseen`` is as in the summary itself. The list is None if no steps were requested.
    """
    found = [
        {"steps": k, "unseen": predictor_statistics(e, "personal", ~e.seen, label_mask=label_mask)}
        for k, e in after.items()
    ]
    return found or None


def line_score(line: Mapping[str, Any]) -> float | None:
    """Return the score that the best round maximizes: the headline on validation data, negative if lower is better."""
    loss, pooled = line.get("validation_loss"), line["validation_pooled"]
    if loss is not None:
        return -float(loss)
    higher = line.get("headline", {}).get("higher_is_better", True)
    return pooled if pooled is None or higher else -float(pooled)


@dataclass(frozen=True)
class RunDescription:
    """Description of a run in its summary; ``titles`` are the names of the method's predictors in tables."""

    name: str
    algorithm: str
    dataset: str
    model: str
    seed: int
    titles: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RunCost:
    """Cost of a run.

    Attributes
    ----------
    rounds
        Number of rounds trained.
    clients_per_round
        None for a method without rounds.
    client_steps, training_s
        Local SGD steps, and wall time of the training rounds that made them, including aggregation and wire, excluding
        evaluation and start-up.
    """

    rounds: int
    clients_per_round: int | None
    communication: Communication
    duration_s: float
    client_steps: int
    training_s: float


def summary(
    final: EvaluationResult,
    history: Iterable[Mapping[str, Any]],
    about: RunDescription,
    cost: RunCost,
    *,
    label_mask: bool,
    last: Sequence[Mapping[str, Any]] = (),
    after_steps: Mapping[int, EvaluationResult] | None = None,
    extra: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return the object of ``summary.json``.

    Parameters
    ----------
    final
        Evaluation of the last round.
    history
        Lines of ``metrics.jsonl``, including that of the best round.
    last
        Last ``last_evaluations.LATE`` lines of it.
    after_steps
        Number of own steps -> evaluation of the unseen clients after them.
    extra
        Sub-objects of methods, by the method's name. ``extra[algorithm]["new_client"]`` gives, by predictor, a new
        client's cost for ``fedloom compare``: ``client_steps``, ``payload_up``, ``payload_down``.

    Raises
    ------
    ValueError
        If ``extra`` uses a key of the summary itself.
    """
    steps, seconds = cost.client_steps, cost.training_s
    result = {
        "name": about.name,
        "algorithm": about.algorithm,
        "titles": dict(about.titles),
        "dataset": about.dataset,
        "model": about.model,
        **headline_keys(final.plan),
        "metrics": {metric.name: metric._asdict() for metric in final.plan.metrics},
        "seed": about.seed,
        "rounds": cost.rounds,
        "clients_per_round": cost.clients_per_round,
        **groups(final, label_mask=label_mask),
        "own_steps": own_steps(after_steps or {}, label_mask=label_mask),
        "best": best(history),
        "last_evaluations": late(last),
        "uncertainty": {
            name: None if found is None else {**found, "ece_clients": calibration_of_clients(final, name)}
            for name, found in uncertainties(final).items()
        },
        "spread": spreads(final),
        "communication": asdict(cost.communication),
        "duration_s": cost.duration_s,
        "client_steps_per_s": steps / seconds if steps and seconds > 0 else None,
    }
    return _extended(result, extra)


def _extended(line: dict[str, Any], extra: Mapping[str, Mapping[str, Any]] | None) -> dict[str, Any]:
    """Add the methods' sub-objects."""
    extra = extra or {}
    taken = sorted(set(extra) & set(line))
    if taken:
        raise ValueError(f"a method may not be called {taken[0]!r}: that key is taken")
    return line | {method: dict(values) for method, values in extra.items()}
