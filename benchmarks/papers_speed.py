"""Time the papers' kernels on this GPU, for docs/gemv.md and docs/splitk.md: benchmarks/results/h100/.

    python benchmarks/papers_speed.py gemv   [--out FILE.json]    gemv_paper.json
    python benchmarks/papers_speed.py splitk [--out FILE.json]    splitk_paper.json
    ncu -k regex:_gemm_kernel python benchmarks/papers_speed.py splitk --profile SPLIT_K    ncu_splitk_1.txt, _8.txt (Table 7)

gemv: FastGEMV's y = W x for N = K = 512 .. 16384 with W in fp16, int8 and int4 (one scale and zero a row, as near as ours comes
to its one a tensor; and in groups of 128), beside cuBLAS fp16; the bandwidth is its own estimate, (bytes of W + 4 n) / time.
GemLite's CUDA branch: A16Wn with its three ways to sum (four fp32 accumulators, one, half2), A8Wn with int32 sums by dp4a and
plain. Best block shape of each; every result is checked against fp32 before it is timed.
splitk: arXiv:2402.00025. One fixed tile with SPLIT_K = 1 (data parallel) .. 16, M = 1 and 16, the same sizes, 4 bits in groups
of 128; RevSplitK beside GEMV and SplitK at M = 1. --profile launches M = 16, N = K = 4096 a few times and exits.
"""

import argparse
import datetime
import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from lowq_kernels.dispatch import registry
from lowq_kernels.dispatch.measure import call_for, copies, random_weight
from lowq_kernels.dispatch.registry import Config, kernels
from lowq_kernels.dispatch.timing import graph_time, roofline, rotation
from lowq_kernels.dispatch.tuning import Shape
from lowq_kernels.dispatch.tuning_file import Machine
from lowq_packers.layouts import DISK, PackedWeight, repack, unpack
from lowq_packers.scheme import Scheme
from papers import PAPERS, gemv_rows, gemv_warp32
from papers.warp32 import WARP32

RESULTS = Path(__file__).parent / "results" / "h100"
Row = dict[str, Any]
SIZES = (512, 1024, 2048, 4096, 8192, 16384)
SUMS = {gemv_warp32.FP32X4: "fp32 x 4", gemv_warp32.FP32: "fp32", gemv_warp32.HALF2: "half2"}
DEVICE, DTYPE = torch.device("cuda"), torch.float16
LIMIT = 4e-3  # relative Frobenius error; half2 sums round to fp16 up to E codes long
Best = tuple[float, Config, float]  # us, config, error
Product = Callable[[Any, Config], torch.Tensor]
ROWS = (1, 16)
SPLITS = (1, 2, 4, 8, 16)
SCHEME = Scheme(4, 128)
# the paper's tile, 16 x 32 x 128 with 4 warps, has fewer columns than 4 warps of ours can share: 64 here
TILE = {"BLOCK_M": 16, "BLOCK_N": 64, "ROWS": 16, "TRANSPOSED": 0, "NATURAL": 0, "num_warps": 4, "num_stages": 3}


def best(product: Product, weights: list[Any], configs: list[Config], ref: torch.Tensor) -> Best:
    """(us, config, error) of the fastest config. Raises AssertionError for a wrong result."""
    with ThreadPoolExecutor(16) as pool:  # compiles run side by side
        list(pool.map(partial(product, weights[0]), configs))
    found = []
    for config in configs:
        error = float((product(weights[0], config).float() - ref).norm() / ref.norm())
        assert error < LIMIT, (config, error)
        found.append((graph_time([partial(product, w, config) for w in weights]), config, error))
    return min(found, key=lambda f: f[0])


def gemv_row(
    experiment: str, kernel: str, n: int, bits: int, group: int, nbytes: int, found: tuple[float, Config, float]
) -> Row:
    """One JSON row. gbs as FastGEMV estimates it: W once, x and y of two bytes each."""
    us, config, error = found
    about = {"experiment": experiment, "kernel": kernel, "N": n, "bits": bits, "group": group}
    return about | {"us": round(us, 2), "gbs": round((nbytes + 4 * n) / us / 1e3, 1), "config": config, "rel_err": error}


def dense(n: int) -> Iterator[Row]:
    """cuBLAS and the dense rows of FastGEMV."""
    weights = [torch.randn(n, n, device=DEVICE, dtype=DTYPE) / 64 for _ in range(rotation(2 * n * n))]
    x = torch.randn(1, n, device=DEVICE, dtype=DTYPE)
    ref = x.float() @ weights[0].float().t()
    yield gemv_row("fastgemv", "cublas", n, 16, n, 2 * n * n, best(lambda w, _: x @ w.t(), weights, [{}], ref))
    ours = best(lambda w, c: gemv_rows.gemv_rows_dense(x, w, c), weights, list(gemv_rows.CONFIGS), ref)
    yield gemv_row("fastgemv", "gemv_rows", n, 16, n, 2 * n * n, ours)


