"""Finished runs side by side: what a client would get, what it costs, and which differences are more than chance."""

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
from fedloom.reporting.runs import GROUPS, PREDICTORS, USERS, NewClient, Result, Run, read_run, run_folders_in
from fedloom.reporting.significance import hierarchical_bootstrap, holm, signed_rank_test, t_interval, t_test

FEATURED = 8
"""Largest number of rows of a block that are all shown in figures."""

LEVEL = 0.05
"""A corrected p-value below it counts as a difference."""


class Spread(NamedTuple):
    """Mean over seeds, and standard deviation of a sample (ddof = 1); None for one seed."""

    mean: float
    std: float | None


@dataclass(frozen=True)
class Scale:
    """What rows are measured by: test accuracy, or, on data without classes, test loss.

    Attributes
    ----------
    name
        ``accuracy`` or ``loss``.
    sign
        1 where more is better, -1 where less is.
    unit
        What stands behind a value that is shown.
    """

    name: str
    sign: int
    unit: str

    @property
    def words(self) -> str:
        """The name with its unit, as a table is titled."""
        return f"{self.name}, {self.unit}" if self.unit else self.name

    def shown(self, value: Spread | None) -> str:
        """Percent with one decimal, or a loss with five digits; ± where there is a standard deviation."""
        if value is None:
            return DASH
        if self is ACCURACY:
            return f"{100 * value.mean:.1f}" + (f" ± {100 * value.std:.1f}" if value.std is not None else "")
        return f"{value.mean:#.5g}".rstrip(".") + (f" ± {value.std:#.2g}".rstrip(".") if value.std is not None else "")

    def shown_difference(self, difference: float) -> str:
        """With its sign, in points or as it is."""
        if not difference:
            return "0"
        return f"{100 * difference:+.1f}" if self is ACCURACY else f"{difference:+.3g}"


ACCURACY = Scale("accuracy", 1, "%")
LOSS = Scale("loss", -1, "")

DASH = "–"
"""What is not known."""


@dataclass(frozen=True)
class Row:
    """One predictor under one setting: its runs differ in the seed alone.

    Attributes
    ----------
    method
        What a table calls it.
    details
        The settings that tell it from rows of the same method, ``key value`` each.
    block
        Which rows were measured on the same kind of data, in the same reading; best is best within a block.
    """

    method: str
    details: tuple[str, ...]
    block: str
    predictor: str
    runs: tuple[Run, ...]

    @property
    def label(self) -> str:
        """Method and details on one line."""
        return ", ".join((self.method, *self.details))

    @property
    def is_own(self) -> bool:
        """Whether it is of the models that clients end up with: each run has one such row."""
        return self.predictor == "personal" or "personal" not in _shown_predictors(self.runs)

    def answers_to(self, name: str | None) -> bool:
        """Whether a name is its label, its method or its algorithm; all rows answer to None."""
        return name is None or name in (self.label, self.method, self.runs[0].method, self.runs[0].algorithm)

    @property
    def settings(self) -> Mapping[str, Any]:
        """By dotted key, those of all its runs."""
        return self.runs[0].settings

    @property
    def results(self) -> tuple[Result, ...]:
        """One per run."""
        return tuple(run.results[self.predictor] for run in self.runs)

    @property
    def seeds(self) -> tuple[int, ...]:
        """One per run."""
        return tuple(run.seed for run in self.runs)

    @property
    def new_client(self) -> NewClient:
        """Costs of a new client, means over seeds."""
        columns = zip(*(result.new_client for result in self.results), strict=True)
        return NewClient(*(_mean(column) for column in columns))

    @property
    def scale(self) -> Scale:
        """What it is measured by."""
        return LOSS if self.runs[0].by_loss else ACCURACY

    def over_seeds(self, group: str, statistic: str = "mean") -> Spread | None:
        """A statistic of :class:`GroupStatistics` over seeds; None unless every run has it."""
        found = [result.groups.get(group) for result in self.results]
        return spread(None if one is None else getattr(one, statistic) for one in found)

    def of_runs(self, quantity: str) -> Spread | None:
        """A number of :class:`Run`, as ``duration_s``, over seeds."""
        return spread(getattr(run, quantity) for run in self.runs)

    def training(self, quantity: str) -> Spread | None:
        """A number of the last :class:`Point`, as ``client_steps``, over seeds."""
        return spread(getattr(result.curve[-1], quantity) for result in self.results)

    @property
    def training_loss(self) -> dict[int, float]:
        """Of each round that every seed has one of, the mean over seeds."""
        rounds = set.intersection(*(set(run.training_loss) for run in self.runs))
        return {t: math.fsum(run.training_loss[t] for run in self.runs) / len(self.runs) for t in sorted(rounds)}

    @property
    def own_steps(self) -> dict[int, Spread]:
        """Mean over the unseen clients after so many steps of their own, over seeds, where every run has it."""
        steps = set.intersection(*(set(run.own_steps) for run in self.runs))
        found = {k: spread(run.own_steps[k].mean for run in self.runs) for k in sorted(steps)}
        return {k: value for k, value in found.items() if value is not None}

    def validation(self, *, best: bool) -> Spread | None:
        """Pooled validation accuracy (or mean validation loss) of the last round, or of the best."""
        points = [result.best if best else result.curve[-1] for result in self.results]
        return spread(None if point is None else point.validation for point in points)

    def at_best(self, group: str) -> Spread | None:
        """Mean test accuracy (or loss) of the round that is best by validation."""
        return spread(None if result.best is None else result.best.mean.get(group) for result in self.results)


