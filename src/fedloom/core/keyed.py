"""Random generators keyed by a seed and a purpose."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from fedloom.core.memory import large_array

_SORTED = 1 << 20
"""Draws in memory at a time, about."""


def make_rng(seed: int, *purpose: str | int) -> np.random.Generator:
    """Return the generator for one purpose: the same on every machine, independent of all others.

    Parameters
    ----------
    seed
        The experiment's seed.
    purpose
        Use of the numbers, e.g. ``("deal", "train", 3)``.
    """
    key = json.dumps([seed, *purpose]).encode()
    entropy = int.from_bytes(hashlib.blake2b(key, digest_size=16).digest(), "little")
    return np.random.Generator(np.random.PCG64(entropy))


def shuffled(generator: np.random.Generator, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return a random order of ``0 ... count - 1``.

    Sorting uniform draws depends only on numpy's bit stream, which (unlike ``permutation``) is stable across releases.
    """
    order: np.ndarray[tuple[int], np.dtype[np.int64]] = np.argsort(generator.random(count), kind="stable")
    return order


def signed_grouping(
    seed: int, purpose: str, *, count: int, groups: int
) -> tuple[np.ndarray[tuple[int], np.dtype[Any]], np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    """Return a random group of each of ``0 ... count - 1``, and whether its random sign is positive.

    Groups differ in size by at most 1: a number's group is its rank among uniform draws, modulo ``groups``. Draws of
    large models are sorted in ranges, one after another, because sorting them at once takes ten times the memory of
    the model.
    """
    grouping = large_array(count, np.min_scalar_type(-groups))
    is_positive = large_array(count, np.bool_)
    ranges, rank = min(32, 1 + count // _SORTED), 0
    for i in range(ranges):
        places, draws = [], []
        for start, block in _uniform(make_rng(seed, purpose, "groups"), count):
            inside = np.flatnonzero((block >= i / ranges) & (block < (i + 1) / ranges))
            places.append(inside + start)
            draws.append(block[inside])
        order = np.concatenate(places)[np.argsort(np.concatenate(draws), kind="stable")]
        grouping[order] = np.arange(rank, rank + len(order)) % groups
        rank += len(order)
    for start, block in _uniform(make_rng(seed, purpose, "signs"), count):
        np.less(block, 0.5, out=is_positive[start : start + len(block)])
    return grouping, is_positive


def _uniform(generator: np.random.Generator, count: int) -> Iterator[tuple[int, np.ndarray[tuple[int], np.dtype[Any]]]]:
    """Yield ``count`` uniform draws in blocks, each with the number of draws before it."""
    for start in range(0, max(count, 1), _SORTED):
        yield start, generator.random(min(_SORTED, count - start))
