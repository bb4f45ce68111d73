"""Folders of tiny random models that take pictures, with a tokenizer, a chat template and a processor, as their publishers'."""

import json
import random
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

import pictured
import torch
from PIL import Image, ImageDraw
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from lowq_cli.files.source import DEMO

VOCAB = 480
TURNS = ("<|im_start|>", "<|im_end|>", "<bos>")
PLACES = {
    "gemma3": "<start_of_image>", "gemma4": "<|image|>", "mistral3": "[IMG]", "llama4": "<|image|>",
    "llava": "<image>", "internvl": "<IMG_CONTEXT>",
}  # fmt: skip
TOKENS = {  # in addition to TURNS; the first is the image token
    "gemma3": ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
    "gemma4": ("<|image|>", "<|image>", "<image|>"),
    "mistral3": ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    "llava": ("<image>", "<pad>", "<unk>"),
    "internvl": ("<IMG_CONTEXT>", "<img>", "</img>"),
    "llama4": ("<|patch|>", "<|image_start|>", "<|image_end|>", "<|image|>", "<|tile_x_separator|>", "<|tile_y_separator|>"),
}
QWEN = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
MEAN = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
PROCESSORS: dict[str, dict[str, Any]] = {
    "gemma3": {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 16, "width": 16}, **MEAN},
    "llava": {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 16},
        "crop_size": {"height": 16, "width": 16},
        **MEAN,
    },
    "internvl": {
        "image_processor_type": "GotOcr2ImageProcessor",
        "size": {"height": 16, "width": 16},
        "crop_to_patches": True,
        "min_patches": 1,
        "max_patches": 4,
        **MEAN,
    },
    "llama4": {
        "image_processor_type": "Llama4ImageProcessor",
        "size": {"height": 16, "width": 16},
        "max_patches": 4,
        **MEAN,
    },
    "gemma4": {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 4, "max_soft_tokens": 70},
    "mistral3": {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 48}, "patch_size": 4, **MEAN},
}
OF_QWEN = {
    "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2,
    "size": {"shortest_edge": 256, "longest_edge": 2304}, **MEAN,
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}PLACE{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TILES = find_spec("torchvision") is not None  # which transformers' processor of Llama 4 needs
NAMES = tuple(n for n in pictured.SIZES if n != "llava/pixtral" and (n != "llama4" or TILES))


def tokenizer(family: str) -> Tokenizer:
    """Byte-level BPE of 400 tokens, and the special tokens of a family."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([(DEMO / "sample.txt").read_text()[:20000]], trainer)
    made.add_special_tokens([AddedToken(t, special=True) for t in (*TURNS, *TOKENS.get(family, QWEN))])
    return made


def write(family: str, folder: Path, dtype: torch.dtype = torch.float32, **more: Any) -> Path:
    """A folder of a family; `more`: of `pictured.fields`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = tokenizer(family)
    row, begin, end = (tokens.token_to_id(t) for t in TOKENS.get(family, QWEN)[:3])
    ids = {"image_token_id": row, "boi_token_id": begin, "eoi_token_id": end}
    if family in pictured.BY_INDEX:
        ids = {"image_token_index": row, "boi_token_index": begin, "eoi_token_index": end}
    elif family not in ("gemma4", "internvl"):
        ids = {"image_token_id": row, "vision_start_token_id": begin, "vision_end_token_id": end}
    eos = tokens.token_to_id("<|im_end|>")
    model = pictured.model(family, ids=ids, text=dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB), **more)
    model.generation_config.eos_token_id = model.config.get_text_config().eos_token_id = eos
    model.to(dtype).save_pretrained(folder)
    tokens.save(str(folder / "tokenizer.json"))
    place = PLACES.get(family, "".join((QWEN[1], QWEN[0], QWEN[2])))
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": "<bos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("PLACE", place))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS.get(family, OF_QWEN)))
    return folder


def drawing(seed: int, size: tuple[int, int] = (60, 44)) -> Image.Image:
    """A picture of coloured shapes."""
    r = random.Random(seed)
    image = Image.new("RGB", size, tuple(r.randrange(256) for _ in range(3)))
    pen = ImageDraw.Draw(image)
    for _ in range(6):
        x, y = r.randrange(size[0]), r.randrange(size[1])
        pen.rectangle((x, y, x + r.randrange(4, 30), y + r.randrange(4, 30)), fill=tuple(r.randrange(256) for _ in range(3)))
    return image


def encoded(image: Image.Image, kind: str = "PNG", **how: Any) -> bytes:
    """A picture as a file's bytes."""
    into = BytesIO()
    image.save(into, kind, **how)
    return into.getvalue()
