"""Measure servers over HTTP under the users of serve_load.py: `lowq serve`, `vllm serve`, and vLLM with lowq's plugin.

    python benchmarks/serve_http.py --work /dev/shm/x [--servers lowq,export,plugin] [--users 1,16,64,128] [--long 4400,128000]
    python benchmarks/serve_http.py --work /dev/shm/x [--users 1] --loads rag-1,rag-16,rag-64,agents-16,agents-64,chats-128
    python benchmarks/serve_http.py --work /dev/shm/x --texts 64

The server export8 is export with vLLM's own 8-bit activations (its CutlassW4A8 on Hopper, which takes bfloat16).

Each server is a process of its own with the flags that its users would type; all start side by side, then one after another is
measured while the others wait, by one client: so many connections, prompts as token ids, answers streamed. The model is one of
random codes (vllm_speed.make), its tokenizer filled up to the model's vocabulary, for a token without text is not told. A
token's time is when its event has come; those beside another one's have a gap of 0. --long: after the users, prompts of so many
tokens, one at a time, until their first token. results/<gpu>/serve_http_SHAPE.json.

`--adapters 0,1,8`: 16 users of the plain load whose requests name one of so many random LoRA adapters of every product.
`--loads rag-16,...`: after them those of serve_load.LOADS. Both servers have a cache of --cache GB then.

`--texts N`: the bundled model in 4 bits, N prompts at once by the `openai` package, streaming, greedy, beside `lowq.stream` of
each alone; where texts part, by how much the two tokens' log-probabilities differ. results/<gpu>/serve_texts.json.
"""

import argparse
import asyncio
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from pages import results_of
from safetensors.torch import save_file
from serve_load import LOADS, LONGEST_NEW, LONGEST_PROMPT, SEED, Answered, Asked, User, plain, requests, row_of, users_of
from vllm_speed import SHAPES, SIZES, USERS, linears, make

SERVERS = ("lowq", "export", "plugin")  # unless asked for others
LOWQ = [sys.executable, "-P", "-c", "from lowq_cli.main import run; run()", "serve"]
WITH_TEXT = re.compile(rb'"(?:text|content)": ?"[^"]')  # an event that shows something; a last one may have an empty text
WORDS = re.compile(rb"w(\d+)")  # tokens that fill_tokenizer named
COUNTED = re.compile(rb'"completion_tokens": *(\d+)')
REPEATS = 2  # of a long prompt
NEW = 64  # tokens of an answer of --texts
ADAPTED, RANK = 16, 16  # users, and the adapters' rank
LONGEST_TURN = 8192  # tokens of a request of --loads that vLLM takes; of 9,000 requests of rag-64 the longest has 4,897
Row = dict[str, Any]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]  # type: ignore[no-any-return]


def fill_tokenizer(folder: Path, vocabulary: int) -> None:
    """A word of its own for each id that the tokenizer does not know."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    words = tokenizer["model"]["vocab"]
    if len(words) == vocabulary:
        return  # an export of the folder, which goes by its files, stays valid
    words |= {f"\u0120w{i}": i for i in range(len(words), vocabulary)}
    path.write_text(json.dumps(tokenizer))


@dataclass
class Told(Answered):
    """model: which is asked.

    events: how many of the answer's tokens had one of their own; a slow server, or client, takes several together.
    ids: the answer's tokens, as far as their text says which they are.
    """

    model: str = "m"
    events: int = 0
    ids: list[int] = field(default_factory=list)


class Server:
    """A server process. url: where it is, once `ready` has said so."""

    def __init__(self, name: str, line: list[str], port: int, log: Path, env: dict[str, str]) -> None:
        self.name, self.port, self.log, self.began = name, port, log, time.perf_counter()
        with log.open("w") as out:
            out.write(" ".join(line) + "\n")
            out.flush()
            self.process = subprocess.Popen(line, stdout=out, stderr=out, env=os.environ | env, start_new_session=True)
        self.ready_s = 0.0

    async def ready(self, patience: float) -> None:
        """Return once it answers. Raises RuntimeError with the end of what it said where it does not in so many seconds."""
        while time.perf_counter() < self.began + patience and self.process.poll() is None:
            with suppress(OSError, ValueError, IndexError):
                if (await get(self.port, "/health"))[0] == 200:
                    self.ready_s = round(time.perf_counter() - self.began, 2)
                    return
            await asyncio.sleep(0.05)
        raise RuntimeError(f"{self.name} did not answer: {self.log.read_text()[-3000:]}")

    def stop(self) -> int | None:
        """Ask it to end, and see to it."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.poll()


