"""FEMNIST: handwritten digits and letters by writer, made by LEAF from NIST's Special Database 19 (Caldas et al. 2018).

LEAF's script downloads and converts the data; there are no official files. Pixels are as in LEAF: dark on white (1).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.data.datasets import leaf
from fedloom.data.datasets.base import RawDataset
from fedloom.errors import DataError

SIDE = 28
CLASSES = 62
TOLERANCE = 1e-4


def read_femnist(contents: Mapping[str, bytes]) -> RawDataset:
    """Return the content of LEAF's files."""
    return leaf.read_leaf(contents, _encoded)


def _encoded(x: list[Any], y: list[Any], where: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return a user's images ``[n, 1, 28, 28]`` and classes ``[n]``; a value k/255, to 1e-4, becomes k."""
    for position, image in enumerate(x):
        if not isinstance(image, list) or len(image) != SIDE * SIDE:
            found = f"has {len(image)} values" if isinstance(image, list) else "is not a list"
            raise DataError(f"{where}: image {position} {found}; it must have {SIDE * SIDE}, {SIDE} x {SIDE} pixels")
    try:
        values = np.array(x, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: an image has a value that is not a number: {error}") from error
    pixels = np.rint(values * 255)
    right = (np.abs(values - pixels / 255) <= TOLERANCE) & (pixels >= 0) & (pixels <= 255)
    if not right.all():
        image, position = np.argwhere(~right)[0]
        raise DataError(
            f"{where}: image {image} has the value {values[image, position]} at {position}; it must be k/255, k a "
            "whole number from 0 to 255"
        )
    for position, label in enumerate(y):
        if type(label) is not int or not 0 <= label < CLASSES:
            raise DataError(f"{where}: label {position} is {label!r}; it must be 0 to {CLASSES - 1}")
    return pixels.astype(np.uint8).reshape(-1, 1, SIDE, SIDE), np.array(y, dtype=np.int64)
