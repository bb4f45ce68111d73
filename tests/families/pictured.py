"""Tiny models of the families that take pictures, and random pictures as their processors give them."""

from copy import deepcopy
from functools import cache
from typing import Any

import torch
from described import TOWER, config
from described import model as random_model

from lowq_cli.hf.pictures import Picture, normalised

TOKEN = 9  # stands for a row of a picture in all of them
VOCAB = 160
SIZES: dict[str, dict[str, Any]] = {  # further fields of the tower, in addition to TOWER
    "qwen2_vl": {"patch_size": 4, "embed_dim": 32, "hidden_size": 64},
    "qwen2_5_vl": {"patch_size": 4, "window_size": 32, "depth": 2, "fullatt_block_indexes": [1]},
    "qwen3_vl": {"patch_size": 4, "depth": 3, "num_hidden_layers": 3, "deepstack_visual_indexes": [0, 2]},
    "qwen3_vl_moe": {"patch_size": 4, "depth": 3, "num_hidden_layers": 3, "deepstack_visual_indexes": [0, 2]},
    "qwen3_5": {"patch_size": 4},
    "qwen3_5_moe": {"patch_size": 4},
    "gemma3": {"patch_size": 4, "image_size": 16},
    "gemma4": {"patch_size": 4},
    "mistral3": {"patch_size": 4, "image_size": 64},
    "llama4": {"patch_size": 4, "image_size": 16, "intermediate_size": 128},
    "llava": {"patch_size": 4, "image_size": 16, "num_hidden_layers": 2},
    "llava/pixtral": {"patch_size": 4, "image_size": 64, "num_hidden_layers": 2, "model_type": "pixtral"},
    "internvl": {"patch_size": (4, 4), "image_size": (16, 16)},
}
OUTER: dict[str, dict[str, Any]] = {  # of the whole config
    "gemma3": {"mm_tokens_per_image": 4}, "gemma4": {"audio_config": None}, "internvl": {"image_seq_length": 4},
    "llava": {"image_seq_length": 16}, "llava/pixtral": {"vision_feature_select_strategy": "full", "vision_feature_layer": -1},
}  # fmt: skip
BY_INDEX = ("gemma3", "mistral3", "llama4", "llava")  # whose config has image_token_index
NO_KINDS = ("mistral3", "llama4", "llava", "internvl")  # which take no types of tokens
NAMES = (*SIZES, "gemma4/whole")
MANY = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"}  # of any size, places of three parts


def model(name: str, seed: int = 0, ids: dict[str, int] | None = None, text: dict[str, Any] | None = None) -> Any:
    """A random model with a tower; "gemma4/whole": whose tokens of a picture see all of it.

    ids: of the tokens of pictures, where not TOKEN. text: further fields of the text part.
    """
    return deepcopy(shared(name, seed)) if ids is text is None else _made(name, seed, ids, text)


@cache
def shared(name: str, seed: int = 0) -> Any:
    """The model that `model` copies, for tests that write nothing into it."""
    return _made(name, seed, None, None)


def _made(name: str, seed: int, ids: dict[str, int] | None, text: dict[str, Any] | None) -> Any:
    family = name.partition("/")[0]
    more = {"use_bidirectional_attention": "vision"} if name == "gemma4/whole" else {}
    if ids is None:
        ids = {"image_token_id": TOKEN, "video_token_id": 8, "audio_token_id": 7}
        ids = {"image_token_index": TOKEN} if family in BY_INDEX else ids
    whole = config(family, **more, **(text or {}))
    fields = (
        whole.to_dict() | ids | {"vision_config": {**whole.vision_config.to_dict(), **TOWER, **SIZES.get(name, SIZES[family])}}
    )
    return random_model(family, seed, made_of=type(whole).from_dict(fields | OUTER.get(name, OUTER.get(family, {}))))


def picture(name: str, seed: int, h: int = 2, w: int = 3) -> Picture:
    """A random picture of h x w rows of features, where the family takes any size; 4 rows else."""
    g, family = torch.Generator().manual_seed(seed), name.partition("/")[0]

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    if family in MANY:
        grid = torch.tensor([[1, 2 * h, 2 * w]])
        return Picture({"pixel_values": noise(4 * h * w, 3 * 2 * 4 * 4), "image_grid_thw": grid}, h * w, (h, w))
    if name == "llava/pixtral":
        return Picture({"pixel_values": noise(1, 3, 4 * h, 4 * w), "image_sizes": torch.tensor([[4 * h, 4 * w]])}, h * w)
    if family == "internvl":
        return Picture({"pixel_values": noise(2, 3, 16, 16)}, 8)  # two crops
    if family == "mistral3":
        return Picture({"pixel_values": noise(1, 3, 8 * h, 8 * w), "image_sizes": torch.tensor([[8 * h, 8 * w]])}, h * w)
    if family == "gemma4":
        k = 3  # patches a side that are pooled
        places = torch.stack(torch.meshgrid(torch.arange(w * k), torch.arange(h * k), indexing="xy"), -1).reshape(1, -1, 2)
        values = noise(1, h * w * k * k, 3 * 4 * 4).sigmoid()
        return Picture({"pixel_values": values, "image_position_ids": places}, h * w)
    return Picture({"pixel_values": noise(1, 3, 16, 16)}, 16 if family == "llava" else 4)


def text(*parts: Picture | list[int]) -> tuple[list[int], list[Picture]]:
    """Token ids of texts and pictures one after another, each picture framed by two tokens; and the pictures."""
    ids, found = list[int](), list[Picture]()
    for part in parts:
        if isinstance(part, Picture):
            ids += [11, *[TOKEN] * part.rows, 12]
            found.append(part)
        else:
            ids += [i if i != TOKEN else 10 for i in part]
    return ids, found


def inputs_of(config: Any, ids: list[int], pictures: list[Picture]) -> dict[str, Any]:
    """The arguments of transformers' model: the pictures of a text stacked, and padded if their sizes differ."""
    there, inputs = torch.tensor([ids]), dict[str, Any]()
    family = config.model_type
    each = [normalised(p.inputs) for p in pictures]
    for key in each[0] if each else ():
        rows = [one[key] for one in each]
        if key == "pixel_values" and rows[0].dim() == 4:
            sides = [max(t.shape[i] for t in rows) for i in (2, 3)]
            rows = [torch.nn.functional.pad(t, (0, sides[1] - t.shape[3], 0, sides[0] - t.shape[2])) for t in rows]
        elif family == "gemma4":
            most = max(t.shape[1] for t in rows)
            rows = [torch.nn.functional.pad(t, (0, 0, 0, most - t.shape[1]), value=-1 if "ids" in key else 0) for t in rows]
        inputs[key] = torch.cat(rows)
    if pictures and family not in NO_KINDS:
        token = getattr(config, "image_token_id", None) or config.image_token_index
        inputs["token_type_ids" if family == "gemma3" else "mm_token_type_ids"] = (there == token).long()
    return {"input_ids": there, **inputs}


@torch.inference_mode()
def logits_of(theirs: Any, ids: list[int], pictures: list[Picture]) -> torch.Tensor:
    """transformers' logits (T, V) of a whole text with its pictures."""
    if hasattr(getattr(theirs, "model", None), "rope_deltas"):
        theirs.model.rope_deltas = None  # of the text before
    inputs = inputs_of(theirs.config, ids, pictures)
    if pictures:
        inputs["pixel_values"] = inputs["pixel_values"].to(theirs.dtype)  # Llama 4's are in bf16
    return theirs(**inputs, use_cache=False).logits[0].float()
