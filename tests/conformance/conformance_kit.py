"""A tiny federation of the real parts, and transports that lose, move and corrupt messages."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from fedloom import experiment as experiments
from fedloom.algorithms.base import ClientAlgorithm, Conversation, available, find_algorithm
from fedloom.algorithms.client_group import ClientGroup
from fedloom.data.federated import FederatedDataset
from fedloom.engine import assemble, loops, run_data
from fedloom.engine.assemble import RunContext
from fedloom.evaluation.plan import EvaluationResult
from fedloom.federation.client_side import InProcess
from fedloom.federation.evaluator import LoopHooks
from fedloom.federation.loop import Loop
from fedloom.federation.silence import Silence
from fedloom.federation.transport import Call, ConversationKey, Lost, Refusals, Traffic, Transport
from fedloom.messages import Message
from fedloom.runs.folder import RunFolder
from fedloom.runs.journal import Attempt, Journal, Replay
from fedloom.transport.exchanges import deal

VARIANTS: dict[str, dict[str, Any]] = {
    "pefll:subspace": {
        "embedding": {"network": "linear"},
        "local": {"epochs": 1, "batch_size": 4, "lr": 0.05},
        "hypernetwork": {"subspace": {"size": 11}},
    },
    "fgdro-kl:momentum": {"optimizer": "momentum", "local": {"steps": 3, "batch_size": 4, "lr": 0.05}},
    "pfedbayes:kept": {
        "steps": 2,
        "batch_size": 4,
        "optimizer": "adam",
        "draws": 3,
        "personalize_steps": 2,
        "moments": "kept",
        "averaged": 2,
    },
    "pfedbayes:ivon": {
        "steps": 2,
        "batch_size": 4,
        "optimizer": "ivon",
        "lr_personal": 0.1,
        "draws": 3,
        "personalize_steps": 2,
    },
    "wga:all": {
        "batch_size": 4,
        "users": "all",
        "block": 2,
        "beta": "harmonic",
        "optimizer": "adam",
        "weights": "inverse_variance",
    },
}
"""Settings with which some methods run once more, where these decide what the server keeps."""

TINY = {name: find_algorithm(name).example_settings() for name in available()} | VARIANTS
"""Settings with which each method runs on 6x6 images; epochs, so that clients of different sizes differ in steps."""

MODELS = {"fedbn": {"name": "vgg", "channels": [3], "norm": "batch"}}
"""Models of methods that need more than body and head."""

COHORT = 3
ROUNDS = 3


class Quiet:
    """Observer that does nothing; tests replace its callbacks."""

    def __init__(self) -> None:
        self.on_round: Callable[[Attempt], None] = lambda attempt: None
        self.on_failure: Callable[[Attempt], None] = lambda attempt: None

    def round_done(self, attempt: Attempt, rounds: int) -> None:
        self.on_round(attempt)

    def attempt_failed(self, attempt: Attempt, attempts: int) -> None:
        self.on_failure(attempt)

    def evaluating(self, round: int, done: int, clients: int) -> None: ...

    def evaluated(self, line: dict[str, Any]) -> None: ...


@dataclass
class Federation:
    """One method on the tiny data, which can be run repeatedly."""

    parts: RunContext
    dataset: FederatedDataset
    tmp: Path
    records: Path

    def changed(self, **keys: Any) -> Federation:
        """Return a copy with changed keys of a section (``federation__rounds=2``), or with a section replaced."""
        tree = self.parts.experiment.model_dump(mode="json")
        for key, value in keys.items():
            section, _, name = key.partition("__")
            if name:
                tree[section][name] = value
            else:
                tree[section] = value
        return dataclasses.replace(self, parts=_parts(self.tmp, tree, self.dataset))

    def transport(self, name: str, change: Callable[[ClientAlgorithm], Any] = lambda half: half) -> InProcess:
        """Return an in-process transport for the run in folder ``name``; ``change`` may wrap the client algorithm."""
        algorithm = self.parts.algorithm
        changed = copy.copy(algorithm)
        vars(changed)["client"] = lambda *known: change(algorithm.client(*known))
        return assemble.in_process(
            dataclasses.replace(self.parts, algorithm=changed), self.dataset, RunFolder(self.tmp / name)
        )

    def loop(
        self,
        name: str,
        transport: Transport | None = None,
        replay: str | None = None,
        stop: threading.Event | None = None,
        upto: int | None = None,
    ) -> Loop:
        """A loop over the run's folder ``name``; ``replay`` names the folder whose journal is repeated.

        One that goes ``upto`` a round does not evaluate that round, where :meth:`Loop.advance` makes its rounds.
        """
        folder = RunFolder(self.tmp / name)
        folder.make()
        again = None if replay is None else Replay(RunFolder(self.tmp / replay))
        stop = threading.Event() if stop is None else stop
        transport, hooks = transport or self.transport(name), LoopHooks(Quiet(), stop)
        return loops.loop(self.parts, transport, folder, hooks, replay=again, upto=upto, measure_last=upto is None)

    def run(self, name: str, transport: Transport | None = None, replay: str | None = None) -> EvaluationResult:
        """Run from the beginning to the end."""
        return self.loop(name, transport, replay).run()

    def advance(
        self, name: str, transport: Transport | None = None, replay: str | None = None, upto: int | None = None
    ) -> Loop:
        """Run from the beginning through the last round, which is not evaluated: that takes half of a tiny run."""
        loop = self.loop(
            name, transport, replay, upto=self.parts.experiment.federation.rounds if upto is None else upto
        )
        loop.advance()
        return loop

    def recorded(self, name: str, upto: int | None = None) -> list[Call]:
        """Copy an undisturbed run into folder ``name`` and return its calls; it goes like ``advance`` with ``upto``.

        The first test that needs it makes the run, in the folder ``records``.
        """
        tree = [self.parts.experiment.model_dump(mode="json"), upto]
        made = dataclasses.replace(self, tmp=self.records / hashlib.sha256(json.dumps(tree).encode()).hexdigest())
        if made.tmp not in CALLS:
            transport = Faulty(made.transport("run"))
            made.run("run", transport) if upto is None else made.advance("run", transport, upto=upto)
            CALLS[made.tmp] = transport.calls
        shutil.copytree(made.tmp / "run", self.tmp / name)
        return CALLS[made.tmp]

    def trained(self, name: str) -> None:
        """Copy an undisturbed run into folder ``name`` that lacks only the evaluation of its last round."""
        self.recorded(name, upto=self.parts.experiment.federation.rounds)

    def disturbed(
        self, name: str, lose: Callable[[Call, int], bool], undisturbed: int = 1, upto: int | None = None
    ) -> Loop:
        """Like ``advance``, with lost clients; the first rounds are copied from an undisturbed run."""
        self.recorded(name, upto=undisturbed)
        rounds = self.parts.experiment.federation.rounds if upto is None else upto
        loop = self.loop(name, Faulty(self.transport(name), lose), upto=rounds)
        loop.resume()
        loop.advance()
        return loop

    def resume(self, name: str, transport: Transport | None = None) -> EvaluationResult:
        """Resume in a folder with new objects only."""
        loop = self.loop(name, transport)
        loop.resume()
        return loop.run()

    def final(self, name: str) -> bytes:
        """Return the bytes of a run's last checkpoint."""
        return sorted((self.tmp / name / "checkpoints").glob("round-*"))[-1].read_bytes()

    def metrics(self, name: str) -> list[dict[str, Any]]:
        """Return the evaluated rounds."""
        return list(RunFolder(self.tmp / name).lines("metrics.jsonl"))

    def attempts(self, name: str) -> list[Attempt]:
        """Return the journal without times and incarnations."""
        attempts = Journal.read(RunFolder(self.tmp / name)).attempts
        return [dataclasses.replace(attempt, seconds=0.0, phases={}, life=0) for attempt in attempts]

    def exchanges(self, round: int = 2) -> list[Exchange]:
        """Return the exchanges of a training round of an undisturbed run, which is copied into folder ``whole``."""
        return [
            Exchange(call.key.conversation, call.exchange, call.rows)
            for call in self.recorded("whole")
            if call.key.round == round and call.key.purpose == "train"
        ]


