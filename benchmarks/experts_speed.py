"""A mixture's layer by both kernels: experts read once a token, and products grouped by expert. results/<gpu>/experts.json.

    python benchmarks/experts_speed.py [--bits 4] [--out FILE]     # on a Hopper GPU

Shapes of Qwen3-30B-A3B and Mixtral 8x7B, random weights, groups of 128; us a layer inside a CUDA graph, layers rotating past
the second-level cache; the relative error of each against fp32.
"""

import argparse
import json
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from pages import results_of

from lowq_kernels.decode.experts import experts
from lowq_kernels.decode.grouped_experts import grouped_experts
from lowq_kernels.dispatch.timing import graph_time
from lowq_kernels.modules.stack import Stack
from lowq_packers.layouts import PackedWeight, unpack
from lowq_packers.layouts.tile import WORDS, chunks
from lowq_packers.scheme import Scheme

SHAPES = {"qwen3-30b-a3b": (128, 8, 2048, 768), "mixtral-8x7b": (8, 2, 4096, 14336)}  # experts, a token, hidden, width
TOKENS = (1, 4, 8, 16, 24, 32, 64, 128, 256, 512, 2048, 8192)
FEW = 256  # tokens up to which experts are read once a token here
WORTH = 3 << 30  # bytes of weights that rotate


def stack(E: int, N: int, K: int, bits: int) -> Stack:
    """Random words in layout tile."""
    s, half = Scheme(bits, 128, "none"), {"dtype": torch.float16, "device": "cuda"}
    words = torch.randint(-(1 << 31), 1 << 31, (E, N // 16, chunks(K, bits) * WORDS[bits]), device="cuda").to(torch.int32)
    scales = torch.rand(E, N // 16, K // 128, 16, **half).add_(0.5).mul_(K**-0.5 / 2**bits)  # type: ignore[arg-type]
    return Stack(words, scales, None, None, s, N, K, "tile")


def error(y: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, up: Stack, down: Stack) -> float:
    """Relative, of the first 64 tokens."""
    wanted = torch.zeros(min(64, len(x)), x.shape[1], device="cuda")

    def dense(s: Stack, e: int) -> torch.Tensor:
        p: PackedWeight = s.expert(e)
        return unpack(p).dequantize().float()

    for e in ids[: len(wanted)].unique().tolist():
        at, k = (ids[: len(wanted)] == e).nonzero(as_tuple=True)
        gate, value = (x[at].float() @ dense(up, e).T).chunk(2, -1)
        wanted.index_add_(0, at, (torch.nn.functional.silu(gate) * value) @ dense(down, e).T * weights[at, k, None])
    return float((y[: len(wanted)].float() - wanted).norm() / wanted.norm())


def main() -> None:
    """Time and check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    torch.backends.cuda.matmul.allow_tf32 = False
    for name, (E, top_k, H, width) in SHAPES.items():
        layer_bytes = 3 * E * H * width * args.bits // 8
        layers = [
            (stack(E, 2 * width, H, args.bits), stack(E, H, width, args.bits)) for _ in range(max(1, WORTH // layer_bytes))
        ]
        for T in TOKENS:
            x = torch.randn(T, H, device="cuda", dtype=torch.float16)
            ids = torch.rand(T, E, device="cuda").topk(top_k).indices
            weights = torch.rand(T, top_k, device="cuda")
            row: dict[str, Any] = {"model": name, "tokens": T, "bits": args.bits}
            ways: dict[str, Callable[..., torch.Tensor]] = {"grouped": grouped_experts}
            if T <= FEW:
                ways["single"] = experts
            for way, call in ways.items():
                try:
                    row[f"{way}_error"] = error(call(x, ids, weights, *layers[0], "silu"), x, ids, weights, *layers[0])
                    row[f"{way}_us"] = graph_time([partial(call, x, ids, weights, up, down, "silu") for up, down in layers])
                except Exception as e:
                    row[f"{way}_failed"] = f"{type(e).__name__}: {e}"[:200]
            rows.append(row)
            print(json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
        del layers
    device = torch.cuda.get_device_name(0)
    facts = {"device": device, "date": datetime.now(UTC).isoformat("T", "seconds")}
    facts |= {p: version(p) for p in ("lowq", "torch", "triton")}
    out = args.out or results_of(device) / "experts.json"
    out.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
