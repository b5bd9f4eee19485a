"""Personalization of a run's model for clients that took no part in the run (docs/serving.md).

The server algorithm is behind an address, or in this process at a checkpoint of a run's folder or of a published run.
The client's side of the conversation is the same, and so is the model, bit for bit.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from fedloom import experiment as experiments
from fedloom.algorithms.base import Algorithm, find_algorithm
from fedloom.algorithms.client_group import ClientGroup
from fedloom.core.home import expanded
from fedloom.core.words import printable
from fedloom.data.augment import augmentation
from fedloom.data.federated import FederatedDataset
from fedloom.data.manifest import Manifest
from fedloom.data.newcomer import Newcomer
from fedloom.data.own import read_card
from fedloom.data.problem import Problem
from fedloom.engine import assemble
from fedloom.engine.assemble import RunContext
from fedloom.engine.constants import check_constants
from fedloom.engine.trained import (
    CheckpointEvaluation,
    check_checkpoint,
    check_predictor,
    checkpoint_evaluation,
    evaluate_predictors,
    restore,
    torch_threads,
)
from fedloom.errors import DataError, ExperimentError, QuorumError, RefusedError, argument
from fedloom.experiment import Experiment, Runtime
from fedloom.federation.client_side import ClientConfig, ClientSide
from fedloom.federation.loop import vocabulary
from fedloom.federation.served import About, ServedRound, Tile, served_round, useless_values
from fedloom.federation.transport import ConversationKey, Lost
from fedloom.ledger.ledger import PrivacyAccountant
from fedloom.ledger.training_cost import training_claimed
from fedloom.messages import Message, Metrics
from fedloom.models.predictors import Predictor, Predictors, predictor_of
from fedloom.privacy.examples import ExamplePrivacy
from fedloom.privacy.gaussian_mechanism import gaussian_epsilon
from fedloom.privacy.spent import PrivacyGuarantee
from fedloom.runs.checkpoint import Checkpoints
from fedloom.runs.folder import RunFolder
from fedloom.security.options import ClientOptions, Credentials
from fedloom.serving.personal_model import PersonalModel, card_of
from fedloom.serving.personalization import PersonalizationRequest, is_run
from fedloom.serving.serve import DurableRounds
from fedloom.transport.newcomer import Answered, Models

T = TypeVar("T")

TIMEOUT_S = 60.0
"""Seconds within which a server's answer, and each model, must arrive in an evaluation."""


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
    if check_checkpoint(str(request.checkpoint)) == "best":
        raise ExperimentError(
            f"{argument('checkpoint')} must be last, or the round that the server serves (got 'best').",
            key="checkpoint",
            found="best",
            allowed=["last"],
        )
    request.check_privacy()
    if request.data is not None:
        read_card(expanded(request.data))
    models = Models(request.where, Credentials(request.client_options()))
    try:
        description = (await models.describe(request.timeout_s)).about
        client = await asyncio.to_thread(RequestingClient.described, request, description)
        answer = await models.converse(
            description,
            client.id,
            vocabulary(client.parts.algorithm),
            client.speak,
            round=None if request.checkpoint == "last" else int(request.checkpoint),
            timeout_s=max(0.001, ends - time.monotonic()),
        )
    finally:
        await models.close()
    return client.model(answer)


def _from_run(request: PersonalizationRequest) -> PersonalModel:
    """Return a model from a run's checkpoint, whose server algorithm runs in this process."""
    request.check_privacy()
    checkpoint_name = str(request.checkpoint)
    folder = RunFolder.open(request.where)
    rounds = DurableRounds(folder, checkpoint_name)
    run, description = rounds.parts, rounds.about
    data = request.newcomer(Problem.from_json(description.problem), run.experiment)
    client = RequestingClient(request, description, data, dataclasses.replace(run, manifest=data.manifest))
    if client.accountant is not None and (trained_client := _trained_client(folder, request)) is not None:
        client.accountant.add_training(training_claimed(request.where, trained_client))
    with torch_threads(run.experiment.runtime.threads):
        checkpoint = Checkpoints(folder.checkpoints).load(check_checkpoint(checkpoint_name))
        round = served_round(description, run.algorithm, run.server_algorithm(), checkpoint)
        converse_here(round, client.id, client.speak)
    return client.model(Answered(description.run, round.round, round.digest, 0, 0))


def converse_here(round: ServedRound, client: str, speak: Callable[[int, int, Message], Message | None]) -> None:
    """Hold a client's conversation with a server algorithm in this process.

    Raise DataError if the client's answers cannot be used.
    """
    exchange, answers = 0, [speak(round.round, 0, round.opening)]

    def usable() -> list[Message | None]:
        if answers[-1] is not None and (fault := useless_values(answers[-1])) is not None:
            raise DataError(fault)
        return [answers[-1]]

    def write(message: Message, _: type[Message] | None) -> None:
        nonlocal exchange
        exchange += 1
        answers.append(speak(round.round, exchange, message))

    if round.answer is not Metrics:
        round.server.personalize(Tile([client], usable(), write, usable))


