"""Vowel, and the reader of its R file."""

from __future__ import annotations

import lzma
import struct
from pathlib import Path

import numpy as np
import pytest

from fedloom.data import datasets
from fedloom.data.datasets.rda import Factor, data_frame
from fedloom.errors import DataError

FIXTURES = Path(__file__).parents[1] / "fixtures"
VOWEL = (FIXTURES / "Vowel.rda").read_bytes()


def test_the_utterances_of_the_repository() -> None:
    columns = data_frame(VOWEL, "Vowel")
    assert list(columns) == [*(f"V{i}" for i in range(1, 11)), "Class"]
    # The first line of vowel-context.data, without its second feature, 0.418, which mlbench omits.
    first = [-3.639, -0.670, 1.779, -0.168, 1.627, -0.388, 0.529, -0.874, -0.814]
    assert [columns[f"V{i}"][0] for i in range(2, 11)] == pytest.approx(first)
    speakers = columns["V1"]
    assert isinstance(speakers, Factor)
    assert np.bincount(speakers.codes).tolist() == [66] * 15


def test_half_of_the_repetitions_of_each_vowel_by_each_speaker_trains() -> None:
    source = datasets.find_dataset("vowel")
    official = source.read({"Vowel.rda": VOWEL})
    assert official.owners == datasets.Owners(tuple(f"speaker-{i}" for i in range(15)), divided=True)
    for pool in (official.train, official.test):
        assert pool.inputs.shape == (495, 9)
        assert pool.inputs.dtype == np.float32
        assert pool.owners is not None
        counts = np.zeros((15, 11), dtype=int)
        np.add.at(counts, (pool.owners, pool.labels), 1)
        assert (counts == 3).all()
    # A speaker says the eleven vowels in turn, six times over: the first 33 of the 66 rows of each train.
    rows = np.stack([data_frame(VOWEL, "Vowel")[f"V{i}"] for i in range(2, 11)], axis=1).astype(np.float32)
    assert np.array_equal(official.train.inputs[:33], rows[:33])
    assert np.array_equal(official.test.inputs[:33], rows[33:66])


def test_class_names_match_the_file() -> None:
    vowel = data_frame(VOWEL, "Vowel")["Class"]
    assert isinstance(vowel, Factor)
    assert vowel.levels == datasets.find_dataset("vowel").spec.class_names


def test_invalid_data_are_rejected() -> None:
    """Put a closure in place of the first number: nothing of it is read."""
    whole = bytearray(lzma.decompress(VOWEL))
    at = whole.index(struct.pack(">ii", 14, 990))  # the first column of numbers: R's type 14, 990 of them
    whole[at + 3] = 3
    with pytest.raises(DataError, match="R's type 3"):
        data_frame(lzma.compress(whole), "Vowel")
