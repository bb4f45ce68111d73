"""Prepares images for a model with the checkpoint's processor of transformers, and writes their placeholders into the prompt.

The placeholders of an image depend on its number of feature rows; `written` has them for each form (`arch.parts.Images`). Tests
compare them with transformers' processors of whole texts, which are not used because they need torchvision (for videos) and a
second tokenizer.
"""

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowq_cli.files.checked_view import only_its_files
from lowq_cli.files.source import open_source
from lowq_packers.arch.parts import Images
from lowq_packers.errors import DamagedError, LowqError, NotFoundError, UnsupportedError, UsageError, library_errors, naming
from lowq_packers.lazy import torch

if TYPE_CHECKING:
    from PIL.Image import Image

Spelled = Callable[[int], str | None]
NAMES = ("preprocessor_config.json", "processor_config.json")
MOST_ROWS = 1 << 16  # max. rows of features per image; Qwen's largest image makes 16,384
MOST_SIDE, MOST_AREA = 1 << 13, 1 << 26  # max. side and max. area of resized images in a processor's config, in pixels
AREAS = ("min_pixels", "max_pixels")
PIXELS = "pixel_values"  # the input that holds an image
MEAN, STD = "level_mean", "level_std"  # inputs of an image whose pixels are levels 0 .. 255, per channel or for all
TRIED = (61, 40)  # width and height of the image with which a processor is tried; odd, so that it is resized and padded


@dataclass(frozen=True)
class Picture:
    """One image of a text.

    inputs: the arguments of the tower, before `normalised`. rows: number of feature rows. grid: that number in height and
    width; () where it is not needed. tiles: number of Llama 4's tiles in height and width.
    """

    inputs: "Mapping[str, torch.Tensor]"
    rows: int
    grid: tuple[int, ...] = ()
    tiles: tuple[int, ...] = field(default=())

    @cached_property
    def name(self) -> bytes:
        """A digest of the tower's inputs. For 6 MB SHA-256, which CPUs have instructions for, takes 3 ms, BLAKE2 14 ms."""
        h = sha256()
        for key, t in sorted(self.inputs.items()):
            h.update(f"{key} {t.dtype} {tuple(t.shape)} ".encode())
            h.update(t.contiguous().view(torch.uint8).numpy().data)
        return h.digest()[:16]


