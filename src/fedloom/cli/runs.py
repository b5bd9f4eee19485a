"""Commands for trained runs: ``fedloom evaluate`` and ``runs``."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom.cli.options import Checkpoint, OtherPartition, OwnFolders, RunFolderArgument
from fedloom.cli.results import CommandResult
from fedloom.core.words import pluralize
from fedloom.tasks.names import ACCURACY, metric_title

if TYPE_CHECKING:
    from fedloom.runs.listing import RunEntry


def evaluate_command(
    run: RunFolderArgument,
    checkpoint: Checkpoint = "last",
    partition: OtherPartition = None,
    data: OwnFolders = None,
    out: Annotated[Path | None, typer.Option(help="Write the statistics as JSON to this file.")] = None,
) -> CommandResult:
    """Evaluate a trained model again. The clients are the run's, or those of another partition."""
    from fedloom.runs.folder import RunFolder

    RunFolder.open(run)  # fail early, before torch is imported
    from fedloom.cli.tables import print_results
    from fedloom.engine import trained

    statistics = trained.evaluate(run, checkpoint, partition, data or ()).statistics
    if "overlap" in statistics and (warning := overlapping(statistics["overlap"])):
        print(f"warning: {warning}", file=sys.stderr)
    failures = []
    if out is not None:
        from fedloom.core.files import write_atomically
        from fedloom.errors import StorageError

        try:
            write_atomically(out, (json.dumps(statistics, indent=2) + "\n").encode())
        except StorageError as error:
            failures.append(StorageError(error.message, hint="choose another file with --out"))
    return CommandResult(statistics, lambda: print_results(statistics), failures)  # the results survive a failure


def overlapping(found: Mapping[str, Any] | None) -> str | None:
    """Return a warning about new clients whose examples the run was trained on; None if there are none."""
    if found is None:
        return (
            "it is unknown whether the run was trained on examples of these clients: its partition is not in the "
            "data root (create it with `fedloom partition RUN/experiment.yaml`)"
        )
    if not found["clients"]:
        return None
    split = ", ".join(f"{found[name]:,} {name}" for name in ("train", "validation", "test") if found[name])
    return (
        f"these clients are not all new: the run was trained on {split} examples of "
        f"{pluralize(found['clients'], 'client')}; data.partition.reserve holds examples back for new clients"
    )


def runs_command(
    folder: Annotated[
        Path, typer.Argument(help="Folder that holds runs, at any depth.", metavar="[DIR]", show_default=True)
    ] = Path("runs"),
) -> CommandResult:
    """List runs. Shows progress, method, data set, and the mean test result over clients."""
    from fedloom.cli.tables import print_table
    from fedloom.runs.listing import list_runs

    found = list_runs(folder)
    if not found:
        return CommandResult(found, f"no runs in {folder} or below it")
    headings = ("run", "method", "data", "rounds", "seen %", "unseen %", "state", "last change")

    def show() -> None:
        title, rows = f"{pluralize(len(found), 'run')} in {folder}", [_row(run, folder) for run in found]
        print_table(title, headings, rows, texts=(0, 1, 2, 6, 7))
        for run in found:
            if run.fault is not None:
                typer.echo(f"damaged: {run.fault}", err=True)

    return CommandResult(found, show)


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
