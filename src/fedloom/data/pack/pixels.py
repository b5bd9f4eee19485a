"""Pixels of Pillow images: 8 bits per channel, as a viewer shows them; others are rejected."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    """Image whose pixels cannot be used.

    Attributes
    ----------
    fault
        Kind of error, and the remedy.
    detail
        Value found in this image.
    """

    def __init__(self, fault: str, detail: str) -> None:
        super().__init__(f"{fault} ({detail})")
        self.fault, self.detail = fault, detail


def endings() -> frozenset[str]:
    """Return the file extensions that can be read, such as ``.png``."""
    from PIL import Image

    return frozenset(end for end, form in Image.registered_extensions().items() if form in (*FORMATS, "MPO"))


def read_picture(path: Path) -> tuple[Image, tuple[str, ...]]:
    """Return the image in a file, upright and of a mode in :data:`GREY` or :data:`COLOUR`; and notes.

    Raise UnfitImage if the file cannot be read, or its pixels cannot be kept.
    """
    from PIL import Image

    with _failures_named(path):
        with Image.open(path, formats=FORMATS) as opened:
            width, height = opened.size
            if width * height > MOST_PIXELS:
                raise _too_large(f"{height} x {width}")
            check_depth(opened)
            notes = [FURTHER] if check_frames(opened) else []
            # Pillow rotates a TIFF while loading it; the EXIF of a PNG may come after its pixels.
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
    """Reject an image with more than 8 bits per channel, whose values Pillow may have truncated.

    Raise UnfitImage if it has more bits, or its mode does not convert to greyscale or RGB.
    """
    deep = image.mode.startswith(("I", "F"))
    found = f"mode {image.mode}"
    tiles = getattr(image, "tile", ())  # empty after loading
    arguments = [tile[3] for tile in tiles]
    if image.format == "PNG":
        deep = deep or any(";16" in str(given) for given in arguments)
    elif image.format == "PPM":
        deep = deep or any(isinstance(given, tuple) and given[-1] > 255 for given in arguments)
    elif image.format == "TIFF":
        deep = deep or max(getattr(image, "tag_v2", {}).get(BITS_PER_SAMPLE, (1,))) > 8
    if deep:
        found += "" if image.mode.startswith(("I", "F")) else " with 16 bits"
        raise UnfitImage("more than 8 bits a channel; scale the images to 8 bits first", found)
    if image.mode not in (*GREY, *COLOUR):
        raise UnfitImage("a mode without an exact greyscale or RGB form; save the images as RGB first", found)


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
        found: Any = image.getexif().get(ORIENTATION, 1)
    except Exception:  # EXIF comes from all kinds of programs; viewers show such images unrotated
        return 1
    return found if isinstance(found, int) and 1 <= found <= 8 else 1


def _turned(image: Image, held: int) -> Image:
    """Return an image upright; transposing removes the tag that would rotate it again."""
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
            said = str(error).replace(str(path), path.name)
            formats = f"{', '.join(FORMATS[:-1])} and {FORMATS[-1]}"
            raise UnfitImage(f"damaged image, or not one of the formats {formats}", said) from error
