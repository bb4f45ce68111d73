"""Time `lowq generate` with and without drafts, each time in a process of its own. <device>/draft_commands.json.

    python benchmarks/draft_commands.py --work /dev/shm/x --base FOLDER --texts FILE [--shapes 1b,8b]

The model is a small trained one inside a large one's shape (grown.py), quantized by `lowq quantize`, which compiles
kernels. HOME is empty before. Each text comes once without drafts and once with them, in turns. decode_tps: of tokens after
the first.
"""

import argparse
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from draft_follow import parser_of, report_of
from drafts import prompts
from grown import grown
from serve_http import LOWQ
from transformers import AutoTokenizer
from vllm_speed import SHAPES

SMALLER = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64}
KINDS = ("edit", "free", "code")


def run(args: argparse.Namespace, *line: str) -> tuple[str, float]:
    """What a command of lowq writes, and its seconds. Raises RuntimeError with the end of its messages if it fails."""
    began = time.perf_counter()
    home = os.environ | {"HOME": str(args.work / "home")}
    done = subprocess.run([*LOWQ[:-1], *line, "--device", args.device], capture_output=True, text=True, env=home)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return done.stdout, time.perf_counter() - began


def main() -> None:
    """Quantize, generate, write."""
    parser = parser_of(__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--shapes", default="1b,8b")
    parser.add_argument("--new", type=lambda s: [int(n) for n in s.split(",")], default=[64, 250])
    parser.add_argument("--turns", type=int, default=2)
    args = parser.parse_args()
    (args.work / "home").mkdir(parents=True, exist_ok=True)
    report, tokenizer = report_of(args, "draft_commands.json"), AutoTokenizer.from_pretrained(args.base)
    texts = prompts(tokenizer, args.texts.read_text())
    shapes: dict[str, Any] = SHAPES | {"1b": SHAPES["8b"] | SMALLER}
    for shape in args.shapes.split(","):
        folder, whole = args.work / shape, args.work / f"{shape}-16"
        grown(Path(args.base), whole, shapes[shape], args.device, 16)
        _, seconds = run(args, "quantize", str(whole), "--out", str(folder), "--method", "rtn", "--json")
        report({"model": shape, "quantize_s": seconds})
        shutil.rmtree(whole)
        line = ["generate", str(folder), "--temperature", "0", "--json"]
        run(args, *line, "--prompt", "The", "--max-new-tokens", "8")  # its process reads the files for the first time
        for turn in range(args.turns):
            for new in args.new:
                for kind in KINDS:
                    text = str(tokenizer.decode(texts[kind][turn]))
                    for draft in ("none", "auto") if turn % 2 else ("auto", "none"):
                        made, seconds = run(args, *line, "--prompt", text, "--max-new-tokens", str(new), "--draft", draft)
                        g = json.loads(made)
                        about = {"model": shape, "new": new, "kind": kind, "turn": turn, "draft": draft, "seconds": seconds}
                        kept = {name: g.get(name) for name in ("decode_tps", "ttft_s", "finish_reason", "drafts")}
                        report(about | {"tokens": len(g["tokens"])} | kept)


if __name__ == "__main__":
    main()
