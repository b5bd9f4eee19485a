"""Table of the open conversations, and the check that a worker's answer is awaited."""

from __future__ import annotations

from collections.abc import Iterator

from fedloom.federation.transport import ConversationKey
from fedloom.transport.exchanges import Exchange, Link, OpenConversation
from fedloom.transport.frames import Refusal, WireError
from fedloom.transport.stream import key_from_wire
from fedloom.transport.wire import federation_pb2 as wire


class Conversations:
    """Open conversations by key. Belongs to the event loop's thread."""

    def __init__(self) -> None:
        self._open: dict[ConversationKey, OpenConversation] = {}
        self._newest: tuple[int, int, int] = (-1, -1, -1)

    def __iter__(self) -> Iterator[OpenConversation]:
        return iter(self._open.values())

    def running(self) -> Iterator[tuple[OpenConversation, Exchange]]:
        """Yield the conversations with a running exchange, and that exchange."""
        for conversation in self:
            if conversation.current is not None:
                yield conversation, conversation.current

    def get(self, key: ConversationKey) -> OpenConversation | None:
        """Return the conversation with this key if it is open."""
        return self._open.get(key)

    def start(self, exchange: Exchange) -> OpenConversation:
        """Start an exchange and return its conversation, which the first exchange opens.

        Raise ValueError if the conversation is not open, or this is not its next exchange.
        """
        key, number = exchange.call.key, exchange.call.exchange
        if number == 0 and key not in self._open:
            self._open[key] = OpenConversation(key)
            self._newest = max(self._newest, (key.round, key.attempt, key.conversation))
        if key not in self._open:
            raise ValueError(f"{key}: exchange {number} of a conversation that is not open")
        self._open[key].post(exchange)
        return self._open[key]

    def pop(self, key: ConversationKey) -> OpenConversation | None:
        """Remove a conversation and return it; None if it is not open."""
        return self._open.pop(key, None)

    def find(self, wire_key: wire.ConversationKey, number: int) -> Exchange:
        """Return the running exchange with this key and number.

        Raise WireError if no such exchange is running.
        """
        key = key_from_wire(wire_key)
        conversation = self._open.get(key)
        if conversation is None:
            old = (key.round, key.attempt, key.conversation) <= self._newest
            raise WireError(Refusal.LATE if old else Refusal.CONVERSATION, f"{key_text(key)} is not open")
        exchange = conversation.current
        if exchange is None or exchange.call.exchange != number:
            old = number < len(conversation.calls)
            raise WireError(Refusal.LATE if old else Refusal.CONVERSATION, f"{key_text(key)}, exchange {number}")
        return exchange


def check_awaited(link: Link, exchange: Exchange, row: int) -> None:
    """Raise WireError if a row is not awaited from this stream."""
    arriving = (row, link) in exchange.arriving
    if row in exchange.outstanding and exchange.awaits(row, link) and not arriving:
        return
    where = f"exchange {exchange.call.exchange} of {key_text(exchange.call.key)}"
    if row not in exchange.client:
        raise WireError(Refusal.CLIENT, f"row {row} is not in {where}")
    raise WireError(Refusal.LATE, f"row {row}, {where}{' is arriving already' if arriving else ''}")


def key_text(key: ConversationKey) -> str:
    """Return a conversation's key for messages; its purpose may come from a peer and is shortened."""
    return f"round {key.round}, attempt {key.attempt}, conversation {key.conversation} ({key.purpose[:20]})"
