"""Folder of images by class, laid out like torchvision's ``ImageFolder``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedloom.core.words import composed
from fedloom.data.listing import files_below, folders_in
from fedloom.data.pack.examples import SPLIT_NAMES, Examples, OnProgress, Request, ValidationErrors, listed, spec_of
from fedloom.data.pack.masks import has_masks, read_masked
from fedloom.data.pack.medical import refuse_medical
from fedloom.data.pack.pixels import ImageStack, UnfitImage, endings, read_picture
from fedloom.data.values import found_classes
from fedloom.errors import DataError, ExperimentError


def read_images(folder: Path, request: Request, errors: ValidationErrors, on_progress: OnProgress) -> Examples:
    """Read every image below a folder: ``CLASS/...``, or ``train/CLASS/...`` and so on; or images with their masks.

    Hidden files and those that operating systems leave behind are skipped; links to folders are followed. With
    ``client``, the owners' folders are above those of the classes. Without ``data.own``, the images are greyscale if
    all of them are, else RGB, and have the size of the first.

    Raise ExperimentError if ``client`` is neither None nor ``folder``, Pillow is not installed, or the experiment asks
    for inputs other than images; DataError if there is no image, an image is invalid, or a folder cannot be read.
    """
    _check_request(folder, request)
    refuse_medical(folder)
    own = request.own
    given = _are_splits(folder, () if own is None else own.classes)
    depth = int(given) + int(request.client is not None)
    if request.labelled and request.wanted_task in (None, "segmentation") and has_masks(folder, depth):
        return read_masked(folder, depth, request, errors, on_progress)
    if request.wanted_task not in (None, "classification"):
        raise DataError(
            f"{folder}: task {request.wanted_task} cannot be read from images in folders; segmentation needs folders "
            "images and masks, and other targets a table or arrays"
        )
    taken = ImageStack(None if own is None else own.input_shape, request.resize)
    found = _pictures(folder, depth, request, taken, errors, on_progress, given=given)
    kept, x = [each.path for each in found], taken.joined()
    empty = [] if not request.labelled else [str(path.relative_to(folder)) for path in _empty(folder, depth, kept)]
    classes, y = _labels(found, request)
    return Examples(
        specs={"": spec_of("pixels", x)},
        classes=classes,
        x=x,
        y=y,
        split=np.array([each.split for each in found], dtype=np.int64) if given else None,
        where=lambda i: str(kept[i]),
        notes=(*taken.notes(), *([f"folders without an image, left out: {listed(empty)}"] if empty else [])),
        owners=None if request.client is None else tuple(each.owner for each in found),
    )


def _pictures(
    folder: Path,
    depth: int,
    request: Request,
    taken: ImageStack,
    errors: ValidationErrors,
    on_progress: OnProgress,
    *,
    given: bool,
) -> list[_Picture]:
    """Add every image below a folder to a stack; return their places.

    Raise DataError if there is no image, or some are invalid.
    """
    known, files, found = endings(), list(files_below(folder)), list[_Picture]()
    for done, path in enumerate(files):
        on_progress("reading images", done, len(files))
        try:
            picture = _picture(path, folder, depth, request, known, given)
            taken.add(read_picture(path))
        except UnfitImage as unfit:
            name = path.relative_to(folder)  # as shown in errors, which start with the folder
            errors.add(unfit.fault, f"{name}: {unfit.detail}" if unfit.detail else str(name))
        else:
            found.append(picture)
    errors.refuse()
    if not found:
        raise DataError(f"{folder} has no images; put images below it as CLASS/NAME.png")
    return found


def _labels(found: Sequence[_Picture], request: Request) -> tuple[tuple[str, ...], NDArray[np.int64] | None]:
    """Return the classes, and each image's position in them if they are labelled."""
    labels = [each.label for each in found]
    given = None if request.own is None else request.own.classes
    if not request.labelled:
        return given or (), None
    classes = found_classes(labels) if given is None else given
    place = {composed(name): i for i, name in enumerate(classes)}
    return classes, np.array([place[label] for label in labels], dtype=np.int64)


class _Picture(NamedTuple):
    """Path of an image, with the class, owner and split that its folders give."""

    path: Path
    label: str
    owner: str
    split: int


def _picture(path: Path, folder: Path, depth: int, request: Request, known: frozenset[str], given: bool) -> _Picture:
    """Return an image, described by its folders; raise UnfitImage if it is in the wrong place."""
    steps = tuple(map(composed, path.relative_to(folder).parts))
    if given and len(steps) == 1:
        raise UnfitImage("an image outside the folders of splits", "")
    label = steps[depth] if len(steps) > depth + 1 else None
    _check_place(path, label, request, known)
    owner = steps[depth - 1] if request.client is not None else ""
    return _Picture(path, label or "", owner, SPLIT_NAMES[steps[0].lower()] if given else 0)


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


def _are_splits(folder: Path, classes: tuple[str, ...]) -> bool:
    """Return True if the folders in a folder are splits rather than classes.

    A single folder called ``test`` or ``train`` may be a class; folders for training and for held-out examples together
    are splits.
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
