"""Plugins: objects that other packages register with FedLoom through entry points (docs/extending.md)."""

from __future__ import annotations

import functools
import sys
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from fedloom.errors import ExperimentError

T = TypeVar("T")


def entries(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points that installed packages register in a group, sorted by name.

    All are cached per search path: reading the metadata of every installed package takes tens of milliseconds.
    """
    return _entries(tuple(sys.path)).get(group, ())


@functools.cache
def _entries(path: tuple[str, ...]) -> dict[str, tuple[EntryPoint, ...]]:
    points = entry_points()
    own = (group for group in points.groups if group.startswith("fedloom."))
    return {group: tuple(sorted(points.select(group=group), key=lambda point: point.name)) for group in own}


def plugins(group: str, kind: type[T]) -> list[T]:
    """Load everything that installed packages register in a group, sorted by name.

    Raise ExperimentError if an object cannot be loaded, or is of another class.

    Parameters
    ----------
    group
        ``fedloom.datasets``, ``fedloom.tasks`` or ``fedloom.models``.
    kind
        Required class of each object.
    """
    return [load_plugin(point, kind) for point in entries(group)]


def capability(name: str, user: str | None = None) -> Any:
    """Load what an optional part of FedLoom registers in the group ``fedloom.capabilities``.

    Parameters
    ----------
    name
        Name of the entry point.
    user
        Key, option or command that cannot work without it; None: return None if the part is missing.

    Raises
    ------
    ExperimentError
        If ``user`` is given and this installation lacks the part.
    """
    reason = f"this installation does not register {name!r}; install FedLoom again"
    for point in entries("fedloom.capabilities"):
        if point.name == name:
            try:
                return point.load()
            except ModuleNotFoundError as error:
                missing = missing_part(error)
                if missing is None:
                    raise
                reason = missing
    if user is None:
        return None
    raise ExperimentError(f"{user}: {reason}")


def missing_part(error: BaseException) -> str | None:
    """Return the message for an import of an optional part that this installation lacks; None for other errors."""
    if not isinstance(error, ModuleNotFoundError) or not (error.name or "").startswith("fedloom."):
        return None
    return f"this installation lacks FedLoom's part {str(error.name).split('.')[1]!r}"


def load_plugin(point: EntryPoint, kind: type[T]) -> T:
    """Load the object behind an entry point.

    Raise ExperimentError if it cannot be loaded, or is of another class: package, name and reason.

    Parameters
    ----------
    kind
        Required class of the object.
    """
    try:
        loaded = point.load()
    except Exception as error:
        raise ExperimentError(f"{_described(point)} cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(loaded, kind):
        raise ExperimentError(
            f"{_described(point)} has the class {type(loaded).__name__}; it must have the class {kind.__name__}."
        )
    return loaded


def _described(point: EntryPoint) -> str:
    package = f" (package {point.dist.name})" if point.dist else ""  # parses the package's metadata: 0.3 ms
    return f"{point.group}: {point.name} = {point.value}{package}"
