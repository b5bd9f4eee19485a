"""``fedloom pipeline schedules``: list, pause, resume and delete recurring runs of Kubeflow pipelines."""

from __future__ import annotations

from typing import Annotated

import typer

from fedloom.cli.options import Commands
from fedloom.cli.pipeline import KubeflowOption, connected

app = Commands(
    help="Recurring runs of pipelines, which `fedloom pipeline submit --cron` or `--every` creates.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Id = Annotated[str, typer.Argument(help="Id of the schedule.", metavar="SCHEDULE")]


@app.command("list")
def _list(kubeflow: KubeflowOption = None) -> None:
    """List the schedules in the Kubeflow experiment of the settings."""
    from fedloom.kubeflow.schedules import list_schedules
    from fedloom.kubeflow.settings import KubeflowSettings

    for one in list_schedules(connected(kubeflow), KubeflowSettings.of(kubeflow).experiment):
        typer.echo(f"{one.run}  {one.state}  {one.name}: {one.when}")


@app.command("pause")
def _pause(schedule: Id, kubeflow: KubeflowOption = None) -> None:
    """Start no more runs of a schedule; those in progress continue."""
    from fedloom.kubeflow.schedules import pause_schedule

    pause_schedule(connected(kubeflow), schedule)
    typer.echo(f"paused {schedule}")


@app.command("resume")
def _resume(schedule: Id, kubeflow: KubeflowOption = None) -> None:
    """Start runs of a paused schedule again."""
    from fedloom.kubeflow.schedules import resume_schedule

    resume_schedule(connected(kubeflow), schedule)
    typer.echo(f"resumed {schedule}")


@app.command("delete")
def _delete(schedule: Id, kubeflow: KubeflowOption = None) -> None:
    """Delete a schedule; its past runs remain, and those in progress continue."""
    from fedloom.kubeflow.schedules import delete_schedule

    delete_schedule(connected(kubeflow), schedule)
    typer.echo(f"deleted {schedule}")
