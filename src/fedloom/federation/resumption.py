"""The point from which a run is resumed: its last durable round, and what its files say up to there."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from fedloom import digests
from fedloom.digests import RESTORE
from fedloom.errors import NEW_RUN, DataError
from fedloom.evaluation.summary import line_score
from fedloom.federation.checkpoint import Checkpoint, Checkpoints
from fedloom.federation.folder import METRICS, RELEASES, RunFolder
from fedloom.federation.journal import NAME, Journal


@dataclass(frozen=True)
class Resumption:
    """The last durable round of a run.

    Attributes
    ----------
    checkpoint, journal
        Its state, and the journal up to it.
    last
        The line of ``metrics.jsonl`` after which the run goes on; None: it has none that counts.
    evaluated
        The round of that line, or -1.
    """

    checkpoint: Checkpoint
    journal: Journal
    last: dict[str, Any] | None
    evaluated: int
    _end: int

    @classmethod
    def find(cls, folder: RunFolder, checkpoints: Checkpoints) -> Resumption | None:
        """Return the last durable round; None of a run that was stopped before the first. Nothing is changed.

        Raises
        ------
        DataError
            If the checkpoint, the journal or the metrics are damaged or lack something, or the run has come to its end
            and there is no checkpoint.
        """
        if not checkpoints.rounds():
            if folder.has("summary.json"):
                raise DataError(
                    f"{folder.path / 'checkpoints'}: found none, of a run that has come to its end",
                    hint=f"restore them, or {NEW_RUN}",
                )
            return None
        checkpoint = checkpoints.load("last")
        # Killed after this round had been evaluated and before a checkpoint said that it is the best: with its line
        # gone it is evaluated again, and found to be the best again.
        last = folder.last_evaluation(checkpoint.round)
        if last is not None and last[0]["round"] == checkpoint.round:
            score, best = line_score(last[0]), checkpoint.best
            if score is not None and (best is None or score > best.score):
                last = folder.last_evaluation(checkpoint.round - 1)
        line, end = last or (None, 0)
        evaluated = -1 if line is None else line["round"]
        journal = Journal.read(folder, checkpoint.round, checkpoints.rounds(), evaluated)
        if not journal.whole == journal.counted_rounds == checkpoint.round:
            raise DataError(
                f"{folder.path / NAME}: found no round {journal.whole + 1}, needed: all up to round "
                f"{checkpoint.round}, of which the last checkpoint is",
                hint=f"remove the checkpoints after round {journal.whole} to go on from the one before",
            )
        _check_followed(folder, journal)
        return cls(checkpoint, journal, line, evaluated, end)

    def rewind(self, folder: RunFolder) -> None:
        """Remove from the files of lines what came after the round: it runs again."""
        folder.reopen_lines()
        self.journal.rewind()
        folder.cut(METRICS, self._end)


def _check_followed(folder: RunFolder, journal: Journal) -> None:
    """Compare every line of the other files of lines with its digest, and each file with what the journal knows of it.

    Raises
    ------
    DataError
        If a line is damaged, or lines that were there when the journal was written are gone.
    """
    for name in (METRICS, RELEASES):
        wanted = journal.follows.get(name)
        found: set[str | None] = {None, digests.beginning(name)}
        for _ in folder.placed(name, skipped=partial(_note, found)):
            pass
        if wanted not in found:
            raise DataError(
                f"{folder.path / name}: damaged, it lacks the line that it ended with when {NAME} was written",
                hint=RESTORE,
            )


def _note(found: set[str | None], line: bytes) -> bool:
    """Add a line's digest to those found, and pass it over."""
    found.add(digests.said_by(line))
    return True
