"""Tokens per second with a new draft head and without, measured when its training ends; `--draft auto` decides by them."""

from typing import Any

import torch

from lowq_cli.engine.prompts import stream

TEXTS, NEW = 3, 64  # greedy texts that are timed, after one that is not, and the tokens of each


def measure(model: Any, tokenizer: Any, head: str, windows: torch.Tensor) -> dict[str, float]:
    """Tokens/s "without" drafts and "with" the head in a folder; empty if no text had a step. windows: (n, L) of held-out text,
    of which each first quarter is a prompt."""
    tokens, seconds = [0, 0], [0.0, 0.0]
    for number in range(TEXTS + 1):
        prompt = windows[number % len(windows), : max(1, windows.shape[1] // 4)].tolist()
        for i, draft in enumerate(("none", head)):
            text = stream(model, tokenizer, prompt, NEW, draft=draft)
            for _ in text.pieces():
                pass
            if number and text.steps:
                tokens[i] += len(text.tokens[0]) - 1
                seconds[i] += text.decode_s
    return {w: n / s for w, n, s in zip(("without", "with"), tokens, seconds, strict=True)} if all(tokens) else {}
