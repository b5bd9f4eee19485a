"""In-memory data sets such as torchvision's. Images and labels are kept exactly, or rejected with their index."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedloom.core.words import pluralize
from fedloom.data.pack.arrays import MOST_CHANNELS
from fedloom.data.pack.pixels import PALETTES, UnfitImage, check_depth, check_frames, orientation
from fedloom.data.values import as_array
from fedloom.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

AS_THEY_ARE = ("L", "LA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV")
"""Pillow modes whose channels are kept unchanged, as ``ToTensor`` keeps them."""

STACKED = (
    "stack the examples: x, y = next(iter(DataLoader(dataset, len(dataset)))); pad graphs to one size, with x a dict "
    "such as {'nodes': [n, nodes, features], 'edges': [n, nodes, nodes]}"
)
"""Advice for examples that are objects."""

READ_TWICE = 16
"""Images that are read twice to find random transforms."""

ROUNDING = 1e-3
"""Maximum deviation of a float from a multiple of 1/255, as a fraction of that step."""


def read_items(dataset: Any, name: str) -> tuple[NDArray[np.uint8], NDArray[Any], tuple[str, ...]]:
    """Return the images of a data set ``[n, channels, height, width]``, its labels ``[n]``, and notes.

    Raise DataError if an item is not such a pair, image shapes differ, or a pixel or label cannot be kept exactly.

    Parameters
    ----------
    dataset
        Items are pairs of an image (a Pillow image, a tensor ``[channels, height, width]``, or an array ``[height,
        width, channels]``; the channel axis may be omitted for one channel) and a label: a whole number, or a name.
    name
        Name of the data set in errors.
    """
    images: list[NDArray[np.uint8]] = []
    labels: list[Any] = []
    notes: Counter[str] = Counter()
    for i, (image, label) in enumerate(_pairs(dataset, name)):
        pixels, changes = _pixels(image, f"{name}[{i}]")
        if images and pixels.shape != images[0].shape:
            raise DataError(
                f"{name}[{i}]: is an image of shape {list(pixels.shape)}, but the first one has "
                f"{list(images[0].shape)}; resize all images to one size"
            )
        images.append(pixels)
        labels.append(_label(label, f"{name}[{i}]"))
        notes.update(changes)
    if len({isinstance(label, str) for label in labels}) > 1:
        raise DataError(f"{name}: has labels that are numbers and labels that are names; use one of the two for all")
    return np.stack(images), np.array(labels), tuple(f"{pluralize(n, 'image')} {note}" for note, n in notes.items())


def read_dataset(dataset: Any, name: str) -> tuple[Any, Any, tuple[str, ...]]:
    """Return the inputs of a data set of torch, one tensor or several by name, its targets, and notes.

    Images of Pillow and their labels are read as by :func:`read_items`.

    Raise DataError if an item is not a pair (x, y), or the items do not have the same shape.
    """
    from torch import Tensor
    from torch.utils.data import default_collate

    items = list(_pairs(dataset, name))
    if _is_pillow(items[0][0]):
        return read_items(items, name)
    try:
        x, y = default_collate(items)
    except (TypeError, RuntimeError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{name}: its items cannot be stacked ({reason}); pad them to one shape") from error
    has_names = isinstance(y, tuple | list) and all(isinstance(label, str) for label in y)
    if not isinstance(x, Tensor | Mapping) or not (isinstance(y, Tensor) or has_names):
        types = " and ".join(type(each).__name__ for each in items[0])
        raise DataError(f"{name}: an item is a pair of {types}; give a tensor, or a dict of tensors, and its target")
    return x, y, ()


def _pairs(dataset: Any, name: str) -> Iterator[Sequence[Any]]:
    """Yield the items of a data set.

    Raise DataError if it is none, has no items or others than pairs, has another length than it states, or yields
    another input when read twice, because of a random transform.
    """
    try:
        length = len(dataset) if hasattr(dataset, "__len__") else None
    except TypeError:  # such as a data loader over a stream
        length = None
    if isinstance(dataset, str | bytes | Mapping | Set) or (length is None and not hasattr(dataset, "__iter__")):
        raise DataError(f"{name}: is a {type(dataset).__name__}; it must be a data set of pairs (x, y)")
    for i in range(min(READ_TWICE, length or 0)):  # before any is converted: a random transform explains other errors
        if _differs(dataset, i):
            raise DataError(
                f"{name}[{i}]: is a different input each time it is read, and only one would be kept.",
                hint="leave out its random transforms, and give them as augment=, which changes only training images",
                key=name,
            )
    count = 0
    for item in dataset if hasattr(dataset, "__iter__") else _by_place(dataset, length or 0):
        place, count = f"{name}[{count}]", count + 1
        if length is not None and count > length:
            break
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise DataError(f"{place}: is a {type(item).__name__}; it must be a pair (x, y)", hint=STACKED)
        yield item
    if not count or length not in (None, count):
        hint = f" than the {length:,} of its length; correct its length" if length else ""
        raise DataError(f"{name} has {'no' if not count else 'more' if count > (length or 0) else 'fewer'} items{hint}")


def _differs(dataset: Any, place: int) -> bool:
    """Return True if an input is another one when it is read again."""
    try:
        inputs = (dataset[place][0] for _ in range(2))
        one, other = ([*map(np.asarray, x.values() if isinstance(x, Mapping) else [x])] for x in inputs)
    except Exception:  # the iteration reports errors
        return False
    return not all(np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in zip(one, other, strict=True))


def _by_place(dataset: Any, length: int) -> Iterator[Any]:
    for place in range(length):
        try:
            yield dataset[place]
        except IndexError:  # its length is wrong
            return


def _is_pillow(image: Any) -> bool:
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(image, pillow.Image)


def _pixels(image: Any, place: str) -> tuple[NDArray[np.uint8], tuple[str, ...]]:
    """Return pixels ``[channels, height, width]``, and notes."""
    if _is_pillow(image):
        values, notes = _pillow_pixels(image, place)
        return (values[:, :, None] if values.ndim == 2 else values).transpose(2, 0, 1), notes
    values = _shaped(as_array(image, place), hasattr(image, "detach"), place)
    if values.dtype.kind == "b":
        return values.astype(np.uint8) * np.uint8(255), ("of booleans became 0 and 255",)
    if values.dtype.kind == "f":
        return _unscaled(values, place), ()
    if values.dtype.kind not in "iu":
        raise DataError(f"{place}: is an image of type {values.dtype}; pixels must be whole numbers from 0 to 255")
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > 255:
        raise DataError(
            f"{place}: has pixels from {low} to {high}, which 8 bits cannot hold; scale them to 0 to 255 first"
        )
    return values.astype(np.uint8), ()


def _pillow_pixels(image: Image, place: str) -> tuple[NDArray[np.uint8], tuple[str, ...]]:
    """Return the pixels of a Pillow image, ``[height, width]`` or ``[height, width, channels]``, and notes."""
    notes: list[str] = []
    try:
        check_depth(image)
        if check_frames(image):
            notes.append("had further images; only the current one was taken")
    except UnfitImage as unfit:
        raise DataError(f"{place}: {unfit.detail}: {unfit.fault}") from None
    if image.mode in PALETTES:
        mode = "RGBA" if image.has_transparency_data else "RGB"
        notes.append(f"converted from a palette to {mode}")
        image = image.convert(mode)
    elif image.mode == "1":
        image = image.convert("L")
    elif image.mode not in AS_THEY_ARE:
        raise DataError(f"{place}: is an image of mode {image.mode}; convert it to RGB, or to another mode of 8 bits")
    values = np.asarray(image, dtype=np.uint8)
    if orientation(image) != 1:
        notes.append(
            "had an EXIF orientation, which was not applied, and may be rotated; "
            "PIL.ImageOps.exif_transpose turns them upright"
        )
    return values, tuple(notes)


def _shaped(values: NDArray[Any], is_tensor: bool, place: str) -> NDArray[Any]:
    """Return ``[channels, height, width]``: tensors have their channels first, other arrays last."""
    if values.ndim == 2:
        values = values[None] if is_tensor else values[:, :, None]
    if values.ndim != 3 or not values.size:
        raise DataError(
            f"{place}: is an image of shape {list(values.shape)}; it must have a height and a width. Give other inputs "
            "to Federated.from_arrays."
        )
    first, last = values.shape[0], values.shape[2]
    if is_tensor and first > MOST_CHANNELS >= last:
        raise DataError(
            f"{place}: is a tensor of shape {list(values.shape)}; a tensor must be [channels, height, width], as "
            "image.permute(2, 0, 1) makes it"
        )
    if not is_tensor and last > MOST_CHANNELS >= first:
        raise DataError(
            f"{place}: is an array of shape {list(values.shape)}; an array must be [height, width, channels], as "
            "image.transpose(1, 2, 0) makes it"
        )
    return values if is_tensor else values.transpose(2, 0, 1)


def _unscaled(values: NDArray[Any], place: str) -> NDArray[np.uint8]:
    """Return pixels that ``ToTensor`` has divided by 255."""
    levels = values.astype(np.float64) * 255
    with np.errstate(invalid="ignore"):
        whole = np.round(levels)
        exact = (np.abs(levels - whole) < ROUNDING) & (whole >= 0) & (whole <= 255)
    if not exact.all():
        value = values[~exact].reshape(-1)[0]
        raise DataError(
            f"{place}: has a pixel of {value:g}, which is not a multiple of 1/255 from 0 to 1; leave out the "
            "transform, or use ToTensor alone: pixels are standardized by the federation (whole numbers from 0 to 255 "
            "must be of an integer type)"
        )
    return whole.astype(np.uint8)


def _label(label: Any, place: str) -> int | str:
    allowed = "a label must be one whole number, or one name"
    values = as_array(label, f"{place}: the label")
    if values.size != 1:
        raise DataError(f"{place}: has {values.size} labels; {allowed}")
    value = values.reshape(-1)[0]
    if values.dtype.kind == "U" and str(value).strip():
        return str(value).strip()
    if values.dtype.kind not in "iuf" or not abs(value) <= np.iinfo(np.int32).max or value != int(value):
        raise DataError(f"{place}: has the label {value!r:.80}; {allowed}")
    return int(value)
