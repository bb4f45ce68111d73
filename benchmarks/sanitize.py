"""Run compute-sanitizer over every GPU kernel, CUDA and Triton: `python benchmarks/sanitize.py [--only NAME]`.

Each kernel runs in a process of its own under memcheck and racecheck, on small shapes with tails in M, N and K, at every
width, over a few of its configs; weights, x and truth are made on the CPU, so that few kernels but ours are instrumented,
and torch's caching allocator is off, so that an access past the end of a tensor leaves its allocation. Results are
compared with fp32 too. Of decode's kernels (TESTED) it is their tests that run so. Writes
benchmarks/results/<gpu>/sanitize.json, or --out.
"""

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import torch
from pages import ROOT, results_of

from lowq_kernels.activations import rounded
from lowq_kernels.cuda import nvrtc
from lowq_kernels.cuda.operands import TYPES
from lowq_kernels.dispatch import registry
from lowq_kernels.dispatch.precompile import Work, compile_all
from lowq_kernels.dispatch.registry import Call, Config, KernelSpec
from lowq_kernels.fp8 import gemm_wgmma
from lowq_kernels.fp8.call import Fp8Call
from lowq_packers import fp8
from lowq_packers.fp8 import Fp8Matrix
from lowq_packers.layouts import LAYOUTS, PackedWeight, pack
from lowq_packers.qtensor import QuantizedTensor

TOOLS = ("memcheck", "racecheck")
SHAPES = ((72, 1152, 48), (33, 400, 400), (200, 1024, 128))  # N, K, group: tails of rows, chunks and groups
MORE = {"cuda/tile_wgmma": ((1032, 2048, 128),)}  # steps of tiles shared out among all blocks
ROWS = (1, 3, 16, 18, 33, 70)
CONFIGS = {"cuda": 4, "triton": 1}  # of each case; a Triton config takes seconds to compile
LIMIT = {torch.float16: 4e-3, torch.bfloat16: 2e-2}
SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")