def _trained_client(folder: RunFolder, request: PersonalizationRequest) -> str | None:
    """Return the id that a packed client had in the training of a run; None if its examples took no part."""
    if request.data is None:
        return None
    sha256 = read_card(expanded(request.data)).sha256
    return next((each.id for each in folder.manifest().clients if each.seen and each.sha256 == sha256), None)


def _finished(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, even if an event loop is already running (as in a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


@dataclass(frozen=True, eq=False)
class DescribedRun:
    """Run as described by its server to clients."""

    algorithm: Algorithm
    experiment: Experiment
    problem: Problem

    @classmethod
    def parse(cls, description: About) -> DescribedRun:
        """Read a server's description; raise RefusedError if the run's method is not installed here in its version."""
        try:
            algorithm = find_algorithm(description.algorithm)
        except ExperimentError as error:
            raise RefusedError(f"the run's method is not installed here: {error}") from error
        if algorithm.version != description.version:
            raise RefusedError(
                f"The run uses version {description.version} of {description.algorithm}, and version "
                f"{algorithm.version} is installed here.",
                hint="install the same version on both sides",
                found=algorithm.version,
                allowed=[description.version],
            )
        e = experiments.from_shared_json(description.experiment, runtime=Runtime(workers=0))
        return cls(algorithm, e, Problem.from_json(description.problem))

    def parts(self, manifest: Manifest) -> RunContext:
        """Return the parts of the run for new clients."""
        parts = assemble.for_newcomers(assemble.make_parts(self.experiment, manifest), self.problem.clients)
        digests = {printable(name): printable(digest) for name, digest in self.problem.constants.items()}
        check_constants(parts, digests, "the server's model")
        return dataclasses.replace(parts, algorithm=self.algorithm)


class PersonalizationClient:
    """Client side of a personalization conversation.

    Parameters
    ----------
    parts
        Parts of the run for new clients.
    data
        Data of one or more clients.
    client
        Id of the client, among those in ``data``.

    Attributes
    ----------
    once
        True to answer a single opening message only; answering another would release more about the data.
    """

    once = False

    def __init__(self, parts: RunContext, data: FederatedDataset, client: str) -> None:
        self.parts, self.id = parts, client
        self._opening: Message | None = None
        self._predictors: dict[str, Predictor] | None = None
        self._side = ClientSide(
            parts.client_algorithm(),
            vocabulary(parts.algorithm),
            parts.examples_of(data),
            self._conclude,
            ClientConfig(
                parts.experiment.seed,
                secret=os.urandom(32),
                augment=augmentation(parts.experiment.data.augment, data.manifest.spec.normalization),
                examples=ExamplePrivacy.from_settings(parts.experiment.federation.privacy),
            ),
        )
        self._side.raises_bugs = True

    @property
    def predictors(self) -> dict[str, Predictor]:
        """Predictors computed in the conversation, by name; raise QuorumError if there are none."""
        if self._predictors is None:
            raise QuorumError(f"{self.parts.algorithm.name} has made no model for client {self.id}")
        return self._predictors

    def spend(self) -> None:
        """Account for the first answer, before it is released."""

    def speak(self, round: int, exchange: int, message: Message) -> Message | None:
        """Answer a message of the server; return None once the predictors are computed.

        Raise DataError if the client algorithm cannot process the message or the data; QuorumError if it would release
        a second answer although ``once`` is set.
        """
        key = ConversationKey(round, 0, 0, "evaluate")
        if exchange == 0:
            if self.once and self._opening is not None and not _equal(message, self._opening):
                raise QuorumError(
                    "the server switched to another round after it was answered, and a second answer would cost "
                    "(ε, δ) again",
                    hint="request the model again to accept that cost",
                )
            if self._opening is None:
                self.spend()
            self._opening = message
            self._side.close_all()
        with torch_threads(self.parts.experiment.runtime.threads):
            _, answer = next(iter(self._side.answer(key, exchange, [0], [self.id], message)))
        if isinstance(answer, Lost):
            raise DataError(answer.reason)
        return None if isinstance(answer, Metrics) else answer

    def _conclude(self, predictors: Predictors, group: ClientGroup) -> Message:
        self._predictors = predictors[0]
        return self.parts.plan.nothing(1, len(self.parts.client_algorithm().predictors))


def _equal(a: Message, b: Message) -> bool:
    first, second = a.tensors(), b.tensors()
    return type(a) is type(b) and first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


class RequestingClient(PersonalizationClient):
    """Client with data of its own that requests a model, with its privacy accounting.

    Raise DataError if it has labels that the method would ignore; ExperimentError if δ or the run does not allow
    the requested privacy, or there is a ledger, but the answer has no noise to account for.
    """

    def __init__(self, request: PersonalizationRequest, description: About, data: Newcomer, parts: RunContext) -> None:
        if request.y is not None and not parts.algorithm.labelled(parts.settings):
            raise DataError(f"y must be left out: {parts.algorithm.name} does not use labels here.")
        self._request, self._about, self._examples = request, description, data.manifest.clients[0].train
        request.check_delta(self._examples)
        super().__init__(request.private(parts), data, data.client_id)
        self.guarantee = self._guarantee()
        """Privacy guarantee of the client's answer; None without noise."""
        self.once = self.guarantee is not None
        self.accountant: PrivacyAccountant | None = None
        if request.ledger is not None:
            if self.guarantee is None:
                epsilon = request.epsilon
                raise ExperimentError(
                    f"{argument('epsilon')} must be a finite number above 0 with {argument('ledger')}, which records "
                    f"answers with noise (got {'none' if epsilon is None else f'{epsilon:g}'}).",
                    key="epsilon",
                    found=epsilon,
                )
            self.accountant = PrivacyAccountant(expanded(request.ledger), request.budget)

    @classmethod
    def described(cls, request: PersonalizationRequest, description: About) -> RequestingClient:
        """Return the client of a request to a server that describes its run like this."""
        run = DescribedRun.parse(description)
        data = request.newcomer(run.problem, run.experiment)
        return cls(request, description, data, run.parts(data.manifest))

    def _guarantee(self) -> PrivacyGuarantee | None:
        noise = self.parts.algorithm.privacy(self.parts.settings)
        if noise is None or not noise.noise_multiplier:
            return None
        epsilon = gaussian_epsilon(noise.noise_multiplier, noise.delta)
        return PrivacyGuarantee(epsilon, noise.delta, noise.clip, noise.noise_multiplier, self._examples)

    def spend(self) -> None:
        """Record the guarantee in the ledger, if any."""
        if self.accountant is not None and self.guarantee is not None:
            run = self.parts.experiment.name
            self.guarantee = self.accountant.charge(self.guarantee, where=self._request.where, run=run, client=self.id)

    def model(self, answer: Answered) -> PersonalModel:
        """Return the requested predictor as a module with its card."""
        name = self._request.predictor
        check_predictor(name, self.parts.client_algorithm().predictors)
        card = card_of(
            Problem.from_json(self._about.problem),
            run=answer.run,
            round=answer.round,
            digest=answer.digest,
            algorithm=self._about.algorithm,
            predictor=name,
            model=self.parts.experiment.model.name,
            client=self.id,
            privacy=self.guarantee,
            standardizes=self.parts.standardizes,
        )
        return PersonalModel(predictor_of(self.id, self.predictors, name), card)


def evaluate_served(
    run: Path, address: str, partition: str | Path, credentials: Path | None = None
) -> CheckpointEvaluation:
    """Evaluate the models that a server at ``HOST:PORT`` gives to a partition's clients, which are all new to the run.

    ``run`` is the folder of the served run, as far as it is published; it states the requirements on the data.
    ``credentials`` is the folder with the credentials for the server.

    Raise as :func:`~fedloom.engine.trained.restore`; DataError if the server has another run, or cannot process a
    client's data; RefusedError if it refuses the connection; QuorumError if a model does not arrive within
    :data:`TIMEOUT_S`.
    """
    parts, loop, dataset = restore(run, "last", partition)
    clients = tuple(entry.id for entry in dataset.manifest.clients)
    predictors, rounds = asyncio.run(
        _converse_for_all(address, parts.experiment.name, dataset, clients, ClientOptions.from_folder(credentials))
    )
    evaluation = evaluate_predictors(parts, dataset, clients, predictors, loop.predictors, max(rounds))
    service = {"served": {"by": address, "rounds": sorted(set(rounds))}}
    return checkpoint_evaluation(run, partition, parts, dataset, evaluation, service)


async def _converse_for_all(
    address: str, run: str, dataset: FederatedDataset, clients: tuple[str, ...], trust: ClientOptions
) -> tuple[list[dict[str, Predictor]], list[int]]:
    """Request a model for each client of a partition; return each client's predictors and round."""
    models = Models(address, Credentials(trust))
    predictors, rounds = [], []
    try:
        description = (await models.describe(TIMEOUT_S)).about
        if description.run != run:
            raise DataError(
                f"{address} serves the run {description.run}, but the evaluation is of {run}.",
                found=description.run,
                allowed=[run],
            )
        parts = DescribedRun.parse(description).parts(dataset.manifest)
        words = vocabulary(parts.algorithm)
        for client in clients:
            side = PersonalizationClient(parts, dataset, client)
            answer = await models.converse(description, client, words, side.speak, timeout_s=TIMEOUT_S)
            predictors.append(side.predictors)
            rounds.append(answer.round)
    finally:
        await models.close()
    return predictors, rounds
