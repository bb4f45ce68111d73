"""The report of `generate` on an answer: its statistics, the kernels of --explain, the table of --profile."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowq_cli import console, thinking

if TYPE_CHECKING:
    from lowq_cli.engine import Generation
    from lowq_cli.engine.explain import LayerKernel
    from lowq_cli.models import CausalModel

PROFILE_ROWS = 12  # rows of the profile: the kernels that took the most time
ENDED = {"length": "--max-new-tokens", "stop": "the text ended", "context": "the context is full"}  # by finish_reason
TIMED = 32  # min. prompt tokens for which the prefill speed is shown: with fewer, the start dominates the time


def sampling_text(settings: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    """How tokens are sampled, and whether flags, the model's file or a default set it."""
    from lowq_cli.engine.generation_config import described

    if settings["temperature"]:
        return described(settings, origins)
    return f"the likeliest token ({origins['temperature']})"


def drawn_text(settings: Mapping[str, Any], origins: Mapping[str, str], seed: int) -> str:
    """The end of the line of statistics: the sampling settings and the seed; "" for greedy decoding."""
    return f"; {sampling_text(settings, origins)}, seed {seed}" if settings["temperature"] else ""


def exhausted(pieces: Iterable[Any]) -> bool:
    """Wait for an answer to end; returns whether Ctrl-C ended it."""
    try:
        for _ in pieces:
            pass
    except KeyboardInterrupt:
        return True
    return False


def with_thoughts(text: str, marks: Any) -> dict[str, str]:
    """An answer, and the model's thoughts before it, if any."""
    if marks is None:
        return {"text": text}
    thoughts, answer = thinking.split(text, marks)
    return {"text": answer, "thoughts": thoughts}


def numbers_of(model: "CausalModel", generation: "Generation", kernels: bool) -> dict[str, Any]:
    """The object that --json prints."""
    from dataclasses import asdict

    from lowq_cli import memory
    from lowq_cli.engine import explain

    g = generation
    batch = len(g.prompts)
    peak = memory.peak_bytes(model.device)  # before the roofline, whose measurement may allocate a buffer
    percent, how = explain.roofline(model, g.decoder, g.decode_tps, batch)
    several: dict[str, Any] = {"texts": g.texts, "tokens_of_all": g.tokens} if batch > 1 else {}
    if kernels:  # kilobytes of text: every kernel that refused, with its reason
        rows = explain.kernels_of(explain.called(model, g.decoder), batch, model.dtype)
        several["kernels"] = [asdict(k) for k in rows]
    return {
        **with_thoughts(g.text, g.marks),
        "tokens": g.tokens[0],
        "finish_reason": g.finish_reason,
        "prompt_tokens": len(g.prompts[0]),
        "prefill_tps": round(g.prefill_tps, 2),
        "decode_tps": round(g.decode_tps, 2),
        "ttft_s": round(g.ttft_s, 4),
        **({"pictures_s": round(g.pictures_s, 4)} if g.pictures_s else {}),
        "peak_memory_bytes": peak,
        "roofline_pct": percent,
        "roofline": how,
        "decoder": g.decoder.name,
        "decoder_reason": g.decoder.reason,
        "kv": g.decoder.kv,
        "drafts": g.drafting.numbers(len(g.tokens[0]) - 1, g.steps) if g.drafting else None,
        "seed": g.sampling.seed,
        **several,
    }


def count(n: int, what: str) -> str:
    return f"{n} {what}" + "s" * (n != 1)


def show_numbers(numbers: dict[str, Any], generation: "Generation") -> None:
    n = numbers
    new_tokens = sum(map(len, generation.tokens))
    speed = f" at {n['prefill_tps']:.0f}/s" if n["prompt_tokens"] >= TIMED else ""
    parts = {"the pictures": n.get("pictures_s"), "--explain": n.get("explain_s")}
    within = " and ".join(f"{seconds:.2f} s for {what}" for what, seconds in parts.items() if seconds)
    first = f", first token after {n['ttft_s']:.2f} s{within and f' (with {within})'}"
    read = f"{speed}{first}" if n["ttft_s"] else ""  # there may be no first token
    line = f"{count(n['prompt_tokens'], 'prompt token')}{read}; "
    speed = f" at {n['decode_tps']:.1f}/s" if n["decode_tps"] else ""
    line += f"{count(new_tokens, 'new token')}{speed} ({ENDED.get(n['finish_reason'], n['finish_reason'])})"
    if n["roofline_pct"] is not None:
        line += f", {n['roofline_pct']:.0f}% of the memory's speed"
    d = n["drafts"]
    if d and not d["drafted"] and d["drafter"] != "ngram":
        line += f"; {d['drafter']}: no drafts, as none promised to save time"
    elif d and d["drafted"]:
        line += f"; {d['drafter']} drafts in {d['steps_with_drafts']} of {d['steps']} steps: "
        line += f"{d['accepted']} of {d['drafted']} right, {d['tokens_per_step']:.2f} tokens a step"
    drawn = drawn_text(n["sampling"], n["sampling_from"], n["seed"])
    console.say(f"{line}; peak memory {console.size(n['peak_memory_bytes'])}; decoder {n['decoder']}{drawn}")


