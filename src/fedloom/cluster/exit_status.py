"""Outcome of a federation on Kubernetes: maps the status of Jobs and pods to FedLoom errors. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedloom.cluster.manifests import AGGREGATOR, COMPONENT, FINAL, WORKER, get_label, phase_of
from fedloom.core.processes import ChildReport
from fedloom.errors import FAILURES, ExitCode, FedloomError, QuorumError, WorkerLostError

KILLED = 137
AGAIN = "start it again with the same run id to continue from the published state"


@dataclass(frozen=True)
class End:
    """Outcome of a Job: success or failure, and the reason and message of its condition."""

    complete: bool
    reason: str
    message: str


@dataclass(frozen=True)
class Exit:
    """Termination of a pod's container; ``message`` has the reports of its process, or the end of its log.

    ``code`` is 0 if no container ended: the node rejected the pod, such as for a second GPU where GPUs are shared.
    """

    pod: str
    code: int
    reason: str
    message: str

    @property
    def summary(self) -> str:
        """Message of the error that the process reported, else the last line that it printed."""
        reports = ChildReport(self.message)
        if reports.failure is not None:
            return reports.failure.message
        text = reports.bug or "\n".join(reports.notices) or self.message
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1] if lines else "it left no message"

    def explain(self, component: str) -> tuple[str, str | None]:
        """Return a sentence on how the container ended, and the remedy if one is known."""
        if self.code == 0:
            return f"failed: {self.reason}: {self.summary}", None
        failure = ChildReport(self.message).failure
        summary, hint = self.summary, None if failure is None else failure.hint
        if self.code == KILLED and self.reason == "OOMKilled":
            summary, hint = "it exceeded its memory limit", f"raise cluster.{component}.limits.memory"
        return f"ended with code {self.code} ({name_of(self.code)}): {summary}", hint


def end_of(job: Mapping[str, Any]) -> End | None:
    """Return the outcome of a Job; None if it has not ended."""
    for condition in (job.get("status") or {}).get("conditions") or ():
        if condition.get("type") in ("Complete", "Failed") and condition.get("status") == "True":
            return End(condition["type"] == "Complete", condition.get("reason", ""), condition.get("message", ""))
    return None


def exits(pods: Iterable[Mapping[str, Any]], component: str) -> list[Exit]:
    """Return the failed containers of a component, in the order in which they ended; pods without one come first."""
    own = [pod for pod in pods if get_label(pod, COMPONENT) == component]
    found = [
        (str(ended.get("finishedAt") or ""), _exit(pod, ended))
        for pod in own
        for container in (pod.get("status") or {}).get("containerStatuses") or ()
        if (ended := (container.get("state") or {}).get("terminated")) and ended.get("exitCode")
    ]
    rejected = [
        _exit(pod, {"exitCode": 0, "message": pod["status"].get("message")})
        for pod in own
        if phase_of(pod) == "Failed" and not pod["status"].get("containerStatuses")
    ]
    return rejected + [failed for _, failed in sorted(found, key=lambda pair: pair[0])]


def _exit(pod: Mapping[str, Any], ended: Mapping[str, Any]) -> Exit:
    reason = str(pod["status"].get("reason") or ended.get("reason") or "")
    return Exit(pod["metadata"]["name"], ended["exitCode"], reason, str(ended.get("message") or ""))


def aggregator_failure(end: End, failed: Sequence[Exit]) -> FedloomError:
    """Return the error for an aggregator's failed Job.

    Parameters
    ----------
    end
        Outcome of the Job.
    failed
        Failed containers of its pods, the last one last.
    """
    if end.reason == "DeadlineExceeded":
        return QuorumError(
            f"the federation exceeded its time limit: {end.message}", hint=f"raise cluster.deadline_s, then {AGAIN}"
        )
    if not failed:
        return WorkerLostError(f"the aggregator failed: {end.reason}: {end.message}", hint=AGAIN)
    last = failed[-1]
    ended, hint = last.explain(AGGREGATOR)
    again = None if last.code in FINAL else AGAIN
    return FAILURES.get(last.code, WorkerLostError)(f"the aggregator {ended}", hint=hint or again)


def workers_failure(job: Mapping[str, Any], end: End, failed: Sequence[Exit]) -> FedloomError | None:
    """Return the federation's error for an ended workers' Job; None if the federation is unaffected.

    Parameters
    ----------
    job
        The workers' Job; a worker ends successfully once it is notified that the run is over.
    end
        Outcome of the Job.
    failed
        Failed containers of its pods.
    """
    status = job.get("status") or {}
    if end.complete or status.get("completedIndexes"):
        return None
    if end.reason == "DeadlineExceeded":
        return aggregator_failure(end, ())
    spec = job.get("spec") or {}
    if which := status.get("failedIndexes"):
        text = f"{count_indexes(which)} of {spec.get('completions')} workers failed permanently (index {which}), and "
        text += f"cluster.max_failed_workers allows {spec.get('maxFailedIndexes')}"
    else:
        text = f"the workers failed: {end.reason}: {end.message}"
    if not failed:
        return WorkerLostError(text, hint=AGAIN)
    last = failed[-1]
    ended, hint = last.explain(WORKER)
    kind = FAILURES[last.code] if last.code in FINAL else WorkerLostError
    return kind(f"{text}; {last.pod} {ended}", hint=hint or AGAIN)


def count_indexes(ranges: str) -> int:
    """Return the number of indexes in a Job's status, such as ``0,2-4``."""
    count = 0
    for part in filter(None, ranges.split(",")):
        first, _, last = part.partition("-")
        count += int(last or first) - int(first) + 1
    return count


def name_of(code: int) -> str:
    """Return the meaning of an exit code, such as ``QUORUM`` or ``signal 9``."""
    try:
        return ExitCode(code).name
    except ValueError:
        return f"signal {code - 128}" if code > 128 else "unexpected"
