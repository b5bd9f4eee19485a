"""The rule by which an exception loses one client, or is a bug in a method, a model or FedLoom.

A client is lost for what is its own: a :class:`~fedloom.errors.FedloomError` (its data or its state cannot be used),
and numbers that overflow or are singular. So is one for which the client half calls ``Group.lose``. Any other exception
is a bug. In one process it is raised where it is, at once; a worker logs its traceback, and tells the aggregator its
class and line.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from fedloom.errors import FedloomError, raised_at

_SINGULAR = (torch.linalg.LinAlgError, np.linalg.LinAlgError)  # type: ignore[attr-defined]  # torch lists it nowhere
_OF_A_CLIENT = (FedloomError, FloatingPointError, OverflowError, *_SINGULAR)


def is_bug(error: Exception) -> bool:
    """Return True if an exception says nothing of the client for which it was raised."""
    return not isinstance(error, _OF_A_CLIENT)


def place(error: Exception) -> str:
    """Return the line of a bug, ``my_method.py, line 12``, without the folder."""
    at = raised_at(error)
    return "no line known" if at is None else f"{Path(at.filename).name}, line {at.lineno}"


def told(error: Exception) -> str:
    """Return what the aggregator is told: a sentence of ours, or the class and the line of code.

    Other exceptions may quote what they read; their class and line say nothing of the data.
    """
    text = str(error).splitlines()
    if isinstance(error, FloatingPointError | FedloomError) and text:
        return text[0][:300]
    return f"{type(error).__name__} ({place(error)})"
