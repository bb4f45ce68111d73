"""Measure draft heads: right guesses in a row on greedy text, and their time. benchmarks/results/<device>/draft_heads.json.

    python benchmarks/draft_heads.py MODEL HEAD --texts FILE [--name base] [--device cuda]

`accepted`: share of places where guesses 1 .. j are all what the model says there, and tokens of a round of a text that is
decoded so. `steps` (on a GPU): us of a model's step, with and without what the head reads, and of guesses, each recorded.
"""

import argparse
import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from drafts import prompts
from pages import results_of

from lowq_cli.engine import open_model
from lowq_cli.engine.batch import Batch, Rectangle
from lowq_cli.engine.decoders import decoder_of
from lowq_cli.engine.drafts import heads
from lowq_cli.engine.drafts.drafter import DraftRows
from lowq_cli.engine.drafts.heads import HeadDrafter
from lowq_cli.engine.graph import capture
from lowq_cli.engine.heads import HeadPlan
from lowq_cli.engine.plan import Plan, plan_of
from lowq_cli.engine.sampling import Sampling
from lowq_cli.engine.state import static_state

SLOTS, AT, TIMES, NEW = 512, 200, 200, 256
Row = dict[str, Any]


def timed(step: Callable[[], object]) -> float:
    """us of a recorded step."""
    recorded = capture(step)
    for _ in range(20):
        recorded.replay()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(TIMES):
        recorded.replay()
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - began) / TIMES


class Timing:
    """Steps of B texts at one position."""

    def __init__(self, plan: Plan, head: HeadPlan, B: int) -> None:
        self.plan, self.head, self.B, device = plan, head, B, plan.device
        self.state, self.own = (static_state(p, B, SLOTS, "16") for p in (plan, head))
        self.angles, self.turned = (p.angles(SLOTS, device) for p in (plan, head))
        self.pos = torch.full((B,), AT, dtype=torch.int32, device=device)
        self.ids = torch.full((B,), 5, dtype=torch.int64, device=device)
        self.places = torch.arange(1, B + 1, device=device)
        self.x = torch.randn(B, head.model.hidden, device=device, dtype=plan.dtype)

    def step(self, tapped: bool) -> None:
        """One of the model."""
        taps: list[torch.Tensor] = []
        batch = Batch(self.plan.ops, self.ids, self.B, self.pos, self.angles, self.places)
        y = self.plan.hidden(self.plan.embed(self.ids), batch, self.state, taps if tapped else None)
        self.plan.logits(y).argmax(-1)
        if tapped:
            self.head.entering(taps or [y])

    def guesses(self, K: int) -> None:
        """K of the head."""
        ids, x = self.ids, self.x.clone()
        for _ in range(K):
            batch = Batch(self.head.ops, ids, self.B, self.pos, self.turned, self.places)
            y, x = self.head.guess(ids, x, batch, self.own)
            ids = self.head.ids(self.head.logits(y).argmax(-1))


@torch.inference_mode()
def steps(plan: Plan, drafter: HeadDrafter) -> list[Row]:
    """A row for each batch."""
    found = []
    for B in (1, 4, 16):
        timing = Timing(plan, drafter.plan, B)
        plan.tap(())
        row = {"batch": B, "step_us": timed(partial(timing.step, False))}
        plan.tap(tuple(i for i in drafter.layers if i >= 0))
        row["step_read_us"] = timed(partial(timing.step, True))
        row |= {f"guesses_{k}_us": timed(partial(timing.guesses, k)) for k in (1, 2, 4)}
        found.append({k: round(v, 1) for k, v in row.items()})
        print(found[-1], flush=True)
    return found


@torch.inference_mode()
def guessed(plan: Plan, drafter: HeadDrafter, texts: torch.Tensor) -> torch.Tensor:
    """Guesses (B, places, K) in texts (B, T), as if each place were the newest.

    The head reads the text up to there, place by place, as it does while the model decodes.
    """
    (B, T), K, device = texts.shape, drafter.most, plan.device
    hidden = states_of(plan, drafter.layers, texts)
    drafter.make_room(B, T + K)
    places = torch.arange(B, device=device)
    found = []
    for t in range(T - K - 1):
        rows = DraftRows(torch.full((B,), t, dtype=torch.int32, device=device), places, 1)
        found.append(drafter.draft(texts[:, t + 1], {i: x[:, t] for i, x in hidden.items()}, rows, places, K))
    return torch.stack(found, 1)


