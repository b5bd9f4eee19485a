"""Published partition in a store, from which workers fetch one client at a time."""

from __future__ import annotations

import logging
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fedloom.core.files import make_private, write_atomically
from fedloom.data.assignment import PartitionSettings
from fedloom.data.folders import check_digest
from fedloom.data.manifest import ClientEntry, Manifest, read_manifest, read_shard, shard_path
from fedloom.errors import DataError
from fedloom.storage import Absent, Store
from fedloom.storage.folder import FolderStore

log = logging.getLogger("fedloom.data")

MANIFEST = "partition.json"
AT_ONCE = 4
"""Number of shards uploaded in parallel: they are small, and each upload waits for a response."""


def publish(folder: Path, store: Store) -> None:
    """Copy a partition to a store that is for this partition only, best named by its ``fingerprint``.

    Shards that exist are kept, so that an interrupted upload resumes. The manifest is written last, so that a partition
    with a manifest is complete. An existing manifest is rewritten to refresh its age, because old manifests mark unused
    partitions.

    Raise DataError if the partition is missing or damaged, or the store has another; StorageError or RefusedError if
    the store fails or denies access.
    """
    manifest = read_manifest(folder)
    try:
        stored = store.read(MANIFEST)
    except Absent:
        pass
    else:
        if stored == manifest.to_json().encode():
            store.write(MANIFEST, stored)  # refreshes its age, so that it is not removed now
            return
        raise DataError(
            f"{store.url} holds another partition than {folder}",
            hint="publish it at another URL, such as one with its fingerprint",
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


def is_published(store: Store, dataset: str, settings: PartitionSettings) -> Manifest | None:
    """Return the manifest of a complete partition in its store; None if there is none, or its settings differ.

    A caller that finds it does not need the data set: a restarted aggregator must not depend on a download server. The
    age of the manifest is refreshed, as in :func:`publish`.

    Raise DataError if the stored text is not a manifest; StorageError or RefusedError if the store fails or denies
    access.
    """
    try:
        stored = store.read(MANIFEST)
    except Absent:
        return None
    manifest = Manifest.from_json(stored.decode(), source=f"{store.url}/{MANIFEST}")
    made_with = (manifest.seed, manifest.held_out_fraction, manifest.validation_fraction, manifest.measured_on)
    expected = (settings.seed, settings.held_out_fraction, settings.validation_fraction, settings.normalization)
    if made_with != expected or (manifest.dataset, manifest.scheme) != (
        dataset,
        settings.scheme.model_dump(mode="json"),
    ):
        return None
    store.write(MANIFEST, stored)
    return manifest


class Remote:
    """Published partition, as read by workers that serve some of its clients."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    def manifest(self) -> Manifest:
        """Fetch the manifest; raise DataError if it is missing or damaged."""
        url = f"{self._store.url}/{MANIFEST}"
        try:
            return Manifest.from_json(self._store.read(MANIFEST), source=url)
        except Absent:
            raise DataError(f"{url} has no partition manifest", hint="publish the partition there first") from None

    def cached(self, manifest: Manifest, cache: Path | None) -> Path:
        """Create the folder for fetched files, and put the manifest into it.

        Parameters
        ----------
        cache
            Parent folder; the new folder is named by the partition's fingerprint. None: a temporary folder that is
            removed with this object.
        """
        if cache is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="fedloom-shards-")
            cache = Path(self._temporary.name)
        folder = cache / manifest.fingerprint[:12]
        FolderStore(folder).write(MANIFEST, manifest.to_json().encode())
        make_private(folder / "shards")
        return folder

    def shard(self, folder: Path, entry: ClientEntry) -> bytes:
        """Return the bytes of a client's shard, from the folder or else the store, checked against their hash.

        Raise DataError if the shard is missing or damaged in the store; StorageError or RefusedError if the store fails
        or denies access.
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
                f"the shard of client {entry.id} is missing: {self._store.url}/{name} does not exist",
                hint=f"remove {self._store.url}/{MANIFEST}, and publish the partition again",
            ) from None
        remedy = f"remove it and {self._store.url}/{MANIFEST}, and publish the partition again"
        check_digest(content, entry.sha256, f"the shard {self._store.url}/{name}", remedy)
        # No fsync: a shard truncated by a power cut does not match its hash, and is fetched again.
        write_atomically(path, content, durably=False, private=True)
        return content


def _name(entry: ClientEntry) -> str:
    return f"shards/{entry.id}.safetensors"
