"""R's saved data (``.rda``), as far as a data frame of numbers and factors takes it.

The XDR serialization, versions 2 and 3 ("R Internals", section "Serialization Formats"), read item by item. Only data
are understood: functions, calls and environments are refused, and nothing is ever run. The Python package for it,
rdata, would bring pandas and xarray along for one file of 18 kB.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import struct
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import DataError

MAGIC = {b"RDX2\nX\n": 2, b"RDX3\nX\n": 3}
COMPRESSED = {b"\x1f\x8b": gzip.decompress, b"BZh": bz2.decompress, b"\xfd7zXZ": lzma.decompress}

# Item types (R's SEXPTYPE, and the special codes of a serialization).
SYMBOL, PAIRLIST, CHARACTERS, LOGICAL, INTEGER, REAL, STRINGS, LIST = 1, 2, 9, 10, 13, 14, 16, 19
NULL, REFERENCE = 254, 255
HAS_ATTRIBUTES, HAS_TAG = 1 << 9, 1 << 10
MISSING_INTEGER = -(2**31)


@dataclass(frozen=True, eq=False)
class Factor:
    """A column of categories: ``codes`` [n] int64, indices into ``levels``."""

    codes: NDArray[np.int64]
    levels: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Item:
    """An R object: its value and its attributes."""

    value: Any
    attributes: dict[str, Item]


def data_frame(content: bytes, name: str, variable: str) -> dict[str, Factor | NDArray[np.float64]]:
    """Return the columns of a data frame in an ``.rda`` file, by name.

    Parameters
    ----------
    content
        The whole file, compressed or not.
    name
        What to call it in errors.
    variable
        The R name of the data frame.

    Raises
    ------
    DataError
        If the file is damaged, holds anything but data, or lacks such a data frame; if a value is missing.
    """
    try:
        decompress = next((undo for magic, undo in COMPRESSED.items() if content.startswith(magic)), bytes)
        reader = _Reader(decompress(content), name)
        saved: dict[str, Item] = reader.everything().value
    except (struct.error, OSError, EOFError, zlib.error, lzma.LZMAError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{name} is damaged, or cut short: {error}") from error
    frame = saved.get(variable) if isinstance(saved, dict) else None
    if frame is None or "names" not in frame.attributes or not isinstance(frame.value, list):
        raise DataError(f"{name} holds no data frame {variable!r}; found {sorted(saved or {})}")
    columns: dict[str, Factor | NDArray[np.float64]] = {}
    for column, item in zip(frame.attributes["names"].value, frame.value, strict=True):
        if not isinstance(item.value, np.ndarray):
            raise DataError(f"{name}, column {column}: expected numbers or a factor")
        levels = item.attributes.get("levels")
        if levels is None:
            columns[column] = item.value.astype(np.float64)
        else:
            columns[column] = Factor(item.value.astype(np.int64) - 1, tuple(levels.value))
        missing = np.isnan(item.value) if item.value.dtype.kind == "f" else item.value == MISSING_INTEGER
        if missing.any():
            raise DataError(f"{name}, column {column}: row {int(missing.argmax()) + 1} has no value")
    return columns


class _Reader:
    """Goes through a serialization once, from its start to its end."""

    def __init__(self, content: bytes, name: str) -> None:
        self.content = content
        self.name = name
        self.position = 0
        self.symbols: list[str] = []

    def everything(self) -> Item:
        """Read the header, and the one object that follows: the saved variables by name."""
        version = MAGIC.get(self.content[:7])
        if version is None:
            raise DataError(f"{self.name} starts with {self.content[:7]!r}; expected R's saved data, {[*MAGIC]}")
        self.take(7 + 12)  # the version again, that of the R which wrote it, and the oldest that can read it
        if version == 3:
            self.take(self.integer())  # the native encoding
        return self.item()

    def take(self, count: int) -> memoryview:
        """Return the next bytes."""
        if not 0 <= count <= len(self.content) - self.position:
            raise EOFError(f"{count} bytes expected at {self.position}, of {len(self.content)}")
        self.position += count
        return memoryview(self.content)[self.position - count : self.position]

    def integer(self) -> int:
        """Return the next number."""
        return int(struct.unpack(">i", self.take(4))[0])

    def item(self) -> Item:
        """Return the next object."""
        flags = self.integer()
        kind = flags & 0xFF
        if kind == NULL:
            return Item({}, {})
        if kind == PAIRLIST:
            return Item(self.pairs(flags), {})
        if kind == SYMBOL:
            self.symbols.append(self.item().value)
            return Item(self.symbols[-1], {})
        if kind == REFERENCE:
            position = (flags >> 8) - 1
            if not 0 <= position < len(self.symbols):
                raise EOFError(f"a reference to symbol {position + 1} of {len(self.symbols)}")
            return Item(self.symbols[position], {})
        if kind == CHARACTERS:
            length = self.integer()
            return Item(None if length == -1 else bytes(self.take(length)).decode(), {})
        value = self.vector(kind)
        return Item(value, self.item().value if flags & HAS_ATTRIBUTES else {})

    def vector(self, kind: int) -> NDArray[Any] | list[Any]:
        """Return the elements of a vector."""
        if kind not in (LOGICAL, INTEGER, REAL, STRINGS, LIST):
            raise DataError(f"{self.name} holds an object of R's type {kind}; expected data alone")
        length = self.integer()
        if kind in (LOGICAL, INTEGER):
            return np.frombuffer(self.take(4 * length), dtype=">i4")
        if kind == REAL:
            return np.frombuffer(self.take(8 * length), dtype=">f8")
        items = [self.item() for _ in range(length)]
        return [item.value for item in items] if kind == STRINGS else items

    def pairs(self, flags: int) -> dict[str, Item]:
        """Return the objects of a pairlist by their tags."""
        found: dict[str, Item] = {}
        while flags & 0xFF == PAIRLIST:
            if flags & HAS_ATTRIBUTES:
                self.item()
            tag = self.item().value if flags & HAS_TAG else ""
            found[tag] = self.item()
            flags = self.integer()
        if flags & 0xFF != NULL:
            raise DataError(f"{self.name} holds a list that ends in R's type {flags & 0xFF}; expected data alone")
        return found
