"""Moments of training examples, and the normalization that they give."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.data.manifest import Kind, Normalization

CHUNK = 4096
"""Examples whose pixels are counted at once."""


@dataclass(frozen=True)
class Moments:
    """Moments of a client's training examples, for normalization.

    Attributes
    ----------
    count
        Number of values of each channel or feature.
    sum, squares
        Sum and sum of squares of each channel's values (0 ... 255, exact integers) or each feature's (correctly
        rounded). Empty for tokens.
    """

    count: int
    sum: tuple[int | float, ...]
    squares: tuple[int | float, ...]


def pixel_sums(pieces: Iterable[NDArray[Any]]) -> list[tuple[int, int, int]]:
    """Return count, sum and sum of squares of each channel's values, in exact integers.

    Parameters
    ----------
    pieces
        Images ``[n, channels, height, width]`` uint8, at least one piece.
    """
    counts: NDArray[np.int64] | int = 0
    for images in pieces:
        counts = counts + np.stack(
            [np.bincount(images[:, channel].reshape(-1), minlength=256) for channel in range(images.shape[1])]
        )
    values = range(256)
    return [
        (
            sum(of_channel),
            sum(v * count for v, count in zip(values, of_channel, strict=True)),
            sum(v * v * count for v, count in zip(values, of_channel, strict=True)),
        )
        for of_channel in np.asarray(counts).tolist()
    ]


def moments_of(x: NDArray[Any], kind: Kind) -> Moments:
    """Return the moments of inputs ``[n, *input_shape]``; exact, or correctly rounded."""
    if kind == "tokens":
        return Moments(len(x), (), ())
    if kind == "features":
        columns = x.astype(np.float64).T
        sums, squares = ([math.fsum(column) for column in each] for each in (columns, columns * columns))
        return Moments(len(x), tuple(sums), tuple(squares))
    channels = pixel_sums(x[start : start + CHUNK] for start in range(0, max(len(x), 1), CHUNK))
    return Moments(channels[0][0], tuple(each[1] for each in channels), tuple(each[2] for each in channels))


def pooled_normalization(kind: Kind, numbers: int, moments: Sequence[Moments]) -> Normalization:
    """Return mean and standard deviation over all clients' training examples together, computed in exact arithmetic.

    Parameters
    ----------
    numbers
        Number of channels or features.
    moments
        Moments of each client; at least one has an example.
    """
    if kind == "tokens":
        return Normalization((), ())
    count = sum(one.count for one in moments)
    scale = 255 if kind == "pixels" else 1
    mean, std = [], []
    for i in range(numbers):
        first = sum((Fraction(one.sum[i]) for one in moments), Fraction(0))
        second = sum((Fraction(one.squares[i]) for one in moments), Fraction(0))
        mean.append(float(first / count / scale))
        variance = max(Fraction(0), (second * count - first * first) / (count * count * scale * scale))
        # A constant channel or feature carries no information; dividing by 1 keeps it at zero.
        std.append(math.sqrt(variance) or 1.0)
    return Normalization(tuple(mean), tuple(std))
