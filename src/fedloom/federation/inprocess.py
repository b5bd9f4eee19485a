"""In-process transport: clients answer in the aggregator's own process, one after another."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedloom.federation.client_side import ClientSide
from fedloom.federation.silence import Silence
from fedloom.federation.transport import Call, ConversationKey, Lost, Refusals, Traffic
from fedloom.federation.validation import fault
from fedloom.messages import Message


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
        """Ask each row in turn; an invalid answer is refused, as on the wire.

        Raises
        ------
        Exception
            The bug, in the method or the model, that a client ran into.
        """
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
