"""Generate answers to many prompts, each as soon as there is room for it: the engine of `generate --prompts`."""

import queue
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from lowq_cli.engine.prompts import context_limit, stop_ids, stream
from lowq_cli.engine.sampling import Sampling
from lowq_cli.engine.state import BLOCK
from lowq_cli.engine.stopping import check
from lowq_cli.serving import continuous
from lowq_cli.serving.continuous import MOST, MOST_RUNNING, ContinuousEngine
from lowq_cli.serving.request import Draw, Event, Request
from lowq_cli.serving.writing import Answer, TextWriter
from lowq_kernels.decode.kv import PLAIN

SEEDS = 1 << 63


def answers(
    model: Any, tokenizer: Any, prompts: Sequence[list[int]], settings: Mapping[str, Any], batch: int | None = None
) -> Iterator[Answer]:
    """Yield the answers in order: each prompt starts as soon as there is room for it, or in batches of `batch` prompts.

    settings: the settings of `Sampling`, and max_new_tokens, stop and kv.
    """
    if continuous.why_not(model) is None:
        how = Sampling(**{f.name: settings[f.name] for f in fields(Sampling) if f.name in settings})
        yield from answer_all(
            model, tokenizer, prompts, settings["max_new_tokens"], how, settings["stop"], batch, settings["kv"]
        )
        return
    at_once = batch or 1
    for start in range(0, len(prompts), at_once):
        g = stream(model, tokenizer, prompts[start : start + at_once], **settings)
        for _ in g.pieces():
            pass
        yield from map(Answer, g.texts, g.tokens, g.finish_reasons)


def answer_all(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    sampling: Sampling,
    stop: Sequence[str] = (),
    at_once: int | None = None,
    kv: str = PLAIN,
    engine_type: type[ContinuousEngine] = ContinuousEngine,
) -> Iterator[Answer]:
    """Yield the answers in the order of the prompts, the first ones while later ones are still computed.

    Args:
        model: a model for which `continuous.why_not` returns None.
        prompts: the token ids of each, at least one, fewer than the model's context.
        sampling: the settings for all prompts; prompt i has the seed `sampling.seed + i`.
        at_once: max. sequences computed at once; None: the default of the device.
        kv: storage format of keys and values (`decode.kv.KINDS`).
        engine_type: the engine that computes them.
    """
    stops, limit, ends = check(stop), context_limit(model), stop_ids(model, tokenizer)
    rooms = [max_new_tokens if limit is None else min(max_new_tokens, limit - len(p)) for p in prompts]
    if max_new_tokens == 0:
        yield from (Answer(finish_reason="length") for _ in prompts)
        return
    running = min(at_once or MOST[model.device.type], len(prompts), MOST_RUNNING)
    longest = sorted((len(p) + room + BLOCK for p, room in zip(prompts, rooms, strict=True)), reverse=True)
    tokens, reads = sum(longest[:running]), sum(map(len, prompts))
    engine = engine_type(model, len(prompts), running, tokens, kv=kv, reads=reads)
    events: queue.SimpleQueue[list[tuple[int, Event]]] = queue.SimpleQueue()
    engine.start(events.put)
    try:
        writers = {}
        for i, (prompt, room) in enumerate(zip(prompts, rooms, strict=True)):
            s = sampling
            draw = Draw(s.temperature, s.top_k, s.top_p, s.repetition_penalty, (s.seed + i) % SEEDS)
            number = engine.submit(Request(tuple(prompt), room, ends, draw))
            limited = "length" if room == max_new_tokens else "context"
            writers[number] = TextWriter(tokenizer, prompt, stops, ends, limited)
        for writer in list(writers.values()):
            while not writer.answer.finish_reason:
                for n, event in events.get():
                    if writers[n].take(event) and event.finish_reason is None:
                        engine.cancel(n)
            yield writer.answer
    finally:
        engine.stop(0)
