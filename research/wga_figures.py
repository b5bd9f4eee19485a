"""Figures 1-5 of papers/004 in shape, its mean estimation and its Appendix A, in one dimension with many runs.

    OMP_NUM_THREADS=1 python research/wga_figures.py [--out docs/results/wga.csv]

research/results.py makes tables and figures from that file. The updates are those of the algorithm
(fedloom.algorithms.wga); each simulated mean is listed with the exact value from bounds.collaboration.
Parameters and findings: docs/results/wga.md.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from bounds import collaboration as bounds
from pages_wga import COLUMNS
from summaries import Evaluation, Run, Runs, read, written
from torch import Tensor

from fedloom.algorithms import collaboration
from fedloom.algorithms.collaboration import CollaborationConstants, next_bias, weighted_gradient

RUNS = 400
POINTS = 40


@dataclass(frozen=True)
class Setting:
    """Method on f_i(x) = (x - m_i)²/2, m_0 = 0; β is None for WGA.

    Every user's gradient has noise of variance σ² + M x² (``noise`` and ``growth``; Appendix A of the paper).
    """

    helpers: int = 100
    bias: float = 2.0
    noise: float = 10.0
    alpha: float = 0.9
    beta: float | None = 0.001
    step_size: float = 0.01
    steps: int = 4000
    start: float = -1.0
    growth: float = 0.0

    @property
    def problem(self) -> CollaborationConstants:
        """Problem in the form of the theory module."""
        return CollaborationConstants(self.helpers, self.bias**2, self.noise, growth=self.growth)

    def exact(self) -> list[float]:
        """Return E F(x_t), t = 0 ... T."""
        beta = self.beta
        return bounds.quadratic_losses(self.problem, 1.0, self.alpha, beta, self.step_size, self.steps, self.start)


def simulate(s: Setting, seed: int = 0, runs: int = RUNS) -> Tensor:
    """Return the mean of F(x_t) = x_t²/2 over independent runs, ``[T + 1]`` float64.

    The mean gradient of N helpers at x is x + B plus noise of variance σ²/N.
    """
    random = torch.Generator().manual_seed(seed)
    x = torch.full((runs,), s.start, dtype=torch.float64)
    c = torch.zeros_like(x)
    losses = [x.square().mean() / 2]
    for _ in range(s.steps):
        noise = (s.noise + s.growth * x.square()).sqrt() * torch.randn(2, runs, generator=random, dtype=torch.float64)
        own, helpers = x + noise[0], x + s.bias + noise[1] / math.sqrt(s.helpers)
        x = x - s.step_size * weighted_gradient(own, helpers, s.alpha, c)
        if s.beta is not None:
            c = next_bias(c, own, helpers, s.beta)
        losses.append(x.square().mean() / 2)
    return torch.stack(losses)


def tuned(
    s: Setting, grid: Sequence[float] = (0.0005, 0.0007, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05)
) -> Setting:
    """Return the setting with the step size that has the least exact final loss."""
    return min((replace(s, step_size=eta) for eta in grid), key=lambda candidate: candidate.exact()[-1])


def curve(name: str, s: Setting, *, drawn: bool = False) -> Run:
    """Return a curve's final values, simulated and exact (means over the last 200 steps), and its course if drawn."""
    simulated, exact = simulate(s), s.exact()
    lines = []
    for t in range(0, s.steps + 1, s.steps // POINTS) if drawn else (s.steps,):
        values = {"simulated_loss": float(simulated[t]), "exact_loss": exact[t]} if drawn else {}
        if t == s.steps:
            ends = {"simulated": float(simulated[-200:].mean()), "exact": sum(exact[-200:]) / 200}
            values |= {"step_size": s.step_size, **ends}
        lines.append(Evaluation(name, "", {}, t, None, {key: float(f"{v:.8g}") for key, v in values.items()}, {}))
    return tuple(lines)


def curves() -> Iterator[Run]:
    """Yield all curves, named by figure."""
    base = Setting()
    yield curve("2/Alone, η of BC", replace(base, alpha=0.0, beta=None), drawn=True)
    yield curve("2/Alone, η tuned", tuned(replace(base, alpha=0.0, beta=None)), drawn=True)
    yield curve("2/WGA, η tuned", tuned(replace(base, beta=None)), drawn=True)
    yield curve("2/BC", base, drawn=True)
    for bias in (0.0, 1.0, 2.0, 5.0, 10.0):
        yield curve(f"3/ζ = {bias:g}", replace(base, bias=bias, steps=10_000))
    for bias in (0.0, 0.1, 0.3, 1.0, 3.0):
        yield curve(f"4/ζ = {bias:g}", replace(base, bias=bias, beta=None))
    for helpers in (1, 2, 5, 20, 100):
        yield curve(f"5/N = {helpers}", replace(base, helpers=helpers, steps=8000), drawn=True)
    for helpers in (20, 100):
        beta = 0.2 * base.step_size / helpers
        alpha = collaboration.optimal_alpha_bc(replace(base, helpers=helpers).problem, base.step_size, beta)
        s = replace(base, helpers=helpers, beta=beta, alpha=alpha, bias=0.1, steps=8000)
        name = f"5/{helpers}, best α = {alpha:.3f}, β = 0.2 η/N"
        yield (Evaluation(name, "", {}, s.steps, None, {"step_size": s.step_size, "exact": floor(s)}, {}),)
    for helpers, bias in MEANS:
        yield measured(f"mean/{helpers}/{bias:g}", mean_estimation(helpers, bias))
    for growth in (0.0, 1.0, 10.0, 50.0):
        yield measured(f"noise/{growth:g}", relaxed(growth))


MEANS = [(helpers, bias) for helpers in (1, 20) for bias in (0.0, 0.1, 0.3, 1.0, 3.0)]
SAMPLES, SAMPLE_NOISE = 100, 10.0


def mean_estimation(helpers: int, bias: float, runs: int = 100_000) -> dict[str, float]:
    """Return E F of estimates of m_0 from 100 samples per user: alone, and averaged with the helpers' (papers/004, §4).

    ``alone``, ``known`` (the best weight for known σ and ζ) and ``constant`` (WGA with a constant step size, both
    tuned) are exact; ``harmonic`` (WGA with that weight and η_t = 1/(t + 1)), ``estimated`` (the weight with s² for σ²
    and the squared distance of the sample means for ζ²) and ``bc`` (η_t = β_t = 1/(t + 1), α = N/(N + 1)) are
    simulated.
    """
    p = CollaborationConstants(helpers, bias**2, SAMPLE_NOISE)
    alpha = collaboration.optimal_alpha(p, 1 / SAMPLES)
    random = torch.Generator().manual_seed(0)
    x, y, c, own_sum, own_squares, helpers_sum = torch.zeros(6, runs, dtype=torch.float64)
    for t in range(SAMPLES):
        drawn = torch.randn(2, runs, generator=random, dtype=torch.float64) * math.sqrt(SAMPLE_NOISE)
        own, average = drawn[0], bias + drawn[1] / math.sqrt(helpers)
        own_sum, own_squares, helpers_sum = own_sum + own, own_squares + own.square(), helpers_sum + average
        x = x - weighted_gradient(x - own, x - average, alpha) / (t + 1)
        y_own, y_average = y - own, y - average
        y = y - weighted_gradient(y_own, y_average, helpers / (helpers + 1), c) / (t + 1)
        c = next_bias(c, y_own, y_average, 1 / (t + 1))
    mean, others = own_sum / SAMPLES, helpers_sum / SAMPLES
    variance = (own_squares - SAMPLES * mean.square()) / (SAMPLES - 1) / SAMPLES
    weight = variance / (variance * (1 + 1 / helpers) + (others - mean).square())
    start = math.sqrt(SAMPLE_NOISE)  # a sample's distance from m_0, on either side
    constant = min(
        sum(bounds.quadratic_losses(p, 1.0, a / 50, None, eta, SAMPLES, x0)[-1] for x0 in (start, -start)) / 2
        for eta in (0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.07, 0.1)
        for a in range(51)
    )
    return {
        "alone": bounds.mean_estimation_loss(p, 0.0, SAMPLES),
        "known": bounds.mean_estimation_loss(p, alpha, SAMPLES),
        "harmonic": float(x.square().mean()) / 2,
        "constant": constant,
        "estimated": float((mean + weight * (others - mean)).square().mean()) / 2,
        "bc": float(y.square().mean()) / 2,
    }


def relaxed(growth: float) -> dict[str, float]:
    """Return the exact late loss with noise of variance σ² + M‖∇f_0‖²: alone, WGA without bias, BC with two biases.

    Each uses the α that is best for it without M, at the same step size; ``gain`` is the bounds' value for WGA.
    """
    s = Setting(alpha=0.0, beta=None, growth=growth, steps=20_000)
    unbiased = replace(s, bias=0.0, alpha=s.helpers / (s.helpers + 1))
    beta = 0.2 * s.step_size / s.helpers
    corrected = replace(s, beta=beta, alpha=collaboration.optimal_alpha_bc(s.problem, s.step_size, beta), steps=800_000)
    ends = [replace(corrected, bias=bias).exact()[-1] for bias in (0.0, 2.0)]
    p = unbiased.problem
    floors = [bounds.wga_floor(p, a, s.step_size) for a in (0.0, collaboration.optimal_alpha(p, s.step_size))]
    found = (s.exact()[-1], unbiased.exact()[-1], *ends, floors[0] / floors[1])
    return dict(zip(("alone", "wga", "bc", "bc_biased", "gain"), found, strict=True))


def measured(name: str, values: dict[str, float]) -> Run:
    """Return one line of the file."""
    return (Evaluation(name, "", {}, 0, None, {key: float(f"{value:.6g}") for key, value in values.items()}, {}),)


def best_unknowing() -> str:
    """Return the setting that is best for T steps in the worst case of ζ = 0 and ζ = 2."""
    base = Setting()
    found = [
        (max(replace(s, bias=bias).exact()[-1] for bias in (0.0, base.bias)), s)
        for eta in (0.0005, 0.0007, 0.001, 0.002, 0.005, 0.01)
        for alpha in (0.0, 0.5, 0.9, 1.0)
        for beta in (0.0005, 0.001, 0.002, 0.005)
        for s in [replace(base, step_size=eta, alpha=alpha, beta=beta)]
    ]
    best, how = min(found, key=lambda one: one[0])
    return f"{best:.5f} with {how}; σ²/(2T) is {base.noise / (2 * base.steps):.5f}"


def floor(s: Setting) -> float:
    """Return the exact loss after the effect of the start has vanished."""
    return float(f"{replace(s, start=0.0, bias=0.0, steps=60_000).exact()[-1]:.8g}")


def main() -> None:
    """Write the curves, and print the best setting for an unknown bias."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/results/wga.csv"))
    out = parser.parse_args().out
    before = read(out) if out.exists() else Runs()
    out.write_text(written(Runs(before | {run[0].run: run for run in curves()}), COLUMNS), encoding="utf-8")
    print(f"Best η, α, β for T = {Setting().steps} steps, worst of ζ = 0 and 2:\n{best_unknowing()}")


if __name__ == "__main__":
    main()
