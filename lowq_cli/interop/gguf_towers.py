"""Vision towers in GGUF: llama.cpp's names of tensors and metadata, to write (`gguf_mmproj`) and to read (`gguf_tower`) them.

An entry of `FORMS` describes the towers of one model_type. A tower that llama.cpp's graph computes differently is refused.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from lowq_cli.interop.gguf_file import BOOL, Value, array, flag, u32
from lowq_packers.errors import DamagedError, UnsupportedError

WINDOW = 112  # pixels of a window's side in llama.cpp's graph of Qwen2.5-VL
PLACEHOLDERS = {"{n}": r"(?P<n>\d+)", "{deep}": r"(?P<deep>\d+)", "{w}": r"(?P<w>\w+)"}  # of the templates in `Form.names`


@dataclass(frozen=True)
class Form:
    """The description of the towers of one model_type.

    cls: transformers' class of the whole model. projector: llama.cpp's name. names: templates (module's name below its prefix,
    name of the tensor), of which the first match is used; several names of tensors split the module's rows equally. {n} is a
    number, {w} a word, {deep} the layer of the n-th added features. permuted: tensors whose rows llama.cpp expects in pairs.
    facts: from config.json, further metadata (after "clip."); raises UnsupportedError. fields: from a file's facts, the fields
    of vision_config and of config.json. token: a token whose embedding is also written, and its name. words: the tokens of an
    image, by the fields of config.json that hold their ids. processor: of transformers. rows: min. and max. number of feature
    rows of an image where the metadata have no areas, as published processors have them.
    """

    cls: str
    projector: str
    names: tuple[tuple[str, str | tuple[str, ...]], ...]
    facts: Callable[[Mapping[str, Any]], dict[str, Value]]
    fields: Callable[["Facts"], tuple[dict[str, Any], dict[str, Any]]]
    words: Mapping[str, str]
    processor: str = "Qwen2VLImageProcessor"
    rows: tuple[int, int] = (4, 16384)
    permuted: tuple[str, ...] = ()
    token: tuple[str, str] | None = None

    def to_file(self, module: str, deep: Sequence[int]) -> tuple[str, ...] | None:
        """The names of the tensors that hold a module; None for a module that the tower does not have."""
        for ours, theirs in self.names:
            if (match := _fits(ours, module)) is not None:
                layer = {"deep": deep[int(match["n"])]} if "{deep}" in theirs else {}
                return tuple(t.format(**match, **layer) for t in ((theirs,) if isinstance(theirs, str) else theirs))
        return None

    def to_module(self, tensor: str, deep: Sequence[int]) -> tuple[str, int, int] | None:
        """The module that a tensor belongs to, which part of its rows the tensor is, and of how many parts; None as above."""
        for ours, theirs in self.names:
            parts = (theirs,) if isinstance(theirs, str) else theirs
            for i, part in enumerate(parts):
                match = _fits(part, tensor)
                if match is None or ("deep" in match and int(match["deep"]) not in deep):
                    continue
                number = {"n": deep.index(int(match["deep"]))} if "deep" in match else {}
                return ours.format(**match | number), i, len(parts)
        return None


@dataclass(frozen=True)
class Facts:
    """A file's facts about its tower: metadata under "clip." and shapes of tensors."""

    metadata: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    where: str

    def number(self, name: str, default: int | None = None) -> int:
        """A positive integer of the metadata. Raises DamagedError."""
        value = self.metadata.get(f"vision.{name}", default)
        if type(value) is not int or not 0 < value < 1 << 31:
            raise DamagedError(f"{self.where} has clip.vision.{name}={str(value)[:40]}, which must be a positive number")
        return value

    def deep(self) -> list[int]:
        """The layers whose features are added behind the first layers of the text."""
        flags = self.metadata.get("vision.is_deepstack_layers") or []
        return [i for i, flag in enumerate(flags) if flag] if isinstance(flags, list) else []


def _fits(template: str, name: str) -> dict[str, Any] | None:
    pattern = re.escape(template)
    for mark, group in PLACEHOLDERS.items():
        pattern = pattern.replace(re.escape(mark), group)
    match = re.fullmatch(pattern, name)
    return None if match is None else match.groupdict()


