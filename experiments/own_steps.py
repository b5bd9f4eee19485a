"""How well a new client is served, against the steps that it makes itself: PeFLL, FedAvg and Local, one line each.

    python experiments/own_steps.py runs/quickstart/pefll runs/quickstart/fedavg runs/quickstart/local --out own-steps
    python experiments/own_steps.py RUN... --partition NEW... --steps 0,1,5 --out DIR

The models are those of the runs' last rounds; a client makes its steps by the run's own local SGD, from the model that
it is handed, or, of Local, from a random start (its accuracy after no step is chance, and is not measured). Test
accuracy of the unseen clients of the runs' partition, or of the clients of others, which ``data.partition.reserve``
makes new (an overlap with what was trained on is refused). Runs that differ in the seed alone are one line, mean over
seeds. Writes DIR/own-steps.csv (every seed), and DIR/own-steps.svg.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import yaml
from matplotlib.figure import Figure

from fedloom.federation.folder import EXPERIMENT
from fedloom.reporting.compare_figures import COLOURS
from fedloom.reporting.drawing import as_svg
from fedloom.runner.trained import evaluate

STEPS = (0, 1, 2, 5, 10, 20, 50)
KEYS = {"local": "algorithm.local", "fedavg": "algorithm", "pefll": "algorithm"}


class Measured(NamedTuple):
    """One line of the table: accuracies are fractions."""

    method: str
    seed: int
    steps: int
    clients: int
    mean: float
    worst_decile: float
    masked: float | None


def with_steps(run: Path, steps: int, into: Path) -> Path | None:
    """Return a folder with a run's files, whose clients make so many steps; None where that says nothing.

    Raises
    ------
    SystemExit
        If it is a run of another method.
    """
    experiment = yaml.safe_load((run / EXPERIMENT).read_text(encoding="utf-8"))
    method = experiment["algorithm"]["name"]
    if method not in KEYS:
        sys.exit(f"{run}: found algorithm {method}; allowed: {', '.join(KEYS)}")
    if method == "local":
        if steps == 0:
            return None
        experiment["algorithm"]["local"] |= {"steps": steps, "epochs": None}
    else:
        experiment["algorithm"]["personalize_steps"] = steps
    into.mkdir()
    for file in run.iterdir():
        if file.name != EXPERIMENT:
            (into / file.name).symlink_to(file.resolve())
    (into / EXPERIMENT).write_text(yaml.safe_dump(experiment), encoding="utf-8")
    return into


def measured(run: Path, steps: int, partitions: Sequence[Path]) -> list[Measured]:
    """Evaluate a run's last model after so many steps of each new client; one entry for each partition."""
    found = []
    with tempfile.TemporaryDirectory() as place:
        folder = with_steps(run, steps, Path(place) / "run")
        others: list[Path | None] = [*partitions] or [None]
        for partition in others if folder is not None else []:
            assert folder is not None
            statistics_ = evaluate(folder, partition=partition).statistics
            overlap = statistics_.get("overlap", {"clients": 0})
            if overlap is None or overlap["clients"]:
                sys.exit(f"{partition}: found overlap {overlap} with what {run} was trained on; allowed: new examples")
            unseen = statistics_["unseen"]
            if unseen is None:
                sys.exit(f"{run}: found no unseen clients; allowed: a run with some, or --partition")
            masked = unseen.get("masked")
            found.append(
                Measured(
                    statistics_["algorithm"],
                    statistics_["seed"],
                    steps,
                    unseen["clients"],
                    unseen["accuracy_mean"],
                    unseen["accuracy_worst_decile"],
                    None if masked is None else masked["accuracy_mean"],
                )
            )
    return found


def drawn(lines: Sequence[Measured]) -> Figure:
    """Mean accuracy over steps, a line for each method; a dot for each seed."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for colour, method in zip(COLOURS.values(), dict.fromkeys(line.method for line in lines), strict=False):
        of_method = [line for line in lines if line.method == method]
        steps = sorted({line.steps for line in of_method})
        means = [100 * statistics.fmean(line.mean for line in of_method if line.steps == t) for t in steps]
        axes.plot(steps, means, marker="o", color=colour, label=method)
        axes.plot([line.steps for line in of_method], [100 * line.mean for line in of_method], ".", color=colour)
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xticks(sorted({line.steps for line in lines}), [str(t) for t in sorted({line.steps for line in lines})])
    axes.set_xlabel("steps of a new client's own")
    axes.set_ylabel("test accuracy, %")
    axes.legend()
    return figure


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--partition", type=Path, nargs="+", default=[])
    parser.add_argument("--steps", default=",".join(map(str, STEPS)))
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        line
        for run in given.runs
        for steps in map(int, given.steps.split(","))
        for line in measured(run, steps, given.partition)
    ]
    given.out.mkdir(parents=True, exist_ok=True)
    with (given.out / "own-steps.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerows([Measured._fields, *lines])
    (given.out / "own-steps.svg").write_text(as_svg(drawn)(lines), encoding="utf-8")
    for line in lines:
        print(f"{line.method} seed {line.seed}: {line.steps} steps, {line.clients} clients, {100 * line.mean:.1f} %")


if __name__ == "__main__":
    main()
