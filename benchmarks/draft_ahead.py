"""Measure n-grams of the server's engine, launched ahead of results and after them. <device>/draft_ahead.json.

    python benchmarks/draft_ahead.py --work /dev/shm/x --base FOLDER --texts FILE... [--plan 16:copying:balance:ahead,...]

One engine in this process computes a small trained model inside a large one's shape (grown.py), so that all ways are compared
with the same recordings. A way is USERS:LOAD:MODE:ORDER. load: texts that copy, free ones, or `cached`, which copy and whose
prompts have been read before; `copying-long` has answers of four times as many tokens. mode: never, by the server's
balance and limit (`draft_rounds.BEHIND`), or always. order: ahead, or wait for each result.
"""

import queue
import random
from itertools import count, islice, product
from typing import Any

from draft_follow import report_of
from draft_http import LOADS, LONG, grown_parser, loads, paragraphs
from drafts import NEW, Row, served_loop
from grown import grown
from vllm_speed import SHAPES

from lowq_cli.engine.open_model import ready
from lowq_cli.serving.draft_budget import Answers
from lowq_cli.serving.draft_costs import GAP_S
from lowq_cli.serving.draft_trials import Trials
from lowq_cli.serving.engines import engine_of
from lowq_cli.serving.request import Draw, Request

EACH = {1: 8, 16: 5, 64: 3}  # requests of each user
WAYS = ("never:ahead", "balance:ahead", "balance:wait", "always:ahead", "always:wait")
PLAN = ",".join(f"{users}:{load}:{way}" for users, load, way in product(EACH, (*LOADS, "cached"), WAYS))


class Fixed(Trials):
    """Drafts always or never, whatever they bring."""

    def __init__(self, allowed: bool) -> None:
        super().__init__()
        self.allowed = allowed

    def allows(self, size: int) -> bool:
        """What is fixed."""
        return self.allowed

    def plain_s(self, size: int) -> float:
        """Unknown."""
        return 0.0

    def passed(self, *about: Any, **more: Any) -> None:
        """Count nothing."""


def measured(engine: Any, texts: list[list[int]], users: int, load: str, mode: str, order: str) -> Row:
    """What users in a closed loop get; `texts` are in no cache yet."""
    drafts, each, drawn = engine.drafts, len(texts) // users, random.Random(users)
    longest = NEW * (LONG if load.endswith("long") else 1)
    drafts._trials = Trials(drafts.costs.plain_s) if mode == "balance" else Fixed(mode == "always")
    vars(drafts).pop("_latest", None)
    if mode == "always":
        drafts._latest = lambda texts: None
    drafts.on, drafts._answers = True, Answers()
    if order == "ahead":
        drafts.go_ahead()
    else:
        drafts.ahead, drafts.scheduler.waits, drafts.costs.gap_s = False, True, GAP_S
    asked = [[i, drawn.randint(longest // 2, longest)] for i in range(len(texts))]
    ask = lambda one, new: Request(tuple(texts[one[0]]), one[1], draw=Draw(seed=one[0]))  # noqa: E731
    if load == "cached":
        served_loop(engine, engine.events, [[i, 1] for i, _ in asked], users, each, ask)
    before = engine.stats()
    row, after = served_loop(engine, engine.events, asked, users, each, ask), engine.stats()
    counts = {"drafted": after.drafted - before.drafted, "accepted": after.accepted - before.accepted}
    return row | counts | {"passes": after.steps - before.steps}


def main() -> None:
    """Write the model, start an engine, measure."""
    parser = grown_parser(__doc__)
    parser.add_argument("--plan", default=PLAN)
    parser.add_argument("--turns", type=int, default=2)
    args = parser.parse_args()
    report, folder = report_of(args, "draft_ahead.json"), args.work / f"grown-{args.shape}"
    if not folder.exists():
        grown(args.base, folder, SHAPES[args.shape], args.device, 4)
    model, tokenizer = ready(str(folder), args.device)
    prompts = loads(tokenizer, "\n\n".join(map(paragraphs, args.texts)))
    plan = [(int(users), *rest) for users, *rest in (one.split(":") for one in args.plan.split(","))]
    most = max(users for users, *_ in plan)
    engine: Any = engine_of(model, 4096, running=most, cache_tokens=4096 * most, draft="ngram")
    engine.events = queue.SimpleQueue()
    engine.start(engine.events.put)
    report({"pass_ms": {rows: round(1e3 * s, 3) for (rows, _), s in sorted(engine.drafts.passes.seconds.items())}})
    for first, (users, load, mode, order) in zip(count(100), plan * args.turns):  # a first token: in no cache
        some = islice(prompts[load.replace("cached", "copying")] * 4, users * EACH[users])
        about = {"users": users, "load": load, "mode": mode, "order": order}
        report(about | measured(engine, [[first, *ids] for ids in some], users, load, mode, order))
    engine.stop(0)


if __name__ == "__main__":
    main()
