"""Mixed widths against uniform ones at the same bits per weight: benchmarks/results/accuracy/mixed.json.

    python benchmarks/accuracy_bpw.py --models MODELS --data DATA [--only base] [--method auto,gptq] [--part all,linears]

Each cell runs `lowq quantize --bpw` (or one scheme for all weights) and reads the checkpoint's bytes back into an fp32 model.
part: "all" has the embedding take part (these models' head is their embedding), "linears" keeps it (--lm-head keep).
`expected` is the KL divergence that the plan foretells; `kl` and `unquantized` (perplexity) are measured on the first text.
"""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from accuracy_calibrated import dequantized, fill
from accuracy_rows import TEXTS, Judge, Results, Row, folders, parser
from accuracy_rows import device as pick_device
from transformers import AutoModelForCausalLM

from lowq_cli.accuracy import perplexity
from lowq_cli.run import pipeline
from lowq_cli.run.recipe import make_recipe
from lowq_cli.run.writer import SENSITIVITY
from lowq_packers.scheme import Scheme

UNIFORM = ((2, 128), (2, 64), (3, 128), (3, 64), (4, 128), (4, 64), (4, 32))


def measure(folder: Path, args: argparse.Namespace) -> Iterator[Row]:
    """One row per part, method and target, and per uniform scheme."""
    judge = Judge(folder, args)
    dense = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(pick_device())
    ids = judge.texts[next(iter(TEXTS))]
    for part in args.part:
        keep = {"lm_head": "keep"} if part == "linears" else {}
        known: dict[str, bytes] = {}
        for method in args.method:
            targets = [{"target": t} for t in args.targets]
            uniform = [{"bits": b, "group": g} for b, g in UNIFORM if b in args.bits and (part == "all" or args.uniform)]
            for cell in targets + uniform:
                with tempfile.TemporaryDirectory() as out:
                    made = Path(out) / "q"
                    if "target" in cell:
                        recipe = make_recipe(bpw=cell["target"], method=method, **keep)
                        if method in known:
                            made.mkdir()
                            (made / SENSITIVITY).write_bytes(known[method])
                    else:
                        table = [] if part == "linears" else [f"embed_tokens={cell['bits']}:{cell['group']}"]
                        recipe = make_recipe(**cell, method=method, overrides=table)
                    planned, *_, finished = pipeline.run(folder, recipe, made, device=pick_device())
                    known |= {method: planned.mixed.cache} if planned.mixed else {}
                    fill(judge.model, dequantized(made))
                mixed = planned.mixed
                bpw = mixed.bpw if mixed else Scheme(cell["bits"], cell["group"]).bits_per_weight()
                report = perplexity.evaluate(judge.model, ids, dense)
                yield {
                    "model": folder.name, **cell, "bpw": round(bpw, 4), "method": method, "stored": "bfloat16", "part": part,
                    "ppl": judge.ppl(), "unquantized": round(report.base_ppl, 4), "kl": round(report.kl, 5),
                    "expected": mixed and round(mixed.error, 5), "seconds": round(finished.result.seconds, 1),
                    "schemes": mixed and {s.group: str(s.scheme or "kept") for s in mixed.shares},
                }  # fmt: skip


def main() -> None:
    """Measure and write the file."""
    flags = parser(__doc__, "mixed.json", (4, 3, 2))
    flags.add_argument("--method", type=lambda text: text.split(","), default=["auto", "gptq"])
    flags.add_argument("--part", type=lambda text: text.split(","), default=["all", "linears"])
    flags.add_argument(
        "--targets", type=lambda text: [float(t) for t in text.split(",") if t], default=[2.5, 3.0, 3.5, 4.0, 4.5]
    )
    flags.add_argument("--uniform", action="store_true", help="measure uniform linears too (else those of the tables count)")
    args = flags.parse_args()
    results = Results(args)
    for folder in folders(args):
        results.take(measure(folder, args))


if __name__ == "__main__":
    main()
