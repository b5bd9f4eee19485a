"""QMNIST: MNIST with the writer of each digit (Yadav and Bottou 2019).

The images are MNIST's; QMNIST adds NIST's metadata. Its train set is MNIST's. The first 10,000 of its 60,000 test rows
are MNIST's test set; the rest, whose images are not in MNIST, are left out.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fedloom.data import idx
from fedloom.data.sources import mnist
from fedloom.data.sources.base import Owners, Pool, RawDataset, Source, SourceFile
from fedloom.data.sources.fetchers import Download
from fedloom.errors import DataError

COLUMNS = 8
CLASS, WRITER = 0, 2


def read(contents: Mapping[str, bytes]) -> RawDataset:
    """Return MNIST's examples with their writers; the test writers differ from the train writers.

    Raises
    ------
    DataError
        If the labels are not MNIST's.
    """
    digits = mnist.read(contents)
    writers = {
        part: _writers(contents[name], name, pool.labels)
        for part, name, pool in (
            ("train", "qmnist-train-labels-idx2-int", digits.train),
            ("test", "qmnist-test-labels-idx2-int", digits.test),
        )
    }
    ids, owners = np.unique(np.concatenate([writers["train"], writers["test"]]), return_inverse=True)
    train, test = np.split(owners.astype(np.int64), [len(digits.train)])
    return RawDataset(
        Pool(digits.train.inputs, digits.train.labels, train),
        Pool(digits.test.inputs, digits.test.labels, test),
        Owners(tuple(f"writer-{i:04d}" for i in ids), divided=False),
    )


def _writers(content: bytes, name: str, labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return NIST's number of each example's writer, ``[n]``: column 2 of QMNIST's labels; column 0 is the class."""
    rows = idx.parse_int32(content, name, 2)
    if rows.shape[1] != COLUMNS or len(rows) < len(labels):
        raise DataError(f"{name} is {rows.shape[0]} x {rows.shape[1]}; expected at least {len(labels)} x {COLUMNS}")
    rows = rows[: len(labels)]
    wrong = np.flatnonzero(rows[:, CLASS] != labels)
    if len(wrong):
        first = int(wrong[0])
        raise DataError(
            f"{name} does not belong to these images: {len(wrong)} labels are not MNIST's, the first in row {first}: "
            f"found {rows[first, CLASS]}, expected {labels[first]}"
        )
    return rows[:, WRITER]


QMNIST = Source(
    name="qmnist",
    title="QMNIST",
    class_names=mnist.MNIST.class_names,
    input_shape=mnist.MNIST.input_shape,
    licence="BSD 3-clause (Facebook, Inc.), on MNIST's images",
    files=(
        SourceFile(
            "qmnist-train-labels-idx2-int", 1920012, "bb1b6e1ec7b04fd5696f1ed50b5f58f8ef195118edd5c93c81783df9740b8ac5"
        ),
        SourceFile(
            "qmnist-test-labels-idx2-int", 1920012, "92d0ccb8c25f9c6534270fb4be7e1d24a1c6d315edfc8a638bfbd31c70f362dd"
        ),
    ),
    fetchers=(Download("https://raw.githubusercontent.com/facebookresearch/qmnist/master"),),
    read=read,
    needs=(mnist.MNIST,),
)
