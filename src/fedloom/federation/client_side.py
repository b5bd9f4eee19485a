"""Clients' side of all conversations: holds the coroutines and their last answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedloom import tracing
from fedloom.algorithms.base import ClientAlgorithm, ClientGroup, Conversation
from fedloom.data.federated import ClientData, Split
from fedloom.errors import DataError, FedloomError, RefusedError, StorageError
from fedloom.federation.bugs import is_bug, told
from fedloom.federation.carrier import ConversationKey, Lost, MissingConversation
from fedloom.federation.randomness import generator
from fedloom.federation.states import States, Versions
from fedloom.messages import Message
from fedloom.models.predictors import Predictors
from fedloom.runs.journal import Version

_log = logging.getLogger(__name__)

TRAIN, EVALUATE = "train", "evaluate"


def after_steps_purpose(steps: int) -> str:
    """Return the purpose of an evaluation after so many local steps of each client."""
    return f"{EVALUATE}/{steps}"


@dataclass(eq=False)
class _Open:
    """One coroutine, its rows, and their last answers; ``life`` identifies the aggregator process that opened it.

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


class ClientSide:
    """Conversations of clients: one instance per worker process, or one in the aggregator's own process.

    Parameters
    ----------
    half
        The algorithm's client half.
    vocabulary
        All messages that it receives or sends, by name.
    load
        ``client id -> ClientData``; the only place where data are read.
    seed
        Seed of the run.
    conclude
        Turns the predictors that a conversation returns into its last answer: ``(predictors, group) -> message`` with
        one row per client (for an evaluation, the metrics).
    device, clients_at_once
        On CPU a group is one client; elsewhere up to ``clients_at_once``.
    states
        Storage of client states; required if the half is ``stateful``.
    start_afresh
        Let a client whose state is lost start afresh; otherwise it is refused.
    secret
        Key of noise that hides data from the aggregator (:class:`~fedloom.algorithms.base.ClientGroup`).
    after_steps
        Client half for each number of local steps of a new client (``evaluation.own_steps``).
    """

    def __init__(
        self,
        half: ClientAlgorithm,
        vocabulary: Mapping[str, type[Message]],
        load: Callable[[str], ClientData],
        seed: int,
        conclude: Callable[[Predictors, ClientGroup], Message],
        device: torch.device | None = None,
        clients_at_once: int = 1,
        states: States | None = None,
        *,
        start_afresh: bool = False,
        secret: bytes | None = None,
        after_steps: Mapping[int, ClientAlgorithm] | None = None,
    ) -> None:
        if half.stateful and states is None:
            raise ValueError(f"{type(half).__name__} keeps client states: found no place for them")
        self.vocabulary = vocabulary
        self._half = half
        self._after_steps = {after_steps_purpose(k): other for k, other in (after_steps or {}).items()}
        self._load = load
        self._seed = seed
        self._conclude = conclude
        self._device = device or torch.device("cpu")
        self._at_once = clients_at_once
        self._states = states
        self._start_afresh = start_afresh
        self._secret = secret
        self._open: dict[ConversationKey, dict[int, _Open]] = {}
        self.raises_bugs = False
        """True to raise a bug where it is, where nobody else would see it; else it is logged, and loses the client."""

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
        or of the previous evaluation, are closed, because a worker that was away is not told of their end.

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
        if key not in self._open:
            for earlier in [other for other in self._open if _moment(other) < _moment(key)]:
                self.close(earlier)
        conversation = self._open.setdefault(key, {})
        missing = [
            row
            for row in rows
            if exchange > 0
            and (
                row not in conversation
                or conversation[row].exchange not in (exchange - 1, exchange)
                or row in conversation[row].left
            )
        ]
        if missing:
            raise MissingConversation(missing)
        position = {row: i for i, row in enumerate(rows)}
        new = [row for row in rows if exchange == 0 and (row not in conversation or conversation[row].exchange > 0)]
        done: set[int] = set()
        for row in rows:
            if new and row == new[0]:
                chunk, new = tuple(new[: self._at_once]), new[self._at_once :]
                versions = [states[position[row]] for row in chunk] if states else []
                named = [clients[position[row]] for row in chunk]
                with _traced(key, exchange, named, message):
                    self._start(key, chunk, named, message, position, versions)
            opened = conversation[row]
            if id(opened) in done:
                continue
            done.add(id(opened))
            if opened.exchange < exchange:
                with _traced(
                    key, exchange, [clients[position[row]] for row in opened.rows if row in position], message
                ):
                    self._advance(opened, exchange, message, position)
            for member, answer in zip(opened.rows, opened.answers, strict=True):
                if member in position and conversation[member] is opened:
                    yield member, answer

    def close(self, key: ConversationKey) -> None:
        """End a conversation; its coroutines receive GeneratorExit."""
        for opened in set(self._open.pop(key, {}).values()):
            opened.coroutine.close()

    def close_all(self) -> None:
        """End every conversation."""
        for key in list(self._open):
            self.close(key)

    def _start(
        self,
        key: ConversationKey,
        rows: tuple[int, ...],
        clients: Sequence[str],
        message: Message,
        position: Mapping[int, int],
        versions: Sequence[Versions],
    ) -> None:
        def keyed(client: str, purpose: str) -> torch.Generator:
            drawn = key.purpose.partition("/")[0]  # after local steps the same draws as in an evaluation
            return generator(self._seed, f"{drawn}/{purpose}", client, key.round)

        conversation = self._open[key]
        try:
            group = ClientGroup(
                [_to(self._loaded(client), self._device) for client in clients],
                keyed,
                [self._state(client, version) for client, version in zip(clients, versions, strict=True)]
                if versions
                else None,
                may_keep=key.purpose == TRAIN and self._half.stateful,
                secret=self._secret,
            )
            opening = _message_to(message.select([position[row] for row in rows]), self._device)
            life = versions[0].life if versions else 0
            opened = _Open(key, rows, group, self._half_for(key.purpose).open(group, opening), life)
            self._step(opened, 0, lambda: next(opened.coroutine), alone=len(rows) == 1)
            if key.purpose == TRAIN:
                for client, version in zip(clients, versions, strict=False):
                    self._forget(client, version)
        except (RefusedError, StorageError):  # raised by the store
            raise
        except Exception as error:  # lose the client, not the worker
            if len(rows) > 1:  # serve the other clients of the group one by one
                for i, row in enumerate(rows):
                    self._start(key, (row,), clients[i : i + 1], message, position, versions[i : i + 1])
                return
            if self.raises_bugs and is_bug(error):
                raise
            names = ", ".join(clients)
            about = {"client": names, "round": key.round, "attempt": key.attempt, "exchange": 0}
            # Our own sentences need no traceback; their cause is logged only here (:meth:`_loaded`).
            said = not isinstance(error, FedloomError) or _log.isEnabledFor(logging.DEBUG)
            why = str(error) if error.__cause__ is None else f"{error} ({error.__cause__})"
            _log.error("clients %s cannot take part: %s", names, " ".join(why.split()), exc_info=said, extra=about)
            answers: list[Message | Lost] = [_lost(error)] * len(rows)
            opened = _Open(key, rows, ClientGroup([], keyed), _ended(), exchange=0, answers=answers)
        for row in rows:
            conversation[row] = opened

    def _loaded(self, client: str) -> ClientData:
        """Return the data of a client.

        Raises
        ------
        DataError
            If they cannot be read. The error omits the cause's paths and values, which must stay on this machine.
        """
        try:
            return self._load(client)
        except DataError as error:
            raise DataError(f"client {client}: its data cannot be read, the worker's log says why") from error

    def _half_for(self, purpose: str) -> ClientAlgorithm:
        """Return the client half for a purpose.

        Raises
        ------
        DataError
            If the evaluation is after a number of steps that the experiment does not name.
        """
        if "/" in purpose and purpose not in self._after_steps:
            raise DataError(f"evaluation: found {purpose[:40]!r}, which evaluation.own_steps does not name")
        return self._after_steps.get(purpose, self._half)

    def _state(self, client: str, versions: Versions) -> dict[str, Tensor] | None:
        """Return the state that a client starts from; None to start afresh.

        Raises
        ------
        DataError
            If it is lost, and clients with lost states are refused.
        """
        if versions.start is None or self._states is None:
            return None
        state = self._states.load(client, versions.start)
        if state is None and not self._start_afresh:
            raise DataError(
                f"client {client}: its state of round {versions.start.round} is lost (federation.lost_state: refuse)"
            )
        if state is None:
            _log.warning(
                "client %s starts afresh: its state of round %d is lost",
                client,
                versions.start.round,
                extra={"client": client},
            )
            return None
        return {name: tensor.to(self._device) for name, tensor in state.items()}

    def _forget(self, client: str, versions: Versions) -> None:
        if self._states is not None and versions.start is not None:
            self._states.forget(client, versions)

    def _store(self, opened: _Open) -> None:
        """Store the states that the group's clients keep, before the answer that they belong to is sent."""
        kept, opened.group.kept = opened.group.kept, {}
        for i, tensors in kept.items():
            assert self._states is not None
            row, key = opened.rows[i], opened.key
            version = Version(key.round, key.attempt, key.conversation, row, opened.life)
            self._states.save(opened.group.clients[i].id, version, tensors)

    def _advance(self, opened: _Open, exchange: int, message: Message, position: Mapping[int, int]) -> None:
        opened.left.update(
            row for row in opened.rows if row not in position or self._open[opened.key][row] is not opened
        )
        lost = [
            answer
            if isinstance(answer, Lost)
            else Lost("left out of an exchange before")
            if row in opened.left
            else None
            for row, answer in zip(opened.rows, opened.answers, strict=True)
        ]
        if all(lost):
            opened.exchange = exchange
            return
        moved = _message_to(self._rows_for(opened, message, position), self._device)
        self._step(opened, exchange, lambda: opened.coroutine.send(moved))
        # A lost client stays lost, whatever the group computed from its zeros.
        opened.answers = [gone or answer for gone, answer in zip(lost, opened.answers, strict=True)]

    def _step(self, opened: _Open, exchange: int, resume: Callable[[], Message], *, alone: bool = True) -> None:
        """Run the coroutine to its next answer, or to its end, where the predictors are used.

        The error of a group that is not ``alone`` is raised, so that its clients can still be served one by one.
        """
        g = len(opened.rows)
        try:
            try:
                reply = resume()
            except StopIteration as end:
                if end.value is None:
                    raise RuntimeError("the conversation is over, nothing answers this message") from None
                reply = self._conclude(end.value, opened.group)
            reply = _message_to(reply, torch.device("cpu"))
            self._store(opened)
            lost = opened.group.lost
            opened.answers = [Lost(lost[i]) if i in lost else reply.select([i]) for i in range(g)]
        except (RefusedError, StorageError):  # raised by the store
            raise
        except Exception as error:
            if not alone or (self.raises_bugs and is_bug(error)):
                raise
            said = not isinstance(error, FedloomError)  # our own sentences need no traceback
            names = ", ".join(c.id for c in opened.group.clients)
            about = {"client": names, "round": opened.key.round, "attempt": opened.key.attempt, "exchange": exchange}
            _log.error("clients %s failed: %s", names, error, exc_info=said, extra=about)
            lost = opened.group.lost
            opened.answers = [Lost(lost[i]) if i in lost else _lost(error) for i in range(g)]
        opened.exchange = exchange

    def _rows_for(self, opened: _Open, message: Message, position: Mapping[int, int]) -> Message:
        """Return the rows of a group, with zeros for a member that was lost (possible only in groups of several)."""
        if all(row in position for row in opened.rows):
            return message.select([position[row] for row in opened.rows])
        fields: dict[str, Tensor] = {}
        for field_, tensor in zip(message.fields(), message.tensors().values(), strict=True):
            fields[field_.name] = (
                torch.stack(
                    [tensor[position[row]] if row in position else torch.zeros_like(tensor[0]) for row in opened.rows]
                )
                if field_.per_client
                else tensor
            )
        return type(message)(**fields)


