"""Figures of runs beside the published figures of the same runs, with the tolerance across machines.

The published figures are rows of a page's compact file, the measured ones the same rows of a fold of the runs. The same
seed gives the same bits on one kind of processor with one build of torch. Elsewhere sums have another order, and the
training another course: at worst as another as that of another seed. So unless a page has measured what other
processors do, the tolerance is the 95 % prediction interval for the difference of two trainings, t·s·√2, where s is the
deviation over the page's own seeds, pooled over the settings of the part.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from page_parts import Part
from scipy import stats
from summaries import Evaluation, Runs

SEED = re.compile(r"(,?)\bseed=\d+")


@dataclass(frozen=True)
class Comparison:
    """One quantity of one run: as published, as measured (None: missing), and the paper's, if the page cites one.

    ``far`` is the tolerance. ``commit`` is the commit that made the published figure, or else recorded it.
    """

    run: str
    seed: str
    quantity: str
    published: float
    measured: float | None
    far: float
    paper: float | None
    commit: str

    @property
    def agrees(self) -> bool:
        """Return whether the measured figure exists and is within the tolerance."""
        rounding = 1e-9
        return self.measured is not None and abs(self.measured - self.published) <= self.far + rounding


def compared(
    part: Part,
    published: Runs,
    measured: Runs,
    paper: Mapping[str, Mapping[str, float]],
    seeds: Sequence[str] | None = None,
) -> list[Comparison]:
    """Return every figure of a part, in the compact file's order; with ``seeds``, only those of these seeds."""
    rows = published_rows(part, published)
    found = []
    for line in rows:
        if seeds is not None and line.seed not in seeds:
            continue
        there = [other for other in measured.get(line.run, ()) if (other.seed, other.round) == (line.seed, line.round)]
        for quantity in part.keys.compare or ():
            if quantity not in line.values:
                continue
            value = there[0].values.get(quantity) if there else None
            far = tolerance(part, line.run, quantity, rows, published)
            cited = next((values.get(quantity) for name, values in paper.items() if fnmatchcase(line.run, name)), None)
            commit = line.commit or f"recorded in {line.recorded}" if line.recorded or line.commit else "unknown"
            found.append(Comparison(line.run, line.seed, quantity, line[quantity], value, far, cited, commit))
    return found


def published_rows(part: Part, published: Runs) -> list[Evaluation]:
    """Return the last evaluation of each seed of the runs that a part makes; runs that diverged have none."""
    patterns = part.rows()
    rows: list[Evaluation] = []
    for name, run in published.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            by_seed = {line.seed: line for line in run if line.left is None}
            rows += by_seed.values()
    return rows


def tolerance(part: Part, run: str, quantity: str, rows: Iterable[Evaluation], published: Runs) -> float:
    """Return how far a measured figure may be from the published one: declared in the part, or from seeds.

    The spread is that of the part's own rows; if they have no two seeds of one setting, that of all rows of the page.
    Infinite if there is no spread at all.
    """
    declared = [
        values[quantity]
        for pattern, values in part.keys.tolerance.items()
        if quantity in values and fnmatchcase(run, pattern)
    ]
    if declared:
        return declared[-1]
    everything = (line for other in published.values() for line in other if line is other[-1])
    for lines in (rows, everything):
        if (spread := of_two_trainings(_by_setting(lines, quantity))) is not None:
            return spread
    return math.inf


def of_two_trainings(settings: Iterable[Sequence[float]]) -> float | None:
    """Return the 95 % prediction interval for the difference of two trainings of one setting: t·s·√2.

    ``settings`` has the results of each setting's seeds; s is pooled over them. None if no setting has two seeds.
    """
    several = [values for values in settings if len(values) > 1]
    if not several:
        return None
    freedom = sum(len(values) - 1 for values in several)
    variance = sum((len(values) - 1) * statistics.variance(values) for values in several) / freedom
    return float(stats.t.ppf(0.975, freedom)) * math.sqrt(2 * variance)


def _by_setting(lines: Iterable[Evaluation], quantity: str) -> Iterator[list[float]]:
    settings: dict[str, dict[str, float]] = {}
    for line in lines:
        if quantity in line.values:
            settings.setdefault(SEED.sub("", line.run), {})[line.seed] = line[quantity]
    yield from (list(by_seed.values()) for by_seed in settings.values())
