"""``fedloom cluster``: federations on Kubernetes without Kubeflow, and removal of old runs."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom.cli.options import Commands, Set
from fedloom.cli.results import CommandResult

if TYPE_CHECKING:
    from fedloom.cluster.federations import Status
    from fedloom.federation.activity import Activity
    from fedloom.runs.listing import StoredFolder

app = Commands(help="Federations on Kubernetes, without Kubeflow.")

Name = Annotated[str, typer.Argument(help="The federation: fl-..., or its run id.", metavar="NAME")]
UNITS = {"m": 60.0, "h": 3600.0, "d": 86_400.0}


@app.callback()
def _choose_namespace(
    context: typer.Context,
    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace", "-n", help="Kubernetes namespace; by default this pod's, otherwise the kubeconfig's."
        ),
    ] = None,
) -> None:
    context.obj = namespace


@app.command("submit")
def _submit(
    context: typer.Context,
    experiment: Annotated[str, typer.Argument(help="The experiment file; `storage` is s3://...", metavar="EXPERIMENT")],
    cluster: Annotated[
        Path, typer.Option(help="YAML file: image, Secret and the other settings (docs/cluster.md).", metavar="FILE")
    ],
    set_: Set = None,
    partition: Annotated[
        str | None, typer.Option(help="Use this local partition instead of creating one.", metavar="DIR")
    ] = None,
    run_id: Annotated[
        str | None, typer.Option(help="Distinguishes runs of one experiment; by default its name and a digest.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Show progress, wait for the end, and fetch the run to this new folder.", metavar="DIR"),
    ] = None,
) -> CommandResult:
    """Start a federation. If it exists already, with the same experiment and run id, attach to it."""
    from fedloom import experiment as experiments
    from fedloom.cluster import federate
    from fedloom.cluster.settings import ClusterSettings, TaskConfig, settings_from_file
    from fedloom.engine import run_data

    settings = settings_from_file(ClusterSettings, cluster)
    if context.obj is not None:
        settings = settings.model_copy(update={"namespace": context.obj})
    e = experiments.load_experiment(experiment, set_ or ())
    federate.check_cluster_settings(e, settings, TaskConfig())
    if run_id is None:
        run_id = f"{e.name}-{hashlib.sha256(e.resolved_yaml().encode()).hexdigest()[:8]}"
    dataset = run_data.make_partition(e) if partition is None else run_data.open_partition(e, partition, verify=True)
    if out is not None:
        federate.federate(
            e, dataset.folder, out, backend="kubernetes", cluster=settings, run_id=run_id, unattended=True, say=_say
        )
        return CommandResult({"run_id": run_id, "folder": out}, "")
    started = federate.submit_federation(e, dataset.folder, cluster=settings, run_id=run_id, say=_say)
    _say(f"see: fedloom cluster status|logs|stop {started.name}; the same with --out DIR fetches it")
    facts = {"name": started.name, "run_id": run_id, "run": started.run}
    return CommandResult(facts, f"{started.name}: run id {run_id}, run {started.run}")


@app.command("status")
def _status(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Only this federation: fl-..., or its run id.")] = None,
) -> CommandResult:
    """Show the federations of a namespace, each with its progress, or the reason why it does not start."""
    from fedloom.cluster import federations
    from fedloom.cluster.api import Api

    api = Api(context.obj)
    found = [federations.find_federation(api, name)] if name is not None else federations.federations(api)
    known = [(one, federations.federation_progress(api, one)) for one in found]
    if not found:
        typer.echo(f"no federation in namespace {api.namespace}", err=True)
    facts = [{**vars(one), "progress": progress} for one, progress in known]
    return CommandResult(facts, "\n".join(_described(*each) for each in known))


@app.command("logs")
def _logs(
    context: typer.Context,
    name: Name,
    worker: Annotated[
        int | None, typer.Option(help="Show the log of this worker, by its index.", min=0, metavar="N")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep showing new lines until the pod ends.")] = False,
) -> None:
    """Show the log of a federation. By default the aggregator's; with --worker, that of a worker."""
    from fedloom.cluster import federations
    from fedloom.cluster.api import Api

    api = Api(context.obj)
    for line in federations.federation_logs(
        api, federations.find_federation(api, name), worker=worker, followed=follow
    ):
        typer.echo(line)