def _traced(
    key: ConversationKey, exchange: int, clients: Sequence[str], message: Message
) -> AbstractContextManager[object]:
    """Return a tracing span for the work of one group in one exchange."""
    return tracing.span(
        f"client {type(message).__name__}",
        client=",".join(clients),
        round=key.round,
        attempt=key.attempt,
        conversation=key.conversation,
        exchange=exchange,
    )


def _moment(key: ConversationKey) -> tuple[int, bool, int]:
    """Return a sort key for the time of a conversation: a round is trained, in attempts, and then evaluated."""
    return key.round, key.purpose != TRAIN, key.attempt


def _ended() -> Conversation:
    return None
    yield  # makes this a generator that has ended


def _lost(error: Exception) -> Lost:
    return Lost(told(error), is_bug(error))


def _to(client: ClientData, device: torch.device) -> ClientData:
    if device.type == "cpu":
        return client

    def moved(split: Split) -> Split:
        return Split(split.x.to(device), None if split.y is None else split.y.to(device))

    return ClientData(client.id, moved(client.train), moved(client.validation), moved(client.test), client.classes)


def _message_to(message: Message, device: torch.device) -> Message:
    if all(tensor.device == device for tensor in message.tensors().values()):
        return message
    return type(message)(**{name: tensor.to(device) for name, tensor in message.tensors().items()})
