"""Computation of ``metrics.jsonl`` and ``summary.json`` from the clients' counts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from fedloom.evaluation.group_statistics import (
    calibration_of_clients,
    groups,
    predictor_statistics,
    reading_statistics,
    spreads,
    uncertainties,
)
from fedloom.evaluation.plan import EvaluationPlan, EvaluationResult
from fedloom.tasks.base import CORRECT, LOSS, TOTAL
from fedloom.tasks.names import GROUPS, MODEL_LOSS, Headline, headline_of, values_of


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
    values = evaluation.metrics("personal", "validation", evaluation.seen, pooled=True)
    value = float(values[evaluation.plan.task.headline.name])
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
        statistics = reading_statistics(evaluation, "personal", everyone, reading, classes=False)
        client_count = 0 if statistics is None else statistics["clients"]
        return {"absent": evaluation.asked - evaluation.measured, "untested": evaluation.measured - client_count}
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

    ``train_loss`` is the mean training loss since the previous line, None at round 0; ``communication`` and
    ``client_steps`` are cumulative over training. ``extra`` has sub-objects of methods by name; raise ValueError if it
    uses a key of the line itself.
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
    lowest validation loss. Lines of ``metrics.jsonl`` may be in any order. The result has ``round``, ``seen``,
    ``unseen`` and ``global``, and is None if no round was validated.
    """
    scored = ((-score, line["round"], line) for line in history if (score := line_score(line)) is not None)
    *_, best_line = min(scored, key=lambda each: each[:2], default=(None,))
    return None if best_line is None else {key: best_line[key] for key in ("round", "seen", "unseen", "global")}


def own_steps(results: Mapping[int, EvaluationResult], *, label_mask: bool) -> list[dict[str, Any]] | None:
    """Return ``own_steps`` of ``summary.json``: {``steps``, ``unseen``} for each number of a client's own steps.

    ``unseen`` is as in the summary itself. The list is None if no steps were requested.
    """
    statistics = [
        {"steps": k, "unseen": predictor_statistics(e, "personal", ~e.seen, label_mask=label_mask)}
        for k, e in results.items()
    ]
    return statistics or None


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
    """Cost of a run with this number of ``rounds``; ``clients_per_round`` is None for a method without rounds.

    ``client_steps`` are local SGD steps, ``training_s`` the wall time of the training rounds that made them, including
    aggregation and wire, excluding evaluation and start-up.
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
    run: RunDescription,
    cost: RunCost,
    *,
    label_mask: bool,
    last: Sequence[Mapping[str, Any]] = (),
    after_steps: Mapping[int, EvaluationResult] | None = None,
    extra: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return the object of ``summary.json``; raise ValueError if ``extra`` uses a key of the summary itself.

    Parameters
    ----------
    final
        Evaluation of the last round.
    history, last
        Lines of ``metrics.jsonl``, including that of the best round; and the last :data:`LATE` lines.
    after_steps
        Evaluation of the unseen clients by number of own steps.
    extra
        Sub-objects of methods, by the method's name. ``extra[algorithm]["new_client"]`` gives, by predictor, a new
        client's cost for ``fedloom compare``: ``client_steps``, ``payload_up``, ``payload_down``.
    """
    steps, seconds = cost.client_steps, cost.training_s
    result = {
        "name": run.name,
        "algorithm": run.algorithm,
        "titles": dict(run.titles),
        "dataset": run.dataset,
        "model": run.model,
        **headline_keys(final.plan),
        "metrics": {metric.name: metric._asdict() for metric in final.plan.metrics},
        "seed": run.seed,
        "rounds": cost.rounds,
        "clients_per_round": cost.clients_per_round,
        **groups(final, label_mask=label_mask),
        "own_steps": own_steps(after_steps or {}, label_mask=label_mask),
        "best": best(history),
        "last_evaluations": late(last),
        "uncertainty": {
            name: None if values is None else {**values, "ece_clients": calibration_of_clients(final, name)}
            for name, values in uncertainties(final).items()
        },
        "spread": spreads(final),
        "communication": asdict(cost.communication),
        "duration_s": cost.duration_s,
        "client_steps_per_s": steps / seconds if steps and seconds > 0 else None,
    }
    return _extended(result, extra)


def _extended(line: dict[str, Any], extra: Mapping[str, Mapping[str, Any]] | None) -> dict[str, Any]:
    """Add the methods' sub-objects."""
    methods = {method: dict(values) for method, values in (extra or {}).items()}
    if conflicting := sorted(methods.keys() & line.keys()):
        raise ValueError(f"a method may not be called {conflicting[0]!r}: that key is taken")
    return line | methods


LATE = 8
"""Number of evaluations at the end of training that are summarized together."""


def late(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return ``last_evaluations`` of ``summary.json``: statistics of the evaluations at the end of training.

    A single evaluation, and even more the highest of several, is unreliable if accuracy fluctuates between evaluations.
    Lines of ``metrics.jsonl``, ascending, before training are left out unless there are no others. None without lines.

    The result has ``evaluations``, their number; ``rounds``, the first and the last; and for ``seen``, ``unseen`` and
    ``global``, by ``accuracy_mean`` and ``accuracy_pooled`` (of another task its headline, as ``rmse_mean`` and
    ``rmse_pooled``; without targets ``loss_mean``), {``mean``, ``lowest``, ``highest``}; None for a group that some
    line lacks.
    """
    lines = [line for line in lines if line["round"]] or list(lines)
    if not lines:
        return None
    result: dict[str, Any] = {"evaluations": len(lines), "rounds": [lines[0]["round"], lines[-1]["round"]]}
    for name in GROUPS:
        groups = [line[name] for line in lines]
        result[name] = None if None in groups else _over_evaluations(groups, headline_of(lines[-1]))
    return result


def _over_evaluations(groups: Sequence[Mapping[str, Any]], headline: Headline) -> dict[str, dict[str, float]]:
    """Return mean, lowest and highest of a group's headline, or of its losses if there is none."""
    values = [values_of(group, headline) for group in groups]
    columns = {f"{headline.name}_{key}": [getattr(each, key) for each in values] for key in ("mean", "pooled")}
    complete = {key: column for key, column in columns.items() if None not in column}
    if not complete or headline == MODEL_LOSS:
        complete = {"loss_mean": [group["loss_mean"] for group in groups]}
    return {
        key: {"mean": math.fsum(column) / len(column), "lowest": min(column), "highest": max(column)}
        for key, column in complete.items()
    }
