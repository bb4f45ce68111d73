"""Export a lowq checkpoint of the Llama or Qwen families as a GGUF file, which llama.cpp, Ollama and LM Studio run.

Names and metadata are llama.cpp's. Its Llama graph rotates adjacent pairs, Hugging Face's model rotates halves, so rows of q
and k are permuted for it (whole rows: codes, scales and zeros move together). Norms and biases are written in fp32.
The vision tower of a multimodal model goes into a second file next to it (`gguf_mmproj.py`), as llama.cpp expects.
With `mixture` (`--type Q4_K_M`) the weights are quantized here, in blocks that lowq checkpoints cannot hold.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from lowq_cli.files.checkpoint import Checkpoint, CheckpointTensor
from lowq_cli.files.family_tensors import Named
from lowq_cli.files.folder import check_room, sweep, unfinished_bytes
from lowq_cli.files.safetensors_writer import SHARD
from lowq_cli.interop.exported import Exported, Progress, run_name
from lowq_cli.interop.gguf_bytes import File, Piece, chosen, stored
from lowq_cli.interop.gguf_file import INT32, GgufTensor, Value, array, f32, head, padded, text, u32
from lowq_cli.interop.gguf_mmproj import mmproj
from lowq_cli.interop.gguf_names import ARCHITECTURES, LAYER, PERMUTED, ROUTER, ROUTERS, TOP
from lowq_cli.interop.gguf_tokenizer import tokenizer_metadata
from lowq_cli.interop.gguf_writer import new_gguf
from lowq_cli.plan.gguf_types import Facts, Mixture, type_of
from lowq_cli.state import was_exported
from lowq_packers.arch.config import NotPlain, read_config
from lowq_packers.arch.parts import Attention, Experts, Linear, Mlp, Model, Norm, Router, walk
from lowq_packers.errors import DamagedError, UnsupportedError
from lowq_packers.formats import gguf

ENGINES = ("llama.cpp", "Ollama", "LM Studio")
EXPERT = re.compile(r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)")
STACKS = {  # an expert's matrix -> the tensor of all experts, (E, N, K)
    **dict.fromkeys(("gate_proj", "w1"), "ffn_gate_exps"),
    **dict.fromkeys(("up_proj", "w3"), "ffn_up_exps"),
    **dict.fromkeys(("down_proj", "w2"), "ffn_down_exps"),
}


Entries = list[tuple[GgufTensor, list[CheckpointTensor]]]  # a row of the tensor table, and the checkpoint tensors in it


def prepared(checkpoint: Checkpoint, name: str, mixture: Mixture | None = None) -> tuple[str, list[tuple[str, Value]], Entries]:
    """The architecture, metadata and tensors of a file. Raises UnsupportedError or NotFoundError if it cannot be written."""
    raw, kind = checkpoint.config, checkpoint.config.get("model_type")
    inside = raw.get("text_config") or raw
    if kind == "mistral3":  # its language model can be any of Mistral's
        kind = inside.get("model_type", "mistral")
    arch = ARCHITECTURES.get(str(kind))
    if arch is None:
        raise UnsupportedError(f"model_type {kind!r} cannot be written as GGUF (supported: {', '.join(ARCHITECTURES)})")
    config, model = config_and_model(raw)
    _check_computed_alike(config, model, arch)
    facts = _model_metadata(inside, config, model, arch, name)
    text, others = parts_of(checkpoint, model)
    entries = _entries(text, model, mixture is not None)
    if others:
        mmproj(checkpoint, others, _embedding(text))  # raises if the tower is not supported
    if mixture:
        facts.append(("general.file_type", u32(mixture.number)))
        entries = _typed(entries, mixture, _facts(checkpoint, config, model))
    return arch, [*facts, *tokenizer_metadata(checkpoint.folder, {**inside, **raw}, config.vocab_size)], entries


def parts_of(checkpoint: Checkpoint, model: Model) -> tuple[list[tuple[str, CheckpointTensor]], list[CheckpointTensor]]:
    """The text model's tensors, under their names in a text-only model, and the tensors of tower and projector."""
    named = Named.of_files(model, checkpoint.source.headers)
    (prefix, head), text, others = named.place, list[tuple[str, CheckpointTensor]](), list[CheckpointTensor]()
    for t in checkpoint.tensors:
        if named.outside_text(t.name):
            others.append(t)
        elif t.name.startswith(prefix):
            text.append((f"model.{t.name.removeprefix(prefix)}", t))
        else:
            text.append(("lm_head" + t.name.removeprefix(head) if t.name.startswith(head) else t.name, t))
    return text, others