@dataclass(frozen=True)
class Pair:
    """Two rows of a block, client by client; ``first`` and ``second`` are their places in the table, the better first.

    The clients of a seed share one training. With one seed the test is over its clients, and about them under this one
    training; with several it is over seeds, by one number each.

    Attributes
    ----------
    seeds
        In which both were measured on the same partition.
    clients, better, worse
        Pairs of values, over all those seeds; where the first is better than the second, and where it is worse.
    median
        Of the differences, first less second; None without pairs.
    mean
        Over seeds, of the mean difference over clients.
    interval
        95 % interval of that mean, by Student's t over seeds; None with one seed.
    bootstrap
        95 % interval of that mean, seeds drawn again, and of each its clients; with one seed clients alone.
    p_of_seeds
        Of the signed-rank test over the clients of each seed.
    p, p_holm
        With one seed that of its signed-rank test, with several that of a t test over the seeds' mean differences;
        plain, and corrected over all pairs of this group. None without pairs.
    p_against
        p corrected over the pairs of this group with a reference alone; None of other pairs. This one decides what is
        told apart.
    why
        Why the two cannot be compared; empty where they can.
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
        """What the test is over: ``seeds``, or ``clients`` of one seed."""
        return "seeds" if len(self.seeds) > 1 else "clients"

    def turned(self) -> Pair:
        """The same, with the second first."""
        turned = replace(self, first=self.second, second=self.first, better=self.worse, worse=self.better)
        median, mean = (None if value is None else -value for value in (self.median, self.mean))
        interval, bootstrap = (None if i is None else (-i[1], -i[0]) for i in (self.interval, self.bootstrap))
        return replace(turned, median=median, mean=mean, interval=interval, bootstrap=bootstrap)


class Reference(NamedTuple):
    """The row of a block that the others are tested against, and what made it so: never a test number."""

    row: int
    because: str


@dataclass(frozen=True)
class Choice:
    """The setting of a method that is best by validation: of highest accuracy, or of lowest loss.

    Attributes
    ----------
    row
        Its place in the table.
    candidates
        How many settings there were.
    seeds
        Over which the means are taken: those that every candidate has.
    validation
        Pooled validation accuracy (or mean loss) of seen clients in the last round, mean over these seeds.
    runner_up
        That of the second best.
    edges
        Settings in which the chosen value is the lowest or highest of three or more that were tried.
    """

    row: int
    candidates: int
    seeds: tuple[int, ...]
    validation: float
    runner_up: float
    edges: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """Rows of the table, the rows of a block next to each other, and what is to be said about the runs.

    ``against`` names the rows, or the method, that the others are tested against; None: validation chooses.
    """

    rows: tuple[Row, ...]
    notices: tuple[str, ...]
    against: str | None = None

    @property
    def scale(self) -> Scale:
        """What all rows are measured by."""
        return self.rows[0].scale

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """The groups for which some row has a result: of ``users``, ``seen`` and ``unseen``."""
        return tuple(g for g in (USERS, *GROUPS) if any(row.over_seeds(g) is not None for row in self.rows))

    @property
    def several_seeds(self) -> bool:
        """Whether ± is over seeds: some row has more than one. Else it is over clients."""
        return any(len(row.runs) > 1 for row in self.rows)

    @cached_property
    def blocks(self) -> dict[str, list[int]]:
        """Places of the rows of each block."""
        found: dict[str, list[int]] = {}
        for i, row in enumerate(self.rows):
            found.setdefault(row.block, []).append(i)
        return found

    @cached_property
    def differing(self) -> tuple[str, ...]:
        """Dotted keys of the settings that are not the same in all rows."""
        return differing([row.settings for row in self.rows])

    @cached_property
    def pairs(self) -> tuple[Pair, ...]:
        """All pairs of rows within a block, for seen and for unseen clients; Holm's correction is within each group.

        Once over all of them, and once over those with the references alone, k - 1 of k rows.
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
        """What its tests are over: ``seeds``, ``clients``, or either."""
        over = {pair.over for pair in self.pairs if pair.p_against is not None}
        return " or ".join(sorted(over, reverse=True)) or "clients"

    @cached_property
    def references(self) -> dict[str, Reference]:
        """For each block the row that the others are tested against.

        That which :attr:`against` names (of several, the one that validation prefers), or else the row of clients' own
        models that validation prefers. Where nothing was validated, the first in the table.
        """
        found = {}
        best = "highest" if self.scale is ACCURACY else "lowest"
        for block, members in self.blocks.items():
            named = [i for i in members if self.rows[i].answers_to(self.against)]
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
        """For each method with several settings in a block, the setting that validation chooses; never test."""
        methods: dict[tuple[str, str], list[int]] = {}
        for i, row in enumerate(self.rows):
            if row.is_own:
                methods.setdefault((row.block, row.runs[0].method), []).append(i)
        several = [rows for rows in methods.values() if differing([self.rows[i].settings for i in rows])]
        return tuple(choice for rows in several if (choice := self._choice(rows)) is not None)

    @cached_property
    def featured(self) -> dict[str, list[int]]:
        """Places of the rows of each block that figures show.

        All, or where they are more than :data:`FEATURED`, of each method the settings that validation chooses; where
        these are still more, the clients' own models alone.
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
        """Places of the featured rows of each block that were measured after steps of a client's own, one for a run.

        Where a run has two rows, that of the clients' own models, which is what was measured.
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
        """The seeds that rows have in common, and each row's validation over these; None where there is none."""
        if any(self.rows[i].over_seeds(USERS) is not None for i in candidates):
            return None  # validation is over all seen clients, and these models are made for some
        seeds = set.intersection(*(set(self.rows[i].seeds) for i in candidates))
        means: dict[int, float] = {}
        for i in candidates:
            row = self.rows[i]
            last = [r.curve[-1].validation for run, r in zip(row.runs, row.results, strict=True) if run.seed in seeds]
            mean = _mean(last)
            if mean is None:  # no seed in common, or nothing to validate on
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
        """For each row ``best`` of its block, ``tied`` with the reference of its block, or nothing.

        Tied is a row that the test cannot tell from the reference (:data:`LEVEL`), and the reference itself if it
        cannot be told from the best; only means of seen and unseen clients are tested. A row alone in its block is not
        marked.
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
    """Read finished runs and put them side by side.

    A folder that is no run but holds runs, as that of a sweep, stands for the finished runs in it. Runs that differ in
    name and seed alone make one row for each predictor. (If two of them have the same seed too, as a run and its
    replay, they are listed apart: merging would count one result twice.) A personal predictor whose statistics are
    those of the global one, as FedAvg's without fine-tuning, has no row of its own. Runs on data without classes are
    compared by loss.

    Parameters
    ----------
    run_folders
        Of runs, or of what holds runs.
    against
        The label of a row, or the name of a method or an algorithm, that the others are tested against; None: the row
        that validation prefers.

    Raises
    ------
    DataError
        If a folder is not that of a finished run and holds none either, or a file of a run is missing or damaged.
    ExperimentError
        If the experiment of a run cannot be read, or some runs are on data with classes and others on data without, or
        no row of some block is called ``against``.
    """
    folders, notices = run_folders_in(run_folders)
    read = [read_run(folder) for folder in folders]
    by_loss = [run.name for run in read if run.by_loss]
    if by_loss and len(by_loss) < len(read):
        others = [run.name for run in read if not run.by_loss]
        raise ExperimentError(
            f"found runs on data without classes ({_few(by_loss)}) together with runs on data with classes "
            f"({_few(others)}); allowed: one kind, because the first are compared by loss and the others by accuracy",
            hint="compare them apart",
        )
    merged: dict[str, list[Run]] = {}
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
        if not any(row.answers_to(against) for row in inside):
            names = dict.fromkeys(name for row in inside for name in (row.method, row.label))
            raise ExperimentError(
                f"{argument('against')} must be one of {', '.join(names)} (got {against}).",
                key="against",
                found=against,
                allowed=list(names),
            )
    return Comparison(tuple(rows), tuple(notices), against)


def best_by_validation(run_folders: Sequence[str | Path]) -> tuple[Choice, ...]:
    """For each method that was run with several settings, the one that validation chooses.

    The measure is pooled validation accuracy (of data without classes, mean validation loss) of the seen clients' own
    predictors in the last round, the round that tables report; its mean over the seeds that every candidate has. The
    first of equal ones is chosen.

    Raises
    ------
    DataError, ExperimentError
        As :func:`compare`.
    """
    return compare(run_folders).chosen


def differing(settings: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Dotted keys whose value, or presence, is not the same everywhere."""
    keys = dict.fromkeys(key for one in settings for key in one)
    return tuple(key for key in keys if len({json.dumps(one[key]) if key in one else "" for one in settings}) > 1)


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """The shortest ends of dotted keys that tell them apart; a name or scheme goes by what it is the name of."""
    stems = {key: re.sub(r"\.(name|scheme)$", "", key).split(".") for key in keys}
    found = {}
    for key, steps in stems.items():
        length = 1
        while length < len(steps) and any(o != key and stems[o][-length:] == steps[-length:] for o in stems):
            length += 1
        found[key] = ".".join(steps[-length:])
    return found


