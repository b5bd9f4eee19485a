"""Diagnosis of Jobs and pods: failure classes of those that ended, reasons and time limits of those that do not run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from facts import mentions

from fedloom.cluster.diagnosis import (
    End,
    Exit,
    PodMonitor,
    Verdict,
    aggregator_failure,
    count_missing,
    diagnose,
    end_of,
    exits,
    workers_failure,
)
from fedloom.errors import (
    AbandonedError,
    DataError,
    ExperimentError,
    FedloomError,
    InterruptedRun,
    QuorumError,
    RefusedError,
    StorageError,
    WorkerLostError,
)

POLICY = End(False, "PodFailurePolicy", "Container aggregator for pod a/b failed with exit code 2")
BACKOFF = End(False, "BackoffLimitExceeded", "Job has reached the specified backoff limit")
LATE = End(False, "DeadlineExceeded", "Job was active longer than specified deadline")
TOO_MANY = End(False, "MaxFailedIndexesExceeded", "Job has exceeded the specified maximal number of failed indexes")
GPU = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu. preemption: 0/3 nodes are available."
LEAVING = {"deletionTimestamp": "2026-01-01T00:00:00Z"}


def exited(code: int, message: str = "", reason: str = "Error") -> Exit:
    return Exit("fl-1-aggregator-x", code, reason, message)


# ---- what has ended


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (None, None),
        ("Suspended", None),
        ("FailureTarget", None),
        ("Complete", End(True, "R", "M")),
        ("Failed", End(False, "R", "M")),
    ],
)
def test_end_of_a_job_by_its_condition(kind: str | None, expected: End | None) -> None:
    conditions = [{"type": kind, "status": "True", "reason": "R", "message": "M"}]
    assert end_of({"status": {"conditions": conditions}} if kind else {"metadata": {}}) == expected


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (2, ExperimentError), (3, DataError), (4, RefusedError), (5, QuorumError), (6, StorageError),
        (7, WorkerLostError), (8, AbandonedError), (130, InterruptedRun), (1, WorkerLostError), (139, WorkerLostError),
    ],
)  # fmt: skip
def test_exit_codes_map_to_failure_classes(code: int, kind: type[FedloomError]) -> None:
    reported = json.dumps({"failure": kind("name: it is 3", hint="change it", key="name", found=3).as_json()})
    error = aggregator_failure(POLICY, [exited(7), exited(code, f'{{"notice": "something"}}\n{reported}\n')])
    assert type(error) is kind
    assert "name: it is 3" in str(error)
    assert error.hint == "change it"
    assert f"code {code} (" in str(error)


@pytest.mark.parametrize(
    ("end", "ended", "kind", "facts"),
    [
        (BACKOFF, [exited(1, "Traceback ...\nKeyError: 'x'\n\n")], WorkerLostError, ("KeyError: 'x'", "same run id")),
        (BACKOFF, [exited(137, "", "OOMKilled")], WorkerLostError, ("signal 9", "cluster.aggregator.limits.memory")),
        (LATE, [], QuorumError, ("cluster.deadline_s",)),
        (BACKOFF, [], WorkerLostError, ("backoff limit",)),
    ],
    ids=["bug", "memory", "deadline", "no pod"],
)
def test_other_ends_of_an_aggregator(
    end: End, ended: list[Exit], kind: type[FedloomError], facts: tuple[str, ...]
) -> None:
    error = aggregator_failure(end, ended)
    assert type(error) is kind
    assert mentions(str(error), *facts)
    if end is LATE:
        assert str(workers_failure({}, end, ended)) == str(error)


def test_too_many_failed_workers() -> None:
    job = {"spec": {"completions": 5, "maxFailedIndexes": 2}, "status": {"failedIndexes": "0,2-3"}}
    error = workers_failure(job, TOO_MANY, [exited(137, "", "OOMKilled")])
    assert isinstance(error, WorkerLostError)
    facts = ("3 of 5 workers", "index 0,2-3", "cluster.max_failed_workers allows 2", "cluster.worker.limits.memory")
    assert mentions(str(error), *facts)


@pytest.mark.parametrize(
    ("code", "kind"), [(2, ExperimentError), (3, DataError), (4, RefusedError), (6, WorkerLostError)]
)
def test_workers_with_permanent_errors_give_the_reason(code: int, kind: type[FedloomError]) -> None:
    assert type(workers_failure({}, TOO_MANY, [exited(code, "it is so")])) is kind


def test_dismissed_workers_are_no_failure() -> None:
    assert workers_failure({}, End(True, "", ""), []) is None
    # One failed permanently, within the limit; the other learned that the run is over.
    ended = End(False, "FailedIndexes", "Job has failed indexes")
    assert workers_failure({"status": {"completedIndexes": "1", "failedIndexes": "0"}}, ended, [exited(7)]) is None


def test_exits_are_ordered_by_time() -> None:
    def pod(name: str, component: str, code: int, at: str) -> dict[str, Any]:
        ended = {"exitCode": code, "finishedAt": at, "message": "m", "reason": "Error"}
        labels = {"app.kubernetes.io/component": component}
        state = {"containerStatuses": [{"name": component, "state": {"terminated": ended}}]}
        return {"metadata": {"name": name, "labels": labels}, "status": state}

    pods = [
        pod("b", "worker", 7, "2026-01-01T00:00:02Z"),
        pod("a", "worker", 5, "2026-01-01T00:00:01Z"),
        pod("c", "worker", 0, "2026-01-01T00:00:03Z"),
        pod("d", "aggregator", 2, "2026-01-01T00:00:04Z"),
        {"metadata": {"name": "e"}, "status": {}},
    ]
    assert [(found.pod, found.code) for found in exits(pods, "worker")] == [("a", 5), ("b", 7)]


def test_a_pod_rejected_by_its_node_is_reported_with_the_reason() -> None:
    """No container ever started, for example for a second part of a shared GPU (NVIDIA's device plugin, README)."""
    reason = "Allocate failed due to rpc error: request for 'nvidia.com/gpu: 2' too large"
    status = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": reason}
    labels = {"labels": {"app.kubernetes.io/component": "worker"}}
    rejected = {"metadata": {"name": "w", **labels}, "status": status}
    (found,) = exits([rejected], "worker")
    assert (found.code, found.reason, found.summary) == (0, "UnexpectedAdmissionError", reason)
    job = {"spec": {"completions": 2, "maxFailedIndexes": 0}, "status": {"failedIndexes": "0"}}
    failure = workers_failure(job, BACKOFF, [found])
    assert isinstance(failure, WorkerLostError)
    assert mentions(str(failure), "UnexpectedAdmissionError", reason)
    running = {"metadata": {"name": "w", **labels}, "status": {"phase": "Running"}}
    assert exits([running], "worker") == []


# ---- what does not run


def job(completions: int = 1, **status: Any) -> dict[str, Any]:
    return {"metadata": {"name": "fl-1-worker"}, "spec": {"completions": completions}, "status": status}


def pod(name: str = "p", phase: str = "Pending", **status: Any) -> dict[str, Any]:
    return {"metadata": {"name": name}, "status": {"phase": phase, **status}}


def waiting(reason: str, message: str = "", name: str = "p") -> dict[str, Any]:
    return pod(name, containerStatuses=[{"image": "i:1", "state": {"waiting": {"reason": reason, "message": message}}}])


def unscheduled(reason: str = "Unschedulable", message: str = GPU) -> dict[str, Any]:
    return pod(conditions=[{"type": "PodScheduled", "status": "False", "reason": reason, "message": message}])


def warning(reason: str, message: str) -> dict[str, Any]:
    return {"type": "Warning", "reason": reason, "message": message}


class Watched:
    """PodMonitor with a clock and events from the test."""

    def __init__(self, events: Mapping[str, Sequence[Mapping[str, Any]]] | None = None) -> None:
        self.said: list[str] = []
        self.asked: list[str] = []
        self._events = events or {}
        self._pending = PodMonitor(600, 15, self._ask, self.said.append)

    def _ask(self, name: str) -> Sequence[Mapping[str, Any]]:
        self.asked.append(name)
        return self._events.get(name, [])

    def check(self, now: float, *pods: dict[str, Any], of: dict[str, Any] | None = None) -> tuple[bool, Any]:
        return self._pending.check(of or job(len(pods)), pods, now)


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (pod(phase="Running"), None),
        (pod(phase="Succeeded"), None),
        (pod(phase="Failed"), None),
        ({**waiting("ImagePullBackOff"), "metadata": {"name": "p", **LEAVING}}, None),
        (pod(), Verdict.START),
        (waiting("ContainerCreating"), Verdict.START),
        (waiting("ErrImagePull"), Verdict.FAIL),
        (waiting("ImagePullBackOff"), Verdict.FAIL),
        (waiting("InvalidImageName"), Verdict.FAIL),
        (waiting("CreateContainerConfigError"), Verdict.FAIL),
        (waiting("CreateContainerError"), Verdict.FAIL),
        (unscheduled(), Verdict.WAIT),
        (unscheduled(message='0/1 nodes are available: persistentvolumeclaim "c" not found. not found'), Verdict.FAIL),
        (
            unscheduled(message="0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims."),
            Verdict.WAIT,
        ),
        (unscheduled("SchedulingGated"), Verdict.START),
    ],
)
def test_verdicts(found: dict[str, Any], verdict: Verdict | None) -> None:
    seen = diagnose(found)
    assert (seen and seen.verdict) is verdict


