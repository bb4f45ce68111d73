"""fp8 and int8 activations on a Hopper GPU: `python3 benchmarks/fp8.py --model DIR --text FILE --out FILE.json`.

    quantizer   block quantizer, 256x256: ours, the tile-per-block baseline, the plan of the GridQuant article, torch.compile's,
                and the plain cast, which moves the same bytes
    gemm        block-scaled products: cuda/fp8_gemm with 128x128 and 256x256 blocks, triton/fp8_gemm, torch's scaled_mm
    codes       8-bit activations times packed codes beside what dispatch takes for 16-bit activations, and cuBLAS fp16
    error       of products on real activations (captured from --model on --text) against fp64
    perplexity  of --model on --text, in every format and activation mode

Compile first, in parallel: `python3 benchmarks/fp8.py --compile I/N`, one process for each I; torch.compile's for each size by
`--inductor N`. Every output is checked against fp32 before it is timed; timing as in lowq_kernels.dispatch.timing.
"""

import argparse
import datetime
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fp8_accuracy import error_rows, perplexity_rows
from fp8_compile import compile_inductor, compile_share
from fp8_speed import CODES, GEMMS, Row, codes_rows, gemm_rows, quantizer_rows

from lowq_kernels.dispatch.tuning import Machine


def about(row: Row) -> tuple[Any, ...]:
    """What a row tells of."""
    return tuple(row.get(name) for name in ("n", "bits", "group", "N", "K", "M", "layer", "format"))


def as_json(report: dict[str, Any]) -> str:
    """JSON with one line a row."""
    parts = []
    for name, value in report.items():
        rows = ",\n".join("  " + json.dumps(r) for r in value) if isinstance(value, list) else ""
        parts.append(f" {json.dumps(name)}: " + (f"[\n{rows}\n ]" if rows else json.dumps(value)))
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    """Run what the flags ask for."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--model", default="demo")
    flags.add_argument("--text")
    flags.add_argument("--out", help="JSON; rows that it holds already are kept, those measured anew replaced")
    flags.add_argument("--parts", help="some of gemm,quantizer,codes,error,perplexity; the last two run on a CPU too")
    flags.add_argument("--max-tokens", type=int, help="of the text, for perplexity")
    flags.add_argument("--compile", metavar="I/N")
    flags.add_argument("--inductor", type=int, metavar="N")
    given = flags.parse_args()
    if given.compile:
        index, of = map(int, given.compile.split("/"))
        return compile_share(index, of, (given.parts or "gemm,codes,quantizer").split(","))
    if given.inductor:
        return compile_inductor(given.inductor)
    torch.manual_seed(0)
    from lowq_cli.evaluate.perplexity import read_text

    text = read_text(given.text)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    here = Machine.here(torch.device(device))
    out = Path(given.out) if given.out else None
    report: dict[str, Any] = json.loads(out.read_text()) if out and out.exists() else {"runs": {}}
    parts: dict[str, Callable[[], Iterator[Row]]] = {
        "gemm": partial(gemm_rows, GEMMS),
        "quantizer": quantizer_rows,
        "codes": partial(codes_rows, CODES),
        "error": partial(error_rows, given.model, text, device),
        "perplexity": partial(perplexity_rows, given.model, text, device, given.max_tokens),
    }
    for name in given.parts.split(",") if given.parts else parts:
        began = time.monotonic()
        report["runs"][name] = {
            "gpu": here.gpu,
            "torch": here.torch,
            "triton": here.triton,
            "date": datetime.date.today().isoformat(),
            "model": Path(given.model).name if name in ("error", "perplexity") else "",
            "text": Path(given.text).name if given.text else "bundled sample",
        }
        for row in parts[name]():
            print(json.dumps(row), flush=True)
            report[name] = [*(r for r in report.get(name, []) if about(r) != about(row)), row]
            if out:
                out.write_text(as_json(report))
        print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
    return None


if __name__ == "__main__":
    main()
