"""Personalized models from a model server, a run's folder, or a published run."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import re
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from fedloom import experiment as experiments
from fedloom.algorithms.base import Algorithm, ClientGroup, available, find_algorithm
from fedloom.data.federated import FederatedDataset
from fedloom.data.newcomer import Newcomer, Wanted
from fedloom.data.own import read_card
from fedloom.data.problem import Problem
from fedloom.errors import DataError, ExperimentError, QuorumError, RefusedError, argument
from fedloom.evaluation.measure import metrics, nothing_measured
from fedloom.evaluation.summary import EvaluationResult
from fedloom.experiment import Experiment, OwnData, Runtime
from fedloom.federation.carrier import ConversationKey, Lost
from fedloom.federation.client_side import ClientConfig, ClientSide
from fedloom.federation.loop import vocabulary
from fedloom.federation.served import About, served_round
from fedloom.messages import Message, Metrics
from fedloom.models.predictors import Predictor, Predictors, predictor_of
from fedloom.privacy.gaussian_mechanism import MAX_DELTA, gaussian_epsilon, noise_multiplier
from fedloom.runner import assemble
from fedloom.runner.assemble import RunContext
from fedloom.runner.ledger import PrivacyAccountant
from fedloom.runner.personal_model import PersonalModel, PrivacyGuarantee, card_of
from fedloom.runner.serve import DurableRounds
from fedloom.runner.trained import CheckpointEvaluation, check_checkpoint, found_of, restore
from fedloom.runs.checkpoint import Checkpoints
from fedloom.runs.folder import RunFolder
from fedloom.storage import is_url
from fedloom.transport.model_stream import PRECISIONS
from fedloom.transport.newcomer import Answered, Models
from fedloom.trust.options import ClientOptions, Credentials
from fedloom.trust.tokens import checked_token

CLIENT = "newcomer"
"""Client id used when the caller gives none."""

DELTA = 1e-5
"""Default δ where only ε is given."""

T = TypeVar("T")


@dataclass(frozen=True)
class PersonalizationRequest:
    """Request for a personalized model.

    Attributes
    ----------
    x, y
        Raw examples and their labels. Give either these or ``data``.
    data
        Folder made by ``fedloom data pack``.
    client
        Id that keys the random numbers; a packed folder has its own.
    checkpoint
        ``last``, ``best`` or a round; for a server, ``last`` is the round that it serves.
    predictor
        One of the predictors that the method gives a client.
    precision
        Precision in which the server's tensors are transferred.
    timeout_s
        Seconds within which a server must answer.
    epsilon, delta
        (ε, δ) of differential privacy for the client's answer. ε None: as the run was trained; inf: no noise.
    clip
        Clipping bound C of the mechanism; None: the run's.
    ledger
        File that records the privacy spent on the data.
    budget
        Maximum total ε of the requests in the ledger, including this one; None: no limit.
    """

    x: Any = None
    y: Any = None
    data: Path | None = None
    client: str | None = None
    checkpoint: str = "last"
    predictor: str = "personal"
    precision: str = "float32"
    timeout_s: float = 60.0
    epsilon: float | None = None
    delta: float | None = None
    clip: float | None = None
    ledger: Path | None = None
    budget: float | None = None


@dataclass(frozen=True, eq=False)
class _Client:
    """Client with its data, able to answer a run's messages."""

    parts: RunContext
    about: About
    data: Newcomer

    @property
    def id(self) -> str:
        return self.data.client_id

    @property
    def promise(self) -> PrivacyGuarantee | None:
        """Privacy promise of the client's answer; None without noise."""
        promised = self.parts.algorithm.privacy(self.parts.settings)
        if promised is None or not promised.noise_multiplier:
            return None
        z, delta = promised.noise_multiplier, promised.delta
        examples = self.data.manifest.clients[0].train
        return PrivacyGuarantee(gaussian_epsilon(z, delta), delta, promised.clip, z, examples)

    def spend(self, where: str, ledger: PrivacyAccountant | None) -> PrivacyGuarantee | None:
        """Return the privacy promise; record it in the ledger, if any, before anything is released."""
        promise = self.promise
        if ledger is None or promise is None:
            return promise
        return ledger.charge(promise, where=where, run=self.parts.experiment.name, client=self.id)

    def ledger(self, asked: PersonalizationRequest) -> PrivacyAccountant | None:
        """Return the ledger of this request, if one was asked for.

        Raises
        ------
        ExperimentError
            If a ledger was asked for, but the answer has no noise to account for.
        """
        if asked.ledger is None:
            return None
        if self.promise is None:
            found = "none" if asked.epsilon is None else f"{asked.epsilon:g}"
            raise ExperimentError(
                f"{argument('epsilon')} must be a finite number above 0 with {argument('ledger')}, which counts what "
                "is told "
                f"with noise (got {found}).",
                key="epsilon",
                found=asked.epsilon,
            )
        return PrivacyAccountant(asked.ledger, asked.budget)


