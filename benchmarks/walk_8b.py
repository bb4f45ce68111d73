"""Time every command on a model of an 8B's shape with random weights, from shell prompt to shell prompt.

    python benchmarks/walk_8b.py                      # on a GPU; 35 GB of disk; --folder /dev/shm for memory
    python benchmarks/walk_8b.py --shape tiny         # the same steps on a CPU in a minute or two, to see that they work

The model is written first, so its files are in the page cache. Each command is a process of its own in a home of its own; a row
says how many kernels it compiled. A step that fails is told, with the end of its stderr, and exits 1.
With --only the result file keeps its other rows, each with the date of its run.
"""

import argparse
import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from pages import results_of
from safetensors.torch import save_file
from serve_http import Server, free_port

from lowq_cli import demo

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5}
LLAMA |= {"tie_word_embeddings": False, "dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, "rope_theta": 500000.0}
SHAPES: dict[str, dict[str, Any]] = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 131072},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "max_position_embeddings": 131072},
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8}
    | {"num_key_value_heads": 4, "head_dim": 32, "vocab_size": 8192, "max_position_embeddings": 1024},
}
NEW = "--prompt Once --max-new-tokens"
TUNED: tuple[tuple[str, str], ...] = (("generate, 512 tokens", f"generate CKPT {NEW} 512"), ("tune", "tune CKPT"))
TUNED += (("generate, 512 tokens, tuned", f"generate CKPT {NEW} 512"),)
FIRST = ("generate, 1 token, the first after quantize", f"generate CKPT {NEW} 1")
ONE = ("generate, 1 token", FIRST[1])
FEWER = tuple((f"{what}; 2 bits g64", line.replace("CKPT", "CKPT2")) for what, line in (FIRST, *TUNED))
SERVE = ("serve, until it answers", "serve CKPT")
STEPS = (  # what a row is called, the command; CKPT is the 4-bit checkpoint, CKPT2 the 2-bit one
    ("python, torch and a first tensor on the device", ""),
    ("doctor", "doctor"),
    ("inspect the original", "inspect MODEL"),
    ("plan: quantize --dry-run", "quantize MODEL --group 128 --dry-run"),
    ("quantize, 4 bits g128", "quantize MODEL --group 128 --out CKPT"),
    ("inspect", "inspect CKPT"),
    FIRST,
    ONE,
    ("generate, 1 token, again", f"generate CKPT {NEW} 1"),
    TUNED[0],
    ("eval, 20,000 tokens", "eval CKPT --max-tokens 20000"),
    ("export", "export CKPT --out EXPORT"),
    ("the demo: quantize", "quantize demo --out DEMO"),
    ("the demo: 60 tokens", "generate DEMO --prompt Once --max-new-tokens 60"),
    ("the demo: both in one command", "run demo Once --max-new-tokens 60"),
    ("the demo: against the original", "eval DEMO --against demo"),
    ("quantize, 2 bits g64", "quantize MODEL --bits 2 --out CKPT2"),
    *FEWER,
    ("generate, 16 texts of 256 tokens, first time", "generate CKPT --prompts PROMPTS --batch 16 --max-new-tokens 256"),
    ("generate, 16 texts of 256 tokens", "generate CKPT --prompts PROMPTS --batch 16 --max-new-tokens 256"),
    SERVE,
    *TUNED[1:],
)


