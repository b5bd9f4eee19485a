"""Grids of settings, ``key=v1,v2,...``, and the experiment at each grid point."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.core.words import shortened, shortest_suffixes
from fedloom.errors import ExperimentError, argument
from fedloom.experiment.loading import of
from fedloom.experiment.yaml_reader import as_yaml, parse_yaml

if TYPE_CHECKING:
    from fedloom.experiment.sections import Experiment

LONGEST_NAME = 120
"""Maximum length of a run folder's name, in characters."""


@dataclass(frozen=True)
class Point:
    """One run of a sweep: its folder's name, its overrides, and the resulting experiment."""

    name: str
    overrides: tuple[str, ...]
    experiment: Experiment


def grid_values(text: str) -> tuple[str, list[str]]:
    """Parse one axis of a grid, ``key=v1,v2,...``.

    Parameters
    ----------
    text
        A dotted key, then YAML values separated by commas (commas inside brackets, braces and quotes do not separate).

    Returns
    -------
    key
        The dotted key.
    values
        Each value as YAML on one line, for use after ``key=`` in an override.

    Raises
    ------
    ExperimentError
        If the text is malformed, or a value occurs twice.
    """
    key, equals, values = text.partition("=")
    if not equals or not all(step.strip() for step in key.split(".")):
        raise ExperimentError(
            f"{argument('grid')} must be KEY=VALUE,VALUE,..., such as algorithm.local.lr=0.01,0.03 (got "
            f"{shortened(text)}).",
            key="grid",
        )
    parsed, _ = parse_yaml(f"[{values}]", f"{argument('grid')} {shortened(text)}")
    if not isinstance(parsed, list) or not parsed:
        raise ExperimentError(f"{argument('grid')} {shortened(text)} has no value.", key="grid")
    found = [as_yaml(value) for value in parsed]
    twice = [value for value in found if found.count(value) > 1]
    if twice:
        raise ExperimentError(f"{argument('grid')} {shortened(text)} has the value {twice[0]} twice.", key="grid")
    return key.strip(), found


def points(
    experiment: Experiment | Mapping[str, Any] | str | Path,
    overrides: Sequence[str],
    seeds: str | None,
    grid: Sequence[str],
    *,
    begun: Path | None = None,
) -> list[Point]:
    """Return every run of a sweep, with the seeds of one setting next to each other.

    Parameters
    ----------
    experiment
        As for :func:`~fedloom.experiment.of`.
    overrides
        ``key=value`` for every run.
    seeds
        ``1,2,3`` or ``1-3``; None keeps the experiment's.
    grid
        ``key=v1,v2`` each; the runs are their product.
    begun
        Folder of one of the runs, if the sweep is resumed; as for :func:`~fedloom.experiment.of`.

    Raises
    ------
    ExperimentError
        If the grid is malformed, or an experiment in it is invalid; before anything runs.
    """
    axes = _axes(grid, seeds)
    labels = shortest_suffixes([key for key, _ in axes])
    found: list[Point] = []
    for values in itertools.product(*(values for _, values in axes)):
        settings = [f"{key}={value}" for (key, _), value in zip(axes, values, strict=True)]
        try:
            made = of(experiment, [*overrides, *settings], begun=begun)
        except ExperimentError as error:
            raise ExperimentError(f"at {', '.join(settings)}: {error}") from error
        name = _folder_name([f"{label}={_short(value)}" for label, value in zip(labels, values, strict=True)], settings)
        found.append(Point(name, (*overrides, *settings), made))
    return found


def _axes(grid: Sequence[str], seeds: str | None) -> list[tuple[str, list[str]]]:
    """Return the keys of a sweep with their values, seeds last."""
    axes = [grid_values(text) for text in grid]
    keys = [key for key, _ in axes]
    for key in keys:
        if keys.count(key) > 1:
            raise ExperimentError(f"{argument('grid')} names {key} twice; give all its values at once.", key="grid")
    if seeds is None:
        return axes
    if "seed" in keys:
        raise ExperimentError(f"{argument('grid')} of seed cannot be combined with {argument('seeds')}.", key="grid")
    return [*axes, ("seed", [str(seed) for seed in seeds_of(seeds)])]


def begun_in(folder: Path | None) -> Path | None:
    """Return the folder of a run inside a sweep's folder; None if there is none."""
    return None if folder is None else next((file.parent for file in sorted(folder.glob("*/experiment.yaml"))), None)


def seeds_of(text: str) -> list[int]:
    """Return the seeds listed as ``1,2,3`` or ``1-3``.

    Raises
    ------
    ExperimentError
        If the text is malformed, or a seed occurs twice.
    """
    seeds: list[int] = []
    for part in text.split(","):
        span = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
        if span is None:
            raise ExperimentError(
                f"{argument('seeds')} must be numbers separated by commas, such as 1,2,3 or 1-3 (got {text!r}).",
                key="seeds",
                found=text,
            )
        seeds += range(int(span[1]), int(span[2] or span[1]) + 1)
    if not seeds or len(set(seeds)) < len(seeds):
        raise ExperimentError(
            f"{argument('seeds')} must be at least one seed, each once (got {text!r}).", key="seeds", found=text
        )
    return seeds


def _short(value: str) -> str:
    """Return a YAML value as part of a folder name; for a mapping, its ``name`` or ``scheme``."""
    parsed, _ = parse_yaml(value, argument("grid"))
    named = (parsed.get("name") or parsed.get("scheme")) if isinstance(parsed, dict) else None
    return f"{{{named}}}" if named else value


def _folder_name(parts: Sequence[str], settings: Sequence[str]) -> str:
    """Return a folder name made from the settings, with a hash of them if it cannot show them exactly."""
    plain = ",".join(parts)
    name = re.sub(r"[^A-Za-z0-9._=,+-]+", "_", plain)
    if name == plain and len(name) <= LONGEST_NAME:
        return name
    digest = hashlib.sha256("\n".join(settings).encode()).hexdigest()[:8]
    return f"{name[: LONGEST_NAME - 9]}-{digest}"
