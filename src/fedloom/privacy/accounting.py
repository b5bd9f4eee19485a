"""Privacy accounting of training: the ε of noisy sums over a random part of the clients, or of a client's examples.

A :class:`Release` is one sum of terms clipped to the norm C, with noise of standard deviation z · C on each coordinate.
Sums compose adaptively. Their privacy loss depends on how the terms of each were drawn:

``poisson``
    Each unit takes part independently with probability q. Privacy loss distributions, for adding or removing one unit
    (Koskela, Jälkö, Honkela 2020, arXiv 1906.03049; Doroshenko, Ghazi, Kamath, Kumar, Manurangsi 2022, arXiv
    2207.04380, for their discretization), by the package ``dp-accounting``.
``fixed``
    A number of units without replacement. Rényi divergences, for replacing one unit (Wang, Balle, Kasiviswanathan 2019,
    arXiv 1808.00087, Theorem 27), by the same package. Replacing a term changes a sum by up to 2C, so the noise
    multiplier counts half.
``all``
    Every unit, or a part whose choice an observer knows. The Gaussian mechanism, exactly
    (:mod:`fedloom.privacy.gaussian_mechanism`).

Every answer is an upper bound. The package is an optional dependency that only sampled releases need.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from fedloom.errors import ExperimentError
from fedloom.privacy.gaussian_mechanism import compose, gaussian_epsilon

Sampling = Literal["poisson", "fixed", "all"]

EVERYONE = ""
"""Name under which sums over many clients are counted; they count for every client."""
PRECISION = 1e-3
"""Relative error of a noise multiplier found by search; it is never too small."""
MOST_ROUNDS = 10**7
"""Number of rounds at which a search stops."""

_ORDERS = (1.1, 1.25, 1.5, 1.75, *(1 + i / 4 for i in range(4, 12)), *range(4, 65), 96, 128, 256, 512)
_HUGE = 200.0
"""ε above which the bound by Rényi divergences is good enough."""
_LEAST = 1 / 32
"""Noise multiplier at which a search stops: ε is above 500 there."""
_MOST_CELLS = 2**18
"""Approximate number of cells of the loss distribution of one sum."""
_DISTINCT = 12
"""Number of different sampling rates that are composed one by one; beyond it, rates are rounded up."""


@dataclass(frozen=True)
class Release:
    """One noisy sum over a sample of a population of clients, or of a client's examples.

    Attributes
    ----------
    rate
        Probability q with which a unit takes part; 1 for ``all``.
    noise_multiplier
        Standard deviation of the noise on a coordinate divided by the clipping norm; 0 without noise.
    population, cohort
        Numbers of units to draw from, and expected (``poisson``) or fixed number of those drawn; None if unknown.
    sampling
        How the units were drawn.
    """

    rate: float
    noise_multiplier: float
    population: int | None
    cohort: int | None
    sampling: Sampling

    def __post_init__(self) -> None:
        """Raise ValueError for numbers out of range."""
        if not 0 < self.rate <= 1:
            raise ValueError(f"the sampling rate must be above 0 and at most 1 (got {self.rate})")
        if not self.noise_multiplier >= 0:
            raise ValueError(f"the noise multiplier must not be negative (got {self.noise_multiplier})")
        if self.sampling == "all" and self.rate != 1:
            raise ValueError(f"a sum over all units has rate 1 (got {self.rate})")

    def without_sampling(self) -> Release:
        """Return the release toward an observer who knows which units take part: sampling hides nothing from it.

        Neighbouring data sets stay the same: with a ``fixed`` number of units, one unit is still replaced.
        """
        sampling: Sampling = "fixed" if self.sampling == "fixed" else "all"
        return replace(self, rate=1.0, cohort=self.population, sampling=sampling)

    def beside(self) -> Release:
        """Return the release toward a unit that was not drawn itself, and knows that: the others were more likely.

        Of a ``fixed`` number of units, m of the other n − 1 were drawn. Independent draws tell it nothing.
        """
        if self.sampling != "fixed" or self.population is None or self.cohort is None:
            return self
        others = max(self.population - 1, 1)
        return replace(self, rate=min(1.0, self.cohort / others), population=others, cohort=min(self.cohort, others))


def sampled(sampling: Literal["poisson", "fixed"], population: int, cohort: int, noise_multiplier: float) -> Release:
    """Return the release of a sum over an expected or fixed number of units; ``all`` if that is the population."""
    if cohort >= population:
        return Release(1.0, noise_multiplier, population, population, "all")
    return Release(cohort / population, noise_multiplier, population, cohort, sampling)


def check_accountant() -> None:
    """Raise ExperimentError if the package that accounts for samples is not installed."""
    _package()


def gaussian_release(noise_multiplier: float) -> Release:
    """Return the release of a Gaussian mechanism on all data, as of a client's descriptor."""
    return Release(1.0, noise_multiplier, None, None, "all")


def neighbouring_relation(counts: Mapping[Release, int]) -> Literal["add-or-remove-one", "replace-one"]:
    """Return the relation between neighbouring data sets for which these releases are accounted."""
    is_fixed = any(release.sampling == "fixed" and count for release, count in counts.items())
    return "replace-one" if is_fixed else "add-or-remove-one"


