"""Limit on the sums of the same answers that a member helps to reveal over different sets of clients.

When a round is repeated, because an attempt failed or the aggregator was restarted, clients give the same answers. If
two sums are over sets that differ by one client, their difference is that client's answer. A member cannot verify that
a failure is real, so it limits what repeated rounds can reveal. A record on disk preserves the limit across restarts.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fedloom.core import digests
from fedloom.errors import DataError, RefusedError, StorageError
from fedloom.privacy.settings import SMALLEST_SUM
from fedloom.runs.line_file import LineFile
from fedloom.storage.folder import PRIVATE_FILE, storing, sync

_log = logging.getLogger(__name__)

MOST_IDS = 2_000_000
"""Number of client ids in remembered sets above which the oldest rounds are forgotten: some 100 MB."""

RECORD = "revealed-sums.jsonl"
"""Name of the record in a folder."""

VERSION = 1
"""Version of the record's lines."""


class Subject(NamedTuple):
    """Identity of answers that are the same whenever they are asked for."""

    round: int
    """Round of the sum; 0 for answers that are the same in every round."""
    purpose: str
    """Purpose of the conversation; empty for answers that are the same in every round."""
    answer: str
    """Class of the answers."""
    run: str = ""
    """Digest of the settings that cannot change in a run (:func:`fedloom.runner.open_federation.run_digest`)."""

    @property
    def is_lasting(self) -> bool:
        """True if the answers are the same in every round."""
        return self.round == 0 and not self.purpose


@dataclass
class _Revealed:
    """Sets of clients over which sums of one subject were revealed, and the indices of each client's sets."""

    sets: list[frozenset[str]] = field(default_factory=list)
    places: dict[str, list[int]] = field(default_factory=dict)

    def of(self, client: str) -> list[frozenset[str]]:
        """Return the sets of a client."""
        return [self.sets[place] for place in self.places.get(client, ())]


class RevealedSums:
    """Sets of clients over which the clients of this process, or of a folder, have helped to reveal sums.

    Parameters
    ----------
    folder
        Existing folder for a record on disk, which other processes may use at the same time; None for no record.

    Raises
    ------
    DataError
        If the record is damaged, or from another version.
    StorageError
        If it cannot be written.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._revealed: OrderedDict[Subject, _Revealed] = OrderedDict()
        self._ids = 0
        self._record = None if folder is None else _Record(folder)
        with self._synchronized():
            pass

    def check(self, client: str, subject: Subject, survivors: Sequence[str]) -> None:
        """Check that a client may help to reveal the sum over these clients, and remember it.

        The same set is allowed again, and one other set that differs by three clients or more. If there is a record,
        the set is on disk when the call returns.

        Raise RefusedError if the client may not help, or the record cannot be read or written.
        """
        try:
            with self._synchronized():
                self._check(client, subject, frozenset(survivors))
        except (DataError, StorageError) as error:  # names files of this machine
            raise RefusedError(
                f"client {client} cannot use its record of revealed sums; its worker's log has the reason"
            ) from error

    def _check(self, client: str, subject: Subject, asked: frozenset[str]) -> None:
        known = self._revealed[subject].of(client) if subject in self._revealed else []
        if asked in known:
            return
        if len(known) > 1 or any(len(asked ^ other) < SMALLEST_SUM for other in known):
            what, instead = f"round {subject.round}", "start a run with another seed"
            if subject.is_lasting:
                what, instead = "its inputs", "give data.own.normalization {mean, std}"
            raise RefusedError(
                f"client {client} has helped to reveal a sum of {what} already, over other clients, and the difference "
                f"of the two could reveal a single answer: ask the same clients, or {instead}"
            )
        if self._record is not None:
            sets = self._revealed[subject].sets if subject in self._revealed else []
            self._record.append(_line(client, subject, sets.index(asked) if asked in sets else sorted(asked)))
        self._remember(client, subject, asked)

    def _remember(self, client: str, subject: Subject, asked: frozenset[str]) -> None:
        revealed = self._revealed.setdefault(subject, _Revealed())
        if asked not in revealed.sets:
            revealed.sets.append(asked)
            self._ids += len(asked)
        revealed.places.setdefault(client, []).append(revealed.sets.index(asked))
        while self._ids > MOST_IDS:
            oldest = next((one for one in self._revealed if not one.is_lasting and one != subject), None)
            if oldest is None:
                return
            self._ids -= sum(map(len, self._revealed.pop(oldest).sets))

    @contextmanager
    def _synchronized(self) -> Iterator[None]:
        """Read what other processes have written, and keep them from writing within the block."""
        if self._record is None:
            yield
            return
        with self._record.locked():
            if not self._record.is_continued():
                self._revealed.clear()
                self._ids = 0
            for line in self._record.lines():
                self._record.read_line(line, self._read)
            yield
            if self._record.ids > 4 * MOST_IDS:
                self._record.rewrite(self._lines())

    def _read(self, line: Mapping[str, Any]) -> None:
        subject = Subject(*(line[name] for name in Subject._fields))
        clients = line["clients"]
        asked = self._revealed[subject].sets[clients] if isinstance(clients, int) else frozenset(clients)
        self._remember(line["client"], subject, asked)

    def _lines(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of a record of what is remembered."""
        for subject, revealed in self._revealed.items():
            for place, clients in enumerate(revealed.sets):
                members = [client for client, places in revealed.places.items() if place in places]
                yield _line(members[0], subject, sorted(clients))
                yield from (_line(member, subject, place) for member in members[1:])


