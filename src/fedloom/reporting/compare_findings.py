"""Findings of a comparison: the best row, its lead, and the significance."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from fedloom.core.words import pluralize
from fedloom.reporting.compare import LEVEL, RunComparison
from fedloom.reporting.compare_pairs import Pair
from fedloom.reporting.compare_rows import Row
from fedloom.reporting.run_results import USERS
from fedloom.reporting.significance import least_p

GROUP_NAMES = {USERS: "user 0", "seen": "seen clients", "unseen": "unseen clients"}

NAMED = 3
"""Maximum number of rows that a sentence lists by name; more are counted."""


@dataclass(frozen=True)
class Finding:
    """Best row of a block for a group of clients, and the other rows in order of their means.

    ``close`` rows are not significantly worse than the best, ``untested`` ones not measured on the same clients.
    ``pair`` compares the best row with its ``rival``, with corrected ``p``; None if it was not tested. The rival is the
    second best row; or the reference, if another row than the best was named as that (``only_reference``), since only
    differences to it are tested then. ``too_few`` is the number of clients, if they are too few for any difference to
    be significant.
    """

    block: str
    group: str
    best: Row
    others: tuple[Row, ...]
    close: tuple[Row, ...]
    untested: tuple[Row, ...]
    rival: Row
    only_reference: bool
    pair: Pair | None
    p: float | None
    too_few: int | None

    @property
    def second(self) -> Row:
        """Second best row."""
        return self.others[0]

    @property
    def winner(self) -> Row | None:
        """Best row, if it is significantly better than every other row of its block."""
        return None if self.close or self.untested or self.only_reference else self.best


def findings(comparison: RunComparison) -> Iterator[Finding]:
    """Yield the finding of each block and group of clients that has two rows with results, unseen clients first.

    p-values are those of the tables (:meth:`RunComparison.p`). If models are made for user 0, results of other clients
    are not compared.
    """
    groups = (USERS,) if USERS in comparison.groups else tuple(reversed(comparison.groups))
    for block, members in comparison.blocks.items():
        for group in groups:
            best = comparison.best(members, group)
            if best:
                yield _finding(comparison, block, group, best[0])


def _finding(comparison: RunComparison, block: str, group: str, best: int) -> Finding:
    rows, sign = comparison.rows, comparison.headline.sign
    measured = [i for i in comparison.blocks[block] if i != best and rows[i].over_seeds(group) is not None]
    others = sorted(measured, key=lambda i: -sign * rows[i].mean(group))
    pairs, reference = comparison.pairs_of(best, group), comparison.references[block].row
    only_reference = comparison.against is not None and reference != best
    rival = reference if only_reference and reference in others else others[0]
    p = {i: comparison.p(pair) for i, pair in pairs.items()}
    return Finding(
        block,
        group,
        rows[best],
        tuple(rows[i] for i in others),
        tuple(rows[i] for i in others if (p.get(i) or 0.0) >= LEVEL),
        tuple(rows[i] for i in others if i not in p),
        rows[rival],
        only_reference,
        pairs.get(rival),
        p.get(rival),
        _too_few(comparison, group, pairs.values()),
    )


def _too_few(comparison: RunComparison, group: str, pairs: Collection[Pair]) -> int | None:
    """Return the number of clients of tests within one seed, if too small for any difference to be significant."""
    clients = max((pair.clients for pair in pairs if pair.over == "clients"), default=0)
    tested = sum(pair.group == group and comparison.p(pair) is not None for pair in comparison.pairs)
    return clients if clients and tested * least_p(clients) >= LEVEL else None


def sentence(comparison: RunComparison, finding: Finding) -> str:
    """Return a finding in words: the winner if there is one, its lead, interval and seeds."""
    title = comparison.title(finding.block)
    whom = GROUP_NAMES[finding.group].capitalize() + (f" ({title})" if title else "")
    result = f"{comparison.shown(finding.best.over_seeds(finding.group))}{comparison.headline.unit}"
    lead = _lead(comparison, finding)
    if finding.group == USERS:
        return f"{whom}: {finding.best.label} is best ({result}), {lead}. There is no test, as user 0 is one client."
    if finding.winner:
        return f"{whom}: {finding.best.label} wins with {result}, {lead}."
    mean = f"{comparison.headline.superlative} mean"
    if finding.only_reference:
        text = f"{whom}: {finding.best.label} has the {mean} ({result}), {lead}."
        return f"{text} Only differences to {comparison.against} are tested."
    text = f"{whom}: no clear winner. {finding.best.label} has the {mean} ({result}), {lead}."
    if finding.too_few is not None:
        text += f" With {pluralize(finding.too_few, 'client')}, no difference can be significant."
    elif finding.close == finding.others:
        text += " No other row is significantly worse." if len(finding.others) > 1 else ""
    elif finding.close:
        text += f" Not significantly worse: {_listed(finding.close)}."
    if finding.untested:
        text += f" Not measured on the same clients: {_listed(finding.untested)}."
    return text


def _lead(comparison: RunComparison, finding: Finding) -> str:
    """Return the distance to the rival, with its interval, seeds and p-value."""
    pair = finding.pair
    difference = finding.best.mean(finding.group) - finding.rival.mean(finding.group)
    if pair is not None and pair.mean is not None:
        difference = pair.mean
    text = f"level with {finding.rival.label}"
    if difference:
        points = " points" if comparison.headline.percent else ""
        amount = comparison.headline.shown_difference(abs(difference)).lstrip("+")
        text = f"{amount}{points} {'above' if difference > 0 else 'below'} {finding.rival.label}"
    return text if pair is None or finding.p is None else f"{text} ({_evidence(comparison, pair, finding.p)})"


def _evidence(comparison: RunComparison, pair: Pair, p: float) -> str:
    """Return the interval of a difference, the number of seeds or clients, and the p-value."""
    low, high = map(comparison.headline.shown_difference, pair.ends)
    seeds = f"{len(pair.seeds)} seeds" if len(pair.seeds) > 1 else f"1 seed, {pluralize(pair.clients, 'client')}"
    shown = "< 0.001" if p < 0.001 else f"= {p:.2g}"
    return (
        f"95 % interval {low} to {high}; {seeds}; p {shown}, by Holm's correction over {comparison.family(pair.group)}"
    )


def caution(comparison: RunComparison) -> str:
    """Return a caveat about tests over the clients of one seed; empty for other tests."""
    tested = [pair for pair in comparison.pairs if pair.p is not None]
    if not tested or any(pair.over == "seeds" for pair in tested):
        return ""
    return "With one seed this holds for these clients after this training; only more seeds show whether it repeats."


def _listed(rows: tuple[Row, ...]) -> str:
    if len(rows) > NAMED:
        return f"{len(rows)} rows"
    return "; ".join(row.label for row in rows)
