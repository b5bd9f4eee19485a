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
from fedloom.messages import Message
from fedloom.privacy.settings import SecureAggregation
from fedloom.security.masks import Integers, decode, encode, integer_type
from fedloom.security.sum_session import default_degree, default_threshold

STATISTIC_BOUND = 1e9
"""Largest magnitude of a statistic: a count or a loss."""

MOST_CLIENTS = 1 << 16
"""Largest cohort whose sums of 16-bit parts fit into 32 bits."""

_PARTS = 4


@dataclass(frozen=True)
class SumVector:
    """Layout of one answer.

    Attributes
    ----------
    answer
        Class of the answer.
    fields
        The sum of each of its fields that is sent.
    shapes
        Trailing shape of each field.
    settings
        Bound and bits of updates.
    """

    answer: type[Message]
    fields: Mapping[str, Summed]
    shapes: Mapping[str, tuple[int, ...]]
    settings: SecureAggregation

    @cached_property
    def updates(self) -> tuple[str, ...]:
        """Names of the fields that are updates, in order."""
        return tuple(f.name for f in self.answer.fields() if f.name in self.fields and f.quantity not in STATISTICS)

    @cached_property
    def statistics(self) -> tuple[str, ...]:
        """Names of the fields that are statistics, in order."""
        return tuple(f.name for f in self.answer.fields() if f.name in self.fields and f.quantity in STATISTICS)

    @property
    def size(self) -> int:
        """Number of integers."""
        return self.nbytes * 8 // self.settings.bits

    @property
    def nbytes(self) -> int:
        """Bytes of the vector."""
        narrow, bits = self._size(self.updates), self.settings.bits
        return narrow * bits // 8 + self._size(self.statistics) * (_PARTS * 4 if bits == 32 else 8)

    def _size(self, names: tuple[str, ...]) -> int:
        return sum(math.prod(self.shapes[name]) for name in names)

    def check(self, values: Mapping[str, NDArray[np.float64]]) -> None:
        """Check that each value is finite, and within its bound.

        Raises
        ------
        DataError
            If one is not.
        """
        for names, bound in ((self.updates, self.settings.range), (self.statistics, STATISTIC_BOUND)):
            for name in names:
                largest = float(np.abs(values[name]).max(initial=0.0))
                if not largest <= bound:
                    hint = "; raise federation.secure_aggregation.range" if name in self.updates else ""
                    raise DataError(f"{name} has a value of magnitude {largest:g}, beyond {bound:g}{hint}")

    def encode(self, values: Mapping[str, NDArray[np.float64]], clients: int) -> Integers:
        """Return the values of one client as integers, for a sum over so many clients.

        Raises
        ------
        DataError
            If a value is not finite, or beyond its bound.
        """
        bits = self.settings.bits
        updates = encode(_joined(values, self.updates), self.settings.range, clients, bits)
        statistics = encode(_joined(values, self.statistics), STATISTIC_BOUND, clients, 64)
        if bits == 32:
            statistics = statistics.view("<u2").astype("<u4")
        return np.concatenate([updates, statistics])

    def decode(self, total: Integers, clients: int) -> Mapping[str, NDArray[np.float64]]:
        """Return the sums of the fields, ``clients`` as in :meth:`encode`."""
        bits, narrow = self.settings.bits, self._size(self.updates)
        wide = total[narrow:]
        if bits == 32:
            parts = wide.reshape(-1, _PARTS).astype("<u8")
            wide = (parts << (np.arange(_PARTS, dtype="<u8") * np.uint64(16))).sum(axis=1, dtype="<u8")
        flat = (decode(total[:narrow], self.settings.range, clients, bits), decode(wide, STATISTIC_BOUND, clients, 64))
        found: dict[str, NDArray[np.float64]] = {}
        for names, numbers in zip((self.updates, self.statistics), flat, strict=True):
            start = 0
            for name in names:
                shape = self.shapes[name]
                found[name] = numbers[start : start + math.prod(shape)].reshape(shape)
                start += math.prod(shape)
        return found

    def as_bytes(self, vector: Integers) -> Tensor:
        """Return a vector as a row of bytes, ``[1, nbytes]`` uint8."""
        return torch.from_numpy(vector.view(np.uint8)[None])

    def from_bytes(self, row: Tensor) -> Integers:
        """Return the vector of a row of bytes, ``[nbytes]`` or ``[1, nbytes]``."""
        return row.contiguous().numpy().reshape(-1).view(integer_type(self.settings.bits))


def _joined(values: Mapping[str, NDArray[np.float64]], names: tuple[str, ...]) -> NDArray[np.float64]:
    return np.concatenate([values[name].reshape(-1) for name in names]) if names else np.zeros(0)


def graph_of(settings: SecureAggregation, members: int) -> tuple[int, int]:
    """Return the neighbours and the threshold of a secure sum over so many clients.

    Where the settings name more neighbours than there are others, all others are neighbours, and the threshold is the
    default one.
    """
    if settings.neighbours is None or settings.neighbours >= members - 1:
        degree = min(default_degree(members), members - 1)
        return degree, default_threshold(degree)
    threshold = settings.threshold
    return settings.neighbours, default_threshold(settings.neighbours) if threshold is None else threshold
