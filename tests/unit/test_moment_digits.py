"""Sums of exact digits."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from facts import refusing
from hypothesis import given
from hypothesis import strategies as st

from fedloom.errors import DataError
from fedloom.sums.measuring import (
    SQUARE_DIGITS,
    SQUARE_SCALE,
    SUM_DIGITS,
    SUM_SCALE,
    from_digits,
    to_digits,
)
from fedloom.sums.vector import STATISTIC_BOUND

FLOATS = st.floats(width=32, allow_nan=False, min_value=-(2.0**50), max_value=2.0**50)


@given(st.lists(st.lists(FLOATS, min_size=1, max_size=5), min_size=1, max_size=6))
def test_sums_of_digits_are_exact(clients: list[list[float]]) -> None:
    """Each client's moments are rounded as on its card; the sum of these is exact."""
    for scale, digits, power in ((SUM_SCALE, SUM_DIGITS, 1), (SQUARE_SCALE, SQUARE_DIGITS, 2)):
        sums = [math.fsum(value**power for value in values) for values in clients]
        encoded = np.array([to_digits([one, -one], scale, digits) for one in sums])
        assert np.abs(encoded).max() <= STATISTIC_BOUND
        exact = sum(map(Fraction, sums), Fraction(0))
        assert from_digits(encoded.sum(0), scale) == [exact, -exact]


@pytest.mark.parametrize("number", [0, 1, -1, 255 * 10**9, -(2.0**-149), 1e40, -1e40])
def test_extreme_numbers(number: float) -> None:
    assert from_digits(to_digits([number], SUM_SCALE, SUM_DIGITS), SUM_SCALE) == [Fraction(number)]


def test_the_smallest_square() -> None:
    tiny = float(np.float32(1e-45)) ** 2
    assert from_digits(to_digits([tiny], SQUARE_SCALE, SQUARE_DIGITS), SQUARE_SCALE) == [Fraction(tiny)]


@pytest.mark.parametrize("number", [1e43, -1e43, 2.0**-150])
def test_impossible_float32_sums_are_rejected_without_showing_them(number: float) -> None:
    with refusing(DataError) as error:
        to_digits([number], SUM_SCALE, SUM_DIGITS)
    assert str(number) not in str(error.value)


def test_non_integer_digits_are_rejected() -> None:
    assert from_digits(to_digits([], SUM_SCALE, SUM_DIGITS), SUM_SCALE) == []
    digits = to_digits([3.0], SUM_SCALE, SUM_DIGITS)
    digits[0, 5] += 0.5
    assert from_digits(digits, SUM_SCALE) is None


def test_a_sum_of_digits_hides_the_number_of_negative_values() -> None:
    """Without carries, the upper digits of 1 + 1 - 1 and of 3 - 1 - 1 are -1 and -2 times 255."""
    signs = {1: (1.0, 1.0, -1.0), 2: (3.0, -1.0, -1.0)}
    seen = {
        negative: np.array(
            [np.sum([to_digits([x], SUM_SCALE, SUM_DIGITS) for x in numbers], axis=0)[0] for _ in range(400)]
        )
        for negative, numbers in signs.items()
    }
    upper = slice(SUM_SCALE // 8 + 1, SUM_DIGITS)
    for digit in range(upper.start, upper.stop):
        one, two = (seen[negative][:, digit] for negative in (1, 2))
        assert len(set(one)) > 300
        assert abs(one.mean() - two.mean()) < 5 * math.sqrt((one.var() + two.var()) / 400)


def test_the_last_digit_has_the_sign_and_the_carry() -> None:
    found = {float(to_digits([-1.0], SUM_SCALE, SUM_DIGITS)[0, -1]) for _ in range(50)}
    assert len(found) > 45
