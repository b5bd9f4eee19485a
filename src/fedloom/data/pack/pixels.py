"""Pixels of images in Pillow's hands: 8 bits a channel, as a viewer shows them; what cannot be kept is refused."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "PPM", "TGA", "TIFF", "WEBP")
"""Formats that Pillow decodes itself and whose depth it tells: others start programs (EPS), or lose bits silently."""

MOST_PIXELS = 89_478_485
"""Pixels of an image at most, Pillow's own bound: a small file can claim to hold far more than memory does."""

PALETTES = ("P", "PA")
GREY = ("1", "L", "LA")
COLOUR = ("P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV")
"""Pillow's modes that have 8 bits a channel and a form in grey or RGB."""

ORIENTATION = 0x0112
"""EXIF's tag that says how a camera was held."""

BITS_PER_SAMPLE = 258
"""TIFF's tag."""

FURTHER = "hold further pictures beside the first, such as previews; they were left out"
TRANSPARENT = "had transparent pixels, which now have the colour that is stored there"
TURNED = "turned upright, as the EXIF orientation says"


class UnfitImage(Exception):
    """An image whose pixels cannot be taken.

    Attributes
    ----------
    fault
        The kind of fault, and what to do.
    detail
        What was found in this image.
    """

    def __init__(self, fault: str, detail: str) -> None:
        super().__init__(f"{fault} ({detail})")
        self.fault, self.detail = fault, detail


def endings() -> frozenset[str]:
    """Return the ends of the names of files that can be read, such as ``.png``."""
    from PIL import Image

    return frozenset(end for end, form in Image.registered_extensions().items() if form in (*FORMATS, "MPO"))


def read_picture(path: Path) -> tuple[Image, tuple[str, ...]]:
    """Return the image in a file, upright and of a mode in :data:`GREY` or :data:`COLOUR`; and notes.

    Raises
    ------
    UnfitImage
        If the file cannot be read, or its pixels cannot be kept.
    """
    from PIL import Image

    with _failures_named(path):
        with Image.open(path, formats=FORMATS) as opened:
            width, height = opened.size
            if width * height > MOST_PIXELS:
                raise _too_large(f"{height} x {width}")
            check_depth(opened)
            notes = [FURTHER] if check_frames(opened) else []
            # A TIFF is turned by Pillow while it is loaded; EXIF of a PNG may come after its pixels.
            before = 1 if opened.format == "PNG" else orientation(opened)
            opened.load()
            after = orientation(opened)
            image = _turned(opened, after)
            if image.has_transparency_data:
                image, lowest = _transparency(image)
                notes += [TRANSPARENT] if lowest < 255 else []
        if before != 1 or after != 1:
            notes.append(TURNED)
        return image, tuple(notes)


def check_depth(image: Image) -> None:
    """Refuse an image that is not of 8 bits a channel, which Pillow may have cut its values to.

    Raises
    ------
    UnfitImage
        If it has more bits, or its mode has no form in grey or RGB.
    """
    deep = image.mode.startswith(("I", "F"))
    found = f"mode {image.mode}"
    tiles = getattr(image, "tile", ())  # empty once an image is loaded
    arguments = [tile[3] for tile in tiles]
    if image.format == "PNG":
        deep = deep or any(";16" in str(given) for given in arguments)
    elif image.format == "PPM":
        deep = deep or any(isinstance(given, tuple) and given[-1] > 255 for given in arguments)
    elif image.format == "TIFF":
        deep = deep or max(getattr(image, "tag_v2", {}).get(BITS_PER_SAMPLE, (1,))) > 8
    if deep:
        found += "" if image.mode.startswith(("I", "F")) else " of 16 bits"
        raise UnfitImage("more than 8 bits a channel; scale the images to 8 bits first", found)
    if image.mode not in (*GREY, *COLOUR):
        raise UnfitImage("a mode without an exact form in grey or RGB; save the images as RGB first", found)


def check_frames(image: Image) -> bool:
    """Return whether an image has further pictures that belong to its first, as phones write them.

    Raises
    ------
    UnfitImage
        If it has several pages or frames, each of which may be an example.
    """
    if not getattr(image, "is_animated", False):
        return False
    if image.format == "MPO":
        return True
    frames = getattr(image, "n_frames", 2)
    raise UnfitImage("several pages or frames; save each as an image of its own", f"{frames} in a {image.format} file")


def orientation(image: Image) -> int:
    """Return how the camera was held, 1 to 8 as EXIF has it; 1, upright, where that is not said, or damaged."""
    try:
        found: Any = image.getexif().get(ORIENTATION, 1)
    except Exception:  # EXIF is written by all kinds of programs, and viewers show such images as they are
        return 1
    return found if isinstance(found, int) and 1 <= found <= 8 else 1


def _turned(image: Image, held: int) -> Image:
    """Return an image upright; without a tag that would have it turned again."""
    from PIL.Image import Transpose

    ways = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    return image.transpose(ways[held]) if held in ways else image.copy()


def _transparency(image: Image) -> tuple[Image, int]:
    """Return an image, without a palette, and its lowest opacity, 0 to 255."""
    plain = image.convert("RGBA")
    lowest: Any = plain.getchannel("A").getextrema()[0]
    return (plain if image.mode in PALETTES else image), int(lowest)


def _too_large(found: str) -> UnfitImage:
    return UnfitImage(f"more than {MOST_PIXELS:,} pixels; make the images smaller first", found)


@contextmanager
def _failures_named(path: Path) -> Iterator[None]:
    """Turn what Pillow raises in the block, which its decoders do with errors of every class, into UnfitImage."""
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
            raise UnfitImage("image that cannot be read; change its permissions", str(error.strerror)) from error
        except Exception as error:
            said = str(error).replace(str(path), path.name)
            formats = f"{', '.join(FORMATS[:-1])} and {FORMATS[-1]}"
            raise UnfitImage(f"damaged image, or none of the formats that are read, {formats}", said) from error
