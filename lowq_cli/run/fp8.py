"""Checkpoints in the fp8-block layout of DeepSeek and transformers: `weight` in e4m3 beside `weight_scale_inv`.

`write` makes one from any model that lowq reads, a matrix at a time; lowq itself, transformers and vLLM load it. Every linear
weight of the decoder is taken but the output head, unless `lm_head` asks for that; stacked experts and (K, N) matrices stay.
"""

import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lowq_cli.files.atomic import writing
from lowq_cli.files.folder import new_folder
from lowq_cli.files.shards import ShardWriter, to_json
from lowq_cli.files.source import Source
from lowq_cli.hf.structure import roles
from lowq_cli.interop.foreign import SECTIONS, fetcher
from lowq_cli.memory import peak_rss
from lowq_cli.plan.planner import refuse_quantized
from lowq_cli.plan.recipe import matches
from lowq_packers import fp8
from lowq_packers.errors import DamagedError, UnsupportedError, UsageError
from lowq_packers.fp8 import ACT_KEY, BLOCKS, Block

SLAB = 1 << 24  # weights quantized at a time
Progress = Callable[[int, str], None]


@dataclass(frozen=True)
class Fp8Plan:
    """What becomes of each tensor: `quantized` names with their shapes, `kept` names with the reason."""

    source: str
    block: Block
    act: str
    quantized: Mapping[str, tuple[int, int]]
    kept: Mapping[str, str]
    params: int
    source_bytes: int
    nbytes: int

    @property
    def quantized_params(self) -> int:
        """Weights in fp8."""
        return sum(N * K for N, K in self.quantized.values())

    @property
    def bpw(self) -> float:
        """Bits per weight over everything."""
        return 8 * self.nbytes / max(self.params, 1)

    def to_json(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        return {
            "source": self.source,
            "format": "fp8",
            "block": list(self.block),
            "act": self.act,
            "params": self.params,
            "quantized_fraction": self.quantized_params / max(self.params, 1),
            "source_bytes": self.source_bytes,
            "bytes": self.nbytes,
            "bpw": self.bpw,
            "kept": dict(self.kept),
        }


def block_of(text: str) -> Block:
    """The block that `--block` names. Raises UsageError."""
    if text not in BLOCKS:
        raise UsageError(f"block {text!r} does not exist; use one of {', '.join(BLOCKS)}")
    return BLOCKS[text]


def make_plan(source: Source, block: Block, act: str = "fp8", skip: Iterable[str] = (), lm_head: bool = False) -> Fp8Plan:
    """Which weights of `source` go to fp8. Reads headers only.

    Raises UnsupportedError for a source that is quantized already (open it decoded) or has nothing to quantize, UsageError for
    an unknown pattern and int8 activations.
    """
    if act not in ("fp8", "none"):
        raise UsageError(f"fp8 weights take activations in fp8 or as they are; --act {act} needs --format lowq")
    refuse_quantized(source)
    found = roles(source.config, source.headers)
    quantized: dict[str, tuple[int, int]] = {}
    kept: dict[str, str] = {}
    for name, header in source.headers.items():
        role = found[name]
        if role.kind in ("norm", "embedding", "router", "other") or (role.kind == "head" and not lm_head):
            kept[name] = role.kind
        elif len(role.parts) != 1 or len(header.shape) != 2 or role.parts[0].transposed or role.parts[0].rows:
            kept[name] = role.reason or "stored stacked, fused or transposed"
        else:
            quantized[name] = (header.shape[0], header.shape[1])
    for pattern in skip:
        for stem in matches(pattern, [n.removesuffix(".weight") for n in quantized]):
            if quantized.pop(f"{stem}.weight", None):
                kept[f"{stem}.weight"] = "the recipe keeps it"
    if not quantized:
        raise UnsupportedError(f"nothing to quantize: {source.name} has no linear weight that fp8 blocks take")
    sizes = [source.headers[n].nbytes for n in kept]
    for shape in quantized.values():
        scales = fp8.scale_shape(shape, block)
        sizes.append(shape[0] * shape[1] + 4 * scales[0] * scales[1])
    return Fp8Plan(source.name, block, act, quantized, kept, source.params, source.nbytes, sum(sizes))


def config_of(source: Source, plan: Fp8Plan) -> dict[str, Any]:
    """The config.json to write."""
    config = {k: v for k, v in source.config.items() if k not in SECTIONS}
    kept = [n.removesuffix(".weight") for n in plan.kept if n.endswith(".weight") and len(source.headers[n].shape) == 2]
    section: dict[str, Any] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(plan.block),
        "modules_to_not_convert": sorted({"lm_head", *kept} - {n.removesuffix(".weight") for n in plan.quantized}),
    }
    if plan.act != "fp8":
        section[ACT_KEY] = plan.act
    return config | {"quantization_config": section}


