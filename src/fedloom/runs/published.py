"""Runs published in a store: the format of the records, reading and writing.

Below the run's place in the store:

``published/<n>.json``
    Record of one publication: round, incarnation, and the blobs of each file of the run's folder. Records count up from
    1, and each is written with a conditional put: of two aggregators that both resume from record n, only one can write
    n + 1; the other gets an error and stops. Records are never removed.
``blobs/<n>-<sha256>``
    Contents of the files that the last record names, each written for the first record that names it. A blob that a
    record names is never overwritten with other content, and later records name only such blobs, or blobs with their
    own numbers. A file is one blob; a line file, which only grows, is cut into segments (:func:`segments`), so that a
    publication copies only what is new, however long the run is.
``states/``
    The clients' states, which the workers keep there.
``releases/<life>-<n>.json``
    Lines of ``releases.jsonl`` that are not published yet: private answers are recorded before they are requested.
everything else
    The finished run's folder, for people and programs to read. It is complete if it has a ``summary.json``.

The last record of a finished run, written once its folder is there, names the checkpoints in that folder instead of
blobs, so that each is stored once. The bytes of a checkpoint follow from its round, so an aggregator that is replaced
while it copies the folder, and continues copying, does not change them.

A restart needs only the last record and what it names. Publishing is safe because of the order of writes: first the
blobs, then the record, and then the removal of blobs of this and earlier numbers that it does not name. Even an
aggregator that is delayed before this last step and replaced meanwhile removes nothing that its successors need.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import TypeAdapter

from fedloom.core.files import PARTIAL, copy_atomically, opened, storing
from fedloom.core.words import parsed_json
from fedloom.errors import DataError, StorageError, argument
from fedloom.runs.files import AGGREGATOR_LOG, CHECKPOINTS, EXPERIMENT, RELEASES, SUMMARY, RunFiles
from fedloom.storage import Absent, Store, Taken
from fedloom.storage.base import parts_of

VERSION = 2
FIRST = (EXPERIMENT, "published.json")
"""Files to copy first.

An experiment makes a folder a run; ``published.json`` locates the clients' states before any round exists.
"""

FOLDER = "folder"
"""Replaces a blob's number for a file in the finished run's folder."""

SEGMENTS = (1 << 24, 1 << 21, 1 << 18)
"""Sizes of the segments of a line file in bytes, each 8 times the next; the rest at the end is smaller than the last.
"""

STORE_FOLDERS = ("blobs", "published", "releases", "states")
"""Folders in the store that do not belong to the finished run's folder."""

_RECORD = re.compile(r"published/(\d{8})\.json")


@dataclass(frozen=True)
class Record:
    """One publication of a ``round`` by an aggregator process, the ``incarnation``; numbers count from 1.

    ``files`` are the blobs of each file, in order, ``<number>-<sha256 in hex>``, by its path in the run's folder;
    ``folder-<sha256 in hex>`` for a file in the finished run's folder.
    """

    number: int
    round: int
    incarnation: str
    files: Mapping[str, Sequence[str]]

    @property
    def is_finished(self) -> bool:
        """True for the complete publication of a finished run."""
        return any(blobs[0].startswith(FOLDER) for blobs in self.files.values())


_ADAPTER = TypeAdapter(Record)
_BLOB = re.compile(rf"(\d{{8}}|{FOLDER})-[0-9a-f]{{64}}")


