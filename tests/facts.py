"""Checks of messages: they must contain keys, values, files and allowed values; the wording is free."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from fedloom.errors import FedloomError

if TYPE_CHECKING:
    from typer.testing import Result


def tells(text: str, *facts: object) -> bool:
    """Return True if a message contains these facts in this order."""
    at = 0
    for fact in map(str, facts):
        found = text.find(fact, at)
        if found < 0:
            return False
        at = found + len(fact)
    return True


def mentions(text: str, *facts: object) -> bool:
    """Return True if a message contains these facts, in any order."""
    return all(str(fact) in text for fact in facts)


@contextlib.contextmanager
def refusing(kind: type[Exception], *facts: object) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expect an error of this type that contains these facts, in any order."""
    with pytest.raises(kind) as refused:
        yield refused
    assert mentions(str(refused.value), *facts), f"{refused.value} does not name all of {facts}"


def failed(result: Result, kind: type[FedloomError]) -> str:
    """Return the message of a command that failed with an error of a class."""
    assert isinstance(result.exception, kind), (result.output, result.exception)
    return str(result.exception)


@contextlib.contextmanager
def telling(kind: type[Exception], *facts: object) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expect an error of this type that contains these facts, in this order."""
    with pytest.raises(kind) as refused:
        yield refused
    assert tells(str(refused.value), *facts), f"{refused.value} does not name all of {facts} in this order"


def failing(kind: type[FedloomError], message: str, hint: str | None = None) -> str:
    """Return shell commands that report an error like a process of FedLoom, in place of its program."""
    record = json.dumps({"failure": kind(message, hint=hint).as_json()})
    return f"echo '{record}' >> $FEDLOOM_TELL_PARENT"
