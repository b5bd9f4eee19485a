"""Folder of images by class, laid out like torchvision's ``ImageFolder``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedloom.core.words import composed, pluralize
from fedloom.data.listing import files_below, folders_in
from fedloom.data.pack.examples import SPLIT_NAMES, Examples, Request, Tell, ValidationErrors, listed
from fedloom.data.pack.pixels import GREY, UnfitImage, endings, read_picture
from fedloom.data.values import found_classes
from fedloom.errors import DataError, ExperimentError, argument

if TYPE_CHECKING:
    from PIL.Image import Image


def read_images(folder: Path, request: Request, errors: ValidationErrors, tell: Tell) -> Examples:
    """Read every image below a folder: ``CLASS/...``, or ``train/CLASS/...`` and so on.

    Hidden files and those that operating systems leave behind are skipped; links to folders are followed. With
    ``client``, the owners' folders are above those of the classes. Without ``data.own``, the images are greyscale if
    all of them are, else RGB, and have the size of the first.

    Raise ExperimentError if ``client`` is neither None nor ``folder``, Pillow is not installed, or the experiment asks
    for inputs other than images; DataError if there is no image, an image is invalid, or a folder cannot be read.
    """
    _check_request(folder, request)
    own = request.own
    known = endings()
    files = list(files_below(folder))
    given = _are_splits(folder, () if own is None else own.classes)
    depth = int(given) + int(request.client is not None)
    taken = _Taken(None if own is None else own.input_shape, request.resize)
    owners: list[str] = []
    labels: list[str] = []
    splits: list[int] = []
    kept: list[Path] = []
    for done, path in enumerate(files):
        tell("reading images", done, len(files))
        name = path.relative_to(folder)  # as shown in errors, which start with the folder
        steps = tuple(map(composed, name.parts))
        label = steps[depth] if len(steps) > depth + 1 else None
        try:
            if given and len(steps) == 1:
                raise UnfitImage("an image outside the folders of splits", "")
            _check_place(path, label, request, known)
            taken.add(*read_picture(path))
        except UnfitImage as unfit:
            errors.add(unfit.fault, f"{name}: {unfit.detail}" if unfit.detail else str(name))
            continue
        labels.append(label or "")
        owners.append(steps[depth - 1] if request.client is not None else "")
        splits.append(SPLIT_NAMES[steps[0].lower()] if given else 0)
        kept.append(path)
    errors.refuse()
    if not kept:
        raise DataError(f"{folder} has no images; put images below it as CLASS/NAME.png")
    empty = [] if not request.labelled else [str(path.relative_to(folder)) for path in _empty(folder, depth, kept)]
    classes = own.classes if own is not None else found_classes(labels) if request.labelled else ()
    place = {composed(name): i for i, name in enumerate(classes)}
    x = taken.joined()
    return Examples(
        kind="pixels",
        classes=classes,
        x=x,
        y=np.array([place[label] for label in labels], dtype=np.int64) if request.labelled else None,
        split=np.array(splits, dtype=np.int64) if given else None,
        where=lambda i: str(kept[i]),
        notes=(*taken.notes(), *([f"folders without an image, left out: {listed(empty)}"] if empty else [])),
        owners=None if request.client is None else tuple(owners),
    )


def _empty(folder: Path, depth: int, kept: Sequence[Path]) -> Iterator[Path]:
    """Yield the folders of classes, ``depth`` below a folder, and those above them, from which no image was kept."""
    full = {above for path in kept for above in path.parents}
    for name in folders_in(folder):
        if folder / name not in full:
            yield folder / name
        elif depth:
            yield from _empty(folder / name, depth - 1, kept)


def _check_request(folder: Path, request: Request) -> None:
    """Reject requests that a folder of images cannot satisfy, and an installation without Pillow."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise ExperimentError(
            f"reading the images in {folder} needs Pillow, which is not installed", hint="pip install 'fedloom[vision]'"
        ) from None
    if request.client not in (None, "folder"):
        raise ExperimentError(f"client: {request.client!r} cannot be used with a folder of images; use folder, or null")
    own = request.own
    if own is not None and (own.kind != "pixels" or own.input_shape[0] not in (1, 3)):
        raise ExperimentError(
            f"{folder}: a folder of images needs kind pixels and 1 or 3 channels; data.own has kind {own.kind} and "
            f"input_shape {list(own.input_shape)}"
        )


