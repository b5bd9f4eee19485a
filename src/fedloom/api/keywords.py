"""Errors in the words of Python: keyword arguments where the command line has options."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from fedloom.errors import FedloomError

P = ParamSpec("P")
T = TypeVar("T")

OTHERWISE = {
    "--resume": "resume=True",
    "--data": "packed",
    "--data DIR": "packed=[DIR]",
    "--set": "",
    "--no-report": "report=False",
}
"""Options that are no keyword of the same name."""


def with_keywords(function: Callable[P, T]) -> Callable[P, T]:
    """Let the errors of a function name its keyword arguments."""

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except FedloomError as error:
            in_keywords(error)
            raise

    return called


def in_keywords(error: FedloomError) -> None:
    """Let an error name keyword arguments; commands that it tells to run stay as they are."""
    error.args = tuple(_reworded(str(text)) for text in error.args)
    error.hint = None if error.hint is None else _reworded(error.hint)


def _reworded(text: str) -> str:
    lines = []
    for line in text.split("\n"):
        said, command, rest = re.match(r"(.*?)(`?fedloom [a-z]|$)(.*)", line).groups()  # type: ignore[union-attr]
        lines.append(re.sub(r"--set,? |--data DIR|--[a-z]+(?:-[a-z]+)*", _keyword, said) + command + rest)
    return "\n".join(lines)


def _keyword(option: re.Match[str]) -> str:
    name = option[0].rstrip(", ")
    return OTHERWISE.get(name, name.removeprefix("--").replace("-", "_"))