def personal_model(where: str, asked: PersonalizationRequest, trust: ClientOptions | None = None) -> PersonalModel:
    """Return a personalized model.

    Parameters
    ----------
    where
        ``HOST:PORT`` of a model server, a run's folder, or the URL of a published run.
    trust
        Credentials for the server.

    Raises
    ------
    DataError
        If the data do not match the run's, or there is no such run or round.
    ExperimentError
        If the request is invalid or the run cannot satisfy it.
    RefusedError
        If the server refuses the connection.
    QuorumError
        If no model arrives in time.
    """
    if is_run(where):
        return _from_run(where, asked)
    return _finished(personal_model_async(where, asked, trust))


async def personal_model_async(
    where: str, asked: PersonalizationRequest, trust: ClientOptions | None = None
) -> PersonalModel:
    """Return a personalized model like :func:`personal_model`, without blocking the event loop."""
    if is_run(where):
        return await asyncio.to_thread(_from_run, where, asked)
    if not re.search(r":[0-9]+$", where):  # probably a misspelled folder
        raise DataError(f"{where}: found no such folder; allowed: a run's folder, HOST:PORT or a URL")
    _check(asked)
    ends = time.monotonic() + asked.timeout_s
    models = Models(where, Credentials(trust))
    try:
        found = await models.describe(asked.timeout_s)
        client = await asyncio.to_thread(_client_of, found.about, asked)
        ledger = client.ledger(asked)
        speaking = PersonalizationClient(
            client.parts,
            client.data,
            client.id,
            once=client.promise is not None,
            tell=lambda: client.spend(where, ledger),
        )
        answered = await models.converse(
            found.about,
            client.id,
            vocabulary(client.parts.algorithm),
            speaking.speak,
            precision=asked.precision,
            round=None if asked.checkpoint == "last" else int(asked.checkpoint),
            timeout_s=max(0.001, ends - time.monotonic()),
            # With noise, every answer spends privacy; it would be wasted if the server's round changed.
            early=client.promise is None,
        )
    finally:
        await models.close()
    return _made(client, speaking.predictors, asked, answered, speaking.told)


def is_run(where: str) -> bool:
    """Return whether ``where`` is a run (an existing folder or a URL) and not an address."""
    return is_url(where) or Path(where).is_dir()


def _check(asked: PersonalizationRequest) -> None:
    if asked.precision not in PRECISIONS:
        raise ExperimentError(
            f"{argument('precision')} must be one of {', '.join(PRECISIONS)} (got {asked.precision!r}).",
            key="precision",
            found=asked.precision,
            allowed=list(PRECISIONS),
        )
    if asked.checkpoint == "best":
        raise ExperimentError(
            f"{argument('checkpoint')} must be last, or the round that it serves, where a server is asked (got "
            "'best').",
            key="checkpoint",
            found=asked.checkpoint,
            allowed=["last"],
        )
    check_checkpoint(asked.checkpoint)
    check_privacy(asked)
    if asked.data is not None:
        read_card(asked.data)  # report local errors before using the network


def _client_of(about: About, asked: PersonalizationRequest) -> _Client:
    """Build the client from the server's description of its run."""
    algorithm = find_method(about)
    e = experiments.from_shared_json(about.experiment, runtime=Runtime(workers=0))
    problem = Problem.from_json(about.problem)
    data = _data(asked, problem, e)
    parts = assemble.for_newcomers(assemble.make_parts(e, data.manifest), problem.clients)
    _check_labels(asked, parts)
    check_delta(asked, data.manifest.clients[0].train)
    return _Client(private(asked, dataclasses.replace(parts, algorithm=algorithm)), about, data)


