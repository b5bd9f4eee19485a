"""Fixed-point integers for secure sums, and the streams of masks that hide them.

Integers are taken modulo 2³² or 2⁶⁴, negative ones as two's complement. A sum of them is exact and does not depend on
order. Masks are AES-128-CTR key streams, with the security level of X25519's secrets (128 bits); each key is used for
one stream.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from fedloom.errors import DataError, ExperimentError

Bits: TypeAlias = Literal[32, 64]
"""Width of the integers of a sum."""

Integers: TypeAlias = NDArray[np.unsignedinteger[Any]]
"""Little-endian uint32 or uint64, values modulo 2³² or 2⁶⁴."""

SEED_BYTES = 16
"""Length of the seed of a mask, an AES-128 key."""

CHUNK = 1 << 20
"""Number of bytes of a mask that are made at a time; they stay in the cache."""

_ZEROS = memoryview(bytes(CHUNK))


def integer_type(bits: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Return the type of a sum's integers: little-endian uint32 or uint64."""
    return np.dtype({32: "<u4", 64: "<u8"}[bits])


def scale(bound: float, clients: int, bits: int) -> float:
    """Return the number of integer steps per unit: the largest power of two for which no sum can wrap.

    The sum of ``clients`` integers, each at most ``bound * scale`` rounded, is below 2^(bits - 1).

    Parameters
    ----------
    bound
        Largest absolute value of one client; positive and finite.

    Raises
    ------
    ExperimentError
        If the bound is not positive and finite.
    """
    if not (0 < bound < math.inf and clients >= 1):
        raise ExperimentError(
            f"A secure sum needs a positive, finite bound on each client's values (got {bound:g}, {clients} clients).",
            found=bound,
        )
    largest = 2 ** (bits - 1) - 1
    exponent = min(math.floor(math.log2(largest / clients) - math.log2(bound)) + 1, 1000)  # right, or too large
    while clients * round(math.ldexp(bound, exponent)) > largest:
        exponent -= 1
    return math.ldexp(1.0, exponent)


def to_integers(values: NDArray[np.floating[Any]], bound: float, clients: int, bits: int) -> Integers:
    """Return values as fixed-point integers, rounded to the nearest step.

    The error of each value is at most half a step, ``0.5 / scale(bound, clients, bits)``, and the error of a sum of n
    clients at most n times that.

    Parameters
    ----------
    values
        Floating-point values, shape [d].
    bound
        Largest absolute value allowed.
    clients
        Largest number of clients in the sum.

    Returns
    -------
    uint32 or uint64, shape [d].

    Raises
    ------
    DataError
        If a value is not finite, or beyond the bound. Nothing is clipped.
    """
    steps = scale(bound, clients, bits)
    largest = float(np.max(np.abs(values), initial=0.0))  # NaN if one is
    if not largest <= bound:
        raise DataError(
            f"A value for the secure sum is {largest:g} in size; at most {bound:g} fits. Clip the values, or raise the "
            "bound.",
            found=largest,
            allowed=[-bound, bound],
        )
    values_scaled = np.multiply(values, steps, dtype=np.float64)
    integers: Integers = (
        np.rint(values_scaled, out=values_scaled).astype("<i8").view("<u8")
    )  # two's complement, modulo 2⁶⁴
    return integers if bits == 64 else integers.astype(integer_type(bits))  # modulo 2^bits


def from_integers(total: Integers, bound: float, clients: int, bits: int) -> NDArray[np.float64]:
    """Return a sum of encoded values as floating-point numbers, shape [d].

    ``bound``, ``clients`` and ``bits`` are those of :func:`to_integers`; ``clients`` counts all clients that could be
    in the sum, not only those that are.
    """
    integers = np.asarray(total, integer_type(bits)).view("<i4" if bits == 32 else "<i8")
    return integers.astype(np.float64) / scale(bound, clients, bits)


def key_stream(seed: bytes, length: int) -> bytes:
    """Return the first bytes of the key stream of a seed of 16 or 32 bytes, which is used only once."""
    return Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor().update(bytes(length))


def add_masks(total: Integers, masks: Iterable[tuple[bytes, int]]) -> None:
    """Add masks to a vector in place.

    Parameters
    ----------
    masks
        For each mask its seed, 16 bytes, and its sign: +1 to add it, -1 to subtract it.
    """
    size = min(total.nbytes, CHUNK)
    buffer = memoryview(bytearray(size + 15))  # update_into asks for 15 bytes more than it writes
    mask = np.frombuffer(buffer[:size], total.dtype)
    parts = [total[start : start + mask.size] for start in range(0, total.size, max(mask.size, 1))]
    for seed, sign in masks:
        stream = Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor()
        operation = np.add if sign > 0 else np.subtract
        for part in parts:
            stream.update_into(_ZEROS[: part.nbytes], buffer)
            operation(part, mask[: part.size], out=part)
