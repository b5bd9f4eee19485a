"""Cohorts and rounds: the interface of the server algorithm to clients, independent of the transport."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedloom.core import tracing
from fedloom.core.words import REASON_CHARACTERS, pluralize, printable
from fedloom.errors import DataError, ExperimentError, InterruptedRun, argument
from fedloom.federation.loop_config import RoundConfig
from fedloom.federation.private_sums import Draw, PrivateSums, everyone
from fedloom.federation.question import Question
from fedloom.federation.randomness import generator
from fedloom.federation.releases import Releases
from fedloom.federation.states import Versions
from fedloom.federation.sum_messages import STEPS
from fedloom.federation.transport import EVALUATE, TRAIN, Call, ConversationKey, Lost, Transport
from fedloom.messages import Message, Metrics, Replies, Shapes, SummedMetrics, stack
from fedloom.privacy.accounting import Release
from fedloom.runs.journal import Attempt, ConversationRecord, Loss, lost_rows

_log = logging.getLogger(__name__)

OUT_OF_RANGE = "value out of range"
"""Reason under which answers with implausible values are counted as refused."""


class TooFewReplies(Exception):
    """Fewer clients than ``federation.min_replies`` answered an exchange, which ends the attempt."""


class RemoteCohort:
    """One cohort and the conversation held with it (``algorithms.base.Cohort``)."""

    def __init__(
        self,
        session: RoundAttempt,
        key: ConversationKey,
        clients: Sequence[str],
        sizes: Tensor,
        planned: ConversationRecord | None,
        draw: Draw,
    ) -> None:
        self.key = key
        self.draw = draw
        self.clients = tuple(clients)
        self.records: dict[str, Tensor] = {}
        self.sizes = sizes
        self._transport, self._config, self._helper = session.transport, session.rules, session.helper
        self._attempt = session.attempt
        self._planned = planned
        self._at = 0
        self.question = Question()
        self.reveal = session.reveal
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
        if answer is Metrics and self._config.sums_metrics:
            answer = SummedMetrics
        if answer not in self._config.shapes:
            known = ", ".join(sorted(cls.__name__ for cls in self._config.shapes))
            raise TypeError(f"clients do not answer with {answer.__name__}, only with {known}")
        summation = self._config.summation
        if summation is not None and answer in summation.fields:
            return summation.gather(self, message, answer, meanwhile, self._private_sum())
        answers = self.exchange(message, answer, self._config.shapes[answer], meanwhile)
        stacked = None
        if answers:
            stacked = stack(answer, [answers.get(row) for row in range(len(self.clients))])
        return Replies(stacked, self.present, self.sizes)

    def _private_sum(self) -> PrivateSums | None:
        """Record that a private sum of training is asked for, and return its settings; None if the sum is exact."""
        private = self._config.private if self.key.purpose == TRAIN else None
        if private is not None and self._config.releases is not None:
            self._config.releases.tell_sum(self.key, private.release(self.draw), self.clients)
        return private

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
        if self._config.is_secure and not isinstance(message, STEPS):
            self.question = self.question.then(Question.from_message(message))
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

    def check_replies(self, answered: int, message: Message) -> None:
        """Raise TooFewReplies if too few clients have answered a message."""
        if answered < self._config.min_replies:
            name, least = type(message).__name__, self._config.min_replies
            raise self.too_few(answered, name, "federation.min_replies", least)

    def shapes(self, answer: type[Message]) -> Mapping[str, tuple[int, ...]]:
        """Return the trailing shape of each field of an answer of the method."""
        return self._config.shapes[answer]

    def flags(self, rows: Collection[int]) -> Tensor:
        """Return ``[c]`` bool, True in these rows."""
        found = torch.zeros(len(self.clients), dtype=torch.bool)
        found[sorted(rows)] = True
        return found

    def ended_by(self, error: Exception) -> TooFewReplies:
        """Return the error that ends the attempt for this reason, with that of the last loss."""
        return TooFewReplies(f"{self._why_lost()}{error}")

    def too_few(self, answered: int, message: str, key: str, least: int) -> TooFewReplies:
        """Return the error of an exchange that too few clients have answered, with the reason of the last loss."""
        return TooFewReplies(
            f"{self._why_lost()}{answered} of {pluralize(len(self.clients), 'client')} answered {message}, "
            f"{key} is {least}"
        )

    def _lose_planned(self) -> None:
        """Lose the clients that a replayed conversation lost at this exchange."""
        planned = {} if self._planned is None else {loss.row: loss for loss in lost_rows(self._planned, self._at)}
        for row in [row for row in self._alive if row in planned]:
            self._lose(row, planned[row].reason)

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
                deadline_s=self._config.deadline_s,
                states=self._states() if self._at == 0 else (),
                trace=tracing.here(),
                told_again=self._record_private(next(iter(shapes))),
            )
            received = self._carry(call, meanwhile)
        if self._config.stop.is_set() and any(isinstance(reply, Lost) for reply in received):
            raise InterruptedRun(f"stopped in the middle of round {self.key.round}; continue with {argument('resume')}")
        answers = {}
        for row, reply in zip(call.rows, received, strict=True):
            if (usable := self._usable(row, reply)) is not None:
                answers[row] = usable
        sent = [reply.client_bytes() for reply in answers.values()]
        if self._may_fail and sent:  # silent rows are not in the journal, so they count as in a replay
            sent = [sent[0]] * len(self._alive)
        self._attempt.payload_up += sum(sent)
        return answers

    def _usable(self, row: int, reply: Message | Lost) -> Message | None:
        if isinstance(reply, Lost):
            if reply.is_bug:
                self._bugs[row] = printable(reply.reason, REASON_CHARACTERS)
            self._lose(row, f"bug: {reply.reason}" if reply.is_bug else reply.reason)
            return None
        if (implausible := self._config.judge(self.clients[row], reply)) is None:
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
        states = self._config.states
        return () if states is None else states([self.clients[row] for row in self._alive])

    def _record_private(self, answer: type[Message]) -> Callable[[Sequence[str]], None] | None:
        """Record private answers before they are asked for; return a function that records repeats, if any."""
        releases, clients = self._config.releases, [self.clients[row] for row in self._alive]
        if releases is None:
            return None
        repeats: list[Callable[[Sequence[str]], None]] = []
        if (steps := self._config.noisy_steps) is not None:  # a worker that restarts repeats them at any exchange
            if self._at == 0:
                self._record_steps(releases, steps, clients)
            repeats.append(partial(self._record_steps, releases, steps, again=True))
        if answer.__name__ in releases.covers:
            releases.tell(self.key, self._at, clients)
            repeats.append(partial(releases.tell, self.key, self._at))

        def record_again(asked: Sequence[str]) -> None:
            for record in repeats:
                record(asked)

        return record_again if repeats else None

    def _record_steps(
        self,
        releases: Releases,
        steps: Callable[[str, str], Mapping[Release, int]],
        clients: Sequence[str],
        *,
        again: bool = False,
    ) -> None:
        by_client = {client: found for client in clients if (found := steps(client, self.key.purpose))}
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
        at = self._at if exchange is None else exchange
        self._record.lost.append(Loss(row, self.clients[row], at, printable(reason, REASON_CHARACTERS)))


class RoundAttempt:
    """One attempt at a round, or an evaluation (``algorithms.base.Round``)."""

    def __init__(
        self,
        attempt: Attempt,
        purpose: str,
        roster: Sequence[str],
        sizes: Mapping[str, int],
        transport: Transport,
        rules: RoundConfig,
        helper: ThreadPoolExecutor,
        planned: Attempt | None = None,
        groups: Callable[[Sequence[str]], list[Sequence[str]]] | None = None,
    ) -> None:
        self._groups = groups
        self.number = attempt.round
        self.attempt = attempt
        self._purpose = purpose
        self._roster = tuple(roster)
        self._sizes = sizes
        self.transport = transport
        self.rules = rules
        self.helper = helper
        self._planned = planned
        self._conversations: list[RemoteCohort] = []
        self.has_revealed = False
        """True once members may have revealed a sum of this attempt."""

    def reveal(self) -> None:
        """Note that members may reveal a sum from now on."""
        self.has_revealed = True

    def sample(
        self,
        size: int | None = None,
        purpose: str = "cohort",
        weights: Tensor | None = None,
        replace: bool = False,
        always: Sequence[str] = (),
    ) -> RemoteCohort:
        """Draw a cohort from the roster.

        In an open federation a uniform draw prefers clients that answer, and is smaller rather than filled up with
        others (:meth:`fedloom.federation.silence.Silence.groups`).

        ``purpose`` keys the generator, so that two draws of one round differ. ``weights``, ``[roster]``, are
        probabilities up to a factor, uniform by default; with ``replace`` a client may be drawn more than once. Clients
        named in ``always`` count for the size, and the rest is drawn uniformly from the others.

        With differential privacy of clients a cohort of training is drawn as ``federation.privacy.sampling`` says; the
        clients' answers, and their silence in earlier rounds, make no difference.

        Raise ValueError if ``always`` is combined with ``weights`` or ``replace``; ExperimentError if clients are
        private and the method draws other cohorts than uniform ones.
        """
        size = self.rules.clients_per_round if size is None else size
        if size > len(self._roster) and not replace:
            raise ExperimentError(
                f"A cohort of {pluralize(size, 'client')} is larger than the roster, which has {len(self._roster)}.",
                found=size,
            )
        is_uniform = weights is None and not replace
        if always and not is_uniform:
            raise ValueError("a cohort with fixed members is drawn uniformly and without replacement")
        private = self.rules.private if self._purpose == TRAIN else None
        if private is not None:
            draw = private.choice(len(self._roster), size, is_uniform=is_uniform and not always)
            drawn = private.drawn(self._roster, draw, purpose, self.number, self.attempt.attempt)
            return self.hold(self._in_order(drawn), draw)
        random = generator(self.rules.seed, purpose, round=self.number, attempt=self.attempt.attempt)
        if is_uniform:
            return self.hold(self._in_order(self._uniform(size, always, random)))
        chances = torch.ones(len(self._roster), dtype=torch.float64) if weights is None else weights.double()
        rows = torch.multinomial(chances, size, replacement=replace, generator=random)
        return self.hold([self._roster[i] for i in sorted(rows.tolist())])

    def _in_order(self, drawn: Collection[str]) -> list[str]:
        return [client for client in self._roster if client in drawn]

    def _uniform(self, size: int, always: Sequence[str], random: torch.Generator) -> set[str]:
        """Draw clients uniformly without replacement, group after group; ``always`` are drawn first."""
        drawn = set(always)
        if always:
            groups: list[Sequence[str]] = [[client for client in self._roster if client not in drawn]]
        else:
            groups = [self._roster] if self._groups is None else self._groups(self._roster)
        for group in groups:
            order = torch.randperm(len(group), generator=random)[: max(0, size - len(drawn))]
            drawn.update(group[i] for i in order.tolist())
        return drawn

    def everyone(self) -> RemoteCohort:
        """Return the whole roster as one cohort."""
        return self.hold(self._roster)

    def generator(self, purpose: str) -> torch.Generator:
        """Return the server's random generator for this round and purpose."""
        return generator(self.rules.seed, f"server/{purpose}", round=self.number, attempt=self.attempt.attempt)

    def hold(self, clients: Sequence[str], draw: Draw | None = None) -> RemoteCohort:
        """Begin a conversation with these clients, or with those that a replayed journal names."""
        planned = None
        if self._planned is not None:
            planned = self._planned_conversation(clients)
            clients = planned.clients
        key = ConversationKey(self.number, self.attempt.attempt, len(self._conversations), self._purpose)
        sizes = torch.tensor([self._sizes[client] for client in clients], dtype=torch.int64)
        draw = everyone(len(clients)) if draw is None else draw
        conversation = RemoteCohort(self, key, clients, sizes, planned, draw)
        self._conversations.append(conversation)
        return conversation

    def _planned_conversation(self, clients: Sequence[str]) -> ConversationRecord:
        """Return the journal's record of the next conversation.

        Raise DataError if it does not match this run.
        """
        assert self._planned is not None
        planned, begun = self._planned.conversations, len(self._conversations)
        if begun >= len(planned):
            raise DataError(
                f"the replayed journal has {len(planned)} conversations in round {self.number}, and this experiment "
                "has more",
                hint="replay a run of the same experiment",
            )
        strangers = [client for client in planned[begun].clients if client not in self._sizes]
        if self._purpose == EVALUATE and planned[begun].clients != list(clients):
            raise DataError(
                f"the replayed journal measures {len(planned[begun].clients)} clients at once after round "
                f"{self.number}, and this experiment {len(clients)}",
                hint="replay a run of the same experiment",
            )
        if strangers:
            raise DataError(
                f"the replayed journal has client {strangers[0]} in round {self.number}, and this partition lacks it",
                hint="replay a run of the same experiment",
            )
        return planned[begun]

    @property
    def failure(self) -> Exception | None:
        """Error that the transport raised in one of its conversations, if any."""
        return next((c.failure for c in self._conversations if c.failure is not None), None)

    def close(self) -> None:
        """End all conversations of this attempt."""
        for conversation in self._conversations:
            conversation.close()
