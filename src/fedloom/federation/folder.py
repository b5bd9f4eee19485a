"""Run folder: whole files are written atomically, logs are appended line by line."""

from __future__ import annotations

import csv
import fcntl
import io
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedloom import digests
from fedloom.data.manifest import Manifest
from fedloom.errors import DataError, ExperimentError, argument
from fedloom.federation.line_file import LineFile, Placed
from fedloom.storage.folder import PARTIAL, read_file, storing, write_atomically
from fedloom.words import parsed_json

EXPERIMENT = "experiment.yaml"
METRICS = "metrics.jsonl"
DIGESTS = "digests.json"
"""Digests of files that cannot hold their own, and, once a run is finished, those of the last lines of line files."""
ELSEWHERE = ("partition.json", "clients.csv", "confusion.csv")
"""Files whose digests are in :data:`DIGESTS`.

The partition equals that of the data root byte for byte, and tables are read by other programs.
"""
RELEASES = "releases.jsonl"
"""Private answers of clients, for methods with a privacy guarantee; it only grows, even on a resume."""
ENDED = (METRICS, RELEASES, "journal.jsonl")
AGAIN = f"run again with {argument('resume')}: it makes the results of a finished run anew"
HINTS = {
    "summary.json": AGAIN,
    "clients.csv": AGAIN,
    "confusion.json": AGAIN,
    "confusion.csv": AGAIN,
    "calibration.json": AGAIN,
    "control.json": "remove it; then the run continues",
}
"""Hints for damaged files, where they differ from :data:`digests.RESTORE`."""
ABSENT = "is not there"
"""End of the message about a file that a run does not have (yet)."""
MANY_ROUNDS = 2000
"""Number of evaluated rounds above which :meth:`RunFolder.metrics` reads only some of them."""
_ROUND = re.compile(rb'\{"round": (\d+),')


class Lines(list[dict[str, Any]]):
    """Objects of a JSON-lines file, in order; ``unreadable`` counts lines left out (one, after a crash)."""

    def __init__(self, objects: Iterable[dict[str, Any]], unreadable: int) -> None:
        super().__init__(objects)
        self.unreadable = unreadable


