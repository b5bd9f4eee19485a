"""FEMNIST: handwritten digits and letters by writer, made by LEAF from NIST's Special Database 19 (Caldas et al. 2018).

LEAF's script downloads and converts the data; there are no official files. Pixels are LEAF's: dark on white, 1 = white.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.data.sources import leaf
from fedloom.data.sources.base import RawDataset, Source
from fedloom.errors import DataError

SIDE = 28
CLASS_NAMES = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
TOLERANCE = 1e-4


def encode(x: list[Any], y: list[Any], where: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return a user's images ``[n, 1, 28, 28]`` and classes ``[n]``; a value k/255 becomes k.

    Raises
    ------
    DataError
        If an image has another size, a value is not within 1e-4 of a k/255, or a label is out of range.
    """
    for position, image in enumerate(x):
        size = len(image) if isinstance(image, list) else None
        if size != SIDE * SIDE:
            found = "no list" if size is None else f"{size} values"
            raise DataError(f"{where}: image {position} has {found}; expected {SIDE * SIDE}, {SIDE} x {SIDE} pixels")
    try:
        values = np.array(x, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: an image holds something other than numbers: {error}") from error
    pixels = np.rint(values * 255)
    right = (np.abs(values - pixels / 255) <= TOLERANCE) & (pixels >= 0) & (pixels <= 255)
    if not right.all():
        image, position = np.argwhere(~right)[0]
        raise DataError(
            f"{where}: image {image} has the value {values[image, position]} at {position}; expected k/255, k a whole "
            "number from 0 to 255"
        )
    for position, label in enumerate(y):
        if type(label) is not int or not 0 <= label < len(CLASS_NAMES):
            raise DataError(f"{where}: label {position} is {label!r}; expected 0 ... {len(CLASS_NAMES) - 1}")
    return pixels.astype(np.uint8).reshape(-1, 1, SIDE, SIDE), np.array(y, dtype=np.int64)


def read(contents: Mapping[str, bytes]) -> RawDataset:
    """Return the content of LEAF's files."""
    return leaf.read(contents, encode)


FEMNIST = Source(
    name="femnist",
    title="FEMNIST",
    class_names=CLASS_NAMES,
    input_shape=(1, SIDE, SIDE),
    licence="public domain (NIST Special Database 19), made with LEAF (BSD 2-clause)",
    files=(),
    fetchers=(),
    read=read,
    own=leaf.OWN_FILES,
)
