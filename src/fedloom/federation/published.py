"""Publication of a run in a store while it runs, so that an aggregator elsewhere can resume it.

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

A restart needs only the last record and what it names. This is safe because of the order of writes: first the blobs,
then the record, and then the removal of blobs of this and earlier numbers that it does not name. Even an aggregator
that is delayed before this last step and replaced meanwhile removes nothing that its successors need.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import TypeAdapter

from fedloom.errors import DataError, StorageError, argument
from fedloom.federation.folder import RELEASES, RunFolder
from fedloom.storage import Absent, Store, Taken
from fedloom.storage.base import parts_of
from fedloom.storage.folder import PARTIAL, copy_atomically, opened, storing
from fedloom.words import parsed_json

log = logging.getLogger("fedloom.published")

VERSION = 2
PART = ".part"
SUMMARY = "summary.json"
FIRST = ("experiment.yaml", "published.json")
"""Files to copy first.

An experiment makes a folder a run; ``published.json`` locates the clients' states before any round exists.
"""

CHECKPOINTS = "checkpoints/"
FOLDER = "folder"
"""Replaces a blob's number for a file in the finished run's folder."""

LINES = ".jsonl"
"""Suffix of line files."""

SEGMENTS = (1 << 24, 1 << 21, 1 << 18)
"""Sizes of the segments of a line file in bytes, each 8 times the next; the rest at the end is smaller than the last.
"""

OF_ITS_OWN = ("blobs", "published", "releases", "states")
"""Folders in the store that do not belong to the finished run's folder."""

_RECORD = re.compile(r"published/(\d{8})\.json")


@dataclass(frozen=True)
class Record:
    """One publication.

    Attributes
    ----------
    number
        Number of the record, counting from 1.
    round
        Last round that it holds.
    incarnation
        Id of the aggregator process that wrote it.
    files
        Blobs of each file, in order, ``<number>-<sha256 in hex>``, by the file's path in the run's folder;
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


class Look:
    """Local mirror of a published run, without its checkpoints; each refresh fetches only what is new.

    Parameters
    ----------
    store
        The run's place in the store.
    folder
        Folder for the files, used by nothing else.
    """

    def __init__(self, store: Store, folder: Path) -> None:
        self._store, self.folder = store, RunFolder(folder)
        self._source = Published(self.folder, store, "")
        self._blobs = folder / "blobs"
        self._last: Record | None = None

    @property
    def url(self) -> str:
        """URL of the run's place."""
        return self._store.url

    def refresh(self) -> Record | None:
        """Update the folder to the last publication, and return its record; None if nothing is published.

        Raises
        ------
        DataError
            If published files are missing or damaged.
        StorageError, RefusedError
            If the store fails, or denies access.
        """
        record = self._source.latest()
        while record is not None and record != self._last:
            try:
                for name, blobs in record.files.items():
                    if not name.startswith(CHECKPOINTS):
                        self._bring(name, blobs)
            except Absent as error:
                newer = self._source.latest()  # a running aggregator has removed what this record needs
                if newer is None or newer.number == record.number:
                    raise DataError(f"{self._store.url}: the published run is not whole: {error}") from error
                record = newer
            else:
                self._last = record
        return record

    def published_at(self, record: Record) -> float:
        """Return when a record was written, in seconds since 1970."""
        name = _name(record.number)
        return max((entry.modified for entry in self._store.entries(name) if entry.name == name), default=0.0)

    def _bring(self, name: str, blobs: Sequence[str]) -> None:
        before = () if self._last is None else self._last.files.get(name, ())
        if list(before) == list(blobs):
            return
        with storing(self.folder.path / name):
            self._blobs.mkdir(parents=True, exist_ok=True)
            for blob in blobs:
                if not (self._blobs / _digest(blob)).exists():
                    self._store.download(f"blobs/{blob}", self._blobs / _digest(blob))
            content = b"".join((self._blobs / _digest(blob)).read_bytes() for blob in blobs)
            for blob in set(map(_digest, before)) - set(map(_digest, blobs)):
                (self._blobs / blob).unlink(missing_ok=True)
            path = self.folder.path / name
            if path.exists() and not content.startswith(path.read_bytes()):
                path.unlink()  # replaced, not grown: readers that continue from an offset must notice
            path.write_bytes(content)


