"""Clients' side of all conversations: holds the coroutines and their last answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedloom.algorithms.base import ClientAlgorithm, Conversation
from fedloom.algorithms.client_group import ClientGroup
from fedloom.data.augment import Augmentation
from fedloom.data.federated import ClientData, Split
from fedloom.data.inputs import each
from fedloom.errors import DataError, FedloomError, RefusedError, StorageError
from fedloom.federation.client_request import ClientRequest
from fedloom.federation.progress import Saved, Saves
from fedloom.federation.randomness import generator
from fedloom.federation.silence import Silence
from fedloom.federation.states import States, Versions
from fedloom.federation.transport import (
    EVALUATE,
    TRAIN,
    AnswerHolder,
    Call,
    ConversationKey,
    Guard,
    Lost,
    MissingConversation,
    ModelKeeper,
    Refusals,
    Traffic,
)
from fedloom.federation.validation import fault, is_bug, safe_reason
from fedloom.messages import Message
from fedloom.models.predictors import Predictors
from fedloom.privacy.examples import ExamplePrivacy
from fedloom.runs.journal import Version

_log = logging.getLogger(__name__)
_CPU = torch.device("cpu")


def after_steps_purpose(steps: int) -> str:
    """Return the purpose of an evaluation after this many local steps of each client."""
    return f"{EVALUATE}/{steps}"


@dataclass(eq=False)
class _Talk:
    """Coroutine, its rows, and their last answers; ``life`` identifies the aggregator process that opened it.

    ``left`` holds rows that continued elsewhere while the rest of their group continued here.
    """

    key: ConversationKey
    rows: tuple[int, ...]
    group: ClientGroup
    coroutine: Conversation
    life: int = 0
    exchange: int = -1
    answers: list[Message | Lost] = field(default_factory=list)
    left: set[int] = field(default_factory=set)
    saved: Saved | None = None


@dataclass(frozen=True)
class ClientConfig:
    """Settings of the clients' side."""

    seed: int
    device: torch.device = _CPU
    """Device of the clients' data and messages."""
    clients_at_once: int = 1
    """Maximum number of clients in a group."""
    start_afresh: bool = False
    """True to let a client whose state is lost start without one; otherwise it is refused."""
    secret: bytes | None = None
    """Key of noise that hides data from the aggregator (:class:`~fedloom.algorithms.base.ClientGroup`)."""
    augment: Augmentation | None = None
    held: AnswerHolder | None = None
    """Answers held back so that the aggregator learns only their sums; None if it receives every answer."""
    examples: ExamplePrivacy | None = None
    """Differential privacy of examples in training rounds."""
    saves: Saves | None = None
    """Saves of local training; None without."""
    models: ModelKeeper | None = None
    """Keeper of the clients' models; None: they are not kept."""
    purpose: str = EVALUATE
    """Purpose of conversations outside training, which may be followed by a number of local steps."""
    guard: Guard | None = None
    """Policy of the member; None allows everything."""


