"""``fedloom pipeline``: compile, run locally, submit, schedule, wait for and stop Kubeflow pipelines."""

from __future__ import annotations

import logging
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom.cli.options import Commands, Set, Space, TrialCount
from fedloom.cli.pipeline_arguments import pipeline_arguments, plan_order, text_of
from fedloom.storage.folder import copy_atomically, storing

if TYPE_CHECKING:
    from fedloom.kubeflow.api import Kubeflow

app = Commands(help="Kubeflow pipelines.", no_args_is_help=True, rich_markup_mode=None)

Name = Annotated[
    str, typer.Argument(help="personalized_federation, compare_methods or unseen_clients.", metavar="NAME")
]
ExperimentFile = Annotated[Path, typer.Argument(help="The experiment file.", metavar="EXPERIMENT")]
Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        metavar="KEY=VALUE;...",
        help="compare_methods: changes to the file for one method, possibly empty; repeatable.",
    ),
]
Seeds = Annotated[str | None, typer.Option(help="compare_methods: 1,2,3 or 1-3.", metavar="N,N,...")]
Model = Annotated[
    str | None, typer.Option(help="unseen_clients: the trained model, a run's folder or an artifact's URI.")
]
Serve = Annotated[
    str | None,
    typer.Option(help="unseen_clients: request the clients' models from this server.", metavar="HOST:PORT"),
]
Which = Annotated[
    str | None,
    typer.Option("--checkpoint", help="Checkpoint to evaluate: last, best or a round.", metavar="last|best|N"),
]
Source = Annotated[
    str | None,
    typer.Option(help="Read the data set's files from this folder or s3://BUCKET/PREFIX.", metavar="DIR|URL"),
]
KubeflowOption = Annotated[
    str | None,
    typer.Option(
        "--kubeflow",
        help="URL of Kubeflow Pipelines; in-cluster, in a pod; or a YAML file with host, token, namespace and other "
        "settings (docs/kubeflow.md). By default $KF_PIPELINES_ENDPOINT.",
        metavar="URL|FILE|in-cluster",
    ),
]
Backend = Annotated[str | None, typer.Option(help="kubernetes: client pods (default); local: processes of one pod.")]
Cluster = Annotated[
    Path | None, typer.Option(help="YAML file: settings of the client pods (docs/cluster.md).", metavar="FILE")
]
Pods = Annotated[
    Path | None,
    typer.Option(help="YAML file: resources, GPUs and nodes of the tasks' pods (docs/kubeflow.md).", metavar="FILE"),
]
Labels = Annotated[
    list[str] | None, typer.Option(help="Label of all pods of the run; repeatable.", metavar="KEY=VALUE")
]
NoCache = Annotated[
    bool, typer.Option("--no-cache", help="Run every task, even if Kubeflow has its result from an earlier run.")
]
KeepVersions = Annotated[
    int | None,
    typer.Option(
        help="Remove older versions of the pipeline that FedLoom uploaded and nothing uses; by default none.",
        min=1,
        metavar="N",
    ),
]


@app.command("compile")
def _compile(
    name: Annotated[str | None, typer.Argument(help="The pipeline; by default all.", metavar="[NAME]")] = None,
    out: Annotated[Path, typer.Option(help="Folder for NAME.yaml.", metavar="DIR")] = Path(),
    image: Annotated[str | None, typer.Option(help="Image of the components, with tag or digest.")] = None,
    pods: Pods = None,
    no_cache: NoCache = False,
) -> None:
    """Compile a pipeline to YAML. The file can be uploaded by hand, or archived."""
    from fedloom.cluster.settings import settings_from_file
    from fedloom.kubeflow import compiling
    from fedloom.kubeflow.pods import PipelineChanges, PodSettings

    found = PodSettings() if pods is None else settings_from_file(PodSettings, pods)
    changes = PipelineChanges.of(found, {}, cached=not no_cache, locations=())
    names = [compiling.check_name(name)] if name else list(compiling.NAMES)
    if image is not None:
        compiling.use_image(image)
    with tempfile.TemporaryDirectory() as folder:
        for one in names:
            compiling.compile_to(one, Path(folder) / f"{one}.yaml")
            changes.apply(Path(folder) / f"{one}.yaml")
        with storing(out):
            out.mkdir(parents=True, exist_ok=True)
        for one in names:
            copy_atomically(Path(folder) / f"{one}.yaml", out / f"{one}.yaml")
            typer.echo(f"{out / f'{one}.yaml'}: version {compiling.version_of(out / f'{one}.yaml')}")


