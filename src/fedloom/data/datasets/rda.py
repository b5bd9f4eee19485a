"""Reader for R's saved data (``.rda``), limited to one data frame of numbers and factors: Vowel's pinned file.

It parses the XDR serialization ("R Internals", section "Serialization Formats") item by item and runs nothing. Packages
that read all of R's data (rdata, pyreadr, rds2py) have one to three dependencies, for one file of 18 kB.
"""

from __future__ import annotations

import io
import lzma
import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import DataError

HEADER = 19
"""Bytes of the header: ``RDX2\\nX\\n``, the format version, the R version of the writer, and the oldest that can read.
"""

# Item types (R's SEXPTYPE, and the special codes of a serialization).
SYMBOL, PAIRLIST, CHARACTERS, INTEGER, REAL, STRINGS, LIST = 1, 2, 9, 13, 14, 16, 19
NULL, REFERENCE = 254, 255
HAS_ATTRIBUTES = 1 << 9
NUMBERS: dict[int, np.dtype[Any]] = {INTEGER: np.dtype(">i4"), REAL: np.dtype(">f8")}


@dataclass(frozen=True, eq=False)
class Factor:
    """Categorical column: ``codes`` [n] int64, indices into ``levels``."""

    codes: NDArray[np.int64]
    levels: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class _Item:
    """R object: its value and its attributes."""

    value: Any
    attributes: dict[str, _Item] = field(default_factory=dict)


def data_frame(content: bytes, variable: str) -> dict[str, Factor | NDArray[np.float64]]:
    """Return the columns of a data frame in an xz-compressed ``.rda`` file, by name.

    Raise DataError if it holds anything but data.
    """
    frame = _Reader(lzma.decompress(content)).item().value[variable]
    columns: dict[str, Factor | NDArray[np.float64]] = {}
    for name, column in zip(frame.attributes["names"].value, frame.value, strict=True):
        levels = column.attributes.get("levels")
        if levels is None:
            columns[name.value] = column.value.astype(np.float64)
        else:
            codes = column.value.astype(np.int64) - 1
            columns[name.value] = Factor(codes, tuple(level.value for level in levels.value))
    return columns


class _Reader:
    """Single-pass parser of a serialization."""

    def __init__(self, content: bytes) -> None:
        self.stream = io.BytesIO(content)
        self.stream.seek(HEADER)
        self.symbols: list[str] = []

    def integer(self) -> int:
        return int(struct.unpack(">i", self.stream.read(4))[0])

    def item(self) -> _Item:
        """Return the next object; a pairlist is a dict of its items by tag."""
        flags = self.integer()
        kind = flags & 0xFF
        if kind == NULL:
            return _Item({})
        if kind == PAIRLIST:
            tag, value, rest = self.item(), self.item(), self.item()
            return _Item({tag.value: value, **rest.value})
        if kind == SYMBOL:
            self.symbols.append(self.item().value)
            return _Item(self.symbols[-1])
        if kind == REFERENCE:
            return _Item(self.symbols[(flags >> 8) - 1])
        if kind not in (CHARACTERS, *NUMBERS, STRINGS, LIST):
            raise DataError(f"Vowel.rda holds an object of R's type {kind}; only data can be read")
        length = self.integer()
        if kind == CHARACTERS:
            return _Item(self.stream.read(length).decode())
        elements: Any
        if kind in NUMBERS:
            elements = np.frombuffer(self.stream.read(NUMBERS[kind].itemsize * length), dtype=NUMBERS[kind])
        else:
            elements = [self.item() for _ in range(length)]
        return _Item(elements, self.item().value if flags & HAS_ATTRIBUTES else {})
