"""Comparison of finished runs: test results, costs, and which differences are significant."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from fedloom.errors import ExperimentError, argument
from fedloom.reporting.run_results import GROUPS, PREDICTORS, USERS, NewClient, Result, RunResults, read_results
from fedloom.reporting.significance import hierarchical_bootstrap, holm, signed_rank_test, t_interval, t_test
from fedloom.runs.listing import finished_runs

FEATURED = 8
"""Maximum number of rows of a block that figures show in full."""

LEVEL = 0.05
"""Significance level: a corrected p-value below it counts as a difference."""


class MeanStd(NamedTuple):
    """Mean over seeds, and sample standard deviation (ddof = 1); None for a single seed."""

    mean: float
    std: float | None


@dataclass(frozen=True)
class Scale:
    """Quality measure of rows: test accuracy, or test loss if the data have no classes.

    Attributes
    ----------
    name
        ``accuracy`` or ``loss``.
    sign
        1 if higher is better, -1 if lower is.
    unit
        Unit of displayed values.
    """

    name: str
    sign: int
    unit: str

    @property
    def words(self) -> str:
        """Name with its unit, for a table's title."""
        return f"{self.name}, {self.unit}" if self.unit else self.name

    def shown(self, value: MeanStd | None) -> str:
        """Return percent with one decimal, or a loss with five digits; with ± if there is a standard deviation."""
        if value is None:
            return DASH
        if self is ACCURACY:
            return f"{100 * value.mean:.1f}" + (f" ± {100 * value.std:.1f}" if value.std is not None else "")
        return f"{value.mean:#.5g}".rstrip(".") + (f" ± {value.std:#.2g}".rstrip(".") if value.std is not None else "")

    def shown_difference(self, difference: float) -> str:
        """Return a difference with its sign, in percentage points or as a loss."""
        if not difference:
            return "0"
        return f"{100 * difference:+.1f}" if self is ACCURACY else f"{difference:+.3g}"


ACCURACY = Scale("accuracy", 1, "%")
LOSS = Scale("loss", -1, "")

DASH = "–"
"""Placeholder for an unknown value."""


@dataclass(frozen=True)
class Row:
    """One predictor under one setting; its runs differ only in the seed.

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
    def is_own(self) -> bool:
        """True if the row is about the clients' final models, which is so for one row of each run."""
        return self.predictor == "personal" or "personal" not in _shown_predictors(self.runs)

    def matches(self, name: str | None) -> bool:
        """Return whether a name is the row's label, method or algorithm; True for None."""
        return name is None or name in (self.label, self.method, self.runs[0].method, self.runs[0].algorithm)

    @property
    def settings(self) -> Mapping[str, Any]:
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

    @property
    def new_client(self) -> NewClient:
        """Costs of a new client, means over seeds."""
        columns = zip(*(result.new_client for result in self.results), strict=True)
        return NewClient(*(_mean(column) for column in columns))

    @property
    def scale(self) -> Scale:
        """Measure of the row's quality."""
        return LOSS if self.runs[0].by_loss else ACCURACY

    def over_seeds(self, group: str, statistic: str = "mean") -> MeanStd | None:
        """Return a statistic of :class:`GroupStatistics` over seeds; None unless every run has it."""
        found = [result.groups.get(group) for result in self.results]
        return spread(None if one is None else getattr(one, statistic) for one in found)

    def of_runs(self, quantity: str) -> MeanStd | None:
        """Return an attribute of :class:`RunResults`, such as ``duration_s``, over seeds."""
        return spread(getattr(run, quantity) for run in self.runs)

    def training(self, quantity: str) -> MeanStd | None:
        """Return an attribute of the last :class:`CurvePoint`, such as ``client_steps``, over seeds."""
        return spread(getattr(result.curve[-1], quantity) for result in self.results)

    @property
    def training_loss(self) -> dict[int, float]:
        """Mean training loss over seeds by round, for rounds that every seed has."""
        rounds = set.intersection(*(set(run.training_loss) for run in self.runs))
        return {t: math.fsum(run.training_loss[t] for run in self.runs) / len(self.runs) for t in sorted(rounds)}

    @property
    def own_steps(self) -> dict[int, MeanStd]:
        """Mean over unseen clients by number of extra local steps, over seeds; only where every run has it."""
        steps = set.intersection(*(set(run.own_steps) for run in self.runs))
        found = {k: spread(run.own_steps[k].mean for run in self.runs) for k in sorted(steps)}
        return {k: value for k, value in found.items() if value is not None}

    def validation(self, *, best: bool) -> MeanStd | None:
        """Return the pooled validation accuracy (or mean validation loss) of the last round, or of the best."""
        points = [result.best if best else result.curve[-1] for result in self.results]
        return spread(None if point is None else point.validation for point in points)

    def at_best(self, group: str) -> MeanStd | None:
        """Return the mean test accuracy (or loss) of the round that is best on validation."""
        return spread(None if result.best is None else result.best.mean.get(group) for result in self.results)


