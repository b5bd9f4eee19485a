"""Figures 1-5 of papers/004 in shape: the noisy quadratic model in one dimension, many runs at once.

    OMP_NUM_THREADS=1 python experiments/wga_figures.py [--out docs/results]

The updates are those of the algorithm (fedloom.algorithms.wga); beside each simulated mean is what
fedloom.theory.collaboration says exactly. Parameters and what the figures show: docs/results/wga.md.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedloom.algorithms.wga import next_bias, weighted_gradient
from fedloom.theory import collaboration
from fedloom.theory.collaboration import Problem

RUNS = 400


@dataclass(frozen=True)
class Setting:
    """One method on f_i(x) = (x - m_i)²/2, m_0 = 0, gradients with noise of variance σ²; β is None for WGA."""

    helpers: int = 100
    bias: float = 2.0
    noise: float = 10.0
    alpha: float = 0.9
    beta: float | None = 0.001
    step_size: float = 0.01
    steps: int = 4000
    start: float = -1.0

    @property
    def problem(self) -> Problem:
        """As theory has it."""
        return Problem(self.helpers, self.bias**2, self.noise)

    def exact(self) -> list[float]:
        """E F(x_t), t = 0 ... T."""
        beta = self.beta
        return collaboration.quadratic_losses(
            self.problem, 1.0, self.alpha, beta, self.step_size, self.steps, self.start
        )


def simulate(s: Setting, seed: int = 0, runs: int = RUNS) -> Tensor:
    """Mean of F(x_t) = x_t²/2 over independent runs, ``[T + 1]`` float64.

    The mean gradient of N helpers at x is x + B plus noise of variance σ²/N.
    """
    random = torch.Generator().manual_seed(seed)
    x = torch.full((runs,), s.start, dtype=torch.float64)
    c = torch.zeros_like(x)
    losses = [x.square().mean() / 2]
    for _ in range(s.steps):
        noise = math.sqrt(s.noise) * torch.randn(2, runs, generator=random, dtype=torch.float64)
        own, helpers = x + noise[0], x + s.bias + noise[1] / math.sqrt(s.helpers)
        x = x - s.step_size * weighted_gradient(own, helpers, s.alpha, c)
        if s.beta is not None:
            c = next_bias(c, own, helpers, s.beta)
        losses.append(x.square().mean() / 2)
    return torch.stack(losses)


def tuned(
    s: Setting, grid: Sequence[float] = (0.0005, 0.0007, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05)
) -> Setting:
    """The same with the step size of least exact final loss."""
    return min((replace(s, step_size=eta) for eta in grid), key=lambda candidate: candidate.exact()[-1])


def plot(axes: Any, s: Setting, label: str, colour: str, rows: list[str]) -> None:
    """Draw a simulated curve over the exact one, and note both ends."""
    simulated, exact = simulate(s), s.exact()
    shown = range(0, s.steps + 1, s.steps // 200)
    axes.plot(shown, [exact[t] for t in shown], color=colour, linewidth=0.8, linestyle="--")
    axes.plot(shown, simulated[list(shown)], color=colour, linewidth=0.9, alpha=0.8, label=label)
    end = float(simulated[-200:].mean())
    rows.append(f"| {label} | {s.step_size:g} | {end:.5f} | {sum(exact[-200:]) / 200:.5f} |")


def main() -> None:
    """Write the five figures, and print what their curves end at."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    out = parser.parse_args().out
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams |= {"svg.hashsalt": "fedloom", "font.size": 9}
    import matplotlib.pyplot as plt

    started = time.perf_counter()
    rows: list[str] = []

    def figure(number: int, title: str, log_y: bool = True) -> tuple[Any, Any]:
        made, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
        axes.set(title=title, xlabel="iteration t", ylabel="loss $F(x_t)$")
        if log_y:
            axes.set_yscale("log")
        rows.append(f"\nFigure {number}: {title}\n")
        rows.append("| curve | η | simulated | exact |\n|---|---|---|---|")
        return made, axes

    def save(made: Any, number: int) -> None:
        made.savefig(out / f"wga-figure-{number}.svg", metadata={"Date": None})
        plt.close(made)

    colours = [f"C{i}" for i in range(10)]
    made, axes = plt.subplots(figsize=(5, 4), layout="constrained")
    x, y = torch.logspace(-4, 2, 121), torch.logspace(0, 3, 91)
    speedups = torch.tensor([[collaboration.speedup(float(n), float(r)) for r in x] for n in y])
    drawn = axes.pcolormesh(x, y, speedups, norm=mpl.colors.LogNorm(), shading="gouraud", rasterized=True)
    lines = axes.contour(x, y, speedups, levels=[1.1, 2, 5, 10, 100], colors="white", linewidths=0.7)
    axes.clabel(lines, fmt="%g")
    axes.set(
        xscale="log", yscale="log", xlabel="$\\mu T\\zeta^2/(L\\sigma^2)$", ylabel="N", title="Speedup, m = 0, best α"
    )
    made.colorbar(drawn)
    save(made, 1)

    base = Setting()
    made, axes = figure(2, "Convergence")
    plot(axes, replace(base, alpha=0.0, beta=None), "Alone, η of BC", "C0", rows)
    plot(axes, tuned(replace(base, alpha=0.0, beta=None)), "Alone, η tuned", "C3", rows)
    plot(axes, tuned(replace(base, beta=None)), "WGA, η tuned", "C2", rows)
    plot(axes, base, "BC", "C1", rows)
    axes.legend()
    save(made, 2)

    made, axes = figure(3, "BC: the bias")
    for colour, bias in zip(colours, (0.0, 1.0, 2.0, 5.0, 10.0), strict=False):
        plot(axes, replace(base, bias=bias, steps=10_000), f"ζ = {bias:g}", colour, rows)
    axes.legend()
    save(made, 3)

    made, axes = figure(4, "WGA: the bias")
    for colour, bias in zip(colours, (0.0, 0.1, 0.3, 1.0, 3.0), strict=False):
        plot(axes, replace(base, bias=bias, beta=None), f"ζ = {bias:g}", colour, rows)
    axes.legend()
    save(made, 4)

    made, axes = figure(5, "BC: the number of helpers")
    for colour, helpers in zip(colours, (1, 2, 5, 20, 100), strict=False):
        plot(axes, replace(base, helpers=helpers, steps=8000), f"N = {helpers}", colour, rows)
    for helpers in (20, 100):
        beta = 0.2 * base.step_size / helpers
        alpha = collaboration.optimal_alpha_bc(replace(base, helpers=helpers).problem, base.step_size, beta)
        s = replace(base, helpers=helpers, beta=beta, alpha=alpha, bias=0.1, steps=8000)
        rows.append(f"| exact, N = {helpers}, best α = {alpha:.3f}, β = 0.2 η/N, as T → ∞ | 0.01 | | {floor(s):.5f} |")
    axes.legend()
    save(made, 5)

    rows.append(f"\nBest η, α, β for T = {base.steps} steps, worst of ζ = 0 and 2:\n")
    found = [
        (max(replace(s, bias=bias).exact()[-1] for bias in (0.0, base.bias)), s)
        for eta in (0.0005, 0.0007, 0.001, 0.002, 0.005, 0.01)
        for alpha in (0.0, 0.5, 0.9, 1.0)
        for beta in (0.0005, 0.001, 0.002, 0.005)
        for s in [replace(base, step_size=eta, alpha=alpha, beta=beta)]
    ]
    best, how = min(found, key=lambda one: one[0])
    rows.append(f"{best:.5f} with {how}; σ²/(2T) is {base.noise / (2 * base.steps):.5f}")
    print("\n".join(rows))
    print(f"\n{time.perf_counter() - started:.0f} s")


def floor(s: Setting) -> float:
    """The exact loss after so long that nothing of the start is left."""
    return replace(s, start=0.0, bias=0.0, steps=60_000).exact()[-1]


if __name__ == "__main__":
    main()