class RunFolder:
    """Folder of one run (docs/design.md, §7), for its writers and later readers.

    Every reader raises ``DataError`` naming the file and what is wrong with it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """Return the folder of an existing run, finished or not.

        Raises
        ------
        DataError
            If there is no such folder, or no experiment in it.
        """
        folder = Path(path)
        if not folder.is_dir():
            what = "a file" if folder.exists() else "no such folder"
            raise DataError(f"{folder}: found {what}, expected the folder of a run", hint="fedloom run EXPERIMENT")
        if not (folder / EXPERIMENT).is_file():
            raise DataError(
                f"{folder}: found no {EXPERIMENT}, expected the folder of a run", hint="fedloom run EXPERIMENT"
            )
        return cls(folder)

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints."""
        return self.path / "checkpoints"

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

        An earlier worker that is still writing a client's state loses nothing: it writes it again
        (``FolderStore.write``).
        """
        with storing(self.path, "removed"):
            for pattern in (f".*{PARTIAL}", f"checkpoints/.*{PARTIAL}", f"states/*/.*{PARTIAL}"):
                for partial in self.path.glob(pattern):
                    partial.unlink(missing_ok=True)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the folder against other processes; the lock ends with the process, even if it is killed.

        Raises
        ------
        ExperimentError
            If another process holds the lock.
        """
        with storing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ExperimentError(
                    f"{self.path}: found another process at work on this run, allowed: one at a time",
                    hint=f"wait until it has ended, or choose another folder ({argument('out')})",
                ) from None
            yield
        finally:
            os.close(descriptor)

    def write(self, name: str, text: str) -> None:
        """Write a whole file with its digest, which goes into ``digests.json`` if the file cannot hold it."""
        if name in ELSEWHERE:
            known = self._known()
            # The previous digest is kept, so that the file's digest is listed whenever the process is killed.
            accepted = [digests.digest_of(text.encode()), *known.get(name, ())]
            self._know({**known, name: list(dict.fromkeys(accepted))[:2]})
            write_atomically(self.path / name, text.encode())
        else:
            write_atomically(self.path / name, digests.sealed(name, text).encode())

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write an object as indented JSON."""
        self.write(name, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")

    def close_lines(self) -> None:
        """Record the last lines of the line files of a finished run."""
        self._know({**self._known(), **{name: [self.line_file(name).last_digest()] for name in ENDED}})

    def last_digests(self, *names: str) -> dict[str, str]:
        """Return the digest of the last line of each of these line files that exists."""
        return {name: self.line_file(name).last_digest() for name in names if self.has(name)}

    def reopen_lines(self) -> None:
        """Let the line files of a resumed run grow again."""
        known = self._known()
        if any(name in known for name in ENDED):
            self._know({name: found for name, found in known.items() if name not in ENDED})

    def _know(self, known: Mapping[str, Sequence[str]]) -> None:
        self.write_json(DIGESTS, {"version": digests.VERSION, "files": known})

    def _known(self) -> dict[str, list[str]]:
        """Return the digests that files may have, by name; none if there is no digest file."""
        match self.json_or_none(DIGESTS):
            case None:
                return {}
            case {"version": digests.VERSION, "files": dict() as files}:
                return files
        raise DataError(f"{self.path / DIGESTS}: written by another version of FedLoom", hint=digests.RESTORE)

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
            if name not in ELSEWHERE:
                content = digests.unsealed(name, content)
            elif digests.digest_of(content) not in self._known().get(name, ()):
                raise digests.Damaged(f"its digest is not in {DIGESTS}")
            return content.decode("utf-8").replace("\r\n", "\n")
        except (digests.Damaged, UnicodeDecodeError) as error:
            raise DataError(f"{path}: damaged, {error}", hint=HINTS.get(name, digests.RESTORE)) from error

    def text(self, name: str) -> str:
        """Return the content of a file that must exist."""
        found = self.read(name)
        if found is None:
            raise DataError(f"{self.path / name}: {ABSENT}")
        return found

    def json(self, name: str) -> dict[str, Any]:
        """Return the object of a JSON file that must exist."""
        try:
            value = parsed_json(self.text(name))
        except ValueError as error:
            raise DataError(f"{self.path / name}: is not JSON ({error})") from error
        if not isinstance(value, dict):
            raise DataError(f"{self.path / name}: found a {type(value).__name__}, expected an object")
        return value

    def json_or_none(self, name: str) -> dict[str, Any] | None:
        """Return the object of a JSON file; None if it does not exist."""
        return None if self.read(name) is None else self.json(name)

    def line_file(self, name: str) -> LineFile:
        """Return a line file, which need not exist."""

        def ending() -> str | None:
            found = self._known().get(name)
            return found[0] if found else None

        return LineFile(self.path / name, ending if name in ENDED else lambda: None)

    def lines(self, name: str) -> Lines:
        """Return the objects of a JSON-lines file; none if it does not exist. A line cut short is counted."""
        found = [line.object for line in self.placed(name)]
        objects = [value for value in found if value is not None]
        return Lines(objects, len(found) - len(objects))

    def objects(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield the objects of a JSON-lines file in constant memory; none if it does not exist."""
        return (line.object for line in self.placed(name) if line.object is not None)

    def placed(
        self, name: str, skipped: Callable[[bytes], bool] = lambda line: False, start: int = 0
    ) -> Iterator[Placed]:
        """Yield the lines of a file with their positions (:meth:`LineFile.forwards`)."""
        return self.line_file(name).forwards(skipped, start)

    def backwards(self, name: str, beginning: str = "") -> Iterator[Placed]:
        """Yield the lines of a file, from the last to the first (:meth:`LineFile.backwards`)."""
        return self.line_file(name).backwards(beginning)

    def last_evaluation(self, upto: int = sys.maxsize) -> tuple[dict[str, Any], int] | None:
        """Return the object in ``metrics.jsonl`` of the last round up to ``upto`` and the end of its line, or None.

        Only the part of the file after it is read.
        """
        for line in self.backwards(METRICS):
            if line.whole and line.object is not None and _is_evaluation(line.object) and line.object["round"] <= upto:
                return line.object, line.end
        return None

    def last_evaluations(self, most: int, upto: int) -> list[dict[str, Any]]:
        """Return the objects of the last ``most`` rounds in ``metrics.jsonl`` up to ``upto``, ascending.

        Of several lines of a round, the last counts.
        """
        found: list[dict[str, Any]] = []
        for line in self.backwards(METRICS):
            if line.whole and line.object is not None and _is_evaluation(line.object):
                round = line.object["round"]
                if round <= upto and (not found or round < found[-1]["round"]):
                    found.append(line.object)
            if len(found) == most:
                break
        return found[::-1]

    def evaluation_of(self, round: int) -> dict[str, Any] | None:
        """Return the object in ``metrics.jsonl`` of one round; None if there is none."""
        of_round = (line.object for line in self.backwards(METRICS, f'{{"round": {round},'))
        return next((line for line in of_round if line is not None and _is_evaluation(line)), None)

    def metrics(self) -> Lines:
        """Return the evaluated rounds, ascending; of a round written twice (before and after a resume), the later line.

        Above :data:`MANY_ROUNDS`, only rounds at a wider spacing and the last one are read: as many as a curve can
        show.
        """
        spacing, last = 1, self.last_evaluation()
        first = [line["round"] for line in itertools.islice(self.evaluations(), 2)]
        if last is not None and len(first) == 2:
            every = max(1, first[1] - first[0])
            while last[0]["round"] >= MANY_ROUNDS * every * spacing:
                spacing *= 2
            spacing = every * spacing if spacing > 1 else 1

        def skipped(line: bytes) -> bool:
            of_round = _ROUND.match(line)
            return of_round is not None and int(of_round[1]) % spacing > 0

        found = [line.object for line in self.placed(METRICS, skipped)]
        by_round = {line["round"]: line for line in found if line is not None and _is_evaluation(line)}
        unreadable = sum(line is None or not _is_evaluation(line) for line in found)
        if last is not None:
            by_round.setdefault(last[0]["round"], last[0])
        return Lines((by_round[number] for number in sorted(by_round)), unreadable)

    def evaluations(self) -> Iterator[dict[str, Any]]:
        """Yield all evaluated rounds in the order in which they were written, in constant memory."""
        return (line for line in self.objects(METRICS) if _is_evaluation(line))

    def training_loss(self) -> dict[int, float]:
        """Return the training loss of each round in the journal, ascending; empty for methods without one."""
        found: dict[int, float] = {}
        for attempt in self.objects("journal.jsonl"):
            match attempt:
                case {"round": int(round), "statistics": {"loss": int() | float() as loss}}:
                    if attempt.get("outcome", "done") == "done":
                        found[round] = loss
        return dict(sorted(found.items()))

    def clients(self) -> list[dict[str, str]]:
        """Return the rows of ``clients.csv``; a last line that was cut short is dropped."""
        reader = csv.DictReader(io.StringIO(self.text("clients.csv")))
        try:
            rows = [row for row in reader if None not in row and None not in row.values()]
        except csv.Error as error:
            raise DataError(f"{self.path / 'clients.csv'}: not a CSV table ({error})") from error
        if not rows or "seen" not in rows[0]:
            raise DataError(f"{self.path / 'clients.csv'}: has no clients")
        return rows

    def confusions(self) -> dict[str, list[tuple[int, int, int]]]:
        """Return the lines of ``confusion.csv`` by client: class, predicted class, examples."""
        found: dict[str, list[tuple[int, int, int]]] = {}
        header, *lines = self.text("confusion.csv").splitlines() or [""]
        if header != "id,class,predicted,examples":
            raise DataError(f"{self.path / 'confusion.csv'}: damaged, found the header {header[:80]!r}")
        for line in lines:
            try:
                client, *numbers = line.split(",")
                true, predicted, examples = (_index(number) for number in numbers)
            except ValueError:
                raise DataError(f"{self.path / 'confusion.csv'}: damaged, found the line {line[:80]!r}") from None
            found.setdefault(client, []).append((true, predicted, examples))
        return found

    def manifest(self) -> Manifest:
        """Return the partition."""
        return Manifest.from_json(self.text("partition.json"), str(self.path / "partition.json"))

    def append(self, name: str, line: Mapping[str, Any]) -> None:
        """Append one object as a line."""
        self.line_file(name).append(line)

    def sync(self, *names: str) -> None:
        """Wait until everything appended to those of these files that exist is on the disk."""
        for path in (*(self.path / name for name in names), self.path):  # the folder, for the files' names
            with storing(path):
                try:
                    descriptor = os.open(path, os.O_RDONLY)
                except FileNotFoundError:
                    continue
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)

    def cut(self, name: str, end: int) -> None:
        """Keep the first bytes of a line file, all of them whole lines (:meth:`LineFile.cut`)."""
        self.line_file(name).cut(end)

    def rewrite(self, name: str, lines: Iterable[Mapping[str, Any]]) -> None:
        """Replace the lines of a line file."""
        self.line_file(name).rewrite(lines)


def _is_evaluation(line: Mapping[str, Any]) -> bool:
    """Return whether a line has what every reader of ``metrics.jsonl`` needs."""
    match line:
        case {
            "round": int(round), "seen": dict() | None, "unseen": dict() | None, "global": dict() | None,
            "communication": dict(),
        }:  # fmt: skip
            return round >= 0
    return False


def _index(text: str) -> int:
    """Return a whole number of up to 18 decimal digits.

    Raises
    ------
    ValueError
        If the text is not one.
    """
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise ValueError(text)
    return int(text)
