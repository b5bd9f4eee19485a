"""Diagnosis of pods that do not run, with the remedy if waiting does not help."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from fedloom.cluster.exit_status import count_indexes
from fedloom.cluster.manifests import phase_of
from fedloom.cluster.refusals import diagnose_refusal
from fedloom.errors import ExperimentError, FedloomError, QuorumError


class Verdict(Enum):
    """Launcher's reaction to a pod that does not run."""

    START = "start"
    """The pod is starting; nothing is wrong."""
    WAIT = "wait"
    """The pod waits for resources that may become free: a node, a GPU."""
    FAIL = "fail"
    """The problem needs the user's action."""


@dataclass(frozen=True)
class Diagnosis:
    """Reason why a pod does not run."""

    verdict: Verdict
    reason: str
    message: str

    def error(self, who: str, waited_s: float) -> FedloomError:
        """Return the error for this diagnosis."""
        text = f"{who} does not start: {self.reason}: {self.message}".rstrip(": ")
        if self.verdict is Verdict.WAIT:
            return QuorumError(
                f"{text} (waited {waited_s:.0f} s)",
                hint="request less (gpu, requests, node_selector), add nodes, or raise cluster.pending_timeout_s",
            )
        if self.reason in IMAGE:
            return ExperimentError(
                text, hint="push the image, correct cluster.image, or name its registry's Secret in image_pull_secrets"
            )
        if self.reason in CONFIGURATION:
            return ExperimentError(
                text, hint="kubectl create secret generic NAME --from-literal=AWS_ACCESS_KEY_ID=... (docs/cluster.md)"
            )
        if refused := diagnose_refusal(self.message):
            kind, hint = refused
            return kind(text, hint=hint)
        return ExperimentError(text, hint="change the cluster setting named above (docs/cluster.md)")


IMAGE = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"}
CONFIGURATION = {"CreateContainerConfigError"}
CREATION = {"CreateContainerError", "RunContainerError", "StartError"}
EVENTS = {"FailedCreate", "FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox"}
"""Reasons of events that report problems missing from a status."""


def diagnose(pod: Mapping[str, Any]) -> Diagnosis | None:
    """Diagnose why a pod does not run.

    Parameters
    ----------
    pod
        As returned by the API.

    Returns
    -------
    Diagnosis or None
        None if it runs, has run, or is being removed.
    """
    status = pod.get("status") or {}
    if phase_of(pod) != "Pending" or pod["metadata"].get("deletionTimestamp"):
        return None
    for container in status.get("containerStatuses") or ():
        waiting = container.get("state", {}).get("waiting") or {}
        reason = waiting.get("reason", "")
        if reason in IMAGE | CONFIGURATION | CREATION:
            message = waiting.get("message") or container.get("image", "")
            return Diagnosis(Verdict.FAIL, reason, f"{container.get('image', '')}: {message}".removeprefix(": "))
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            gated = condition.get("reason") == "SchedulingGated"  # a queue holds the pod and will release it
            verdict = Verdict.START if gated else Verdict.WAIT
            return Diagnosis(verdict, condition.get("reason", "Unschedulable"), condition.get("message", ""))
    return Diagnosis(Verdict.START, "", "")


def diagnose_events(events: Iterable[Mapping[str, Any]]) -> Diagnosis | None:
    """Return the diagnosis in the last of some events, if that keeps a pod from existing or starting."""
    warnings = [event for event in events if event.get("type", "Warning") == "Warning"]
    if warnings and warnings[-1].get("reason") in EVENTS:
        return Diagnosis(Verdict.FAIL, warnings[-1]["reason"], str(warnings[-1].get("message", "")))
    return None


def count_missing(job: Mapping[str, Any], pods: Sequence[Mapping[str, Any]]) -> int:
    """Return how many of a Job's pods are missing: refused, or waiting for a retry."""
    spec, status = job.get("spec") or {}, job.get("status") or {}
    if spec.get("suspend"):
        return 0
    live = sum(phase_of(pod) not in ("Succeeded", "Failed") for pod in pods)
    given_up = count_indexes(str(status.get("failedIndexes") or ""))
    return max(0, int(spec.get("completions") or 1) - live - int(status.get("succeeded") or 0) - given_up)


