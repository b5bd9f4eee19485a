"""Submission of a pipeline: plan a run, upload a version, and start a run or create a schedule."""

from __future__ import annotations

import json
import re
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.errors import ExperimentError, FedloomError, StorageError, argument
from fedloom.kubeflow import catalog
from fedloom.kubeflow.client import Conflict, Kubeflow, KubeflowSettings
from fedloom.kubeflow.pods import PodSettings

if TYPE_CHECKING:
    from fedloom.cluster.settings import ClusterSettings
    from fedloom.experiment import Experiment

Say = Callable[[str], None]

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

SCHEDULE_ACTIONS = {"pause": "disable", "resume": "enable", "delete": "delete"}
"""Methods of the API for a schedule, by action."""


@dataclass(frozen=True)
class Order:
    """Checked run or schedule to submit.

    Attributes
    ----------
    pipeline, arguments
        Name of the pipeline, and its parameters.
    name
        Unique name of the run or schedule.
    pods, locations
        Settings of its tasks, and the places that these read and write.
    """

    pipeline: str
    arguments: Mapping[str, Any]
    name: str
    pods: PodSettings
    locations: tuple[str | None, ...]


def parameters_from(words: Sequence[str]) -> dict[str, Any]:
    """Return the pipeline parameters given as ``KEY=VALUE``: ``methods`` repeatedly, ``seeds`` as ``1,2,3`` or ``1-3``.

    Raise ExperimentError if one is not of this form, is given twice, or has an argument of its own.
    """
    from fedloom.experiment import seeds_of

    parameters: dict[str, Any] = {}
    for word in words:
        key, separator, value = word.partition("=")
        if not separator or key in parameters.keys() - {"methods"} or key in ("experiment", "overrides", "cluster"):
            reason = "must be KEY=VALUE" if not separator else "is given twice or has an argument of its own"
            raise ExperimentError(f"{argument('param')} {word!r} {reason}.", key="param", found=word)
        if key == "methods":
            parameters.setdefault(key, []).append(value)
        elif key == "seeds":
            parameters[key] = seeds_of(value) if value else []
        else:
            parameters[key] = value
    if parameters.get("backend", "local") not in ("kubernetes", "local"):
        raise ExperimentError(f"backend must be kubernetes or local (got {parameters['backend']!r}).", key="backend")
    return parameters


def plan_order(
    pipeline: str,
    arguments: Mapping[str, Any],
    settings: KubeflowSettings,
    *,
    cluster: ClusterSettings | None = None,
    pods: PodSettings | None = None,
) -> Order:
    """Check a run, and return its order; nothing is sent.

    Raise ExperimentError if the run would be refused.

    Parameters
    ----------
    pipeline, arguments
        Name of the pipeline, and its parameters, with ``experiment`` and ``overrides``.
    cluster, pods
        Settings of the client pods, and of the tasks and their pods.
    """
    name, pods = catalog.check_name(pipeline), pods or PodSettings()
    catalog.use_image(pods.image)
    secrets = {"storage_secret": settings.storage_secret, "serve_secret": settings.serve_secret}
    if name != "unseen_clients":
        secrets.pop("serve_secret")
    arguments = {**arguments, **{key: secret for key, secret in secrets.items() if secret is not None}}
    if cluster is not None:
        arguments["cluster"] = json.dumps(cluster.model_dump(mode="json", exclude_unset=True))
    catalog.check_parameters(name, arguments)
    experiments = _checked_experiments(name, arguments)
    locations = (arguments.get("source"), *(e.storage for e in experiments))
    return Order(name, arguments, f"{experiments[0].name}-{uuid.uuid4().hex[:8]}", pods, locations)


