"""Expansion of a leading ``~``, also for users without a home folder (a container with an arbitrary user id)."""

from __future__ import annotations

import os
from pathlib import Path

from fedloom.errors import ExperimentError


def expanded(path: str | Path, variable: str = "HOME") -> Path:
    """Return a path with a leading ``~`` replaced by the home folder.

    Raise ExperimentError if the home folder is unknown.

    Parameters
    ----------
    variable
        Environment variable that sets this path, for the error's hint.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        user = str(path).partition("/")[0]
        raise ExperimentError(
            f"{path}: the home folder {user} is unknown: HOME is not set, or there is no such user (user id "
            f"{os.getuid()})",
            hint=f"set {variable}, or give a path without {user}",
        ) from None