class PublishedRun:
    """Published run in its store, and the folder ``path`` that it is copied to, with or without its checkpoints.

    Nothing else writes to the folder between two calls of :meth:`restore`.

    Attributes
    ----------
    record
        Last publication read or written; None if there is none.
    """

    def __init__(self, store: Store, path: Path, *, checkpoints: bool = True) -> None:
        self._store = store
        self._path = path
        self._checkpoints = checkpoints
        self.record: Record | None = None

    @property
    def url(self) -> str:
        """URL of the run's place."""
        return self._store.url

    def published_at(self) -> float:
        """Return the time of the last publication, in seconds since 1970."""
        name = "" if self.record is None else record_name(self.record.number)
        return max((entry.modified for entry in self._store.entries(name) if entry.name == name), default=0.0)

    def restore(self, check: Callable[[Path], None] = lambda folder: None) -> bool:
        """Update the folder to the last publication, copying only new content; return False if nothing is published.

        Published files replace those with the same names, and other checkpoints are removed. First, ``check`` gets a
        folder with the new files; if it raises an error, the run's folder stays unchanged.

        Raise DataError if published files are missing or damaged; StorageError or RefusedError if the store fails or
        denies access, or the folder cannot be written.
        """
        number = self._newest()
        while number and (self.record is None or self.record.number != number):
            try:
                self._copy(self.read(number), check)
            except Absent as error:
                # An aggregator that is still running may have published again, and removed what this record needs.
                failed, number = number, self._newest()
                if number == failed:
                    raise DataError(f"{self.url}: the published run is incomplete: {error}") from error
        return number > 0

    def _newest(self) -> int:
        """Return the number of the last record; 0 if there is none."""
        records = (_RECORD.fullmatch(entry.name) for entry in self._store.entries("published/"))
        return max((int(record[1]) for record in records if record), default=0)

    def read(self, number: int) -> Record:
        """Return a record; raise DataError if it is damaged, or of another version."""
        url = f"{self.url}/{record_name(number)}"
        try:
            facts: dict[str, Any] = parsed_json(self._store.read(record_name(number)))
            if facts.pop("version") != VERSION:
                raise DataError(f"{url} was published by another version of FedLoom", hint="resume with that version")
            record = _ADAPTER.validate_python(facts)
            if record.number != number:
                raise ValueError(f"it has the number {record.number}")
            for name, blobs in record.files.items():
                parts_of(name)  # it is used as a path to write to, so it must lie in the run's folder
                if not blobs or not all(map(_BLOB.fullmatch, blobs)):
                    raise ValueError(f"invalid blobs of {name}: {blobs}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{url} is not a record of a published run ({error})") from error
        return record

    def _copy(self, record: Record, check: Callable[[Path], None]) -> None:
        """Update the folder to a record, once all new files are downloaded and checked."""
        old_files = {} if self.record is None else self.record.files
        with tempfile.TemporaryDirectory(prefix="fedloom-run-") as temporary:
            staging, part = Path(temporary) / "run", Path(temporary) / "part"
            staging.mkdir()
            changed_files = []
            for name, blobs in record.files.items():
                old_blobs = list(map(blob_digest, old_files.get(name, ())))
                is_wanted = self._checkpoints or not name.startswith(f"{CHECKPOINTS}/")
                if name == AGGREGATOR_LOG and self.record is None and (self._path / name).exists():
                    is_wanted = False  # this folder's log goes on after what was published of it
                if is_wanted and old_blobs != list(map(blob_digest, blobs)):
                    self._stage(name, old_blobs, blobs, staging / name, part)
                    changed_files.append(name)
            check(staging)
            self.record = None  # if copying fails, the folder holds files of two records
            stale = {f"{CHECKPOINTS}/{path.name}" for path in self._path.glob(f"{CHECKPOINTS}/*.safetensors")}
            for name in (stale | set(old_files)) - set(record.files):
                (self._path / name).unlink(missing_ok=True)
            for name in sorted(changed_files, key=lambda name: (name not in FIRST, name)):  # we may be killed half-way
                path = self._path / name
                with storing(path):
                    path.parent.mkdir(parents=True, exist_ok=True)
                copy_atomically(staging / name, path)
        self.record = record

    def _stage(self, name: str, old_blobs: Sequence[str], blobs: Sequence[str], path: Path, part: Path) -> None:
        """Write a file of a record to ``path``; the first blobs are taken from the folder if it has them."""
        have = sum(
            1 for _ in takewhile(lambda pair: pair[0] == blob_digest(pair[1]), zip(old_blobs, blobs, strict=False))
        )
        with storing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            if have:
                shutil.copyfile(self._path / name, path)
                os.truncate(path, sum(length for _, length in segments(path.stat().st_size)[:have]))
        for blob in blobs[have:]:
            source = name if blob.startswith(FOLDER) else f"blobs/{blob}"
            self._store.download(source, part)
            content = part.read_bytes()
            digest = hashlib.sha256(content).hexdigest()
            if digest != blob_digest(blob):
                raise DataError(f"{self.url}/{source} is damaged: its SHA-256 is {digest}.")
            with storing(path), path.open("ab") as whole:
                whole.write(content)


