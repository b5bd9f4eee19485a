"""Federations: from an experiment and its partition to a complete run folder, on any backend."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.cluster import local
from fedloom.cluster.api import AWAY, FORWARDING, Api, in_cluster, own_pod, rights_hint
from fedloom.cluster.manifests import (
    INSTANCE,
    RUN_ID,
    FederationSpec,
    Manifest,
    identity,
    label,
    owners_of_pod,
    resources,
    run_path,
)
from fedloom.cluster.settings import ALLOWED_IMAGE, ClusterSettings, TaskConfig, is_gpu
from fedloom.core import digests
from fedloom.core.files import write_atomically
from fedloom.core.words import pluralize
from fedloom.errors import DataError, ExperimentError, FedloomError, RefusedError, argument
from fedloom.models.factories import FACTORIES
from fedloom.security.options import TOKEN
from fedloom.storage import location_of, open_store
from fedloom.storage.base import ENDPOINT
from fedloom.storage.locations import pod_environment

if TYPE_CHECKING:
    from fedloom.cluster.launcher import Launcher
    from fedloom.experiment import Experiment
    from fedloom.storage import Store

Say = Callable[[str], None]


ORPHAN_AFTER_S = 600.0


def _print(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def federate(
    experiment: Experiment,
    partition: Path,
    out: Path,
    *,
    backend: str,
    cluster: ClusterSettings,
    run_id: str,
    task: str = "federate",
    task_config: Mapping[str, Any] | None = None,
    unattended: bool = False,
    say: Say = _print,
) -> None:
    """Run a federation, and leave the complete run folder in ``out``.

    Raise the federation's error, of the class in docs/troubleshooting.md; its message gives the remedy.

    Parameters
    ----------
    experiment
        Experiment to run.
    partition
        Folder of its partition.
    out
        Becomes the run's folder. After a failure it holds the logs, and the results so far.
    backend
        ``local``: worker processes on this machine, ``experiment.runtime.workers`` of them; ``storage`` is not used.
        ``kubernetes``: pods.
    cluster
        Settings of the backend ``kubernetes``; ``local`` only uses ``deadline_s``.
    run_id, task
        Together they identify the federation. A repeated call with the same values continues the federation from its
        current state: it adopts it, resumes it, or only fetches the result. Two federations of one pipeline run need
        different tasks.
    task_config
        A ``kfp.dsl.TaskConfig`` as a mapping: settings of the Kubeflow task that apply to the worker pods.
    unattended
        True if it may run without a launcher indefinitely, unless ``orphan_after_s`` is set.
    say
        Called with lines of progress.
    """
    if backend == "local":
        with tempfile.TemporaryDirectory(prefix="fedloom-") as folder, local.terminable(say, ""):
            path = Path(folder) / f"{experiment.name}.yaml"
            # The result is returned as files; a store would give all federations one location, that of this folder.
            local_experiment = experiment.model_copy(update={"storage": None})
            write_atomically(path, local_experiment.resolved_yaml().encode(), durably=False)
            local.run_locally(path, partition, out, deadline_s=cluster.deadline_s, say=say)
    elif backend == "kubernetes":
        step = _Step(experiment, partition, cluster, run_id, task, TaskConfig.read(task_config), unattended, say)
        _on_kubernetes(step, out)
    else:
        raise ExperimentError(
            f"backend must be local or kubernetes (got {backend})", key="backend", allowed=["local", "kubernetes"]
        )


def cleanup(run_id: str, namespace: str | None = None, *, say: Say = _print) -> list[str]:
    """Delete every remaining federation of a pipeline run; for exit handlers, which run after any outcome.

    Return ``Kind name`` of each deleted object. Raise FedloomError if the cluster cannot be reached, or denies access.

    Parameters
    ----------
    run_id
        As given to :func:`federate`.
    namespace
        Namespace of the federations; None is the launcher's own.
    say
        Called with a line for each object.
    """
    from fedloom.cluster.launcher import delete

    deleted = delete(Api(namespace), f"{RUN_ID}={label(run_id)},app.kubernetes.io/managed-by=fedloom")
    for name in deleted:
        say(f"deleted {name}")
    return deleted


@dataclass(frozen=True)
class Submitted:
    """Submitted federation: the name of its objects, and the URL of its published run."""

    name: str
    run: str


def submit_federation(
    experiment: Experiment, partition: Path, *, cluster: ClusterSettings, run_id: str, say: Say = _print
) -> Submitted:
    """Start a detached federation on Kubernetes, or attach to a running one.

    Raise FedloomError if it cannot be started. The objects that this call created, or of a federation that has failed,
    are removed.

    Parameters
    ----------
    experiment, partition, cluster, run_id, say
        As for :func:`federate`; calling that with the same arguments and ``unattended`` waits for the federation to
        end.
    """
    step = _Step(experiment, partition, cluster, run_id, "federate", TaskConfig(), True, say)
    if cluster.orphan_after_s is not None:
        raise ExperimentError(
            f"cluster.orphan_after_s is {cluster.orphan_after_s:g}, and no launcher watches the federation; "
            f"set it to null, or give {argument('wait')}",
            key="cluster.orphan_after_s",
        )
    run, launcher = _prepared(step)
    name = f"fl-{identity(run_id, step.task)}"
    if launcher is None:
        say(f"this federation has already ended: {run.url}")
        return Submitted(name, run.url)
    try:
        launcher.ensure()
    except FedloomError:
        if launcher.over:
            launcher.remove()
        raise
    return Submitted(name, run.url)


@dataclass(frozen=True)
class _Step:
    """Arguments of a federation on Kubernetes."""

    experiment: Experiment
    partition: Path
    cluster: ClusterSettings
    run_id: str
    task: str
    task_config: TaskConfig
    unattended: bool
    say: Say


def _on_kubernetes(step: _Step, out: Path) -> None:
    from fedloom.cluster.launcher import Deleted, delete, save_logs

    cluster, say, name = step.cluster, step.say, f"fl-{identity(step.run_id, step.task)}"
    run, launcher = _prepared(step, out / "logs")
    if launcher is None:
        say(f"this federation has already ended: fetching {run.url}")
        collect(run, out, say)
        try:  # objects that an earlier launcher did not delete
            api, selector = Api(cluster.namespace, say=say), f"{INSTANCE}={name}"
            save_logs(api, api.select("Pod", selector)[0], out / "logs")
            delete(api, selector)
        except (FedloomError, OSError) as error:
            say(f"any remaining objects expire by themselves: {error}")
        return
    keep = (
        f"the federation continues: start again with run id {step.run_id} to adopt it, or end it: "
        f"fedloom cluster stop {name}"
    )
    try:
        with local.terminable(say, "" if cluster.delete_on_interrupt else keep):
            try:
                launcher.run()
            except (Deleted, *AWAY):  # it may have finished meanwhile, and may have been removed since
                if not launcher.finished():
                    raise
                launcher.over = True
            collect(run, out, say)
    except (local.Stopped, KeyboardInterrupt):
        if cluster.delete_on_interrupt:
            launcher.remove()
        raise
    except FedloomError:
        _save_logs_and_remove(launcher, out, say)
        if launcher.attached and not launcher.over:
            say(keep)
        raise
    _save_logs_and_remove(launcher, out, say)


def _prepared(step: _Step, logs: Path | None = None) -> tuple[Store, Launcher | None]:
    """Check the settings and publish the pods' inputs.

    Parameters
    ----------
    logs
        Folder for the logs of a failed attempt that is restarted.

    Returns
    -------
    tuple
        The run's store, and a launcher; None if the run is complete.
    """
    from fedloom.cluster.launcher import Launcher
    from fedloom.data.manifest import read_manifest
    from fedloom.data.remote import publish

    cluster, say = step.cluster, step.say
    check_cluster_settings(step.experiment, cluster, step.task_config)
    experiment = step.experiment.located()  # as the aggregator records it
    manifest = read_manifest(step.partition)
    store = _store(experiment, cluster)
    run = store.under(run_path(experiment.name, step.run_id, step.task))
    store.check()
    if is_finished(run, experiment):
        return run, None
    api, inside = Api(cluster.namespace, say=say), in_cluster()
    _check_rights(api, cluster, inside=inside)
    watched = cluster.orphan_after_s is not None or (inside and not step.unattended)
    if cluster.token_secret is not None and watched and not os.environ.get(TOKEN):
        raise ExperimentError(
            f"cluster.token_secret is {cluster.token_secret}, and this environment has no {TOKEN}: set it, because the "
            "aggregator would end without its launcher watching",
            key="cluster.token_secret",
        )
    shards = store.under(f"partitions/{manifest.fingerprint}")
    federation = FederationSpec(
        run_id=step.run_id,
        task=step.task,
        namespace=api.namespace,
        settings=cluster.with_claims(store.url),
        task_config=step.task_config,
        experiment=experiment.resolved_yaml(),
        run_url=run.url,
        partition_url=shards.url,
        clients=len(manifest.clients),
        device=experiment.runtime.device,
        threads=experiment.runtime.threads,
        clients_at_once=experiment.runtime.clients_at_once,
        save_every_s=experiment.runtime.save_every_s,
        # Pods may call the code that the launcher's own experiment names.
        storage_environment=_storage_environment(cluster, store.url)
        | ({FACTORIES: ",".join(experiment.code)} if experiment.code else {}),
        orphan_after_s=cluster.orphan_after_s or (ORPHAN_AFTER_S if watched else None),
    )
    workers = pluralize(federation.workers, "worker")
    say(f"federation {federation.name} in namespace {api.namespace}, {workers}; run {run.url}")
    publish(step.partition, shards)
    publish_experiment(run, experiment)

    def finished() -> bool:
        try:
            return is_finished(run, experiment)
        except FedloomError:  # the store may be away, too
            return False

    return run, Launcher(federation, api, say, owners=_owners(api), inside=inside, finished=finished, logs=logs)


def _storage_environment(cluster: ClusterSettings, url: str) -> dict[str, str]:
    """Return the variables by which pods reach a store; credentials come from a Secret."""
    own = {} if cluster.s3_endpoint is None else {ENDPOINT: cluster.s3_endpoint}
    return pod_environment(url, {**os.environ, **own})


def _store(experiment: Experiment, cluster: ClusterSettings) -> Store:
    """Return the experiment's store; a launcher outside of the cluster may reach it at another address than pods."""
    environment, endpoint_from = dict(os.environ), None
    if cluster.s3_endpoint is not None and not environment.get(ENDPOINT):
        environment[ENDPOINT] = cluster.s3_endpoint
        endpoint_from = f"cluster.s3_endpoint (or {ENDPOINT}, if the launcher alone reaches the store elsewhere)"
    return open_store(str(experiment.storage).rstrip("/"), environment, endpoint_from=endpoint_from)