def packed(n: int, bits: int, group: int) -> Iterator[Row]:
    """gemv_rows and the tile kernels on one weight."""
    shape = Shape(n, n, Scheme(bits, group), DTYPE)
    x = torch.randn(1, n, device=DEVICE, dtype=DTYPE)
    weights = copies(random_weight(shape, "rowstream", DEVICE))
    ref = x.float() @ unpack(weights[0]).dequantize().t()
    spec = PAPERS["cuda/gemv_rows"]
    configs = spec.legal_configs(call_for(shape, 1, "rowstream", DEVICE))
    found = best(lambda w, c: spec.launch(x, w, None, c), weights, configs, ref)
    yield gemv_row("fastgemv", "gemv_rows", n, bits, group, n * n * bits // 8, found)
    tiles = [repack(w, "tile") for w in weights]
    chosen, config = registry.select(call_for(shape, 1, "tile", DEVICE))
    found = best(lambda w, c: chosen.launch(x, w, None, c), tiles, [config], ref)
    yield gemv_row("fastgemv", chosen.name.removeprefix("cuda/"), n, bits, group, n * n * bits // 8, found)


def warp32(n: int, bits: int) -> Iterator[Row]:
    """GemLite's A16Wn, each way to sum; A8Wn by dp4a and plain, one scale a row."""
    shape = Shape(n, n, Scheme(bits, n), DTYPE)
    x = torch.randn(1, n, device=DEVICE, dtype=DTYPE) / 16
    q = unpack(random_weight(shape, DISK, DEVICE))
    weights, W, nbytes = copies(WARP32.pack(q)), q.dequantize().t(), n * n * bits // 8
    spec = PAPERS["cuda/gemv_warp32"]
    for SUM, name in SUMS.items():
        configs = [c for c in spec.legal_configs(call_for(shape, 1, "warp32", DEVICE)) if c["SUM"] == SUM]
        if configs:
            found = best(lambda w, c: spec.launch(x, w, None, c), weights, configs, x.float() @ W)
            yield gemv_row("gemlite", f"A16W{bits} {name}", n, bits, n, nbytes, found)
    x8 = torch.randint(-128, 128, (1, n), dtype=torch.int8, device=DEVICE)

    def integer(w: PackedWeight, c: Config) -> torch.Tensor:
        return gemv_warp32.gemv_warp32_int8(x8, w, bool(c["dp4a"]))

    for dp4a in (1, 0):
        found = best(integer, weights, [{"dp4a": dp4a}], x8.float() @ W)
        yield gemv_row("gemlite", f"A8W{bits} int32{', dp4a' if dp4a else ''}", n, bits, n, nbytes, found)


def tile(split: int) -> Config:
    """The fixed tile with K cut into `split` ranges."""
    return {**TILE, "SPLIT_K": split}


def split_rows(n: int, M: int) -> list[Row]:
    """us per split factor for one size, each output checked against fp32."""
    weights = copies(random_weight(Shape(n, n, SCHEME, torch.float16), "strided", DEVICE))
    x = torch.randn(M, n, device=DEVICE, dtype=torch.float16)
    ref = x.float() @ unpack(weights[0]).dequantize().t()
    rows: list[Row] = []
    for split in SPLITS:
        if split > n // 128:
            continue
        launch, config = kernels()["triton/gemm_splitk"].launch, tile(split)
        err = ((launch(x, weights[0], None, config).float() - ref).norm() / ref.norm()).item()
        us = graph_time([partial(launch, x, w, None, config) for w in weights])
        rows.append({"N": n, "K": n, "M": M, "split_k": split, "us": round(us, 2), "rel_err": err})
    return rows


def schedule_rows(n: int) -> list[Row]:
    """Best us of each GEMV schedule at M = 1, over its registered configs."""
    shape = Shape(n, n, SCHEME, torch.float16)
    weights = copies(random_weight(shape, "strided", DEVICE))
    x = torch.randn(1, n, device=DEVICE, dtype=torch.float16)
    rows: list[Row] = []
    for name in ("triton/gemv", "triton/gemv_revsplitk", "triton/gemv_splitk"):
        spec, best = (kernels() | PAPERS)[name], (math.inf, Config())
        for config in spec.legal_configs(call_for(shape, 1, "strided", DEVICE)):
            us = graph_time([partial(spec.launch, x, w, None, config) for w in weights], 5, 500.0)
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


def gemv() -> Row:
    """FastGEMV's and GemLite's cells."""
    rows: list[Row] = []
    for n in SIZES:
        found = [dense(n), *(packed(n, bits, group) for bits in (8, 4) for group in sorted({n, 128}))]
        for r in chain(*found, *(warp32(n, bits) for bits in (8, 4, 2, 1))):
            rows.append(r)
            print(f"{r['experiment']} {r['kernel']} {n} {r['bits']}b g{r['group']}: {r['us']} us, {r['gbs']} GB/s", flush=True)
    return {"rows": rows}


def splitk() -> Row:
    """The split factors, and the schedules of one row."""
    splits = [row for n in SIZES for M in ROWS for row in split_rows(n, M)]
    return {"tile": TILE, "splitk": splits, "gemv": [row for n in SIZES for row in schedule_rows(n)]}


def main() -> None:
    """Parse, run, write."""
    experiments = {"gemv": gemv, "splitk": splitk}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paper", choices=experiments)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--profile", type=int)
    args = parser.parse_args()
    if args.profile:
        return profile(args.profile)
    here = Machine.here(DEVICE)
    facts: Row = {"gpu": here.gpu, "torch": here.torch, "triton": here.triton, "date": datetime.date.today().isoformat()}
    facts |= {"read_gbs": round(roofline(DEVICE).read_gbs)} | experiments[args.paper]()
    (args.out or RESULTS / f"{args.paper}_paper.json").write_text(json.dumps(facts, indent=1))
    return None


if __name__ == "__main__":
    main()