def segments(size: int) -> list[tuple[int, int]]:
    """Return the segments of a line file as (start, length), the largest first.

    A file of 1 GB has 64 to 79 segments. As the file grows, a byte is in a segment of each length once, so it is copied
    at most four times, except for the last bytes, fewer than 256 KiB.
    """
    cuts, begin = [], 0
    for length in SEGMENTS:
        while size - begin >= length:
            cuts.append((begin, length))
            begin += length
    return [*cuts, (begin, size - begin)] if size > begin or not cuts else cuts


def record_name(number: int) -> str:
    """Return the name of a record in the store."""
    return f"published/{number:08d}.json"


def blob_digest(blob: str) -> str:
    """Return the SHA-256 in a blob's name."""
    return blob.partition("-")[2]


log = logging.getLogger("fedloom.published")

LINES = ".jsonl"
"""Suffix of line files."""


class Publisher(PublishedRun):
    """Publisher of a run from its folder to a store of its own, for the lifetime of one aggregator process.

    ``incarnation`` is the id of that process.
    """

    def __init__(self, folder: RunFiles, store: Store, incarnation: str) -> None:
        super().__init__(store, folder.path)
        self._folder = folder
        self._incarnation = incarnation
        self._blobs: dict[str, str] = {}  # existing blobs, by sha256
        self._segments: dict[str, tuple[int, dict[tuple[int, int], str]]] = {}  # inode, digest by start and length
        self._unpublished: list[str] = []  # objects below releases/ whose lines this folder has

    @property
    def finished(self) -> bool:
        """True if the last publication is the complete one of a finished run."""
        return self.record is not None and self.record.is_finished

    def restore(self, check: Callable[[Path], None] = lambda folder: None) -> bool:
        """Copy the files of the last publication into the run's folder, to resume it; see :class:`PublishedRun`."""
        if not super().restore(check):
            return False
        assert self.record is not None
        self.gather_releases()
        self._blobs = _by_digest(self.record)
        log.info("resuming round %d of %s", self.record.round, self.url)
        return True

    def publish(self, round: int) -> None:
        """Publish the run as of a durable round.

        Raise StorageError if another aggregator has published since this one read the run, or the store fails;
        RefusedError if the store denies access.
        """
        number = 1 if self.record is None else self.record.number + 1
        names = list(self._unpublished)
        files = {}
        for name in self._needed():
            blobs = []
            for digest, content in self._contents(name):
                if digest not in self._blobs:
                    self._store.write(f"blobs/{number:08d}-{digest}", content())
                    self._blobs[digest] = f"{number:08d}-{digest}"
                blobs.append(self._blobs[digest])
            files[name] = blobs
        self._record(Record(number, round, self._incarnation, files))
        self._store.remove(names)
        del self._unpublished[: len(names)]
        log.info("published round %d at %s", round, self.url)

    def keep_release(self, line: Mapping[str, Any]) -> None:
        """Store a line of the folder's ``releases.jsonl`` until it is published; callable from any thread.

        Raise StorageError or RefusedError if the store fails, or denies access.
        """
        name = _release(line)
        self._store.write(name, json.dumps(line).encode())
        self._unpublished.append(name)

    def gather_releases(self) -> None:
        """Append to ``releases.jsonl`` the lines that aggregators have stored but not published."""
        names = [entry.name for entry in self._store.entries("releases/") if entry.name not in self._unpublished]
        own_releases = {_release(line) for line in self._folder.objects(RELEASES)} if names else set()
        for name in names:
            if name not in own_releases:
                self._folder.append(RELEASES, parsed_json(self._store.read(name)))
            self._unpublished.append(name)

    def finish(self) -> None:
        """Publish the finished run's folder under the names of its files.

        Raise StorageError if another aggregator has published since, or the store fails; RefusedError if the store
        denies access.
        """
        # Checkpoints of the run before it was resumed. Listed first, to exclude what a successor writes after our
        # record.
        names = [entry.name for entry in self._store.entries(f"{CHECKPOINTS}/")]
        # Publishing first proves that the run is ours before we overwrite files that others may read.
        self.publish(self.record.round if self.record is not None else 0)
        assert self.record is not None
        self._store.remove([SUMMARY, *(name for name in names if name not in self.record.files)])
        for name in sorted(self._everything(), key=lambda name: (name == SUMMARY, name)):
            self._store.upload(name, self._path / name)
        files = {
            name: [f"{FOLDER}-{blob_digest(blob)}" for blob in blobs] if name.startswith(CHECKPOINTS) else blobs
            for name, blobs in self.record.files.items()
        }
        self._record(Record(self.record.number + 1, self.record.round, self._incarnation, files))
        log.info("published the finished run at %s", self.url)

    def check_newest(self) -> None:
        """Raise StorageError if another aggregator has published since this one read or published the run.

        Client states that only this one needs are then gone, and every round fails.
        """
        number = self._newest()
        if number > (0 if self.record is None else self.record.number):
            raise self._overtaken(number)

    def _overtaken(self, number: int) -> StorageError:
        other = self.read(number)
        return StorageError(
            f"{self.url}: another aggregator ({other.incarnation[:12]}) has published round {other.round} meanwhile, "
            f"so this one ({self._incarnation[:12]}) stops.",
            hint=f"let one aggregator at a time work on a run; {argument('resume')} continues from the published state",
        )

    def log_files(self) -> None:
        """Copy the current logs, which document why a run ended."""
        for name in self._everything():
            if name.startswith("logs/"):
                self._store.upload(name, self._path / name)

    def _record(self, record: Record) -> None:
        """Write the next record, and remove blobs that are no longer needed.

        Raise StorageError if another aggregator has written that record.
        """
        text = json.dumps({"version": VERSION, **asdict(record)}, indent=2, sort_keys=True) + "\n"
        try:
            self._store.create(record_name(record.number), text.encode())
        except Taken:
            raise self._overtaken(self._newest()) from None
        self.record, self._blobs = record, _by_digest(record)
        named = {blob for blobs in record.files.values() for blob in blobs}
        blobs = (entry.name.removeprefix("blobs/") for entry in self._store.entries("blobs/"))
        last = f"{record.number + 1:08d}"
        self._store.remove([f"blobs/{blob}" for blob in blobs if blob < last and blob not in named])

    def _needed(self) -> list[str]:
        """Return the files that a resumed run may read or continue: checkpoints, top-level files and its log."""
        return [
            name
            for name in self._everything()
            if "/" not in name
            or name == AGGREGATOR_LOG
            or (name.startswith(f"{CHECKPOINTS}/") and name.endswith(".safetensors"))
        ]

    def _everything(self) -> list[str]:
        """Return all complete files of the folder, except those of the workers."""
        root = self._path
        files = (path.relative_to(root) for path in root.rglob("*") if path.is_file() and path.suffix != PARTIAL)
        return sorted(path.as_posix() for path in files if path.parts[0] not in STORE_FOLDERS)

    def _contents(self, name: str) -> Iterator[tuple[str, Callable[[], bytes]]]:
        """Yield the digest and the content of each blob of a file; known segments of a line file are not read again."""
        with opened(self._path / name) as file:
            if not name.endswith(LINES):
                content = file.read()
                yield hashlib.sha256(content).hexdigest(), lambda: content
                return
            status = os.fstat(file.fileno())
            inode, known = self._segments.get(name, (0, {}))
            last = next(reversed(known), (0, 0))
            if inode != status.st_ino or sum(last) > status.st_size or known.get(last) != _digest_of(file, *last):
                known = {}  # the file has not only grown
            digests = {end: known.get(end) or _digest_of(file, *end) for end in segments(status.st_size)}
            self._segments[name] = status.st_ino, digests
            for end, digest in digests.items():
                yield digest, partial(_part, file, *end)


def _part(file: BinaryIO, begin: int, length: int) -> bytes:
    file.seek(begin)
    return file.read(length)


def _digest_of(file: BinaryIO, begin: int, length: int) -> str:
    return hashlib.sha256(_part(file, begin, length)).hexdigest()


def _release(line: Mapping[str, Any]) -> str:
    return f"releases/{line['life']}-{line['number']:08d}.json"


def _by_digest(record: Record) -> dict[str, str]:
    return {blob_digest(blob): blob for blobs in record.files.values() for blob in blobs if not blob.startswith(FOLDER)}