def show_profile(model: "CausalModel", generation: "Generation", timeline: Path) -> None:
    """--profile: write the timeline to a file, and the table of a step's time to stderr."""
    from lowq_cli.engine import explain
    from lowq_cli.engine.profiling import profile_steps

    g, batch = generation, len(generation.prompts)
    products = [r.layers for r in explain.kernels_of(explain.called(model, g.decoder), batch, model.dtype)]
    rows = profile_steps(g.decoder, g.prompts, g.sampling, timeline, list(dict.fromkeys(products)))
    total = explain.bytes_per_token(model, g.decoder, batch)
    speed, _ = explain.memory_speed(model.device, total)
    read = explain.bytes_by_layer(model, g.decoder, batch) | {rows[-1].what: total}
    most = sorted((r.us for r in rows[:-1]), reverse=True)[:PROFILE_ROWS]
    cells = []
    for r in [r for r in rows if r.us >= most[-1]]:
        percent = f"{100 * read[r.what] / r.us / speed * 1e6:.0f}%" if speed and r.what in read and r.us else ""
        each = f"{r.us / r.calls:.1f}" if r.calls else ""
        cells.append((r.what[:60], f"{r.us:.1f}", f"{r.calls:g}", each, f"{100 * r.us / rows[-1].us:.0f}%", percent))
    columns = ("one step", ">us", ">calls", ">us each", ">of the step", ">of the read roofline")
    end = None if any(row[-1] for row in cells) else -1
    console.table("", columns[:end], [row[:end] for row in cells])
    console.say(f"timeline: {timeline} (open it in ui.perfetto.dev)")


def _kernel_row(r: "LayerKernel") -> tuple[object, ...]:
    """One row of --explain; of a config only the values, whose names are in the kernel's file."""
    config = ",".join(str(v) for v in r.config.values())
    return r.layers, r.count, f"{r.N}x{r.K}", r.scheme, r.layout, r.kernel, config, r.chosen


def show_kernels(model: "CausalModel", generation: "Generation") -> None:
    """--explain: the decoder and its drafts on stderr, then `show_rows`."""
    from lowq_cli.engine import explain

    decoder = generation.decoder
    about = getattr(decoder, "about", lambda batch: "")(len(generation.prompts))
    console.say(
        f"decoder: {decoder.name}" + (f" ({decoder.reason})" if decoder.reason else "") + (f"; {about}" if about else "")
    )
    console.say(f"drafts: {generation.drafting.about() if generation.drafting else generation.why_no_drafts}")
    show_rows(explain.kernels_of(explain.called(model, decoder), len(generation.prompts), model.dtype))


def show_rows(rows: "Sequence[LayerKernel]") -> None:
    """The distinct layers with their kernels, then the reasons of the kernels that refused, those with one reason on a line."""
    columns = ("layers", ">count", ">NxK", "weight", "layout", "kernel", "config", "by")
    cells = [_kernel_row(r) for r in rows]
    shown = [i for i in range(len(columns)) if any(row[i] for row in cells)]  # drop empty columns: CPU kernels have no configs
    console.table("", [columns[i] for i in shown], [[row[i] for i in shown] for row in cells])
    choices = [r for r in rows if r.refused]
    layers: dict[tuple[str, str], list[str]] = {}
    for r in choices:
        for kernel, why in r.refused.items():
            layers.setdefault((kernel, why), []).append(r.layers)
    kernels: dict[tuple[str, str], list[str]] = {}  # kernels that refuse the same layers for the same reason share a line
    for (kernel, why), some in sorted(layers.items()):
        where = "" if len(some) == len(choices) else f" ({', '.join(some)})"
        kernels.setdefault((why, where), []).append(kernel)
    for (why, where), names in kernels.items():
        console.say(f"  {_named(names)}: {why}{where}")


def _named(kernels: list[str]) -> str:
    """The names; if there are many, the number of each kind."""
    from lowq_kernels.dispatch.registry import NAMED

    if len(kernels) <= NAMED:
        return ", ".join(kernels)
    kinds = [name.split("/")[0] for name in kernels]
    return f"{len(kernels)} kernels (" + ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)) + ")"
