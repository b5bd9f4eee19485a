"""Rehearsal of a run: its first rounds with one typical client, whose answers all others repeat, to measure the costs.

Bytes are those that the round loop counts. Local training ends after a fraction of a second; its other steps are
assumed to take as long as those made.
"""

from __future__ import annotations

import dataclasses
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from fedloom.algorithms.base import ClientAlgorithm, Conversation
from fedloom.algorithms.client_group import ClientGroup
from fedloom.data.federated import ClientData, FederatedDataset
from fedloom.engine import loops
from fedloom.engine.assemble import DTYPE, RunContext, client_side, use_device
from fedloom.engine.observer import RunObserver
from fedloom.errors import DataError
from fedloom.federation.client_side import InProcess
from fedloom.federation.evaluator import LoopHooks
from fedloom.messages import Message
from fedloom.models.predictors import Predictors
from fedloom.runs.folder import RunFolder
from fedloom.runs.journal import Attempt

TRAINING_S, ROUND_S = 0.25, 1.0
"""Seconds after which a local training ends, and of a first round after which no second one is measured."""


@dataclass(frozen=True)
class RoundCost:
    """Cost of one round: bytes as the papers count them, number of clients, seconds of a client and of the server."""

    payload_up: int
    payload_down: int
    clients: int
    client_s: float
    server_s: float


@dataclass(frozen=True)
class MeasuredCosts:
    """Costs of the first round and of a later one, of the evaluation of a client, and memory of a process in bytes."""

    first: RoundCost | None
    later: RoundCost | None
    evaluation_s: float
    memory: int
    device_memory: int | None


class StepClock:
    """Clock of local training, which ends a training that takes too long (``Progress``)."""

    def __init__(self) -> None:
        self.conversation_s, self.step_s, self.skipped = 0.0, list[float](), 0
        self._started = self._last = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds of the client's conversations with all of their steps."""
        return self.conversation_s + self.skipped * (statistics.median(self.step_s) if self.step_s else 0.0)

    def begin(self, training: int) -> Mapping[str, Tensor] | None:
        """Start the clock; no training is continued."""
        self._started = self._last = time.perf_counter()
        return None

    def is_due(self, *, finished: bool = False) -> bool:
        """Note the time of a step; nothing is saved."""
        if not finished:
            self.step_s.append(time.perf_counter() - self._last)
            self._last = time.perf_counter()
        return False

    def save(self, training: int, state: Mapping[str, Tensor]) -> None:
        """Save nothing."""

    def ends(self, rest: Iterator[object]) -> bool:
        """Return whether the training has taken long enough; count the steps that are left."""
        if time.perf_counter() - self._started < TRAINING_S:
            return False
        self.skipped += sum(1 for _ in rest)
        return True


class MeasuredAlgorithm(ClientAlgorithm):
    """Client algorithm that computes the answers of one group in each conversation; other groups repeat them."""

    def __init__(self, inner: ClientAlgorithm) -> None:
        super().__init__(inner.settings, inner.setup)
        self.predictors, self.stateful, self.personalizing = inner.predictors, inner.stateful, inner.personalizing
        self._inner = inner
        self.restart()

    def restart(self) -> None:
        """Forget all answers and times."""
        self.clock, self.at_once, self.lost = StepClock(), 1, dict[int, str]()
        self._answers: dict[type[Message], list[Message]] = {}

    def trains(self, opening: type[Message]) -> bool:
        """Return whether this class of message opens a training round."""
        return self._inner.trains(opening)

    def open(self, clients: ClientGroup, opening: Message) -> Conversation:
        """Start the conversation that this message opens."""
        if (answers := self._answers.get(type(opening))) is not None:
            return self._repeated(answers, clients)
        clients.progress, self.at_once, self.lost = self.clock, len(clients), clients.lost
        return self._measured(self._inner.open(clients, opening), type(opening))

    def _measured(self, inner: Conversation, opening: type[Message]) -> Conversation:
        message = None
        while True:
            started = time.perf_counter()
            try:
                answer = inner.send(message)
            except StopIteration as end:
                result: Predictors | None = end.value
                return result
            finally:
                self.clock.conversation_s += time.perf_counter() - started
            self._answers.setdefault(opening, []).append(answer.select([0]))
            message = yield answer

    def _repeated(self, answers: list[Message], clients: ClientGroup) -> Conversation:
        at = 0
        while at < len(answers):
            for reason in self.lost.values():
                for i in range(len(clients)):
                    clients.fail_client(i, reason)
            yield answers[at].select([0] * len(clients))
            at += 1
        raise DataError("the client that is measured has failed")


