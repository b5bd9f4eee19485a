"""Results of finished runs, read and validated as a whole, for ``compare``."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fedloom.core.words import dotted_keys
from fedloom.errors import DataError
from fedloom.reporting.inputs import OF_BROKEN_FILES, check_compared
from fedloom.reporting.words import is_masked
from fedloom.runs.files import METRICS, SUMMARY
from fedloom.runs.folder import RunFolder

GROUPS = ("seen", "unseen")
USERS = "users"
"""Group of clients of a method that makes one model for some of them (WGA with ``users: one``)."""
PREDICTORS = ("global", "personal")
APART = ("name", "seed", "runtime.", "storage", "tracking", "data.root")
"""Prefixes of experiment keys that do not distinguish settings."""
MILLION = 10**6


class GroupStatistics(NamedTuple):
    """Statistics of a group of clients in a run: accuracies as fractions, or losses (:attr:`RunResults.by_loss`).

    ``mean``, ``std`` and ``worst_decile`` are over clients (``evaluation.summary.group_statistics``); the worst losses
    are the highest. Only accuracies have ``pooled``, and ``other``, the mean in the secondary reading (masked or
    unmasked).
    """

    clients: int
    mean: float
    std: float | None = None
    worst_decile: float | None = None
    pooled: float | None = None
    other: float | None = None


class CurvePoint(NamedTuple):
    """Evaluated round: cost of training so far, and mean test accuracy (or loss) of each group."""

    round: int
    payload: int
    client_steps: int
    validation: float | None
    mean: Mapping[str, float | None]


class NewClient(NamedTuple):
    """Cost of a new client's model: gradient steps, bytes received and sent; None if unknown."""

    client_steps: float | None
    payload_down: float | None
    payload_up: float | None


@dataclass(frozen=True)
class Result:
    """Result of one predictor in one run.

    Attributes
    ----------
    groups
        Statistics of the last round for ``seen``, ``unseen`` and, if the method has it, ``users``; None without
        results.
    clients
        Right predictions and examples of each client in the last round, by id, for ``seen`` and ``unseen``. Their
        quotient is the accuracy. In runs without classes, they are the loss in millionths, and a million.
    curve
        Evaluated rounds, in ascending order.
    best
        Point that is best on validation (``summary.best``); None without validation.
    new_client
        Cost of the predictor for a new client.
    """

    groups: Mapping[str, GroupStatistics | None]
    clients: Mapping[str, Mapping[str, tuple[int, int]]]
    curve: tuple[CurvePoint, ...]
    best: CurvePoint | None
    new_client: NewClient


@dataclass(frozen=True)
class RunResults:
    """Results of a finished run, with ``settings`` by dotted key and the fingerprint of its ``partition``.

    ``titles``: names of its predictors in tables.

    ``by_loss``: the data have no classes, and results are losses.

    ``own_steps``: statistics of unseen clients' models by number of extra local steps, if evaluated.
    """

    path: Path
    seed: int
    algorithm: str
    titles: Mapping[str, str]
    dataset: str
    model: str
    masked: bool
    by_loss: bool
    settings: Mapping[str, Any]
    partition: str
    environment: Mapping[str, Any]
    payload_up: int
    payload_down: int
    wire_up: int | None
    wire_down: int | None
    duration_s: float
    training_loss: Mapping[int, float]
    own_steps: Mapping[int, GroupStatistics]
    results: Mapping[str, Result]

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.path.name

    @property
    def method(self) -> str:
        """Algorithm, with its rule if it has several (WGA)."""
        rule = self.settings.get("algorithm.rule")
        return self.algorithm if rule is None else f"{self.algorithm} {rule}"


def read_results(run: RunFolder) -> RunResults:
    """Read the results of a finished run.

    Raise DataError if one of its files, the experiment included, is missing or damaged.
    """
    settings = dotted_keys(run.stored_experiment())
    summary, environment = run.json(SUMMARY), run.json("environment.json")
    partition, history, clients = run.manifest().fingerprint, run.metrics(), run.clients()
    if not history:
        raise DataError(f"{run.path / METRICS}: has no evaluated round")
    try:
        best = _best(run, summary)
        groups = [group for group in (summary["seen"], summary["unseen"], summary["global"]) if group is not None]
        by_loss = any(group["accuracy_mean"] is None for group in groups)
        masked = not by_loss and any(map(is_masked, groups))
        predictors = PREDICTORS if summary["global"] is not None else ("personal",)
        traffic = summary["communication"]
        return RunResults(
            path=run.path.resolve(),
            seed=int(summary["seed"]),
            algorithm=str(summary["algorithm"]),
            titles=summary.get("titles") or {},
            dataset=str(summary["dataset"]),
            model=str(summary["model"]),
            masked=masked,
            by_loss=by_loss,
            settings={key: value for key, value in settings.items() if not key.startswith(APART)},
            partition=partition,
            environment=environment,
            payload_up=int(traffic["payload_up"]),
            payload_down=int(traffic["payload_down"]),
            wire_up=_int_or_none(traffic["wire_up"]),
            wire_down=_int_or_none(traffic["wire_down"]),
            duration_s=float(summary["duration_s"]),
            training_loss=run.training_loss(),
            own_steps=_own_steps(summary.get("own_steps"), masked=masked, by_loss=by_loss),
            results={
                predictor: _result(summary, history, best, clients, predictor, masked=masked, by_loss=by_loss)
                for predictor in predictors
            },
        )
    except OF_BROKEN_FILES:
        check_compared(run)
        raise  # with intact files, it is a bug


