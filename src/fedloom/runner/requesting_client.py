"""Client that requests a model: its data, its side of the conversation, and its privacy accounting."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

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
from fedloom.data.problem import Problem
from fedloom.errors import DataError, ExperimentError, QuorumError, RefusedError, argument
from fedloom.experiment import Experiment, Runtime
from fedloom.federation.client_side import ClientConfig, ClientSide
from fedloom.federation.loop import vocabulary
from fedloom.federation.served import About
from fedloom.federation.transport import ConversationKey, Lost
from fedloom.messages import Message, Metrics
from fedloom.models.predictors import Predictor, Predictors, predictor_of
from fedloom.privacy.examples import ExamplePrivacy
from fedloom.privacy.gaussian_mechanism import gaussian_epsilon
from fedloom.runner import assemble
from fedloom.runner.assemble import RunContext
from fedloom.runner.constants import check_constants
from fedloom.runner.ledger import PrivacyAccountant
from fedloom.runner.personal_model import PersonalModel, PrivacyGuarantee, card_of
from fedloom.runner.personalization import PersonalizationRequest
from fedloom.transport.newcomer import Answered


@dataclass(frozen=True, eq=False)
class DescribedRun:
    """Run as described by its server to clients."""

    algorithm: Algorithm
    experiment: Experiment
    problem: Problem

    @classmethod
    def of(cls, about: About) -> DescribedRun:
        """Read a server's description; raise RefusedError if the run's method is not installed here in its version."""
        try:
            algorithm = find_algorithm(about.algorithm)
        except ExperimentError as error:
            raise RefusedError(f"the run's method is not installed here: {error}") from error
        if algorithm.version != about.version:
            raise RefusedError(
                f"The run uses version {about.version} of {about.algorithm}, and version {algorithm.version} is "
                "installed here.",
                hint="install the same version on both sides",
                found=algorithm.version,
                allowed=[about.version],
            )
        e = experiments.from_shared_json(about.experiment, runtime=Runtime(workers=0))
        return cls(algorithm, e, Problem.from_json(about.problem))

    def parts(self, manifest: Manifest) -> RunContext:
        """Return the parts of the run for new clients."""
        parts = assemble.for_newcomers(assemble.make_parts(self.experiment, manifest), self.problem.clients)
        digests = {printable(name): printable(digest) for name, digest in self.problem.constants.items()}
        check_constants(parts, digests, "the server's model")
        return dataclasses.replace(parts, algorithm=self.algorithm)


@dataclass(frozen=True, eq=False)
class RequestingClient:
    """Client that took no part in a run, with its data, able to answer the run's messages."""

    request: PersonalizationRequest
    about: About
    data: Newcomer
    parts: RunContext

    @classmethod
    def described(cls, request: PersonalizationRequest, about: About) -> RequestingClient:
        """Return the client of a request to a server that describes its run like this."""
        run = DescribedRun.of(about)
        data = request.newcomer(run.problem, run.experiment)
        return cls.of(request, about, data, run.parts(data.manifest))

    @classmethod
    def of(cls, request: PersonalizationRequest, about: About, data: Newcomer, parts: RunContext) -> RequestingClient:
        """Return the client of a request.

        Raise DataError if it has labels that the method would ignore; ExperimentError if δ or the run does not allow
        the requested privacy.
        """
        if request.y is not None and not parts.algorithm.labelled(parts.settings):
            raise DataError(f"y must be left out: {parts.algorithm.name} does not use labels here.")
        request.check_delta(data.manifest.clients[0].train)
        return cls(request, about, data, request.private(parts))

    @property
    def id(self) -> str:
        """Id of the client."""
        return self.data.client_id

    @property
    def guarantee(self) -> PrivacyGuarantee | None:
        """Privacy guarantee of the client's answer; None without noise."""
        found = self.parts.algorithm.privacy(self.parts.settings)
        if found is None or not found.noise_multiplier:
            return None
        z, delta = found.noise_multiplier, found.delta
        examples = self.data.manifest.clients[0].train
        return PrivacyGuarantee(gaussian_epsilon(z, delta), delta, found.clip, z, examples)

    @property
    def accountant(self) -> PrivacyAccountant | None:
        """Accountant of the ledger that the request names, if any.

        Raise ExperimentError if there is a ledger, but the answer has no noise to account for.
        """
        if self.request.ledger is None:
            return None
        if self.guarantee is None:
            epsilon = self.request.epsilon
            raise ExperimentError(
                f"{argument('epsilon')} must be a finite number above 0 with {argument('ledger')}, which records "
                f"answers with noise (got {'none' if epsilon is None else f'{epsilon:g}'}).",
                key="epsilon",
                found=epsilon,
            )
        return PrivacyAccountant(expanded(self.request.ledger), self.request.budget)

    def spend(self, accountant: PrivacyAccountant | None) -> PrivacyGuarantee | None:
        """Return the privacy guarantee; record it in the ledger, if any, before anything is released."""
        if accountant is None or self.guarantee is None:
            return self.guarantee
        run = self.parts.experiment.name
        return accountant.charge(self.guarantee, where=self.request.where, run=run, client=self.id)

    def model(
        self, predictors: dict[str, Predictor], answered: Answered, guarantee: PrivacyGuarantee | None
    ) -> PersonalModel:
        """Return the requested predictor as a module with its card."""
        name = self.request.predictor
        check_predictor(name, self.parts.client_algorithm().predictors)
        card = card_of(
            Problem.from_json(self.about.problem),
            run=answered.run,
            round=answered.round,
            digest=answered.digest,
            algorithm=self.about.algorithm,
            predictor=name,
            model=self.parts.experiment.model.name,
            client=self.id,
            precision=answered.precision,
            privacy=guarantee,
            standardizes=self.parts.standardizes,
        )
        return PersonalModel(predictor_of(self.id, predictors, name), card)


