"""Reading of a run, in progress or finished, from its folder or from where it is published."""

from __future__ import annotations

import csv
import io
import itertools
import re
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.core.home import expanded
from fedloom.core.urls import is_url
from fedloom.data.manifest import Manifest
from fedloom.errors import DataError, ExperimentError
from fedloom.runs.files import EXPERIMENT, JOURNAL, METRICS, PARTITION, SUMMARY, Lines, RunFiles, checkpoint_files
from fedloom.storage import open_store

if TYPE_CHECKING:
    from fedloom.experiment import Experiment
    from fedloom.runs.published import PublishedRun

MANY_ROUNDS = 2000
"""Number of evaluated rounds above which :meth:`RunFolder.metrics` reads only some of them."""
POLL_INTERVAL_S = 1.0
"""Seconds between checks for a first publication."""
SECTIONS = ("name", "seed", "data", "model", "algorithm", "federation")
"""Required keys of a run's experiment."""
_ROUND = re.compile(rb'\{"round": (\d+),')


class RunFolder(RunFiles):
    """A run on disk (docs/design.md, §7), for all readers and for the run itself.

    Every reader raises ``DataError`` naming the file and what is wrong with it.

    Attributes
    ----------
    published
        Published run that the folder is a copy of; None for a local run.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.published: PublishedRun | None = None

    @classmethod
    def open(
        cls, where: str | Path, *, checkpoints: bool = True, wait: Callable[[float], bool] = lambda seconds: False
    ) -> RunFolder:
        """Return an existing run, finished or not.

        Raise DataError if there is no such run, or a published one is damaged; StorageError or RefusedError if the
        URL's store cannot be used.

        Parameters
        ----------
        where
            Folder of the run, or the URL of a published run. That is copied to a temporary folder, which is removed
            with the returned object.
        checkpoints
            Copy the checkpoints of a published run, too.
        wait
            Called with a number of seconds to wait while nothing is published; returns whether to check again.
        """
        if not is_url(where):
            folder = expanded(where)
            if not (folder / EXPERIMENT).is_file():
                fault = "is a file" if folder.exists() else "does not exist"
                fault = f"has no {EXPERIMENT}" if folder.is_dir() else fault
                raise DataError(f"{folder} is not a run's folder: it {fault}.", hint="fedloom run EXPERIMENT")
            return cls(folder)
        from fedloom.runs.published import PublishedRun

        store = open_store(where)
        run = cls(Path(tempfile.mkdtemp(prefix="fedloom-run-")))
        weakref.finalize(run, shutil.rmtree, run.path, ignore_errors=True)
        run.published = PublishedRun(store, run.path, checkpoints=checkpoints)
        while not run.published.restore() and wait(POLL_INTERVAL_S):
            pass
        run.refresh()
        return run

    def refresh(self) -> None:
        """Update the copy of a published run; raise as :meth:`open`."""
        if self.published is not None and not self.published.restore():
            raise DataError(f"{self.published.url} holds no published run.", hint="fedloom run --publish URL")

    # --- state --------------------------------------------------------------------------------------------------------

    @property
    def is_finished(self) -> bool:
        """True if the run has a summary."""
        return self.has(SUMMARY)

    def changed_at(self) -> float:
        """Return when the run last changed, in seconds since 1970."""
        files = (self.path / name for name in (SUMMARY, JOURNAL, METRICS, EXPERIMENT))
        return max(file.stat().st_mtime for file in files if file.exists())

    def durable(self) -> tuple[int, float] | None:
        """Return the last round with a checkpoint, and the time of writing it, in seconds since 1970."""
        for round, path in reversed(checkpoint_files(self.checkpoints).items()):
            with suppress(FileNotFoundError):  # superseded meanwhile
                return round, path.stat().st_mtime
        return None

    # --- whole files --------------------------------------------------------------------------------------------------

    def experiment(self) -> Experiment:
        """Return the experiment, validated again, with every default filled in."""
        from fedloom import experiment as experiments  # imports pydantic

        return experiments.of_run(self.text(EXPERIMENT), str(self.path / EXPERIMENT))

    def stored_experiment(self) -> dict[str, Any]:
        """Return the experiment as stored: with every default, and not validated again.

        Validation would import its method and model, and therefore torch.
        """
        from fedloom.experiment.yaml_reader import parse_yaml

        try:
            value, _ = parse_yaml(self.text(EXPERIMENT), str(self.path / EXPERIMENT))
        except ExperimentError as error:  # the fault is in a file of the run, not in a request
            raise DataError(str(error)) from error
        experiment = dict(value) if isinstance(value, dict) else {}  # an edited file has no digest
        if missing := [key for key in SECTIONS if key not in experiment]:
            raise DataError(f"{self.path / EXPERIMENT} is not an experiment: it has no {', '.join(missing)}")
        return experiment

    def manifest(self) -> Manifest:
        """Return the partition."""
        return Manifest.from_json(self.text(PARTITION), str(self.path / PARTITION))

    def clients(self) -> list[dict[str, str]]:
        """Return the rows of ``clients.csv``."""
        return list(csv.DictReader(io.StringIO(self.text("clients.csv"))))

    def confusions(self) -> dict[str, list[tuple[int, int, int]]]:
        """Return the lines of ``confusion.csv`` by client: class, predicted class, examples."""
        confusions: dict[str, list[tuple[int, int, int]]] = {}
        for client, *numbers in itertools.islice(csv.reader(io.StringIO(self.text("confusion.csv"))), 1, None):
            true, prediction, examples = map(int, numbers)
            confusions.setdefault(client, []).append((true, prediction, examples))
        return confusions

    # --- metrics and journal ------------------------------------------------------------------------------------------

    def evaluations(self) -> Iterator[dict[str, Any]]:
        """Yield all evaluated rounds in the order in which they were written, in constant memory."""
        return self.objects(METRICS)

    def last_evaluation(self, upto: int = sys.maxsize) -> tuple[dict[str, Any], int] | None:
        """Return the object in ``metrics.jsonl`` of the last round up to ``upto`` and the end of its line, or None.

        The file is read from its end.
        """
        return next((pair for pair in self._latest_first() if pair[0]["round"] <= upto), None)

    def last_evaluations(self, most: int, upto: int) -> list[dict[str, Any]]:
        """Return the objects of the last ``most`` rounds in ``metrics.jsonl`` up to ``upto``, ascending.

        Of several lines of a round, the last counts.
        """
        lines: list[dict[str, Any]] = []
        for line, _ in self._latest_first():
            if line["round"] <= upto and (not lines or line["round"] < lines[-1]["round"]):
                lines.append(line)
            if len(lines) == most:
                break
        return lines[::-1]

    def evaluation_of(self, round: int) -> dict[str, Any] | None:
        """Return the object in ``metrics.jsonl`` of one round; None if there is none."""
        return next((line for line, _ in self._latest_first(f'{{"round": {round},')), None)

    def _latest_first(self, beginning: str = "") -> Iterator[tuple[dict[str, Any], int]]:
        """Yield evaluated rounds and the ends of their lines, from the last to the first."""
        for line in self.line_file(METRICS).backwards(beginning):
            if line.object is not None:
                yield line.object, line.end

    def metrics(self) -> Lines:
        """Return the evaluated rounds, ascending; of a round written twice (before and after a resume), the later line.

        Above :data:`MANY_ROUNDS`, which a curve cannot show, only rounds at a wider spacing and the last one are read.
        """
        last = self.last_evaluation()
        first = [line["round"] for line in itertools.islice(self.evaluations(), 2)]
        spacing = 1 if last is None or len(first) < 2 else _spacing(max(1, first[1] - first[0]), last[0]["round"])

        def skipped(line: bytes) -> bool:
            of_round = _ROUND.match(line)
            return of_round is not None and int(of_round[1]) % spacing > 0

        lines = [line.object for line in self.placed(METRICS, skipped)]
        whole = [line for line in (last and last[0], *lines) if line is not None]
        by_round = {line["round"]: line for line in whole}
        return Lines((by_round[number] for number in sorted(by_round)), lines.count(None))

    def training_loss(self) -> dict[int, float]:
        """Return the training loss of each round in the journal, ascending; empty for methods without one."""
        losses = {
            attempt["round"]: attempt["statistics"]["loss"]
            for attempt in self.objects(JOURNAL)
            if attempt.get("outcome", "done") == "done" and "loss" in attempt.get("statistics", ())
        }
        return dict(sorted(losses.items()))


def _spacing(every: int, last: int) -> int:
    """Return the spacing of the rounds to read, for a run evaluated every ``every`` rounds up to ``last``."""
    spacing = every
    while last >= MANY_ROUNDS * spacing:
        spacing *= 2
    return spacing if spacing > every else 1