BLOCK = "vision_tower.transformer.layers.{n}."
PIXTRAL = (
    ("vision_tower.patch_conv", "v.patch_embd"), ("vision_tower.ln_pre", "v.pre_ln"),
    (BLOCK + "attention_norm", "v.blk.{n}.ln1"), (BLOCK + "ffn_norm", "v.blk.{n}.ln2"),
    (BLOCK + "attention.o_proj", "v.blk.{n}.attn_out"), (BLOCK + "attention.{w}_proj", "v.blk.{n}.attn_{w}"),
    (BLOCK + "feed_forward.{w}_proj", "v.blk.{n}.ffn_{w}"), ("multi_modal_projector.norm", "mm.input_norm"),
    ("multi_modal_projector.patch_merger.merging_layer", "mm.patch_merger"), ("multi_modal_projector.linear_{n}", "mm.{n}"),
)  # fmt: skip
QWEN = (
    ("visual.patch_embed.proj", "v.patch_embd"), ("visual.blocks.{n}.norm1", "v.blk.{n}.ln1"),
    ("visual.blocks.{n}.norm2", "v.blk.{n}.ln2"), ("visual.blocks.{n}.attn.proj", "v.blk.{n}.attn_out"),
)  # fmt: skip
QWEN_2 = (
    *QWEN, ("visual.blocks.{n}.attn.qkv", tuple(f"v.blk.{{n}}.attn_{c}" for c in "qkv")),
    ("visual.merger.ln_q", "v.post_ln"), ("visual.merger.mlp.{n}", "mm.{n}"),
)  # fmt: skip
QWEN_2_0 = (*QWEN_2, ("visual.blocks.{n}.mlp.fc1", "v.blk.{n}.ffn_up"), ("visual.blocks.{n}.mlp.fc2", "v.blk.{n}.ffn_down"))
QWEN_2_5 = (*QWEN_2, ("visual.blocks.{n}.mlp.{w}_proj", "v.blk.{n}.ffn_{w}"))
QWEN_3 = (
    *QWEN, ("visual.pos_embed", "v.position_embd"), ("visual.blocks.{n}.attn.qkv", "v.blk.{n}.attn_qkv"),
    ("visual.blocks.{n}.mlp.linear_fc1", "v.blk.{n}.ffn_up"), ("visual.blocks.{n}.mlp.linear_fc2", "v.blk.{n}.ffn_down"),
    ("visual.merger.norm", "v.post_ln"), ("visual.merger.linear_fc1", "mm.0"), ("visual.merger.linear_fc2", "mm.2"),
    ("visual.deepstack_merger_list.{n}.norm", "v.deepstack.{deep}.norm"),
    ("visual.deepstack_merger_list.{n}.linear_{w}", "v.deepstack.{deep}.{w}"),
)  # fmt: skip


def _only(vision: Mapping[str, Any], name: str, *known: Any) -> Any:
    """A field of vision_config (default: `known[0]`). Raises UnsupportedError unless llama.cpp's graph supports its value."""
    value = vision.get(name, known[0])
    if value not in known:
        raise UnsupportedError(f"its tower's {name} is {value}; llama.cpp supports {' or '.join(map(str, known))}")
    return value


def _pixtral(config: Mapping[str, Any]) -> dict[str, Value]:
    vision = config["vision_config"]
    act = _only(vision, "hidden_act", "silu", "gelu")
    theta = float((vision.get("rope_parameters") or {}).get("rope_theta", vision.get("rope_theta", 10000.0)))
    _only({"rope_theta": theta}, "rope_theta", 10000.0)
    _only({"vision_feature_layer": config.get("vision_feature_layer", -1)}, "vision_feature_layer", -1)
    _only({"projector_hidden_act": config.get("projector_hidden_act", "gelu")}, "projector_hidden_act", "gelu")
    return {f"use_{act}": flag(True), "vision.spatial_merge_size": u32(config.get("spatial_merge_size", 2))}


def _pixtral_fields(of: Facts) -> tuple[dict[str, Any], dict[str, Any]]:
    width, heads = of.number("embedding_length"), of.number("attention.head_count")
    vision = {
        "model_type": "pixtral", "hidden_size": width, "intermediate_size": of.number("feed_forward_length"),
        "num_hidden_layers": of.number("block_count"), "num_attention_heads": heads, "head_dim": width // heads,
        "patch_size": of.number("patch_size"), "image_size": of.number("image_size"), "rope_theta": 10000.0,
        "hidden_act": "silu" if of.metadata.get("use_silu") else "gelu",
    }  # fmt: skip
    bias = "mm.1.bias" in of.shapes
    more = {"vision_feature_layer": -1, "projector_hidden_act": "gelu", "multimodal_projector_bias": bias}
    return vision, more | {"spatial_merge_size": of.number("spatial_merge_size", 1)}


def _qwen2(config: Mapping[str, Any]) -> dict[str, Value]:
    _only(config["vision_config"], "hidden_act", "quick_gelu")
    return {"vision.spatial_merge_size": u32(config["vision_config"].get("spatial_merge_size", 2))}


