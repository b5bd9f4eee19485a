from __future__ import annotations

import gzip
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.data.datasets.digits import parse_idx
from fedloom.errors import DataError, ExitCode

GOOD = struct.pack(">BBBB3I", 0, 0, 8, 3, 2, 3, 4) + bytes(range(24))


def test_shape_and_bytes_are_read_in_order() -> None:
    images = parse_idx(GOOD, "images", 0x08, 3)
    assert images.dtype == np.uint8
    assert np.array_equal(images, np.arange(24, dtype=np.uint8).reshape(2, 3, 4))


def test_an_empty_set_is_an_array_without_rows() -> None:
    assert parse_idx(struct.pack(">BBBB1I", 0, 0, 8, 1, 0), "labels", 0x08, 1).shape == (0,)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["bytes (none)", "00 00 08 03"]),
        (GOOD[:3], ["bytes 00 00 08;"]),
        (GOOD[:9], ["00 00 08 03"]),
        (GOOD[:-1], ["truncated", "39 bytes", "needs 40", "(2, 3, 4)"]),
        (GOOD + b"\0", ["too long", "41 bytes", "needs 40"]),
        (b"\0\0\x0d\x03" + GOOD[4:], ["00 00 0d 03", "begins with 00 00 08 03"]),
        (b"\0\0\x08\x01" + GOOD[4:], ["00 00 08 01", "3 dimension(s)"]),
        (b"PNG!" + GOOD[4:], ["50 4e 47 21"]),
        # mtime: two processes that collect this test a second apart must make the same bytes.
        (gzip.compress(GOOD, mtime=0), ["1f 8b", "uncompressed IDX"]),
    ],
    ids=["empty", "short", "header", "cut", "long", "type", "dimensions", "png", "gzip"],
)
def test_errors_are_named(content: bytes, words: list[str]) -> None:
    with pytest.raises(DataError) as error:
        parse_idx(content, "train-images", 0x08, 3)
    assert error.value.exit_code == ExitCode.DATA
    assert "train-images" in str(error.value)
    for word in words:
        assert word in str(error.value)


@given(st.binary(max_size=64))
def test_any_bytes_are_read_or_rejected(content: bytes) -> None:
    try:
        array = parse_idx(content, "file", 0x08, 1)
    except DataError:
        return
    assert 8 + len(array) == len(content)


INTEGERS = struct.pack(">BBBB2I3i", 0, 0, 0x0C, 2, 1, 3, 7, -1, 2**31 - 1)


def test_big_endian_integers_are_read() -> None:
    rows = parse_idx(INTEGERS, "labels", 0x0C, 2)
    assert rows.dtype == np.dtype(">i4")
    assert rows.tolist() == [[7, -1, 2**31 - 1]]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (INTEGERS[:-1], ["truncated", "23 bytes", "needs 24", "(1, 3)"]),
        (INTEGERS[:9], ["00 00 0c 02"]),
        (b"\0\0\x08\x02" + INTEGERS[4:], ["00 00 08 02", "begins with 00 00 0c 02", "i4"]),
    ],
    ids=["cut", "header", "type"],
)
def test_non_integer_values_are_named(content: bytes, words: list[str]) -> None:
    with pytest.raises(DataError) as error:
        parse_idx(content, "labels", 0x0C, 2)
    for word in words:
        assert word in str(error.value)