@dataclass(frozen=True)
class Pair:
    """Paired comparison of two rows of a block; ``first`` and ``second`` are row indices, the better row first.

    Clients of a seed share one training. With one seed, the test is over clients, and concerns them under this one
    training. With several, it is over seeds, with one value each.

    Attributes
    ----------
    seeds
        Seeds in which both rows were measured on the same partition.
    clients, better, worse
        Numbers of paired clients over all those seeds: in total, with the first row better, and with it worse.
    median
        Median of the differences, first minus second; None without pairs.
    mean
        Mean over seeds of the mean difference over clients.
    interval
        95 % interval of ``mean``, by Student's t over seeds; None with one seed.
    bootstrap
        95 % bootstrap interval of ``mean``, resampling seeds and, within each, clients; with one seed, clients only.
    p_of_seeds
        p-value of the signed-rank test over the clients of each seed.
    p, p_holm
        p-value: with one seed, of its signed-rank test; with several, of a t test over the seeds' mean differences.
        ``p`` is uncorrected; ``p_holm`` is corrected over all pairs of this group. None without pairs.
    p_against
        p corrected over this group's pairs with a reference only; None for other pairs. Significance is decided by this
        value.
    why
        Reason why the two rows cannot be compared; empty if they can.
    """

    first: int
    second: int
    group: str
    seeds: tuple[int, ...] = ()
    clients: int = 0
    better: int = 0
    worse: int = 0
    median: float | None = None
    mean: float | None = None
    interval: tuple[float, float] | None = None
    bootstrap: tuple[float, float] | None = None
    p_of_seeds: tuple[float, ...] = ()
    p: float | None = None
    p_holm: float | None = None
    p_against: float | None = None
    why: str = ""

    @property
    def over(self) -> str:
        """Unit of observation of the test: ``seeds``, or ``clients`` of one seed."""
        return "seeds" if len(self.seeds) > 1 else "clients"

    def turned(self) -> Pair:
        """Return the same comparison with first and second swapped."""
        turned = replace(self, first=self.second, second=self.first, better=self.worse, worse=self.better)
        median, mean = (None if value is None else -value for value in (self.median, self.mean))
        interval, bootstrap = (None if i is None else (-i[1], -i[0]) for i in (self.interval, self.bootstrap))
        return replace(turned, median=median, mean=mean, interval=interval, bootstrap=bootstrap)


class Reference(NamedTuple):
    """Row that the others of its block are tested against, and the reason, which is never a test result."""

    row: int
    because: str


