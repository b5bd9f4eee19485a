"""Collaboration theory against simulation of the algorithm's updates, and against numerical optimization."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import wga_figures as figures
from bounds.collaboration import (
    bc_bound,
    bc_bound_pl,
    bc_step_size,
    descent,
    mean_estimation_loss,
    oracle_bound_pl,
    quadratic_losses,
    relative_bias,
    speedup,
    weighted_variance,
    wga_bound,
    wga_bound_pl,
    wga_floor,
)
from wga_figures import Setting, simulate

from fedloom.algorithms.collaboration import (
    CollaborationConstants,
    optimal_alpha,
    optimal_alpha_bc,
    optimal_alpha_oracle,
    optimal_beta,
    relative_bias_bc,
)

GRID = [i / 2000 for i in range(2001)]
QUICK = Setting(helpers=10, bias=1.0, noise=4.0, alpha=0.7, beta=0.02, step_size=0.05, steps=300, start=-2.0)


def exact_floor(s: Setting) -> float:
    return replace(s, steps=4000).exact()[-1]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("alpha", "beta", "growth"),
    [*((alpha, beta, 0.0) for alpha in (0.0, 0.7, 1.0) for beta in (None, 0.02, 0.3)), (0.7, 0.3, 3.0)],
)
def test_moments_on_a_quadratic_match_the_algorithms_updates(alpha: float, beta: float | None, growth: float) -> None:
    s = replace(QUICK, alpha=alpha, beta=beta, growth=growth)
    simulated = simulate(s, seed=1, runs=20_000)[::50]
    torch.testing.assert_close(simulated, torch.tensor(s.exact()[::50], dtype=torch.float64), rtol=0.05, atol=1e-3)


def test_bias_correction_converges_to_the_loss_without_bias_and_wga_to_its_square() -> None:
    bc = [exact_floor(replace(QUICK, bias=bias)) for bias in (0.0, 1.0, 10.0)]
    assert bc == pytest.approx([bc[0]] * 3, rel=1e-9)
    wga = [exact_floor(replace(QUICK, bias=bias, beta=None)) for bias in (0.0, 1.0, 2.0, 3.0)]
    above = [loss - wga[0] for loss in wga[1:]]
    assert above == pytest.approx([0.7**2 / 2 * bias**2 for bias in (1, 2, 3)])
    simulated = [float(simulate(replace(QUICK, bias=bias, steps=600))[-100:].mean()) for bias in (0.0, 10.0)]
    assert simulated[1] == pytest.approx(simulated[0], rel=0.02)


def test_bias_correction_gets_worse_before_it_gets_better() -> None:
    losses = replace(QUICK, bias=5.0, start=-0.5, steps=2000).exact()
    assert max(losses) > 4 * losses[0]
    assert losses[-1] < losses[0] / 2


def test_with_a_fixed_alpha_more_helpers_saturate() -> None:
    few, some, many = (exact_floor(replace(QUICK, helpers=n)) for n in (1, 10, 1000))
    assert few > 1.8 * some
    assert many > some / 3


@pytest.mark.parametrize("helpers", [1, 3, 10, 100])
def test_without_bias_the_best_weights_divide_the_variance_by_n_plus_one(helpers: int) -> None:
    p = CollaborationConstants(helpers, 0.0, 3.0)
    alpha = optimal_alpha(p, 0.1)
    assert alpha == pytest.approx(helpers / (helpers + 1))
    assert weighted_variance(alpha, 3.0, helpers) == pytest.approx(3.0 / (helpers + 1))
    s = Setting(helpers=helpers, bias=0.0, noise=3.0, alpha=alpha, beta=None, step_size=0.1)
    assert exact_floor(replace(s, alpha=0.0)) / exact_floor(s) == pytest.approx(helpers + 1)
    assert speedup(helpers, 0.0) == helpers + 1


@pytest.mark.parametrize("helpers", [1, 20])
@pytest.mark.parametrize("bias", [0.0, 0.01, 1.0])
@pytest.mark.parametrize("scaling", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("growth", [0.0, 1.5])
def test_the_best_alpha_minimizes_the_bound(helpers: int, bias: float, scaling: float, growth: float) -> None:
    p = CollaborationConstants(helpers, bias, 2.0, 4.0, 0.5, scaling, growth=growth)
    noise = [0.4 * weighted_variance(alpha, growth, helpers) for alpha in GRID]
    allowed = [alpha for alpha, grown in zip(GRID, noise, strict=True) if alpha**2 * scaling + grown < 1]
    best = min(allowed, key=lambda alpha: wga_floor(p, alpha, 0.1))
    assert optimal_alpha(p, 0.1) == pytest.approx(best, abs=1e-3)
    if scaling == growth == 0:
        gain = wga_floor(p, 0.0, 0.1) / wga_floor(p, optimal_alpha(p, 0.1), 0.1)
        assert gain == pytest.approx(speedup(helpers, relative_bias(p, 0.1)))


def test_the_best_weights_of_the_other_two_methods_minimize_their_bounds() -> None:
    p = CollaborationConstants(7, 1.0, 2.0)
    best = min(GRID, key=lambda alpha: weighted_variance(alpha, 2.0, 7, 5.0))
    assert optimal_alpha_oracle(p, 5.0) == pytest.approx(best, abs=1e-3)
    best = min(GRID, key=lambda alpha: bc_bound_pl(p, alpha, 0.05, 0.1, 10**6, 1.0, 1.0))
    assert optimal_alpha_bc(p, 0.1, 0.05) == pytest.approx(best, abs=1e-3)
    floors = [bc_bound_pl(p, alpha, 0.05, 0.1, 10**6, 1.0, 1.0) for alpha in (0.0, optimal_alpha_bc(p, 0.1, 0.05))]
    assert floors[0] / floors[1] == pytest.approx(speedup(7, relative_bias_bc(p, 0.1, 0.05)))
    for steps in (5, 500):
        best = min(GRID[1:], key=lambda beta: bc_bound(p, 0.7, beta, 0.1, steps, 1.0, p.bias))
        assert optimal_beta(p, steps) == pytest.approx(best, abs=1e-3)
    assert optimal_beta(CollaborationConstants(7, 1.0, 0.0), 5) == 1  # only the initial error of c must decay
    assert optimal_beta(CollaborationConstants(7, 0.0, 1.0), 5) == 0  # c_0 = 0 is right


@pytest.mark.parametrize(
    ("helpers", "bias", "eta", "beta"),
    [
        (20, 0.05, 0.05, None),
        (20, 0.2, 0.05, None),
        (100, 0.01, 0.01, None),
        (20, 0.0, 0.01, 0.001),
        (20, 0.0, 0.05, 0.05),
    ],
)
def test_bounds_are_close_to_the_values_of_a_quadratic(
    helpers: int, bias: float, eta: float, beta: float | None
) -> None:
    """The table of docs/theory.md: the best α of the bound is nearly optimal, the speedup at most twice the gain."""
    p = CollaborationConstants(helpers, bias, 10.0)
    if beta is None:
        alpha, claimed = optimal_alpha(p, eta), speedup(helpers, relative_bias(p, eta))
    else:
        alpha, claimed = optimal_alpha_bc(p, eta, beta), speedup(helpers, relative_bias_bc(p, eta, beta))

    def gain(alpha: float) -> float:
        steps = 20_000 if beta == 0.001 else 4000
        ends = [quadratic_losses(p, 1, a, beta, eta, steps, 0)[-1] for a in (0.0, alpha)]
        return ends[0] / ends[1]

    found, best = gain(alpha), max(gain(alpha) for alpha in (i / 40 for i in range(41)))
    assert 0.9 * best < found <= 1.01 * best
    assert found < claimed < 2 * found


def test_without_noise_no_helper_is_needed() -> None:
    p = CollaborationConstants(5, 0.5, 0.0)
    assert (optimal_alpha(p, 0.1), optimal_alpha_oracle(p, 0.0), optimal_alpha_bc(p, 0.1, 0.1)) == (0, 0, 0)
    assert speedup(5, relative_bias(p, 0.1)) == 1


def test_bias_correction_has_linear_speedup_if_beta_falls_with_n() -> None:
    """At one η: the exact loss falls like 1/(N + 1) up to a constant, where a fixed β saturates."""

    def gain(helpers: int, beta: float) -> float:
        p, eta = CollaborationConstants(helpers, 0.0, 10.0), 0.05
        alpha = optimal_alpha_bc(p, eta, beta)
        return quadratic_losses(p, 1, 0, None, eta, 2000, 0)[-1] / quadratic_losses(p, 1, alpha, beta, eta, 2000, 0)[-1]

    assert gain(50, 0.05 / 50) > 3.5 * gain(10, 0.05 / 10)
    assert gain(50, 0.05) < 1.5 * gain(10, 0.05)


@pytest.mark.parametrize("helpers", [1, 20])
@pytest.mark.parametrize("bias", [0.0, 0.3, 3.0])
def test_mean_estimation_equals_wga_with_harmonic_steps(helpers: int, bias: float) -> None:
    p, samples = CollaborationConstants(helpers, bias**2, 4.0), 25
    alpha = optimal_alpha(p, 1 / samples)
    best = min(GRID, key=lambda a: mean_estimation_loss(p, a, samples))
    assert alpha == pytest.approx(best, abs=1e-3)
    random = torch.Generator().manual_seed(0)
    drawn = 2 * torch.randn(samples, 2, 20_000, generator=random, dtype=torch.float64)
    own, average = drawn[:, 0], bias + drawn[:, 1] / math.sqrt(helpers)
    x = torch.full((20_000,), 7.0, dtype=torch.float64)  # for any start: the first step has size 1
    for t in range(samples):
        x = x - figures.weighted_gradient(x - own[t], x - average[t], alpha) / (t + 1)
    torch.testing.assert_close(x, (1 - alpha) * own.mean(0) + alpha * average.mean(0))
    assert float(x.square().mean()) / 2 == pytest.approx(mean_estimation_loss(p, alpha, samples), rel=0.03)


@pytest.mark.parametrize("growth", [0.0, 0.5])
@pytest.mark.parametrize("beta", [0.02, 0.2, 1.0])
@pytest.mark.parametrize("alpha", [0.3, 1.0])
@pytest.mark.parametrize("steps", [1, 10, 300])
def test_bounds_hold_on_quadratics(alpha: float, beta: float, steps: int, growth: float) -> None:
    """Use L = μ = h, δ = 0; the gradient is h z."""
    h, eta, start = 0.8, 0.5, -2.0
    p = CollaborationConstants(5, 1.5, 2.0, h, h, growth=growth)
    excess = h * start**2 / 2
    wga = quadratic_losses(p, h, alpha, None, eta, steps, start)
    assert wga[-1] <= wga_bound_pl(p, alpha, eta, steps, excess)
    assert 2 * h * sum(wga[:-1]) / steps <= wga_bound(p, alpha, eta, steps, excess)
    bc = quadratic_losses(p, h, alpha, beta, eta, steps, start)
    if growth == 0:
        assert bc[-1] <= bc_bound_pl(p, alpha, beta, eta, steps, excess, p.bias)
    assert 2 * h * sum(bc[:-1]) / steps <= bc_bound(p, alpha, beta, eta, steps, excess, p.bias)
    unbiased = quadratic_losses(replace(p, bias=0.0), h, alpha, None, eta, steps, start)
    assert unbiased[-1] <= oracle_bound_pl(p, alpha, eta, steps, excess, 0.0)


@pytest.mark.parametrize("growth", [0.0, 0.15])
def test_the_bound_with_different_hessians_holds_in_simulation(growth: float) -> None:
    """Use f_0 = x²/2, f_avg = (1 + δ) (x - m)²/2: B(x) = δx - (1 + δ) m."""
    delta, m, alpha, beta, noise, helpers, steps = 0.5, 1.0, 0.8, 0.3, 1.0, 10, 400
    p = CollaborationConstants(helpers, 0.0, noise, dissimilarity=delta, growth=growth)
    eta = min(bc_step_size(p, alpha, beta), beta / 2)
    random = torch.Generator().manual_seed(0)
    x, c = torch.full((4000,), -2.0, dtype=torch.float64), torch.zeros(4000, dtype=torch.float64)
    start, squares = float(x[0]), 0.0
    for _ in range(steps):
        squares += float(x.square().mean()) / steps
        n = torch.randn(2, 4000, generator=random, dtype=torch.float64) * (noise + growth * x.square()).sqrt()
        own, average = x + n[0], (1 + delta) * (x - m) + n[1] / math.sqrt(helpers)
        x = x - eta * figures.weighted_gradient(own, average, alpha, c)
        c = figures.next_bias(c, own, average, beta)
    excess, bias = start**2 / 2, (delta * start - (1 + delta) * m) ** 2
    assert squares <= bc_bound(p, alpha, beta, eta, steps, excess, bias)
    if growth:
        with pytest.raises(ValueError, match=r"growth .*0\.15"):
            bc_bound_pl(p, alpha, beta, eta, steps, excess, bias)
        return
    assert float(x.square().mean()) / 2 <= bc_bound_pl(p, alpha, beta, eta, steps, excess, bias)
    with pytest.raises(ValueError, match=r"step_size .*0\.9"):
        bc_bound(p, alpha, beta, 0.9, steps, excess, bias)


def test_growing_noise_slows_descent_and_too_much_is_rejected() -> None:
    p = CollaborationConstants(4, 1.0, 1.0, 2.0, 1.0, 0.5, growth=3.0)
    assert descent(p, 0.5, 0.1) == pytest.approx(1 - 0.25 * 0.5 - 0.2 * 3 * (0.25 + 0.0625))
    with pytest.raises(ValueError, match=r"step_size .*0\.46.*0\.5"):
        wga_floor(p, 0.5, 0.5)
    with pytest.raises(ValueError, match=r"growth .*2\.66667.*3"):
        bc_bound(p, 0.5, 1.0, 0.1, 10, 1.0, 1.0)


def test_invalid_problems_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"pl .*smoothness, 1\.0.*2\.0"):
        CollaborationConstants(3, 0.0, 1.0, pl=2.0)
    with pytest.raises(ValueError, match=r"noise .*-1"):
        CollaborationConstants(3, 0.0, -1.0)
    with pytest.raises(ValueError, match=r"alpha .*0\.5.*1"):
        wga_floor(CollaborationConstants(3, 0.0, 1.0, scaling=4.0), 1, 0.1)
