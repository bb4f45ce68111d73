"""A picture as its model is given it: by the checkpoint's own processor of transformers, and written into the prompt.

What stands in a text for a picture depends on how many rows of features it makes, which `written` knows of each form
(`arch.parts.Images`). transformers' processors of whole texts say the same, and tests compare with them; they need torchvision
for videos that nobody shows, and a second tokenizer.
"""

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowq_cli.files.checked_view import only_its_files
from lowq_cli.files.source import open_source
from lowq_packers.arch.parts import Images
from lowq_packers.errors import DamagedError, NotFoundError, UnsupportedError, UsageError, library_errors
from lowq_packers.lazy import torch

if TYPE_CHECKING:
    from PIL.Image import Image

Spelled = Callable[[int], str | None]
NAMES = ("preprocessor_config.json", "processor_config.json")
MOST_ROWS = 1 << 16  # of features of one picture; Qwen's largest makes 16,384
MOST_SIDE, MOST_AREA = 1 << 13, 1 << 26  # what a processor may be told to make of a picture: sides, or an area
AREAS = ("min_pixels", "max_pixels")


@dataclass(frozen=True)
class Picture:
    """One picture of a text.

    inputs: what the tower is given. rows: rows of features that it makes. grid: their number in height and width; () where
    nothing asks for it. tiles: those of Llama 4, in height and width.
    """

    inputs: "Mapping[str, torch.Tensor]"
    rows: int
    grid: tuple[int, ...] = ()
    tiles: tuple[int, ...] = field(default=())

    @cached_property
    def name(self) -> bytes:
        """A digest of what the tower is given."""
        h = blake2b(digest_size=16)
        for key, t in sorted(self.inputs.items()):
            h.update(f"{key} {t.dtype} {tuple(t.shape)} ".encode())
            h.update(t.contiguous().view(torch.uint8).numpy().data)
        return h.digest()


@dataclass(frozen=True)
class Packed:
    """A picture on its way to another process: its name and rows, and what `packed` made of its inputs."""

    name: bytes
    rows: int
    grid: tuple[int, ...]
    tiles: tuple[int, ...]
    data: bytes


def packed(picture: Picture) -> Packed:
    """A picture as bytes."""
    data = pickle.dumps({k: t.numpy() for k, t in picture.inputs.items()})
    return Packed(picture.name, picture.rows, picture.grid, picture.tiles, data)


def unpacked(given: Packed) -> Picture:
    """The picture that was packed, in a process of ours."""
    return Picture({k: torch.from_numpy(t) for k, t in pickle.loads(given.data).items()}, given.rows, given.grid)


