"""Compare two GPUs with one: quantizing, and decoding by tensor parallelism. benchmarks/results/h200x2/two_gpus.json.

    python benchmarks/once/two_gpus.py --models MODELS --work /dev/shm/x [--devices cuda:0,cuda:1] [--layers 16] [--out FILE]
    python benchmarks/once/two_gpus.py --take FILE    # rows measured elsewhere into the results; other kinds of row stay

Quantizing: a random model of Qwen2.5-32B's shape (as many layers as asked), made on the spot, by each method on the first
device and on both; the files must be equal byte for byte. Decoding: that model and a trained one, one process and one process
a device, greedy; tokens, the largest difference of a logit and tokens per second. Everything runs on --devices cpu,cpu too.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import lowq
from lowq_cli import ranks
from lowq_cli.files.weight_files import INDEX
from lowq_cli.run import pipeline

OUT = Path(__file__).parents[1] / "results" / "h200x2" / "two_gpus.json"
SHAPE = {  # Qwen2.5-32B without its biases
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 5120, "intermediate_size": 27648,
    "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 152064, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096, "tie_word_embeddings": False, "hidden_act": "silu", "dtype": "bfloat16",
}  # fmt: skip
SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
PROMPTS = ("The river", "In the year 1901 the city of", "Once upon a time there was a")
NEW_TOKENS = 48
PIECE = 1 << 28  # bytes of a file that are summed at a time
Row = dict[str, Any]


def make_model(folder: Path, layers: int, device: torch.device, tokenizer: Path, small: bool) -> int:
    """Random bf16 weights in one file per layer, several files at a time; their bytes."""
    folder.mkdir(parents=True)
    config: dict[str, Any] = SHAPE | (SMALL if small else {}) | {"num_hidden_layers": layers}
    H, inter, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv, V = config["num_attention_heads"] * d, config["num_key_value_heads"] * d, config["vocab_size"]
    linears = {"self_attn.q_proj": (q, H), "self_attn.k_proj": (kv, H), "self_attn.v_proj": (kv, H), "self_attn.o_proj": (H, q),
               "mlp.gate_proj": (inter, H), "mlp.up_proj": (inter, H), "mlp.down_proj": (H, inter)}  # fmt: skip
    norms = ("input_layernorm", "post_attention_layernorm")

    def write(number: int) -> dict[str, str]:
        """File 0 holds the embedding, the last one head and norm, those between a layer each."""
        shapes = {f"model.layers.{number - 1}.{name}.weight": shape for name, shape in linears.items()}
        ones = [f"model.layers.{number - 1}.{name}.weight" for name in norms]
        if number == 0:
            shapes, ones = {"model.embed_tokens.weight": (V, H)}, []
        if number == layers + 1:
            shapes, ones = {"lm_head.weight": (V, H)}, ["model.norm.weight"]
        g = torch.Generator(device).manual_seed(number)
        tensors = {}
        for name, (N, K) in shapes.items():
            W = torch.randn(N, K, device=device, dtype=torch.bfloat16, generator=g).mul_(K**-0.5)
            tensors[name] = torch.empty(W.shape, dtype=W.dtype, pin_memory=W.is_cuda).copy_(W)
        tensors |= {name: torch.ones(H, dtype=torch.bfloat16) for name in ones}
        file = f"model-{number:03d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        return dict.fromkeys(tensors, file)

    with ThreadPoolExecutor(8) as pool:
        where = {name: file for found in pool.map(write, range(layers + 2)) for name, file in found.items()}
    total = sum(p.stat().st_size for p in folder.glob("*.safetensors"))
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}))
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder / name)
    return total


def checksums(folder: Path) -> dict[str, list[int]]:
    """CRC-32 of every file but the log, in pieces."""

    def checksum(path: Path, start: int) -> int:
        with path.open("rb") as f:
            f.seek(start)
            return zlib.crc32(f.read(PIECE))

    pieces = {p: range(0, max(1, p.stat().st_size), PIECE) for p in sorted(folder.iterdir()) if p.name != "lowq.log"}
    with ThreadPoolExecutor(16) as pool:
        found = {p.name: [pool.submit(checksum, p, start) for start in starts] for p, starts in pieces.items()}
        return {name: [f.result() for f in crcs] for name, crcs in found.items()}


def quantize_rows(model: Path, source_bytes: int, devices: str, methods: list[str], work: Path) -> Iterator[Row]:
    """Seconds of each method on the first device and on all, and whether the files are equal. Leaves work/kept."""
    pipeline.quantize(model, work / "kept", bits=4, group=128, method=methods[0], device=devices)  # contexts, pinned pages
    for method in methods:
        found = []
        for name in (devices.split(",")[0], devices):
            out = work / "kept"  # the last is used again
            shutil.rmtree(out)
            done = pipeline.quantize(model, out, bits=4, group=128, method=method, device=name)
            facts = {"GB": source_bytes / 1e9, "seconds": done["seconds"], "peak_rss_GB": done["peak_rss_bytes"] / 1e9}
            yield {"what": "quantize", "method": method, "devices": name, **facts, "bpw": done["quantized_bpw"]}
            found.append(checksums(out))
        yield {"what": "files", "method": method, "equal": found[0] == found[1], "files": len(found[0])}


def answer(folder: Path, dtype: str) -> Row:
    """Greedy tokens, the logits after the first prompt, and decoding speed, here: in this process's share of the model."""
    start = time.perf_counter()
    model, tokenizer = lowq.load(folder, dtype=dtype)
    loaded = time.perf_counter() - start
    ids = torch.tensor([tokenizer(PROMPTS[0])["input_ids"]], device=model.device)
    with torch.inference_mode():
        logits = model(input_ids=ids).logits[0, -1].float().cpu()
    tokens, tps = [], 0.0
    for prompt in PROMPTS:
        g = lowq.stream(model, tokenizer, prompt, max_new_tokens=NEW_TOKENS)
        for _ in g.pieces():
            pass
        tokens.append(g.tokens[0])
        tps = max(tps, g.decode_tps)
    memory = torch.cuda.max_memory_allocated() if model.device.type == "cuda" else 0
    return {"load_s": loaded, "tokens": tokens, "decode_tps": tps, "decoder": g.decoder.name, "logits": logits.tolist(),
            "memory_GB": memory / 1e9}  # fmt: skip


