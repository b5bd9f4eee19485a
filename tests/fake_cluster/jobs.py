"""The Job controller: creates pods, counts their results, and ends Jobs.

Written from the documentation of batch/v1 (Jobs, pod failure policy, backoff limit per index, pod replacement policy),
and, for the finalizer of pods, from ``pkg/controller/job`` of kubernetes/kubernetes: ``canRemoveFinalizer`` of
``job_controller.go``, ``getPodsWithDelayedDeletionPerIndex`` of ``indexed_job_utils.go``. Under a backoff limit per
index, the last failed pod of an index keeps its finalizer until another pod of that index exists, the index has
failed, or the Job ends or is deleted. In a namespace that is being deleted no pod can be created, so failed ones stay.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from fake_cluster.quotas import Quotas
from fake_cluster.resources import RESOURCES, suffix
from fake_cluster.store import ApiError, Object, Store, emit, now, seconds_since

JOBS, PODS = RESOURCES["jobs"], RESOURCES["pods"]
TRACKING = "batch.kubernetes.io/job-tracking"
INDEX = "batch.kubernetes.io/job-completion-index"
MAX_BACKOFF_S = 360.0
REASONS = {
    "BackoffLimitExceeded": "Job has reached the specified backoff limit",
    "DeadlineExceeded": "Job was active longer than specified deadline",
    "MaxFailedIndexesExceeded": "Job has exceeded the specified maximal number of failed indexes",
    "FailedIndexes": "Job has failed indexes",
}


class Count:
    """Counts of one Job's finished pods in its controller. Without indexes, every pod has index None."""

    def __init__(self) -> None:
        self.failures: Counter[int | None] = Counter()
        """Failures that count against a limit."""
        self.succeeded = 0
        self.failed = 0
        self.completed: set[int | None] = set()
        self.given_up: set[int | None] = set()
        self.counted: set[str] = set()
        """Pods whose end has been counted, by uid."""
        self.not_before: dict[int | None, float] = {}
        self.refused_until = 0.0
        """A quota has refused a pod; it is asked again then."""
        self.fatal: str | None = None
        """Why the pod failure policy ends the Job."""


