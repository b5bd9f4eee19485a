"""Published run of a federation: its experiment goes to the store, and its folder comes back at the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fedloom.core import digests
from fedloom.errors import DataError, ExperimentError

if TYPE_CHECKING:
    from fedloom.experiment import Experiment
    from fedloom.storage import Store


def is_finished(run: Store, experiment: Experiment) -> bool:
    """Return True if this exact run has been published completely."""
    from fedloom.runs.files import SUMMARY
    from fedloom.storage import Absent

    try:
        run.read(SUMMARY)
        return _experiment_at(run) == experiment.resolved_yaml().encode()
    except Absent:
        return False


def publish_experiment(run: Store, experiment: Experiment) -> None:
    """Publish a run's experiment for its aggregator.

    Raises
    ------
    ExperimentError
        If another experiment has the same run id and task.
    """
    from fedloom.storage import Taken

    text = experiment.resolved_yaml().encode()
    try:
        run.create("experiment.yaml", text)
    except Taken:
        if _experiment_at(run) != text:
            raise ExperimentError(
                f"{run.url} holds another experiment, which ran with the same run id and task",
                hint="use another run id or task",
            ) from None


def _experiment_at(run: Store) -> bytes:
    """Return the experiment of a run, as published for the aggregator or with the finished run."""
    try:
        return digests.without_digest("experiment.yaml", run.read("experiment.yaml"))
    except digests.Damaged as error:
        raise DataError(f"{run.url}/experiment.yaml is damaged: {error}", hint="use another run id or task") from error


def collect(run: Store, out: Path, say: Callable[[str], None]) -> None:
    """Fetch a finished run's folder, and print its location.

    Raises
    ------
    DataError
        If the run is incomplete.
    """
    from fedloom.runs.files import SUMMARY
    from fedloom.runs.published import STORE_FOLDERS

    names = [entry.name for entry in run.entries() if entry.name.partition("/")[0] not in STORE_FOLDERS]
    if SUMMARY not in names:
        raise DataError(f"{run.url}: the federation has ended without a {SUMMARY}")
    for name in sorted(names, key=lambda name: name == SUMMARY):
        run.download(name, out / name)
    say(f"the run is in {out}")
    if "report.html" not in names:  # its pod reported this, but its log will soon be deleted
        say(f"it has no report, because the aggregator's image cannot create one; create it here: fedloom report {out}")
