"""The namespace controller: empties a namespace that is being deleted, its pods first.

Sources in kubernetes/kubernetes: ``pkg/controller/namespace/deletion/namespaced_resources_deleter.go`` (content, then
the finalizer of ``spec``), KEP-5080 (pods before everything else; on by default since 1.33, always since 1.34).
"""

from __future__ import annotations

from fake_cluster.resources import RESOURCES
from fake_cluster.store import Object, Store

NAMESPACES, PODS = RESOURCES["namespaces"], RESOURCES["pods"]


def namespace_object(name: str) -> Object:
    """Return an active namespace."""
    return {
        "apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name},
        "spec": {"finalizers": ["kubernetes"]}, "status": {"phase": "Active"},
    }  # fmt: skip


class NamespaceController:
    """Controller that deletes the content of namespaces under deletion."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def tick(self) -> None:
        """Process every namespace under deletion, once."""
        for namespace in self._store.list(NAMESPACES)[0]:
            if "deletionTimestamp" in namespace["metadata"]:
                self._empty(namespace["metadata"]["name"])

    def _empty(self, name: str) -> None:
        self._store.modify(NAMESPACES, "", name, lambda found: found["status"].update(phase="Terminating"))
        if not self._delete("pods", name) and not sum(
            self._delete(plural, name) for plural, resource in RESOURCES.items() if resource.namespaced
        ):
            self._store.modify(NAMESPACES, "", name, lambda found: found["spec"]["finalizers"].clear())

    def _delete(self, plural: str, namespace: str) -> int:
        """Delete every object of a kind, and return their number."""
        found = self._store.list(RESOURCES[plural], namespace)[0]
        for item in found:
            meta = item["metadata"]
            if "deletionTimestamp" not in meta:
                ended = plural == "pods" and item["status"]["phase"] in ("Succeeded", "Failed")
                self._store.delete(RESOURCES[plural], namespace, meta["name"], "Background", 0 if ended else None)
        return len(found)
