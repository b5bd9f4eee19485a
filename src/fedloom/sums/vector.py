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
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.algorithms.sums import STATISTICS, Summed, learned_fields, reported_fields
from fedloom.core.memory import large_array
from fedloom.errors import DataError, ExperimentError
from fedloom.federation.private_sums import BIT, Values, noisy_names
from fedloom.messages import Message, Quantity
from fedloom.privacy.clipped_sum import ClippedSum
from fedloom.privacy.distributed import distributed_multiplier
from fedloom.privacy.noise import NoiseSource
from fedloom.privacy.settings import SecureAggregation
from fedloom.sums.masks import Bits, Integers, from_integers, integer_type, scale, to_integers
from fedloom.sums.session import default_degree, default_threshold

STATISTIC_BOUND = 1e9
"""Largest magnitude of a statistic: a count, a loss, or another number."""

METRIC_BOUND = 1e12
"""Largest magnitude of a sum over the examples of an evaluation."""

MOST_MEMBERS = 1 << 16
"""Largest number of members whose sums of 16-bit parts fit into 32 bits."""

TAIL = 14.0
"""Standard deviations of a client's noise for which there is room beside its update: a sum wraps with a probability
below 10⁻⁴³ per coordinate."""

FINEST = 2.0**40
"""Largest standard deviation of a client's noise in steps; finer steps do not improve privacy."""

_PARTS = 4

Weights: TypeAlias = Mapping[str, float]
_ALIKE: Weights = MappingProxyType({})

_BLOCK = 1 << 20
"""Values that are converted at a time."""


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

    def check(self, values: Values) -> None:
        """Check that each value is finite, and within its bound.

        Raise DataError if one is not. The message is sent to the aggregator, so the value is only in the error's cause.
        """
        for name in (*self.updates, *self.statistics):
            value, bound = values[name], self.bound(name)
            largest = max(float(value.max(initial=0)), -float(value.min(initial=0)))  # abs would copy it
            if not math.isfinite(largest):
                raise DataError(f"{name} is not finite")
            if largest > bound:
                hint = "; raise federation.secure_aggregation.range" if name in self.updates else ""
                cause = DataError(f"the largest has magnitude {largest:g}")
                raise DataError(f"{name} has a value beyond {bound:g}{hint}") from cause

    def encode(self, values: Values, clients: int, weights: Weights = _ALIKE) -> Integers:
        """Return the weighted values of one client as integers, for a sum over this number of clients.

        Fields without a weight count once. Raise DataError if a value is not finite, or beyond its bound.
        """
        integers, end = np.empty(self.size, integer_type(self.bits)), 0
        for name in (*self.updates, *self.statistics):
            flat, bits = values[name].reshape(-1), self.bits if name in self.updates else 64
            for start in range(0, len(flat), _BLOCK):
                block = np.multiply(flat[start : start + _BLOCK], weights.get(name, 1.0), dtype=np.float64)
                part = to_integers(block, self.bound(name), clients, bits)
                part = part if bits == self.bits else part.view("<u2").astype("<u4")
                integers[end : (end := end + len(part))] = part
        return integers

    def decode(self, total: Integers, clients: int, weights: Weights = _ALIKE, dtype: Any = np.float64) -> Values:
        """Return the sums of the fields, times weights; ``clients`` as in :meth:`encode`, ``dtype`` that of updates."""
        sums: dict[str, NDArray[Any]] = {}
        for name in (*self.updates, *self.statistics):
            count, bits = math.prod(self.shapes[name]), self.bits
            if name in self.statistics and bits == 32:
                count, bits = _PARTS * count, 64
            part, total = total[:count], total[count:]
            if bits != self.bits:
                shifts = np.arange(_PARTS, dtype="<u8") * np.uint64(16)
                part = (part.reshape(-1, _PARTS).astype("<u8") << shifts).sum(axis=1, dtype="<u8")
            values = large_array(len(part), np.float64 if name in self.statistics else dtype)
            for start in range(0, len(part), _BLOCK):
                block = from_integers(part[start : start + _BLOCK], self.bound(name), clients, bits)
                values[start : start + _BLOCK] = block * weights.get(name, 1.0)
            sums[name] = values.reshape(self.shapes[name])
        return sums

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


