"""Measure drafts: the time of steps of several rows, and the gain from n-grams. benchmarks/results/<device>/drafts.json.

    python benchmarks/drafts.py [--parts rows,same,steps,speed] [--models base=FOLDER,...] [--texts FILE] [--device cuda]

`rows`: a step of 1 plain row, and of 2 to 16 rows of one text, of a model of random codes, as the device takes them one after
another, and as long as the host waits where it reads each before the next. `same`: greedy texts with drafts beside those
without: tokens until the first that differs, and by how much its logit was the largest there. `steps` (on a CPU): milliseconds
of the thread's time of a step of each number of rows after 200 tokens of a model, all in turns. `speed`: prompts whose answers
copy from them (a passage that is written again with a word changed, its first sentences, code), and prompts that do not.
`serve`: such prompts by users of the server's engine in a closed loop, with drafts and without.
"""

import argparse
import json
import queue
import statistics
import time
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from e2e_decode import decoder_for
from pages import results_of

from lowq_cli.engine import stream
from lowq_cli.engine.decoders import decoder_of
from lowq_cli.engine.drafts import drafting
from lowq_cli.engine.drafts.draft_length import TableCosts
from lowq_cli.engine.open_model import ready
from lowq_cli.engine.sampling import Sampling
from lowq_kernels.dispatch.precompile import launch_all

WIDTHS, STEPS, NEW, EACH = (2, 4, 8, 16), 60, 128, 20
STEP_ROWS = (2, 3, 4, 6, 8, 12, 16)  # those of steps with drafts on a CPU
Row = dict[str, Any]