class ClientSide:
    """Conversations of clients: one instance per worker process, or one in the aggregator's own process.

    Parameters
    ----------
    algorithm
        Client algorithm of the method.
    vocabulary
        All messages that it receives or sends, by name.
    load
        ``client id -> ClientData``; the only place where data are read.
    conclude
        Turns the predictors that a conversation returns into its last answer, ``(predictors, group) -> message`` with
        one row per client: in an evaluation, the metrics.
    states
        Storage of client states; required to train an algorithm that is ``stateful``.
    after_steps
        Client algorithm for each number of local steps of a new client (``evaluation.own_steps``).
    """

    def __init__(
        self,
        algorithm: ClientAlgorithm,
        vocabulary: Mapping[str, type[Message]],
        load: Callable[[str], ClientData],
        conclude: Callable[[Predictors, ClientGroup], Message],
        config: ClientConfig,
        *,
        states: States | None = None,
        after_steps: Mapping[int, ClientAlgorithm] | None = None,
    ) -> None:
        self.vocabulary = vocabulary
        self._algorithm = algorithm
        self._after_steps = {after_steps_purpose(k): other for k, other in (after_steps or {}).items()}
        self._load = load
        self._conclude = conclude
        self._config = config
        self._states = states
        self._open: dict[ConversationKey, dict[int, _Talk]] = {}
        self.raises_bugs = False
        """True to raise a bug at once, in process; otherwise it is logged, and the client is lost."""

    def answer(
        self,
        key: ConversationKey,
        exchange: int,
        rows: Sequence[int],
        clients: Sequence[str],
        message: Message,
        states: Sequence[Versions] = (),
    ) -> Iterator[tuple[int, Message | Lost]]:
        """Yield each row's answer as soon as it is ready.

        The same exchange asked again gives the same answer without recomputation. Conversations of an earlier attempt,
        or of the previous evaluation, are closed, because a disconnected worker is not notified of their end.

        Parameters
        ----------
        rows, clients
            Positions in the cohort, and their clients; row fields of ``message`` have as many rows.
        states
            In an opening with client states: the versions of each row's client.

        Raises
        ------
        MissingConversation
            Before any work, if rows have no conversation at this exchange: the earlier messages are needed first.
        """
        request = ClientRequest(key, exchange, message, {row: i for i, row in enumerate(rows)}, clients, states)
        conversation = self._conversation(key)
        if exchange and (missing := [row for row in rows if not _is_ready(conversation.get(row), row, exchange)]):
            raise MissingConversation(missing)
        new = [row for row in rows if exchange == 0 and (row not in conversation or conversation[row].exchange > 0)]
        advanced: set[_Talk] = set()
        if new and self._config.saves is not None:
            self._config.saves.look()
        for row in rows:
            if new and row == new[0]:
                chunk, new = tuple(new[: self._config.clients_at_once]), new[self._config.clients_at_once :]
                with request.traced(chunk):
                    self._start(request, chunk)
            if (talk := conversation[row]) not in advanced:
                advanced.add(talk)
                yield from self._answers(talk, request, conversation)

    def _answers(
        self, talk: _Talk, request: ClientRequest, by_row: Mapping[int, _Talk]
    ) -> Iterator[tuple[int, Message | Lost]]:
        if talk.exchange < request.exchange:
            with request.traced(talk.rows):
                self._advance(talk, request)
        for member, answer in zip(talk.rows, talk.answers, strict=True):
            if member in request.position and by_row[member] is talk:
                yield member, answer

    def _conversation(self, key: ConversationKey) -> dict[int, _Talk]:
        """Return the open rows of a conversation; if it is new, close those before it."""
        if key not in self._open:
            now = key.round, key.purpose != TRAIN, key.attempt  # a round's attempts come before its evaluation
            for earlier in [it for it in self._open if (it.round, it.purpose != TRAIN, it.attempt) < now]:
                self.close(earlier)
        return self._open.setdefault(key, {})

    def close(self, key: ConversationKey) -> None:
        """End a conversation; its coroutines receive GeneratorExit."""
        for talk in set(self._open.pop(key, {}).values()):
            talk.coroutine.close()
            if talk.saved is not None:
                talk.saved.close()
        if self._config.held is not None:
            self._config.held.close(key)

    def close_all(self) -> None:
        """End every conversation."""
        for key in list(self._open):
            self.close(key)

    def _start(self, request: ClientRequest, rows: tuple[int, ...]) -> None:
        """Open the conversation of a group; if that fails, open those of its clients one by one."""
        try:
            talk = self._opened(request, rows)
        except (RefusedError, StorageError):  # raised by the store
            raise
        except Exception as error:  # lose the client, not the worker
            if len(rows) > 1:
                if isinstance(error, torch.OutOfMemoryError):
                    _log.warning(
                        "%d clients together do not fit into the device's memory, and are computed one by one; a "
                        "smaller runtime.clients_at_once is faster: %s", len(rows), str(error).partition(". ")[0],
                    )  # fmt: skip
                for row in rows:
                    self._start(request, (row,))
                return
            if self.raises_bugs and is_bug(error):
                error.add_note(request.described(rows))
                raise
            # FedLoom's own errors need no traceback; their cause is logged only here (:meth:`_loaded`).
            traceback = not isinstance(error, FedloomError) or _log.isEnabledFor(logging.DEBUG)
            failure = _failure("cannot take part", error, request, request.named(rows), traceback)
            nobody = ClientGroup([], lambda client, purpose: generator(0, purpose))
            talk = _Talk(request.key, rows, nobody, _ended(), exchange=0, answers=[failure])
        self._open[request.key].update(dict.fromkeys(rows, talk))

    def _opened(self, request: ClientRequest, rows: tuple[int, ...]) -> _Talk:
        key, clients, versions = request.key, request.named(rows), request.versions(rows)

        algorithm, trains = self._algorithm_for(key.purpose, type(request.message)), key.purpose == TRAIN
        if (guard := self._config.guard) is not None:
            guard.question(key, request.message, trains=trains)
            for client in clients:
                guard.opens(key, client)

        def keyed(client: str, purpose: str) -> torch.Generator:
            stream = key.purpose.partition("/")[0]  # after local steps the same draws as in an evaluation
            return generator(self._config.seed, f"{stream}/{purpose}", client, key.round)

        states = [self._state(client, v) for client, v in zip(clients, versions, strict=True)] if versions else None
        data, saves = [_client_to(self._loaded(client), self._config.device) for client in clients], self._config.saves
        message = _message_to(request.select(rows), self._config.device)
        saved = None if saves is None else saves.begin(key, data, states, message)
        group = ClientGroup(
            data,
            keyed,
            states,
            may_keep=trains and self._algorithm.stateful,
            secret=self._config.secret,
            round=key.round if trains else None,
            augment=self._config.augment,
            examples=self._config.examples,
            progress=saved,
        )
        coroutine = algorithm.open(group, message)
        talk = _Talk(key, rows, group, coroutine, versions[0].life if versions else 0, saved=saved)
        if self._config.held is not None:
            self._config.held.begin(key, rows, states or [None] * len(rows))
        self._step(talk, request, lambda: next(coroutine), alone=len(rows) == 1)
        if trains and self._states is not None:
            for client, version in zip(clients, versions, strict=False):
                if version.start is not None:
                    self._states.forget(client, version)
        return talk

    def _loaded(self, client: str) -> ClientData:
        """Return the data of a client.

        Raise DataError if they cannot be read. The error omits the cause's paths and values, which must stay on this
        machine.
        """
        try:
            return self._load(client)
        except DataError as error:
            raise DataError(f"client {client}: cannot read its data; the worker's log has the reason") from error

    def _algorithm_for(self, purpose: str, opening: type[Message]) -> ClientAlgorithm:
        """Return the client algorithm for a conversation.

        Noise, clipping and kept states depend on the purpose, so it must be that of the opening message, whatever the
        aggregator names. Raise DataError if it is not, or the evaluation is after a number of steps that the experiment
        does not name.
        """
        if "/" in purpose and purpose not in self._after_steps:
            raise DataError(f"evaluation.own_steps does not name {purpose[:40]!r}", key="evaluation.own_steps")
        algorithm = self._after_steps.get(purpose, self._algorithm)
        allowed = (TRAIN,) if algorithm.trains(opening) else (self._config.purpose, *self._after_steps)
        if purpose not in allowed:
            raise DataError(f"the aggregator opens {purpose[:40]!r} with {opening.__name__}, which is for {allowed[0]}")
        return algorithm

    def _state(self, client: str, versions: Versions) -> dict[str, Tensor] | None:
        """Return the state that a client starts from; None to start afresh.

        Raise DataError if it is lost, and clients with lost states are refused.
        """
        if versions.start is None or self._states is None:
            return None
        state = self._states.load(client, versions.start)
        if state is None and not self._config.start_afresh:
            raise DataError(
                f"client {client}: its state of round {versions.start.round} is lost (federation.lost_state: refuse)"
            )
        if state is None:
            warning = f"client {client} starts afresh: its state of round {versions.start.round} is lost"
            _log.warning(warning, extra={"client": client})
            return None
        return {name: tensor.to(self._config.device) for name, tensor in state.items()}

    def _store(self, talk: _Talk) -> None:
        """Store the states that the group's clients keep, before the answer that they belong to is sent."""
        states, talk.group.kept = talk.group.kept, {}
        for i, tensors in states.items():
            assert self._states is not None
            row, key = talk.rows[i], talk.key
            version = Version(key.round, key.attempt, key.conversation, row, talk.life)
            self._states.save(talk.group.clients[i].id, version, tensors)

    def _advance(self, talk: _Talk, request: ClientRequest) -> None:
        """Deliver the next message to a group; rows absent from it have left."""
        by_row = self._open[talk.key]
        talk.left.update(row for row in talk.rows if row not in request.position or by_row[row] is not talk)
        losses = [
            answer if isinstance(answer, Lost) else Lost("missed an earlier exchange") if row in talk.left else None
            for row, answer in zip(talk.rows, talk.answers, strict=True)
        ]
        if all(losses):
            talk.exchange = request.exchange
            return
        if (holder := self._config.held) is not None and holder.is_step(request.message):
            talk.answers = [loss or self._step_of_sum(holder, talk, i, request) for i, loss in enumerate(losses)]
            talk.exchange = request.exchange
            return
        message = _message_to(request.select(talk.rows), self._config.device)
        if talk.saved is not None:
            talk.saved.hear(message)
        self._step(talk, request, lambda: talk.coroutine.send(message))
        # A lost client stays lost, whatever the group computed from its zeros.
        talk.answers = [loss or answer for loss, answer in zip(losses, talk.answers, strict=True)]

    def _step(self, talk: _Talk, request: ClientRequest, resume: Callable[[], Message], *, alone: bool = True) -> None:
        """Run the coroutine to its next answer, or to its end, where the predictors are used.

        The error of a group that is not ``alone`` is raised, so that its clients can still be served one by one.
        """
        losses = talk.group.lost
        if self._config.held is not None:
            self._config.held.hear(talk.key, talk.rows, request.message)
        guard = self._config.guard
        try:
            if guard is not None and request.exchange:
                guard.question(talk.key, request.message, trains=talk.key.purpose == TRAIN)
            reply = _message_to(self._next(talk, resume), _CPU)
            self._store(talk)
            talk.answers = [
                Lost(losses[i]) if i in losses else self._held(talk, i, request, reply.select([i]))
                for i in range(len(talk.rows))
            ]
        except (RefusedError, StorageError):  # raised by the store
            raise
        except Exception as error:
            if not alone:
                raise
            if self.raises_bugs and is_bug(error):
                error.add_note(request.described(talk.rows))
                raise
            names = [client.id for client in talk.group.clients]
            failure = _failure("failed", error, request, names, not isinstance(error, FedloomError))
            talk.answers = [Lost(losses[i]) if i in losses else failure for i in range(len(talk.rows))]
        talk.exchange = request.exchange

    def _held(self, talk: _Talk, i: int, request: ClientRequest, reply: Message) -> Message | Lost:
        """Return the i-th client's answer, or a notice that it is held back for a sum."""
        holder, guard, key = self._config.held, self._config.guard, talk.key
        client, varies = talk.group.clients[i], talk.group.drew[i]
        covered = holder is not None and holder.covers(reply)
        try:
            if guard is not None:
                guard.answer(key, client.id, reply, trains=key.purpose == TRAIN, summed=covered)
            if holder is None or not covered:
                return reply
            return holder.hold(key, talk.rows[i], client, request.message, reply, varies=varies)
        except FedloomError as error:
            return _failure("failed", error, request, [client.id])

    def _step_of_sum(self, holder: AnswerHolder, talk: _Talk, i: int, request: ClientRequest) -> Message | Lost:
        """Return the i-th client's answer to a step of a secure sum."""
        row, client = talk.rows[i], talk.group.clients[i].id
        try:
            return holder.step(talk.key, row, client, request.select([row]))
        except (FedloomError, IndexError, RuntimeError, TypeError, ValueError) as error:
            if not isinstance(error, FedloomError):
                if self.raises_bugs:
                    raise
                error = RefusedError(f"{type(request.message).__name__} has a form that no honest aggregator sends")
            return _failure("failed", error, request, [client])

    def _next(self, talk: _Talk, resume: Callable[[], Message]) -> Message:
        try:
            return resume()
        except StopIteration as end:
            if end.value is None:
                raise RuntimeError("the conversation is over; nothing answers this message") from None
            if self._config.models is not None and talk.key.purpose == EVALUATE:
                self._config.models.keep(talk.key.round, talk.group.clients, end.value)
            return self._conclude(end.value, talk.group)


