"""Images for a loaded model: its processor, its vision tower, and a cache of the last images' features by name."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lowq_cli.engine.model_record import owned
from lowq_cli.engine.native import NativeDecoder
from lowq_cli.engine.pictures import Features, Shown
from lowq_cli.engine.plan import plan_of, why_not
from lowq_cli.engine.recorded_tower import TOGETHER, RecordedTower
from lowq_cli.files.picture_file import decode, read_picture
from lowq_cli.files.source import open_source
from lowq_cli.hf.pictures import Picture, Processor, expanded, framed, size_of
from lowq_packers.arch.parts import Images
from lowq_packers.errors import UnsupportedError

KEPT_BYTES = 1 << 28  # max. bytes of cached features: 256 MB, 30 images of 1,024 rows for an 8B with three deepstack layers


class Sight:
    """Computes the features of images.

    Args:
        folder: the checkpoint's. images: the model's conventions for images. device, dtype: of the features.
        tower: computes the features; None: the checkpoint's. together: max. rows of features of images that run together.
    """

    def __init__(
        self,
        folder: Path,
        images: Images,
        device: torch.device,
        dtype: torch.dtype,
        tower: RecordedTower | None = None,
        together: int = TOGETHER,
    ) -> None:
        self.folder, self.images, self.device, self.dtype, self.together = folder, images, device, dtype, together
        self._processor: Processor | None = None
        self._tower = tower
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

    def load(self) -> RecordedTower:
        """The tower; loaded at the first call."""
        if self._tower is None:
            from lowq_cli.hf.tower import load_tower

            with open_source(self.folder) as source:
                self._tower = RecordedTower(load_tower(source, self.device, self.dtype))
        return self._tower

    def features(self, pictures: Sequence[Picture], waiting: Iterable[Picture] = ()) -> list[Features]:
        """The tower's features of images, cached; those of images that wait may be computed with images of the same size."""
        found = {p.name: self._kept.pop(p.name) for p in pictures if p.name in self._kept}
        missing = {p.name: p for p in pictures if p.name not in found}
        others = {p.name: p for p in waiting if p.name not in found and p.name not in self._kept} if missing else {}
        while missing:
            few = _together(missing | others, self.together)
            for p, features in zip(few, self.load()([p.inputs for p in few], few[0].rows), strict=True):
                found[p.name] = features
                missing.pop(p.name, None)
                others.pop(p.name, None)
            self.computed += len(few)
        self._kept |= found
        while len(self._kept) > 1 and sum(map(_bytes, self._kept.values())) > KEPT_BYTES:
            self._kept.popitem(last=False)
        return [found[p.name] for p in pictures]

    def written(self, text: str, pictures: Sequence[Picture], spelled: Callable[[int], str | None]) -> str:
        """A text with the tokens of its images at their placeholders, or at its beginning if it has none."""
        if pictures and (placeholder := framed(self.images, spelled)) not in text:
            text = placeholder * len(pictures) + text
        return expanded(text, pictures, self.images, spelled)

    def shown(self, ids: Sequence[int], pictures: Sequence[Picture], waiting: Iterable[Picture] = ()) -> Shown:
        """The images of a prompt, with their features; `waiting` as `features` takes it."""
        seen = Shown(self.images, ids, pictures)
        return seen.see(self.features(pictures, waiting), self.device, self.dtype)


def _together(pictures: Mapping[bytes, Picture], most_rows: int) -> list[Picture]:
    """Images for one run of the tower: the first one and others of its size; their number is a power of two."""
    first, *others = pictures.values()
    alike = [first, *(p for p in others if p.rows == first.rows and size_of(p.inputs) == size_of(first.inputs))]
    most = max(1, min(len(alike), most_rows // first.rows))
    return alike[: 1 << (most.bit_length() - 1)]


def _bytes(features: Features) -> int:
    rows, layers = features
    return rows.nbytes + sum(layer.nbytes for layer in layers)


def sight_of(model: Any) -> Sight:
    """The `Sight` of a loaded model, kept with the model. Raises UnsupportedError for a model that does not take images."""
    record = owned(model)
    if record.sight is None or (record.sight.device, record.sight.dtype) != (model.device, model.dtype):
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
