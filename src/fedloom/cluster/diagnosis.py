"""Diagnosis of Jobs and pods: why they do not start, how they ended, and the remedy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from fedloom.cluster.manifests import AGGREGATOR, COMPONENT, FINAL, WORKER, get_label, phase_of
from fedloom.core.processes import ChildReport
from fedloom.errors import FAILURES, ExitCode, ExperimentError, FedloomError, QuorumError, RefusedError, WorkerLostError

REFUSALS: Sequence[tuple[str, type[FedloomError], str]] = (
    (r"failed quota: (?P<what>[^\s:]+): must specify (?P<needed>.+)", RefusedError,
     "set {settings}, as required by quota {what}"),
    (r"exceeded quota: (?P<what>[^\s,]+)(?:, requested: (?P<requested>.+?), used: )?", RefusedError,
     "request less ({settings}), or have the quota raised: kubectl describe quota {what}"),
    # A LimitRange sets the limit before the API server validates the pod.
    (r'Pod "[^"]*" is invalid: (?P<requested>.*must be less than or equal to \S+ limit)', RefusedError,
     "set {limits}, or lower {settings}: a LimitRange has a lower limit: kubectl describe limitrange"),
    (r'(?:webhook|ValidatingAdmissionPolicy) ["\'](?P<what>[^"\']+)["\']', RefusedError,
     "change the cluster setting named above, or ask the operator of {what}"),
    ("violates PodSecurity", RefusedError, "change the cluster setting named above, or cluster.namespace"),
    ("no PriorityClass with name", ExperimentError, "change cluster.priority_class: kubectl get priorityclasses"),
    ("looking up service account", ExperimentError, "change cluster.service_account: kubectl get serviceaccounts"),
    ("pod rejected: RuntimeClass", ExperimentError, "change cluster.runtime_class: kubectl get runtimeclasses"),
    (" per Container | per Pod |limit to request ratio", RefusedError,
     "change {settings}: kubectl describe limitrange"),
    # A missing right is not a refusal of the request's content.
    (r'(?s)\A(?!.*User "[^"]*" cannot ).*is forbidden', RefusedError,
     "change the cluster setting named above (docs/cluster.md)"),
)  # fmt: skip
"""Refusals by admission controllers: pattern of the message, error class, and remedy."""

NEEDED = re.compile(r"([a-z0-9./-]+(?:,[a-z0-9./-]+)*) for: ([a-z0-9-]+(?:,[a-z0-9-]+)*)")
REQUESTED = re.compile(r"(?:^|,|equal to )([a-z0-9./-]+)(?:=|$| limit)")
COUNTED = {
    "jobs.batch": "fewer federations at once",
    "services": "fewer federations at once",
    "pods": "cluster.workers",
}
"""Remedies for quotas of objects."""


def diagnose_refusal(message: str) -> tuple[type[FedloomError], str] | None:
    """Return the error class and the remedy for a refusal by an admission controller; None for another message.

    Parameters
    ----------
    message
        The API server's message, from its response or from an event.
    """
    for pattern, kind, hint in REFUSALS:
        if refusal := re.search(pattern, message):
            facts = refusal.groupdict()
            settings = _settings(message, facts.get("requested") or "", facts.get("needed") or "")
            limits = settings.replace(".requests.", ".limits.")
            return kind, hint.format(what=facts.get("what"), settings=settings, limits=limits)
    return None


def _settings(message: str, requested: str, needed: str) -> str:
    """Return the settings behind the resources that a message names; all possible ones if it names none.

    Parameters
    ----------
    requested
        Requested resources, such as ``limits.memory=2Gi,pods=1``.
    needed
        Resources that a quota requires of containers, such as ``limits.memory for: aggregator``.
    """
    concerned = [name for name in ("aggregator", "worker") if f"-{name}-" in message] or ["aggregator", "worker"]
    pairs = [(resources.split(","), containers.split(",")) for resources, containers in NEEDED.findall(needed)]
    pairs = pairs or [(REQUESTED.findall(requested), concerned)]
    names = [
        COUNTED.get(resource.removeprefix("count/"))
        or f"cluster.{container}.{resource if '.' in resource else f'requests.{resource}'}"
        for resources, containers in pairs
        for resource in resources
        for container in containers
    ]
    every = ["cluster.workers", *(f"cluster.{name}.{kind}" for name in concerned for kind in ("requests", "limits"))]
    return ", ".join(dict.fromkeys(names or every))


class Verdict(Enum):
    """Launcher's reaction to a pod that does not run."""

    START = "start"
    """The pod is starting; nothing is wrong."""
    WAIT = "wait"
    """The pod waits for resources that may become free: a node, a GPU."""
    FAIL = "fail"
    """The problem needs the user's action."""


