"""Point from which a run is resumed: its last durable round, and its files up to that round."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from fedloom.core import digests
from fedloom.core.digests import RESTORE
from fedloom.errors import NEW_RUN, DataError
from fedloom.evaluation.summary import line_score
from fedloom.runs.checkpoint import Checkpoint, Checkpoints
from fedloom.runs.files import JOURNAL, METRICS, RELEASES
from fedloom.runs.folder import RunFolder
from fedloom.runs.journal import Journal


@dataclass(frozen=True)
class Resumption:
    """Last durable round of a run."""

    checkpoint: Checkpoint
    journal: Journal
    """Journal up to the round."""
    last: dict[str, Any] | None
    """Line of ``metrics.jsonl`` after which the run continues; None if no line counts."""
    evaluated: int
    """Round of that line, or -1."""
    _end: int

    @classmethod
    def find(cls, folder: RunFolder, checkpoints: Checkpoints) -> Resumption | None:
        """Return the last durable round; None if a run was stopped before the first. Changes nothing.

        Raise DataError if the checkpoint, the journal or the metrics are damaged or incomplete, or the run has finished
        and has no checkpoint.
        """
        if not checkpoints.rounds():
            if folder.has("summary.json"):
                raise DataError(
                    f"{folder.path / 'checkpoints'} is empty, although the run has finished.",
                    hint=f"restore them, or {NEW_RUN}",
                )
            return None
        checkpoint = checkpoints.load("last")
        # The run may have been killed between the evaluation of this round and the checkpoint that records it as the
        # best. Without its line, the round is evaluated again, and again found to be the best.
        last = folder.last_evaluation(checkpoint.round)
        if last is not None and last[0]["round"] == checkpoint.round:
            score, best = line_score(last[0]), checkpoint.best
            if score is not None and (best is None or score > best.score):
                last = folder.last_evaluation(checkpoint.round - 1)
        line, end = last or (None, 0)
        last_evaluation = -1 if line is None else line["round"]
        journal = Journal.read(folder, checkpoint.round, checkpoints.rounds(), last_evaluation)
        if not journal.whole == journal.counted_rounds == checkpoint.round:
            raise DataError(
                f"{folder.path / JOURNAL} lacks round {journal.whole + 1}; the last checkpoint, of round "
                f"{checkpoint.round}, needs all rounds up to it.",
                hint=f"remove the checkpoints after round {journal.whole} to continue from the previous one",
            )
        _check_followed(folder, journal)
        return cls(checkpoint, journal, line, last_evaluation, end)

    def rewind(self, folder: RunFolder) -> None:
        """Remove from the line files everything after the round: later rounds run again."""
        folder.reopen_lines()
        self.journal.rewind()
        folder.line_file(METRICS).cut(self._end)


def _check_followed(folder: RunFolder, journal: Journal) -> None:
    """Check the digests of all lines in the other line files, and that the lines known to the journal exist.

    Raise DataError if a line is damaged, or lines that existed when the journal was written are missing.
    """
    for name in (METRICS, RELEASES):
        expected = journal.follows.get(name)
        digests_seen: set[str | None] = {None, digests.beginning(name)}
        for _ in folder.placed(name, skip=partial(_note, digests_seen)):
            pass
        if expected not in digests_seen:
            raise DataError(
                f"{folder.path / name} is damaged: it lacks its last line as of when {JOURNAL} was written",
                hint=RESTORE,
            )


def _note(digests_seen: set[str | None], line: bytes) -> bool:
    """Add a line's digest to those found; return True to skip the line."""
    digests_seen.add(digests.stated_digest(line))
    return True