def adapter(args: argparse.Namespace, number: int) -> Path:
    """The folder of a random adapter in PEFT's format, which is made once."""
    folder, shape = args.work / f"adapter-{number}", SHAPES[args.shape]
    if folder.exists():
        return folder
    g, tensors = torch.Generator().manual_seed(number), {}
    for leaf, (N, K) in linears(shape).items():
        for layer in range(shape["num_hidden_layers"]):
            at = f"base_model.model.model.layers.{layer}.{leaf}"
            tensors[f"{at}.lora_A.weight"] = (torch.randn(RANK, K, generator=g) / K**0.5).half()
            tensors[f"{at}.lora_B.weight"] = (torch.randn(N, RANK, generator=g) * 1e-3).half()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    leaves = sorted(leaf.rpartition(".")[2] for leaf in linears(shape))
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": leaves, "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def with_8_bit_activations(exported: Path) -> Path:
    """A folder beside an export in compressed-tensors that has vLLM round activations to e4m3, with a scale per token."""
    folder = exported.with_name(f"{exported.name}-fp8")
    folder.mkdir(exist_ok=True)
    for file in exported.iterdir():
        if file.name != "config.json" and not (folder / file.name).exists():
            (folder / file.name).symlink_to(file)
    config = json.loads((exported / "config.json").read_text())
    rounding = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
    for group in config["quantization_config"]["config_groups"].values():
        group["input_activations"] = rounding
    config |= {"torch_dtype": "bfloat16", "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def start(name: str, args: argparse.Namespace, folder: Path) -> Server:
    """Start `lowq serve`, or vLLM as `lowq serve --engine vllm` would."""
    port, env = free_port(), {}
    if name == "lowq":
        cache = 64 * (LONGEST_PROMPT + LONGEST_NEW)  # other engines run on the same GPU: leave them memory
        if args.loads:
            c = SHAPES[args.shape]
            cache = (args.cache << 30) // (4 * c["num_hidden_layers"] * c["num_key_value_heads"] * c["head_dim"])
        line = [*LOWQ, str(folder), "--port", str(port), "--device", args.device, "--cache-tokens", str(cache), "--name", "m"]
        line += [*args.args.split(), *(f"--lora=a{i}={adapter(args, i)}" for i in range(max(args.adapters, default=0)))]
    else:
        from lowq_cli.interop.serving import command

        longest = max(LONGEST_PROMPT + LONGEST_NEW, *args.long, LONGEST_TURN if args.loads else 0) + 8
        extra = ["--max-model-len", str(longest), "--max-num-seqs", "256"]
        extra += ["--dtype", "bfloat16" if name == "export8" else "float16"]
        extra += ["--kv-cache-memory-bytes", str(args.cache << 30), "--gpu-memory-utilization", "0.05"]
        extra += ["--attention-backend", "FLASH_ATTN", "--cudagraph-capture-sizes", *map(str, SIZES), "--served-model-name=m"]
        if several := max(args.adapters, default=0):
            extra += ["--enable-lora", f"--max-loras={several}", f"--max-lora-rank={RANK}", "--lora-modules"]
            extra += [f"a{i}={adapter(args, i)}" for i in range(several)]
        line = command(str(folder), 1, port, tuple(extra), native=name == "plugin")
        if name == "export8":
            line[2] = str(with_8_bit_activations(Path(line[2])))
        line = [sys.executable, "-m", "vllm.entrypoints.cli.main", *line[1:]]
        env = {"VLLM_USE_DEEP_GEMM": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    return Server(name, line, port, args.work / f"server-{name}.log", env)


async def get(port: int, path: str) -> tuple[int, bytes]:
    """(status, what follows the head)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
        head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
        return int(head.split()[1]), body
    finally:
        writer.close()


async def ask(port: int, asked: Asked, answered: Told) -> None:
    """Stream the answer to a prompt of token ids. Raises RuntimeError where it is not whole."""
    await stream(port, "/v1/completions", {"prompt": asked.prompt}, asked.number, asked.new, answered)


async def stream(port: int, path: str, body: Row, number: int, new: int, answered: Told) -> None:
    """Stream one answer of `new` tokens and note the times of its events. Raises RuntimeError where it is not whole."""
    body = body | {"model": answered.model, "max_tokens": new, "temperature": 0, "ignore_eos": True}
    raw = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    made = 0
    try:
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        seen = b""  # since the last event that was whole
        while more := await reader.read(1 << 16):
            now, seen = time.perf_counter(), seen + more
            whole, found, seen = seen.rpartition(b"\n\n")
            if found and (shown := len(WITH_TEXT.findall(whole))):
                answered.times.append((now, shown))
                answered.ids += map(int, WORDS.findall(whole))
            if found and (told := COUNTED.findall(whole)):
                made = int(told[-1])
            if found and b"[DONE]" in whole:
                break
        else:
            raise RuntimeError(f"request {number} was not answered: {seen[:300]!r}")
    finally:
        writer.close()
    if made != new:
        raise RuntimeError(f"request {number}: {made} of {new} tokens")
    events = sum(n for _, n in answered.times)
    if not 1 <= events <= made:
        raise RuntimeError(f"request {number}: {events} events with text for {made} tokens")
    answered.events = events
    at, shown = answered.times[-1]
    answered.times[-1] = (at, shown + made - events)


async def load(port: int, users: Sequence[User], count: int, vocabulary: int, adapters: int = 0) -> Row:
    """The closed loop: a request of each user under way until `count` are answered; the others are left.

    adapters: requests name them in turn. vocabulary: ids of tokens are below it.
    """
    done: list[Told] = []
    every: list[Told] = []
    began, enough = time.perf_counter(), asyncio.Event()

    async def serve(user: User) -> None:
        one = next(user)
        while True:
            every.append(answered := Told(time.perf_counter(), model=f"a{one.number % adapters}" if adapters else "m"))
            await ask(port, one, answered)
            done.append(answered)
            if len(done) >= count:
                enough.set()
            one = user.send([i for i in answered.ids if i < vocabulary])  # two tokens side by side may read as one number

    tasks = [asyncio.create_task(serve(user)) for user in users]
    waiting = asyncio.create_task(enough.wait())
    await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
    seconds, made = time.perf_counter() - began, sum(n for a in every for _, n in a.times)
    for task in (waiting, *tasks):
        task.cancel()
    found = await asyncio.gather(waiting, *tasks, return_exceptions=True)
    await asyncio.sleep(0.5)  # until the server has put away what was left
    for failed in found:
        if isinstance(failed, Exception):
            raise failed
    events = sum(a.events for a in done) / sum(n for a in done for _, n in a.times)
    return row_of(len(users), count, seconds, made, done) | {"events_per_token": events}


async def alone(port: int, length: int, asked: Iterator[Asked]) -> Row:
    """Seconds until a prompt of so many tokens has its first one, with no other request running: of REPEATS."""
    seconds = []
    for one in itertools.islice(asked, REPEATS):
        ids = (one.prompt * (length // len(one.prompt) + 1))[:length]
        ids[0] = one.number + 3  # so that none begins as the one before it
        answered = Told(time.perf_counter())
        await ask(port, Asked(one.number, ids, 2), answered)
        seconds.append(answered.times[0][0] - answered.sent)
    return {"tokens": length, "first_token_s": seconds}


def moved(n: int, vocabulary: int) -> Iterator[Asked]:
    """Requests as long as those of every other n, of other tokens, whose prefixes no cache has."""
    for one in requests(vocabulary):
        yield replace(one, prompt=[3 + (i + n) % (vocabulary - 3) for i in one.prompt])


async def measure(servers: list[Server], args: argparse.Namespace, found: Row, write: Any) -> None:
    """Each server in turn, every number of users."""
    V = SHAPES[args.shape]["vocab_size"]
    for server in servers:
        row = found["servers"][server.name] = {}
        try:
            await server.ready(args.patience)
        except RuntimeError as e:
            row["failed"] = str(e)
        print(server.name, "ready after", server.ready_s, row.get("failed", ""), flush=True)
    for server in servers:
        row = found["servers"][server.name]
        if "failed" in row:
            continue
        row["ready_s"] = server.ready_s
        try:
            for users in (1, 16, args.users[-1]):  # compile kernels for these numbers of rows
                await load(server.port, plain(users, requests(V, 7 + users)), 2 * users, V)
            for users in args.users:
                count = max(users, int(USERS[users] * args.requests))
                row[f"users_{users}"] = await load(server.port, plain(users, requests(V, SEED + users)), count, V)
                print(server.name, json.dumps(row[f"users_{users}"]), flush=True)
                write()
            for several in args.adapters:
                await load(server.port, plain(ADAPTED, requests(V, 7)), ADAPTED, V, several)
                users, count = plain(ADAPTED, moved(several, V)), max(ADAPTED, int(USERS[ADAPTED] * args.requests))
                row[f"adapters_{several}"] = await load(server.port, users, count, V, several)
                print(server.name, several, "adapters", json.dumps(row[f"adapters_{several}"]), flush=True)
                write()
            for name in args.loads:
                row[name] = await load(server.port, users_of(LOADS[name], V), LOADS[name].count, V)
                print(server.name, name, json.dumps(row[name]), flush=True)
                write()
            for length in args.long:
                row[f"prompt_{length}"] = await alone(server.port, length, requests(V, SEED + length))
                print(server.name, json.dumps(row[f"prompt_{length}"]), flush=True)
        except Exception:
            row["failed"] = traceback.format_exc()
            print(server.name, row["failed"], flush=True)
        write()


async def streamed(url: str, prompts: list[str]) -> tuple[list[str], list[Any], float]:
    """All prompts at once by OpenAI's client: texts, then each alone with log-probabilities; the seconds of the first."""
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")

    async def one(prompt: str) -> str:
        stream = await client.completions.create(model="m", prompt=prompt, max_tokens=NEW, temperature=0, stream=True)
        return "".join([c.choices[0].text async for c in stream if c.choices])

    began = time.perf_counter()
    together = await asyncio.gather(*map(one, prompts))
    seconds = time.perf_counter() - began
    alone = [
        (await client.completions.create(model="m", prompt=p, max_tokens=NEW, temperature=0, logprobs=2)).choices[0]
        for p in prompts
    ]
    await client.close()
    return list(together), alone, seconds


def texts(args: argparse.Namespace) -> Row:
    """OpenAI's client and `lowq.stream`, greedy."""
    import openai

    import lowq
    from lowq_cli.evaluate.perplexity import SAMPLE

    folder = args.work / "texts"
    if not folder.exists():
        lowq.quantize("demo", out=str(folder), bits=4, group=64, device=args.device)
    words = SAMPLE.read_text().split()
    prompts = [" ".join(words[i * 40 : i * 40 + 5 + 3 * i % 30]) for i in range(args.texts)]
    server = Server("texts", [*LOWQ, str(folder), "--name", "m", "--device", args.device, "--port", str(port := free_port())],
                    port, args.work / "server-texts.log", {})  # fmt: skip

    async def ask_all() -> tuple[list[str], list[Any], float]:
        await server.ready(args.patience)
        return await streamed(f"http://127.0.0.1:{port}", prompts)

    try:
        together, alone, seconds = asyncio.run(ask_all())
    finally:
        code = server.stop()
    model, tokenizer = lowq.load(str(folder), device=args.device)
    generated = []
    for prompt in prompts:
        g = lowq.stream(model, tokenizer, prompt, max_new_tokens=NEW, temperature=0)
        generated.append("".join(g))
    gaps = [gap(a, b, choice) for a, b, choice in zip(together, generated, alone, strict=True) if a != b]
    row = {"device": device_name(args.device), "date": now(), "openai": openai.__version__, "lowq": version("lowq"),
           "at_once": len(prompts), "new": NEW, "seconds": seconds, "exit_code": code,
           "equal_to_generate": sum(map(str.__eq__, together, generated)),
           "equal_to_alone": sum(a == c.text for a, c in zip(together, alone, strict=True)),
           "gaps_where_they_part": gaps, "first": [together[0], generated[0]]}  # fmt: skip
    print(json.dumps(row), flush=True)
    return row


def gap(a: str, b: str, choice: Any) -> float | None:
    """By how much the likeliest token's log-probability exceeds the second one's where two texts part, asked alone."""
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    offset = choice.logprobs.text_offset[0]
    token = max((i for i, o in enumerate(choice.logprobs.text_offset) if o - offset <= at), default=None)
    if token is None or not choice.text.startswith(a[:at]):
        return None
    first, second = sorted(choice.logprobs.top_logprobs[token].values(), reverse=True)[:2]
    return first - second


def now() -> str:
    return datetime.now(UTC).isoformat("T", "seconds")


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a folder for checkpoints and the servers' logs")
    parser.add_argument("--shape", default="8b", choices=SHAPES)
    parser.add_argument("--servers", default=",".join(SERVERS))
    parser.add_argument("--users", type=lambda s: [int(n) for n in s.split(",")], default=list(USERS))
    parser.add_argument("--requests", type=float, default=1.0, help="share of USERS' requests that are answered")
    parser.add_argument("--long", type=lambda s: [int(n) for n in s.split(",")], default=[], help="prompts, one at a time")
    parser.add_argument("--adapters", type=lambda s: [int(n) for n in s.split(",")], default=[])
    parser.add_argument("--loads", type=lambda s: s.split(","), default=[], help="names of serve_load.LOADS")
    parser.add_argument("--texts", type=int, default=0, metavar="N")
    parser.add_argument("--args", default="", help="more flags of lowq serve")
    parser.add_argument("--cache", type=int, default=14, help="GB of vLLM's cache, under --loads of lowq's too")
    parser.add_argument("--patience", type=float, default=150.0, help="seconds that a server may take to start")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    name = device_name(args.device)
    args.work.mkdir(parents=True, exist_ok=True)
    out = args.out or results_of(name) / ("serve_texts.json" if args.texts else f"serve_http_{args.shape}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    if args.texts:
        out.write_text(json.dumps(texts(args), indent=1, ensure_ascii=False) + "\n")
        return
    folder = args.work / f"lowq-{args.shape}-4"
    if not folder.exists():
        make(folder, args.shape, 4, args.device)
    fill_tokenizer(folder, SHAPES[args.shape]["vocab_size"])
    found: Row = {"shape": args.shape, "device": name, "date": now(), "args": args.args}
    found |= {p: version(p) for p in ("lowq", "torch")} | {"servers": {}}
    with suppress(ModuleNotFoundError):
        found["vllm"] = version("vllm")
    with suppress(ModuleNotFoundError):
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
        found["client"] = f"uvloop {uvloop.__version__}"
    servers: list[Server] = []

    def write() -> None:
        out.write_text(json.dumps(found, indent=1) + "\n")

    try:
        # the export takes its time before its server starts, so it comes last
        for server in sorted(args.servers.split(","), key="export".__eq__):
            servers.append(start(server, args, folder))
        asyncio.run(measure(servers, args, found, write))
    finally:
        for server in servers:
            found["servers"].setdefault(server.name, {})["exit_code"] = server.stop()
        write()
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
