"""Measure n-grams of `lowq serve` beside those of `vllm serve`, over HTTP. <device>/draft_http.json.

    python benchmarks/draft_http.py --work /dev/shm/x --base FOLDER --texts FILE [--servers lowq,lowq-ngram,vllm,vllm-ngram]

Both servers need the same text that copies, which random weights do not write. So the model is a small trained one inside a
large one's shape: its weights in the first channels, heads and layers, all other products into the residual stream 0. It
writes the small model's texts, and a step reads as many bytes as one of the large shape. vLLM runs an export of the checkpoint.

A closed loop of users, each with the same number of requests, no prompt twice (as far as the texts go), answers of NEW / 2 to
NEW tokens; texts that copy (edits, summaries, code) and free ones. between_ms: of tokens that come in one event all but the
first have a gap of 0; event_ms: between events.
"""

import argparse
import asyncio
import json
import random
import sys
import time
import traceback
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import drafts
import torch
from draft_follow import report_of
from drafts import NEW, Row
from safetensors.torch import load_file, save_file
from serve_http import LOWQ, Server, Told, ask, free_port
from serve_load import Asked, percentiles, row_of
from transformers import AutoTokenizer
from vllm_speed import SHAPES, linears, make

from lowq_packers.bitstream import pack

GROUP = 128
SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
CACHE_TOKENS = 49_152  # of each server: 64 texts of 768 tokens
REQUESTS = {1: 10, 16: 6, 64: 4}  # of each user, by users


