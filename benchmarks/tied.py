"""Measure an embedding that is also the head in 16 and in 8 bits, in lowq's server engine. benchmarks/results/<gpu>/tied.json.

    python benchmarks/tied.py --work /dev/shm/x [--shapes 1b,0.6b,262k] [--out FILE]

Llamas of random weights with the shapes of Llama 3.2 1B, Qwen3 0.6B and about Gemma 3 1B, 4 bits g128 of `lowq quantize
--method rtn`, all layers. Each checkpoint is served in a process of its own. A row: tokens/s of 1, 8 and 64 sequences, from
answers of two lengths, so prompts (128 tokens) drop out. weights_gb: of the files. loaded_gb, peak_gb: of the GPU memory that
torch allocated, when the model was loaded and at most, the cache of CACHE_TOKENS included.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from pages import results_of
from quantize_cost import llama_config, write_model
from serve_load import Asked
from serve_own import Engine

from lowq_cli.engine import native_loader
from lowq_cli.files.source import open_source

Row = dict[str, Any]
SHAPES = {  # layers, widths, vocabulary
    "1b": (16, 2048, 8192, 128256),
    "0.6b": (28, 1024, 3072, 151936),
    "262k": (26, 1024, 6912, 262144),  # about Gemma 3 1B, whose width is no multiple of a Llama's heads
}
BITS = ("keep", "8")
BATCHES, PROMPT, NEW, REPEATS = (1, 8, 64), 128, (32, 288), 3
CACHE_TOKENS = 64 * 448


def measured(folder: Path) -> Row:
    """Tokens/s by batch, and memory."""
    with open_source(str(folder)) as source:
        model = native_loader.read(source, torch.device("cuda"))
    loaded = torch.cuda.memory_allocated()
    engine = Engine(model, running=max(BATCHES), cache_tokens=CACHE_TOKENS)
    rng = random.Random(0)

    def seconds(batch: int, new: int) -> float:
        asked = [Asked(i, [rng.randrange(3, 8000) for _ in range(PROMPT)], new) for i in range(batch)]
        began = time.perf_counter()
        engine.answers(asked)
        return time.perf_counter() - began

    row: Row = {"engine": engine.engine.name, "loaded_gb": loaded / 1e9}
    for batch in BATCHES:
        least = [min(seconds(batch, new) for _ in range(REPEATS + 1)) for new in NEW]
        row[f"tokens_per_s_{batch}"] = batch * (NEW[1] - NEW[0]) / (least[1] - least[0])
    return row | {"peak_gb": torch.cuda.max_memory_allocated() / 1e9}


def main() -> None:
    """A row per shape and bits of the embedding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a folder for models")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measured(args.one)))
        return
    device, rows = torch.cuda.get_device_name(), list[Row]()
    out = args.out or results_of(device) / "tied.json"
    for shape in args.shapes.split(","):
        source = args.work / shape
        source.mkdir(parents=True)
        write_model(source, llama_config(*SHAPES[shape]), 1)
        for bits in BITS:
            folder = args.work / f"{shape}-{bits}"
            line = ["lowq", "quantize", str(source), "--bits", "4", "--group", "128", "--method", "rtn", "--embedding", bits]
            subprocess.run([*line, "--out", str(folder), "--quiet"], check=True)
            done = subprocess.run([sys.executable, __file__, "--work", str(args.work), "--one", str(folder)],
                                  check=True, capture_output=True, text=True)  # fmt: skip
            size = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
            rows.append(
                {"shape": shape, "embedding": bits, "weights_gb": size / 1e9} | json.loads(done.stdout.splitlines()[-1])
            )
            print(rows[-1], flush=True)
            facts: Row = {"device": device, "date": datetime.now(UTC).isoformat(timespec="minutes"), "lowq": version("lowq")}
            facts |= {"torch": version("torch"), "prompt": PROMPT, "new": NEW, "cache_tokens": CACHE_TOKENS}
            out.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
