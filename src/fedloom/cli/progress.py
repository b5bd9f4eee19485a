"""How long work shows that it moves: a bar with ETA on a terminal, plain lines elsewhere; always on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer

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

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines()
        return
    amount: ProgressColumn = DownloadColumn() if bytes_counted else MofNCompleteColumn()
    with Progress(
        TextColumn("{task.description}", markup=False), BarColumn(), amount, TimeRemainingColumn(), console=console
    ) as bar:
        task = bar.add_task("", total=None)
        doing = ""

        def tell(what: str, done: float, total: float | None) -> None:
            nonlocal doing
            if what != doing:
                doing = what
                bar.reset(task, description=what)
            bar.update(task, completed=done, total=total)

        yield tell


def _lines() -> Tell:
    """One line for each new thing that is done."""
    doing = ""

    def tell(what: str, done: float, total: float | None) -> None:
        nonlocal doing
        if what != doing:
            doing = what
            typer.echo(what, err=True)

    return tell
