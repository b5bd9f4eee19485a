"""From an experiment file and overrides to a checked :class:`Experiment`.

A file that cannot be read, or is not YAML, is refused before torch is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.errors import ExperimentError
from fedloom.experiment.validation_errors import KeyPath, dotted, shown
from fedloom.experiment.yaml_reader import parse
from fedloom.storage import is_url, open_store
from fedloom.storage.folder import read_file
from fedloom.words import shortened

if TYPE_CHECKING:
    from fedloom.experiment.sections import Experiment

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
            content = read_file(Path(path))
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
    from fedloom.experiment.validation import validated  # imports torch: after all that may fail before

    return validated(value, source, origins)


def _set(value: dict[str, Any], origins: dict[KeyPath, str], override: str) -> None:
    """Put one ``key=value`` in its place."""
    key, equals, text = override.partition("=")
    path = tuple(step.strip() for step in key.split("."))
    if not equals or not all(path):
        raise ExperimentError(f"--set {shortened(override)}: allowed: KEY=VALUE, such as federation.rounds=10")
    new, inside = parse(text, f"--set {shortened(override)}")
    target = value
    for depth, step in enumerate(path[:-1], start=1):
        if target.get(step) is None:
            target[step] = {}
            origins[path[:depth]] = "--set"
        target = target[step]
        if not isinstance(target, dict):
            raise ExperimentError(
                f"--set {shortened(override)}: {dotted(path[:depth])} is {shown(target)}, which has no keys"
            )
    target[path[-1]] = new
    for old in [p for p in origins if p[: len(path)] == path]:
        del origins[old]
    origins.update({(*path, *p): "--set" for p in inside} | {path: "--set"})
