"""Gaussian and discrete Gaussian noise against exact probabilities, and the arithmetic of noise in shares."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch
from scipy import stats

from fedloom.errors import ExperimentError
from fedloom.privacy.adaptive_clip import default_count_noise, next_clip, update_multiplier
from fedloom.privacy.distributed import distributed_multiplier, rounded_sensitivity
from fedloom.privacy.gaussian_mechanism import compose
from fedloom.privacy.noise import NoiseSource

SIGNIFICANT = 1e-6
"""p-value below which a test of fixed seeds fails."""


def exact(deviation: float, values: np.ndarray) -> np.ndarray:
    """Return P(x) ∝ exp(-x²/2σ²) over all integers, by summation."""
    far = np.arange(-int(12 * deviation) - 12, int(12 * deviation) + 13)
    total = np.exp(-(far.astype(float) ** 2) / (2 * deviation**2)).sum()
    found: np.ndarray = np.exp(-(values.astype(float) ** 2) / (2 * deviation**2)) / total
    return found


@pytest.mark.parametrize("deviation", [0.3, 0.5, 1.0, 2.5, 9.99])
def test_the_discrete_gaussian_has_its_exact_probabilities(deviation: float) -> None:
    drawn = NoiseSource.seeded(b"chi-square").discrete_gaussian(200_000, deviation)
    values = np.arange(drawn.min() - 1, drawn.max() + 2)
    expected = exact(deviation, values) * len(drawn)
    counts = np.array([(drawn == value).sum() for value in values])
    common = expected > 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], len(drawn) - expected[common].sum())
    if wanted[-1] < 5:
        observed, wanted = observed[:-1], wanted[:-1] * observed[:-1].sum() / wanted[:-1].sum()
    assert stats.chisquare(observed, wanted).pvalue > SIGNIFICANT


@pytest.mark.parametrize("deviation", [1e3, 1e6, 2.0**43])
def test_a_wide_discrete_gaussian_is_normal(deviation: float) -> None:
    drawn = NoiseSource.seeded(b"wide").discrete_gaussian(100_000, deviation)
    assert drawn.dtype == np.int64
    assert stats.kstest(drawn / deviation, "norm").pvalue > SIGNIFICANT
    assert np.std(drawn) == pytest.approx(deviation, rel=0.02)
    assert 0.48 < (drawn % 2).mean() < 0.52  # the last bits are not those of a rounded product


def test_the_gaussian_is_normal() -> None:
    drawn = NoiseSource.seeded(b"normal").gaussian(100_001, 3.0)
    assert len(drawn) == 100_001
    assert stats.kstest(drawn / 3.0, "norm").pvalue > SIGNIFICANT
    assert stats.kurtosis(drawn) == pytest.approx(0, abs=0.1)
    assert abs(np.corrcoef(drawn[:50_000], drawn[50_000:100_000])[0, 1]) < 0.03


def test_secret_noise_never_repeats_and_seeded_noise_does() -> None:
    def first(source: NoiseSource) -> list[float]:
        return source.gaussian(4).tolist()

    assert first(NoiseSource.secret()) != first(NoiseSource.secret())
    assert first(NoiseSource.seeded(b"1")) == first(NoiseSource.seeded(b"1")) != first(NoiseSource.seeded(b"2"))
    source = NoiseSource.seeded(b"1")
    assert first(source) != first(source)


def test_noise_does_not_depend_on_global_generators() -> None:
    torch.manual_seed(0)
    before = NoiseSource.secret().gaussian(4).tolist()
    torch.manual_seed(0)
    assert NoiseSource.secret().gaussian(4).tolist() != before


def test_uniform_numbers_are_never_zero() -> None:
    drawn = NoiseSource.seeded(b"u").uniform(100_000)
    assert 0 < drawn.min() < drawn.max() <= 1
    assert stats.kstest(drawn, "uniform").pvalue > SIGNIFICANT


@pytest.mark.parametrize("deviation", [1.5, 1e6])
def test_a_hundred_thousand_draws_are_fast(deviation: float) -> None:
    source = NoiseSource.secret()
    source.discrete_gaussian(10, deviation)
    times = []
    for _ in range(5):
        took = time.process_time()
        source.discrete_gaussian(100_000, deviation)
        times.append(time.process_time() - took)
    assert min(times) < 0.1


def test_invalid_noise_is_rejected() -> None:
    with pytest.raises(ValueError, match="32"):
        NoiseSource(b"short")
    for deviation in (0.0, -1.0, 2.0**50):
        with pytest.raises(ValueError, match="σ"):
            NoiseSource.secret().discrete_gaussian(1, deviation)
    assert len(NoiseSource.secret().discrete_gaussian(0, 1.0)) == 0
    assert len(NoiseSource.secret().gaussian(0)) == 0


# --- noise in shares --------------------------------------------------------------------------------------------------


def test_the_sum_of_noise_shares_has_the_noise_of_the_sum() -> None:
    """20 shares of discrete Gaussian noise, of which 15 are needed: the sum is at least as noisy as claimed."""
    clip, step, z = 1.0, 1e-4, 2.0
    share = z * clip / math.sqrt(15)
    source = NoiseSource.seeded(b"shares")
    total = sum(source.discrete_gaussian(50_000, share / step) for _ in range(15)) * step
    assert np.std(total) == pytest.approx(z * clip, rel=0.02)


def test_on_a_fine_grid_shares_have_the_multiplier_of_the_sum() -> None:
    for m in (2, 15, 1000):
        share = 1.7 * 0.5 / math.sqrt(m)
        assert distributed_multiplier(share, m, 0.5, 1e-9, 100) == pytest.approx(1.7, rel=1e-6)


def test_the_multiplier_of_shares_accounts_for_rounding_collusion_and_coarse_grids() -> None:
    share = 2.0 / math.sqrt(10)
    rounded = distributed_multiplier(share, 10, 1.0, 0.01, 10_000)
    assert rounded == pytest.approx(2.0 / (1 + 0.01 * 100 / 2))
    assert distributed_multiplier(share, 10, 1.0, 1e-9, 100, colluding=5) == pytest.approx(2.0 / math.sqrt(2))
    # τ = 10 Σ exp(-2π² (σ/γ)² k/(k+1)), by hand for two shares of half a step
    coarse = distributed_multiplier(0.5, 2, 1.0, 1.0, 1)
    tau = 10 * math.exp(-2 * math.pi**2 * 0.25 / 2)
    reported = (1 + 0.5) / (math.sqrt(2) * 0.5)
    assert 1 / coarse == pytest.approx(min(math.sqrt(reported**2 + tau / 2), reported + tau))
    assert coarse < 1 / reported
    with pytest.raises(ValueError, match="no noise"):
        distributed_multiplier(share, 10, 1.0, 0.01, 100, colluding=10)


def test_rounding_keeps_updates_within_the_stated_norm() -> None:
    random = np.random.default_rng(0)
    for dimension in (1, 30, 1000):
        for step in (1e-3, 0.3):
            x = random.normal(size=dimension)
            x *= 2.0 / np.linalg.norm(x)
            rounded = np.round(x / step) * step
            assert np.linalg.norm(rounded) <= rounded_sensitivity(2.0, step, dimension) + 1e-12


# --- adaptive clipping ------------------------------------------------------------------------------------------------


def test_clipping_bits_and_updates_together_reveal_what_the_multiplier_states() -> None:
    """The bits have sensitivity ½ and hence the multiplier 2σ_b."""
    for z, count_noise in ((1.0, 5.0), (0.3, 0.2), (8.0, 4.1)):
        assert compose([update_multiplier(z, count_noise), 2 * count_noise]) == pytest.approx(z)
    with pytest.raises(ExperimentError) as refused:
        update_multiplier(1.0, 0.5)
    assert refused.value.key == "federation.privacy.adaptive_clip.count_noise"
    assert default_count_noise(100) == 5


def test_the_clipping_norm_moves_to_the_quantile() -> None:
    norms = np.random.default_rng(0).lognormal(1.0, 0.7, 1000)
    clip = 0.1
    for _ in range(300):
        clip = next_clip(clip, float((norms <= clip).sum()) - 500, 1000, 0.3, 0.2)
    assert clip == pytest.approx(np.quantile(norms, 0.3), rel=0.01)
    assert next_clip(1.0, 1e9, 10, 0.5, 0.2) == pytest.approx(math.exp(-0.1))  # noise can change it only a little
