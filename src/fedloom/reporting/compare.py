"""Comparison of finished runs: test results, costs, and which differences are significant."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedloom.core.words import first_of, pluralize
from fedloom.errors import ExperimentError, argument
from fedloom.reporting.page import DASH, check_installed
from fedloom.reporting.run_results import (
    GROUPS,
    USERS,
    MeanStd,
    Row,
    RunResults,
    block_labels,
    comparison_rows,
    differing,
    mean_of,
    read_results,
)
from fedloom.reporting.words import Document
from fedloom.runs.listing import finished_runs
from fedloom.tasks.names import MODEL_LOSS, Headline

if TYPE_CHECKING:
    from fedloom.reporting.significance import Pair

GROUP_NAMES = {USERS: "user 0", "seen": "seen clients", "unseen": "unseen clients"}

FEATURED = 8
"""Maximum number of rows of a block that figures show in full."""

LEVEL = 0.05
"""Significance level: a corrected p-value below it counts as a difference."""


COLOURS = {
    "m0": "#0072b2", "m1": "#d55e00", "m2": "#009e73", "m3": "#cc79a7",
    "m4": "#e69f00", "m5": "#56b4e9", "m6": "#7f3c8d", "m7": "#8c6d31",
}  # fmt: skip
"""Colours by CSS variable of the page: Okabe and Ito's, and two more as dark as the first."""

DASHES: tuple[tuple[float, ...], ...] = ((), (6, 2), (1.5, 1.5), (6, 2, 1.5, 2), (10, 3), (3, 1.5, 1.5, 1.5, 1.5, 1.5))
MARKERS = "os^DvPX"


class LineStyle(NamedTuple):
    """Drawing style of a method; after eight methods, colours repeat with other line styles and markers."""

    name: str
    dash: tuple[float, ...]
    marker: str

    @property
    def colour(self) -> str:
        """Colour of the line."""
        return COLOURS[self.name]

    @property
    def line(self) -> dict[str, Any]:
        """Arguments of ``plot``."""
        return {"color": self.colour, "linestyle": (0, self.dash) if self.dash else "-"}

    @property
    def key(self) -> dict[str, str]:
        """Colour and dash pattern of a table's row; the line has a width of 2."""
        return {"colour": self.name, "dash": " ".join(f"{2 * length:g}" for length in self.dash)}


def line_styles(labels: Iterable[str]) -> dict[str, LineStyle]:
    """Return a style for each label, in order of appearance."""
    return {
        label: LineStyle(f"m{i % len(COLOURS)}", DASHES[i % len(DASHES)], MARKERS[i % len(MARKERS)])
        for i, label in enumerate(dict.fromkeys(labels))
    }


class Reference(NamedTuple):
    """Reference row of a block, and the reason for its choice, which is never a test result."""

    row: int
    because: str


class Choice(NamedTuple):
    """Row of a method's setting that is best on validation, out of this many ``candidates``.

    ``validation`` and ``runner_up`` are the headline metric on the validation data of seen clients in the last round
    for this and for the second-best setting, means over the ``seeds`` that every candidate has. ``edges`` are settings
    whose chosen value is the lowest or highest of three or more values tried.
    """

    row: Row
    candidates: int
    seeds: tuple[int, ...]
    validation: float
    runner_up: float
    edges: tuple[str, ...]


