"""``fedloom report --follow``: the report of a run that is under way, written again as the run goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from fedloom.federation.activity import Activity
from fedloom.federation.folder import RunFolder
from fedloom.reporting.report import Renewal, write_report
from fedloom.reporting.run_list import changed_at
from fedloom.reporting.status import RunFiles
from fedloom.words import counted

LOOK_S = 1.0
"""How often the run's files are looked at."""

SHARE = 10
"""The page is written at most for a tenth of the time: a run that trains beside it needs the processor more."""


def follow_report(
    run_folder: str | Path, every_s: float, wrote: Callable[[Path], None] = lambda page: None
) -> Activity:
    """Write the report of a run again and again until no process works on the run any more.

    The page asks the browser to load it anew; each version takes the place of the last one whole. The last version, of
    a run that is finished or was stopped or killed, does not ask any more. It is also written where the following
    itself is interrupted.

    Parameters
    ----------
    run_folder
        Of the run.
    every_s
        Seconds between two versions, at least; more where drawing takes long (:data:`SHARE`). Without a change there is
        no new one.
    wrote
        Called after each version.

    Returns
    -------
    Activity
        What the run was at the end; ``phase`` is ``finished`` or ``interrupted``.

    Raises
    ------
    DataError, ExperimentError, StorageError
        As :func:`~fedloom.reporting.report.write_report`.
    """
    folder = RunFolder.open(run_folder)
    files = RunFiles(folder)
    written, due = None, 0.0
    now = files.activity()
    try:
        while now.phase == "running":
            found = changed_at(folder.path)
            if found != written and time.monotonic() >= due:
                began = time.monotonic()
                wrote(write_report(folder.path, Renewal(max(1, round(every_s)), _state(now))))
                written, spent = found, time.monotonic() - began
                due = time.monotonic() + max(every_s, SHARE * spent)
            time.sleep(LOOK_S)
            now = files.activity()
    except BaseException:
        if written is not None:
            write_report(folder.path, Renewal(None, f"{_state(now)} Nobody writes this page again."))
        raise
    wrote(write_report(folder.path, None if now.phase == "finished" else Renewal(None, _state(now))))
    return now


def _state(now: Activity) -> str:
    """How far the run is, as the page says it."""
    of = "" if now.rounds is None else f" of {now.rounds}"
    if now.phase == "running":
        return f"This run is under way: round {now.round}{of} is done."
    done = counted(now.round, "round") if now.round else "no round"
    return (
        f"This run is not finished, and no process works on it: it was stopped or killed after {done}{of}. "
        "`fedloom run EXPERIMENT --resume` goes on with it."
    )
