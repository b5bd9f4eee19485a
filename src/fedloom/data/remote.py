"""A partition in a store: published once, and fetched one client at a time by those who serve the client."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fedloom.data.manifest import ClientEntry, Manifest, check_shard, read_manifest, read_shard, shard_path
from fedloom.errors import DataError
from fedloom.storage import Absent, Store
from fedloom.storage.folder import FolderStore, make_private, write_atomically

log = logging.getLogger("fedloom.data")

MANIFEST = "partition.json"
AT_ONCE = 4
"""Shards that are uploaded at the same time: they are small, and each waits for an answer."""


def publish(folder: Path, store: Store) -> None:
    """Copy a partition to a store.

    Shards that are there already are left, so that what was interrupted goes on; the manifest comes last, so that what
    has one is whole. It is written again where it is there: age says which partitions nobody needs.

    Parameters
    ----------
    folder
        The partition on disk.
    store
        For this partition alone: its place is best named by the manifest's ``fingerprint``.

    Raises
    ------
    DataError
        If the partition is missing or damaged, or the store has another.
    StorageError, RefusedError
        If the store fails, or refuses us.
    """
    manifest = read_manifest(folder)
    try:
        there = store.read(MANIFEST)
    except Absent:
        pass
    else:
        if there == manifest.to_json().encode():
            store.write(MANIFEST, there)  # as new, so that nobody removes it for its age just now
            return
        raise DataError(
            f"{store.url}: found another partition there than that of {folder}",
            hint="publish it elsewhere, such as below its fingerprint",
        )
    sizes = {entry.name: entry.size for entry in store.entries("shards/")}

    def copy(entry: ClientEntry) -> None:
        content = read_shard(folder, entry)
        if sizes.get(_name(entry)) != len(content):
            store.write(_name(entry), content)

    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="shard") as pool:
        for done in [pool.submit(copy, entry) for entry in manifest.clients]:
            try:
                done.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    store.write(MANIFEST, manifest.to_json().encode())
    log.info("published the partition of %s (%d clients) at %s", manifest.dataset, len(manifest.clients), store.url)


def is_published(
    store: Store, dataset: str, scheme: Mapping[str, Any], seed: int, unseen_fraction: float, validation_fraction: float
) -> Manifest | None:
    """Return the manifest of a partition that is published already, whole; None if none is, or another.

    Who finds it needs no data set to go on: an aggregator that starts anew must not depend on whoever offers one for
    download. It is published anew as to its age, as by :func:`publish`.

    Parameters
    ----------
    store
        For this partition alone.
    dataset, scheme, seed, unseen_fraction, validation_fraction
        What it would be made with; ``scheme`` as JSON.

    Raises
    ------
    DataError
        If what is there is no manifest.
    StorageError, RefusedError
        If the store fails, or refuses us.
    """
    try:
        there = store.read(MANIFEST)
    except Absent:
        return None
    found = Manifest.from_json(there.decode(), where=f"{store.url}/{MANIFEST}")
    made_with = found.dataset, found.scheme, found.seed, found.unseen_fraction, found.validation_fraction
    if made_with != (dataset, scheme, seed, float(unseen_fraction), float(validation_fraction)):
        return None
    store.write(MANIFEST, there)
    return found


class Remote:
    """A published partition, as whoever serves some of its clients sees it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    def manifest(self) -> Manifest:
        """Fetch the manifest.

        Raises
        ------
        DataError
            If it is missing or damaged.
        """
        where = f"{self._store.url}/{MANIFEST}"
        try:
            return Manifest.from_json(self._store.read(MANIFEST), where=where)
        except Absent:
            raise DataError(
                f"no partition here: expected its manifest in {where}", hint="publish the partition there first"
            ) from None

    def cached(self, manifest: Manifest, cache: Path | None) -> Path:
        """Make the folder for what is fetched, and put the manifest into it.

        Parameters
        ----------
        cache
            Where to make it, under the partition's fingerprint; None for a temporary one that goes with this object.
        """
        if cache is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="fedloom-shards-")
            cache = Path(self._temporary.name)
        folder = cache / manifest.fingerprint[:12]
        FolderStore(folder).write(MANIFEST, manifest.to_json().encode())
        make_private(folder / "shards")
        return folder

    def shard(self, folder: Path, entry: ClientEntry) -> bytes:
        """Return the bytes of a client's shard, from the folder or else the store, compared with their hash.

        Raises
        ------
        DataError
            If it is missing in the store, or damaged there.
        StorageError, RefusedError
            If the store fails, or refuses us.
        """
        path = shard_path(folder, entry.id)
        if path.exists():
            try:
                return read_shard(folder, entry)
            except DataError as error:
                log.warning("%s; fetching it again", str(error).splitlines()[0])
        name = _name(entry)
        try:
            content = self._store.read(name)
        except Absent:
            raise DataError(
                f"the shard of client {entry.id} is missing: expected {self._store.url}/{name}",
                hint=f"remove {self._store.url}/{MANIFEST}, and publish the partition again",
            ) from None
        again = f"remove it and {self._store.url}/{MANIFEST}, and publish the partition again"
        check_shard(content, entry, f"{self._store.url}/{name}", again)
        # Without waiting for the disk: what a power cut leaves short does not have its hash, and is fetched again.
        write_atomically(path, content, durably=False, private=True)
        return content


def _name(entry: ClientEntry) -> str:
    return f"shards/{entry.id}.safetensors"