class Published:
    """A run's place in a store, for the lifetime of one aggregator.

    Parameters
    ----------
    folder
        The run's folder on this machine.
    store
        Store of this run only.
    incarnation
        Id of this aggregator process.
    """

    def __init__(self, folder: RunFolder, store: Store, incarnation: str) -> None:
        self._folder = folder
        self._store = store
        self._incarnation = incarnation
        self._last: Record | None = None
        self._blobs: dict[str, str] = {}  # existing blobs, by sha256
        self._segments: dict[str, Grown] = {}
        self._told: list[str] = []  # objects below releases/ whose lines this folder has

    @property
    def finished(self) -> bool:
        """True if the last publication read or written is the complete one of a finished run."""
        return self._last is not None and self._last.is_finished

    @property
    def is_behind(self) -> bool:
        """True if the store may have a newer publication than the last one read or written."""
        return self._last is None or self._newest() != self._last.number

    def restore(self, check: Callable[[RunFolder], None] = lambda found: None) -> bool:
        """Copy the files of the last publication into the run's folder.

        They replace files with the same names, and other checkpoints are removed.

        Parameters
        ----------
        check
            Checks the published files, in a folder of their own, before the run's folder is changed; its errors leave
            that folder unchanged.

        Returns
        -------
        bool
            False if nothing has been published; the folder is then unchanged.

        Raises
        ------
        DataError
            If published files are missing or damaged.
        StorageError, RefusedError
            If the store fails, or denies access; or the folder cannot be written.
        """
        record = self.latest()
        while record is not None:
            try:
                self._fetch(record, check)
            except Absent as error:
                # An aggregator that is still running may have published again, and removed what this record needs.
                newer = self.latest()
                if newer is None or newer.number == record.number:
                    raise DataError(f"{self._store.url}: the published run is not whole: {error}") from error
                record = newer
            else:
                break
        if record is None:
            return False
        self.gather_releases()
        self._last, self._blobs = record, _by_digest(record)
        log.info("resuming round %d of %s", record.round, self._store.url)
        return True

    def publish(self, round: int) -> None:
        """Publish the run as of a durable round.

        Raises
        ------
        StorageError
            If another aggregator has published since this one read the run, or the store fails.
        RefusedError
            If the store denies access.
        """
        number = 1 if self._last is None else self._last.number + 1
        told = list(self._told)
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
        self._store.remove(told)
        del self._told[: len(told)]
        log.info("published round %d at %s", round, self._store.url)

    def keep_release(self, line: Mapping[str, Any]) -> None:
        """Store a line of the folder's ``releases.jsonl`` until it is published; callable from any thread.

        Raises
        ------
        StorageError, RefusedError
            If the store fails, or denies access.
        """
        name = _release(line)
        self._store.write(name, json.dumps(line).encode())
        self._told.append(name)

    def gather_releases(self) -> None:
        """Append to ``releases.jsonl`` the lines that aggregators have stored but not published."""
        there = [entry.name for entry in self._store.entries("releases/") if entry.name not in self._told]
        known = {_release(line) for line in self._folder.objects(RELEASES)} if there else set()
        for name in there:
            if name not in known:
                self._folder.append(RELEASES, parsed_json(self._store.read(name)))
            self._told.append(name)

    def finish(self) -> None:
        """Publish the finished run's folder under the names of its files.

        Raises
        ------
        StorageError
            If another aggregator has published since, or the store fails.
        RefusedError
            If the store denies access.
        """
        # Checkpoints of the run before it was resumed. Listed first, to exclude what a successor writes after our
        # record.
        there = [entry.name for entry in self._store.entries(CHECKPOINTS)]
        # Publishing first proves that the run is ours before we overwrite files that others may read.
        self.publish(self._last.round if self._last is not None else 0)
        assert self._last is not None
        self._store.remove([SUMMARY, *(name for name in there if name not in self._last.files)])
        for name in sorted(self._everything(), key=_summary_last):
            self._store.upload(name, self._folder.path / name)
        files = {
            name: [f"{FOLDER}-{_digest(blob)}" for blob in blobs] if name.startswith(CHECKPOINTS) else blobs
            for name, blobs in self._last.files.items()
        }
        self._record(Record(self._last.number + 1, self._last.round, self._incarnation, files))
        log.info("published the finished run at %s", self._store.url)

    def log_files(self) -> None:
        """Copy the current logs, to document why a run ended."""
        for name in self._everything():
            if name.startswith("logs/"):
                self._store.upload(name, self._folder.path / name)

    # --- records ------------------------------------------------------------------------------------------------------

    def _record(self, record: Record) -> None:
        """Write the next record, unless another aggregator has, and remove blobs that are no longer needed.

        Raises
        ------
        StorageError
            If another aggregator has written it.
        """
        number = record.number
        text = json.dumps({"version": VERSION, **asdict(record)}, indent=2, sort_keys=True) + "\n"
        try:
            self._store.create(_name(number), text.encode())
        except Taken:
            other = self._read(number)
            raise StorageError(
                f"{self._store.url}: found round {other.round} published meanwhile by another aggregator "
                f"({other.incarnation[:12]}), so this one ({self._incarnation[:12]}) stops",
                hint=f"let one aggregator at a time work on a run; {argument('resume')} goes on with what is published",
            ) from None
        self._last, self._blobs = record, _by_digest(record)
        self._sweep(record)

    def latest(self) -> Record | None:
        """Return the record of the last publication; None if there is none."""
        newest = self._newest()
        return self._read(newest) if newest else None

    def _newest(self) -> int:
        """Return the number of the last record; 0 if there is none."""
        names = (_RECORD.fullmatch(entry.name) for entry in self._store.entries("published/"))
        return max((int(found[1]) for found in names if found), default=0)

    def _read(self, number: int) -> Record:
        where = f"{self._store.url}/{_name(number)}"
        try:
            about: dict[str, Any] = parsed_json(self._store.read(_name(number)))
            if about.pop("version") != VERSION:
                raise DataError(f"{where}: published by another version of FedLoom", hint="resume with that version")
            record = _ADAPTER.validate_python(about)
            if record.number != number:
                raise ValueError(f"it says that it is number {record.number}")
            for name, blobs in record.files.items():
                parts_of(name)  # it is used as a path to write to, so it must lie in the run's folder
                if not blobs or not all(_BLOB.fullmatch(blob) for blob in blobs):
                    raise ValueError(f"the blobs of {name} are {blobs}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{where}: not a record of a published run ({error})") from error
        return record

    # --- files --------------------------------------------------------------------------------------------------------

    def _needed(self) -> list[str]:
        """Return the files that a resumed run may read: checkpoints and top-level files, but no logs or figures."""
        return [
            name
            for name in self._everything()
            if "/" not in name or (name.startswith(CHECKPOINTS) and name.endswith(".safetensors"))
        ]

    def _everything(self) -> list[str]:
        """Return all complete files of the folder, except those of the workers."""
        root = self._folder.path
        found = (path.relative_to(root) for path in root.rglob("*") if path.is_file() and path.suffix != PARTIAL)
        return sorted(path.as_posix() for path in found if path.parts[0] not in OF_ITS_OWN)

    def _contents(self, name: str) -> Iterator[tuple[str, Callable[[], bytes]]]:
        """Yield the digest of each blob of a file, and a function that reads it."""
        path = self._folder.path / name
        if not name.endswith(LINES):
            with opened(path) as file:
                content = file.read()
            yield hashlib.sha256(content).hexdigest(), lambda: content
            return
        with opened(path) as file:
            about = os.fstat(file.fileno())
            known = self._segments.get(name)
            if known is None or not known.still(file, about):
                known = Grown(about.st_ino)
            cuts = segments(about.st_size)
            known.digests = {cut: known.digests.get(cut) or _digest_of(file, *cut) for cut in cuts}
            self._segments[name] = known
            for cut, digest in known.digests.items():
                yield digest, partial(_part, file, *cut)

    def _fetch(self, record: Record, check: Callable[[RunFolder], None]) -> None:
        """Replace the folder's files with a record's, once all of them are downloaded and checked."""
        with tempfile.TemporaryDirectory(prefix="fedloom-run-") as temporary:
            staging = Path(temporary)
            for name, blobs in record.files.items():
                with storing(staging / name):
                    (staging / name).parent.mkdir(parents=True, exist_ok=True)
                    (staging / name).touch()
                for blob in blobs:
                    there = name if blob.startswith(FOLDER) else f"blobs/{blob}"
                    self._store.download(there, staging / PART)
                    content = (staging / PART).read_bytes()
                    found = hashlib.sha256(content).hexdigest()
                    if found != _digest(blob):
                        raise DataError(f"{self._store.url}/{there}: damaged, found sha256 {found}")
                    with storing(staging / name), (staging / name).open("ab") as whole:
                        whole.write(content)
                (staging / PART).unlink(missing_ok=True)
            check(RunFolder(staging))
            for name in self._needed():
                if name.startswith(CHECKPOINTS) and name not in record.files:
                    (self._folder.path / name).unlink()
            for name in sorted(record.files, key=lambda name: (name not in FIRST, name)):  # we may be killed half-way
                path = self._folder.path / name
                with storing(path):
                    path.parent.mkdir(parents=True, exist_ok=True)
                copy_atomically(staging / name, path)

    def _sweep(self, record: Record) -> None:
        """Remove the blobs of this and earlier numbers that a record does not name."""
        named = {blob for blobs in record.files.values() for blob in blobs}
        blobs = (entry.name.removeprefix("blobs/") for entry in self._store.entries("blobs/"))
        last = f"{record.number + 1:08d}"
        self._store.remove([f"blobs/{blob}" for blob in blobs if blob < last and blob not in named])