def generate_rows(folder: Path, name: str, processes: int, work: Path, dtype: str, env: dict[str, str]) -> list[Row]:
    """The same model in one process and over several."""
    found = {}
    for n in (1, processes):
        out = work / f"answer-{n}.json"
        line = (
            [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}"]
            if n > 1
            else [sys.executable]
        )
        line += [__file__, "--worker", str(folder), str(out), dtype]
        done = subprocess.run(line, env=env, check=False, capture_output=True, text=True)
        if done.returncode:
            print(done.stdout[-3000:], done.stderr[-6000:], flush=True)
            return [{"what": "generate", "model": name, "processes": n, "error": done.stderr[-300:]}]
        found[n] = json.loads(out.read_text())
    logits = {n: torch.tensor(f.pop("logits")) for n, f in found.items()}
    tokens = {n: f.pop("tokens") for n, f in found.items()}
    pairs = list(zip(tokens[1], tokens[processes], strict=True))
    alike = [next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a)) for a, b in pairs]
    rows: list[Row] = [{"what": "generate", "model": name, "processes": n, **f} for n, f in found.items()]
    rows.append({
        "what": "same", "model": name, "tokens": [len(a) for a, _ in pairs], "equal_tokens_in_front": alike,
        "largest_logit_difference": (logits[1] - logits[processes]).abs().max().item(),
        "largest_logit": logits[1].abs().max().item(),
    })  # fmt: skip
    for row in rows:
        print(json.dumps(row), flush=True)
    return rows


def worker(folder: str, out: str, dtype: str) -> None:
    """One process of `generate_rows`."""
    found = answer(Path(folder), dtype)
    if ranks.rank() == 0:
        Path(out).write_text(json.dumps(found))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def take(measured: Path, out: Path) -> None:
    """Put the rows of a file into `out`, in place of those of the same kind."""
    old, new = json.loads(out.read_text()), json.loads(measured.read_text())
    for report in (old, new):
        facts = {"layers": report["layers"], "date": report["date"]}
        report["rows"] = [facts | row for row in report["rows"]]
    quantized, decoded = (any(row["what"] == what for row in new["rows"]) for what in ("quantize", "generate"))
    again = {"quantize": quantized, "files": quantized, "generate": decoded, "same": decoded}
    kept = [row for row in old["rows"] if not again[row["what"]]]
    out.write_text(json.dumps({**new, "rows": new["rows"] + kept}, indent=1) + "\n")


def main() -> None:
    """Make, quantize, generate, write."""
    if sys.argv[1:2] == ["--worker"]:
        return worker(*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--take", type=Path)
    parser.add_argument("--models", type=Path, help="folder that holds `base`")
    parser.add_argument("--work", type=Path, help="an empty folder in memory, for twice the model")
    parser.add_argument("--devices", default="cuda:0,cuda:1")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--methods", default="rtn,lsq,hqq")
    parser.add_argument("--generate", default="base", help="models to decode with: base, big, both as base,big, or none")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    if args.take:
        return take(args.take, args.out)
    on_cpu = args.devices.startswith("cpu")
    processes, first = len(args.devices.split(",")), torch.device(args.devices.split(",")[0])
    dtype = "float32" if on_cpu else "float16"
    env = dict(os.environ) | ({"CUDA_VISIBLE_DEVICES": ""} if on_cpu else {})
    rows: list[Row] = []
    start = time.perf_counter()
    source_bytes = make_model(args.work / "big", args.layers, first, args.models / "base", small=on_cpu)
    print(f"{source_bytes / 1e9:.1f} GB made in {time.perf_counter() - start:.1f} s", flush=True)
    facts: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "devices": args.devices,
        "shape": SHAPE,
        "layers": args.layers,
    }
    facts["versions"] = {p: importlib.metadata.version(p) for p in ("lowq", "torch", "transformers")}
    if not on_cpu:
        facts["gpu"] = torch.cuda.get_device_name(0)

    def save() -> None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")

    for row in quantize_rows(args.work / "big", source_bytes, args.devices, args.methods.split(","), args.work):
        print(json.dumps(row), flush=True)
        rows.append(row)
        save()
    shutil.rmtree(args.work / "big")
    if "base" in args.generate:
        lowq.quantize(args.models / "base", out=args.work / "base-4", bits=4, group=64, device=str(first))
        rows += generate_rows(args.work / "base-4", "base, 4-bit g64", processes, args.work, dtype, env)
        save()
    if "big" in args.generate:
        rows += generate_rows(args.work / "kept", "32B shape, random, 4-bit g128", processes, args.work, dtype, env)
        save()


if __name__ == "__main__":
    main()