def shown_value(value: Any) -> str:
    """A setting as a person writes it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def spread(values: Iterable[float | None]) -> Spread | None:
    """Mean and sample standard deviation; None if there are no values, or one is missing."""
    known = list(values)
    mean = _mean(known)
    if mean is None:
        return None
    squares = math.fsum((value - mean) ** 2 for value in known if value is not None)
    return Spread(mean, math.sqrt(squares / (len(known) - 1)) if len(known) > 1 else None)


def differences(first: Row, second: Row, group: str) -> dict[int, list[float]]:
    """First less second value of each client, by the seeds in which two rows have the same partition, and clients."""
    others = {(run.seed, run.partition): run.results[second.predictor] for run in second.runs}
    found: dict[int, list[float]] = {}
    for run, result in zip(first.runs, first.results, strict=True):
        if (run.seed, run.partition) not in others:
            continue
        theirs = others[run.seed, run.partition].clients[group]
        for client, (right, examples) in result.clients[group].items():
            if client in theirs:
                right_2, examples_2 = theirs[client]
                # One division of whole numbers: differences that are equal are equal floats.
                difference = (right * examples_2 - right_2 * examples) / (examples * examples_2)
                found.setdefault(run.seed, []).append(difference)
    return found


def _edges(chosen: Mapping[str, Any], tried: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Keys of which the chosen value is the lowest or highest of three numbers or more."""
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


def _shown_predictors(runs: Sequence[Run]) -> list[str]:
    """The global predictor where there is one, and the personal one where it is another, or is made for some users."""
    shown = [p for p in PREDICTORS if all(p in run.results for run in runs)]
    if len(shown) < 2:
        return shown
    pairs = [(run.results["global"].groups, run.results["personal"].groups) for run in runs]
    if any(shared[group] != personal[group] for shared, personal in pairs for group in GROUPS):
        return shown
    return ["personal" if any(USERS in personal for _, personal in pairs) else "global"]


def _block(run: Run) -> str:
    return json.dumps([run.dataset, of_block(run), run.masked], sort_keys=True)


def of_block(run: Run) -> dict[str, Any]:
    """The settings that runs of a block share: those of the data, and, where losses count, of the model they are of."""
    wanted = ("data.", "model.") if run.by_loss else ("data.",)
    return {key: value for key, value in run.settings.items() if key.startswith(wanted)}


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _told_apart(rows: Sequence[Row]) -> list[Row]:
    """Rows of a block with the settings that tell those of one method apart; at last, the names of their runs.

    The model is told to all rows where it is not the same for all.
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
