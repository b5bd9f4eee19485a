"""Personalization of a run's model for one client that took no part in the run (docs/serving.md).

The server algorithm is behind an address, or in this process at a checkpoint of a run's folder or of a published run.
The client algorithm is the same, and so is the model, bit for bit.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fedloom.algorithms.client_group import ClientGroup
from fedloom.core.home import expanded
from fedloom.data.own import read_card
from fedloom.data.problem import Problem
from fedloom.errors import DataError, ExperimentError, QuorumError, argument
from fedloom.federation.loop import vocabulary
from fedloom.federation.served import served_round
from fedloom.messages import Message
from fedloom.models.predictors import Predictor, Predictors
from fedloom.runner import assemble, loops
from fedloom.runner.assemble import RunContext
from fedloom.runner.personal_model import PersonalModel
from fedloom.runner.personalization import PersonalizationRequest, is_run
from fedloom.runner.requesting_client import PersonalizationClient, RequestingClient, torch_threads
from fedloom.runner.serve import DurableRounds
from fedloom.runner.trained import check_checkpoint
from fedloom.runner.training_cost import training_claimed
from fedloom.runs.checkpoint import Checkpoints
from fedloom.runs.folder import RunFolder
from fedloom.security.options import Credentials
from fedloom.transport.model_stream import PRECISIONS
from fedloom.transport.newcomer import Answered, Models

T = TypeVar("T")


def request_model(request: PersonalizationRequest) -> PersonalModel:
    """Return a personalized model.

    Raise DataError if the data do not match the run's, or there is no such run or round; ExperimentError if the request
    is invalid or the run cannot satisfy it; RefusedError if the server refuses the connection; QuorumError if no model
    arrives in time.
    """
    return _from_run(request) if is_run(request.where) else _finished(_from_server(request))


async def request_model_async(request: PersonalizationRequest) -> PersonalModel:
    """Return a personalized model like :func:`request_model`, without blocking the event loop."""
    return await (asyncio.to_thread(_from_run, request) if is_run(request.where) else _from_server(request))


async def _from_server(request: PersonalizationRequest) -> PersonalModel:
    ends = time.monotonic() + request.timeout_s
    if not re.search(r":[0-9]+$", request.where):  # probably a misspelled folder
        raise DataError(f"{request.where} is not a run's folder, a URL, or HOST:PORT.", found=request.where)
    _check_for_server(request)
    models = Models(request.where, Credentials(request.client_options()))
    try:
        found = await models.describe(request.timeout_s)
        client = await asyncio.to_thread(RequestingClient.described, request, found.about)
        accountant = client.accountant
        private = client.guarantee is not None
        own_side = PersonalizationClient(
            client.parts, client.data, client.id, once=private, charge=lambda: client.spend(accountant)
        )
        answered = await models.converse(
            found.about,
            client.id,
            vocabulary(client.parts.algorithm),
            own_side.speak,
            precision=request.precision,
            round=None if request.checkpoint == "last" else int(request.checkpoint),
            timeout_s=max(0.001, ends - time.monotonic()),
            # With noise, every answer spends privacy; it would be wasted if the server's round changed.
            early=not private,
        )
    finally:
        await models.close()
    return client.model(own_side.predictors, answered, own_side.guarantee)


def _check_for_server(request: PersonalizationRequest) -> None:
    """Raise the errors of a request that can be found without the network."""
    if request.precision not in PRECISIONS:
        raise ExperimentError(
            f"{argument('precision')} must be one of {', '.join(PRECISIONS)} (got {request.precision!r}).",
            key="precision",
            found=request.precision,
            allowed=list(PRECISIONS),
        )
    if request.checkpoint == "best":
        raise ExperimentError(
            f"{argument('checkpoint')} must be last, or the round that the server serves (got 'best').",
            key="checkpoint",
            found=request.checkpoint,
            allowed=["last"],
        )
    check_checkpoint(str(request.checkpoint))
    request.check_privacy()
    if request.data is not None:
        read_card(expanded(request.data))


def _from_run(request: PersonalizationRequest) -> PersonalModel:
    """Return a model from a run's checkpoint; the conversation runs in this process, as in an evaluation."""
    if request.precision != "float32":
        raise ExperimentError(
            f"{argument('precision')} must be float32 if a run's folder is read (got {request.precision}).",
            key="precision",
            found=request.precision,
            allowed=["float32"],
        )
    request.check_privacy()
    which = str(request.checkpoint)
    folder = RunFolder.open(request.where)
    rounds = DurableRounds(folder, which)
    run, about = rounds.parts, rounds.about
    data = request.newcomer(Problem.from_json(about.problem), run.experiment)
    client = RequestingClient.of(request, about, data, dataclasses.replace(run, manifest=data.manifest))
    accountant = client.accountant
    if accountant is not None and (trained := _trained_client(folder, request)) is not None:
        accountant.add_training(training_claimed(request.where, trained))
    parts = _on_cpu(client.parts)
    made: list[dict[str, Predictor]] = []

    def keep(predictors: Predictors, group: ClientGroup) -> Message:
        made.extend(predictors)
        return parts.plan.nothing(1, len(loop.predictors))

    with torch_threads(parts.experiment.runtime.threads):
        found = Checkpoints(folder.checkpoints).load(check_checkpoint(which))
        transport = assemble.in_process(parts, data, folder, keep, secret=os.urandom(32))
        loop = loops.evaluator(parts, transport, folder)
        served_round(about, parts.algorithm, loop.server, found)  # raises if the method has nothing for new clients
        loop.server.load(found.state)
        loop.round = found.round
        guarantee = client.spend(accountant)
        lost = loop.personalize([client.id])
    if lost:
        raise DataError(lost[client.id])
    if not made:
        raise QuorumError(f"{parts.algorithm.name} has made no model for client {client.id}")
    answered = Answered(parts.experiment.name, found.round, found.digest, "float32", 0, 0, False)
    return client.model(made[0], answered, guarantee)


def _trained_client(folder: RunFolder, request: PersonalizationRequest) -> str | None:
    """Return the id that a packed client had in the training of a run; None if its examples took no part."""
    if request.data is None:
        return None
    sha256 = read_card(expanded(request.data)).sha256
    return next((each.id for each in folder.manifest().clients if each.seen and each.sha256 == sha256), None)


def _on_cpu(parts: RunContext) -> RunContext:
    e = parts.experiment
    runtime = e.runtime.model_copy(update={"device": "cpu", "clients_at_once": 1})
    return dataclasses.replace(parts, experiment=e.model_copy(update={"runtime": runtime}))


def _finished(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, even if an event loop is already running (as in a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()