CALLS: dict[Path, list[Call]] = {}
"""Calls of the recorded runs, by folder."""


@dataclass(frozen=True)
class Exchange:
    """One exchange of a round."""

    conversation: int
    exchange: int
    rows: tuple[int, ...]

    def same(self, call: Call) -> bool:
        """Return True if a call is this exchange of any round."""
        return (call.key.conversation, call.exchange) == (self.conversation, self.exchange)


def federation(tmp: Path, place: Path, algorithm: str, settings: Mapping[str, Any]) -> Federation:
    """Return eight clients of very different sizes, two of them unseen, with three in a cohort.

    Federations of a ``place`` share its data and its recorded runs.
    """
    trains = find_algorithm(algorithm).trains
    tree = {
        "name": "conformance",
        "seed": 3,
        "data": {
            "dataset": "tiny",
            "root": str(place / "root"),
            "partition": {"scheme": "classes", "clients": 8, "classes_per_client": 2, "shares": [0.8, 0.2]},
            "held_out_fraction": 0.25,
        },
        "model": MODELS.get(algorithm, {"name": "mlp", "hidden": [4]}),
        "algorithm": {"name": algorithm, **settings},
        "federation": {
            "rounds": ROUNDS if trains else 0,
            "clients_per_round": COHORT,
            "deadline_s": 30.0,
            "checkpoint_every_s": 0.0,
        },
        "evaluation": {"every": 2, "cohort": 4, "batch_size": 16},
        "runtime": {"workers": 0},
    }
    path = tmp / "experiment.yaml"
    path.write_text(yaml.safe_dump(tree))
    e = experiments.load_experiment(path)
    dataset = run_data.make_partition(e)
    assert {entry.train for entry in dataset.manifest.clients} == {15, 22, 33}
    return Federation(assemble.make_parts(e, dataset.manifest), dataset, tmp, place / "records")


