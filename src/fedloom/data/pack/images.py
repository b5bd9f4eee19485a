"""A folder of images by class, laid out as torchvision's ``ImageFolder`` wants it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedloom.data.pack.examples import SPLIT_NAMES, Examples, Mistakes, Request, Tell, found_classes, listed
from fedloom.errors import DataError, ExperimentError, argument
from fedloom.words import counted

DEEP = ("I", "F")
"""How the names of Pillow's modes begin whose values do not fit into a byte."""


def read_images(folder: Path, request: Request, mistakes: Mistakes, tell: Tell) -> Examples:
    """Read every image below a folder: ``CLASS/...``, or ``train/CLASS/...`` and so on; hidden files are left out.

    Where whose they are is asked for, an owner's folder is above that of the class.

    Raises
    ------
    ExperimentError
        If another word than ``folder`` says whose they are, Pillow is not installed, or images have not as many
        channels as are asked for.
    DataError
        If there is no image.
    """
    try:
        from PIL import Image
    except ImportError:
        raise ExperimentError(
            f"{folder}: reading images needs Pillow, which is not installed", hint="pip install 'fedloom[vision]'"
        ) from None
    if request.client not in (None, "folder"):
        raise ExperimentError(f"client: found {request.client!r} with a folder of images; allowed: folder, or null")
    own = request.own
    if own is not None and (own.kind != "pixels" or own.input_shape[0] not in (1, 3)):
        raise ExperimentError(
            f"{folder}: found a folder of images; data.own has kind {own.kind} and input_shape "
            f"{list(own.input_shape)}; allowed for images: kind pixels, 1 or 3 channels"
        )
    known = Image.registered_extensions()
    files = list(_files(folder))
    given = _are_splits(folder, () if own is None else own.classes)
    depth = int(given) + int(request.client is not None)
    owners: list[str] = []
    shape = None if own is None else own.input_shape
    pixels: list[NDArray[np.uint8]] = []
    labels: list[str] = []
    splits: list[int] = []
    kept: list[Path] = []
    changed: dict[str, int] = {}
    for done, path in enumerate(files):
        tell("reading images", done, len(files))
        name = path.relative_to(folder)  # as mistakes call it: the folder stands before all of them
        steps = name.parts
        label = steps[depth] if len(steps) > depth + 1 else None
        if path.suffix.lower() not in known:
            mistakes.add(f"no image, by its name; allowed: {listed(('.png', '.jpg', '.bmp', '.webp'))}, ...", str(name))
            continue
        if not path.is_file():
            mistakes.add("no file, but a pipe, a device or a link to nothing", str(name))
            continue
        if request.labelled and label is None:
            where = "OWNER/CLASS" if request.client is not None else "classes"
            mistakes.add(f"label missing: an image outside of the folders of {where}", str(name))
            continue
        if request.labelled and own is not None and label not in own.classes:
            mistakes.add(f"unknown class of folder; allowed: {listed(own.classes)}", str(name))
            continue
        try:
            with Image.open(path) as opened:
                opened.load()
                image: Image.Image = opened
                if image.mode.startswith(DEEP):
                    mistakes.add("more than 8 bits a channel; allowed: images of 8 bits", f"{name}: mode {image.mode}")
                    continue
                if shape is None:
                    shape = (1 if image.mode in ("1", "L", "LA") else 3, image.height, image.width)
                mode, size = "L" if shape[0] == 1 else "RGB", (shape[2], shape[1])
                found = image.size
                if image.mode != mode:
                    what = f"converted from {image.mode} to {mode}"
                    changed[what] = changed.get(what, 0) + 1
                    image = image.convert(mode)
                if found != size and request.resize:
                    what = f"resized to {size[1]} x {size[0]}"
                    changed[what] = changed.get(what, 0) + 1
                    image = image.resize(size, Image.Resampling.BILINEAR)
                elif found != size:
                    allowed = f"another size (height x width); allowed: {size[1]} x {size[0]}, or {argument('resize')}"
                    mistakes.add(allowed, f"{name}: {found[1]} x {found[0]}")
                    continue
                array = np.asarray(image, dtype=np.uint8)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            mistakes.add("damaged image", f"{name}: {error}")
            continue
        pixels.append(array.reshape(size[1], size[0], shape[0]).transpose(2, 0, 1))
        labels.append(label or "")
        owners.append(steps[depth - 1] if request.client is not None else "")
        splits.append(SPLIT_NAMES[steps[0]] if given else 0)
        kept.append(path)
    mistakes.refuse()
    if shape is None or not kept:
        raise DataError(f"{folder}: found no image; expected CLASS/NAME.png and the like below it")
    classes = own.classes if own is not None else found_classes(labels) if request.labelled else ()
    place = {name: i for i, name in enumerate(classes)}
    return Examples(
        kind="pixels",
        classes=classes,
        x=np.ascontiguousarray(np.stack(pixels)),
        y=np.array([place[label] for label in labels], dtype=np.int64) if request.labelled else None,
        split=np.array(splits, dtype=np.int64) if given else None,
        where=lambda i: str(kept[i]),
        notes=tuple(f"{counted(count, 'image')} {what}" for what, count in changed.items()),
        owners=None if request.client is None else tuple(owners),
    )


def _files(folder: Path) -> Iterator[Path]:
    """Every file below a folder, in an order that is the same everywhere."""
    for at, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(at) / name for name in sorted(files) if not name.startswith("."))


def _are_splits(folder: Path, classes: tuple[str, ...]) -> bool:
    """Whether the folders are those of splits, and not of classes."""
    names = {path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")}
    return not names & set(classes) and {SPLIT_NAMES.get(name) for name in names} == {0, 1, 2}
