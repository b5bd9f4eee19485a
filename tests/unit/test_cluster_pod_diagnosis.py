"""Diagnosis of pods that do not run: causes, time limits and messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from facts import mentions

from fedloom.cluster.diagnosis import PodMonitor, Verdict, count_missing, diagnose
from fedloom.errors import ExperimentError, QuorumError, RefusedError

GPU = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu. preemption: 0/3 nodes are available."


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


@pytest.mark.parametrize("phase", ["Running", "Succeeded", "Failed"])
def test_running_and_finished_pods_are_not_reported(phase: str) -> None:
    assert diagnose(pod(phase=phase)) is None


def test_deleted_pods_are_not_reported() -> None:
    leaving = waiting("ImagePullBackOff")
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert diagnose(leaving) is None


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (pod(), Verdict.START),
        (waiting("ContainerCreating"), Verdict.START),
        (waiting("ErrImagePull"), Verdict.FAIL),
        (waiting("ImagePullBackOff"), Verdict.FAIL),
        (waiting("InvalidImageName"), Verdict.FAIL),
        (waiting("CreateContainerConfigError"), Verdict.FAIL),
        (waiting("CreateContainerError"), Verdict.FAIL),
        (unscheduled(), Verdict.WAIT),
        (unscheduled("SchedulingGated"), Verdict.START),
    ],
)
def test_error_classes(found: dict[str, Any], verdict: Verdict) -> None:
    seen = diagnose(found)
    assert seen is not None
    assert seen.verdict is verdict


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
    watched = Watched()
    watched.check(0.0, waiting("CreateContainerConfigError", 'secret "store" not found'))
    _, error = watched.check(16.0, waiting("CreateContainerConfigError", 'secret "store" not found'))
    assert isinstance(error, ExperimentError)
    assert 'secret "store" not found' in str(error)
    assert "kubectl create secret generic" in str(error)


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
    assert isinstance(watched.check(600.0, waiting("ContainerCreating"))[1], QuorumError)


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
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
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
