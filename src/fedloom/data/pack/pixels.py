"""Pixels of Pillow images: 8 bits per channel, as a viewer shows them; others are rejected."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedloom.core.words import pluralize

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "PPM", "TGA", "TIFF", "WEBP")
"""Formats that Pillow decodes itself and whose depth it reports: others start programs (EPS), or lose bits silently."""

MOST_PIXELS = 89_478_485
"""Maximum pixels of an image, Pillow's own bound: a small file can claim more than fits in memory."""

PALETTES = ("P", "PA")
GREY = ("1", "L", "LA")
COLOUR = ("P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV")
"""Pillow modes with 8 bits per channel that convert to greyscale or RGB."""

ORIENTATION = 0x0112
"""EXIF tag for the camera orientation."""

BITS_PER_SAMPLE = 258
"""TIFF tag for the bits per sample."""

FURTHER = "had further images besides the first, such as previews, which were left out"
TRANSPARENT = "had transparent pixels, which now show their stored colour"
TURNED = "turned upright according to the EXIF orientation"


class UnfitImage(Exception):
    """Image whose pixels cannot be used: the kind of error with its remedy, and the value found in this image."""

    def __init__(self, fault: str, detail: str) -> None:
        super().__init__(f"{fault} ({detail})")
        self.fault, self.detail = fault, detail


def endings() -> frozenset[str]:
    """Return the file extensions that can be read, such as ``.png``."""
    from PIL import Image

    return frozenset(end for end, form in Image.registered_extensions().items() if form in (*FORMATS, "MPO"))


class Picture(NamedTuple):
    """Upright image, notes on changes to it, and the EXIF orientation that its file has."""

    image: Image
    notes: tuple[str, ...]
    orientation: int


def read_picture(path: Path) -> Picture:
    """Return the image in a file, of a mode in :data:`GREY` or :data:`COLOUR`.

    Raise UnfitImage if the file cannot be read, or its pixels cannot be kept.
    """
    image, notes, tag = load_picture(path, check_depth)
    if image.has_transparency_data:
        image, lowest = _transparency(image)
        notes += (TRANSPARENT,) if lowest < 255 else ()
    return Picture(image, (*notes, TURNED) if tag != 1 else notes, tag)


def load_picture(path: Path, check: Callable[[Image], None]) -> Picture:
    """Return the image in a file, of the mode that the file has.

    ``check`` gets the image before its pixels are read, and raises UnfitImage if it does not have the right form.

    Raise UnfitImage if the file cannot be read.
    """
    from PIL import Image, ImageOps

    with _failures_named(path), Image.open(path, formats=FORMATS) as picture_file:
        width, height = picture_file.size
        if width * height > MOST_PIXELS:
            raise _too_large(f"{height} x {width}")
        check(picture_file)
        notes = (FURTHER,) if check_frames(picture_file) else ()
        # Pillow rotates a TIFF while loading it; the EXIF of a PNG may come after its pixels.
        stored_orientation = 1 if picture_file.format == "PNG" else orientation(picture_file)
        picture_file.filename = (
            ""  # else Pillow maps the file into memory, with the sides of a TIFF swapped before their time
        )
        picture_file.load()
        final_orientation = orientation(picture_file)
        upright = picture_file.copy() if final_orientation == 1 else ImageOps.exif_transpose(picture_file)
        return Picture(upright, notes, final_orientation if stored_orientation == 1 else stored_orientation)


def check_depth(image: Image) -> None:
    """Reject an image with more than 8 bits per channel, whose values Pillow may have truncated.

    Raise UnfitImage if it has more bits, or its mode does not convert to greyscale or RGB.
    """
    deep = image.mode.startswith(("I", "F"))
    description = f"mode {image.mode}"
    tiles = getattr(image, "tile", ())  # empty after loading
    arguments = [tile[3] for tile in tiles]
    if image.format == "PNG":
        deep = deep or any(";16" in str(argument) for argument in arguments)
    elif image.format == "PPM":
        deep = deep or any(isinstance(argument, tuple) and argument[-1] > 255 for argument in arguments)
    elif image.format == "TIFF":
        deep = deep or max(getattr(image, "tag_v2", {}).get(BITS_PER_SAMPLE, (1,))) > 8
    if deep:
        description += "" if image.mode.startswith(("I", "F")) else " with 16 bits"
        raise UnfitImage("more than 8 bits a channel; scale the images to 8 bits first", description)
    if image.mode not in (*GREY, *COLOUR):
        raise UnfitImage("a mode without an exact greyscale or RGB form; save the images as RGB first", description)


