"""Modules that are imported on first use in a test: each test process reads all files, and runs some tests."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest


class Lazy:
    """Module that is imported on first access to an attribute."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # pytest looks up marks of its own on every name of a test's file
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)


def lazy_or_skip(name: str) -> Any:
    """Return a lazy module, or skip the tests of the calling file if it is not installed."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed", allow_module_level=True)
    return Lazy(name)
