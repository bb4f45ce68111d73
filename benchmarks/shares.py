"""Measure what each part of `distill` is worth: one walk through the layers, then trainings with one part left out each.

    python benchmarks/shares.py MODEL --data DATA [--bits 2] [--group 16] [--bpw 2.5] [--format table-e4m3]
        [--calib-tokens 131072] [--batch 8] [--passes 4] [--seeds 0,1] [--start own,gptq] [--left-out whole,codes,...]
        [--missing] --out FILE.json

MODEL writes its own text. Linears alone are quantized; KL divergence and perplexity as in peers.py. A row has the model, the
scheme, the seed of the text, the rounding that the training starts from, and what was left out:
walked (everything: as the layers left them), whole (nothing), codes (they stay), scales (with zeros and tables), norms,
outside (embedding, head and last norm), passes (half of them), parts (all passes read the first part of the text), near (codes
start amid their intervals, not where weights lie);
or the reverse, straight (codes start where weights lie, at the rate of that start, also where the product starts them amid)
and faster (the codes' rates add up to as much as in the passes over a GPU's default text).
--start: the product's own rounding (own: gptq, or yaqa where it takes the curvature), gptq or yaqa in its place, or lsq (codes
nearest to the weights, without a text). --bpw: widths and groups placed by that budget instead of --bits and --group.
--batch: windows per step of the training; fewer give a short text as many steps as the product takes on a longer one.
--passes: over the text, instead of the product's number. --missing: only rows that the file lacks.
"""

import argparse
import datetime
import importlib.metadata
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accuracy import quantized
from accuracy_rows import Judge, device, ints, words
from peers import judged

from lowq_cli.calibrate import calibration, end_to_end, requirements, texts
from lowq_cli.plan.recipe import make_recipe
from lowq_cli.quantizers import distill, lsq

LEFT_OUT = ("walked", "whole", "codes", "scales", "norms", "outside", "passes", "parts", "near", "straight", "faster")

USUAL_STEPS = requirements.step_count(requirements.MOST_TOKENS, requirements.PASSES)  # on a GPU


class Done(Exception):
    """All parts are measured, and the walk has nothing more to do."""


def put(trained: end_to_end.EndToEnd, model: Any, dense: Any) -> None:
    """Give a model the values of a training, and the original's wherever nothing was trained."""
    model.load_state_dict(dense.state_dict())
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for layer in trained.layers:
            for name, grid in layer.grids.items():
                parameters[f"{name}.weight"].copy_(grid.quantized().dequantize())
            for path, t in layer.norms.items():
                parameters[layer.names[path]].copy_(t.to(trained.kept[layer.names[path]]))
        for name, t in trained.outside.learnt().items():
            parameters[name].copy_(t)


