"""Live report for ``fedloom report --follow``, rewritten while a run is in progress."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from fedloom.core.words import pluralize
from fedloom.federation.activity import Activity
from fedloom.reporting.report import AutoRefresh, write_report
from fedloom.reporting.status import RunStatus
from fedloom.runs.folder import RunFolder

POLL_INTERVAL_S = 1.0
"""Seconds between checks of the run's files."""

SHARE = 10
"""Minimum ratio of total time to writing time: the page takes at most a tenth, leaving the processor to the run."""


def follow_report(
    run_folder: str | Path, every_s: float, wrote: Callable[[Path], None] = lambda page: None
) -> Activity:
    """Rewrite a run's report repeatedly until no process works on the run.

    The page asks the browser to reload it; each version replaces the previous one atomically. The last version, when
    the run has finished or was stopped or killed, does not reload. It is also written if following is interrupted.

    Raise the errors of :func:`~fedloom.reporting.report.write_report`.

    Parameters
    ----------
    run_folder
        Folder of the run.
    every_s
        Minimum interval between versions in seconds; longer if drawing is slow (:data:`SHARE`). No version is written
        without a change.
    wrote
        Called after each version with the path of the page.

    Returns
    -------
    Activity
        State of the run at the end; ``phase`` is ``finished`` or ``interrupted``.
    """
    folder = RunFolder.open(run_folder)
    status = RunStatus(folder)
    written, due = None, 0.0
    now = status.activity()
    try:
        while now.phase == "running":
            found = folder.changed_at()
            if found != written and time.monotonic() >= due:
                began = time.monotonic()
                wrote(write_report(folder.path, AutoRefresh(max(1, round(every_s)), _state(now))))
                written, spent = found, time.monotonic() - began
                due = time.monotonic() + max(every_s, SHARE * spent)
            time.sleep(POLL_INTERVAL_S)
            now = status.activity()
    except BaseException:
        if written is not None:
            write_report(folder.path, AutoRefresh(None, f"{_state(now)} This page will not be updated again."))
        raise
    wrote(write_report(folder.path, None if now.phase == "finished" else AutoRefresh(None, _state(now))))
    return now


def _state(now: Activity) -> str:
    """Return the run's state in the page's words."""
    of = "" if now.rounds is None else f" of {now.rounds}"
    if now.phase == "running":
        return f"This run is in progress: round {now.round}{of} is done."
    done = pluralize(now.round, "round") if now.round else "no round"
    return (
        f"This run is not finished, and no process works on it: it was stopped or killed after {done}{of}. "
        "Continue it with `fedloom run EXPERIMENT --resume`."
    )
