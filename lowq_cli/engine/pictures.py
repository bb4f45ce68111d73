"""Images in a pass of the model: their rows, the features of those rows, and the rows' positions.

The engine gets an image as data: the input of the vision tower, and a name that is unique to this input. All tokens of images
have the same id. Shared prefixes are therefore found with `names`, where an image's tokens have numbers made from its name.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lowq_cli.engine.batch import Pictures, upload
from lowq_cli.hf.pictures import Picture
from lowq_packers.arch.parts import Images
from lowq_packers.errors import DamagedError, UsageError

Features = tuple[torch.Tensor, tuple[torch.Tensor, ...]]  # (n, H), and (n, H) for each of the first layers


class Shown:
    """The images of a prompt, in the order of their positions.

    Args:
        images: the model's conventions for images. ids: the prompt's tokens, with one `images.token` for each row of an image.
    Attributes:
        names: ids, with negative numbers instead of the images' tokens. at (n,): indices of the images' rows in the prompt.
        places (3, T), shift: the tokens' three-part positions, and the offset added to the positions of tokens after the
        prompt; None and 0 for a model with one-part positions. spans: (first token, end) of each image.
    Raises UsageError where the number of tokens does not match the images.
    """

    def __init__(self, images: Images, ids: Sequence[int], pictures: Sequence[Picture]) -> None:
        self.images, self.pictures = images, tuple(pictures)
        self.ids, self.names = list(ids), list(ids)
        at = [i for i, token in enumerate(ids) if token == images.token]
        if len(at) != sum(p.rows for p in pictures):
            needed = sum(p.rows for p in pictures)
            raise UsageError(
                f"the prompt has {len(at)} picture tokens, but its {len(pictures)} pictures need {needed}; "
                f"leave the token that stands for a picture out of the text"
            )
        self.spans, first = list[tuple[int, int]](), 0
        for p in pictures:
            places, start = at[first : first + p.rows], -1 - (int.from_bytes(p.name, "big") << 20)
            self.spans.append((places[0], places[-1] + 1))
            for i, place in enumerate(places):
                self.names[place] = start - i
            first += p.rows
        self.at = torch.tensor(at)
        self.places: torch.Tensor | None = None
        self.shift = 0
        if images.sections:
            self.places, self.shift = self._places()
        self.runs = _runs(at) if images.whole else []
        self.features: Features | None = None

    def _places(self) -> tuple[torch.Tensor, int]:
        """Three-part positions. For text all parts are equal and increase by 1; an image is a grid, and the text after it
        continues from the grid's longer side."""
        positions, following, end = list[torch.Tensor](), 0, 0
        for p, (first, last) in zip(self.pictures, self.spans, strict=True):
            positions.append(torch.arange(first - end).expand(3, -1) + following)
            following, (h, w) = following + first - end, p.grid
            rows = torch.arange(h).repeat_interleave(w), torch.arange(w).repeat(h)
            positions.append(torch.stack((torch.zeros(h * w, dtype=torch.int64), *rows)) + following)
            following, end = following + max(h, w), last
        positions.append(torch.arange(len(self.ids) - end).expand(3, -1) + following)
        return torch.cat(positions, 1), following - end

    def see(self, features: Sequence[Features], device: torch.device, dtype: torch.dtype) -> "Shown":
        """Set the features that the vision tower computed for each image; returns self."""
        rows = torch.cat([f for f, _ in features]).to(device, dtype)
        added = tuple(torch.cat(layer).to(device, dtype) for layer in zip(*(more for _, more in features), strict=True))
        fit = all(len(f) == p.rows for p, (f, _) in zip(self.pictures, features, strict=True))
        if not fit or len(added) != self.images.deepstack:
            raise DamagedError("the vision tower's features do not have the shape that config.json and the processor ask for")
        self.features = rows, added
        return self

    def part(self, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
        """For tokens first .. end: the rows of images, counted from `first`, and their features."""
        a, b = torch.searchsorted(self.at, torch.tensor([first, end])).tolist()
        assert self.features is not None
        rows, added = self.features
        return self.at[a:b] - first, rows[a:b], tuple(layer[a:b] for layer in added)

    def positions(self, first: int, end: int) -> torch.Tensor:
        """Three-part positions (3, end - first) of tokens first .. end; tokens past the prompt are text."""
        n = len(self.ids)
        places = torch.arange(first, end).expand(3, -1) + self.shift
        if self.places is not None and first < n:
            places = torch.cat([self.places[:, first : min(n, end)], places[:, max(0, n - first) :]], 1)
        return places

    def until(self, first: int, end: int) -> torch.Tensor:
        """(end - first,): the last token that each token attends to, in layers where an image's tokens attend to all of it."""
        seen = torch.arange(first, end)
        for a, b in self.runs:
            seen[max(a - first, 0) : max(min(b, end) - first, 0)] = b - 1
        return seen


def _runs(at: Sequence[int]) -> list[tuple[int, int]]:
    """(first, end) of each run of consecutive numbers."""
    starts = [i for i, place in enumerate(at) if i == 0 or at[i - 1] != place - 1]
    return [(at[a], at[b - 1] + 1) for a, b in zip(starts, [*starts[1:], len(at)], strict=True)]


def end_of_pass(first: int, end: int, whole: Sequence[tuple[int, int]]) -> int:
    """The last cut at or before `end` of a pass that begins at `first`, such that each run of `whole` stays in one pass."""
    while inside := [a for a, b in whole if a < end < b and a >= first]:
        end = min(inside)
    return end


def in_pass(
    images: Images,
    pieces: Sequence[tuple[Shown | None, int, int]],
    device: torch.device,
    steps: torch.Tensor | None = None,
    C: int = 0,
) -> Pictures:
    """The images in a pass over tokens first .. end of some sequences, sequence after sequence.

    steps: (b,) positions of the step rows before these rows; None without step rows. C: rows after the steps, the last of
    which may be padding.
    """
    rows, features, added, places, until, M = list[Any](), list[Any](), list[Any](), list[Any](), list[Any](), 0
    if steps is not None:
        places.append(steps.long().expand(3, -1))
        M = steps.shape[0]
    for shown, first, end in pieces:
        plain = torch.arange(first, end)
        if shown is not None:
            rows_here, features_here, more = shown.part(first, end)
            rows.append(rows_here + M)
            features.append(features_here)
            added.append(more)
        places.append(upload(plain.expand(3, -1) if shown is None else shown.positions(first, end), device))
        until.append(plain if shown is None else shown.until(first, end))
        M += end - first
    if (fill := C - sum(end - first for _, first, end in pieces)) > 0:
        places.append(torch.zeros(3, fill, dtype=torch.int64, device=device))
        until.append(torch.zeros(fill, dtype=torch.int64))
    at = torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64)
    layers = tuple(torch.cat(layer) for layer in zip(*added, strict=True))
    return Pictures(
        images,
        upload(at, device) if len(at) else None,
        None,
        torch.cat(features) if len(at) else None,
        layers,
        torch.cat(places, 1) if images.sections else None,
        upload(torch.cat(until), device) if images.whole and until else None,
    )


