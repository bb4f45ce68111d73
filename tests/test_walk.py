"""The walk: every command of docs/cli.md in its usual forms, as a person runs them, in one home of its own.

Each step is a process: its exit code, the shape of what it prints, no traceback and no "internal error" on stderr. The seconds
of each are printed at the end (`pytest -m walk -s`). Steps build on one another, so they stand in one test, in order. Commands
that compute are forks of one process that has imported torch, which is half of what most of them take.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import forking
import pytest
import torch

from lowq_cli import main
from lowq_kernels.products.cpu import native
from lowq_packers.home import cache_dir

LOWQ = Path(sys.executable).with_name("lowq")
LIGHT = ("--help", "--version", "ls", "rm", "inspect", "quantize demo --dry-run")  # they import no torch
TEXT = ("--max-new-tokens", "8")


@dataclass(frozen=True)
class Step:
    """One command line. keys: of the JSON object on stdout. says: on stdout or stderr. makes: paths that are there then."""

    line: str
    code: int = 0
    keys: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()
    stdin: str = ""


STEPS = (
    Step("--help", says=("Commands:", "quantize")),
    Step("--version", says=("lowq 0",)),
    Step("doctor --json", keys=("ok", "checks")),
    Step("ls", says=("nothing yet",)),
    Step("generate --prompt x", 3, says=("lowq quantize demo",)),
    Step("quantize demo --dry-run --embedding keep", says=("bits per weight", "--embedding 8")),
    Step("quantize demo", says=("demo-lowq-4b-g64", "next: lowq tune"), makes=("demo-lowq-4b-g64/config.json",)),
    Step("quantize demo --json", keys=("out", "bpw", "bytes", "already_done")),
    Step("inspect", says=("4.50", "serves in:")),
    Step("inspect --verify --json", keys=("format", "verified")),
    Step(f"generate --prompt Once --explain {' '.join(TEXT)}", says=("new tokens", "(--max-new-tokens)")),
    Step(f"generate --prompt Once --temperature 1 --stop zebra --json {' '.join(TEXT)}", keys=("text", "seed", "ttft_s")),
    Step(f"generate --prompts - --batch 2 {' '.join(TEXT)}", says=('"id": 7',), stdin='{"prompt": "Once", "id": 7}\n"A"\n'),
    Step("chat --max-new-tokens 4", says=("/save FILE", "no chat template"), stdin="/help\nOnce\n/quit\n"),
    Step("eval --max-tokens 600 --json", keys=("ppl", "tokens")),
    Step("tune --batch 1 --budget 10", says=("wrote",), makes=("demo-lowq-4b-g64/lowq_tune.json",)),
    Step("bench --batch 1 --json", keys=("rows",)),
    Step("compare demo demo-lowq-4b-g64 --max-tokens 600 --new-tokens 4 --json", keys=("rows",)),
    Step("export", says=("humming is the first format",), makes=("demo-lowq-4b-g64-humming/config.json",)),
    Step("export --to gguf", 5, says=("lowq quantize demo --export gguf",)),
    Step(
        "quantize demo --export gguf --json",
        keys=("out", "export"),
        makes=("demo-lowq-4b-g32-sym-head16.gguf", "demo-lowq-4b-g32-sym-head16/config.json"),
    ),
    Step("draft train demo-lowq-4b-g64 --dry-run --json", keys=("plan", "seconds")),
    Step(
        "batch - demo-lowq-4b-g64 --out answers.jsonl --json",
        keys=("answered",),
        makes=("answers.jsonl",),
        stdin='{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Once", "max_tokens": 4}}\n',
    ),
    Step("ps --json", keys=("servers",)),
    Step("stop", says=("no background server is running",)),
    Step("refine demo-lowq-4b-g64 --model demo", 2, says=("lowq: ",)),  # 17 s on another tool's file: tests/cli has that
    Step("serve demo-lowq-4b-g64 --engine vllm --dry-run", says=("vllm serve",)),
    Step("serve demo-lowq-4b-g64 --port 0 --dry-run", says=("1,024 tokens",)),
    Step("push me/demo --dry-run --ckpt demo-lowq-4b-g64", says=("README.md",)),
    Step(f"run demo Once {' '.join(TEXT)}", says=("into the cache",)),
    Step("ls --json", keys=("holdings", "bytes")),
    Step("rm demo-lowq-4b-g64", 2, says=("--yes",)),
    Step("rm demo-lowq-4b-g64 --yes --quiet"),
    Step("rm --cached --yes --json", keys=("removed", "bytes")),
    Step("inspect demo-lowq-4b-g46", 3, says=("lowq: ",)),
)


def walk(folder, device):
    """Take all steps in `folder`, on a device; the seconds of each."""
    homes = {f"XDG_{kind}_HOME": str(folder / kind.lower()) for kind in ("STATE", "CACHE")}
    env = {**os.environ, **homes, "HF_HUB_OFFLINE": "1"}
    env |= {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    (folder / "work").mkdir()
    if native.library() is not None:  # 15 s of compiling, which a test of its own looks at
        shutil.copytree(cache_dir() / "cpu", folder / "cache" / "lowq" / "cpu")
    spent = []
    for step in STEPS:
        began = time.monotonic()
        words = step.line.split()
        if device == "cuda" and "--budget" in words:  # for compiling, while other tests keep the processors busy
            words[words.index("--budget") + 1] = "60"
        if step.line.startswith(LIGHT) and "--verify" not in words:
            here = {"cwd": folder / "work", "env": env, "input": step.stdin}
            done = subprocess.run([LOWQ, *words], capture_output=True, text=True, timeout=300, **here)
        else:
            done = forking.lowq(*words, env=env, cwd=folder / "work", given=step.stdin)
        spent.append((step.line, time.monotonic() - began))
        output = f"lowq {step.line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        assert done.returncode == step.code, output
        assert "Traceback" not in done.stderr, output
        assert "internal error" not in done.stderr, output
        if step.keys:
            (line,) = done.stdout.splitlines()  # exactly one object
            assert set(step.keys) <= json.loads(line).keys(), output
        for words in step.says:
            assert words in done.stdout + done.stderr, output
        for path in step.makes:
            assert (folder / "work" / path).exists(), output
    return spent


@pytest.mark.walk
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_command_has_its_documented_effect(tmp_path, device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    spent = walk(tmp_path, device)
    print()
    for line, seconds in spent:
        print(f"{seconds:6.1f} s  lowq {line}")


def test_the_walk_leaves_no_command_out():
    taken = {step.line.split()[0] for step in STEPS}
    assert {str(c.name) for c in main.app.registered_commands} <= taken