IMAGE = "push the image, correct cluster.image, or name its registry's Secret in image_pull_secrets"
REASONS: Mapping[str, str | None] = {
    **dict.fromkeys(
        ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"), IMAGE
    ),
    "CreateContainerConfigError": "kubectl create secret generic NAME --from-literal=AWS_ACCESS_KEY_ID=... "
    "(docs/cluster.md)",
    **dict.fromkeys(("CreateContainerError", "RunContainerError", "StartError")),
}
"""Reasons for which a container waits and that need the user's action, and the remedies that do not need its message.
"""
EVENTS = {"FailedCreate", "FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox"}
"""Reasons of events that report problems missing from a status."""


@dataclass(frozen=True)
class Diagnosis:
    """Reason why a pod does not run."""

    verdict: Verdict
    reason: str
    message: str

    def error(self, pod: str, waited_s: float) -> FedloomError:
        """Return the error for this diagnosis."""
        text = f"{pod} does not start: {self.reason}: {self.message}".rstrip(": ")
        if self.verdict is Verdict.WAIT:
            return QuorumError(
                f"{text} (waited {waited_s:.0f} s)",
                hint="request less (gpu, requests, node_selector), add nodes, or raise cluster.pending_timeout_s",
            )
        if remedy := REASONS.get(self.reason):
            return ExperimentError(text, hint=remedy)
        kind, hint = diagnose_refusal(self.message) or (
            ExperimentError,
            "change the cluster setting named above (docs/cluster.md)",
        )
        return kind(text, hint=hint)


def diagnose(pod: Mapping[str, Any]) -> Diagnosis | None:
    """Return why a pod, as the API describes it, does not run; None if it runs, has run, or is being removed."""
    status = pod.get("status") or {}
    if phase_of(pod) != "Pending" or pod["metadata"].get("deletionTimestamp"):
        return None
    for container in status.get("containerStatuses") or ():
        waiting = container.get("state", {}).get("waiting") or {}
        if (reason := waiting.get("reason", "")) in REASONS:
            image = container.get("image", "")
            message = f"{image}: {waiting.get('message') or image}"
            return Diagnosis(Verdict.FAIL, reason, message.removeprefix(": "))
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            reason, message = condition.get("reason", "Unschedulable"), condition.get("message", "")
            verdict = Verdict.FAIL if re.search('persistentvolumeclaim "[^"]+" not found', message) else Verdict.WAIT
            # A queue holds a gated pod and will release it.
            return Diagnosis(Verdict.START if reason == GATED else verdict, reason, message)
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