def test_an_image_that_cannot_be_pulled_fails_within_a_minute() -> None:
    watched = Watched()
    for now, reason in ((0.0, "ErrImagePull"), (5.0, "ImagePullBackOff"), (10.0, "ErrImagePull")):
        assert watched.check(now, waiting(reason, "i:1: not found")) == (False, None)
    settled, error = watched.check(15.0, waiting("ImagePullBackOff", "i:1: not found"))
    assert not settled
    assert isinstance(error, ExperimentError)
    assert "p does not start: ImagePullBackOff: i:1: i:1: not found" in str(error)
    assert "cluster.image" in str(error)
    assert watched.said[0] == "p waits: ErrImagePull: i:1: i:1: not found"


def test_a_late_image_pull_is_tolerated() -> None:
    watched = Watched()
    watched.check(0.0, waiting("ErrImagePull"))
    assert watched.check(14.0, pod(phase="Running")) == (True, None)
    assert watched.check(20.0, waiting("ErrImagePull")) == (False, None)  # a separate clock


def test_a_missing_secret_gives_the_command_to_create_it() -> None:
    watched, lacking = Watched(), waiting("CreateContainerConfigError", 'secret "store" not found')
    watched.check(0.0, lacking)
    _, error = watched.check(16.0, lacking)
    assert isinstance(error, ExperimentError)
    assert mentions(str(error), 'secret "store" not found', "kubectl create secret generic")


