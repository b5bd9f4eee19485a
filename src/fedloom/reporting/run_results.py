"""Results of finished runs, and rows of a comparison: the runs of one method under one setting."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from fedloom.core.words import dotted_keys, shortest_suffixes
from fedloom.errors import DataError
from fedloom.reporting.page import reading
from fedloom.reporting.words import ClientRow, Document, client_column, is_masked
from fedloom.runs.files import METRICS, SUMMARY
from fedloom.runs.folder import RunFolder
from fedloom.tasks.names import ACCURACY, MODEL_LOSS, Headline, headline_of, validation_value, values_of

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
    """Result of one predictor in one run: statistics of the last round by group, and evaluated rounds, ascending.

    ``clients`` has each client's headline metric in the last round for ``seen`` and ``unseen``, as a quotient of whole
    numbers: right predictions and examples, or the digits of another metric and a power of ten. ``best`` is best on
    validation (``summary.best``); None without validation.
    """

    groups: Mapping[str, GroupStatistics | None]
    clients: Mapping[str, Mapping[str, tuple[int, int]]]
    curve: tuple[CurvePoint, ...]
    best: CurvePoint | None
    new_client: NewClient


@dataclass(frozen=True)
class RunResults:
    """Results of a finished run, with ``settings`` by dotted key and the fingerprint of its ``partition``.

    ``titles`` are names of its predictors in tables; ``own_steps`` statistics of unseen clients' models by number of
    extra local steps, if evaluated; ``privacy`` the summary's ``training_privacy``, None without.
    """

    path: Path
    seed: int
    algorithm: str
    titles: Mapping[str, str]
    dataset: str
    model: str
    masked: bool
    headline: Headline
    settings: Document
    partition: str
    environment: Document
    payload_up: int
    payload_down: int
    wire_up: int | None
    wire_down: int | None
    duration_s: float
    own_steps: Mapping[int, GroupStatistics]
    results: Mapping[str, Result]
    privacy: Document | None = None

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
        best = None if summary["best"] is None else run.evaluation_of(summary["best"]["round"])
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
            own_steps={
                line["steps"]: values
                for line in summary["own_steps"] or ()
                if (values := _measured(line["unseen"], headline, {}, masked=masked)) is not None
            },
            results={
                predictor: _result(summary, history, best, clients, predictor, headline, masked=masked)
                for predictor in (PREDICTORS if summary["global"] is not None else ("personal",))
            },
            privacy=summary.get("training_privacy"),
        )


def _result(
    summary: Document,
    history: Sequence[Document],
    best: Document | None,
    clients: Sequence[ClientRow],
    predictor: str,
    headline: Headline,
    *,
    masked: bool,
) -> Result:
    method = summary["algorithm"]
    costs = summary.get(method, {}).get("new_client", {}).get(predictor, {})
    column = client_column(predictor, headline.name, "masked" if masked else "unmasked")
    counts = {
        group: {
            row["id"]: _quotient(row, column, headline) for row in clients if row["seen"] == seen and row.get(column)
        }
        for group, seen in (("seen", "true"), ("unseen", "false"))
    }
    return Result(
        groups={
            name: _measured(group, headline, counts.get(name, {}), masked=masked)
            for name, group in _groups_of(summary, predictor, method).items()
        },
        clients=counts,
        curve=tuple(_point(line, predictor, method, headline) for line in history),
        best=None if best is None else _point(best, predictor, method, headline),
        new_client=NewClient(*(costs.get(key) for key in NewClient._fields)),
    )


def _quotient(row: ClientRow, column: str, headline: Headline) -> tuple[int, int]:
    """Return a client's right predictions and examples, which six digits of an accuracy are enough to recover.

    Another metric is returned as its digits and a power of ten.
    """
    if headline == ACCURACY:
        total = int(row["test"])
        return round(float(row[column]) * total), total
    return Decimal(row[column]).as_integer_ratio()


def _groups_of(line: Document, predictor: str, method: str) -> dict[str, Document | None]:
    """Return a predictor's groups from a summary or a line of metrics; ``users`` if they are not all the seen ones."""
    groups = line if predictor == "personal" else line["global"]
    result = {group: groups[group] for group in GROUPS}
    users = line.get(method, {}).get(USERS)
    return result | {USERS: users} if predictor == "personal" and users not in (None, result["seen"]) else result


