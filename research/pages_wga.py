"""Tables and figures of docs/results/wga.md."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from bounds.collaboration import quadratic_losses, speedup
from matplotlib.figure import Figure
from summaries import Evaluation, Run, Runs, difference, last, spread, table

from fedloom.algorithms.collaboration import CollaborationConstants
from fedloom.data.inputs import single
from fedloom.engine import run_data
from fedloom.experiment import load_experiment
from fedloom.reporting.drawing import FULL

MEANS = ("alone", "known", "harmonic", "constant", "estimated", "bc")
NOISES = ("alone", "wga", "bc", "bc_biased", "gain")
COLUMNS = (
    "step_size", "simulated_loss", "exact_loss", "simulated", "exact", *dict.fromkeys((*MEANS, *NOISES)),
    "validation", "seen_mean", "seen_worst_decile", "seen_loss", "global_seen_mean", "train_loss",
    "user_loss", "best_loss",
)  # fmt: skip
RULES = {"alone": "alone", "wga": "wga", "cosine": "wga, cosine weights", "bc": "bc"}
RATES = ("0.03", "0.1", "0.3")
LATE = 5
"""Number of the quadratic model's evaluations that are averaged."""


def tables(runs: Runs) -> Iterator[str]:
    """Yield the numbers of Figures 1, 2, 4 and 5 of papers/004, its mean estimation, and its relaxed noise."""
    ratios = (0.0001, 0.001, 0.01, 0.1, 1.0)
    rows = [(str(n), *(f"{speedup(n, r):.1f}" for r in ratios)) for n in (1, 10, 100, 1000)]
    yield table(("N", *(f"r = {r:g}" for r in ratios)), rows)

    def ends(figure: str) -> Iterator[tuple[str, Evaluation]]:
        for name, run in runs.items():
            if name.startswith(f"{figure}/"):
                yield name.partition("/")[2], last(run)

    def five(line: Evaluation, quantity: str) -> str:
        return f"{line[quantity]:.5f}" if quantity in line.values else ""

    both = ("simulated", "exact")
    rows = [(name, f"{line['step_size']:g}", *(five(line, q) for q in both)) for name, line in ends("2")]
    yield table(("curve", "η", *both), rows, left=4)
    for figure, symbol in (("4", "ζ"), ("5", "N")):
        rows = [(name.removeprefix(f"{symbol} = "), *(five(line, q) for q in both)) for name, line in ends(figure)]
        yield table((symbol, *both), rows, left=3)
    rows = [(*name.split("/"), *(five(line, q) for q in MEANS)) for name, line in ends("mean")]
    shown = ("Alone", "α known", "WGA, η = 1/(t + 1)", "WGA, constant η", "α estimated", "BC")
    yield table(("N", "ζ", *shown), rows, left=2)
    rows = [
        (m, *(five(line, q) for q in NOISES[:-1]), f"{line['alone'] / line['wga']:.0f}", f"{line['gain']:.0f}")
        for m, line in ends("noise")
    ]
    yield table(("M", "Alone", "WGA, ζ = 0", "BC, ζ = 0", "BC, ζ = 2", "gain of WGA", "by the bound"), rows)
    yield _quadratic(runs)
    yield _logistic(runs)
    yield from _lenet(runs)


def best_loss(folder: Path) -> dict[str, float]:
    """Return user 0's test loss at its own test mean, for the quadratic model."""
    e = load_experiment(folder / "experiment.yaml")
    if e.model.name != "quadratic":
        return {}
    dataset = run_data.make_partition(e)
    test = single(dataset.client(dataset.manifest.clients[0].id).test.x).double()
    return {"best_loss": float(f"{(test - test.mean(0)).square().sum(1).mean() / 2:.6g}")}


def _quadratic(runs: Runs) -> str:
    """Return each rule's late loss above the best, over seeds, and the theoretical value."""
    exact = {"alone": (0.0, None, 4.0), "wga": (0.9, None, 4.0), "bc": (0.9, 0.01, 4.0), "oracle": (0.9, None, 0.0)}
    rows = []
    for rule, (alpha, beta, bias) in exact.items():
        found = runs.under(f"quadratic/{rule}")
        above = [statistics.fmean(line["user_loss"] for line in run[-LATE:]) - last(run)["best_loss"] for run in found]
        expected = quadratic_losses(CollaborationConstants(19, bias, 18.0), 1.0, alpha, beta, 0.05, 1000, -1.0)
        late = statistics.fmean(expected[50 * line.round] for line in found[0][-LATE:])
        about = {"alone": "alone", "bc": "bc, α = 0.9, β = 0.01"}.get(rule, f"{rule}, α = 0.9")
        rows.append((about, spread(above, 2), f"{late:.2f}"))
    return table(("rule", "above the best", "exact, σ² = 18"), rows)