def weight(N: int, K: int, bits: int, group: int, zero: str, dtype: torch.dtype) -> QuantizedTensor:
    """A random weight on the CPU."""
    g = torch.Generator().manual_seed(N + bits)
    W_q = torch.randint(0, 1 << bits, (N, K), dtype=torch.uint8, generator=g)
    scales = (torch.rand(N, K // group, generator=g) * 0.009 + 0.001).to(dtype)
    zeros = None if zero == "none" else (torch.rand(N, K // group, generator=g) * ((1 << bits) - 1)).to(dtype)
    return QuantizedTensor(W_q, scales, zeros, bits, group, zero)  # type: ignore[arg-type]


def on_gpu(p: PackedWeight) -> PackedWeight:
    """The same packed weight on the GPU."""
    words, scales, zeros, aux = (None if t is None else t.cuda() for t in (p.words, p.scales, p.zeros, p.aux))
    assert words is not None
    assert scales is not None
    return PackedWeight(words, scales, zeros, p.scheme, p.N, p.K, p.layout, aux)


def cases(spec: KernelSpec) -> Iterator[tuple[torch.Tensor, PackedWeight, torch.Tensor, list[Config]]]:
    """(x, packed weight, truth, configs) of what to launch."""
    share = 0
    for i, (bits, (N, K, group)) in enumerate(product(spec.bits, SHAPES + MORE.get(spec.name, ()))):
        dtype, zero = spec.dtypes[i % min(2, len(spec.dtypes))], ("float", "none")[i % 2]
        for layout in (n for n in spec.layouts if n in LAYOUTS):
            q = weight(N, K, bits, group, zero, dtype)
            if LAYOUTS[layout].why_not(q.scheme, N, K):
                continue
            p = on_gpu(pack(q, layout))
            for M in ROWS[i % 2 :: 2]:
                x = torch.randn(M, K, generator=torch.Generator().manual_seed(M)).to(dtype)
                call = Call.of(x.cuda(), p, spec.acts[0])
                if spec.why_not(call):
                    continue
                legal = spec.legal_configs(call)
                share += 1  # start elsewhere each time, so that all are run
                few = CONFIGS[spec.name.split("/")[0]]
                yield (
                    x,
                    p,
                    rounded(x.float(), spec.acts[0]) @ q.dequantize().t(),
                    [legal[(share + j * 7) % len(legal)] for j in range(min(few, len(legal)))],
                )


FP8 = "cuda/fp8_gemm"
TESTED = {  # kernels whose tests have the cases: pytest runs under the tool
    "cuda/attend": "tests/kernels/test_decode_cuda.py::test_attend",
    "cuda/attend, few bits": "tests/kernels/test_decode_cuda.py::test_attend_over_codes",
    "cuda/experts": "tests/kernels/test_decode_cuda.py::test_experts",
    "cuda/prompt": "tests/kernels/test_prompt_cuda.py",
    "cuda/route": "tests/kernels/test_route_cuda.py",
}


def fp8_cases() -> Iterator[tuple[Fp8Matrix, Fp8Matrix, torch.dtype, list[Config]]]:
    """(x, W, dtype of y, configs) of fp8_gemm: scales by blocks, by groups and by rows, tails in M, N and K."""
    schemes = (((1, 128), (128, 128)), ((256, 256), (256, 256)), ((1, 0), (1, 0)))
    for i, (M, (x_block, w_block)) in enumerate(product((1, 3, 16, 40, 70, 300), schemes)):
        N, K = ((200, 1040), (328, 400), (72, 1152))[i % 3]
        rng = torch.Generator().manual_seed(i)
        x, w = (fp8.quantize(torch.randn(n, K, generator=rng), (b[0], b[1] or K)) for n, b in ((M, x_block), (N, w_block)))
        legal = [c for c in gemm_wgmma.CONFIGS if gemm_wgmma.refuse(Fp8Call.of(x, w, torch.float16), c) is None]
        yield x, w, (torch.float16, torch.bfloat16)[i // 3 % 2], [legal[(i + 5 * j) % len(legal)] for j in range(3)]


def fp8_child() -> None:
    """As `child`, for fp8_gemm."""
    launches = 0
    for x, w, dtype, configs in fp8_cases():
        ref = x.dequantize(torch.float32) @ w.dequantize(torch.float32).t()
        there = [Fp8Matrix(m.q.cuda(), m.scales.cuda(), m.block) for m in (x, w)]
        for config in configs:
            y = gemm_wgmma.fp8_gemm(*there, None, dtype, config).cpu()
            error = float((y.float() - ref).norm() / ref.norm())
            assert error < LIMIT[dtype], (FP8, tuple(x.q.shape), w.q.shape, w.block, config, error)
            launches += 1
    print(f"launches {launches}", flush=True)


def fp8_compile(workers: int) -> None:
    """The instances of `fp8_cases`, side by side."""
    instances = set()
    for x, w, dtype, configs in fp8_cases():
        for c in configs:
            modes = tuple(gemm_wgmma.mode_of(m) for m in ((w, x) if c["SWAP"] else (x, w)))
            instances.add(gemm_wgmma.expression(c, TYPES[dtype], modes))  # type: ignore[arg-type]
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda instance: nvrtc.compiled("fp8_gemm.cu", instance, "sm_90a"), sorted(instances)))


def child(name: str) -> None:
    """Launch one kernel's cases; print how many, raise for a wrong result."""
    if name == FP8:
        fp8_child()
        return
    spec, launches = registry.kernels()[name], 0
    for x, p, ref, configs in cases(spec):
        for config in configs:
            y = spec.launch(x.cuda(), p, None, config).cpu()
            error = float((y.float() - ref).norm() / ref.norm())
            assert error < LIMIT[x.dtype], (name, p.scheme, tuple(x.shape), p.N, config, error)
            launches += 1
    print(f"launches {launches}", flush=True)


def work(spec: KernelSpec) -> list[Work]:
    """What the cases of a kernel compile: done before, side by side, for compilers crawl under a tool."""
    return [
        Work.of(spec.name, config, p.scheme, p.layout, x.dtype, x.shape[0], p.N, p.K)
        for x, p, _, configs in cases(spec)
        for config in configs
    ]


def run(name: str, tool: str, timeout: float) -> dict:
    """One kernel under one tool."""
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", "20"]
    if name in TESTED:
        command += ["pytest", "-p", "no:cacheprovider", "-m", "gpu", str(ROOT / TESTED[name])]
    else:
        command += [sys.executable, __file__, "--child", name]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    row = {"kernel": name, "tool": tool, "launches": 0, "errors": -1, "text": ""}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
        text = done.stdout + done.stderr
    except subprocess.TimeoutExpired as e:
        return row | {"text": f"no end within {timeout:.0f} s: {str(e.stdout)[-300:]}"}
    found, count = SUMMARY.findall(text), re.search(r"launches (\d+)|(\d+) passed", text)
    row |= {"launches": int(count[1] or count[2]) if count else 0, "errors": int("".join(found[-1])) if found else -1}
    return row if row["errors"] == 0 and count else row | {"text": f"{text[:3000]} ... {text[-1000:]}"}


def main() -> None:
    """All kernels under both tools, several at a time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--jobs", type=int, default=12, help="processes at a time")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one kernel under one tool")
    parser.add_argument("--out", help="default: results/<gpu>/sanitize.json")
    args = parser.parse_args()
    if args.child:
        child(args.child)
        return
    out = Path(args.out or results_of(torch.cuda.get_device_name()) / "sanitize.json")
    names = [
        n
        for n, s in registry.kernels().items()
        if n.startswith(("cuda/", "triton/")) and args.only in n and "cuda" in s.devices
    ]
    rows: list[dict] = []
    compile_all([w for n in names for w in work(registry.kernels()[n])], workers=args.jobs)
    if args.only in FP8:
        fp8_compile(args.jobs)
        names.append(FP8)
    names += [n for n in TESTED if args.only in n]
    with ThreadPoolExecutor(args.jobs) as pool:
        for row in pool.map(lambda asked: run(*asked), [(n, t, args.timeout) for t in args.tools.split(",") for n in names]):
            rows.append(row)
            verdict = "clean" if row["errors"] == 0 and row["launches"] else f"{row['errors']} errors\n{row['text']}"
            print(f"{row['tool']} {row['kernel']}: {row['launches']} launches, {verdict}", flush=True)
            facts = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "date": str(datetime.date.today())}
            out.write_text(json.dumps(facts | {"script": "benchmarks/sanitize.py", "rows": rows}, indent=0))


if __name__ == "__main__":
    main()
