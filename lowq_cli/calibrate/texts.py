"""The texts for calibration and evaluation: their tokens, in windows of one length."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lowq_cli.files.picture_file import SUFFIXES
from lowq_cli.models import CausalModel, Tokenizer
from lowq_cli.state import user_path
from lowq_packers.errors import NotFoundError, UsageError
from lowq_packers.lazy import torch
from lowq_packers.regular import read_given

WINDOW = 512
BATCH = 8  # windows per batch
MAX_TEXT = 1 << 32  # max. bytes per file
WHAT = "calibration text"
DEFAULT_TEXT = Path(__file__).parents[1] / "demo" / "calibration.txt"
SELF, BUNDLED = "self", "bundled"  # a recipe's names for the text that the model writes itself and for the bundled one


@dataclass(frozen=True)
class Text:
    """A calibration text: words, or the tokens (T,) that the model wrote itself. name: the recipe's name for it, e.g. a path.

    pairs: images and the text of each; `words` fill the rest of their windows. later: further parts (n, T), which only training
    all layers together reads, one in each pass.
    """

    name: str
    words: str = ""
    ids: torch.Tensor | None = None
    pairs: tuple[tuple[Path, str], ...] = ()
    later: torch.Tensor | None = None

    @classmethod
    def read(cls, path: str | None, what: str = WHAT) -> Text:
        """The text that a recipe names, unless the model writes it itself. what, errors: as `read_text`."""
        root = None if path in (None, BUNDLED) else user_path(str(path))
        if root is None or not root.is_dir() or not (pairs := picture_pairs(root)):
            return cls(path or BUNDLED, read_text(path, what))
        captions = {file.with_suffix(".txt") for file, _ in pairs}
        others = [read_text(str(p), what) for p in text_files(root) if p not in captions]
        return cls(str(path), "\n\n".join(others) or read_text(None), pairs=tuple(pairs))

    @cached_property
    def digest(self) -> str:
        """A hash of the contents."""
        raw = self.words.encode() if self.ids is None else self.ids.to(torch.int32).numpy().tobytes()
        sha = hashlib.sha256(raw)
        if self.later is not None:
            sha.update(self.later.to(torch.int32).numpy().tobytes())
        for file, words in self.pairs:
            sha.update(hashlib.sha256(read_given(file, "picture", MAX_TEXT)).digest() + words.encode() + b"\0")
        return sha.hexdigest()[:16]

    def windows(self, tokenizer: Tokenizer, tokens: int, model: CausalModel) -> torch.Tensor:
        """The token ids (n, window) that `choose_windows` picks for a model. Raises the errors of both it and `check_ids`."""
        ids = tokenize(tokenizer, self.words) if self.ids is None else self.ids.long()
        check_ids(ids.unique().tolist(), model.config.get_text_config().vocab_size)
        return choose_windows(ids, tokens, window_of(model))

    def later_windows(self, model: CausalModel) -> list[torch.Tensor]:
        """The windows (n, window) of each later part."""
        return [choose_windows(ids.long(), len(ids), window_of(model)) for ids in self.later] if self.later is not None else []


def read_text(path: str | None, what: str = WHAT) -> str:
    """A text: a .txt file, a .jsonl file of {"text": ...}, all such files in a folder, or the bundled one.

    what: its name in messages. Raises NotFoundError, UsageError.
    """
    root = DEFAULT_TEXT if path in (None, BUNDLED) else user_path(str(path))
    if root.is_dir():
        files = text_files(root)
        if not files:
            raise NotFoundError(f"{root} holds no .txt or .jsonl file for the {what}")
        return "\n\n".join(read_text(str(p), what) for p in files)
    text = read_utf8(root, what)
    if root.suffix == ".jsonl":
        try:
            text = "\n\n".join(json.loads(line)["text"] for line in text.split("\n") if line.strip())
            text.encode()  # raises for half of a surrogate pair
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UsageError(f'{root} must hold one JSON object with a "text" per line') from None
    if not text.strip():
        raise UsageError(f"the {what} {root} is empty")
    return text


def text_files(folder: Path) -> list[Path]:
    """The text files of a folder."""
    return sorted(p for p in folder.iterdir() if p.suffix in (".txt", ".jsonl") and p.is_file())


def picture_pairs(folder: Path) -> list[tuple[Path, str]]:
    """The images of a folder that have a text file next to them (a.txt for a.png), each with its text."""
    files = sorted(f for f in folder.iterdir() if f.suffix.lower() in SUFFIXES and f.with_suffix(".txt").is_file())
    return [(f, read_utf8(f.with_suffix(".txt"), "text").strip()) for f in files]


def choose_windows(ids: torch.Tensor, tokens: int, window: int) -> torch.Tensor:
    """Windows (n, window) of a text's token ids (T,): `tokens` of them, spread evenly over the text, or all if it has fewer.

    Raises UsageError where the text has, or `tokens` is, less than one batch.
    """
    cut = windows(ids, window)
    count = min(len(cut), max(1, tokens // window)) // BATCH * BATCH
    if cut.shape[1] < window or count == 0:
        few, had = cut.numel() < BATCH * window, f"the text has {cut.numel()}; give a longer text"
        raise UsageError(f"{BATCH * window} tokens of text or more are needed, {had if few else f'not {tokens}; ask for more'}")
    return cut[torch.linspace(0, len(cut) - 1, count).round().long()]


def random_token_windows(tokenizer: Any, count: int, rows: int, window: int, seed: int = 0) -> torch.Tensor:
    """Tokens (count, window), sampled from the whole vocabulary without special tokens; the same on every run.

    rows: rows of the embedding; tokens beyond them are left out.
    """
    return random_tokens(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids), rows, (count, window), seed)


def random_tokens(words: set[int], rows: int, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Tokens of a shape, sampled from those of `words` that are below `rows`; the same on every run."""
    known = torch.tensor(sorted(t for t in words if t < rows))
    return known[torch.randint(len(known), shape, generator=torch.Generator().manual_seed(seed))]


