"""Normalization of inputs in an open federation, measured before round 1 from sums that each client reports once.

The conversation involves no method: the aggregator asks the connected training clients, and computes the normalization
for all rounds from their answers, in exact arithmetic. Under secure aggregation it learns only sums
(:mod:`fedloom.sums.measuring`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from fractions import Fraction

import torch
from torch import Tensor

from fedloom.algorithms.base import ClientAlgorithm, Conversation
from fedloom.algorithms.client_group import ClientGroup
from fedloom.data.federated import ClientData, Split
from fedloom.data.moments import Moments, pooled_normalization
from fedloom.data.own import ClientCard, Own
from fedloom.data.spec import Normalization
from fedloom.errors import DataError, QuorumError, argument
from fedloom.federation.client_side import ClientConfig, ClientSide
from fedloom.federation.transport import AnswerHolder, Call, ConversationKey, Guard, Lost, Transport
from fedloom.messages import LOSS_LIMIT, Message, Quantity, broadcast, rows

log = logging.getLogger("fedloom.federation.measuring")

MEASURE = "measure"
"""Purpose of the conversation."""

KEY = ConversationKey(0, 0, 0, MEASURE)


class MeasureInputs(Message):
    """Request for :class:`InputMoments`."""

    numbers: Tensor = broadcast(Quantity.COUNT)  # [1] float64, channels, features and numbers of targets


class InputMoments(Message):
    """Count, sums and sums of squares over the training examples, of each channel, feature and number of targets.

    The count is the number of values of one channel or feature; for several tensors, the sum of their counts.
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
    clients, numbers = tuple(examples), own.spec.numbers
    count = torch.tensor([float(numbers)], dtype=torch.float64)
    call = Call(
        key=KEY,
        exchange=0,
        rows=tuple(range(len(clients))),
        clients=clients,
        message=MeasureInputs(count),
        shapes={InputMoments: {"count": (1,), "sum": (numbers,), "squares": (numbers,)}},
        deadline_s=deadline_s,
    )
    try:
        answers = transport.exchange(call)
    finally:
        transport.close(KEY)
    plausible = []
    for client, answer in zip(clients, answers, strict=True):
        moments = _moments(answer, own, examples[client]) if isinstance(answer, InputMoments) else None
        if moments is not None:
            plausible.append(moments)
        else:
            why = answer.reason if isinstance(answer, Lost) else "the sums are impossible for any examples"
            log.warning("client %s is left out of the normalization: %s", client, why)
    if not plausible:
        reasons = [answer.reason for answer in answers if isinstance(answer, Lost)] or ["their sums are impossible"]
        raise not_measured(len(clients), f"no client sent its sums: {reasons[0]}")
    return pooled_normalization(own.spec.measured, plausible)


def not_measured(clients: int, why: str) -> QuorumError:
    """Return the error of a measurement over these clients that failed."""
    return QuorumError(
        f"data.own.normalization is measured, but the sums over {clients} clients could not be computed: {why}",
        hint=f"continue with {argument('resume')}, or give mean and std",
        key="data.own.normalization",
    )


def _moments(answer: InputMoments, own: Own, examples: int) -> Moments | None:
    """Return a client's moments; None if they are impossible for this number of examples."""
    count = float(answer.count[0, 0])
    first, second = (tuple(map(Fraction, sums[0].tolist())) for sums in (answer.sum, answer.squares))
    if count != examples * sum(each.values for each in own.spec.measured):
        return None
    return Moments(int(count), first, second) if are_possible(own, first, second, examples) else None


def are_possible(
    own: Own, first: Sequence[Fraction], second: Sequence[Fraction], examples: int, clients: int = 1
) -> bool:
    """Return whether this number of examples and clients can have these sums and sums of squares."""
    measured = [each for each in own.spec.measured for _ in range(each.numbers)]
    limit = clients * Fraction(LOSS_LIMIT)
    for total, squares, each in zip(first, second, measured, strict=True):
        values = examples * each.values
        possible = max(abs(total), squares) <= limit
        # Cauchy-Schwarz, with tolerance for rounded sums
        possible = possible and total**2 <= values * squares * Fraction(1 + 1e-9)
        if each.scale != 1:  # pixels, each from 0 to 255
            possible = possible and 0 <= squares <= 255 * total <= 255**2 * values
        if not possible:
            return False
    return True


class MeasuredClients(ClientAlgorithm):
    """Clients that answer with the moments on their cards."""

    def __init__(self, cards: Mapping[str, ClientCard]) -> None:
        self._cards = cards

    def trains(self, opening: type[Message]) -> bool:
        """Return False: the measurement precedes training."""
        return False

    def open(self, clients: ClientGroup, opening: Message) -> Conversation:
        """Answer :class:`MeasureInputs`."""
        (client,) = clients.clients
        moments = self._cards[client.id].moments
        if len(moments.sum) != int(opening.tensors()["numbers"][0]):
            raise DataError(f"client {client.id} has no targets to measure")
        yield self.answer(moments)
        raise DataError(f"client {client.id} has already been measured")

    def answer(self, moments: Moments) -> Message:
        """Return a client's answer."""
        return InputMoments(
            torch.tensor([[float(moments.count)]], dtype=torch.float64),
            torch.tensor([moments.sum], dtype=torch.float64),
            torch.tensor([moments.squares], dtype=torch.float64),
        )


def measuring_side(
    cards: Mapping[str, ClientCard],
    clients: ClientAlgorithm,
    held: AnswerHolder | None = None,
    vocabulary: Mapping[str, type[Message]] = VOCABULARY,
    guard: Guard | None = None,
) -> ClientSide:
    """Return the clients' side of the measurement.

    Parameters
    ----------
    cards
        Cards of the clients, which have their moments.
    clients
        Client algorithm: :class:`MeasuredClients`, or one that answers in another form.
    held, vocabulary, guard
        As for :class:`ClientSide` and its settings.
    """

    def load(client: str) -> ClientData:
        if client not in cards:
            raise DataError(f"client {client} is not served here")
        train, none = (Split(torch.empty(size, 0), None) for size in (cards[client].train, 0))
        return ClientData(client, train, none, none, 0)

    return ClientSide(
        clients, vocabulary, load, lambda predictors, clients: MeasureInputs(torch.zeros(1)),
        ClientConfig(0, held=held, purpose=MEASURE, guard=guard),
    )  # fmt: skip
