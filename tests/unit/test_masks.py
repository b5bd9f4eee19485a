"""Arithmetic of secure sums: fixed-point integers and their masks, exact digits, and secret sharing."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from facts import refusing
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedloom.errors import DataError, ExperimentError
from fedloom.sums.masks import CHUNK, add_masks, from_integers, integer_type, key_stream, scale, to_integers
from fedloom.sums.measuring import SQUARE_DIGITS, SQUARE_SCALE, SUM_DIGITS, SUM_SCALE, from_digits, to_digits
from fedloom.sums.shamir import PRIME, SHARE_BYTES, combine, correct, random_secret, split
from fedloom.sums.vector import STATISTIC_BOUND

BOUNDS = st.floats(1e-30, 1e30)


@given(BOUNDS, st.integers(1, 100_000), st.sampled_from([32, 64]))
def test_the_scale_is_the_largest_power_of_two_that_cannot_wrap(bound: float, clients: int, bits: int) -> None:
    steps = scale(bound, clients, bits)
    assert math.frexp(steps)[0] == 0.5
    largest = 2 ** (bits - 1) - 1
    assert clients * round(bound * steps) <= largest < clients * round(2 * bound * steps)


@given(st.data(), st.sampled_from([32, 64]), st.sampled_from([np.float32, np.float64]))
@settings(max_examples=60)
def test_a_sum_is_accurate_to_half_a_step_per_client(data: st.DataObject, bits: int, kind: type) -> None:
    clients = data.draw(st.integers(1, 50))
    bound = float(np.float32(data.draw(st.floats(1e-3, 1e3))))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    values = rng.uniform(-bound, bound, (clients, 20)).astype(kind).clip(-bound, bound)
    values[:, 0], values[:, 1] = bound, -bound  # sums that could wrap
    total = np.zeros(20, integer_type(bits))
    for row in values:
        encoded = to_integers(row, bound, clients, bits)
        assert encoded.dtype == total.dtype
        total += encoded
    exact = np.array([math.fsum(column) for column in values.T.tolist()])
    error = np.abs(from_integers(total, bound, clients, bits) - exact)
    assert (error <= clients * 0.5 / scale(bound, clients, bits) + 1e-15 * np.abs(exact)).all()


@pytest.mark.parametrize("value", [1.0000001, -1.1, np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("bits", [32, 64])
def test_values_beyond_the_bound_are_rejected(value: float, bits: int) -> None:
    with refusing(DataError, "1"):
        to_integers(np.array([0.0, value, 0.5]), 1.0, 10, bits)


@pytest.mark.parametrize(("bound", "clients"), [(0.0, 3), (-1.0, 3), (math.inf, 3), (math.nan, 3), (1.0, 0)])
def test_invalid_bounds(bound: float, clients: int) -> None:
    with pytest.raises(ExperimentError):
        scale(bound, clients, 32)


@pytest.mark.parametrize("bits", [32, 64])
def test_a_mask_is_the_key_stream_of_its_seed(bits: int) -> None:
    size = CHUNK // (bits // 8) + 777  # more than one chunk
    first, second = bytes(range(32)), bytes(range(1, 33))
    total = np.zeros(size, integer_type(bits))
    add_masks(total, [(first, +1)])
    blocks = b"".join(counter.to_bytes(16, "big") for counter in range(-(-total.nbytes // 16)))
    stream = Cipher(algorithms.AES(first), modes.ECB()).encryptor().update(blocks)
    assert total.tobytes() == stream[: total.nbytes] == key_stream(first, total.nbytes)
    add_masks(total, [(second, +1), (first, -1)])
    add_masks(total, [(second, -1)])
    assert not total.any()
    add_masks(np.zeros(0, "<u4"), [(bytes(32), 1)])
    assert from_integers(to_integers(np.zeros(0), 1.0, 3, 32), 1.0, 3, 32).shape == (0,)


FLOATS = st.floats(width=32, allow_nan=False, min_value=-(2.0**50), max_value=2.0**50)


@given(st.lists(st.lists(FLOATS, min_size=1, max_size=5), min_size=1, max_size=6))
def test_sums_of_digits_are_exact(clients: list[list[float]]) -> None:
    """Each client's moments are rounded as on its card; the sum of these is exact."""
    for steps, digits, power in ((SUM_SCALE, SUM_DIGITS, 1), (SQUARE_SCALE, SQUARE_DIGITS, 2)):
        sums = [math.fsum(value**power for value in values) for values in clients]
        encoded = np.array([to_digits([one, -one], steps, digits) for one in sums])
        assert np.abs(encoded).max() <= STATISTIC_BOUND
        exact = sum(map(Fraction, sums), Fraction(0))
        assert from_digits(encoded.sum(0), steps) == [exact, -exact]


