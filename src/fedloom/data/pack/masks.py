"""Folder of images with masks: ``images/NAME.png`` and ``masks/NAME.png``, whose values are the classes of pixels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedloom.core.words import pluralize
from fedloom.data.listing import files_below, folders_in
from fedloom.data.pack.examples import SPLIT_NAMES, Examples, OnProgress, Request, ValidationErrors, listed, spec_of
from fedloom.data.pack.pixels import ImageStack, Picture, UnfitImage, endings, load_picture, read_picture, turned
from fedloom.data.pack.targets import read_targets
from fedloom.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGES, MASKS = "images", "masks"
"""Names of the two folders."""

MODES = ("1", "L", "P", "I", "I;16", "I;16B")
"""Pillow modes with one whole number for each pixel."""

LOSSY = ("JPEG", "MPO", "WEBP", "jpeg", "tiff_jpeg", "webp")
"""Formats, and compressions within a TIFF file, that change the numbers of pixels."""

APPLY = "apply the orientation to the pixels of both files, and remove the tag"


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
    palettes, aligned = _Palettes(), Counter[str]()
    for done, (key, (image, mask)) in enumerate(pairs.items()):
        on_progress("reading images and masks", done, len(pairs))
        try:
            picture = read_picture(image)
            values, how = _read_mask(mask, "/".join(key), picture, palettes)
            stack.add(picture)
        except UnfitImage as unfit:
            errors.add(unfit.fault, f"{'/'.join(key)}: {unfit.detail}")
            continue
        masks.append(_resized(values, stack.size))
        kept.append(key)
        aligned.update(how)
    errors.refuse()
    if not kept:
        raise DataError(
            f"{folder} has no images; put images in {IMAGES} and their masks, of the same names, in {MASKS}"
        )
    x = stack.joined()
    specs = {"": spec_of("pixels", x)}
    needed = None if own is None else own.spec.targets
    names, outputs = ((), request.outputs) if needed is None else (needed.names, needed.outputs)
    where: Callable[[int], str] = lambda i: "/".join(kept[i])  # noqa: E731
    y, targets, notes = read_targets(
        [np.stack(masks)], "segmentation", specs, where, errors, names=names, outputs=outputs
    )
    of_masks = (*(f"{pluralize(count, 'mask')} {how}" for how, count in aligned.items()), *palettes.notes())
    examples = Examples(specs, (), x, y, None, where, notes=(*stack.notes(), *of_masks, *notes), targets=targets)
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


@dataclass
class _Palettes:
    """Colours of the numbers in masks with a palette, each with the first mask that has it."""

    colours: dict[int, tuple[str, str]] = field(default_factory=dict)
    used: set[int] = field(default_factory=set)

    def add(self, mask: Image, values: NDArray[np.int64], name: str) -> None:
        """Add a mask; raise UnfitImage if a number that is used has another colour than in a mask before."""
        if mask.mode != "P":
            return
        self.used |= set(np.unique(values).tolist())
        palette = bytes(mask.getpalette() or ())
        for number in range(len(palette) // 3):
            colour = f"#{palette[3 * number : 3 * number + 3].hex()}"
            other, first = self.colours.setdefault(number, (colour, name))
            if colour != other and number in self.used:
                raise UnfitImage(
                    "palette in which a number has another colour than in another mask; give all masks one palette, "
                    "or save the numbers of classes as greyscale",
                    f"{number} is {colour}, and {other} in {first}",
                )

    def notes(self) -> tuple[str, ...]:
        """Return the colours of the numbers that are used; masks of other clients must have the same."""
        shown = [f"{number} {self.colours[number][0]}" for number in sorted(self.used) if number in self.colours]
        return (f"colours in the palette of the masks: {listed(shown, 24)}",) if shown else ()


def _read_mask(path: Path, name: str, image: Picture, palettes: _Palettes) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Return the numbers of a mask, ``[height, width]``, upright like its image, and a note if their tags differ.

    Raise UnfitImage if it is not a mask of this image.
    """
    mask, _, held = load_picture(path, _check_form)
    fits, note = [mask] if mask.size == image.image.size else [], tuple[str, ...]()
    if held not in (1, image.orientation):
        raise UnfitImage(f"mask with another EXIF orientation than its image; {APPLY}", f"{held}, {image.orientation}")
    if held != image.orientation:
        with_image = turned(mask, image.orientation)
        if with_image.size == image.image.size:
            fits.append(with_image)
        if len(fits) == 2 and not np.array_equal(np.asarray(mask), np.asarray(with_image)):
            raise UnfitImage(
                "image with an EXIF orientation, whose mask has none: was the mask drawn before or after the image was "
                f"turned? {APPLY}",
                f"orientation {image.orientation}",
            )
        note = ("turned with the image, by its EXIF orientation",) if fits and fits[0] is with_image else ()
    if not fits:
        sizes = " x ".join(map(str, mask.size[::-1])), " x ".join(map(str, image.image.size[::-1]))
        raise UnfitImage("mask of another size (height x width) than its image", f"{sizes[0]}, image {sizes[1]}")
    values = np.asarray(fits[0]).astype(np.int64)
    palettes.add(mask, values, name)
    return values, note


def _check_form(mask: Image) -> None:
    """Reject an image that cannot hold the number of each pixel's class."""
    if found := [form for form in (mask.format, mask.info.get("compression")) if form in LOSSY]:
        raise UnfitImage(
            "mask in a lossy format, which changes the numbers of classes; save the original masks as PNG", found[0]
        )
    if mask.mode not in MODES:
        raise UnfitImage(
            "mask with several channels or fractions; a mask has one whole number for each pixel, its class", mask.mode
        )


def _resized(values: NDArray[np.int64], size: tuple[int, int]) -> NDArray[np.int64]:
    """Return a mask resized to (width, height), by nearest neighbours."""
    height, width = values.shape
    if (width, height) == size:
        return values
    rows = (np.arange(size[1]) * 2 + 1) * height // (2 * size[1])
    columns = (np.arange(size[0]) * 2 + 1) * width // (2 * size[0])
    resized: NDArray[np.int64] = values[rows[:, None], columns]
    return resized
