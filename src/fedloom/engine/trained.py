"""Evaluation of a run's saved model, whether the run is finished or not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedloom.algorithms.client_group import ClientGroup
from fedloom.core.urls import is_url
from fedloom.core.words import pluralize
from fedloom.data.federated import ClientData, FederatedDataset, Manifest, OwnDataset
from fedloom.data.folders import data_root
from fedloom.data.overlap import apart_by_reserve, overlap
from fedloom.data.own import OWN, OwnClients, own_manifest
from fedloom.data.partition import find_partition
from fedloom.engine import assemble, loops, run_data
from fedloom.engine.assemble import RunContext
from fedloom.engine.constants import check_run_constants
from fedloom.engine.results import extra_metrics
from fedloom.errors import DataError, ExperimentError, QuorumError, argument
from fedloom.evaluation.group_statistics import groups
from fedloom.evaluation.measure import metrics
from fedloom.evaluation.plan import EvaluationResult
from fedloom.evaluation.summary import headline_keys
from fedloom.experiment import Data, Experiment, OwnData
from fedloom.federation.evaluator import Evaluator
from fedloom.messages import Message
from fedloom.models.predictors import Predictor, Predictors
from fedloom.runs.checkpoint import check_fits
from fedloom.runs.folder import RunFolder
from fedloom.runs.journal import Journal


@dataclass(frozen=True)
class CheckpointEvaluation:
    """Result of evaluating a checkpoint."""

    statistics: dict[str, Any]
    evaluation: EvaluationResult
    parts: RunContext


def evaluate(
    run: Path, checkpoint: str = "last", partition: str | Path | None = None, data: Sequence[Path] = ()
) -> CheckpointEvaluation:
    """Evaluate a run's checkpoint on its own clients, or on another partition's, which are all unseen.

    ``data`` are folders of packed clients, for a run whose clients have data of their own; those that trained are seen.

    Raise as :func:`restore`; QuorumError if clients could not be measured.
    """
    parts, evaluator, dataset = restore(run, checkpoint, partition, data)
    evaluation = evaluator.evaluate()
    extra = extra_metrics(parts.experiment, evaluator.roster, evaluator.folder, keep=False)
    return checkpoint_evaluation(run, partition, parts, dataset, evaluation, extra(evaluation))


def evaluate_predictors(
    parts: RunContext,
    dataset: FederatedDataset,
    clients: Sequence[str],
    predictors: Predictors,
    names: Sequence[str],
    round: int,
) -> EvaluationResult:
    """Return measurements of predictors, by ``names``, that new clients of a data set were given after a round."""
    size, examples = parts.experiment.evaluation.batch_size, list(map(parts.examples_of(dataset), clients))
    return EvaluationResult(
        round=round,
        clients=tuple(clients),
        seen=torch.zeros(len(clients), dtype=torch.bool),
        present=torch.ones(len(clients), dtype=torch.bool),
        predictors=tuple(names),
        **metrics(predictors, examples, names, batch_size=size, plan=parts.plan).tensors(),
        plan=parts.plan,
        records={},
    )


def checkpoint_evaluation(
    run: Path,
    partition: str | Path | None,
    parts: RunContext,
    dataset: FederatedDataset,
    evaluation: EvaluationResult,
    extra: Mapping[str, Any],
) -> CheckpointEvaluation:
    """Return the statistics of an evaluation of a partition's clients, together with ``extra``.

    Raise QuorumError if clients could not be measured.
    """
    if not evaluation.present.all():  # statistics of a subset would look like those of all clients
        missing = [evaluation.clients[int(i)] for i in (~evaluation.present).nonzero()]
        listing = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        everyone = pluralize(len(evaluation.clients), "client")
        raise QuorumError(f"{len(missing)} of {everyone} could not be measured: {listing}")
    if not parts.setup.same_clients:  # this run never saw them, whatever their partition says
        evaluation = dataclasses.replace(evaluation, seen=torch.zeros_like(evaluation.seen))
    is_new = partition is not None and not parts.setup.same_clients
    statistics = {
        "name": parts.experiment.name,
        "algorithm": parts.algorithm.name,
        "seed": parts.experiment.seed,
        "round": evaluation.round,
        "partition": dataset.manifest.fingerprint,
        **({"overlap": overlap_with(run, parts.experiment, dataset)} if is_new else {}),
        **headline_keys(evaluation.plan),
        **groups(evaluation, label_mask=parts.experiment.evaluation.label_mask),
        **extra,
    }
    return CheckpointEvaluation(statistics, evaluation, parts)


def overlap_with(run: Path, e: Experiment, dataset: FederatedDataset) -> dict[str, Any] | None:
    """Return the number of another partition's examples that the run's seen clients were trained on.

    This is derived from the reserve that both partitions hold back, or else by comparing all examples. None: unknown,
    because the run's partition is not in the data root.

    Raise DataError if a shard is damaged.
    """
    trained_on = RunFolder.open(run).manifest()
    if (clients_apart := apart_by_reserve(trained_on, dataset.manifest)) is not None:
        return dataclasses.asdict(clients_apart)
    folder = None if isinstance(e.data, OwnData) else find_partition(trained_on, e.data.root)
    return None if folder is None else dataclasses.asdict(overlap(FederatedDataset(folder, trained_on), dataset))


def restore(
    run: Path, checkpoint: str = "last", partition: str | Path | None = None, data: Sequence[Path] = ()
) -> tuple[RunContext, Evaluator, FederatedDataset]:
    """Return a run's parts, an evaluator at a checkpoint with clients in this process, and their data.

    Raise ExperimentError if ``checkpoint`` is not ``last``, ``best`` or a number; DataError if the folder is not a run
    or has no such checkpoint, or the partition has another kind of data, is incomplete, or is damaged.
    """
    checkpoint_chosen = check_checkpoint(checkpoint)
    folder = RunFolder.open(run)
    trained_on, e = folder.manifest(), folder.experiment()
    dataset = _clients_of(folder, e, trained_on, partition, data)
    if dataset.manifest.dataset != trained_on.dataset:
        raise DataError(f"{dataset.folder}: dataset is {dataset.manifest.dataset}; the run has {trained_on.dataset}")
    if (fault := dataset.manifest.spec.mismatch(trained_on.spec, "the run")) is not None:
        raise DataError(f"{dataset.folder}: {fault}")
    if partition is not None and not is_url(partition):  # a store's shards are checked as they are fetched
        dataset.verify()
    # The models were trained on inputs normalized as in the training partition.
    manifest = dataclasses.replace(dataset.manifest, spec=trained_on.spec)
    dataset = dataset.described_by(manifest)
    if partition is None and isinstance(e.data, Data) and manifest.fingerprint != trained_on.fingerprint:
        raise DataError(
            f"{run}: the run's clients have partition {trained_on.fingerprint[:12]}, which is not in the data root "
            f"{data_root(e.data.root)}, and this FedLoom creates {manifest.fingerprint[:12]} from its settings",
            hint="evaluate it where the partition is, or with the version of FedLoom that it ran with",
        )
    assemble.use_device("cpu", e.runtime.threads)
    parts = assemble.make_parts(e, dataset.manifest, trained_on)
    check_run_constants(folder, parts)
    evaluator = loops.evaluator(parts, assemble.in_process(parts, dataset, folder), folder)
    loaded = evaluator.checkpoints.load(checkpoint_chosen)
    check_fits(loaded, evaluator.server.state, parts.algorithm.name, parts.algorithm.version)
    evaluator.server.load(loaded.state)
    evaluator.round = loaded.round
    if parts.setup.same_clients:  # clients of another partition are different clients, even under the same id
        evaluator.journal = Journal.read(folder, evaluator.round)
    return parts, evaluator, dataset


def personalize_each(
    parts: RunContext,
    evaluator: Evaluator,
    dataset: FederatedDataset,
    clients: Sequence[str],
    use: Callable[[ClientData, Mapping[str, Predictor]], None],
) -> dict[str, str]:
    """Personalize clients in this process, and call ``use`` with the data and the predictors of each.

    Return the clients that got no model, with the reasons.
    """

    def conclude(predictors: Predictors, group: ClientGroup) -> Message:
        for client, predictor_set in zip(group.clients, predictors, strict=True):
            use(client, predictor_set)
        return parts.plan.nothing(len(predictors), len(evaluator.predictors))

    evaluator.transport = assemble.in_process(parts, dataset, evaluator.folder, conclude)
    return evaluator.personalize(clients)


def check_predictor(name: str, names: Sequence[str]) -> None:
    """Raise ExperimentError if a method has no predictor of this name."""
    if name not in names:
        raise ExperimentError(
            f"{argument('predictor')} must be one of {', '.join(names)} (got {name!r}).",
            key="predictor",
            found=name,
            allowed=list(names),
        )


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Set torch's number of threads in the block to the run's, since the bits depend on it."""
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads_before)


