"""IDX format of MNIST and related data sets.

The header is two zero bytes, the element type, the number of dimensions, and each dimension as a big-endian 32-bit
integer; the elements follow.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import DataError

GZIP = b"\x1f\x8b"


def parse_bytes(content: bytes, name: str, dimensions: int) -> NDArray[np.uint8]:
    """Return the array in an IDX file of unsigned bytes, as a read-only view of ``content``.

    ``name`` names the file in errors; ``dimensions`` is 3 for images and 1 for labels.

    Raise DataError if the file is compressed, not IDX, of another type or number of dimensions, too short or too long.
    """
    return _parsed(content, name, dimensions, 0x08, np.dtype(np.uint8), "unsigned bytes")


def parse_int32(content: bytes, name: str, dimensions: int) -> NDArray[np.int64]:
    """Return the array in an IDX file of 32-bit integers; parameters and errors as for :func:`parse_bytes`."""
    return _parsed(content, name, dimensions, 0x0C, np.dtype(">i4"), "32-bit integers").astype(np.int64)


def _parsed(content: bytes, name: str, dimensions: int, code: int, dtype: np.dtype[Any], what: str) -> NDArray[Any]:
    if content[:2] == GZIP:
        raise DataError(f"{name} is gzip-compressed; expected the uncompressed IDX file")
    expected = bytes([0, 0, code, dimensions])
    if content[:4] != expected:
        raise DataError(
            f"{name} starts with the bytes {content[:4].hex(' ') or '(none: it is empty)'}; expected "
            f"{expected.hex(' ')}, an IDX file of {what} in {dimensions} dimension(s)"
        )
    header = 4 + 4 * dimensions
    if len(content) < header:
        raise DataError(f"{name} is truncated: {len(content)} bytes, expected a header of {header} bytes")
    shape = struct.unpack(f">{dimensions}I", content[4:header])
    size = header + dtype.itemsize * math.prod(shape)
    if len(content) != size:
        fault = "truncated" if len(content) < size else "too long"
        raise DataError(f"{name} is {fault}: {len(content)} bytes, expected {size} for its shape {shape}")
    return np.frombuffer(content, dtype=dtype, offset=header).reshape(shape)
