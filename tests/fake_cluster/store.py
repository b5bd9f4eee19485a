"""Store of the cluster: versioned objects, their changes, and garbage collection by owner."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from fake_cluster.resources import RESOURCES, Resource, suffix

Object = dict[str, Any]
Key = tuple[str, str, str]
"""Plural, namespace, name."""

FOREGROUND = "foregroundDeletion"


class ApiError(Exception):
    """Failure of the API, sent as a ``Status`` body."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason, self.message = code, reason, message

    def status(self) -> Object:
        """Return the body."""
        return {
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.message, "reason": self.reason, "code": self.code,
        }  # fmt: skip


@dataclass(frozen=True)
class Change:
    """One entry of the history that watches read."""

    version: int
    type: str
    resource: str
    object: Object
    before: Object | None


def clone(item: Any) -> Any:
    """Copy an object of the API, which is JSON, several times as fast as ``copy.deepcopy``."""
    if isinstance(item, dict):
        return {key: clone(value) for key, value in item.items()}
    return [clone(value) for value in item] if isinstance(item, list) else item


def now() -> str:
    """Return the time in the API's format."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds_since(stamp: str) -> float:
    """Return the seconds since a time in the API's format."""
    return time.time() - datetime.strptime(stamp, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()


class Store:
    """All objects; every method is atomic, and ``changed`` is notified of each change.

    Returned objects are copies; entries of the history are never changed.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.compacted = 0
        """Versions before this are forgotten: a watch from one is answered 410."""
        self._objects: dict[Key, Object] = {}
        self._history: list[Change] = []
        self._version = 1
        self.deletions = 0

    def create(self, resource: Resource, given: Object) -> Object:
        """Add an object.

        Raises
        ------
        ApiError
            409 if the name exists.
        """
        with self.changed:
            made = clone(given)
            meta = made["metadata"]
            key = (resource.plural, meta.get("namespace", ""), meta["name"])
            if key in self._objects:
                raise ApiError(409, "AlreadyExists", f'{resource.qualified} "{meta["name"]}" already exists')
            meta |= {"uid": str(uuid.uuid4()), "creationTimestamp": now(), "generation": 1}
            self._put(key, "ADDED", made, None)
            return clone(made)

    def get(self, resource: Resource, namespace: str, name: str) -> Object:
        """Return one object.

        Raises
        ------
        ApiError
            404 if it does not exist.
        """
        with self.changed:
            try:
                return clone(self._objects[resource.plural, namespace, name])
            except KeyError:
                raise ApiError(404, "NotFound", f'{resource.qualified} "{name}" not found') from None

    def list(self, resource: Resource, namespace: str = "") -> tuple[list[Object], int]:
        """Return every object of a kind, oldest first, and the version of that state."""
        with self.changed:
            found = [
                clone(item)
                for (plural, where, _), item in self._objects.items()
                if plural == resource.plural and namespace in ("", where)
            ]
            return found, self._version

    def modify(
        self, resource: Resource, namespace: str, name: str, change: Callable[[Object], object], uid: str | None = None
    ) -> Object:
        """Let a function change an object; remove it if that was the last finalizer of one under deletion.

        Raises
        ------
        ApiError
            404 if it does not exist (or has another ``uid``).
        """
        with self.changed:
            key = (resource.plural, namespace, name)
            before = self._objects.get(key)
            if before is None or uid not in (None, before["metadata"]["uid"]):
                raise ApiError(404, "NotFound", f'{resource.qualified} "{name}" not found')
            after = clone(before)
            change(after)
            if after != before:
                if after.get("spec") != before.get("spec"):
                    after["metadata"]["generation"] += 1
                gone = _gone(after)
                self._put(key, "DELETED" if gone else "MODIFIED", after, before)
                if gone:
                    del self._objects[key]
                    self.deletions += 1
            return clone(after)

    def delete(
        self, resource: Resource, namespace: str, name: str, propagation: str | None = None, grace_s: int | None = None,
        uid: str | None = None,
    ) -> Object:  # fmt: skip
        """Begin to delete an object and return it; it is removed once no finalizer holds it.

        Raises
        ------
        ApiError
            404 if it does not exist, 409 if it has another ``uid``.
        """
        with self.changed:
            current = self.get(resource, namespace, name)
            meta = current["metadata"]
            if uid not in (None, meta["uid"]):
                raise ApiError(
                    409,
                    "Conflict",
                    f"the UID in the precondition ({uid}) does not match the UID in record ({meta['uid']})",
                )

            def begin(item: Object) -> None:
                found = item["metadata"]
                found.setdefault("deletionTimestamp", now())
                if resource.plural == "pods":
                    wanted = item["spec"]["terminationGracePeriodSeconds"] if grace_s is None else grace_s
                    found["deletionGracePeriodSeconds"] = min(wanted, found.get("deletionGracePeriodSeconds", wanted))
                if propagation == "Foreground" and FOREGROUND not in found.get("finalizers", []):
                    found.setdefault("finalizers", []).append(FOREGROUND)

            return self.modify(resource, namespace, name, begin)

    def collect_garbage(self) -> None:
        """Delete objects that have lost their owners, and owners that waited for their dependents."""
        with self.changed:
            alive = {item["metadata"]["uid"]: item for item in self._objects.values()}
            owned: dict[str, list[Object]] = {}
            for (plural, namespace, name), item in list(self._objects.items()):
                meta = item["metadata"]
                references = meta.get("ownerReferences", [])
                for reference in references:
                    owned.setdefault(reference["uid"], []).append(item)
                owners = [alive.get(reference["uid"]) for reference in references]
                leaving = [owner for owner in owners if owner and FOREGROUND in owner["metadata"].get("finalizers", [])]
                if owners and "deletionTimestamp" not in meta and (not any(owners) or leaving):
                    self.delete(RESOURCES[plural], namespace, name, "Foreground" if leaving else "Background")
            for (plural, namespace, name), item in list(self._objects.items()):
                meta = item["metadata"]
                if FOREGROUND in meta.get("finalizers", []) and not owned.get(meta["uid"]):
                    self.modify(
                        RESOURCES[plural],
                        namespace,
                        name,
                        lambda found: found["metadata"]["finalizers"].remove(FOREGROUND),
                    )

    def compact(self) -> int:
        """Drop the history, as etcd does every few minutes; return the current version."""
        with self.changed:
            self._version += 1
            self._history.clear()
            self.compacted = self._version
            self.changed.notify_all()
            return self._version

    def since(self, version: int, resource: Resource) -> Iterator[Change]:
        """Return the changes after a version."""
        with self.changed:
            return iter([c for c in self._history if c.version > version and c.resource == resource.plural])

    def _put(self, key: Key, kind: str, item: Object, before: Object | None) -> None:
        self._version += 1
        item["metadata"]["resourceVersion"] = str(self._version)
        self._objects[key] = item
        self._history.append(Change(self._version, kind, key[0], item, before))
        self.changed.notify_all()


def emit(store: Store, about: Object, kind: str, reason: str, message: str) -> None:
    """Write an Event about a pod or a Job."""
    meta, stamp = about["metadata"], now()
    store.create(
        RESOURCES["events"],
        {
            "apiVersion": "v1", "kind": "Event", "type": kind, "reason": reason, "message": message, "count": 1,
            "metadata": {"name": f"{meta['name']}.{suffix()}{suffix()}", "namespace": meta["namespace"]},
            "firstTimestamp": stamp, "lastTimestamp": stamp, "source": {"component": "fake"},
            "involvedObject": {"kind": about["kind"], **{k: meta[k] for k in ("namespace", "name", "uid")}},
        },
    )  # fmt: skip


def _gone(item: Object) -> bool:
    """Return True if no finalizer holds back the deletion of an object."""
    meta = item["metadata"]
    held = meta.get("finalizers") or meta.get("deletionGracePeriodSeconds") or item.get("spec", {}).get("finalizers")
    return "deletionTimestamp" in meta and not held
