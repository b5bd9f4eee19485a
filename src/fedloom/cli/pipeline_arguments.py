"""Arguments of ``fedloom pipeline submit`` and ``local``: the pipeline's parameters, and its pods."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.cli.options import refuse_options

if TYPE_CHECKING:
    from fedloom.experiment import Experiment
    from fedloom.kubeflow.settings import KubeflowSettings
    from fedloom.kubeflow.submit import Order


def plan_order(
    name: str,
    arguments: dict[str, Any],
    settings: KubeflowSettings,
    *,
    backend: str | None,
    cluster: Path | None,
    pods: Path | None,
    run_name: str | None,
    labels: Sequence[str],
    cached: bool,
    unique: bool,
) -> Order:
    """Check a run's settings, and return its order; nothing is sent.

    Parameters
    ----------
    name, arguments
        Name of the pipeline, and its parameters so far.
    backend
        ``kubernetes`` or ``local``; None for the pipeline's default.
    cluster, pods
        Files with the settings of the client pods, and of the tasks' pods.
    run_name
        Name of the run; None for the experiment's, with random digits if it must be ``unique``.
    labels
        Labels of all pods, as ``key=value``.
    cached
        False to run every task, even if Kubeflow has its result.

    Raises
    ------
    ExperimentError
        If the run would be refused.
    """
    from fedloom.cluster.settings import settings_from_file
    from fedloom.kubeflow import compiling
    from fedloom.kubeflow.pods import PipelineChanges, PodSettings
    from fedloom.kubeflow.submit import Order

    found = _labels(labels)
    arguments = arguments | _where(name, backend, cluster, settings.storage_secret, found)
    if "cluster" in arguments:
        arguments["cluster"] = settings.store.for_client_pods(arguments["cluster"])
    if arguments.get("serve") and settings.serve_secret is not None:
        arguments["serve_secret"] = settings.serve_secret
    if settings.image is not None:
        compiling.use_image(settings.image)
    experiments = _checked(name, arguments)
    locations = [arguments.get("source"), *(e.storage for e in experiments)]
    of_pods = PodSettings() if pods is None else settings_from_file(PodSettings, pods)
    return Order(
        name,
        arguments,
        run_name or (f"{experiments[0].name}-{uuid.uuid4().hex[:8]}" if unique else experiments[0].name),
        settings.experiment,
        settings.service_account,
        settings.pipeline_root,
        PipelineChanges.of(of_pods, found, cached=cached, locations=locations),
        settings.store,
    )


def _labels(given: Sequence[str]) -> dict[str, str]:
    """Return labels given as ``key=value``; raise ExperimentError if one is invalid."""
    from fedloom.errors import ExperimentError
    from fedloom.kubeflow.pods import check_labels

    labels: dict[str, str] = {}
    for text in given:
        key, separator, value = text.partition("=")
        if not separator:
            raise ExperimentError(f"--label must be KEY=VALUE (got {text!r}).", key="label", found=text)
        labels[key] = value
    try:
        return check_labels(labels)
    except ValueError as error:
        raise ExperimentError(f"--label: {error}", key="label") from error


def pipeline_arguments(
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

    text = text_of(experiment)
    if name == "compare_methods":
        refuse_options({"--checkpoint": checkpoint}, f"is for personalized_federation and unseen_clients (got {name}).")
    else:
        refuse_options({"--method": methods, "--seeds": seeds}, f"is for compare_methods (got {name}).")
    if name != "unseen_clients":
        refuse_options({"--model": model, "--serve": serve}, f"is for unseen_clients (got {name}).")
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


def text_of(experiment: Path) -> str:
    """Return the text of an experiment file; raise ExperimentError if it cannot be read."""
    from fedloom.errors import ExperimentError
    from fedloom.storage.folder import read_file

    try:
        return read_file(experiment).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = (getattr(error, "strerror", None) or "not a UTF-8 text file").lower()
        raise ExperimentError(f"{experiment}: cannot be read: {why}") from error


def _where(
    name: str, backend: str | None, cluster: Path | None, storage_secret: str | None, labels: dict[str, str]
) -> dict[str, Any]:
    """Return the parameters that determine where the federation runs.

    Raises
    ------
    ExperimentError
        If an option or a setting in the file is invalid.
    """
    from fedloom.cluster.settings import ClusterSettings, settings_from_file
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
        settings = settings_from_file(ClusterSettings, cluster)
        found = settings.model_dump(mode="json", exclude_unset=True)
        given["cluster"] = json.dumps(found | ({"labels": {**settings.labels, **labels}} if labels else {}))
    return {key: value for key, value in given.items() if value is not None}


def _checked(name: str, arguments: dict[str, Any]) -> list[Experiment]:
    """Check the run's parameters before anything is uploaded; return the file's experiment, and those that will run.

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
    found = [parse_experiment(planned.experiment)]
    experiments = found
    if name == "compare_methods":
        points = planning.grid(planned.experiment, arguments.get("methods") or [""], arguments.get("seeds", [1, 2, 3]))
        experiments = [parse_experiment(point["experiment"]) for point in points]
    if name != "unseen_clients" and arguments.get("backend", "kubernetes") == "kubernetes":
        settings = ClusterSettings.from_json(arguments.get("cluster", ""))
        if settings.storage_secret is None:  # the pipeline's parameter has a default
            settings = settings.model_copy(update={"storage_secret": arguments.get("storage_secret", "default")})
        for experiment in experiments:
            check_cluster_settings(experiment, settings, TaskConfig())
    return [*found, *experiments]
