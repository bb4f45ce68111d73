"""Measure drafts of `lowq serve` beside those of `vllm serve`, over HTTP. <device>/draft_http.json, draft_http_eagle3.json.

    python benchmarks/draft_http.py --work /dev/shm/x --base FOLDER --texts FILE [--servers lowq,lowq-ngram,vllm,vllm-ngram]
    python benchmarks/draft_http.py --work /dev/shm/x --base FOLDER --texts FILE --head HEAD [--guesses 3]
        [--servers lowq,lowq-eagle3,vllm,vllm-eagle3]

Both servers need the same text that copies, which random weights do not write. So the model is a small trained one inside a
large one's shape (grown.py), and vLLM runs an export of the same checkpoint in 4 bits.

`--head`: an EAGLE-3 head that `lowq draft train` made for the small model, inside the large one's shape in the same way and in
16 bits; `lowq-eagle3-4bit` takes it in 4 bits, its output head in 8. Before the servers start, the guesses of both heads are
compared on the small model's texts (`same`), and with what the texts say (`right_small`, `right_large`). vLLM makes `--guesses`
each time; lowq as many as are worth the time, and n-grams where they promise more.

A closed loop of users, each with the same number of requests, no prompt twice, answers of NEW / 2 to
NEW tokens; texts that copy (edits, summaries, code) and free ones; with `copying-long` answers are LONG times as long, about as
long as what they copy. between_ms: of tokens that come in one event all but the
first have a gap of 0; event_ms: between events.
"""

import argparse
import asyncio
import json
import random
import re
import sys
import time
import traceback
import urllib.request
from collections.abc import Iterator
from itertools import islice, pairwise, product
from pathlib import Path
from typing import Any

import drafts
import torch
from draft_follow import parser_of, report_of
from draft_heads import greedy, guessed, right_of
from drafts import NEW, Row
from grown import GROUP, grown, grown_head
from serve_http import LOWQ, Server, Told, ask, free_port
from serve_load import Asked, percentiles, row_of
from transformers import AutoTokenizer
from vllm_speed import SHAPES

import lowq
from lowq_cli.engine.drafts import heads
from lowq_cli.engine.open_model import ready
from lowq_cli.engine.plan import plan_of

SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
CACHE_TOKENS = 49_152  # of each server: 64 texts of 768 tokens
REQUESTS = {1: 10, 16: 6, 64: 7}  # of each user, by users
BEFORE = {1: 10, 16: 6, 64: 3}  # requests of each user that are not counted: lowq tries drafts after 128 passes without any
VLLM_COUNTS = {
    "num_draft_tokens_total": "draft_tokens_total",
    "num_accepted_tokens_total": "draft_tokens_accepted_total",
    "num_drafts_total": "drafts_total",
}
COMPARED = 8  # texts on which the guesses of the small and the large head are compared
LOADS = ("copying", "copying-long", "free")
LONG = 4  # tokens of an answer of `copying-long`, in those of others