def epsilon_of(counts: Mapping[Release, int], delta: float, *, replacing: bool = False) -> float:
    """Return the ε at δ in (0, 1) of all these releases together, each this many times; inf if one has no noise.

    If one release has sampling ``fixed``, all others are also accounted for replacing one unit, without amplification.

    Parameters
    ----------
    replacing
        Account for replacing one unit, whatever the sampling. A sum over a Poisson sample is then dominated by the pair
        (1 − q) N(0, z²) + q N(1, z²) and (1 − q) N(0, z²) + q N(−1, z²): among clipped terms x, x', tests distinguish
        N(x) from a mixture of N(0) and N(x') best for x = −x', where one half-line is the best test against both.

    Raises
    ------
    ExperimentError
        If a sampled release needs the package ``dp-accounting``, which is not installed.
    """
    return _epsilon(_key(counts), delta, replacing)


def epsilon_bound(counts: Mapping[Release, int], delta: float) -> float:
    """Return an upper bound on :func:`epsilon_of`, found faster by Rényi divergences; raises the same errors."""
    key = _key(counts)
    exact = _without_sampling(key)
    if exact == 0 or _all_known(key):
        return _epsilon(key, delta, False)
    by_renyi, _ = _package().rdp.compute_epsilon(_ORDERS, _renyi(key), delta)
    return min(gaussian_epsilon(exact, delta), float(by_renyi))


def least_multiplier(epsilon: float, cost: Callable[[float], float]) -> float:
    """Return the least noise multiplier z with ``cost(z)`` ≤ ε; up to 0.1 % too large, never too small, 0 for ε = inf.

    ``cost`` returns the ε for a multiplier above 0; it decreases with z.
    """
    if math.isinf(epsilon) or cost(1.0) == 0:
        return 0.0
    low, high = _bracket(cost, epsilon)
    while high > low * (1 + PRECISION):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if cost(middle) <= epsilon else (middle, high)
    return high


def rounds_within(
    epsilon: float, delta: float, release: Release, spent: Mapping[Release, int] | None = None
) -> int | None:
    """Return how often a release fits into ε at δ, after those already ``spent``; None for more than ten million."""

    def fits(rounds: int) -> bool:
        counts = Counter(spent or {})
        counts[release] += rounds
        return epsilon_of(counts, delta) <= epsilon

    if not fits(0):
        return 0
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
        if low > MOST_ROUNDS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


_Counts = tuple[tuple[Release, int], ...]


def _key(counts: Mapping[Release, int]) -> _Counts:
    """Return counts of releases that reveal something; those that differ only in their numbers of units are merged."""
    total: Counter[Release] = Counter()
    for release, count in counts.items():
        if release.rate == 1:
            release = replace(release, sampling="all" if release.sampling == "poisson" else release.sampling)
        if not math.isinf(release.noise_multiplier):
            total[replace(release, population=None, cohort=None)] += count
    return tuple(sorted(((r, n) for r, n in total.items() if n), key=repr))


@lru_cache(maxsize=256)
def _epsilon(counts: _Counts, delta: float, replacing: bool) -> float:
    is_fixed = neighbouring_relation(dict(counts)) == "replace-one"
    exact = _without_sampling(counts, replacing=replacing)
    if exact == 0:
        return math.inf
    if _all_known(counts):
        return gaussian_epsilon(exact, delta)
    renyi = epsilon_bound(dict(counts), delta)
    if replacing and not is_fixed:  # more than for adding or removing one, which is at most ``renyi``
        epsilon = gaussian_epsilon(exact, delta)
        return (
            epsilon
            if renyi > _HUGE
            else min(epsilon, float(_loss(counts, replacing=True).get_epsilon_for_delta(delta)))
        )
    if is_fixed or renyi > _HUGE:
        return renyi
    return min(renyi, float(_loss(counts).get_epsilon_for_delta(delta)))


def _all_known(counts: _Counts) -> bool:
    return all(release.sampling == "all" for release, _ in counts)


def _without_sampling(counts: _Counts, *, replacing: bool = False) -> float:
    """Return the multiplier of one Gaussian mechanism that reveals as much as all releases would without sampling."""
    replaced = replacing or neighbouring_relation(dict(counts)) == "replace-one"
    zs = [release.noise_multiplier / (2 if replaced else 1) for release, _ in counts]
    if 0 in zs:
        return 0.0
    return compose(z / math.sqrt(count) for z, (_, count) in zip(zs, counts, strict=True))


def _renyi(counts: _Counts) -> Any:
    """Return the Rényi divergences of all releases at ``_ORDERS``."""
    replaced = neighbouring_relation(dict(counts)) == "replace-one"
    total: Any = 0.0
    for release, count in counts:
        if replaced:
            rate = release.rate if release.sampling == "fixed" else 1.0
            total = total + count * _renyi_of(release.noise_multiplier / 2, rate, "fixed")
        else:
            total = total + count * _renyi_of(release.noise_multiplier, release.rate, "poisson")
    return total