def right_of(guesses: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
    """Whether guess j of (B, places, K), and all before it, are what the texts say."""
    K = guesses.shape[-1]
    return (guesses == texts[:, 2:].unfold(1, K, 1)).cumprod(-1)


def accepted(plan: Plan, drafter: HeadDrafter, texts: torch.Tensor, first: int) -> list[Row]:
    """Of greedy texts (B, T), at places from `first` on: guesses right in a row, and a text's rounds."""
    right = right_of(guessed(plan, drafter, texts), texts)[:, first:]
    tokens = rounds = 0
    for row in right.sum(-1).tolist():
        at = 0
        while at < len(row):
            at, rounds, tokens = at + row[at] + 1, rounds + 1, tokens + row[at] + 1
    share = right.float().mean((0, 1)).tolist()
    return [
        {"right": [round(a, 4) for a in share], "tokens_per_round": round(tokens / rounds, 3), "places": right[..., 0].numel()}
    ]


def states_of(plan: Plan, layers: tuple[int, ...], texts: torch.Tensor) -> dict[int, torch.Tensor]:
    """Hidden states (B, T, H) of texts that a head reads, by layer."""
    B, T = texts.shape
    plan.tap(tuple(i for i in layers if i >= 0))
    there = Rectangle(slice(0, B), 0, T, [T] * B, B)
    pos, places = torch.zeros(B, dtype=torch.int32, device=plan.device), torch.arange(1, B + 1, device=plan.device)
    flat, angles = texts.reshape(-1), plan.angles(T, plan.device)
    batch = Batch(plan.ops, flat, 0, pos, angles, places, rectangle=there, tile=plan.tile)
    taps: list[torch.Tensor] = []
    y = plan.hidden(plan.embed(flat), batch, static_state(plan, B, T, "16"), taps)
    return {i: x.reshape(B, T, -1) for i, x in zip((*plan.taps, -1), (*taps, y), strict=True)}


def greedy(model: Any, asked: list[list[int]]) -> tuple[torch.Tensor, int]:
    """Texts (B, T) of a model after the same number of tokens of each prompt, and that number."""
    first = min(map(len, asked))
    decoder: Any = decoder_of(model)
    rows = [decoder.start([ids[:first] for ids in asked], Sampling(), NEW).clone()]
    rows += [decoder.step().clone() for _ in range(NEW - 1)]
    start = torch.tensor([ids[:first] for ids in asked], device=model.device)
    return torch.cat((start, torch.stack(rows, 1)), 1), first


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("head")
    parser.add_argument("--name", default="")
    parser.add_argument("--texts", type=Path, required=True, help="paragraphs that prompts are made of")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model, tokenizer = open_model.ready(args.model, args.device)
    plan, drafter = plan_of(model), heads.load(args.head, model)
    made = Path(args.head) / "lowq_draft.json"
    about: Row = {"model": args.name or args.model, "head": drafter.name, "layers": drafter.layers}
    about |= {"trained": json.loads(made.read_text()) if made.is_file() else {}}
    found: list[Row] = []
    for kind, asked in prompts(tokenizer, args.texts.read_text()).items():
        if asked:
            found += [
                about
                | {"part": "accepted", "kind": kind, "prompts": len(asked)}
                | accepted(plan, drafter, *greedy(model, asked))[0]
            ]
            print({k: v for k, v in found[-1].items() if k != "trained"}, flush=True)
    if args.device == "cuda":
        found += [about | {"part": "steps"} | row for row in steps(plan, drafter)]
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    out = args.out or results_of(name) / "draft_heads.json"
    before = json.loads(out.read_text())["rows"] if out.is_file() else []
    kept = [row for row in before if (row["model"], row["head"]) != (about["model"], about["head"])]
    facts = {"device": name, "date": datetime.now(UTC).strftime("%Y-%m-%d"), "torch": torch.__version__}
    out.write_text(json.dumps(facts | {"rows": kept + found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
