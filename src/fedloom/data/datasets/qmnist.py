"""QMNIST: MNIST with the writer of each digit (Yadav and Bottou 2019).

The images are MNIST's; QMNIST adds NIST's metadata. Its train set is MNIST's. The first 10,000 of its 60,000 test rows
are MNIST's test set; the rest, whose images are not in MNIST, are left out.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fedloom.data import idx
from fedloom.data.datasets.base import Owners, Pool, RawDataset
from fedloom.data.datasets.mnist import read_mnist
from fedloom.errors import DataError

COLUMNS = 8
CLASS, WRITER = 0, 2


def read_qmnist(contents: Mapping[str, bytes]) -> RawDataset:
    """Return MNIST's examples with their writers; the test writers differ from the train writers.

    Raise DataError if the labels are not MNIST's.
    """
    digits = read_mnist(contents)
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
        raise DataError(f"{name} is {rows.shape[0]} x {rows.shape[1]}; it must be at least {len(labels)} x {COLUMNS}")
    rows = rows[: len(labels)]
    wrong = np.flatnonzero(rows[:, CLASS] != labels)
    if len(wrong):
        first = int(wrong[0])
        raise DataError(
            f"{name} does not belong to these images: {len(wrong)} labels are not MNIST's, the first in row {first}: "
            f"{rows[first, CLASS]} in place of {labels[first]}"
        )
    return rows[:, WRITER]
