"""``fedloom search``: search for the hyperparameters that are best on validation data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedloom.cli.options import ExperimentFile, Set, Space, TrialCount
from fedloom.cli.run import Observe, OwnFolders, Partition, Publish, Report, Track, Workers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedloom.experiment import Experiment
    from fedloom.runner.search import SearchResult


def search_command(
    experiment: ExperimentFile,
    space: Space,
    trials: TrialCount = None,
    parallel: Annotated[
        int, typer.Option(help="Number of parallel trials, each with its share of the cores.", min=1, metavar="N")
    ] = 1,
    set_: Set = None,
    out: Annotated[
        Path | None, typer.Option(help="The search's folder; by default runs/NAME-search.", metavar="DIR")
    ] = None,
    workers: Workers = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the search in the folder; its number of trials may grow.")
    ] = False,
    partition: Partition = None,
    data: OwnFolders = None,
    observe: Observe = None,
    publish: Publish = None,
    report: Report = True,
    track: Track = None,
) -> None:
    """Find the values of keys that are best on validation data. Test results are shown for the chosen trial only."""
    from fedloom import experiment as experiments
    from fedloom.experiment.search_space import plan_search, read_space
    from fedloom.runner.options import RunOptions

    overrides = [*(set_ or ()), *([f"runtime.workers={workers}"] if workers is not None else ())]
    options = RunOptions(
        out,
        resume,
        partition=partition,
        data=tuple(data or ()),
        observe=tuple(observe or ()),
        publish=publish,
        signals=True,
        report=report,
        track=tuple(track or ()),
    )
    asked = read_space(space, trials=trials)
    begun = experiments.begun_in(out) if resume else None

    def make(changes: Sequence[str]) -> Experiment:
        return experiments.of(experiment, [*overrides, *changes], begun=begun)

    plan = plan_search(asked, make)
    from fedloom.api.searches import carry_out_search
    from fedloom.api.watch import SweepWatch

    _show(carry_out_search(plan, make, options, SweepWatch(choosing=True), parallel))


def _show(found: SearchResult) -> None:
    """Print the trials by their validation results, then the chosen one with its test results."""
    from fedloom.cli.tables import print_results, print_table
    from fedloom.reporting.search_page import PAGE, trial_rows
    from fedloom.runs.files import SUMMARY
    from fedloom.runs.folder import RunFolder

    headings, rows = trial_rows(found.summary)
    print_table("Trials, by validation data of the seen clients", headings, rows, texts=(0, len(headings) - 1))
    typer.echo(f"\nchosen: {found.folder / found.chosen.name}")
    for key, text in found.chosen.texts.items():
        typer.echo(f"  --set {key}={text}")
    print_results(RunFolder(found.folder / found.chosen.name).json(SUMMARY))
    if (found.folder / PAGE).exists():
        typer.echo(f"page: {found.folder / PAGE}")
