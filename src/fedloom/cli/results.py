"""Results of commands: text for people, or with ``--json`` one JSON document, also of errors (docs/cli-json.md)."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import typer

from fedloom.core.plugins import missing_part
from fedloom.errors import STORAGE_FAILURES, ExperimentError, FedloomError, InterruptedRun, as_storage_error

UsageError: Any = typer.BadParameter.__bases__[0]
"""Base of click's usage errors; typer may bring a click of its own."""


class Terminated(BaseException):
    """SIGTERM received before a command handles it; not an Exception, which an import in progress could catch."""


@dataclass(frozen=True)
class CommandResult:
    """Facts that a command prints; a command whose return type is this class has the option ``--json``.

    Attributes
    ----------
    facts
        Facts for programs: JSON values, data classes and paths.
    show
        Function that prints them for people, or their text; an empty one prints nothing.
    failures
        Errors that the facts show; the command ends with the first one.
    exit_code
        Exit code of a command without failures.
    """

    facts: Any
    show: Callable[[], None] | str
    failures: Sequence[FedloomError] = ()
    exit_code: int = 0

    def print(self, *, as_json: bool) -> None:
        """Print the facts on standard output, and raise the first failure."""
        if as_json:
            print_json({**self.facts, **described(self.failures)} if self.failures else self.facts)
        elif not isinstance(self.show, str):
            self.show()
        elif self.show:
            typer.echo(self.show)
        if self.failures:
            raise self.failures[0]
        raise typer.Exit(self.exit_code)


def print_json(value: Any, indent: int | None = 2) -> None:
    """Print a value as a JSON document; without ``indent`` in one line."""
    typer.echo(json.dumps(_as_json(value), indent=indent, ensure_ascii=False, allow_nan=False))


def described(errors: Sequence[BaseException]) -> dict[str, Any]:
    """Return errors as the JSON object that every command with ``--json`` prints; the first decides the exit code."""
    entries = [_entry(error) for error in errors]
    return {"exit_code": entries[0]["exit_code"], "errors": entries}


def _entry(error: BaseException) -> dict[str, Any]:
    failure = as_command_failure(error)
    if failure is None:  # a bug
        nothing = dict.fromkeys(("hint", "key", "found", "allowed"))
        return {"class": type(error).__name__, "message": str(error), **nothing, "exit_code": 1}
    texts = {"message": failure.message, "hint": failure.hint, "exit_code": int(failure.exit_code)}
    return failure.as_json() | texts


def as_command_failure(error: BaseException) -> FedloomError | None:
    """Return the error that ends a command because of an exception; None for a bug."""
    if isinstance(error, FedloomError):
        return error
    if isinstance(error, Terminated | KeyboardInterrupt):
        return InterruptedRun("stopped on request")
    if isinstance(error, UsageError):
        key = getattr(getattr(error, "param", None), "name", None) or getattr(error, "option_name", None)
        return ExperimentError(error.format_message(), key=key)
    if isinstance(error, OSError):
        return as_storage_error(error) if error.errno in STORAGE_FAILURES else None
    missing = missing_part(error)
    return None if missing is None else ExperimentError(missing)


def _as_json(value: Any) -> Any:
    """Return a value that JSON can hold; a number that is not finite becomes null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _as_json({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        return {str(key): _as_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, date):
        return value.isoformat()
    return str(value) if isinstance(value, Path) else value
