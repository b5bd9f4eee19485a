"""Vowel: eleven vowels of British English by fifteen speakers (Deterding 1989, in the UCI repository).

The file is that of the R package mlbench, which has nine of the repository's ten features; the second is missing. It is
R's saved data, compressed: a column is its type, its length and its numbers, big-endian ("R Internals", section
"Serialization Formats"). Its checksum is known, so the columns are found by their type and length alone.
"""

from __future__ import annotations

import lzma
import re
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.data.datasets.base import Owners, Pool, RawDataset
from fedloom.errors import DataError

ROWS, SPEAKERS, VOWELS = 990, 15, 11
FACTOR, REAL = 0x30D, 0x0E
"""Types of a column of categories, numbered from 1, and of one of numbers."""

REPETITIONS = 6
"""Repetitions of each vowel by each speaker; the first half is for training."""


def read_vowel(contents: Mapping[str, bytes]) -> RawDataset:
    """Return nine features of each utterance; the first three repetitions of a speaker's vowel are for training."""
    saved = lzma.decompress(contents["Vowel.rda"])
    features = _columns(saved, REAL, np.dtype(">f8"))
    factors = _columns(saved, FACTOR, np.dtype(">i4"))
    if (len(features), len(factors)) != (9, 2):
        raise DataError(
            f"Vowel.rda has {len(features)} columns of numbers and {len(factors)} of categories, not 9 and 2"
        )
    inputs = np.stack(features, axis=1).astype(np.float32)
    speaker, vowel = (column.astype(np.int64) - 1 for column in factors)
    spoken = speaker * VOWELS + vowel
    # Number of earlier utterances of this vowel by this speaker, in file order.
    repetition = np.array([np.count_nonzero(spoken[:i] == spoken[i]) for i in range(len(spoken))])
    train = repetition < REPETITIONS // 2
    pools = [Pool(inputs[part], vowel[part], speaker[part]) for part in (train, ~train)]
    return RawDataset(pools[0], pools[1], Owners(tuple(f"speaker-{i}" for i in range(SPEAKERS)), divided=True))


def _columns(saved: bytes, kind: int, dtype: np.dtype[Any]) -> list[NDArray[Any]]:
    """Return the columns of a type, in order."""
    heads = re.finditer(re.escape(struct.pack(">ii", kind, ROWS)), saved)
    return [np.frombuffer(saved, dtype=dtype, count=ROWS, offset=head.end()) for head in heads]