class Processor:
    """transformers' processor of a folder's pictures. Raises NotFoundError, UnsupportedError, DamagedError."""

    def __init__(self, folder: Path, images: Images) -> None:
        self.images, self.folder = images, folder
        named = [name for name in NAMES if (folder / name).is_file()]
        if not named:
            raise NotFoundError(f"{folder} has no {NAMES[0]}, which says how pictures are prepared; copy the original model's")
        from transformers import AutoImageProcessor

        unread = library_errors(DamagedError, f"the processor of {folder} cannot be read")
        with unread, open_source(folder) as source, only_its_files(source) as view:
            self.own: Any = AutoImageProcessor.from_pretrained(str(view), local_files_only=True, trust_remote_code=False)
        _check_sizes(self.own)

    def __call__(self, image: "Image") -> Picture:
        """A picture as the tower is given it. Raises UsageError where the processor refuses it."""
        how: dict[str, Any] = {"return_tensors": "pt"}
        if self.images.form == "rows":
            how["patch_size"] = self.images.patch * self.images.merge
        with library_errors(UsageError, "the model's processor refuses the picture"):
            made = dict(self.own(images=[image], **how))
        return self._picture(made)

    def _picture(self, made: dict[str, Any]) -> Picture:
        images, pixels = self.images, made["pixel_values"]
        if images.form == "run":
            _, h, w = (int(n) for n in made["image_grid_thw"][0])
            h, w = h // images.merge, w // images.merge
            found = Picture(_only(made, "pixel_values", "image_grid_thw"), h * w, (h, w))
        elif images.form == "rows":
            h, w = (int(n) // (images.patch * images.merge) for n in made["image_sizes"][0])
            sizes = torch.as_tensor(made["image_sizes"])
            found = Picture({"pixel_values": pixels, "image_sizes": sizes}, h * w, (h, w))
        elif images.form == "tiles":
            each = (pixels.shape[-2] // images.patch) * (pixels.shape[-1] // images.patch) // images.merge**2
            tiles = tuple(int(n) for n in made["aspect_ratios"][0])
            found = Picture({"pixel_values": pixels.flatten(0, -4)}, each * pixels.shape[-4], tiles=tiles)
        elif images.rows:
            found = Picture(_only(made, "pixel_values"), images.rows)
        else:
            rows = int(made["num_soft_tokens_per_image"][0])
            found = Picture(_only(made, "pixel_values", "image_position_ids"), rows)
        if not 0 < found.rows <= MOST_ROWS:
            raise UsageError(f"the picture makes {found.rows} tokens; from 1 to {MOST_ROWS} can be, change its size")
        return found


def _only(made: Mapping[str, Any], *names: str) -> "dict[str, torch.Tensor]":
    return {n: torch.as_tensor(made[n]) for n in names}


def _check_sizes(processor: Any) -> None:
    """Raise DamagedError for a config that would make too much of the smallest picture."""
    sizes = getattr(processor, "size", None) or {}
    sizes = dict(sizes) | {n: getattr(processor, n, None) for n in (*AREAS, "patch_size", "max_image_size", "max_patches")}
    area = hasattr(processor, "merge_size")  # Qwen's edges are areas
    for name, n in sizes.items():
        most = MOST_AREA if area or name in AREAS else MOST_SIDE
        if type(n) in (int, float) and not 0 < n <= most:
            raise DamagedError(f"the processor's config has {name} = {n}; at most {most} can be")


def place(images: Images, spelled: Spelled) -> str:
    """What a chat template writes where a picture is to be."""
    if images.form == "tiles":
        return "<|image|>"
    return _text(spelled, images.begin if images.around else images.token)


def framed(images: Images, spelled: Spelled) -> str:
    """The same for a prompt without a template."""
    own = place(images, spelled)
    return _text(spelled, images.begin) + own + _text(spelled, images.end) if images.form == "run" and images.begin else own


def written(images: Images, picture: Picture | Packed, spelled: Spelled) -> str:
    """What stands in a prompt for a picture, at its `place`."""
    token = _text(spelled, images.token)
    if images.form == "run":
        return token * picture.rows
    if images.form == "rows":
        h, w = picture.grid
        return "[IMG_BREAK]".join([token * w] * h) + "[IMG_END]"
    begin, end = _text(spelled, images.begin), _text(spelled, images.end)
    if images.form == "framed":
        return images.around + begin + token * picture.rows + end + images.around
    h, w = picture.tiles
    each = token * (picture.rows // (h * w + 1 if h * w > 1 else 1))
    row = "<|tile_x_separator|>".join([each] * w) + "<|tile_y_separator|>"
    return begin + (row * h if h * w > 1 else "") + "<|image|>" + each + end


def expanded(text: str, pictures: Sequence[Picture | Packed], images: Images, spelled: Spelled) -> str:
    """A text with its pictures written at their places. Raises UsageError where there are more places or fewer."""
    own = place(images, spelled)
    parts = text.split(own)
    if len(parts) - 1 != len(pictures):
        raise UsageError(
            f"the text has {len(parts) - 1} places for pictures ({own}) and there are {len(pictures)} pictures; "
            f"leave {own} out of what you write"
        )
    made = [part for pair in zip(parts, (written(images, p, spelled) for p in pictures), strict=False) for part in pair]
    return "".join([*made, parts[-1]])


def _text(spelled: Spelled, token: int) -> str:
    found = spelled(token)
    if not found:
        raise UnsupportedError(f"the tokenizer has no token {token}, which config.json names for pictures")
    return found
