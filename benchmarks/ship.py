"""Write kernels/tuned/*.json, the kernels' defaults where a checkpoint has no table of its own, from measurements on a GPU.

    python benchmarks/ship.py measure TIMES.json                        on the GPU: what `lowq tune` measures, for common layers
    python benchmarks/ship.py write TIMES.json kernels/tuned/h100.json  anywhere: put these times into a file that ships

`measure` keeps what it has after every shape; a later run adds to it. `write` puts the fastest config in front of each row that
answers for a measured call, fits the constants of tile_wgmma's model to all of its times and replaces the exact shapes of the
layouts that were measured. The shapes are those of Llama-3 8B and 70B, Qwen 2.5 7B and Qwen 3 8B as their decoder multiplies
them: query, key and value side by side, gate and up side by side.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lowq_cli.tuning import tuner
from lowq_kernels import gpu
from lowq_kernels.dispatch import measure, policy, tuning_file
from lowq_kernels.dispatch.measure import Budget
from lowq_kernels.dispatch.precompile import Work, compile_all
from lowq_kernels.dispatch.registry import Call, Config, kernels
from lowq_kernels.dispatch.tuning import Shape
from lowq_kernels.dispatch.tuning_file import Entry, Machine
from lowq_packers.scheme import Scheme

SHAPES = {  # (N, K), most used first
    "llama3-8b": ((28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096)),
    "llama3-70b": ((57344, 8192), (8192, 28672), (10240, 8192), (8192, 8192)),
    "qwen2.5-7b": ((37888, 3584), (3584, 18944), (4608, 3584), (3584, 3584)),
    "qwen3-8b": ((24576, 4096), (4096, 12288)),
}
BATCHES = "1,2,4,8,16,32,64,128,256,1024,4096"
LISTS = ("prefer", "configs", "measured")  # one row a line
TIMES = tuple[tuple[Call, Config, float], ...]


def measured(a: argparse.Namespace) -> None:
    """Time every candidate of every shape, as `lowq tune` does, and keep the winners and their runners-up."""
    device, budget, batches = torch.device("cuda"), Budget(a.seconds), tuner.parse_batches(a.batch)
    schemes = [Scheme(int(bits), int(group)) for bits, group in (s.split(":") for s in a.schemes.split(","))]
    sizes = [size for model in a.models.split(",") for size in SHAPES[model]]
    shapes = [Shape(N, K, s, torch.float16) for s in schemes for N, K in sizes]
    work = [
        Work.of(spec.name, config, shape.scheme, a.layout, shape.dtype, M, *sizes[0])
        for shape in shapes
        for M in batches
        for spec, config in measure.candidates(measure.call_for(shape, M, a.layout, device))
    ]
    print(f"compiled {compile_all(work, workers=a.workers)} kernels in {budget.spent:.0f} s", flush=True)
    for i, shape in enumerate(shapes):
        weights = measure.copies(measure.random_weight(shape, a.layout, device))
        found = [e for M in batches if budget.left and (e := measure.best(shape, M, weights, device))]
        tuning_file.write_file(a.times, Machine.here(device), found)
        print(f"{i + 1}/{len(shapes)} {shape.N}x{shape.K} {shape.scheme}: {budget.spent:.0f} s", flush=True)
    for name, why in sorted(measure.failed.items()):
        print("FAILED", name, why.splitlines()[0][:200])


def times_of(kernel: str, entries: Sequence[Entry], capability: gpu.Capability) -> TIMES:
    """Every time of one kernel among winners and runners-up."""
    found = []
    for e in entries:
        scheme = Scheme(e.bits, e.group, e.zero)  # type: ignore[arg-type]
        call = Call(e.M, e.N, e.K, scheme, e.layout, getattr(torch, e.dtype), "cuda", capability, e.act)
        own = ({"kernel": e.kernel, "config": e.config, "us": e.us}, *e.runners_up)
        found += [(call, r["config"], r["us"]) for r in own if r["kernel"] == kernel]
    return tuple(found)


def put_in_front(file: dict[str, Any], kernel: str, times: TIMES) -> int:
    """In each row of `configs`, for each M, in front what took least over the measured calls that it answers for; returns how
    many it has put there."""
    keys, calls = file["keys"][kernel], dict[tuple[int, int], dict[Call, dict[tuple[int, ...], float]]]()
    rows = {}
    for call, config, us in times:
        row = policy.row_of(file["configs"], kernel, call)
        rows[id(row)] = row
        calls.setdefault((call.M, id(row)), {}).setdefault(call, {})[tuple(config[k] for k in keys)] = us
    put = 0
    for (M, which), by_call in sorted(calls.items()):
        row, common = rows[which], set.intersection(*(set(by_config) for by_config in by_call.values()))
        if common and row:
            best = [M, *min(common, key=lambda c: sum(math.log(by_config[c]) for by_config in by_call.values()))]
            at = next((i for i, (most, *_) in enumerate(row) if most >= M), len(row))
            if row[at : at + 1] != [best]:
                row.insert(at, best)
                put += 1
    return put


def fit(model: dict[str, float], times: TIMES, rounds: int = 40) -> dict[str, float]:
    """Constants of tile_wgmma's model that bring its microseconds nearest to the times: one after the other, ever finer."""
    from lowq_kernels.products.cuda import tile_wgmma

    def error(m: dict[str, float]) -> float:
        return sum(math.log(tile_wgmma.estimate(c, config, gpu.of(c.capability), m) / us) ** 2 for c, config, us in times)

    best, least, width = dict(model), error(model), 0.1
    for _ in range(rounds):
        before = least
        for name in model:
            for factor in (1 + width, 1 / (1 + width)):
                tried = {**best, name: best[name] * factor}
                if (e := error(tried)) < least:
                    best, least = tried, e
        if least > 0.999 * before:
            width /= 2
    return {k: float(f"{v:.4g}") for k, v in best.items()}


