"""Paths that begin with ``~``, on machines whose user need not have a home folder (a container with any user id)."""

from __future__ import annotations

import os
from pathlib import Path

from fedloom.errors import ExperimentError


def expanded(path: str | Path, variable: str = "HOME") -> Path:
    """Return a path with the home folder in place of a leading ``~``.

    Parameters
    ----------
    variable
        The environment variable that makes the path another one.

    Raises
    ------
    ExperimentError
        If nobody knows that folder.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        whose = str(path).partition("/")[0]
        raise ExperimentError(
            f"{path}: the home folder {whose} is not known: HOME is not set, or there is no such user (user id "
            f"{os.getuid()})",
            hint=f"set {variable}, or give a path without {whose}",
        ) from None