@pytest.mark.parametrize("number", [0, 1, -1, 255 * 10**9, -(2.0**-149), 1e40, -1e40])
def test_extreme_numbers(number: float) -> None:
    assert from_digits(to_digits([number], SUM_SCALE, SUM_DIGITS), SUM_SCALE) == [Fraction(number)]
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


SECRETS = st.one_of(st.integers(0, PRIME - 1), st.sampled_from([0, 1, PRIME - 1]))


def element(value: int) -> bytes:
    return (value % PRIME).to_bytes(SHARE_BYTES, "big")


def polynomial_shares(coefficients: list[int], holders: int) -> dict[int, bytes]:
    """Return the shares of a known polynomial, the constant first."""
    return {x: element(sum(c * x**i for i, c in enumerate(coefficients))) for x in range(1, holders + 1)}


def test_the_field_is_a_prime_field() -> None:
    assert all(pow(base, PRIME - 1, PRIME) == 1 for base in (2, 3, 5, 7, 11, 13))
    assert PRIME < 2**256
    odd, twos = PRIME - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37):  # Miller and Rabin's test
        power = pow(base, odd, PRIME)
        assert power in (1, PRIME - 1) or any((power := power * power % PRIME) == PRIME - 1 for _ in range(twos - 1))


@given(SECRETS, st.integers(1, 6), st.integers(0, 3))
@settings(max_examples=50)
def test_any_t_shares_reconstruct_the_secret(secret: int, threshold: int, more: int) -> None:
    holders = threshold + more
    shares = dict(enumerate(split(element(secret), threshold, holders), start=1))
    for chosen in combinations(shares, threshold):
        assert combine({x: shares[x] for x in chosen}) == element(secret)
    assert combine(shares) == element(secret)


def test_a_known_polynomial() -> None:
    """The example of Wikipedia's article: 1234 + 166 x + 94 x²; and one whose values wrap."""
    shares = polynomial_shares([1234, 166, 94], 6)
    assert [int.from_bytes(shares[x], "big") for x in range(1, 7)] == [1494, 1942, 2578, 3402, 4414, 5614]
    assert combine({x: shares[x] for x in (2, 4, 5)}) == element(1234)
    wrapping = polynomial_shares([5, PRIME - 1, PRIME - 7, 2**255], 9)
    assert combine({x: wrapping[x] for x in (9, 1, 4, 6)}) == element(5)


def test_fewer_shares_reveal_nothing() -> None:
    """Any t - 1 shares are consistent with every secret, and uniform."""
    shares = split(element(42), 3, 5)
    for guess in (0, 42, PRIME - 1):
        # The polynomial of degree 2 through the guess at 0 and two shares exists: Lagrange at 3, 4, 5.
        points = {0: guess, 1: int.from_bytes(shares[0], "big"), 2: int.from_bytes(shares[1], "big")}
        others = {}
        for x in (3, 4, 5):
            value = 0
            for i, y in points.items():
                term = y
                for j in points:
                    if j != i:
                        term = term * (x - j) * pow(i - j, -1, PRIME) % PRIME
                value += term
            others[x] = element(value)
        assert combine(others) == element(guess)
    first = [split(element(42), 2, 3)[0][0] for _ in range(4000)]
    counts = [first.count(byte) for byte in range(256)]
    assert stats.chisquare(counts).pvalue > 1e-9


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_wrong_shares_are_corrected(data: st.DataObject) -> None:
    threshold = data.draw(st.integers(1, 6))
    holders = data.draw(st.integers(threshold, 14))
    secret = element(data.draw(SECRETS))
    every = dict(enumerate(split(secret, threshold, holders), start=1))
    shares = {x: every[x] for x in data.draw(st.permutations(sorted(every)))}
    wrong = data.draw(st.sets(st.sampled_from(sorted(every)), max_size=(holders - threshold) // 2))
    for x in wrong:
        shares[x] = element(int.from_bytes(shares[x], "big") + data.draw(st.integers(1, PRIME - 1)))
    found = correct(shares, threshold)
    assert (found[0], sorted(found[1])) == (secret, sorted(wrong))


def test_too_many_wrong_shares_do_not_give_the_secret() -> None:
    secret = random_secret()
    shares = dict(enumerate(split(secret, 4, 8), start=1))
    for x in (1, 2, 3):
        shares[x] = random_secret()
    found = correct(shares, 4)
    assert found is None or found[0] != secret
    for threshold in (0, 4):
        with pytest.raises(ValueError, match=str(threshold)):
            split(element(1), threshold, 3)
