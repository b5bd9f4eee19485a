"""``Federated.from_torchvision``: pixels and labels are stored exactly, or rejected with the example's position."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from facts import tells
from PIL import Image

import fedloom
from fedloom.data.newcomer import Newcomer
from fedloom.data.pack.items import read_items
from fedloom.data.problem import Problem
from fedloom.data.spec import DataSpec, Normalization
from fedloom.errors import DataError

RNG = np.random.default_rng(0)
SCHEME = {"scheme": "iid", "clients": 2}


def image(*shape: int) -> Any:
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def refusal(dataset: Any) -> str:
    with pytest.raises(DataError) as caught:
        fedloom.Federated.from_torchvision(dataset, SCHEME)
    return str(caught.value)


def first(given: Any) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the stored pixels of an image, and notes."""
    x, _, notes = read_items([(given, 0)], "dataset")
    assert x.dtype == np.uint8
    return x[0], notes


# --- pixels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        (lambda: Image.fromarray(np.full((4, 5), 300, np.uint16)), ("8 bits",)),
        (lambda: Image.fromarray(np.full((4, 5), 300, np.int32)), ("8 bits",)),
        (lambda: Image.fromarray(np.full((4, 5), 0.5, np.float32)), ("8 bits",)),
        (lambda: Image.new("LAB", (5, 4)), ("LAB",)),
        (lambda: torch.full((1, 4, 5), 256), ("256", "255")),
        (lambda: torch.full((1, 4, 5), -1), ("-1", "255")),
        (lambda: np.full((4, 5), 4095, np.uint16), ("4095", "255")),
        (lambda: np.full((4, 5), -1, np.int8), ("-1", "255")),
        (lambda: torch.full((1, 4, 5), 0.5), ("0.5", "255")),
        (lambda: torch.full((1, 4, 5), 200.0), ("200", "ToTensor")),
        (lambda: torch.full((1, 4, 5), float("nan")), ("nan", "ToTensor")),
        (lambda: torch.full((1, 4, 5), 1j), ("complex64",)),
        (lambda: torch.zeros((8, 9, 3), dtype=torch.uint8), ("[8, 9, 3]", "permute(2, 0, 1)")),
        (lambda: np.zeros((3, 8, 9), np.uint8), ("[3, 8, 9]", "transpose(1, 2, 0)")),
        (lambda: torch.zeros((2, 1, 4, 5), dtype=torch.uint8), ("[2, 1, 4, 5]",)),
        (lambda: torch.zeros((1, 0, 5)), ("[1, 0, 5]",)),
        (lambda: np.array([["a", "b"]]), ("<U1",)),
        (lambda: torch.full((1, 4, 5), 100 / 255, dtype=torch.bfloat16), ("0.392578", "255")),
        (lambda: {"pixels": 1}, ("[]",)),
        (lambda: None, ("[]",)),
    ],
)
def test_pixels_that_would_change_are_rejected_and_named(given: Callable[[], Any], facts: tuple[str, ...]) -> None:
    dataset = [(given(), i % 2) for i in range(2)]
    assert tells(refusal(dataset), "dataset[0]", *facts)


@pytest.mark.parametrize(
    "given",
    [
        lambda pixels: Image.fromarray(pixels),
        lambda pixels: pixels,
        lambda pixels: pixels.astype(np.int16),
        lambda pixels: torch.from_numpy(pixels.copy()).permute(2, 0, 1),
        lambda pixels: torch.from_numpy(pixels.copy()).permute(2, 0, 1).long(),
        lambda pixels: torch.from_numpy(pixels.copy()).permute(2, 0, 1).float().div(255),
        lambda pixels: pixels / 255,
    ],
)
@pytest.mark.parametrize("channels", [3, 4])
def test_every_form_of_an_image_gives_the_same_pixels(given: Callable[[Any], Any], channels: int) -> None:
    pixels = image(6, 7, channels)
    kept, notes = first(given(pixels))
    assert np.array_equal(kept, pixels.transpose(2, 0, 1))
    assert not notes


@pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV"])
def test_pillow_images_are_stored_as_by_totensor(mode: str) -> None:
    from torchvision.transforms import ToTensor

    channels = len(Image.new(mode, (1, 1)).getbands())
    shown = Image.frombytes(mode, (7, 6), image(6, 7, channels).tobytes())
    assert np.array_equal(first(shown)[0], first(ToTensor()(shown))[0])


def test_bits_and_booleans_are_black_and_white() -> None:
    mask = RNG.random((6, 7)) < 0.5
    white = (mask * 255).astype(np.uint8)[None]
    for given in (Image.fromarray(mask), mask, torch.from_numpy(mask)):
        kept, notes = first(given)
        assert np.array_equal(kept, white)
        assert len(notes) == (0 if isinstance(given, Image.Image) else 1)


def test_a_palette_is_converted_with_a_note() -> None:
    colours = Image.fromarray(RNG.choice(np.array([10, 200], np.uint8), (6, 7, 3)))
    kept, notes = first(colours.quantize(8))
    assert np.array_equal(kept, np.asarray(colours).transpose(2, 0, 1))
    assert tells(notes[0], "1 image", "palette", "RGB")


def test_a_spectral_tensor_keeps_its_channels() -> None:
    assert first(torch.zeros((13, 8, 8), dtype=torch.uint8))[0].shape == (13, 8, 8)
    assert first(np.zeros((9, 8, 13), np.uint8))[0].shape == (13, 9, 8)


def test_orientation_and_frames_in_memory_are_reported(tmp_path: Path) -> None:
    tag = Image.Exif()
    tag[0x0112] = 6
    pixels = image(6, 7, 3)
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=tag)
    kept, notes = first(Image.open(tmp_path / "a.png"))
    assert np.array_equal(kept, pixels.transpose(2, 0, 1))  # the dataset determines the layout of its images
    assert tells(notes[0], "1 image", "EXIF")
    Image.fromarray(pixels).save(
        tmp_path / "a.gif", save_all=True, append_images=[Image.fromarray(pixels[::-1].copy())]
    )
    assert tells(refusal([(Image.open(tmp_path / "a.gif"), 0)]), "dataset[0]", "2", "GIF", "frames")


def test_notes_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = [(RNG.random((6, 7)) < 0.5, i % 2) for i in range(40)]
    with caplog.at_level(logging.WARNING, "fedloom.data"):
        fedloom.Federated.from_torchvision(dataset, SCHEME, root=tmp_path)
    assert [tells(record.getMessage(), "dataset", "40 images", "booleans") for record in caplog.records] == [True]


# --- labels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "label",
    [1, np.int32(1), np.array([1]), np.array(1), torch.tensor(1), torch.tensor([1]), torch.tensor([[1]]), 1.0, [1]],
)
def test_a_single_integer_is_a_label(label: Any) -> None:
    assert read_items([(image(4, 5), label)], "dataset")[1].tolist() == [1]


def test_strings_are_labels(tmp_path: Path) -> None:
    dataset = [(image(4, 5), ("dog", "cat")[i % 2]) for i in range(40)]
    manifest = fedloom.Federated.from_torchvision(dataset, SCHEME, root=tmp_path).open().manifest
    assert manifest.spec.class_names == ("cat", "dog")


@pytest.mark.parametrize(
    "label",
    [0.7, np.float32(0.5), float("nan"), float("inf"), torch.tensor([0, 1]), np.zeros(14), {"boxes": []}, {}, None, "",
     True, torch.tensor(True), 2**40, 2**70, b"cat", 1j, [[1], [1, 2]], (1, "a")],
)  # fmt: skip
def test_targets_other_than_one_label_are_rejected_and_named(label: Any) -> None:
    dataset = [(image(4, 5), 1), (image(4, 5), label)]
    assert tells(refusal(dataset), "dataset[1]", "label")


def test_numbers_and_names_cannot_be_mixed() -> None:
    assert tells(refusal([(image(4, 5), 1), (image(4, 5), "cat")]), "numbers", "names")


# --- data sets --------------------------------------------------------------------------------------------------------


