"""Reading an experiment that a command names: a file of this machine, or one in a store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedloom import experiment as experiments
from fedloom.errors import ExperimentError
from fedloom.experiment import Experiment
from fedloom.storage import is_url, open_store


def experiment(where: str | Path, overrides: Sequence[str] = ()) -> Experiment:
    """Read an experiment.

    Parameters
    ----------
    where
        Path, or ``s3://bucket/prefix/name``.
    overrides
        ``key=value`` each.

    Raises
    ------
    ExperimentError
        If it cannot be read, or is no experiment.
    StorageError, RefusedError
        If the store cannot be used.
    """
    if not is_url(where):
        return experiments.load(where, overrides)
    place, _, name = str(where).rpartition("/")
    content = open_store(place).read(name)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ExperimentError(f"{where}: not a UTF-8 text file (byte {error.start})") from error
    return experiments.loads(text, overrides, source=str(where))
