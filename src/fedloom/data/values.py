"""Rules for input values of all formats: keep, convert with a note, or reject.

Features are kept as 32-bit floats, pixels and tokens as bytes, labels as positions in the list of classes. A value that
its type cannot hold precisely enough is rejected with its place (:class:`Rounding`); one that changes but stays useful
is noted. Folders, tables, arrays, DataFrames, torchvision data sets and packing all use this rule.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.core.words import composed
from fedloom.errors import DataError

EXACT = 2**53
"""Largest integer up to which a 64-bit float, used in the checks, holds every integer exactly."""

COARSE = 1e-3
"""Relative rounding error, as a fraction of a column's range, above which the column is rejected."""

VISIBLE = 1e-5
"""Relative rounding error, as a fraction of a column's range, above which the column is noted."""

FEW = 20
"""Number of distinct numbers that may be classes, however few examples there are."""

LARGE, EXPANSION = 2**30, 100
"""Unpacked size allowed for any file, in bytes, and as a multiple of its own size; the larger of the two counts."""

_NUMBER = re.compile(r"[+-]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?|nan|inf(?:inity)?)", re.IGNORECASE)
_WHOLE = re.compile(r"(-?[0-9]+)(?:\.0*)?")
MISSING = frozenset(("", "#N/A", "#NA", "<NA>", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null"))
"""Texts that mark a missing value, as R, SQL, Python, pandas and spreadsheets write it."""

TRUTHS = {"true": 1.0, "false": 0.0}


def number(text: str) -> float | None:
    """Return the number in a text: ASCII digits, a point, an exponent, ``nan`` or ``inf``; None for anything else."""
    text = text.strip()
    return float(text) if _NUMBER.fullmatch(text) else None


def is_whole(text: str) -> bool:
    """Return True if a text is an integer in digits."""
    return text.strip().lstrip("+-").isdecimal()


def as_array(value: Any, name: str) -> NDArray[Any]:
    """Return a tensor, or anything else that numpy can convert, as an array; errors call it ``name``.

    Raise DataError if numpy cannot convert it, or some of its values are masked.
    """
    if np.ma.is_masked(value):
        raise DataError(f"{name}: the masked array has missing values; give an array without a mask")
    try:
        if not hasattr(value, "detach"):
            return np.asarray(value)
        tensor = value.detach().cpu()
        if "bfloat16" in str(tensor.dtype):  # a type that numpy lacks
            tensor = tensor.double()
        array: NDArray[Any] = tensor.numpy()
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{name}: a {type(value).__name__} that numpy cannot convert ({str(error).splitlines()[0]}); give plain "
            "values, in rows of equal length"
        ) from error
    return array


def as_numbers(values: NDArray[Any]) -> NDArray[np.float64]:
    """Return numbers as 64-bit floats; True is 1 and False 0.

    Raise ValueError if they are not real numbers, or are integers beyond ±2^53, which a float cannot all represent.
    """
    if values.dtype.kind not in "iufb":
        raise ValueError(f"values of type {values.dtype} are not numbers")
    if values.dtype.kind in "iu" and values.size and (int(values.max()) > EXACT or int(values.min()) < -EXACT):
        raise ValueError(
            f"integers beyond 2^53 cannot be features ({int(values.min())} to {int(values.max())}): leave ids out, or "
            "give categories as class names"
        )
    return values.astype(np.float64)


class Rounding:
    """Precision that 32-bit floats keep for f columns of numbers, which arrive in chunks, and columns that count."""

    def __init__(self, columns: int) -> None:
        self._low = np.full(columns, np.inf)
        self._high = np.full(columns, -np.inf)
        self._error = np.zeros(columns)
        self._integers = np.zeros(columns, dtype=np.int64)
        self._last = np.full(columns, -np.inf)
        self._rising = np.arange(columns)
        self._rows = 0

    def add(self, values: NDArray[np.float64], rounded: NDArray[np.float32]) -> None:
        """Add ``[m, f]`` values, and the same values as stored; those that are not finite are ignored."""
        if not len(values):
            return
        finite = np.isfinite(values) & np.isfinite(rounded)
        error = np.where(finite, np.abs(np.where(finite, values, 0) - np.where(finite, rounded, 0)), 0)
        self._low = np.minimum(self._low, np.where(finite, values, np.inf).min(0))
        self._high = np.maximum(self._high, np.where(finite, values, -np.inf).max(0))
        self._error = np.maximum(self._error, error.max(0))
        self._integers += np.count_nonzero((error > 0) & (values == np.floor(values)), axis=0)
        some = np.vstack([self._last[self._rising], values[:, self._rising]])
        self._rising = self._rising[((some[1:] > some[:-1]) & (some[1:] == np.floor(some[1:]))).all(0)]
        self._last, self._rows = values[-1], self._rows + len(values)

    def shares(self, spread: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
        """Return the largest rounding error of each column, as a fraction of its range or of a known spread.

        It is 0 where all values are equal.
        """
        extent = self._high - self._low
        scale = extent if spread is None else spread
        shares: NDArray[np.float64] = np.zeros_like(self._error)
        np.divide(self._error, scale, out=shares, where=(extent > 0) & (scale > 0))
        return shares

    def imprecise_columns(self, spread: NDArray[np.float64] | None = None) -> list[int]:
        """Return the columns for which 32 bits lose too much precision."""
        return [int(i) for i in np.flatnonzero(self.shares(spread) > COARSE)]

    def counting_columns(self) -> list[int]:
        """Return the columns with another whole number in each row, in ascending order, like an id or an index."""
        return self._rising.tolist() if self._rows > FEW else []

    def rounded_columns(self) -> list[int]:
        """Return the columns that are kept with notable changes: rounded integers, or visible rounding."""
        shares = self.shares()
        return [int(i) for i in np.flatnonzero((shares <= COARSE) & ((shares > VISIBLE) | (self._integers > 0)))]


def label_text(value: object, classes: Collection[str] = ()) -> str | None:
    """Return the name for a label or an owner: whole numbers as digits; None if missing.

    Text is in Unicode's composed form, so that two spellings that look alike are one name. A text that marks a missing
    value is a name if it is one of ``classes``, which are given.

    Raise ValueError if it is neither text nor a number.
    """
    if value is None:
        return None
    if isinstance(value, bytes):
        try:
            value = value.decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{value!r:.60} is not UTF-8 text") from None
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str):
        text = composed(value.strip())
        if "\0" in text:
            raise ValueError(f"{text!r:.60} has a NUL character")
        return None if text in MISSING and text not in classes else text
    if isinstance(value, bool | int):
        return str(value)
    if isinstance(value, float | Decimal):
        if math.isnan(value):
            return None
        is_exact = math.isfinite(value) and -EXACT <= value <= EXACT and value == int(value)
        return str(int(value)) if is_exact else str(value)
    raise ValueError(f"{value!s:.60} is a {type(value).__name__}, neither text nor a number")


def plain_numbers(names: Iterable[str]) -> dict[str, str]:
    """Return the plain form of whole numbers, ``1.0`` as ``1``, if every name is a number; else nothing."""
    different = set(names)
    if not all(_NUMBER.fullmatch(name) for name in different):
        return {}
    return {name: match[1] for name in different if (match := _WHOLE.fullmatch(name)) and match[1] != name}


def measured(names: Iterable[str]) -> list[str]:
    """Return the names with a fraction or an exponent if every name is a number: a measured quantity, not classes."""
    different = set(names)
    if not all(_NUMBER.fullmatch(name) for name in different):
        return []
    return sorted(name for name in different if not _WHOLE.fullmatch(name))


def are_numbers(names: Sequence[str]) -> bool:
    """Return True if all names are integers in digits; an integer label is then a name, not a position."""
    return all(_integer(name) for name in names)


def found_classes(names: Iterable[str]) -> tuple[str, ...]:
    """Return the sorted distinct labels as classes: in numeric order if all are integers, else as text."""
    different = set(names)
    if are_numbers(tuple(different)):
        return tuple(sorted(different, key=lambda name: (int(name), name)))
    return tuple(sorted(different))


def _integer(name: str) -> bool:
    return len(name) <= 40 and name.removeprefix("-").isdecimal()
