"""Files of a run folder: whole files are written atomically with a digest, line files grow line by line."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from fedloom.core import digests
from fedloom.core.files import PARTIAL, open_file, opened, read_file, staged, storing, sync, write_atomically
from fedloom.core.words import parsed_json
from fedloom.errors import DataError, ExperimentError, argument, as_storage_error

PIECE = 1 << 20


class Placed(NamedTuple):
    """Line of a line file: its start and end in bytes, its object and its digest.

    ``whole`` is False if a crash cut the line short; then it has no object.
    """

    start: int
    end: int
    object: dict[str, Any] | None
    whole: bool
    digest: str = ""


class LineFile:
    """File of JSON objects, one per line, each with a digest chained over the lines before.

    Every reader raises ``DataError`` with the file, the line and what to do if a line has been changed. ``ending``
    returns the digest of the last line if it is known that nothing has been appended since; else None.
    """

    def __init__(self, path: Path, ending: Callable[[], str | None] = lambda: None) -> None:
        self.path = path
        self._ending = ending

    def last_digest(self) -> str:
        """Return the digest of the last line, unchecked; for a file without lines, the initial digest.

        Raise DataError if the end of the file is not a complete line.
        """
        try:
            with open_file(self.path) as file:
                return self._before(file, os.fstat(file.fileno()).st_size)
        except FileNotFoundError:
            return digests.beginning(self.path.name)
        except OSError as error:
            raise as_storage_error(error) from error

    def has_line(self, end: int, digest: str) -> bool:
        """Return whether a line with this digest ends at byte ``end``, and so whether all lines up to it are the same.

        Byte 0 has the digest of :func:`digests.beginning`.
        """
        try:
            with open_file(self.path) as file:
                return self._before(file, end, torn=True) == digest
        except OSError:
            return False

    def append(self, value: Mapping[str, Any]) -> None:
        """Append one object as a line."""
        line = digests.line_of(value, self.last_digest())
        with storing(self.path), self.path.open("ab") as file:
            file.write(line)

    def rewrite(self, values: Iterable[Mapping[str, Any]]) -> None:
        """Replace all lines."""
        previous, lines = digests.beginning(self.path.name), []
        for value in values:
            lines.append(digests.line_of(value, previous))
            previous = digests.check_line(lines[-1], previous)
        write_atomically(self.path, b"".join(lines))

    def cut(self, end: int) -> None:
        """Truncate the file to ``end`` bytes, a line boundary. A shorter file stays unchanged."""
        path = self.path
        with storing(path):
            if not path.exists() or path.stat().st_size <= end:
                return
        with staged(path) as partial:
            with path.open("rb") as whole, partial.open("wb") as target:
                while piece := whole.read(min(end - target.tell(), PIECE)):
                    target.write(piece)
            sync(partial)
            partial.replace(path)
            sync(path.parent)

    def forwards(self, skip: Callable[[bytes], bool] = lambda line: False, start: int = 0) -> Iterator[Placed]:
        """Yield the lines from byte ``start``, where one begins, except those ``skip``; none if there is no file."""
        expected, end, previous = self._ending(), start, ""
        try:
            with open_file(self.path) as file:
                previous = self._before(file, start)
                file.seek(start)
                for line in file:  # binary: only \n ends a line
                    start, end = end, end + len(line)
                    if not line.endswith(b"\n"):
                        yield Placed(start, end, None, whole=False)
                        break
                    previous = self._checked(line, previous, start)
                    if not skip(line):
                        yield Placed(start, end, self._object(line, start), whole=True, digest=previous)
        except FileNotFoundError:
            previous = digests.beginning(self.path.name)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read ({error.strerror or error})") from error
        self._check_end(previous, expected)

    def backwards(self, beginning: str = "") -> Iterator[Placed]:
        """Yield the lines like :meth:`forwards`, from the last to the first, without reading the lines before them.

        Lines without the ``beginning`` are skipped, and their digests are not checked.
        """
        expected, start = self._ending(), beginning.encode()
        try:
            with open_file(self.path) as file:
                end = os.fstat(file.fileno()).st_size
                self._check_end(self._before(file, end, torn=True), expected)
                if not end:
                    return
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                    while end:
                        position = content.rfind(b"\n" + start, 0, end - 1) + 1
                        stop = content.find(b"\n", position) + 1 or len(content)
                        line, end = content[position:stop], position
                        if not line.endswith(b"\n"):
                            yield Placed(position, stop, None, whole=False)
                        elif line.startswith(start):
                            digest = self._checked(line, self._before(file, position), position)
                            yield Placed(position, stop, self._object(line, position), whole=True, digest=digest)
        except FileNotFoundError:
            self._check_end(digests.beginning(self.path.name), expected)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read ({error.strerror or error})") from error

    def _before(self, file: BinaryIO, position: int, *, torn: bool = False) -> str:
        """Return the digest in the line that ends at a byte; with ``torn``, empty if no line ends there."""
        if position == 0:
            return digests.beginning(self.path.name)
        begin = max(0, position - digests.TAIL)
        digest = digests.stated_digest(os.pread(file.fileno(), position - begin, begin))
        if digest is None and not torn:
            raise self._damaged(position - 1, "it does not end with a digest")
        return digest or ""

    def _checked(self, line: bytes, previous: str, start: int) -> str:
        try:
            return digests.check_line(line, previous)
        except digests.Damaged as error:
            raise self._damaged(start, str(error)) from None

    def _object(self, line: bytes, start: int) -> dict[str, Any]:
        value = as_object(line)
        if value is None:
            raise self._damaged(start, "it is not a JSON object")
        del value["digest"]
        return value

    def _check_end(self, last: str, expected: str | None) -> None:
        """Compare the last digest with that of a finished run, unless the run has been resumed meanwhile."""
        if expected is not None and last != expected and self._ending() == expected:
            raise DataError(
                f"{self.path} is damaged: it does not end with its last line as of the end of the run",
                hint=digests.RESTORE,
            )

    def _damaged(self, start: int, reason: str) -> DataError:
        with opened(self.path) as file:
            number = file.read(start).count(b"\n") + 1
        return DataError(f"{self.path}, line {number} is damaged: {reason}", hint=digests.RESTORE)


def as_object(line: str | bytes) -> dict[str, Any] | None:
    """Return the object in a line; None if the line is not a JSON object."""
    try:
        value = parsed_json(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


EXPERIMENT = "experiment.yaml"
PARTITION = "partition.json"
CONSTANTS = "constants.json"
"""Digests of the tensors of the model that are neither stored nor sent, by name; absent if there are none."""
METRICS = "metrics.jsonl"
JOURNAL = "journal.jsonl"
RELEASES = "releases.jsonl"
"""Private answers of clients, for methods with a privacy guarantee; the file only grows, even on a resume."""
SUMMARY = "summary.json"
AUDIT = "audit.json"
"""Results of attacks on a finished run, written by an audit."""
AGGREGATOR_LOG = "logs/aggregator.jsonl"
CHECKPOINTS = "checkpoints"
DIGESTS = "digests.json"
"""Digests of files that cannot hold their own, and, once a run is finished, those of the last lines of line files."""
WITHOUT_DIGEST = (PARTITION, "clients.csv", "confusion.csv")
"""Files whose digests are in :data:`DIGESTS`.

