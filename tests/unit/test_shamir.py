"""Secret sharing against known results."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedloom.sums.shamir import PRIME, SHARE_BYTES, combine, correct, random_secret, split

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
    assert found is not None
    assert (found[0], sorted(found[1])) == (secret, sorted(wrong))


def test_too_many_wrong_shares_do_not_give_the_secret() -> None:
    secret = random_secret()
    shares = dict(enumerate(split(secret, 4, 8), start=1))
    for x in (1, 2, 3):
        shares[x] = random_secret()
    found = correct(shares, 4)
    assert found is None or found[0] != secret


@pytest.mark.parametrize(("threshold", "holders"), [(0, 3), (4, 3)])
def test_invalid_thresholds(threshold: int, holders: int) -> None:
    with pytest.raises(ValueError, match=str(threshold)):
        split(element(1), threshold, holders)