@app.command("local")
def _local(
    name: Name,
    experiment: ExperimentFile,
    out: Annotated[Path, typer.Option(help="New folder for the tasks' outputs.", metavar="DIR")],
    set_: Set = None,
    method: Methods = None,
    seeds: Seeds = None,
    model: Model = None,
    checkpoint: Which = None,
    serve: Serve = None,
    source: Source = None,
) -> None:
    """Run a pipeline on this machine, with processes instead of pods."""
    from fedloom.kubeflow import compiling, local

    known = compiling.check_name(name)
    arguments = pipeline_arguments(known, experiment, set_, method, seeds, model, checkpoint, serve, source)
    if known != "unseen_clients":
        arguments["backend"] = "local"
    everything = logging.getLogger("fedloom").isEnabledFor(logging.DEBUG)
    local.run_pipeline(known, arguments, out, say=_say, everything=everything)
    for page in sorted(out.glob("*.md")):
        typer.echo(page.read_text(encoding="utf-8"))
    for found in sorted((*out.glob("*.html"), *out.glob("run"), *out.glob("runs"))):
        typer.echo(f"{found.stem}: {found}")


@app.command("submit")
def _submit(
    name: Name,
    experiment: ExperimentFile,
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
    run_name: Annotated[
        str | None,
        typer.Option("--name", help="Name of the run or schedule; by default the experiment's.", metavar="TEXT"),
    ] = None,
    label: Labels = None,
    no_cache: NoCache = False,
    keep_versions: KeepVersions = None,
    kubeflow: KubeflowOption = None,
    cron: Annotated[
        str | None,
        typer.Option(
            help="Create a schedule instead, with these times: minute, hour, day of month, month, day of week; or six "
            "fields with seconds first. The time zone is that of the installation (UTC).",
            metavar="'M H D M W'",
        ),
    ] = None,
    every: Annotated[
        str | None,
        typer.Option(
            help="Create a schedule instead, with this interval between the starts: 90m, 6h or 1d.",
            metavar="NUMBER{s|m|h|d}",
        ),
    ] = None,
    max_concurrency: Annotated[
        int | None,
        typer.Option(
            help="Runs of the schedule that may be in progress at the same time; by default 1.",
            min=1,
            max=10,
            metavar="N",
        ),
    ] = None,
    catch_up: Annotated[
        bool,
        typer.Option("--catch-up", help="Also start missed runs of the schedule; by default only the latest of them."),
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the end; the exit code gives the outcome.")] = False,
    terminate_on_interrupt: Annotated[
        bool, typer.Option("--terminate-on-interrupt", help="Ctrl-C while waiting also stops the run.")
    ] = False,
) -> None:
    """Run a pipeline on Kubeflow; with --cron or --every, create a schedule that runs it repeatedly."""
    from fedloom.errors import ExperimentError
    from fedloom.kubeflow import compiling, schedules, submit
    from fedloom.kubeflow.settings import KubeflowSettings

    timing = schedules.Timing.of(cron, every, at_once=max_concurrency, catch_up=catch_up)
    if timing is not None and wait:
        raise ExperimentError("--wait is for a single run, not for a schedule.", key="wait")
    settings = KubeflowSettings.of(kubeflow)
    known = compiling.check_name(name)
    arguments = pipeline_arguments(known, experiment, set_, method, seeds, model, checkpoint, serve, source)
    order = plan_order(
        known,
        arguments,
        settings,
        backend=backend,
        cluster=cluster,
        pods=pods,
        run_name=run_name,
        labels=label or (),
        cached=not no_cache,
        unique=timing is None,
    )
    api = settings.connect()
    with _terminable():
        if timing is not None:
            made = schedules.schedule_pipeline(api, order, timing, _say)
            typer.echo(": ".join(filter(None, (f"schedule {made.run}", str(timing), made.page))))
            _remove_versions(api, made.pipeline, keep_versions)
            return
        started = submit.submit_pipeline(api, order, _say)
        typer.echo(": ".join(filter(None, (f"run {started.run}", started.page))))
        _remove_versions(api, started.pipeline, keep_versions)
        if wait:
            _await(api, started.run, terminate=terminate_on_interrupt)


def _remove_versions(api: Kubeflow, pipeline: str, keep: int | None) -> None:
    """Remove old versions of a pipeline if requested; only report a failure, because the run has already started."""
    from fedloom.errors import FedloomError
    from fedloom.kubeflow.versions import remove_old_versions

    if keep is not None:
        try:
            for name in remove_old_versions(api, pipeline, keep):
                typer.echo(f"removed version {name}", err=True)
        except FedloomError as error:
            typer.echo(f"old versions were not removed: {error}", err=True)


@app.command("search")
def _search(
    experiment: ExperimentFile,
    space: Space,
    cluster: Annotated[
        Path, typer.Option(help="YAML file: settings of the trials' pods (docs/cluster.md).", metavar="FILE")
    ],
    partition: Annotated[
        str,
        typer.Option(
            help="The partition that all trials use, published by `fedloom partition EXPERIMENT --out`.",
            metavar="s3://BUCKET/PREFIX",
        ),
    ],
    set_: Set = None,
    trials: TrialCount = None,
    parallel: Annotated[
        int | None, typer.Option(help="Number of parallel trials; by default 3.", min=1, metavar="N")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the search on the cluster; by default the experiment's and a digest.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="File for `kubectl apply -f`; by default standard output.", metavar="FILE")
    ] = None,
    submit: Annotated[bool, typer.Option("--submit", help="Create the search on the cluster of $KUBECONFIG.")] = False,
) -> None:
    """Write a search as an Experiment of Katib. A trial is a Job; the space is that of `fedloom search`."""
    from fedloom.cluster.manifests import as_documents
    from fedloom.cluster.settings import ClusterSettings, settings_from_file
    from fedloom.experiment.search_space import read_space
    from fedloom.kubeflow import katib

    asked, settings = read_space(space, trials=trials), settings_from_file(ClusterSettings, cluster)
    found = katib.plan_katib_search(text_of(experiment), set_ or (), asked, settings, partition, name, parallel)
    objects = katib.search_objects(found)
    text = as_documents(objects)
    if out is not None:
        with storing(out):
            out.write_text(text, encoding="utf-8")
    if submit:
        from fedloom.cluster.api import Api

        api = Api(settings.namespace)
        katib.submit_search(api, objects)
        typer.echo(f"{found.title}: kubectl get -n {api.namespace} experiments.kubeflow.org,trials {found.title}")
    elif out is None:
        typer.echo(text, nl=False)
    else:
        typer.echo(f"{out}: kubectl apply -f {out}")


@app.command("wait")
def _wait(
    run: Annotated[str, typer.Argument(help="Id of the run.", metavar="RUN")],
    kubeflow: KubeflowOption = None,
) -> None:
    """Wait for a run on Kubeflow; the exit code gives its outcome."""
    api = connected(kubeflow)
    with _terminable():
        _await(api, run, terminate=False)


@app.command("stop")
def _stop(
    run: Annotated[str, typer.Argument(help="Id of the run.", metavar="RUN")],
    kubeflow: KubeflowOption = None,
) -> None:
    """Stop a run on Kubeflow, its federations and their pods."""
    from fedloom.kubeflow import submit

    api = connected(kubeflow)
    words = {None: "stopping", "CANCELING": "is already being stopped:"}
    typer.echo(f"{words.get(submit.stop_run(api, run), 'has already ended:')} {api.link(run)}")


def _await(kubeflow: Kubeflow, run: str, *, terminate: bool) -> None:
    from fedloom.kubeflow import submit

    with submit.stopping(kubeflow, run, terminate=terminate):
        submit.wait_for_run(kubeflow, run, _say)
    typer.echo("succeeded")


def connected(where: str | None) -> Kubeflow:
    """Return the API of the installation given by ``--kubeflow``, after checking that it responds as one."""
    from fedloom.kubeflow.settings import KubeflowSettings

    api = KubeflowSettings.of(where).connect()
    api.check()
    return api


def _say(line: str) -> None:
    typer.echo(line, err=True)


@contextmanager
def _terminable() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C, so that partial work is undone."""

    def handle(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