def check_privacy(asked: PersonalizationRequest) -> None:
    """Raise unless ε, δ, C, ledger and budget form a valid request.

    Raises
    ------
    ExperimentError
        Names the invalid argument, its value and what is allowed.
    """
    if asked.budget is not None:
        if asked.ledger is None:
            raise ExperimentError(f"{argument('budget')} needs {argument('ledger')}.", key="budget", found=asked.budget)
        if not 0 < asked.budget < math.inf:
            raise ExperimentError(
                f"{argument('budget')} must be a finite number above 0 (got {asked.budget}).",
                key="budget",
                found=asked.budget,
            )
    if asked.epsilon is None:
        for name in ("delta", "clip"):
            if getattr(asked, name) is not None:
                raise ExperimentError(
                    f"{argument(name)} needs {argument('epsilon')}.", key=name, found=getattr(asked, name)
                )
        return
    if not asked.epsilon > 0:
        raise ExperimentError(
            f"{argument('epsilon')} must be above 0; inf adds no noise (got {asked.epsilon}).",
            key="epsilon",
            found=asked.epsilon,
        )
    if asked.delta is not None and not 0 < asked.delta <= MAX_DELTA:
        raise ExperimentError(
            f"{argument('delta')} must be above 0 and at most {MAX_DELTA:g} (got {asked.delta:g}).",
            key="delta",
            found=asked.delta,
        )
    if asked.clip is not None and not (0 < asked.clip < math.inf):
        raise ExperimentError(
            f"{argument('clip')} must be a finite number above 0 (got {asked.clip}).", key="clip", found=asked.clip
        )


def check_delta(asked: PersonalizationRequest, examples: int) -> None:
    """Raise if δ is too large to protect this many examples.

    Publishing one of n examples, chosen at random, is (0, 1/n)-differentially private.

    Raises
    ------
    ExperimentError
        If δ is not below 1/n.
    """
    delta = DELTA if asked.delta is None else asked.delta
    if asked.epsilon is not None and math.isfinite(asked.epsilon) and delta * examples >= 1:
        raise ExperimentError(
            f"{argument('delta')} must be below 1/n for n = {examples} training examples, {1 / examples:.3g} (got "
            f"{delta:g}): with a larger one a whole example could be told",
            key="delta",
            found=delta,
            hint=f"ask with {argument('delta')} {10 ** -math.ceil(math.log10(examples) + 1):g} or less",
        )


def private(asked: PersonalizationRequest, parts: RunContext) -> RunContext:
    """Return the parts for a client that limits what its answer reveals, as requested.

    Raises
    ------
    ExperimentError
        If the method has no answer to add noise to, or C is not given.
    """
    if asked.epsilon is None:
        return parts
    method, e = parts.algorithm, parts.experiment
    if not method.answers_privately:
        able = [name for name in available() if find_algorithm(name).answers_privately]
        raise ExperimentError(
            f"{argument('epsilon')} is for methods with a descriptor to add noise to ({', '.join(able)}); the run's is "
            f"{method.name}.",
            key="epsilon",
            found=asked.epsilon,
        )
    if math.isinf(asked.epsilon) and asked.clip is None and method.privacy(parts.settings) is None:
        return parts
    delta = DELTA if asked.delta is None else asked.delta
    settings = method.private(parts.settings, asked.clip, noise_multiplier(asked.epsilon, delta), delta)
    choice = e.algorithm.model_copy(update={"settings": settings})
    return dataclasses.replace(parts, experiment=e.model_copy(update={"algorithm": choice}))


def find_method(about: About) -> Algorithm:
    """Return a run's method.

    Raises
    ------
    RefusedError
        If it is not installed here in the run's version.
    """
    try:
        algorithm = find_algorithm(about.algorithm)
    except ExperimentError as error:
        raise RefusedError(f"the run's method is not installed here: {error}") from error
    if algorithm.version != about.version:
        raise RefusedError(
            f"{about.algorithm}: found version {algorithm.version} here; allowed: {about.version}, the run's",
            hint="install the same version on both sides",
        )
    return algorithm


def _data(asked: PersonalizationRequest, problem: Problem, e: Experiment) -> Newcomer:
    wanted = Wanted.of(problem, e.data.own.features if isinstance(e.data, OwnData) else None)
    if (asked.x is None) is (asked.data is None):
        raise ExperimentError("data: found x and a folder, or neither; allowed: one of them")
    if not wanted.class_names:
        raise DataError("the run's data have no classes, so that its models predict none; allowed: a run with classes")
    if asked.data is None:
        return Newcomer.from_arrays(asked.client or CLIENT, asked.x, asked.y, wanted)
    if asked.y is not None or asked.client is not None:
        raise ExperimentError("data: found labels or an id beside a packed folder; allowed: the folder, which has both")
    return Newcomer.from_folder(asked.data, wanted)


