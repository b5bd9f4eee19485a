"""``fedloom run --seeds ... --grid ...``: one experiment at every point of a grid, then the comparison."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from fedloom.experiment import Experiment

LONGEST_NAME = 120
"""Of a run's folder, in characters."""


@dataclass(frozen=True)
class Point:
    """One run of a sweep: its folder's name, the overrides that make it, and the experiment they give."""

    name: str
    overrides: tuple[str, ...]
    experiment: Experiment


def points(path: str | Path, overrides: Sequence[str], seeds: str | None, grid: Sequence[str]) -> list[Point]:
    """Every run of a sweep, the seeds of one setting next to each other.

    Parameters
    ----------
    path
        The experiment file, or its URL.
    overrides
        ``key=value`` for every run.
    seeds
        ``1,2,3`` or ``1-3``; None keeps the experiment's.
    grid
        ``key=v1,v2`` each; the runs are the product.

    Raises
    ------
    ExperimentError
        If the grid cannot be read, or an experiment in it is not allowed; before anything runs.
    """
    from fedloom import experiment as experiments
    from fedloom.cli import reading
    from fedloom.errors import ExperimentError

    axes = [experiments.grid_values(text) for text in grid]
    keys = [key for key, _ in axes]
    for key in keys:
        if keys.count(key) > 1:
            raise ExperimentError(f"--grid {key}: found twice; allowed: each key once, with all its values")
    if seeds is not None:
        if "seed" in keys:
            raise ExperimentError("--grid seed: found with --seeds; allowed: one of them")
        axes.append(("seed", [str(seed) for seed in seeds_of(seeds)]))
    labels = _labels([key for key, _ in axes])
    found: list[Point] = []
    for values in itertools.product(*(values for _, values in axes)):
        settings = [f"{key}={value}" for (key, _), value in zip(axes, values, strict=True)]
        try:
            experiment = reading.experiment(path, [*overrides, *settings])
        except ExperimentError as error:
            raise ExperimentError(f"at {', '.join(settings)}: {error}") from error
        name = _folder_name([f"{label}={_short(value)}" for label, value in zip(labels, values, strict=True)], settings)
        found.append(Point(name, (*overrides, *settings), experiment))
    return found


def seeds_of(text: str) -> list[int]:
    """Return the seeds that ``1,2,3`` or ``1-3`` stands for.

    Raises
    ------
    ExperimentError
        If it cannot be read, or a seed occurs twice.
    """
    from fedloom.errors import ExperimentError

    seeds: list[int] = []
    for part in text.split(","):
        span = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
        if span is None:
            raise ExperimentError(
                f"--seeds: found {text!r}; allowed: numbers separated by commas, such as 1,2,3 or 1-3"
            )
        seeds += range(int(span[1]), int(span[2] or span[1]) + 1)
    if not seeds or len(set(seeds)) < len(seeds):
        raise ExperimentError(f"--seeds: found {text!r}; allowed: at least one, each once")
    return seeds


def _labels(keys: Sequence[str]) -> list[str]:
    """The shortest ends of dotted keys that tell them apart."""

    def end(key: str, steps: int) -> str:
        return ".".join(key.split(".")[-steps:])

    labels = []
    for key in keys:
        others = [other for other in keys if other != key]
        steps = 1
        while any(end(key, steps) == end(other, steps) for other in others):
            steps += 1
        labels.append(end(key, steps))
    return labels


def _short(value: str) -> str:
    """A YAML value as part of a name; of a mapping, the name in it."""
    import yaml

    parsed = yaml.safe_load(value)
    named = (parsed.get("name") or parsed.get("scheme")) if isinstance(parsed, dict) else None
    return f"{{{named}}}" if named else value


def _folder_name(parts: Sequence[str], settings: Sequence[str]) -> str:
    """A folder's name that says the settings; where it cannot say them all, a hash of them tells it apart."""
    plain = ",".join(parts)
    name = re.sub(r"[^A-Za-z0-9._=,+-]+", "_", plain)
    if name == plain and len(name) <= LONGEST_NAME:
        return name
    digest = hashlib.sha256("\n".join(settings).encode()).hexdigest()[:8]
    return f"{name[: LONGEST_NAME - 9]}-{digest}"


def finished(folder: Path, experiment: Experiment) -> bool:
    """Whether a run has come to the end of its rounds, and has its report, or is published as a whole."""
    from importlib.util import find_spec

    from fedloom.federation.folder import RunFolder

    if not (folder / "summary.json").exists():
        return False
    run = RunFolder.open(folder)
    if run.json("summary.json").get("rounds") != experiment.federation.rounds:
        return False
    if (folder / "published.json").exists():  # the report, too, is made before that
        return bool(run.json("published.json").get("finished", False))
    return (folder / "report.html").exists() or find_spec("matplotlib") is None


def conclude(folder: Path) -> None:
    """Show and write what the sweep found.

    Where settings were tried, test accuracy is shown only of those that validation chooses: looking at it for all
    would be choosing by it. `fedloom compare SWEEP` shows everything.
    """
    from rich.console import Console

    from fedloom.cli.use import show_comparison
    from fedloom.cli.watch import narrow
    from fedloom.reporting.compare import compare

    comparison = compare([folder])
    tried = {
        (comparison.rows[choice.row].block, comparison.rows[choice.row].runs[0].method) for choice in comparison.chosen
    }
    chosen = {run.path for choice in comparison.chosen for run in comparison.rows[choice.row].runs}
    shown: dict[Path, None] = {}
    title = f"Validation {comparison.scale.words} (seen clients, pooled)"
    table = narrow(title, ("", "last round", "best round"))
    for row in comparison.rows:
        paths = [run.path for run in row.runs]
        candidate = (row.block, row.runs[0].method) in tried
        personal = [r for r in comparison.rows if r.runs == row.runs and r.predictor == "personal"]
        if candidate and (row in personal or not personal):  # without fine-tuning the global model is everybody's own
            mark = "  <- chosen" if chosen.issuperset(paths) else ""
            table.add_row(row.label + mark, *(row.scale.shown(row.validation(best=best)) for best in (False, True)))
        if not candidate or chosen.issuperset(paths):
            shown |= dict.fromkeys(paths)
    if comparison.chosen:
        Console().print(table)
    show_comparison(list(shown), folder / "comparison")
    typer.echo(f"comparison: {folder / 'comparison' / 'compare.html'}")
