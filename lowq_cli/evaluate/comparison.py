"""Several models of one family side by side: size, perplexity, distance from the first, decode speed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lowq_cli import drawing
from lowq_cli.calibrate.texts import tokenize, window_of
from lowq_cli.evaluate.perplexity import evaluate
from lowq_cli.models import CausalModel, Tokenizer

PROMPT_TOKENS = 32  # length of the prompt of the timed generation: the text's first tokens


@dataclass(frozen=True)
class Compared:
    """The row of a model. kl, top1_agreement: against the first model (None for itself). decode_tps: for one sequence."""

    model: str
    bytes: int
    bpw: float
    ppl: float
    ppl_increase_pct: float | None
    kl: float | None
    top1_agreement: float | None
    decode_tps: float
    tokens: int
    window: int


def compare(
    models: Sequence[str], text: str, device: str = "auto", max_tokens: int | None = None, new_tokens: int = 64
) -> Iterator[Compared]:
    """Yield a row per model, in order; the first model is the reference of the other rows.

    Args:
        models: folders, hub ids or "demo", of one vocabulary.
        text: the text for perplexity, read in windows of 512 tokens without overlap.
        new_tokens: length of the timed generation, greedy, from the text's first 32 tokens.
    Raises:
        NotFoundError, DamagedError, UnsupportedError: as `lowq.load`. UsageError: other vocabularies, too short a text.
    """
    from lowq_cli.engine.open_model import ready
    from lowq_cli.interop.inspection import inspect_model

    reference: Any = None
    inspected = [inspect_model(name) for name in models]  # raises for missing models before measuring
    for name, inspection in zip(models, inspected, strict=True):
        model, tokenizer = ready(name, device)
        ids = tokenize(tokenizer, text)
        window = window_of(model)
        report = evaluate(model, ids, reference, window, max_tokens)
        speed = decode_tps(model, tokenizer, ids, new_tokens)
        distance = (report.ppl_increase_pct, report.kl, report.top1_agreement)
        yield Compared(name, inspection.bytes, inspection.bpw, report.ppl, *distance, speed, report.tokens, window)
        if reference is None:
            reference = model
        del model


def decode_tps(model: CausalModel, tokenizer: Tokenizer, ids: torch.Tensor, new_tokens: int, times: int = 1) -> float:
    """Tokens per second after one prompt, ids (T,): the best of several generations, after one for compiling and warm-up."""
    from lowq_cli.engine import stream

    prompt = tokenizer.decode(ids[:PROMPT_TOKENS])
    speeds = []
    for length in (4, *[new_tokens] * times):
        generation = stream(model, tokenizer, prompt, max_new_tokens=length, temperature=0)
        for _ in generation:
            pass
        speeds.append(float(generation.decode_tps))
    return max(speeds[1:])


def plot(rows: Sequence[Compared], path: Path) -> None:
    """Plot perplexity against size. Raises the errors of `drawing.save`."""
    drawn = drawing.figure(6, 4)
    axis = drawn.subplots()
    axis.plot([r.bytes / 1e6 for r in rows], [r.ppl for r in rows], "o")
    for r in rows:
        axis.annotate(Path(r.model).name, (r.bytes / 1e6, r.ppl), xytext=(4, 4), textcoords="offset points", fontsize=8)
    axis.set(xlabel="size of the weights, MB", ylabel="perplexity", xscale="log", yscale="log")
    axis.margins(0.15)  # room for the models' names
    axis.grid(alpha=0.2, which="both")
    for ticks, values in ((axis.xaxis, [r.bytes for r in rows]), (axis.yaxis, [r.ppl for r in rows])):
        wide = max(values) > 10 * min(values)

        def label(value: float, _: object, wide: bool = wide) -> str:
            """Label ticks as 30 instead of 3 x 10^1; over a wide range only 1, 2 and 5 of each decade."""
            return f"{value:g}" if not wide or f"{value:e}"[0] in "125" else ""

        ticks.set_major_formatter(label)
        ticks.set_minor_formatter(label)
    drawn.tight_layout()
    drawing.save(drawn, path)
