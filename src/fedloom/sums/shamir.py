"""Shamir's secret sharing over a prime field, with correction of wrong shares.

A secret is the value at 0 of a random polynomial of degree t - 1; the share of holder x = 1, 2, ... is the value at x.
Any t shares give the secret, and t - 1 shares are independent of it (Shamir, How to share a secret, Communications of
the ACM 22(11), 1979). Shares are a Reed-Solomon code word: of m shares, up to (m - t) / 2 wrong ones are found and
corrected (Gao, A new algorithm for decoding Reed-Solomon codes, 2003).

Arithmetic on Python's integers does not take constant time: timing a member's computations may reveal its secrets.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import accumulate

PRIME = 2**256 - 189
"""Order of the field: the largest prime below 2²⁵⁶."""

SHARE_BYTES = 32
"""Length of a secret and of each share in bytes."""

Polynomial = list[int]
"""Coefficients modulo :data:`PRIME`, the constant first, without zeros at the end."""


def random_secret() -> bytes:
    """Return a uniformly random element of the field from the operating system's generator."""
    while True:
        secret = os.urandom(SHARE_BYTES)
        if int.from_bytes(secret, "big") < PRIME:
            return secret


def split(secret: bytes, threshold: int, holders: int) -> list[bytes]:
    """Return the shares of holders 1, 2, ..., any ``threshold`` of which give the secret.

    Parameters
    ----------
    secret
        Element of the field, 32 bytes big-endian, less than :data:`PRIME`.
    """
    if not 1 <= threshold <= holders < PRIME:
        raise ValueError(f"the threshold must be 1 to {holders}, the number of holders (got {threshold})")
    coefficients = [_element(random_secret()) for _ in range(threshold - 1)]  # highest power first
    constant = _element(secret)
    shares = []
    for x in range(1, holders + 1):
        value = 0
        for coefficient in coefficients:
            value = value * x + coefficient  # x is small: reducing once, at the end, is faster
        shares.append((value * x + constant) % PRIME)
    return [share.to_bytes(SHARE_BYTES, "big") for share in shares]


def combine(shares: Mapping[int, bytes]) -> bytes:
    """Return the secret that these shares, by holder, belong to: Lagrange's interpolation at 0.

    There must be at least as many shares as the threshold, and all must be correct: a wrong one gives another secret.
    """
    holders = list(shares)
    product = 1
    for x in holders:
        product = product * x % PRIME
    denominators = []
    for x in holders:
        denominator = x
        for other in holders:
            if other != x:
                denominator *= other - x
        denominators.append(denominator % PRIME)
    weights = _inverses(denominators)  # Lagrange's basis at 0: the product of other / (other - x)
    total = sum(_element(share) * weight for share, weight in zip(shares.values(), weights, strict=True))
    return (total * product % PRIME).to_bytes(SHARE_BYTES, "big")


def correct(shares: Mapping[int, bytes], threshold: int) -> tuple[bytes, list[int]] | None:
    """Return the secret despite wrong shares, and the holders of the wrong ones.

    Of m shares up to (m - threshold) / 2 may be wrong. Return None if more are wrong and this can be detected: many
    wrong shares may look like correct shares of another secret, so the caller must check a digest of the secret.
    """
    holders = list(shares)
    modulus: Polynomial = [1]
    for x in holders:
        modulus = _times(modulus, [-x % PRIME, 1])
    previous, now = modulus, _interpolated(holders, [_element(share) for share in shares.values()], modulus)
    factor_before: Polynomial = []
    factor: Polynomial = [1]
    while 2 * (len(now) - 1) >= len(holders) + threshold:
        quotient, rest = _divided(previous, now)
        previous, now = now, rest
        factor_before, factor = factor, _minus(factor_before, _times(quotient, factor))
    polynomial, rest = _divided(now, factor)
    if rest or len(polynomial) > threshold:
        return None
    wrong = [x for x in holders if _value(polynomial, x) != _element(shares[x])]
    return (polynomial[0] if polynomial else 0).to_bytes(SHARE_BYTES, "big"), wrong


def _element(share: bytes) -> int:
    return int.from_bytes(share, "big") % PRIME


def _inverses(values: Sequence[int]) -> list[int]:
    """Return the inverses of values that are not 0, by one inversion (Montgomery's trick)."""
    products = list(accumulate(values, lambda a, b: a * b % PRIME))
    inverse = pow(products[-1], -1, PRIME)
    inverses = [0] * len(values)
    for i in range(len(values) - 1, 0, -1):
        inverses[i] = inverse * products[i - 1] % PRIME
        inverse = inverse * values[i] % PRIME
    inverses[0] = inverse
    return inverses


def _interpolated(holders: Sequence[int], values: Sequence[int], modulus: Polynomial) -> Polynomial:
    """Return the polynomial with these values; ``modulus`` is the product of all (X - x)."""
    total = [0] * len(holders)
    for x, value in zip(holders, values, strict=True):
        basis, _ = _divided(modulus, [-x % PRIME, 1])
        scale = value * pow(_value(basis, x), -1, PRIME) % PRIME
        total = [(a + scale * b) % PRIME for a, b in zip(total, basis, strict=True)]
    return _trimmed(total)


def _value(polynomial: Polynomial, x: int) -> int:
    value = 0
    for coefficient in reversed(polynomial):
        value = (value * x + coefficient) % PRIME
    return value


def _times(a: Polynomial, b: Polynomial) -> Polynomial:
    product = [0] * max(len(a) + len(b) - 1, 0)
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            product[i + j] = (product[i + j] + x * y) % PRIME
    return _trimmed(product)


def _minus(a: Polynomial, b: Polynomial) -> Polynomial:
    length = max(len(a), len(b))
    padded = ([*p, *[0] * (length - len(p))] for p in (a, b))
    return _trimmed([(x - y) % PRIME for x, y in zip(*padded, strict=True)])


def _divided(a: Polynomial, b: Polynomial) -> tuple[Polynomial, Polynomial]:
    """Return quotient and remainder."""
    rest, quotient = list(a), [0] * max(len(a) - len(b) + 1, 0)
    lead = pow(b[-1], -1, PRIME)
    for shift in reversed(range(len(quotient))):
        factor = quotient[shift] = rest[shift + len(b) - 1] * lead % PRIME
        if factor:
            for i, y in enumerate(b):
                rest[shift + i] = (rest[shift + i] - factor * y) % PRIME
    return _trimmed(quotient), _trimmed(rest[: len(b) - 1])


def _trimmed(polynomial: Polynomial) -> Polynomial:
    while polynomial and not polynomial[-1]:
        polynomial.pop()
    return polynomial
