"""Measure the loss from 8-bit activations in answers: two tasks in the manner of lm-eval's, made from texts.

    python benchmarks/once/act_tasks.py --models DIR,DIR --texts FILE,FILE --out FILE.json [--bits 8,4,3,2] [--tokens N]

Texts are read in windows of 512 tokens, and each word of a window with 64 tokens before it makes a question of both tasks.
word: whether the likeliest tokens are the word's (as lambada). choice: whether its first token is likelier than those of three
other words of the window (a cloze with four choices). Widths and modes are act_quality.py's, without auto; 16 bits are the
model that is not quantized.

`right`: the share of right answers. Those of a mode are compared with the same questions' answers with 16-bit activations, and
the latter with those of the model that is not quantized: `gained` and `lost` count answers that became right and wrong,
`difference` is that of the shares. `se` and `difference_se` are standard errors; all answers of a window count as one draw.
Rows of an earlier run stay in FILE.json, except those of the same model and width.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from act_quality import AT_ONCE, Acts, quantized, set_acts

sys.path.insert(0, str(Path(__file__).parents[1]))  # the scripts of benchmarks/
from cpu_llamacpp import cpu_name

from lowq_cli.calibrate.texts import tokenize, windows
from lowq_cli.engine.open_model import ready
from lowq_cli.evaluate.logits import device_of, logits_of

WINDOW = 512
BEFORE = 64  # tokens of a window before its first asked word
LONGEST_WORD = 4  # tokens
FURTHER = (7, 13, 29)  # how many words further the wrong choices are, past the window's last from its first on
UNQUANTIZED = 16  # bits
Row = dict[str, Any]


@dataclass(frozen=True)
class Questions:
    """Those of a text. windows (W, WINDOW); words (n, 3): each word's window, its first token there and its number of tokens;
    choices (m, 4): tokens, the first of which is right; asked (m,): the word that each belongs to."""

    windows: torch.Tensor
    words: torch.Tensor
    choices: torch.Tensor
    asked: torch.Tensor


@dataclass(frozen=True)
class Answers:
    """Whether each was right (n,), and its window (n,)."""

    right: torch.Tensor
    window: torch.Tensor

    def share(self) -> Row:
        """The share of right answers."""
        right = self.right.double()
        return {"right": right.mean().item(), "se": error(right, self.window)}

    def beyond(self, other: "Answers") -> Row:
        """The difference from other answers to the same questions."""
        change = self.right.double() - other.right.double()
        counts = {"gained": int((change > 0).sum()), "lost": int((change < 0).sum())}
        return counts | {"difference": change.mean().item(), "difference_se": error(change, self.window)}


def error(values: torch.Tensor, draw: torch.Tensor) -> float:
    """The standard error of the mean of values (n,), whose draws (n,) are independent of each other."""
    sums = torch.zeros(int(draw.max()) + 1, dtype=torch.float64).index_add_(0, draw, values - values.mean())
    return float(sums.square().sum().sqrt()) / len(values)


def questions_of(tokenizer: Any, text: str, tokens: int) -> Questions:
    """The questions of a text's first `tokens` tokens."""
    cut = windows(tokenize(tokenizer, text), WINDOW, tokens)
    words = words_of(kinds_of(tokenizer, int(cut.max()) + 1)[cut])
    return Questions(cut, words, *choices_of(cut, words))


def kinds_of(tokenizer: Any, tokens: int) -> torch.Tensor:
    """(tokens,): 2 for the start of a word, 1 for letters that go on with one, 0 for other tokens."""
    spelled = [tokenizer.decode([i]) for i in range(tokens)]
    return torch.tensor([2 if s.startswith(" ") and s[1:].isalpha() else int(s.isalpha()) for s in spelled])


def words_of(kinds: torch.Tensor) -> torch.Tensor:
    """Words (n, 3) of windows whose tokens are of these kinds (W, T); the window must hold the token after a word."""
    words = []
    for window, row in enumerate(kinds.tolist()):
        for first in (i for i in range(BEFORE, len(row)) if row[i] == 2):
            end = next((i for i in range(first + 1, len(row)) if row[i] != 1), None)
            if end is not None and end - first <= LONGEST_WORD:
                words.append((window, first, end - first))
    return torch.tensor(words)


