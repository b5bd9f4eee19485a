"""Reads what a run left in its folder (DESIGN §7), also one that was stopped early."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.data.manifest import Manifest
from fedloom.errors import DataError

EXPERIMENT = "experiment.yaml"


@dataclass(frozen=True)
class Lines:
    """Objects of a JSON-lines file, and how many of its lines could not be read (one, after a crash)."""

    objects: list[dict[str, Any]]
    unreadable: int


@dataclass(frozen=True)
class RunFolder:
    """A run's folder.

    Every reader raises ``DataError`` naming the file and what is wrong with it.
    """

    path: Path

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """Return the folder of a run.

        Raises
        ------
        DataError
            If there is no such folder, or no experiment in it.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise DataError(f"{folder}: found no such folder, expected that of a run", hint="fedloom run EXPERIMENT")
        if not (folder / EXPERIMENT).is_file():
            raise DataError(
                f"{folder}: found no {EXPERIMENT}, expected the folder of a run", hint="fedloom run EXPERIMENT"
            )
        return cls(folder)

    def text(self, name: str) -> str:
        """Content of a file."""
        try:
            return (self.path / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise DataError(f"{self.path / name}: is not there") from None
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{self.path / name}: cannot be read ({error})") from error

    def json(self, name: str) -> dict[str, Any]:
        """Object of a JSON file."""
        text = self.text(name)
        try:
            value = json.loads(text)
        except ValueError as error:
            raise DataError(f"{self.path / name}: is not JSON ({error})") from error
        if not isinstance(value, dict):
            raise DataError(f"{self.path / name}: found a {type(value).__name__}, expected an object")
        return value

    def lines(self, name: str) -> Lines:
        """Objects of a JSON-lines file; lines that are no object are counted."""
        objects, unreadable = [], 0
        for line in self.text(name).splitlines():
            try:
                value = json.loads(line)
            except ValueError:
                value = None
            if isinstance(value, dict):
                objects.append(value)
            elif line.strip():
                unreadable += 1
        return Lines(objects, unreadable)

    def metrics(self) -> Lines:
        """Evaluated rounds, ascending; of a round written twice (before and after a resume) the later line."""
        found = self.lines("metrics.jsonl")
        wanted = ("round", "seen", "unseen", "global", "communication")
        whole = [line for line in found.objects if all(key in line for key in wanted)]
        by_round = {line["round"]: line for line in whole}
        unreadable = found.unreadable + len(found.objects) - len(whole)
        return Lines([by_round[number] for number in sorted(by_round)], unreadable)

    def clients(self) -> list[dict[str, str]]:
        """Rows of ``clients.csv``; a last line that was cut short is dropped."""
        reader = csv.DictReader(self.text("clients.csv").splitlines())
        rows = [row for row in reader if None not in row and None not in row.values()]
        if not rows or "seen" not in rows[0]:
            raise DataError(f"{self.path / 'clients.csv'}: has no clients")
        return rows

    def manifest(self) -> Manifest:
        """The partition."""
        return Manifest.from_json(self.text("partition.json"), str(self.path / "partition.json"))


def is_masked(group: dict[str, Any]) -> bool:
    """Whether the statistics of a group are those under the label mask (then the other reading is inside)."""
    return "unmasked" in group


def human_bytes(count: int | None) -> str:
    """Bytes for people, in the decimal units in which communication is counted; a dash where it is not known."""
    if count is None:
        return "–"
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:  # what rounds to 1000 belongs to the next unit
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
