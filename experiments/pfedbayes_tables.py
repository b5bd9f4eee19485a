"""The tables and the figure of docs/results/pfedbayes.md, from the runs of experiments/pfedbayes-table-1.sh.

    OMP_NUM_THREADS=1 python experiments/pfedbayes_tables.py [--runs runs/pfedbayes] [--out docs/results]

Whatever is finished is shown. Of the parts ``tune``, ``tune-cifar10`` and ``choices`` no test accuracy is read.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

from fedloom import experiment as experiments
from fedloom.algorithms.pfedbayes import BayesianPredictor
from fedloom.federation.checkpoint import Checkpoints
from fedloom.federation.folder import RunFolder
from fedloom.run import assemble

SIZES = ("small", "medium", "large")
DATASETS = ("fashion-mnist", "mnist", "cifar10")
SEARCHES = {"tune": "MNIST", "tune-cifar10": "CIFAR-10"}
PREDICTORS = {"pfedbayes": ("PM", "GM"), "fedavg": ("GM",), "local": ("PM",)}
NAMES = {"pfedbayes": "pFedBayes", "fedavg": "FedAvg", "local": "Local"}
PAPER = {  # Table 1, percent
    ("fashion-mnist", "pfedbayes", "PM"): (89.05, 91.95, 93.01),
    ("fashion-mnist", "pfedbayes", "GM"): (80.17, 82.33, 83.30),
    ("fashion-mnist", "fedavg", "GM"): (81.51, 83.90, 85.42),
    ("mnist", "pfedbayes", "PM"): (94.13, 97.09, 98.79),
    ("mnist", "pfedbayes", "GM"): (90.44, 92.33, 94.39),
    ("mnist", "fedavg", "GM"): (87.38, 90.60, 92.39),
    ("cifar10", "pfedbayes", "PM"): (61.37, 73.94, 83.46),
    ("cifar10", "pfedbayes", "GM"): (47.71, 60.84, 64.40),
    ("cifar10", "fedavg", "GM"): (44.24, 56.73, 79.05),
}


def accuracy(line: dict[str, Any], predictor: str) -> float:
    """Pooled test accuracy in percent of a line of ``metrics.jsonl``."""
    return 100 * float(line["seen" if predictor == "PM" else "global"]["accuracy_pooled"])


def validated(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The line of highest validation accuracy, the earliest on ties."""
    return max(lines, key=lambda line: (line["validation_pooled"], -line["round"]))


def highest(lines: Sequence[dict[str, Any]], predictor: str) -> float:
    """The highest test accuracy over the rounds, which is the paper's figure."""
    return max(accuracy(line, predictor) for line in lines)


def finished(folder: Path) -> list[Path]:
    """The finished runs of a sweep, by name."""
    return sorted(path.parent for path in folder.glob("*/summary.json"))


def histories(folder: Path) -> list[list[dict[str, Any]]]:
    """The evaluated rounds of each finished run of a sweep."""
    return [RunFolder.open(run).metrics() for run in finished(folder)]


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Mean ± sample standard deviation."""
    shown = f"{statistics.fmean(values):.{digits}f}"
    return f"{shown} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else shown


def global_validation(run: Path) -> float:
    """Pooled validation accuracy in percent of the global distribution in the last round; no run writes it down."""
    e = experiments.load(run / "experiment.yaml")
    dataset = assemble.make_partition(e)
    parts = assemble.make_parts(e, dataset.manifest)
    v = Checkpoints(run / "checkpoints").load("last").state["v"]
    noise = torch.randn(parts.settings.draws, v.shape[-1], generator=torch.Generator().manual_seed(0), dtype=v.dtype)
    predictor = BayesianPredictor(parts.task.model, v, noise)
    right = total = 0
    for entry in dataset.manifest.clients:
        split = dataset.client(entry.id).validation
        assert split.y is not None
        right += int(predictor.log_probabilities(split.x).argmax(1).eq(split.y).sum())
        total += len(split)
    return 100 * right / total


def searches(runs: Path) -> Iterator[str]:
    """Validation accuracy of every setting that was tried, the best first."""
    for part, method in product(SEARCHES, PREDICTORS):
        found = [
            (100 * RunFolder.open(run).metrics()[-1]["validation_pooled"], run)
            for run in finished(runs / part / method)
        ]
        if found:
            yield f"\n{NAMES[method]}, {SEARCHES[part]} medium, validation\n"
        for value, run in sorted(found, reverse=True):
            yield f"| {run.name} | {value:.2f} |" + (
                f" {global_validation(run):.2f} |" if method == "pfedbayes" else ""
            )


def choices(runs: Path) -> Iterator[str]:
    """What each open choice is worth on validation."""
    for folder in sorted((runs / "choices").glob("*")):
        for run in finished(folder):
            last = RunFolder.open(run).metrics()[-1]
            personal = 100 * last["validation_pooled"]
            yield f"| {run.name} | {personal:.2f} | {global_validation(run):.2f} | {training_seconds(run):.0f} |"


def training_seconds(run: Path) -> float:
    """Time in rounds, evaluations left out."""
    return sum(float(line.get("seconds", 0.0)) for line in RunFolder.open(run).lines("journal.jsonl"))


def table(runs: Path, dataset: str) -> Iterator[str]:
    """Table 1 for one data set: the paper's figure, ours in the same way, and what validation would have picked."""
    yield f"\n{dataset}\n"
    yield "| size | | paper | highest of all rounds | each seed | round picked on validation | last round |"
    yield "|---|---|---:|---:|---|---:|---:|"
    for i, size in enumerate(SIZES):
        for method, predictors in PREDICTORS.items():
            found = histories(runs / dataset / size / method)
            for predictor in predictors if found else ():
                best = [highest(lines, predictor) for lines in found]
                columns: list[Callable[[Any], dict[str, Any]]] = [validated, lambda lines: lines[-1]]
                honest, last = ([accuracy(pick(lines), predictor) for lines in found] for pick in columns)
                paper = PAPER.get((dataset, method, predictor))
                yield (
                    f"| {size} | {NAMES[method]}, {predictor} | {paper[i] if paper else ''} | {spread(best)} | "
                    f"{', '.join(f'{value:.2f}' for value in best)} | {spread(honest)} | {spread(last)} |"
                )


