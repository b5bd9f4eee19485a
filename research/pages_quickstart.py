"""Tables and figure of docs/results/quickstart.md."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from summaries import Evaluation, Runs, difference, last, spread, table

from fedloom.reporting.compare import COLOURS, MARKERS

STEPS = (0, 1, 2, 5, 10, 20, 50)
COLUMNS = (
    "validation", "seen_mean", "seen_worst_decile", "unseen_mean", "unseen_worst_decile", "unseen_masked",
    "global_seen_mean", "global_unseen_mean", *(f"after_{k}" for k in (*STEPS, 100)),
    *(f"after_{k}_masked" for k in STEPS),
)  # fmt: skip
METHODS = {"pefll": "PeFLL", "fedavg": "FedAvg + fine-tuning", "local": "Local, alone"}
KINDS = {"native": "AVX-512", "avx2": "`avx2`", "default": "`default`"}
RATES = ("0.003", "0.01", "0.03", "0.1")
SEARCHES = ("search/*", "search-seen/*")


def measured_too(folder: Path) -> dict[str, float]:
    """Return unseen clients' results after extra local steps, and after the steps that the method includes."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    values = {}
    if summary["algorithm"] == "local":
        made = summary["local"]["new_client"]["personal"]["client_steps"]
        values[f"after_{made:g}"] = 100 * summary["unseen"]["accuracy_mean"]
    for line in summary.get("own_steps") or []:
        values[f"after_{line['steps']}"] = 100 * line["unseen"]["accuracy_mean"]
        values[f"after_{line['steps']}_masked"] = 100 * line["unseen"]["masked"]["accuracy_mean"]
    return {name: float(f"{value:.6g}") for name, value in values.items()}


def _lines(runs: Runs, kind: str, method: str) -> list[Evaluation]:
    """Return the last evaluations of a method's runs on a kind of processor, by seed."""
    return sorted((last(run) for run in runs.under(f"{kind}/{method}")), key=lambda line: int(line.seed))


def _mean(lines: Sequence[Evaluation], quantity: str) -> str:
    there = [line[quantity] for line in lines if quantity in line.values]
    return spread(there) if there else ""


def tables(runs: Runs) -> Iterator[str]:
    """Yield results after a new client's local steps, by seed and processor, with other label codes, and the search."""
    steps = (*STEPS, 100)
    rows = [(name, *(_mean(_lines(runs, "native", m), f"after_{k}") for k in steps)) for m, name in METHODS.items()]
    yield table(("local steps of a new client", *map(str, steps)), rows)
    rows = []
    for kind, processor in KINDS.items():
        of = {method: {line.seed: line for line in _lines(runs, kind, method)} for method in METHODS}
        for seed, pefll in of["pefll"].items():
            if seed not in of["fedavg"]:
                continue
            fedavg = of["fedavg"][seed]
            best = max(fedavg[f"after_{k}"] for k in STEPS)
            values = [pefll["after_0"], pefll["after_5"], fedavg["after_0"], fedavg["after_5"], best]
            rows.append((processor, seed, *(f"{value:.1f}" for value in values)))
    header = ("processor", "seed", "PeFLL, 0 steps", "5 steps", "FedAvg, 0 steps", "5 steps", "best of FedAvg")
    yield table(header, rows, left=2)
    for folder, title in (("five-classes", "five classes"), ("label-codes", "four label codes")):
        yield _more_classes(runs, folder, title)
    for folder in ("search", "search-seen"):
        yield _search(runs, folder)


def _search(runs: Runs, folder: str) -> str:
    """Return validation accuracy by local rate; ``search-seen`` is normalized over seen clients."""
    rows = []
    for method, name in METHODS.items():
        found = {rate: _validation(runs, f"{folder}/{method}-{rate}") for rate in RATES}
        shown = {rate: f"{value:.1f}" for rate, value in found.items() if value is not None}
        highest = max(shown.values(), key=float)
        cells = (f"**{shown[rate]}**" if shown.get(rate) == highest else shown.get(rate, "") for rate in RATES)
        rows.append((name.removesuffix(" + fine-tuning"), *cells))
    return table(("local rate, validation", *RATES), rows)


def _more_classes(runs: Runs, folder: str, title: str) -> str:
    """Return results of new clients with five classes after extra local steps, and differences with the same seed."""
    steps = (0, 1, 5, 20, 50, 100)
    of = {method: _lines(runs, folder, method) for method in METHODS}
    rows = [(METHODS[m], *(_mean(lines, f"after_{k}") for k in steps)) for m, lines in of.items()]
    less = []
    for k in steps[:-1]:
        pefll, fedavg = ([line[f"after_{k}"] for line in of[method]] for method in ("pefll", "fedavg"))
        less.append(difference(pefll, fedavg))
    rows.append((f"PeFLL minus {METHODS['fedavg']}", *less, ""))
    return table((f"{title}: local steps", *map(str, steps)), rows)


def _validation(runs: Runs, name: str) -> float | None:
    return last(runs[name])["validation"] if name in runs else None


def own_steps(runs: Runs) -> Figure:
    """Draw a new client's test accuracy over its extra local steps: mean over seeds, and a dot per seed."""
    figure = Figure(figsize=(7.2, 3.5), layout="constrained", facecolor="white")  # readable on dark pages too
    axes = figure.subplots()
    for (method, name), colour, marker in zip(METHODS.items(), COLOURS.values(), MARKERS, strict=False):
        lines = _lines(runs, "native", method)
        steps = [k for k in STEPS if lines and f"after_{k}" in lines[0].values]
        x = [STEPS.index(k) for k in steps]
        means = [statistics.fmean(line[f"after_{k}"] for line in lines) for k in steps]
        axes.plot(x, means, marker=marker, color=colour, label=name)
        for line in lines:
            axes.plot(x, [line[f"after_{k}"] for k in steps], ".", color=colour, markersize=4, alpha=0.6)
    axes.set_xticks(range(len(STEPS)), [str(k) for k in STEPS])
    axes.set_xlabel("local training steps of the new client, on 10 images")
    axes.set_ylabel("test accuracy, %")
    axes.set_title("A client that was never seen in training")
    axes.legend(loc="lower right")
    return figure


FIGURES = {"own-steps": own_steps}
