"""Hook of the clients' side for answers that are held back until they can be summed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from fedloom.data.federated import ClientData
from fedloom.federation.transport import ConversationKey
from fedloom.messages import Message


class AnswerHolder(Protocol):
    """Holder of answers of which the aggregator may learn only a sum; rows are positions in a cohort."""

    def begin(self, key: ConversationKey, rows: Sequence[int], states: Sequence[Mapping[str, Tensor] | None]) -> None:
        """Begin the conversation of some rows, each from a state of its client."""

    def hear(self, key: ConversationKey, rows: Sequence[int], message: Message) -> None:
        """Note a message that these rows answer next."""

    def covers(self, answer: Message) -> bool:
        """Return whether the aggregator uses only the sum of answers of this class."""

    def hold(
        self, key: ConversationKey, row: int, client: ClientData, request: Message, answer: Message, *, varies: bool
    ) -> Message:
        """Return the message to send in place of a one-row answer, which ``varies`` with the round.

        Raise DataError if its values cannot be summed.
        """

    def is_step(self, message: Message) -> bool:
        """Return whether a message is a step of a sum."""

    def step(self, key: ConversationKey, row: int, client: str, message: Message) -> Message:
        """Return a client's answer to one step of the sum of its answer.

        Raise RefusedError if an honest aggregator would not send this message.
        """

    def close(self, key: ConversationKey) -> None:
        """Forget a conversation."""