def check_frames(image: Image) -> bool:
    """Return True if an image has further pictures attached to the first, as phones write them.

    Raise UnfitImage if it has several pages or frames, each of which may be an example.
    """
    if not getattr(image, "is_animated", False):
        return False
    if image.format == "MPO":
        return True
    frames = getattr(image, "n_frames", 2)
    raise UnfitImage("several pages or frames; save each as a separate image", f"{frames} in a {image.format} file")


def orientation(image: Image) -> int:
    """Return the EXIF camera orientation, 1 to 8; 1, upright, if it is missing or damaged."""
    try:
        value: Any = image.getexif().get(ORIENTATION, 1)
    except Exception:  # EXIF comes from all kinds of programs; viewers show such images unrotated
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _transparency(image: Image) -> tuple[Image, int]:
    """Return an image, without a palette, and its lowest opacity, 0 to 255."""
    plain = image.convert("RGBA")
    lowest: Any = plain.getchannel("A").getextrema()[0]
    return (plain if image.mode in PALETTES else image), int(lowest)


def _too_large(size: str) -> UnfitImage:
    return UnfitImage(f"more than {MOST_PIXELS:,} pixels; make the images smaller first", size)


@contextmanager
def _failures_named(path: Path) -> Iterator[None]:
    """Turn exceptions in the block into UnfitImage; Pillow's decoders raise errors of every class."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            yield
        except UnfitImage:
            raise
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise _too_large(str(error).partition(",")[0]) from error
        except PermissionError as error:
            raise UnfitImage("unreadable image; change its permissions", str(error.strerror)) from error
        except Exception as error:
            reason = str(error).replace(str(path), path.name)
            formats = f"{', '.join(FORMATS[:-1])} and {FORMATS[-1]}"
            raise UnfitImage(f"damaged image, or not one of the formats {formats}", reason) from error


@dataclass
class ImageStack:
    """Images of one size, and the changes made to them.

    The shape is ``(channels, height, width)``; None: greyscale if all images are, else RGB, of the size of the first.
    """

    shape: tuple[int, ...] | None
    resize: bool
    _size: tuple[int, int] | None = None
    _pixels: list[NDArray[np.uint8]] = field(default_factory=list)
    _changed: dict[str, int] = field(default_factory=dict)
    _grey: int = 0

    def add(self, picture: Picture) -> None:
        """Add an image, converted to the required mode and size."""
        image = picture.image
        if self._size is None:
            self._size = image.size if self.shape is None else (self.shape[2], self.shape[1])
        size = self._size
        if image.size != size and not self.resize:
            fault = f"another size (height x width) than {size[1]} x {size[0]}; resize it, or set resize: true"
            raise UnfitImage(fault, f"{image.size[1]} x {image.size[0]}")
        grey = image.mode in GREY if self.shape is None else self.shape[0] == 1
        mode = "L" if grey else "RGB"
        notes = list(picture.notes)
        if image.mode != mode:
            notes.append(f"converted from {image.mode} to {mode}")
            image = image.convert(mode)
        if image.size != size:
            from PIL.Image import Resampling

            notes.append(f"resized to {size[1]} x {size[0]}")
            image = image.resize(size, Resampling.BILINEAR)
        for note in notes:
            self._changed[note] = self._changed.get(note, 0) + 1
        self._grey += grey
        self._pixels.append(np.asarray(image, dtype=np.uint8).reshape(size[1], size[0], -1).transpose(2, 0, 1))

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) of all images, once there is one."""
        assert self._size is not None
        return self._size

    def joined(self) -> NDArray[np.uint8]:
        """Return all images, ``[n, channels, height, width]``; greyscale images among RGB ones become RGB."""
        channels = max(len(each) for each in self._pixels)
        if channels == 3 and self._grey and self.shape is None:
            self._changed["converted from L to RGB"] = self._grey
        return np.stack([np.broadcast_to(each, (channels, *each.shape[1:])) for each in self._pixels])

    def notes(self) -> tuple[str, ...]:
        """Return how many images were changed, and how."""
        return tuple(f"{pluralize(count, 'image')} {note}" for note, count in self._changed.items())
