"""Launcher of a federation on Kubernetes, which starts or adopts it and follows it to its end.

A launcher may be killed at any moment, and another may start in its place. Existing objects are adopted if their
specification is the same, and rejected otherwise. Nothing depends on a launcher's orderly exit: Jobs have deadlines and
a time to live, and an aggregator without a launcher ends by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from fedloom.cluster.api import AWAY, FORWARDING, Api
from fedloom.cluster.diagnosis import PodMonitor, aggregator_failure, end_of, exits, name_of, workers_failure
from fedloom.cluster.manifests import (
    AGGREGATOR,
    COMPONENT,
    DIGEST,
    FINAL,
    PORT,
    WORKER,
    FederationSpec,
    Manifest,
    aggregator_job,
    attempt_number,
    completed,
    get_label,
    owner,
    phase_of,
    service,
    worker_job,
)
from fedloom.cluster.progress_client import ProgressClient, Tunnel
from fedloom.core.files import storing
from fedloom.errors import ExperimentError, FedloomError, RefusedError, WorkerLostError

POLL_S = 3.0
"""Poll interval while some pod is not running: a pod's problems do not show in its Job."""
SETTLED_POLL_S = 15.0
DELETE_TIMEOUT_S = 120.0
REFUSED_PAUSE_S = 1.0
"""Pause after a refused create: a quota is charged shortly before another launcher's new object becomes visible."""
KINDS = ("Job", "Service")

_T = TypeVar("_T")


class Deleted(WorkerLostError):
    """Deletion of a Job of the federation by somebody else."""


class Occupied(ExperimentError):
    """Conflict: an object with another specification has the name of one of this federation's objects."""