def _embedding(text: list[tuple[str, CheckpointTensor]]) -> CheckpointTensor:
    return next(t for name, t in text if name.startswith("model.embed_tokens"))


def _facts(checkpoint: Checkpoint, config: Any, model: Model) -> Facts:
    """The facts from which a mixture assigns types."""
    experts = next((part.experts for part in walk(model.layers) if isinstance(part, Router)), 0)
    tied = not any("lm_head" in t.name for t in checkpoint.tensors)
    return Facts(config.num_hidden_layers, config.num_attention_heads // config.num_key_value_heads, experts, tied)


def _typed(entries: Entries, mixture: Mixture, facts: Facts) -> Entries:
    """The tensors of a file in the types of a mixture; norms, biases and routers stay in fp32."""
    kinds = [type_of(mixture, row.name, row.shape[-1], facts) if chosen(row) else row.kind for row, _ in entries]
    return [(replace(row, kind=kind), members) for (row, members), kind in zip(entries, kinds, strict=True)]


def rows_of(checkpoint: Checkpoint, mixture: Mixture) -> tuple[list[GgufTensor], list[GgufTensor]]:
    """The tensors that `export_gguf` would write, of the text's file and of the tower's. Raises as `prepared`."""
    rows = [row for row, _ in prepared(checkpoint, "", mixture)[2]]
    text, others = parts_of(checkpoint, config_and_model(checkpoint.config)[1])
    tower = mmproj(checkpoint, others, _embedding(text)).pieces if others else []
    return rows, list(dict.fromkeys(piece.row for piece in tower))


def totals(rows: Iterable[GgufTensor]) -> list[tuple[str, int, int, int]]:
    """(type, tensors, weights, bytes) of some tensors, largest first."""
    kinds: dict[str, list[GgufTensor]] = {}
    for row in rows:
        kinds.setdefault(row.kind, []).append(row)
    sums = [(kind, len(of), sum(prod(r.shape) for r in of), sum(r.nbytes for r in of)) for kind, of in kinds.items()]
    return sorted(sums, key=lambda line: -line[3])


def config_and_model(config: Mapping[str, Any]) -> tuple[Any, Model]:
    """The config with its family's defaults, and the model that it describes. Raises UnsupportedError for unknown families."""
    try:
        read, model, _ = read_config(config)
    except NotPlain as e:
        raise UnsupportedError(f"lowq writes only described families as GGUF, and this model is not: {e}") from None
    return read.get_text_config(), model


def tower_path(out: Path) -> Path:
    """The file of a vision tower, next to the text's file `out`."""
    return out.with_name(f"mmproj-{out.name}")


def export_gguf(
    checkpoint: Checkpoint,
    out: Path,
    rounding: bool,
    progress: Progress | None,
    mixture: Mixture | None = None,
    file_bytes: int = SHARD,
) -> Exported:
    """Write `checkpoint` to the file `out`, and its vision tower, if any, to mmproj-NAME next to it.

    rounding: accept scales and offsets rounded to fp16 if they do not fit. mixture: quantize the text model to its types.
    file_bytes: as in `export`.
    Raises UnsupportedError for a family, tokenizer or scheme that lowq cannot write as GGUF, UsageError if `out`
    exists.
    """
    arch, metadata, entries = prepared(checkpoint, out.stem, mixture)
    config, model = config_and_model(checkpoint.config)
    factors = rope_factors(config)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads} if arch in PERMUTED else {}
    text, others = parts_of(checkpoint, model)
    pieces = [Piece(row, t, heads=heads.get(row.name.split(".")[-2])) for row, members in entries for t in members]
    files = [File(out, metadata, pieces, mixture is not None, factors)]
    if others:
        tower = mmproj(checkpoint, others, _embedding(text))
        files.insert(0, File(tower_path(out), tower.metadata, tower.pieces))
    run = run_name(checkpoint, f"gguf {mixture.number}" if mixture else "gguf", rounding)
    new = [file.path for file in files if not was_exported(file.path, f"{run} {file.path.name}")]
    nbytes = sum(padded(row.nbytes) for file in files if file.path in new for row in {p.row for p in file.pieces})
    check_room(nbytes - sum(map(unfinished_bytes, new)), out)
    there = [_write(checkpoint, file, f"{run} {file.path.name}", rounding, progress, file_bytes) for file in files]
    notes = tuple(f"its tower and projector: {file.path} (llama.cpp: --mmproj)" for file in files[:-1])
    matrices = sum(map(chosen, (row for row, _ in entries))) if mixture else len(checkpoint.schemes)
    size = sum(file.path.stat().st_size for file in files)
    return Exported(str(out), "gguf", size, matrices, ENGINES, notes, all(there))