@app.command("stop")
def _stop(context: typer.Context, name: Name) -> CommandResult:
    """Stop a federation. Published results remain, and submitting it again continues from them."""
    from fedloom.cluster import federations
    from fedloom.cluster.api import Api

    api = Api(context.obj)
    found = federations.find_federation(api, name)
    deleted = []
    for what in federations.stop_federation(api, found):
        _say(f"deleted {what}")
        deleted.append(what)
    facts = {"name": found.name, "run": found.run, "deleted": deleted}
    return CommandResult(facts, f"its published results stay in {found.run}")


@app.command("clean")
def _clean(
    storage: Annotated[str, typer.Argument(help="As `storage` in experiments: s3://BUCKET/PREFIX.", metavar="STORAGE")],
    keep: Annotated[int | None, typer.Option(help="Keep this many of the latest finished runs.", min=0)] = None,
    older_than: Annotated[
        str | None,
        typer.Option(
            help="Remove only runs, finished or not, and partitions that were last written longer ago than this: 30d, "
            "12h.",
            metavar="TIME",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed, and remove nothing.")] = False,
) -> CommandResult:
    """Remove old runs from a store: checkpoints, states and results; with --older-than, unused partitions too."""
    from fedloom.errors import ExperimentError
    from fedloom.runs.listing import expired, remove_folders, stored_partitions, stored_runs, unused
    from fedloom.storage import open_store

    if keep is None and older_than is None:
        raise ExperimentError("Give --keep or --older-than, or both.", key="keep")
    store = open_store(storage)
    store.check(writing=not dry_run)
    age, lines = seconds(older_than), list[str]()
    runs, now = stored_runs(store), time.time()

    def remove(one: StoredFolder, about: str) -> None:
        about = f"{about}, {_when(one.modified)}, {one.size / 1e6:.1f} MB"
        if dry_run:
            lines.append(f"would remove {about}")
        else:
            remove_folders(store, [one])
            _say(f"removed {about}")  # at once: a later failure must not hide it

    for run in (old := expired(runs, now, keep=keep, older_than_s=age)):
        remove(run, f"{run.name}: {'finished' if run.finished else 'unfinished'}")
    lines.append(f"{len(old)} of {len(runs)} runs, {sum(run.size for run in old) / 1e6:.1f} MB")
    facts: dict[str, Any] = {"dry_run": dry_run, "runs": _removed(old), "partitions": []}
    if age is not None:
        partitions = stored_partitions(store)
        gone, silent = unused(store, partitions, [run for run in runs if run not in old], now, older_than_s=age)
        for partition in gone:
            remove(partition, f"partition {partition.name}: used by no run")
        if silent:
            names = ", ".join(run.name for run in silent)
            why = "partitions are kept, because these runs have not published yet which ones they need"
            lines.append(f"{why}: {names}")
        lines.append(f"{len(gone)} of {len(partitions)} partitions, {sum(one.size for one in gone) / 1e6:.1f} MB")
        facts["partitions"] = _removed(gone)
    return CommandResult(facts, "\n".join(lines))


def _removed(folders: Sequence[StoredFolder]) -> list[dict[str, Any]]:
    return [{"name": each.name, "bytes": each.size, "modified": each.modified} for each in folders]


def _say(line: str) -> None:
    typer.echo(line, err=True)


def _when(modified: float) -> str:
    return datetime.fromtimestamp(modified, UTC).strftime("%Y-%m-%d %H:%M")


def _described(status: Status, progress: Activity | None) -> str:
    """Return the status of a federation in two or three lines."""
    from fedloom.cluster.progress_client import rounds_of

    how = status.state
    if progress is not None:
        how = f"{progress.phase}, {rounds_of(progress)}"
    how += (
        f", {status.workers_running} of {status.workers} workers run" if status.state in ("starting", "running") else ""
    )
    again = f", attempt {status.attempt}" if status.attempt > 1 else ""
    lines = [f"{status.name}: {how}{again}", f"  run id {status.run_id}, since {status.created}, run {status.run}"]
    messages = [status.detail, "" if progress is None else progress.message]
    return "\n".join([*lines, *(f"  {line}" for message in messages for line in message.splitlines())])


def seconds(text: str | None) -> float | None:
    """Return a duration such as ``30d`` or ``12h`` in seconds.

    Raises
    ------
    ExperimentError
        If the duration is malformed.
    """
    from fedloom.errors import ExperimentError

    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([mhd])", text)
    if found is None:
        raise ExperimentError(
            f"--older-than must be a number with m, h or d, such as 30d (got {text}).", key="older_than", found=text
        )
    return float(found[1]) * UNITS[found[2]]
