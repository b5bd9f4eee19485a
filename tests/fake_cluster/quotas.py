"""Quotas of objects and of pods' resources, charged on create, before the name is checked; default limits.

A LimitRange sets the limits that a container lacks, and the pod is validated afterwards
(``plugin/pkg/admission/limitranger`` and ``pkg/apis/core/validation`` of kubernetes/kubernetes): a request above such a
limit is refused as if the pod had set it itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fake_cluster.resources import RESOURCES, Resource, quantity
from fake_cluster.store import ApiError, Object, Store

COMPUTE = ("requests.cpu", "requests.memory", "limits.cpu", "limits.memory")


@dataclass
class Quota:
    """A ResourceQuota: the limits of a namespace, and the amounts charged."""

    name: str
    hard: dict[str, str]
    used: dict[str, float] = field(default_factory=dict)
    recalculated_at: int = -1
    """Number of deletions when ``used`` was last counted: refused creates stay charged until the next count."""


class Quotas:
    """All quotas of a cluster."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.all: list[Quota] = []
        self.default_limits: dict[str, str] = {}
        """Limits of a LimitRange."""

    def limit(self, pod: Object) -> None:
        """Set a pod's default limits.

        Raises
        ------
        ApiError
            422, with the message of the API, if a container requests more; one line names all of its errors.
        """
        wrong = []
        for i, container in enumerate(pod["spec"]["containers"]):
            resources = container.setdefault("resources", {})
            limits = {**self.default_limits, **(resources.get("limits") or {})}
            resources.update({"limits": limits} if limits else {})
            for kind, asked in (resources.get("requests") or {}).items():
                if kind in limits and quantity(asked) > quantity(limits[kind]):
                    wrong.append(
                        f'spec.containers[{i}].resources.requests: Invalid value: "{asked}": must be less than or '
                        f"equal to {kind} limit of {limits[kind]}"
                    )
        if wrong:
            errors = f"[{', '.join(wrong)}]" if len(wrong) > 1 else wrong[0]
            raise ApiError(422, "Invalid", f'Pod "{pod["metadata"]["name"]}" is invalid: {errors}')

    def charge(self, resource: Resource, item: Object) -> None:
        """Charge every quota for an object, whether it can then be created or not.

        Raises
        ------
        ApiError
            403, with the message of the API, if a quota does not allow it.
        """
        for quota in self.all:
            if quota.recalculated_at != self._store.deletions:
                quota.used = self._count(quota)
                quota.recalculated_at = self._store.deletions
            forbidden = f'{resource.qualified} "{item["metadata"]["name"]}" is forbidden: '
            if resource.kind == "Pod" and (lacking := _unspecified(quota.hard, item)):
                raise ApiError(403, "Forbidden", f"{forbidden}failed quota: {quota.name}: must specify {lacking}")
            asked = {kind: amount for kind, amount in usage(resource, item).items() if kind in quota.hard}
            over = [k for k, v in asked.items() if quota.used.get(k, 0.0) + v > quantity(quota.hard[k])]
            if over:
                limits = {kind: quantity(quota.hard[kind]) for kind in over}
                reported = [",".join(f"{kind}={of[kind]:g}" for kind in over) for of in (asked, quota.used, limits)]
                words = "exceeded quota: {}, requested: {}, used: {}, limited: {}".format(quota.name, *reported)
                raise ApiError(403, "Forbidden", forbidden + words)
            for kind, amount in asked.items():
                quota.used[kind] = quota.used.get(kind, 0.0) + amount

    def _count(self, quota: Quota) -> dict[str, float]:
        used = dict.fromkeys(quota.hard, 0.0)
        for resource in RESOURCES.values():
            for item in self._store.list(resource)[0]:
                if resource.kind == "Pod" and item["status"]["phase"] in ("Succeeded", "Failed"):
                    continue
                for kind, amount in usage(resource, item).items():
                    used[kind] = used.get(kind, 0.0) + amount
        return used


def usage(resource: Resource, item: Object) -> dict[str, float]:
    """Return the amounts of a quota that an object uses."""
    counted: dict[str, float] = {f"count/{resource.qualified}": 1.0}
    if not resource.group:
        counted[resource.plural] = 1.0
    if resource.kind == "Pod":
        for kind in COMPUTE:
            counted[kind] = sum(quantity(_specified(container, kind) or 0) for container in item["spec"]["containers"])
    return counted


def _specified(container: Object, kind: str) -> Any:
    part, _, name = kind.partition(".")
    return ((container.get("resources") or {}).get(part) or {}).get(name)


def _unspecified(hard: dict[str, str], pod: Object) -> str:
    """Return ``limits.memory for: main``, or nothing if every container states the resources that a quota counts."""
    lacking = {
        kind: [container["name"] for container in pod["spec"]["containers"] if _specified(container, kind) is None]
        for kind in COMPUTE
        if kind in hard
    }
    return "; ".join(f"{kind} for: {','.join(names)}" for kind, names in lacking.items() if names)
