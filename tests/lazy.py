"""Modules that are imported when a test uses them: each worker of the suite reads all files, and runs some tests."""

from __future__ import annotations

import importlib
from typing import Any


class Lazy:
    """Module that is imported once an attribute of it is needed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)
