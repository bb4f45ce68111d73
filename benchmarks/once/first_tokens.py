"""Time the first token of prompts in the server's engine, of one family with random weights. Prints a line of JSON.

    python benchmarks/once/first_tokens.py [--family deepseek_v2] [--layers 20] [--tokens 200,1000,8000]

Shapes and layers are those of families_vllm.py. ms: medians of prompts read alone, the first ones left out; `after`: 100 tokens
after so many that the cache holds, in whole blocks. Also works with an older tree's package before this one on the path.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the scripts of benchmarks/
from families_vllm import CUTS, cut, lowq_engine

WARM, TIMED, NEW = 3, 6, 100


def main() -> None:
    """Prompts of each length, one after another, each once alone and once with another end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="deepseek_v2", choices=CUTS)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokens", default="200,1000,8000")
    args = parser.parse_args()
    if args.layers:
        CUTS[args.family] = (args.layers, *CUTS[args.family][1:])
    torch.manual_seed(0)
    began, rng = time.perf_counter(), random.Random(0)
    ask, facts = lowq_engine(args.family, args)
    row = {"family": args.family, **cut(args.family)[2], **facts, "first": []}

    def ms(ids: list[int]) -> float:
        start = time.perf_counter()
        ask([ids], 1)
        return (time.perf_counter() - start) * 1e3

    def drawn(n: int) -> list[int]:
        return [rng.randrange(3, row["vocabulary"]) for _ in range(n)]

    for tokens in map(int, args.tokens.split(",")):
        prompts = [drawn(tokens) for _ in range(WARM + TIMED)]
        alone = [ms(ids) for ids in prompts][WARM:]
        after = [ms([*prompts[-1], *drawn(NEW)]) for _ in range(WARM + TIMED)][WARM:]
        row["first"].append({"tokens": tokens, "ms": statistics.median(alone), "after": statistics.median(after)})
    row["seconds"] = time.perf_counter() - began
    print(json.dumps(row), flush=True)
    os._exit(0)  # the engine's threads are not needed any more


if __name__ == "__main__":
    main()
