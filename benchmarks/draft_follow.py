"""Measure n-grams on a large model's shape: random weights write a small trained model's texts. <device>/draft_follow.json.

    python benchmarks/draft_follow.py --base FOLDER --texts FILE [--shape 8b] [--variant 4h8] [--users 1,16,64]

The small model writes greedy answers to the prompts of `drafts.py`. Then the large one generates with the same prompts, drafts
and loop as `lowq generate`, except that each token that it draws is replaced by the answer's. So the share of right drafts is
that of the small model's texts, and the time of steps that of the large model. `--users`: the same in the server's engine, by
so many users in a closed loop; there n-grams look only into a sequence's own tokens. Answers have NEW / 2 to NEW tokens: if all
were as long, users without drafts would go on in step, and prompts would be read by themselves.
"""

import argparse
import json
import queue
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from drafts import NEW, Row, prompts, served_loop
from e2e_decode import decoder_for
from pages import results_of

from lowq_cli.engine import stream
from lowq_cli.engine.drafts.drafting import FromHost
from lowq_cli.engine.drafts.ngram import NGram
from lowq_cli.engine.open_model import ready
from lowq_cli.engine.precompiling import launches
from lowq_cli.engine.sampling import Sampling
from lowq_cli.engine.stream import Generation
from lowq_kernels.dispatch.precompile import launch_all

LONGEST = 4096  # max. tokens of a text and the drafts after it
Texts = dict[str, list[tuple[list[int], list[int]]]]  # kind -> (prompt, answer)


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """The flags of a benchmark in which a small trained model's texts are written by a large one."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="the small model's folder")
    parser.add_argument("--texts", type=Path, nargs="+", required=True, help="paragraphs that prompts are made of")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    return parser


def report_of(args: argparse.Namespace, file: str) -> Callable[[Row], None]:
    """A function that takes the rows of a report one by one: prints each, and writes the file with all until then."""
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    out, rows = args.out or results_of(name) / file, list[Row]()
    about = {"device": name, "date": datetime.now(UTC).strftime("%Y-%m-%d"), "torch": torch.__version__}

    def keep(row: Row) -> None:
        rows.append(row)
        print(row, flush=True)
        out.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")

    return keep


def answers_of(args: argparse.Namespace, new: int, longest: int = LONGEST) -> tuple[Any, Texts]:
    """The tokenizer, and `args.each` prompts of each kind with answers of `new` tokens by the small model.

    longest: prompts have fewer tokens. Answers that ended early are left out.
    """
    small, tokenizer = ready(args.base, args.device)
    found: Texts = {}
    for kind, some in prompts(tokenizer, "\n\n".join(map(Path.read_text, args.texts))).items():
        made = (stream(small, tokenizer, ids, max_new_tokens=new, draft="none") for ids in some if len(ids) < longest)
        whole = (g for g in made if list(g) and len(g.tokens[0]) == new)
        found[kind] = [(g.prompts[0], g.tokens[0]) for g in islice(whole, args.each)]
    return tokenizer, found


@contextmanager
def following(decoder: Any) -> Iterator[torch.Tensor]:
    """Inside, the decoder draws the tokens of the tensor that this yields, by position."""
    before, text = decoder.plan.ops, torch.zeros(LONGEST, dtype=torch.int64, device=decoder.device)

    def choose(logits: torch.Tensor, token: torch.Tensor, pos: torch.Tensor, *rest: Any) -> None:
        before.choose(logits, token, pos, *rest)
        token.copy_(text.index_select(0, pos.long()))

    def choose_rows(logits: torch.Tensor, rows: torch.Tensor, drawn: torch.Tensor, pos: torch.Tensor, *rest: Any) -> None:
        places = pos.long() + 1
        before.choose_rows(logits, rows, drawn, pos, *rest)
        drawn.copy_(text.index_select(0, places))

    decoder.plan.ops = replace(before, choose=choose, choose_rows=choose_rows)
    decoder.slots = decoder.batch = 0  # a new cache, and new recordings
    yield text
    decoder.plan.ops, decoder.slots, decoder.batch = before, 0, 0


def written(decoder: Any, tokenizer: Any, ids: list[int], drafts: bool, new: int = NEW) -> Generation:
    """A text of `new` tokens, with n-grams or without drafts."""
    decoder.drafts = drafts
    drafting = FromHost(NGram(), decoder) if drafts else None
    how: dict[str, Any] = {"stop_ids": frozenset(), "limited_by": "length", "began": time.perf_counter(), "stop": []}
    g = Generation(decoder, tokenizer, [ids], Sampling(), new, drafting=drafting, **how)
    for _ in g.pieces():
        pass
    return g


def measured(
    decoder: Any, tokenizer: Any, answers: dict[str, list[list[int]]], write: Callable[..., Generation] = written
) -> Iterator[Row]:
    """A row for each kind of prompts. answers: prompts with their answers, of which the last NEW tokens are the model's."""
    with following(decoder) as text:
        for turn in range(2):  # the first is not counted: kernels are compiled, steps recorded and drafts tried
            for kind, some in answers.items():
                seconds, steps, counts = {True: 0.0, False: 0.0}, 0, {"steps": 0, "drafted": 0, "accepted": 0}
                for ids in some:
                    for drafts in seconds:
                        text[: len(ids)] = torch.tensor(ids)
                        g = write(decoder, tokenizer, ids[:-NEW], drafts)
                        if g.tokens[0] != ids[-NEW:]:
                            raise RuntimeError("the text is not the answer that was to be written")
                        seconds[drafts] += g.decode_s
                        if d := g.drafting:
                            steps += g.steps
                            counts = {name: n + getattr(d, name) for name, n in counts.items()}
                if turn:
                    tokens = len(some) * (NEW - 1)
                    row = {"kind": kind, "prompts": len(some), "tokens_per_s": round(tokens / seconds[True], 1)}
                    row |= {"tokens_per_s_without": round(tokens / seconds[False], 1)}
                    row |= {"times": round(seconds[False] / seconds[True], 3), "tokens_per_pass": round(tokens / steps, 3)}
                    yield row | counts


