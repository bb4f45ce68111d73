"""Export a multimodal model's vision tower as mmproj-NAME.gguf, the second file that llama.cpp loads.

`gguf_towers` has the names of tensors and metadata, which are those of llama.cpp's clip.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowq_cli.files.checkpoint import Checkpoint, CheckpointTensor
from lowq_cli.files.safetensors_io import read_json
from lowq_cli.hf.pictures import NAMES as PROCESSORS
from lowq_cli.interop.gguf_bytes import Piece
from lowq_cli.interop.gguf_file import FLOAT32, GgufTensor, Value, array, f32, flag, text, u32
from lowq_cli.interop.gguf_towers import FORMS, Form
from lowq_packers.errors import DamagedError, NotFoundError, UnsupportedError
from lowq_packers.formats import gguf

EPS = {"pixtral": 1e-5}  # eps of towers' norms that configs omit, from transformers' classes; others 1e-6


@dataclass(frozen=True)
class Mmproj:
    """The contents of a file to write."""

    metadata: list[tuple[str, Value]]
    pieces: list[Piece]


def mmproj(checkpoint: Checkpoint, beside: list[CheckpointTensor], embedding: CheckpointTensor) -> Mmproj:
    """The metadata and tensors of a checkpoint's vision tower and projector. beside: their tensors in the checkpoint.

    embedding: the text model's; llama.cpp stores one row of it with some towers. Raises UnsupportedError, NotFoundError,
    DamagedError.
    """
    form = FORMS.get(str(checkpoint.config.get("model_type")))
    if form is None:
        raise UnsupportedError(f"{checkpoint.config.get('model_type')} has a tower that lowq does not write for llama.cpp")
    pieces = [piece for t in beside for piece in _pieces(checkpoint, form, t)]
    if form.token:
        word, name = form.token
        i = _number_of(checkpoint, word)
        pieces.append(Piece(GgufTensor(name, (embedding.shape[1],), "F32"), embedding, (i, i + 1)))
    return Mmproj(_metadata(checkpoint, form), pieces)


def _metadata(checkpoint: Checkpoint, form: Form) -> list[tuple[str, Value]]:
    config = checkpoint.config
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
        raise UnsupportedError("llama.cpp supports this tower only with heads * head_dim equal to its hidden size")
    facts: dict[str, Value] = {
        "projector_type": text(form.projector), "has_vision_encoder": flag(True), "vision.image_size": u32(side),
        "vision.patch_size": u32(patch), "vision.embedding_length": u32(width), "vision.feed_forward_length": u32(int(inner)),
        "vision.block_count": u32(number("num_hidden_layers", "depth")), "vision.attention.head_count": u32(heads),
        "vision.projection_dim": u32(inside["hidden_size"]),
        "vision.attention.layer_norm_epsilon": f32(EPS.get(form.projector, 1e-6)), **_pixels(checkpoint), **form.facts(config),
    }  # fmt: skip
    general = {"architecture": text("clip"), "type": text("mmproj"), "quantization_version": u32(2)}
    return [*((f"general.{k}", v) for k, v in general.items()), *((f"clip.{k}", v) for k, v in facts.items())]


def _pixels(checkpoint: Checkpoint) -> dict[str, Value]:
    """Metadata of the image processor."""
    named = [checkpoint.folder / name for name in PROCESSORS if (checkpoint.folder / name).is_file()]
    if not named:
        raise NotFoundError(f"{checkpoint.folder} has no {PROCESSORS[0]}, the image processor's settings; copy the original's")
    settings = read_json(named[0])
    settings = settings.get("image_processor") or settings
    clip = {"image_mean": (0.48145466, 0.4578275, 0.40821073), "image_std": (0.26862954, 0.26130258, 0.27577711)}
    values = {name: array([float(v) for v in settings.get(name) or default], of=FLOAT32) for name, default in clip.items()}
    size = settings.get("size") or {}
    limits = {"image_min_pixels": settings.get("min_pixels") or size.get("shortest_edge"),
              "image_max_pixels": settings.get("max_pixels") or size.get("longest_edge")}  # fmt: skip
    areas = {k: u32(int(v)) for k, v in limits.items() if v} if "merge_size" in settings else {}  # Qwen's "edges" are areas
    if not areas and type(edge := size.get("longest_edge")) is int:
        values["image_size"] = u32(edge)  # Pixtral's largest side; the tower's image_size is an upper bound of it
    return {f"vision.{k}": v for k, v in {**values, **areas}.items()}


def _pieces(checkpoint: Checkpoint, form: Form, t: CheckpointTensor) -> list[Piece]:
    """The tensors of the file that hold one tensor of the checkpoint."""
    short = t.name.removeprefix("model.")
    stem, leaf = (short, "weight") if t.scheme else (short.rpartition(".")[0], short.rpartition(".")[2])
    vision = checkpoint.config["vision_config"]
    names = form.to_file(stem, vision.get("deepstack_visual_indexes", (8, 16, 24)))
    if names is None:
        raise UnsupportedError(f"{t.name} has no place in llama.cpp's graph of this tower")
    if len(t.shape) == 5:  # kernels of two video frames; for an image, both frames are the same
        N, C, frames, *sides = t.shape
        shape, kind = (N, C, *sides), "F16" if t.dtype == "F16" else "F32"
        ends = ("weight", "weight.1") if frames == 2 else ()
        if not ends:
            raise UnsupportedError(f"{t.name} takes {frames} video frames at once; llama.cpp supports two")
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


def _number_of(checkpoint: Checkpoint, word: str) -> int:
    """The id of a special token."""
    path: Path = checkpoint.folder / "tokenizer.json"
    added = read_json(path).get("added_tokens") if path.is_file() else None
    number = next((t["id"] for t in added or () if t.get("content") == word), None)
    if type(number) is not int:
        raise UnsupportedError(f"its tokenizer has no token {word}, whose embedding llama.cpp needs with the tower")
    return number