def _checked_experiments(name: str, arguments: Mapping[str, Any]) -> list[Experiment]:
    """Return the file's experiment, and those that will run; raise ExperimentError if one would be refused."""
    from fedloom.cluster.federate import check_cluster_settings
    from fedloom.cluster.settings import ClusterSettings, TaskConfig
    from fedloom.experiment import parse_experiment
    from fedloom.kubeflow import planning

    plan = planning.plan(arguments["experiment"], arguments["overrides"])
    experiments = [parse_experiment(plan.experiment)]
    if name == "compare_methods":
        points = planning.grid(plan.experiment, arguments.get("methods") or [""], arguments.get("seeds", [1, 2, 3]))
        experiments += [parse_experiment(point["experiment"]) for point in points]
    if name != "unseen_clients" and arguments.get("backend", "kubernetes") == "kubernetes":
        settings = ClusterSettings.from_json(arguments.get("cluster", ""))
        if settings.storage_secret is None:  # the pipeline's parameter has a default
            settings = settings.model_copy(update={"storage_secret": arguments.get("storage_secret", "default")})
        for experiment in experiments[1:] or experiments:
            check_cluster_settings(experiment, settings, TaskConfig())
    return experiments


def trigger_of(kubeflow: Kubeflow, text: str) -> tuple[Any, str]:
    """Return the trigger of a schedule, and its description.

    Raise ExperimentError if it is neither; Kubeflow checks the fields of a cron expression.

    Parameters
    ----------
    text
        Interval such as ``90m``, ``6h`` or ``1d``; or a cron expression with five fields, or six with seconds first.
        Kubeflow's own cron (``github.com/robfig/cron`` v1.2.0) would take five fields for second to month without an
        error, so they get the second 0.
    """
    models, fields = kubeflow.models, text.split()
    if interval := re.fullmatch(r"([1-9][0-9]{0,8})([smhd])", text.strip()):
        seconds = int(interval[1]) * UNITS[interval[2]]
        # The generated client takes the API's 64-bit integers as text.
        periodic = models.V2beta1PeriodicSchedule(interval_second=str(seconds))
        return models.V2beta1Trigger(periodic_schedule=periodic), f"every {seconds} s"
    if len(fields) not in (5, 6):
        raise ExperimentError(
            f"{argument('schedule')} must be an interval such as 90m, 6h or 1d, or the 5 fields of a cron expression, "
            f"such as '0 2 * * *' (got {text!r}).",
            key="schedule",
            found=text,
        )
    cron = " ".join(fields if len(fields) == 6 else ["0", *fields])
    return models.V2beta1Trigger(cron_schedule=models.V2beta1CronSchedule(cron=cron)), f"cron {cron}"


def submit_pipeline(kubeflow: Kubeflow, order: Order, say: Say) -> str:
    """Upload a pipeline's version if it does not exist, start a run of it, and return the run's id.

    The version is named by its content, so that the same pipeline is uploaded once. A run whose start was interrupted,
    or whose answer was lost, is removed again.

    Raise FedloomError if the pipeline cannot be compiled, or Kubeflow rejects a request or fails.
    """
    return str(_create(kubeflow, "run", kubeflow.models.V2beta1Run(**_upload(kubeflow, order, say)), say).run_id)


def schedule_pipeline(kubeflow: Kubeflow, order: Order, trigger: Any, say: Say) -> str:
    """Create a recurring run, and return its id; as :func:`submit_pipeline`."""
    body = kubeflow.models.V2beta1RecurringRun(
        **_upload(kubeflow, order, say),
        max_concurrency=str(kubeflow.settings.max_concurrency),
        no_catchup=not kubeflow.settings.catch_up,
        mode="ENABLE",
        trigger=trigger,
    )
    return str(_create(kubeflow, "recurring_run", body, say).recurring_run_id)