def normalised(inputs: "Mapping[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
    """The arguments of the tower. Pixels that are levels 0 .. 255 become (level - mean) / std in fp32."""
    arguments = {k: t for k, t in inputs.items() if k not in (MEAN, STD)}
    if MEAN in inputs:
        levels, mean, std = arguments[PIXELS], inputs[MEAN][:, None], inputs[STD][:, None]
        # (patches, channels * pixels of one) or (images, channels, height, width); one mean for all takes any shape
        channels = levels.unflatten(1, (len(mean), -1)) if levels.dim() == 2 else levels.flatten(2)
        arguments[PIXELS] = ((channels.float() - mean) / std).reshape(levels.shape)
    return arguments


def joined(images: "Sequence[Mapping[str, torch.Tensor]]") -> "dict[str, torch.Tensor]":
    """The inputs of images of one `size_of` as those of a batch."""
    return {k: t if k in (MEAN, STD) else torch.cat([one[k] for one in images]) for k, t in images[0].items()}


def size_of(image: "Mapping[str, torch.Tensor]") -> tuple[Any, ...]:
    """What images have in common whose features are computed by the same operations."""
    return tuple((k, t.shape, t.dtype, b"" if k == PIXELS else t.numpy().tobytes()) for k, t in sorted(image.items()))


@dataclass(frozen=True)
class Packed:
    """An image on its way to another process: its name, its rows, and its inputs as `packed` serialized them."""

    name: bytes
    rows: int
    grid: tuple[int, ...]
    tiles: tuple[int, ...]
    data: bytes | bytearray

    def __reduce_ex__(self, protocol: Any) -> Any:
        data = pickle.PickleBuffer(self.data) if protocol >= 5 else self.data  # which need not be copied (large_messages.py)
        return Packed, (self.name, self.rows, self.grid, self.tiles, data)


def packed(picture: Picture, name: bytes = b"") -> Packed:
    """The image as bytes. name: a digest of the file that the image was made from, which takes less time than its inputs'."""
    data = pickle.dumps({k: t.numpy() for k, t in picture.inputs.items()})
    return Packed(name or picture.name, picture.rows, picture.grid, picture.tiles, data)


def unpacked(given: Packed) -> Picture:
    """The image from its bytes, which must come from a process of lowq."""
    picture = Picture(
        {k: torch.from_numpy(t) for k, t in pickle.loads(given.data).items()}, given.rows, given.grid, given.tiles
    )
    picture.__dict__["name"] = given.name  # as the property keeps it: 3 ms of hashing
    return picture


class Processor:
    """transformers' image processor of a model folder. Raises NotFoundError, UnsupportedError, DamagedError."""

    def __init__(self, folder: Path, images: Images) -> None:
        self.images, self.folder = images, folder
        named = [name for name in NAMES if (folder / name).is_file()]
        if not named:
            raise NotFoundError(f"{folder} has no {NAMES[0]}, which says how pictures are prepared; copy the original model's")
        from transformers import AutoImageProcessor

        if images.form == "tiles" and find_spec("torchvision") is None:
            raise UnsupportedError(f"the processor of {folder} needs torchvision; pip install torchvision")
        unread = library_errors(DamagedError, f"the processor of {folder} cannot be read")
        with unread, open_source(folder) as source, only_its_files(source) as view:
            self.own: Any = AutoImageProcessor.from_pretrained(str(view), local_files_only=True, trust_remote_code=False)
        self.file = named[0]
        with naming(folder / self.file):
            _check_sizes(self.own)

    def __call__(self, image: "Image") -> Picture:
        """The image as the tower takes it. Raises UsageError if the processor refuses it."""
        return self._of_levels(image, *self._levels) if self._levels else self._prepared(image)

    @cached_property
    def _levels(self) -> "tuple[torch.Tensor, torch.Tensor] | None":
        """Mean and deviation of each channel's levels, or one for all; None where pixels are not (level - mean) / std.

        Levels take a quarter of the bytes on their way to the device, which are hashed and copied between processes.
        """
        own, ones = self.own, ([0.0] * 3, [1.0] * 3)
        mean, std = (own.image_mean, own.image_std) if getattr(own, "do_normalize", False) else ones
        if not getattr(own, "do_rescale", False) or not mean or not std:
            return None
        try:
            by = torch.stack([(torch.tensor(x, dtype=torch.float32) / own.rescale_factor).expand(3) for x in (mean, std)])
            by = by[:, :1] if (by == by[:, :1]).all() else by
            image = _noise()
            pixels = self._prepared(image).inputs[PIXELS]
            tried = normalised(self._of_levels(image, by[0], by[1]).inputs)[PIXELS]
        except (LowqError, OverflowError, TypeError, ValueError, RuntimeError):  # what it says of the image is more useful
            return None
        same = pixels.shape == tried.shape and torch.allclose(pixels.float(), tried, rtol=0, atol=1e-5)
        return (by[0], by[1]) if same else None

    def _of_levels(self, image: "Image", mean: "torch.Tensor", std: "torch.Tensor") -> Picture:
        """As `_prepared`, with pixels as levels."""
        picture = self._prepared(image, do_rescale=False, do_normalize=False)
        levels = picture.inputs[PIXELS].to(torch.uint8)
        return replace(picture, inputs={**picture.inputs, PIXELS: levels, MEAN: mean, STD: std})

    def _prepared(self, image: "Image", **how: Any) -> Picture:
        if self.images.form == "rows":
            how["patch_size"] = self.images.patch * self.images.merge
        with library_errors(UsageError, f"the model's processor ({self.file}) refuses the picture"):
            prepared = dict(self.own(images=[image], return_tensors="pt", **how))
        return self._picture(prepared)

    def _picture(self, features: dict[str, Any]) -> Picture:
        images, pixels = self.images, features[PIXELS]
        if any(int(n) for n in features.get("num_crops", ())):
            raise UnsupportedError(f"{self.folder}/{NAMES[0]} has do_pan_and_scan, which lowq does not write; take it out")
        if images.rows:
            picture = Picture(_only(features, PIXELS), images.rows * pixels.shape[0])
        elif images.form == "run":
            _, h, w = (int(n) for n in features["image_grid_thw"][0])
            h, w = h // images.merge, w // images.merge
            picture = Picture(_only(features, PIXELS, "image_grid_thw"), h * w, (h, w))
        elif images.form == "rows":
            h, w = (int(n) // (images.patch * images.merge) for n in features["image_sizes"][0])
            sizes = torch.as_tensor(features["image_sizes"])
            picture = Picture({PIXELS: pixels, "image_sizes": sizes}, h * w, (h, w))
        elif images.form == "tiles":
            each = (pixels.shape[-2] // images.patch) * (pixels.shape[-1] // images.patch) // images.merge**2
            tiles = tuple(int(n) for n in features["aspect_ratios"][0])
            picture = Picture({PIXELS: pixels.flatten(0, -4)}, each * pixels.shape[-4], tiles=tiles)
        else:
            rows = int(features["num_soft_tokens_per_image"][0])
            picture = Picture(_only(features, PIXELS, "image_position_ids"), rows)
        if not 0 < picture.rows <= MOST_ROWS:
            raise UsageError(f"the picture makes {picture.rows} tokens; allowed are 1 to {MOST_ROWS}, change its size")
        return picture


def _noise() -> "Image":
    """An image of random levels."""
    from PIL import Image

    w, h = TRIED
    levels = torch.randint(0, 256, (h, w, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return Image.fromarray(levels.numpy())


def _only(features: Mapping[str, Any], *names: str) -> "dict[str, torch.Tensor]":
    return {n: torch.as_tensor(features[n]) for n in names}


def _check_sizes(processor: Any) -> None:
    """Raise DamagedError for a processor's config with sizes that are not positive or exceed MOST_SIDE or MOST_AREA."""
    sizes = [pair for n in ("size", "crop_size") for pair in dict(getattr(processor, n, None) or {}).items()]
    sizes += [(n, getattr(processor, n, None)) for n in (*AREAS, "patch_size", "max_image_size", "max_patches")]
    area = hasattr(processor, "merge_size")  # Qwen's edges are areas
    for name, n in sizes:
        most = MOST_AREA if area or name in AREAS else MOST_SIDE
        if type(n) in (int, float) and not 0 < n <= most:
            raise DamagedError(f"the processor's config has {name} = {n}; at most {most} is allowed")


def place(images: Images, spelled: Spelled) -> str:
    """The text that a chat template writes at the place of an image."""
    if images.form == "tiles":
        return "<|image|>"
    return _text(spelled, images.begin if images.around else images.token)


def framed(images: Images, spelled: Spelled) -> str:
    """The same for a prompt without a template."""
    placeholder = place(images, spelled)
    return (
        _text(spelled, images.begin) + placeholder + _text(spelled, images.end)
        if images.form == "run" and images.begin
        else placeholder
    )


def written(images: Images, picture: Picture | Packed, spelled: Spelled) -> str:
    """The placeholders that replace an image's `place` in a prompt."""
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


def check_typed(messages: Sequence[Mapping[str, Any]], images: Images, spelled: Spelled) -> None:
    """Raise UsageError if a message spells an image's `place`: an image that the template leaves out would be shown there."""
    placeholder = place(images, spelled)
    if any(placeholder in str(m) for m in messages):
        raise UsageError(f"a message has the text {placeholder}, which stands for a picture; {_leave_out(placeholder)}")


def _leave_out(placeholder: str) -> str:
    return f"leave {placeholder} out of what you write"


def expanded(text: str, pictures: Sequence[Picture | Packed], images: Images, spelled: Spelled) -> str:
    """The text with the placeholders of its images. Raises UsageError if images and places differ in number."""
    placeholder = place(images, spelled)
    parts = text.split(placeholder)
    if len(parts) - 1 < len(pictures):
        raise UsageError(
            f"the chat template writes {len(parts) - 1} of the {len(pictures)} pictures; send pictures in messages of the user"
        )
    if len(parts) - 1 > len(pictures):
        raise UsageError(f"the text has {len(parts) - 1} places for {len(pictures)} pictures; {_leave_out(placeholder)}")
    pieces = [part for pair in zip(parts, (written(images, p, spelled) for p in pictures), strict=False) for part in pair]
    return "".join([*pieces, parts[-1]])


def _text(spelled: Spelled, token: int) -> str:
    token_text = spelled(token)
    if not token_text:
        raise UnsupportedError(f"the tokenizer has no token {token}, which config.json names for pictures")
    return token_text
