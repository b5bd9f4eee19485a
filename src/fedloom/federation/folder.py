"""A run's folder: whole files are written atomically, logs are appended a line at a time."""

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
"""Digests of files that have no place for one, and, of a finished run, those of the last lines of files of lines."""
ELSEWHERE = ("partition.json", "clients.csv", "confusion.csv")
"""Files whose digests are in :data:`DIGESTS`: the partition is byte for byte that of the data root, and tables are read
by other programs."""
RELEASES = "releases.jsonl"
"""Private answers of clients, of methods that promise privacy; it only grows, on a resume, too."""
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
"""What to do about a damaged file, where that is not :data:`digests.RESTORE`."""
ABSENT = "is not there"
"""How the message about a file ends that a run does not have, or not yet."""
MANY_ROUNDS = 2000
"""Of more evaluated rounds only some are read where all are asked for."""
_ROUND = re.compile(rb'\{"round": (\d+),')


class Lines(list[dict[str, Any]]):
    """Objects of a JSON-lines file, in its order; ``unreadable`` lines (one, after a crash) are left out."""

    def __init__(self, objects: Iterable[dict[str, Any]], unreadable: int) -> None:
        super().__init__(objects)
        self.unreadable = unreadable


class RunFolder:
    """The folder of one run (docs/design.md, §7), for those who write it and those who read it later.

    Every reader raises ``DataError`` naming the file and what is wrong with it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """Return the folder of a run that is there, finished or not.

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
        """Where checkpoints lie."""
        return self.path / "checkpoints"

    @property
    def states(self) -> Path:
        """Where clients keep their states."""
        return self.path / "states"

    @property
    def logs(self) -> Path:
        """Where each process writes its log."""
        return self.path / "logs"

    def has(self, name: str) -> bool:
        """Whether there is a file of this name, damaged or not."""
        return (self.path / name).exists()

    def is_free(self) -> bool:
        """Whether there is no such folder, or nothing in it but the half-written experiment of a run killed there."""
        if not self.path.is_dir():
            return not self.path.exists()
        names = (entry.name for entry in self.path.iterdir())
        return all(name.startswith(f".{EXPERIMENT}.") and name.endswith(PARTIAL) for name in names)

    def make(self, experiment: str | None = None) -> None:
        """Make the folder and its parts, and remove files that a crash left half-written.

        ``experiment.yaml`` comes first: what has it is a run, and can be resumed.
        """
        with storing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            if experiment is not None:
                self.write(EXPERIMENT, experiment)
            for folder in (self.checkpoints, self.logs):
                folder.mkdir(exist_ok=True)
        self.tidy()

    def tidy(self) -> None:
        """Remove files that processes left half-written which were killed.

        A worker of before that still writes a client's state loses nothing: it writes it again (``FolderStore.write``).
        """
        with storing(self.path, "removed"):
            for pattern in (f".*{PARTIAL}", f"checkpoints/.*{PARTIAL}", f"states/*/.*{PARTIAL}"):
                for partial in self.path.glob(pattern):
                    partial.unlink(missing_ok=True)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes from working in this folder; the hold goes when the process goes, killed or not.

        Raises
        ------
        ExperimentError
            If one does already.
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
        """Write a whole file, with its digest; if it has no place for one, that goes into ``digests.json``."""
        if name in ELSEWHERE:
            known = self._known()
            # The digest of before stays: whenever the process is killed, that of the file is there.
            accepted = [digests.digest_of(text.encode()), *known.get(name, ())]
            self._know({**known, name: list(dict.fromkeys(accepted))[:2]})
            write_atomically(self.path / name, text.encode())
        else:
            write_atomically(self.path / name, digests.sealed(name, text).encode())

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write an object as indented JSON."""
        self.write(name, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")

    def close_lines(self) -> None:
        """Write down with which lines files of lines end, those of a finished run."""
        self._know({**self._known(), **{name: [self.line_file(name).last_digest()] for name in ENDED}})

    def last_digests(self, *names: str) -> dict[str, str]:
        """Return the digest of the last line of each of these files of lines that is there."""
        return {name: self.line_file(name).last_digest() for name in names if self.has(name)}

    def reopen_lines(self) -> None:
        """Let files of lines grow again, of a run that goes on."""
        known = self._known()
        if any(name in known for name in ENDED):
            self._know({name: found for name, found in known.items() if name not in ENDED})

    def _know(self, known: Mapping[str, Sequence[str]]) -> None:
        self.write_json(DIGESTS, {"version": digests.VERSION, "files": known})

    def _known(self) -> dict[str, list[str]]:
        """The digests that files may have, by name; none if there is no such file."""
        match self.json_or_none(DIGESTS):
            case None:
                return {}
            case {"version": digests.VERSION, "files": dict() as files}:
                return files
        raise DataError(f"{self.path / DIGESTS}: written by another version of FedLoom", hint=digests.RESTORE)

    def read(self, name: str) -> str | None:
        """Return the content of a file, compared with its digest; None if it is not there."""
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
        """Return the content of a file that must be there."""
        found = self.read(name)
        if found is None:
            raise DataError(f"{self.path / name}: {ABSENT}")
        return found

    def json(self, name: str) -> dict[str, Any]:
        """Return the object of a JSON file that must be there."""
        try:
            value = parsed_json(self.text(name))
        except ValueError as error:
            raise DataError(f"{self.path / name}: is not JSON ({error})") from error
        if not isinstance(value, dict):
            raise DataError(f"{self.path / name}: found a {type(value).__name__}, expected an object")
        return value

    def json_or_none(self, name: str) -> dict[str, Any] | None:
        """Return the object of a JSON file; None if it is not there."""
        return None if self.read(name) is None else self.json(name)

    def line_file(self, name: str) -> LineFile:
        """Return a file of lines, which need not be there."""

        def ending() -> str | None:
            found = self._known().get(name)
            return found[0] if found else None

        return LineFile(self.path / name, ending if name in ENDED else lambda: None)

    def lines(self, name: str) -> Lines:
        """Return the objects of a JSON-lines file; none if it is not there. A line cut short is counted."""
        found = [line.object for line in self.placed(name)]
        objects = [value for value in found if value is not None]
        return Lines(objects, len(found) - len(objects))

    def objects(self, name: str) -> Iterator[dict[str, Any]]:
        """Give the objects of a JSON-lines file one after another, however many there are; none if it is not there."""
        return (line.object for line in self.placed(name) if line.object is not None)

    def placed(
        self, name: str, skipped: Callable[[bytes], bool] = lambda line: False, start: int = 0
    ) -> Iterator[Placed]:
        """Give the lines of a file, and where they are (:meth:`LineFile.forwards`)."""
        return self.line_file(name).forwards(skipped, start)

    def backwards(self, name: str, beginning: str = "") -> Iterator[Placed]:
        """Give the lines of a file, from the last to the first (:meth:`LineFile.backwards`)."""
        return self.line_file(name).backwards(beginning)

    def last_evaluation(self, upto: int = sys.maxsize) -> tuple[dict[str, Any], int] | None:
        """Return the object of ``metrics.jsonl`` of the last round up to this one, and where its line ends; or None.

        Only as much of the file is read as comes after it.
        """
        for line in self.backwards(METRICS):
            if line.whole and line.object is not None and _is_evaluation(line.object) and line.object["round"] <= upto:
                return line.object, line.end
        return None

    def last_evaluations(self, most: int, upto: int) -> list[dict[str, Any]]:
        """Return the objects of the last rounds of ``metrics.jsonl`` up to this one, ascending; of two, the later."""
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
        """Return the object of ``metrics.jsonl`` of one round; None if there is none."""
        of_round = (line.object for line in self.backwards(METRICS, f'{{"round": {round},'))
        return next((line for line in of_round if line is not None and _is_evaluation(line)), None)

    def metrics(self) -> Lines:
        """Return the evaluated rounds, ascending; of one written twice (before and after a resume) the later line.

        Of more than :data:`MANY_ROUNDS` only those of a wider spacing are read, and the last: as many as a curve shows.
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
        """Give all evaluated rounds one after another, as they were written, however many there are."""
        return (line for line in self.objects(METRICS) if _is_evaluation(line))

    def training_loss(self) -> dict[int, float]:
        """Return the training loss of each round that is in the journal, ascending; none of methods without one."""
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
        """Return, by client, the lines of ``confusion.csv``: class, predicted class, examples."""
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
        """Wait until the disk has what was appended so far to these files, those of them that are there."""
        for path in (*(self.path / name for name in names), self.path):  # the folder, for their names
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
        """Keep the first bytes of a file of lines, all of them whole lines (:meth:`LineFile.cut`)."""
        self.line_file(name).cut(end)

    def rewrite(self, name: str, lines: Iterable[Mapping[str, Any]]) -> None:
        """Replace a file of lines."""
        self.line_file(name).rewrite(lines)


def _is_evaluation(line: Mapping[str, Any]) -> bool:
    """Whether a line has what every reader of ``metrics.jsonl`` needs."""
    match line:
        case {
            "round": int(round), "seen": dict() | None, "unseen": dict() | None, "global": dict() | None,
            "communication": dict(),
        }:  # fmt: skip
            return round >= 0
    return False


def _index(text: str) -> int:
    """A whole number of up to 18 decimal digits, as a table has it."""
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise ValueError(text)
    return int(text)
