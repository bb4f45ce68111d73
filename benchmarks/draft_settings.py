"""Time copying answers in the server's engine by sampling settings, with n-grams and without: <device>/draft_settings.json.

    python benchmarks/draft_settings.py --model FOLDER --texts FILE [--device cpu] [--requests N] [--users N] [--out FILE]

The prompts are those of drafts.py whose answers copy (edits, summaries, code). With drafts and without, the same requests are
computed in blocks of `--users`. `processor` is milliseconds of processor time per token, of this process and of the one that
computes masks; `parted` counts texts that differ, since passes of more rows may round otherwise, and `gap` is the largest
difference of log-probabilities in the others. Thoughts that a budget ends are those of a chat template with `<think>`.
"""

import argparse
import copy
import json
import queue
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from drafts import NEW, prompts
from pages import results_of

from lowq_cli.engine.open_model import ready
from lowq_cli.serving.engines import engine_of
from lowq_cli.serving.http.rules import Rules
from lowq_cli.serving.mask_process import MaskProcess
from lowq_cli.serving.request import Draw, Mask, Request

ANY_TEXT = r"start: /(?s:.*)/" + "\n"
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "repetition_penalty 1.05": {"repetition_penalty": 1.05},
    "temperature 0.7, top_k 20, top_p 0.8, repetition_penalty 1.05": {  # Qwen 2.5's generation_config.json
        **{"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05, "seed": 1}
    },
    "presence_penalty 0.5": {"presence_penalty": 0.5},
    "logit_bias of 10 tokens": {"logit_bias": dict.fromkeys(range(500, 510), -2.0)},
    "a grammar of any text": {},
    "logprobs 0": {"logprobs": 0},
    "logprobs 20": {"logprobs": 20},
    "a budget of 64 tokens of thoughts": {},
}
BUDGET = 64
Answer = list[tuple[int, float | None, tuple[tuple[int, float], ...]]]  # token, log-probability, those of the likeliest


def answers(engine: Any, events: Any, requests: list[Request], users: int) -> list[Answer]:
    """The answer to each request, computed in blocks."""
    made: list[Answer] = []
    for first in range(0, len(requests), users):
        numbers = [engine.submit(request) for request in requests[first : first + users]]
        tokens: dict[int, Answer] = {n: [] for n in numbers}
        left = set(numbers)
        while left:
            for number, event in events.get(timeout=300):
                if event.message:
                    raise RuntimeError(event.message)
                tokens[number].append((event.token, event.logprob, event.top))
                left -= {number} if event.finish_reason else set()
        made += [tokens[n] for n in numbers]
    return made


def turns(
    model: Any, made: Callable[[str], list[Request]], users: int, seconds: Callable[[], float]
) -> Iterator[dict[str, Any]]:
    """What each setting takes, without drafts and with them."""
    for name in SETTINGS:
        row: dict[str, Any] = {"settings": name, "users": users}
        texts = []
        for draft in ("none", "ngram"):
            engine, events = (
                engine_of(model, 4096, running=users, cache_tokens=1024 * users, draft=draft),
                queue.SimpleQueue[Any](),
            )
            engine.start(events.put)
            requests = made(name)
            answers(engine, events, requests[: 2 * users], users)  # costs are measured in these
            before, began = engine.stats(), seconds()
            texts.append(answers(engine, events, requests, users))
            stats, spent = engine.stats(), seconds() - began
            engine.stop(0)
            tokens = sum(map(len, texts[-1]))
            row[draft] = {"processor": round(1e3 * spent / tokens, 4), "tokens": tokens, "passes": stats.steps - before.steps}
            row[draft] |= {"drafted": stats.drafted - before.drafted, "accepted": stats.accepted - before.accepted}
        gaps = [gap(a, b) for a, b in zip(*texts, strict=True)]
        row |= {"parted": gaps.count(None), "gap": max((g for g in gaps if g is not None), default=0.0)}
        yield row


def gap(a: Answer, b: Answer) -> float | None:
    """The largest difference of two answers' log-probabilities; None if their tokens differ."""
    if [(t, [i for i, _ in top]) for t, _, top in a] != [(t, [i for i, _ in top]) for t, _, top in b]:
        return None
    values = [[v for _, own, top in one for v in (own, *(v for _, v in top)) if v is not None] for one in (a, b)]
    return max((abs(x - y) for x, y in zip(*values, strict=True)), default=0.0)


def main() -> None:
    """A row for each setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--texts", type=Path, required=True, help="paragraphs that prompts are made of")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--users", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model, tokenizer = ready(args.model, args.device)
    kinds = prompts(tokenizer, args.texts.read_text())
    copying = [ids for group in zip(*(kinds[k] for k in ("edit", "summary", "code")), strict=False) for ids in group]
    masks = MaskProcess(tokenizer, [tokenizer.eos_token_id or 0], model.get_output_embeddings().weight.shape[0])

    def made(name: str) -> list[Request]:
        def mask() -> Mask | None:
            if "thoughts" in name:
                return Rules(thinking=BUDGET, inside=True).mask(thinks, masks.mask)
            return masks.mask(grammar) if "grammar" in name else None

        return [Request(tuple(ids), NEW, draw=Draw(**SETTINGS[name]), mask=mask()) for ids in copying[: args.requests]]

    thinks = copy.copy(tokenizer)
    thinks.chat_template = "<think></think>"
    from llguidance import LLMatcher

    grammar = LLMatcher.grammar_from_lark(ANY_TEXT)
    masks.mask(grammar)  # starts the process
    rows = []
    for row in turns(model, made, args.users, lambda: time.process_time() + processor_of(masks)):
        print(row, flush=True)
        rows.append(row)
    masks.stop()
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    out = args.out or results_of(name) / "draft_settings.json"
    about: dict[str, Any] = {"device": name, "date": datetime.now(UTC).strftime("%Y-%m-%d"), "torch": torch.__version__}
    about |= {"model": Path(args.model).name, "new": NEW, "threads": torch.get_num_threads()}
    out.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


def processor_of(masks: MaskProcess) -> float:
    """Seconds of processor time of the process that computes masks, where the system says so."""
    running = masks._running
    with suppress(OSError):
        for line in Path(f"/proc/{running.process.pid}/schedstat").read_text().splitlines() if running is not None else ():
            return int(line.split()[0]) / 1e9
    return 0.0


if __name__ == "__main__":
    main()
