"""Measure the loss from 8-bit activations in answers: two tasks in the manner of lm-eval's, made from texts.

    python benchmarks/once/act_tasks.py --models DIR,DIR --texts FILE,FILE --out FILE.json [--bits 8,4,3,2] [--most N]

continuation: which of four continuations of 16 tokens follows a context of 64, by their likelihood; the others are those of
other contexts of the same text (as hellaswag). word: whether the likeliest tokens after 63 are those of the text's next word
(as lambada). Models, widths and modes are act_quality.py's. `right`: the share of right answers; `changed`: of answers that
differ from those with 16-bit activations.
"""

import argparse
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from act_quality import AT_ONCE, Acts, quantized, set_acts

from lowq_cli.calibrate.texts import tokenize
from lowq_cli.evaluate.logits import logits_of

CONTEXT, MORE, CHOICES = 64, 16, 4
LONGEST_WORD = 4  # tokens
Row = dict[str, Any]


def continuations(ids: torch.Tensor, most: int) -> torch.Tensor:
    """(n, CHOICES, CONTEXT + MORE) of a text's tokens; the first choice is the right one."""
    cut = ids[: len(ids) // (CONTEXT + MORE) * (CONTEXT + MORE)].view(-1, CONTEXT + MORE)[:most]
    others = [cut[:, CONTEXT:].roll(shift, 0) for shift in range(CHOICES)]
    return torch.stack([torch.cat([cut[:, :CONTEXT], other], 1) for other in others], 1)


def words(ids: torch.Tensor, starts: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(n, CONTEXT - 1 + LONGEST_WORD) tokens, and how many of those after the first CONTEXT - 1 are the word's (n,)."""
    first = starts.nonzero()[:, 0]
    long = first.diff()
    keep = (first[:-1] >= CONTEXT) & (long <= LONGEST_WORD) & (first[:-1] + LONGEST_WORD <= len(ids))
    at, long = first[:-1][keep], long[keep]
    some = torch.arange(0, len(at), max(1, len(at) // most))[:most]
    at, long = at[some], long[some]
    return ids[at[:, None] + torch.arange(1 - CONTEXT, LONGEST_WORD)], long


@torch.inference_mode()
def answers(model: Any, chosen: torch.Tensor, of_words: torch.Tensor, long: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The choice of each question, 0 being right, and whether each word was right."""
    device, picked, right = next(model.parameters()).device, [], []
    for part in chosen.split(AT_ONCE):
        flat = part.flatten(0, 1).to(device)
        logs = torch.log_softmax(logits_of(model, flat)[:, CONTEXT - 1 : -1].float(), -1)
        picked.append(logs.gather(-1, flat[:, CONTEXT:, None]).sum((1, 2)).view(-1, CHOICES).argmax(1).cpu())
    for part, n in zip(of_words.split(4 * AT_ONCE), long.split(4 * AT_ONCE), strict=True):
        best = logits_of(model, part.to(device))[:, CONTEXT - 2 : -1].argmax(-1).cpu()
        same = (best == part[:, CONTEXT - 1 :]) | (torch.arange(LONGEST_WORD) >= n[:, None])
        right.append(same.all(1))
    return torch.cat(picked), torch.cat(right)


def rows_of(folder: Path, width: int, texts: list[Path], device: str, most: int) -> Row:
    """right and changed of each mode, by text and task."""
    with quantized(folder, width, device) as (model, tokenizer, modes, choice):
        row: Row = {"model": folder.name, "bits": width, "auto": {"act": choice.act, "share": choice.share}}
        for text in texts:
            ids = tokenize(tokenizer, text.read_text()).flatten()
            shown = [tokenizer.decode([int(i)]) for i in range(int(ids.max()) + 1)]
            starts = torch.tensor([s.startswith(" ") and s[1:].isalpha() for s in shown])[ids]
            questions = continuations(ids, most), *words(ids, starts, most)
            row[text.stem] = compared(model, modes, questions)
        return row


def compared(model: Any, modes: dict[str, Acts], questions: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> Row:
    found: Row = {"continuation": {"questions": len(questions[0])}, "word": {"questions": len(questions[1])}}
    plain: tuple[torch.Tensor, torch.Tensor] | None = None
    for name, acts in modes.items():
        if not acts and name != "none":
            continue
        set_acts(model, acts)
        picked, right = answers(model, *questions)
        plain = plain or (picked, right)
        for task, now, before, good in (("continuation", picked, plain[0], picked == 0), ("word", right, plain[1], right)):
            shares = {"right": good.double().mean().item(), "changed": (now != before).double().mean().item()}
            found[task][name] = shares
    return found


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    paths: Callable[[str], list[Path]] = lambda s: [Path(p) for p in s.split(",")]  # noqa: E731
    ask.add_argument("--models", type=paths, required=True)
    ask.add_argument("--texts", type=paths, required=True)
    ask.add_argument("--bits", type=lambda s: tuple(map(int, s.split(","))), default=(8, 4, 3, 2))
    ask.add_argument("--most", type=int, default=2000, help="questions of a task")
    ask.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    ask.add_argument("--out", type=Path, required=True)
    args = ask.parse_args()
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    found: Row = {"device": name, "torch": torch.__version__, "date": datetime.now(UTC).date().isoformat(), "rows": []}
    for folder in args.models:
        for width in args.bits:
            found["rows"].append(rows_of(folder, width, args.texts, args.device, args.most))
            print(json.dumps(found["rows"][-1]), flush=True)
            args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
