"""How long work shows that it moves: a bar with ETA on a terminal or in a notebook, else lines on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

Tell = Callable[[str, float, float | None], None]
"""Called with what is being done, how much of it is done, and out of how much (None where that is not known)."""


@contextmanager
def progress(*, bytes_counted: bool = False) -> Iterator[Tell]:
    """Show the progress that is told in the block.

    Parameters
    ----------
    bytes_counted
        Whether amounts are bytes, and shown as such.
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
    doing = ""

    def tell(what: str, done: float, total: float | None) -> None:
        nonlocal doing
        if what != doing:
            doing = what
            bar.reset(task, description=what)
        bar.update(task, completed=done, total=total)
        if page is not None:
            page.show(bar)

    with bar if page is None else nullcontext():
        yield tell
    if page is not None and doing:
        page.show(bar, now=True)


def _lines(console: Console) -> Tell:
    """One line for each new thing that is done."""
    doing = ""

    def tell(what: str, done: float, total: float | None) -> None:
        nonlocal doing
        if what != doing:
            doing = what
            console.print(what, markup=False, highlight=False, soft_wrap=True)

    return tell
