"""Vector of integers of a clipped answer, to which a client can add its share of the noise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from fedloom.algorithms.sums import Summed, learned_fields, reported_fields
from fedloom.errors import ExperimentError
from fedloom.federation.clipping import BIT, Values, noisy_names
from fedloom.messages import Message
from fedloom.privacy.clipped_sum import ClippedSum
from fedloom.privacy.distributed import distributed_multiplier
from fedloom.privacy.noise import NoiseSource
from fedloom.privacy.settings import SecureAggregation
from fedloom.security.masks import Integers, scale
from fedloom.sums.vector import SumVector

TAIL = 14.0
"""Standard deviations of a client's noise for which there is room beside its update: a sum wraps with a probability
below 10⁻⁴³ per coordinate."""

FINEST = 2.0**40
"""Largest standard deviation of a client's noise in steps; finer steps do not improve privacy."""


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
    def of(
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