def choices_of(cut: torch.Tensor, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Choices (m, 4) and their words (m,), of those words whose wrong choices all begin with another token."""
    choices = []
    for window in range(len(cut)):
        firsts = cut[window, words[words[:, 0] == window, 1]]
        choices.append(torch.stack([firsts.roll(-further) for further in (0, *FURTHER)], 1))
    every = torch.cat(choices)
    asked = (every[:, 1:] != every[:, :1]).all(1).nonzero()[:, 0]
    return every[asked], asked


@torch.inference_mode()
def answers(model: Any, questions: Questions, acts: Acts) -> dict[str, Answers]:
    """The model's answers, by task."""
    set_acts(model, acts)
    window, first, long = questions.words.unbind(1)
    likeliest, scores = [], torch.empty(questions.choices.shape)
    for start in range(0, len(questions.windows), AT_ONCE):
        logits = logits_of(model, questions.windows[start : start + AT_ONCE].to(device_of(model)))[:, :-1]
        likeliest.append(logits.argmax(-1).cpu())
        at = (window[questions.asked] // AT_ONCE == start // AT_ONCE).nonzero()[:, 0]
        of = questions.asked[at]
        before = logits[(window[of] - start).to(logits.device), (first[of] - 1).to(logits.device)].float().cpu()
        scores[at] = before.gather(1, questions.choices[at])
    hits = torch.cat(likeliest) == questions.windows[:, 1:]
    offsets = torch.arange(LONGEST_WORD)
    places = (first[:, None] - 1 + offsets).clamp(max=WINDOW - 2)
    words = (hits[window[:, None], places] | (offsets >= long[:, None])).all(1)
    chosen = (scores[:, :1] > scores[:, 1:]).all(1)
    return {"word": Answers(words, window), "choice": Answers(chosen, window[questions.asked])}


def rows_of(folder: Path, args: argparse.Namespace) -> Iterator[Row]:
    """A row for the model that is not quantized, and one for each width."""
    model, tokenizer = ready(folder, args.device)
    of = {text.stem: questions_of(tokenizer, text.read_text(), args.tokens) for text in args.texts}
    facts = {"torch": torch.__version__, "lowq": version("lowq"), "date": datetime.now(UTC).date().isoformat()}
    facts |= {"tokens": args.tokens, "model": folder.name}
    exact = {text: answers(model, questions, {}) for text, questions in of.items()}
    shares = {text: {task: counted(a) | {"none": a.share()} for task, a in found.items()} for text, found in exact.items()}
    yield facts | {"bits": UNQUANTIZED} | shares
    for width in args.bits:
        start = time.process_time()
        with quantized(folder, width, args.device) as (model, _, modes):
            row = facts | {"bits": width} | {text: compared(model, modes, of[text], exact[text]) for text in of}
        yield row | {"cpu_seconds": round(time.process_time() - start)}


def counted(a: Answers) -> Row:
    """The number of questions."""
    return {"questions": len(a.right)}


def compared(model: Any, modes: dict[str, Acts], questions: Questions, exact: dict[str, Answers]) -> Row:
    """Shares and differences of each mode, by task."""
    plain = answers(model, questions, {})
    row: Row = {task: counted(a) | {"none": a.share() | a.beyond(exact[task])} for task, a in plain.items()}
    for name, acts in modes.items():
        if acts:
            for task, a in answers(model, questions, acts).items():
                row[task][name] = a.share() | a.beyond(plain[task])
    return row


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    paths: Callable[[str], list[Path]] = lambda s: [Path(p) for p in s.split(",")]  # noqa: E731
    ask.add_argument("--models", type=paths, required=True)
    ask.add_argument("--texts", type=paths, required=True)
    ask.add_argument("--bits", type=lambda s: tuple(map(int, s.split(","))), default=(8, 4, 3, 2))
    ask.add_argument("--tokens", type=int, default=131_072, help="of a text")
    ask.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    ask.add_argument("--out", type=Path, required=True)
    args = ask.parse_args()
    device = torch.cuda.get_device_name() if args.device == "cuda" else cpu_name()
    rows: list[Row] = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    for folder in args.models:
        for row in rows_of(folder, args):
            rows = [r for r in rows if (r["model"], r["bits"]) != (row["model"], row["bits"])] + [row]
            print(json.dumps(row), flush=True)
            args.out.write_text(json.dumps({"device": device, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