def _is_ready(talk: _Talk | None, row: int, exchange: int) -> bool:
    return talk is not None and talk.exchange in (exchange - 1, exchange) and row not in talk.left


class InProcess:
    """Carries exchanges by function calls. Deadlines do not apply: a client in our own thread cannot be interrupted."""

    def __init__(self, client_side: ClientSide, dtype: torch.dtype) -> None:
        self._client_side = client_side
        client_side.raises_bugs = True
        self._dtype = dtype
        self.traffic = Traffic()
        self.refusals = Refusals()
        self.silence = Silence()

    def exchange(self, call: Call) -> Sequence[Message | Lost]:
        """Ask each row in turn; an invalid answer is refused, as on the wire. A bug that a client meets is raised."""
        answers: dict[int, Message | Lost] = {}
        for row, answer in self._client_side.answer(
            call.key, call.exchange, call.rows, call.clients, call.message, call.states
        ):
            wrong = None if isinstance(answer, Lost) else fault(answer, call.shapes, self._dtype)
            if wrong is not None:
                self.refusals.count("invalid reply")
            answers[row] = answer if wrong is None else Lost(wrong)
        return [answers[row] for row in call.rows]

    def close(self, key: ConversationKey) -> None:
        """End a conversation."""
        self._client_side.close(key)


