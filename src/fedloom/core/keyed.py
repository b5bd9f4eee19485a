"""Random generators keyed by a seed and a purpose."""

from __future__ import annotations

import hashlib
import json

import numpy as np


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
) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    """Return a random group of each of ``0 ... count - 1``, and whether its random sign is positive.

    Groups differ in size by at most 1.
    """
    grouping = np.empty(count, dtype=np.int64)
    grouping[shuffled(make_rng(seed, purpose, "groups"), count)] = np.arange(count) % groups
    return grouping, make_rng(seed, purpose, "signs").random(count) < 0.5
