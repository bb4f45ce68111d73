"""Time and memory of calibrated quantization on some layers of a random Llama-3.2-1B-shaped model.

    python benchmarks/calibrate_time.py [--layers 4] [--method gptq,awq] [--calib-tokens 65536] [--device cuda] --out FILE.json

Layers are alike and one is in memory at a time, so seconds per layer and per billion parameters hold for any number of them.
The embedding is left as it is; the weights' writing is in `seconds` and `cpu_seconds`, not in the layers' own. On a CPU that
others use too, `cpu_seconds` (of all threads) is what to go by.
"""

import argparse
import datetime
import json
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from quantize_memory import llama_config, status, write_model

import lowq_cli

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
SHAPE = {"hidden": 2048, "intermediate": 8192, "vocab": 8192}  # the tokenizer's vocabulary; nothing here depends on it


def measure(model: Path, options: dict[str, Any], device: str) -> dict[str, Any]:
    """One run in this process."""
    import torch

    from lowq_cli.run import pipeline
    from lowq_cli.run.events import LayerDone

    torch.backends.cuda.matmul.allow_tf32 = False
    baseline, began = status("VmRSS"), time.process_time()
    with tempfile.TemporaryDirectory() as out:
        *events, finished = pipeline.run(model, pipeline.make_recipe(**options), Path(out) / "q", device=device)
    busy = time.process_time() - began
    layers = [e.seconds for e in events if isinstance(e, LayerDone)]
    params = sum(i.params for i in events[0].plan.items if i.scheme)
    cuda = device == "cuda"
    return options | {
        "layers": len(layers),
        "params": params,
        "seconds": round(finished.result.seconds, 1),
        "cpu_seconds": round(busy, 1),
        "layer_seconds": [round(s, 2) for s in layers],
        "seconds_per_billion": round(sum(layers) / params * 1e9, 1),
        "peak_rss_bytes": status("VmHWM") - baseline,
        "peak_gpu_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "device": torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads",
    }


def main() -> None:
    """Write the model, measure each method in a process of its own, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--method", type=lambda text: text.split(","), default=["gptq", "awq"])
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--calib-tokens", type=int, default=65536)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(Path(args.measure[0]), json.loads(args.measure[1]), args.device)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), llama_config(args.layers, **SHAPE), 1)
        for name in TOKENIZER:
            shutil.copy(Path(lowq_cli.__file__).parent / "demo" / name, folder)
        for method in args.method:
            options = {"bits": args.bits, "group": args.group, "method": method, "calib_tokens": args.calib_tokens}
            command = [sys.executable, __file__, "--device", args.device, "--measure", folder, json.dumps(options)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            rows.append(json.loads(done.splitlines()[-1]))
            print(json.dumps(rows[-1]), flush=True)
    if args.out:
        versions = {p: version(p) for p in ("lowq", "torch", "transformers")}
        report = {"date": datetime.date.today().isoformat(), "versions": versions, "shape": SHAPE, "rows": rows}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
