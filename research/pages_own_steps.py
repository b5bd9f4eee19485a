"""Compact file, tables and figure of docs/results/own-steps.md."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterator
from pathlib import Path

from matplotlib.figure import Figure
from own_steps import STEPS
from summaries import Evaluation, Runs, difference, evaluations, last, spread, table

from fedloom.reporting.drawing import HALF
from fedloom.runs.files import EXPERIMENT

DATA = {
    "fashion-mnist": "Fashion-MNIST, two classes",
    "mnist": "MNIST, two classes",
    "fashion-mnist-lenet": "Fashion-MNIST, LeNet",
    "cifar10": "CIFAR-10, LeNet",
    "vowel": "Vowel, speakers",
    "writers": "QMNIST, writers",
}
THETA, NETWORKS = ("0", "5e-05", "0.005", "0.5"), ("0", "1e-05", "0.001")
"""Grid of papers/001, Table 8: λ_θ, and λ_h = λ_v."""
NETWORKS_OF = {
    "hypernetwork.size=S": "S: one hidden layer (Table 7)",
    "hypernetwork.size=L": "L: five (Table 7)",
    "hypernetwork.output_relu=false": "no ReLU before the output (official code)",
    "embedding.network=mlp": "an MLP as embedding network (Table 9)",
}
COLUMNS = ("validation", *(f"after_{t}" for t in STEPS), "masked_0")
METHODS = {"pefll": "PeFLL", "fedavg": "FedAvg", "local": "Local"}
COLOURS = {"pefll": "#0072b2", "fedavg": "#d55e00", "local": "#009e73"}


def folded(folder: Path) -> Runs:
    """Return the results of the runs of research/parts/own-steps.yaml.

    DATA/search/METHOD/RATE has validation accuracy of seen clients (mean over seeds), DATA/own/METHOD/RATE that of new
    clients after each number of steps (mean over seeds). DATA/test/METHOD/seed=N has their test accuracy at the step
    size chosen on validation, and after no step also with labels masked to their own classes (``masked_0``).
    DATA/lambda/NETWORKS/THETA/seed=N has validation accuracy of seen clients and, after no step, of new ones.
    DATA/networks/SETTING has the same as DATA for PeFLL with another network and no step.
    """
    runs = Runs()

    def keep(name: str, values: dict[str, float], seed: str = "") -> None:
        runs[name] = (Evaluation(name, seed, {}, 0, None, {k: float(f"{v:.6g}") for k, v in values.items()}, {}),)

    for data in sorted(path.name for path in folder.iterdir()):
        networks = [f"networks/{name}" for name in NETWORKS_OF]
        for search in (*(f"search/{method}" for method in METHODS), *(f"{name}/search" for name in networks)):
            found: dict[float, list[float]] = {}
            for path in sorted((folder / data / search).glob(f"*/{EXPERIMENT}")):
                settings, run = evaluations(path.parent, "")
                found.setdefault(float(settings["algorithm.local.lr"]), []).append(last(run)["validation"])
            for rate, values in sorted(found.items()):
                keep(f"{data}/{search}/{rate:g}", {"validation": statistics.fmean(values)})
        for name in networks:
            for row in _rows(folder / data / name / "new" / "own-steps.csv"):
                keep(f"{data}/{name}/seed={row['seed']}", {"after_0": 100 * float(row["mean"])}, row["seed"])
        for path in sorted((folder / data / "lambda").glob("networks=*/*.new/own-steps.csv")):
            for row in _rows(path):
                cell = path.parent.with_suffix("")
                settings, run = evaluations(cell.with_name(f"{cell.name},seed={row['seed']}"), "")
                weights = (float(settings[f"algorithm.{key}"]) for key in ("lambda_h", "local.lambda_theta"))
                name = "/".join((data, "lambda", *(f"{weight:g}" for weight in weights), f"seed={row['seed']}"))
                measured = {"validation": last(run)["validation"], "after_0": 100 * float(row["validation"])}
                keep(name, measured, row["seed"])
        rows = _rows(folder / data / "own-steps" / "own-steps.csv")
        for method in METHODS:
            of = [row for row in rows if row["method"] == method]
            for rate in sorted({float(row["rate"]) for row in of}):
                at = [row for row in of if float(row["rate"]) == rate]
                steps = sorted({int(row["steps"]) for row in at if row["validation"]})
                means = {
                    f"after_{t}": 100
                    * statistics.fmean(float(row["validation"]) for row in at if int(row["steps"]) == t)
                    for t in steps
                }
                keep(f"{data}/own/{method}/{rate:g}", means)
            for seed in sorted({row["seed"] for row in of}, key=int):
                chosen = [row for row in of if row["seed"] == seed and row["mean"]]
                tested = {f"after_{row['steps']}": 100 * float(row["mean"]) for row in chosen}
                tested |= {f"masked_{r['steps']}": 100 * float(r["masked"]) for r in chosen if r["masked"]}
                keep(f"{data}/test/{method}/seed={seed}", tested, seed)
    return runs


def _rows(path: Path) -> list[dict[str, str]]:
    """Return the lines of a file; empty if it does not exist."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def over_seeds(runs: Runs, data: str, method: str) -> dict[int, list[float]]:
    """Return new clients' test accuracy by number of steps, one value per seed."""
    lines = [last(run) for run in runs.under(f"{data}/test/{method}")]
    return {t: [line[f"after_{t}"] for line in lines] for t in STEPS if f"after_{t}" in lines[0].values}


