"""Measure errors of GGUF's block types on a model's weights: lowq's search, plain rounding, and llama.cpp's own.

    python benchmarks/once/gguf_types.py MODEL [--library libggml-base.so] -> benchmarks/results/accuracy/gguf_types.json

Each type rounds the linears of two decoder layers, their rows cut to whole blocks; compared are the relative errors over all.
--library: a shared library with llama.cpp's `quantize_q4_K` and the like; without it that column keeps its old numbers.
"""

import argparse
import ctypes
import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from lowq_cli.files.source import open_source
from lowq_cli.quantizers._block_search import quantize_blocks
from lowq_packers.formats._gguf_blocks import BLOCK_KINDS, Blocks, read_blocks
from lowq_packers.formats.gguf import TYPES

OUT = Path(__file__).parents[1] / "results" / "accuracy" / "gguf_types.json"
LAYERS = ("1", "4")


def weights(model: str) -> Iterator[torch.Tensor]:
    """The linears of LAYERS, (N, K) fp32, K a multiple of 256."""
    with open_source(model) as source:
        for name, header in source.headers.items():
            if (m := re.search(r"layers\.(\d+)\..*_proj\.weight$", name)) and m[1] in LAYERS:
                W = source.read(name).reshape(header.shape).float()
                yield W[:, : W.shape[1] // 256 * 256].contiguous()


def plain(W: torch.Tensor, kind: str) -> Blocks:
    """Rounding by the definition: each sub-block's range, whole numbers rounded to the largest one, nearest codes."""
    b = BLOCK_KINDS[kind]
    x, lone = W.reshape(len(W), -1, b.elements // b.sub, b.sub), b.elements == b.sub
    values, order = b.values().sort()
    low = -x.amin(-1) if lone else -x.amin(-1).clamp(max=0)
    step = (x.amax(-1) + low) / (values[-1] - values[0]) if b.mins else x.abs().amax(-1) / values.abs().max()
    d, dmin = ((t.amax(-1, keepdim=True) / max(top, 1)).half() for t, top in ((step, b.scales[1]), (low, b.mins)))
    s, m = (step / d.float()).round().clamp(0, b.scales[1]), (low / dmin.float().clamp(min=1e-9)).round().clamp(0, b.mins)
    dmin, m = (low.half(), torch.ones_like(s)) if lone else (dmin, m)
    off = (dmin.float() * m).unsqueeze(-1) if b.mins else 0
    codes = order[torch.bucketize((x + off) / (d.float() * s).unsqueeze(-1).clamp(min=1e-30), (values[1:] + values[:-1]) / 2)]
    flat = [t.reshape(len(W), -1) for t in (codes.to(torch.uint8), s, m, d, dmin)]
    return Blocks(kind, flat[0], flat[1], flat[2] if b.mins else None, flat[3], flat[4] if b.mins else None)


def by_llama_cpp(library: ctypes.CDLL, W: torch.Tensor, kind: str) -> Blocks:
    """llama.cpp's own choice, without an importance matrix."""
    (N, K), t = W.shape, TYPES[kind]
    out = torch.zeros(N * K // t.elements * t.nbytes, dtype=torch.uint8)
    run = getattr(library, f"quantize_{kind.lower() if kind.startswith('IQ') else 'q' + kind[1:]}")
    run.argtypes, run.restype = (
        [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p],
        ctypes.c_size_t,
    )
    run(W.data_ptr(), out.data_ptr(), N, K, None)
    return read_blocks(out, kind, N, K)


def main() -> None:
    """Measure every type."""
    made = argparse.ArgumentParser()
    made.add_argument("model")
    made.add_argument("--library")
    args = made.parse_args()
    library = ctypes.CDLL(args.library) if args.library else None
    old = {r["type"]: r for r in json.loads(OUT.read_text())["rows"]} if OUT.is_file() else {}
    found, rows = list(weights(args.model)), []
    total = sum(float(W.square().sum()) for W in found)
    for kind in BLOCK_KINDS:
        ways = {"lowq": quantize_blocks, "plain": plain}
        errors = {n: sum(float((w(W, kind).dequantize() - W).square().sum()) for W in found) for n, w in ways.items()}
        row = {n: round((e / total) ** 0.5, 5) for n, e in errors.items()}
        if library:
            theirs = sum(float((by_llama_cpp(library, W, kind).dequantize() - W).square().sum()) for W in found)
            row["llama.cpp"] = round((theirs / total) ** 0.5, 5)
        else:
            row["llama.cpp"] = old.get(kind, {}).get("llama.cpp")
        rows.append({"type": kind, "bits": 8 * TYPES[kind].nbytes / TYPES[kind].elements, **row})
        print(json.dumps(rows[-1]), flush=True)
    OUT.write_text(json.dumps({"model": Path(args.model).name, "layers": LAYERS, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
