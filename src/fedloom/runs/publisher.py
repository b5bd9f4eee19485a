"""Publication of a run in a store while it runs, so that an aggregator on another machine can resume it.

A restart needs only the last record and what it names (:mod:`fedloom.runs.published`). This is safe because of the
order of writes: first the blobs, then the record, and then the removal of blobs of this and earlier numbers that it
does not name. Even an aggregator that is delayed before this last step and replaced meanwhile removes nothing that its
successors need.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, BinaryIO

from fedloom.core.words import parsed_json
from fedloom.errors import StorageError, argument
from fedloom.runs.files import AGGREGATOR_LOG, CHECKPOINTS, RELEASES, SUMMARY
from fedloom.runs.folder import RunFolder
from fedloom.runs.published import (
    FOLDER,
    STORE_FOLDERS,
    VERSION,
    PublishedRun,
    Record,
    blob_digest,
    record_name,
    segments,
)
from fedloom.storage import Store, Taken
from fedloom.storage.folder import PARTIAL, opened

log = logging.getLogger("fedloom.published")

LINES = ".jsonl"
"""Suffix of line files."""


class Publisher(PublishedRun):
    """Publisher of a run from its folder to a store of its own, for the lifetime of one aggregator process.

    ``incarnation`` is the id of that process.
    """

    def __init__(self, folder: RunFolder, store: Store, incarnation: str) -> None:
        super().__init__(store, folder.path)
        self._folder = folder
        self._incarnation = incarnation
        self._blobs: dict[str, str] = {}  # existing blobs, by sha256
        self._segments: dict[str, _PublishedLines] = {}
        self._unpublished: list[str] = []  # objects below releases/ whose lines this folder has

    @property
    def finished(self) -> bool:
        """True if the last publication is the complete one of a finished run."""
        return self.record is not None and self.record.is_finished

    def restore(self, check: Callable[[RunFolder], None] = lambda found: None) -> bool:
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
        taken = list(self._unpublished)
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
        self._store.remove(taken)
        del self._unpublished[: len(taken)]
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
        there = [entry.name for entry in self._store.entries("releases/") if entry.name not in self._unpublished]
        known = {_release(line) for line in self._folder.objects(RELEASES)} if there else set()
        for name in there:
            if name not in known:
                self._folder.append(RELEASES, parsed_json(self._store.read(name)))
            self._unpublished.append(name)

    def finish(self) -> None:
        """Publish the finished run's folder under the names of its files.

        Raise StorageError if another aggregator has published since, or the store fails; RefusedError if the store
        denies access.
        """
        # Checkpoints of the run before it was resumed. Listed first, to exclude what a successor writes after our
        # record.
        there = [entry.name for entry in self._store.entries(f"{CHECKPOINTS}/")]
        # Publishing first proves that the run is ours before we overwrite files that others may read.
        self.publish(self.record.round if self.record is not None else 0)
        assert self.record is not None
        self._store.remove([SUMMARY, *(name for name in there if name not in self.record.files)])
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
        found = (path.relative_to(root) for path in root.rglob("*") if path.is_file() and path.suffix != PARTIAL)
        return sorted(path.as_posix() for path in found if path.parts[0] not in STORE_FOLDERS)

    def _contents(self, name: str) -> Iterator[tuple[str, Callable[[], bytes]]]:
        with opened(self._path / name) as file:
            if not name.endswith(LINES):
                content = file.read()
                yield hashlib.sha256(content).hexdigest(), lambda: content
                return
            about = os.fstat(file.fileno())
            known = self._segments.get(name)
            if known is None or not known.is_continued_by(file, about):
                known = _PublishedLines(about.st_ino)
            cuts = segments(about.st_size)
            known.digests = {cut: known.digests.get(cut) or _digest_of(file, *cut) for cut in cuts}
            self._segments[name] = known
            for cut, digest in known.digests.items():
                yield digest, partial(_part, file, *cut)


@dataclass
class _PublishedLines:
    """A line file as last published: its inode, and the digests of its segments by start and length."""

    inode: int
    digests: dict[tuple[int, int], str] = field(default_factory=dict)

    def is_continued_by(self, file: BinaryIO, about: os.stat_result) -> bool:
        """Return whether the file has only grown since, i.e. its last segment is unchanged."""
        last = next(reversed(self.digests), (0, 0))
        return (
            self.inode == about.st_ino
            and sum(last) <= about.st_size
            and self.digests.get(last) == _digest_of(file, *last)
        )


def _part(file: BinaryIO, begin: int, length: int) -> bytes:
    file.seek(begin)
    return file.read(length)


def _digest_of(file: BinaryIO, begin: int, length: int) -> str:
    return hashlib.sha256(_part(file, begin, length)).hexdigest()


def _release(line: Mapping[str, Any]) -> str:
    return f"releases/{line['life']}-{line['number']:08d}.json"


def _by_digest(record: Record) -> dict[str, str]:
    return {blob_digest(blob): blob for blobs in record.files.values() for blob in blobs if not blob.startswith(FOLDER)}
