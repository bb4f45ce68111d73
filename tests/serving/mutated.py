"""Pictures as strangers send them: files of four formats with bytes changed, cut, doubled, and sizes in their headers."""

import random
import struct
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "families"))
import sighted

KINDS = ("PNG", "JPEG", "WEBP", "GIF")


def mutants(count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """(kind and change, bytes) of the requested number of files."""
    r = random.Random(seed)
    whole = {kind: _files(kind) for kind in KINDS}
    for i in range(count):
        kind = KINDS[i % len(KINDS)]
        data = bytearray(r.choice(whole[kind]))
        changes = r.sample(CHANGES, r.choice((1, 1, 1, 2, 3)))
        for change in changes:
            change(data, r)
        yield f"{kind} {'+'.join(c.__name__.strip('_') for c in changes)} {i}", bytes(data)


def _files(kind: str) -> list[bytes]:
    """Whole files of a kind: sizes, modes, EXIF, several frames."""
    a, b = sighted.drawing(1, (40, 30)), sighted.drawing(2, (33, 61))
    result = [sighted.encoded(a, kind), sighted.encoded(b, kind)]
    result.append(sighted.encoded(a.convert("L"), kind))
    if kind != "GIF":
        exif = Image.Exif()
        exif[0x0112] = 6
        result.append(sighted.encoded(a, kind, exif=exif))
    if kind != "JPEG":
        result.append(sighted.encoded(a, kind, save_all=True, append_images=[a.rotate(90)]))
        result.append(sighted.encoded(a.convert("RGBA"), kind))
    else:
        result += [sighted.encoded(a.convert("CMYK"), kind), sighted.encoded(a, kind, progressive=True)]
    return result


def _flip(data: bytearray, r: random.Random) -> None:
    for _ in range(r.choice((1, 1, 4, 30))):
        data[r.randrange(len(data))] ^= 1 << r.randrange(8)


def _bytes(data: bytearray, r: random.Random) -> None:
    at = r.randrange(len(data))
    for i in range(at, min(len(data), at + r.choice((1, 2, 4, 16)))):
        data[i] = r.choice((0, 255, 127, 128, r.randrange(256)))


def _cut(data: bytearray, r: random.Random) -> None:
    del data[r.randrange(4, len(data)) :]


def _drop(data: bytearray, r: random.Random) -> None:
    at = r.randrange(len(data))
    del data[at : at + r.randrange(1, 40)]


def _double(data: bytearray, r: random.Random) -> None:
    at = r.randrange(len(data))
    data[at:at] = data[at : at + r.randrange(1, 60)]


def _more(data: bytearray, r: random.Random) -> None:
    data += r.randbytes(r.randrange(1, 2000))


def _large(data: bytearray, r: random.Random) -> None:
    """Sizes that a header can say, at the place where the format says them."""
    w, h = r.choice((0, 1, 65535, 60000, 16383)), r.choice((0, 1, 65535, 7, 16383))
    if data.startswith(b"\x89PNG") and len(data) > 33:
        big = r.choice((1, 1 << 15))
        data[16:24] = struct.pack(">II", (w * big) & 0x7FFFFFFF, (h * big) & 0x7FFFFFFF)
        data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    elif data.startswith(b"GIF"):
        data[6:10] = struct.pack("<HH", w, h)
    elif data.startswith(b"\xff\xd8") and (at := data.find(b"\xff\xc0")) > 0:
        data[at + 5 : at + 9] = struct.pack(">HH", h, w)
    elif data.startswith(b"RIFF") and len(data) > 30:
        data[26:30] = struct.pack("<HH", w & 0x3FFF, h & 0x3FFF)


CHANGES = (_flip, _bytes, _cut, _drop, _double, _more, _large)
