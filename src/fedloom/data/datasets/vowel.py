"""Vowel: eleven vowels of British English by fifteen speakers (Deterding 1989, in the UCI repository).

The file is that of the R package mlbench, which has nine of the repository's ten features; the second is missing.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedloom.data.datasets.base import Owners, Pool, RawDataset
from fedloom.data.datasets.rda import Factor, data_frame

FEATURES = tuple(f"V{i}" for i in range(2, 11))
REPETITIONS = 6
"""Repetitions of each vowel by each speaker; the first half is for training."""


def read_vowel(contents: Mapping[str, bytes]) -> RawDataset:
    """Return nine features of each utterance; the first three repetitions of a speaker's vowel are for training."""
    columns = data_frame(contents["Vowel.rda"], "Vowel")
    speaker, vowel = columns["V1"], columns["Class"]
    assert isinstance(speaker, Factor)
    assert isinstance(vowel, Factor)
    inputs = np.stack([np.asarray(columns[feature]) for feature in FEATURES], axis=1).astype(np.float32)
    spoken = speaker.codes * len(vowel.levels) + vowel.codes
    # Number of earlier utterances of this vowel by this speaker, in file order.
    repetition = np.array([np.count_nonzero(spoken[:i] == spoken[i]) for i in range(len(spoken))])
    train = repetition < REPETITIONS // 2
    pools = [Pool(inputs[part], vowel.codes[part], speaker.codes[part]) for part in (train, ~train)]
    return RawDataset(pools[0], pools[1], Owners(tuple(f"speaker-{level}" for level in speaker.levels), divided=True))