def server(name: str, args: argparse.Namespace, folder: Path, head: Path) -> Server:
    """Start `lowq serve` or `vllm serve`, with n-grams, a head or without drafts."""
    whose, _, draft = name.partition("-")
    by_head = {"eagle3": head, "eagle3-4bit": packed(head)}.get(draft)
    port, env = free_port(), {}
    if whose == "lowq":
        line = [*LOWQ, str(folder), "--port", str(port), "--device", args.device, "--cache-tokens", str(CACHE_TOKENS)]
        line += ["--name", "m", "--draft", str(by_head or draft or "none")]
    else:
        from lowq_cli.interop.serving import command

        c = SHAPES[args.shape]
        layers = c["num_hidden_layers"] + bool(by_head)  # the head has keys and values of its own
        cache = CACHE_TOKENS * 4 * layers * c["num_key_value_heads"] * c["head_dim"]
        extra = ["--max-model-len", "1024", "--max-num-seqs", "64", "--dtype", "float16", "--served-model-name=m"]
        extra += [
            "--kv-cache-memory-bytes",
            str(cache),
            "--gpu-memory-utilization",
            "0.05",
            "--attention-backend",
            "FLASH_ATTN",
        ]
        by = {"method": "eagle3", "model": str(head), "num_speculative_tokens": args.guesses} if by_head else SPECULATIVE
        extra += ["--speculative-config", json.dumps(by)] if draft else []
        line = command(str(folder), 1, port, tuple(extra), native=False)
        line = [sys.executable, "-m", "vllm.entrypoints.cli.main", *line[1:]]
        env = {"VLLM_USE_DEEP_GEMM": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    return Server(name, line, port, args.work / f"server-{name}.log", env)


async def loop(port: int, users: int, asked: list[Asked]) -> Row:
    """A row of what users saw until all requests were answered."""
    waiting, done = iter(asked), list[Told]()

    async def user() -> None:
        for one in waiting:
            done.append(told := Told(time.perf_counter()))
            await ask(port, one, told)

    began = time.perf_counter()
    await asyncio.gather(*(user() for _ in range(users)))
    row = row_of(users, len(done), time.perf_counter() - began, sum(one.new for one in asked), done)
    events = [b - a for told in done for (a, _), (b, _) in pairwise(told.times)]
    per_token = [(t.times[-1][0] - t.times[0][0]) / (one.new - 1) for t, one in zip(done, asked, strict=True)]
    return row | {"event_ms": percentiles(events), "token_ms": percentiles(per_token)}


def drafted(one: Server) -> dict[str, int]:
    """What /metrics counts: drafts that were checked, of these right ones, and in vLLM rounds of drafts (`drafts_total`)."""
    with urllib.request.urlopen(f"http://127.0.0.1:{one.port}/metrics", timeout=10) as answer:
        return counted(answer.read().decode())


def counted(metrics: str) -> dict[str, int]:
    """The counts of drafts in a server's metrics, under lowq's names."""
    found = re.findall(r"^(?:lowq|vllm:spec_decode)_(\w+_total)\S* (\S+)$", metrics, re.MULTILINE)
    counts = {VLLM_COUNTS.get(name, name): int(float(n)) for name, n in found}
    return {name: n for name, n in counts.items() if name.startswith("draft")}


def packed(head: Path) -> Path:
    """Where a head in 4 bits stands beside one in 16."""
    return head.with_name(f"{head.name}-4bit")


def write_head(args: argparse.Namespace, folder: Path, head: Path, prompts: list[list[int]]) -> dict[str, Any]:
    """Write the head that `args.servers` need, and compare its guesses with the small head's: a row."""
    if not head.exists():
        grown_head(args.head, head, SHAPES[args.shape], args.device)
    if "4bit" in args.servers and not packed(head).exists():
        lowq.quantize(head, out=packed(head), bits=4, lm_head=8, group=GROUP, method="rtn")
    return {"server": "guesses"} | agreement((args.base, args.head), (folder, head), prompts[:COMPARED], args.device)


def agreement(small: tuple[Path, Path], large: tuple[Path, Path], prompts: list[list[int]], device: str) -> dict[str, Any]:
    """Shares of places in greedy texts of the small model where guesses 1 .. j of both heads are the same, and right."""
    made, texts, first = list[torch.Tensor](), torch.empty(0), 0
    for model, head in (small, large):
        loaded, _ = ready(str(model), device)
        if not made:
            texts, first = greedy(loaded, prompts)
        made.append(guessed(plan_of(loaded), heads.load(str(head), loaded), texts)[:, first:])
        del loaded
    both = {"same": (made[0] == made[1]).cumprod(-1)}
    both |= {name: right_of(some, texts[:, first:]) for name, some in zip(("right_small", "right_large"), made, strict=True)}
    return {name: [round(share, 3) for share in x.float().mean((0, 1)).tolist()] for name, x in both.items()}


def paragraphs(file: Path) -> str:
    """A file's text with an empty line between paragraphs; where it has none, each line is one."""
    text = file.read_text()
    return text if "\n\n" in text else text.replace("\n", "\n\n")


def loads(tokenizer: Any, text: str) -> dict[str, list[list[int]]]:
    """Prompts of each of LOADS in a drawn order, none twice."""
    drafts.EACH = 10_000  # all that the text has
    some = drafts.prompts(tokenizer, text)
    found = {"copying": [ids for kind in ("edit", "summary", "code") for ids in some[kind]], "free": some["free"]}
    for each in found.values():
        random.Random(0).shuffle(each)
    half = len(found["copying"]) // 2
    long = [ids for ids in found["copying"][half:] if len(ids) + LONG * NEW < 1000]  # the small model's context is 1,024
    return found | {"copying": found["copying"][:half], "copying-long": long}


def requests(left: Iterator[list[int]], count: int, seed: int, longest: int = NEW) -> list[Asked]:
    """The next prompts, with drawn lengths of answers. Raises ValueError where there are fewer."""
    rng = random.Random(seed)
    found = [Asked(i, ids, rng.randint(longest // 2, longest)) for i, ids in enumerate(islice(left, count))]
    if len(found) < count:
        raise ValueError("the texts have too few prompts: give more of them")
    return found


async def measure(servers: list[Server], args: argparse.Namespace, prompts: dict[str, list[list[int]]], report: Any) -> None:
    """Measure each load of each server in turn, `--turns` times, each after one that is not counted, with other prompts."""
    found = await asyncio.gather(*(one.ready(args.patience) for one in servers), return_exceptions=True)
    for one, failed in zip(servers, found, strict=True):
        print(one.name, "ready after", one.ready_s, flush=True)
        if failed:
            report({"server": one.name, "failed": str(failed)})
    left = {one.name: {load: iter(some) for load, some in prompts.items()} for one in servers if one.ready_s}
    for turn, users, load, one in product(range(args.turns), args.users, args.loads.split(","), servers):
        if one.name in left:
            try:
                prompt, longest = left[one.name][load], NEW * (LONG if load.endswith("long") else 1)
                await loop(one.port, users, requests(prompt, BEFORE[users] * users, 1))
                before = drafted(one)
                row = await loop(one.port, users, requests(prompt, REQUESTS[users] * users, 2, longest))
                counts = {name: n - before[name] for name, n in drafted(one).items()}
                report({"server": one.name, "load": load, "turn": turn, "ready_s": one.ready_s} | row | counts)
            except Exception:
                del left[one.name]
                report({"server": one.name, "failed": traceback.format_exc()[-3000:]})


def grown_parser(doc: str | None) -> argparse.ArgumentParser:
    """The flags of a script that writes the small model inside a large one's shape."""
    parser = parser_of(doc)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--shape", default="8b", choices=SHAPES)
    return parser


def main() -> None:
    """Write the model, start the servers, measure, stop them."""
    parser = grown_parser(__doc__)
    parser.add_argument("--servers", help="default: lowq and vllm, each without drafts and with n-grams or the head")
    parser.add_argument("--users", type=lambda s: [int(n) for n in s.split(",")], default=[16, 64, 1])
    parser.add_argument("--loads", default="copying,free", help="some of " + ", ".join(LOADS))
    parser.add_argument("--head", type=Path, help="of the small model, as `lowq draft train` writes it")
    parser.add_argument("--guesses", type=int, default=3, help="of vLLM's drafts by a head")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--patience", type=float, default=150.0)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    draft = "eagle3" if args.head else "ngram"
    args.servers = args.servers or f"lowq,lowq-{draft},vllm,vllm-{draft}"
    report = report_of(args, "draft_http_eagle3.json" if args.head else "draft_http.json")
    folder, head, servers = args.work / f"grown-{args.shape}", args.work / f"head-{args.shape}", list[Server]()
    began = time.perf_counter()
    if not folder.exists():
        grown(args.base, folder, SHAPES[args.shape], args.device, 4)
    print("the model is written after", time.perf_counter() - began, flush=True)
    prompts = loads(AutoTokenizer.from_pretrained(args.base), "\n\n".join(map(paragraphs, args.texts)))
    print({load: len(some) for load, some in prompts.items()}, flush=True)
    if args.head:
        report(write_head(args, folder, head, prompts["free"]))
        torch.cuda.empty_cache()
    try:
        for name in args.servers.split(","):
            servers.append(server(name, args, folder, head))
        asyncio.run(measure(servers, args, prompts, report))
    finally:
        for one in servers:
            one.stop()


if __name__ == "__main__":
    main()
