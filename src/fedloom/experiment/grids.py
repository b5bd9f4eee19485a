"""Grids of settings, ``key=v1,v2,...``."""

from __future__ import annotations

from fedloom.errors import ExperimentError
from fedloom.experiment.yaml_reader import as_yaml, parse


def grid_values(text: str) -> tuple[str, list[str]]:
    """Read one axis of a grid, ``key=v1,v2,...``.

    Parameters
    ----------
    text
        A dotted key, then YAML values separated by commas (commas inside brackets, braces and quotes do not separate).

    Returns
    -------
    key
        The dotted key.
    values
        Each value as YAML on one line, to put behind ``key=`` in an override.

    Raises
    ------
    ExperimentError
        If it is not of that form, or a value occurs twice.
    """
    key, equals, values = text.partition("=")
    if not equals or not all(step.strip() for step in key.split(".")):
        raise ExperimentError(f"--grid {text}: allowed: KEY=VALUE,VALUE,..., such as algorithm.local.lr=0.01,0.03")
    parsed, _ = parse(f"[{values}]", f"--grid {text}")
    if not isinstance(parsed, list) or not parsed:
        raise ExperimentError(f"--grid {text}: found no value; allowed: KEY=VALUE,VALUE,...")
    found = [as_yaml(value) for value in parsed]
    twice = [value for value in found if found.count(value) > 1]
    if twice:
        raise ExperimentError(f"--grid {text}: found {twice[0]} twice; allowed: each value once")
    return key.strip(), found