class Indexed:
    """Dataset by index that reports a length beyond its end."""

    def __init__(self, says: int, has: int) -> None:
        self._says, self._has = says, has

    def __len__(self) -> int:
        return self._says

    def __getitem__(self, place: int) -> tuple[Any, int]:
        if place >= self._has:
            raise IndexError("no more")
        return np.full((4, 5), place, np.uint8), place % 2


class Iterated(Indexed):
    """Dataset with the same examples that supports iteration."""

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        return (self[place] for place in range(self._has))


@pytest.mark.parametrize(("kind", "has"), [(Indexed, 3), (Iterated, 3), (Iterated, 6), (Iterated, 10**9)])
def test_a_dataset_of_the_wrong_length_is_rejected(kind: type[Indexed], has: int) -> None:
    dataset = Indexed(5, has) if kind is Indexed else Iterated(5, has)
    assert tells(refusal(dataset), "dataset", 5, "length")


def test_a_bug_in_the_dataset_is_raised() -> None:
    class Broken(Indexed):
        def __getitem__(self, place: int) -> tuple[Any, int]:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fedloom.Federated.from_torchvision(Broken(5, 5), SCHEME)


@pytest.mark.parametrize("dataset", [3, None, "mnist", {"x": 1}, {1, 2}, object()])
def test_objects_that_are_not_datasets_are_rejected(dataset: Any) -> None:
    assert tells(refusal(dataset), "dataset", type(dataset).__name__)


@pytest.mark.parametrize("item", [3, "ab", (1, 2, 3), {"image": 1, "label": 2}])
def test_items_that_are_not_pairs_are_rejected(item: Any) -> None:
    assert tells(refusal([item]), "dataset[0]", type(item).__name__)


def test_images_of_several_shapes_are_rejected() -> None:
    assert tells(refusal([(image(4, 5), 0), (image(4, 6), 0)]), "dataset[1]", "[1, 4, 6]", "[1, 4, 5]")


# --- newcomers --------------------------------------------------------------------------------------------------------

WANTED = Problem("photos", DataSpec.single("pixels", (1, 4, 4), ("a", "b"), Normalization((0.5,), (0.5,))), clients=1)


@pytest.mark.parametrize("dtype", ["u1", "<u2", ">u2", "u4", "u8", "i2", ">i4", "i8"])
def test_new_clients_pixels_may_have_any_integer_type(dtype: str) -> None:
    x = RNG.integers(0, 256, (3, 1, 4, 4))
    taken = Newcomer.from_arrays("eve", x.astype(dtype), np.array([0, 1, 1]).astype(dtype), WANTED).client("eve").train
    same = Newcomer.from_arrays("eve", x.astype(np.uint8), [0, 1, 1], WANTED).client("eve").train
    assert torch.equal(taken.x, same.x)
    assert taken.y.tolist() == [0, 1, 1]
    if np.dtype(dtype).itemsize > 1:
        x[1, 0, 2, 3] = 300
        with pytest.raises(DataError) as caught:
            Newcomer.from_arrays("eve", x.astype(dtype), None, WANTED)
        assert tells(str(caught.value), 255, "x", 300)


def test_a_pixel_model_rejects_floats_that_would_be_scaled_twice(tmp_path: Path) -> None:
    task = {
        "name": "own",
        "model": {"name": "logistic"},
        "algorithm": {"name": "fedavg", "local": {"steps": 1}},
        "federation": {"rounds": 1, "clients_per_round": 1},
        "runtime": {"workers": 0},
    }
    data = fedloom.Federated.from_torchvision([(image(4, 5), i % 2) for i in range(60)], SCHEME, root=tmp_path)
    run = fedloom.run(task, data=data, out=tmp_path / "run", report=False, progress=False)
    model = run.models("client-0000")
    x = torch.from_numpy(image(2, 1, 4, 5))
    assert torch.equal(model(x), model(x.long()))
    for given in (x.float() / 255, x.numpy() / 255, x > 0):
        with pytest.raises(DataError) as caught:
            model(given)
        assert tells(str(caught.value), "pixels", "255")