class JobController:
    """Controller of the Jobs in a store.

    Parameters
    ----------
    backoff_s
        Wait after a first failure, doubled with each further one (10 s in Kubernetes).
    """

    def __init__(self, store: Store, quotas: Quotas, backoff_s: float) -> None:
        self._store = store
        self._quotas = quotas
        self._backoff_s = backoff_s
        self._counts: dict[str, Count] = {}

    def tick(self) -> None:
        """Process every Job and every pod of one, once."""
        jobs = {job["metadata"]["uid"]: job for job in self._store.list(JOBS)[0]}
        pods: dict[str, list[Object]] = {uid: [] for uid in jobs}
        for pod in self._store.list(PODS)[0]:
            owner = next((r for r in pod["metadata"].get("ownerReferences", []) if r.get("controller")), None)
            if owner and owner["uid"] in pods:
                pods[owner["uid"]].append(pod)
            else:
                self._release(pod)
        for uid, job in jobs.items():
            self._sync(job, pods[uid])
        for uid in self._counts.keys() - jobs.keys():
            del self._counts[uid]

    def _sync(self, job: Object, pods: list[Object]) -> None:
        meta, spec, status = job["metadata"], job["spec"], job["status"]
        count = self._counts.setdefault(meta["uid"], Count())
        if end := condition(status, "Complete") or condition(status, "Failed"):
            for pod in pods:
                self._release(pod)
            ttl = spec.get("ttlSecondsAfterFinished")
            if "deletionTimestamp" not in meta and ttl is not None and seconds_since(end["lastTransitionTime"]) >= ttl:
                self._store.delete(JOBS, meta["namespace"], meta["name"], "Foreground", uid=meta["uid"])
            return
        for pod in pods:
            if TRACKING in pod["metadata"].get("finalizers", []) and has_ended(pod):
                if pod["metadata"]["uid"] not in count.counted:
                    count.counted.add(pod["metadata"]["uid"])
                    self._account(count, spec, pod)
                if "deletionTimestamp" in meta or not waits_for_successor(job, count, pod, pods):
                    self._release(pod)
        live = [pod for pod in pods if pod["status"]["phase"] in ("Pending", "Running")]
        staying = [pod for pod in live if "deletionTimestamp" not in pod["metadata"]]
        if "deletionTimestamp" in meta:
            return  # the pods are deleted with the Job
        if "startTime" not in status:
            status = {**status, "startTime": now()}
        ended = self._ended(spec, status, count)
        conditions = list(status.get("conditions", []))
        if ended:
            self._stop(staying)
        else:
            staying += self._make(job, count, live, staying)
        if ended:
            kind, reason, message = ended
            first = {"Failed": "FailureTarget", "Complete": "SuccessCriteriaMet"}[kind]
            if not condition(status, first):
                conditions.append(_condition(first, "True", reason, message))
            if not live:  # the end of a Job ends all its pods
                conditions.append(_condition(kind, "True", reason, message))
                if kind == "Complete":
                    status = {**status, "completionTime": now()}
        new = {
            **status,
            "conditions": conditions,
            "active": len(staying),
            "ready": sum(bool(condition(pod["status"], "Ready")) for pod in staying),
            "terminating": len(live) - sum(pod in staying for pod in live),
            "succeeded": count.succeeded,
            "failed": count.failed,
            "uncountedTerminatedPods": {},
        }
        if spec["completionMode"] == "Indexed":
            new["completedIndexes"] = ranges(count.completed)
            if "backoffLimitPerIndex" in spec:
                new["failedIndexes"] = ranges(count.given_up)
        for key in ("active", "terminating", "succeeded", "failed", "conditions"):  # empty entries are left out
            if not new[key]:
                del new[key]
        self._store.modify(JOBS, meta["namespace"], meta["name"], lambda found: found.update(status=new))

    def _ended(self, spec: Object, status: Object, count: Count) -> tuple[str, str, str] | None:
        """Return condition, reason and message of a finished Job, or None."""
        if target := condition(status, "FailureTarget"):
            return "Failed", target["reason"], target["message"]
        if count.fatal:
            return "Failed", "PodFailurePolicy", count.fatal
        reason = None
        deadline = spec.get("activeDeadlineSeconds")
        if count.given_up and len(count.given_up) > spec.get("maxFailedIndexes", len(count.given_up)):
            reason = "MaxFailedIndexesExceeded"
        elif sum(count.failures.values()) > spec["backoffLimit"]:
            reason = "BackoffLimitExceeded"
        elif count.succeeded + len(count.given_up) >= spec["completions"]:
            if not count.given_up:
                return "Complete", "CompletionsReached", "Reached expected number of succeeded pods"
            reason = "FailedIndexes"
        elif deadline is not None and "startTime" in status and seconds_since(status["startTime"]) >= deadline:
            reason = "DeadlineExceeded"
        return ("Failed", reason, REASONS[reason]) if reason else None

    def _account(self, count: Count, spec: Object, pod: Object) -> None:
        index = index_of(pod)
        if pod["status"]["phase"] == "Succeeded":
            if index is None or index not in count.completed:
                count.succeeded += 1
            count.completed |= {index} if index is not None else set()
            return
        count.failed += 1
        action, message = matched(spec, pod)
        if action == "Ignore":
            return
        if action == "FailJob":
            count.fatal = message
        count.failures[index] += 1
        limit = spec.get("backoffLimitPerIndex")
        if action == "FailIndex" or (limit is not None and count.failures[index] > limit):
            count.given_up.add(index)
        failures = count.failures[index] if limit is not None else sum(count.failures.values())
        wait = min(self._backoff_s * 2 ** (failures - 1), MAX_BACKOFF_S)
        count.not_before[index if limit is not None else None] = time.monotonic() + wait

    def _make(self, job: Object, count: Count, live: list[Object], staying: list[Object]) -> list[Object]:
        """Create the missing pods and return them."""
        spec = job["spec"]
        occupying = live if spec["podReplacementPolicy"] == "Failed" else staying
        room = spec["parallelism"] - len(occupying)
        wanted: Iterable[int | None]
        if spec["completionMode"] == "Indexed":
            busy = {index_of(pod) for pod in occupying}
            wanted = [i for i in range(spec["completions"]) if i not in busy | count.completed | count.given_up]
        else:
            wanted = [None] * min(room, spec["completions"] - count.succeeded - len(occupying))
        made = []
        for index in list(wanted)[: max(room, 0)]:
            per_index = spec.get("backoffLimitPerIndex") is not None
            if time.monotonic() >= max(count.not_before.get(index if per_index else None, 0.0), count.refused_until):
                pod = pod_of(job, index)
                try:
                    self._admit(pod)
                except ApiError as error:
                    count.refused_until = time.monotonic() + self._backoff_s
                    emit(self._store, job, "Warning", "FailedCreate", f"Error creating: {error.message}")
                else:
                    made.append(self._store.create(PODS, pod))
        return made

    def _admit(self, pod: Object) -> None:
        namespace = self._store.get(RESOURCES["namespaces"], "", pod["metadata"]["namespace"])
        if "deletionTimestamp" in namespace["metadata"]:
            raise ApiError(403, "Forbidden", "the namespace is being terminated")
        self._quotas.limit(pod)
        self._quotas.charge(PODS, pod)

    def _stop(self, pods: list[Object]) -> None:
        for pod in pods:
            meta = pod["metadata"]
            self._store.delete(PODS, meta["namespace"], meta["name"], uid=meta["uid"])

    def _release(self, pod: Object) -> None:
        """Remove the finalizer of an ended pod that was counted or belongs to no Job."""
        meta = pod["metadata"]
        if has_ended(pod) and TRACKING in meta.get("finalizers", []):
            self._store.modify(
                PODS, meta["namespace"], meta["name"], lambda found: found["metadata"]["finalizers"].remove(TRACKING)
            )