def _upload(kubeflow: Kubeflow, order: Order, say: Say) -> dict[str, Any]:
    """Find or create the pipeline, its version and the Kubeflow experiment; return the fields of a run of it."""
    kubeflow.check()
    models, settings, owner = kubeflow.models, kubeflow.settings, kubeflow.in_namespace()
    name, call = order.pipeline.replace("_", "-"), kubeflow.call
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{name}.yaml"
        catalog.compile_to(order.pipeline, file)
        order.pods.apply(file, order.locations)
        version_name = catalog.version_of(file)
        description = catalog.pipeline(order.pipeline).component_spec.description or ""
        body = models.V2beta1Pipeline(display_name=name, description=description, **owner)
        pipeline = _ensure(
            kubeflow, "pipeline", name, lambda what: call(what, "pipeline_service_create_pipeline", body), **owner
        )
        upload = {"name": version_name, "pipelineid": pipeline, "description": "Uploaded by fedloom."}
        version = _ensure(
            kubeflow,
            "pipeline_version",
            version_name,
            lambda what: call(what, "upload_pipeline_version", str(file), **upload),
            pipeline,
        )
    group = models.V2beta1Experiment(display_name=settings.experiment, **owner)
    experiment = _ensure(
        kubeflow,
        "experiment",
        settings.experiment,
        lambda what: call(what, "experiment_service_create_experiment", group),
        **owner,
    )
    say(f"pipeline {name}, version {version_name}")
    return {
        "display_name": order.name,
        "experiment_id": experiment,
        "pipeline_version_reference": models.V2beta1PipelineVersionReference(pipeline, version),
        "runtime_config": models.V2beta1RuntimeConfig(
            parameters=dict(order.arguments), pipeline_root=settings.pipeline_root
        ),
        "service_account": settings.service_account,
    }


def _ensure(kubeflow: Kubeflow, kind: str, name: str, create: Callable[[str], Any], *parents: str, **owner: str) -> str:
    """Find an object by its name or create it, perhaps while another process does so; return its id."""
    existing = kubeflow.named(kind, name, *parents, **owner)
    if existing is None:
        try:
            existing = create(f"create {kind} {name}")
        except Conflict:
            existing = kubeflow.named(kind, name, *parents, **owner)
            if existing is None:
                raise
    return str(getattr(existing, f"{kind}_id"))


def _create(kubeflow: Kubeflow, kind: str, body: Any, say: Say) -> Any:
    """Create a run or recurring run; delete it again if the request was interrupted, or its answer was lost."""
    service, label = f"{kind}_service", kind.replace("_", " ")
    try:
        return kubeflow.call(f"create {label} {body.display_name}", f"{service}_create_{kind}", body)
    except BaseException as error:
        if isinstance(error, StorageError) or not isinstance(error, Exception):  # it may have been received
            group = {"experiment_id": body.experiment_id, **kubeflow.in_namespace()}
            try:
                existing = kubeflow.named(kind, body.display_name, **group)
                if existing is not None:
                    kubeflow.call(f"delete {label}", f"{service}_delete_{kind}", getattr(existing, f"{kind}_id"))
            except FedloomError as failure:
                say(f"{label} {body.display_name} may have been created: {failure}")
        raise


def schedules(kubeflow: Kubeflow) -> Iterator[dict[str, str]]:
    """Yield the id, state, name and times of each recurring run in the Kubeflow experiment of the settings.

    Raise FedloomError if Kubeflow rejects a request or fails.
    """
    name, owner = kubeflow.settings.experiment, kubeflow.in_namespace()
    experiment = kubeflow.named("experiment", name, **owner)
    if experiment is None:
        return
    for one in kubeflow.recurring_runs(experiment_id=experiment.experiment_id, **owner):
        state, trigger, times = "active" if one.status == "ENABLED" else "paused", one.trigger, "no trigger"
        if trigger is not None and trigger.cron_schedule is not None:
            times = f"cron {trigger.cron_schedule.cron}"
        elif trigger is not None and trigger.periodic_schedule is not None:
            times = f"every {trigger.periodic_schedule.interval_second} s"
        yield {"schedule": one.recurring_run_id, "state": state, "name": one.display_name, "times": times}


def change_schedule(kubeflow: Kubeflow, action: str, schedule: str) -> None:
    """Pause, resume or delete a recurring run; its runs in progress continue, and past runs remain.

    Raise FedloomError if there is no such recurring run, or Kubeflow rejects the request or fails.
    """
    # By default Kubernetes would also delete the workflows in progress, which the recurring run owns
    # (``backend/src/crd/controller/scheduledworkflow/util/scheduled_workflow.go``, ``SetOwnerReferences``).
    orphans = {"propagation_policy": "ORPHAN"} if action == "delete" else {}
    method = f"recurring_run_service_{SCHEDULE_ACTIONS[action]}_recurring_run"
    kubeflow.call(f"{action} schedule {schedule}", method, schedule, **orphans)
