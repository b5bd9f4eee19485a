"""Fixed-point integers of secure sums, and their masks."""

from __future__ import annotations

import math

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from facts import refusing
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.errors import DataError, ExperimentError
from fedloom.sums.masks import CHUNK, add_masks, from_integers, integer_type, key_stream, scale, to_integers

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


def test_the_order_of_a_sum_does_not_matter() -> None:
    values = np.random.default_rng(0).normal(size=(30, 100)).clip(-5, 5)
    encoded = np.stack([to_integers(row, 5.0, 30, 32) for row in values])
    sums = [encoded[order].sum(axis=0, dtype="<u4") for order in (range(30), [*range(30)][::-1])]
    assert np.array_equal(*sums)


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


def test_empty_vectors() -> None:
    total = np.zeros(0, "<u4")
    add_masks(total, [(bytes(32), 1)])
    assert from_integers(to_integers(np.zeros(0), 1.0, 3, 32), 1.0, 3, 32).shape == (0,)