class Launcher:
    """Launcher of one federation, from scratch or from the state that an earlier launcher left.

    Parameters
    ----------
    federation
        FederationSpec to run.
    api
        Client of the cluster.
    say
        Called with lines of progress for the user.
    owners
        References to the owners of the federation, with which it is deleted.
    inside
        True if this process runs in a pod of the cluster, which can reach Services.
    finished
        Returns True if the federation's run is complete, which is asked while the API server is away.
    logs
        Folder for the logs of a failed attempt that is restarted; None keeps none.

    Attributes
    ----------
    attached
        True once its objects exist.
    over
        True once the federation may be removed: it has ended, or this launcher has created it and it cannot start.
    """

    def __init__(
        self,
        federation: FederationSpec,
        api: Api,
        say: Callable[[str], None],
        *,
        owners: Sequence[Manifest] = (),
        inside: bool = False,
        finished: Callable[[], bool] = lambda: False,
        logs: Path | None = None,
    ) -> None:
        self.attached = self.over = False
        self.finished = finished
        self._federation = federation
        self._api = api
        self._say = say
        self._owners = owners
        self._inside = inside
        self._logs = logs
        self._digest = federation.digest()
        s = federation.settings
        self._monitors = {
            component: PodMonitor(s.pending_timeout_s, s.failing_timeout_s, api.events, say)
            for component in (AGGREGATOR, WORKER)
        }
        self._reported: set[str] = set()
        self._said_last = ""
        self._own: set[str] = set()  # uids of objects created or adopted here; nothing else is ever removed
        self._created: set[str] = set()
        self._started = False  # all pods have run at once, or rounds have begun

    def run(self) -> None:
        """Create or adopt the federation, and return when it has ended successfully.

        Raise the federation's error, or this launcher's. The objects still exist: see ``over``, :meth:`save_logs` and
        :meth:`remove`.
        """
        address = self.ensure()
        if address is None:
            return
        with self._reached(address) as connection:
            client = ProgressClient(connection, self._say, orphan_after_s=self._federation.orphan_after_s)
            with client.following():
                self._watch(client)

    def _outlast(self, request: Callable[[], _T]) -> _T:
        """Repeat requests while the API server is away, for as long as the federation may run."""
        until, is_reported = time.monotonic() + self._federation.settings.deadline_s, False
        while True:
            try:
                return request()
            except AWAY as error:
                if time.monotonic() > until or self.finished():
                    raise
                if not is_reported:
                    is_reported = True
                    self._say(f"waiting for the Kubernetes API; the federation keeps running: {error.message}")

    @contextmanager
    def _reached(self, address: str) -> Iterator[str]:
        """Yield the address of the aggregator: its Service inside the cluster, else a tunnel through the API."""
        if self._inside:
            yield address
        elif missing := self._outlast(lambda: self._api.missing_rights(FORWARDING)):
            self._say(f"progress is not shown: these credentials do not allow {', '.join(missing)}")
            yield address
        else:
            with Tunnel(self._api, lambda: aggregator_pod(self._pods()), PORT) as tunnel:
                yield tunnel.address

    def ensure(self) -> str | None:
        """Create missing objects, adopt existing ones, and return the aggregator's address, ``host:port``.

        Return None if the federation has already ended successfully.

        Raise Occupied if an object of one of these names exists with another specification; FedloomError if an adopted
        federation has failed in a way that another attempt would only repeat, or an object cannot be created; those
        that this call created are then removed.
        """
        try:
            return self._ensure()
        except (Occupied, *AWAY):
            raise
        except FedloomError:
            with suppress(FedloomError):  # the objects expire
                self._delete(self._created)
            raise

    def _ensure(self) -> str | None:
        attempt = 1
        while True:
            root = self._create_or_adopt(
                completed(aggregator_job(self._federation), self._digest, self._owners, attempt)
            )
            end = end_of(root)
            if end is None:
                break
            if end.complete:
                self.over = True
                return None
            failure = aggregator_failure(end, exits(self._pods(), AGGREGATOR))
            if failure.exit_code in FINAL:
                self.over = True
                raise failure
            attempt = attempt_number(root) + 1
            self._say(f"restarting the failed federation, attempt {attempt}; it failed because: {failure}")
            if self._logs is not None:
                self.save_logs(self._logs)
            self.remove(wait=True)
        owners = [owner(root)]
        existing = self._create_or_adopt(completed(service(self._federation), self._digest, owners))
        self._create_or_adopt(completed(worker_job(self._federation), self._digest, owners))
        self.attached = True
        host = existing.get("spec", {}).get("clusterIP") or f"{self._federation.name}.{self._federation.namespace}.svc"
        return f"[{host}]:{PORT}" if ":" in host else f"{host}:{PORT}"

    def save_logs(self, folder: Path) -> None:
        """Write the logs of the federation's pods to a folder, as :func:`save_logs`."""
        if self._own:
            save_logs(self._api, self._pods(), folder)

    def remove(self, *, wait: bool = False) -> None:
        """Delete the objects that this launcher created or adopted; with ``wait``, return when they no longer exist.

        Raise WorkerLostError if an object, or one of its pods, still exists after two minutes.
        """
        self._delete(self._own)
        until = time.monotonic() + DELETE_TIMEOUT_S
        while wait and (remaining := self._owned((*KINDS, "Pod"), self._own)):
            if time.monotonic() > until:
                names = ", ".join(f"{kind} {existing['metadata']['name']}" for kind, existing in remaining)
                raise WorkerLostError(
                    f"these objects still exist {DELETE_TIMEOUT_S:.0f} s after their deletion: {names}",
                    hint="see why with kubectl describe, then start again with the same run id",
                )
            time.sleep(0.5)

    def _delete(self, uids: set[str]) -> None:
        # Look up all objects first: deleting a Job may delete what it owns.
        for kind, existing in self._owned(KINDS, uids):
            self._api.delete(kind, existing["metadata"]["name"], existing["metadata"]["uid"])

    def _create_or_adopt(self, manifest: Manifest) -> Manifest:
        """Adopt the object of a name, or create it.

        The object is read first. Admission (quotas, webhooks) answers a create request before the API server checks
        whether the name is taken. At a quota's limit, creating an existing object is therefore refused with 403 instead
        of 409, and a quota stays charged for the refused request.
        """
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        until = time.monotonic() + DELETE_TIMEOUT_S
        while time.monotonic() < until:
            existing = self._api.read(kind, name)
            if existing is None:
                created_object = self._create(kind, manifest)
                if created_object is not None:
                    self._own.add(created_object["metadata"]["uid"])
                    self._created.add(created_object["metadata"]["uid"])
                    self._say(f"created {kind} {name}")
                    return created_object
            elif not existing["metadata"].get("deletionTimestamp"):
                if (kind == "Job" and name.endswith(AGGREGATOR)) or _owners(existing) == _owners(manifest):
                    return self._adopted(existing)
                if not _owners(existing):
                    raise Occupied(f"{kind} {name} already exists, and belongs to no federation")
                # An object owned by another Job belongs to an earlier attempt, and will be garbage-collected.
            time.sleep(0.5)
        raise WorkerLostError(f"{kind} {name} is being deleted, and still exists after {DELETE_TIMEOUT_S:.0f} s")

    def _create(self, kind: str, manifest: Manifest) -> Manifest | None:
        """Create an object; None if another launcher was faster."""
        try:
            return self._api.create(manifest)
        except (RefusedError, ExperimentError):
            time.sleep(REFUSED_PAUSE_S)
            if self._api.read(kind, manifest["metadata"]["name"]) is not None:
                return None
            raise

    def _adopted(self, existing: Manifest) -> Manifest:
        metadata, f = existing["metadata"], self._federation
        name = f"{existing['kind']} {metadata['name']}"
        if (metadata.get("annotations") or {}).get(DIGEST) != self._digest:
            raise Occupied(
                f"{name} already exists for the same run id ({f.run_id}) and task ({f.task}), with another "
                "specification: other settings or another experiment",
                hint=f"use another run id or task, or end it: kubectl delete jobs,services -n {f.namespace} "
                f"-l {f.selector}",
            )
        self._own.add(metadata["uid"])
        self._say(f"adopted {name}")
        return existing

    def _watch(self, client: ProgressClient) -> None:
        ended_job: Manifest | None = None  # the workers' Job, once it has ended without failing the federation
        while True:
            jobs, version, pods = self._outlast(self._look)
            aggregator = self._present(jobs, AGGREGATOR)
            self._report_exits(pods)
            if not client.under_way:
                self._report_phases(pods)
            if end := end_of(aggregator):
                self.over = True
                if end.complete:
                    return
                raise aggregator_failure(end, exits(pods, AGGREGATOR))
            # An ended Job is removed after cluster.ttl_s, and the aggregator may run longer than that.
            workers = ended_job or self._present(jobs, WORKER)
            finished = client.latest is not None and client.latest.phase == "finished"
            if ended_job is None and (end := end_of(workers)):
                failure = None if finished else workers_failure(workers, end, exits(pods, WORKER))
                if failure is not None:
                    self.over = True
                    raise failure
                ended_job = workers
            settled = self._diagnose_pods(aggregator, workers, pods, client)
            self._api.wait_for_change("Job", self._federation.selector, version, SETTLED_POLL_S if settled else POLL_S)

    def _look(self) -> tuple[dict[str, Manifest], str, list[Manifest]]:
        """Return the federation's Jobs by component, the version of that state, and the pods."""
        jobs, version = self._api.select("Job", self._federation.selector)
        return {get_label(job, COMPONENT): job for job in jobs}, version, self._pods()

    def _diagnose_pods(
        self, aggregator: Manifest, workers: Manifest, pods: Sequence[Manifest], client: ProgressClient
    ) -> bool:
        settled = True
        running_count = sum(phase_of(pod) == "Running" for pod in pods)
        self._started = self._started or client.under_way or running_count > self._federation.workers
        for component, job in ((AGGREGATOR, aggregator), (WORKER, workers)):
            if end_of(job):
                continue
            own = [pod for pod in pods if get_label(pod, COMPONENT) == component]
            quiet, error = self._monitors[component].check(job, own, time.monotonic())
            settled = settled and quiet
            # After the rounds have started, a worker that cannot run counts as lost: the quorum decides.
            if error is not None and (component == AGGREGATOR or not client.under_way):
                self.over = aggregator["metadata"]["uid"] in self._created and not self._started
                raise error
        return settled

    def _present(self, jobs: Mapping[str, Manifest], component: str) -> Manifest:
        job = jobs.get(component)
        if job is None or job["metadata"].get("deletionTimestamp"):
            self.over = True
            raise Deleted(
                f"Job {self._federation.name}-{component} was deleted while the federation ran",
                hint="it was ended; start it again with the same run id to continue from the published state",
            )
        return job

    def _report_exits(self, pods: Sequence[Manifest]) -> None:
        for failed in (*exits(pods, AGGREGATOR), *exits(pods, WORKER)):
            if failed.pod not in self._reported:
                self._reported.add(failed.pod)
                reason = f", {failed.reason}" if failed.reason not in ("", "Error") else ""
                exit_text = f"ended with code {failed.code} ({name_of(failed.code)}{reason})"
                self._say(f"{failed.pod} {exit_text if failed.code else f'failed{reason}'}: {failed.summary}")

    def _report_phases(self, pods: Sequence[Manifest]) -> None:
        """Report changes of the pods' phases: the only progress before the aggregator answers."""
        phases = [
            (get_label(pod, COMPONENT), phase_of(pod)) for pod in pods if not pod["metadata"].get("deletionTimestamp")
        ]
        aggregator = ["not created", *(phase.lower() for component, phase in phases if component == AGGREGATOR)][-1]
        running_count = phases.count((WORKER, "Running"))
        line = f"aggregator: {aggregator}, workers running: {running_count} of {self._federation.workers}"
        if line != self._said_last:
            self._said_last = line
            self._say(line)

    def _pods(self) -> list[Manifest]:
        return self._api.select("Pod", self._federation.selector)[0]

    def _owned(self, kinds: Sequence[str], uids: set[str]) -> list[tuple[str, Manifest]]:
        """Return the existing objects with these uids and those that they own, whose uids are added."""
        owned = []
        for kind in kinds:
            for existing in self._api.select(kind, self._federation.selector)[0]:
                uid = existing["metadata"]["uid"]
                if uid in uids or _owners(existing) & uids:
                    uids.add(uid)
                    owned.append((kind, existing))
        return owned


