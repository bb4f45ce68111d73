"""Time attention over caches in 16 bits, fp8 and 4 bits on this CPU: benchmarks/results/cpu/kv.json.

    python benchmarks/kv_cpu.py [--rounds N] [--out FILE]

Kinds of cache alternate; times are ms of CPU time, the least of all rounds, on one thread, in bf16, over random values.
Rows with "heads" are of one layer's attention after so many tokens: of a step, of 4 draft rows of one sequence over pages, of a
piece of 256 tokens of a prompt over pages. Rows with "layers" are of a whole step of a Llama with random weights in 16 bits.
"""

import argparse
import json
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from time import process_time
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lowq_cli.engine.batch import KeyValues
from lowq_cli.engine.native import NativeDecoder
from lowq_cli.engine.sampling import Sampling
from lowq_kernels.decode import kv, ops
from lowq_kernels.decode.reference import Heads, Packed, Places
from lowq_kernels.products.cpu import native

OUT = Path(__file__).parent / "results" / "cpu" / "kv.json"
SHAPES = {"story": (8, 4, 32), "Llama 3.2 1B": (32, 8, 64), "Llama 3.1 8B": (32, 8, 128), "Gemma 3 12B": (16, 8, 256)}
TOKENS = (1000, 8000)
DRAFTS, PIECE, PAGE, SECONDS = 4, 256, 64, 0.1  # SECONDS: least CPU time of a round
MODELS = {
    "story": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "vocab_size": 8192},
    "Llama 3.2 1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 2, "vocab_size": 8192},
}


def least(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Milliseconds of the fastest of some calls of each, which take turns."""
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds):
        for name, run in runs.items():
            run()
            until = process_time() + SECONDS
            while (began := process_time()) < until:
                run()
                best[name] = min(best[name], (process_time() - began) * 1e3)
    return {name: round(ms, 4) for name, ms in best.items()}


def caches(kind: str, shape: tuple[int, ...]) -> list[kv.Cache]:
    """Keys and values of random contents: a pattern that repeats, since torch encodes slowly."""
    g = torch.Generator().manual_seed(0)
    made = []
    for _ in range(2):
        cache, some = kv.empty(kind, shape, torch.bfloat16, torch.device("cpu")), torch.randn(1, *shape[1:], generator=g)
        some = some[:, :, : min(512, shape[2])]
        for first in range(0, shape[2], some.shape[2]):
            n = min(some.shape[2], shape[2] - first)
            cache[:, :, first : first + n] = some[:, :, :n].bfloat16()
        made.append(cache)
    return made


def tensors(cache: kv.Cache | None) -> list[torch.Tensor]:
    """What a cache consists of."""
    return [cache.codes, cache.scales] if isinstance(cache, kv.Coded) else [] if cache is None else [cache]


def attention(name: str, n: int, rounds: int) -> list[dict[str, Any]]:
    """A step, draft rows and a piece of a prompt after n tokens."""
    HQ, HKV, D = SHAPES[name]
    h, g, own, blocks = Heads(HQ, HKV, D, D**-0.5), torch.Generator().manual_seed(1), ops("cpu"), -(-(n + PIECE) // PAGE)
    cos, sin = torch.rand(2, n + PIECE, D, generator=g).bfloat16()
    rows = torch.randn(PIECE, (HQ + 2 * HKV) * D, generator=g).bfloat16()
    table, pos = torch.randperm(blocks, generator=g).int()[None], torch.arange(n, n + PIECE, dtype=torch.int32)
    packed = Packed(
        table, torch.zeros(PIECE, dtype=torch.int32), pos, torch.tensor([[i, i + 128] for i in range(0, PIECE, 128)])
    )
    runs: dict[str, dict[str, Callable[[], object]]] = {"step": {}, "drafts": {}, "prompt": {}}
    for kind in kv.KINDS:
        plain, paged = caches(kind, (1, HKV, n + 1, D)), caches(kind, (blocks, HKV, PAGE, D))
        at, drafts = Places(pos[:1], cos, sin), Places(pos[:DRAFTS], cos, sin, table.expand(DRAFTS, -1).contiguous())
        runs["step"][kind] = partial(own.attend, rows[:1], *plain, at, h)
        runs["drafts"][kind] = partial(own.attend_rows, rows[:DRAFTS], *paged, drafts, h)
        runs["prompt"][kind] = partial(own.attend_packed, rows, *paged, packed, cos, sin, h)
    about = {"model": name, "heads": (HQ, HKV, D), "tokens": n}
    return [{**about, "what": what, "ms": least(ways, rounds)} for what, ways in runs.items()]


def steps(name: str, n: int, rounds: int) -> dict[str, Any]:
    """A whole step after n tokens: the caches are filled with random values in place of a prompt's."""
    HQ, HKV, D = SHAPES[name]
    sizes = {"num_attention_heads": HQ, "num_key_value_heads": HKV, "head_dim": D, "max_position_embeddings": 1 << 14}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **MODELS[name], **sizes), dtype=torch.bfloat16)
    runs: dict[str, Callable[[], object]] = {}
    for kind in kv.KINDS:
        decoder = NativeDecoder(model.eval(), kv=kind)
        decoder.start([[1, 2, 3]], Sampling(), n + 512)
        for state in decoder.state:
            assert isinstance(state, KeyValues)
            for cache, filled in zip((state.k, state.v), caches(kind, tuple(state.k.shape)), strict=True):
                for to, some in zip(tensors(cache), tensors(filled), strict=True):
                    to.copy_(some)

        def run(decoder: NativeDecoder = decoder) -> None:
            decoder.pos.fill_(n)
            decoder.step()

        runs[kind] = run
    return {
        "model": name,
        "layers": MODELS[name]["num_hidden_layers"],
        "tokens": n,
        "what": "whole step",
        "ms": least(runs, rounds),
    }


def main() -> None:
    """A row for each shape, length and kind of work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for n in TOKENS:
            for name in SHAPES:
                rows += attention(name, n, args.rounds)
            rows += [steps(name, n, args.rounds) for name in MODELS]
    for row in rows:
        print(row, flush=True)
    cpu = next(
        (line.split(": ")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), ""
    )
    about = {"measured": datetime.now(UTC).date().isoformat(), "cpu": cpu, "isa": native.isa()[1], "threads": 1}
    about |= {"torch": version("torch"), "rounds": args.rounds}
    args.out.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
