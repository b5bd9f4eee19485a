"""Cohorts: the interface of the server algorithm to clients, independent of the transport."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from fedloom.core import tracing
from fedloom.core.words import REASON_CHARACTERS, pluralize, printable
from fedloom.errors import InterruptedRun, argument
from fedloom.federation.private_sums import Draw, PrivateSums
from fedloom.federation.releases import Releases
from fedloom.federation.states import Versions
from fedloom.federation.transport import Call, ConversationKey, Lost, Transport
from fedloom.messages import Message, Metrics, Replies, Shapes, Sums, stack
from fedloom.privacy.accounting import Release
from fedloom.runs.journal import Attempt, ConversationRecord, Loss, lost_rows

_log = logging.getLogger(__name__)

OUT_OF_RANGE = "value out of range"
"""Reason under which answers with implausible values are counted as refused."""


class Summing(Protocol):
    """Sums that a server receives in place of answers; None in a run whose server receives each answer."""

    @property
    def vocabulary(self) -> Mapping[str, type[Message]]:
        """Messages that conversations have for sums, beside those of the method."""

    @property
    def is_secure(self) -> bool:
        """True if the aggregator can read only sums."""

    @property
    def scaled(self) -> tuple[str, ...]:
        """Names of the fields that clipping may scale down."""

    def covers(self, answer: type[Message]) -> bool:
        """Return whether answers of this class are summed."""

    def observed_by(self, observe: Callable[[ConversationKey, Sequence[str], Sums[Any]], None]) -> Summing:
        """Return the same sums, each of which is also given to a function."""

    def in_process(self) -> Summing:
        """Return the same sums of clients in this process, which sign nothing."""

    def cohort(
        self,
        key: ConversationKey,
        clients: Sequence[str],
        sizes: Tensor,
        *,
        draw: Draw,
        reveal: Callable[[], None],
        **conversation: Any,
    ) -> RemoteCohort:
        """Return a cohort, randomly drawn, that sums; ``reveal`` is called once members may reveal a sum."""


@dataclass(frozen=True)
class RoundConfig:
    """Settings that apply to every conversation of a run."""

    seed: int
    clients_per_round: int
    deadline_s: float
    min_replies: int
    shapes: Shapes
    stop: threading.Event
    judge: Callable[[str, Message], str | None]
    """Returns why the values of a client's well-formed answer are implausible; None if they are plausible."""
    states: Callable[[Sequence[str]], tuple[Versions, ...]] | None = None
    """Returns the versions that clients start from now, for methods with client states."""
    releases: Releases | None = None
    """Record of private answers, updated before they are requested."""
    summation: Summing | None = None
    """Settings of sums, if the server uses only sums of the answers; None if it uses each answer."""
    sums_metrics: bool = False
    """True if the clients' metrics are summed securely."""
    noisy_steps: Callable[[str, str], Mapping[Release, int]] | None = None
    """Returns the releases of a client's noisy steps in a conversation of this purpose, for privacy of examples."""
    private: PrivateSums | None = None
    """Draws and noise of training, if clients are private."""


class TooFewReplies(Exception):
    """Fewer clients than ``federation.min_replies`` answered an exchange, which ends the attempt."""


