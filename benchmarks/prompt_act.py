"""Measure whole prompts with activations of 16 and of 8 bits in the server's engine. benchmarks/results/<gpu>/prompt_act.json.

    python benchmarks/prompt_act.py [--runs 8b=4h8,30b-a3b=4h8,gpt-oss-20b=mxfp4h8] [--prompts 1x4096,8x4096] [--acts none,fp8]

Shapes and variants are those of e2e_decode.py, with random weights. ms: from sending until the first tokens of all prompts,
the median after rests; no prompt comes twice.
"""

import argparse
import gc
import json
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from e2e_decode import EXPERTS_ONLY, quantized_model, skeleton
from pages import results_of
from prompt_timeline import timed
from serve_own import Engine

from lowq_cli.hf.activations import set_activations

Row = dict[str, Any]
TURNS = 6  # prompts of each kind; the first pays for what is compiled at its first use
ROOM = 4  # prompts of the longest load that the cache holds, as no prompt may evict another while it is read


def main() -> None:
    """A row for each run and mode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default="8b=4h8,30b-a3b=4h8,gpt-oss-20b=mxfp4h8")
    parser.add_argument("--prompts", default="1x4096,8x4096")
    parser.add_argument("--acts", default="none,fp8")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device, rows = torch.cuda.get_device_name(), list[Row]()
    out = args.out or results_of(device) / "prompt_act.json"
    loads = [tuple(map(int, text.split("x"))) for text in args.prompts.split(",")]
    for run in args.runs.split(","):
        shape, _, variant = run.partition("=")
        dtype = torch.float16 if shape == "8b" else torch.bfloat16  # which its publisher's folder has, but for Llama
        model = quantized_model(skeleton(shape, dtype), variant, dtype, "cuda", shape in EXPERTS_ONLY)
        with torch.no_grad():
            model.get_input_embeddings().weight.normal_()  # tokens of a smaller spread all go to the same experts
        for act in args.acts.split(","):
            set_activations(model, act)
            engine = Engine(model, cache_tokens=ROOM * max(n * tokens for n, tokens in loads))
            row: Row = {"shape": shape, "variant": variant, "dtype": str(dtype).removeprefix("torch."), "act": act}
            for turn, (n, tokens) in enumerate(loads):
                seeds = range(100 * turn, 100 * turn + TURNS)
                row[f"{n}x{tokens}"] = timed(engine, n, tokens, model.config.vocab_size, seeds)["ms"]
            engine.engine.stop(0)
            rows.append(row)
            print(row, flush=True)
            facts = {"device": device, "date": datetime.now(UTC).isoformat(timespec="minutes"), "lowq": version("lowq")}
            out.write_text(json.dumps(facts | {"torch": version("torch"), "rows": rows}, indent=1) + "\n")
            del engine
            gc.collect()
            torch.cuda.empty_cache()
        del model


if __name__ == "__main__":
    main()