def _failure(
    action: str, error: Exception, request: ClientRequest, clients: Sequence[str], traceback: bool = False
) -> Lost:
    """Log an error with its cause, which stays on this machine, and return it as the aggregator is told of it."""
    names, key = ", ".join(clients), request.key
    reason = " ".join((str(error) if error.__cause__ is None else f"{error} ({error.__cause__})").split())
    details = {"client": names, "round": key.round, "attempt": key.attempt, "exchange": request.exchange}
    details["data"] = {"event": "refused"}
    _log.error("clients %s %s: %s", names, action, reason, exc_info=traceback, extra=details)
    return Lost(safe_reason(error), is_bug(error))


def _ended() -> Conversation:
    return None
    yield  # makes this function a generator that yields nothing


def _client_to(client: ClientData, device: torch.device) -> ClientData:
    """Return a client's data on a device."""
    if device.type == "cpu":
        return client

    def moved(split: Split) -> Split:
        return Split(each(split.x, lambda x: x.to(device)), None if split.y is None else split.y.to(device))

    return ClientData(client.id, moved(client.train), moved(client.validation), moved(client.test), client.classes)


def _message_to(message: Message, device: torch.device) -> Message:
    """Return a message on a device."""
    if all(tensor.device == device for tensor in message.tensors().values()):
        return message
    return type(message)(**{name: tensor.to(device) for name, tensor in message.tensors().items()})
