"""Answers that a server uses only as weighted sums over the cohort (:meth:`Algorithm.sums`).

Such a method needs no client's own answer, so its updates can be summed under secure aggregation, or clipped and made
private, without any code of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from fedloom.messages import Message, Quantity, Weighting

STATISTICS = frozenset({Quantity.COUNT, Quantity.LOSS, Quantity.OTHER, Quantity.METRICS})
"""Quantities that describe a client's work; all others are updates of what the federation learns."""


@dataclass(frozen=True)
class Summed:
    """Sum of one field of an answer, the only use that the server makes of it.

    Attributes
    ----------
    weighting
        Weights of the clients: their numbers of training examples, or 1 each.
    since
        Field of the request that the values are subtracted from, so that changes are summed; None to sum the values.
    learned
        True for a statistic from which the server learns, which must therefore be as private as an update.
    """

    weighting: Weighting = "uniform"
    since: str | None = None
    learned: bool = False

    def weight(self, examples: int) -> float:
        """Return the weight of a client with this many training examples."""
        return float(examples) if self.weighting == "examples" else 1.0


SummedFields: TypeAlias = Mapping[type[Message], Mapping[str, Summed]]
"""Sums of the fields that are sent, by class of answer."""

UNIFORM = Summed()


def learned_fields(answer: type[Message], fields: Mapping[str, Summed]) -> tuple[str, ...]:
    """Return the names of the summed fields from which the server learns, in order: updates, and some statistics."""
    return tuple(
        f.name for f in answer.fields() if f.name in fields and (f.quantity not in STATISTICS or fields[f.name].learned)
    )


def reported_fields(answer: type[Message], fields: Mapping[str, Summed]) -> tuple[str, ...]:
    """Return the names of the summed fields that the server only reports, in order."""
    learned = learned_fields(answer, fields)
    return tuple(f.name for f in answer.fields() if f.name in fields and f.name not in learned)


def sums_of(answer: type[Message], *, excluded: Collection[str] = (), **summed: Summed) -> SummedFields:
    """Return the sums of the fields of one answer: plain sums, except for the ``summed`` fields.

    Fields named in ``excluded`` are not sent at all.
    """
    names = [field.name for field in answer.fields() if field.name not in excluded]
    return {answer: {name: summed.get(name, UNIFORM) for name in names}}
