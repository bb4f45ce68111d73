"""Images with texts to calibrate on: each window is an image, then the image's text, then other text.

In all windows of a run the image is at the same place and has the same number of rows, so that layers get the same arguments
for all windows (three-part positions, bidirectional attention within an image). Images are therefore fitted into a square of
one size. In the token ids (n, T), the rows of image i are the number -1 - i.
"""

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from lowq_cli.calibrate import texts
from lowq_cli.files.picture_file import read_picture
from lowq_cli.files.source import Source
from lowq_cli.hf.pictures import PIXELS, Picture, Processor, expanded, framed, normalised
from lowq_packers.arch.config import NotPlain, read_config
from lowq_packers.arch.parts import Images
from lowq_packers.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    from PIL.Image import Image

SIDE = 16  # rows of features per side of an image where the model takes any size: 256 rows, half of a window's tokens


class Pictured:
    """The images of a calibration.

    Raises UnsupportedError for a model that takes no images, or whose layers cannot be walked with them; UsageError where they
    leave no room for a text.
    """

    def __init__(self, source: Source, base: Any, tokenizer: Any, text: texts.Text, tokens: int, window: int) -> None:
        self.images, self.takes = _images(source), inspect.signature(base.forward).parameters
        self.dtype = base.dtype
        assert source.folder
        processor = Processor(source.folder, self.images)
        count = max(1, tokens // window // texts.BATCH) * texts.BATCH
        chosen = torch.linspace(0, len(text.pairs) - 1, min(count, len(text.pairs))).round().long().tolist()
        spelled, side = tokenizer.convert_ids_to_tokens, SIDE * self.images.patch * self.images.merge
        self.pictures: list[Picture] = [processor(_squared(read_picture(text.pairs[i][0]), side)) for i in chosen]
        framed_text = framed(self.images, spelled)
        written = [expanded(framed_text, [p], self.images, spelled) for p in self.pictures]
        heads = [texts.tokenize(tokenizer, w) for w in written]
        self.lead = len(heads[0])
        if len({len(h) for h in heads}) > 1 or self.lead >= window:
            raise UsageError(f"the pictures take {self.lead} of a window's {window} tokens and leave no room for a text")
        wholes = [texts.tokenize(tokenizer, f"{w} {text.pairs[i][1]}\n\n") for w, i in zip(written, chosen, strict=True)]
        self.ids = self._windows(wholes, texts.tokenize(tokenizer, text.words), count, window)
        texts.check_ids(self.ids.clamp(min=0).unique().tolist(), base.config.get_text_config().vocab_size)

    def _windows(self, wholes: Sequence[torch.Tensor], others: torch.Tensor, count: int, window: int) -> torch.Tensor:
        """Windows (count, window): the images with their texts, repeated as needed; other text fills each window up."""
        rows, at = list[torch.Tensor](), 0
        for i in range(count):
            number = i % len(wholes)
            ids = wholes[number][:window].clone()
            ids[: self.lead][ids[: self.lead] == self.images.token] = -1 - number
            filling = torch.arange(at, at + window - len(ids)) % len(others)
            at += len(filling)
            rows.append(torch.cat([ids, others[filling]]))
        return torch.stack(rows)

    def before(self, windows: torch.Tensor) -> torch.Tensor:
        """Windows (n, T) of other tokens, whose first tokens are replaced with images."""
        turns = torch.arange(len(windows)) % len(self.ids)
        return torch.cat([self.ids[turns, : self.lead], windows[:, self.lead :]], 1)

    def __call__(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """The arguments of transformers' model for windows (n, T)."""
        seen = [normalised(self.pictures[-1 - int(row.min())].inputs) for row in ids]
        arguments = {key: torch.cat([one[key] for one in seen]) for key in seen[0]}
        arguments[PIXELS] = arguments[PIXELS].to(self.dtype)  # Llama 4 takes no other
        kinds = next((k for k in ("mm_token_type_ids", "token_type_ids") if k in self.takes), None)
        if kinds:
            arguments[kinds] = (ids < 0).long()
        return arguments | {"input_ids": torch.where(ids < 0, self.images.token, ids)}


def _images(source: Source) -> Images:
    """The description of a model's image inputs. Raises UnsupportedError."""
    try:
        images = read_config(source.config, len(source.headers))[1].images
    except NotPlain as e:
        raise UnsupportedError(f"{source.name} cannot be calibrated on pictures: {e}; give a text") from None
    if images is None:
        raise UnsupportedError(f"{source.name} has no picture inputs to calibrate on; give a text")
    return images


def _squared(image: "Image", side: int) -> "Image":
    """The image in the middle of a white square."""
    from PIL import Image, ImageOps

    return ImageOps.pad(image, (side, side), Image.Resampling.BICUBIC, color=(255, 255, 255))
