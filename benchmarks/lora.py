"""Measure the cost of LoRA adapters in the server: users of an 8B at 4 bits without, with unused, with one and with several.

    python benchmarks/lora.py --work /dev/shm/x [--users 16] [--adapters 8] [--rank 16]

The plain load of serve_load.py in lowq's own engine. Adapters are random and change every product of every layer, so the texts
are of no use and the work is all there is. Writes lora.json into the folder of the GPU's results.
"""

import argparse
import gc
import json
from datetime import UTC, datetime
from pathlib import Path

import torch
from pages import results_of
from serve_load import LONGEST_NEW, LONGEST_PROMPT, SEED, Asked, plain, requests
from serve_own import Engine
from vllm_speed import make

from lowq_cli.engine.lora import adapt
from lowq_cli.engine.open_model import ready
from lowq_cli.engine.plan import plan_of
from lowq_cli.engine.steps import Product
from lowq_cli.files.adapter import Adapter


def random_adapter(model: object, name: str, rank: int, seed: int) -> Adapter:
    """One that changes every product of a plan."""
    g, factors = torch.Generator().manual_seed(seed), {}
    for step in plan_of(model).steps:
        if isinstance(step, Product) and step.part is not None:
            for module, N in zip(step.part.parts, step.part.rows, strict=True):
                A = torch.randn(rank, step.part.columns, generator=g) / step.part.columns**0.5
                factors[module] = A, torch.randn(N, rank, generator=g) * 1e-3
    return Adapter(name, factors, name.encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a folder for the checkpoint")
    parser.add_argument("--users", type=int, default=16)
    parser.add_argument("--count", type=int, default=128, help="requests that are answered")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    card = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    out = args.out or results_of(card) / "lora.json"
    folder = args.work / "lowq-8b-4"
    if not folder.exists():
        make(folder, "8b", 4, device)
    model, _ = ready(str(folder), device)
    vocabulary = model.get_output_embeddings().weight.shape[0]
    found = {"device": card, "date": datetime.now(UTC).isoformat("T", "seconds"), "users": args.users, "rank": args.rank}
    for name, several in {"0": 0, "unused": 0, "1": 1, str(args.adapters): args.adapters}.items():
        if name == "unused":
            given = [random_adapter(model, f"a{i}", args.rank, i) for i in range(args.adapters)]
            adapt(plan_of(model), given)
        engine = Engine(model, cache_tokens=24 * (LONGEST_PROMPT + LONGEST_NEW))

        def ways(asked: Asked, n: int = several) -> dict[str, int]:
            return {"adapter": 1 + asked.number % n} if n else {}

        engine.ways = ways
        engine.load(plain(args.users, requests(vocabulary, SEED)), args.users)  # the first run compiles kernels
        row = engine.load(plain(args.users, requests(vocabulary, SEED + args.users)), args.count)
        row["share"] = row["tokens_per_s"] / found.get("0", row)["tokens_per_s"]  # type: ignore[attr-defined]
        row["folds"] = getattr(plan_of(model).adapters, "folds", None)
        row["ready_s"] = engine.ready_s
        found[name] = row
        print(
            name,
            "adapters:",
            json.dumps({k: row[k] for k in ("tokens_per_s", "share", "ttft_ms", "between_ms")}),
            flush=True,
        )
        out.write_text(json.dumps(found, indent=1) + "\n")
        engine.engine.stop(0)
        del engine
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