def windows(ids: torch.Tensor, window: int = WINDOW, max_tokens: int | None = None) -> torch.Tensor:
    """Windows (n, window) of token ids (T,): the first `max_tokens`, without an incomplete last window.

    A text shorter than one window is one window of its own length. Raises UsageError for fewer than 2 tokens.
    """
    ids = ids[:max_tokens]
    if ids.numel() < 2 or window < 2:
        raise UsageError(f"at least 2 tokens of text are needed; the text has {ids.numel()} and the window {window}")
    window = min(window, ids.numel())
    return ids[: ids.numel() // window * window].reshape(-1, window)


def tokenize(tokenizer: Tokenizer, text: str) -> torch.Tensor:
    """(T,) token ids of the text, without special tokens added."""
    return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.long)


def check_ids(ids: Iterable[int], rows: int) -> None:
    """Raise UsageError for a token id that is not below `rows`: the tokenizer is another model's, or has added tokens."""
    if (other := next((i for i in ids if not 0 <= i < rows), None)) is not None:
        had = f"token id {other} is not one of the model's ids, 0 to {rows - 1}"
        raise UsageError(f"{had}; use the tokenizer of this model")


def read_utf8(file: Path, what: str) -> str:
    """A text file's contents. Raises UsageError for bytes that are not UTF-8, NotFoundError. what: its name in messages."""
    try:
        return read_given(file, what, MAX_TEXT).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as e:
        raise UsageError(f"cannot read the {what} {file}: it is not UTF-8 ({e.reason} at byte {e.start})") from None


def window_of(model: CausalModel) -> int:
    """WINDOW, or the model's max. context if that is shorter: positions beyond it may have no embedding."""
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    return min(WINDOW, getattr(config, "max_position_embeddings", None) or WINDOW)
