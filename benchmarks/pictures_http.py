"""Measure servers over HTTP under users who send pictures: `lowq serve` and `vllm serve` on an export.

    python benchmarks/pictures_http.py --work /dev/shm/x [--servers lowq,export] [--layers 36] [--users 1,16]

A whole Qwen3-VL of 8B's shape with random weights, 4 bits g128 by lowq, its tower in 16 bits. Each picture is another
JPEG of 1,024 x 1,024 as a data URL in `/v1/chat/completions`, with a line of text; an answer has 100 tokens. Rows as of
serve_http.py: the first token counts from the moment in which the request is sent. results/<gpu>/pictures_http.json.
"""

import argparse
import asyncio
import base64
import itertools
import json
import sys
import time
import traceback
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from pages import results_of
from pictures import NEW, PROCESSOR, SMALL_TEXT, SMALL_TOWER, TEXT, TOWER, photo
from serve_http import LOWQ, Row, Server, Told, fill_tokenizer, free_port, stream
from serve_load import row_of
from tokenizers import AddedToken
from transformers import AutoConfig, AutoModelForImageTextToText

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "families"))
import sighted

import lowq

ANSWERS = {1: 12, 16: 96}  # answers that are counted, of so many users
QUESTION = "What is in this picture?"
VIDEO = "<|video_pad|>"
LONGEST = 4096  # tokens of a request that vLLM takes: 1,024 rows, a line of text, 100 new tokens


def write(folder: Path, layers: int, device: str) -> None:
    """A random model of the shape, as its publisher would write it."""
    small = device == "cpu"
    text, tower = TEXT | (SMALL_TEXT if small else {}), TOWER | (SMALL_TOWER if small else {})
    tokens = sighted.tokenizer("qwen3_vl")
    tokens.add_special_tokens([AddedToken(VIDEO, special=True)])
    row, begin, end = (tokens.token_to_id(t) for t in sighted.QWEN)
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    text |= {"num_hidden_layers": layers, "rope_parameters": rope, "tie_word_embeddings": False}
    ids = {"image_token_id": row, "vision_start_token_id": begin, "vision_end_token_id": end}
    ids |= {"video_token_id": tokens.token_to_id(VIDEO)}
    config = AutoConfig.for_model("qwen3_vl", text_config=text, vision_config=tower, **ids)
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    written = json.loads(tokens.to_str())
    written["model"]["vocab"] |= {t["content"]: t["id"] for t in written["added_tokens"]}
    (folder / "tokenizer.json").write_text(json.dumps(written))
    fill_tokenizer(folder, text["vocab_size"])
    facts = {"tokenizer_class": "Qwen2TokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    place = "".join((sighted.QWEN[1], sighted.QWEN[0], sighted.QWEN[2]))
    (folder / "chat_template.jinja").write_text(sighted.TEMPLATE.replace("PLACE", place))
    sizes = {"size": {"shortest_edge": 65536, "longest_edge": 1 << 21}}
    processor = {**PROCESSOR, **sizes, "processor_class": "Qwen3VLProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    video = {**processor, "video_processor_type": "Qwen3VLVideoProcessor"}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video))


def start(name: str, args: argparse.Namespace, folder: Path) -> Server:
    """Start `lowq serve`, or vLLM as `lowq serve --engine vllm` would."""
    port, env = free_port(), {}
    if name == "lowq":
        line = [
            *LOWQ,
            str(folder),
            "--port",
            str(port),
            "--device",
            args.device,
            "--cache-tokens",
            str(32 * LONGEST),
            "--name",
            "m",
        ]
    else:
        from lowq_cli.interop.serving import command

        extra = ["--max-model-len", str(LONGEST), "--max-num-seqs", "64", "--kv-cache-memory-bytes", str(24 << 30)]
        extra += ["--gpu-memory-utilization", "0.05", "--served-model-name=m", "--limit-mm-per-prompt", '{"video": 0}']
        line = command(str(folder), 1, port, tuple(extra), native=False)
        line = [sys.executable, "-m", "vllm.entrypoints.cli.main", *line[1:]]
        env = {"VLLM_USE_DEEP_GEMM": "0"}
    return Server(name, line, port, args.work / f"server-{name}.log", env)


async def load(port: int, users: int, count: int, numbers: Any) -> Row:
    """The closed loop of users who send pictures, until `count` are answered."""
    urls = ["data:image/jpeg;base64," + base64.b64encode(photo(next(numbers))).decode() for _ in range(count + users)]
    done: list[Told] = []
    every: list[Told] = []
    began, enough = time.perf_counter(), asyncio.Event()

    async def user() -> None:
        while urls:
            parts = [{"type": "image_url", "image_url": {"url": urls.pop()}}, {"type": "text", "text": QUESTION}]
            every.append(answered := Told(time.perf_counter()))
            body = {"messages": [{"role": "user", "content": parts}]}
            await stream(port, "/v1/chat/completions", body, len(every), NEW, answered)
            done.append(answered)
            if len(done) >= count:
                enough.set()

    tasks = [asyncio.create_task(user()) for _ in range(users)]
    waiting = asyncio.create_task(enough.wait())
    await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
    seconds, made = time.perf_counter() - began, sum(n for a in every for _, n in a.times)
    for task in (waiting, *tasks):
        task.cancel()
    ends = await asyncio.gather(waiting, *tasks, return_exceptions=True)
    await asyncio.sleep(0.5)  # until the server has put away what was left
    for end in ends:
        if isinstance(end, Exception):
            raise end
    return row_of(users, count, seconds, made, done)


async def measure(server: Server, args: argparse.Namespace, row: Row) -> None:
    """All numbers of users of one server."""
    await server.ready(args.patience)
    row["ready_s"] = server.ready_s
    numbers = itertools.count()
    for users in args.users:  # compile kernels and record passes of these numbers
        await load(server.port, users, 2 * users, numbers)
    for users in args.users:
        row[f"users_{users}"] = await load(server.port, users, ANSWERS.get(users, 6 * users), numbers)
        print(server.name, json.dumps(row[f"users_{users}"]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a folder for checkpoints and the servers' logs")
    parser.add_argument("--servers", default="lowq,export")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--users", type=lambda s: [int(n) for n in s.split(",")], default=list(ANSWERS))
    parser.add_argument("--patience", type=float, default=200.0, help="seconds that a server may take to start")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    out = args.out or results_of(name) / "pictures_http.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = args.work / "vl-4"
    if not folder.exists():
        write(args.work / "vl", args.layers, args.device)
        lowq.quantize(
            str(args.work / "vl"), out=str(folder), bits=4, group=128, zero="none", lm_head="keep", device=args.device
        )
    rows: Row = {"device": name, "layers": args.layers, "servers": {}}
    rows |= {p: version(p) for p in ("lowq", "torch", "transformers")}
    for each in args.servers.split(","):
        row: Row = {"date": datetime.now(UTC).isoformat("T", "seconds")}
        rows["servers"][each] = row
        server = start(each, args, folder)
        try:
            asyncio.run(measure(server, args, row))
        except Exception:
            row["failed"] = traceback.format_exc()
            print(each, row["failed"], flush=True)
        finally:
            server.stop()
        out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
