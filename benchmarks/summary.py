"""The README's part `measured`: one short table per question a newcomer asks, out of benchmarks/results/."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import cuda_table

RESULTS = Path(__file__).parent / "results"
Table = Callable[[Sequence[str], Iterable[Sequence[object]]], str]
PRODUCTS = ((4096, 4096), (4096, 14336), (28672, 4096))  # an 8B Llama's o, down, and gate with up
ROWS = (1, 4, 16, 64, 256, 1024)  # of x
DECODERS = {  # variants of benchmarks/e2e_decode.py, as a reader would name them
    "transformers": "transformers `generate`, 16-bit",
    "transformers-compile": "transformers `generate`, static cache, its own torch.compile, 16-bit",
    "transformers-static": "transformers, static cache, one CUDA graph, 16-bit",
    "16": "lowq, 16-bit",
    "8": "lowq, 8-bit g128",
    "4": "lowq, 4-bit g128",
    "4g64": "lowq, 4-bit g64",
    "4h8": "lowq, 4-bit g128, 8-bit head",
    "4h4": "lowq, 4-bit g128, 4-bit head",
    "3": "lowq, 3-bit g128",
    "3h8": "lowq, 3-bit g128, 8-bit head",
    "2": "lowq, 2-bit g128",
    "2h8": "lowq, 2-bit g128, 8-bit head",
    "2h4": "lowq, 2-bit g128, 4-bit head",
}


def read(name: str) -> Any:
    """A result file."""
    return json.loads((RESULTS / name).read_text())


def widths(variant: str) -> tuple[int, int, int]:
    """(bits, group, bits of the head or 0) of a variant that e2e_decode.py spells bits[gGROUP][hBITS], as 4g64h8."""
    body, _, head = variant.partition("h")
    bits, _, group = body.partition("g")
    return int(bits), int(group or 128), int(head or 0)


def measured(table: Table) -> str:
    """All of them; `table` makes Markdown of columns and rows."""
    return "\n".join((_accuracy(table), _decode(table, "h100/decode_8b.json", 1), _products(table), _cpu(table)))


def _accuracy(table: Table) -> str:
    """Perplexity at group 64 of the base model, WikiText-2."""
    free, calibrated = read("accuracy/data_free.json"), read("accuracy/calibrated.json")
    text = "wikitext2_test"
    dense = next(r["ppl"][text] for r in free["rows"] if r["model"] == "base" and "bits" not in r)
    cells = {
        (r["bits"], r["method"], r["stored"]): r["ppl"][text]
        for r in [*free["rows"], *calibrated["rows"]]
        if r["model"] == "base" and r.get("group") == 64 and r.get("calib") in (None, "bundled")
    }
    methods = (("hqq package", "float32"), ("rtn", "float32"), ("lsq", "bfloat16"), ("gptq", "bfloat16"))
    rows = []
    for bits in sorted({b for b, _, _ in cells}, reverse=True):
        values = [cells.get((bits, *m)) for m in methods]
        rows.append((f"{bits}-bit g64", *("" if v is None else f"{v:,.1f}" for v in values)))
    columns = ("", ">hqq package", ">rounding", ">lowq without data (lsq)", ">lowq calibrated (gptq)")
    head = f"**Perplexity** on WikiText-2 of a 21.9M-parameter Llama ({dense:.1f} in 16 bits; small models quantize badly):\n"
    return f"{head}\n{table(columns, rows)}"


def _decode(table: Table, name: str, batch: int) -> str:
    """Tokens per second of a whole model."""
    report = read(name)
    found = {r["variant"]: r for r in report["rows"] if r.get("batch") == batch}
    rows = [
        (label + mark(r), f"{r['tokens_per_s']:.0f}", f"{r['ms_per_step']:.2f}", f"{r['roofline_pct']:.0f}%")
        for label, r in ((label, found[v]) for v, label in DECODERS.items() if v in found)
    ]
    head = f"**Decoding** an 8B Llama-3.1-shaped model on one {report['device']}, batch {batch}, prompt {report['prompt']}:\n"
    return f"{head}\n{table(('', '>tokens/s', '>ms per token', '>of the read roofline'), rows)}{other_runs(found.values())}"


def mark(row: dict[str, Any]) -> str:
    """A sign beside a row of e2e_decode.py that another run than its file's measured."""
    return " †" if "run" in row else ""


def other_runs(rows: Iterable[dict[str, Any]]) -> str:
    """What the sign means, or nothing."""
    runs = sorted({r["run"].replace("T", " ") for r in rows if "run" in r})
    return f"\n† of a run of {', '.join(runs)} UTC\n" if runs else ""


def _products(table: Table) -> str:
    """One layer at 4 bits beside the best of the peers, from the rows of docs/cuda.md."""
    mine, peers = cuda_table.measured(4), cuda_table.best_peers(4)
    rows = []
    for key in sorted(k for k in mine if k in peers and k[:2] in PRODUCTS and k[2] in ROWS):
        one, (us, name) = mine[key], peers[key]
        N, K, M = key
        rows.append(
            (
                f"{N}x{K}",
                M,
                f"`cuda/tile_{one.kernel}`",
                f"{one.us:.1f}",
                f"{us:.1f} {name.removesuffix('_bf16')}",
                f"{us / one.us:.2f}x",
            )
        )
    head = (
        "**One linear layer**, 4 bits, group 128, float zeros, microseconds of what dispatch picks on one H100; the peers "
        "(without zeros) in an earlier run on the same kind of GPU. All layers, widths, and cuBLAS: "
        "[docs/cuda.md](docs/cuda.md)\n"
    )
    return f"{head}\n{table(('N x K', '>M', 'kernel', '>lowq', '>best peer', '>as fast'), rows)}"


def _cpu(table: Table) -> str:
    """Decoding on two CPU cores."""
    report = read("cpu/decode_1b.json")
    rows = [(DECODERS.get(r["variant"], r["variant"]), f"{r['tokens_per_s']:.1f}") for r in report["rows"]]
    head = f"**Without a GPU**: a 1B Llama-3.2-shaped model on {report['threads']} CPU cores, batch 1:\n"
    return f"{head}\n{table(('', '>tokens/s'), rows)}"