def _write(checkpoint: Checkpoint, file: File, run: str, rounding: bool, progress: Progress | None, file_bytes: int) -> bool:
    """Write one file; returns whether it already existed, from the same run."""
    members: dict[GgufTensor, list[Piece]] = {}
    for piece in file.pieces:
        members.setdefault(piece.row, []).append(piece)
    extra = [] if file.factors is None else [GgufTensor("rope_freqs.weight", tuple(file.factors.shape), "F32")]
    rows, done, total = list(members), 0, sum(prod(row.shape) for row in members)

    def contents(row: GgufTensor) -> Iterator[memoryview]:
        nonlocal done
        for piece in members[row]:
            for part in stored(checkpoint, piece, rounding, file.anew):
                yield part.flatten().view(torch.uint8).numpy().data
            done += prod(row.shape) // len(members[row])
            if progress:
                progress(100 * done // total, piece.of.name)

    if was_exported(file.path, run):
        sweep(file.path)
        return True
    with new_gguf(file.path, run, head(file.metadata, [*rows, *extra]), file_bytes) as writer:
        done = sum(prod(row.shape) for row in rows[: writer.finished])
        for row in rows[writer.finished :]:
            writer.write(row, contents(row))
        for row in extra[max(0, writer.finished - len(rows)) :]:
            assert file.factors is not None
            writer.write(row, [file.factors.view(torch.uint8).numpy().data])
    return False


BIASED = {
    "llama": (".q_proj", ".k_proj", ".v_proj", ".o_proj", ".gate_proj", ".up_proj", ".down_proj"),
    **dict.fromkeys(("qwen2", "qwen2vl"), (".q_proj", ".k_proj", ".v_proj")),
}


def _check_computed_alike(config: Any, model: Model, arch: str) -> None:
    """Raise UnsupportedError if llama.cpp's graph of the family computes something different."""
    for part in walk(model.layers):
        if isinstance(part, Attention) and part.window:
            raise UnsupportedError("its attention has a sliding window, which llama.cpp does not apply to this architecture")
        if isinstance(part, Attention) and part.rope and part.rope.dims != part.dim:
            raise UnsupportedError(
                f"it rotates {part.rope.dims} of the {part.dim} values of a head; llama.cpp rotates all of them"
            )
        if isinstance(part, Mlp | Experts) and part.act != "silu":
            raise UnsupportedError(f"its activation is {config.hidden_act}; llama.cpp computes this family with silu")
        if isinstance(part, Linear) and part.bias and (odd := [p for p in part.parts if not p.endswith(BIASED.get(arch, ()))]):
            raise UnsupportedError(f"{odd[0]} has a bias, which llama.cpp's graph of {arch} does not add")


def _entries(text: list[tuple[str, CheckpointTensor]], model: Model, anew: bool) -> Entries:
    """Rows of the tensor table, each with its checkpoint tensors: one, or a layer's experts in order.

    anew: the weights are quantized here, so experts may have different schemes.
    """
    entries: dict[str, tuple[GgufTensor, list[CheckpointTensor]]] = {}
    for ours, t in text:
        expert = EXPERT.fullmatch(ours if t.scheme else ours.removesuffix(".weight"))
        if expert is None or expert[3] not in STACKS:
            row = _tensor(ours, t)
            entries[row.name] = row, [t]
            continue
        name = f"blk.{expert[1]}.{STACKS[expert[3]]}.weight"
        entries.setdefault(name, (GgufTensor(name, (), ""), []))[1].append(t)
    experts = next((part.experts for part in walk(model.layers) if isinstance(part, Router)), 0)
    for name, (row, members) in entries.items():
        if row.shape:
            continue
        kinds = {(t.shape, "" if anew else gguf.type_for(t.scheme) if t.scheme else t.dtype) for t in members}
        if len(kinds) > 1 or len(members) != experts:
            raise UnsupportedError(f"{name} would stack {len(members)} experts of {len(kinds)} kinds; they must agree")
        ((shape, kind),) = kinds
        members.sort(key=lambda t: int(t.name.split(".experts.")[1].split(".")[0]))
        entries[name] = GgufTensor(name, (len(members), *shape), kind or ""), members
    return list(entries.values())


def _tensor(own: str, t: CheckpointTensor) -> GgufTensor:
    """The row of the tensor table for a tensor whose name in a text model is `own`."""
    stem, leaf = (own, "weight") if t.scheme else (own.rpartition(".")[0], own.rpartition(".")[2])
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    inside = LAYER | ROUTERS
    name = f"blk.{layer[1]}.{inside[layer[2]]}" if layer and layer[2] in inside else TOP.get(stem)
    if name is None or leaf not in ("weight", "bias"):
        raise UnsupportedError(f"{t.name} has no place in llama.cpp's graph of this family")
    if t.scheme:
        return GgufTensor(f"{name}.{leaf}", t.shape, gguf.type_for(t.scheme) or "")
    whole = len(t.shape) == 1 or name.endswith(ROUTER)  # llama.cpp keeps norms, biases and routers in fp32
    return GgufTensor(f"{name}.{leaf}", t.shape, "F32" if whole else t.dtype)


def _int(raw: Mapping[str, Any], name: str) -> int:
    value = raw.get(name)
    if type(value) is not int:
        raise DamagedError(f"config.json lacks {name}")
    return value


def _rope(config: Any) -> Mapping[str, Any]:
    """Metadata of the rotary embedding. Raises UnsupportedError for a type that lowq does not write."""
    rope: Mapping[str, Any] = config.rope_parameters
    if rope["rope_type"] not in ("default", "llama3"):
        raise UnsupportedError(f"rotary embedding {rope['rope_type']!r} cannot be written as GGUF")
    return rope


def _model_metadata(raw: Mapping[str, Any], config: Any, model: Model, arch: str, name: str) -> list[tuple[str, Value]]:
    eps = {part.eps for part in walk((model.layers, model.norm)) if isinstance(part, Norm)}
    if len(eps) > 1:
        raise UnsupportedError(f"its norms have several eps ({', '.join(map(str, sorted(eps)))}), GGUF has one")
    facts = {
        "context_length": u32(config.max_position_embeddings),
        "embedding_length": u32(config.hidden_size),
        "block_count": u32(config.num_hidden_layers),
        "feed_forward_length": u32(_int(raw, "intermediate_size")),
        "attention.head_count": u32(config.num_attention_heads),
        "attention.head_count_kv": u32(config.num_key_value_heads),
        "attention.key_length": u32(config.head_dim),
        "attention.value_length": u32(config.head_dim),
        "attention.layer_norm_rms_epsilon": f32(next(iter(eps))),
        "rope.dimension_count": u32(config.head_dim),
        "rope.freq_base": f32(float(_rope(config)["rope_theta"])),
        "vocab_size": u32(config.vocab_size),
        **_mixture_metadata(config, model),
    }
    if model.images and model.images.sections:
        facts["rope.dimension_sections"] = array([*model.images.sections, 0], of=INT32)
    if model.images and arch.startswith("qwen3vl"):
        facts["n_deepstack_layers"] = u32(model.images.deepstack)
    readable = name.encode(errors="replace").decode()  # a file's name need not be UTF-8
    general = [("general.architecture", text(arch)), ("general.name", text(readable)), ("general.quantization_version", u32(2))]
    return [*general, *((f"{arch}.{key}", value) for key, value in facts.items())]


def _mixture_metadata(config: Any, model: Model) -> dict[str, Value]:
    """Metadata of the routing. Raises UnsupportedError for a routing that llama.cpp's graph of the family does not support."""
    routers = [part for part in walk(model.layers) if isinstance(part, Router)]
    if not routers:
        return {}
    if not all(router.normalise for router in routers):
        raise UnsupportedError("its router does not normalise (norm_topk_prob); llama.cpp's does for this family")
    if len(routers) != len(model.layers):
        raise UnsupportedError("some of its layers have no experts; llama.cpp's graph of this family has them everywhere")
    values = {"expert_count": u32(routers[0].experts), "expert_used_count": u32(routers[0].top_k)}
    if type(inner := getattr(config, "moe_intermediate_size", None)) is int:
        values["expert_feed_forward_length"] = u32(inner)
    return values


def rope_factors(config: Any) -> torch.Tensor | None:
    """Llama 3's divisors of the rotary frequencies, (head_dim / 2,) fp32; None for other types."""
    rope, dim = _rope(config), config.head_dim
    if rope["rope_type"] != "llama3":
        return None
    factor, low, high = (float(rope[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    context = float(rope["original_max_position_embeddings"])
    out = []
    for i in range(0, dim, 2):
        wave = 2 * math.pi * float(rope["rope_theta"]) ** (i / dim)
        if wave < context / high:
            out.append(1.0)
        elif wave > context / low:
            out.append(factor)
        else:
            smooth = (context / wave - low) / (high - low)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return torch.tensor(out, dtype=torch.float32)
