"""``fedloom search``: hyperparameter search on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from fedloom.cli.options import ExperimentFile, Parallel, Set, Space, TrialCount, with_options
from fedloom.cli.results import CommandResult
from fedloom.core import forks
from fedloom.engine.options import JobOptions

if TYPE_CHECKING:
    from fedloom.experiment import Experiment


@with_options()
def search_command(
    experiment: ExperimentFile,
    options: JobOptions,
    space: Space,
    trials: TrialCount = None,
    parallel: Parallel = 1,
    set_: Set = None,
) -> CommandResult:
    """Find the values of keys that are best on validation data. Test results are shown for the chosen trial only."""
    from fedloom import experiment as experiments
    from fedloom.experiment.search_space import plan_search, read_space

    search_space = read_space(space, trials=trials)
    begun = experiments.begun_in(options.out) if options.resume else None

    def make(changes: Sequence[str]) -> Experiment:
        return experiments.of(experiment, [*(set_ or ()), *changes], stored=begun)

    plan = plan_search(search_space, make)
    with forks.prepared(needed=True):
        from fedloom.api.searches import carry_out_search
        from fedloom.api.watch import SweepWatch
        from fedloom.cli.tables import print_results, print_table
        from fedloom.engine import worker  # noqa: F401 (for forks)
        from fedloom.reporting.search_page import PAGE, trial_rows

    search = carry_out_search(plan, make, options, SweepWatch(choosing=True), parallel)
    headings, rows = trial_rows(search.summary)

    def show() -> None:
        print_table("Trials, by validation data of the seen clients", headings, rows, texts=(0, len(headings) - 1))
        typer.echo(f"\nchosen: {search.chosen.folder}")
        for key, text in search.chosen_texts.items():
            typer.echo(f"  --set {key}={text}")
        print_results(search.chosen.summary)
        if (search.folder / PAGE).exists():
            typer.echo(f"page: {search.folder / PAGE}")

    return CommandResult({"folder": search.folder, **search.summary}, show)