def prepared(part: str, given: tuple[Any, ...]) -> end_to_end.EndToEnd:
    """A training without a part."""
    kept = {k: getattr(requirements, k) for k in ("TOGETHER", "TABLES", "MORE_PASSES", "PASSES")}
    grid, straight, rates = end_to_end.Grid, end_to_end.starts_straight, kept["TOGETHER"].items()
    faster = USUAL_STEPS / (requirements.PASSES * given[5]) if part == "faster" else 1.0
    requirements.TOGETHER = {b: (s * (part != "scales"), n * (part != "norms"), c * faster) for b, (s, n, c) in rates}
    if part == "outside":
        requirements.TABLES = 0.0
    if part == "passes":
        requirements.MORE_PASSES, requirements.PASSES = kept["MORE_PASSES"] // 2, kept["PASSES"] // 2

    if part == "straight":
        end_to_end.starts_straight = lambda *_: True

    def of(q: Any, dtype: Any, where: Any, rate: float, code_rate: float, near: Any = None) -> Any:
        return grid(q, dtype, where, rate, code_rate * (part != "codes"), None if part == "near" else near)

    end_to_end.Grid = of  # type: ignore[assignment, misc]
    try:
        return end_to_end.EndToEnd(*given)
    finally:
        end_to_end.Grid, end_to_end.starts_straight = grid, straight  # type: ignore[misc]
        for k, v in kept.items():
            setattr(requirements, k, v)


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a result file, if there is one."""
    return json.loads(path.read_text())["rows"] if path.is_file() else []


def keep(args: argparse.Namespace, row: dict[str, Any]) -> None:
    """Print a row, and add it to the file."""
    print(json.dumps(row), flush=True)
    versions = {p: importlib.metadata.version(p) for p in ("lowq", "torch", "transformers")}
    on = torch.cuda.get_device_name() if device() == "cuda" else "CPU"
    report = {"date": datetime.date.today().isoformat(), "device": on, "versions": versions, "rows": [*rows_of(args.out), row]}
    args.out.write_text(json.dumps(report, indent=1) + "\n")


def measure(args: argparse.Namespace, seed: int, start: str) -> None:
    """A row per part, after one walk."""
    width = {"bpw": args.bpw} if args.bpw else {"bits": args.bits, "group": args.group}
    about = {"model": args.model.name, **width, "format": args.format, "seed": seed, "calib_tokens": args.calib_tokens}
    about |= {"batch": args.batch, "passes": args.passes, "tokens": args.tokens or "all", "start": start}
    left_out = [
        p
        for p in args.left_out
        if not args.missing or not any(r.items() >= (about | {"left_out": p}).items() for r in rows_of(args.out))
    ]
    if not left_out:
        return
    judge, dense = Judge(args.model, args), Judge(args.model, args).model

    class Parts:
        """Takes the place of the training."""

        def __init__(self, *given: Any) -> None:
            self.given = given

        def run(self, *text: Any) -> Iterator[Any]:
            items = [i for i in self.given[1].values() if i.scheme]
            spent = sum(i.params * i.scheme.bits_per_weight() for i in items) / sum(i.params for i in items)
            placed = {"spent": round(spent, 4), "schemes": Counter(str(i.scheme) for i in items)} if args.bpw else {}
            for part in left_out:
                began = time.monotonic()
                trained = prepared(part, self.given)
                with tempfile.TemporaryDirectory() as folder:
                    if part != "walked":
                        copied = [list(t) if isinstance(t, list) else t for t in text[:-1]]  # a training changes its lists
                        copied[0] = copied[0][: 1 if part == "parts" else None]
                        losses = [step.loss for step in self.training(trained, copied, Path(folder))]
                    else:
                        losses = []
                put(trained, judge.model, dense)
                seconds = round(time.monotonic() - began, 1)
                keep(args, about | {"left_out": part, "losses": losses, "seconds": seconds} | placed | judged(judge, dense))
                for layer in trained.layers:
                    layer.module.forward = layer.forward
            raise Done
            yield

        def training(self, trained: end_to_end.EndToEnd, text: list[Any], folder: Path) -> Iterator[Any]:
            trained._write = lambda *_: None  # type: ignore[method-assign]
            trained.loss = lambda *_: 0.0  # type: ignore[method-assign]  # of use to _write alone
            parts, start, targets, others, tables = text
            yield from trained.run(parts, start, targets, others, tables, folder)

    original = calibration.EndToEnd, calibration.better, distill.quantize, calibration.rounds_both_sides
    calibration.EndToEnd = Parts  # type: ignore[assignment, misc]
    if start == "lsq":
        distill.quantize = lambda W, scheme, dtype=None, moments=None, **_: lsq.quantize(W, scheme, dtype)
        calibration.better = lambda W, given, moments: given
    elif start != "own":
        calibration.rounds_both_sides = lambda item: start == "yaqa" and item.kind != "expert"
    how = {"calib": "self", "calib_tokens": args.calib_tokens, "calib_seed": seed, "format": args.format}
    try:
        quantized(args.model, make_recipe(method="distill", lm_head="keep", **width, **how), judge)
    except Done:
        pass
    finally:
        calibration.EndToEnd, calibration.better, distill.quantize, calibration.rounds_both_sides = original  # type: ignore[misc]


def main() -> None:
    """Each seed, each start."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("model", type=Path)
    made.add_argument("--data", type=Path, required=True)
    made.add_argument("--bits", type=int, default=2)
    made.add_argument("--group", type=int, default=16)
    made.add_argument("--bpw", type=float)
    made.add_argument("--format", default="table-e4m3")
    made.add_argument("--calib-tokens", type=int, default=131072)
    made.add_argument("--batch", type=int, default=texts.BATCH)
    made.add_argument("--passes", type=int)
    made.add_argument("--seeds", type=ints, default=[0, 1])
    made.add_argument("--start", type=words, default=["own"])
    made.add_argument("--left-out", type=words, default=list(LEFT_OUT))
    made.add_argument("--tokens", type=int, help="of each text evaluated; all by default")
    made.add_argument("--missing", action="store_true")
    made.add_argument("--out", type=Path, required=True)
    args = made.parse_args()
    texts.BATCH = args.batch
    if args.passes:
        requirements.PASSES = requirements.MORE_PASSES = args.passes
    for seed in args.seeds:
        for start in args.start:
            measure(args, seed, start)


if __name__ == "__main__":
    main()
