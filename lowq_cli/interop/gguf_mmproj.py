"""Export a multimodal model's vision tower as mmproj-NAME.gguf, the second file that llama.cpp loads.

Names of tensors and metadata are those of llama.cpp's clip; an entry of `FORMS` describes one kind of tower. A tower that
llama.cpp's graph computes differently is refused.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from lowq_cli.files.checkpoint import Checkpoint, CheckpointTensor
from lowq_cli.files.safetensors_io import read_json
from lowq_cli.hf.pictures import NAMES as PROCESSORS
from lowq_cli.interop.gguf_bytes import Piece
from lowq_cli.interop.gguf_file import BOOL, FLOAT32, GgufTensor, Value, array, f32, flag, text, u32
from lowq_packers.errors import DamagedError, NotFoundError, UnsupportedError
from lowq_packers.formats import gguf

WINDOW = 112  # pixels of a window's side in llama.cpp's graph of Qwen2.5-VL
EPS = {"pixtral": 1e-5}  # eps of towers' norms that configs omit, from transformers' classes; others 1e-6


@dataclass(frozen=True)
class Form:
    """The description of one kind of tower.

    projector: llama.cpp's name. names: (regular expression of a module's name below its prefix, name of the tensor; several
    names split its rows equally). permuted: tensors whose rows llama.cpp expects in pairs. facts: returns additional metadata
    (after "clip.") from config.json; raises UnsupportedError. token: a token whose embedding is also written, and its name.
    """

    projector: str
    names: tuple[tuple[str, str | tuple[str, ...]], ...]
    facts: Callable[[Mapping[str, Any]], dict[str, Value]]
    permuted: tuple[str, ...] = ()
    token: tuple[str, str] | None = None


@dataclass(frozen=True)
class Mmproj:
    """The contents of a file to write."""

    metadata: list[tuple[str, Value]]
    pieces: list[Piece]


BLOCKS = r"vision_tower\.transformer\.layers\.(\d+)\."
PIXTRAL = (
    (r"vision_tower\.patch_conv", "v.patch_embd"), (r"vision_tower\.ln_pre", "v.pre_ln"),
    (BLOCKS + r"attention_norm", "v.blk.{0}.ln1"), (BLOCKS + r"ffn_norm", "v.blk.{0}.ln2"),
    (BLOCKS + r"attention\.([qkv])_proj", "v.blk.{0}.attn_{1}"), (BLOCKS + r"attention\.o_proj", "v.blk.{0}.attn_out"),
    (BLOCKS + r"feed_forward\.(gate|up|down)_proj", "v.blk.{0}.ffn_{1}"), (r"multi_modal_projector\.norm", "mm.input_norm"),
    (r"multi_modal_projector\.patch_merger\.merging_layer", "mm.patch_merger"),
    (r"multi_modal_projector\.linear_([12])", "mm.{0}"),
)  # fmt: skip
QWEN = (
    (r"visual\.patch_embed\.proj", "v.patch_embd"), (r"visual\.blocks\.(\d+)\.norm([12])", "v.blk.{0}.ln{1}"),
    (r"visual\.blocks\.(\d+)\.attn\.proj", "v.blk.{0}.attn_out"),
)  # fmt: skip
QWEN_2 = (
    *QWEN, (r"visual\.blocks\.(\d+)\.attn\.qkv", tuple(f"v.blk.{{0}}.attn_{c}" for c in "qkv")),
    (r"visual\.blocks\.(\d+)\.mlp\.(gate|up|down)_proj", "v.blk.{0}.ffn_{1}"),
    (r"visual\.blocks\.(\d+)\.mlp\.fc1", "v.blk.{0}.ffn_up"), (r"visual\.blocks\.(\d+)\.mlp\.fc2", "v.blk.{0}.ffn_down"),
    (r"visual\.merger\.ln_q", "v.post_ln"), (r"visual\.merger\.mlp\.([02])", "mm.{0}"),
)  # fmt: skip
QWEN_3 = (
    *QWEN, (r"visual\.pos_embed", "v.position_embd"), (r"visual\.blocks\.(\d+)\.attn\.qkv", "v.blk.{0}.attn_qkv"),
    (r"visual\.blocks\.(\d+)\.mlp\.linear_fc1", "v.blk.{0}.ffn_up"),
    (r"visual\.blocks\.(\d+)\.mlp\.linear_fc2", "v.blk.{0}.ffn_down"), (r"visual\.merger\.norm", "v.post_ln"),
    (r"visual\.merger\.linear_fc1", "mm.0"), (r"visual\.merger\.linear_fc2", "mm.2"),
    (r"visual\.deepstack_merger_list\.(\d+)\.norm", "v.deepstack.{deep}.norm"),
    (r"visual\.deepstack_merger_list\.(\d+)\.linear_(fc[12])", "v.deepstack.{deep}.{1}"),
)  # fmt: skip


def _only(vision: Mapping[str, Any], name: str, *known: Any) -> Any:
    """A field of vision_config (default: `known[0]`). Raises UnsupportedError unless llama.cpp's graph supports its value."""
    found = vision.get(name, known[0])
    if found not in known:
        raise UnsupportedError(f"its tower's {name} is {found}, llama.cpp's graph of it has {' or '.join(map(str, known))}")
    return found


