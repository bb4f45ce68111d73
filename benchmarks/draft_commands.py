"""Time `lowq generate` with and without drafts, each time in a process of its own. <device>/draft_commands.json.

    python benchmarks/draft_commands.py --work /dev/shm/x --base FOLDER --texts FILE [--shapes 1b,8b]

The model is a small trained one inside a large one's shape (grown.py), quantized by `lowq quantize`, which compiles
kernels. HOME is empty before. Each text comes once without drafts and once with them, in turns. decode_tps: of tokens after
the first. exit_s: of the process after its answer was written.
"""

import argparse
import json
import os
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from draft_follow import parser_of, report_of
from drafts import Row, prompts
from grown import grown
from serve_http import LOWQ
from transformers import AutoTokenizer
from vllm_speed import SHAPES

SMALLER = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64}
KINDS = ("edit", "code")


def run(args: argparse.Namespace, *line: str) -> tuple[Row, float, float]:
    """The JSON object that a command of lowq writes, the seconds of its process, and those of them after the object was there.
    Raises RuntimeError with the end of its messages if it fails."""
    began, made, done_at, text = time.perf_counter(), Row(), 0.0, ""
    home, log = os.environ | {"HOME": str(args.work / "home")}, args.work / "log.txt"
    with log.open("w") as messages:
        command = [*LOWQ[:-1], *line, "--device", args.device]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=messages, text=True, env=home)
        for part in process.stdout or ():
            text += part
            with suppress(json.JSONDecodeError):
                made, done_at = json.loads(text), time.perf_counter()
        failed = process.wait()
    ended = time.perf_counter()
    if failed:
        raise RuntimeError(log.read_text()[-2000:])
    return made, ended - began, ended - done_at


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
    texts = prompts(tokenizer, "\n\n".join(map(Path.read_text, args.texts)))
    shapes: dict[str, Any] = SHAPES | {"1b": SHAPES["8b"] | SMALLER}
    for shape in args.shapes.split(","):
        folder, whole = args.work / shape, args.work / f"{shape}-16"
        grown(args.base, whole, shapes[shape], args.device, 16)
        _, seconds, _ = run(args, "quantize", str(whole), "--out", str(folder), "--method", "rtn", "--json")
        report({"model": shape, "quantize_s": seconds})
        shutil.rmtree(whole)
        line = ["generate", str(folder), "--temperature", "0", "--json"]
        for kind in KINDS:  # not counted: files are read, and kernels for prompts compiled, for the first time
            run(args, *line, "--prompt", str(tokenizer.decode(texts[kind][0])), "--max-new-tokens", "8", "--draft", "none")
        for turn in range(args.turns):
            for new in args.new:
                for kind in KINDS:
                    text = str(tokenizer.decode(texts[kind][0]))
                    for draft in ("none", "auto") if turn % 2 else ("auto", "none"):
                        g, seconds, after = run(args, *line, "--prompt", text, "--max-new-tokens", str(new), "--draft", draft)
                        about = {"model": shape, "new": new, "kind": kind, "turn": turn, "draft": draft, "seconds": seconds}
                        about["exit_s"] = after
                        kept = {name: g.get(name) for name in ("decode_tps", "ttft_s", "finish_reason", "drafts")}
                        report(about | {"tokens": len(g["tokens"])} | kept)


if __name__ == "__main__":
    main()
