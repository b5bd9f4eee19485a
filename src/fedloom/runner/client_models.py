"""The models of a run's clients, as modules of torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from fedloom.algorithms.base import Group
from fedloom.errors import DataError, ExperimentError, QuorumError
from fedloom.evaluation.measure import nothing_measured
from fedloom.messages import Message
from fedloom.models.predictors import Predictors
from fedloom.runner import assemble
from fedloom.runner.personal import torch_threads
from fedloom.runner.personal_model import PersonalModel, card_of
from fedloom.runner.serve import about
from fedloom.runner.trained import restore


def client_models(
    run: Path,
    clients: Sequence[str] | None = None,
    checkpoint: str = "last",
    predictor: str = "personal",
    data: Sequence[Path] = (),
) -> dict[str, PersonalModel]:
    """Return the models of a run's clients by id, each what its evaluation at this checkpoint measured.

    Parameters
    ----------
    clients
        Ids, or names of owners; None: all of the run's, seen and unseen.
    checkpoint
        ``last``, ``best`` or a round.
    predictor
        Which of those that the method gives a client.
    data
        Folders of packed clients, of a run whose clients bring data of their own.

    Raises
    ------
    DataError
        If there is no such run, checkpoint or client, or its data are missing or damaged.
    ExperimentError
        If the method gives no such predictor.
    QuorumError
        If a client got no model.
    """
    with torch_threads(1):  # put back what it is set to on the way
        parts, loop, dataset = restore(run, checkpoint, data=data)
        entries = dataset.manifest.clients
        owned = {entry.owner: entry.id for entry in entries if entry.owner is not None}
        wanted = [entry.id for entry in entries] if clients is None else [owned.get(name, name) for name in clients]
        for client in wanted:
            dataset.manifest.entry(client)
        if not dataset.manifest.classes:
            raise DataError(f"{run}: its data have no classes, so that its models predict none; allowed: with classes")
        if predictor not in loop.predictors:
            raise ExperimentError(f"predictor: found {predictor!r}; allowed: {', '.join(loop.predictors)}")
        e, problem = parts.experiment, json.loads(about(parts).problem)
        digest = loop.checkpoints.load(loop.round).digest
        made: dict[str, PersonalModel] = {}

        def keep(predictors: Predictors, group: Group) -> Message:
            for named, client in zip(predictors, group.clients, strict=True):
                card = card_of(
                    problem,
                    run=e.name,
                    round=loop.round,
                    digest=digest,
                    algorithm=e.algorithm.name,
                    predictor=predictor,
                    model=e.model.name,
                    client=client.id,
                )
                made[client.id] = PersonalModel(named[predictor], card)
            return nothing_measured(len(predictors), len(loop.predictors), dataset.manifest.classes)

        loop.carrier = assemble.in_process(parts, dataset, loop.folder, keep)
        lost = loop.personalize(wanted)
    if lost:
        client, reason = next(iter(lost.items()))
        raise QuorumError(f"{len(lost)} of {len(wanted)} clients got no model; {client}: {reason}")
    return {client: made[client] for client in wanted}