def test_waiting_for_a_gpu_ends_with_the_schedulers_message() -> None:
    watched = Watched()
    assert watched.check(0.0, unscheduled()) == (False, None)
    assert watched.check(599.0, unscheduled()) == (False, None)
    assert watched.said == [f"p waits: Unschedulable: {GPU}"]  # once
    _, error = watched.check(600.0, unscheduled())
    assert isinstance(error, QuorumError)
    assert "3 Insufficient nvidia.com/gpu" in str(error)
    assert "waited 600 s" in str(error)


def test_a_pod_may_wait_in_a_queue() -> None:
    watched = Watched()
    for now in (0.0, 10_000.0, 20_000.0):
        assert watched.check(now, unscheduled("SchedulingGated"))[1] is None
    assert watched.check(20_001.0, unscheduled())[1] is None  # the clock starts when the queue releases the pod
    suspended = {"metadata": {"name": "j"}, "spec": {"completions": 1, "suspend": True}, "status": {}}
    assert watched.check(1e6, of=suspended) == (True, None)


def test_a_quota_appears_only_in_the_events_of_the_job() -> None:
    words = (
        'Error creating: pods "fl-1-worker-0-x" is forbidden: exceeded quota: small, requested: cpu=2, limited: cpu=1'
    )
    watched = Watched({"fl-1-worker": [warning("FailedCreate", words)]})
    assert watched.check(0.0, pod(phase="Running"), of=job(2)) == (False, None)  # one of two exists
    assert watched.check(6.0, pod(phase="Running"), of=job(2)) == (False, None)
    _, error = watched.check(25.0, pod(phase="Running"), of=job(2))
    assert isinstance(error, RefusedError)
    assert "exceeded quota: small" in str(error)
    assert "kubectl describe quota" in str(error)


def test_a_volume_problem_appears_only_in_the_events_of_the_pod() -> None:
    watched = Watched({"p": [warning("FailedMount", 'MountVolume.SetUp failed: configmap "ca" not found')]})
    watched.check(0.0, waiting("ContainerCreating"))
    assert watched.asked == []  # a pod that has just started is not examined
    watched.check(6.0, waiting("ContainerCreating"))
    _, error = watched.check(21.0, waiting("ContainerCreating"))
    assert isinstance(error, ExperimentError)
    assert 'configmap "ca" not found' in str(error)


def test_without_rights_to_events_a_pending_pod_times_out() -> None:
    watched = Watched()
    assert watched.check(0.0, waiting("ContainerCreating"))[1] is None
    assert watched.check(599.0, waiting("ContainerCreating"))[1] is None
    _, error = watched.check(600.0, waiting("ContainerCreating"))
    assert isinstance(error, QuorumError)
    assert "unknown reason" in str(error)


@pytest.mark.parametrize(
    ("of", "phases", "expected"),
    [
        (job(1), [], 1),
        (job(3), ["Running", "Pending"], 1),
        (job(3, succeeded=1), ["Succeeded", "Running", "Running"], 0),
        (job(3), ["Failed", "Running", "Running"], 1),
        (job(6, failedIndexes="0,2-3"), ["Failed", "Running", "Running", "Running"], 0),
    ],
)
def test_counting_missing_pods(of: dict[str, Any], phases: list[str], expected: int) -> None:
    assert count_missing(of, [pod(phase=phase) for phase in phases]) == expected


def test_a_stuck_pod_is_reported_once_with_the_command_that_frees_it() -> None:
    """On a lost node the API server keeps the pods, and their Job replaces none of them."""
    watched, leaving = Watched(), pod("w", phase="Running")
    leaving["metadata"] |= LEAVING
    leaving["spec"] = {"nodeName": "node-7"}
    assert watched.check(0.0, leaving, of=job(0)) == (True, None)
    assert watched.check(119.0, leaving, of=job(0)) == (True, None)
    assert watched.said == []
    for now in (120.0, 300.0):
        assert watched.check(now, leaving, of=job(0)) == (True, None)  # the quorum decides, not the launcher
    (output,) = watched.said
    assert mentions(output, "w", "node-7", "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute")
    del leaving["spec"]["nodeName"]
    assert Watched().check(1000.0, leaving, of=job(0)) == (True, None)
