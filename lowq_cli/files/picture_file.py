"""Read an image from a file or an untrusted request into pixels, or refuse it in one line, with little memory and time.

The header is checked before the image is decoded. The EXIF orientation is applied; transparent pixels are put on white.
"""

import os
import warnings
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowq_packers.errors import LowqError, NotFoundError, UnsupportedError, UsageError, library_errors
from lowq_packers.regular import open_regular, read_regular

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MOST_BYTES = 20 << 20  # max. bytes of an image file; OpenAI's limit
MOST_PIXELS = 1 << 26  # max. pixels: 67 million take 200 MB decoded; the largest images of phones have 50 million
MOST_LONGER = 150  # max. aspect ratio; models' image processors, which crop or pad, refuse more than 200
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif")
STARTS = {"PNG": b"\x89PNG\r\n\x1a\n", "JPEG": b"\xff\xd8\xff", "GIF": b"GIF8", "WEBP": b"RIFF"}


def read_picture(path: str | os.PathLike[str]) -> "Image":
    """The image in a file. Raises NotFoundError, and as `decode`."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise NotFoundError(f"there is no picture {path}")
    return decode(read_regular(file, MOST_BYTES), str(path))


def is_picture(path: str) -> bool:
    """Whether this is a file in one of FORMATS, by its first bytes."""
    with suppress(OSError, ValueError, LowqError), open(open_regular(Path(path).expanduser()), "rb") as file:
        return file.read(max(map(len, STARTS.values()))).startswith(tuple(STARTS.values()))
    return False


def named_as_picture(word: str) -> bool:
    """Whether an argument is the name of an image, not a text that ends with one: it has no blanks, or its folder exists."""
    folder = Path(word).expanduser().parent
    return word.lower().endswith(SUFFIXES) and (len(word.split()) == 1 or (folder != Path() and folder.is_dir()))


def decode(data: bytes, name: str = "the picture") -> "Image":
    """The RGB pixels of an image. Raises UsageError, with the limit, if it cannot be read or is too large."""
    Image, ImageOps = _pil()
    if len(data) > MOST_BYTES:
        raise UsageError(f"{name} has {len(data) >> 20} MB; at most {MOST_BYTES >> 20} MB are read, make it smaller")
    if not any(data.startswith(start) for start in STARTS.values()):
        raise UsageError(f"{name} is not a PNG, JPEG, WebP or GIF; convert it to one of them")
    try:
        with library_errors(UsageError, f"{name} cannot be read"), Image.open(BytesIO(data), formats=FORMATS) as image:
            _check_size(image.size, name)
            if _moves(image):
                raise UsageError(f"{name} is animated; give one of its frames")
            image.load()
            return _on_white(_eight_bits(ImageOps.exif_transpose(image)), Image)
    except MemoryError:
        raise UsageError(f"{name} does not fit into memory; make it smaller") from None


def _pil() -> Any:
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise UnsupportedError("pictures are read by Pillow, which is not installed: pip install pillow") from None
    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # such images are refused below
    return Image, ImageOps


def _check_size(size: tuple[int, int], name: str) -> None:
    """Raise UsageError for too many pixels or too large an aspect ratio."""
    w, h = size
    if w < 1 or h < 1 or w * h > MOST_PIXELS:
        raise UsageError(f"{name} has {w} x {h} pixels; at most {MOST_PIXELS >> 20} million are read, make it smaller")
    if max(w, h) > MOST_LONGER * min(w, h):
        raise UsageError(f"{name} has {w} x {h} pixels; a side may be at most {MOST_LONGER} times the other, cut it")


def _moves(image: Any) -> bool:
    """Whether the image has a second frame; does not count all frames."""
    with suppress(EOFError):
        image.seek(1)
        return True
    image.seek(0)
    return False


def _eight_bits(image: Any) -> Any:
    """Scale 16-bit grey values to 8 bits; Pillow's conversion would clip them at 255."""
    if image.mode.startswith(("I", "F")):
        return image.convert("I").point(lambda v: v * (1 / 257)).convert("L")
    return image


def _on_white(image: Any, Image: Any) -> "Image":
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")
