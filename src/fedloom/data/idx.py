"""The IDX format of MNIST and its kin: a magic number, the shape, then raw bytes."""

from __future__ import annotations

import math
import struct

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import DataError

UNSIGNED_BYTE = 0x08
GZIP = b"\x1f\x8b"


def parse(content: bytes, name: str, dimensions: int) -> NDArray[np.uint8]:
    """Return the array in an IDX file of unsigned bytes, as a read-only view of ``content``.

    The header is two zero bytes, the element type (0x08: unsigned byte), the number of dimensions, and each
    dimension as a big-endian 32-bit integer.

    Parameters
    ----------
    content
        The whole file, uncompressed.
    name
        What to call it in errors.
    dimensions
        How many dimensions it must have: 3 for images, 1 for labels.

    Raises
    ------
    DataError
        If the file is compressed, not IDX, of another type or number of dimensions, too short or too long.
    """
    if content[:2] == GZIP:
        raise DataError(f"{name} is gzip-compressed; expected the uncompressed IDX file")
    expected = bytes([0, 0, UNSIGNED_BYTE, dimensions])
    if content[:4] != expected:
        raise DataError(
            f"{name} starts with the bytes {content[:4].hex(' ') or '(none: it is empty)'}; expected "
            f"{expected.hex(' ')}, an IDX file of unsigned bytes in {dimensions} dimension(s)"
        )
    header = 4 + 4 * dimensions
    if len(content) < header:
        raise DataError(f"{name} is truncated: {len(content)} bytes, expected a header of {header} bytes")
    shape = struct.unpack(f">{dimensions}I", content[4:header])
    size = header + math.prod(shape)
    if len(content) != size:
        fault = "truncated" if len(content) < size else "too long"
        raise DataError(f"{name} is {fault}: {len(content)} bytes, expected {size} for its shape {shape}")
    return np.frombuffer(content, dtype=np.uint8, offset=header).reshape(shape)