def _check_rights(api: Api, cluster: ClusterSettings, *, inside: bool) -> None:
    """Raise RefusedError if these credentials lack a right that the launcher needs."""
    if missing := api.missing_rights():
        raise RefusedError(
            f"Kubernetes, namespace {api.namespace}: these credentials do not allow: {', '.join(missing)}",
            hint=rights_hint(api.namespace),
        )
    if cluster.orphan_after_s is not None and not inside and (missing := api.missing_rights(FORWARDING)):
        raise RefusedError(
            f"cluster.orphan_after_s is {cluster.orphan_after_s:g}, and this launcher outside of the cluster cannot "
            f"watch the aggregator: these credentials do not allow: {', '.join(missing)}",
            hint=f"leave it out, or: {rights_hint(api.namespace)}",
            key="cluster.orphan_after_s",
        )


def check_cluster_settings(experiment: Experiment, cluster: ClusterSettings, task_config: TaskConfig) -> None:
    """Reject settings that cannot run on any cluster.

    Raise ExperimentError, which names the key.
    """
    location = location_of(experiment.storage or "")
    if location is None:
        raise ExperimentError(
            f"storage is {experiment.storage or 'not set'}; with backend kubernetes set it to s3://BUCKET/PREFIX, or "
            "in one cluster pvc://CLAIM/PATH, where pods find partition, checkpoints and states",
            key="storage",
            found=experiment.storage,
        )
    if cluster.image is None:
        raise ExperimentError(f"cluster.image is not set; give {ALLOWED_IMAGE}", key="cluster.image")
    secret = location.credentials
    if cluster.storage_secret is None and secret and cluster.env.keys().isdisjoint(secret):
        literals = " ".join(f"--from-literal={name}=..." for name in secret)
        raise ExperimentError(
            "cluster.storage_secret is not set; name a Secret with the credentials of the storage",
            hint=f"kubectl create secret generic NAME {literals}",
            key="cluster.storage_secret",
        )
    _check_device(experiment.runtime.device, cluster, task_config)


