"""What a run may go on from: the checks of a folder, and of the partition a run was begun with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fedloom import experiment as experiments
from fedloom.data.federated import FederatedDataset, Manifest
from fedloom.errors import DataError, ExperimentError
from fedloom.experiment import Experiment
from fedloom.federation.folder import RunFolder

FREE_ON_RESUME = (
    ("runtime",),
    ("storage",),
    ("data", "root"),
    ("federation", "rounds"),
    ("federation", "deadline_s"),
    ("federation", "attempts"),
    ("federation", "checkpoint_every_s"),
)
"""What may differ between a run and its resumption: none of it changes a number."""


def check_folder(folder: RunFolder, e: Experiment, resume: bool) -> bool:
    """Whether there is a run to resume.

    Raises
    ------
    ExperimentError
        If the folder is taken and not to be resumed, or holds another experiment.
    """
    before = folder.read("experiment.yaml")
    if before is None:
        if folder.path.is_dir() and any(folder.path.iterdir()):
            raise ExperimentError(
                f"--out: found {folder.path}, which is not empty and not a run; allowed: a new folder"
            )
        return False
    if not resume:
        raise ExperimentError(
            f"{folder.path}: found a run there already", hint="go on with --resume, or choose another folder with --out"
        )
    old = experiments.load(folder.path / "experiment.yaml").model_dump(mode="json")
    new = e.model_dump(mode="json")
    for path in FREE_ON_RESUME:
        for tree in (old, new):
            for key in path[:-1]:
                tree = tree[key]
            tree.pop(path[-1], None)
    changed = list(_differences(old, new))
    if changed:
        raise ExperimentError(
            f"--resume: {folder.path} holds another experiment:\n  " + "\n  ".join(changed[:10]),
            hint="resume with the same settings, or choose another folder with --out",
        )
    return True


def check_partition(folder: RunFolder, dataset: FederatedDataset) -> None:
    """A resumed run goes on with the very examples it began with.

    Raises
    ------
    DataError
        If the partition on disk is another.
    """
    before = folder.read("partition.json")
    if before is None:
        return
    begun_with = Manifest.from_json(before, where=str(folder.path / "partition.json")).fingerprint
    if begun_with != dataset.manifest.fingerprint:
        raise DataError(
            f"--resume: the run was begun with partition {begun_with[:12]}, {dataset.folder} is now "
            f"{dataset.manifest.fingerprint[:12]}",
            hint="resume with the same FedLoom and data, or begin anew with --out",
        )


def _differences(old: Any, new: Any, where: str = "") -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from _differences(old.get(key), new.get(key), f"{where}.{key}" if where else str(key))
    elif old != new:
        yield f"{where}: the run has {old!r}, found {new!r}"
