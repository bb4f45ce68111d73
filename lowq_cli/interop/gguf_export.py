"""A lowq checkpoint of the Llama or Qwen families as one GGUF file, which llama.cpp, Ollama and LM Studio run.

Names and metadata are llama.cpp's. Its Llama graph rotates adjacent pairs where Hugging Face's rotates halves, so rows of q
and k are permuted for it (whole rows: codes, scales and zeros move together). Norms and biases are written in fp32.
"""

import math
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lowq_cli.files.checkpoint import Checkpoint, CheckpointTensor
from lowq_cli.files.folder import sweep
from lowq_cli.interop.exported import Exported, Progress, check_same, run_name
from lowq_cli.interop.gguf_file import GgufTensor, Value, f32, head, text, u32
from lowq_cli.interop.gguf_names import ARCHITECTURES, LAYER, PERMUTED, ROUTERS, TOP
from lowq_cli.interop.gguf_tokenizer import tokenizer_metadata
from lowq_cli.interop.gguf_writer import new_gguf
from lowq_cli.state import was_exported
from lowq_packers.errors import DamagedError, LowqError, UnsupportedError
from lowq_packers.formats import _common, gguf
from lowq_packers.qtensor import QuantizedTensor

ENGINES = ("llama.cpp", "Ollama", "LM Studio")
EXPERT = re.compile(r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)")
STACKS = {  # an expert's matrix -> all experts' in one tensor, (E, N, K)
    **dict.fromkeys(("gate_proj", "w1"), "ffn_gate_exps"),
    **dict.fromkeys(("up_proj", "w3"), "ffn_up_exps"),
    **dict.fromkeys(("down_proj", "w2"), "ffn_down_exps"),
}


Entries = list[tuple[GgufTensor, list[CheckpointTensor]]]  # a row of the tensor table, and what it is made of


def prepared(found: Checkpoint, name: str) -> tuple[str, list[tuple[str, Value]], Entries]:
    """The architecture, metadata and tensors of a file. Raises UnsupportedError, NotFoundError where there can be none."""
    arch = ARCHITECTURES.get(str(found.config.get("model_type")))
    if arch is None:
        raise UnsupportedError(
            f"model_type {found.config.get('model_type')!r} is not one that lowq writes as GGUF ({', '.join(ARCHITECTURES)})"
        )
    _check_computed_alike(found.config)
    facts = _model_metadata(found, arch, name)
    entries = _entries(found)
    return arch, [*facts, *tokenizer_metadata(found.folder, found.config, _int(found, "vocab_size"))], entries