def tables(runs: Runs) -> Iterator[str]:
    """Yield, for each data set, test accuracy, differences, and the search for step sizes."""
    header = ("local steps", *map(str, STEPS))
    for data in (data for data in DATA if runs.under(f"{data}/test/*")):
        found = {method: over_seeds(runs, data, method) for method in METHODS}
        rows = [
            (name, *(spread(found[method][t]) if t in found[method] else "" for t in STEPS))
            for method, name in METHODS.items()
        ]
        for method in ("fedavg", "local"):
            there = found[method]
            cells = [difference(found["pefll"][t], there[t]) if t in there else "" for t in STEPS]
            rows.append((f"PeFLL minus {METHODS[method]}", *cells))
        yield table(header, rows)
        searched = {method: _by_rate(runs, f"{data}/search/{method}") for method in ("pefll", "fedavg")}
        rates = sorted({rate for lines in searched.values() for rate in lines})
        rows = []
        for method, lines in searched.items():
            best = max(line["validation"] for line in lines.values())
            rows.append((METHODS[method], *(_bold(lines[rate]["validation"], best) for rate in rates)))
        yield table(("training's step size", *(f"{rate:g}" for rate in rates)), rows)
        rows = []
        for method, name in METHODS.items():
            lines = _by_rate(runs, f"{data}/own/{method}")
            for rate, line in lines.items():
                cells = []
                for t in (f"after_{t}" for t in STEPS):
                    best = max(other.values.get(t, 0.0) for other in lines.values())
                    cells.append(_bold(line[t], best) if t in line.values else "")
                rows.append((name, f"{rate:g}", *cells))
        yield table(("local steps", "step size", *header[1:]), rows, left=2)
        if runs.under(f"{data}/lambda/*/*"):
            yield from _regularized(runs, data)
        if runs.under(f"{data}/networks/*"):
            yield _other_networks(runs, data)


def _other_networks(runs: Runs, data: str) -> str:
    """Return PeFLL with other hypernetworks or embedding networks: the search, and new clients without steps."""
    as_is = "M: three hidden layers, a LeNet"
    searches = {as_is: f"{data}/search/pefll"}
    tests = {as_is: f"{data}/test/pefll"}
    for name, title in NETWORKS_OF.items():
        searches[title], tests[title] = f"{data}/networks/{name}/search", f"{data}/networks/{name}"
    found = {title: [last(run)["after_0"] for run in runs.under(folder)] for title, folder in tests.items()}
    rates = sorted({rate for search in searches.values() for rate in _by_rate(runs, search)})
    rows = []
    for title, folder in searches.items():
        lines = _by_rate(runs, folder)
        best = max(line["validation"] for line in lines.values())
        cells = [_bold(lines[rate]["validation"], best) if rate in lines else "" for rate in rates]
        less = "" if title == as_is else difference(found[title], found[as_is])
        rows.append((title, *cells, spread(found[title]), less))
    return table(("step size", *(f"{rate:g}" for rate in rates), "new clients, test", "minus M"), rows)


def _regularized(runs: Runs, data: str) -> Iterator[str]:
    """Yield the validation accuracy of seen and of new clients by λ."""
    for of in ("validation", "after_0"):
        rows = []
        for theta in THETA:
            cells = [runs.under(f"{data}/lambda/{networks}/{theta}") for networks in NETWORKS]
            rows.append((theta, *(spread([last(run)[of] for run in cell]) for cell in cells)))
        yield table(("λ_θ", *(f"λ_h = λ_v = {networks}" for networks in NETWORKS)), rows)


def _by_rate(runs: Runs, folder: str) -> dict[float, Evaluation]:
    lines = {float(last(run).run.rpartition("/")[2]): last(run) for run in runs.under(folder)}
    return dict(sorted(lines.items()))


def _bold(value: float, best: float) -> str:
    return f"**{value:.1f}**" if value == best else f"{value:.1f}"


def curves(runs: Runs) -> Figure:
    """Draw test accuracy over a new client's extra local steps: a line per mean over seeds, a dot per seed."""
    shown = {data: title for data, title in DATA.items() if runs.under(f"{data}/test/*")}
    rows = 1 if len(shown) < 4 else 2
    columns = math.ceil(len(shown) / rows)
    figure = Figure(figsize=(HALF * columns, 3.2 * rows), layout="constrained")
    places = [figure.add_subplot(rows, columns, i + 1) for i in range(len(shown))]
    for axes, (data, title) in zip(places, shown.items(), strict=True):
        for method, name in METHODS.items():
            found = over_seeds(runs, data, method)
            axes.plot(list(found), [statistics.fmean(v) for v in found.values()], color=COLOURS[method], label=name)
            x, y = zip(*((t, v) for t, values in found.items() for v in values), strict=True)
            axes.plot(x, y, ".", color=COLOURS[method], markersize=3)
        axes.set_xscale("symlog", linthresh=1)
        axes.set_xticks(STEPS, [str(t) for t in STEPS])
        axes.set(title=title, xlabel="local steps of a new client")
    for axes in figure.axes[::columns]:
        axes.set_ylabel("test accuracy, %")
    figure.axes[0].legend()
    return figure
