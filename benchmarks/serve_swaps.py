"""Measure swaps of models in one server: `lowq serve` with a memory for one, asked by turns. results/<device>/serve_swap.json.

    python benchmarks/serve_swaps.py --work /dev/shm/x [--shape 8b] [--swaps 8]

Two folders with the same random model (vllm_speed.make), files in the page cache. A request names the model that is not loaded;
its first token is timed, then its other tokens, then those of a second request. `load_s` is the server's own time. Then
`lowq generate` is timed while the server has its model: seconds to its first byte, beside those of Python's and lowq's start.
"""

import argparse
import asyncio
import http.client
import json
import os
import re
import subprocess
import sys
import time
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from pages import results_of
from serve_http import LOWQ, Server, fill_tokenizer, free_port
from vllm_speed import SHAPES, make

NEW = 32  # tokens of an answer
STARTS = 7  # of each command
PATIENCE = 120  # seconds until the server must answer
FLAGS = ("--memory", "9GB", "--cache-tokens", "16384", "--max-batch", "16")
LOADED = re.compile(r"is loaded, after ([\d.]+) s")


def ask(port: int, model: str) -> list[float]:
    """Return the seconds from sending a request to each of its events."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    asked = {"model": model, "prompt": [5] * 40, "max_tokens": NEW, "stream": True, "temperature": 0, "ignore_eos": True}
    began, times = time.perf_counter(), []
    connection.request("POST", "/v1/completions", json.dumps(asked), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(answer.read().decode())
    while line := answer.readline():
        if line.startswith(b"data: {"):
            times.append(time.perf_counter() - began)
    connection.close()
    return times


def warm(folder: Path) -> dict[str, list[float]]:
    """Return the seconds to the first byte of commands, each started several times by turns."""
    text = ("generate", str(folder), "--prompt", "Once upon a time", "--max-new-tokens", "8")
    start = (sys.executable, "-P", "-c", "from lowq_cli.start import run; run()")
    lines = {"python": (sys.executable, "-c", "print(1)"), "lowq --version": (*start, "--version"), "generate": (*start, *text)}
    lines["generate --json"] = (*lines["generate"], "--json")  # through Typer
    seconds: dict[str, list[float]] = {name: [] for name in lines}
    for _ in range(STARTS):
        for name, line in lines.items():
            began = time.perf_counter()
            with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                assert process.stderr is not None
                process.stdout.read(1)
                seconds[name].append(round(time.perf_counter() - began, 4))
                rest, errors = process.stdout.read(), process.stderr.read()
            if name.startswith("generate") and "process" not in rest + errors:
                raise RuntimeError(f"{name} was not answered by the server: {errors}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a folder for checkpoints; on /dev/shm they stay in memory")
    parser.add_argument("--shape", default="8b", choices=SHAPES)
    parser.add_argument("--layers", type=int, help="fewer than the shape's")
    parser.add_argument("--swaps", type=int, default=8, help="at least one")
    parser.add_argument("--rest", type=float, default=7.0, help="seconds between two swaps, for the process that stands by")
    parser.add_argument("--args", default=" ".join(FLAGS), help="flags of lowq serve")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    out = args.out or results_of(name) / "serve_swap.json"
    first, second = args.work / "models" / "a", args.work / "models" / "b"
    if not first.exists():
        make(first, args.shape, 4, device, args.layers)
        fill_tokenizer(first, SHAPES[args.shape]["vocab_size"])
        second.mkdir()
        for file in first.iterdir():
            os.link(file, second / file.name)
    port, flags = free_port(), ["--models", str(args.work / "models"), *args.args.split()]
    server = Server("lowq", [*LOWQ, str(first), *flags, "--device", device, "--port", str(port)], port, args.work / "log", {})
    found: dict[str, Any] = {"device": name, "date": datetime.now(UTC).isoformat("T", "seconds"), "flags": args.args}
    try:
        asyncio.run(server.ready(PATIENCE))
        found |= {"start_s": server.ready_s, "swaps": []}
        ask(port, "a")
        for i in range(args.swaps):
            time.sleep(args.rest)
            model = "ba"[i % 2]
            swap, again = ask(port, model), ask(port, model)
            gaps = [round(1e3 * (b - a), 2) for a, b in pairwise(swap)]
            row = {"first_token_s": swap[0], "gaps_ms": gaps, "again_first_token_s": again[0], "again_s": again[-1]}
            row["load_s"] = [float(s) for s in LOADED.findall(server.log.read_text())][-1]
            found["swaps"].append(row)
            found["median_s"] = median(r["first_token_s"] for r in found["swaps"])
            print(json.dumps({k: v for k, v in row.items() if k != "gaps_ms"}), max(gaps, default=0), flush=True)
            out.write_text(json.dumps(found, indent=1) + "\n")
        found["warm_s"] = warm(args.work / "models" / model)
        print({name: median(each) for name, each in found["warm_s"].items()}, flush=True)
        out.write_text(json.dumps(found, indent=1) + "\n")
    finally:
        server.stop()
        print(server.log.read_text()[-1500:])


if __name__ == "__main__":
    main()
