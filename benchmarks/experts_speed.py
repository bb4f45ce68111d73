"""Time a mixture's layer by several kernels: experts read once per token; grouped by expert, in 16 bits and in 8.

    python benchmarks/experts_speed.py [--bits 4] [--models NAME,...] [--tokens 1,16,...] [--ways grouped,fp8] [--out FILE]

Needs a Hopper GPU; writes results/<gpu>/experts.json. Shapes of Qwen3-30B-A3B and Mixtral 8x7B, random weights, groups of
128, of gpt-oss-20b (MXFP4, biases, its own gate) and of its experts in codes of 4 bits, groups of 64. us a layer inside a CUDA
graph, layers rotating past the second-level cache; the relative error of each against fp32; GB/s of the words and scales of the
experts that were hit.
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
from lowq_kernels.decode.grouped_experts8 import config_for, layer
from lowq_kernels.decode.reference import gated
from lowq_kernels.dispatch.timing import graph_time
from lowq_kernels.modules.stack import Stack
from lowq_packers.layouts import PackedWeight, unpack
from lowq_packers.layouts.tile import WORDS, chunks, padded_rows
from lowq_packers.scheme import Scheme
from lowq_packers.tables import to_bytes

SHAPES = {  # experts, a token, hidden, width
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "mixtral-8x7b": (8, 2, 4096, 14336),
    "gpt-oss-20b": (32, 4, 2880, 2880),
    "gpt-oss-20b-codes": (32, 4, 2880, 2880),
}
MXFP4 = ("gpt-oss-20b",)
OWN_GATES = {"gpt-oss-20b": "clamped_swiglu", "gpt-oss-20b-codes": "clamped_swiglu"}
Way = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Stack, Stack, str], torch.Tensor]


def in_eight_bits(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, up: Stack, down: Stack, act: str, int8: bool
) -> torch.Tensor:
    """By the tiles that the kernel takes, whatever the number of rows."""
    assert up.scheme is not None
    return layer(x, ids, weights, up, down, act, config_for(ids.numel() / len(up.words), up.scheme), int8)


WAYS: dict[str, Way] = {
    "grouped": partial(grouped_experts, config={}),
    "single": partial(experts, config={}),
    "fp8": partial(in_eight_bits, int8=False),
    "int8": partial(in_eight_bits, int8=True),
}
TOKENS = (1, 4, 8, 16, 24, 32, 64, 128, 256, 512, 2048, 8192)
FEW = 256  # tokens up to which experts are read once a token here
WORTH = 3 << 30  # bytes of weights that rotate


def stack(E: int, N: int, K: int, s: Scheme) -> Stack:
    """Random words in layout tile; of a table, with biases."""
    tiles = padded_rows(N) // 16
    half: dict[str, Any] = {"dtype": torch.float16, "device": "cuda"}
    words = torch.randint(-(1 << 31), 1 << 31, (E, tiles, chunks(K, s.bits) * WORDS[s.bits]), device="cuda").to(torch.int32)
    scales = torch.rand(E, tiles, s.groups(K), 16, **half).add_(0.5).mul_(K**-0.5 / 2**s.bits)
    if not s.table:
        return Stack(words, scales, None, None, s, N, K, "tile")
    bias = torch.randn(E, N, **half)
    return Stack(words, to_bytes(4 * scales.float(), s.scale), None, None, s, N, K, "tile", bias=bias)


def error(
    y: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, up: Stack, down: Stack, act: str
) -> float:
    """Relative, of the first 64 tokens."""
    wanted = torch.zeros(min(64, len(x)), x.shape[1], device="cuda")

    def dense(s: Stack, e: int) -> torch.Tensor:
        p: PackedWeight = s.expert(e)
        return unpack(p).dequantize().float()

    for e in ids[: len(wanted)].unique().tolist():
        at, k = (ids[: len(wanted)] == e).nonzero(as_tuple=True)
        of_up, of_down = (0 if s.bias is None else s.bias[e].float() for s in (up, down))
        h = gated(x[at].float() @ dense(up, e).T + of_up, act)
        wanted.index_add_(0, at, (h @ dense(down, e).T + of_down) * weights[at, k, None])
    return float((y[: len(wanted)].float() - wanted).norm() / wanted.norm())


def main() -> None:
    """Time and check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    device = torch.cuda.get_device_name(0)
    facts = {"device": device, "date": datetime.now(UTC).isoformat("T", "seconds")}
    facts |= {p: version(p) for p in ("lowq", "torch", "triton")}
    out = args.out or results_of(device) / "experts.json"
    torch.backends.cuda.matmul.allow_tf32 = False
    for name in args.models.split(","):
        E, top_k, H, width = SHAPES[name]
        of_codes = Scheme(args.bits, 64 if name.startswith("gpt-oss") else 128, "none")
        s, act = (Scheme.of(4, 32, "e2m1/e8m0") if name in MXFP4 else of_codes), OWN_GATES.get(name, "silu")
        pair = stack(E, 2 * width, H, s), stack(E, H, width, s)
        expert_bytes = sum(t.nbytes for p in pair for t in (p.words, p.scales) if t is not None) / E
        more = max(1, int(WORTH // (E * expert_bytes))) - 1
        layers = [pair, *((stack(E, 2 * width, H, s), stack(E, H, width, s)) for _ in range(more))]
        for T in map(int, args.tokens.split(",")):
            x = torch.randn(T, H, device="cuda", dtype=torch.float16)
            ids = torch.rand(T, E, device="cuda").topk(top_k).indices
            weights = torch.rand(T, top_k, device="cuda")
            row: dict[str, Any] = {"model": name, "tokens": T, "bits": s.bits, "weights": str(s)}
            for way in args.ways.split(","):
                call = WAYS[way]
                if (way == "single" and T > FEW) or (way == "int8" and name in MXFP4):
                    continue
                try:
                    row[f"{way}_error"] = error(call(x, ids, weights, *pair, act), x, ids, weights, *pair, act)
                    row[f"{way}_us"] = graph_time([partial(call, x, ids, weights, up, down, act) for up, down in layers])
                    row[f"{way}_gbs"] = ids.unique().numel() * expert_bytes / row[f"{way}_us"] / 1e3
                except Exception as e:
                    row[f"{way}_failed"] = f"{type(e).__name__}: {e}"[:200]
            rows.append(row)
            print(json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
            out.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
        del pair, layers


if __name__ == "__main__":
    main()