def _check_labels(asked: PersonalizationRequest, parts: RunContext) -> None:
    """Raise on labels that the method would ignore."""
    if asked.y is not None and not parts.algorithm.labelled(parts.settings):
        raise DataError(f"y: found labels; allowed: none, {parts.algorithm.name} describes clients without them here")


class PersonalizationClient:
    """Client half in this process that converses with a remote server half.

    Parameters
    ----------
    parts
        Parts of the run, for clients from outside it.
    data
        Data of one or more clients.
    client
        Id of the client, among those in ``data``.
    once
        Answer a single opening message only; answering another would release more about the data.
    tell
        Called once, before the first answer to a server; its result is stored in ``told``.
    """

    told: PrivacyGuarantee | None = None

    def __init__(
        self,
        parts: RunContext,
        data: FederatedDataset,
        client: str,
        *,
        once: bool = False,
        tell: Callable[[], PrivacyGuarantee | None] = lambda: None,
    ) -> None:
        self._id = client
        self._once = once
        self._tell = tell
        self._opening: Message | None = None
        self._threads = parts.experiment.runtime.threads
        self._nothing = nothing_measured(1, len(parts.client_half().predictors), parts.task.classes)
        self._made: dict[str, Predictor] | None = None
        self._side = ClientSide(
            parts.client_half(),
            vocabulary(parts.algorithm),
            data.client,
            self._conclude,
            ClientConfig(parts.experiment.seed, secret=os.urandom(32)),
        )
        self._side.raises_bugs = True

    @property
    def predictors(self) -> dict[str, Predictor]:
        """Predictors made in the conversation, by name."""
        assert self._made is not None
        return self._made

    def speak(self, round: int, exchange: int, message: Message) -> Message | None:
        """Answer a message of the server; return None once the predictors are made.

        Raises
        ------
        DataError
            If the client half cannot process the message or the data.
        QuorumError
            If it would release a second answer although ``once`` is set.
        """
        key = ConversationKey(round, 0, 0, "evaluate")
        if exchange == 0:
            if self._once and self._opening is not None and not _equal(message, self._opening):
                raise QuorumError(
                    "the server went on to another round when it had been answered, and a second answer would cost "
                    "(ε, δ) again",
                    hint="ask again to spend it",
                )
            if self._opening is None:
                self.told = self._tell()
            self._opening = message
            self._side.close_all()
        with torch_threads(self._threads):
            _, answer = next(iter(self._side.answer(key, exchange, [0], [self._id], message)))
        if isinstance(answer, Lost):
            raise DataError(answer.reason)
        return None if isinstance(answer, Metrics) else answer

    def _conclude(self, predictors: Predictors, group: ClientGroup) -> Message:
        self._made = predictors[0]
        return self._nothing


def _equal(a: Message, b: Message) -> bool:
    first, second = a.tensors(), b.tensors()
    return type(a) is type(b) and first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


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
            raise DataError(f"{where}: found the run {about.run}; allowed: {run}, the model's")
        e = experiments.from_shared_json(about.experiment, runtime=Runtime(workers=0))
        parts = assemble.for_newcomers(
            assemble.make_parts(e, dataset.manifest), Problem.from_json(about.problem).clients
        )
        parts = dataclasses.replace(parts, algorithm=find_method(about))
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
        [dataset.client(client) for client in clients],
        loop.predictors,
        batch_size=parts.experiment.evaluation.batch_size,
    )
    evaluation = EvaluationResult(
        round=max(rounds),
        clients=clients,
        seen=torch.zeros(len(clients), dtype=torch.bool),
        present=torch.ones(len(clients), dtype=torch.bool),
        predictors=loop.predictors,
        **measured.tensors(),
        records={},
    )
    return found_of(
        run, partition, parts, dataset, evaluation, {"served": {"by": where, "rounds": sorted(set(rounds))}}
    )


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Set torch's number of threads in the block to the run's, since the bits depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _made(
    client: _Client,
    predictors: dict[str, Predictor],
    asked: PersonalizationRequest,
    answered: Answered,
    promise: PrivacyGuarantee | None,
) -> PersonalModel:
    known = client.parts.client_half().predictors
    if asked.predictor not in known:
        raise ExperimentError(f"predictor: found {asked.predictor!r}; allowed: {', '.join(known)}")
    predictor = predictor_of(client.id, predictors, asked.predictor)
    e = client.parts.experiment
    card = card_of(
        Problem.from_json(client.about.problem),
        run=answered.run,
        round=answered.round,
        digest=answered.digest,
        algorithm=client.about.algorithm,
        predictor=asked.predictor,
        model=e.model.name,
        client=client.id,
        precision=answered.precision,
        privacy=promise,
    )
    return PersonalModel(predictor, card)