The partition equals that of the data root byte for byte, and tables are read by other programs.
"""
LINE_FILES = (METRICS, RELEASES, JOURNAL)
RECREATE = f"run again with {argument('resume')} to recreate the results of the finished run"
HINTS = {
    **dict.fromkeys((SUMMARY, "clients.csv", "confusion.json", "confusion.csv", "calibration.json"), RECREATE),
    "control.json": "remove the file to let the run continue",
}
"""Hints for damaged files, where they differ from :data:`digests.RESTORE`."""
ABSENT = "does not exist"
"""End of the message about a file that a run does not have (yet)."""

_CHECKPOINT = re.compile(r"round-(\d{6,})\.safetensors")


class Lines(list[dict[str, Any]]):
    """Objects of a JSON-lines file, in order; ``unreadable`` counts lines left out (one, after a crash)."""

    def __init__(self, objects: Iterable[dict[str, Any]], unreadable: int) -> None:
        super().__init__(objects)
        self.unreadable = unreadable


class RunFiles:
    """Files of one run folder, for its writer and for readers.

    Every reader raises ``DataError`` naming the file and what is wrong with it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints."""
        return self.path / CHECKPOINTS

    @property
    def states(self) -> Path:
        """Folder of client states."""
        return self.path / "states"

    @property
    def logs(self) -> Path:
        """Folder of the processes' logs."""
        return self.path / "logs"

    def has(self, name: str) -> bool:
        """Return whether a file with this name exists, damaged or not."""
        return (self.path / name).exists()

    # --- the folder ---------------------------------------------------------------------------------------------------

    def is_free(self) -> bool:
        """Return whether the folder is missing, or holds only the half-written experiment of a run killed there."""
        if not self.path.is_dir():
            return not self.path.exists()
        names = (entry.name for entry in self.path.iterdir())
        return all(name.startswith(f".{EXPERIMENT}.") and name.endswith(PARTIAL) for name in names)

    def make(self, experiment: str | None = None) -> None:
        """Create the folder and its subfolders, and remove files that a crash left half-written.

        ``experiment.yaml`` comes first: a folder that has it is a run, and can be resumed.
        """
        with storing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            if experiment is not None:
                self.write(EXPERIMENT, experiment)
            for folder in (self.checkpoints, self.logs):
                folder.mkdir(exist_ok=True)
        self.tidy()

    def tidy(self) -> None:
        """Remove files that killed processes left half-written.

        A worker that is still writing a client's state loses nothing, because it retries (``FolderStore.write``).
        """
        with storing(self.path, "removed"):
            for pattern in (f".*{PARTIAL}", f"checkpoints/.*{PARTIAL}", f"states/*/.*{PARTIAL}"):
                for partial in self.path.glob(pattern):
                    partial.unlink(missing_ok=True)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the folder against other processes; the lock ends with the process, even if it is killed.

        Raise ExperimentError if another process holds the lock.
        """
        with storing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        with self._locked(fcntl.LOCK_EX, patience_s=1.0) as is_ours:
            if not is_ours:
                raise ExperimentError(
                    f"{self.path} is in use: another process works on this run.",
                    hint=f"wait until it ends, or choose another folder ({argument('out')})",
                )
            yield

    def is_held(self) -> bool:
        """Return whether a process works on the run."""
        with self._locked(fcntl.LOCK_SH) as is_ours:
            return not is_ours

    @contextmanager
    def _locked(self, mode: int, patience_s: float = 0.0) -> Iterator[bool]:
        """Try to lock the folder; yield whether that succeeded.

        Processes that look at runs hold a shared lock for an instant (``is_held``), which ``patience_s`` outlasts.
        """
        with storing(self.path):
            descriptor = os.open(self.path, os.O_RDONLY)
        until, is_ours = time.monotonic() + patience_s, False
        try:
            while not is_ours:
                try:
                    fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
                    is_ours = True
                except BlockingIOError:
                    if time.monotonic() >= until:
                        break
                    time.sleep(0.01)
            yield is_ours
        finally:
            os.close(descriptor)

    # --- whole files --------------------------------------------------------------------------------------------------

    def write(self, name: str, text: str) -> None:
        """Write a whole file with its digest, which goes into ``digests.json`` if the file cannot hold it."""
        if name in WITHOUT_DIGEST:
            digests_known = self._digests()
            # The previous digest is kept, so that the file's digest is listed whenever the process is killed.
            accepted = [digests.short_digest(text.encode()), *digests_known.get(name, ())]
            self._write_digests({**digests_known, name: list(dict.fromkeys(accepted))[:2]})
        else:
            text = digests.with_digest(name, text)
        write_atomically(self.path / name, text.encode())

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write an object as indented JSON."""
        self.write(name, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        with storing(self.path / name, "removed"):
            (self.path / name).unlink(missing_ok=True)

    def read(self, name: str) -> str | None:
        """Return the content of a file after checking its digest; None if the file does not exist."""
        path = self.path / name
        try:
            content = read_file(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
        try:
            if name not in WITHOUT_DIGEST:
                content = digests.without_digest(name, content)
            elif digests.short_digest(content) not in self._digests().get(name, ()):
                raise digests.Damaged(f"{DIGESTS} has no digest of it")
            return content.decode("utf-8").replace("\r\n", "\n")
        except (digests.Damaged, UnicodeDecodeError) as error:
            raise DataError(f"{path} is damaged: {error}", hint=HINTS.get(name, digests.RESTORE)) from error

    def text(self, name: str) -> str:
        """Return the content of a file that must exist."""
        text = self.read(name)
        if text is None:
            raise DataError(f"{self.path / name} {ABSENT}")
        return text

    def json(self, name: str) -> dict[str, Any]:
        """Return the object of a JSON file that must exist."""
        return self._object(name, self.text(name))

    def json_or_none(self, name: str) -> dict[str, Any] | None:
        """Return the object of a JSON file; None if it does not exist."""
        text = self.read(name)
        return None if text is None else self._object(name, text)

    def _object(self, name: str, text: str) -> dict[str, Any]:
        try:
            value = parsed_json(text)
        except ValueError as error:
            raise DataError(f"{self.path / name} is not JSON ({error})") from error
        if not isinstance(value, dict):
            raise DataError(f"{self.path / name} must hold a JSON object, and holds a {type(value).__name__}.")
        return value

    # --- line files ---------------------------------------------------------------------------------------------------

    def line_file(self, name: str) -> LineFile:
        """Return a line file, which need not exist."""

        def ending() -> str | None:
            return next(iter(self._digests().get(name, ())), None)

        return LineFile(self.path / name, ending if name in LINE_FILES else lambda: None)

    def append(self, name: str, line: Mapping[str, Any]) -> None:
        """Append one object as a line."""
        self.line_file(name).append(line)

    def lines(self, name: str) -> Lines:
        """Return the objects of a JSON-lines file; none if it does not exist. A line cut short is counted."""
        values = [line.object for line in self.placed(name)]
        return Lines((value for value in values if value is not None), values.count(None))

    def objects(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield the objects of a JSON-lines file in constant memory; none if it does not exist."""
        return (line.object for line in self.placed(name) if line.object is not None)

    def placed(self, name: str, skip: Callable[[bytes], bool] = lambda line: False, start: int = 0) -> Iterator[Placed]:
        """Yield the lines of a file with their positions (:meth:`LineFile.forwards`)."""
        return self.line_file(name).forwards(skip, start)

    def sync(self, *names: str) -> None:
        """Flush these files, where they exist, to disk."""
        for path in (*(self.path / name for name in names), self.path):  # the folder, for the files' names
            with storing(path), suppress(FileNotFoundError):
                sync(path)

    def close_lines(self) -> None:
        """Record the last lines of the line files of a finished run."""
        self._write_digests({**self._digests(), **{name: [self.line_file(name).last_digest()] for name in LINE_FILES}})

    def reopen_lines(self) -> None:
        """Allow appending to the line files of a resumed run."""
        digests_known = self._digests()
        if any(name in digests_known for name in LINE_FILES):
            self._write_digests({name: accepted for name, accepted in digests_known.items() if name not in LINE_FILES})

    def last_digests(self, *names: str) -> dict[str, str]:
        """Return the digest of the last line of each of these line files that exists."""
        return {name: self.line_file(name).last_digest() for name in names if self.has(name)}

    def rewrite(self, name: str, lines: Iterable[Mapping[str, Any]]) -> None:
        """Replace the lines of a line file."""
        self.line_file(name).rewrite(lines)

    def accepted_digest(self, name: str) -> str | None:
        """Return the digest that a file must have (:data:`WITHOUT_DIGEST`); None if it is not known."""
        return next(iter(self._digests().get(name, ())), None)

    def _write_digests(self, digests_known: Mapping[str, Sequence[str]]) -> None:
        self.write_json(DIGESTS, {"version": digests.VERSION, "files": digests_known})

    def _digests(self) -> dict[str, list[str]]:
        """Return the digests that files may have, by name; none if there is no digest file."""
        match self.json_or_none(DIGESTS):
            case None:
                return {}
            case {"version": digests.VERSION, "files": dict() as files}:
                return files
        raise DataError(f"{self.path / DIGESTS} was written by another version of FedLoom", hint=digests.RESTORE)


def checkpoint_files(folder: Path) -> dict[int, Path]:
    """Return the checkpoint files in a folder by round, ascending; none if there is no such folder."""
    names = [_CHECKPOINT.fullmatch(entry.name) for entry in folder.iterdir()] if folder.is_dir() else []
    return {int(name[1]): folder / name[0] for name in sorted(filter(None, names), key=lambda name: int(name[1]))}
