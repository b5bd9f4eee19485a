"""``fedloom pipeline``: compile, run locally, submit, schedule, wait for and stop Kubeflow pipelines."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fedloom.cli.options import Checkpoint, Commands, Set
from fedloom.cli.results import CommandResult
from fedloom.core.files import copy_atomically, storing

if TYPE_CHECKING:
    from fedloom.kubeflow.client import Kubeflow
    from fedloom.kubeflow.pods import PodSettings

app = Commands(help="Kubeflow pipelines.")

Name = Annotated[
    str, typer.Argument(help="personalized_federation, compare_methods or unseen_clients.", metavar="NAME")
]
ExperimentFile = Annotated[Path, typer.Argument(help="The experiment file.", metavar="EXPERIMENT")]
Parameters = Annotated[
    list[str] | None,
    typer.Option(
        "--param",
        metavar="KEY=VALUE",
        help="Parameter of the pipeline, such as checkpoint=best, source=s3://BUCKET/PREFIX, model=RUN, seeds=1-3, or "
        "methods=CHANGES once for each method (docs/kubeflow.md); repeatable.",
    ),
]
Pods = Annotated[
    Path | None,
    typer.Option(
        help="YAML file: image, caching, and the pods' resources, GPUs and nodes (docs/kubeflow.md).", metavar="FILE"
    ),
]
Run = Annotated[str, typer.Argument(help="Id of the run.", metavar="RUN")]


@app.callback()
def _choose_installation(
    context: typer.Context,
    kubeflow: Annotated[
        str | None,
        typer.Option(
            help="URL of Kubeflow Pipelines; in-cluster, in a pod; or a YAML file with host, token, namespace and "
            "other settings (docs/kubeflow.md). By default $KF_PIPELINES_ENDPOINT.",
            metavar="URL|FILE|in-cluster",
        ),
    ] = None,
) -> None:
    context.obj = kubeflow


@app.command("compile")
def _compile(
    name: Annotated[str | None, typer.Argument(help="The pipeline; by default all.", metavar="[NAME]")] = None,
    out: Annotated[Path, typer.Option(help="Folder for NAME.yaml.", metavar="DIR")] = Path(),
    pods: Pods = None,
) -> CommandResult:
    """Compile a pipeline to YAML. The file can be uploaded by hand, or archived."""
    from fedloom.kubeflow import catalog

    settings = _pods(pods)
    names = [catalog.check_name(name)] if name else list(catalog.NAMES)
    catalog.use_image(settings.image)
    with tempfile.TemporaryDirectory() as folder:
        for one in names:
            catalog.compile_to(one, Path(folder) / f"{one}.yaml")
            settings.apply(Path(folder) / f"{one}.yaml")
        with storing(out):
            out.mkdir(parents=True, exist_ok=True)
        for one in names:
            copy_atomically(Path(folder) / f"{one}.yaml", out / f"{one}.yaml")
    files = [out / f"{one}.yaml" for one in names]
    facts = [{"file": file, "version": catalog.version_of(file)} for file in files]
    return CommandResult(facts, "\n".join(f"{each['file']}: version {each['version']}" for each in facts))


@app.command("local")
def _local(
    name: Name,
    experiment: ExperimentFile,
    out: Annotated[Path, typer.Option(help="New folder for the tasks' outputs.", metavar="DIR")],
    set_: Set = None,
    param: Parameters = None,
) -> CommandResult:
    """Run a pipeline on this machine, with processes instead of pods."""
    from fedloom.kubeflow import catalog, local

    known = catalog.check_name(name)
    arguments = _arguments(experiment, set_, param)
    if known != "unseen_clients":
        arguments["backend"] = "local"
    everything = logging.getLogger("fedloom").isEnabledFor(logging.DEBUG)
    local.run_pipeline(known, arguments, out, say=_say, everything=everything)
    pages = [page.read_text(encoding="utf-8") for page in sorted(out.glob("*.md"))]
    results = {result.stem: result for result in sorted((*out.glob("*.html"), *out.glob("run"), *out.glob("runs")))}
    return CommandResult(results, "\n".join([*pages, *(f"{name}: {path}" for name, path in results.items())]))


@app.command("submit")
def _submit(
    context: typer.Context,
    name: Name,
    experiment: ExperimentFile,
    set_: Set = None,
    param: Parameters = None,
    cluster: Annotated[
        Path | None, typer.Option(help="YAML file: settings of the client pods (docs/cluster.md).", metavar="FILE")
    ] = None,
    pods: Pods = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            help="Create a schedule instead: an interval such as 90m, 6h or 1d, or times in the time zone of the "
            "installation (UTC): minute, hour, day of month, month, day of week; or six fields with seconds first.",
            metavar="'M H D M W'|INTERVAL",
        ),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the end; the exit code gives the outcome.")] = False,
) -> CommandResult:
    """Run a pipeline on Kubeflow; with --schedule, create a schedule that runs it repeatedly."""
    from fedloom.cluster.settings import ClusterSettings, settings_from_file
    from fedloom.errors import ExperimentError
    from fedloom.kubeflow import submit
    from fedloom.kubeflow.client import Kubeflow, KubeflowSettings

    if schedule is not None and wait:
        raise ExperimentError("--wait is for a single run, not for a schedule.", key="wait")
    settings = KubeflowSettings.from_option(context.obj)
    clients = None if cluster is None else settings_from_file(ClusterSettings, cluster)
    arguments = _arguments(experiment, set_, param)
    order = submit.plan_order(name, arguments, settings, cluster=clients, pods=_pods(pods))
    api = Kubeflow(settings)
    if schedule is not None:
        trigger, times = submit.trigger_of(api, schedule)
        identity = submit.schedule_pipeline(api, order, trigger, _say)
        link = api.link(identity, kind="recurringrun")
        facts = {"schedule": identity, "times": times, "link": link}
        return CommandResult(facts, f"schedule {identity}: {times}: {link}")
    run = submit.submit_pipeline(api, order, _say)
    if not wait:
        return CommandResult({"run": run, "link": api.link(run)}, f"run {run}: {api.link(run)}")
    _say(f"run {run}: {api.link(run)}")
    return _awaited(api, run)


@app.command("wait")
def _wait(context: typer.Context, run: Run) -> CommandResult:
    """Wait for a run on Kubeflow; the exit code gives its outcome."""
    return _awaited(_connected(context.obj), run)


@app.command("stop")
def _stop(context: typer.Context, run: Run) -> CommandResult:
    """Stop a run on Kubeflow, its federations and their pods."""
    from fedloom.kubeflow import runs

    api = _connected(context.obj)
    words = {None: "stopping", "CANCELING": "is already being stopped:"}
    state = runs.stop_run(api, run)
    text = f"{words.get(state, 'has already ended:')} {api.link(run)}"
    return CommandResult({"run": run, "state": state or "stopping", "link": api.link(run)}, text)


@app.command("schedules")
def _schedules(
    context: typer.Context,
    action: Annotated[Literal["list", "pause", "resume", "delete"], typer.Argument(help="What to do.")],
    schedule: Annotated[str | None, typer.Argument(help="Id of the schedule; not for list.")] = None,
) -> CommandResult:
    """List, pause, resume or delete the schedules that `fedloom pipeline submit --schedule` creates."""
    from fedloom.errors import ExperimentError
    from fedloom.kubeflow import submit

    if (schedule is None) != (action == "list"):
        raise ExperimentError(f"{action} needs {'no' if schedule else 'the id of a'} schedule.", key="schedule")
    api = _connected(context.obj)
    if schedule is None:
        known = list(submit.schedules(api))
        lines = [f"{one['schedule']}  {one['state']}  {one['name']}: {one['times']}" for one in known]
        return CommandResult(known, "\n".join(lines))
    submit.change_schedule(api, action, schedule)
    return CommandResult({"schedule": schedule, "action": action}, f"{action.rstrip('e')}ed {schedule}")


def _arguments(experiment: Path, overrides: list[str] | None, parameters: list[str] | None) -> dict[str, Any]:
    from fedloom.kubeflow.submit import parameters_from

    return {"experiment": _text(experiment), "overrides": overrides or [], **parameters_from(parameters or ())}


def _text(experiment: Path) -> str:
    """Return the text of an experiment file; raise ExperimentError if it cannot be read."""
    from fedloom.core.files import read_file
    from fedloom.errors import ExperimentError

    try:
        return read_file(experiment).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = (getattr(error, "strerror", None) or "not a UTF-8 text file").lower()
        raise ExperimentError(f"{experiment} cannot be read: {why}") from error


def _pods(path: Path | None) -> PodSettings:
    from fedloom.cluster.settings import settings_from_file
    from fedloom.kubeflow.pods import PodSettings

    return PodSettings() if path is None else settings_from_file(PodSettings, path)


def _awaited(kubeflow: Kubeflow, run: str) -> CommandResult:
    from fedloom.kubeflow import runs

    runs.wait_for_run(kubeflow, run, _say)
    return CommandResult({"run": run, "state": "succeeded", "link": kubeflow.link(run)}, "succeeded")


def _connected(option: str | None) -> Kubeflow:
    """Return the API of the installation given by ``--kubeflow``, after checking that it responds as one."""
    from fedloom.kubeflow.client import Kubeflow, KubeflowSettings

    api = Kubeflow(KubeflowSettings.from_option(option))
    api.check()
    return api


def _say(line: str) -> None:
    typer.echo(line, err=True)


def register_command(
    run: Annotated[str, typer.Argument(help="Folder of the finished run, or its URL.", metavar="RUN|URL")],
    registry: Annotated[
        str | None,
        typer.Option(
            help="URL of the model registry; its token is $FEDLOOM_REGISTRY_TOKEN.",
            metavar="URL",
            envvar="FEDLOOM_REGISTRY",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the model; by default the experiment's.")] = None,
    version: Annotated[
        str | None, typer.Option(help="Name of the version; by default the round and the checkpoint's digest.")
    ] = None,
    checkpoint: Checkpoint = "last",
    uri: Annotated[
        str | None,
        typer.Option(
            help="URI of the run's folder for those who serve it; by default the URL of a published run.",
            metavar="URI",
        ),
    ] = None,
) -> CommandResult:
    """Register a run's model in the Kubeflow Model Registry. The same checkpoint is registered once."""
    from fedloom.kubeflow.registration import ModelRegistry, register_run

    api = ModelRegistry(registry)
    entry = register_run(api, run, model=name, version=version, checkpoint=checkpoint, uri=uri)
    done = "registered" if entry.created else "is already registered"
    where = f"{api.url}, model {entry.model_id}, version {entry.version_id}"
    return CommandResult({**entry._asdict(), "registry": api.url}, f"{entry.model} {entry.version} {done}: {where}")