GATED = "SchedulingGated"
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
        """Check a Job's pods at a time in seconds.

        Returns
        -------
        settled
            True if every expected pod runs or has run.
        error
            Reason to give up the federation, if there is one.
        """
        self._report_stuck(pods, now)
        waiting = {pod["metadata"]["name"]: seen for pod in pods if (seen := diagnose(pod)) is not None}
        if missing := count_missing(job, pods):
            waiting[job["metadata"]["name"]] = Diagnosis(Verdict.START, "", f"pods that were not created: {missing}")
        self._pending = {name: self._pending.get(name, now) for name in waiting}
        self._failing = {name: since for name, since in self._failing.items() if name in waiting}
        errors = []
        for name, seen in waiting.items():
            if seen.reason == GATED:
                self._pending[name] = now
                continue
            pending_s = now - self._pending[name]
            if seen.verdict is Verdict.START and pending_s >= self._quiet_s:
                seen = diagnose_events(self._events(name)) or seen
            if seen.verdict is not Verdict.START:
                self._report(name, seen.reason, f"{name} waits: {seen.reason}: {seen.message}")
            if seen.verdict is Verdict.FAIL:
                failing_s = now - self._failing.setdefault(name, now)
                errors += [seen.error(name, failing_s)] if failing_s >= self._failing_timeout_s else []
                continue
            self._failing.pop(name, None)
            if pending_s >= self._pending_timeout_s:
                errors.append(
                    Diagnosis(Verdict.WAIT, seen.reason or "unknown reason", seen.message).error(name, pending_s)
                )
        return not waiting, next(iter(errors), None)

    def _report(self, name: str, reason: str, line: str) -> None:
        """Say a line, once for each pod and reason."""
        if (name, reason) not in self._said:
            self._said.add((name, reason))
            self._say(line)

    def _report_stuck(self, pods: Sequence[Mapping[str, Any]], now: float) -> None:
        """Report pods that stay in deletion: on a lost node, only an operator can confirm that they are gone."""
        for pod in pods:
            name, node = pod["metadata"]["name"], (pod.get("spec") or {}).get("nodeName")
            leaving = pod["metadata"].get("deletionTimestamp") and node is not None
            if leaving and now - self._leaving.setdefault(name, now) >= STUCK_S:
                self._report(
                    name,
                    "Terminating",
                    f"{name} does not end on node {node}, so it is not replaced; if the node is lost: kubectl taint "
                    f"nodes {node} node.kubernetes.io/out-of-service=nodeshutdown:NoExecute (docs/cluster.md)",
                )


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
    terminated = [
        (str(state_ended.get("finishedAt") or ""), _exit(pod, state_ended))
        for pod in own
        for container in (pod.get("status") or {}).get("containerStatuses") or ()
        if (state_ended := (container.get("state") or {}).get("terminated")) and state_ended.get("exitCode")
    ]
    rejected = [
        _exit(pod, {"exitCode": 0, "message": pod["status"].get("message")})
        for pod in own
        if phase_of(pod) == "Failed" and not pod["status"].get("containerStatuses")
    ]
    return rejected + [failed for _, failed in sorted(terminated, key=lambda pair: pair[0])]


def _exit(pod: Mapping[str, Any], terminated: Mapping[str, Any]) -> Exit:
    reason = str(pod["status"].get("reason") or terminated.get("reason") or "")
    return Exit(pod["metadata"]["name"], terminated["exitCode"], reason, str(terminated.get("message") or ""))


def aggregator_failure(end: End, failed: Sequence[Exit]) -> FedloomError:
    """Return the error for an aggregator's failed Job, given its outcome and the failed containers in order."""
    if end.reason == "DeadlineExceeded":
        return QuorumError(
            f"the federation exceeded its time limit: {end.message}", hint=f"raise cluster.deadline_s, then {AGAIN}"
        )
    if not failed:
        return WorkerLostError(f"the aggregator failed: {end.reason}: {end.message}", hint=AGAIN)
    last = failed[-1]
    reason, hint = last.explain(AGGREGATOR)
    retry_hint = None if last.code in FINAL else AGAIN
    return FAILURES.get(last.code, WorkerLostError)(f"the aggregator {reason}", hint=hint or retry_hint)


def workers_failure(job: Mapping[str, Any], end: End, failed: Sequence[Exit]) -> FedloomError | None:
    """Return the federation's error for an ended workers' Job; None if the federation is unaffected.

    A worker ends successfully once it is notified that the run is over.
    """
    spec, status = job.get("spec") or {}, job.get("status") or {}
    if end.complete or status.get("completedIndexes"):
        return None
    if end.reason == "DeadlineExceeded":
        return aggregator_failure(end, ())
    text = f"the workers failed: {end.reason}: {end.message}"
    if indexes := status.get("failedIndexes"):
        text = (
            f"{count_indexes(indexes)} of {spec.get('completions')} workers failed permanently (index {indexes}), and "
        )
        text += f"cluster.max_failed_workers allows {spec.get('maxFailedIndexes')}"
    if not failed:
        return WorkerLostError(text, hint=AGAIN)
    last = failed[-1]
    reason, hint = last.explain(WORKER)
    kind = FAILURES[last.code] if last.code in FINAL else WorkerLostError
    return kind(f"{text}; {last.pod} {reason}", hint=hint or AGAIN)


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