def _measured(
    group: Document | None, headline: Headline, clients: Mapping[str, tuple[int, int]], *, masked: bool
) -> GroupStatistics | None:
    """Return a group's statistics; those of a loss that the summary lacks are computed from the clients."""
    if group is None:
        return None
    mean, std, _, decile, pooled = values_of(group, headline)
    if mean is None:  # no client has enough data for this metric
        return None
    other = group["unmasked" if masked else "masked"] if headline == ACCURACY else None
    if std is None and clients:
        losses = sorted((loss / total for loss, total in clients.values()), reverse=True)
        std, decile = statistics.pstdev(losses), statistics.fmean(losses[: math.ceil(len(losses) / 10)])
    accuracy = None if other is None else other["accuracy_mean"]
    return GroupStatistics(group["clients"], mean, std, decile, pooled, accuracy)


def _point(line: Document, predictor: str, method: str, headline: Headline) -> CurvePoint:
    traffic, groups = line["communication"], _groups_of(line, predictor, method).items()
    return CurvePoint(
        line["round"],
        traffic["payload_up"] + traffic["payload_down"],
        line["client_steps"],
        validation_value(line),
        {name: None if group is None else values_of(group, headline).mean for name, group in groups},
    )


class MeanStd(NamedTuple):
    """Mean over seeds, and sample standard deviation (ddof = 1); None for a single seed."""

    mean: float
    std: float | None

    @classmethod
    def over(cls, values: Iterable[float]) -> MeanStd:
        """Return the statistics of one or more values."""
        numbers = list(values)
        return cls(statistics.fmean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else None)

    def shown(self, headline: Headline) -> str:
        """Return percent with one decimal, or five digits; with ± if there is a standard deviation."""
        if headline.percent:
            return f"{100 * self.mean:.1f}" + (f" ± {100 * self.std:.1f}" if self.std is not None else "")
        mean = f"{self.mean:#.5g}".rstrip(".")
        if self.std is None:
            return mean
        return f"{mean} ± " + (f"{self.std:#.2g}".rstrip(".") if self.std < 100 else f"{self.std:.5g}")