def rows_of(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Winners as rows of `measured`, one a shape."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for e in sorted(entries, key=lambda e: (*map(str, e.place), e.M)):
        row = found.setdefault(e.place, {**e.place._asdict(), "M": {}})
        row["M"][str(e.M)] = [e.kernel, e.config, e.us]
    return list(found.values())


def updated(file: dict[str, Any], machine: dict[str, Any]) -> dict[str, Any]:
    """A file of tuned/ with the times of a machine in it."""
    entries = [Entry(**{**e, "runners_up": tuple(e["runners_up"])}) for e in machine["entries"]]
    capability, layouts = tuple(machine["capability"]), {e.layout for e in entries}
    file = json.loads(json.dumps(file))
    for kernel in file["keys"]:
        put_in_front(file, kernel, times_of(kernel, entries, capability))
    wgmma = "cuda/tile_wgmma"
    if wgmma in kernels() and (times := times_of(wgmma, entries, capability)):
        file["models"][wgmma] = fit(file["models"][wgmma], times)
    kept = [row for row in file["measured"] if row["layout"] not in layouts]
    origin = f"measured on {machine['gpu']}, {machine['date']} (torch {machine['torch']}, triton {machine['triton']})"
    return {**file, "origin": f"{file['origin']}; {origin}", "measured": kept + rows_of(entries)}


def dumps(file: dict[str, Any]) -> str:
    """JSON with one row a line, so that a diff of a file can be read."""

    def lines(value: Any, ends: str, rows: list[str]) -> str:
        return f"{ends[0]}\n" + ",\n".join(f"  {row}" for row in rows) + f"\n {ends[1]}" if value else ends

    parts = []
    for key, value in file.items():
        if key in LISTS:
            text = lines(value, "[]", [json.dumps(row) for row in value])
        elif key in ("models", "gated"):
            text = lines(value, "{}", [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in value.items()])
        else:
            text = json.dumps(value)
        parts.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    """Parse, then measure or write."""
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = ap.add_subparsers(required=True)
    m = verbs.add_parser("measure")
    m.add_argument("times", type=Path)
    m.add_argument("--schemes", default="4:128,4:64,8:128,3:128,2:128,1:128", help="BITS:GROUP,...")
    m.add_argument("--models", default=",".join(SHAPES))
    m.add_argument("--batch", default=BATCHES)
    m.add_argument("--layout", default="tile")
    m.add_argument("--seconds", type=float, default=math.inf)
    m.add_argument("--workers", type=int, default=8)
    m.set_defaults(run=measured)
    w = verbs.add_parser("write")
    w.add_argument("times", type=Path)
    w.add_argument("file", type=Path)

    def write(a: argparse.Namespace) -> None:
        file = json.loads(a.file.read_text())
        for machine in tuning_file.read_file(a.times):
            if tuple(machine["capability"]) == tuple(file["capability"]):
                file = updated(file, machine)
        a.file.write_text(dumps(file))

    w.set_defaults(run=write)
    a = ap.parse_args()
    a.run(a)


if __name__ == "__main__":
    main()