def export_gguf(found: Checkpoint, out: Path, rounding: bool, progress: Progress | None) -> Exported:
    """Write `found` to the file `out`.

    rounding: accept scales and offsets rounded to fp16 where they do not fit it.
    Raises UnsupportedError for a family, tokenizer or scheme that GGUF (as lowq writes it) does not hold, UsageError if `out`
    is there already.
    """
    arch, metadata, entries = prepared(found, out.stem)
    factors = _rope_factors(found.config)
    extra = [] if factors is None else [GgufTensor("rope_freqs.weight", tuple(factors.shape), "F32")]
    heads = {"attn_q": _int(found, "num_attention_heads"), "attn_k": _int(found, "num_key_value_heads", "num_attention_heads")}
    done, total = 0, sum(t.params for t in found.tensors)

    def contents(row: GgufTensor, members: list[CheckpointTensor]) -> Iterator[memoryview]:
        nonlocal done
        own = heads.get(row.name.split(".")[-2]) if arch in PERMUTED else None
        for t in members:
            yield _bytes(found, t, row, own, rounding).flatten().view(torch.uint8).numpy().data
            done += t.params
            if progress:
                progress(100 * done // total, t.name)

    start, run = head(metadata, [*(row for row, _ in entries), *extra]), run_name(found, "gguf", rounding)
    facts_of = partial(Exported, str(out), "gguf", matrices=len(found.schemes), engines=ENGINES, notes=())
    if was_exported(out, run):
        sweep(out)
        return facts_of(bytes=out.stat().st_size, already_done=True)
    with new_gguf(out, run, start) as writer:
        done = sum(t.params for _, members in entries[: writer.finished] for t in members)
        for row, members in entries[writer.finished :]:
            writer.write(row, contents(row, members))
        for row in extra[max(0, writer.finished - len(entries)) :]:
            assert factors is not None
            writer.write(row, [factors.view(torch.uint8).numpy().data])
    return facts_of(bytes=out.stat().st_size)


def _check_computed_alike(config: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for what llama.cpp's graphs of these families do otherwise."""
    if _common.sliding_window(config) and config.get("use_sliding_window", True):
        raise UnsupportedError("its attention has a sliding window, which llama.cpp does not apply to this architecture")
    if not _common.has_silu(config):
        raise UnsupportedError(f"its activation is {config['hidden_act']}, llama.cpp's graph of this family has silu")


def _entries(found: Checkpoint) -> Entries:
    """Rows of the tensor table and what each is made of: one tensor, or a layer's experts in their order."""
    entries: dict[str, tuple[GgufTensor, list[CheckpointTensor]]] = {}
    for t in found.tensors:
        expert = EXPERT.fullmatch(t.name if t.scheme else t.name.removesuffix(".weight"))
        if expert is None or expert[3] not in STACKS:
            row = _tensor(t)
            entries[row.name] = row, [t]
            continue
        name = f"blk.{expert[1]}.{STACKS[expert[3]]}.weight"
        entries.setdefault(name, (GgufTensor(name, (), ""), []))[1].append(t)
    experts = found.config.get("num_local_experts") or found.config.get("num_experts")
    for name, (row, members) in entries.items():
        if row.kind:
            continue
        kinds = {(t.shape, gguf.type_for(t.scheme) if t.scheme else t.dtype) for t in members}
        if len(kinds) > 1 or len(members) != experts:
            raise UnsupportedError(f"{name} would stack {len(members)} experts of {len(kinds)} kinds; they must agree")
        ((shape, kind),) = kinds
        members.sort(key=lambda t: int(t.name.split(".experts.")[1].split(".")[0]))
        entries[name] = GgufTensor(name, (len(members), *shape), kind or ""), members
    return list(entries.values())


def _tensor(t: CheckpointTensor) -> GgufTensor:
    """Its row of the tensor table."""
    stem, leaf = (t.name, "weight") if t.scheme else (t.name.rpartition(".")[0], t.name.rpartition(".")[2])
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    inside = LAYER | ROUTERS
    name = f"blk.{layer[1]}.{inside[layer[2]]}" if layer and layer[2] in inside else TOP.get(stem)
    if name is None or leaf not in ("weight", "bias"):
        raise UnsupportedError(f"{t.name} has no place in llama.cpp's graph of this family")
    if t.scheme:
        return GgufTensor(f"{name}.{leaf}", t.shape, gguf.type_for(t.scheme) or "")
    whole = len(t.shape) == 1 or name.endswith(ROUTERS["mlp.gate"])  # llama.cpp keeps norms, biases and routers in fp32
    return GgufTensor(f"{name}.{leaf}", t.shape, "F32" if whole else t.dtype)


def _bytes(found: Checkpoint, t: CheckpointTensor, row: GgufTensor, heads: int | None, rounding: bool) -> torch.Tensor:
    """What is written for one tensor; its rows permuted where it belongs to `heads` heads."""

    def permuted(rows: torch.Tensor) -> torch.Tensor:
        return rows if heads is None else gguf.permute_heads(rows, heads).contiguous()

    if t.scheme is None:
        plain = found.read_plain(t)
        return permuted(plain.float() if row.kind == "F32" else plain).contiguous()
    q = found.read_matrix(t)
    zeros = None if q.zeros is None else permuted(q.zeros)
    q = QuantizedTensor.of(q.scheme, permuted(q.W_q), permuted(q.scales), zeros, q.table)
    try:
        raw = gguf.encode(q, t.name, rounding)
    except LowqError as e:
        raise UnsupportedError(f"cannot export {e}") from None
    check_same(gguf.decode(raw, row.kind, t.shape[0], t.shape[1], t.name), q, t.name, rounding)
    return raw


def _int(found: Checkpoint, *names: str) -> int:
    value = next((found.config[n] for n in names if type(found.config.get(n)) is int), None)
    if value is None:
        raise DamagedError(f"config.json lacks {names[0]}")
    return value


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings, as transformers 5 or as 4 keeps them."""
    nested = config.get("rope_parameters") or config.get("rope_scaling") or {}
    found = {"rope_theta": config.get("rope_theta", 10000.0), "rope_type": "default", **nested}
    found["rope_type"] = nested.get("rope_type") or nested.get("type") or "default"
    if found["rope_type"] not in ("default", "llama3"):
        raise UnsupportedError(f"rotary embedding {found['rope_type']!r} is not one that lowq writes as GGUF")
    return found


def _model_metadata(found: Checkpoint, arch: str, name: str) -> list[tuple[str, Value]]:
    config = found.config
    heads = _int(found, "num_attention_heads")
    hidden = _int(found, "hidden_size")
    head_dim = config.get("head_dim") or hidden // heads
    own = {
        "context_length": u32(_int(found, "max_position_embeddings")),
        "embedding_length": u32(hidden),
        "block_count": u32(_int(found, "num_hidden_layers")),
        "feed_forward_length": u32(_int(found, "intermediate_size")),
        "attention.head_count": u32(heads),
        "attention.head_count_kv": u32(_int(found, "num_key_value_heads", "num_attention_heads")),
        "attention.key_length": u32(head_dim),
        "attention.value_length": u32(head_dim),
        "attention.layer_norm_rms_epsilon": f32(float(config.get("rms_norm_eps", 1e-6))),
        "rope.dimension_count": u32(head_dim),
        "rope.freq_base": f32(float(_rope(config)["rope_theta"])),
        "vocab_size": u32(_int(found, "vocab_size")),
        **_mixture_metadata(found),
    }
    general = [("general.architecture", text(arch)), ("general.name", text(name)), ("general.quantization_version", u32(2))]
    return [*general, *((f"{arch}.{key}", value) for key, value in own.items())]


def _mixture_metadata(found: Checkpoint) -> dict[str, Value]:
    """How experts are chosen. Raises UnsupportedError for a choice that llama.cpp's graph of the family does not make."""
    config = found.config
    if not any(t.name.rpartition(".experts.")[0] for t in found.tensors):
        return {}
    if not config.get("norm_topk_prob", False) and config["model_type"] == "qwen3_moe":
        raise UnsupportedError("its router does not normalise (norm_topk_prob), llama.cpp's graph of this family does")
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise UnsupportedError("some of its layers have no experts; llama.cpp's graph of this family has them everywhere")
    values = {
        "expert_count": u32(_int(found, "num_local_experts", "num_experts")),
        "expert_used_count": u32(_int(found, "num_experts_per_tok")),
    }
    if type(config.get("moe_intermediate_size")) is int:
        values["expert_feed_forward_length"] = u32(config["moe_intermediate_size"])
    return values


def _rope_factors(config: Mapping[str, Any]) -> torch.Tensor | None:
    """Llama 3's divisors of the rotary frequencies, (head_dim / 2,) fp32; None where there are none."""
    rope = _rope(config)
    if rope["rope_type"] != "llama3":
        return None
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
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
