"""``fedloom pipeline schedule`` and ``schedules``: recurring runs of Kubeflow pipelines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from fedloom.cli.pipeline import (
    Backend,
    Cluster,
    ExperimentFile,
    KeepVersions,
    KubeflowOption,
    Labels,
    Methods,
    Model,
    Name,
    NoCache,
    Pods,
    Seeds,
    Serve,
    Set,
    Source,
    Which,
    remove_versions,
    terminable,
)
from fedloom.cli.pipeline_arguments import OrderOptions, pipeline_arguments, plan_order

if TYPE_CHECKING:
    from fedloom.kubeflow.api import Kubeflow

app = typer.Typer(help="Recurring runs of pipelines on Kubeflow.", no_args_is_help=True, rich_markup_mode=None)

Id = Annotated[str, typer.Argument(help="Id of the schedule.", metavar="SCHEDULE")]


def schedule_command(
    name: Name,
    experiment: ExperimentFile,
    cron: Annotated[
        str | None,
        typer.Option(
            help="When to run: minute, hour, day of month, month, day of week; or six fields with seconds first. The "
            "time zone is that of the installation (UTC).",
            metavar="'M H D M W'",
        ),
    ] = None,
    every: Annotated[
        str | None, typer.Option(help="Interval between the starts: 90m, 6h or 1d.", metavar="NUMBER{s|m|h|d}")
    ] = None,
    max_concurrency: Annotated[
        int, typer.Option(help="Runs of the schedule that may be in progress together.", min=1, max=10, metavar="N")
    ] = 1,
    catch_up: Annotated[
        bool, typer.Option("--catch-up", help="Also start the runs that were missed; by default only the latest.")
    ] = False,
    set_: Set = None,
    method: Methods = None,
    seeds: Seeds = None,
    model: Model = None,
    checkpoint: Which = None,
    serve: Serve = None,
    source: Source = None,
    backend: Backend = None,
    cluster: Cluster = None,
    pods: Pods = None,
    schedule_name: Annotated[
        str | None, typer.Option("--name", help="Name of the schedule; by default the experiment's.", metavar="TEXT")
    ] = None,
    label: Labels = None,
    no_cache: NoCache = False,
    keep_versions: KeepVersions = None,
    kubeflow: KubeflowOption = None,
) -> None:
    """Run a pipeline on Kubeflow again and again, by a cron expression or at an interval."""
    from fedloom.kubeflow import compiling, schedules
    from fedloom.kubeflow.settings import KubeflowSettings

    timing = schedules.Timing.of(cron, every, at_once=max_concurrency, catch_up=catch_up)
    settings = KubeflowSettings.of(kubeflow)
    known = compiling.check_name(name)
    arguments = pipeline_arguments(known, experiment, set_, method, seeds, model, checkpoint, serve, source)
    options = OrderOptions(backend, cluster, pods, schedule_name, label or (), not no_cache)
    order = plan_order(known, arguments, settings, options, unique=False)
    api = settings.connect()
    with terminable():
        made = schedules.schedule_pipeline(api, order, timing, lambda line: typer.echo(line, err=True))
        typer.echo(f"schedule {made.run}: {made.when}: {made.link}")
        remove_versions(api, made.pipeline, keep_versions)


@app.command("list")
def _list(kubeflow: KubeflowOption = None) -> None:
    """List the schedules in the Kubeflow experiment of the settings."""
    from fedloom.kubeflow.schedules import list_schedules
    from fedloom.kubeflow.settings import KubeflowSettings

    settings = KubeflowSettings.of(kubeflow)
    api = settings.connect()
    api.check()
    for one in list_schedules(api, settings.experiment):
        typer.echo(f"{one.run}  {one.state}  {one.name}: {one.when}")


@app.command("pause")
def _pause(schedule: Id, kubeflow: KubeflowOption = None) -> None:
    """Start no more runs of a schedule; those in progress continue."""
    from fedloom.kubeflow.schedules import pause_schedule

    pause_schedule(_connected(kubeflow), schedule)
    typer.echo(f"paused {schedule}")


@app.command("resume")
def _resume(schedule: Id, kubeflow: KubeflowOption = None) -> None:
    """Start runs of a paused schedule again."""
    from fedloom.kubeflow.schedules import resume_schedule

    resume_schedule(_connected(kubeflow), schedule)
    typer.echo(f"resumed {schedule}")


@app.command("delete")
def _delete(schedule: Id, kubeflow: KubeflowOption = None) -> None:
    """Delete a schedule; its past runs remain, and those in progress continue."""
    from fedloom.kubeflow.schedules import delete_schedule

    delete_schedule(_connected(kubeflow), schedule)
    typer.echo(f"deleted {schedule}")


def _connected(kubeflow: str | None) -> Kubeflow:
    from fedloom.kubeflow.settings import KubeflowSettings

    api = KubeflowSettings.of(kubeflow).connect()
    api.check()
    return api
