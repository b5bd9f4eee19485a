"""Permission to call factories and metrics named by a file or an aggregator."""

from __future__ import annotations

import os

from fedloom.errors import ExperimentError

FACTORIES = "FEDLOOM_FACTORIES"
"""Environment variable: names, separated by commas, of factories and metrics that a process may call,
regardless of who names them."""

KEY = "model.factory"

_permitted: set[str] = set()
_sent: set[str] = set()  # that an aggregator may name


def permit_factory(name: str) -> None:
    """Let this process call a factory that its user has named, in an experiment or as an argument."""
    _permitted.add(name)


def permit_sent_factory(name: str) -> None:
    """Let an aggregator name a factory, as if the environment named it."""
    _sent.add(name)


def is_permitted(name: str) -> bool:
    """Return True if the user or the environment of this process has named the factory."""
    return name in _permitted or name in _from_environment()


def is_permitted_to_send(name: str) -> bool:
    """Return True if an aggregator may name the factory: the environment of this process or its policy does, too."""
    return name in _from_environment()


def check_permitted(name: str, key: str = KEY) -> None:
    """Reject a factory named only by a run, a URL or an aggregator: importing it would run code.

    ``key`` is the key of the experiment that names it: a model's factory, or a metric.

    Raise ExperimentError if neither the user of this process nor its environment has named the factory.
    """
    if not is_permitted(name):
        raise _not_permitted(name, "a run or an address on the network", key)


def check_sent_factory(name: str, key: str = KEY) -> None:
    """Reject a factory named by an aggregator, unless the environment of this process names it too.

    ``key`` is as for :func:`check_permitted`.

    Raise ExperimentError if the environment does not name the factory.
    """
    if not is_permitted_to_send(name):
        raise _not_permitted(name, "the aggregator", key)


def _from_environment() -> list[str]:
    return [*(name.strip() for name in os.environ.get(FACTORIES, "").split(",") if name.strip()), *sorted(_sent)]


def _not_permitted(name: str, source: str, key: str) -> ExperimentError:
    permitted = ", ".join(_from_environment()) or "none"
    return ExperimentError(
        f"{key}: {name!r} is named by {source}, and loading it runs its code; {FACTORIES} permits {permitted}.",
        hint=f"If you trust this code, set {FACTORIES}={name} in the environment of this command.",
    )