@dataclass(frozen=True)
class RunComparison:
    """Rows of the comparison, grouped by block, and notices about the runs.

    ``against`` names the row or method that the others are tested against; None: chosen on validation.
    """

    rows: tuple[Row, ...]
    notices: tuple[str, ...]
    against: str | None = None

    @property
    def headline(self) -> Headline:
        """Metric that compares the rows, on test data."""
        return self.rows[0].headline

    def shown(self, value: MeanStd | None) -> str:
        """Return a value of the headline metric as tables show it; a dash if unknown."""
        return DASH if value is None else value.shown(self.headline)

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """Groups for which some row has a result, among ``users``, ``seen`` and ``unseen``."""
        return tuple(g for g in (USERS, *GROUPS) if any(row.over_seeds(g) is not None for row in self.rows))

    @cached_property
    def labels(self) -> dict[str, str]:
        """Data set of each block, with the settings that distinguish it from other blocks."""
        return block_labels(self.rows)

    def title(self, block: str) -> str:
        """Return the label of a block; empty if there is only one."""
        return self.labels[block] if len(self.labels) > 1 else ""

    @property
    def several_seeds(self) -> bool:
        """True if ± is over seeds, because some row has several; otherwise ± is over clients."""
        return any(len(row.runs) > 1 for row in self.rows)

    @cached_property
    def runs(self) -> tuple[RunResults, ...]:
        """Runs of all rows, each once."""
        return tuple({run.path: run for row in self.rows for run in row.runs}.values())

    @cached_property
    def styles(self) -> dict[str, LineStyle]:
        """Styles of the featured rows in figures, by label."""
        return line_styles(self.rows[i].label for featured in self.featured.values() for i in featured)

    @cached_property
    def blocks(self) -> dict[str, list[int]]:
        """Row indices by block."""
        blocks = dict.fromkeys(row.block for row in self.rows)
        return {block: [i for i, row in enumerate(self.rows) if row.block == block] for block in blocks}

    @cached_property
    def differing(self) -> tuple[str, ...]:
        """Dotted keys of the settings that differ between rows."""
        return differing([row.settings for row in self.rows])

    @cached_property
    def pairs(self) -> tuple[Pair, ...]:
        """All pairs of rows within a block, for seen and for unseen clients, with corrected p-values."""
        from fedloom.reporting.significance import test_pairs

        references = {reference.row for reference in self.references.values()}
        return tuple(
            pair for group in GROUPS for pair in test_pairs(self.rows, self.blocks.values(), references, group)
        )

    def p(self, pair: Pair) -> float | None:
        """Return a pair's p-value, corrected over the comparison's one family of tests; None outside it.

        The family of a group of clients is all pairs of rows within a block, so that p-values hold for whichever row is
        best or becomes the reference; with :attr:`against`, which is named in advance, the pairs with the reference.
        """
        return pair.p_holm if self.against is None else pair.p_against

    def family(self, group: str) -> str:
        """Return the family of tests of a group in words, with the number of its pairs."""
        tests = pluralize(sum(pair.group == group and self.p(pair) is not None for pair in self.pairs), "pair")
        return f"{tests} of rows" if self.against is None else f"{tests} with {self.against}"

    @property
    def tested_over(self) -> str:
        """Unit of observation of the tests: ``seeds``, ``clients``, or either."""
        units = {pair.over for pair in self.pairs if self.p(pair) is not None}
        return " or ".join(sorted(units, reverse=True)) or "clients"

    @cached_property
    def references(self) -> dict[str, Reference]:
        """Reference row of each block, against which the others are tested.

        It is the row named by :attr:`against` (if several, the best on validation), or else the row of clients' own
        models that is best on validation. Without validation data, it is the first row. Test results never choose it.
        """
        references = {}
        for block, members in self.blocks.items():
            matching = [i for i in members if self.rows[i].matches(self.against)]
            candidates = [i for i in matching if self.rows[i].is_own] or matching
            validated = self._validated(candidates)
            values = validated[1] if validated else dict.fromkeys(candidates, 0.0)
            because = "named" if self.against is not None else "best on validation" if validated else "first"
            references[block] = Reference(max(values, key=lambda i: self.headline.sign * values[i]), because)
        return references

    @cached_property
    def chosen(self) -> tuple[Choice, ...]:
        """Setting chosen on validation, never on test data, for each method with several settings in a block."""
        methods: dict[tuple[str, str], list[int]] = {}
        for i, row in enumerate(self.rows):
            if row.is_own:
                methods.setdefault(row.method_in_block, []).append(i)
        return tuple(choice for rows in methods.values() if (choice := self._choice(rows)) is not None)

    @cached_property
    def featured(self) -> dict[str, list[int]]:
        """Indices of the rows of each block that figures show.

        These are all rows or, if there are more than :data:`FEATURED`, each method's setting chosen on validation; if
        there are still more, only the rows of clients' own models.
        """
        settings = {choice.row.method_in_block: choice.row.settings for choice in self.chosen}
        featured = {}
        for block, rows_shown in self.blocks.items():
            if len(rows_shown) > FEATURED:
                rows = ((i, self.rows[i]) for i in rows_shown)
                rows_shown = [i for i, row in rows if settings.get(row.method_in_block) in (None, row.settings)]
            featured[block] = self._own_rows(rows_shown) if len(rows_shown) > FEATURED else rows_shown
        return featured

    @cached_property
    def stepping(self) -> dict[str, list[int]]:
        """Indices of the featured rows of each block that were evaluated after extra local steps, one per run.

        If a run has two rows, the row of the clients' own models is taken, since those were evaluated.
        """
        steps = {
            block: self._own_rows([i for i in members if self.rows[i].own_steps])
            for block, members in self.featured.items()
        }
        return {block: members for block, members in steps.items() if members}

    def _own_rows(self, members: Sequence[int]) -> list[int]:
        """Return the rows of clients' own models, and those of runs without such models."""
        own = [self.rows[i].runs for i in members if self.rows[i].predictor == "personal"]
        return [i for i in members if self.rows[i].predictor == "personal" or self.rows[i].runs not in own]

    def _validated(self, candidates: Sequence[int]) -> tuple[set[int], dict[int, float]] | None:
        """Return the seeds that all candidates have, and each one's validation result over them; None without any."""
        if any(self.rows[i].over_seeds(USERS) is not None for i in candidates):
            return None  # validation covers all seen clients; these models are for some
        seeds = set.intersection(*(set(self.rows[i].seeds) for i in candidates))
        means: dict[int, float] = {}
        for i in candidates:
            results = zip(self.rows[i].seeds, self.rows[i].results, strict=True)
            mean = mean_of(result.curve[-1].validation for seed, result in results if seed in seeds)
            if mean is None:  # no common seed, or no validation data
                return None
            means[i] = mean
        return seeds, means

    def _choice(self, candidates: Sequence[int]) -> Choice | None:
        """Return the best of a method's rows on validation; None if they are of one setting, or not validated."""
        settings = [self.rows[i].settings for i in candidates]
        if not differing(settings) or (validated := self._validated(candidates)) is None:
            return None
        seeds, means = validated
        first, second, *_ = sorted(candidates, key=lambda i: -self.headline.sign * means[i])
        edges = _edges(self.rows[first].settings, settings)
        return Choice(self.rows[first], len(candidates), tuple(sorted(seeds)), means[first], means[second], edges)

    def marks(self, group: str, statistic: str = "mean") -> list[str]:
        """Return a mark for each row: ``best`` of its block, ``tied`` with its reference, or an empty string.

        A row is tied if the test does not distinguish it from the reference (:data:`LEVEL`). The reference is tied if
        it is not distinguished from the best. Only means of seen and unseen clients are tested. A row alone in its
        block is not marked.
        """
        marks = [""] * len(self.rows)
        for block, members in self.blocks.items():
            best = self.best(members, group, statistic)
            for i in best:
                marks[i] = "best"
            reference = self.references[block].row
            for other, pair in self.pairs_of(reference, group).items() if statistic == "mean" and best else ():
                tied = reference if other in best else other
                if (p := self.p(pair)) is not None and p >= LEVEL:
                    marks[tied] = marks[tied] or "tied"
        return marks

    def pairs_of(self, row: int, group: str) -> dict[int, Pair]:
        """Return the tested pairs of a row, the row first, by the index of the other."""
        pairs = (pair.seen_from(row) for pair in self.pairs if pair.group == group and pair.p is not None)
        return {pair.second: pair for pair in pairs if pair.first == row}

    def best(self, members: Sequence[int], group: str, statistic: str = "mean") -> list[int]:
        """Return the rows with the best statistic, several on ties; none if fewer than two rows have it."""
        means = {i: value.mean for i in members if (value := self.rows[i].over_seeds(group, statistic)) is not None}
        best = max((self.headline.sign * mean for mean in means.values()), default=None)
        return [i for i, mean in means.items() if self.headline.sign * mean == best] if len(means) > 1 else []