@dataclass(frozen=True)
class Row:
    """Predictor under one setting; its runs differ only in the seed.

    Attributes
    ----------
    method
        Name of the method in tables.
    details
        Settings that distinguish the row from others of the same method, each as ``key value``.
    block
        Key of the rows measured on the same kind of data in the same way; "best" means best within a block.
    """

    method: str
    details: tuple[str, ...]
    block: str
    predictor: str
    runs: tuple[RunResults, ...]

    @property
    def label(self) -> str:
        """Method and details on one line."""
        return ", ".join((self.method, *self.details))

    @property
    def method_in_block(self) -> tuple[str, str]:
        """Block and method, the key of a method's settings."""
        return self.block, self.runs[0].method

    @property
    def is_own(self) -> bool:
        """True if the row has the clients' final models; one row of each run has them."""
        return self.predictor == "personal" or "personal" not in _shown_predictors(self.runs)

    def matches(self, name: str | None) -> bool:
        """Return whether a name is the row's label, method or algorithm; True for None."""
        return name is None or name in (self.label, self.method, self.runs[0].method, self.runs[0].algorithm)

    @property
    def settings(self) -> Document:
        """Settings by dotted key, the same in all runs of the row."""
        return self.runs[0].settings

    @property
    def results(self) -> tuple[Result, ...]:
        """Results, one per run."""
        return tuple(run.results[self.predictor] for run in self.runs)

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds, one per run."""
        return tuple(run.seed for run in self.runs)

    def epsilon(self, toward: str = "readers") -> float | None:
        """Return the largest ε toward ``readers``, ``members`` or ``aggregator``; None if a run has no guarantee."""
        claims = [run.privacy[f"to_{toward}"]["epsilon"] for run in self.runs if run.privacy is not None]
        numbers = [float(epsilon) for epsilon in claims if epsilon is not None]
        return max(numbers) if len(numbers) == len(self.runs) else None

    @property
    def new_client(self) -> NewClient:
        """Costs of a new client, means over seeds."""
        columns = zip(*(result.new_client for result in self.results), strict=True)
        return NewClient(*(mean_of(column) for column in columns))

    @property
    def headline(self) -> Headline:
        """Metric of the results."""
        return self.runs[0].headline

    def over_seeds(self, group: str, statistic: str = "mean") -> MeanStd | None:
        """Return a statistic of :class:`GroupStatistics` over seeds; None unless every run has it."""
        return mean_std(getattr(result.groups.get(group), statistic, None) for result in self.results)

    def mean(self, group: str) -> float:
        """Return the mean over seeds of a group for which the row has a result."""
        mean = self.over_seeds(group)
        if mean is None:
            raise ValueError(f"{self.label} has no result for {group}")
        return mean.mean

    def client_values(self, group: str) -> list[float]:
        """Return the clients' values of the headline metric in the last round, over all seeds."""
        return [value / total for result in self.results for value, total in result.clients[group].values()]

    def of_runs(self, quantity: str) -> MeanStd | None:
        """Return an attribute of :class:`RunResults`, such as ``duration_s``, over seeds."""
        return mean_std(getattr(run, quantity) for run in self.runs)

    def training(self, quantity: str) -> MeanStd | None:
        """Return an attribute of the last :class:`CurvePoint`, such as ``client_steps``, over seeds."""
        return mean_std(getattr(result.curve[-1], quantity) for result in self.results)

    @property
    def own_steps(self) -> dict[int, MeanStd]:
        """Mean over unseen clients by number of extra local steps, over seeds; only where every run has it."""
        steps = set.intersection(*(set(run.own_steps) for run in self.runs))
        return {k: MeanStd.over(run.own_steps[k].mean for run in self.runs) for k in sorted(steps)}

    def validation(self, *, best: bool) -> MeanStd | None:
        """Return the headline metric on validation data in the last round, or in the best."""
        points = (result.best if best else result.curve[-1] for result in self.results)
        return mean_std(None if point is None else point.validation for point in points)

    def at_best(self, group: str) -> MeanStd | None:
        """Return the mean of the headline metric on test data in the round that is best on validation."""
        return mean_std(None if result.best is None else result.best.mean.get(group) for result in self.results)


def comparison_rows(runs: Sequence[RunResults]) -> list[Row]:
    """Return a row for each setting and predictor, in blocks.

    Runs that differ only in name and seed form one row per predictor. If two of them also share the seed, as a run and
    its replay do, they are listed separately: merging would count one result twice.
    """
    by_label: dict[str, list[RunResults]] = {}
    for run in runs:
        by_label.setdefault(json.dumps(run.settings, sort_keys=True), []).append(run)
    blocks: dict[str, list[Row]] = {}
    for same in by_label.values():
        distinct = len({run.seed for run in same}) == len(same)
        for group in [same] if distinct else [[run] for run in same]:
            first = group[0]
            block = json.dumps([first.dataset, _of_block(first), first.masked], sort_keys=True)
            for predictor in _shown_predictors(group):
                method = first.titles.get(predictor, f"{first.method} ({predictor})")
                blocks.setdefault(block, []).append(Row(method, (), block, predictor, tuple(group)))
    return [row for rows in blocks.values() for row in _with_details(rows)]


def _shown_predictors(runs: Sequence[RunResults]) -> list[str]:
    """Return the global predictor, if any, and the personal one if it differs or is made for some users only."""
    if not all("global" in run.results for run in runs):
        return [p for p in PREDICTORS if all(p in run.results for run in runs)]
    pairs = [(run.results["global"].groups, run.results["personal"].groups) for run in runs]
    if any(shared[group] != personal[group] for shared, personal in pairs for group in GROUPS):
        return list(PREDICTORS)
    return ["personal" if any(USERS in personal for _, personal in pairs) else "global"]


