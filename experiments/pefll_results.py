"""Tables and figures of docs/results/pefll-cifar10.md, from the runs of experiments/pefll-cifar10.sh.

    OMP_NUM_THREADS=1 python experiments/pefll_results.py [--runs runs/pefll-cifar10] [--out docs/results]

Whatever is there is shown. Of the parts ``search`` and ``ablation`` no test accuracy is read.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from matplotlib.figure import Figure

from fedloom.reporting.figures import FULL, HALF, as_svg
from fedloom.reporting.run_folder import EXPERIMENT, RunFolder

ROWS = {  # part: its name, and the paper's figures for seen and unseen clients
    "table/pefll": ("PeFLL", "89.0", "89.3"),
    "table/fedavg": ("FedAvg", "47.5", "48.6"),
    "table/local": ("Local", "82.2", "81.6"),
    "unlabelled": ("PeFLL, descriptors without labels", "", "84.5"),
    "dirichlet": ("PeFLL, Dirichlet(0.1) clients", "", ""),
}
COLOURS = {"PeFLL": "#0072b2", "FedAvg": "#d55e00", "Local": "#009e73"}

Lines = list[dict[str, Any]]


def runs_in(folder: Path) -> Iterator[tuple[dict[str, Any], Lines]]:
    """The experiment and the evaluated rounds of each run that ended, by folder."""
    for path in sorted(folder.glob(f"*/{EXPERIMENT}")):
        files = RunFolder.open(path.parent)
        if (path.parent / "summary.json").exists():
            yield yaml.safe_load(files.text(EXPERIMENT)), files.metrics().objects


def percent(line: Mapping[str, Any], group: str, *, masked: bool = False) -> float:
    """Pooled test accuracy of a group of clients."""
    about = line[group]["masked"] if masked else line[group]
    return 100 * float(about["accuracy_pooled"])


def spearman(line: Mapping[str, Any]) -> float:
    """Rank correlation of descriptor distances with class-mix distances, mean over the unseen clients."""
    return float(line["pefll"]["spearman"]["mean"])


def validated(lines: Lines) -> dict[str, Any]:
    """The round of highest validation accuracy, the earliest on ties."""
    return max(lines, key=lambda line: (line["validation_pooled"], -line["round"]))


def shown(values: Sequence[float]) -> str:
    """Mean, ± the standard deviation where there are several."""
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{spread}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table in Markdown."""
    print("\n| " + " | ".join(header) + " |\n|---" + "|---:" * (len(header) - 1) + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |")


def searches(runs: Path) -> None:
    """Validation accuracy of every setting that was tried, in the last round and in the best."""
    rows = []
    for folder in sorted([*(runs / "search").glob("*"), *(runs / "ablation").glob("*")]):
        for e, lines in runs_in(folder):
            algorithm = e["algorithm"]
            about = [f"lr {algorithm['local']['lr']:g}", f"momentum {algorithm['local']['momentum']:g}"]
            about.append(e["model"]["precision"])
            if algorithm["name"] == "pefll":
                about.append(f"output_relu {algorithm['hypernetwork']['output_relu']}".lower())
                about.append(f"standardize {algorithm['descriptor']['standardize']}")
                about.append(f"lambda_theta {algorithm['local']['lambda_theta']:g}")
            values = (100 * line["validation_pooled"] for line in (lines[-1], validated(lines)))
            rows.append((folder.name, ", ".join(about), str(lines[-1]["round"]), *(f"{value:.1f}" for value in values)))
    table(("search", "setting", "rounds", "validation, last round", "best round"), rows)


def results(runs: Path) -> None:
    """Each part in its last round, and in the round that validation picks."""
    for title, picked in (("last round", lambda lines: lines[-1]), ("round of highest validation accuracy", validated)):
        rows = []
        for part, (name, *paper) in ROWS.items():
            found = [picked(lines) for _, lines in runs_in(runs / part)]
            if found:
                cells = [shown([percent(line, g, masked=m) for line in found]) for m in (False, True) for g in GROUPS]
                validation = shown([100 * line["validation_pooled"] for line in found])
                rounds = ", ".join(str(line["round"]) for line in found)
                rows.append((name, rounds, validation, cells[0], paper[0], cells[1], paper[1], *cells[2:]))
        print(f"\n{title}")
        table(("", "round", "validation", "seen", "paper", "unseen", "paper", "seen, masked", "unseen, masked"), rows)


GROUPS = ("seen", "unseen")


def curves(found: Mapping[str, Lines], local: Lines | None) -> Figure:
    """Test accuracy over rounds and over communication, as in papers/001, Figure 8."""
    figure = Figure(figsize=(FULL, 5.0), layout="constrained")
    axes = figure.subplots(2, 2, sharey=True, sharex="col")
    for row, group in zip(axes, GROUPS, strict=True):
        for name, lines in found.items():
            sent = [sum(line["communication"][f"payload_{way}"] for way in ("up", "down")) / 1e9 for line in lines]
            for panel, x in zip(row, ([line["round"] for line in lines], sent), strict=True):
                panel.plot(x, [percent(line, group) for line in lines], color=COLOURS[name], label=name)
        if local:
            for panel in row:
                panel.axhline(percent(local[-1], group), color=COLOURS["Local"], linestyle=":", label="Local")
        row[0].set_ylabel(f"{group} clients, %")
    axes[1][0].set_xlabel("rounds")
    axes[1][1].set_xlabel("tensors sent and received, GB")
    axes[0][0].legend()
    return figure


def descriptors(found: Mapping[str, Lines]) -> Figure:
    """Rank correlation of descriptors with class mixes over rounds, as in papers/001, Figure 3."""
    figure = Figure(figsize=(HALF, 2.8), layout="constrained")
    axes = figure.subplots()
    for (name, lines), colour in zip(found.items(), COLOURS.values(), strict=False):
        axes.plot([line["round"] for line in lines], [spearman(line) for line in lines], color=colour, label=name)
    axes.set_xlabel("rounds")
    axes.set_ylabel("Spearman, unseen clients")
    axes.legend()
    return figure


def extrapolation(found: Mapping[float, Mapping[str, Any]]) -> Figure:
    """Test accuracy of new clients from other mixes, as in papers/001, Figure 4."""
    figure = Figure(figsize=(HALF, 2.8), layout="constrained")
    axes = figure.subplots()
    axes.plot(list(found), [percent(line, "unseen") for line in found.values()], marker="o", color=COLOURS["PeFLL"])
    axes.set_xlabel("α of the new clients (training: 0.1)")
    axes.set_ylabel("test accuracy, %")
    return figure


def first(folder: Path) -> Lines | None:
    """The evaluated rounds of a part's first run that ended."""
    return next((lines for _, lines in runs_in(folder)), None)


def save(out: Path | None, name: str, draw: Callable[[], Figure]) -> None:
    """Write a figure."""
    if out is not None:
        (out / name).write_text(as_svg(draw)())


def main() -> None:
    """Print the tables, draw the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/pefll-cifar10"))
    parser.add_argument("--out", type=Path, help="where figures go; without it there are none")
    given = parser.parse_args()
    runs: Path = given.runs
    searches(runs)
    results(runs)
    pefll, fedavg = first(runs / "table/pefll"), first(runs / "table/fedavg")
    if pefll and fedavg:
        local = first(runs / "table/local")
        both = {"PeFLL": pefll, "FedAvg": fedavg}
        save(given.out, "pefll-cifar10-curves.svg", lambda: curves(both, local))
    dirichlet = first(runs / "dirichlet")
    if dirichlet:
        correlations = {"Dirichlet(0.1)": dirichlet, **({"two classes": pefll} if pefll else {})}
        rows = [
            (name, *(f"{spearman(line):.2f}" for line in (lines[0], min(lines, key=spearman), lines[-1])))
            for name, lines in correlations.items()
        ]
        table(("Spearman", "round 0", "least", "last round"), rows)
        save(given.out, "pefll-cifar10-descriptors.svg", lambda: descriptors(correlations))
    files = sorted(runs.glob("extrapolation-*.json"))
    if files:
        mixes = {float(path.stem.rpartition("-")[2]): json.loads(path.read_text()) for path in files}
        table(
            ("α", *(f"{alpha:g}" for alpha in mixes)),
            [("PeFLL", *(f"{percent(m, 'unseen'):.1f}" for m in mixes.values()))],
        )
        save(given.out, "pefll-cifar10-extrapolation.svg", lambda: extrapolation(mixes))


if __name__ == "__main__":
    main()
