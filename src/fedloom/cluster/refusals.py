"""Admission refusals of a cluster (quotas, limit ranges, pod security, webhooks), and the settings to change."""

from __future__ import annotations

import re

from fedloom.errors import ExperimentError, FedloomError, RefusedError

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