@dataclass(frozen=True)
class PrivateVector(SumVector):
    """Layout of a clipped answer."""

    rule: ClippedSum
    """Clipping and noise of the sum."""
    members: int
    """Number of clients whose answers may be in the sum."""
    shares: int = 0
    """Least number of clients that add their share of the noise; 0 if the aggregator adds it."""

    @classmethod
    def create(
        cls,
        answer: type[Message],
        fields: Mapping[str, Summed],
        shapes: Mapping[str, tuple[int, ...]],
        settings: SecureAggregation,
        rule: ClippedSum,
        members: int,
        shares: int,
    ) -> PrivateVector:
        """Return the layout, with a place for the bit of adaptive clipping.

        Raise ExperimentError if the steps of the integers are too coarse for the noise.
        """
        bit = {} if rule.count_noise is None else {BIT: (1,)}
        vector = cls(answer, fields, {**shapes, **bit}, settings, rule, members, shares)
        vector.check_steps()
        return vector

    @cached_property
    def updates(self) -> tuple[str, ...]:
        """Names of the fields that are clipped and get noise, in order."""
        return noisy_names(self.answer, self.fields, self.rule)

    @cached_property
    def learned(self) -> tuple[str, ...]:
        """Names of the fields that are clipped, in order."""
        return learned_fields(self.answer, self.fields)

    @cached_property
    def statistics(self) -> tuple[str, ...]:
        """Names of the fields without noise, in order."""
        return reported_fields(self.answer, self.fields)

    @property
    def dimension(self) -> int:
        """Number of coordinates with noise."""
        return self._count(self.updates)

    @cached_property
    def _update_bound(self) -> float:
        if not self.shares:
            return self.rule.norm
        share = self.rule.deviation() / math.sqrt(self.shares)
        coarsest = 2.0 ** (self.bits - 1) / (self.members * FINEST / share)
        return max(self.rule.norm + TAIL * share, coarsest)

    def bound(self, name: str) -> float:
        """Return the largest magnitude of a field's values, with room for a client's noise."""
        return self._update_bound if name in self.updates else super().bound(name)

    @cached_property
    def step(self) -> float:
        """Step of the integers of an update."""
        return 1 / scale(self._update_bound, self.members, self.bits)

    @property
    def deviation(self) -> float:
        """Standard deviation of the noise on each coordinate of the sum, if as few clients as possible share it."""
        return self.rule.deviation(self.step, self.dimension)

    @property
    def share(self) -> float:
        """Standard deviation of a client's noise; 0 if the aggregator adds it."""
        return self.deviation / math.sqrt(self.shares) if self.shares else 0.0

    def check_steps(self) -> None:
        """Raise ExperimentError if steps are so coarse that rounding costs more than a tenth of the noise, or of z."""
        z = self.rule.noise_multiplier
        fine = self.deviation <= 1.1 * self.rule.deviation()
        if fine and self.shares:
            exact = distributed_multiplier(self.share, self.shares, self.rule.norm, self.step, self.dimension)
            fine = exact >= z * (1 - 1e-9)
        if not fine:
            raise ExperimentError(
                f"federation.secure_aggregation.bits is {self.settings.bits}, too few for private sums of "
                f"{self.dimension} coordinates over {self.members} clients; set it to 64.",
                key="federation.secure_aggregation.bits",
                found=self.settings.bits,
            )

    def noisy(self, values: Values, source: NoiseSource) -> Integers:
        """Return clipped values as integers, with the client's share of the noise if it has one."""
        integers = self.encode(values, self.members)
        if self.shares:
            noise = source.discrete_gaussian(self.dimension, self.share / self.step)
            integers[: self.dimension] += noise.astype("<i8").view("<u8").astype(integers.dtype)  # modulo 2^bits
        return integers
