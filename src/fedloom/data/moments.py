"""Moments of training examples, and the normalization computed from them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.data.spec import DataSpec, InputSpec, Measured, Normalization, RawInputs, named_arrays

CHUNK = 4096
"""Number of examples whose pixels are counted at once."""


@dataclass(frozen=True)
class Moments:
    """Moments of a client's training examples, for normalization.

    Attributes
    ----------
    count
        Number of values of each channel or feature, added over the tensors.
    sum, squares
        Sum and sum of squares of the values of each channel (0 ... 255, exact integers), feature or number (correctly
        rounded): of the inputs in order, then of the targets of regression. Tokens have none. Sums over several clients
        are exact.
    """

    count: int
    sum: tuple[int | float | Fraction, ...]
    squares: tuple[int | float | Fraction, ...]


def pixel_sums(pieces: Iterable[NDArray[Any]]) -> list[tuple[int, int, int]]:
    """Return count, sum and sum of squares of each channel's values, in exact integers.

    There is at least one piece of images, ``[n, channels, height, width]`` uint8.
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


def moments_of(x: RawInputs, y: NDArray[Any] | None, spec: DataSpec) -> Moments:
    """Return the moments of inputs ``[n, *input_shape]``, or several by name, and of targets; exact, or rounded."""
    arrays = named_arrays(x)
    parts = [_of_input(arrays[name], each) for name, each in spec.inputs.items()]
    if spec.targets is not None and spec.targets.numbers and y is not None:
        parts.append(_of_rows(spec.targets.rows(y)))
    return Moments(
        sum(each.count for each in parts),
        tuple(number for each in parts for number in each.sum),
        tuple(number for each in parts for number in each.squares),
    )


def _of_input(x: NDArray[Any], spec: InputSpec) -> Moments:
    if spec.kind == "tokens":
        return Moments(len(x), (), ())
    if spec.kind != "pixels":
        return _of_rows(spec.rows(x))
    channels = pixel_sums(x[start : start + CHUNK] for start in range(0, max(len(x), 1), CHUNK))
    return Moments(channels[0][0], tuple(each[1] for each in channels), tuple(each[2] for each in channels))


def _of_rows(values: NDArray[Any]) -> Moments:
    """Return the moments of each row of ``[numbers, n]``."""
    rows = values.astype(np.float64)
    sums, squares = ([math.fsum(row) for row in each] for each in (rows, rows * rows))
    return Moments(values.shape[1], tuple(sums), tuple(squares))


def pooled_normalization(tensors: Sequence[Measured], moments: Sequence[Moments]) -> Normalization:
    """Return mean and standard deviation over all clients' training examples together, computed in exact arithmetic.

    The normalizations of the measured tensors are concatenated. At least one client's moments have an example.
    """
    examples = Fraction(sum(one.count for one in moments), sum(each.values for each in tensors))
    mean, std, i = [], [], 0
    for tensor in tensors:
        count, scale = examples * tensor.values, tensor.scale
        for _ in range(tensor.numbers):
            first = sum((Fraction(one.sum[i]) for one in moments), Fraction(0))
            second = sum((Fraction(one.squares[i]) for one in moments), Fraction(0))
            mean.append(float(first / count / scale))
            variance = max(Fraction(0), (second * count - first * first) / (count * count * scale * scale))
            # A constant channel or feature carries no information; dividing by 1 keeps it at zero.
            std.append(math.sqrt(variance) or 1.0)
            i += 1
    return Normalization(tuple(mean), tuple(std))