def save_logs(api: Api, pods: Sequence[Manifest], folder: Path) -> None:
    """Write the logs of the aggregator's pods, and of failed workers, to a folder, one file each."""
    for pod in pods:
        name, component = pod["metadata"]["name"], get_label(pod, COMPONENT)
        if component == AGGREGATOR or phase_of(pod) == "Failed":
            log = api.log(name, component)
            if log:
                with storing(path := folder / f"{name}.log"):
                    folder.mkdir(parents=True, exist_ok=True)
                    path.write_text(log)


def delete(api: Api, selector: str) -> list[str]:
    """Delete all Jobs (with their pods) and Services that match a selector; return ``Kind name`` of each."""
    # Look up all objects first: deleting a Job may delete what it owns.
    objects = [(kind, existing["metadata"]["name"]) for kind in KINDS for existing in api.select(kind, selector)[0]]
    for kind, name in objects:
        api.delete(kind, name)
    return [f"{kind} {name}" for kind, name in objects]


def aggregator_pod(pods: Sequence[Manifest]) -> str | None:
    """Return the name of the aggregator's newest running pod; None if none is running."""
    running_pods = [
        pod["metadata"]
        for pod in pods
        if get_label(pod, COMPONENT) == AGGREGATOR
        and phase_of(pod) == "Running"
        and not pod["metadata"].get("deletionTimestamp")
    ]
    newest = max(running_pods, key=lambda existing: str(existing.get("creationTimestamp")), default=None)
    return None if newest is None else str(newest["name"])


def _owners(existing: Any) -> set[str]:
    return {reference["uid"] for reference in existing["metadata"].get("ownerReferences") or ()}