@dataclass(frozen=True)
class _Rehearsed(RunContext):
    """Parts of a run whose clients all have the data of one of them."""

    measured: MeasuredAlgorithm | None = None

    def client_algorithm(self) -> ClientAlgorithm:
        """Return the client algorithm that measures."""
        return super().client_algorithm() if self.measured is None else self.measured

    def examples_of(self, dataset: FederatedDataset) -> Callable[[str], ClientData]:
        """Return a function of a client's id that returns the typical client's data."""
        load = super().examples_of(dataset)
        return lambda client: dataclasses.replace(load(typical_client(dataset)), id=client)


def typical_client(dataset: FederatedDataset) -> str:
    """Return the seen client (any, if there is none) whose number of training examples is closest to the mean."""
    clients = [entry for entry in dataset.manifest.clients if entry.seen] or dataset.manifest.clients
    mean = statistics.fmean(entry.train for entry in clients)
    return min(clients, key=lambda entry: abs(entry.train - mean)).id


class _Attempts(RunObserver):
    def __init__(self) -> None:
        self.last = Attempt(0, 0)

    def round_done(self, attempt: Attempt, rounds: int | None) -> None:
        """Keep the attempt."""
        self.last = attempt


def rehearse(parts: RunContext, dataset: FederatedDataset) -> MeasuredCosts:
    """Return the costs of a run, measured on this machine; only a temporary folder is written.

    Raise QuorumError if the first round fails.
    """
    e = parts.experiment
    privacy = e.federation.privacy
    if privacy is not None and privacy.of == "clients":  # cohorts of the expected size
        privacy = privacy.model_copy(update={"sampling": "fixed"})
    # The clients that repeat answers keep no states.
    federation = e.federation.model_copy(update={"lost_state": "afresh", "attempts": 1, "privacy": privacy})
    typical = dataset.manifest.entry(typical_client(dataset))
    alike = [dataclasses.replace(typical, id=entry.id, seen=entry.seen) for entry in dataset.manifest.clients]
    measured = MeasuredAlgorithm(parts.client_algorithm())
    rehearsed = _Rehearsed(
        e.model_copy(update={"federation": federation}),
        dataclasses.replace(parts.manifest, clients=tuple(alike)),
        parts.algorithm,
        parts.setup,
        parts.plan,
        parts.standardizes,
        measured,
    )
    device = use_device(e.runtime.device, e.runtime.threads)
    with TemporaryDirectory(prefix="fedloom-check-") as temporary:
        folder = RunFolder(Path(temporary))
        transport = InProcess(client_side(rehearsed, dataset, device, str(folder.states)), DTYPE)
        rounds = _rounds(rehearsed, transport, folder) if e.federation.rounds != 0 else []
        seconds, evaluator = [], loops.evaluator(rehearsed, transport, folder)
        for _ in range(2):
            measured.restart()
            started = time.perf_counter()
            evaluator.personalize([typical.id])
            clock = measured.clock
            seconds.append(time.perf_counter() - started + clock.seconds - clock.conversation_s)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    on_device = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    first, later = (rounds[0], rounds[-1]) if rounds else (None, None)
    return MeasuredCosts(first, later, min(seconds), peak, on_device)


def _rounds(parts: _Rehearsed, transport: InProcess, folder: RunFolder) -> list[RoundCost]:
    """Return the costs of the first two rounds, or of the first one if it takes long."""
    attempts, measured, rounds = _Attempts(), parts.measured, list[RoundCost]()
    assert measured is not None
    most = parts.experiment.federation.rounds or 2
    loop = loops.loop(parts, transport, folder, LoopHooks(attempts), upto=most)
    while len(rounds) < min(2, most) and (not rounds or attempts.last.seconds < ROUND_S):
        measured.restart()
        loop.rehearse(1)
        last = attempts.last
        clients = sum(len(conversation.clients) for conversation in last.conversations)
        server_s = max(0.0, last.seconds - measured.clock.conversation_s)
        client_s = measured.clock.seconds / measured.at_once
        rounds.append(RoundCost(last.payload_up, last.payload_down, clients, client_s, server_s))
    loop.checkpoints.close()
    return rounds
