"""New clients' accuracy over the number of their extra local steps: PeFLL, FedAvg and Local, a line each.

    python research/own_steps.py runs/quickstart/pefll runs/quickstart/fedavg runs/quickstart/local --out own-steps
    python research/own_steps.py RUN... --partition NEW... --steps 0,1,5 --rates 0.01,0.1 --out DIR

The models are those of the runs' last rounds. A client makes its steps with the run's own local SGD, starting from the
model that it receives or, for Local, at random (accuracy after no step is then chance, and is not measured). Test
accuracy is that of unseen clients of the runs' partition, or of clients of other partitions, which
``data.partition.reserve`` makes new (an overlap with the training data is refused). Runs that differ only in the seed
form one line, the mean over seeds. With ``--rates``, a method's step size at each number of steps is the one with the
highest accuracy on new clients' validation examples, mean over the runs; without it, the run's own. Test accuracy is
recorded for no other step size. Writes DIR/own-steps.csv (every seed) and DIR/own-steps.svg.
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

from fedloom.engine.trained import evaluate
from fedloom.errors import QuorumError
from fedloom.reporting.compare_figures import COLOURS
from fedloom.reporting.drawing import as_svg
from fedloom.runs.files import EXPERIMENT
from fedloom.tasks.base import CORRECT, TOTAL

STEPS = (0, 1, 2, 5, 10, 20, 50)
METHODS = ("local", "fedavg", "pefll")


class Measured(NamedTuple):
    """Line of the table: accuracies are fractions, means over clients; ``rate`` is the step size of extra local steps.

    ``validation`` is pooled. The three test results are None at a rate that validation did not choose.
    """

    method: str
    seed: int
    steps: int
    rate: float
    clients: int
    validation: float | None
    mean: float | None
    worst_decile: float | None
    masked: float | None


def with_steps(run: Path, steps: int, rate: float | None, into: Path) -> tuple[Path | None, float]:
    """Return a folder with a run's files, changed to this number of steps, and their step size.

    The folder is None if the number does not apply; the step size is the run's own if ``rate`` is None.

    Raises
    ------
    SystemExit
        If the run's method is not supported.
    """
    experiment = yaml.safe_load((run / EXPERIMENT).read_text(encoding="utf-8"))
    algorithm = experiment["algorithm"]
    if algorithm["name"] not in METHODS:
        sys.exit(f"{run} must be a run of {', '.join(METHODS)} (got {algorithm['name']})")
    rate = algorithm["local"]["lr"] if rate is None else rate
    algorithm["local"]["lr"] = rate
    if algorithm["name"] == "local":
        if steps == 0:
            return None, rate
        algorithm["local"] |= {"steps": steps, "epochs": None}
    else:
        algorithm["personalize_steps"] = steps
    into.mkdir()
    for file in run.iterdir():
        if file.name != EXPERIMENT:
            (into / file.name).symlink_to(file.resolve())
    (into / EXPERIMENT).write_text(yaml.safe_dump(experiment), encoding="utf-8")
    return into, rate


def measured(run: Path, steps: int, partitions: Sequence[Path], rate: float | None = None) -> list[Measured]:
    """Evaluate a run's last model after extra local steps of each new client; return one entry per partition.

    A partition is left out if a client's steps diverged.
    """
    found = []
    with tempfile.TemporaryDirectory() as place:
        folder, rate = with_steps(run, steps, rate, Path(place) / "run")
        others: list[Path | None] = [*partitions] or [None]
        for partition in others if folder is not None else []:
            assert folder is not None
            try:
                about = evaluate(folder, partition=partition)
            except QuorumError as error:
                print(f"{run}: {steps} steps of {rate:g}: {error}")
                continue
            statistics_ = about.statistics
            overlap = statistics_.get("overlap", {"clients": 0})
            if overlap is None or overlap["clients"]:
                sys.exit(f"{partition} must have no training examples of {run} (overlap: {overlap})")
            unseen = statistics_["unseen"]
            if unseen is None:
                sys.exit(f"{run} has no unseen clients; give another run, or --partition")
            masked = unseen.get("masked")
            new = ~about.evaluation.seen.bool()
            counts = about.evaluation.of("personal", "validation", "unmasked")[new].sum(0)
            found.append(
                Measured(
                    statistics_["algorithm"],
                    statistics_["seed"],
                    steps,
                    rate,
                    unseen["clients"],
                    float(counts[CORRECT] / counts[TOTAL]) if counts[TOTAL] else None,
                    unseen["accuracy_mean"],
                    unseen["accuracy_worst_decile"],
                    None if masked is None else masked["accuracy_mean"],
                )
            )
    return found


def by_validation(lines: Sequence[Measured]) -> list[Measured]:
    """Return the lines, with test accuracy only at the step size chosen on validation.

    It is the step size with the highest validation accuracy, mean over the runs, for each method and number of steps;
    the smallest on ties. A step size at which a client of any run diverged is excluded.

    Raises
    ------
    SystemExit
        If new clients have no validation examples.
    """
    cells: dict[tuple[str, int], dict[float, list[Measured]]] = {}
    for line in lines:
        cells.setdefault((line.method, line.steps), {}).setdefault(line.rate, []).append(line)
    kept = []
    for rates in cells.values():
        runs = max(len(those) for those in rates.values())
        means = {
            rate: statistics.fmean(line.validation for line in those if line.validation is not None)
            for rate, those in sorted(rates.items())
            if len(those) == runs and all(line.validation is not None for line in those)
        }
        if not means:
            sys.exit("With --rates, new clients need validation examples.")
        best = max(means, key=lambda rate: means[rate])
        kept += [rates[best]]
    chosen = {id(line) for those in kept for line in those}
    return [line if id(line) in chosen else line._replace(mean=None, worst_decile=None, masked=None) for line in lines]


def drawn(lines: Sequence[Measured]) -> Figure:
    """Draw mean accuracy over steps, a line per method and a dot per seed."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for colour, method in zip(COLOURS.values(), dict.fromkeys(line.method for line in lines), strict=False):
        found = [(line.steps, 100 * line.mean) for line in lines if line.method == method and line.mean is not None]
        steps = sorted({t for t, _ in found})
        means = [statistics.fmean(mean for at, mean in found if at == t) for t in steps]
        axes.plot(steps, means, marker="o", color=colour, label=method)
        axes.plot([t for t, _ in found], [mean for _, mean in found], ".", color=colour)
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xticks(sorted({line.steps for line in lines}), [str(t) for t in sorted({line.steps for line in lines})])
    axes.set_xlabel("local steps of a new client")
    axes.set_ylabel("test accuracy, %")
    axes.legend()
    return figure


def main() -> None:
    """Measure, print and write the table and the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--partition", type=Path, nargs="+", default=[])
    parser.add_argument("--steps", default=",".join(map(str, STEPS)))
    parser.add_argument(
        "--rates", help="step sizes of the extra local steps, separated by commas; by default the run's"
    )
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rates = [float(rate) for rate in given.rates.split(",")] if given.rates else [None]
    lines = [
        line
        for run in given.runs
        for steps in map(int, given.steps.split(","))
        for rate in (rates if steps else [None])  # without steps there is no step size
        for line in measured(run, steps, given.partition, rate)
    ]
    if given.rates:
        lines = by_validation(lines)
    given.out.mkdir(parents=True, exist_ok=True)
    with (given.out / "own-steps.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerows([Measured._fields, *lines])
    (given.out / "own-steps.svg").write_text(as_svg(drawn)(lines), encoding="utf-8")
    for line in lines:
        if line.mean is not None:
            about = f"{line.steps} steps of {line.rate:g}, {line.clients} clients"
            print(f"{line.method} seed {line.seed}: {about}, {100 * line.mean:.1f} %")


if __name__ == "__main__":
    main()
