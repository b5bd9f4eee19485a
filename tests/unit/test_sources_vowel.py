"""Vowel, and the reader of its R file."""

from __future__ import annotations

import lzma
import struct
from pathlib import Path

import numpy as np
import pytest

from fedloom.data import datasets
from fedloom.errors import DataError

VOWEL = (Path(__file__).parents[1] / "fixtures" / "Vowel.rda").read_bytes()
SOURCE = datasets.find_dataset("vowel")


def test_half_of_the_repetitions_of_each_vowel_by_each_speaker_trains() -> None:
    official = SOURCE.read({"Vowel.rda": VOWEL})
    assert official.owners == datasets.Owners(tuple(f"speaker-{i}" for i in range(15)), divided=True)
    for pool in (official.train, official.test):
        assert SOURCE.spec.examples_fault(pool.inputs, pool.labels) is None
        assert pool.inputs.shape == (495, 9)
        assert pool.owners is not None
        counts = np.zeros((15, 11), dtype=int)
        np.add.at(counts, (pool.owners, pool.labels), 1)
        assert (counts == 3).all()
    # The first line of vowel-context.data, without its second feature, 0.418, which mlbench omits.
    first = [-3.639, -0.670, 1.779, -0.168, 1.627, -0.388, 0.529, -0.874, -0.814]
    assert official.train.inputs[0] == pytest.approx(first)
    # A speaker says the eleven vowels in turn, six times over: the first 33 of the 66 rows of each train.
    assert official.train.labels[:33].tolist() == official.test.labels[:33].tolist() == [*range(11)] * 3


def test_class_names_and_speakers_are_those_of_the_file_in_its_order() -> None:
    saved = lzma.decompress(VOWEL)
    for names in (SOURCE.spec.class_names, tuple(map(str, range(15)))):
        assert b"".join(struct.pack(">ii", 0x09, len(name)) + name.encode() for name in names) in saved


def test_a_file_with_other_columns_is_rejected() -> None:
    whole = bytearray(lzma.decompress(VOWEL))
    whole[whole.index(struct.pack(">ii", 14, 990)) + 3] = 3
    with pytest.raises(DataError, match="8 columns of numbers"):
        SOURCE.read({"Vowel.rda": lzma.compress(whole)})
