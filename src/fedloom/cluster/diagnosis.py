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

EXCEEDED = re.compile(r"exceeded quota: (?P<quota>[^\s,]+)(?:, requested: (?P<requested>.+?), used: )?")
UNSPECIFIED = re.compile(r"failed quota: (?P<quota>[^\s:]+): must specify (?P<needed>.+)")
FOR = re.compile(r"(?P<resources>[a-z0-9./-]+(?:,[a-z0-9./-]+)*) for: (?P<containers>[a-z0-9-]+(?:,[a-z0-9-]+)*)")
TOO_LOW = re.compile(r'Pod "[^"]*" is invalid: .*must be less than or equal to (?P<resource>[a-z0-9./-]+) limit')
"""Default limit below a request: a LimitRange sets it before the API server validates the pod."""
WEBHOOK = re.compile(r'admission webhook "(?P<name>[^"]+)" denied the request')
UNAUTHORIZED = re.compile(r'User "[^"]*" cannot ')
"""Missing right, which is not a refusal of the request's content."""


def diagnose_refusal(message: str) -> tuple[type[FedloomError], str] | None:
    """Return the error class for a refusal by an admission controller, and the remedy.

    Parameters
    ----------
    message
        The API server's message, from its response or from an event.

    Returns
    -------
    tuple or None
        Error class and hint; None if the message is not such a refusal.
    """
    if found := UNSPECIFIED.search(message):
        return RefusedError, f"set {_settings(found['needed'])}, as required by quota {found['quota']}"
    if found := EXCEEDED.search(message):
        asked = _asked(found["requested"] or "", message)
        hint = f"request less ({asked}), or have the quota raised: kubectl describe quota {found['quota']}"
        return RefusedError, hint
    if found := TOO_LOW.search(message):
        own = _asked(f"{found['resource']}=", message)
        raised = own.replace(".requests.", ".limits.")
        return (
            RefusedError,
            f"set {raised}, or lower {own}: a LimitRange has a lower limit: kubectl describe limitrange",
        )
    if found := WEBHOOK.search(message):
        return RefusedError, f"change the cluster setting named above, or ask the operator of {found['name']}"
    if "violates PodSecurity" in message:
        return RefusedError, "change the cluster setting named above, or cluster.namespace"
    if "no PriorityClass with name" in message:
        return ExperimentError, "change cluster.priority_class: kubectl get priorityclasses"
    if "error looking up service account" in message:
        return ExperimentError, "change cluster.service_account: kubectl get serviceaccounts"
    if " per Container " in message or " per Pod " in message or "limit to request ratio" in message:
        return RefusedError, f"change {_asked('', message)}: kubectl describe limitrange"
    if "is forbidden" in message and not UNAUTHORIZED.search(message):
        return RefusedError, "change the cluster setting named above (docs/cluster.md)"
    return None


def _settings(needed: str) -> str:
    """Return the settings for a quota's required resources, such as ``limits.memory for: aggregator``."""
    return ", ".join(
        f"cluster.{container}.{resource if '.' in resource else f'requests.{resource}'}"
        for found in FOR.finditer(needed)
        for container in found["containers"].split(",")
        for resource in found["resources"].split(",")
    )


def _asked(requested: str, message: str) -> str:
    """Return the settings behind the requested resources; all possible ones if unknown."""
    component = next((name for name in ("aggregator", "worker") if f"-{name}-" in message), None)
    components = [component] if component else ["aggregator", "worker"]
    named = []
    for resource in re.findall(r"(?:^|,)([a-z0-9./-]+)=", requested):
        if resource.removeprefix("count/") in ("jobs.batch", "services"):
            named.append("fewer federations at once")
        elif resource.removeprefix("count/") == "pods":
            named.append("cluster.workers")
        else:
            kind = resource if "." in resource else f"requests.{resource}"
            named += [f"cluster.{component}.{kind}" for component in components]
    fallback = ["cluster.workers", *(f"cluster.{one}.{kind}" for one in components for kind in ("requests", "limits"))]
    return ", ".join(dict.fromkeys(named or fallback))


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
                    "(docs/cluster.md)"
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
