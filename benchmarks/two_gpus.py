"""Two GPUs beside one: quantizing, and decoding by tensor parallelism. benchmarks/results/h200x2/two_gpus.json.

    python benchmarks/two_gpus.py --models MODELS --work /dev/shm/x [--devices cuda:0,cuda:1] [--layers 12] [--out FILE]

Quantizing: a random model of Qwen2.5-32B's shape (as many layers as asked), made on the spot, by each method on the first
device and on both; the files must be equal byte for byte. Decoding: that model and a trained one, one process and one process
a device, greedy; tokens, the largest difference of a logit and tokens per second. Everything runs on --devices cpu,cpu too.
"""

import argparse
import datetime
import filecmp
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import lowq
from lowq_cli import ranks
from lowq_cli.files.source import INDEX
from lowq_cli.run import pipeline

OUT = Path(__file__).parent / "results" / "h200x2" / "two_gpus.json"
SHAPE = {  # Qwen2.5-32B without its biases
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 5120, "intermediate_size": 27648,
    "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 152064, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096, "tie_word_embeddings": False, "hidden_act": "silu", "dtype": "bfloat16",
}  # fmt: skip
SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
PROMPTS = ("The river", "In the year 1901 the city of", "Once upon a time there was a")
NEW_TOKENS = 48


def make_model(folder: Path, layers: int, device: torch.device, tokenizer: Path, small: bool) -> int:
    """Random bf16 weights in one file per layer; their bytes."""
    folder.mkdir(parents=True)
    config = SHAPE | (SMALL if small else {}) | {"num_hidden_layers": layers}
    H, inter, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv, V = config["num_attention_heads"] * d, config["num_key_value_heads"] * d, config["vocab_size"]
    torch.manual_seed(0)

    def weight(N: int, K: int) -> torch.Tensor:
        return (torch.randn(N, K, device=device, dtype=torch.bfloat16) * K**-0.5).cpu()

    where: dict[str, str] = {}

    def write(file: str, tensors: dict[str, torch.Tensor]) -> int:
        save_file(tensors, folder / file, metadata={"format": "pt"})
        where.update(dict.fromkeys(tensors, file))
        return (folder / file).stat().st_size

    linears = {"self_attn.q_proj": (q, H), "self_attn.k_proj": (kv, H), "self_attn.v_proj": (kv, H), "self_attn.o_proj": (H, q),
               "mlp.gate_proj": (inter, H), "mlp.up_proj": (inter, H), "mlp.down_proj": (H, inter)}  # fmt: skip
    total = 0
    for i in range(layers):
        tensors = {f"model.layers.{i}.{name}.weight": weight(*shape) for name, shape in linears.items()}
        norms = ("input_layernorm", "post_attention_layernorm")
        tensors |= {f"model.layers.{i}.{name}.weight": torch.ones(H, dtype=torch.bfloat16) for name in norms}
        total += write(f"layer-{i:03d}.safetensors", tensors)
    ends = {"model.embed_tokens.weight": weight(V, H), "lm_head.weight": weight(V, H)}
    total += write("ends.safetensors", ends | {"model.norm.weight": torch.ones(H, dtype=torch.bfloat16)})
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}))
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder / name)
    return total


def quantize_rows(model: Path, source_bytes: int, devices: str, work: Path) -> list[dict[str, Any]]:
    """Seconds of each method on the first device and on all, and whether the files are equal. Leaves work/kept."""
    rows = []
    for device in dict.fromkeys(devices.split(",")):
        pipeline.quantize("demo", work / "warm", bits=4, group=128, device=device, fresh=True)  # contexts, libraries
    for method in ("rtn", "lsq"):
        outs = {}
        for name in (devices.split(",")[0], devices):
            outs[name] = work / f"{method}-{len(outs)}"
            done = pipeline.quantize(model, outs[name], bits=4, group=128, method=method, device=name)
            row = {"what": "quantize", "method": method, "devices": name, "GB": source_bytes / 1e9, "seconds": done["seconds"],
                   "peak_rss_GB": done["peak_rss_bytes"] / 1e9, "bpw": done["quantized_bpw"]}  # fmt: skip
            rows.append(row)
            print(json.dumps(row), flush=True)
        one, many = outs.values()
        names = sorted(p.name for p in one.iterdir() if p.name != "lowq.log")
        same = filecmp.cmpfiles(one, many, names, shallow=False)[0] == names
        rows.append({"what": "files", "method": method, "equal": same, "files": len(names)})
        print(json.dumps(rows[-1]), flush=True)
        shutil.rmtree(one)
        kept = work / "kept"  # the last is used again
        shutil.rmtree(kept, ignore_errors=True)
        many.rename(kept)
    return rows


def answer(folder: Path, dtype: str) -> dict[str, Any]:
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


def generate_rows(folder: Path, name: str, processes: int, work: Path, dtype: str, env: dict[str, str]) -> list[dict[str, Any]]:
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
    rows: list[dict[str, Any]] = [{"what": "generate", "model": name, "processes": n, **f} for n, f in found.items()]
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


def main() -> None:
    """Make, quantize, generate, write."""
    if sys.argv[1:2] == ["--worker"]:
        return worker(*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="folder that holds `base`")
    parser.add_argument("--work", type=Path, required=True, help="an empty folder in memory, for 1.5 times the model")
    parser.add_argument("--devices", default="cuda:0,cuda:1")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    on_cpu = args.devices.startswith("cpu")
    processes, first = len(args.devices.split(",")), torch.device(args.devices.split(",")[0])
    dtype = "float32" if on_cpu else "float16"
    env = dict(os.environ) | ({"CUDA_VISIBLE_DEVICES": ""} if on_cpu else {})
    rows: list[dict[str, Any]] = []
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

    rows += quantize_rows(args.work / "big", source_bytes, args.devices, args.work)
    save()
    lowq.quantize(args.models / "base", out=args.work / "base-4", bits=4, group=64, device=str(first))
    rows += generate_rows(args.work / "base-4", "base, 4-bit g64", processes, args.work, dtype, env)
    save()
    rows += generate_rows(args.work / "kept", "32B shape, random, 4-bit g128", processes, args.work, dtype, env)
    save()


if __name__ == "__main__":
    main()