def _of_qwen(of: Facts, act: str) -> dict[str, Any]:
    """Fields of Qwen's towers."""
    return {
        "depth": of.number("block_count"), "num_heads": of.number("attention.head_count"), "hidden_act": act,
        "patch_size": of.number("patch_size"), "spatial_merge_size": of.number("spatial_merge_size", 2),
        "temporal_patch_size": 2, "in_channels": 3,
    }  # fmt: skip


def _wide(of: Facts) -> dict[str, Any]:
    """Sizes of the towers of Qwen2.5-VL and Qwen3-VL."""
    inner = of.number("feed_forward_length")
    return {
        "hidden_size": of.number("embedding_length"), "intermediate_size": inner, "out_hidden_size": of.number("projection_dim")
    }  # fmt: skip


def _qwen2_fields(of: Facts) -> tuple[dict[str, Any], dict[str, Any]]:
    width, inner = of.number("embedding_length"), of.number("feed_forward_length")
    sizes = {"embed_dim": width, "hidden_size": of.number("projection_dim"), "mlp_ratio": inner // width}
    return _of_qwen(of, "quick_gelu") | sizes, {}


def _qwen2_5(config: Mapping[str, Any]) -> dict[str, Value]:
    vision = config["vision_config"]
    _only(vision, "hidden_act", "silu")
    _only(vision, "window_size", WINDOW)
    whole = vision.get("fullatt_block_indexes", [7, 15, 23, 31])
    every = whole[0] + 1 if whole else 0
    if every < 2 or any(b - a != every for a, b in pairwise(whole)):
        raise UnsupportedError(f"its tower sees whole pictures in layers {whole}; llama.cpp supports every n-th, n >= 2")
    merge = u32(vision.get("spatial_merge_size", 2))
    return {"use_silu": flag(True), "vision.n_wa_pattern": u32(every), "vision.spatial_merge_size": merge}


def _qwen2_5_fields(of: Facts) -> tuple[dict[str, Any], dict[str, Any]]:
    every = of.number("n_wa_pattern")
    whole = list(range(every - 1, of.number("block_count"), every))
    return _of_qwen(of, "silu") | _wide(of) | {"window_size": WINDOW, "fullatt_block_indexes": whole}, {}


def _qwen3(config: Mapping[str, Any]) -> dict[str, Value]:
    vision = config["vision_config"]
    _only(vision, "hidden_act", "gelu_pytorch_tanh")
    deep = [i in vision.get("deepstack_visual_indexes", (8, 16, 24)) for i in range(vision["depth"])]
    merge = u32(vision.get("spatial_merge_size", 2))
    return {"use_gelu": flag(True), "vision.spatial_merge_size": merge, "vision.is_deepstack_layers": array(deep, of=BOOL)}


def _qwen3_fields(of: Facts) -> tuple[dict[str, Any], dict[str, Any]]:
    places = of.shapes.get("v.position_embd.weight", (0,))[0]
    more = {"num_position_embeddings": places, "deepstack_visual_indexes": of.deep()}
    return _of_qwen(of, "gelu_pytorch_tanh") | _wide(of) | more, {}


WORDS = {
    "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>", "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}  # fmt: skip
QWEN3VL = ("qwen3vl_merger", QWEN_3, _qwen3, _qwen3_fields, WORDS)
OF_MISTRAL: dict[str, Any] = {
    "words": {"image_token_index": "[IMG]"}, "processor": "PixtralImageProcessor", "permuted": ("attn_q", "attn_k"),
    "token": ("[IMG_BREAK]", "v.token_embd.img_break"),
}  # fmt: skip
FORMS = {  # by model_type
    "mistral3": Form("Mistral3ForConditionalGeneration", "pixtral", PIXTRAL, _pixtral, _pixtral_fields, **OF_MISTRAL),
    "qwen2_vl": Form("Qwen2VLForConditionalGeneration", "qwen2vl_merger", QWEN_2_0, _qwen2, _qwen2_fields, WORDS),
    "qwen2_5_vl": Form("Qwen2_5_VLForConditionalGeneration", "qwen2.5vl_merger", QWEN_2_5, _qwen2_5, _qwen2_5_fields, WORDS),
    "qwen3_vl": Form("Qwen3VLForConditionalGeneration", *QWEN3VL, rows=(64, 16384)),
    "qwen3_vl_moe": Form("Qwen3VLMoeForConditionalGeneration", *QWEN3VL, rows=(64, 16384)),
}
