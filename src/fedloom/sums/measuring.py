"""Normalization of inputs measured in a secure sum: the aggregator learns only the exact sums over all clients.

The normalization is bit-identical to that of :mod:`fedloom.federation.measuring`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from fedloom.algorithms.sums import sums_of
from fedloom.data.input_spec import Normalization
from fedloom.data.moments import Moments, pooled_normalization
from fedloom.data.own import ClientCard
from fedloom.data.requirements import Own
from fedloom.federation.client_side import ClientSide
from fedloom.federation.cohort import RoundConfig, TooFewReplies
from fedloom.federation.measuring import (
    MEASURE,
    VOCABULARY,
    MeasuredClients,
    MeasureInputs,
    are_possible,
    log,
    measuring_side,
    not_measured,
)
from fedloom.federation.round_attempt import RoundAttempt
from fedloom.federation.transport import Transport
from fedloom.messages import Message, Quantity, rows
from fedloom.privacy.settings import SMALLEST_SUM, SecureAggregation
from fedloom.runs.journal import Attempt
from fedloom.security.signing import Signing
from fedloom.sums import messages
from fedloom.sums.held_answers import HeldAnswers
from fedloom.sums.moment_digits import (
    SQUARE_DIGITS,
    SQUARE_SCALE,
    SUM_DIGITS,
    SUM_SCALE,
    from_digits,
    to_digits,
)
from fedloom.sums.revealed_sums import RevealedSums
from fedloom.sums.summation import Summation


class MomentDigits(Message):
    """Sums and sums of squares as in :class:`InputMoments`, as digits; the aggregator learns only their sums."""

    values: Tensor = rows(Quantity.OTHER, "numbers", SUM_DIGITS)  # [c, numbers, 36] float64
    squares: Tensor = rows(Quantity.OTHER, "numbers", SQUARE_DIGITS)  # [c, numbers, 54] float64


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
            raise not_measured(len(clients), f"the secure sum failed: {error}") from error
        finally:
            session.close()
    summed = [client for client, there in zip(clients, sums.present.tolist(), strict=True) if there]
    for client in sorted(set(clients) - set(summed)):
        log.warning("client %s is left out of the normalization: it left before its sums arrived", client)
    first = from_digits(sums.sum(sums.values).numpy(), SUM_SCALE)
    second = from_digits(sums.sum(sums.squares).numpy(), SQUARE_SCALE)
    total = sum(examples[client] for client in summed)
    if first is None or second is None or not are_possible(own, first, second, total, len(summed)):
        raise not_measured(len(clients), "no examples have these sums, so a client has sent false ones")
    moments = Moments(total * sum(each.values for each in own.spec.measured), tuple(first), tuple(second))
    return pooled_normalization(own.spec.measured, [moments])


def summed_moments(secure: SecureAggregation) -> Summation:
    """Return the settings of secure sums of moments; a client's moments are the same in every run."""
    return Summation(sums_of(MomentDigits), secure, None, torch.float64, secure.signature_bytes, is_lasting=True)


class _SummedClients(MeasuredClients):
    """Clients that answer with the digits of their moments."""

    def answer(self, moments: Moments) -> Message:
        """Return a client's answer."""
        sums = to_digits(moments.sum, SUM_SCALE, SUM_DIGITS)
        squares = to_digits(moments.squares, SQUARE_SCALE, SQUARE_DIGITS)
        return MomentDigits(torch.from_numpy(sums)[None], torch.from_numpy(squares)[None])


def securely_measuring_side(
    cards: Mapping[str, ClientCard],
    secure: SecureAggregation,
    signing: Signing,
    revealed: RevealedSums | None = None,
    *,
    only_sums: bool = False,
) -> ClientSide:
    """Return the clients' side of the measurement in a secure sum.

    ``cards`` have the clients' moments; the other parameters are those of :class:`HeldAnswers`.
    """
    held = HeldAnswers(summed_moments(secure), signing, revealed=revealed, only_sums=only_sums)
    return measuring_side(cards, _SummedClients(cards), held, {**VOCABULARY, **messages.VOCABULARY})