def check_checkpoint(checkpoint: str) -> str | int:
    """Return the checkpoint to load: ``last``, ``best`` or a round number.

    Raise ExperimentError if ``checkpoint`` is none of these.
    """
    if checkpoint in ("last", "best"):
        return checkpoint
    if not checkpoint.isdecimal():
        raise ExperimentError(
            f"{argument('checkpoint')} must be last, best or a round (got {checkpoint!r}).",
            key="checkpoint",
            found=checkpoint,
            allowed=["last", "best"],
        )
    return int(checkpoint)


def _clients_of(
    folder: RunFolder, e: Experiment, trained_on: Manifest, partition: str | Path | None, data: Sequence[Path]
) -> FederatedDataset:
    """Return the data of the clients to evaluate: the run's own, another partition's, or packed ones."""
    if isinstance(e.data, OwnData):
        if partition is not None and (given_dataset := FederatedDataset.open(partition)).manifest.dataset == OWN:
            return given_dataset  # an audit's packed clients with canaries
        if partition is not None or not data:
            instead = "" if partition is None else f", not {argument('partition')}"
            raise ExperimentError(
                f"The run's clients have their own data: give their folders with {argument('packed')}{instead}.",
                key="packed",
            )
        clients = OwnClients.open(data)
        clients.check(e.data.own)
        trained_clients = Journal.read(folder).ever.union(trained_on.roster)
        entries = [card.entry(seen=name in trained_clients) for name, card in clients.cards.items()]
        dataset = OwnDataset(clients, own_manifest(e.data.own, entries, e.seed, trained_on.spec.normalization))
        dataset.verify()
        return dataset
    if data:
        raise ExperimentError(
            f"{argument('packed')} is for runs whose clients have their own data, and this run has data.dataset; "
            f"give {argument('partition')}, or neither.",
            key="packed",
        )
    if partition is not None:
        return FederatedDataset.open(partition)
    # The stored partition needs neither its source, which may have moved, nor the version of FedLoom that made it.
    folder_of_run = find_partition(trained_on, e.data.root)
    if folder_of_run is None:
        return run_data.make_partition(e)
    own_dataset = FederatedDataset.open(folder_of_run)
    own_dataset.verify()
    return own_dataset
