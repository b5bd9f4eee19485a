"""CSV tracker: ``tracking.csv`` in the run's folder, with a line ``round,name,value`` per number."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedloom.trackers.numbers import NumberTracker

NAME = "tracking.csv"
HEAD = ("round", "name", "value")


class CSV(NumberTracker):
    """Tracker that appends to ``tracking.csv``; after a resume, repeated rounds replace their earlier lines."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        if not self._path.exists():
            self._write("w", [HEAD])

    def resumed(self, round: int) -> None:
        """Remove the lines of later rounds."""
        with self._path.open(newline="", encoding="utf-8") as file:
            rows = [row for row in csv.reader(file) if len(row) == len(HEAD)]
        self._write("w", [HEAD, *(row for row in rows[1:] if int(row[0]) <= round)])

    def add(self, round: int, numbers: Mapping[str, float]) -> None:
        """Append the numbers."""
        self._write("a", [(round, name, repr(value)) for name, value in numbers.items()])

    def _write(self, mode: str, rows: list[Any]) -> None:
        with self._path.open(mode, newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)