class PassImages:
    """The images in recorded passes: tensors at fixed addresses, which hold the rows after the steps, at most `most` of them.

    Args:
        width: of the features.
    """

    def __init__(self, images: Images, most: int, width: int, device: torch.device, dtype: torch.dtype) -> None:
        self.images, self.device = images, device
        self._features = torch.zeros(1 + images.deepstack, most, width, dtype=dtype, device=device)
        self._rows = torch.zeros(4, most, dtype=torch.int32, device=device)  # three positions, and whether it is an image's

    def fill(self, pieces: Sequence[tuple[Shown | None, int, int]], C: int) -> None:
        """Set the C rows after the steps to tokens first .. end of some sequences, sequence after sequence."""
        numbers, at = np.zeros((4, C), np.int32), 0
        for shown, first, end in pieces:
            n = end - first
            if shown is None:
                numbers[:3, at : at + n] = np.arange(first, end)
            else:
                numbers[:3, at : at + n] = shown.positions(first, end).numpy()
                rows, features, added = shown.part(first, end)
                numbers[3, at + rows.numpy()] = 1
                if len(rows):
                    there = upload(at + rows, self.device)
                    for to, values in zip(self._features.unbind(), (features, *added), strict=True):
                        to.index_copy_(0, there, values)
            at += n
        self._rows[:, :C].copy_(upload(numbers, self.device))

    def of(self, C: int, steps: torch.Tensor) -> Pictures:
        """The images of a pass with C rows after steps at positions `steps` (b,)."""
        features, rows, places = self._features[:, :C], self._rows[:, :C], None
        if self.images.sections:
            places = torch.cat([steps.long().expand(3, -1), rows[:3].long()], 1)
        return Pictures(self.images, None, (rows[3] != 0)[:, None], features[0], tuple(features[1:]), places)
