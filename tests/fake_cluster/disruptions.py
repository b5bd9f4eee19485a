"""PodDisruptionBudgets: which pods may be evicted now.

Written from ``pkg/registry/core/pod/storage/eviction.go`` (which evictions are checked) and
``pkg/controller/disruption`` of kubernetes/kubernetes (how many pods are expected and healthy). There the owner of the
pods says how many are expected. No StatefulSet or Deployment runs here, so a budget expects as many pods as it has had
at once.
"""

from __future__ import annotations

import math
from typing import Any

from fake_cluster.resources import RESOURCES
from fake_cluster.store import ApiError, Object, Store

PODS, BUDGETS = RESOURCES["pods"], RESOURCES["poddisruptionbudgets"]


class Disruptions:
    """All budgets of a cluster."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._expected: dict[str, int] = {}

    def tick(self) -> None:
        """Count the pods that each budget expects."""
        for budget in self._store.list(BUDGETS)[0]:
            uid = budget["metadata"]["uid"]
            self._expected[uid] = max(self._expected.get(uid, 0), len(self._pods(budget)))

    def check(self, pod: Object) -> None:
        """Refuse an eviction that a budget does not allow now.

        Raises
        ------
        ApiError
            429, as the API does; 500 if the pod has several budgets.
        """
        if pod["status"]["phase"] != "Running" or "deletionTimestamp" in pod["metadata"]:
            return
        self.tick()
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
            expected = self._expected.get(budget["metadata"]["uid"], 0)
            healthy = sum(map(is_healthy, self._pods(budget)))
            if "minAvailable" in budget["spec"]:
                least = amount(budget["spec"]["minAvailable"], expected)
            else:
                least = expected - amount(budget["spec"].get("maxUnavailable", 0), expected)
            if healthy <= least:
                raise ApiError(
                    429, "TooManyRequests", "Cannot evict pod as it would violate the pod's disruption budget."
                )

    def _pods(self, budget: Object) -> list[Object]:
        labels = (budget["spec"].get("selector") or {}).get("matchLabels") or {}
        return [
            pod
            for pod in self._store.list(PODS, budget["metadata"]["namespace"])[0]
            if labels.items() <= (pod["metadata"].get("labels") or {}).items()
            and pod["status"]["phase"] in ("Pending", "Running")
            and "deletionTimestamp" not in pod["metadata"]
        ]


def is_healthy(pod: Object) -> bool:
    """Return True if a pod is ready."""
    return any(found["type"] == "Ready" and found["status"] == "True" for found in pod["status"].get("conditions", []))


def amount(given: Any, expected: int) -> int:
    """Return a number of pods, given as such or as a percentage, which is rounded up."""
    text = str(given)
    return math.ceil(int(text[:-1]) * expected / 100) if text.endswith("%") else int(text)
