"""FastGEMV's experiment and GemLite-CUDA's, on this GPU: `python benchmarks/gemv_paper.py [--out FILE.json]`.

FastGEMV: y = W x for N = K = 512 .. 16384 with W in fp16, int8 and int4 (one scale and zero a row, as near as ours comes to
its one a tensor; and in groups of 128), beside cuBLAS fp16; the bandwidth is its own estimate, (bytes of W + 4 n) / time.
GemLite's CUDA branch: A16Wn with its three ways to sum (four fp32 accumulators, one, half2), A8Wn with int32 sums by dp4a
and plain. Best block shape of each; every result is checked against fp32 before it is timed.
"""

import argparse
import datetime
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lowq_kernels.dispatch import registry
from lowq_kernels.dispatch.measure import call_for, copies, random_weight
from lowq_kernels.dispatch.registry import Config
from lowq_kernels.dispatch.timing import graph_time, roofline, rotation
from lowq_kernels.dispatch.tuning import Shape
from lowq_kernels.papers import gemv_rows, gemv_warp32
from lowq_packers.layouts import PackedWeight, repack, unpack
from lowq_packers.scheme import Scheme

SIZES = (512, 1024, 2048, 4096, 8192, 16384)
SUMS = {gemv_warp32.FP32X4: "fp32 x 4", gemv_warp32.FP32: "fp32", gemv_warp32.HALF2: "half2"}
DEVICE, DTYPE = torch.device("cuda"), torch.float16
LIMIT = 4e-3  # relative Frobenius error; half2 sums round to fp16 up to E codes long
Product = Callable[[Any, Config], torch.Tensor]


def best(product: Product, weights: list[Any], configs: list[Config], ref: torch.Tensor) -> tuple[float, Config, float]:
    """(us, config, error) of the fastest config. Raises AssertionError for a wrong result."""
    with ThreadPoolExecutor(16) as pool:  # compiles run side by side
        list(pool.map(partial(product, weights[0]), configs))
    found = []
    for config in configs:
        error = float((product(weights[0], config).float() - ref).norm() / ref.norm())
        assert error < LIMIT, (config, error)
        found.append((graph_time([partial(product, w, config) for w in weights]), config, error))
    return min(found, key=lambda f: f[0])


def row(experiment: str, kernel: str, n: int, bits: int, group: int, nbytes: int, found: tuple[float, Config, float]) -> dict:
    """One JSON row. gbs as FastGEMV estimates it: W once, x and y of two bytes each."""
    us, config, error = found
    us_gbs = {"us": round(us, 2), "gbs": round((nbytes + 4 * n) / us / 1e3, 1)}
    return {
        "experiment": experiment,
        "kernel": kernel,
        "N": n,
        "bits": bits,
        "group": group,
        **us_gbs,
        "config": config,
        "rel_err": error,
    }


def dense(n: int) -> Iterator[dict]:
    """cuBLAS and the dense rows of FastGEMV."""
    weights = [torch.randn(n, n, device=DEVICE, dtype=DTYPE) / 64 for _ in range(rotation(2 * n * n))]
    x = torch.randn(1, n, device=DEVICE, dtype=DTYPE)
    ref = x.float() @ weights[0].float().t()
    yield row("fastgemv", "cublas", n, 16, n, 2 * n * n, best(lambda w, _: x @ w.t(), weights, [{}], ref))
    ours = best(lambda w, c: gemv_rows.gemv_rows_dense(x, w, c), weights, list(gemv_rows.CONFIGS), ref)
    yield row("fastgemv", "gemv_rows", n, 16, n, 2 * n * n, ours)


def packed(n: int, bits: int, group: int) -> Iterator[dict]:
    """gemv_rows and the tile kernels on one weight."""
    shape = Shape(n, n, Scheme(bits, group), DTYPE)
    x = torch.randn(1, n, device=DEVICE, dtype=DTYPE)
    weights = copies(random_weight(shape, "rowstream", DEVICE))
    ref = x.float() @ unpack(weights[0]).dequantize().t()
    spec = registry.kernels()["cuda/gemv_rows"]
    configs = spec.legal_configs(call_for(shape, 1, "rowstream", DEVICE))
    found = best(lambda w, c: spec.launch(x, w, None, c), weights, configs, ref)
    yield row("fastgemv", "gemv_rows", n, bits, group, n * n * bits // 8, found)
    tiles = [repack(w, "tile") for w in weights]
    chosen, config = registry.select(call_for(shape, 1, "tile", DEVICE))
    found = best(lambda w, c: chosen.launch(x, w, None, c), tiles, [config], ref)
    yield row("fastgemv", chosen.name.removeprefix("cuda/"), n, bits, group, n * n * bits // 8, found)


def warp32(n: int, bits: int) -> Iterator[dict]:
    """GemLite's A16Wn, each way to sum; A8Wn by dp4a and plain, one scale a row."""
    shape = Shape(n, n, Scheme(bits, n), DTYPE)
    x = torch.randn(1, n, device=DEVICE, dtype=DTYPE) / 16
    weights = copies(random_weight(shape, "warp32", DEVICE))
    W, nbytes = unpack(weights[0]).dequantize().t(), n * n * bits // 8
    spec = registry.kernels()["cuda/gemv_warp32"]
    for SUM, name in SUMS.items():
        configs = [c for c in spec.legal_configs(call_for(shape, 1, "warp32", DEVICE)) if c["SUM"] == SUM]
        if configs:
            found = best(lambda w, c: spec.launch(x, w, None, c), weights, configs, x.float() @ W)
            yield row("gemlite", f"A16W{bits} {name}", n, bits, n, nbytes, found)
    x8 = torch.randint(-128, 128, (1, n), dtype=torch.int8, device=DEVICE)

    def integer(w: PackedWeight, c: Config) -> torch.Tensor:
        return gemv_warp32.gemv_warp32_int8(x8, w, bool(c["dp4a"]))

    for dp4a in (1, 0):
        found = best(integer, weights, [{"dp4a": dp4a}], x8.float() @ W)
        yield row("gemlite", f"A8W{bits} int32{', dp4a' if dp4a else ''}", n, bits, n, nbytes, found)


def main() -> None:
    """Every cell, into one file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "h100" / "gemv_paper.json"))
    args = parser.parse_args()
    rows: list[dict] = []

    def keep(more: Iterator[dict]) -> None:
        for r in more:
            rows.append(r)
            print(
                r["experiment"], r["kernel"], r["N"], f"{r['bits']}b g{r['group']}: {r['us']} us, {r['gbs']} GB/s", flush=True
            )

    for n in SIZES:
        keep(dense(n))
        for bits in (8, 4):
            for group in sorted({n, 128}):
                keep(packed(n, bits, group))
        for bits in (8, 4, 2, 1):
            keep(warp32(n, bits))
    facts = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "date": str(datetime.date.today())}
    facts |= {"script": "benchmarks/gemv_paper.py", "read_gbs": round(roofline(DEVICE).read_gbs)}
    Path(args.out).write_text(json.dumps(facts | {"rows": rows}, indent=0))


if __name__ == "__main__":
    main()