@dataclass(frozen=True)
class Choice:
    """Setting of a method that is best on validation: highest accuracy or lowest loss.

    Attributes
    ----------
    row
        Index of the row.
    candidates
        Number of settings tried.
    seeds
        Seeds that every candidate has; the means are over these.
    validation
        Pooled validation accuracy (or mean loss) of seen clients in the last round, mean over these seeds.
    runner_up
        The same value of the second-best setting.
    edges
        Settings whose chosen value is the lowest or highest of three or more values tried.
    """

    row: int
    candidates: int
    seeds: tuple[int, ...]
    validation: float
    runner_up: float
    edges: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """Rows of the comparison, grouped by block, and notices about the runs.

    ``against`` names the row or method that the others are tested against; None: chosen on validation.
    """

    rows: tuple[Row, ...]
    notices: tuple[str, ...]
    against: str | None = None

    @property
    def scale(self) -> Scale:
        """Measure of all rows' quality."""
        return self.rows[0].scale

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """Groups for which some row has a result, among ``users``, ``seen`` and ``unseen``."""
        return tuple(g for g in (USERS, *GROUPS) if any(row.over_seeds(g) is not None for row in self.rows))

    @property
    def several_seeds(self) -> bool:
        """True if ± is over seeds, because some row has several; otherwise ± is over clients."""
        return any(len(row.runs) > 1 for row in self.rows)

    @cached_property
    def blocks(self) -> dict[str, list[int]]:
        """Row indices by block."""
        found: dict[str, list[int]] = {}
        for i, row in enumerate(self.rows):
            found.setdefault(row.block, []).append(i)
        return found

    @cached_property
    def differing(self) -> tuple[str, ...]:
        """Dotted keys of the settings that differ between rows."""
        return differing([row.settings for row in self.rows])

    @cached_property
    def pairs(self) -> tuple[Pair, ...]:
        """All pairs of rows within a block, for seen and for unseen clients, with Holm's correction within each group.

        The correction is computed over all pairs, and again over pairs with a reference only: k - 1 for k rows.
        """
        references = {reference.row for reference in self.references.values()}
        found = []
        for group in GROUPS:
            pairs = [
                _paired(self.rows, i, j, group)
                for members in self.blocks.values()
                for i in members
                for j in members
                if i < j
            ]
            tested = [pair for pair in pairs if pair.p is not None]
            corrected = iter(holm([pair.p for pair in tested if pair.p is not None]))
            pairs = [pair if pair.p is None else replace(pair, p_holm=next(corrected)) for pair in pairs]
            planned = [p.p is not None and not references.isdisjoint((p.first, p.second)) for p in pairs]
            against = iter(
                holm([pair.p for pair, one in zip(pairs, planned, strict=True) if one and pair.p is not None])
            )
            found += [
                replace(pair, p_against=next(against)) if one else pair
                for pair, one in zip(pairs, planned, strict=True)
            ]
        return tuple(found)

    @property
    def tested_over(self) -> str:
        """Unit of observation of the tests: ``seeds``, ``clients``, or either."""
        over = {pair.over for pair in self.pairs if pair.p_against is not None}
        return " or ".join(sorted(over, reverse=True)) or "clients"

    @cached_property
    def references(self) -> dict[str, Reference]:
        """Row of each block that the others are tested against.

        It is the row named by :attr:`against` (if several, the best on validation), or else the row of clients' own
        models that is best on validation. Without validation data, it is the first row.
        """
        found = {}
        best = "highest" if self.scale is ACCURACY else "lowest"
        for block, members in self.blocks.items():
            named = [i for i in members if self.rows[i].matches(self.against)]
            candidates = [i for i in named if self.rows[i].is_own] or named
            validated = self._validated(candidates)
            because = f"of {best} validation {self.scale.name}" if validated else "the first, as nothing was validated"
            if self.against is not None:
                because = "named by --against"
            values = validated[1] if validated else dict.fromkeys(candidates, 0.0)
            found[block] = Reference(max(values, key=lambda i: self.scale.sign * values[i]), because)
        return found

    @cached_property
    def chosen(self) -> tuple[Choice, ...]:
        """Setting chosen on validation, never on test data, for each method with several settings in a block."""
        methods: dict[tuple[str, str], list[int]] = {}
        for i, row in enumerate(self.rows):
            if row.is_own:
                methods.setdefault((row.block, row.runs[0].method), []).append(i)
        several = [rows for rows in methods.values() if differing([self.rows[i].settings for i in rows])]
        return tuple(choice for rows in several if (choice := self._choice(rows)) is not None)

    @cached_property
    def featured(self) -> dict[str, list[int]]:
        """Indices of the rows of each block that figures show.

        These are all rows or, if there are more than :data:`FEATURED`, each method's setting chosen on validation; if
        there are still more, only the rows of clients' own models.
        """
        chosen = [self.rows[choice.row] for choice in self.chosen]
        settings = {(row.block, row.runs[0].method): row.settings for row in chosen}
        found = {}
        for block, members in self.blocks.items():
            shown = list(members)
            if len(shown) > FEATURED:
                rows = ((i, self.rows[i]) for i in members)
                shown = [i for i, r in rows if settings.get((block, r.runs[0].method), r.settings) == r.settings]
            if len(shown) > FEATURED:
                own = [self.rows[i].runs for i in shown if self.rows[i].predictor == "personal"]
                shown = [i for i in shown if self.rows[i].predictor == "personal" or self.rows[i].runs not in own]
            found[block] = shown
        return found

    @cached_property
    def stepping(self) -> dict[str, list[int]]:
        """Indices of the featured rows of each block that were evaluated after extra local steps, one per run.

        If a run has two rows, the row of the clients' own models is taken, since those were evaluated.
        """
        found = {}
        for block, members in self.featured.items():
            measured = [i for i in members if self.rows[i].own_steps]
            own = [self.rows[i].runs for i in measured if self.rows[i].predictor == "personal"]
            kept = [i for i in measured if self.rows[i].predictor == "personal" or self.rows[i].runs not in own]
            if kept:
                found[block] = kept
        return found

    def _validated(self, candidates: Sequence[int]) -> tuple[set[int], dict[int, float]] | None:
        """Return the seeds that all candidates have, and each one's validation result over them; None without any."""
        if any(self.rows[i].over_seeds(USERS) is not None for i in candidates):
            return None  # validation covers all seen clients; these models are for some
        seeds = set.intersection(*(set(self.rows[i].seeds) for i in candidates))
        means: dict[int, float] = {}
        for i in candidates:
            row = self.rows[i]
            last = [r.curve[-1].validation for run, r in zip(row.runs, row.results, strict=True) if run.seed in seeds]
            mean = _mean(last)
            if mean is None:  # no common seed, or no validation data
                return None
            means[i] = mean
        return seeds, means

    def _choice(self, candidates: Sequence[int]) -> Choice | None:
        validated = self._validated(candidates)
        if validated is None:
            return None
        seeds, means = validated
        first, second, *_ = sorted(candidates, key=lambda i: -self.scale.sign * means[i])
        edges = _edges(self.rows[first].settings, [self.rows[i].settings for i in candidates])
        return Choice(first, len(candidates), tuple(sorted(seeds)), means[first], means[second], edges)

    def marks(self, group: str, statistic: str = "mean") -> list[str]:
        """Return a mark for each row: ``best`` of its block, ``tied`` with its reference, or an empty string.

        A row is tied if the test does not distinguish it from the reference (:data:`LEVEL`). The reference is tied if
        it is not distinguished from the best. Only means of seen and unseen clients are tested. A row alone in its
        block is not marked.
        """
        marks, sign = [""] * len(self.rows), self.scale.sign
        for block, members in self.blocks.items():
            reference = self.references[block].row
            values = {i: s.mean for i in members if (s := self.rows[i].over_seeds(group, statistic)) is not None}
            if len(values) < 2:
                continue
            highest = max(sign * value for value in values.values())
            best = [i for i, value in values.items() if sign * value == highest]
            for i in best:
                marks[i] = "best"
            for pair in self.pairs if statistic == "mean" else ():
                both = {pair.first, pair.second}
                if pair.group == group and reference in both and pair.p_against is not None and pair.p_against >= LEVEL:
                    (other,) = both - {reference}
                    tied = reference if other in best else other
                    marks[tied] = marks[tied] or "tied"
        return marks