def compare_runs(run_folders: Sequence[str | Path], against: str | None = None) -> RunComparison:
    """Read finished runs and compare them.

    A folder that is not a run but holds runs, such as a sweep's, stands for the finished runs in it. Runs that differ
    only in name and seed form one row per predictor; a personal predictor with the same statistics as the global one,
    as in FedAvg without fine-tuning, has no separate row. Runs are compared by the headline metric of their task.

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
        If a run's experiment cannot be read, if runs have different headline metrics, or if some block has no row
        called ``against``.
    """
    check_installed("scipy", extra="compare")
    folders, notices = finished_runs(run_folders)
    runs = [read_results(folder) for folder in folders]
    names: dict[Headline, list[str]] = {}
    for run in runs:
        names.setdefault(run.headline, []).append(run.name)
    if len(names) > 1:
        listing = "; ".join(f"{metric.title}: {first_of(of_metric, 3)}" for metric, of_metric in names.items())
        raise ExperimentError(
            f"Runs are compared by one metric, and these have different ones ({listing}). Compare the runs of each "
            "metric separately."
        )
    comparison = RunComparison(tuple(comparison_rows(runs)), (), against)
    for members in comparison.blocks.values():
        rows = [comparison.rows[i] for i in members]
        if not any(row.matches(against) for row in rows):
            labels = list(dict.fromkeys(name for row in rows for name in (row.method, row.label)))
            raise ExperimentError(
                f"{argument('against')} must be one of {', '.join(labels)} (got {against}).",
                key="against",
                found=against,
                allowed=labels,
            )
    return replace(comparison, notices=(*notices, *_notices(comparison)))


def _notices(comparison: RunComparison) -> list[str]:
    notices = []
    if unlike := differing([run.environment for run in comparison.runs]):
        notices.append(f"The runs were made in different environments ({', '.join(unlike)}): compare times with care.")
    blocks = comparison.blocks.values()
    if any(len({comparison.rows[i].seeds for i in members}) > 1 for members in blocks):
        notices.append("Not all rows have the same seeds, so their means are over different partitions.")
    if len(blocks) > 1:
        unlike_data = "data or models" if comparison.headline == MODEL_LOSS else "data"
        notices.append(
            f"The runs are of different {unlike_data}: each block of the table has its own best, and clients of "
            "different blocks are never paired."
        )
    return notices


def _edges(choice: Document, candidates: Sequence[Document]) -> tuple[str, ...]:
    """Return the keys whose chosen value is the lowest or highest of three or more numbers."""
    edges = []
    for key in differing(candidates):
        numbers = {settings[key] for settings in candidates if type(settings.get(key)) in (int, float)}
        if len(numbers) > 2 and choice.get(key) in (min(numbers), max(numbers)):
            edges.append(key)
    return tuple(edges)
