"""Mapping of the status of Jobs and pods to failure classes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from facts import mentions

from fedloom.cluster.diagnosis import End, Exit, aggregator_failure, end_of, exits, workers_failure
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


def exited(code: int, message: str = "", reason: str = "Error") -> Exit:
    return Exit("fl-1-aggregator-x", code, reason, message)


def test_a_job_may_have_no_status_yet() -> None:
    assert end_of({"metadata": {}}) is None
    assert end_of({"status": {"conditions": [{"type": "Suspended", "status": "True"}]}}) is None
    assert end_of({"status": {"conditions": [{"type": "FailureTarget", "status": "True"}]}}) is None


@pytest.mark.parametrize("kind", ["Complete", "Failed"])
def test_conditions_of_a_finished_job(kind: str) -> None:
    condition = {"type": kind, "status": "True", "reason": "R", "message": "M"}
    assert end_of({"status": {"conditions": [condition]}}) == End(kind == "Complete", "R", "M")


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


def test_the_last_line_of_a_bug_is_reported() -> None:
    error = aggregator_failure(BACKOFF, [exited(1, "Traceback ...\nKeyError: 'x'\n\n")])
    assert "KeyError: 'x'" in str(error)
    assert "same run id" in str(error)  # it may be restarted


def test_out_of_memory_names_the_setting() -> None:
    error = aggregator_failure(BACKOFF, [exited(137, "", "OOMKilled")])
    assert "cluster.aggregator.limits.memory" in str(error)


def test_an_exceeded_deadline_names_the_setting() -> None:
    error = aggregator_failure(End(False, "DeadlineExceeded", "Job was active longer than specified deadline"), [])
    assert isinstance(error, QuorumError)
    assert "cluster.deadline_s" in str(error)


def test_a_failure_without_a_pod_quotes_the_jobs_condition() -> None:
    assert "backoff limit" in str(aggregator_failure(BACKOFF, []))


TOO_MANY = End(False, "MaxFailedIndexesExceeded", "Job has exceeded the specified maximal number of failed indexes")


def test_too_many_failed_workers() -> None:
    job = {"spec": {"completions": 5, "maxFailedIndexes": 2}, "status": {"failedIndexes": "0,2-3"}}
    error = workers_failure(job, TOO_MANY, [exited(137, "", "OOMKilled")])
    assert isinstance(error, WorkerLostError)
    assert "3 of 5 workers" in str(error)
    assert "index 0,2-3" in str(error)
    assert "cluster.max_failed_workers allows 2" in str(error)
    assert "cluster.worker.limits.memory" in str(error)


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