@lru_cache(maxsize=512)
def _renyi_of(z: float, rate: float, sampling: Literal["poisson", "fixed"]) -> Any:
    import numpy as np

    divergences = np.array(_ORDERS) / (2 * z * z)
    if rate == 1:
        return divergences
    package = _package()
    sum_event, relations = package.GaussianDpEvent(z), package.NeighboringRelation
    if sampling == "poisson":
        accountant = package.rdp.RdpAccountant(_ORDERS, relations.ADD_OR_REMOVE_ONE)
        accountant.compose(package.PoissonSampledDpEvent(rate, sum_event))
    else:
        size = 2**40  # only the ratio of the sizes counts
        accountant = package.rdp.RdpAccountant(_ORDERS, relations.REPLACE_ONE)
        accountant.compose(package.SampledWithoutReplacementDpEvent(size, math.ceil(rate * size), sum_event))
    return np.minimum(accountant.rdp, divergences)  # sampling never reveals more; the bound may


def _loss(counts: _Counts, *, replacing: bool = False) -> Any:
    """Return the distribution of the privacy loss of all releases, for adding or removing one unit, or replacing it."""
    merged_counts = _few({release: count for release, count in counts if release.sampling == "poisson"})
    effective_noise = [
        release.noise_multiplier / math.sqrt(count) for release, count in counts if release.sampling == "all"
    ]
    step = max(map(_step, merged_counts))
    if effective_noise:
        step = min(step, _largest_step(effective_noise := [compose(effective_noise)]))
    parts = [_composed(r.noise_multiplier, r.rate, step, count, replacing) for r, count in merged_counts.items()]
    parts += [_composed(z, 1.0, step, 1, replacing) for z in effective_noise]
    total = parts[0]
    for part in parts[1:]:
        total = total.compose(part)
    return total


def _few(counts: Mapping[Release, int]) -> dict[Release, int]:
    """Return releases of at most some dozen rates, by rounding rates up, more coarsely the more there are."""
    merged_counts, factor = Counter(counts), 1.005
    while len(merged_counts) > _DISTINCT:
        next_counts: Counter[Release] = Counter()
        for release, count in counts.items():
            rounded = math.exp(math.ceil(math.log(release.rate) / math.log(factor)) * math.log(factor))
            next_counts[replace(release, rate=min(1.0, max(release.rate, rounded)))] += count
        merged_counts, factor = next_counts, factor**2
        if factor > 4:
            break
    return dict(merged_counts)


def _step(release: Release) -> float:
    """Return the width of the cells of a loss distribution: a power of two, about a sixteenth of a release's loss.

    The loss of a sampled release has a standard deviation of about q √(e^(1/z²) − 1); rounding it to cells of width w
    makes the variance larger by at most w²/4. Cells are wider where a loss of ten standard deviations of the noise
    would need too many.
    """
    z = release.noise_multiplier
    spread = release.rate * math.sqrt(math.expm1(min(1 / z**2, 60.0)))
    longest = max(10 / z + 0.5 / z**2 + math.log(release.rate), 0.0)
    width = max(spread / 16, longest / _MOST_CELLS, 1e-10)
    return min(2.0 ** math.floor(math.log2(width)), _largest_step([z]))


def _largest_step(zs: list[float]) -> float:
    return min(2.0 ** math.floor(math.log2(1e-3 * max(1.0, z**-2))) for z in zs)


@lru_cache(maxsize=64)
def _composed(z: float, rate: float, step: float, count: int, replacing: bool) -> Any:
    one = _loss_of(z, rate, step, replacing)
    return one.self_compose(count) if count > 1 else one


@lru_cache(maxsize=64)
def _loss_of(z: float, rate: float, step: float, replacing: bool) -> Any:
    package = _package()
    relations = package.NeighboringRelation
    return package.pld.privacy_loss_distribution.from_gaussian_mechanism(
        standard_deviation=z,
        sampling_prob=rate,
        value_discretization_interval=step,
        neighboring_relation=relations.REPLACE_ONE if replacing else relations.ADD_OR_REMOVE_ONE,
    )


def _bracket(cost: Callable[[float], float], epsilon: float) -> tuple[float, float]:
    """Return multipliers z and 2z of which only the second costs at most ε."""
    z = 1.0
    while cost(z) > epsilon:
        z *= 2
    while z > _LEAST and cost(z / 2) <= epsilon:
        z /= 2
    return z / 2, z


def _package() -> Any:
    """Return the package ``dp_accounting``. Raise ExperimentError if it is not installed."""
    try:
        import dp_accounting
        import dp_accounting.pld.privacy_loss_distribution
        import dp_accounting.rdp
    except ImportError as error:
        raise ExperimentError(
            f"the ε of sampled clients or examples needs the package dp-accounting, which is not installed ({error})",
            hint="pip install 'fedloom[privacy]', where the experiment starts, its rounds are run, or a ledger is kept",
            key="federation.privacy",
        ) from None
    logging.getLogger("absl").setLevel(logging.ERROR)  # it warns of each order at which a series does not converge
    return dp_accounting
