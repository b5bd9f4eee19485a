"""Tables and figures of docs/results/vowel.md and wga.md."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from matplotlib.figure import Figure
from summaries import Evaluation, Runs, last, spread, table

from fedloom.reporting.drawing import FULL
from fedloom.theory.collaboration import speedup

VOWEL_COLUMNS = (
    "validation", "seen_mean", "seen_worst_decile", "unseen_mean", "unseen_worst_decile", "global_seen_mean",
    "global_seen_worst_decile", "global_unseen_mean", "global_unseen_worst_decile", "seconds",
)  # fmt: skip
SIZES = ("0.003", "0.01", "0.03", "0.1", "0.3")


def vowel(runs: Runs) -> Iterator[str]:
    """What a speaker gets, and the search for step sizes."""
    fedavg, local = ([last(run) for run in runs.under(method)] for method in ("fedavg", "local"))
    methods = (
        ("the global model (FedAvg)", "0", "global_", fedavg, False),
        ("Local: alone, on its 22 examples", "300", "", local, False),
        ("the global model, fine-tuned", "100", "", fedavg, True),
    )
    rows = []
    for name, steps, of, lines, best in methods:
        cells = []
        for group in ("seen", "unseen"):
            cells.append(spread([line[f"{of}{group}_mean"] for line in lines]))
            cells.append(f"{statistics.fmean(line[f'{of}{group}_worst_decile'] for line in lines):.1f}")
        bold = (0, 1, 2) if best else ()
        cells = [f"**{cell}**" if i in bold else cell for i, cell in enumerate(cells)]
        rows.append((f"**{name}**" if best else name, steps, *cells))
    yield table(("what a speaker gets", "steps of its own", "seen", "worst decile", "unseen", "worst decile"), rows)
    rows = []
    for name, folder in (("FedAvg + fine-tuning", "grid-fedavg"), ("Local", "grid-local")):
        found = {size: _validation(runs, folder, size) for size in SIZES}
        best_one = max(found.values())
        first = next(size for size in SIZES if round(found[size], 1) == round(best_one, 1))
        shown = (f"**{value:.1f}**" if size == first else f"{value:.1f}" for size, value in found.items())
        rows.append((f"{name}, validation", *shown))
    yield table(("step size", *SIZES), rows)


def _validation(runs: Runs, folder: str, size: str) -> float:
    return statistics.fmean(
        last(run)["validation"] for run in runs.under(folder) if last(run).settings["algorithm.local.lr"] == size
    )


MEANS = ("alone", "known", "harmonic", "constant", "estimated", "bc")
NOISES = ("alone", "wga", "bc", "bc_biased", "gain")
WGA_COLUMNS = ("step_size", "simulated_loss", "exact_loss", "simulated", "exact", *dict.fromkeys((*MEANS, *NOISES)))


def wga(runs: Runs) -> Iterator[str]:
    """Figures 1, 2, 4 and 5 of papers/004 in numbers, its mean estimation, and its relaxed noise."""
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


def losses(runs: Runs) -> Figure:
    """Figures 2 and 5 of papers/004: loss over iterations, simulated, and as theory has it (dashed)."""
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