def _logistic(runs: Runs) -> str:
    """Return every rule and α, without choosing."""
    rows = []
    alone = _by_seed(runs.under("fashion-mnist/alone"))
    for folder, name in RULES.items():
        found = runs.under(f"fashion-mnist/{folder}")
        for alpha in sorted({last(run).settings["algorithm.alpha"] for run in found}):
            lines = _by_seed(run for run in found if last(run).settings["algorithm.alpha"] == alpha)
            shared, loss = (_mean(lines, of) for of in ("global_seen_mean", "seen_loss"))
            shown = (*_each_and_mean(lines, alone), f"{shared:.1f}", f"{loss:.3f}")
            rows.append((name, "0" if folder == "alone" else alpha, *shown))
    header = ("rule", "α", *_header(alone), "mean of all θ_i (`global`)", "loss")
    return table(header, rows, left=2)


def _by_seed(found: Iterable[Run]) -> list[Evaluation]:
    return sorted((last(run) for run in found), key=lambda line: int(line.seed))


def _mean(lines: Sequence[Evaluation], quantity: str) -> float:
    return statistics.fmean(line[quantity] for line in lines)


def _header(lines: Sequence[Evaluation]) -> list[str]:
    return [*(f"seed {line.seed}" for line in lines), "mean", "minus alone"]


def _each_and_mean(lines: Sequence[Evaluation], alone: Sequence[Evaluation]) -> list[str]:
    """Return test accuracy of each seed, over seeds, and minus Alone's with the same seed."""
    each = [line["seen_mean"] for line in lines]
    less = difference(each, [line["seen_mean"] for line in alone]) if lines != alone else ""
    return [*(f"{value:.1f}" for value in each), spread(each), less]


def _lenet(runs: Runs) -> Iterator[str]:
    """Yield each seed's validation accuracy, and the chosen step size on test data."""
    tried, tested = [], []
    alone: list[Evaluation] = []
    for folder, name in RULES.items():
        found = runs.under(f"lenet/{folder}")
        by_rate = {rate: _by_seed(run for run in found if last(run).settings["algorithm.lr"] == rate) for rate in RATES}
        whole = {rate: lines for rate, lines in by_rate.items() if all(line.left is None for line in lines)}
        best = max(whole, key=lambda rate: _mean(whole[rate], "validation"))
        cells = []
        for rate, lines in by_rate.items():
            each = (f"{line['validation']:.1f}" if line.left is None else f"not finite ({line.left})" for line in lines)
            cells.append(" / ".join(each) if rate != best else f"**{' / '.join(each)}**")
        tried.append((name, *cells))
        alone = alone or whole[best]
        shown = _each_and_mean(whole[best], alone)
        for of, digits in (("seen_worst_decile", 1), ("global_seen_mean", 1), ("seen_loss", 2), ("train_loss", 2)):
            shown.append(f"{_mean(whole[best], of):.{digits}f}")
        tested.append((name, best, *shown))
    yield table(("rule", *(f"η = {rate}" for rate in RATES)), tried)
    of_tests = ("worst decile", "mean of all θ_i (`global`)", "test loss", "train loss")
    yield table(("rule", "η", *_header(alone), *of_tests), tested, left=2)


def losses(runs: Runs) -> Figure:
    """Draw Figures 2 and 5 of papers/004: loss over iterations, simulated and theoretical (dashed)."""
    figure = Figure(figsize=(FULL, 3.4), layout="constrained")
    for axes, number, title in zip(
        figure.subplots(1, 2, sharey=True), ("2", "5"), ("Convergence", "BC: the number of helpers"), strict=True
    ):
        for name, run in runs.items():
            over = [line for line in run if "simulated_loss" in line.values]
            if name.startswith(f"{number}/") and over:
                x = [line.round for line in over]
                drawn = axes.plot(x, [line["simulated_loss"] for line in over], label=name.partition("/")[2])
                axes.plot(x, [line["exact_loss"] for line in over], "--", color=drawn[0].get_color(), linewidth=0.8)
        axes.set(title=title, xlabel="iteration", yscale="log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.legend(ncols=2)
    figure.axes[0].set_ylabel("loss")
    return figure


FIGURES = {"losses": losses}
