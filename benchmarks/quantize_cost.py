"""Measure memory and time of `lowq quantize` on random checkpoints of Llama's shapes, each run in a fresh process.

    python benchmarks/quantize_cost.py memory        # 16 and 32 layers, 4 bits: benchmarks/results/cpu/quantize_memory.json
    python benchmarks/quantize_cost.py memory --hidden 512 --intermediate 2048 --vocab 8192 --runs 2:rtn --out -
    python benchmarks/quantize_cost.py calibrated [--shape 8B] [--layers 4] [--method gptq,awq] [--device cuda] --out FILE.json
    python benchmarks/quantize_cost.py estimates MODEL ... [--runs "lsq:bits=4;distill:bpw=3.5"] [--device cuda] --out FILE.json

memory: neither memory nor time per GB may grow with the model; `above_import` is the peak resident memory less what the process
had after importing the pipeline. On a CPU.
calibrated: for docs/accuracy.md, results/accuracy/calibrate_time_*.json (rows are added). Layers are alike, one is in memory at
a time, so seconds per layer and per billion parameters hold for any number of them. The embedding is left as it is; the
weights' writing is in `seconds` and `cpu_seconds`, not in the layers' own. Few layers follow the rules for as many weights as
all layers of the shape have. On a CPU that others use too, `cpu_seconds` (of all
threads) is what to go by.
estimates: the seconds that the plan of each run expects, and those it takes (results/<device>/quantize_estimates.json).
"""

import argparse
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pages.accuracy import LAYERS

import lowq_cli
from lowq_cli import quantizers

Row = dict[str, Any]
RESULT = Path(__file__).parent / "results" / "cpu" / "quantize_memory.json"
ROWS = 1 << 22  # weights generated at a time
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
SHAPES = {"1B": (2048, 8192), "8B": (4096, 14336)}  # hidden and intermediate size of Llama 3's
RUNS = "lsq:bits=4;gptq:bits=4;gptq:bits=2;awq:bits=4;yaqa:bits=4;learn:bits=3;distill:bits=4;distill:bits=2"
VOCAB = 8192  # the tokenizer's; nothing here depends on it


