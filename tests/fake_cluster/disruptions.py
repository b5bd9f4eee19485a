"""PodDisruptionBudgets: which pods may be evicted now.

Written from ``pkg/registry/core/pod/storage/eviction.go`` (which evictions are checked) and
``pkg/controller/disruption`` of kubernetes/kubernetes (how many pods are expected and healthy). There the owner of the
pods says how many are expected. No StatefulSet or Deployment runs here, so a budget expects as many pods as it has had
at once. A Job does not say it: its pods can only be evicted under a budget whose ``minAvailable`` is a number.
"""

from __future__ import annotations

import math
from typing import Any

from fake_cluster.resources import RESOURCES
from fake_cluster.store import ApiError, Object, Store, now

PODS, BUDGETS = RESOURCES["pods"], RESOURCES["poddisruptionbudgets"]


class Disruptions:
    """All budgets of a cluster."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._expected: dict[str, int] = {}

    def tick(self) -> None:
        """Count the pods that each budget expects, and tell in its status whether one of them may be evicted."""
        for budget in self._store.list(BUDGETS)[0]:
            meta, pods = budget["metadata"], self._pods(budget)
            self._expected[meta["uid"]] = max(self._expected.get(meta["uid"], 0), len(pods))
            reason = "SufficientPods" if self._allows(budget, pods) else "InsufficientPods"
            reason = "SyncFailed" if is_uncountable(budget, pods) else reason
            before = (budget.get("status") or {}).get("conditions") or [{}]
            if before[0].get("reason") != reason:
                status = str(reason == "SufficientPods")
                made = {"type": "DisruptionAllowed", "status": status, "reason": reason, "message": ""}
                made["lastTransitionTime"] = now()
                self._store.modify(
                    BUDGETS, meta["namespace"], meta["name"],
                    lambda found, made=made: found.update(status={"conditions": [made]}),
                )  # fmt: skip

    def check(self, pod: Object) -> None:
        """Refuse an eviction that a budget does not allow now.

        Raises
        ------
        ApiError
            429, as the API does; 500 if the pod has several budgets.
        """
        if pod["status"]["phase"] != "Running" or "deletionTimestamp" in pod["metadata"]:
            return
        budgets = [
            budget
            for budget in self._store.list(BUDGETS, pod["metadata"]["namespace"])[0]
            if any(found["metadata"]["uid"] == pod["metadata"]["uid"] for found in self._pods(budget))
        ]
        if len(budgets) > 1:
            raise ApiError(
                500, "InternalError", "This pod has more than one PodDisruptionBudget, which the eviction subresource "
                "does not support.",
            )  # fmt: skip
        for budget in budgets:
            if not is_healthy(pod) and budget["spec"].get("unhealthyPodEvictionPolicy") == "AlwaysAllow":
                continue
            if not self._allows(budget, self._pods(budget)):
                raise ApiError(
                    429, "TooManyRequests", "Cannot evict pod as it would violate the pod's disruption budget."
                )

    def _allows(self, budget: Object, pods: list[Object]) -> bool:
        """Return True if one of a budget's pods may be evicted."""
        expected = self._expected.get(budget["metadata"]["uid"])
        if expected is None or is_uncountable(budget, pods):  # its controller has not seen it yet, or cannot count
            return False
        if "minAvailable" in budget["spec"]:
            least = amount(budget["spec"]["minAvailable"], expected)
        else:
            least = expected - amount(budget["spec"].get("maxUnavailable", 0), expected)
        return sum(map(is_healthy, pods)) > least

    def _pods(self, budget: Object) -> list[Object]:
        labels = (budget["spec"].get("selector") or {}).get("matchLabels") or {}
        return [
            pod
            for pod in self._store.list(PODS, budget["metadata"]["namespace"])[0]
            if labels.items() <= (pod["metadata"].get("labels") or {}).items()
            and pod["status"]["phase"] in ("Pending", "Running")
            and "deletionTimestamp" not in pod["metadata"]
        ]


def is_uncountable(budget: Object, pods: list[Object]) -> bool:
    """Return True if a budget depends on the number of pods that a Job expects."""
    owners = [owner for pod in pods for owner in pod["metadata"].get("ownerReferences", [])]
    is_of_job = any(owner["kind"] == "Job" and owner.get("controller") for owner in owners)
    return is_of_job and not isinstance(budget["spec"].get("minAvailable"), int)


def is_healthy(pod: Object) -> bool:
    """Return True if a pod is ready."""
    return any(found["type"] == "Ready" and found["status"] == "True" for found in pod["status"].get("conditions", []))


def amount(given: Any, expected: int) -> int:
    """Return a number of pods, given as such or as a percentage, which is rounded up."""
    text = str(given)
    return math.ceil(int(text[:-1]) * expected / 100) if text.endswith("%") else int(text)
