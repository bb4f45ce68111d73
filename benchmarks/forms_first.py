"""Time the first requests for an answer in a form, and what they cost others: benchmarks/results/<device>/forms_first.json.

    python benchmarks/forms_first.py --work FOLDER [--tree FOLDER] [--name NAME] [--loads N] [--out FILE]

A small Llama of random weights gets a tokenizer of 151,650 byte-level tokens, trained on the Python files of this environment.
One user gets a stream of tokens from `lowq serve` while another asks for four short answers, each with its own JSON schema;
`--loads` such servers one after the other. A row, of medians: seconds until each answer, the longest gap of the stream
meanwhile and in the second before, MB that belong to each process alone before and after. `--tree` is the checkout whose lowq
serves, `--name` that of the row, which replaces an earlier one of that name.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import sysconfig
import threading
import time
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from pages import RESULTS
from serve_http import free_port

END = "<|im_end|>"
TOKENS, LOGITS = 151_643, 151_936  # of Qwen 2 and 3, without and with its added tokens and padding
TEMPLATE = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
ASKED = 4


def make(folder: Path) -> None:
    """A model of random weights and its tokenizer."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoConfig, AutoModelForCausalLM

    tokens = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    tokens.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokens.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=TOKENS, min_frequency=1, initial_alphabet=alphabet, show_progress=False)
    files = sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py"))
    tokens.train_from_iterator((f.read_text(errors="replace") for f in files), trainer)
    tokens.add_special_tokens(["<|endoftext|>", "<|im_start|>", END])
    tokens.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    torch.manual_seed(0)
    width = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    ends = {"eos_token_id": tokens.token_to_id(END), "bos_token_id": None}
    config = AutoConfig.for_model("llama", vocab_size=LOGITS, **ends, **width)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    tokens.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def processes_of(pid: int) -> list[int]:
    """A process and all that it has started."""
    found = [pid]
    for one in found:
        for task in Path(f"/proc/{one}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def memory(pid: int) -> dict[str, int]:
    """MB that belong to each process alone, of those with a part in an answer."""
    names = {"server": pid}
    for one in processes_of(pid)[1:]:
        line = Path(f"/proc/{one}/cmdline").read_text()
        if "multiprocessing-fork" in line or "spawn_main" in line:
            names["engine" if "engine" not in names else "masks"] = one
    sizes = {name: Path(f"/proc/{one}/smaps_rollup").read_text() for name, one in names.items()}
    return {name: sum(map(int, re.findall(r"Private_\w+: +(\d+)", text))) // 1000 for name, text in sizes.items()}


def schema(i: int) -> dict[str, Any]:
    """A schema of short answers, another one for each i."""
    kinds = {"kind": {"enum": ["cat", "dog", f"n{i}"]}, "n": {"type": "integer", "minimum": 1, "maximum": 9}}
    return {"type": "object", "properties": kinds, "required": ["kind", "n"], "additionalProperties": False}


class Stream(threading.Thread):
    """One user's answer: the times at which parts of it came."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url, self.times, self.ends = url, list[float](), False

    def run(self) -> None:
        """Read the answer until it is enough."""
        body = {"prompt": "Once", "max_tokens": 1900, "ignore_eos": True, "stream": True, "temperature": 1, "seed": 1}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=600) as answer:
            for _ in answer.iter_raw():
                self.times.append(time.perf_counter())
                if self.ends:
                    return

    def gap(self, begin: float, end: float) -> float:
        """The longest time without a token that ended in this time."""
        return max(b - a for a, b in pairwise(self.times) if begin <= b <= end)


def load(folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    """What one server's first forms take."""
    port = free_port()
    line = [
        sys.executable,
        "-c",
        "from lowq_cli.start import run; run()",
        "serve",
        str(folder),
        "--port",
        str(port),
        "--device",
        "cpu",
    ]
    url, row = f"http://127.0.0.1:{port}", dict[str, Any]()
    with subprocess.Popen(line, env=environment, stderr=subprocess.DEVNULL, cwd=folder) as server:
        try:
            while True:
                try:
                    httpx.post(
                        f"{url}/v1/completions", json={"prompt": "Once", "max_tokens": 8}, timeout=600
                    ).raise_for_status()
                    break
                except httpx.TransportError:
                    time.sleep(0.1)
            row["mb_before"], stream = memory(server.pid), Stream(url)
            stream.start()
            while len(stream.times) < 20:
                time.sleep(0.1)
            row["seconds"], row["gaps"], row["gaps_before"] = [], [], []
            for i in range(ASKED):
                time.sleep(1)
                form = {"type": "json_schema", "json_schema": {"name": "pet", "schema": schema(i)}}
                body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 60, "seed": i, "response_format": form}
                began = time.perf_counter()
                answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600).raise_for_status().json()
                ended = time.perf_counter()
                json.loads(answer["choices"][0]["message"]["content"])
                time.sleep(0.5)
                row["seconds"].append(ended - began)
                row["gaps"].append(stream.gap(began, ended + 0.4))
                row["gaps_before"].append(stream.gap(began - 1, began))
            stream.ends = True
            row["mb_after"] = memory(server.pid)
        finally:
            server.kill()
    return row


def main() -> None:
    """A row for this tree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--tree", type=Path, help="another checkout of lowq")
    parser.add_argument("--name", default="now")
    parser.add_argument("--loads", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu" / "forms_first.json")
    args = parser.parse_args()
    folder = args.work / "model"
    if not (folder / "tokenizer_config.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        make(folder)
    environment = dict(os.environ) | ({"PYTHONPATH": str(args.tree)} if args.tree else {})
    loads = []
    for _ in range(args.loads):
        loads.append(load(folder, environment))
        print(loads[-1], flush=True)
    row: dict[str, Any] = {"tree": args.name, "loads": args.loads}
    for key in ("seconds", "gaps", "gaps_before"):
        row[key] = [round(median(each), 3) for each in zip(*(one[key] for one in loads), strict=True)]
    for key in ("mb_before", "mb_after"):
        row[key] = {name: round(median(one[key][name] for one in loads)) for name in loads[0][key]}
    about = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "tokens": TOKENS, "cpus": os.cpu_count()}
    rows = json.loads(args.out.read_text())["rows"] if args.out.is_file() else []
    rows = [r for r in rows if r["tree"] != args.name] + [row]
    args.out.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
