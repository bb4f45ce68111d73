"""The experiment of arXiv:2402.00025 (SplitK for W4A16) on this GPU, and RevSplitK against GEMV and SplitK at M = 1.

`python3 benchmarks/splitk_paper.py --out FILE.json` times one fixed tile with SPLIT_K = 1 (data parallel) .. 16, M = 1 and 16,
N = K = 512 .. 16384, weights 4-bit in groups of 128. `--profile SPLIT_K` launches M = 16, N = K = 4096 a few times and
exits: run it under `ncu -k regex:_gemm_kernel` for occupancy and memory throughput (the paper's Table 7).
"""

import argparse
import datetime
import json
import math

import torch

from lowq_kernels.dispatch.measure import call_for, copies, random_weight
from lowq_kernels.dispatch.registry import Config, kernels
from lowq_kernels.dispatch.timing import graph_time, roofline
from lowq_kernels.dispatch.tuning import Machine, Shape
from lowq_packers.layouts import unpack
from lowq_packers.scheme import Scheme

SIZES = (512, 1024, 2048, 4096, 8192, 16384)
ROWS = (1, 16)
SPLITS = (1, 2, 4, 8, 16)
SCHEME = Scheme(4, 128)
DEVICE = torch.device("cuda")
# the paper's tile, 16 x 32 x 128 with 4 warps, has fewer columns than 4 warps of ours can share: 64 here
TILE = {"BLOCK_M": 16, "BLOCK_N": 64, "ROWS": 16, "TRANSPOSED": 0, "NATURAL": 0, "num_warps": 4, "num_stages": 3}


def tile(split: int) -> Config:
    """The fixed tile with K cut into `split` ranges."""
    return {**TILE, "SPLIT_K": split}


def split_rows(n: int, M: int) -> list[dict[str, object]]:
    """us per split factor for one size, each output checked against fp32."""
    weights = copies(random_weight(Shape(n, n, SCHEME, torch.float16), "strided", DEVICE))
    x = torch.randn(M, n, device=DEVICE, dtype=torch.float16)
    ref = x.float() @ unpack(weights[0]).dequantize().t()
    rows: list[dict[str, object]] = []
    for split in SPLITS:
        if split > n // 128:
            continue
        launch, config = kernels()["triton/gemm_splitk"].launch, tile(split)
        err = ((launch(x, weights[0], None, config).float() - ref).norm() / ref.norm()).item()
        us = graph_time([lambda w=w, f=launch, c=config: f(x, w, None, c) for w in weights])
        rows.append({"N": n, "K": n, "M": M, "split_k": split, "us": round(us, 2), "rel_err": err})
    return rows


def gemv_rows(n: int) -> list[dict[str, object]]:
    """Best us of each GEMV schedule at M = 1, over its registered configs."""
    shape = Shape(n, n, SCHEME, torch.float16)
    weights = copies(random_weight(shape, "strided", DEVICE))
    x = torch.randn(1, n, device=DEVICE, dtype=torch.float16)
    rows: list[dict[str, object]] = []
    for name in ("triton/gemv", "triton/gemv_revsplitk", "triton/gemv_splitk"):
        spec, best = kernels()[name], (math.inf, {})
        for config in spec.legal_configs(call_for(shape, 1, "strided", DEVICE)):
            us = graph_time([lambda w=w, s=spec, c=config: s.launch(x, w, None, c) for w in weights], 5, 500.0)
            best = min(best, (us, config), key=lambda t: t[0])
        rows.append({"N": n, "K": n, "M": 1, "kernel": name, "config": best[1], "us": round(best[0], 2)})
    return rows


def profile(split: int) -> None:
    """Launch the M = 16, 4096 x 4096 case for a profiler."""
    weights = copies(random_weight(Shape(4096, 4096, SCHEME, torch.float16), "strided", DEVICE))
    x = torch.randn(16, 4096, device=DEVICE, dtype=torch.float16)
    for w in weights[:6]:
        kernels()["triton/gemm_splitk"].launch(x, w, None, tile(split))
    torch.cuda.synchronize()


def main() -> None:
    """Parse, run, write."""
    ap = argparse.ArgumentParser()
    ap.add_argument("--out")
    ap.add_argument("--profile", type=int)
    a = ap.parse_args()
    if a.profile:
        profile(a.profile)
        return
    splits = [row for n in SIZES for M in ROWS for row in split_rows(n, M)]
    gemvs = [row for n in SIZES for row in gemv_rows(n)]
    ceiling = roofline(DEVICE)
    here = Machine.here(DEVICE)
    facts = {"gpu": here.gpu, "torch": here.torch, "triton": here.triton, "date": datetime.date.today().isoformat()}
    with open(a.out, "w") as f:
        json.dump({**facts, "tile": TILE, "read_gbs": round(ceiling.read_gbs), "splitk": splits, "gemv": gemvs}, f, indent=1)
    for row in splits:
        print(row)
    for row in gemvs:
        print(row)


if __name__ == "__main__":
    main()