class RemoteCohort:
    """One cohort and the conversation held with it (``algorithms.base.Cohort``)."""

    def __init__(
        self,
        key: ConversationKey,
        clients: Sequence[str],
        sizes: Tensor,
        *,
        transport: Transport,
        config: RoundConfig,
        attempt: Attempt,
        helper: ThreadPoolExecutor,
        record: ConversationRecord | None = None,
    ) -> None:
        self.key = key
        self.clients = tuple(clients)
        self.records: dict[str, Tensor] = {}
        self.sizes = sizes
        self.config = config
        self._transport, self._helper = transport, helper
        self._attempt = attempt
        self._planned = record
        self._at = 0
        self._alive = list(range(len(clients)))
        self._may_fail = False
        self._resting: dict[int, str] = {}  # rows that failed an exchange that may fail, with the reasons
        self._record = ConversationRecord(list(clients))
        self._bugs: dict[int, str] = {}  # rows lost by a bug, with its description
        self.failure: Exception | None = None
        """Error raised by the transport itself."""
        self._attempt.conversations.append(self._record)

    @property
    def present(self) -> Tensor:
        """``[c]`` bool: clients that have answered every exchange so far."""
        return self.flags(self._alive)

    def send(
        self, message: Message, answer: type[Message] = Metrics, meanwhile: Callable[[], None] | None = None
    ) -> Replies[Any]:
        """Deliver a message to every client still present and return their replies, one row per client.

        Raise TypeError if clients never answer with this class, for which no shapes are known; TooFewReplies if fewer
        than ``min_replies`` clients answered; InterruptedRun if the run was stopped meanwhile and clients are missing:
        the stop may be the cause, so the replies are unusable.
        """
        if answer not in self.config.shapes:
            names = ", ".join(sorted(cls.__name__ for cls in self.config.shapes))
            raise TypeError(f"clients do not answer with {answer.__name__}, only with {names}")
        answers = self.exchange(message, answer, self.config.shapes[answer], meanwhile)
        replies = None
        if answers:
            replies = stack(answer, [answers.get(row) for row in range(len(self.clients))])
        return Replies(replies, self.present, self.sizes)

    def exchange(
        self,
        message: Message,
        answer: type[Message],
        shapes: Mapping[str, tuple[int, ...]],
        meanwhile: Callable[[], None] | None = None,
        *,
        may_fail: bool = False,
    ) -> dict[int, Message]:
        """Make one exchange with every client still present; return the one-row answers by row.

        Parameters
        ----------
        shapes
            Trailing shape of each field of the answer.
        may_fail
            True to keep clients that do not answer, because their earlier answers count. They are lost at the next
            exchange that must succeed, if there is one.

        Raises
        ------
        TooFewReplies, InterruptedRun
            As in :meth:`send`.
        """
        started = time.perf_counter()
        self._may_fail = may_fail
        if not may_fail:
            self._lose_resting()
        self._attempt.payload_down += message.client_bytes() * len(self._alive)
        self._lose_planned()
        answers = self._ask(message, {answer: shapes}, meanwhile)
        name = type(message).__name__
        self._attempt.phases[name] = self._attempt.phases.get(name, 0.0) + time.perf_counter() - started
        self._at += 1
        self.check_replies(len(answers), message)
        return answers

    @property
    def exchanges(self) -> int:
        """Number of exchanges so far."""
        return self._at

    def check_replies(self, count: int, message: Message) -> None:
        """Raise TooFewReplies if too few clients have answered a message."""
        if count < self.config.min_replies:
            name, least = type(message).__name__, self.config.min_replies
            raise self.too_few(count, name, "federation.min_replies", least)

    def shapes(self, answer: type[Message]) -> Mapping[str, tuple[int, ...]]:
        """Return the trailing shape of each field of an answer of the method."""
        return self.config.shapes[answer]

    def flags(self, rows: Collection[int]) -> Tensor:
        """Return ``[c]`` bool, True in these rows."""
        flags = torch.zeros(len(self.clients), dtype=torch.bool)
        flags[sorted(rows)] = True
        return flags

    def ended_by(self, error: Exception) -> TooFewReplies:
        """Return the error that ends the attempt for this reason, with that of the last loss."""
        return TooFewReplies(f"{self._why_lost()}{error}")

    def too_few(self, count: int, message: str, key: str, least: int) -> TooFewReplies:
        """Return the error of an exchange that too few clients have answered, with the reason of the last loss."""
        return TooFewReplies(
            f"{self._why_lost()}{count} of {pluralize(len(self.clients), 'client')} answered {message}, "
            f"{key} is {least}"
        )

    def _lose_planned(self) -> None:
        """Lose the clients that a replayed conversation lost at this exchange."""
        losses_by_row = {} if self._planned is None else {loss.row: loss for loss in lost_rows(self._planned, self._at)}
        for row in [row for row in self._alive if row in losses_by_row]:
            self._lose(row, losses_by_row[row].reason)

    def _lose_resting(self) -> None:
        """Lose the clients that did not answer an exchange that might fail; their next answers need that one."""
        resting, self._resting = sorted(self._resting), {}
        for row in resting:
            self._lose(row, "missed an earlier exchange")

    def _ask(self, message: Message, shapes: Shapes, meanwhile: Callable[[], None] | None) -> dict[int, Message]:
        rows = [row for row in self._alive if row not in self._resting]
        if not rows:
            if meanwhile is not None:
                meanwhile()
            return {}
        with tracing.span(f"exchange {type(message).__name__}", **self._about(), clients=len(rows)):
            call = Call(
                key=self.key,
                exchange=self._at,
                rows=tuple(rows),
                clients=tuple(self.clients[row] for row in rows),
                message=message.select(rows),
                shapes=shapes,
                deadline_s=self.config.deadline_s,
                states=self._states() if self._at == 0 else (),
                trace=tracing.here(),
                told_again=self._record_private(next(iter(shapes))),
            )
            replies = self._carry(call, meanwhile)
        if self.config.stop.is_set() and any(isinstance(reply, Lost) for reply in replies):
            raise InterruptedRun(f"stopped in the middle of round {self.key.round}; continue with {argument('resume')}")
        answers = {}
        for row, reply in zip(call.rows, replies, strict=True):
            if (usable := self._usable(row, reply)) is not None:
                answers[row] = usable
        sizes_sent = [reply.client_bytes() for reply in answers.values()]
        if self._may_fail and sizes_sent:  # silent rows are not in the journal, so they count as in a replay
            sizes_sent = [sizes_sent[0]] * len(self._alive)
        self._attempt.payload_up += sum(sizes_sent)
        return answers

    def _usable(self, row: int, reply: Message | Lost) -> Message | None:
        if isinstance(reply, Lost):
            if reply.is_bug:
                self._bugs[row] = printable(reply.reason, REASON_CHARACTERS)
            self._lose(row, f"bug: {reply.reason}" if reply.is_bug else reply.reason)
            return None
        if (implausible := self.config.judge(self.clients[row], reply)) is None:
            return reply
        self.refuse(row, implausible)
        return None

    def _why_lost(self) -> str:
        lost = [loss for loss in self._record.lost if loss.exchange == self._at - 1]
        if lost and not self._alive and all(loss.row in self._bugs for loss in lost):
            return (
                f"{pluralize(len(lost), 'client')} failed because of a bug in the method or the model, not their data: "
                f"{self._bugs[lost[-1].row]}; the traceback is in their worker's log; "
            )
        if self._resting:
            row, reason = next(iter(self._resting.items()))
            return f"{self.clients[row]} failed: {reason}; "
        return "".join(f"{loss.client} was lost: {loss.reason}; " for loss in self._record.lost[-1:])

    def _about(self) -> dict[str, int]:
        key = self.key
        return {"round": key.round, "attempt": key.attempt, "conversation": key.conversation, "exchange": self._at}

    def _states(self) -> tuple[Versions, ...]:
        states = self.config.states
        return () if states is None else states([self.clients[row] for row in self._alive])

    def _record_private(self, answer: type[Message]) -> Callable[[Sequence[str]], None] | None:
        """Record private answers before they are asked for; return a function that records repeats, if any."""
        releases, clients = self.config.releases, [self.clients[row] for row in self._alive]
        if releases is None:
            return None
        repeats: list[Callable[[Sequence[str]], None]] = []
        if (steps := self.config.noisy_steps) is not None:  # a worker that restarts repeats them at any exchange
            if self._at == 0:
                self._record_steps(releases, steps, clients)
            repeats.append(partial(self._record_steps, releases, steps, again=True))
        if answer.__name__ in releases.covers:
            releases.tell(self.key, self._at, clients)
            repeats.append(partial(releases.tell, self.key, self._at))

        def record_again(repeated: Sequence[str]) -> None:
            for record in repeats:
                record(repeated)

        return record_again if repeats else None

    def _record_steps(
        self,
        releases: Releases,
        steps: Callable[[str, str], Mapping[Release, int]],
        clients: Sequence[str],
        *,
        again: bool = False,
    ) -> None:
        by_client = {client: noisy for client in clients if (noisy := steps(client, self.key.purpose))}
        if by_client:
            releases.tell_steps(self.key, 0, by_client, again=again)

    def record(self, name: str, values: Tensor) -> None:
        """Keep one row per client for the evaluation."""
        self.records[name] = values

    def close(self) -> None:
        """End the conversation at the clients."""
        self._transport.close(self.key)

    def _carry(self, call: Call, meanwhile: Callable[[], None] | None) -> Sequence[Message | Lost]:
        if meanwhile is None:
            return self._exchange(call)
        if self._transport.traffic.down is None:
            # In process there is no free core: run one after the other.
            meanwhile()
            return self._exchange(call)
        carried = self._helper.submit(self._exchange, call)
        try:
            meanwhile()
        finally:
            answers = carried.result()
        return answers

    def _exchange(self, call: Call) -> Sequence[Message | Lost]:
        try:
            return self._transport.exchange(call)
        except Exception as error:
            self.failure = error
            raise

    def lose(self, row: int, reason: str) -> None:
        """Lose a client because of its answer to the last exchange."""
        self._lose(row, reason, self._at - 1)

    def lose_all(self, reason: str) -> None:
        """Lose all clients still present."""
        for row in list(self._alive):
            self._lose(row, reason)

    def skip(self, reasons: Mapping[str, str]) -> int:
        """Lose clients before anything is sent to them; return how many."""
        rows = [row for row in self._alive if self.clients[row] in reasons]
        for row in rows:
            self._lose(row, reasons[self.clients[row]])
        return len(rows)

    def refuse(self, row: int, reason: str) -> None:
        """Lose a client for a value that no honest client sends; the refusal is counted and logged."""
        self._transport.refusals.count(OUT_OF_RANGE)
        key, client = self.key, self.clients[row]
        _log.warning(
            "refused the reply of client %s (round %d, attempt %d, exchange %d): %s",
            client, key.round, key.attempt, self._at, reason,
            extra={"client": client, "round": key.round, "attempt": key.attempt, "exchange": self._at},
        )  # fmt: skip
        self._lose(row, f"{OUT_OF_RANGE}: {reason}")

    def _lose(self, row: int, reason: str, exchange: int | None = None) -> None:
        if self._may_fail:
            self._resting.setdefault(row, printable(reason, REASON_CHARACTERS))
            return
        self._alive.remove(row)
        exchange_lost = self._at if exchange is None else exchange
        self._record.lost.append(Loss(row, self.clients[row], exchange_lost, printable(reason, REASON_CHARACTERS)))
