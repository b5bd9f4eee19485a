"""Tables of docs/results/leaderboard.md: methods by federation and reading, from the compact files of the other pages.

A board has the methods that were run on the same clients with the same seeds and rounds, each at a setting that
validation chose among equally many. A reading is a mean over clients: seen clients, new ones, or the worst tenth of the
seen ones. Differences between methods are paired by seed and tested by Student's t; all pairs of a board and reading
are corrected together by Holm's method. A method's rank lies between one more than the number of methods that are
certainly better and the number of those that are not certainly worse. As Holm's correction bounds the chance of any
false difference, these intervals hold for all methods of a column together, at 95 %.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from baselines import REGIMES
from pages_baselines import GLOBAL_ALONE, title
from pages_flowdup import NAMES as FLOWDUP
from pages_own_tasks import NAMES as TASKS
from summaries import Runs, read, table

from fedloom.core.words import pluralize
from fedloom.reporting.significance import holm, t_interval, t_test

RESULTS = Path(__file__).parents[1] / "docs" / "results"
LEVEL = 0.05

COMFEDL = {
    "fedavg-examples": "FedAvg, by n_i",
    "fedavg-uniform": "FedAvg, uniform",
    "comfedl-largest": "ComFedL, largest",
    "comfedl-normalized": "ComFedL, normalized",
}
SEEN, NEW, WORST = "seen clients", "new clients", "worst tenth of the seen"


@dataclass(frozen=True)
class Board:
    """Board: a page's runs below a pattern, ``{}`` is the method, and the quantity of each reading."""

    name: str
    page: str
    runs: str
    methods: Mapping[str, str]
    readings: Mapping[str, str]
    lower_is_better: bool = False

    def results(self, runs: Runs, quantity: str) -> dict[str, dict[str, float]]:
        """Return a quantity by method and seed, of the methods that have it."""
        found: dict[str, dict[str, float]] = {}
        for method, name in self.methods.items():
            where = self.runs.format(method)
            those = [line for run in ([runs[where]] if where in runs else runs.under(where)) for line in run]
            last = {line.seed: line[quantity] for line in those if quantity in line.values}
            if len(last) > 1:
                found[name] = last
        return found


def _baselines(name: str, regime: str, test: str, methods: Sequence[str], readings: Mapping[str, str]) -> Board:
    return Board(name, "baselines", f"{regime}/{test}/{{}}", {m: title(regime, m) for m in methods}, readings)


def boards() -> list[Board]:
    """Return the boards in the page's order."""
    ten = {SEEN: "seen_mean", WORST: "seen_worst"}  # of ten clients, the worst one
    both = {SEEN: "seen_mean", NEW: "unseen_mean"}
    decile = {**both, WORST: "seen_worst_decile"}
    found = [
        _baselines(name, regime, "test", [*REGIMES[regime].methods], ten)
        for regime, name in (
            ("robust-two-classes", "Fashion-MNIST, one large client of ten, two classes each"),
            ("robust-iid", "Fashion-MNIST, one large client of ten, alike"),
            ("adapt", "Fashion-MNIST, dominant classes, 500 images"),
            ("adapt-whole", "Fashion-MNIST, dominant classes, all images"),
            ("adapt-mnist", "MNIST, dominant classes, 500 images"),
        )
    ]
    personal = [method for method in REGIMES["table-1"].methods if method not in GLOBAL_ALONE]
    names = {"fashion-mnist": "Fashion-MNIST", "mnist": "MNIST"}
    for test in REGIMES["table-1"].tests:
        data, size = test.rsplit("-", 1)
        name = f"{names[data]}, five of ten labels, {size}"
        found.append(_baselines(name, "table-1", test, personal, {SEEN: "seen"}))
    found += [
        _baselines("Vowel, speakers", "vowel", "test", [*REGIMES["vowel"].methods], both),
        _baselines("QMNIST, writers", "qmnist", "test", [*REGIMES["qmnist"].methods], both),
    ]
    for data, shown in names.items():
        for mix, clients in (("iid", "alike"), ("dominant", "half of one class"), ("two-classes", "two classes each")):
            runs = f"{data}/{mix}-fresh/{{}}"
            name = f"{shown}, weights of one large client of ten, {clients}"
            found.append(Board(name, "comfedl", runs, COMFEDL, ten))
    name = "Fashion-MNIST, three classes each, newcomers without labels"
    found.append(Board(name, "flowdup", "fashion-mnist/test/{}", FLOWDUP, both))
    tasks = {
        "regression": "Regression, RMSE",
        "signals": "Multilabel signals, AUROC",
        "shapes": "Segmentation, mean IoU",
        "categories": "Numbers and categories",
        "cameras": "ResNet18, cameras",
    }
    for problem, name in tasks.items():
        found.append(Board(name, "own-tasks", f"{problem}/test/{{}}", TASKS, decile, problem == "regression"))
    return found


