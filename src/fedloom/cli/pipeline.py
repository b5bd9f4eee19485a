"""``fedloom pipeline``: compile, run locally, submit, wait for and stop Kubeflow pipelines."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from fedloom.kubeflow.api import Kubeflow

app = typer.Typer(help="Kubeflow pipelines.", no_args_is_help=True, rich_markup_mode=None)

Name = Annotated[
    str, typer.Argument(help="personalized_federation, compare_methods or unseen_clients.", metavar="NAME")
]
ExperimentFile = Annotated[Path, typer.Argument(help="The experiment file.", metavar="EXPERIMENT")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Replace a value of the file; repeatable.")
]
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


@app.command("compile")
def _compile(
    name: Annotated[str | None, typer.Argument(help="The pipeline; by default all.", metavar="[NAME]")] = None,
    out: Annotated[Path, typer.Option(help="Folder for NAME.yaml.", metavar="DIR")] = Path(),
    image: Annotated[str | None, typer.Option(help="Image of the components, with tag or digest.")] = None,
) -> None:
    """Compile a pipeline to YAML. The file can be uploaded by hand, or archived."""
    from fedloom.kubeflow import compiling

    names = [compiling.check_name(name)] if name else list(compiling.NAMES)
    if image is not None:
        compiling.use_image(image)
    out.mkdir(parents=True, exist_ok=True)
    for one in names:
        compiling.compile_to(one, out / f"{one}.yaml")
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
    arguments = _arguments(known, experiment, set_, method, seeds, model, checkpoint, serve, source)
    if known != "unseen_clients":
        arguments["backend"] = "local"
    everything = logging.getLogger("fedloom").isEnabledFor(logging.DEBUG)
    local.run_pipeline(known, arguments, out, say=lambda line: typer.echo(line, err=True), everything=everything)
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
    backend: Annotated[
        str | None, typer.Option(help="kubernetes: client pods (default); local: processes of one pod.")
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option(help="YAML file: settings of the client pods (docs/cluster.md).", metavar="FILE")
    ] = None,
    kubeflow: KubeflowOption = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the end; the exit code gives the outcome.")] = False,
    terminate_on_interrupt: Annotated[
        bool, typer.Option("--terminate-on-interrupt", help="Ctrl-C while waiting also stops the run.")
    ] = False,
) -> None:
    """Run a pipeline on Kubeflow. It is uploaded and started, and its link is printed."""
    from fedloom.kubeflow import compiling, submit
    from fedloom.kubeflow.settings import KubeflowSettings

    settings = KubeflowSettings.of(kubeflow)
    known = compiling.check_name(name)
    arguments = _arguments(known, experiment, set_, method, seeds, model, checkpoint, serve, source)
    arguments |= _where(known, backend, cluster, settings.storage_secret)
    if "cluster" in arguments:
        arguments["cluster"] = settings.store.for_client_pods(arguments["cluster"])
    if serve is not None and settings.serve_secret is not None:
        arguments["serve_secret"] = settings.serve_secret
    if settings.image is not None:
        compiling.use_image(settings.image)
    run_name = _checked(known, arguments)
    api = settings.connect()
    order = submit.Order(
        known,
        arguments,
        run_name,
        settings.experiment,
        settings.service_account,
        settings.pipeline_root,
        settings.store,
    )
    with _terminable():
        started = submit.submit_pipeline(api, order, lambda line: typer.echo(line, err=True))
        typer.echo(f"run {started.run}: {started.link}")
        if wait:
            _await(api, started, terminate=terminate_on_interrupt)


@app.command("search")
def _search(
    experiment: ExperimentFile,
    space: Annotated[
        Path, typer.Option(help="YAML file: the keys to search, and how (docs/search.md).", metavar="SPACE.yaml")
    ],
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
    trials: Annotated[
        int | None,
        typer.Option(help="Number of trials; by default the file's, or 20, or all of a grid.", min=1, metavar="N"),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the sampler; by default the file's, or 0.", min=0, metavar="N")
    ] = None,
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
    from fedloom.cluster.settings import ClusterSettings
    from fedloom.experiment.search_space import read_space
    from fedloom.kubeflow import katib

    asked, settings = read_space(space, trials=trials, seed=seed), ClusterSettings.from_file(cluster)
    place = katib.Placement(partition, name, parallel)
    found = katib.plan_katib_search(_text_of(experiment), set_ or (), asked, settings, place)
    objects = katib.search_objects(found)
    text = katib.as_documents(objects)
    if out is not None:
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
    from fedloom.kubeflow.settings import KubeflowSettings
    from fedloom.kubeflow.submit import Started

    api = KubeflowSettings.of(kubeflow).connect()
    api.check()
    with _terminable():
        _await(api, Started(run, api.link(run)), terminate=False)


@app.command("stop")
def _stop(
    run: Annotated[str, typer.Argument(help="Id of the run.", metavar="RUN")],
    kubeflow: KubeflowOption = None,
) -> None:
    """Stop a run on Kubeflow, its federations and their pods."""
    from fedloom.kubeflow import submit
    from fedloom.kubeflow.settings import KubeflowSettings

    api = KubeflowSettings.of(kubeflow).connect()
    api.check()
    if submit.stop_run(api, run):
        typer.echo(f"stopping {api.link(run)}")
    else:
        typer.echo(f"has already ended: {api.link(run)}")


def _arguments(
    name: str,
    experiment: Path,
    overrides: list[str] | None,
    methods: list[str] | None,
    seeds: str | None,
    model: str | None,
    checkpoint: str | None,
    serve: str | None,
    source: str | None,
) -> dict[str, Any]:
    """Return the pipeline parameters given by options.

    Raises
    ------
    ExperimentError
        If the file cannot be read, or an option is missing or does not apply to this pipeline.
    """
    from fedloom.errors import ExperimentError
    from fedloom.experiment import seeds_of

    text = _text_of(experiment)
    of_one = {
        "--method": ("compare_methods", methods),
        "--seeds": ("compare_methods", seeds),
        "--model": ("unseen_clients", model),
        "--serve": ("unseen_clients", serve),
    }
    for option, (owner, value) in of_one.items():
        if value is not None and name != owner:
            raise ExperimentError(f"{option} is for {owner} (got {name}).", key=option[2:])
    if checkpoint is not None and name == "compare_methods":
        raise ExperimentError(
            f"--checkpoint is for personalized_federation and unseen_clients (got {name}).", key="checkpoint"
        )
    if name == "unseen_clients" and model is None:
        raise ExperimentError(
            "unseen_clients needs --model: a run's folder, or the URI of a model artifact.", key="model"
        )
    if serve is not None and checkpoint not in (None, "last"):
        raise ExperimentError(
            f"--checkpoint must be last with --serve: the server chooses the round (got {checkpoint}).",
            key="checkpoint",
        )
    of_pipeline = {"model": model, "checkpoint": checkpoint, "serve": serve, "source": source}
    listed = None if seeds is None else seeds_of(seeds) if seeds else []
    given = {"methods": methods, "seeds": listed, **of_pipeline}
    given = {key: value for key, value in given.items() if value is not None}
    return {"experiment": text, "overrides": overrides or [], **given}


def _text_of(experiment: Path) -> str:
    """Return the text of an experiment file; raise ExperimentError if it cannot be read."""
    from fedloom.errors import ExperimentError
    from fedloom.storage.folder import read_file

    try:
        return read_file(experiment).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = (getattr(error, "strerror", None) or "not a UTF-8 text file").lower()
        raise ExperimentError(f"{experiment}: cannot be read: {why}") from error


def _where(name: str, backend: str | None, cluster: Path | None, storage_secret: str | None) -> dict[str, Any]:
    """Return the parameters that determine where the federation runs.

    Raises
    ------
    ExperimentError
        If an option or a setting in the file is invalid.
    """
    from fedloom.cluster.settings import ClusterSettings
    from fedloom.errors import ExperimentError

    if name == "unseen_clients" and (backend is not None or cluster is not None):
        raise ExperimentError(
            "--backend and --cluster are for pipelines that train; unseen_clients does not.", key="backend"
        )
    if backend not in (None, "kubernetes", "local"):
        raise ExperimentError(
            f"--backend must be kubernetes or local (got {backend!r}).",
            key="backend",
            found=backend,
            allowed=["kubernetes", "local"],
        )
    given: dict[str, Any] = {"backend": backend, "storage_secret": storage_secret}
    if cluster is not None:
        given["cluster"] = ClusterSettings.from_file(cluster).model_dump_json(exclude_unset=True)
    return {key: value for key, value in given.items() if value is not None}


def _checked(name: str, arguments: dict[str, Any]) -> str:
    """Check the run's parameters before anything is uploaded; return the name of the run.

    Raises
    ------
    ExperimentError
        If the run would be refused.
    """
    from fedloom.cluster.federate import check_cluster_settings
    from fedloom.cluster.settings import ClusterSettings, TaskConfig
    from fedloom.experiment import parse_experiment
    from fedloom.kubeflow import planning

    planned = planning.plan(arguments["experiment"], arguments["overrides"])
    experiments = [planned.experiment]
    if name == "compare_methods":
        points = planning.grid(planned.experiment, arguments.get("methods") or [""], arguments.get("seeds", [1, 2, 3]))
        experiments = [point["experiment"] for point in points]
    if name != "unseen_clients" and arguments.get("backend", "kubernetes") == "kubernetes":
        settings = ClusterSettings.from_json(arguments.get("cluster", ""))
        if settings.storage_secret is None:  # the pipeline's parameter has a default
            settings = settings.model_copy(update={"storage_secret": arguments.get("storage_secret", "default")})
        for text in experiments:
            check_cluster_settings(parse_experiment(text), settings, TaskConfig())
    return parse_experiment(planned.experiment).name


def _await(kubeflow: Kubeflow, started: Any, *, terminate: bool) -> None:
    from fedloom.kubeflow import submit

    with submit.stopping(kubeflow, started, terminate=terminate):
        submit.wait_for_run(kubeflow, started.run, lambda line: typer.echo(line, err=True))
    typer.echo("succeeded")


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