def rows(shape: str, variant: str, contexts: list[int], device: str) -> list[Row]:
    """Milliseconds of steps of each number of rows, after so many tokens."""
    dtype = torch.float16 if device == "cuda" else torch.bfloat16
    model, decoder = decoder_for(variant, shape, dtype, device)
    found = []
    for context in contexts:
        ids = torch.randint(3, decoder.plan.vocabulary, (context,), generator=torch.Generator().manual_seed(1)).tolist()
        decoder.drafts, decoder.held = True, []
        if device == "cuda":
            from lowq_cli.engine.precompiling import launches

            launch_all(launches(model, decoder, 1, context, Sampling()), lambda n, of: None)
        for T in (1, *WIDTHS):
            decoder.start([ids], Sampling(), 17 * STEPS)
            wrong = [3] * (T - 1)

            def step(T: int = T, wrong: list[int] = wrong) -> Any:
                return decoder.verify(wrong, T) if T > 1 else decoder.step()

            step(), step()
            _wait(device)
            began = time.perf_counter()
            for _ in range(STEPS):
                step()
            _wait(device)
            ahead, seconds = (time.perf_counter() - began) / STEPS, list[float]()
            for _ in range(STEPS // 2):
                began = time.perf_counter()
                made = step()
                (made.accepted if T > 1 else made).tolist()
                seconds.append(time.perf_counter() - began)
            found.append({"part": "rows", "model": shape, "variant": variant, "context": context, "rows": T}
                         | {"ms": round(1e3 * ahead, 4), "ms_read_each": round(1e3 * statistics.median(seconds), 4)}
                         | {"recorded": device == "cpu" or not decoder.reason})  # fmt: skip
            print(found[-1], flush=True)
    return found


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def prompts(tokenizer: Any, text: str) -> dict[str, list[list[int]]]:
    """Token ids of prompts by kind, EACH of every one: edit, summary, code (their answers copy) and free."""
    blocks = [b.strip() for b in text.split("\n\n")]
    prose = [b for b in blocks if 300 < len(b) < 900 and "    " not in b and b.count(". ") > 2]
    code = [
        b for b in blocks if 200 < len(b) < 900 and "    " in b and ("def " in b or "return" in b or "self" in b or "=" in b)
    ]
    encode = lambda s: list(tokenizer(s)["input_ids"])  # noqa: E731
    made: dict[str, list[list[int]]] = {"edit": [], "summary": [], "code": [], "free": []}
    for p in prose:
        word = max(p.split(), key=lambda w: p.count(w) if w.isalpha() and len(w) > 3 else 0)
        edited, first = p.replace(word, "other"), ". ".join(p.split(". ")[:2]) + "."
        made["edit"].append(encode(f"{p}\n\n{p}\n\n{edited}\n\n") + encode(edited)[:12])
        made["summary"].append(encode(f"{p}\n\n{first}\n\n{first}\n\n{p}\n\n") + encode(first)[:8])
        made["free"].append(encode(p)[:48])
    for p in code:
        made["code"].append(encode(f"{p}\n\n{p}\n\n") + encode(p)[:12])
    fits = {kind: [ids for ids in some if len(ids) + NEW < 1000] for kind, some in made.items()}
    step = {kind: max(1, len(some) // EACH) for kind, some in fits.items()}
    return {kind: some[:: step[kind]][:EACH] for kind, some in fits.items()}


def speed(name: str, model: Any, tokenizer: Any, asked: dict[str, list[list[int]]], draft: str = "ngram") -> list[Row]:
    """Tokens per second without drafts and with them: in turns by n-grams, in blocks by a head, which needs a cache of its own.

    On a GPU all texts come once untimed: kernels are compiled, and steps recorded for each length.
    """
    found, ways = list[Row](), ("none", draft)
    for kind, some in asked.items():
        seconds, cpu, made = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0)
        counts = dict.fromkeys(("steps", "drafted", "accepted", "passes"), 0)
        for block in [ways] if draft == "ngram" else [(way,) for way in ways]:
            turns = [(way, ids) for ids in some for way in block]
            for i, (way, ids) in enumerate(turns * (1 + (model.device.type == "cuda"))):
                g = stream(model, tokenizer, ids, max_new_tokens=NEW, draft=way)
                pieces = iter(g)
                next(pieces, None)
                began = time.process_time()
                for _ in pieces:
                    pass
                if i < len(turns) and model.device.type == "cuda":
                    continue
                cpu[way] += time.process_time() - began
                seconds[way] += g.decode_s
                made[way] += len(g.tokens[0]) - 1
                if d := g.drafting:
                    counts["steps"] += d.steps
                    counts["drafted"] += d.drafted
                    counts["accepted"] += d.accepted
                    counts["passes"] += g.steps
        tps, passes = {way: made[way] / s for way, s in seconds.items()}, counts["passes"]
        found.append({"part": "speed", "model": name, "kind": kind, "prompts": len(some), "draft": draft}
                     | {"tokens_per_s": round(tps[draft], 1), "tokens_per_s_without": round(tps["none"], 1)}
                     | {"cpu_ms_per_token": round(1e3 * cpu[draft] / made[draft], 4)}
                     | {"cpu_ms_per_token_without": round(1e3 * cpu["none"] / made["none"], 4)}
                     | {"times": round(tps[draft] / tps["none"], 3), "tokens_per_pass": round(made[draft] / passes, 3)}
                     | counts)  # fmt: skip
        print(found[-1], flush=True)
    return found


def same(
    name: str, model: Any, tokenizer: Any, asked: list[list[int]], new: int, draft: str = "ngram", deterministic: bool = False
) -> Row:
    """Greedy texts with drafts and without: where they part, the gap of the two largest logits there."""
    tokens = equal = drafted = accepted = 0
    ties, decoder = [], _decoder(model)
    always: dict[str, Any] = {
        "estimated": lambda plan: TableCosts({1: 1.0, 16: 1.1}),
        "GAP_S": 0.0,
        "Balance": lambda first: None,
    }
    for ids in asked:
        a = _generated(model, tokenizer, ids, new, "none", deterministic).tokens[0]
        with mock.patch.multiple(drafting, **always):  # on a GPU drafts are checked whether they pay or not
            b = (g := _generated(model, tokenizer, ids, new, draft, deterministic)).tokens[0]
        n = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        tokens, equal = tokens + len(a), equal + n
        if n < len(a):
            top = decoder.logits(torch.tensor([ids + a[:n]], device=model.device))[0, -1].float().topk(2).values
            ties.append(round(float(top[0] - top[1]) / float(top[0].abs()), 6))
        if g.drafting is not None:
            drafted, accepted = drafted + g.drafting.drafted, accepted + g.drafting.accepted
    decoder.balances.clear()
    row = {"part": "same", "model": name, "draft": Path(draft).name, "prompts": len(asked), "tokens": tokens, "equal": equal}
    row |= {"deterministic": True} if deterministic else {}
    row |= {"parted_at_gaps": ties, "drafted": drafted, "accepted": accepted}
    print(row, flush=True)
    return row


def _decoder(model: Any) -> Any:
    return decoder_of(model)


def _generated(model: Any, tokenizer: Any, ids: list[int], new: int, draft: str, deterministic: bool) -> Any:
    _decoder(model).held = []  # else the second reads the prompt's last token alone, by another order of sums
    g = stream(model, tokenizer, ids, max_new_tokens=new, draft=draft, deterministic=deterministic)
    for _ in g:
        pass
    return g


def steps(name: str, model: Any, ids: list[int]) -> Row:
    """The median and the least milliseconds of a step of each number of rows, whose drafts are all wrong."""
    decoder, ms = decoder_of(model), dict[int, list[float]]()
    decoder.drafts, decoder.held = True, []  # type: ignore[attr-defined]
    for _ in range(STEPS // 3):
        decoder.start([ids], Sampling(), 17 * 4 * len(STEP_ROWS))
        for T in (1, *STEP_ROWS):
            for i in range(4):
                began = time.thread_time()
                decoder.verify([3] * (T - 1), T).result.tolist() if T > 1 else decoder.step().tolist()  # type: ignore[attr-defined]
                if i:  # the first one records the step, or waits for what it needs to come back into the caches
                    ms.setdefault(T, []).append(1e3 * (time.thread_time() - began))
    row = {"part": "steps", "model": name, "context": len(ids), "rows": list(ms)}
    row |= {"cpu_ms": [round(statistics.median(each), 4) for each in ms.values()]}
    row |= {"cpu_ms_least": [round(min(each), 4) for each in ms.values()]}
    print(row, flush=True)
    return row


def serve(name: str, model: Any, asked: dict[str, list[list[int]]], users: list[int], each: int) -> list[Row]:
    """Tokens per second, and the longest waits between a text's tokens, of `each` requests a user; forced: n-grams without a
    balance."""
    from lowq_cli.serving.draft_trials import Trials
    from lowq_cli.serving.engines import engine_of
    from lowq_cli.serving.request import Request

    loads = {"copying": [p for kind in ("edit", "summary", "code") for p in asked[kind]], "free": asked["free"]}
    found = []
    for many in users:
        for load, some in loads.items():
            for draft in ("none", "ngram", "forced"):
                by = "none" if draft == "none" else "ngram"
                engine = engine_of(model, 4096, running=max(users), cache_tokens=1024 * max(users), draft=by)
                events: Any = queue.SimpleQueue()
                engine.start(events.put)
                always: Any = {"allows": lambda self, size: True} if draft == "forced" else {}
                with mock.patch.multiple(Trials, **always) if always else nullcontext():
                    for turn in range(2):  # the first is not counted: drafts are tried there
                        before = engine.stats()
                        row = served_loop(engine, events, some, many, each if turn else max(2, -(-24 // many)), Request)
                stats, by = engine.stats(), getattr(engine, "drafts_by", "none")
                engine.stop(0)
                found.append({"part": "serve", "model": name, "load": load, "users": many, "draft": draft, "drafts_by": by}
                             | row | {"drafted": stats.drafted - before.drafted, "accepted": stats.accepted - before.accepted}
                             | {"passes": stats.steps - before.steps})  # fmt: skip
                print(found[-1], flush=True)
    return found


def served_loop(engine: Any, events: Any, prompts: list[list[int]], users: int, each: int, request: Any) -> Row:
    """What users in a closed loop get. p99_ms: from a user's token to the next. token_ms: of a request's mean times a token."""
    waiting = [prompts[i % len(prompts)] for i in range(users * each)]
    last, first, gaps, each_token = dict[int, float](), dict[int, tuple[float, int]](), list[float](), list[float]()
    tokens, began = 0, time.perf_counter()
    for _ in range(users):
        last[engine.submit(request(tuple(waiting.pop()), NEW))] = time.perf_counter()
    while last:
        batch, now = events.get(timeout=120), time.perf_counter()
        for number, event in batch:
            if event.message:
                raise RuntimeError(event.message)
            tokens += 1
            gaps.append(now - last[number])
            last[number] = now
            start, n = first.get(number, (now, 0))
            first[number] = start, n + 1
            if event.finish_reason:
                del last[number]
                each_token += [(now - start) / n] if n else []
                if waiting:
                    last[engine.submit(request(tuple(waiting.pop()), NEW))] = time.perf_counter()
    seconds = time.perf_counter() - began
    gaps.sort()
    each_token.sort()
    ms = lambda some, q: round(1e3 * some[int(q * len(some))], 3) if some else 0.0  # noqa: E731
    means = {"p50": ms(each_token, 0.5), "p99": ms(each_token, 0.99)}
    return {"tokens_per_s": round(tokens / seconds, 1), "p99_ms": ms(gaps, 0.99), "token_ms": means}


def main() -> None:
    """Measure what was asked for and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="rows,same,speed")
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--variant", default="4h8")
    parser.add_argument("--contexts", default="512,8192")
    parser.add_argument("--models", default="", help="NAME=FOLDER, of small trained models")
    parser.add_argument("--texts", type=Path, help="paragraphs that prompts are made of")
    parser.add_argument("--draft", default="ngram", help="of `same`, several joined by commas")
    parser.add_argument("--deterministic", action="store_true", help="`same` with as many rows in every step")
    parser.add_argument("--new", type=int, default=250, help="tokens of each text of `same`")
    parser.add_argument("--users", default="1,16,64")
    parser.add_argument("--each", type=int, default=4, help="requests of a user of `serve`")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    parts, found = args.parts.split(","), list[Row]()
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    out = args.out or results_of(name) / "drafts.json"
    about = {"device": name, "date": datetime.now(UTC).strftime("%Y-%m-%d"), "torch": torch.__version__}

    def keep(more: list[Row]) -> None:
        found.extend(more)
        out.write_text(json.dumps(about | {"rows": found}, indent=1) + "\n")

    for part in args.models.split(",") if args.models else ():
        own, _, folder = part.partition("=")
        model, tokenizer = ready(folder, args.device)
        asked = prompts(tokenizer, args.texts.read_text())
        if "same" in parts:
            some = [ids for each in asked.values() for ids in each[: EACH // 2]]
            for draft in args.draft.split(","):
                keep([same(own, model, tokenizer, some, args.new, draft, args.deterministic)])
        if "steps" in parts:
            keep([steps(own, model, max(asked["edit"], key=len)[:200])])
        if "speed" in parts:
            keep(speed(own, model, tokenizer, asked, args.draft))
        if "serve" in parts:
            keep(serve(own, model, asked, list(map(int, args.users.split(","))), args.each))
    if "rows" in parts:
        keep(rows(args.shape, args.variant, list(map(int, args.contexts.split(","))), args.device))


if __name__ == "__main__":
    main()