def has_ended(pod: Object) -> bool:
    """Return True once no container of a pod will run again."""
    return pod["status"]["phase"] in ("Succeeded", "Failed")


def waits_for_successor(job: Object, count: Count, pod: Object, pods: list[Object]) -> bool:
    """Return True while the finalizer of a failed pod waits for the pod that replaces it in its index."""
    index = index_of(pod)
    if job["spec"].get("backoffLimitPerIndex") is None or index is None or pod["status"]["phase"] == "Succeeded":
        return False
    if index in count.completed | count.given_up:
        return False
    return next(other for other in reversed(pods) if index_of(other) == index) is pod  # pods are in order of creation


def pod_of(job: Object, index: int | None) -> Object:
    """Return the next pod of a Job."""
    meta, template = job["metadata"], copy.deepcopy(job["spec"]["template"])
    labels, annotations = ({**((template.get("metadata") or {}).get(kind) or {})} for kind in ("labels", "annotations"))
    for prefix in ("batch.kubernetes.io/", ""):
        labels |= {f"{prefix}controller-uid": meta["uid"], f"{prefix}job-name": meta["name"]}
    name = f"{meta['name']}-{suffix()}"
    if index is not None:
        name = f"{meta['name']}-{index}-{suffix()}"
        labels[INDEX] = annotations[INDEX] = str(index)
        template["spec"].setdefault("hostname", f"{meta['name']}-{index}"[:63])
        for container in template["spec"]["containers"]:
            if not any(entry["name"] == "JOB_COMPLETION_INDEX" for entry in container.setdefault("env", [])):
                field = {"fieldRef": {"fieldPath": f"metadata.labels['{INDEX}']"}}
                container["env"].append({"name": "JOB_COMPLETION_INDEX", "valueFrom": field})
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": meta["name"], "uid": meta["uid"]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name, "namespace": meta["namespace"], "labels": labels, "annotations": annotations,
            "finalizers": [TRACKING], "ownerReferences": [{**owner, "controller": True, "blockOwnerDeletion": True}],
        },
        "spec": template["spec"],
        "status": {"phase": "Pending", "qosClass": "BestEffort"},
    }  # fmt: skip


def matched(spec: Object, pod: Object) -> tuple[str | None, str]:
    """Return the action of the first rule of the pod failure policy that matches, and the API's message."""
    where = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
    for i, rule in enumerate((spec.get("podFailurePolicy") or {}).get("rules") or []):
        end = f"matching {rule['action']} rule at index {i}"
        if codes := rule.get("onExitCodes"):
            for status in pod["status"].get("containerStatuses", []):
                code = (status["state"].get("terminated") or {}).get("exitCode", 0)
                applies = codes.get("containerName") in (None, status["name"]) and code != 0
                if applies and (code in codes["values"]) == (codes["operator"] == "In"):
                    return rule[
                        "action"
                    ], f"Container {status['name']} for pod {where} failed with exit code {code} {end}"
        for wanted in rule.get("onPodConditions") or []:
            for found in pod["status"].get("conditions", []):
                if (found["type"], found["status"]) == (wanted["type"], wanted.get("status", "True")):
                    return rule["action"], f"Pod {where} has condition {found['type']} {end}"
    return None, ""


def condition(status: Object, kind: str) -> Object | None:
    """Return a condition with status True."""
    return next((c for c in status.get("conditions", []) if c["type"] == kind and c["status"] == "True"), None)


def index_of(pod: Object) -> int | None:
    """Return the completion index of a pod, or None."""
    found: Any = (pod["metadata"].get("annotations") or {}).get(INDEX)
    return None if found is None else int(found)


def ranges(indexes: Iterable[int | None]) -> str:
    """Format ``{0, 1, 2, 4, 5}`` as ``0-2,4,5`` (``pkg/controller/job/indexed_job_utils.go``: a range has three)."""
    parts: list[list[int]] = []
    for index in sorted(i for i in indexes if i is not None):
        if parts and parts[-1][-1] == index - 1:
            parts[-1] = [parts[-1][0], index]
        else:
            parts.append([index])
    return ",".join(("-" if part[-1] - part[0] > 1 else ",").join(map(str, part)) for part in parts)


def _condition(kind: str, status: str, reason: str, message: str) -> Object:
    stamp = now()
    return {
        "type": kind, "status": status, "reason": reason, "message": message,
        "lastProbeTime": stamp, "lastTransitionTime": stamp,
    }  # fmt: skip