def compare(run_folders: Sequence[str | Path], against: str | None = None) -> Comparison:
    """Read finished runs and compare them.

    A folder that is not a run but holds runs, such as a sweep's, stands for the finished runs in it. Runs that differ
    only in name and seed form one row per predictor. If two of them also share the seed, as a run and its replay do,
    they are listed separately: merging would count one result twice. A personal predictor with the same statistics as
    the global one, as in FedAvg without fine-tuning, has no row of its own. Runs on data without classes are
    compared by loss.

    Parameters
    ----------
    run_folders
        Folders of runs, or folders that hold runs.
    against
        Label of a row, or name of a method or algorithm, that the others are tested against; None: the row that is best
        on validation.

    Raises
    ------
    DataError
        If a folder is not a finished run and holds none, or a file of a run is missing or damaged.
    ExperimentError
        If a run's experiment cannot be read, if only some runs are on data without classes, or if some block has no row
        called ``against``.
    """
    folders, notices = finished_runs(run_folders)
    read = [read_results(folder) for folder in folders]
    by_loss = [run.name for run in read if run.by_loss]
    if by_loss and len(by_loss) < len(read):
        others = [run.name for run in read if not run.by_loss]
        raise ExperimentError(
            f"found runs on data without classes ({_few(by_loss)}) together with runs on data with classes "
            f"({_few(others)}); allowed: one kind, because the first are compared by loss and the others by accuracy",
            hint="compare them apart",
        )
    merged: dict[str, list[RunResults]] = {}
    for run in read:
        merged.setdefault(json.dumps(run.settings, sort_keys=True), []).append(run)
    rows = []
    for runs in merged.values():
        seeds = [run.seed for run in runs]
        for group in [runs] if len(set(seeds)) == len(seeds) else [[run] for run in runs]:
            rows += [
                Row(
                    group[0].titles.get(predictor, f"{group[0].method} ({predictor})"),
                    (),
                    _block(group[0]),
                    predictor,
                    tuple(group),
                )
                for predictor in _shown_predictors(group)
            ]
    blocks = list(dict.fromkeys(row.block for row in rows))
    rows = [row for block in blocks for row in _told_apart([row for row in rows if row.block == block])]
    unlike = differing([run.environment for row in rows for run in row.runs])
    if unlike:
        notices.append(f"The runs were made in different environments ({', '.join(unlike)}): compare times with care.")
    if any(len({row.seeds for row in rows if row.block == block}) > 1 for block in blocks):
        notices.append("Not all rows have the same seeds: their means are over different partitions.")
    if len(blocks) > 1:
        notices.append(
            "The runs are of different data or models, whose losses have scales of their own: each block of the table "
            "has its own best, and clients of different blocks are never paired."
            if by_loss
            else "The runs are of different data: each block of the table has its own best, and clients of different "
            "blocks are never paired."
        )
    for block in blocks:
        inside = [row for row in rows if row.block == block]
        if not any(row.matches(against) for row in inside):
            names = dict.fromkeys(name for row in inside for name in (row.method, row.label))
            raise ExperimentError(
                f"{argument('against')} must be one of {', '.join(names)} (got {against}).",
                key="against",
                found=against,
                allowed=list(names),
            )
    return Comparison(tuple(rows), tuple(notices), against)


