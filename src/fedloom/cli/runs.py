"""``fedloom runs``: list runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedloom.cli.options import Json
from fedloom.tasks.names import ACCURACY, metric_title

if TYPE_CHECKING:
    from fedloom.runs.listing import RunEntry


def runs(
    folder: Annotated[
        Path, typer.Argument(help="Folder that holds runs, at any depth.", metavar="[DIR]", show_default=True)
    ] = Path("runs"),
    as_json: Json = False,
) -> None:
    """List runs. Shows progress, method, data set, and the mean test result over clients."""
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
    groups = (_score(run, run.seen), _score(run, run.unseen))
    return (where, run.method or "", run.dataset or "", rounds, *groups, run.state, when)


def _score(run: RunEntry, value: float | None) -> str:
    """Return a value of the headline metric: an accuracy in percent, or another metric with its name."""
    if value is None or run.metric is None:
        return "–"
    shown = f"{100 * value:.1f}" if run.percent else f"{value:.3g}"
    return shown if run.metric == ACCURACY.name else f"{metric_title(run.metric)} {shown}"
