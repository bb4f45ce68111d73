"""Errors of each decoder layer of a quantized model against the original: of its weights, and of its hidden states."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lowq_cli.calibrate.texts import WINDOW, check_ids, tokenize, window_of, windows
from lowq_packers.errors import UsageError

TOKENS = 8 * WINDOW  # tokens of the text that are read


@dataclass(frozen=True)
class LayerError:
    """One layer's errors. weights: mean ||W - dequantized|| / ||W|| of its quantized matrices (None: none, or not recorded).

    worst: the matrix with the largest error. output: ||h' - h||^2 / ||h||^2 of the layer's output, with all layers up to it
    quantized.
    """

    index: int
    weights: float | None
    worst: str
    output: float


@torch.inference_mode()
def layer_errors(model: str | Path, against: str | Path, text: str, device: str = "auto") -> list[LayerError]:
    """The errors of the layers of `model` in order, on the first 4096 tokens of a text.

    Raises UsageError if the models have different layers, if one lacks tokens of the text, or if the model was rotated
    (--rotate), and the errors of `lowq.load`.
    """
    from lowq_cli.interop.inspection import inspect_model
    from lowq_cli.loading import load

    quantized, tokenizer = load(model, device=device)
    original, _ = load(against, device=device)
    cut = windows(tokenize(tokenizer, text), min(window_of(quantized), window_of(original)), TOKENS)
    pairs = [_hidden(m, cut) for m in (quantized, original)]
    if [h.shape for h in pairs[0]] != [h.shape for h in pairs[1]]:
        raise UsageError(f"{model} and {against} have different layers; their errors cannot be compared one by one")
    errors: dict[int, dict[str, float]] = {}
    for row in inspect_model(str(model)).rows:
        number = re.search(r"\.(\d+)\.(.*)", row.name)
        if number and row.rel_error is not None:
            errors.setdefault(int(number[1]), {})[number[2]] = row.rel_error
    of_layers = []
    for i, (h, h0) in enumerate(zip(*pairs, strict=True)):
        mine = errors.get(i, {})
        mean = sum(mine.values()) / len(mine) if mine else None
        output = float((h - h0).square().sum() / h0.square().sum())
        of_layers.append(LayerError(i, mean, max(mine, key=lambda n: mine[n]) if mine else "", output))
    return of_layers


def _hidden(model: Any, cut: torch.Tensor) -> list[torch.Tensor]:
    """Each decoder layer's output (windows, T, K), in fp32 on the CPU."""
    from lowq_cli.hf.layers import find_layers

    check_ids(cut.unique().tolist(), model.config.get_text_config().vocab_size)
    states: dict[int, list[torch.Tensor]] = {}

    def hook(number: int) -> Any:
        def note(module: torch.nn.Module, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            states.setdefault(number, []).append(first.float().cpu())

        return note

    hooks = [layer.register_forward_hook(hook(i)) for i, layer in enumerate(find_layers(model.base_model)[0])]
    try:
        for window in cut.split(1):
            model(input_ids=window.to(model.device), use_cache=False)
    finally:
        for h in hooks:
            h.remove()
    return [torch.cat(states[i]) for i in sorted(states)]
