"""Folders of images: by class, like torchvision's ``ImageFolder``; or ``images/NAME.png`` with ``masks/NAME.png``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedloom.core.words import composed, first_of
from fedloom.data.folders import files_below, folders_in
from fedloom.data.pack.examples import SPLIT_NAMES, Columns, OnProgress, Places, Request, ValidationErrors
from fedloom.data.pack.pixels import ImageStack, Picture, UnfitImage, endings, load_picture, read_picture
from fedloom.data.spec import InputSpec
from fedloom.data.values import found_classes
from fedloom.errors import DataError, ExperimentError
from fedloom.tasks.names import KINDS

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGES, MASKS = "images", "masks"
"""Names of the two folders of segmentation; the values of masks are the classes of pixels."""

MODES = ("1", "L", "P", "I", "I;16", "I;16B")
"""Pillow modes with one whole number for each pixel."""

LOSSY = ("JPEG", "MPO", "WEBP", "jpeg", "tiff_jpeg", "webp")
"""Formats, and compressions within a TIFF file, that change the numbers of pixels."""

MEDICAL = (".dcm", ".dicom", ".nii", ".nii.gz")

HOW_TO_READ = (
    "read them with pydicom (dcmread(file).pixel_array) or nibabel (load(file).get_fdata()), and give the arrays: x "
    "and y of an .npz file, or Federated.from_arrays; or save slices of 8 bits as PNG; or register a data set that "
    "reads them (docs/extending.md#a-data-set)"
)
"""Hint for DICOM and NIfTI files."""


class _Entry(NamedTuple):
    """Image, the names of its folders and its own, and its mask if there is one."""

    image: Path
    steps: tuple[str, ...]
    mask: Path | None = None


def read_images(folder: Path, request: Request, errors: ValidationErrors, on_progress: OnProgress) -> Columns:
    """Read every image below a folder: ``CLASS/...``, or ``train/CLASS/...`` and so on; or images with their masks.

    Hidden files and those that operating systems leave behind are skipped; links to folders are followed. With
    ``client``, the owners' folders are above those of the classes. Without ``data.own``, the images are greyscale if
    all of them are, else RGB, and have the size of the first. Files that cannot be read are recorded as errors.

    Raise ExperimentError if ``client`` is neither None nor ``folder``, Pillow is not installed, or the experiment asks
    for inputs other than images; DataError if there is no image, an image is invalid, or a folder cannot be read.
    """
    _check_request(folder, request)
    needs = request.needs
    split_folders = _are_splits(folder, () if needs is None else needs.class_names)
    depth = int(split_folders) + int(request.client is not None)
    task = request.wanted_task
    masked = request.labelled and (task is None or KINDS[task].like == "plane") and _has_masks(folder, depth)
    if not masked and task is not None and not KINDS[task].is_class:
        raise DataError(
            f"{folder}: task {task} cannot be read from images in folders; segmentation needs folders {IMAGES} and "
            f"{MASKS}, and other targets a table or arrays"
        )
    if masked:
        entries = _pairs(folder, depth, errors)
    else:
        entries = [_Entry(path, tuple(map(composed, _below(folder, path)))) for path in files_below(folder)]
    stack = ImageStack(None if needs is None else needs.input_shape, request.resize)
    palettes = _Palettes()
    entries_read: list[_Entry] = []
    masks: list[NDArray[np.int64]] = []
    suffixes = endings()
    for count, entry in enumerate(entries):
        on_progress("reading images", count, len(entries))
        name = "/".join(entry.steps)
        try:
            if entry.mask is None:
                _check_place(entry, depth, request, suffixes, has_splits=split_folders)
            picture = read_picture(entry.image)
            if entry.mask is not None:
                mask = _read_mask(entry.mask, name, picture, palettes)
            stack.add(picture)
        except UnfitImage as unfit:
            errors.add(unfit.fault, f"{name}: {unfit.detail}" if unfit.detail else name)
            continue
        entries_read.append(entry)
        if entry.mask is not None:
            masks.append(_resized_mask(mask, stack.size))
    errors.refuse()
    if not entries_read:
        raise DataError(
            f"{folder} has no images; put images below it as CLASS/NAME.png, or in {IMAGES} with masks of the same "
            f"names in {MASKS}"
        )
    x, y, classes = stack.joined(), None, None
    if masked:
        y = np.stack(masks)
    elif request.labelled:
        labels = [entry.steps[depth] for entry in entries_read]
        classes = found_classes(labels) if needs is None else needs.class_names
        position = {composed(name): i for i, name in enumerate(classes)}
        y = np.array([position[label] for label in labels], dtype=np.int64)
    return Columns(
        {"": x},
        {"": InputSpec("pixels", x.shape[1:])},
        y,
        Places(["/".join(entry.steps) for entry in entries_read]),
        np.array([SPLIT_NAMES[entry.steps[0].lower()] for entry in entries_read], dtype=np.int64)
        if split_folders
        else None,
        None if request.client is None else [entry.steps[depth - 1] for entry in entries_read],
        classes=classes,
        notes=(*stack.notes(), *palettes.notes()),
    )


def is_medical(path: Path) -> bool:
    """Return True for a DICOM or NIfTI file; DICOM files without an extension have a mark at byte 128."""
    if path.name.lower().endswith(MEDICAL):
        return True
    if path.suffix or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(132)[128:] == b"DICM"


def _below(folder: Path, path: Path) -> tuple[str, ...]:
    return path.relative_to(folder).parts


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
    needs = request.needs
    if needs is not None and (needs.kind != "pixels" or needs.input_shape[0] not in (1, 3)):
        raise ExperimentError(
            f"{folder}: a folder of images needs kind pixels and 1 or 3 channels; data.own has kind {needs.kind} and "
            f"input_shape {list(needs.input_shape)}"
        )
    if medical := [path for path in files_below(folder) if is_medical(path)]:
        raise DataError(
            f"{folder}: DICOM and NIfTI files are not read, and it has {len(medical):,} (first: "
            f"{medical[0].relative_to(folder)}).",
            hint=HOW_TO_READ,
        )


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
        others = first_of([name for name in names if name not in splits])
        raise DataError(
            f"{folder}: {', '.join(splits)} are folders of splits, and {others} are not; move the others elsewhere, or "
            "into a split"
        )
    return bool(names) and len(splits) == len(names)


def _check_place(entry: _Entry, depth: int, request: Request, suffixes: frozenset[str], *, has_splits: bool) -> None:
    """Reject a path that has no image extension, is not a file, or is outside the folder of a class or split."""
    if has_splits and len(entry.steps) == 1:
        raise UnfitImage("an image outside the folders of splits", "")
    if entry.image.suffix.lower() not in suffixes:
        raise UnfitImage(f"not an image, by its name; images end in {first_of(sorted(suffixes), 30)}", "")
    if not entry.image.is_file():
        raise UnfitImage("not a file, but a pipe, a device or a broken link", "")
    if request.labelled and len(entry.steps) < depth + 2:
        folders = "OWNER/CLASS" if request.client is not None else "classes"
        raise UnfitImage(f"label missing: an image outside the folders of {folders}", "")
    classes = None if request.needs is None else request.needs.class_names
    if request.labelled and classes is not None and entry.steps[depth] not in map(composed, classes):
        raise UnfitImage(f"unknown class of folder; classes are {first_of(classes)}", "")


# --- masks ------------------------------------------------------------------------------------------------------------


def _has_masks(folder: Path, depth: int) -> bool:
    """Return True if the folders ``depth`` levels below a folder are ``images`` and ``masks``."""
    names = folders_in(folder)
    if depth:
        return bool(names) and all(_has_masks(folder / name, depth - 1) for name in names)
    return {IMAGES, MASKS} <= set(names)


def _pairs(folder: Path, depth: int, errors: ValidationErrors) -> list[_Entry]:
    """Return images with their masks, by folders and name; record images without a mask, and masks without an image."""
    files: dict[str, dict[tuple[str, ...], Path]] = {IMAGES: {}, MASKS: {}}
    suffixes = endings()
    for path in files_below(folder):
        steps = _below(folder, path)
        if len(steps) <= depth + 1 or steps[depth] not in files or path.suffix.lower() not in suffixes:
            errors.add(f"not an image in a folder {IMAGES} or {MASKS}", "/".join(steps))
            continue
        key = (*steps[:depth], *steps[depth + 1 : -1], path.stem)
        if key in files[steps[depth]]:
            errors.add("two files of one name", "/".join(steps))
        files[steps[depth]][key] = path
    images, masks = files[IMAGES], files[MASKS]
    for message, one, other in (("image without a mask", images, masks), ("mask without an image", masks, images)):
        errors.add(message, *(str(path.relative_to(folder)) for key, path in one.items() if key not in other))
    return [_Entry(images[key], key, masks[key]) for key in images if key in masks]


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
        colours = [f"{number} {self.colours[number][0]}" for number in sorted(self.used) if number in self.colours]
        return (f"colours in the palette of the masks: {first_of(colours, 24)}",) if colours else ()


def _read_mask(path: Path, name: str, image: Picture, palettes: _Palettes) -> NDArray[np.int64]:
    """Return the numbers of a mask, ``[height, width]``, upright like its image.

    Raise UnfitImage if it is not a mask of this image, or it is unclear in which orientation it was drawn.
    """
    mask, _, tag = load_picture(path, _check_form)
    size = image.image.size
    sides_swap = image.orientation >= 5 and size[0] != size[1]  # the size then shows how the mask was drawn
    if tag != image.orientation and not (tag == 1 and sides_swap and mask.size == size):
        raise UnfitImage(
            "mask whose EXIF orientation is not that of its image: was it drawn before or after the image was turned? "
            "Apply the orientation to the pixels of both files, and remove the tag",
            f"mask {tag}, image {image.orientation}",
        )
    if mask.size != size:
        shapes = (" x ".join(map(str, each[::-1])) for each in (mask.size, size))
        raise UnfitImage("mask of another size (height x width) than its image", ", image ".join(shapes))
    values = np.asarray(mask).astype(np.int64)
    palettes.add(mask, values, name)
    return values


def _check_form(mask: Image) -> None:
    """Reject an image that cannot hold the number of each pixel's class."""
    if lossy := [form for form in (mask.format, mask.info.get("compression")) if form in LOSSY]:
        raise UnfitImage(
            "mask in a lossy format, which changes the numbers of classes; save the original masks as PNG", lossy[0]
        )
    if mask.mode not in MODES:
        raise UnfitImage(
            "mask with several channels or fractions; a mask has one whole number for each pixel, its class", mask.mode
        )


def _resized_mask(values: NDArray[np.int64], size: tuple[int, int]) -> NDArray[np.int64]:
    """Return a mask resized to (width, height), by nearest neighbours."""
    height, width = values.shape
    if (width, height) == size:
        return values
    rows = (np.arange(size[1]) * 2 + 1) * height // (2 * size[1])
    columns = (np.arange(size[0]) * 2 + 1) * width // (2 * size[0])
    resized: NDArray[np.int64] = values[rows[:, None], columns]
    return resized
