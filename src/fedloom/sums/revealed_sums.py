"""Record of the sums that a member has helped to reveal: one question is answered over one set of clients.

When a round is repeated, because an attempt failed or the aggregator was restarted, clients give the same answers. Two
sums of them over different sets have a difference, and sums over several sets more, down to a single client's answer.
A member cannot verify that a failure is real. It therefore helps to reveal the sum of an answer over one set of clients
only, and remembers which by a digest. A record on disk preserves this across restarts. Nothing is ever forgotten.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from fedloom.core import digests
from fedloom.core.files import PRIVATE_FILE, storing, sync
from fedloom.errors import DataError, RefusedError, StorageError
from fedloom.runs.files import LineFile

_log = logging.getLogger(__name__)

RECORD = "revealed-sums.jsonl"
"""Name of the record in a folder."""

VERSION = 2
"""Version of the record's lines."""


class Subject(NamedTuple):
    """Identity of answers that are the same whenever they are asked for."""

    round: int | None
    """Round of the sum, for messages; None for answers that are the same in every run."""
    question: bytes
    """Digest of the question that they answer."""


class RevealedSums:
    """Sums that the clients of this process, or of a folder, have helped to reveal.

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
        self._sums: dict[tuple[str, bytes], bytes] = {}
        self._path = None if folder is None else folder / RECORD
        self._start()
        with self._synchronized():
            pass

    def check(self, client: str, subject: Subject, total: bytes) -> None:
        """Check that a client may help to reveal a sum, and remember it, on disk if there is a record.

        Parameters
        ----------
        total
            Digest of everything that determines the sum beside the question: its set of clients, and the settings and
            state that the client's answer depends on.

        Raises
        ------
        RefusedError
            If the client has helped to reveal another sum of these answers, or the record cannot be read or written.
        """
        try:
            with self._synchronized():
                self._check(client, subject, total)
        except (DataError, StorageError) as error:  # names files of this machine
            raise RefusedError(
                f"client {client} cannot use its record of revealed sums; its worker's log has the reason"
            ) from error

    def _check(self, client: str, subject: Subject, total: bytes) -> None:
        recorded = self._sums.get((client, subject.question))
        if recorded == total:
            return
        if recorded is not None:
            question, instead = f"what round {subject.round} asks", "go on with the next round"
            if subject.round is None:
                question, instead = "its inputs", "give data.own.normalization {mean, std}"
            raise RefusedError(
                f"client {client} has helped to reveal a sum of {question} already, over other clients or with other "
                f"settings, and from several sums a single answer could be computed: ask the same clients, or {instead}"
            )
        if self._path is not None:
            line = {"round": subject.round, "question": subject.question.hex(), "sum": total.hex()}
            self._append(LineFile(self._path), {"version": VERSION, "client": client, **line})
        self._sums[client, subject.question] = total

    # ---- the record: a line per set that a client has helped to reveal, in a chain of digests

    def _start(self) -> None:
        """Prepare to read the record from its start."""
        self._end, self._digest = 0, digests.beginning(RECORD)
        self._sums.clear()

    @contextmanager
    def _synchronized(self) -> Iterator[None]:
        """Read what other processes have written, and keep them from writing within the block."""
        path = self._path
        if path is None:
            yield
            return
        with storing(path.parent):
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            lock = os.open(path.with_suffix(".lock"), flags, PRIVATE_FILE)
        try:
            with storing(path.parent):
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not path.exists():
                    os.close(os.open(path, flags, PRIVATE_FILE))
                    sync(path.parent)
            self._read(path, LineFile(path))
            yield
        finally:
            os.close(lock)

    def _read(self, path: Path, file: LineFile) -> None:
        """Read the lines that were not read yet, or all of another file; remove a truncated last line."""
        lines: list[dict[str, Any]] = []
        if not file.has_line(self._end, self._digest):
            self._start()
        end, digest = self._end, self._digest
        try:
            for placed in file.forwards(start=end):
                if placed.object is None:
                    _log.warning("%s: removing the last line, which was truncated by a crash", path)
                    file.cut(placed.start)
                    break
                end, digest = placed.end, placed.digest
                lines.append(placed.object)
        except DataError as error:
            raise _damaged(str(error)) from error
        for line in lines:
            if line.get("version") != VERSION:
                raise _damaged(f"{path} has version {line.get('version')!r}; this FedLoom reads {VERSION}")
            try:
                self._sums[line["client"], bytes.fromhex(line["question"])] = bytes.fromhex(line["sum"])
            except (KeyError, TypeError, ValueError) as error:
                raise _damaged(f"{path} has a line that is not a revealed sum") from error
        self._end, self._digest = end, digest  # only now: a record that is damaged stays so

    def _append(self, file: LineFile, line: dict[str, Any]) -> None:
        new_line = digests.line_of(line, self._digest)
        file.append(line)
        sync(file.path)
        self._end, self._digest = self._end + len(new_line), digests.check_line(new_line, self._digest)


def _damaged(reason: str) -> DataError:
    return DataError(
        reason,
        hint="restore the file from a copy; or, if no aggregator can repeat the rounds and the measurement in it, "
        "remove it: the worker then forgets what it has revealed",
    )
