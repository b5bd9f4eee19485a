"""A dataset like MNIST, small enough for any test, and its source."""

from __future__ import annotations

import gzip
import hashlib
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fedloom.data import datasets
from fedloom.data.datasets.base import DataFile, Dataset
from fedloom.data.datasets.binary import read_mnist
from fedloom.data.spec import DataSpec


def files() -> dict[str, bytes]:
    """Return its four files: 5 classes, 240 train and 60 test images of 6x6 pixels."""
    rng = np.random.default_rng(0)
    made = {}
    for part, count in (("train", 240), ("t10k", 60)):
        labels = np.arange(count) % 5
        made[f"{part}-images-idx3-ubyte"] = _idx(rng.integers(0, 256, (count, 6, 6)))
        made[f"{part}-labels-idx1-ubyte"] = _idx(labels[rng.permutation(count)])
    return made


def source(contents: Mapping[str, bytes], *locations: str) -> Dataset:
    """Return the source ``tiny`` of files with these contents, at these locations."""
    return Dataset(
        name="tiny",
        title="Tiny",
        spec=DataSpec.single("pixels", (1, 6, 6), ("a", "b", "c", "d", "e")),
        licence="none",
        files=tuple(
            DataFile(name, len(content), hashlib.sha256(content).hexdigest()) for name, content in contents.items()
        ),
        locations=locations,
        read=read_mnist,
    )


def fetch(given: Path, root: Path) -> Dataset:
    """Write the files into folder ``given``, fetch them into a data root, and return their source."""
    given.mkdir()
    contents = files()
    for name, content in contents.items():
        (given / f"{name}.gz").write_bytes(gzip.compress(content))
    made = source(contents)
    datasets.fetch_dataset(made, root, copy_from=given)
    return made


def _idx(array: np.ndarray) -> bytes:
    """Encode an array of unsigned bytes as an IDX file."""
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()
