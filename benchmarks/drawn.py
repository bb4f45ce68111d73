"""Part of the picture benchmarks: draws pictures with questions that have one right answer."""

from dataclasses import dataclass

import numpy as np

SIDE = 64
DOTS = {  # of 5 x 7
    "zero": "01110 10001 10011 10101 11001 10001 01110", "one": "00100 01100 00100 00100 00100 00100 01110",
    "two": "01110 10001 00001 00010 00100 01000 11111", "three": "11111 00010 00100 00010 00001 10001 01110",
    "four": "00010 00110 01010 10010 11111 00010 00010", "five": "11111 10000 11110 00001 00001 10001 01110",
    "six": "00110 01000 10000 11110 10001 10001 01110", "seven": "11111 00001 00010 00100 01000 01000 01000",
    "eight": "01110 10001 10001 01110 10001 10001 01110", "nine": "01110 10001 10001 01111 00001 00010 01100",
}  # fmt: skip
SHAPES = ("circle", "square", "triangle")
COLOURS = {"red": (210, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220), "yellow": (230, 200, 40)}


@dataclass(frozen=True)
class Drawn:
    """A picture (SIDE, SIDE, 3) uint8 of a thing, "digit" or "shape", which has a name and a colour."""

    pixels: np.ndarray
    thing: str
    name: str
    colour: str

    def question(self, of_colour: bool) -> tuple[str, str]:
        """A question about it, and the right answer."""
        if of_colour:
            return f"Which colour is the {self.thing}?", self.colour
        return f"Which {self.thing} is this?", self.name


def draw(r: np.random.Generator) -> Drawn:
    """A picture."""
    thing = ("digit", "digit", "shape")[r.integers(3)]
    name = str(r.choice(list(DOTS) if thing == "digit" else SHAPES))
    mask = _digit(name, r) if thing == "digit" else _shape(name, r)
    colour = str(r.choice(list(COLOURS)))
    ground = r.integers(0, 90) if r.random() < 0.5 else r.integers(190, 256)
    picture = np.full((SIDE, SIDE, 3), float(ground))
    picture[mask] = np.array(COLOURS[colour]) + r.normal(0, 8, 3)
    picture += r.normal(0, 10, picture.shape)
    return Drawn(picture.clip(0, 255).astype(np.uint8), thing, name, colour)


def _digit(name: str, r: np.random.Generator) -> np.ndarray:
    dots = np.array([[c == "1" for c in row] for row in DOTS[name].split()])
    scale = r.integers(4, 9)
    large = dots.repeat(scale, 0).repeat(scale, 1)
    mask = np.zeros((SIDE, SIDE), bool)
    y, x = (r.integers(0, SIDE - n + 1) for n in large.shape)
    mask[y : y + large.shape[0], x : x + large.shape[1]] = large
    return mask


def _shape(name: str, r: np.random.Generator) -> np.ndarray:
    size = r.integers(10, 26)
    y, x = (r.integers(size, SIDE - size) for _ in range(2))
    rows, columns = np.mgrid[:SIDE, :SIDE]
    down, right = rows - y, columns - x
    if name == "circle":
        return down**2 + right**2 <= size**2
    if name == "square":
        return (abs(down) <= size * 0.85) & (abs(right) <= size * 0.85)
    return (down <= size * 0.8) & (down >= -size) & (abs(right) <= (down + size) * 0.6)
