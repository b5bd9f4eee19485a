"""Katib tracker: the file that Katib's collector reads in the pod of a trial (docs/search.md).

Its lines are ``TIME NAME=VALUE``, by round.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.engine.observer import RunObserver
from fedloom.runs.folder import RunFolder
from fedloom.tasks.names import Headline, headline_of, validation_value

if TYPE_CHECKING:
    from fedloom.experiment import Experiment


KATIB_FILE = "FEDLOOM_KATIB_FILE"
"""Environment variable that names the file."""

METRICS_PATH = "/var/log/katib/metrics.log"
"""Default path of the file: Katib's own."""

EPSILON = "epsilon"
"""Name of the ε of training."""


def objective_name(headline: Headline) -> str:
    """Return the name under which Katib receives the headline metric on validation examples."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", f"validation_{headline.name}")


def katib_lines(line: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for the validation value in a line of ``metrics.jsonl``, and one for the ε of training so far.

    Values that are unknown or not finite are left out, and so are test results.
    """
    time = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")  # RFC 3339
    epsilon = (line.get("privacy") or {}).get("epsilon")
    for name, value in ((objective_name(headline_of(line)), validation_value(line)), (EPSILON, epsilon)):
        if value is not None and math.isfinite(value):
            yield f"{time} {name}={float(value)!r}\n"


class Katib(RunObserver):
    """Tracker that writes the headline metric on validation examples, and the ε of training, after each evaluation.

    The evaluation before training is left out, since early stopping counts lines.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = Path(os.environ.get(KATIB_FILE) or METRICS_PATH)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text("")
        self._trains = True

    def started(self, experiment: Experiment, clients: int, location: str) -> None:
        """Record whether the run trains."""
        self._trains = experiment.federation.rounds != 0

    def resumed(self, round: int) -> None:
        """Write the evaluations that an earlier process made."""
        for line in RunFolder(self._folder).evaluations():
            if line["round"] <= round:
                self.evaluated(line)

    def evaluated(self, line: dict[str, Any]) -> None:
        """Write the numbers of an evaluation."""
        if line["round"] > 0 or not self._trains:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(katib_lines(line))