def engines(model: Any, users: int, texts: torch.Tensor) -> dict[str, Any]:
    """Started engines by their drafts; a sequence draws the tokens of the row of `texts` that is its seed, by position."""
    from lowq_cli.serving.engines import engine_of

    made = dict[str, Any]()
    for draft in ("none", "ngram"):
        engine: Any = engine_of(model, 4096, running=users, cache_tokens=1024 * users, draft=draft)
        ops = engine.passes.ops

        def choose_rows(
            logits: torch.Tensor, rows: torch.Tensor, token: torch.Tensor, pos: torch.Tensor, seed: torch.Tensor, *rest: Any,
            draw: Callable[..., None] = ops.choose_rows,
        ) -> None:  # fmt: skip
            draw(logits, rows, token, pos, seed, *rest)
            at = rows.long()
            token.index_copy_(0, at, texts[seed[at] % len(texts), pos[at].long() % LONGEST])

        engine.passes.ops = replace(ops, choose_rows=choose_rows)
        if engine.drafts is not None:  # the same texts come again and again: answers to others are not looked into
            engine.drafts.drafter = NGram
        engine.events = queue.SimpleQueue()
        engine.start(engine.events.put)
        made[draft] = engine
    return made


def served(model: Any, answers: dict[str, list[list[int]]], users: int, each: int) -> Iterator[Row]:
    """Rows of a closed loop of `users` users with `each` requests a user, in turns without drafts and by n-grams."""
    from lowq_cli.serving.request import Draw, Request

    whole = [ids for some in answers.values() for ids in some]
    texts = torch.tensor([ids + [0] * (LONGEST - len(ids)) for ids in whole], device=model.device)
    copying = range(len(whole) - len(answers["free"]))
    loads = {"copying": copying, "free": range(len(copying), len(whole))}
    ask = lambda one, new: Request(tuple(whole[one[0]][:-new]), one[1], draw=Draw(seed=one[0]))  # noqa: E731
    started = engines(model, users, texts)
    for turn in range(3):  # the first is not counted: drafts are tried there
        for load, some in loads.items():
            drawn = random.Random(users)
            asked = [[some[i % len(some)], drawn.randint(NEW // 2, NEW)] for i in range(users * each)]
            for draft, engine in started.items():
                before, by = engine.stats(), engine.drafts_by
                row = served_loop(engine, engine.events, asked, users, each, ask)
                stats = engine.stats()
                about = {"part": "serve", "load": load, "users": users, "draft": draft, "drafts_by": by, "turn": turn}
                counts = {"drafted": stats.drafted - before.drafted, "accepted": stats.accepted - before.accepted}
                if turn:
                    yield about | row | counts | {"passes": stats.steps - before.steps}
    for engine in started.values():
        engine.stop(0)


def main() -> None:
    """Measure and write."""
    parser = parser_of(__doc__)
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--variant", default="4h8")
    parser.add_argument("--each", type=int, default=6, help="prompts of each kind")
    parser.add_argument("--users", default="", help="numbers of users of the server")
    parser.add_argument("--requests", type=int, default=8, help="of each user")
    args = parser.parse_args()
    report = report_of(args, "draft_follow.json")
    tokenizer, texts = answers_of(args, NEW)
    answers = {kind: [prompt + answer for prompt, answer in some] for kind, some in texts.items()}
    dtype = torch.float16 if args.device == "cuda" else torch.bfloat16
    with torch.inference_mode():
        model, decoder = decoder_for(args.variant, args.shape, dtype, args.device)
        decoder.drafts = True
        if args.device == "cuda":
            launch_all(launches(model, decoder, 1, 512, Sampling()), lambda n, of: None)
        about_model = {"model": args.shape, "variant": args.variant}

        def keep(row: Row) -> None:
            report(about_model | row)

        for row in measured(decoder, tokenizer, answers):
            keep({"part": "generate"} | row | {"recorded": not decoder.reason})
    del decoder
    for users in map(int, filter(None, args.users.split(","))):
        for row in served(model, answers, users, args.requests):
            keep(row)


if __name__ == "__main__":
    main()
