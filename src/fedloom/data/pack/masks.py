"""Folder of images with masks: ``images/NAME.png`` and ``masks/NAME.png``, whose values are the classes of pixels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedloom.data.listing import files_below, folders_in
from fedloom.data.pack.examples import SPLIT_NAMES, Examples, OnProgress, Request, ValidationErrors, spec_of
from fedloom.data.pack.pixels import FORMATS, ImageStack, UnfitImage, endings, read_picture
from fedloom.data.pack.targets import read_targets
from fedloom.errors import DataError

IMAGES, MASKS = "images", "masks"
"""Names of the two folders."""

MODES = ("1", "L", "P", "I", "I;16")
"""Pillow modes with one number for each pixel."""


def has_masks(folder: Path, depth: int) -> bool:
    """Return True if the folders ``depth`` levels below a folder are ``images`` and ``masks``."""
    names = folders_in(folder)
    if depth:
        return bool(names) and all(has_masks(folder / name, depth - 1) for name in names)
    return {IMAGES, MASKS} <= set(names)


def read_masked(
    folder: Path, depth: int, request: Request, errors: ValidationErrors, on_progress: OnProgress
) -> Examples:
    """Read every image below ``images`` with the mask of the same name below ``masks``.

    ``depth`` is the number of folders above them, for splits and owners. Files that cannot be read or have no
    counterpart are recorded as errors.

    Raise DataError if there is no image.
    """
    pairs = _pairs(folder, depth, errors)
    own = request.own
    stack = ImageStack(None if own is None else own.input_shape, request.resize)
    masks: list[NDArray[np.int64]] = []
    kept: list[tuple[str, ...]] = []
    for done, (key, (image, mask)) in enumerate(pairs.items()):
        on_progress("reading images and masks", done, len(pairs))
        try:
            picture, notes = read_picture(image)
            size = picture.size
            values = _read_mask(mask, size)
            stack.add(picture, notes)
        except UnfitImage as unfit:
            errors.add(unfit.fault, f"{'/'.join(key)}: {unfit.detail}")
            continue
        masks.append(_resized(values, stack.size))
        kept.append(key)
    errors.refuse()
    if not kept:
        raise DataError(
            f"{folder} has no images; put images in {IMAGES} and their masks, of the same names, in {MASKS}"
        )
    x = stack.joined()
    specs = {"": spec_of("pixels", x)}
    needed = None if own is None else own.wanted
    names, outputs = ((), request.outputs) if needed is None else (needed.names, needed.outputs)
    where: Callable[[int], str] = lambda i: "/".join(kept[i])  # noqa: E731
    y, targets, notes = read_targets(
        [np.stack(masks)], "segmentation", specs, where, errors, names=names, outputs=outputs
    )
    examples = Examples(specs, (), x, y, None, where, notes=(*stack.notes(), *notes), targets=targets)
    if depth and all(name.lower() in SPLIT_NAMES for name in folders_in(folder)):
        examples = replace(examples, split=np.array([SPLIT_NAMES[key[0].lower()] for key in kept], dtype=np.int64))
    owners = tuple(key[depth - 1] for key in kept)
    return examples if request.client is None else replace(examples, owners=owners)


def _pairs(folder: Path, depth: int, errors: ValidationErrors) -> Mapping[tuple[str, ...], tuple[Path, Path]]:
    """Return image and mask by folders and name; record images without a mask, and masks without an image."""
    found: dict[str, dict[tuple[str, ...], Path]] = {IMAGES: {}, MASKS: {}}
    known = endings()
    for path in files_below(folder):
        name = path.relative_to(folder)
        steps = name.parts
        if len(steps) <= depth + 1 or steps[depth] not in found or path.suffix.lower() not in known:
            errors.add(f"not an image in a folder {IMAGES} or {MASKS}", str(name))
            continue
        key = (*steps[:depth], *steps[depth + 1 : -1], path.stem)
        if key in found[steps[depth]]:
            errors.add("two files of one name", str(name))
        found[steps[depth]][key] = path
    images, masks = found[IMAGES], found[MASKS]
    for what, one, other in (("image without a mask", images, masks), ("mask without an image", masks, images)):
        errors.add(what, *(str(path.relative_to(folder)) for key, path in one.items() if key not in other))
    return {key: (images[key], masks[key]) for key in images if key in masks}


def _read_mask(path: Path, size: tuple[int, int]) -> NDArray[np.int64]:
    """Return the numbers of a mask, ``[height, width]``; raise UnfitImage if it is not a mask of this size."""
    from PIL import Image

    try:
        with Image.open(path, formats=FORMATS) as mask:
            if mask.mode not in MODES:
                raise UnfitImage("mask with several channels; a mask has one number for each pixel", mask.mode)
            if mask.size != size:
                found = f"{mask.size[1]} x {mask.size[0]}, image {size[1]} x {size[0]}"
                raise UnfitImage("mask of another size (height x width) than its image", found)
            return np.asarray(mask).astype(np.int64)
    except (OSError, SyntaxError, ValueError) as error:
        raise UnfitImage("damaged mask, or not an image", str(error).replace(str(path), path.name)) from error


def _resized(values: NDArray[np.int64], size: tuple[int, int]) -> NDArray[np.int64]:
    """Return a mask resized to (width, height), by nearest neighbours."""
    height, width = values.shape
    if (width, height) == size:
        return values
    rows = (np.arange(size[1]) * 2 + 1) * height // (2 * size[1])
    columns = (np.arange(size[0]) * 2 + 1) * width // (2 * size[0])
    resized: NDArray[np.int64] = values[rows[:, None], columns]
    return resized