def _check_place(path: Path, label: str | None, request: Request, known: frozenset[str]) -> None:
    """Reject a path that has no image extension, is not a file, or is outside the folder of a class."""
    if path.suffix.lower() not in known:
        raise UnfitImage(f"not an image, by its name; images end in {listed(sorted(known), 30)}", "")
    if not path.is_file():
        raise UnfitImage("not a file, but a pipe, a device or a broken link", "")
    if not request.labelled:
        return
    if label is None:
        where = "OWNER/CLASS" if request.client is not None else "classes"
        raise UnfitImage(f"label missing: an image outside the folders of {where}", "")
    if request.own is not None and label not in map(composed, request.own.classes):
        raise UnfitImage(f"unknown class of folder; classes are {listed(request.own.classes)}", "")


@dataclass
class _Taken:
    """Images of one size, and the changes made to them.

    Attributes
    ----------
    shape
        ``(channels, height, width)``; None: greyscale if all images are, else RGB, of the size of the first.
    resize
        True if images of another size are resized.
    """

    shape: tuple[int, ...] | None
    resize: bool
    _size: tuple[int, int] | None = None
    _pixels: list[NDArray[np.uint8]] = field(default_factory=list)
    _changed: dict[str, int] = field(default_factory=dict)
    _grey: int = 0

    def add(self, image: Image, notes: tuple[str, ...]) -> None:
        """Add an image, converted to the required mode and size."""
        size = self._wanted_size(image)
        if image.size != size and not self.resize:
            fault = f"another size (height x width) than {size[1]} x {size[0]}; resize it, or use {argument('resize')}"
            raise UnfitImage(fault, f"{image.size[1]} x {image.size[0]}")
        grey = image.mode in GREY if self.shape is None else self.shape[0] == 1
        mode = "L" if grey else "RGB"
        changed = list(notes)
        if image.mode != mode:
            changed.append(f"converted from {image.mode} to {mode}")
            image = image.convert(mode)
        if image.size != size:
            from PIL.Image import Resampling

            changed.append(f"resized to {size[1]} x {size[0]}")
            image = image.resize(size, Resampling.BILINEAR)
        for what in changed:
            self._changed[what] = self._changed.get(what, 0) + 1
        self._grey += grey
        self._pixels.append(np.asarray(image, dtype=np.uint8).reshape(size[1], size[0], -1).transpose(2, 0, 1))

    def _wanted_size(self, image: Image) -> tuple[int, int]:
        """Return the required (width, height)."""
        if self._size is None:
            self._size = image.size if self.shape is None else (self.shape[2], self.shape[1])
        return self._size

    def joined(self) -> NDArray[np.uint8]:
        """Return all images, ``[n, channels, height, width]``; greyscale images among RGB ones become RGB."""
        channels = max(len(each) for each in self._pixels)
        if channels == 3 and self._grey and self.shape is None:
            self._changed["converted from L to RGB"] = self._grey
        first = self._pixels[0]
        x = np.empty((len(self._pixels), channels, *first.shape[1:]), dtype=np.uint8)
        for i, each in enumerate(self._pixels):
            x[i] = each
        return x

    def notes(self) -> tuple[str, ...]:
        """Return how many images were changed, and how."""
        return tuple(f"{pluralize(count, 'image')} {what}" for what, count in self._changed.items())


def _are_splits(folder: Path, classes: tuple[str, ...]) -> bool:
    """Return whether the folders are those of splits, and not of classes.

    One called ``test`` or ``train`` may be a class among others; training and held-out examples beside each other are
    splits.
    """
    names = folders_in(folder)
    if set(map(composed, names)) & set(map(composed, classes)):
        return False
    splits = [name for name in names if name.lower() in SPLIT_NAMES]
    if len(splits) < len(names) and {0} < {SPLIT_NAMES[name.lower()] for name in splits}:
        others = listed([name for name in names if name not in splits])
        raise DataError(
            f"{folder}: {', '.join(splits)} are folders of splits, and {others} are not; move the others elsewhere, or "
            "into a split"
        )
    return bool(names) and len(splits) == len(names)
