"""Measure the first texts of a process with n-grams, the recording of their steps included. <device>/draft_first.json.

    python benchmarks/draft_first.py --base FOLDER --texts FILE [--shapes 8b,1b] [--variant 4h8]

As `draft_follow.py`: a large model of random weights writes a small model's answers. Each text comes by plain steps and with
n-grams, in turns. "first" forgets before each text what is recorded and what was timed, as a process begins; "later" keeps it.
The time from the call to the first token shows that nothing of drafts is prepared before it.
"""

from collections.abc import Iterator
from typing import Any

import torch
from draft_follow import Texts, answers_of, following, parser_of, report_of, written
from drafts import Row
from e2e_decode import decoder_for

from lowq_cli.engine.precompiling import launches
from lowq_cli.engine.sampling import Sampling
from lowq_kernels.dispatch.precompile import launch_all

LONGEST = 700  # max. tokens of a prompt
STATES = ("first", "first", "later", "later")


def measured(decoder: Any, tokenizer: Any, texts: Texts, new: int) -> Iterator[Row]:
    """A row for each kind and state: seconds a token after the first, and from the call to the first token."""
    with following(decoder) as tokens:
        decoder.make_room(1, LONGEST + new)
        for kind, some in texts.items():
            for i, state in enumerate(STATES):
                s, first, right, recorded = {True: 0.0, False: 0.0}, {True: 0.0, False: 0.0}, 0, 0
                for ids, answer in some:
                    both = ids + answer[:new]
                    tokens[: len(both)] = torch.tensor(both)
                    for drafts in (False, True) if i % 2 else (True, False):
                        if drafts and state == "first":
                            forget(decoder)
                        g = written(decoder, tokenizer, ids, drafts, new)
                        s[drafts] += g.decode_s
                        first[drafts] += g.ttft_s
                        right += g.tokens[0] == answer[:new]
                    recorded += sum(len(step.captured) for step in decoder.wide.values()) if state == "first" else 0
                if right != 2 * len(some):
                    raise RuntimeError("a text is not the answer that was to be written")
                count = len(some) * (new - 1)
                yield {"part": "first", "kind": kind, "new": new, "state": state, "texts": len(some), "recorded": recorded} | {
                    "us_plain": round(1e6 * s[False] / count, 2),
                    "us": round(1e6 * s[True] / count, 2),
                    "times": round(s[False] / s[True], 3),
                    "first_token_ms_plain": round(1e3 * first[False] / len(some), 3),
                    "first_token_ms": round(1e3 * first[True] / len(some), 3),
                }


def forget(decoder: Any) -> None:
    """Drop what steps with drafts left for later texts."""
    for recordings in decoder.recordings.values():
        recordings.finish()
    for kept in (decoder.wide, decoder.balances, decoder.recordings):
        kept.clear()


def main() -> None:
    """Measure and write."""
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", default="8b,1b")
    parser.add_argument("--variant", default="4h8")
    parser.add_argument("--new", default="64,250", help="tokens of a text")
    parser.add_argument("--each", type=int, default=2, help="prompts of each kind")
    args = parser.parse_args()
    report, lengths = report_of(args, "draft_first.json"), sorted(map(int, args.new.split(",")))
    tokenizer, texts = answers_of(args, lengths[-1], LONGEST)
    dtype = torch.float16 if args.device == "cuda" else torch.bfloat16
    for shape in args.shapes.split(","):
        with torch.inference_mode():
            model, decoder = decoder_for(args.variant, shape, dtype, args.device)
            if args.device == "cuda":
                launch_all(launches(model, decoder, 1, LONGEST, Sampling()), lambda n, of: None)
            for new in lengths:
                for row in measured(decoder, tokenizer, texts, new):
                    report({"model": shape, "variant": args.variant} | row)
        del model, decoder


if __name__ == "__main__":
    main()