def _parts(tmp: Path, tree: dict[str, Any], dataset: FederatedDataset) -> RunContext:
    path = tmp / "changed.yaml"
    path.write_text(yaml.safe_dump(tree))
    return assemble.make_parts(experiments.load_experiment(path), dataset.manifest)


def state(loop: Loop) -> dict[str, Tensor]:
    """Return a copy of the server's state."""
    loop.server.settle()
    return {name: tensor.clone() for name, tensor in loop.server.state.items()}


def same_bits(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Return True if two states are equal to the bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def assert_equal_but_for_traffic(tiny: Federation, name: str, other: str) -> None:
    """Compare the models and the metrics of two runs; only one of them may have counted bytes."""
    assert tiny.final(name) == tiny.final(other)
    for there, here in zip(tiny.metrics(name), tiny.metrics(other), strict=True):
        del there["communication"], here["communication"]
        assert there == here


# --- faults -----------------------------------------------------------------------------------------------------------


class Faulty:
    """Carries as another transport does, and then loses the rows that ``lose`` names: the client did all its work.

    Parameters
    ----------
    lose
        ``(call, row) -> bool``.
    before
        Called with each call before it is carried; may raise.
    """

    def __init__(
        self,
        transport: Transport,
        lose: Callable[[Call, int], bool] = lambda call, row: False,
        before: Callable[[Call], None] = lambda call: None,
    ) -> None:
        self.calls: list[Call] = []
        self.refusals, self.silence = transport.refusals, transport.silence
        self._transport = transport
        self._lose = lose
        self._before = before

    @property
    def traffic(self) -> Traffic:
        return self._transport.traffic

    def exchange(self, call: Call) -> Sequence[Message | Lost]:
        self.calls.append(call)
        self._before(call)
        answers = self._transport.exchange(call)
        return [
            Lost("injected") if self._lose(call, row) else answer
            for row, answer in zip(call.rows, answers, strict=True)
        ]

    def close(self, key: ConversationKey) -> None:
        self._transport.close(key)


class Spread:
    """Several places, each serving its clients; a conversation's row stays where it was opened.

    Traffic is measured as on a wire, so that the server's own work runs beside the exchange.
    """

    def __init__(self, places: Sequence[InProcess], serves: Sequence[frozenset[str]]) -> None:
        self.traffic = Traffic(0, 0)
        self.refusals = Refusals()
        self.silence = Silence()
        self._places = places
        self._serves = {str(i): clients for i, clients in enumerate(serves)}
        self._where: dict[tuple[ConversationKey, int], int] = {}

    def exchange(self, call: Call) -> Sequence[Message | Lost]:
        if call.exchange == 0:
            for place, positions in deal(call.clients, self._serves).items():
                for position in positions:
                    self._where[call.key, call.rows[position]] = int(place)
        answers: dict[int, Message | Lost] = {}
        for i in reversed(range(len(self._places))):  # in another order than that of the rows
            mine = [p for p, row in enumerate(call.rows) if self._where[call.key, row] == i]
            if mine:
                part = dataclasses.replace(
                    call,
                    rows=tuple(call.rows[p] for p in mine),
                    clients=tuple(call.clients[p] for p in mine),
                    message=call.message.select(mine),
                    states=tuple(call.states[p] for p in mine) if call.states else (),
                )
                answers.update(zip(part.rows, self._places[i].exchange(part), strict=True))
        return [answers[row] for row in call.rows]

    def close(self, key: ConversationKey) -> None:
        for place in self._places:
            place.close(key)


class Poisoned:
    """Client algorithm whose answers contain a NaN for one client at one exchange of one kind of conversation."""

    def __init__(self, half: ClientAlgorithm, opening: type[Message], client: str, exchange: int) -> None:
        self.predictors, self.stateful, self.trains = half.predictors, half.stateful, half.trains
        self._half = half
        self._opening = opening
        self._client = client
        self._exchange = exchange

    def open(self, clients: ClientGroup, opening: Message) -> Conversation:
        return self._poison(clients, opening, self._half.open(clients, opening))

    def _poison(self, clients: ClientGroup, opening: Message, honest: Conversation) -> Conversation:
        reported, exchange = None, 0
        while True:
            try:
                answer = honest.send(reported)
            except StopIteration as end:
                return end.value
            mine = type(opening) is self._opening and clients.clients[0].id == self._client
            if mine and exchange == self._exchange:
                answer = type(answer)(**{name: with_nan(tensor) for name, tensor in answer.tensors().items()})
            reported = yield answer
            exchange += 1


class Huge:
    """Client algorithm whose training answers are finite, but overflow the server's state.

    All float32 numbers (models and their updates) are 3e38; float64 numbers (counts and measurements) are 0.
    """

    def __init__(self, half: ClientAlgorithm) -> None:
        self.predictors, self.stateful, self.trains = half.predictors, half.stateful, half.trains
        self._half = half

    def open(self, clients: ClientGroup, opening: Message) -> Conversation:
        honest, reported = self._half.open(clients, opening), None
        while True:
            try:
                answer = honest.send(reported)
            except StopIteration as end:
                return end.value
            clients.lost.clear()  # clients that start from such a state diverge
            reported = yield type(answer)(**{name: huge(tensor) for name, tensor in answer.tensors().items()})


def huge(tensor: Tensor) -> Tensor:
    """Return 3e38 everywhere for a float32 tensor, 0 for another."""
    return torch.full_like(tensor, 3e38 if tensor.dtype == torch.float32 else 0)


def with_nan(tensor: Tensor) -> Tensor:
    """Return a copy whose last number is NaN."""
    copy = tensor.clone()
    if copy.is_floating_point():
        copy.view(-1)[-1] = torch.nan
    return copy


class Killed(BaseException):
    """Exception that ends a run at once, like SIGKILL, but in this process."""