def best_by_validation(run_folders: Sequence[str | Path]) -> tuple[Choice, ...]:
    """Return, for each method with several settings, the setting chosen on validation data.

    The criterion is pooled validation accuracy (mean validation loss if the data have no classes) of the seen clients'
    own predictors in the last round, which tables report; its mean is over the seeds that every candidate has. Ties go
    to the first.

    Raises
    ------
    DataError, ExperimentError
        As in :func:`compare`.
    """
    return compare(run_folders).chosen


def differing(settings: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the dotted keys whose value or presence differs."""
    keys = dict.fromkeys(key for one in settings for key in one)
    return tuple(key for key in keys if len({json.dumps(one[key]) if key in one else "" for one in settings}) > 1)


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return the shortest distinct suffix of each dotted key, ignoring a final ``name`` or ``scheme``."""
    stems = {key: re.sub(r"\.(name|scheme)$", "", key).split(".") for key in keys}
    found = {}
    for key, steps in stems.items():
        length = 1
        while length < len(steps) and any(o != key and stems[o][-length:] == steps[-length:] for o in stems):
            length += 1
        found[key] = ".".join(steps[-length:])
    return found


def shown_value(value: Any) -> str:
    """Return a setting's value as a user would write it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def spread(values: Iterable[float | None]) -> MeanStd | None:
    """Return mean and sample standard deviation; None if there are no values or one is missing."""
    known = list(values)
    mean = _mean(known)
    if mean is None:
        return None
    squares = math.fsum((value - mean) ** 2 for value in known if value is not None)
    return MeanStd(mean, math.sqrt(squares / (len(known) - 1)) if len(known) > 1 else None)


def differences(first: Row, second: Row, group: str) -> dict[int, list[float]]:
    """Return each client's difference, first minus second, by seed, for seeds with the same partition in both rows."""
    others = {(run.seed, run.partition): run.results[second.predictor] for run in second.runs}
    found: dict[int, list[float]] = {}
    for run, result in zip(first.runs, first.results, strict=True):
        if (run.seed, run.partition) not in others:
            continue
        theirs = others[run.seed, run.partition].clients[group]
        for client, (right, examples) in result.clients[group].items():
            if client in theirs:
                right_2, examples_2 = theirs[client]
                # A single division of integers: equal differences are then equal floats.
                difference = (right * examples_2 - right_2 * examples) / (examples * examples_2)
                found.setdefault(run.seed, []).append(difference)
    return found


def _edges(chosen: Mapping[str, Any], tried: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the keys whose chosen value is the lowest or highest of three or more numbers."""
    found = []
    for key in differing(tried):
        values = (settings.get(key) for settings in tried)
        numbers = {value for value in values if isinstance(value, int | float) and not isinstance(value, bool)}
        if len(numbers) > 2 and chosen.get(key) in (min(numbers), max(numbers)):
            found.append(key)
    return tuple(found)


def _paired(rows: Sequence[Row], i: int, j: int, group: str) -> Pair:
    first, second = (j, i) if _goodness(rows[j], group) > _goodness(rows[i], group) else (i, j)
    a, b, sign = rows[first], rows[second], rows[first].scale.sign
    for row in (a, b):
        if row.over_seeds(group) is None:
            return Pair(first, second, group, why=f"{row.label} has no result for {group} clients")
    by_seed = differences(a, b, group)
    if not by_seed:
        common = set(a.seeds) & set(b.seeds)
        why = "their partitions differ, though made with the same seed" if common else "they have no seed in common"
        return Pair(first, second, group, why=why)
    found = [d for of_seed in by_seed.values() for d in of_seed]
    means = [statistics.fmean(of_seed) for of_seed in by_seed.values()]
    p_of_seeds = tuple(signed_rank_test(of_seed) for of_seed in by_seed.values())
    several = len(means) > 1
    return Pair(
        first,
        second,
        group,
        tuple(by_seed),
        len(found),
        sum(sign * d > 0 for d in found),
        sum(sign * d < 0 for d in found),
        statistics.median(found),
        statistics.fmean(means),
        t_interval(means) if several else None,
        hierarchical_bootstrap(list(by_seed.values())),
        p_of_seeds,
        t_test(means) if several else p_of_seeds[0],
    )


def _goodness(row: Row, group: str) -> float:
    found = row.over_seeds(group)
    return -math.inf if found is None else row.scale.sign * found.mean


def _mean(values: Iterable[float | None]) -> float | None:
    found = list(values)
    known = [value for value in found if value is not None]
    return math.fsum(known) / len(known) if known and len(known) == len(found) else None


def _shown_predictors(runs: Sequence[RunResults]) -> list[str]:
    """Return the global predictor, if any, and the personal one if it differs or is made for some users only."""
    shown = [p for p in PREDICTORS if all(p in run.results for run in runs)]
    if len(shown) < 2:
        return shown
    pairs = [(run.results["global"].groups, run.results["personal"].groups) for run in runs]
    if any(shared[group] != personal[group] for shared, personal in pairs for group in GROUPS):
        return shown
    return ["personal" if any(USERS in personal for _, personal in pairs) else "global"]


def _block(run: RunResults) -> str:
    return json.dumps([run.dataset, of_block(run), run.masked], sort_keys=True)


def of_block(run: RunResults) -> dict[str, Any]:
    """Return the settings that define a block: those of the data and, if losses are compared, of the model."""
    wanted = ("data.", "model.") if run.by_loss else ("data.",)
    return {key: value for key, value in run.settings.items() if key.startswith(wanted)}


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _told_apart(rows: Sequence[Row]) -> list[Row]:
    """Add to the rows of a block the settings that distinguish rows of one method, or else the names of their runs.

    If the models differ, every row states its model.
    """
    models = [key for key in differing([row.settings for row in rows]) if key.startswith("model.")]
    found = []
    for row in rows:
        keys = [*models, *differing([other.settings for other in rows if other.method == row.method])]
        short = short_names(tuple(dict.fromkeys(keys)))
        details = tuple(
            f"{name} {shown_value(row.settings[key])}" for key, name in short.items() if key in row.settings
        )
        found.append(replace(row, details=details))
    labels = [row.label for row in found]
    return [
        replace(row, details=(*row.details, *(run.name for run in row.runs))) if labels.count(row.label) > 1 else row
        for row in found
    ]
