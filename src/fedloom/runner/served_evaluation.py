"""Evaluation of the models that a server gives to the clients of a partition."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch

from fedloom.data.federated import FederatedDataset
from fedloom.errors import DataError
from fedloom.evaluation.measure import metrics
from fedloom.evaluation.plan import EvaluationResult
from fedloom.federation.loop import vocabulary
from fedloom.models.predictors import Predictor
from fedloom.runner.requesting_client import DescribedRun, PersonalizationClient
from fedloom.runner.trained import CheckpointEvaluation, checkpoint_evaluation, restore
from fedloom.security.options import ClientOptions, Credentials
from fedloom.transport.newcomer import Models

TIMEOUT_S = 60.0
"""Seconds within which a server's answer, and each model, must arrive."""


async def converse_for_all(
    where: str, run: str, dataset: FederatedDataset, trust: ClientOptions | None = None
) -> tuple[list[dict[str, Predictor]], list[int]]:
    """Request a model for each client of a partition; return each client's predictors and round.

    ``run`` is the name of the run that the server at ``where`` must serve. Each model must arrive within
    :data:`TIMEOUT_S`.

    Raise DataError if the server has another run, or cannot process a client's data; RefusedError if it refuses the
    connection; QuorumError if a model does not arrive in time.
    """
    models = Models(where, Credentials(trust))
    made: list[dict[str, Predictor]] = []
    rounds: list[int] = []
    try:
        about = (await models.describe(TIMEOUT_S)).about
        if about.run != run:
            raise DataError(
                f"{where} serves the run {about.run}, but the evaluation is of {run}.", found=about.run, allowed=[run]
            )
        parts = DescribedRun.of(about).parts(dataset.manifest)
        words = vocabulary(parts.algorithm)
        for entry in dataset.manifest.clients:
            speaking = PersonalizationClient(parts, dataset, entry.id)
            answered = await models.converse(about, entry.id, words, speaking.speak, timeout_s=TIMEOUT_S)
            made.append(speaking.predictors)
            rounds.append(answered.round)
    finally:
        await models.close()
    return made, rounds


def evaluate_served(
    run: Path, where: str, partition: str | Path, trust: ClientOptions | None = None
) -> CheckpointEvaluation:
    """Evaluate the models that a server at ``HOST:PORT`` gives to a partition's clients, which are all new to the run.

    ``run`` is the folder of the served run, as far as it is published; it states the requirements on the data.

    Raise as :func:`~fedloom.runner.trained.restore` and :func:`converse_for_all`.
    """
    parts, loop, dataset = restore(run, "last", partition)
    made, rounds = asyncio.run(converse_for_all(where, parts.experiment.name, dataset, trust))
    clients = tuple(entry.id for entry in dataset.manifest.clients)
    measured = metrics(
        made,
        list(map(parts.examples_of(dataset), clients)),
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
    served = {"served": {"by": where, "rounds": sorted(set(rounds))}}
    return checkpoint_evaluation(run, partition, parts, dataset, evaluation, served)
