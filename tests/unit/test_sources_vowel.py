"""Vowel, and the reader of R's files that it comes in."""

from __future__ import annotations

import bz2
import gzip
import lzma
import struct
from pathlib import Path

import numpy as np
import pytest

from fedloom.data import sources
from fedloom.data.sources.rda import Factor, data_frame
from fedloom.errors import DataError

FIXTURES = Path(__file__).parents[1] / "fixtures"
VOWEL = (FIXTURES / "Vowel.rda").read_bytes()


def test_the_utterances_of_the_repository() -> None:
    columns = data_frame(VOWEL, "Vowel.rda", "Vowel")
    assert list(columns) == [*(f"V{i}" for i in range(1, 11)), "Class"]
    # The first line of vowel-context.data, without its second feature, 0.418, which mlbench leaves out.
    first = [-3.639, -0.670, 1.779, -0.168, 1.627, -0.388, 0.529, -0.874, -0.814]
    assert [columns[f"V{i}"][0] for i in range(2, 11)] == pytest.approx(first)
    speakers = columns["V1"]
    assert isinstance(speakers, Factor)
    assert np.bincount(speakers.codes).tolist() == [66] * 15


def test_half_of_the_repetitions_of_each_vowel_by_each_speaker_trains() -> None:
    source = sources.find("vowel")
    official = source.read({"Vowel.rda": VOWEL})
    assert official.owners == sources.Owners(tuple(f"speaker-{i}" for i in range(15)), divided=True)
    for pool in (official.train, official.test):
        assert pool.inputs.shape == (495, 9)
        assert pool.inputs.dtype == np.float32
        assert pool.owners is not None
        counts = np.zeros((15, 11), dtype=int)
        np.add.at(counts, (pool.owners, pool.labels), 1)
        assert (counts == 3).all()
    # A speaker says the eleven vowels in turn, six times over: the first 33 of the 66 rows of each train.
    rows = np.stack([data_frame(VOWEL, "", "Vowel")[f"V{i}"] for i in range(2, 11)], axis=1).astype(np.float32)
    assert np.array_equal(official.train.inputs[:33], rows[:33])
    assert np.array_equal(official.test.inputs[:33], rows[33:66])


def test_class_names_are_those_of_the_file() -> None:
    vowel = data_frame(VOWEL, "Vowel.rda", "Vowel")["Class"]
    assert isinstance(vowel, Factor)
    assert vowel.levels == sources.find("vowel").class_names


def test_a_file_without_those_columns() -> None:
    with pytest.raises(DataError, match=r"Vowel\.rda has the columns \['size'\]; expected the factors V1 and Class"):
        sources.find("vowel").read({"Vowel.rda": rda(frame(size=real(1.0)), "Vowel")})


def test_a_file_that_is_cut_short_anywhere() -> None:
    whole = lzma.decompress(VOWEL)
    for length in (0, 6, 7, 18, 19, 40, 60, 1000, 30000, len(whole) // 2, len(whole) - 5):
        with pytest.raises(DataError, match=r"Vowel\.rda"):
            data_frame(whole[:length], "Vowel.rda", "Vowel")
    with pytest.raises(DataError, match=r"Vowel\.rda is damaged, or cut short"):
        data_frame(VOWEL[:-100], "Vowel.rda", "Vowel")


# A writer of the format, enough to make what the reader must take and refuse ("R Internals", Serialization Formats).


def text(value: str) -> bytes:
    return struct.pack(">ii", 9, len(value)) + value.encode()


def strings(*values: str) -> bytes:
    return struct.pack(">ii", 16, len(values)) + b"".join(map(text, values))


def symbol(name: str) -> bytes:
    return struct.pack(">i", 1) + text(name)


def reference(position: int) -> bytes:
    return struct.pack(">i", position << 8 | 255)


def attributes(**pairs: bytes) -> bytes:
    return b"".join(struct.pack(">i", 2 | 1 << 10) + symbol(k) + v for k, v in pairs.items()) + struct.pack(">i", 254)


def real(*values: float) -> bytes:
    return struct.pack(">ii", 14, len(values)) + struct.pack(f">{len(values)}d", *values)


def integers(*values: int) -> bytes:
    return struct.pack(">ii", 13, len(values)) + struct.pack(f">{len(values)}i", *values)


def factor(levels: bytes, *codes: int) -> bytes:
    body = struct.pack(f">{len(codes)}i", *codes)
    return struct.pack(">ii", 13 | 1 << 9 | 1 << 8, len(codes)) + body + attributes(levels=levels)


def frame(**columns: bytes) -> bytes:
    head = struct.pack(">ii", 19 | 1 << 9 | 1 << 8, len(columns))
    return head + b"".join(columns.values()) + attributes(names=strings(*columns))


def rda(value: bytes, variable: str = "d", version: int = 2) -> bytes:
    head = f"RDX{version}\nX\n".encode() + struct.pack(">iii", version, 0x40301, 0x20300)
    if version == 3:
        head += struct.pack(">i", 5) + b"UTF-8"
    return head + struct.pack(">i", 2 | 1 << 10) + symbol(variable) + value + struct.pack(">i", 254)


@pytest.mark.parametrize("compress", [bytes, gzip.compress, bz2.compress, lzma.compress])
@pytest.mark.parametrize("version", [2, 3])
def test_numbers_and_factors_in_every_wrapping(version: int, compress: type[bytes]) -> None:
    value = frame(size=real(1.5, -2.0), count=integers(7, 8), kind=factor(strings("a", "b"), 2, 1))
    columns = data_frame(compress(rda(value, version=version)), "file", "d")
    assert np.array_equal(columns["size"], [1.5, -2.0])
    assert np.array_equal(columns["count"], [7.0, 8.0])
    kind = columns["kind"]
    assert isinstance(kind, Factor)
    assert (kind.codes.tolist(), kind.levels) == ([1, 0], ("a", "b"))


def test_a_symbol_that_comes_again_is_a_reference() -> None:
    first = factor(strings("a"), 1)  # the second symbol of the file, after the variable's: levels
    again = struct.pack(">i", 2 | 1 << 10) + reference(2) + strings("x", "y") + struct.pack(">i", 254)
    second = struct.pack(">ii", 13 | 1 << 9, 1) + struct.pack(">i", 2) + again
    two = data_frame(rda(frame(one=first, two=second)), "file", "d")["two"]
    assert isinstance(two, Factor)
    assert (two.codes.tolist(), two.levels) == ([1], ("x", "y"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"PK\x03\x04", "starts with b'PK"),
        (rda(frame(x=real(1.0)), "other"), r"no data frame 'd'; found \['other'\]"),
        (rda(real(1.0)), "no data frame 'd'"),
        (rda(struct.pack(">i", 3)), "an object of R's type 3; expected data alone"),
        (rda(frame(x=strings("a"))), "column x: expected numbers or a factor"),
        (rda(frame(x=real(1.0, float("nan")))), "column x: row 2 has no value"),
        (rda(frame(x=factor(strings("a"), 1, -(2**31)))), "column x: row 2 has no value"),
        (rda(frame(x=struct.pack(">ii", 14, -1))), "damaged, or cut short"),
        (rda(reference(9)), "a reference to symbol 9 of 1"),
    ],
    ids=["zip", "other", "no frame", "closure", "text", "nan", "na", "negative", "reference"],
)
def test_what_is_no_data_frame_is_refused(content: bytes, words: str) -> None:
    with pytest.raises(DataError, match=words):
        data_frame(content, "file", "d")