def _int_or_none(value: Any) -> int | None:
    return None if value is None else int(value)


def _best(run: RunFolder, summary: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the metrics of the round that is best on validation; None without validation."""
    if summary["best"] is None:
        return None
    best = run.evaluation_of(summary["best"]["round"])
    if best is None:
        raise DataError(f"{run.path / METRICS}: lacks round {summary['best']['round']}, the best of {SUMMARY}")
    return best


def _result(
    summary: Mapping[str, Any],
    history: Sequence[Mapping[str, Any]],
    best: Mapping[str, Any] | None,
    clients: Sequence[Mapping[str, str]],
    predictor: str,
    *,
    masked: bool,
    by_loss: bool,
) -> Result:
    method = summary["algorithm"]
    curve = tuple(_point(line, predictor, method, by_loss=by_loss) for line in history)
    of_best = None if best is None else _point(best, predictor, method, by_loss=by_loss)
    costs = summary.get(method, {}).get("new_client", {}).get(predictor, {})
    column = f"{predictor}_{'loss' if by_loss else 'accuracy'}_{'masked' if masked else 'unmasked'}"
    tested = {
        group: {
            row["id"]: _count(row, column, by_loss=by_loss)
            for row in clients
            if row["seen"] == seen and row.get(column)
        }
        for group, seen in (("seen", "true"), ("unseen", "false"))
    }
    return Result(
        groups={
            name: _losses(group, tested.get(name, {})) if by_loss else _measured(group, masked=masked)
            for name, group in _of(summary, predictor, method).items()
        },
        clients=tested,
        curve=curve,
        best=of_best,
        new_client=NewClient(*(costs.get(key) for key in NewClient._fields)),
    )


def _count(row: Mapping[str, str], column: str, *, by_loss: bool) -> tuple[int, int]:
    """Return a client's right predictions and examples: six digits are enough to recover the exact count."""
    of = MILLION if by_loss else int(row["test"])
    return round(float(row[column]) * of), of


def _of(line: Mapping[str, Any], predictor: str, method: str) -> dict[str, Mapping[str, Any] | None]:
    """Return a predictor's groups from a summary or a line of metrics; ``users`` if they are not all the seen ones."""
    groups = line if predictor == "personal" else line["global"]
    found = {group: groups[group] for group in GROUPS}
    users = line.get(method, {}).get(USERS)
    return found | {USERS: users} if predictor == "personal" and users not in (None, found["seen"]) else found


def _measured(group: Mapping[str, Any] | None, *, masked: bool) -> GroupStatistics | None:
    if group is None:
        return None
    other = group["unmasked" if masked else "masked"]
    return GroupStatistics(
        clients=int(group["clients"]),
        mean=float(group["accuracy_mean"]),
        std=float(group["accuracy_std"]),
        worst_decile=float(group["accuracy_worst_decile"]),
        pooled=float(group["accuracy_pooled"]),
        other=None if other is None else float(other["accuracy_mean"]),
    )


def _losses(group: Mapping[str, Any] | None, clients: Mapping[str, tuple[int, int]]) -> GroupStatistics | None:
    """Return the statistics of a group without accuracies: the summary's mean, and the rest from its clients."""
    if group is None:
        return None
    losses = sorted((loss / of for loss, of in clients.values()), reverse=True)
    return GroupStatistics(
        clients=int(group["clients"]),
        mean=float(group["loss_mean"]),
        std=statistics.pstdev(losses) if losses else None,
        worst_decile=statistics.fmean(losses[: math.ceil(len(losses) / 10)]) if losses else None,
    )


def _own_steps(found: Sequence[Mapping[str, Any]] | None, *, masked: bool, by_loss: bool) -> dict[int, GroupStatistics]:
    """Return a summary's ``own_steps`` by number of steps; empty for runs of older versions."""
    groups = {int(line["steps"]): line["unseen"] for line in found or ()}
    measured = {k: _losses(group, {}) if by_loss else _measured(group, masked=masked) for k, group in groups.items()}
    return {k: group for k, group in measured.items() if group is not None}


def _point(line: Mapping[str, Any], predictor: str, method: str, *, by_loss: bool) -> CurvePoint:
    key = "loss_mean" if by_loss else "accuracy_mean"
    return CurvePoint(
        int(line["round"]),
        int(line["communication"]["payload_up"]) + int(line["communication"]["payload_down"]),
        int(line["client_steps"]),
        line["validation_loss" if by_loss else "validation_pooled"],
        {name: None if g is None else float(g[key]) for name, g in _of(line, predictor, method).items()},
    )
