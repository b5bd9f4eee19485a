"""From the text of an experiment, and overrides, to a checked :class:`Experiment`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedloom.algorithms.base import available
from fedloom.errors import ExperimentError
from fedloom.experiment.cross_checks import impossible_combinations
from fedloom.experiment.schema import json_schema
from fedloom.experiment.sections import Experiment, Runtime
from fedloom.experiment.validation_errors import KeyPath, dotted, explain, listing, shown
from fedloom.experiment.yaml_reader import parse
from fedloom.storage import is_url, open_store

Overrides = Sequence[str]
"""Of the form ``data.partition.clients=20``: dotted key, then a YAML value."""


def load(path: str | Path, overrides: Overrides = ()) -> Experiment:
    """Read an experiment file.

    Parameters
    ----------
    path
        The file: its path, or its URL, ``s3://bucket/prefix/name``.
    overrides
        ``key=value`` each: a dotted key, and a YAML value that replaces what the file has there.

    Raises
    ------
    ExperimentError
        If the file cannot be read, or anything in it, or in a combination of its keys, is not allowed.
    StorageError, RefusedError
        If the store of a URL cannot be used.
    """
    try:
        if is_url(path):
            place, _, name = str(path).rpartition("/")
            content = open_store(place).read(name)
        else:
            content = Path(path).read_bytes()
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ExperimentError(f"{path}: not a UTF-8 text file (byte {error.start})") from error
    except OSError as error:
        raise ExperimentError(f"{path}: cannot be read: {(error.strerror or str(error)).lower()}") from error
    return loads(text, overrides, source=str(path))


def loads(text: str, overrides: Overrides = (), *, source: str = "the experiment") -> Experiment:
    """Read the text of an experiment file.

    Parameters
    ----------
    text
        YAML, or JSON.
    overrides
        As of :func:`load`.
    source
        What to call the text in errors.

    Raises
    ------
    ExperimentError
        As of :func:`load`.
    """
    value, origins = parse(text, source)
    if not isinstance(value, dict):
        raise ExperimentError(
            f"{source}: found {shown(value)}; allowed: a mapping with the keys name, data, model, ..."
        )
    for override in overrides:
        _set(value, origins, override)
    return _validated(value, source, origins)


def from_shared_json(text: str, *, root: str | None = None, runtime: Runtime | None = None) -> Experiment:
    """Complete what an aggregator sent with what is the worker's own.

    Parameters
    ----------
    text
        From :meth:`shared_json`.
    root
        ``data.root`` of this machine.
    runtime
        ``runtime`` of this machine.

    Raises
    ------
    ExperimentError
        If the text is no experiment that this version of FedLoom can run.
    """
    source = "experiment sent by the aggregator"
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ExperimentError(f"{source}: not JSON ({error})") from error
    if not isinstance(value, dict) or not isinstance(value.get("data"), dict):
        raise ExperimentError(f"{source}: found {shown(value)}; allowed: a mapping with the key data")
    value["data"]["root"] = root
    value["runtime"] = (runtime or Runtime()).model_dump(mode="json")
    return _validated(value, source, {})


def _validated(value: dict[str, Any], source: str, origins: Mapping[KeyPath, str]) -> Experiment:
    try:
        experiment = Experiment.model_validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError as error:
        algorithm = value.get("algorithm")
        name = algorithm.get("name") if isinstance(algorithm, dict) else None
        schema = json_schema([name] if name in available() else None)
        raise ExperimentError(listing(source, explain(error, schema, value), origins)) from None
    found = impossible_combinations(experiment)
    if found:
        raise ExperimentError(listing(source, found, origins))
    return experiment


def _set(value: dict[str, Any], origins: dict[KeyPath, str], override: str) -> None:
    """Put one ``key=value`` in its place."""
    key, equals, text = override.partition("=")
    path = tuple(step.strip() for step in key.split("."))
    if not equals or not all(path):
        raise ExperimentError(f"--set {override}: allowed: KEY=VALUE, such as federation.rounds=10")
    new, inside = parse(text, f"--set {override}")
    target = value
    for depth, step in enumerate(path[:-1], start=1):
        if target.get(step) is None:
            target[step] = {}
            origins[path[:depth]] = "--set"
        target = target[step]
        if not isinstance(target, dict):
            raise ExperimentError(f"--set {override}: {dotted(path[:depth])} is {shown(target)}, which has no keys")
    target[path[-1]] = new
    for old in [p for p in origins if p[: len(path)] == path]:
        del origins[old]
    origins.update({(*path, *p): "--set" for p in inside} | {path: "--set"})
