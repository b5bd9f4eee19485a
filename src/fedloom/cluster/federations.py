"""Federations in a namespace: their status, their pods' logs, and stopping them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fedloom.cluster.api import Api
from fedloom.cluster.diagnosis import aggregator_failure, count_missing, diagnose, diagnose_events, end_of, exits
from fedloom.cluster.launcher import aggregator_pod, delete
from fedloom.cluster.manifests import (
    AGGREGATOR,
    COMPONENT,
    INSTANCE,
    MANAGED_BY,
    PORT,
    RUN_ID,
    TASK,
    WORKER,
    Manifest,
    attempt_number,
    get_label,
    label,
    phase_of,
)
from fedloom.cluster.progress_client import Tunnel, launchers_credentials
from fedloom.errors import AbandonedError, ExperimentError, RefusedError, argument
from fedloom.federation.activity import Activity
from fedloom.transport.control import follow

OURS = f"{MANAGED_BY}=fedloom"
INDEX = "batch.kubernetes.io/job-completion-index"
ANSWERS_S = 5.0
"""Seconds that an aggregator may take to report its progress."""
ANNOUNCEMENT_INTERVAL_S = 1.0


@dataclass(frozen=True)
class Status:
    """Status of a federation.

    Attributes
    ----------
    name
        Name of its Service, ``fl-<12 hex>``.
    run_id, task
        Run id and task it was started with, as label values.
    state
        ``starting``, ``running``, ``finished`` or ``failed``.
    detail
        Reason why it, or one of its workers, does not start, or why it failed; else empty.
    attempt
        Number of the attempt, from 1.
    created
        Creation time, as the API writes it.
    workers, workers_running
        Number of worker pods requested, and running.
    run
        URL of the run in the store.
    """

    name: str
    run_id: str
    task: str
    state: str
    detail: str
    attempt: int
    created: str
    workers: int
    workers_running: int
    run: str


def federations(api: Api, selector: str = OURS) -> list[Status]:
    """Return the status of each federation in the namespace, oldest first."""
    jobs, pods = api.select("Job", selector)[0], api.select("Pod", selector)[0]
    roots = [job for job in jobs if get_label(job, COMPONENT) == AGGREGATOR]
    statuses = []
    for root in sorted(roots, key=lambda job: str(job["metadata"].get("creationTimestamp"))):
        name = get_label(root, INSTANCE)
        workers = [job for job in jobs if get_label(job, INSTANCE) == name and get_label(job, COMPONENT) == WORKER]
        statuses.append(_status(api, root, workers, [pod for pod in pods if get_label(pod, INSTANCE) == name]))
    return statuses


def find_federation(api: Api, name: str) -> Status:
    """Return the federation with a name or a run id.

    Raise ExperimentError if there is none, or several have that run id.
    """
    existing = federations(api)
    matches = [one for one in existing if name == one.name or label(name) == one.run_id]
    if len(matches) == 1:
        return matches[0]
    listing = ", ".join(f"{one.name} ({one.run_id})" for one in matches or existing)
    raise ExperimentError(
        f"namespace {api.namespace} has {len(matches) or 'no'} federations called {name}"
        + (f"; choose from {listing}" if listing else ""),
        hint="fedloom cluster status lists them; objects are removed an hour after the end; runs stay in the store",
    )


def federation_progress(api: Api, status: Status) -> Activity | None:
    """Return the state of a running federation; None if its aggregator does not answer."""
    if status.state != "running":
        return None
    pod = lambda: aggregator_pod(api.select("Pod", f"{INSTANCE}={status.name}")[0])  # noqa: E731
    with Tunnel(api, pod, PORT) as tunnel:
        try:
            return next(follow(tunnel.address, connect_s=ANSWERS_S, credentials=launchers_credentials()), None)
        except (AbandonedError, RefusedError):
            return None


def federation_logs(api: Api, status: Status, *, worker: int | None = None, followed: bool = False) -> Iterator[str]:
    """Yield the log lines of a federation's aggregator, or of one of its workers, from its newest pod.

    Raise ExperimentError if there is no such pod, or it has not started; the message has the reason.

    Parameters
    ----------
    worker
        Index of the worker; None is the aggregator.
    followed
        Wait for further lines until the pod ends.
    """
    component = AGGREGATOR if worker is None else WORKER
    selector = f"{INSTANCE}={status.name},{COMPONENT}={component}" + ("" if worker is None else f",{INDEX}={worker}")
    while True:
        pods = sorted(api.select("Pod", selector)[0], key=lambda pod: str(pod["metadata"].get("creationTimestamp")))
        if not pods:
            source = component if worker is None else f"worker {worker} of {status.workers}"
            raise ExperimentError(
                f"federation {status.name} has no pod of its {source}{_after_colon(status.detail)}",
                hint=f"logs at its end: {status.run}/logs/",
            )
        pod = pods[-1]
        if phase_of(pod) != "Pending" or not followed:
            break
        time.sleep(ANNOUNCEMENT_INTERVAL_S)
    name = pod["metadata"]["name"]
    if phase_of(pod) == "Pending":
        raise ExperimentError(
            f"{name} has not started, and has no log{_after_colon(_waiting(api, [pod]))}",
            hint=f"{argument('follow')} waits for it",
        )
    yield from api.follow_log(name, component) if followed else api.log(name, component).splitlines()


def stop_federation(api: Api, status: Status) -> list[str]:
    """Delete a federation's objects, and return ``Kind name`` of each; published results stay."""
    return delete(api, f"{INSTANCE}={status.name}")


def _status(api: Api, root: Manifest, workers: Sequence[Manifest], pods: Sequence[Manifest]) -> Status:
    arguments = root["spec"]["template"]["spec"]["containers"][0].get("args") or []
    state, detail = "running", ""
    if end := end_of(root):
        state = "finished" if end.complete else "failed"
        detail = "" if end.complete else str(aggregator_failure(end, exits(pods, AGGREGATOR)))
    else:
        state = "running" if aggregator_pod(pods) is not None else "starting"
        late = [job for job in (root, *workers) if count_missing(job, _pods_of(job, pods))]
        detail = _waiting(api, [*late, *(pod for pod in pods if diagnose(pod) is not None)])
    running_pods = [pod for pod in pods if get_label(pod, COMPONENT) == WORKER and phase_of(pod) == "Running"]
    return Status(
        name=get_label(root, INSTANCE),
        run_id=get_label(root, RUN_ID),
        task=get_label(root, TASK),
        state=state,
        detail=detail,
        attempt=attempt_number(root),
        created=str(root["metadata"].get("creationTimestamp", "")),
        workers=sum(int(job["spec"].get("completions") or 1) for job in workers),
        workers_running=len(running_pods),
        run=str(arguments[arguments.index("--publish") + 1]) if "--publish" in arguments else "",
    )


def _pods_of(job: Manifest, pods: Sequence[Manifest]) -> list[Manifest]:
    return [pod for pod in pods if get_label(pod, COMPONENT) == get_label(job, COMPONENT)]


def _waiting(api: Api, things: Sequence[Manifest]) -> str:
    """Return why pods are missing or do not start, if a pod or an event gives a reason."""
    for thing in things:
        seen = diagnose(thing) if "completions" not in thing["spec"] else None
        if seen is None or not seen.reason:
            seen = diagnose_events(api.events(thing["metadata"]["name"]))
        if seen is not None and seen.reason:
            return f"{thing['metadata']['name']}: {seen.reason}: {seen.message}"
    return ""


def _after_colon(reason: str) -> str:
    return f": {reason}" if reason else ""
