"""Rehearsal of a run: its first rounds with one typical client, whose answers all others repeat, to measure the costs.

The round loop itself counts the bytes. Local training ends after a fraction of a second; its other steps are assumed to
take as long.
"""

from __future__ import annotations

import dataclasses
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

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

TRAINING_S, ROUND_S = 0.25, 1.0
"""Seconds after which a local training ends, and of a first round after which no second one is measured."""


class RoundCost(NamedTuple):
    """Cost of one round: bytes as the papers count them, clients asked, seconds of a client and of the server."""

    payload_up: int
    payload_down: int
    clients: int
    client_s: float
    server_s: float


class MeasuredCosts(NamedTuple):
    """Costs of the first rounds, at most two; seconds to evaluate a client; memory of a process, and of its GPU."""

    rounds: list[RoundCost]
    evaluation_s: float
    memory: int
    device_memory: int | None


class MeasuredAlgorithm(ClientAlgorithm):
    """Client algorithm that computes the answers of one group in each conversation; other groups repeat them.

    It is the group's ``Progress``, which measures its steps, and ends a training that takes too long; the steps that
    were not made would have taken ``skipped_s`` seconds.
    """

    def __init__(self, inner: ClientAlgorithm) -> None:
        super().__init__(inner.settings, inner.setup)
        self.predictors, self.stateful, self.personalizing = inner.predictors, inner.stateful, inner.personalizing
        self.trains = inner.trains  # type: ignore[method-assign]
        self._inner = inner
        self.restart()

    def restart(self) -> None:
        """Forget all answers and times."""
        self.measured_s, self.skipped_s, self.at_once, self.clients = 0.0, 0.0, 1, 0
        self._step_s, self._lost, self._answers = list[float](), dict[int, str](), dict[type[Message], list[Message]]()

    def open(self, clients: ClientGroup, opening: Message) -> Conversation:
        """Start the conversation that this message opens."""
        self.clients += len(clients)
        if (answers := self._answers.get(type(opening))) is not None:
            return self._repeated(answers, clients)
        clients.progress, self.at_once, self._lost = self, len(clients), clients.lost
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
                self.measured_s += time.perf_counter() - started
            self._answers.setdefault(opening, []).append(answer.select([0]))
            message = yield answer

    def _repeated(self, answers: list[Message], clients: ClientGroup) -> Conversation:
        for answer in answers:  # it grows while the conversation goes on
            for reason in self._lost.values():
                for i in range(len(clients)):
                    clients.fail_client(i, reason)
            yield answer.select([0] * len(clients))
        raise DataError("the client that is measured has failed")

    def begin(self, training: int) -> Mapping[str, Tensor] | None:
        """Start the clock; no training is continued."""
        self._started = self._last = time.perf_counter()
        return None

    def is_due(self, *, finished: bool = False) -> bool:
        """Return False: nothing is saved."""
        return False

    def save(self, training: int, state: Mapping[str, Tensor]) -> None:
        """Save nothing."""

    def ends(self, steps_left: int) -> bool:
        """Note the time of a step; return whether the training has taken long enough, and add the steps left."""
        now = time.perf_counter()
        self._step_s.append(now - self._last)
        self._last, is_enough = now, now - self._started >= TRAINING_S
        self.skipped_s += steps_left * statistics.median(self._step_s) if is_enough else 0
        return is_enough


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rehearsed(RunContext):
    """Parts of a run whose clients all have the data of one of them."""

    typical: str
    measured: MeasuredAlgorithm

    def client_algorithm(self) -> ClientAlgorithm:
        """Return the client algorithm that measures."""
        return self.measured

    def examples_of(self, dataset: FederatedDataset) -> Callable[[str], ClientData]:
        """Return a function of a client's id that returns the typical client's data."""
        load = super().examples_of(dataset)
        return lambda client: dataclasses.replace(load(self.typical), id=client)


def rehearse(parts: RunContext, dataset: FederatedDataset) -> MeasuredCosts:
    """Return the costs of a run, measured on this machine; only a temporary folder is written.

    Raise QuorumError if the first round fails.
    """
    e, entries = parts.experiment, dataset.manifest.clients
    training = [entry for entry in entries if entry.seen] or entries
    mean = statistics.fmean(entry.train for entry in training)
    typical = min(training, key=lambda entry: abs(entry.train - mean))
    privacy = e.federation.privacy
    if privacy is not None and privacy.of == "clients":  # cohorts of the expected size
        privacy = privacy.model_copy(update={"sampling": "fixed"})
    # The clients that repeat answers keep no states.
    federation = e.federation.model_copy(update={"lost_state": "afresh", "attempts": 1, "privacy": privacy})
    e = e.model_copy(update={"federation": federation})
    alike = tuple(dataclasses.replace(typical, id=entry.id, seen=entry.seen) for entry in entries)
    measured = MeasuredAlgorithm(parts.client_algorithm())
    changed = {"experiment": e, "manifest": dataclasses.replace(parts.manifest, clients=alike)}
    rehearsed = _Rehearsed(**vars(parts) | changed, typical=typical.id, measured=measured)
    device = use_device(e.runtime.device, e.runtime.threads)
    with TemporaryDirectory(prefix="fedloom-check-") as temporary:
        folder = RunFolder(Path(temporary))
        transport = InProcess(client_side(rehearsed, dataset, device, str(folder.states)), DTYPE)
        rounds = [] if e.federation.rounds == 0 else _rounds(rehearsed, measured, transport, folder)
        seconds, evaluator = list[float](), loops.evaluator(rehearsed, transport, folder)
        for _ in range(2):  # the first one also warms up
            measured.restart()
            started = time.perf_counter()
            evaluator.personalize([typical.id])
            seconds.append(time.perf_counter() - started + measured.skipped_s)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    on_device = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    return MeasuredCosts(rounds, min(seconds), peak, on_device)


def _rounds(parts: RunContext, measured: MeasuredAlgorithm, transport: InProcess, folder: RunFolder) -> list[RoundCost]:
    """Return the costs of the first two rounds, or of the first one if it takes long."""
    most, rounds = parts.experiment.federation.rounds or 2, list[RoundCost]()
    loop = loops.loop(parts, transport, folder, LoopHooks(RunObserver()), upto=most)
    before = dataclasses.replace(loop.journal.costs)
    while len(rounds) < min(2, most) and before.seconds < ROUND_S:
        measured.restart()
        loop.rehearse(1)
        now = dataclasses.replace(loop.journal.costs)
        up, down = now.payload_up - before.payload_up, now.payload_down - before.payload_down
        client_s = (measured.measured_s + measured.skipped_s) / measured.at_once
        server_s = max(0.0, now.seconds - before.seconds - measured.measured_s)
        rounds.append(RoundCost(up, down, measured.clients, client_s, server_s))
        before = now
    loop.checkpoints.close()
    return rounds