def grown(base: Path, folder: Path, shape: str, device: str) -> None:
    """Write a 4-bit checkpoint of a large shape, with the small model `base` (a Llama with tied embeddings) inside."""
    make(folder, shape, 4, device)
    small, c = json.loads((base / "config.json").read_text()), SHAPES[shape]
    w: dict[str, torch.Tensor] = {}
    for file in base.glob("*.safetensors"):
        w |= {name: t.float() for name, t in load_file(file).items()}
    H, less = small["hidden_size"], (small["hidden_size"] / c["hidden_size"]) ** 0.5
    rows, wider = places(small, c), (c["head_dim"] / small["head_dim"]) ** 0.5
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."
        tensors = load_file(folder / f"{at}safetensors")
        for leaf, (N, K) in linears(c).items():
            name = f"{at}{leaf}.weight"
            codes, scale = tensors[name], tensors[f"{name}_scale"]
            if leaf.endswith(("o_proj", "down_proj")):
                scale.zero_()  # nothing else may come into the residual stream
            if i >= small["num_hidden_layers"]:
                continue
            if "self_attn" in leaf and not leaf.endswith("o_proj"):
                scale.zero_()
            part = leaf.rpartition(".")[2]
            inner = torch.arange(w[name].shape[0 if part in ("gate_proj", "up_proj") else 1])
            own, held = {"o_proj": (torch.arange(H), rows["o_proj"]), "down_proj": (torch.arange(H), inner)}.get(
                part, (rows.get(part, inner), torch.arange(H))
            )
            whole = torch.zeros(len(own), K)
            whole[:, held] = w[name] * (wider if part == "q_proj" else 1)
            codes[own], scale[own] = packed(whole)
        for leaf in ("input_layernorm", "post_attention_layernorm") if i < small["num_hidden_layers"] else ():
            tensors[f"{at}{leaf}.weight"][:H] = less * w[f"{at}{leaf}.weight"]
        save_file(tensors, folder / f"{at}safetensors", metadata={"format": "pt"})
    dense = load_file(folder / "dense.safetensors")
    known = w["model.embed_tokens.weight"]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        dense[name].zero_()[: len(known), :H] = known
    dense["lm_head.weight"][len(known) :, :H] = known[small["bos_token_id"]]  # as likely as a token that no text has
    dense["model.norm.weight"][:H] = less * w["model.norm.weight"]
    save_file(dense, folder / "dense.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    theta = small.get("rope_theta") or small["rope_parameters"]["rope_theta"]
    config |= {"rms_norm_eps": small["rms_norm_eps"] * less**2, "rope_theta": theta}
    config |= {"max_position_embeddings": small["max_position_embeddings"], "bos_token_id": 0, "eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_text((base / file).read_text())


def places(small: Row, c: Row) -> dict[str, torch.Tensor]:
    """Where rows of the small model's queries, keys and values, and columns of its output product, stand in the large one.

    A pair of channels that turn together keeps its angle: pair i of the small head is pair i * (ratio of widths) of the large.
    """
    d, D = small["head_dim"], c["head_dim"]
    turned = torch.arange(d // 2) * (D // d)
    turned = torch.cat([turned, turned + D // 2])
    small_group = small["num_attention_heads"] // small["num_key_value_heads"]
    group = c["num_attention_heads"] // c["num_key_value_heads"]
    heads = torch.tensor([h // small_group * group + h % small_group for h in range(small["num_attention_heads"])])
    key_heads = torch.arange(small["num_key_value_heads"])
    at = lambda heads, inside: (heads[:, None] * D + inside).flatten()  # noqa: E731
    return {"q_proj": at(heads, turned), "k_proj": at(key_heads, turned)} | {
        "v_proj": at(key_heads, torch.arange(d)), "o_proj": at(heads, torch.arange(d)),
    }  # fmt: skip


def packed(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Words and scales of symmetric groups: the largest of a group is code 0, which means -8."""
    groups = w.view(len(w), -1, GROUP)
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    scale = (largest / -8).half().float()
    codes = (groups / scale.where(scale != 0, torch.ones(()))).round().add(8).clamp(0, 15)
    return pack(codes.view(w.shape).to(torch.uint8), 4).view(torch.int32), scale.squeeze(2).half()


def server(name: str, args: argparse.Namespace, folder: Path) -> Server:
    """Start `lowq serve` or `vllm serve`, with n-grams or without."""
    whose, _, draft = name.partition("-")
    port, env = free_port(), {}
    if whose == "lowq":
        line = [*LOWQ, str(folder), "--port", str(port), "--device", args.device, "--cache-tokens", str(CACHE_TOKENS)]
        line += ["--name", "m", "--draft", draft or "none"]
    else:
        from lowq_cli.interop.serving import command

        c = SHAPES[args.shape]
        cache = CACHE_TOKENS * 4 * c["num_hidden_layers"] * c["num_key_value_heads"] * c["head_dim"]
        extra = ["--max-model-len", "1024", "--max-num-seqs", "64", "--dtype", "float16", "--served-model-name=m"]
        extra += ["--kv-cache-memory-bytes", str(cache), "--gpu-memory-utilization", "0.05", "--attention-backend", "FLASH_ATTN"]
        extra += ["--speculative-config", json.dumps(SPECULATIVE)] if draft else []
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


def loads(tokenizer: Any, text: str) -> dict[str, list[list[int]]]:
    """Prompts that copy and free ones, in a drawn order."""
    drafts.EACH = 10_000  # all that the text has
    some = drafts.prompts(tokenizer, text)
    found = {"copying": [ids for kind in ("edit", "summary", "code") for ids in some[kind]], "free": some["free"]}
    for each in found.values():
        random.Random(0).shuffle(each)
    return found


async def measure(servers: list[Server], args: argparse.Namespace, prompts: dict[str, list[list[int]]], report: Any) -> None:
    """Each server in turn; a load is warmed up by prompts of its own."""
    for one in servers:
        try:
            await one.ready(args.patience)
            print(one.name, "ready after", one.ready_s, flush=True)
        except RuntimeError as e:
            report({"server": one.name, "failed": str(e)})
    for one in (s for s in servers if s.ready_s):
        at, numbers = defaultdict[str, int](int), iter(range(1 << 30))

        def some(load: str, count: int, seed: int) -> list[Asked]:
            rng, pool = random.Random(seed), prompts[load]
            found = [
                Asked(next(numbers), pool[(at[load] + i) % len(pool)], rng.randint(NEW // 2, NEW)) for i in range(count)
            ]
            at[load] += count
            return found

        try:
            for users in args.users:
                for load in prompts:
                    await loop(one.port, users, some(load, 2 * users, 1))
                    asked = some(load, REQUESTS[users] * users, 2)
                    row = await loop(one.port, users, asked)
                    report({"server": one.name, "load": load, "ready_s": one.ready_s} | row)
        except Exception:
            report({"server": one.name, "failed": traceback.format_exc()[-3000:]})


def main() -> None:
    """Write the model, start the servers, measure, stop them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--texts", type=Path, nargs="+", required=True)
    parser.add_argument("--shape", default="8b", choices=SHAPES)
    parser.add_argument("--servers", default="lowq,lowq-ngram,vllm,vllm-ngram")
    parser.add_argument("--users", type=lambda s: [int(n) for n in s.split(",")], default=[16, 64, 1])
    parser.add_argument("--patience", type=float, default=150.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    report, folder, servers = report_of(args, "draft_http.json"), args.work / f"grown-{args.shape}", list[Server]()
    began = time.perf_counter()
    if not folder.exists():
        grown(args.base, folder, args.shape, args.device)
    print("the model is written after", time.perf_counter() - began, flush=True)
    prompts = loads(AutoTokenizer.from_pretrained(args.base), "\n\n".join(t.read_text() for t in args.texts))
    print({load: len(some) for load, some in prompts.items()}, flush=True)
    try:
        for name in args.servers.split(","):
            servers.append(server(name, args, folder))
        asyncio.run(measure(servers, args, prompts, report))
    finally:
        for one in servers:
            one.stop()


if __name__ == "__main__":
    main()
