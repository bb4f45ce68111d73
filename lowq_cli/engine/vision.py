"""Images for a loaded model: its processor, its vision tower, and a cache of the last images' features by name."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lowq_cli.engine.model_record import owned
from lowq_cli.engine.native import NativeDecoder
from lowq_cli.engine.pictures import Features, Shown
from lowq_cli.engine.plan import plan_of, why_not
from lowq_cli.files.picture_file import decode, read_picture
from lowq_cli.files.source import open_source
from lowq_cli.hf.pictures import Picture, Processor, expanded, framed
from lowq_packers.arch.parts import Images
from lowq_packers.errors import UnsupportedError

if TYPE_CHECKING:
    from lowq_cli.hf.tower import Tower

KEPT_BYTES = 1 << 28  # max. bytes of cached features: 256 MB, 30 images of 1,024 rows for an 8B with three deepstack layers


class Sight:
    """Computes the features of images.

    Args:
        folder: the checkpoint's. images: the model's conventions for images. device, dtype: of the features.
    """

    def __init__(self, folder: Path, images: Images, device: torch.device, dtype: torch.dtype) -> None:
        self.folder, self.images, self.device, self.dtype = folder, images, device, dtype
        self._processor: Processor | None = None
        self._tower: Tower | None = None
        self._lock = threading.Lock()
        self._kept = OrderedDict[bytes, Features]()
        self.computed = 0  # number of images that the tower has computed

    def picture(self, given: Any) -> Picture:
        """An image preprocessed for the tower, given a path, a file's bytes, a PIL or preprocessed image. Raises UsageError."""
        if isinstance(given, Picture):
            return given
        if isinstance(given, bytes):
            given = decode(given)
        elif isinstance(given, str | Path):
            given = read_picture(given)
        with self._lock:
            self._processor = self._processor or Processor(self.folder, self.images)
        return self._processor(given)

    def load(self) -> "Tower":
        """The tower; loaded at the first call."""
        if self._tower is None:
            from lowq_cli.hf.tower import load_tower

            with open_source(self.folder) as source:
                self._tower = load_tower(source, self.device, self.dtype)
        return self._tower

    def features(self, picture: Picture) -> Features:
        """The tower's features of an image, cached."""
        computed = self._kept.pop(picture.name, None)
        if computed is None:
            computed = self.load()(picture.inputs)
            self.computed += 1
        self._kept[picture.name] = computed
        while len(self._kept) > 1 and sum(map(_bytes, self._kept.values())) > KEPT_BYTES:
            self._kept.popitem(last=False)
        return computed

    def written(self, text: str, pictures: Sequence[Picture], spelled: Callable[[int], str | None]) -> str:
        """A text with the tokens of its images at their placeholders, or at its beginning if it has none."""
        if pictures and (placeholder := framed(self.images, spelled)) not in text:
            text = placeholder * len(pictures) + text
        return expanded(text, pictures, self.images, spelled)

    def shown(self, ids: Sequence[int], pictures: Sequence[Picture]) -> Shown:
        """The images of a prompt, with their features."""
        seen = Shown(self.images, ids, pictures)
        return seen.see([self.features(p) for p in pictures], self.device, self.dtype)


def _bytes(features: Features) -> int:
    rows, layers = features
    return rows.nbytes + sum(layer.nbytes for layer in layers)


def sight_of(model: Any) -> Sight:
    """The `Sight` of a loaded model, kept with the model. Raises UnsupportedError for a model that does not take images."""
    record = owned(model)
    if record.sight is None:
        if reason := why_not(model):
            raise UnsupportedError(f"pictures need lowq's own decoder, which does not support this model: {reason}")
        images, folder = plan_of(model).model.images, record.folder or getattr(model, "name_or_path", "")
        if images is None:
            raise UnsupportedError(
                f"{model.config.model_type} has no picture inputs; a GGUF file needs its mmproj file next to it"
            )
        record.sight = Sight(Path(folder), images, model.device, model.dtype)
    sight: Sight = record.sight
    return sight


def check_decoder(decoder: Any) -> None:
    """Raise UnsupportedError for a decoder that does not take images."""
    if not isinstance(decoder, NativeDecoder):
        raise UnsupportedError(f"pictures need lowq's own decoder, and this one is {decoder.name}: {decoder.reason}")