def _with_details(rows: Sequence[Row]) -> list[Row]:
    """Add to the rows of a block the settings that distinguish rows of one method, or else the names of their runs.

    If the models differ, every row states its model.
    """
    models = [key for key in differing([row.settings for row in rows]) if key.startswith("model.")]
    result = []
    for row in rows:
        keys = [*models, *differing([other.settings for other in rows if other.method == row.method])]
        result.append(replace(row, details=tuple(setting_labels(dict.fromkeys(keys), row.settings))))
    labels = [row.label for row in result]
    return [
        replace(row, details=(*row.details, *(run.name for run in row.runs))) if labels.count(row.label) > 1 else row
        for row in result
    ]


def _of_block(run: RunResults) -> dict[str, Any]:
    """Return the data settings, which define a block, and the model's if models have their own losses."""
    prefixes = ("data.", "model.") if run.headline == MODEL_LOSS else ("data.",)
    return {key: value for key, value in run.settings.items() if key.startswith(prefixes)}


def block_labels(rows: Sequence[Row]) -> dict[str, str]:
    """Return the data set of each block, with the settings that distinguish the block from others."""
    first = {row.block: row for row in reversed(rows)}
    keys = [key for key in differing([_of_block(row.runs[0]) for row in first.values()]) if key != "data.dataset"]
    result = {}
    for block, row in first.items():
        labels = [row.runs[0].dataset, *setting_labels(keys, row.settings)]
        result[block] = ", ".join([*labels, *(["masked"] if row.runs[0].masked else [])])
    return result


def differing(settings: Sequence[Document]) -> tuple[str, ...]:
    """Return the dotted keys whose value or presence differs."""
    keys = dict.fromkeys(key for one in settings for key in one)
    return tuple(key for key in keys if len({json.dumps(one[key]) if key in one else "" for one in settings}) > 1)


def shown_value(value: Any) -> str:
    """Return a setting's value as a user would write it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def setting_labels(keys: Iterable[str], settings: Document) -> list[str]:
    """Return ``key value`` for each existing setting; keys are shortened, without a final ``name`` or ``scheme``."""
    shortened = list(keys)
    names = shortest_suffixes([re.sub(r"\.(name|scheme)$", "", key) for key in shortened])
    return [
        f"{name} {shown_value(settings[key])}" for key, name in zip(shortened, names, strict=True) if key in settings
    ]


def own_steps_of(rows: Iterable[Row]) -> list[int]:
    """Return the numbers of extra local steps after which some row was evaluated."""
    return sorted({k for row in rows for k in row.own_steps})


def mean_std(values: Iterable[float | None]) -> MeanStd | None:
    """Return mean and sample standard deviation; None if there are no values or one is missing."""
    numbers = list(values)
    return None if mean_of(numbers) is None else MeanStd.over(value for value in numbers if value is not None)


def mean_of(values: Iterable[float | None]) -> float | None:
    """Return the mean; None if there are no values or one is missing."""
    numbers = list(values)
    return None if not numbers or None in numbers else statistics.fmean(v for v in numbers if v is not None)


def differences(first: Row, second: Row, group: str) -> dict[int, list[float]]:
    """Return each client's difference, first minus second, by seed, for seeds with the same partition in both rows."""
    others = {(run.seed, run.partition): run.results[second.predictor] for run in second.runs}
    by_client: dict[int, list[float]] = {}
    for run, result in zip(first.runs, first.results, strict=True):
        if (run.seed, run.partition) not in others:
            continue
        theirs = others[run.seed, run.partition].clients[group]
        for client, (right, examples) in result.clients[group].items():
            if client in theirs:
                right_2, examples_2 = theirs[client]
                # A single division of integers: equal differences are then equal floats.
                difference = (right * examples_2 - right_2 * examples) / (examples * examples_2)
                by_client.setdefault(run.seed, []).append(difference)
    return by_client
