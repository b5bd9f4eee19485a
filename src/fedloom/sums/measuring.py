"""Normalization of inputs measured in a secure sum: the aggregator learns only the exact sums over all clients.

The normalization is bit-identical to that of :mod:`fedloom.federation.measuring`, because numbers are summed as digits:
a number is a whole multiple of a small power of two, written in base 256, and each digit is summed separately, so a sum
is exact in any order. Sums of digits would reveal more than the sum, for example how many numbers are negative.
Therefore each client moves a random multiple of 256 from every digit to the next, which does not change its number.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.algorithms.sums import sums_of
from fedloom.data.moments import Moments, pooled_normalization
from fedloom.data.own import ClientCard, Own
from fedloom.data.spec import Normalization
from fedloom.errors import DataError
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
from fedloom.federation.transport import Guard, Transport
from fedloom.messages import Message, Quantity, rows
from fedloom.privacy.settings import SMALLEST_SUM, SecureAggregation
from fedloom.runs.journal import Attempt
from fedloom.security.signing import Signing
from fedloom.sums import messages
from fedloom.sums.held_answers import HeldAnswers
from fedloom.sums.revealed_sums import RevealedSums
from fedloom.sums.summation import Summation

SUM_SCALE, SQUARE_SCALE = 149, 298
"""Exponents of the units, 2^-149 and 2^-298: float32 values, and their squares, are whole multiples of them."""

SUM_DIGITS, SQUARE_DIGITS = 36, 54
"""Numbers of digits: they hold magnitudes up to 2^138 and 2^133, above 10^40."""

_CARRY_BITS = 21


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
    guard: Guard | None = None,
) -> ClientSide:
    """Return the clients' side of the measurement in a secure sum.

    ``cards`` have the clients' moments; the other parameters are those of :class:`HeldAnswers`.
    """
    held = HeldAnswers(summed_moments(secure), signing, revealed=revealed, guard=guard)
    return measuring_side(cards, _SummedClients(cards), held, {**VOCABULARY, **messages.VOCABULARY}, guard)


def to_digits(numbers: Iterable[int | float | Fraction], scale: int, digits: int) -> NDArray[np.float64]:
    """Return numbers as digits with random carries, least significant first, whole numbers below 2^30, ``[n, digits]``.

    Parameters
    ----------
    scale
        Exponent of the unit, 2^-scale.

    Raises
    ------
    DataError
        If a number is not a whole multiple of the unit, or too large. The message does not show it.
    """
    rows = []
    for number in numbers:
        units = Fraction(number) * 2**scale
        try:
            rows.append(int(units).to_bytes(digits, "little", signed=True))
        except OverflowError:
            raise DataError("a sum of the inputs is too large for a secure sum") from None
        if units.denominator != 1:
            raise DataError("a sum of the inputs is finer than any sum of float32 numbers")
    parts = np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), digits).astype(np.int64)
    parts[:, -1] -= (parts[:, -1] >> 7) << 8  # two's complement: the last digit has the sign
    random = np.frombuffer(os.urandom(4 * len(rows) * (digits - 1)), "<u4").reshape(len(rows), digits - 1)
    carries = (random >> (32 - _CARRY_BITS)).astype(np.int64)
    parts[:, :-1] += carries << 8
    parts[:, 1:] -= carries
    return parts.astype(np.float64)


def from_digits(totals: NDArray[np.float64], scale: int) -> list[Fraction] | None:
    """Return the numbers with these digits or sums of digits, ``[n, digits]``; None if a digit is not whole."""
    if not np.array_equal(totals, np.rint(totals)):
        return None
    return [
        Fraction(sum(int(digit) << (8 * place) for place, digit in enumerate(row)), 2**scale) for row in totals.tolist()
    ]
