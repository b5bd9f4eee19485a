"""``tracking.csv`` in the run's folder: a line for each number, ``round,name,value``."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.runner.observer import RunObserver
from fedloom.runner.tracking import of_attempt, of_line

if TYPE_CHECKING:
    from fedloom.federation.journal import Attempt

NAME = "tracking.csv"
HEAD = ("round", "name", "value")


class CSV(RunObserver):
    """Appends to ``tracking.csv``; rounds that run again after a resume are written anew.

    Parameters
    ----------
    folder
        The run's.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        if not self._path.exists():
            self._write("w", [HEAD])

    def resumed(self, round: int) -> None:
        """Take out what comes after this round."""
        with self._path.open(newline="", encoding="utf-8") as file:
            rows = [row for row in csv.reader(file) if len(row) == len(HEAD)]
        self._write("w", [HEAD, *(row for row in rows[1:] if int(row[0]) <= round)])

    def round_done(self, attempt: Attempt, rounds: int | None) -> None:
        """Write the numbers of a round."""
        self._add(attempt.round, of_attempt(attempt))

    def evaluated(self, line: dict[str, Any]) -> None:
        """Write the numbers of an evaluation."""
        self._add(line["round"], of_line(line))

    def _add(self, round: int, numbers: Mapping[str, float]) -> None:
        self._write("a", [(round, name, repr(value)) for name, value in numbers.items()])

    def _write(self, mode: str, rows: list[Any]) -> None:
        with self._path.open(mode, newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)
