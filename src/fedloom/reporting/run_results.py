"""Results of finished runs, read and validated as a whole, for ``compare``."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from fedloom.core.words import dotted_keys
from fedloom.errors import DataError
from fedloom.reporting.page import reading
from fedloom.reporting.words import client_column, is_masked
from fedloom.runs.files import METRICS, SUMMARY
from fedloom.runs.folder import RunFolder
from fedloom.tasks.names import ACCURACY, Headline, headline_of, validation_value, values_of

GROUPS = ("seen", "unseen")
USERS = "users"
"""Group of clients of a method that makes one model for some of them (WGA with ``users: one``)."""
PREDICTORS = ("global", "personal")
APART = ("name", "seed", "runtime.", "storage", "tracking", "data.root")
"""Prefixes of experiment keys that do not distinguish settings."""


class GroupStatistics(NamedTuple):
    """Statistics of a group of clients in a run, of its headline metric (:attr:`RunResults.headline`).

    ``mean``, ``std`` and ``worst_decile`` are over clients (``evaluation.group_statistics``), ``pooled`` over
    examples. Only accuracies have ``other``, the mean in the secondary reading (masked or unmasked).
    """

    clients: int
    mean: float
    std: float | None = None
    worst_decile: float | None = None
    pooled: float | None = None
    other: float | None = None


class CurvePoint(NamedTuple):
    """Evaluated round: cost of training so far, and the mean of the headline metric on each group's test data."""

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
        Headline metric of each client in the last round, by id, for ``seen`` and ``unseen``, as a quotient of whole
        numbers: right predictions and examples, or the digits of another metric and a power of ten.
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

    ``headline``: metric of its results.

    ``own_steps``: statistics of unseen clients' models by number of extra local steps, if evaluated.

    ``privacy``: claim of the training's differential privacy (of ``training_privacy``); None without.
    """

    path: Path
    seed: int
    algorithm: str
    titles: Mapping[str, str]
    dataset: str
    model: str
    masked: bool
    headline: Headline
    settings: Mapping[str, Any]
    partition: str
    environment: Mapping[str, Any]
    payload_up: int
    payload_down: int
    wire_up: int | None
    wire_down: int | None
    duration_s: float
    own_steps: Mapping[int, GroupStatistics]
    results: Mapping[str, Result]
    privacy: Mapping[str, Any] | None = None

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
    with reading(run, SUMMARY, METRICS, "clients.csv"):
        best = _best(run, summary)
        groups = [group for group in (summary["seen"], summary["unseen"], summary["global"]) if group is not None]
        headline = headline_of(summary)
        masked = headline == ACCURACY and any(map(is_masked, groups))
        return RunResults(
            path=run.path.resolve(),
            seed=summary["seed"],
            algorithm=summary["algorithm"],
            titles=summary["titles"],
            dataset=summary["dataset"],
            model=summary["model"],
            masked=masked,
            headline=headline,
            settings={key: value for key, value in settings.items() if not key.startswith(APART)},
            partition=partition,
            environment=environment,
            **summary["communication"],
            duration_s=summary["duration_s"],
            own_steps=_own_steps(summary["own_steps"], headline, masked=masked),
            results={
                predictor: _result(summary, history, best, clients, predictor, headline, masked=masked)
                for predictor in (PREDICTORS if summary["global"] is not None else ("personal",))
            },
            privacy=_claim(summary.get("training_privacy")),
        )


def _claim(claim: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the part of a claim that a comparison shows; raise KeyError or TypeError if it is damaged."""
    if claim is None:
        return None
    shown = {key: claim[key] for key in ("unit", "epsilon", "delta", "noise", "statement")}
    return shown | {"toward": {whom: claim[f"to_{whom}"]["epsilon"] for whom in ("readers", "members", "aggregator")}}


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
    headline: Headline,
    *,
    masked: bool,
) -> Result:
    method = summary["algorithm"]
    curve = tuple(_point(line, predictor, method, headline) for line in history)
    of_best = None if best is None else _point(best, predictor, method, headline)
    costs = summary.get(method, {}).get("new_client", {}).get(predictor, {})
    column = client_column(predictor, headline.name, "masked" if masked else "unmasked")
    tested = {
        group: {
            row["id"]: _quotient(row, column, headline) for row in clients if row["seen"] == seen and row.get(column)
        }
        for group, seen in (("seen", "true"), ("unseen", "false"))
    }
    return Result(
        groups={
            name: _measured(group, headline, tested.get(name, {}), masked=masked)
            for name, group in _groups_of(summary, predictor, method).items()
        },
        clients=tested,
        curve=curve,
        best=of_best,
        new_client=NewClient(*(costs.get(key) for key in NewClient._fields)),
    )


def _quotient(row: Mapping[str, str], column: str, headline: Headline) -> tuple[int, int]:
    """Return a client's right predictions and examples, which six digits of an accuracy are enough to recover.

    Another metric is returned as its digits and a power of ten.
    """
    if headline == ACCURACY:
        of = int(row["test"])
        return round(float(row[column]) * of), of
    value = Decimal(row[column])
    digits = max(0, -int(value.as_tuple().exponent))
    return int(value.scaleb(digits)), 10**digits


def _groups_of(line: Mapping[str, Any], predictor: str, method: str) -> dict[str, Mapping[str, Any] | None]:
    """Return a predictor's groups from a summary or a line of metrics; ``users`` if they are not all the seen ones."""
    groups = line if predictor == "personal" else line["global"]
    found = {group: groups[group] for group in GROUPS}
    users = line.get(method, {}).get(USERS)
    return found | {USERS: users} if predictor == "personal" and users not in (None, found["seen"]) else found


def _measured(
    group: Mapping[str, Any] | None, headline: Headline, clients: Mapping[str, tuple[int, int]], *, masked: bool
) -> GroupStatistics | None:
    """Return a group's statistics; those of a loss that the summary lacks are computed from the clients."""
    if group is None:
        return None
    mean, std, _, decile, pooled = values_of(group, headline)
    if mean is None:  # no client has enough data for this metric
        return None
    other = group["unmasked" if masked else "masked"] if headline == ACCURACY else None
    if std is None and clients:
        losses = sorted((loss / of for loss, of in clients.values()), reverse=True)
        std, decile = statistics.pstdev(losses), statistics.fmean(losses[: math.ceil(len(losses) / 10)])
    accuracy = None if other is None else other["accuracy_mean"]
    return GroupStatistics(group["clients"], mean, std, decile, pooled, accuracy)


def _own_steps(
    lines: Sequence[Mapping[str, Any]] | None, headline: Headline, *, masked: bool
) -> dict[int, GroupStatistics]:
    """Return a summary's ``own_steps`` by number of steps."""
    measured = {line["steps"]: _measured(line["unseen"], headline, {}, masked=masked) for line in lines or ()}
    return {k: group for k, group in measured.items() if group is not None}


def _point(line: Mapping[str, Any], predictor: str, method: str, headline: Headline) -> CurvePoint:
    traffic, groups = line["communication"], _groups_of(line, predictor, method).items()
    return CurvePoint(
        line["round"],
        traffic["payload_up"] + traffic["payload_down"],
        line["client_steps"],
        validation_value(line),
        {name: None if group is None else values_of(group, headline).mean for name, group in groups},
    )
