"""Memory and time of `lowq quantize` on random Llama-3.2-1B-shaped checkpoints: neither may grow with the model.

    python benchmarks/quantize_memory.py                 # 16 and 32 layers, 4 bits: benchmarks/results/cpu/quantize_memory.json
    python benchmarks/quantize_memory.py --hidden 512 --intermediate 2048 --vocab 8192 --runs 2:rtn --out -    # a small one

Each run is a fresh process; `above_import` is its peak resident memory less what it had after importing the pipeline.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

RESULT = Path(__file__).parent / "results" / "cpu" / "quantize_memory.json"
ROWS = 1 << 22  # weights generated at a time


def llama_config(layers: int, hidden: int, intermediate: int, vocab: int) -> dict:
    """config.json of a Llama with tied embeddings and heads of 64, as Llama-3.2-1B has them."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "tie_word_embeddings": True,
        "hidden_size": hidden, "intermediate_size": intermediate, "vocab_size": vocab, "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64, "num_key_value_heads": max(1, hidden // 256), "head_dim": 64,
        "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip


def llama_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor."""
    H, inter, kv = config["hidden_size"], config["intermediate_size"], 64 * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], H), "model.norm.weight": (H,)}
    for i in range(config["num_hidden_layers"]):
        for name, shape in {
            "self_attn.q_proj": (H, H), "self_attn.k_proj": (kv, H), "self_attn.v_proj": (kv, H), "self_attn.o_proj": (H, H),
            "mlp.gate_proj": (inter, H), "mlp.up_proj": (inter, H), "mlp.down_proj": (H, inter),
            "input_layernorm": (H,), "post_attention_layernorm": (H,),
        }.items():  # fmt: skip
            shapes[f"model.layers.{i}.{name}.weight"] = shape
    return shapes


def write_model(folder: Path, config: dict, shards: int) -> int:
    """A random bf16 model in `shards` files, written as a stream. Its bytes."""
    import torch

    from lowq_cli.files.safetensors_io import TensorHeader, build_header

    torch.manual_seed(0)
    headers = [(n, TensorHeader(s, "BF16")) for n, s in llama_shapes(config).items()]
    total, where = sum(h.nbytes for _, h in headers), {}
    groups: list[list[tuple[str, TensorHeader]]] = [[] for _ in range(shards)]
    done = 0
    for item in headers:
        groups[min(shards - 1, done * shards // total)].append(item)
        done += item[1].nbytes
    for i, group in enumerate(groups, 1):
        name = f"model-{i:05d}-of-{shards:05d}.safetensors"
        first, _ = build_header(group)
        with open(folder / name, "wb") as f:
            f.write(first)
            for tensor, h in group:
                where[tensor] = name
                for at in range(0, h.numel, ROWS):
                    w = torch.empty(min(ROWS, h.numel - at), dtype=torch.bfloat16).normal_(0, 0.02)
                    f.write((w + (len(h.shape) == 1)).view(torch.uint8).numpy())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}))
    (folder / "config.json").write_text(json.dumps(config))
    return total


def status(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def measure(model: Path, out: Path, options: dict) -> dict:
    """One run in this process: seconds and memory."""
    from lowq_cli.run import pipeline

    baseline = status("VmRSS")
    start, cpu = time.monotonic(), time.process_time()
    recipe = pipeline.make_recipe(**options)
    with pipeline.prepare(model, recipe, out, device="cpu") as prepared:
        for _ in prepared.run():
            pass
    seconds, cpu = time.monotonic() - start, time.process_time() - cpu
    peak = status("VmHWM")
    source = prepared.plan.source_bytes
    return {
        "source_bytes": source,
        "bytes": prepared.plan.nbytes,
        "bpw": round(prepared.plan.bpw, 4),
        "seconds": round(seconds, 2),
        "estimated_seconds": round(prepared.budget.seconds or 0, 2),
        "seconds_per_gb": round(seconds / source * 1e9, 2),
        "cpu_seconds": round(cpu, 2),  # of all threads: what load on the machine changes least
        "import_bytes": baseline,
        "peak_bytes": peak,
        "above_import_bytes": peak - baseline,
        "estimated_peak_bytes": prepared.budget.peak_bytes,
    }


def in_a_process(model: Path, out: Path, options: dict) -> dict:
    """`measure` in a fresh process."""
    command = [sys.executable, __file__, "--measure", str(model), str(out), json.dumps(options)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def main() -> None:
    """Write the models, measure, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default="16:rtn,16:lsq,16:hqq,32:rtn", help="LAYERS:METHOD,...")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--lm-head", type=int, help="quantize the tied head too: the largest matrix, in slabs")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--shards", type=int, default=3)
    parser.add_argument("--out", default=str(RESULT), help="JSON file, or - for stdout")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        sys.stdout.write(json.dumps(measure(Path(args.measure[0]), Path(args.measure[1]), json.loads(args.measure[2]))))
        return
    rows = []
    runs = [(int(layers), method) for layers, _, method in (r.partition(":") for r in args.runs.split(","))]
    for layers in dict.fromkeys(layers for layers, _ in runs):
        with tempfile.TemporaryDirectory(prefix="lowq-memory-") as scratch:
            model = Path(scratch) / "model"
            model.mkdir()
            write_model(model, llama_config(layers, args.hidden, args.intermediate, args.vocab), args.shards)
            for method in [m for n, m in runs if n == layers]:
                options = {"bits": args.bits, "method": method, "lm_head": args.lm_head}
                load = os.getloadavg()[0]
                row = in_a_process(model, Path(scratch) / method, options)
                rows.append({"layers": layers, "method": method, "lm_head": args.lm_head or "keep", "load_before": load, **row})
                sys.stderr.write(f"{rows[-1]}\n")
                save(args, rows)


def save(args: argparse.Namespace, rows: list[dict]) -> None:
    """Write what is measured so far: a run of an hour may be cut off."""
    import torch

    result = {
        "date": datetime.date.today().isoformat(),
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
        },
        "versions": {"lowq": version("lowq"), "torch": torch.__version__, "python": platform.python_version()},
        "shape": {"hidden": args.hidden, "intermediate": args.intermediate, "vocab": args.vocab, "shards": args.shards},
        "bits": args.bits,
        "rows": rows,
    }
    text = json.dumps(result, indent=1) + "\n"
    if args.out == "-":
        if len(rows) == len(args.runs.split(",")):
            sys.stdout.write(text)
    else:
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        Path(args.out).write_text(text)


if __name__ == "__main__":
    main()
