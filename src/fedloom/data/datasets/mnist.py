"""MNIST (LeCun, Cortes and Burges) and data sets in its format, such as Fashion-MNIST (Xiao et al. 2017)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedloom.data import idx
from fedloom.data.datasets.base import Pool, RawDataset


def read_mnist(contents: Mapping[str, bytes]) -> RawDataset:
    """Return the content of the four IDX files."""
    train, test = (
        Pool(
            idx.parse_bytes(contents[f"{part}-images-idx3-ubyte"], f"{part}-images-idx3-ubyte", 3)[:, None],
            idx.parse_bytes(contents[f"{part}-labels-idx1-ubyte"], f"{part}-labels-idx1-ubyte", 1).astype(np.int64),
        )
        for part in ("train", "t10k")
    )
    return RawDataset(train, test)
