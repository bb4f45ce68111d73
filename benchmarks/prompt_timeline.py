"""Where the milliseconds of long prompts go, kernel by kernel. Needs a GPU.

    python benchmarks/prompt_timeline.py --work /dev/shm/x --out x.json [--act fp8] [--prompts 1x4400,8x4400,1x32000]

An 8B of random codes (serve_own.py's) in the server's engine. `ms`: from sending until the first tokens of all, medians
after rests, with the device's ms of each pass. `recorded`: the same while passes of 4,096 rows are CUDA graphs, too, so that no
launch waits for the host (their attention stays in 16 bits). `kernels`: of one more run under CUPTI, by name: launches, ms;
`busy_ms` their sum, `span_ms` from the first's begin to the last's end, `idle_ms` what lies between. `early`, `late`: ms of the
slowest kernel's first and last eighth of launches of the first pass, which differ where the clock falls.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from serve_load import LONGEST_NEW, LONGEST_PROMPT, Asked
from serve_own import Engine
from vllm_speed import make

from lowq_cli.engine.open_model import ready
from lowq_cli.evaluate.eight_bits import apply_act

REST_S = 0.5  # before each run: the clock recovers
Row = dict[str, Any]


def prompts(n: int, tokens: int, vocabulary: int, seed: int) -> list[Asked]:
    g = torch.Generator().manual_seed(seed)  # another text each time: the cache has none of it
    return [Asked(i, torch.randint(3, vocabulary, (tokens,), generator=g).tolist(), 1) for i in range(n)]


def timed(engine: Engine, n: int, tokens: int, vocabulary: int, seeds: range) -> Row:
    seconds, passes = [], []
    for seed in seeds:
        asked = prompts(n, tokens, vocabulary, seed)
        time.sleep(REST_S)
        engine.passes.clear()
        began = time.perf_counter()
        engine.answers(asked)
        seconds.append(time.perf_counter() - began)
        passes.append({f"{b} of {M}": [round(1e3 * s, 2) for s in each] for (b, M, _), each in engine.passes.items()})
    middle = sorted(range(len(seconds)), key=seconds.__getitem__)[len(seconds) // 2]
    return {"ms": round(1e3 * statistics.median(seconds), 2), "passes_ms": passes[middle]}


def kernels(engine: Engine, n: int, tokens: int, vocabulary: int, seed: int) -> Row:
    asked = prompts(n, tokens, vocabulary, seed)
    time.sleep(REST_S)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p:
        engine.answers(asked)
        torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as f:
        p.export_chrome_trace(f.name)
        events = json.loads(Path(f.name).read_text())["traceEvents"]
    found = sorted((e["ts"], e["dur"], e["name"]) for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"))
    by_name: dict[str, list[float]] = defaultdict(list)
    end, idle, gaps = found[0][0], 0.0, []
    for at, us, name in found:
        by_name[name].append(us)
        if at > end:
            idle += at - end
            gaps.append((round(at - end, 1), name[:60]))
        end = max(end, at + us)
    slowest = max(by_name.values(), key=sum)
    eighth = max(1, len(slowest) // 8)
    rows = sorted(((name[:90], len(us), round(sum(us) / 1e3, 3)) for name, us in by_name.items()), key=lambda r: -r[2])
    return {
        "span_ms": round((end - found[0][0]) / 1e3, 3),
        "busy_ms": round(sum(us for _, us, _ in found) / 1e3, 3),
        "idle_ms": round(idle / 1e3, 3),
        "largest_gaps_us": sorted(gaps, reverse=True)[:12],
        "early": statistics.median(slowest[:eighth]),
        "late": statistics.median(slowest[-eighth:]),
        "kernels": rows,
        "order": [(name[:40], round(us, 1)) for _, us, name in found[40:80]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a folder for the checkpoint")
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--act", default="fp8")
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--prompts", default="1x4400,8x4400,1x32000")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    folder = args.work / f"lowq-{args.shape}-4"
    if not folder.exists():
        make(folder, args.shape, 4, "cuda", args.layers)
    model, tokenizer = ready(str(folder), "cuda")
    apply_act(model, tokenizer, args.act)
    V = model.get_output_embeddings().weight.shape[0]
    engine = Engine(model, cache_tokens=100 * (LONGEST_PROMPT + LONGEST_NEW))
    found: Row = {"device": torch.cuda.get_device_name(), "act": args.act}
    loads = [tuple(map(int, text.split("x"))) for text in args.prompts.split(",")]
    for turn, (n, tokens) in enumerate(loads):
        row = found[f"{n}x{tokens}"] = timed(engine, n, tokens, V, range(100 * turn, 100 * turn + 6))
        print(n, tokens, row, flush=True)
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    for turn, (n, tokens) in enumerate(loads):
        row = found[f"{n}x{tokens}"]
        row["profiled"] = kernels(engine, n, tokens, V, 100 * turn + 50)
        print(n, tokens, json.dumps(row["profiled"]["kernels"][:14]), flush=True)
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    passes = engine.engine.passes
    passes.sizes.most_recorded = passes.sizes.totals[-1]
    with torch.inference_mode():
        passes._record(0, passes.sizes.totals[-1], False)
    for turn, (n, tokens) in enumerate(loads):
        row = found[f"{n}x{tokens}"]
        row["recorded"] = timed(engine, n, tokens, V, range(100 * turn + 60, 100 * turn + 65))
        row["recorded_profiled"] = kernels(engine, n, tokens, V, 100 * turn + 70)
        print(n, tokens, row["recorded"], row["recorded_profiled"]["idle_ms"], flush=True)
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    engine.engine.stop(0)


if __name__ == "__main__":
    main()
