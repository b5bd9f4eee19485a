"""Progress of long operations: a bar with ETA on a terminal or in a notebook, else lines on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

Tell = Callable[[str, float, float | None], None]
"""Callback that receives the current step, the amount done, and the total (None if unknown)."""


@contextmanager
def show_progress(*, bytes_counted: bool = False) -> Iterator[Tell]:
    """Show the progress that is reported in the block.

    Parameters
    ----------
    bytes_counted
        Format amounts as bytes.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    from fedloom.api.watch import Page

    console = Console(stderr=True)
    if not console.is_terminal and not console.is_jupyter:
        yield _lines(console)
        return
    amount: ProgressColumn = DownloadColumn() if bytes_counted else MofNCompleteColumn()
    bar = Progress(
        TextColumn("{task.description}", markup=False), BarColumn(), amount, TimeRemainingColumn(), console=console
    )
    page = Page() if console.is_jupyter else None
    task = bar.add_task("", total=None)
    shown_activity = ""

    def report(activity: str, count: float, total: float | None) -> None:
        nonlocal shown_activity
        if activity != shown_activity:
            shown_activity = activity
            bar.reset(task, description=activity)
        bar.update(task, completed=count, total=total)
        if page is not None:
            page.show(bar)

    with bar if page is None else nullcontext():
        yield report
    if page is not None and shown_activity:
        page.show(bar, now=True)


def _lines(console: Console) -> Tell:
    """Return a callback that prints one line per step."""
    shown_activity = ""

    def report(activity: str, count: float, total: float | None) -> None:
        nonlocal shown_activity
        if activity != shown_activity:
            shown_activity = activity
            console.print(activity, markup=False, highlight=False, soft_wrap=True)

    return report
