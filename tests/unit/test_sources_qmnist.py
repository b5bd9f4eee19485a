from __future__ import annotations

import struct

import numpy as np
import pytest

from fedloom.data.datasets import find_dataset
from fedloom.errors import DataError

TRAIN_WRITERS, TEST_WRITERS = [12, 3, 12, 700], [40, 5]


def qmnist_labels(classes: list[int], writers: list[int], more: int = 0) -> bytes:
    """Return QMNIST's label file of so many examples, with more rows after them."""
    rows = np.zeros((len(classes) + more, 8), dtype=">i4")
    rows[: len(classes), 0], rows[: len(classes), 2] = classes, writers
    return struct.pack(">BBBB2I", 0, 0, 0x0C, 2, *rows.shape) + rows.tobytes()


@pytest.fixture
def contents() -> dict[str, bytes]:
    def idx(array: np.ndarray) -> bytes:
        return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()

    files = {}
    for part, classes in (("train", [5, 0, 4, 1]), ("t10k", [7, 2])):
        files[f"{part}-images-idx3-ubyte"] = idx(np.arange(len(classes) * 784).reshape(-1, 28, 28) % 256)
        files[f"{part}-labels-idx1-ubyte"] = idx(np.array(classes))
    return files | {
        "qmnist-train-labels-idx2-int": qmnist_labels([5, 0, 4, 1], TRAIN_WRITERS),
        "qmnist-test-labels-idx2-int": qmnist_labels([7, 2], TEST_WRITERS, more=5),
    }


def test_an_example_belongs_to_its_writer(contents: dict[str, bytes]) -> None:
    official = find_dataset("qmnist").read(contents)
    assert official.owners is not None
    assert not official.owners.divided
    for pool, writers in ((official.train, TRAIN_WRITERS), (official.test, TEST_WRITERS)):
        assert pool.owners is not None
        assert [official.owners.names[i] for i in pool.owners] == [f"writer-{w:04d}" for w in writers]
    assert official.test.labels.tolist() == [7, 2]
    assert official.test.inputs.shape == (2, 1, 28, 28)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("train", qmnist_labels([5, 0, 4, 2], TRAIN_WRITERS), ["1 labels", "row 3: 2", "1"]),
        ("test", qmnist_labels([5, 0], TRAIN_WRITERS[:2]), ["2 labels", "row 0: 5", "7"]),
        ("train", qmnist_labels([5, 0, 4], TRAIN_WRITERS[:3]), ["3 x 8", "at least 4 x 8"]),
        ("train", qmnist_labels([5, 0, 4, 1], TRAIN_WRITERS)[:-4], ["truncated", "136 bytes", "needs 140"]),
        ("train", b"\0\0\x08\x01", ["00 00 08 01", "in 2 dimension(s)"]),
    ],
    ids=["one", "mixed up", "few", "cut", "bytes"],
)
def test_labels_that_differ_from_mnists(
    name: str, content: bytes, words: list[str], contents: dict[str, bytes]
) -> None:
    file = f"qmnist-{name}-labels-idx2-int"
    with pytest.raises(DataError) as error:
        find_dataset("qmnist").read(contents | {file: content})
    for word in (file, *words):
        assert word in str(error.value)
