"""Normalization of inputs in an open federation, measured before round 1 from sums that each client reports once.

The conversation involves no method: the aggregator asks the connected training clients, and computes the normalization
for all rounds from their answers, in exact arithmetic. Under secure aggregation it learns only the exact sums over all
clients, which give a bit-identical normalization.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import torch
from torch import Tensor

from fedloom.algorithms.base import ClientAlgorithm, Conversation
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.sums import sums_of
from fedloom.data.federated import ClientData, Split
from fedloom.data.input_spec import Normalization
from fedloom.data.moments import Moments, pooled_normalization
from fedloom.data.own import ClientCard
from fedloom.data.requirements import Own
from fedloom.errors import DataError, QuorumError, argument
from fedloom.federation.client_side import ClientConfig, ClientSide
from fedloom.federation.cohort import TooFewReplies
from fedloom.federation.held_answers import HeldAnswers
from fedloom.federation.loop_config import RoundConfig
from fedloom.federation.moment_digits import (
    SQUARE_DIGITS,
    SQUARE_SCALE,
    SUM_DIGITS,
    SUM_SCALE,
    from_digits,
    to_digits,
)
from fedloom.federation.revealed_sums import RevealedSums
from fedloom.federation.round_attempt import RoundAttempt
from fedloom.federation.sum_messages import VOCABULARY as STEPS_OF_SUMS
from fedloom.federation.summation import Summation
from fedloom.federation.transport import Call, ConversationKey, Lost, Transport
from fedloom.messages import LOSS_LIMIT, Message, Quantity, broadcast, rows
from fedloom.privacy.settings import SMALLEST_SUM, SecureAggregation
from fedloom.runs.journal import Attempt
from fedloom.security.signing import Signing

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


class MomentDigits(Message):
    """Sums and sums of squares as in :class:`InputMoments`, as digits; the aggregator learns only their sums."""

    values: Tensor = rows(Quantity.OTHER, "numbers", SUM_DIGITS)  # [c, numbers, 36] float64
    squares: Tensor = rows(Quantity.OTHER, "numbers", SQUARE_DIGITS)  # [c, numbers, 54] float64


VOCABULARY: Mapping[str, type[Message]] = {cls.__name__: cls for cls in (MeasureInputs, InputMoments)}


def measured_normalization(
    transport: Transport, own: Own, examples: Mapping[str, int], deadline_s: float
) -> Normalization:
    """Ask clients for their moments, and return the normalization over those with plausible answers.

    ``examples`` are the numbers of training examples that the clients announced.

    Raise QuorumError if no client answers plausibly.
    """
    clients, numbers = tuple(examples), own.spec.numbers
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
        raise _not_measured(len(clients), f"no client sent its sums: {reasons[0]}")
    return pooled_normalization(own.spec.measured, plausible)


def securely_measured_normalization(
    transport: Transport,
    own: Own,
    examples: Mapping[str, int],
    secure: SecureAggregation,
    *,
    deadline_s: float,
    stop: threading.Event,
    attempt: int,
) -> Normalization:
    """Return the normalization over the clients whose moments are in a secure sum.

    Parameters
    ----------
    examples
        Numbers of training examples that the clients announced.
    attempt
        Number of this sum; each needs a new one.

    Raises
    ------
    QuorumError
        If too few clients remain, or no examples can have these sums.
    InterruptedRun
        If ``stop`` is set while clients are missing.
    """
    numbers = own.spec.numbers
    config = RoundConfig(
        seed=0,
        clients_per_round=len(examples),
        deadline_s=deadline_s,
        min_replies=SMALLEST_SUM,
        shapes={MomentDigits: {"values": (numbers, SUM_DIGITS), "squares": (numbers, SQUARE_DIGITS)}},
        stop=stop,
        judge=lambda client, answer: None,
        summation=summed_moments(secure),
    )
    clients = tuple(examples)
    with ThreadPoolExecutor(1) as helper:
        session = RoundAttempt(Attempt(0, attempt), MEASURE, clients, examples, transport, config, helper)
        cohort = session.everyone()
        try:
            sums = cohort.send(MeasureInputs(torch.tensor([float(numbers)], dtype=torch.float64)), MomentDigits)
        except TooFewReplies as error:
            raise _not_measured(len(clients), f"the secure sum failed: {error}") from error
        finally:
            session.close()
    summed = [client for client, there in zip(clients, sums.present.tolist(), strict=True) if there]
    for client in sorted(set(clients) - set(summed)):
        log.warning("client %s is left out of the normalization: it left before its sums arrived", client)
    first = from_digits(sums.sum(sums.values).numpy(), SUM_SCALE)
    second = from_digits(sums.sum(sums.squares).numpy(), SQUARE_SCALE)
    total = sum(examples[client] for client in summed)
    if first is None or second is None or not _are_possible(own, first, second, total, len(summed)):
        raise _not_measured(len(clients), "no examples have these sums, so a client has sent false ones")
    moments = Moments(total * sum(each.values for each in own.spec.measured), tuple(first), tuple(second))
    return pooled_normalization(own.spec.measured, [moments])


def summed_moments(secure: SecureAggregation) -> Summation:
    """Return the settings of secure sums of moments; a client's moments are the same in every run."""
    return Summation(sums_of(MomentDigits), secure, None, torch.float64, secure.signature_bytes, is_lasting=True)