def _pixtral(config: Mapping[str, Any]) -> dict[str, Value]:
    vision = config["vision_config"]
    act = _only(vision, "hidden_act", "silu", "gelu")
    theta = float((vision.get("rope_parameters") or {}).get("rope_theta", vision.get("rope_theta", 10000.0)))
    _only({"rope_theta": theta}, "rope_theta", 10000.0)
    _only({"vision_feature_layer": config.get("vision_feature_layer", -1)}, "vision_feature_layer", -1)
    _only({"projector_hidden_act": config.get("projector_hidden_act", "gelu")}, "projector_hidden_act", "gelu")
    return {f"use_{act}": flag(True), "vision.spatial_merge_size": u32(config.get("spatial_merge_size", 2))}


def _qwen2(config: Mapping[str, Any]) -> dict[str, Value]:
    _only(config["vision_config"], "hidden_act", "quick_gelu")
    return {"vision.spatial_merge_size": u32(config["vision_config"].get("spatial_merge_size", 2))}


def _qwen2_5(config: Mapping[str, Any]) -> dict[str, Value]:
    vision = config["vision_config"]
    _only(vision, "hidden_act", "silu")
    _only(vision, "window_size", WINDOW)
    whole = vision.get("fullatt_block_indexes", [7, 15, 23, 31])
    every = whole[0] + 1 if whole else 0
    if every < 2 or any(b - a != every for a, b in pairwise(whole)):
        raise UnsupportedError(f"its tower sees whole pictures in layers {whole}, llama.cpp's graph in every n-th, n from 2")
    merge = u32(vision.get("spatial_merge_size", 2))
    return {"use_silu": flag(True), "vision.n_wa_pattern": u32(every), "vision.spatial_merge_size": merge}


def _qwen3(config: Mapping[str, Any]) -> dict[str, Value]:
    vision = config["vision_config"]
    _only(vision, "hidden_act", "gelu_pytorch_tanh")
    deep = [i in vision.get("deepstack_visual_indexes", (8, 16, 24)) for i in range(vision["depth"])]
    merge = u32(vision.get("spatial_merge_size", 2))
    return {"use_gelu": flag(True), "vision.spatial_merge_size": merge, "vision.is_deepstack_layers": array(deep, of=BOOL)}


QWEN3VL = Form("qwen3vl_merger", QWEN_3, _qwen3)
FORMS = {  # by model_type
    "mistral3": Form("pixtral", PIXTRAL, _pixtral, ("attn_q", "attn_k"), ("[IMG_BREAK]", "v.token_embd.img_break")),
    "qwen2_vl": Form("qwen2vl_merger", QWEN_2, _qwen2),
    "qwen2_5_vl": Form("qwen2.5vl_merger", QWEN_2, _qwen2_5),
    "qwen3_vl": QWEN3VL,
    "qwen3_vl_moe": QWEN3VL,
}


def mmproj(found: Checkpoint, beside: list[CheckpointTensor], embedding: CheckpointTensor) -> Mmproj:
    """The metadata and pieces of a checkpoint's tower and projector, whose tensors are `beside`.

    embedding: the text model's; one of its rows may be needed. Raises UnsupportedError, NotFoundError, DamagedError.
    """
    form = FORMS.get(str(found.config.get("model_type")))
    if form is None:
        raise UnsupportedError(f"{found.config.get('model_type')} has a tower that lowq does not write for llama.cpp")
    pieces = [piece for t in beside for piece in _pieces(found, form, t)]
    if form.token:
        word, name = form.token
        i = _number_of(found, word)
        pieces.append(Piece(GgufTensor(name, (embedding.shape[1],), "F32"), embedding, (i, i + 1)))
    return Mmproj(_metadata(found, form), pieces)


