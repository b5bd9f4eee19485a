from __future__ import annotations

import io
import json
from collections.abc import Sequence

import numpy as np
import pytest

from fedloom.data.datasets import find_dataset
from fedloom.data.datasets.base import FetchFailed, FetchProgress
from fedloom.data.datasets.cifar import from_pictures, pool_of_files, records
from fedloom.errors import DataError, ExitCode

CIFAR10, CIFAR100 = find_dataset("cifar10"), find_dataset("cifar100")


def record(labels: Sequence[int], red: int, green: int, blue: int) -> bytes:
    """Return one image of one colour, except for its second pixel, which is black."""
    planes = [bytes([value, 0]) + bytes([value]) * 1022 for value in (red, green, blue)]
    return bytes(labels) + b"".join(planes)


def test_a_record_is_labels_then_red_green_and_blue_row_by_row() -> None:
    labels, images = records(record([3], 10, 20, 30) + record([9], 1, 2, 3), "file", 1)
    assert labels.tolist() == [[3], [9]]
    assert images.shape == (2, 3, 32, 32)
    assert images[0, :, 0, 0].tolist() == [10, 20, 30]
    assert images[0, :, 0, 1].tolist() == [0, 0, 0]
    assert images[0, :, 1, 0].tolist() == [10, 20, 30]
    assert images[1, :, 31, 31].tolist() == [1, 2, 3]


def test_cifar10_joins_its_batches_in_order() -> None:
    names = [f"data_batch_{i}.bin" for i in range(1, 6)]
    contents = {name: record([i], i, i, i) for i, name in enumerate(names)} | {"test_batch.bin": record([9], 9, 9, 9)}
    official = CIFAR10.read(contents)
    assert official.train.labels.tolist() == [0, 1, 2, 3, 4]
    assert official.train.inputs[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]
    assert official.test.labels.tolist() == [9]
    assert official.owners is None


def test_cifar100_uses_the_fine_label() -> None:
    contents = {"train.bin": record([19, 99], 1, 1, 1) + record([0, 4], 2, 2, 2), "test.bin": record([7, 0], 3, 3, 3)}
    official = CIFAR100.read(contents)
    assert official.train.labels.tolist() == [99, 4]
    assert official.test.inputs[0, 2, 5, 5] == 3
    assert CIFAR100.spec.classes == len(set(CIFAR100.spec.class_names)) == 100
    assert list(CIFAR100.spec.class_names) == sorted(CIFAR100.spec.class_names)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["0 bytes", "3073"]),
        (record([1], 1, 1, 1)[:-1], ["3072 bytes", "3073"]),
        (record([1, 1], 1, 1, 1), ["3074 bytes", "3073"]),
        (record([10], 1, 1, 1), ["label 10", "0 to 9"]),
    ],
    ids=["empty", "cut", "cifar100", "label"],
)
def test_errors_are_named(content: bytes, words: list[str]) -> None:
    with pytest.raises(DataError) as error:
        pool_of_files({"test_batch.bin": content}, ["test_batch.bin"], 1, 10)
    assert error.value.exit_code == ExitCode.DATA
    for word in ("test_batch.bin", *words):
        assert word in str(error.value)


def test_images_and_lists_are_converted_to_the_official_files() -> None:
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    official, files = {}, {}
    lists: dict[str, list[int]] = {"train": [], "test": []}
    for name in [file.name for file in CIFAR10.files]:
        labels, images = rng.integers(0, 10, 4), rng.integers(0, 256, (4, 3, 1024), dtype=np.uint8)
        official[name] = b"".join(
            bytes([label]) + planes.tobytes() for label, planes in zip(labels, images, strict=True)
        )
        picture = io.BytesIO()
        image.fromarray(images.transpose(0, 2, 1)).save(picture, "PNG")
        files[name.replace(".bin", ".png")] = picture.getvalue()
        lists[name.split("_")[0].replace("data", "train")] += labels.tolist()
    files |= {f"{part}_lables.json": json.dumps(labels).encode() for part, labels in lists.items()}
    reported: list[FetchProgress] = []
    made = from_pictures(
        lambda wanted: ((name, files[name]) for name in wanted), [file.name for file in CIFAR10.files], reported.append
    )
    assert dict(made) == official
    assert reported[-1].doing == "converting test_batch.bin"


def test_an_invalid_image() -> None:
    pytest.importorskip("PIL.Image")
    files = {"train_lables.json": b"[]", "test_lables.json": b"[]", "data_batch_1.png": b"no picture"}
    with pytest.raises(FetchFailed, match=r"data_batch_1\.bin.*damaged"):
        dict(from_pictures(lambda wanted: ((n, files[n]) for n in wanted), ["data_batch_1.bin"], lambda progress: None))