def _not_measured(clients: int, why: str) -> QuorumError:
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
    return Moments(int(count), first, second) if _are_possible(own, first, second, examples) else None


def _are_possible(
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


class _MeasuredClients(ClientAlgorithm):
    """Clients that answer with the moments on their cards; under secure aggregation in digits."""

    def trains(self, opening: type[Message]) -> bool:
        """Return False: the measurement precedes training."""
        return False

    def __init__(self, cards: Mapping[str, ClientCard], secure: bool) -> None:
        self._cards, self._secure = cards, secure

    def open(self, clients: ClientGroup, opening: Message) -> Conversation:
        """Answer :class:`MeasureInputs`."""
        (client,) = clients.clients
        moments = self._cards[client.id].moments
        if len(moments.sum) != int(opening.tensors()["numbers"][0]):
            raise DataError(f"client {client.id} has no targets to measure")
        if self._secure:
            sums = to_digits(moments.sum, SUM_SCALE, SUM_DIGITS)
            squares = to_digits(moments.squares, SQUARE_SCALE, SQUARE_DIGITS)
            yield MomentDigits(torch.from_numpy(sums)[None], torch.from_numpy(squares)[None])
        else:
            yield InputMoments(
                torch.tensor([[float(moments.count)]], dtype=torch.float64),
                torch.tensor([moments.sum], dtype=torch.float64),
                torch.tensor([moments.squares], dtype=torch.float64),
            )
        raise DataError(f"client {client.id} has already been measured")


def measuring_side(
    cards: Mapping[str, ClientCard],
    secure: SecureAggregation | None,
    signing: Signing,
    revealed: RevealedSums | None = None,
    *,
    only_sums: bool = False,
) -> ClientSide:
    """Return the clients' side of the measurement.

    Parameters
    ----------
    cards
        Cards of the clients, which have their moments.
    secure
        Secure aggregation, with which only sums of the clients' moments are known; None to send the moments.
    signing, revealed, only_sums
        As for :class:`HeldAnswers`.
    """
    held = None
    if secure is not None:
        held = HeldAnswers(summed_moments(secure), signing, revealed=revealed, only_sums=only_sums)

    def load(client: str) -> ClientData:
        if client not in cards:
            raise DataError(f"client {client} is not served here")
        train, none = (Split(torch.empty(size, 0), None) for size in (cards[client].train, 0))
        return ClientData(client, train, none, none, 0)

    return ClientSide(
        _MeasuredClients(cards, secure is not None),
        {**VOCABULARY, **STEPS_OF_SUMS},
        load,
        lambda predictors, clients: MeasureInputs(torch.zeros(1)),
        ClientConfig(0, held=held, purpose=MEASURE),
    )