def main() -> None:
    """Write the model, take the steps, write their seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b", choices=SHAPES)
    parser.add_argument("--out", type=Path, help="default: results/<gpu>/walk_SHAPE.json")
    parser.add_argument("--folder", type=Path, help="where to work; default: the temporary folder")
    parser.add_argument("--only", default="", help="steps whose names hold this regular expression")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    work = Path(tempfile.mkdtemp(prefix="lowq-walk-", dir=args.folder))
    try:
        size = write(work / "model", args.shape, args.device)
        facts: dict[str, Any] = {"shape": args.shape, "device": name, "model_gb": round(size / 1e9, 2)}
        facts["date"] = datetime.now(UTC).isoformat("T", "seconds")
        facts |= {package: version(package) for package in ("lowq", "torch", "transformers")}
        out = args.out or results_of(name) / f"walk_{args.shape}.json"
        out.parent.mkdir(parents=True, exist_ok=True)
        before = json.loads(out.read_text()) if args.only and out.is_file() else {"rows": []}
        rows: list[dict[str, Any]] = []
        for row in walk(work, args.device, args.only):
            rows.append(row)
            out.write_text(json.dumps(merged(before, {**facts, "rows": rows}), indent=1) + "\n")  # if cut off, keeps its steps
    finally:
        shutil.rmtree(work)
    print(f"wrote {out}")
    sys.exit(any("exit_code" in row for row in rows))


def merged(before: dict[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    """A report with what only an older one has: those rows with the date of their run. In the order of STEPS."""
    kept = {row["what"]: {**row, "date": row.get("date", before["date"])} for row in before["rows"]}
    rows = kept | {row["what"]: row for row in report["rows"]}
    order = {what: i for i, (what, _) in enumerate(STEPS)}
    return {**report, "rows": sorted(rows.values(), key=lambda row: order.get(row["what"], len(order)))}


def walk(work: Path, device: str, only: str) -> Iterator[dict[str, Any]]:
    """Each step in the folder `work` with its seconds; with its exit code where it failed."""
    prompts = work / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(f"The {n}th day") + "\n" for n in range(16)))
    places = {"MODEL": work / "model", "CKPT": work / "checkpoint", "EXPORT": work / "export", "PROMPTS": prompts}
    places |= {"CKPT2": work / "checkpoint-2-bits", "DEMO": work / "demo"}
    homes = {f"XDG_{kind}_HOME": str(work / kind.lower()) for kind in ("STATE", "CACHE")}
    env = {**os.environ, **homes, "TRITON_CACHE_DIR": str(work / "triton"), "HF_HUB_OFFLINE": "1"}
    compiled = False
    for what, line in STEPS:
        if not re.search(only, what):
            continue
        words = [str(places.get(word, word)) for word in line.split()]
        command = [str(Path(sys.executable).with_name("lowq")), *words]
        if not line:
            command = [sys.executable, "-c", f"import torch; torch.zeros(1, device={device!r})"]
        elif line.split()[0] in ("generate", "run", "eval", "tune", "quantize", "compare"):
            command += ["--device", device]
        there, began = kernels(work), time.perf_counter()
        if line == SERVE[1]:
            done, seconds = served([*command, "--device", device], env, work)
        else:
            done = subprocess.run(command, env=env, cwd=work, capture_output=True, text=True, check=False)
            seconds = round(time.perf_counter() - began, 2)
        told = next((row for row in reversed(done.stderr.splitlines()) if " new token" in row or " written in " in row), "")
        if (what, line) == ONE and not compiled:  # --only left out the step before it
            what = FIRST[0]
        compiled |= line.startswith("generate CKPT ")
        row = {"what": what, "command": f"lowq {line}" if line else "", "seconds": seconds, "said": told}
        row["compiled"] = kernels(work) - there
        print(f"{seconds:7.2f} s  {what}  {row['compiled']} kernels compiled  {told}", flush=True)
        if done.returncode:
            row["exit_code"] = done.returncode
            print(done.stderr[-2000:], flush=True)
        yield row


def served(command: list[str], env: dict[str, str], work: Path) -> tuple[subprocess.CompletedProcess[str], float]:
    """A server's end, and the seconds until it answered."""
    port = free_port()
    server = Server("lowq", [*command, "--port", str(port)], port, work / "server.log", env)
    try:
        asyncio.run(server.ready(120))
    except RuntimeError as e:
        server.stop()
        return subprocess.CompletedProcess(command, 1, "", str(e)), time.perf_counter() - server.began
    code = server.stop()
    return subprocess.CompletedProcess(command, code or 0, "", server.log.read_text()), server.ready_s


def kernels(work: Path) -> int:
    """How many compiled kernels lie in the caches: NVRTC's and Triton's."""
    return sum(1 for pattern in ("cache/lowq/cubin/*", "triton/*/*.cubin") for _ in work.glob(pattern))


def write(folder: Path, shape: str, device: str) -> int:
    """A model of random weights with the demo's tokenizer; a file a layer. Its bytes."""
    folder.mkdir(parents=True)
    c = SHAPES[shape]
    hidden, inner, kv = c["hidden_size"], c["intermediate_size"], c["num_key_value_heads"] * c["head_dim"]
    linears = {"self_attn.q_proj": (c["num_attention_heads"] * c["head_dim"], hidden), "self_attn.k_proj": (kv, hidden)}
    linears |= {"self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, c["num_attention_heads"] * c["head_dim"])}
    linears |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    norms = ("input_layernorm", "post_attention_layernorm")
    files = [{"model.embed_tokens": (c["vocab_size"], hidden), "model.norm": (hidden,), "lm_head": (c["vocab_size"], hidden)}]
    for i in range(c["num_hidden_layers"]):
        files.append(
            {f"model.layers.{i}.{name}": size for name, size in {**linears, **dict.fromkeys(norms, (hidden,))}.items()}
        )
    generator = torch.Generator(device).manual_seed(0)
    index: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        tensors = {}
        for name, size in names.items():
            new = torch.ones(size, dtype=torch.bfloat16, device=device)
            new = new if len(size) == 1 else new.normal_(0, size[-1] ** -0.5, generator=generator)
            tensors[f"{name}.weight"] = new.cpu()
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps(LLAMA | c))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(demo.__path__[0]) / file, folder / file)
    return sum(f.stat().st_size for f in folder.iterdir())


if __name__ == "__main__":
    main()
