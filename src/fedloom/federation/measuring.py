"""Normalization of inputs in an open federation, measured before round 1 from sums that each client reports once.

The conversation has one exchange and involves no method: the aggregator asks the connected training clients, and
computes the normalization for all rounds from their answers, in exact arithmetic.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fedloom.data.input_spec import Normalization
from fedloom.data.moments import Moments, pooled_normalization
from fedloom.data.own import ClientCard
from fedloom.data.requirements import Own
from fedloom.errors import QuorumError, argument
from fedloom.federation.states import Versions
from fedloom.federation.transport import Call, ConversationKey, Lost, Transport
from fedloom.messages import LOSS_LIMIT, Message, Quantity, broadcast, rows

log = logging.getLogger("fedloom.federation.measuring")

KEY = ConversationKey(0, 0, 0, "measure")


class MeasureInputs(Message):
    """Request for :class:`InputMoments`."""

    numbers: Tensor = broadcast(Quantity.COUNT)  # [1] float64, channels, features and numbers of targets


class InputMoments(Message):
    """Count, sums and sums of squares over the training examples, of each channel, feature and number of targets.

    The count is that of the values of one channel or feature; of several tensors, the sum of theirs.
    """

    count: Tensor = rows(Quantity.OTHER, 1)  # [c, 1] float64
    sum: Tensor = rows(Quantity.OTHER, "numbers")  # [c, numbers] float64
    squares: Tensor = rows(Quantity.OTHER, "numbers")  # [c, numbers] float64


VOCABULARY: Mapping[str, type[Message]] = {cls.__name__: cls for cls in (MeasureInputs, InputMoments)}


def measured_normalization(
    transport: Transport, own: Own, examples: Mapping[str, int], deadline_s: float
) -> Normalization:
    """Ask clients for their moments, and return the normalization over those with plausible answers.

    ``examples`` are the numbers of training examples that the clients announced.

    Raise QuorumError if no client answers plausibly.
    """
    clients, numbers = tuple(examples), own.numbers
    asked = torch.tensor([float(numbers)], dtype=torch.float64)
    call = Call(
        key=KEY,
        exchange=0,
        rows=tuple(range(len(clients))),
        clients=clients,
        message=MeasureInputs(asked),
        shapes={InputMoments: {"count": (1,), "sum": (numbers,), "squares": (numbers,)}},
        deadline_s=deadline_s,
    )
    try:
        answers = transport.exchange(call)
    finally:
        transport.close(KEY)
    sensible = []
    for client, answer in zip(clients, answers, strict=True):
        moments = _moments(answer, own, examples[client]) if isinstance(answer, InputMoments) else None
        if moments is not None:
            sensible.append(moments)
        else:
            why = answer.reason if isinstance(answer, Lost) else "the sums are impossible for any examples"
            log.warning("client %s is left out of the normalization: %s", client, why)
    if not sensible:
        reasons = [answer.reason for answer in answers if isinstance(answer, Lost)] or ["their sums are impossible"]
        raise QuorumError(
            f"data.own.normalization is measured, but none of {len(clients)} clients sent its sums: {reasons[0]}",
            hint=f"continue with {argument('resume')}, or give mean and std",
            key="data.own.normalization",
        )
    return pooled_normalization(own.measured, sensible)


def _moments(answer: InputMoments, own: Own, examples: int) -> Moments | None:
    """Return a client's moments; None if they are impossible for this number of examples."""
    count, first, second = float(answer.count[0, 0]), answer.sum[0].tolist(), answer.squares[0].tolist()
    if count != examples * sum(each.values for each in own.measured):
        return None
    measured = [each for each in own.measured for _ in range(each.numbers)]
    for total, squares, each in zip(first, second, measured, strict=True):
        values = examples * each.values
        possible = max(abs(total), squares) <= LOSS_LIMIT
        # Cauchy-Schwarz, with tolerance for rounded sums
        possible = possible and total**2 <= values * squares * (1 + 1e-9)
        if each.scale != 1:  # pixels, each from 0 to 255
            possible = possible and 0 <= squares <= 255 * total <= 255**2 * values
        if not possible:
            return None
    return Moments(int(count), tuple(first), tuple(second))


class MeasuringSession:
    """Worker side of the measurement, based on its clients' cards (``transport.worker.Session``)."""

    def __init__(self, cards: Mapping[str, ClientCard]) -> None:
        self.vocabulary: Mapping[str, type[Message]] = VOCABULARY
        self._cards = cards

    def answer(
        self,
        key: ConversationKey,
        exchange: int,
        rows: Sequence[int],
        clients: Sequence[str],
        message: Message,
        states: Sequence[Versions] = (),
    ) -> Iterator[tuple[int, Message | Lost]]:
        """Yield each row's moments."""
        for row, client in zip(rows, clients, strict=True):
            if client not in self._cards:
                yield row, Lost(f"client {client} is not served here")
                continue
            moments = self._cards[client].moments
            if len(moments.sum) != int(message.tensors()["numbers"][0]):
                yield row, Lost(f"client {client} has no targets to measure")
                continue
            yield (
                row,
                InputMoments(
                    torch.tensor([[float(moments.count)]], dtype=torch.float64),
                    torch.tensor([moments.sum], dtype=torch.float64),
                    torch.tensor([moments.squares], dtype=torch.float64),
                ),
            )

    def close(self, key: ConversationKey) -> None:
        """Do nothing, since there are no conversations to end."""
