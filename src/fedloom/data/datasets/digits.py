"""MNIST (LeCun, Cortes and Burges), data sets in its IDX format such as Fashion-MNIST, and the writers of QMNIST.

The header of an IDX file is two zero bytes, the element type, the number of dimensions, and each dimension as a
big-endian 32-bit integer; the elements follow.

QMNIST (Yadav and Bottou 2019) adds NIST's metadata to MNIST's images. Its train set is MNIST's. The first 10,000 of its
60,000 test rows are MNIST's test set; the rest, whose images are not in MNIST, are left out.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.data.datasets.base import Owners, Pool, RawDataset
from fedloom.errors import DataError

TYPES: Mapping[int, np.dtype[Any]] = {0x08: np.dtype(np.uint8), 0x0C: np.dtype(">i4")}
"""Element types by their code."""

COLUMNS = 8
CLASS, WRITER = 0, 2


def parse_idx(content: bytes, name: str, code: int, dimensions: int) -> NDArray[Any]:
    """Return the array in an IDX file, as a read-only view of ``content``.

    ``name`` names the file in errors; ``code`` is a key of :data:`TYPES`.

    Raise DataError if the file is not IDX, of another type or number of dimensions, too short or too long.
    """
    header = 4 + 4 * dimensions
    if content[:4] != bytes([0, 0, code, dimensions]) or len(content) < header:
        raise DataError(
            f"{name} begins with the bytes {content[:4].hex(' ') or '(none)'}; an uncompressed IDX file of "
            f"{TYPES[code]} in {dimensions} dimension(s) begins with {bytes([0, 0, code, dimensions]).hex(' ')}"
        )
    shape = struct.unpack(f">{dimensions}I", content[4:header])
    size = header + TYPES[code].itemsize * math.prod(shape)
    if len(content) != size:
        fault = "truncated" if len(content) < size else "too long"
        raise DataError(f"{name} is {fault}: it has {len(content)} bytes, and its shape {shape} needs {size}")
    return np.frombuffer(content, dtype=TYPES[code], offset=header).reshape(shape)


def read_mnist(contents: Mapping[str, bytes]) -> RawDataset:
    """Return the content of the four IDX files."""

    def read(name: str, dimensions: int) -> NDArray[Any]:
        return parse_idx(contents[name], name, 0x08, dimensions)

    train, test = (
        Pool(read(f"{part}-images-idx3-ubyte", 3)[:, None], read(f"{part}-labels-idx1-ubyte", 1).astype(np.int64))
        for part in ("train", "t10k")
    )
    return RawDataset(train, test)


def read_qmnist(contents: Mapping[str, bytes]) -> RawDataset:
    """Return MNIST's examples with their writers; the test writers differ from the train writers.

    Raise DataError if the labels are not MNIST's.
    """
    digits = read_mnist(contents)
    pools = {"train": digits.train, "test": digits.test}
    writers = []
    for part, pool in pools.items():
        name = f"qmnist-{part}-labels-idx2-int"
        writers.append(_writers(contents[name], name, pool.labels))
    ids, owners = np.unique(np.concatenate(writers), return_inverse=True)
    parts = np.split(owners.astype(np.int64), [len(digits.train)])
    train, test = (Pool(pool.inputs, pool.labels, part) for pool, part in zip(pools.values(), parts, strict=True))
    return RawDataset(train, test, Owners(tuple(f"writer-{i:04d}" for i in ids), divided=False))


def _writers(content: bytes, name: str, labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return NIST's number of each example's writer, ``[n]``: column 2 of QMNIST's labels; column 0 is the class."""
    rows = parse_idx(content, name, 0x0C, 2).astype(np.int64)
    if rows.shape[1] != COLUMNS or len(rows) < len(labels):
        raise DataError(f"{name} is {rows.shape[0]} x {rows.shape[1]}; it must be at least {len(labels)} x {COLUMNS}")
    rows = rows[: len(labels)]
    wrong = np.flatnonzero(rows[:, CLASS] != labels)
    if len(wrong):
        first = int(wrong[0])
        raise DataError(
            f"{name} does not belong to these images: {len(wrong)} labels are not MNIST's, the first in row {first}: "
            f"{rows[first, CLASS]} in place of {labels[first]}"
        )
    return rows[:, WRITER]
