"""Measure the table that ships with lowq for this GPU: `python3 benchmarks/triton_shipped.py --out kernels/tuned/h100.json`.

The shapes are those of Llama-3 8B and 70B, Qwen 2.5 7B and Qwen 3 8B, as their decoder multiplies them (query, key and value
side by side, gate and up side by side). All layouts and kernels compete, or those of --layouts; batch sizes up to prefill's.
A budget of --seconds goes to the first scheme's shapes, then to the next one's: what it leaves out, the nearest shape answers.
`--from FILE` takes what triton_vs_gemlite.py or `lowq tune` measured on such a GPU, and measures nothing itself.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from lowq_cli.tuning import tuner
from lowq_kernels.dispatch import measure, tuning
from lowq_kernels.dispatch.measure import Budget
from lowq_kernels.dispatch.precompile import Work, compile_all
from lowq_kernels.dispatch.tuning import Entry, Machine, Shape
from lowq_packers.scheme import Scheme

SHAPES = {  # (N, K), most used first: a budget that ends early leaves the rest to the nearest shape
    "llama3-8b": ((28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096)),
    "llama3-70b": ((57344, 8192), (8192, 28672), (10240, 8192), (8192, 8192)),
    "qwen2.5-7b": ((37888, 3584), (3584, 18944), (4608, 3584), (3584, 3584)),
    "qwen3-8b": ((24576, 4096), (4096, 12288)),
}
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)


def measured_before(path: Path) -> dict[Machine, list[Entry]]:
    """Entries out of a result file of triton_vs_gemlite.py or a lowq_tune.json, by machine."""
    data = json.loads(path.read_text())
    if "machines" in data:
        return {
            Machine(m["gpu"], tuple(m["capability"]), m["torch"], m["triton"]): [
                Entry(**{**e, "runners_up": tuple(e["runners_up"])}) for e in m["entries"]
            ]
            for m in data["machines"]
        }
    here = Machine(data["gpu"], tuple(data["capability"]), data["torch"], data["triton"])
    entries = []
    for r in data["rows"]:
        if "kernel" in r:
            place = (r["bits"], r["group"], "float", "float16", "strided", r["N"], r["K"], r["M"])
            entries.append(Entry(*place, r["kernel"], r["config"], r["us"], tuning.source_hash(r["kernel"])))
    return {here: entries}


def entries_of(
    shape: Shape, batches: Sequence[int], layouts: Sequence[str], device: torch.device, budget: Budget
) -> Iterator[Entry]:
    """The winners of one shape, of the layouts named or of all that `measure` lets race."""
    if not layouts:
        yield from measure.measure(shape, batches, device, budget)
    for layout in layouts:
        weights = measure.copies(measure.random_weight(shape, layout, device))
        for M in batches:
            if budget.left and (entry := measure.best(shape, M, weights, device)):
                yield entry


def main() -> None:
    """Parse, compile, measure, write after every shape."""
    ap = argparse.ArgumentParser()
    ap.add_argument("--out", required=True)
    ap.add_argument("--schemes", default="4:128,4:64,8:128,3:128,2:128,1:128", help="BITS:GROUP,...")
    ap.add_argument("--models", default=",".join(SHAPES))
    ap.add_argument("--batch", default=",".join(map(str, BATCHES)))
    ap.add_argument("--seconds", type=float, default=1e9)
    ap.add_argument("--layouts", default="", help="only these, e.g. tile")
    ap.add_argument("--fresh", action="store_true", help="drop what the file holds for this machine")
    ap.add_argument("--workers", type=int, default=8)
    ap.add_argument("--kernels", default="", help="with --from: keep kernels whose name starts so")
    ap.add_argument("--from", dest="sources", type=Path, nargs="*", default=[])
    a = ap.parse_args()
    if a.fresh and Path(a.out).exists():
        Path(a.out).unlink()
    for path in a.sources:
        for machine, entries in measured_before(path).items():
            kept = [e for e in entries if e.kernel.startswith(a.kernels)]
            tuning.write_file(Path(a.out), machine, kept)
    if a.sources:
        return
    device, budget = torch.device("cuda"), Budget(a.seconds)
    batches = tuner.parse_batches(a.batch)
    schemes = [Scheme(*map(int, s.split(":"))) for s in a.schemes.split(",")]
    sizes = [size for model in a.models.split(",") for size in SHAPES[model]]
    shapes = [Shape(N, K, s, torch.float16) for s in schemes for N, K in sizes]
    layouts = a.layouts.split(",") if a.layouts else []
    work = [
        Work.of(spec.name, config, shape.scheme, layout, shape.dtype, M, *sizes[0])
        for shape in shapes
        for layout in layouts or measure.layouts_for(shape, device)
        for M in batches
        for spec, config in measure.candidates(measure.call_for(shape, M, layout, device))
    ]
    print(f"compiled {compile_all(work, workers=a.workers)} kernels in {budget.spent:.0f} s", flush=True)
    found: list[Entry] = []
    for i, shape in enumerate(shapes):
        found += list(entries_of(shape, batches, layouts, device, budget))
        tuning.write_file(Path(a.out), Machine.here(device), found)
        done = f"{i + 1}/{len(shapes)} {shape.N}x{shape.K} {shape.scheme}"
        print(f"{done}: {len(found)} entries, {budget.spent:.0f} s", flush=True)
        torch.cuda.empty_cache()
        if not budget.left:
            break
    for name, why in sorted(measure.failed.items()):
        print("FAILED", name, why.splitlines()[0][:200])


if __name__ == "__main__":
    main()
