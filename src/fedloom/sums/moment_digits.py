"""Exact secure sums of floating-point numbers, as digits.

A number is a whole multiple of a small power of two. It is written in base 256, and each digit is summed separately, so
a sum is exact in any order. Sums of digits would reveal more than the sum, for example how many numbers are negative.
Therefore each client moves a random multiple of 256 from every digit to the next, which does not change its number.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import DataError

SUM_SCALE, SQUARE_SCALE = 149, 298
"""Exponents of the units, 2^-149 and 2^-298: float32 values, and their squares, are whole multiples of them."""

SUM_DIGITS, SQUARE_DIGITS = 36, 54
"""Numbers of digits: they hold magnitudes up to 2^138 and 2^133, above 10^40."""

_CARRY_BITS = 21


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
    found = np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), digits).astype(np.int64)
    found[:, -1] -= (found[:, -1] >> 7) << 8  # two's complement: the last digit has the sign
    random = np.frombuffer(os.urandom(4 * len(rows) * (digits - 1)), "<u4").reshape(len(rows), digits - 1)
    carries = (random >> (32 - _CARRY_BITS)).astype(np.int64)
    found[:, :-1] += carries << 8
    found[:, 1:] -= carries
    return found.astype(np.float64)


def from_digits(totals: NDArray[np.float64], scale: int) -> list[Fraction] | None:
    """Return the numbers with these digits or sums of digits, ``[n, digits]``; None if a digit is not whole."""
    if not np.array_equal(totals, np.rint(totals)):
        return None
    return [
        Fraction(sum(int(digit) << (8 * place) for place, digit in enumerate(row)), 2**scale) for row in totals.tolist()
    ]
