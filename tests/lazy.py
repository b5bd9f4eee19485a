"""Modules that are imported when a test uses them: each worker of the suite reads all files, and runs some tests."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest


class Lazy:
    """Module that is imported once an attribute of it is needed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # pytest looks for marks of its own at every name of a test's file
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)


def lazy_or_skip(name: str) -> Any:
    """Return a lazy module, or skip the tests of the file that asks for it where it is not installed."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed", allow_module_level=True)
    return Lazy(name)
