"""Rounds: attempts of the server algorithm at a round, with the cohorts that it draws."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from fedloom.core.words import pluralize
from fedloom.errors import DataError, ExperimentError
from fedloom.federation.cohort import RemoteCohort, RoundConfig
from fedloom.federation.private_sums import Draw, everyone
from fedloom.federation.randomness import generator
from fedloom.federation.transport import EVALUATE, TRAIN, ConversationKey, Transport
from fedloom.runs.journal import Attempt, ConversationRecord


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
        recorded: Attempt | None = None,
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
        self._planned = recorded
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
            draw_result = private.drawn(self._roster, draw, purpose, self.number, self.attempt.attempt)
            return self.hold(self._in_order(draw_result), draw)
        random = generator(self.rules.seed, purpose, round=self.number, attempt=self.attempt.attempt)
        if is_uniform:
            return self.hold(self._in_order(self._uniform(size, always, random)))
        chances = torch.ones(len(self._roster), dtype=torch.float64) if weights is None else weights.double()
        rows = torch.multinomial(chances, size, replacement=replace, generator=random)
        return self.hold([self._roster[i] for i in sorted(rows.tolist())])

    def _in_order(self, members: Collection[str]) -> list[str]:
        return [client for client in self._roster if client in members]

    def _uniform(self, size: int, always: Sequence[str], random: torch.Generator) -> set[str]:
        """Draw clients uniformly without replacement, group after group; ``always`` are drawn first."""
        members = set(always)
        if always:
            groups: list[Sequence[str]] = [[client for client in self._roster if client not in members]]
        else:
            groups = [self._roster] if self._groups is None else self._groups(self._roster)
        for group in groups:
            order = torch.randperm(len(group), generator=random)[: max(0, size - len(members))]
            members.update(group[i] for i in order.tolist())
        return members

    def everyone(self) -> RemoteCohort:
        """Return the whole roster as one cohort."""
        return self.hold(self._roster)

    def generator(self, purpose: str) -> torch.Generator:
        """Return the server's random generator for this round and purpose."""
        return generator(self.rules.seed, f"server/{purpose}", round=self.number, attempt=self.attempt.attempt)

    def hold(self, clients: Sequence[str], draw: Draw | None = None) -> RemoteCohort:
        """Begin a conversation with these clients, or with those that a replayed journal names."""
        recorded = None
        if self._planned is not None:
            recorded = self._planned_conversation(clients)
            clients = recorded.clients
        key = ConversationKey(self.number, self.attempt.attempt, len(self._conversations), self._purpose)
        sizes = torch.tensor([self._sizes[client] for client in clients], dtype=torch.int64)
        shared: dict[str, Any] = {
            "transport": self.transport, "config": self.rules, "attempt": self.attempt, "helper": self.helper,
            "record": recorded,
        }  # fmt: skip
        if (summation := self.rules.summation) is None:
            conversation = RemoteCohort(key, clients, sizes, **shared)
        else:
            rows_drawn = everyone(len(clients)) if draw is None else draw
            conversation = summation.cohort(key, clients, sizes, draw=rows_drawn, reveal=self.reveal, **shared)
        self._conversations.append(conversation)
        return conversation

    def _planned_conversation(self, clients: Sequence[str]) -> ConversationRecord:
        """Return the journal's record of the next conversation.

        Raise DataError if it does not match this run.
        """
        assert self._planned is not None
        recorded, number = self._planned.conversations, len(self._conversations)
        if number >= len(recorded):
            raise DataError(
                f"the replayed journal has {len(recorded)} conversations in round {self.number}, and this experiment "
                "has more",
                hint="replay a run of the same experiment",
            )
        strangers = [client for client in recorded[number].clients if client not in self._sizes]
        if self._purpose == EVALUATE and recorded[number].clients != list(clients):
            raise DataError(
                f"the replayed journal measures {len(recorded[number].clients)} clients at once after round "
                f"{self.number}, and this experiment {len(clients)}",
                hint="replay a run of the same experiment",
            )
        if strangers:
            raise DataError(
                f"the replayed journal has client {strangers[0]} in round {self.number}, and this partition lacks it",
                hint="replay a run of the same experiment",
            )
        return recorded[number]

    @property
    def failure(self) -> Exception | None:
        """Error that the transport raised in one of its conversations, if any."""
        return next((c.failure for c in self._conversations if c.failure is not None), None)

    def close(self) -> None:
        """End all conversations of this attempt."""
        for conversation in self._conversations:
            conversation.close()
