"""Layout of a summed answer as one vector of integers, which secure aggregation masks and adds.

Updates take one integer of 32 or 64 bits each, of the bound and step of ``federation.secure_aggregation``. Statistics
(counts, losses) keep 64 bits: in a vector of 32 they take four integers of 16 bits each, whose sums over up to 65,536
clients do not wrap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.algorithms.sums import STATISTICS, Summed
from fedloom.errors import DataError
from fedloom.messages import Message, Quantity
from fedloom.privacy.settings import SecureAggregation
from fedloom.security.masks import Bits, Integers, from_integers, integer_type, to_integers
from fedloom.security.sum_session import default_degree, default_threshold

STATISTIC_BOUND = 1e9
"""Largest magnitude of a statistic: a count, a loss, or another number."""

METRIC_BOUND = 1e12
"""Largest magnitude of a sum over the examples of an evaluation."""

MOST_MEMBERS = 1 << 16
"""Largest number of members whose sums of 16-bit parts fit into 32 bits."""

_PARTS = 4


@dataclass(frozen=True)
class SumVector:
    """Layout of one answer."""

    answer: type[Message]
    fields: Mapping[str, Summed]
    """Sum of each field of the answer that is sent."""
    shapes: Mapping[str, tuple[int, ...]]
    """Trailing shape of each field."""
    settings: SecureAggregation
    """Bound and bits of updates."""

    @cached_property
    def updates(self) -> tuple[str, ...]:
        """Names of the fields that are updates, in order."""
        return tuple(f.name for f in self.answer.fields() if f.name in self.fields and f.quantity not in STATISTICS)

    @cached_property
    def statistics(self) -> tuple[str, ...]:
        """Names of the fields that are statistics, in order."""
        return tuple(f.name for f in self.answer.fields() if f.name in self.fields and f.quantity in STATISTICS)

    @property
    def bits(self) -> Bits:
        """Bits of an integer: those of the settings, or 64 if there are only statistics."""
        return self.settings.bits if self.updates else 64

    @property
    def size(self) -> int:
        """Number of integers."""
        return self._count(self.updates) + self._count(self.statistics) * (_PARTS if self.bits == 32 else 1)

    @property
    def nbytes(self) -> int:
        """Bytes of the vector."""
        return self.size * self.bits // 8

    def _count(self, names: tuple[str, ...]) -> int:
        return sum(math.prod(self.shapes[name]) for name in names)

    def bound(self, name: str) -> float:
        """Return the largest magnitude of a field's values."""
        if name in self.updates:
            return self.settings.range
        (quantity,) = (field.quantity for field in self.answer.fields() if field.name == name)
        return METRIC_BOUND if quantity is Quantity.METRICS else STATISTIC_BOUND

    def check(self, values: Mapping[str, NDArray[np.float64]]) -> None:
        """Check that each value is finite, and within its bound.

        Raise DataError if one is not. The message is sent to the aggregator, so the value is only in the error's cause.
        """
        for name in (*self.updates, *self.statistics):
            largest, bound = float(np.abs(values[name]).max(initial=0.0)), self.bound(name)
            if not math.isfinite(largest):
                raise DataError(f"{name} is not finite")
            if largest > bound:
                hint = "; raise federation.secure_aggregation.range" if name in self.updates else ""
                value = DataError(f"the largest has magnitude {largest:g}")
                raise DataError(f"{name} has a value beyond {bound:g}{hint}") from value

    def encode(self, values: Mapping[str, NDArray[np.float64]], clients: int) -> Integers:
        """Return the values of one client as integers, for a sum over this number of clients.

        Raise DataError if a value is not finite, or beyond its bound.
        """
        parts = [to_integers(values[name].reshape(-1), self.bound(name), clients, self.bits) for name in self.updates]
        for name in self.statistics:
            wide = to_integers(values[name].reshape(-1), self.bound(name), clients, 64)
            parts.append(wide if self.bits == 64 else wide.view("<u2").astype("<u4"))
        return np.concatenate(parts)

    def decode(self, total: Integers, clients: int) -> Mapping[str, NDArray[np.float64]]:
        """Return the sums of the fields, ``clients`` as in :meth:`encode`."""
        found: dict[str, NDArray[np.float64]] = {}
        for name in (*self.updates, *self.statistics):
            count, bits = math.prod(self.shapes[name]), self.bits
            if name in self.statistics and bits == 32:
                count, bits = _PARTS * count, 64
            part, total = total[:count], total[count:]
            if bits != self.bits:
                shifts = np.arange(_PARTS, dtype="<u8") * np.uint64(16)
                part = (part.reshape(-1, _PARTS).astype("<u8") << shifts).sum(axis=1, dtype="<u8")
            found[name] = from_integers(part, self.bound(name), clients, bits).reshape(self.shapes[name])
        return found

    def as_bytes(self, vector: Integers) -> Tensor:
        """Return a vector as a row of bytes, ``[1, nbytes]`` uint8."""
        return torch.from_numpy(vector.view(np.uint8)[None])

    def from_bytes(self, row: Tensor) -> Integers:
        """Return the vector of a row of bytes, ``[nbytes]`` or ``[1, nbytes]``."""
        return row.contiguous().numpy().reshape(-1).view(integer_type(self.bits))


def weaker_graph(settings: SecureAggregation, members: int) -> str | None:
    """Return how a secure sum with this number of members protects less than by default; None if it does not."""
    degree, threshold = graph_of(settings, members)
    default = min(default_degree(members), members - 1)
    if degree >= default and threshold >= default_threshold(degree):
        return None
    return (
        f"the experiment has {degree} neighbours and threshold {threshold} for a secure sum of {members} clients, less "
        f"than the default of {default} and {default_threshold(default)}: leave out "
        "federation.secure_aggregation.neighbours"
    )


def graph_of(settings: SecureAggregation, members: int) -> tuple[int, int]:
    """Return the number of neighbours and the threshold of a secure sum with this number of members.

    If the settings name more neighbours than there are other members, all others are neighbours, and the threshold is
    the default.
    """
    if settings.neighbours is None or settings.neighbours >= members - 1:
        degree = min(default_degree(members), members - 1)
        return degree, default_threshold(degree)
    threshold = settings.threshold
    return settings.neighbours, default_threshold(settings.neighbours) if threshold is None else threshold
