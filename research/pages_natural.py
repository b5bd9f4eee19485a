"""Tables and figure of docs/results/natural.md."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from matplotlib.figure import Figure
from summaries import Evaluation, Runs, difference, last, spread, table

from fedloom.reporting.drawing import FULL

STEPS = (0, 1, 5, 10)
COLUMNS = ("validation", "seen", "unseen", "train_loss", "sent_gb", "seconds", *(f"after_{k}" for k in STEPS))
METHODS = {"pefll": ("PeFLL", "#0072b2"), "fedavg": ("FedAvg", "#d55e00")}
GROUPS = ("seen", "unseen")


def tables(runs: Runs) -> Iterator[str]:
    """Yield tables of roles over rounds, after extra local steps, at equal communication, and of the search."""
    yield _over_rounds(runs)
    yield _own_steps(runs)
    yield _communication(runs)
    yield _search(runs)


def _over_rounds(runs: Runs) -> str:
    """Return mean ± deviation over seeds, and differences with the same seed."""
    pefll, fedavg = (runs.under(f"roles/test/{method}") for method in METHODS)
    rounds = [line.round for line in pefll[0] if line.round]
    rows = []
    for group in GROUPS:
        of = [
            [[line[group] for run in those for line in run if line.round == r] for r in rounds]
            for those in (pefll, fedavg)
        ]
        rows += [
            (f"{name}, {group}", *map(spread, values)) for (name, _), values in zip(METHODS.values(), of, strict=True)
        ]
        rows.append((f"PeFLL minus FedAvg, {group}", *map(difference, *of)))
    return table(("rounds", *map(str, rounds)), rows)


def _own_steps(runs: Runs) -> str:
    """Return unseen roles' accuracy after extra local steps from the last round's model."""
    of = [
        [[last(run)[f"after_{k}"] for run in runs.under(f"roles/test/{method}")] for k in STEPS] for method in METHODS
    ]
    rows = [(name, *map(spread, values)) for (name, _), values in zip(METHODS.values(), of, strict=True)]
    rows.append(("PeFLL minus FedAvg", *map(difference, *of)))
    return table(("local steps of an unseen role", *map(str, STEPS)), rows)


def _communication(runs: Runs) -> str:
    """Return each method's last evaluation within the communication of FedAvg's last."""
    budget = min(last(run)["sent_gb"] for run in runs.under("roles/test/fedavg")) * 1.01
    rows = []
    for method, (name, _) in METHODS.items():
        lines = [[line for line in run if line["sent_gb"] <= budget][-1] for run in runs.under(f"roles/test/{method}")]
        sent = statistics.fmean(line["sent_gb"] for line in lines)
        rows.append((name, str(lines[0].round), f"{sent:.2f}", *(spread([line[g] for line in lines]) for g in GROUPS)))
    return table(("", "rounds", "GB sent", *GROUPS), rows)


def _search(runs: Runs) -> str:
    """Return the validation accuracy of each step size, or the round in which training diverged."""
    lines = {name: [last(run) for run in runs.under(f"roles/search/{method}")] for method, (name, _) in METHODS.items()}
    rates = sorted({_rate(line) for of in lines.values() for line in of})
    rows = []
    for name, of in lines.items():
        best = max(line["validation"] for line in of if line.left is None)
        cells = dict.fromkeys(rates, "")
        for line in of:
            shown = f"left in {line.left}" if line.left is not None else f"{line['validation']:.1f}"
            chosen = line.left is None and line["validation"] == best
            cells[_rate(line)] = f"**{shown}**" if chosen else shown
        rows.append((name, *cells.values()))
    return table(("step size", *(f"{rate:g}" for rate in rates)), rows)


def _rate(line: Evaluation) -> float:
    return float(line.run.rpartition("lr=")[2].partition(",")[0])


def curves(runs: Runs) -> Figure:
    """Draw test accuracy over rounds and communication, as in papers/001, Figures 5 and 6: means, and each seed."""
    figure = Figure(figsize=(FULL, 5.0), layout="constrained")
    axes = figure.subplots(2, 2, sharey=True, sharex="col")
    for row, group in zip(axes, GROUPS, strict=True):
        for method, (name, colour) in METHODS.items():
            those = runs.under(f"roles/test/{method}")
            means = [statistics.fmean(line[group] for line in lines) for lines in zip(*those, strict=True)]
            rounds, sent = [line.round for line in those[0]], [line["sent_gb"] for line in those[0]]
            for panel, x in zip(row, (rounds, sent), strict=True):
                panel.plot(x, means, color=colour, label=name)
                for run in those:
                    panel.plot(x, [line[group] for line in run], ".", color=colour, alpha=0.4)
        row[0].set_ylabel(f"{group} roles, %")
    axes[1][0].set_xlabel("rounds")
    axes[1][1].set_xlabel("tensors sent and received, GB")
    axes[0][0].legend()
    return figure


FIGURES = {"curves": curves}