def check_predictor(name: str, known: Sequence[str]) -> None:
    """Raise ExperimentError if a method has no predictor of this name."""
    if name not in known:
        raise ExperimentError(
            f"{argument('predictor')} must be one of {', '.join(known)} (got {name!r}).",
            key="predictor",
            found=name,
            allowed=list(known),
        )


class PersonalizationClient:
    """Client side in this process of a conversation with a remote server.

    Parameters
    ----------
    parts
        Parts of the run for new clients.
    data
        Data of one or more clients.
    client
        Id of the client, among those in ``data``.
    once
        Answer a single opening message only; answering another would release more about the data.
    charge
        Called once, before the first answer to a server; its result is stored in ``guarantee``.
    """

    guarantee: PrivacyGuarantee | None = None

    def __init__(
        self,
        parts: RunContext,
        data: FederatedDataset,
        client: str,
        *,
        once: bool = False,
        charge: Callable[[], PrivacyGuarantee | None] = lambda: None,
    ) -> None:
        self._id = client
        self._once = once
        self._charge = charge
        self._opening: Message | None = None
        self._threads = parts.experiment.runtime.threads
        self._nothing = parts.plan.nothing(1, len(parts.client_algorithm().predictors))
        self._made: dict[str, Predictor] | None = None
        self._side = ClientSide(
            parts.client_algorithm(),
            vocabulary(parts.algorithm),
            parts.examples_of(data),
            self._conclude,
            ClientConfig(
                parts.experiment.seed,
                secret=os.urandom(32),
                augment=augmentation(parts.experiment.data.augment, data.manifest.spec.normalization),
                examples=ExamplePrivacy.of(parts.experiment.federation.privacy),
            ),
        )
        self._side.raises_bugs = True

    @property
    def predictors(self) -> dict[str, Predictor]:
        """Predictors computed in the conversation, by name."""
        assert self._made is not None
        return self._made

    def speak(self, round: int, exchange: int, message: Message) -> Message | None:
        """Answer a message of the server; return None once the predictors are computed.

        Raise DataError if the client algorithm cannot process the message or the data; QuorumError if it would release
        a second answer although ``once`` is set.
        """
        key = ConversationKey(round, 0, 0, "evaluate")
        if exchange == 0:
            if self._once and self._opening is not None and not _equal(message, self._opening):
                raise QuorumError(
                    "the server switched to another round after it was answered, and a second answer would cost "
                    "(ε, δ) again",
                    hint="request the model again to accept that cost",
                )
            if self._opening is None:
                self.guarantee = self._charge()
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


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Set torch's number of threads in the block to the run's, since the bits depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