def _metadata(found: Checkpoint, form: Form) -> list[tuple[str, Value]]:
    config = found.config
    vision: Mapping[str, Any] = config["vision_config"]
    inside = config.get("text_config") or config

    def number(*names: str) -> int:
        value = next((vision[n] for n in names if vision.get(n) is not None), None)
        if type(value) is not int:
            raise DamagedError(f"vision_config of config.json lacks {names[0]}")
        return value

    narrow = "embed_dim" if form.projector.startswith("qwen2vl") else "hidden_size"  # Qwen2-VL's hidden_size is the text's
    width, patch = number(narrow), number("patch_size")
    inner = width * vision.get("mlp_ratio", 4) if narrow == "embed_dim" else number("intermediate_size")
    side = vision.get("image_size") or int(vision.get("num_position_embeddings", 1600) ** 0.5 * patch)
    heads = number("num_attention_heads", "num_heads")
    if (vision.get("head_dim") or width // heads) * heads != width and form.projector == "pixtral":
        raise UnsupportedError("its tower's heads are not as wide as its stream, as llama.cpp's graph of it has them")
    own: dict[str, Value] = {
        "projector_type": text(form.projector), "has_vision_encoder": flag(True), "vision.image_size": u32(side),
        "vision.patch_size": u32(patch), "vision.embedding_length": u32(width), "vision.feed_forward_length": u32(int(inner)),
        "vision.block_count": u32(number("num_hidden_layers", "depth")), "vision.attention.head_count": u32(heads),
        "vision.projection_dim": u32(inside["hidden_size"]),
        "vision.attention.layer_norm_epsilon": f32(EPS.get(form.projector, 1e-6)), **_pixels(found), **form.facts(config),
    }  # fmt: skip
    general = {"architecture": text("clip"), "type": text("mmproj"), "quantization_version": u32(2)}
    return [*((f"general.{k}", v) for k, v in general.items()), *((f"clip.{k}", v) for k, v in own.items())]


def _pixels(found: Checkpoint) -> dict[str, Value]:
    """Metadata of the image processor."""
    named = [found.folder / name for name in PROCESSORS if (found.folder / name).is_file()]
    if not named:
        raise NotFoundError(f"{found.folder} has no {PROCESSORS[0]}, which says how pictures are prepared; copy the original's")
    said = read_json(named[0])
    said = said.get("image_processor") or said
    clip = {"image_mean": (0.48145466, 0.4578275, 0.40821073), "image_std": (0.26862954, 0.26130258, 0.27577711)}
    values = {name: array([float(v) for v in said.get(name) or default], of=FLOAT32) for name, default in clip.items()}
    size = said.get("size") or {}
    limits = {"image_min_pixels": said.get("min_pixels") or size.get("shortest_edge"),
              "image_max_pixels": said.get("max_pixels") or size.get("longest_edge")}  # fmt: skip
    areas = {k: u32(int(v)) for k, v in limits.items() if v} if "merge_size" in said else {}  # Qwen's "edges" are areas
    return {f"vision.{k}": v for k, v in {**values, **areas}.items()}


def _pieces(found: Checkpoint, form: Form, t: CheckpointTensor) -> list[Piece]:
    """The pieces as which one tensor of the checkpoint is written."""
    own = t.name.removeprefix("model.")
    stem, leaf = (own, "weight") if t.scheme else (own.rpartition(".")[0], own.rpartition(".")[2])
    found_at = next(((place, target) for pattern, target in form.names if (place := re.fullmatch(pattern, stem))), None)
    if found_at is None:
        raise UnsupportedError(f"{t.name} has no place in llama.cpp's graph of this tower")
    place, target = found_at
    vision = found.config["vision_config"]
    deep = vision.get("deepstack_visual_indexes", (8, 16, 24))
    more = {"deep": deep[int(place[1])]} if "{deep}" in target else {}
    names = [n.format(*place.groups(), **more) for n in ((target,) if isinstance(target, str) else target)]
    if len(t.shape) == 5:  # kernels of two video frames; for an image, both frames are the same
        N, C, frames, *sides = t.shape
        shape, kind = (N, C, *sides), "F16" if t.dtype == "F16" else "F32"
        ends = ("weight", "weight.1") if frames == 2 else ()
        if not ends:
            raise UnsupportedError(f"{t.name} takes {frames} frames at once, llama.cpp's graph of this tower two")
        return [Piece(GgufTensor(f"{names[0]}.{end}", shape, kind), t, frame=i) for i, end in enumerate(ends)]
    N = t.shape[0] // len(names)
    heads = vision.get("num_attention_heads") if names[0].rpartition(".")[2] in form.permuted else None
    return [
        Piece(_row(t, f"{name}.{leaf}", (N, *t.shape[1:])), t, (i * N, i * N + N) if len(names) > 1 else None, heads=heads)
        for i, name in enumerate(names)
    ]


def _row(t: CheckpointTensor, name: str, shape: tuple[int, ...]) -> GgufTensor:
    if t.scheme:
        return GgufTensor(name, shape, gguf.type_for(t.scheme) or "")
    whole = (len(shape) != 2 and t.dtype != "F16") or len(shape) == 1 or name.startswith("v.position_embd")
    return GgufTensor(name, shape, "F32" if whole else t.dtype)


def _number_of(found: Checkpoint, word: str) -> int:
    """The id of a special token."""
    path: Path = found.folder / "tokenizer.json"
    added = read_json(path).get("added_tokens") if path.is_file() else None
    number = next((t["id"] for t in added or () if t.get("content") == word), None)
    if type(number) is not int:
        raise UnsupportedError(f"its tokenizer has no token {word}, whose embedding llama.cpp takes beside the tower")
    return number
