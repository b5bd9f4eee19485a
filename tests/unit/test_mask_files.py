"""Masks in files: orientation, lossy formats, palettes, and the numbers of classes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from facts import mentions, refusing
from numpy.typing import NDArray
from PIL import Image
from typer.testing import CliRunner

import fedloom
from fedloom.cli.main import app
from fedloom.data.pack import PackedClient, PackSettings, pack
from fedloom.data.pack.examples import Request
from fedloom.errors import DataError

N = 12
ORIENTATION = 0x0112
STORED: dict[int, Callable[[NDArray[Any]], NDArray[Any]]] = {
    2: np.fliplr,
    3: lambda image: np.rot90(image, 2),
    4: np.flipud,
    5: lambda image: image.swapaxes(0, 1),
    6: lambda image: np.rot90(image, 1),
    7: lambda image: np.rot90(image, 2).swapaxes(0, 1),
    8: lambda image: np.rot90(image, -1),
}
"""Pixels as a file stores them, from upright ones (EXIF 2.3, table 9)."""


def upright(i: int, height: int, width: int) -> NDArray[np.uint8]:
    """Return a mask without any symmetry."""
    mask = np.zeros((height, width), np.uint8)
    mask[:3, : 5 + i % 6] = 1
    mask[3 + i // 6, 1] = 1
    return mask


def save(path: Path, values: NDArray[Any], orientation: int = 1, **options: Any) -> None:
    """Write an image that a viewer shows in an orientation."""
    tag = Image.Exif()
    tag[ORIENTATION] = orientation
    path.parent.mkdir(parents=True, exist_ok=True)
    exif = {} if orientation == 1 else {"exif": tag}
    Image.fromarray(np.ascontiguousarray(values)).save(path, **exif, **options)


def photos(
    folder: Path,
    held: int,
    of_mask: int,
    drawn: Callable[[NDArray[Any]], NDArray[Any]],
    size: tuple[int, int],
    ending: str = "png",
) -> None:
    """Write images that are bright where their masks are 1; ``drawn`` returns the pixels of a mask's file."""
    for i in range(N):
        mask = upright(i, *size)
        bright = STORED[held](np.repeat(mask[..., None] * np.uint8(200), 3, 2))
        save(folder / f"images/{i}.png", bright, held)
        save(folder / f"masks/{i}.{ending}", drawn(mask), of_mask)


def overlap(packed: Path) -> float:
    """Return the fraction of pixels that are bright exactly where the mask is 1."""
    tensors = safetensors.numpy.load_file(packed / "shard.safetensors")
    return float(((tensors["train_x"][:, 0] > 100) == (tensors["train_y"] == 1)).mean())


@pytest.mark.parametrize("held", sorted(STORED))
@pytest.mark.parametrize("ending", ["png", "tif"])
def test_masks_are_turned_with_their_images(held: int, ending: str, tmp_path: Path) -> None:
    photos(tmp_path / "m", held, held, STORED[held], (9, 14), ending)
    pack(tmp_path / "m", tmp_path / "out", PackSettings())
    assert overlap(tmp_path / "out") == 1


def test_the_size_of_a_mask_without_a_tag_shows_that_it_was_drawn_upright(tmp_path: Path) -> None:
    photos(tmp_path / "m", 6, 1, np.asarray, (9, 14))
    pack(tmp_path / "m", tmp_path / "out", PackSettings())
    assert overlap(tmp_path / "out") == 1


@pytest.mark.parametrize(("held", "size"), [(6, (9, 9)), (3, (9, 14)), (6, (9, 14))])
def test_a_mask_that_may_have_been_drawn_in_two_ways_is_rejected(
    held: int, size: tuple[int, int], tmp_path: Path
) -> None:
    photos(tmp_path / "m", held, 1, STORED[held], size)
    with refusing(DataError, "12 places", "EXIF", f"mask 1, image {held}"):
        pack(tmp_path / "m", tmp_path / "out", PackSettings())
    assert not (tmp_path / "out").exists()


def test_a_mask_of_another_orientation_is_rejected(tmp_path: Path) -> None:
    photos(tmp_path / "m", 6, 8, STORED[8], (9, 9))
    with refusing(DataError, "12 places", "EXIF", "mask 8, image 6"):
        pack(tmp_path / "m", tmp_path / "out", PackSettings())


def masked(folder: Path, make: Callable[[int, NDArray[Any]], Image.Image], ending: str = "png", **options: Any) -> Path:
    """Write noise, and masks with the classes 0, 1 and 2 as ``make`` draws them."""
    rng = np.random.default_rng(0)
    for i in range(N):
        save(folder / f"images/{i}.png", rng.integers(0, 256, (16, 16, 3)).astype(np.uint8))
        (folder / "masks").mkdir(exist_ok=True)
        make(i, rng.integers(0, 3, (16, 16)).astype(np.uint8)).save(folder / f"masks/{i}.{ending}", **options)
    return folder


def packed(folder: Path, out: Path, **request: Any) -> PackedClient:
    """Pack a folder of images and masks."""
    return pack(folder, out, PackSettings(request=Request(**request)))


