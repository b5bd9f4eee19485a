"""One exchange as the clients' side receives it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedloom.core import tracing
from fedloom.federation.states import Versions
from fedloom.federation.transport import ConversationKey
from fedloom.messages import Message


@dataclass(frozen=True)
class ClientRequest:
    """One exchange, with the position of each row in the message, its client and the versions of its state."""

    key: ConversationKey
    exchange: int
    message: Message
    position: Mapping[int, int]
    clients: Sequence[str]
    states: Sequence[Versions]

    def named(self, rows: Sequence[int]) -> list[str]:
        """Return the clients of rows, without those that the exchange does not ask."""
        return [self.clients[self.position[row]] for row in rows if row in self.position]

    def versions(self, rows: Sequence[int]) -> list[Versions]:
        """Return the versions of the states of rows."""
        return [self.states[self.position[row]] for row in rows] if self.states else []

    def traced(self, rows: Sequence[int]) -> AbstractContextManager[object]:
        """Return a tracing span for the work of one group."""
        key, name = self.key, f"client {type(self.message).__name__}"
        about = {"round": key.round, "attempt": key.attempt, "conversation": key.conversation}
        return tracing.span(name, client=",".join(self.named(rows)), **about, exchange=self.exchange)

    def described(self, rows: Sequence[int]) -> str:
        """Describe the work of a group in a traceback: clients, round, exchange and message."""
        fields = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in self.message.tensors().items())
        return (
            f"client {', '.join(self.named(rows))}, {self.key.purpose} in round {self.key.round}, exchange "
            f"{self.exchange}: {type(self.message).__name__}({fields})"
        )

    @cached_property
    def _single(self) -> list[Message]:
        return self.message.split(len(self.clients))

    def select(self, rows: Sequence[int]) -> Message:
        """Return these rows, with zeros for a member that was lost (possible only in groups of several)."""
        if len(rows) == 1 and rows[0] in self.position:
            return self._single[self.position[rows[0]]]
        if all(row in self.position for row in rows):
            return self.message.select([self.position[row] for row in rows])

        def selected(tensor: Tensor) -> Tensor:
            nothing = torch.zeros_like(tensor[0])
            return torch.stack([tensor[self.position[row]] if row in self.position else nothing for row in rows])

        named = zip(self.message.fields(), self.message.tensors().values(), strict=True)
        return type(self.message)(**{f.name: selected(t) if f.per_client else t for f, t in named})
