"""Distinction between errors that lose one client and bugs in a method, a model or FedLoom.

A client is lost through its own errors: a :class:`~fedloom.errors.FedloomError` (its data or its state cannot be used),
and numbers that overflow or are singular. A client is also lost if the client algorithm calls
``ClientGroup.fail_client`` for it. Any other exception is a bug. In process it is raised at once where it occurs; a
worker logs its traceback and reports its class and line to the aggregator.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from fedloom.errors import FedloomError, raised_at

_SINGULAR = (torch.linalg.LinAlgError, np.linalg.LinAlgError)  # type: ignore[attr-defined]  # not exported by torch
_OF_A_CLIENT = (FedloomError, FloatingPointError, OverflowError, *_SINGULAR)


def is_bug(error: Exception) -> bool:
    """Return True if an exception is not caused by the client for which it was raised."""
    return not isinstance(error, _OF_A_CLIENT)


def place(error: Exception) -> str:
    """Return the line of a bug, ``my_method.py, line 12``, without the folder."""
    at = raised_at(error)
    return "unknown line" if at is None else f"{Path(at.filename).name}, line {at.lineno}"


def safe_reason(error: Exception) -> str:
    """Return the error text that is sent to the aggregator: FedLoom's own sentence, or the class and the line of code.

    Other exceptions may quote what they read; their class and line reveal nothing about the data.
    """
    text = str(error).splitlines()
    if isinstance(error, FloatingPointError | FedloomError) and text:
        return text[0][:300]
    return f"{type(error).__name__} ({place(error)})"