STUCK_S = 120.0
"""Seconds after which a pod that is being deleted is reported: longer than every grace period of a federation."""


class PodMonitor:
    """Monitor of pods that do not run, with the duration and reason of each.

    Parameters
    ----------
    pending_timeout_s
        Seconds that a pod may wait for resources that may become free.
    failing_timeout_s
        Seconds that it may wait for a person's fix: a registry or a Secret may be slightly late.
    events
        Returns the events of an object, by its name; called only for objects that neither run nor give a reason.
    say
        Called once for each reason of waiting.
    """

    def __init__(
        self,
        pending_timeout_s: float,
        failing_timeout_s: float,
        events: Callable[[str], Sequence[Mapping[str, Any]]],
        say: Callable[[str], None],
    ) -> None:
        self._pending_timeout_s = pending_timeout_s
        self._failing_timeout_s = failing_timeout_s
        self._quiet_s = min(5.0, failing_timeout_s)
        self._events = events
        self._say = say
        self._pending: dict[str, float] = {}  # start of not running, whatever the reason
        self._failing: dict[str, float] = {}  # start of a problem that waiting has not solved
        self._leaving: dict[str, float] = {}  # first sight of pods that are being deleted
        self._said: set[tuple[str, str]] = set()

    def check(
        self, job: Mapping[str, Any], pods: Sequence[Mapping[str, Any]], now: float
    ) -> tuple[bool, FedloomError | None]:
        """Check a Job's pods.

        Parameters
        ----------
        job, pods
            As returned by the API; the pods are the Job's.
        now
            Seconds of a monotonic clock.

        Returns
        -------
        settled
            True if every expected pod runs or has run.
        error
            Reason to give up the federation, if there is one.
        """
        self._report_stuck(pods, now)
        found: dict[str, Diagnosis] = {}
        for pod in pods:
            seen = diagnose(pod)
            if seen is not None:
                found[pod["metadata"]["name"]] = seen
        name = job["metadata"]["name"]
        if count_missing(job, pods):
            found[name] = Diagnosis(Verdict.START, "", f"pods that were not created: {count_missing(job, pods)}")
        for clocks in (self._pending, self._failing):
            for who in clocks.keys() - found.keys():
                del clocks[who]
        errors = []
        for who, seen in found.items():
            if seen.reason == "SchedulingGated":
                self._pending[who] = now
                continue
            pending_s = now - self._pending.setdefault(who, now)
            if seen.verdict is Verdict.START and pending_s >= self._quiet_s:
                seen = diagnose_events(self._events(who)) or seen
            self._report(who, seen)
            if seen.verdict is not Verdict.FAIL:
                self._failing.pop(who, None)
                if pending_s >= self._pending_timeout_s:
                    known = seen.reason or "unknown reason"
                    errors.append(Diagnosis(Verdict.WAIT, known, seen.message).error(who, pending_s))
            elif (failing_s := now - self._failing.setdefault(who, now)) >= self._failing_timeout_s:
                errors.append(seen.error(who, failing_s))
        return not found, next(iter(errors), None)

    def _report(self, who: str, seen: Diagnosis) -> None:
        if seen.verdict is not Verdict.START and (who, seen.reason) not in self._said:
            self._said.add((who, seen.reason))
            self._say(f"{who} waits: {seen.reason}: {seen.message}")

    def _report_stuck(self, pods: Sequence[Mapping[str, Any]], now: float) -> None:
        """Report pods that stay in deletion: on a lost node, only an operator can confirm that they are gone."""
        for pod in pods:
            who, node = pod["metadata"]["name"], (pod.get("spec") or {}).get("nodeName")
            if not pod["metadata"].get("deletionTimestamp") or node is None:
                continue
            if now - self._leaving.setdefault(who, now) >= STUCK_S and (who, "Terminating") not in self._said:
                self._said.add((who, "Terminating"))
                self._say(
                    f"{who} does not end on node {node}, so it is not replaced; if the node is lost: "
                    f"kubectl taint nodes {node} node.kubernetes.io/out-of-service=nodeshutdown:NoExecute "
                    "(docs/nodes.md)"
                )
