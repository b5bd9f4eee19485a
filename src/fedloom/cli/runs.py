"""``fedloom runs``: list runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fedloom.runs.listing import RunEntry


def runs(
    folder: Annotated[
        Path, typer.Argument(help="Folder that holds runs, at any depth.", metavar="[DIR]", show_default=True)
    ] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object for each run.")] = False,
) -> None:
    """List runs. Shows progress, method, data set, and mean test accuracy over clients."""
    import dataclasses
    import json

    from fedloom.cli.tables import print_table
    from fedloom.core.words import pluralize
    from fedloom.runs.listing import list_runs

    found = list_runs(folder)
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(run) for run in found], indent=2, ensure_ascii=False))
        return
    if not found:
        typer.echo(f"no runs in {folder} or below it")
        return
    headings = ("run", "method", "data", "rounds", "seen %", "unseen %", "state", "last change")
    print_table(
        f"{pluralize(len(found), 'run')} in {folder}",
        headings,
        [_row(run, folder) for run in found],
        texts=(0, 1, 2, 6, 7),
    )
    for run in found:
        if run.fault is not None:
            typer.echo(f"damaged: {run.fault}", err=True)


def _row(run: RunEntry, folder: Path) -> tuple[str, ...]:
    import time

    where = str(Path(run.path).relative_to(folder)) if Path(run.path) != folder else folder.resolve().name
    when = "" if run.changed is None else time.strftime("%m-%d %H:%M", time.localtime(run.changed))
    rounds = "" if run.done is None else f"{run.done}" if run.rounds is None else f"{run.done}/{run.rounds}"
    groups = (_score(run.seen, run.seen_loss), _score(run.unseen, run.unseen_loss))
    return (where, run.method or "", run.dataset or "", rounds, *groups, run.state, when)


def _score(accuracy: float | None, loss: float | None) -> str:
    """Return the accuracy in percent, or the loss if the data have no classes."""
    if accuracy is not None:
        return f"{100 * accuracy:.1f}"
    return "–" if loss is None else f"loss {loss:.3g}"