def uncertainty(runs: Path, dataset: str) -> Iterator[str]:
    """Calibration error, entropy and mutual information in the last round, mean over seeds."""
    yield f"\n{dataset}: uncertainty on test data, last round\n"
    yield "| size | | ECE | entropy | mutual information |"
    yield "|---|---|---:|---:|---:|"
    for size in SIZES:
        for method, predictors in PREDICTORS.items():
            found = histories(runs / dataset / size / method)
            for predictor in predictors if found else ():
                group = "seen" if predictor == "PM" else "global"
                values = [lines[-1]["uncertainty"][group] for lines in found]
                cells = (
                    f"{statistics.fmean(value[key] for value in values):.3f}"
                    for key in ("ece", "entropy", "mutual_information")
                )
                yield f"| {size} | {NAMES[method]}, {predictor} | {' | '.join(cells)} |"


def curves(runs: Path, datasets: Sequence[str], out: Path) -> None:
    """Test accuracy over rounds, mean over seeds; Local is a level line."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "fedloom", "font.size": 9})
    from matplotlib import pyplot as plt

    looks = {
        ("pfedbayes", "PM"): ("#0072b2", "-"),
        ("pfedbayes", "GM"): ("#0072b2", "--"),
        ("fedavg", "GM"): ("#d55e00", "--"),
        ("local", "PM"): ("#555555", ":"),
    }
    figure, grid = plt.subplots(
        len(datasets), 3, figsize=(9, 2.6 * len(datasets)), layout="constrained", squeeze=False, sharey="row"
    )
    for dataset, row in zip(datasets, grid, strict=True):
        for size, axes in zip(SIZES, row, strict=True):
            for (method, predictor), (colour, dash) in looks.items():
                found = histories(runs / dataset / size / method)
                if not found:
                    continue
                rounds = [line["round"] for line in found[0]]
                means = [
                    statistics.fmean(accuracy(line, predictor) for line in lines) for lines in zip(*found, strict=False)
                ]
                label = f"{NAMES[method]}, {predictor}"
                if method == "local":
                    axes.axhline(means[-1], color=colour, linestyle=dash, label=label)
                else:
                    axes.plot(rounds[1:], means[1:], color=colour, linestyle=dash, label=label)
                if method == "pfedbayes":
                    paper = PAPER[dataset, method, predictor][SIZES.index(size)]
                    axes.plot(
                        [rounds[-1]], [paper], "o", color=colour, fillstyle="full" if predictor == "PM" else "none"
                    )
            axes.set(title=f"{dataset}, {size}", xlabel="round")
            axes.grid(visible=True, alpha=0.3)
        row[0].set_ylabel("test accuracy, %")
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(out / "pfedbayes-curves.svg", metadata={"Date": None})


def main() -> None:
    """Print the tables and write the figure."""
    parser = argparse.ArgumentParser(description="Tables of docs/results/pfedbayes.md")
    parser.add_argument("--runs", type=Path, default=Path("runs/pfedbayes"))
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    options = parser.parse_args()
    datasets = [name for name in DATASETS if (options.runs / name).is_dir()]
    print(*searches(options.runs), *choices(options.runs), sep="\n")
    for dataset in datasets:
        print(*table(options.runs, dataset), *uncertainty(options.runs, dataset), sep="\n")
    if datasets:
        curves(options.runs, datasets, options.out)


if __name__ == "__main__":
    main()