@dataclass(frozen=True)
class Standing:
    """Standing of a method: mean over seeds with its 95 % interval, rank, and first and last rank that are possible."""

    mean: float
    low: float
    high: float
    rank: int
    first: int
    last: int


def standings(
    results: Mapping[str, Mapping[str, float]], *, lower_is_better: bool = False
) -> tuple[dict[str, Standing], list[tuple[str, str]]]:
    """Return each method's standing, and the pairs whose first method is certainly better.

    ``results`` has, by method, one value per seed. Methods need the same seeds.
    """
    sign = -1 if lower_is_better else 1
    pairs = list(itertools.combinations(results, 2))
    gains = [[sign * (results[a][seed] - results[b][seed]) for seed in results[a]] for a, b in pairs]
    adjusted = holm([t_test(gain) for gain in gains])
    certain = [
        (a, b) if statistics.fmean(gain) > 0 else (b, a)
        for (a, b), gain, p in zip(pairs, gains, adjusted, strict=True)
        if p < LEVEL
    ]
    means = {method: statistics.fmean(values.values()) for method, values in results.items()}
    found = {}
    for method, values in results.items():
        better = sum(worse == method for _, worse in certain)
        worse = sum(best == method for best, _ in certain)
        rank = 1 + sum(sign * mean > sign * means[method] for mean in means.values())
        found[method] = Standing(means[method], *t_interval([*values.values()]), rank, 1 + better, len(results) - worse)
    return found, certain


def tables(_: Runs) -> Iterator[str]:
    """Yield, for each board, the table of its standings; then all differences that are certain."""
    rows: list[tuple[str, ...]] = []
    for board in boards():
        runs = read(RESULTS / f"{board.page}.csv")
        columns = {}
        for reading, quantity in board.readings.items():
            results = board.results(runs, quantity)
            if len(results) > 1 and len({tuple(sorted(values)) for values in results.values()}) == 1:
                columns[reading], certain = standings(results, lower_is_better=board.lower_is_better)
                rows += _certain(board, reading, certain, len(results))
        yield _table(board, columns)
    yield table(("federation", "reading", "certainly better", "than"), rows, left=4)


def _table(board: Board, columns: Mapping[str, Mapping[str, Standing]]) -> str:
    first = next(iter(columns.values()))
    rows = []
    digits = 2 if board.lower_is_better else 1
    for method in sorted(first, key=lambda method: first[method].rank):
        cells = []
        for standing in (column.get(method) for column in columns.values()):
            if standing is None:
                cells += ["–", "–"]
                continue
            ends = f"{standing.low:.{digits}f} to {standing.high:.{digits}f}".replace("-", "−")
            possible = f" ({standing.first} to {standing.last})"
            cells += [f"{standing.mean:.{digits}f} ({ends})", f"{standing.rank}{possible}"]
        rows.append((method, *cells))
    return table((board.name, *(cell for reading in columns for cell in (reading, "rank"))), rows)


def _certain(board: Board, reading: str, certain: Sequence[tuple[str, str]], methods: int) -> Iterator[tuple[str, ...]]:
    """Yield a row for each method that is certainly better than others; one row if there is none."""
    if not certain:
        yield board.name, reading, f"none ({pluralize(methods * (methods - 1) // 2, 'pair')})", ""
    for best in dict.fromkeys(better for better, _ in certain):
        yield board.name, reading, best, "; ".join(worse for better, worse in certain if better == best)