def llama_config(layers: int, hidden: int, intermediate: int, vocab: int) -> Row:
    """config.json of a Llama with tied embeddings and heads of 64, as Llama-3.2-1B has them."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "tie_word_embeddings": True,
        "hidden_size": hidden, "intermediate_size": intermediate, "vocab_size": vocab, "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64, "num_key_value_heads": max(1, hidden // 256), "head_dim": 64,
        "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip


def llama_shapes(config: Row) -> dict[str, tuple[int, ...]]:
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


def write_model(folder: Path, config: Row, shards: int, headers_only: bool = False) -> int:
    """A random bf16 model in `shards` files, written as a stream. Its bytes. headers_only: holes instead of weights."""
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
            if headers_only:
                f.truncate(len(first) + sum(h.nbytes for _, h in group))
            for tensor, h in group:
                where[tensor] = name
                for at in () if headers_only else range(0, h.numel, ROWS):
                    w = torch.empty(min(ROWS, h.numel - at), dtype=torch.bfloat16).normal_(0, 0.02)
                    f.write((w + (len(h.shape) == 1)).view(torch.uint8).numpy().data)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}))
    (folder / "config.json").write_text(json.dumps(config))
    return total


def status(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def measure_memory(model: Path, out: Path, device: str, options: Row) -> Row:
    """One run: seconds and memory."""
    from lowq_cli.plan.recipe import make_recipe
    from lowq_cli.run import pipeline

    baseline = status("VmRSS")
    start, cpu = time.monotonic(), time.process_time()
    recipe = make_recipe(**options)
    with pipeline.prepare(model, recipe, out, device=device) as prepared:
        for _ in pipeline.execute(prepared):
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


def counted_bytes(shape: str, options: Row) -> int:
    """The bytes of device memory that the plan of a shape with all of its layers counts."""
    from lowq_cli.calibrate.requirements import working_bytes
    from lowq_cli.files.source import open_source
    from lowq_cli.plan.planner import make_plan
    from lowq_cli.plan.recipe import make_recipe

    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), llama_config(LAYERS[shape], *SHAPES[shape], VOCAB), 1, headers_only=True)
        with open_source(folder) as source:
            return working_bytes(make_plan(source, make_recipe(**options)))


def measure_calibrated(model: Path, out: Path, device: str, options: Row) -> Row:
    """One run: seconds of each layer, memory of host and GPU."""
    import torch

    from lowq_cli.calibrate import requirements
    from lowq_cli.plan.recipe import make_recipe
    from lowq_cli.run import pipeline
    from lowq_cli.run.events import Event, Finished, LayerDone, TensorDone

    requirements.MOST_CODES = int(requirements.MOST_CODES * options.pop("share", 1.0))
    torch.backends.cuda.matmul.allow_tf32 = False
    baseline, began = status("VmRSS"), time.process_time()
    events: list[Event] = []
    first = last = curved = 0.0  # when the last layer was done, when all were done together, and the curvature's seconds
    with pipeline.prepare(model, make_recipe(**options), out, device=device) as prepared:
        start = time.monotonic()
        for event in pipeline.execute(prepared):
            if isinstance(event, requirements.CurvatureDone):
                curved = time.monotonic() - start
            elif isinstance(event, LayerDone):
                first = time.monotonic()
            elif isinstance(event, TensorDone) and not last:
                last = time.monotonic()
            events.append(event)
    busy, finished = time.process_time() - began, events[-1]
    assert isinstance(finished, Finished)
    layers = [e.seconds for e in events if isinstance(e, LayerDone)]
    together = last - first if options["method"] == "distill" else 0.0
    together += curved
    params = sum(i.params for i in prepared.plan.items if i.scheme)
    cuda = device == "cuda"
    return options | {
        "layers": len(layers),
        "params": params,
        "seconds": round(finished.result.seconds, 1),
        "cpu_seconds": round(busy, 1),
        "layer_seconds": [round(s, 2) for s in layers],
        "together_seconds": round(together, 2),  # with the curvature before
        "seconds_per_billion": round((sum(layers) + together) / params * 1e9, 1),
        "peak_rss_bytes": status("VmHWM") - baseline,
        "peak_gpu_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "estimated_seconds": round(prepared.budget.seconds or 0, 1),
        "counted_bytes": requirements.working_bytes(prepared.plan),
        "device": torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads",
    }


MEASURES = {"memory": measure_memory, "calibrated": measure_calibrated}


def in_a_process(name: str, model: Path, device: str, options: Row) -> Row:
    """One of MEASURES in a fresh process."""
    command = [sys.executable, __file__, name, "--device", device, "--measure", str(model), json.dumps(options)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(done.splitlines()[-1])


def memory(args: argparse.Namespace) -> None:
    """Each depth's model, each method on it. The file is written after each run: an hour's may be cut off."""
    import torch

    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    versions = {"lowq": version("lowq"), "torch": torch.__version__, "python": platform.python_version()}
    shape = {"hidden": args.hidden, "intermediate": args.intermediate, "vocab": args.vocab}
    rows: list[Row] = []
    report: Row = {"date": datetime.date.today().isoformat(), "machine": machine, "versions": versions}
    report |= {"shape": shape | {"shards": args.shards}, "bits": args.bits, "rows": rows}
    runs = [(int(layers), method) for layers, _, method in (r.partition(":") for r in args.runs.split(","))]
    for layers in dict.fromkeys(layers for layers, _ in runs):
        with tempfile.TemporaryDirectory(prefix="lowq-memory-") as model:
            write_model(Path(model), llama_config(layers, **shape), args.shards)
            for method in [m for n, m in runs if n == layers]:
                options = {"bits": args.bits, "method": method, "lm_head": args.lm_head}
                about = {"layers": layers, "method": method, "lm_head": args.lm_head or "keep"}
                about["load_before"] = os.getloadavg()[0]
                rows.append(about | in_a_process("memory", Path(model), args.device, options))
                print(rows[-1], file=sys.stderr)
                if args.out != "-":
                    save(Path(args.out), report)
    if args.out == "-":
        print(json.dumps(report))


def calibrated(args: argparse.Namespace) -> None:
    """Each method on one model, with the demo's tokenizer. The file is written after each: an hour's may be cut off."""
    versions = {p: version(p) for p in ("lowq", "torch", "transformers")}
    report: Row = {"date": datetime.date.today().isoformat(), "versions": versions, "rows": []}
    if args.out and Path(args.out).is_file():
        report["rows"] = json.loads(Path(args.out).read_text())["rows"]
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), llama_config(args.layers, *SHAPES[args.shape], VOCAB), 1)
        for name in TOKENIZER:
            shutil.copy(Path(lowq_cli.__file__).parent / "demo" / name, folder)
        for method in args.method.split(","):
            options = {"bits": args.bits, "group": args.group, "method": method, "calib": "bundled"}
            options |= {"calib_tokens": args.calib_tokens, "format": args.format}
            about = {"shape": args.shape, "counted_bytes_all": counted_bytes(args.shape, options)}
            options["share"] = min(1.0, args.layers / LAYERS[args.shape])
            report["rows"].append(about | in_a_process("calibrated", Path(folder), args.device, options))
            print(json.dumps(report["rows"][-1]), flush=True)
            if args.out:
                save(Path(args.out), report)


def estimates(args: argparse.Namespace) -> None:
    """Each run of each model. The file is written after each: an hour's may be cut off."""
    versions = {p: version(p) for p in ("lowq", "torch", "transformers")}
    report: Row = {"date": datetime.date.today().isoformat(), "versions": versions, "rows": []}
    if args.out and Path(args.out).is_file():
        report["rows"] = json.loads(Path(args.out).read_text())["rows"]
    for model in map(Path, args.models):
        for run in args.runs.split(";"):
            method, _, more = run.partition(":")
            options: Row = {"method": method}
            if quantizers.needs_text(method):
                options |= {"calib": args.calib, "calib_tokens": args.calib_tokens}
            given = (o.partition("=") for o in more.split(",") if o)
            options |= {k: json.loads(v) if v[0].isdigit() else v for k, _, v in given}
            about = {"model": model.name, "device": args.device, "load_before": round(os.getloadavg()[0], 1)} | options
            found = in_a_process("memory", model, args.device, options)
            times = {k: found[k] for k in ("seconds", "estimated_seconds", "cpu_seconds")}
            report["rows"].append(about | times | {"over_estimate": round(found["seconds"] / found["estimated_seconds"], 2)})
            print(json.dumps(report["rows"][-1]), flush=True)
            if args.out:
                save(Path(args.out), report)


