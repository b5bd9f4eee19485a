"""Evaluation of the models that a server gives to the clients of a partition."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch

from fedloom.data.federated import FederatedDataset
from fedloom.errors import DataError
from fedloom.evaluation.measure import metrics
from fedloom.evaluation.summary import EvaluationResult
from fedloom.federation.loop import vocabulary
from fedloom.models.predictors import Predictor
from fedloom.runner.requesting_client import DescribedRun, PersonalizationClient
from fedloom.runner.trained import CheckpointEvaluation, found_of, restore
from fedloom.security.options import ClientOptions, Credentials
from fedloom.transport.newcomer import Models


async def converse_for_all(
    where: str, run: str, dataset: FederatedDataset, trust: ClientOptions | None = None, timeout_s: float = 60.0
) -> tuple[list[dict[str, Predictor]], list[int]]:
    """Request a model for each client of a partition; return each client's predictors and round.

    Parameters
    ----------
    run
        Name of the run that the server must serve.
    trust
        Credentials for the server.
    timeout_s
        Seconds within which each model must arrive.

    Raises
    ------
    DataError
        If it serves another run, or a client's data cannot be processed.
    RefusedError
        If it refuses the connection.
    QuorumError
        If no model arrives in time.
    """
    models = Models(where, Credentials(trust))
    made: list[dict[str, Predictor]] = []
    rounds: list[int] = []
    try:
        about = (await models.describe(timeout_s)).about
        if about.run != run:
            raise DataError(
                f"{where} serves the run {about.run}, but the evaluation is of {run}.", found=about.run, allowed=[run]
            )
        parts = DescribedRun.of(about).parts(dataset.manifest)
        words = vocabulary(parts.algorithm)
        for entry in dataset.manifest.clients:
            speaking = PersonalizationClient(parts, dataset, entry.id)
            answered = await models.converse(about, entry.id, words, speaking.speak, timeout_s=timeout_s)
            made.append(speaking.predictors)
            rounds.append(answered.round)
    finally:
        await models.close()
    return made, rounds


def evaluate_served(
    run: Path, where: str, partition: str | Path, trust: ClientOptions | None = None, timeout_s: float = 60.0
) -> CheckpointEvaluation:
    """Evaluate the models that a server gives to a partition's clients, all of which are new to the run.

    Parameters
    ----------
    run
        Folder of the served run, as far as it was published; it states the requirements on the data.
    where
        ``HOST:PORT``.
    trust, timeout_s
        As in :func:`converse_for_all`.

    Raises
    ------
    DataError
        As in :func:`~fedloom.runner.trained.restore` and :func:`converse_for_all`.
    RefusedError
        If the server refuses the connection.
    QuorumError
        If no model arrives in time.
    """
    parts, loop, dataset = restore(run, "last", partition)
    made, rounds = asyncio.run(converse_for_all(where, parts.experiment.name, dataset, trust, timeout_s))
    clients = tuple(entry.id for entry in dataset.manifest.clients)
    measured = metrics(
        made,
        [parts.examples_of(dataset)(client) for client in clients],
        loop.predictors,
        batch_size=parts.experiment.evaluation.batch_size,
        plan=parts.plan,
    )
    evaluation = EvaluationResult(
        round=max(rounds),
        clients=clients,
        seen=torch.zeros(len(clients), dtype=torch.bool),
        present=torch.ones(len(clients), dtype=torch.bool),
        predictors=loop.predictors,
        **measured.tensors(),
        plan=parts.plan,
        records={},
    )
    return found_of(
        run, partition, parts, dataset, evaluation, {"served": {"by": where, "rounds": sorted(set(rounds))}}
    )
