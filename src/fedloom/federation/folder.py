"""A run's folder: whole files are written atomically, logs are appended a line at a time."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedloom.errors import DataError, ExperimentError
from fedloom.storage.folder import PARTIAL, storing, write_atomically


class RunFolder:
    """The folder of one run (docs/design.md, §7)."""

    def __init__(self, path: Path) -> None:
        self.path = path

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

    def make(self, experiment: str | None = None) -> None:
        """Make the folder and its parts, and remove files that a crash left half-written.

        ``experiment.yaml`` comes first: what has it is a run, and can be resumed.
        """
        with storing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            if experiment is not None:
                self.write("experiment.yaml", experiment)
            for folder in (self.checkpoints, self.logs):
                folder.mkdir(exist_ok=True)
            for folder in (self.path, self.checkpoints):
                for partial in folder.glob(f".*{PARTIAL}"):
                    partial.unlink()

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
                    hint="wait until it has ended, or choose another folder with --out",
                ) from None
            yield
        finally:
            os.close(descriptor)

    def write(self, name: str, text: str) -> None:
        """Write a whole file."""
        write_atomically(self.path / name, text.encode())

    def write_json(self, name: str, value: Any) -> None:
        """Write a value as indented JSON."""
        self.write(name, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")

    def read(self, name: str) -> str | None:
        """Read a file; None if it is not there.

        Raises
        ------
        DataError
            If it is no text.
        """
        try:
            return (self.path / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except UnicodeDecodeError as error:
            raise DataError(f"{self.path / name}: damaged, found bytes that are no UTF-8 ({error.reason})") from error

    def append(self, name: str, line: Mapping[str, Any]) -> None:
        """Append one object as a line."""
        with storing(self.path / name), (self.path / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")

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

    def rewrite(self, name: str, lines: Iterable[Mapping[str, Any]]) -> None:
        """Replace a file of lines."""
        self.write(name, "".join(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in lines))

    def lines(self, name: str) -> Iterator[dict[str, Any]]:
        """Read a file of objects, one a line; one cut short by a crash is skipped."""
        for line in (self.read(name) or "").splitlines():
            try:
                found = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(found, dict):
                yield found