def _check_device(device: str, cluster: ClusterSettings, task_config: TaskConfig) -> None:
    gpu = {} if cluster.gpu is None else {cluster.gpu.resource: cluster.gpu.count}
    limits = resources(cluster.worker, gpu, task_config.resources).get("limits", {})
    gpus = ", ".join(filter(is_gpu, limits))
    if device == "cpu" and gpus:
        raise ExperimentError(
            f"cluster.gpu asks for a GPU for each worker ({gpus}), and runtime.device is cpu; set that to cuda, or "
            "remove cluster.gpu",
            key="cluster.gpu",
        )
    if device == "cuda" and not any("/" in resource for resource in limits):
        raise ExperimentError(
            "cluster.gpu is not set, and runtime.device is cuda; set cluster.gpu, or runtime.device to cpu",
            key="cluster.gpu",
        )


def _owners(api: Api) -> list[Manifest]:
    """Return the owners of the federation: the workflow that controls this pod; none outside of a cluster."""
    name = own_pod()
    pod = api.read("Pod", name) if name is not None else None
    return [] if pod is None else owners_of_pod(pod)


def _save_logs_and_remove(launcher: Launcher, out: Path, say: Say) -> None:
    """Save the logs, and delete the objects of a federation that is over.

    Failures do not change the outcome, since the objects expire.
    """
    try:
        launcher.save_logs(out / "logs")
    except AWAY as error:
        say(f"while saving logs: {error}")
        return
    except (FedloomError, OSError) as error:
        say(f"while saving logs: {error}")
    if launcher.over:
        try:
            launcher.remove()
        except FedloomError as error:
            say(f"while removing the federation: {error}")


