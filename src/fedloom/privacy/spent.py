"""Total privacy cost for one example, over a client's private trainings and released descriptors.

The total is for replacing one training example of a client by another, the relation of descriptors. A training that
protects whole clients counts as one whose client is replaced, which covers every change of its examples. Sums and
descriptors compose by their mechanisms (:mod:`fedloom.privacy.accounting`); adding up ε would overstate the cost by
far.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from fedloom.privacy.accounting import Release, epsilon_of
from fedloom.privacy.gaussian_mechanism import MAX_DELTA, compose, gaussian_epsilon
from fedloom.privacy.settings import TrainingPrivacy


class CountedRelease(BaseModel):
    """Noisy sums of one kind: a :class:`~fedloom.privacy.accounting.Release`, and the number of times it was made."""

    model_config = ConfigDict(frozen=True, strict=True)

    rate: float = Field(gt=0, le=1)
    noise_multiplier: float = Field(gt=0, lt=1e15)
    sampling: Literal["poisson", "fixed", "all"]
    times: int = Field(gt=0, lt=2**63)


class TrainingCost(BaseModel):
    """Privacy cost of a training for a client that took part, as a run's ``summary.json`` claims it.

    Attributes
    ----------
    unit, neighbouring, epsilon, delta
        As in :class:`~fedloom.privacy.claim.Claim`.
    releases
        All noisy sums about the client, or about one of its examples; None if only ε and δ are known.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    unit: Literal["clients", "examples"]
    neighbouring: Literal["add-or-remove-one", "replace-one"]
    epsilon: float = Field(ge=0, lt=1e15)
    delta: float = Field(gt=0, le=MAX_DELTA)
    releases: list[CountedRelease] | None = None

    @classmethod
    def planned(cls, privacy: TrainingPrivacy, counts: Mapping[Release, int]) -> Self:
        """Return the cost of planned releases; its ε and δ are not used."""
        relation: Literal["add-or-remove-one", "replace-one"]
        relation = "replace-one" if privacy.sampling == "fixed" else "add-or-remove-one"
        releases = [CountedRelease.model_validate(each) for each in released(counts)]
        return cls(unit=privacy.of, neighbouring=relation, epsilon=0.0, delta=privacy.delta, releases=releases)

    @property
    def counts(self) -> Counter[Release]:
        """Releases by kind; empty if they are not known."""
        counter = Counter[Release]()
        for each in self.releases or ():
            rate = 1.0 if each.sampling == "all" else each.rate
            counter[Release(rate, each.noise_multiplier, None, None, each.sampling)] += each.times
        return counter

    @property
    def for_replacing(self) -> tuple[float, float]:
        """Claimed (ε, δ) for replacing one unit: removing it and adding another costs (2ε, (1 + e^ε) δ)."""
        if self.neighbouring == "replace-one":
            return self.epsilon, self.delta
        return 2 * self.epsilon, (1 + math.exp(min(self.epsilon, 700.0))) * self.delta


def released(counts: Mapping[Release, int]) -> list[dict[str, Any]]:
    """Return releases that reveal something as objects of ``summary.json``, without their numbers of units."""
    counter: Counter[Release] = Counter()
    for release, count in counts.items():
        if count and not math.isinf(release.noise_multiplier):
            counter[replace(release, population=None, cohort=None)] += count
    return [
        {"rate": r.rate, "noise_multiplier": r.noise_multiplier, "sampling": r.sampling, "times": n}
        for r, n in sorted(counter.items(), key=repr)
    ]


@dataclass(frozen=True)
class Total:
    """Total (ε, δ) of all counted releases, for replacing one training example.

    Attributes
    ----------
    is_basic
        True if the ε and δ of a training were added up, because its mechanism is not known.
    """

    epsilon: float
    delta: float
    is_basic: bool


@dataclass(frozen=True)
class Spent:
    """Releases about the examples of one client.

    Attributes
    ----------
    descriptors
        Noise multiplier of each released descriptor, for replacing one example.
    trainings
        Trainings that the client took part in.
    """

    descriptors: tuple[float, ...] = ()
    trainings: tuple[TrainingCost, ...] = ()

    def total(self, delta: float) -> Total:
        """Return the total at δ; a training with known ε and δ only adds these to the total.

        Raise ExperimentError if samples must be accounted for and ``dp-accounting`` is not installed.
        """
        multiplier = compose(self.descriptors)
        counts = _sum(training.counts for training in self.trainings)
        epsilon = _of_mechanisms(counts, multiplier, delta)
        claims = [training.for_replacing for training in self.trainings if training.releases is None]
        delta_used = delta if counts or self.descriptors else 0.0
        return Total(epsilon + sum(e for e, _ in claims), delta_used + sum(d for _, d in claims), bool(claims))


def _of_mechanisms(counts: Counter[Release], multiplier: float, delta: float) -> float:
    """Return the ε at δ of sums, and of descriptors of this noise multiplier together, for replacing one example.

    Samples of a fixed size end the amplification of Poisson samples in one account. The two kinds also cost at most the
    sum of what each costs at δ/2; the smaller one counts.
    """
    if not counts:
        return 0.0 if math.isinf(multiplier) else gaussian_epsilon(multiplier, delta)
    fixed = Counter({release: times for release, times in counts.items() if release.sampling == "fixed"})
    account = counts.copy()
    if not math.isinf(multiplier):
        # Sums count half of their noise where a term is replaced; the noise of descriptors is for replacing already.
        account[Release(1.0, 2 * multiplier, None, None, "fixed" if fixed else "all")] += 1
    together = epsilon_of(account, delta, replacing=True)
    if not fixed or fixed == counts:
        return together
    return min(
        together, _of_mechanisms(fixed, math.inf, delta / 2) + _of_mechanisms(counts - fixed, multiplier, delta / 2)
    )


def _sum(each: Iterable[Counter[Release]]) -> Counter[Release]:
    total = Counter[Release]()
    for counts in each:
        total.update(counts)
    return total


@dataclass(frozen=True)
class PrivacyGuarantee:
    """(ε, δ)-differential privacy of one answer, towards anyone who reads it.

    Attributes
    ----------
    epsilon, delta
        Privacy parameters of this answer; each further answer costs as much again.
    mechanism
        Gaussian noise on a mean over all of the client's training examples.
    neighbours
        Neighbouring data sets: of equal size, differing in one example.
    clip, noise_multiplier, examples
        C, z and n: the noise of each coordinate has deviation z·2C/n.
    requests, trainings, total_epsilon, total_delta
        Numbers of requests, including this one, and of trainings in the client's ledger; their total ε; and the δ at
        which that total holds. None without a ledger.
    """

    epsilon: float
    delta: float
    clip: float
    noise_multiplier: float
    examples: int
    mechanism: str = "gaussian"
    neighbours: str = "replace one"
    requests: int | None = None
    trainings: int | None = None
    total_epsilon: float | None = None
    total_delta: float | None = None