def _line(client: str, subject: Subject, clients: list[str] | int) -> dict[str, Any]:
    """Return the line of a record: a known set is given by its index, a new one by its clients."""
    return {"version": VERSION, **subject._asdict(), "client": client, "clients": clients}


class _Record:
    """File with one line per set that a client has helped to reveal, in a chain of digests.

    A truncated last line is removed.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / RECORD
        self._file = LineFile(self._path)
        self._start()

    def _start(self) -> None:
        self._end, self._digest, self.ids = 0, digests.beginning(RECORD), 0

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from using the file."""
        with storing(self._path.parent):
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            lock = os.open(self._path.with_suffix(".lock"), flags, PRIVATE_FILE)
        try:
            with storing(self._path.parent):
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not self._path.exists():
                    os.close(os.open(self._path, flags, PRIVATE_FILE))
                    sync(self._path.parent)
            yield
        finally:
            os.close(lock)

    def is_continued(self) -> bool:
        """Return whether the file still begins with all that was read; otherwise prepare to read it from the start."""
        if self._file.has_line(self._end, self._digest):
            return True
        self._start()
        return False

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the lines that were not read yet; remove a truncated last line."""
        try:
            for placed in self._file.forwards(start=self._end):
                if placed.object is None:
                    _log.warning("%s: removing the last line, which was truncated by a crash", self._path)
                    self._file.cut(placed.start)
                    return
                self._end, self._digest = placed.end, placed.digest
                yield placed.object
        except DataError as error:
            raise self._damaged(str(error)) from error

    def read_line(self, line: dict[str, Any], read: Callable[[Mapping[str, Any]], None]) -> None:
        """Read a line.

        Raise DataError if it cannot be understood.
        """
        if line.get("version") != VERSION:
            raise self._damaged(f"{self._path} has version {line.get('version')!r}; this FedLoom reads {VERSION}")
        try:
            read(line)
            self._count(line)
        except (KeyError, IndexError, TypeError) as error:
            raise self._damaged(f"{self._path} has a line that is not a revealed sum") from error

    def append(self, line: dict[str, Any]) -> None:
        """Write a line to the disk."""
        written = digests.line_of(line, self._digest)
        self._file.append(line)
        sync(self._path)
        self._end, self._digest = self._end + len(written), digests.check_line(written, self._digest)
        self._count(line)

    def rewrite(self, lines: Iterator[dict[str, Any]]) -> None:
        """Replace all lines; they are read again when the file is used next."""
        self._file.rewrite(lines)
        self._digest = "rewritten"  # matches no line

    def _count(self, line: Mapping[str, Any]) -> None:
        self.ids += 1 if isinstance(line["clients"], int) else 1 + len(line["clients"])

    def _damaged(self, why: str) -> DataError:
        return DataError(
            why,
            hint="restore the file from a copy; or, if no aggregator can repeat the rounds and the measurement in it, "
            "remove it: the worker then forgets what it has revealed",
        )