@pytest.mark.parametrize(
    ("ending", "options", "named"),
    [("jpg", {}, "JPEG"), ("webp", {"lossless": True}, "WEBP"), ("tif", {"compression": "jpeg"}, "jpeg")],
)
def test_lossy_masks_are_rejected(ending: str, options: dict[str, Any], named: str, tmp_path: Path) -> None:
    masked(tmp_path / "m", lambda i, mask: Image.fromarray(mask // 2 * 255), ending, **options)
    with refusing(DataError, "lossy", named, "PNG"):
        packed(tmp_path / "m", tmp_path / "out")


def test_masks_of_several_pages_are_rejected(tmp_path: Path) -> None:
    pages = [Image.fromarray(np.ones((16, 16), np.uint8))]
    masked(tmp_path / "m", lambda i, mask: Image.fromarray(mask), "tif", save_all=True, append_images=pages)
    with refusing(DataError, "pages", "TIFF"):
        packed(tmp_path / "m", tmp_path / "out")


@pytest.mark.parametrize("ending", ["tif", "bmp", "gif", "pgm", "tga", "png"])
def test_lossless_masks_keep_their_numbers(ending: str, tmp_path: Path) -> None:
    drawn: dict[bytes, NDArray[Any]] = {}

    def make(i: int, mask: NDArray[Any]) -> Image.Image:
        drawn[mask.tobytes()] = mask
        return Image.fromarray(mask)

    packed(masked(tmp_path / "m", make, ending), tmp_path / "out", outputs=3)
    kept = safetensors.numpy.load_file(tmp_path / "out/shard.safetensors")["train_y"]
    assert {mask.tobytes() for mask in kept} <= set(drawn)


RED, GREEN = [255, 0, 0], [0, 255, 0]


def coloured(mask: NDArray[Any], *colours: list[int]) -> Image.Image:
    """Return a mask with a palette, whose number 0 is black."""
    image = Image.new("P", mask.shape[::-1])
    image.putdata(mask.flatten().tolist())
    image.putpalette([0, 0, 0, *(value for colour in colours for value in colour)])
    return image


def test_palettes_in_another_order_are_rejected(tmp_path: Path) -> None:
    swap = np.array([0, 2, 1], np.uint8)
    masked(tmp_path / "m", lambda i, m: coloured(swap[m], GREEN, RED) if i % 2 else coloured(m, RED, GREEN))
    with refusing(DataError, "6 places", "palette", "1 is #00ff00, and #ff0000 in 0"):
        packed(tmp_path / "m", tmp_path / "out")
    for i, owner in ((0, "ann"), (1, "bob")):
        masked(tmp_path / "owned" / owner, lambda _, m, i=i: coloured(m, *((RED, GREEN) if i else (GREEN, RED))))
    section = {"dataset": "folder", "source": {"path": str(tmp_path / "owned"), "client": "folder"}}
    with refusing(DataError, "12 places", "palette", "ann/0"):
        fedloom.Federated({**section, "root": str(tmp_path), "partition": {"scheme": "natural"}}).open()


def test_one_palette_is_noted(tmp_path: Path) -> None:
    def make(i: int, mask: NDArray[Any]) -> Image.Image:
        image = coloured(mask, RED, GREEN) if i % 2 else coloured(mask % 2, RED)  # without colours that are not used
        image.info["transparency"] = 0
        return image

    done = packed(masked(tmp_path / "m", make), tmp_path / "out")
    assert any(mentions(note, "0 #000000, 1 #ff0000", "2 #00ff00") for note in done.notes)
    assert done.card.spec.targets.outputs == 3


def numbered(*numbers: int) -> Callable[[int, NDArray[Any]], Image.Image]:
    """Return how to draw the classes 0, 1 and 2 as these numbers."""
    kind = np.uint16 if max(numbers) > 255 else np.uint8
    return lambda i, mask: Image.fromarray(np.array(numbers, kind)[mask])


@pytest.mark.parametrize("numbers", [(0, 127, 255), (0, 85, 170), (7, 300, 26200), (0, 2, 255), (1, 2, 255)])
def test_the_number_of_classes_is_asked_for(numbers: tuple[int, ...], tmp_path: Path) -> None:
    masked(tmp_path / "m", numbered(*numbers))
    with refusing(DataError, "outputs", *numbers):
        packed(tmp_path / "m", tmp_path / "out")
    most = max(numbers) + 1
    done = packed(tmp_path / "m", tmp_path / "whole", outputs=most)
    assert done.card.spec.targets.outputs == most
    kept = safetensors.numpy.load_file(tmp_path / "whole/shard.safetensors")["train_y"]
    assert set(np.unique(kept).tolist()) == set(numbers)
    assert not any("255" in note for note in done.notes)


def test_the_command_states_the_number_of_classes(tmp_path: Path) -> None:
    masked(tmp_path / "m", numbered(0, 2, 255))
    done = CliRunner().invoke(
        app, ["data", "pack", str(tmp_path / "m"), "--out", str(tmp_path / "out"), "--set", "outputs=3"]
    )
    assert done.exit_code == 0
    assert mentions(done.output, "segmentation of 3 outputs", "255")


@pytest.mark.parametrize("numbers", [(0, 127, 255), (0, 2, 255), (3, 4000, 26200)])
def test_it_is_asked_for_in_arrays_too(numbers: tuple[int, ...], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (24, 8, 8)).astype(np.uint8)
    y = np.array(numbers)[rng.integers(0, 3, (24, 8, 8))]
    with refusing(DataError, "outputs", *numbers):
        fedloom.Federated.from_arrays({"a": (x, y)}, root=tmp_path)
    grey = rng.integers(0, 256, (24, 8, 8))  # a photo, and no mask
    grey[0].flat[:64], grey[1].flat[:64] = range(64), range(64, 128)
    grey[2].flat[:64], grey[3].flat[:64] = range(128, 192), range(192, 256)
    with refusing(DataError, "outputs", 255):
        fedloom.Federated.from_arrays({"a": (x, grey)}, task="segmentation", root=tmp_path)