def _from_run(where: str, asked: PersonalizationRequest) -> PersonalModel:
    """Return a model from a run's checkpoint; the conversation runs in this process, as in an evaluation."""
    if asked.precision != "float32":
        raise ExperimentError(
            f"{argument('precision')} must be float32 where a run's folder is read (got {asked.precision}).",
            key="precision",
            found=asked.precision,
            allowed=["float32"],
        )
    check_privacy(asked)
    folder = RunFolder.open(where)
    known = DurableRounds(folder, asked.checkpoint)
    trained = known.parts
    about = known.about
    data = _data(asked, Problem.from_json(about.problem), trained.experiment)
    _check_labels(asked, trained)
    check_delta(asked, data.manifest.clients[0].train)
    parts = private(asked, dataclasses.replace(trained, manifest=data.manifest))
    client = _Client(parts, about, data)
    ledger = client.ledger(asked)
    with torch_threads(parts.experiment.runtime.threads):
        found = Checkpoints(folder.checkpoints).load(check_checkpoint(asked.checkpoint))
        made: list[dict[str, Predictor]] = []

        def keep(predictors: Predictors, group: ClientGroup) -> Message:
            made.extend(predictors)
            return nothing_measured(1, len(loop.predictors), parts.task.classes)

        carrier = assemble.in_process(on_cpu(parts), data, folder, keep, secret=os.urandom(32))
        loop = assemble.evaluator(on_cpu(parts), carrier, folder)
        served_round(about, parts.algorithm, loop.server, found)  # raises if the method has nothing for new clients
        loop.server.load(found.state)
        loop.round = found.round
        promise = client.spend(where, ledger)
        lost = loop.personalize([data.client_id])
    if lost:
        raise DataError(lost[data.client_id])
    if not made:
        raise QuorumError(f"{parts.algorithm.name} gave client {data.client_id} no model")
    answered = Answered(parts.experiment.name, found.round, found.digest, "float32", 0, 0, False)
    return _made(client, made[0], asked, answered, promise)


def on_cpu(parts: RunContext) -> RunContext:
    """Return the parts for computing on a CPU, one client at a time."""
    e = parts.experiment
    runtime = e.runtime.model_copy(update={"device": "cpu", "clients_at_once": 1})
    return dataclasses.replace(parts, experiment=e.model_copy(update={"runtime": runtime}))


def _finished(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, even if an event loop is already running (as in a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    made: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            made.append(asyncio.run(work))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return made[0]


def asked_for(
    where: str,
    x: Any,
    y: Any,
    *,
    data: str | Path | None = None,
    client: str | None = None,
    checkpoint: str | int = "last",
    predictor: str = "personal",
    precision: str = "float32",
    tls_ca: str | Path | None = None,
    tls_certificate: str | Path | None = None,
    tls_key: str | Path | None = None,
    token_file: str | Path | None = None,
    token: str | None = None,
    insecure: bool = False,
    timeout_s: float = 60.0,
    epsilon: float | None = None,
    delta: float | None = None,
    clip: float | None = None,
    ledger: str | Path | None = None,
    budget: float | None = None,
    **unknown: Any,
) -> tuple[PersonalizationRequest, ClientOptions | None]:
    """Return the request and the credentials for :func:`fedloom.personalize`.

    The environment supplies the credentials that are not given.

    Raises
    ------
    ExperimentError
        If a keyword argument is unknown.
    RefusedError
        If the token is malformed.
    """
    if unknown:
        allowed = ", ".join(asked_for.__kwdefaults__ or ())
        raise ExperimentError(f"personalize: found the argument {next(iter(unknown))}; allowed: {allowed}")
    folder = None if data is None else Path(data)
    counted = None if ledger is None else Path(ledger)
    private = (epsilon, delta, clip, counted, budget)
    asked = PersonalizationRequest(x, y, folder, client, str(checkpoint), predictor, precision, timeout_s, *private)
    if is_run(where):
        return asked, None
    said = ClientOptions.from_environment()
    given = (tls_ca, tls_certificate, tls_key, token_file)
    ca, certificate, key, file = (None if path is None else Path(path) for path in given)
    trust = ClientOptions(
        ca or said.ca,
        certificate or said.certificate,
        key or said.key,
        file or (None if token is not None else said.token_file),
        checked_token(token, "token") if token is not None else (None if file is not None else said.token),
        insecure,
    )
    return asked, trust
