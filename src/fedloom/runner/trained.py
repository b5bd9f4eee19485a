"""The model of a run, finished or not: opened, and measured again."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedloom import experiment as experiments
from fedloom.data.federated import FederatedDataset, Manifest, OwnDataset
from fedloom.data.overlap import apart_by_reserve, overlap
from fedloom.data.own import OwnClients, own_manifest
from fedloom.data.partition import find_partition
from fedloom.errors import DataError, ExperimentError, QuorumError
from fedloom.evaluation.summary import Evaluation, groups
from fedloom.experiment import Experiment, OwnData
from fedloom.federation.checkpoint import check_fits
from fedloom.federation.folder import RunFolder
from fedloom.federation.journal import Journal
from fedloom.federation.loop import Loop
from fedloom.runner import assemble
from fedloom.runner.assemble import Parts
from fedloom.runner.observer import RunObserver
from fedloom.storage import is_url
from fedloom.words import counted


@dataclass(frozen=True)
class CheckpointEvaluation:
    """What an evaluation of a checkpoint found, and of what."""

    statistics: dict[str, Any]
    evaluation: Evaluation
    parts: Parts


def evaluate(
    run: Path, checkpoint: str = "last", partition: str | Path | None = None, data: Sequence[Path] = ()
) -> CheckpointEvaluation:
    """Measure a checkpoint of a run on the run's clients, or on those of another partition, who are all unseen.

    Parameters
    ----------
    data
        Folders of packed clients, of a run whose clients bring data of their own; those that trained are seen.

    Raises
    ------
    ExperimentError
        If ``checkpoint`` is none of last, best and a number.
    DataError
        If the folder is not that of a run, has no such checkpoint, or the partition is of another kind of data,
        incomplete or damaged.
    QuorumError
        If clients could not be measured.
    """
    parts, loop, dataset = restore(run, checkpoint, partition, data)
    evaluation = loop.evaluate()
    return found_of(run, partition, parts, dataset, evaluation, loop.extra(evaluation))


def found_of(
    run: Path,
    partition: str | Path | None,
    parts: Parts,
    dataset: FederatedDataset,
    evaluation: Evaluation,
    extra: Mapping[str, Any],
) -> CheckpointEvaluation:
    """Return the statistics of an evaluation of a partition's clients, and ``extra``.

    Raises
    ------
    QuorumError
        If clients could not be measured.
    """
    if not evaluation.present.all():  # statistics of the others would be taken for those of all
        missing = [evaluation.clients[int(i)] for i in (~evaluation.present).nonzero()]
        named = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        everyone = counted(len(evaluation.clients), "client")
        raise QuorumError(f"{len(missing)} of {everyone} could not be measured: {named}")
    if not parts.task.same_clients:  # whatever their partition calls them, this training never saw them
        evaluation = dataclasses.replace(evaluation, seen=torch.zeros_like(evaluation.seen))
    statistics = {
        "name": parts.experiment.name,
        "algorithm": parts.algorithm.name,
        "seed": parts.experiment.seed,
        "round": evaluation.round,
        "partition": dataset.manifest.fingerprint,
        **(
            {}
            if parts.task.same_clients or partition is None
            else {"overlap": overlap_with(run, parts.experiment, dataset)}
        ),
        **groups(evaluation, label_mask=parts.experiment.evaluation.label_mask),
        **extra,
    }
    return CheckpointEvaluation(statistics, evaluation, parts)


def overlap_with(run: Path, e: Experiment, dataset: FederatedDataset) -> dict[str, Any] | None:
    """What of the examples of another partition's clients the seen clients of a run were trained on.

    Known from the reserve that both partitions keep back, or else by a look at all examples. None: not known, since the
    run's partition is not in the data root.

    Raises
    ------
    DataError
        If a shard is damaged.
    """
    trained_on = Manifest.from_json(RunFolder.open(run).text("partition.json"), where=str(run / "partition.json"))
    found = apart_by_reserve(trained_on, dataset.manifest)
    if found is None:
        assert not isinstance(e.data, OwnData), "checked: --partition is of data sets alone"
        folder = find_partition(trained_on, e.data.root)
        if folder is None:
            return None
        found = overlap(FederatedDataset(folder, trained_on), dataset)
    return dataclasses.asdict(found)


def restore(
    run: Path, checkpoint: str = "last", partition: str | Path | None = None, data: Sequence[Path] = ()
) -> tuple[Parts, Loop, FederatedDataset]:
    """Return a run's server at a checkpoint, with clients in this process, and their data.

    Raises
    ------
    ExperimentError
        If ``checkpoint`` is none of last, best and a number.
    DataError
        If the folder is not that of a run, has no such checkpoint, or the partition is of another kind of data,
        incomplete or damaged.
    """
    which = check_checkpoint(checkpoint)
    folder = RunFolder.open(run)
    text = folder.text("partition.json")
    e = experiments.load(folder.checked("experiment.yaml"))
    trained_on = Manifest.from_json(text, where=str(run / "partition.json"))
    dataset = _clients_of(folder, e, trained_on, partition, data)
    for what in ("dataset", "classes", "input_shape"):
        found, needed = getattr(dataset.manifest, what), getattr(trained_on, what)
        if found != needed:
            raise DataError(f"{dataset.folder}: {what} is {found}, the run was trained with {needed}")
    if partition is not None and not is_url(partition):  # a store's shards are checked as they come
        dataset.verify()
    # The models have learned inputs as the training partition normalizes them.
    manifest = dataclasses.replace(dataset.manifest, normalization=trained_on.normalization)
    dataset = dataset.described_by(manifest)
    assemble.use_device("cpu", e.runtime.threads)
    parts = assemble.make_parts(e, dataset.manifest, trained_on)
    loop = assemble.loop(
        parts,
        assemble.in_process(parts, dataset, folder),
        folder,
        RunObserver(),
        threading.Event(),
        keep_descriptors=False,
    )
    loaded = loop.checkpoints.load(which)
    check_fits(loaded, loop.server.state, parts.algorithm.name, parts.algorithm.version)
    loop.server.load(loaded.state)
    loop.round = loaded.round
    if parts.task.same_clients:  # a client of another partition is another client, whatever its name
        loop.journal = Journal.read(folder, loop.round)
    return parts, loop, dataset


def check_checkpoint(checkpoint: str) -> str | int:
    """Return which checkpoint is meant: ``last``, ``best`` or a round.

    Raises
    ------
    ExperimentError
        If it is none of these.
    """
    if checkpoint in ("last", "best"):
        return checkpoint
    if not checkpoint.isdecimal():
        raise ExperimentError(f"--checkpoint: found {checkpoint!r}, allowed: last, best or a round")
    return int(checkpoint)


def _clients_of(
    folder: RunFolder, e: Experiment, trained_on: Manifest, partition: str | Path | None, data: Sequence[Path]
) -> FederatedDataset:
    """Whose models are asked for: the run's clients, those of another partition, or packed ones."""
    if isinstance(e.data, OwnData):
        if partition is not None or not data:
            found = "no --data" if partition is None else f"--partition {partition}"
            raise ExperimentError(
                f"--data: found {found}; the run's clients have data of their own; allowed: --data DIR"
            )
        clients = OwnClients.open(data)
        clients.check(e.data.own)
        trained = Journal.read(folder).ever.union(trained_on.roster)
        entries = [card.entry(seen=name in trained) for name, card in clients.cards.items()]
        dataset = OwnDataset(clients, own_manifest(e.data.own, entries, e.seed, trained_on.normalization))
        dataset.verify()
        return dataset
    if data:
        raise ExperimentError("--data: found with a run of data.dataset; allowed: --partition, or neither")
    return assemble.make_partition(e) if partition is None else FederatedDataset.open(partition)