def default_out(source: Source, plan: Fp8Plan) -> Path:
    """./MODEL-fp8-128x128."""
    name = Path(source.name).absolute().name if Path(source.name).is_dir() else source.name.rstrip("/").rpartition("/")[2]
    return Path(f"{name}-fp8-{plan.block[0]}x{plan.block[1]}")


@torch.inference_mode()
def write(source: Source, plan: Fp8Plan, out: Path, device: torch.device, progress: Progress | None = None) -> dict[str, Any]:
    """Write the checkpoint into the new folder `out`; whole or not at all.

    Returns out, bpw, bytes, source_bytes, quantized_fraction, seconds, peak_rss_bytes, rel_error (largest of any matrix).
    Raises UsageError if `out` holds anything, DamagedError for weights that are not finite.
    """
    began, done, worst, fetch = time.monotonic(), 0, 0.0, fetcher(source)
    with new_folder(out) as folder:
        shards = ShardWriter(folder)
        for name, header in source.headers.items():
            if name in plan.quantized:
                q, error = quantize_matrix(source, name, plan.block, device)
                worst = max(worst, error)
                shards.add({name: q.q, f"{name.removesuffix('.weight')}.weight_scale_inv": q.scales})
                told = f"{name} error {error:.4f}"
            else:
                shards.add({name: fetch(name)})
                told = f"{name} kept"
            done += header.numel
            if progress:
                progress(done, told)
        shards.finish()
        with writing(folder):
            for path in source.companions():
                shutil.copyfile(path, folder / path.name)
            (folder / "config.json").write_bytes(to_json(config_of(source, plan)))
    return {
        "out": str(out),
        "bpw": plan.bpw,
        "bytes": plan.nbytes,
        "source_bytes": plan.source_bytes,
        "quantized_fraction": plan.quantized_params / max(plan.params, 1),
        "seconds": time.monotonic() - began,
        "peak_rss_bytes": peak_rss(),
        "rel_error": float(f"{worst:.6g}"),
    }


def quantize_matrix(source: Source, name: str, block: Block, device: torch.device) -> tuple[fp8.Fp8Matrix, float]:
    """One (N, K) tensor of a source in fp8, on the CPU, and its relative error. Raises DamagedError for NaN and infinity."""
    N, K = source.headers[name].shape
    step = max(1, SLAB // (block[0] * K)) * block[0]
    parts = []
    squared_error = squared_norm = 0.0
    for first in range(0, N, step):
        count = min(step, N - first)
        W = source.read(name, first * K, count * K).reshape(count, K).to(device).float()
        q = fp8.quantize(W, block)
        squared_error += float((q.dequantize() - W).square().sum(dtype=torch.float64))
        squared_norm += float(W.square().sum(dtype=torch.float64))
        if not squared_error < float("inf"):
            raise DamagedError(f"{name} holds NaN or infinite weights; the model file is damaged")
        parts.append((q.q.cpu(), q.scales.cpu()))
    whole = fp8.Fp8Matrix(torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]), block)
    return whole, (squared_error / squared_norm) ** 0.5 if squared_norm else 0.0