@dataclass
class Grown:
    """A line file as last published: its inode, and the digests of its segments by start and length."""

    inode: int
    digests: dict[tuple[int, int], str] = field(default_factory=dict)

    def still(self, file: BinaryIO, about: os.stat_result) -> bool:
        """Return whether the file has only grown since: its last segment is unchanged."""
        last = next(reversed(self.digests), (0, 0))
        return (
            self.inode == about.st_ino
            and sum(last) <= about.st_size
            and self.digests.get(last) == _digest_of(file, *last)
        )


def segments(size: int) -> list[tuple[int, int]]:
    """Return the segments of a line file as (start, length), the largest first.

    A file of 1 GB has 64 to 79 segments. As the file grows, a byte is in a segment of each length once, so it is copied
    at most four times, except for the last bytes, fewer than 256 KiB.
    """
    found, begin = [], 0
    for length in SEGMENTS:
        while size - begin >= length:
            found.append((begin, length))
            begin += length
    return [*found, (begin, size - begin)] if size > begin or not found else found


def _part(file: BinaryIO, begin: int, length: int) -> bytes:
    file.seek(begin)
    return file.read(length)


def _digest_of(file: BinaryIO, begin: int, length: int) -> str:
    return hashlib.sha256(_part(file, begin, length)).hexdigest()


def _name(number: int) -> str:
    return f"published/{number:08d}.json"


def _release(line: Mapping[str, Any]) -> str:
    return f"releases/{line['life']}-{line['number']:08d}.json"


def _digest(blob: str) -> str:
    return blob.partition("-")[2]


def _by_digest(record: Record) -> dict[str, str]:
    return {_digest(blob): blob for blobs in record.files.values() for blob in blobs if not blob.startswith(FOLDER)}


def _summary_last(name: str) -> tuple[bool, str]:
    return name == SUMMARY, name
