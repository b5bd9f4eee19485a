"""What other packages add to FedLoom: objects they name by entry point (docs/extending.md)."""

from __future__ import annotations

import functools
import sys
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from fedloom.errors import ExperimentError

T = TypeVar("T")


def entries(group: str) -> tuple[EntryPoint, ...]:
    """What installed packages register in a group, by name.

    Finding it means reading every installed package's files, for tens of milliseconds: done once a search path.
    """
    return _entries(group, tuple(sys.path))


@functools.cache
def _entries(group: str, path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    return tuple(sorted(entry_points(group=group), key=lambda point: point.name))


def plugins(group: str, kind: type[T]) -> list[T]:
    """Load everything that installed packages register in a group, by name.

    Parameters
    ----------
    group
        ``fedloom.sources`` or ``fedloom.models``.
    kind
        What each must be.

    Raises
    ------
    ExperimentError
        If one cannot be loaded, or is something else.
    """
    return [load(point, kind) for point in entries(group)]


def load(point: EntryPoint, kind: type[T]) -> T:
    """Load one thing that an installed package registers.

    Parameters
    ----------
    kind
        What it must be.

    Raises
    ------
    ExperimentError
        If it cannot be loaded, or is something else: the package, the name and why.
    """
    where = f"{point.group}: {point.name} = {point.value}" + (f" (package {point.dist.name})" if point.dist else "")
    try:
        loaded = point.load()
    except Exception as error:
        raise ExperimentError(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(loaded, kind):
        raise ExperimentError(f"{where} is a {type(loaded).__name__}; allowed: a {kind.__name__}")
    return loaded