def save(path: Path, report: Row) -> None:
    """Write a result file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    """Parse, and do what the first word says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    subjects = parser.add_subparsers(dest="subject", required=True)
    one, two, three = (subjects.add_parser(name) for name in ("memory", "calibrated", "estimates"))
    for made, run in ((one, memory), (two, calibrated), (three, estimates)):
        made.set_defaults(run=run)
        made.add_argument("--bits", type=int, default=4)
        made.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    one.add_argument("--runs", default="16:rtn,16:lsq,16:hqq,32:rtn", help="LAYERS:METHOD,...")
    one.add_argument("--lm-head", type=int, help="quantize the tied head too: the largest matrix, in slabs")
    one.add_argument("--hidden", type=int, default=2048)
    one.add_argument("--intermediate", type=int, default=8192)
    one.add_argument("--vocab", type=int, default=128256)
    one.add_argument("--shards", type=int, default=3)
    one.add_argument("--device", default="cpu")
    one.add_argument("--out", default=str(RESULT), help="JSON file, or - for stdout")
    two.add_argument("--shape", choices=SHAPES, default="1B")
    two.add_argument("--layers", type=int, default=4)
    two.add_argument("--method", default="gptq,awq")
    two.add_argument("--group", type=int, default=64)
    two.add_argument("--format", default="lowq")
    two.add_argument("--calib-tokens", type=int, default=65536)
    two.add_argument("--device", default="cuda")
    two.add_argument("--out")
    three.add_argument("models", nargs="*")
    three.add_argument("--runs", default=RUNS, help="METHOD:OPTION=VALUE,...;...")
    three.add_argument("--calib", default="bundled")
    three.add_argument("--calib-tokens", type=int, default=16384)
    three.add_argument("--device", default="cpu")
    three.add_argument("--out")
    args = parser.parse_args()
    if not args.measure:
        return args.run(args)
    with tempfile.TemporaryDirectory() as out:
        print(
            json.dumps(MEASURES[args.subject](Path(args.measure[0]), Path(out) / "q", args.device, json.loads(args.measure[1])))
        )
    return None


if __name__ == "__main__":
    main()
