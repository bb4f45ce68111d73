"""Time prompts on this CPU with and without `--act int8`: benchmarks/results/cpu/act_speed.json.

    python benchmarks/act_cpu.py CHECKPOINT --text FILE [--prompts N] [--rounds N] [--out FILE]
    python benchmarks/act_cpu.py --make FOLDER --tokenizer CHECKPOINT      writes a wide model, to be quantized

One thread; modes take turns within a round. A row: {model, seconds of CPU time by task and mode, the least of all rounds, and
"ratio", the median of the rounds' own}. prompts: as `lowq generate --prompts`, so many texts of 900 tokens, 8 new tokens each.
eval: as `lowq eval`, windows of 512 of the same tokens. Rows of other models stay.
"""

import argparse
import json
import os
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import torch
from cpu_llamacpp import cpu_name
from e2e_decode import fill
from hybrids_cpu import Form, skeleton

from lowq_cli.calibrate.texts import tokenize
from lowq_cli.engine.open_model import ready
from lowq_cli.evaluate.perplexity import evaluate
from lowq_cli.hf.activations import set_activations
from lowq_cli.serving.offline import answers
from lowq_packers.scheme import Act

OUT = Path(__file__).parent / "results" / "cpu" / "act_speed.json"
LENGTH, NEW = 900, 8  # tokens of a prompt and of its answer
MODES: tuple[Act, ...] = ("none", "int8")
SETTINGS: dict[str, Any] = {"max_new_tokens": NEW, "stop": (), "kv": "16", "seed": 0}


def make(folder: Path, tokenizer: Path) -> None:
    """Write a model of Llama 3.2 1B's width, four of its layers, with a small vocabulary."""
    model = fill(skeleton("llama", Form(2048, "4g64"), 8192), "cpu")
    model.save_pretrained(folder)
    for file in tokenizer.glob("tokenizer*"):
        shutil.copy(file, folder)


def seconds(model: Any, act: Act, task: Callable[[], object]) -> float:
    """CPU time of a task with this mode."""
    set_activations(model, act)
    began = process_time()
    task()
    return process_time() - began


def row(folder: Path, text: str, count: int, rounds: int) -> dict[str, Any]:
    """CPU seconds of both tasks in both modes."""
    model, tokenizer = ready(folder, "cpu")
    ids = tokenize(tokenizer, text)[: count * LENGTH]
    prompts = ids.view(count, LENGTH).tolist()
    tasks: dict[str, Callable[[], object]] = {
        "eval": lambda: evaluate(model, ids),
        "prompts": lambda: list(answers(model, tokenizer, prompts, SETTINGS)),
    }
    times: dict[str, list[dict[str, float]]] = {name: [] for name in tasks}
    for name, task in [pair for _ in range(rounds) for pair in tasks.items()]:
        times[name].append({act: seconds(model, act, task) for act in MODES})
        print(name, times[name][-1], flush=True)
    result: dict[str, Any] = {"model": folder.name, "texts": count, "rounds": rounds}
    for name, of in times.items():
        result[name] = {act: round(min(t[act] for t in of), 2) for act in MODES}
        result[name]["ratio"] = round(median(t["none"] / t["int8"] for t in of), 3)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", type=Path)
    parser.add_argument("--make", type=Path, metavar="FOLDER")
    parser.add_argument("--tokenizer", type=Path, metavar="CHECKPOINT")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.make:
        return make(args.make, args.tokenizer)
    new = row(args.checkpoint, args.text.read_text(), args.prompts, args.rounds)
    rows = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    facts: dict[str, Any] = {"date": datetime.now(UTC).date().isoformat(), "torch": torch.__version__, "processor": cpu_name()}
    facts |= {"cpu": torch.backends.cpu.get_cpu_capability(), "load": round(os.getloadavg()[0], 1)}
    rows = [r for r in rows if r["model"] != new["model"]] + [facts | new]
    args.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