def is_finished(run: Store, experiment: Experiment) -> bool:
    """Return True if this exact run has been published completely."""
    from fedloom.runs.files import SUMMARY
    from fedloom.storage import Absent

    try:
        run.read(SUMMARY)
        return _is_of(run, experiment)
    except Absent:
        return False


def publish_experiment(run: Store, experiment: Experiment) -> None:
    """Publish a run's experiment for its aggregator.

    Raise ExperimentError if another experiment has the same run id and task.
    """
    from fedloom.storage import Taken

    try:
        run.create("experiment.yaml", experiment.resolved_yaml().encode())
    except Taken:
        if not _is_of(run, experiment):
            raise ExperimentError(
                f"{run.url} holds another experiment, which ran with the same run id and task",
                hint="use another run id or task",
            ) from None


def _is_of(run: Store, experiment: Experiment) -> bool:
    """Return True if a run has this experiment, as published for the aggregator or with the finished run."""
    try:
        experiment_digest = digests.without_digest("experiment.yaml", run.read("experiment.yaml"))
    except digests.Damaged as error:
        raise DataError(f"{run.url}/experiment.yaml is damaged: {error}", hint="use another run id or task") from error
    return experiment_digest == experiment.resolved_yaml().encode()


def collect(run: Store, out: Path, say: Callable[[str], None]) -> None:
    """Fetch a finished run's folder, and print its location.

    Raise DataError if the run is incomplete.
    """
    from fedloom.runs.files import SUMMARY
    from fedloom.runs.published import STORE_FOLDERS

    names = [entry.name for entry in run.entries() if entry.name.partition("/")[0] not in STORE_FOLDERS]
    if SUMMARY not in names:
        raise DataError(f"{run.url}: the federation has ended without a {SUMMARY}")
    for name in sorted(names, key=lambda name: name == SUMMARY):
        run.download(name, out / name)
    say(f"the run is in {out}")
    if "report.html" not in names:  # its pod reported this, but its log will soon be deleted
        say(f"it has no report, because the aggregator's image cannot create one; create it here: fedloom report {out}")
