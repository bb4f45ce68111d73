"""lowq generate: a checkpoint and a prompt -> text on stdout while it is generated, statistics on stderr."""

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowq_cli import console, thinking
from lowq_cli.commands import (
    EXIT_INTERRUPTED,
    Activations,
    Device,
    Draft,
    KeepAlive,
    KvCache,
    NoThink,
    Seed,
    Temperature,
    Threads,
    TopK,
    TopP,
    checkpoint_argument,
    seed_or_random,
    unescaped,
)
from lowq_packers.errors import UsageError

if TYPE_CHECKING:
    from lowq_cli.engine import Generation
    from lowq_cli.engine.explain import LayerKernel
    from lowq_cli.models import CausalModel, Tokenizer

EXAMPLES = """Examples:
  lowq generate --prompt 'Once upon a time'
  lowq generate ./my-model-lowq --prompt 'Hi!' --chat
  echo 'Dear Ada,' | lowq generate --prompt - --temperature 0.8
  lowq generate --prompts questions.jsonl
  lowq generate ./my-model-lowq --prompt 'What is this?' --image photo.jpg --chat"""
PROFILE_ROWS = 12  # rows of the profile: the kernels that took the most time
ENDED = {"length": "--max-new-tokens", "stop": "the text ended", "context": "the context is full"}  # by finish_reason
TIMED = 32  # min. prompt tokens for which the prefill speed is shown: with fewer, the start dominates the time
NAMED = 3  # max. kernels that --explain names when they refuse for one reason


def generate(
    checkpoint: Annotated[str | None, checkpoint_argument("Folder or hub id.")] = None,
    words: Annotated[str | None, typer.Argument(metavar="TEXT", help="As --prompt.")] = None,
    prompt: Annotated[str | None, typer.Option(help="The text to continue; - reads it from stdin.")] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help='A file (- is stdin) with a text, {"prompt": ...} or {"messages": [...]} per line; prints JSONL.',
        ),
    ] = None,
    image: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="A picture for the model (PNG, JPEG, WebP, GIF); repeatable.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a user's message (chat template).")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=0, help="Stop after this many tokens.")] = 256,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1: earlier tokens become less likely.")] = None,
    no_think: NoThink = False,
    lora: Annotated[str | None, typer.Option(metavar="DIR", help="Use this LoRA adapter (a folder of PEFT).")] = None,
    seed: Seed = None,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help=r"Stop before this text (\n: a newline); repeatable.")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=4096,
            help="Texts at once: of --prompts, or copies of the prompt.  [default: 1; of --prompts, many]",
        ),
    ] = None,
    device: Device = "auto",
    threads: Threads = None,
    kv: KvCache = "16",
    act: Activations = None,
    draft: Draft = "auto",
    keep_alive: KeepAlive = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show which kernel each layer uses, and why not others.")] = False,
    profile: Annotated[
        str | None, typer.Option(metavar="FILE", help="Also write a timeline of a few steps, for ui.perfetto.dev.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on stdout, nothing streamed; with --explain the kernels too.")
    ] = False,
) -> None:
    """Generate text with a checkpoint: text on stdout as it comes, statistics on stderr."""
    if words is not None:
        if prompt is not None or prompts is not None:
            raise UsageError("give the text once: after the checkpoint, or with --prompt or --prompts")
        prompt = words
    if prompt is None and prompts is None:
        checkpoint, prompt = _bare_text(checkpoint)
    elif prompt is not None and prompts is not None:
        raise UsageError("give one of --prompt TEXT and --prompts FILE.jsonl")
    if prompts is not None and (explain or profile):
        raise UsageError(f"--{'explain' if explain else 'profile'} measures one prompt; give it with --prompt")
    if prompts is not None and image:
        raise UsageError("--image needs one prompt; give it with --prompt")
    if profile is not None:
        _check_writable(profile)
    drawn = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "repetition_penalty": repetition_penalty}
    settings: dict[str, Any] = {**drawn} | {
        "chat": chat,
        "think": False if no_think else None,
        "max_new_tokens": max_new_tokens,
        "kv": kv,
        "act": act,
        "draft": draft,
        "lora": lora,
        "stop": [unescaped(s) for s in stop or ()],
        "images": image or [],
    }
    here = f"{'--explain' if explain else '--profile'} measures this process" if explain or profile else ""
    here = here or ("several texts need a process of their own" if prompts is not None or (batch or 1) > 1 else "")
    local_only = threads is not None or draft != "auto" or bool(image) or lora is not None
    here = here or ("--threads, --draft, --lora and pictures do not go to a running server" if local_only else "")
    answer(checkpoint, prompt, prompts, settings, seed, "greedy", batch, device, explain, profile, as_json, keep_alive, here)


def answer(
    checkpoint: str | None,
    prompt: str | None,
    prompts: str | None,
    settings: dict[str, Any],
    seed: int | None,
    default: str,
    batch: int | None = None,
    device: str = "auto",
    explain: bool = False,
    profile: str | None = None,
    as_json: bool = False,
    keep_alive: str | None = None,
    here: str = "",
) -> None:
    """Answer a prompt, or a file of them, and say how; for the arguments see `generate`.

    settings: of `engine.stream`; those of `Sampling` that are None or missing are the model's generation_config.json's, and
    where that names none, those of `default`: "greedy" or "conversation". chat None: where there is a template. here: why no
    running server is asked, "" where one may be.
    """
    from lowq_cli import state

    many = None if prompts is None else _read_prompts(prompts)
    text = sys.stdin.read() if prompt == "-" else prompt
    if prompt == "-" and not text:
        raise UsageError("stdin is empty; pipe some text in, or use --prompt TEXT")
    folder, seed = state.checkpoint_or_last(checkpoint), seed_or_random(seed)
    here = here or ("pictures do not go to a running server" if settings.get("images") else "")
    if not here:
        here = _answered_by_a_server(folder, text, settings, seed, default, device, as_json, keep_alive)
        if not here:
            return
    if explain:
        console.say(f"computed in this process: {here}")

    from lowq_cli.devices import wake
    from lowq_cli.engine.generation_config import DEFAULTS, NAMES, settle
    from lowq_cli.engine.sampling import Sampling
    from lowq_cli.files.source import check_there
    from lowq_cli.files.templates import has_template

    given = {n: v for n in NAMES if (v := settings.get(n)) is not None}
    Sampling(**given)  # report values out of range before anything is loaded
    _check_pictures(settings.get("images", ()))
    check_there(folder)
    adapter = None
    if (lora := settings.pop("lora", None)) is not None:
        from lowq_cli.files.adapter import read_adapter

        adapter = read_adapter(lora)
    if settings["chat"] is None:
        settings["chat"] = has_template(state.user_path(folder))
    wake(device)
    with console.status(f"loading {folder}"):
        from lowq_cli.engine import stream
        from lowq_cli.engine.drafts.drafter_choice import check as check_draft
        from lowq_cli.engine.open_model import ready
        from lowq_kernels.decode.kv import check

        check(settings.get("kv", "16"))
        check_draft(settings.get("draft", "auto"))
        model, tokenizer = ready(folder, device, console.warn)
        if (act := settings.pop("act", None)) is not None:
            from lowq_cli.evaluate.eight_bits import apply_act

            apply_act(model, tokenizer, act, console.say)
        if adapter is not None:
            from lowq_cli.engine.lora import attach

            attach(model, [adapter])
        drawn, origins = settle(model, given, DEFAULTS[default])
    generation_settings = {n: v for n, v in settings.items() if n not in NAMES}
    settings = {"kv": "16", "draft": "auto", "stop": []} | generation_settings | drawn | {"seed": seed}
    if many is not None:
        _answer_all(model, tokenizer, many, batch, settings, origins, as_json)
        return
    batch = batch or 1
    if batch > 1 and not settings["temperature"]:
        console.say(f"all {batch} texts will be the same; --temperature 1 samples different ones")
    generation = stream(model, tokenizer, text, batch=batch, **settings)  # type: ignore[arg-type]
    _compile(model, generation)
    if explain:
        console.say(f"sampling: {_sampling(drawn, origins)}")
        _show_kernels(model, generation)
    interrupted = _write_text(generation, live=not as_json, batch=batch)
    numbers = _numbers(model, generation, explain) | {"sampling": drawn, "sampling_from": origins}
    if as_json:
        console.out_json(numbers)
    else:
        _show_numbers(numbers, generation)
    if profile is not None and not interrupted:
        _show_profile(model, generation, Path(profile))
    if interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


def _check_pictures(files: Sequence[str]) -> None:
    """Raise NotFoundError or UsageError for a picture that cannot be read, before a model is loaded."""
    if files:
        from lowq_cli.files.picture_file import read_picture

        for file in files:
            read_picture(file)


def _answered_by_a_server(
    folder: str,
    text: str | None,
    settings: Mapping[str, Any],
    seed: int,
    default: str,
    device: str,
    as_json: bool,
    keep_alive: str | None,
) -> str:
    """Have a running server of this user answer, if one has the model loaded, or leave one behind; "", or why none did."""
    from lowq_cli import running

    body = request_body(folder, text, settings, seed, default, device)
    try:
        reply = running.ask_or_leave(body, keep_alive, device)
    except running.Declined as e:
        return str(e)
    facts = reply.told
    marks = facts.pop("marks", None)
    interrupted = _exhausted(reply) if as_json else thinking.write(reply, marks)
    if as_json:
        unknown = dict.fromkeys(("peak_memory_bytes", "roofline_pct", "roofline", "drafts"))
        numbers = {**_apart(reply.text, marks), "tokens": reply.tokens[0], "finish_reason": reply.finish_reason}
        numbers |= {n: round(getattr(reply, n), 4) for n in ("prefill_tps", "decode_tps", "ttft_s")}
        console.out_json({**numbers, "kv": body["kv"], "decoder_reason": "", **unknown, **facts})
    else:
        console.out("")
        new_tokens, read = len(reply.tokens[0]), _count(facts["prompt_tokens"], "prompt token")
        first = f", first token after {reply.ttft_s:.2f} s" if reply.ttft_s else ""
        speed = f" at {reply.decode_tps:.1f}/s" if reply.decode_tps else ""
        drawn = (
            f"; {_sampling(facts['sampling'], facts['sampling_from'])}, seed {seed}" if facts["sampling"]["temperature"] else ""
        )
        ended = ENDED.get(reply.finish_reason, reply.finish_reason)
        line = f"{read}{first}; {_count(new_tokens, 'new token')}{speed} ({ended})"
        console.say(f"{line}; by the running server (process {facts['process']}){drawn}")
    if interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    return ""


def request_body(folder: str, text: Any, settings: Mapping[str, Any], seed: int, default: str, device: str) -> dict[str, Any]:
    """What a running server is asked; text: a prompt, or messages."""
    from lowq_cli import running

    given = {n: settings.get(n) for n in ("temperature", "top_p", "top_k", "repetition_penalty")}
    more = {"chat": settings["chat"], "max_new_tokens": settings["max_new_tokens"], "stop": settings.get("stop", [])}
    path = {"path": running.model_path(folder), "kv": settings.get("kv", "16"), "device": device}
    path |= {} if settings.get("think") is None else {"think": settings["think"]}
    return {**path, "prompt": text, "given": given, "default": default, "seed": seed, **more}


def _sampling(settings: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    """How tokens are chosen, and which of flags, file and default said so."""
    from lowq_cli.engine.generation_config import described

    if settings["temperature"]:
        return described(settings, origins)
    return f"the likeliest token ({origins['temperature']})"


def _compile(model: "CausalModel", generation: "Generation") -> None:
    """Compile this generation's kernels side by side; a progress line, but only where they are not in the caches yet."""
    from lowq_cli.engine.precompiling import warm

    with ExitStack() as shown:
        bar: list[Callable[[int, str], None]] = []

        def advance(n: int, of: int) -> None:
            if not bar:
                bar.append(shown.enter_context(console.progress("compile", of)))
            bar[0](n, f"{n} of {of} kernels")

        warm(model, generation.decoder, generation.prompts, generation.sampling, advance)


def _bare_text(given: str | None) -> tuple[None, str]:
    """A text given in the place of the checkpoint, for the last one to go on from. Raises UsageError where it may be either."""
    if given in (None, "demo") or Path(str(given)).exists():
        raise UsageError("give one of --prompt TEXT and --prompts FILE.jsonl")
    assert given
    if not any(map(str.isspace, given)):
        raise UsageError(
            f"{given} may be a text or a model; for a text: --prompt {shlex.quote(given)}, for a model add --prompt"
        )
    return None, given


def _read_prompts(where: str) -> list[dict[str, Any]]:
    """The lines of a JSONL file or stdin: each "prompt" or "messages", and its other keys.

    Raises NotFoundError, UsageError (with a line).
    """
    from lowq_cli.calibrate.texts import read_utf8

    try:
        text = sys.stdin.read() if where == "-" else read_utf8(Path(where), "prompts in")
    except UnicodeDecodeError:
        raise UsageError("stdin is not UTF-8 text; --prompts takes JSONL") from None
    requests = []
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1):  # str.splitlines also splits at U+2028
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            if line.lstrip().startswith(("{", "[", '"')):  # intended as JSON
                raise UsageError(
                    f'line {number} of {where} is not JSON; write a text as it is, "text" or {{"prompt": "text"}}'
                ) from None
            value = line.strip()
        line = value if isinstance(value, dict) else {"prompt": value}
        if "messages" in line and "prompt" not in line:
            if not _are_messages(line["messages"]):
                raise UsageError(
                    f"line {number} of {where}: messages must be an array of objects such as "
                    '{"role": "user", "content": "text"}'
                )
        elif "images" in line or "image" in line:
            raise UsageError(f"line {number} of {where} has pictures, which --prompts does not take; use --prompt with --image")
        elif not isinstance(line.get("prompt"), str):
            raise UsageError(f'line {number} of {where} holds no text; write it as "text" or {{"prompt": "text"}}')
        requests.append(line)
    if not requests:
        raise UsageError(f"{where} holds no prompts")
    return requests


def _are_messages(value: Any) -> bool:
    """Whether a value is a conversation: an array of objects, each with a role and a content that are texts."""
    each = value if isinstance(value, list) else []
    return bool(each) and all(isinstance(m, dict) and all(isinstance(m.get(k), str) for k in ("role", "content")) for m in each)


def _check_writable(timeline: str) -> None:
    """Raise UsageError where --profile could not write its file after the work."""
    folder = next(p for p in Path(timeline).absolute().parents if p.exists())  # folders below it will be created
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"--profile {timeline}: lowq cannot write to the folder {folder}")


def _answer_all(
    model: "CausalModel",
    tokenizer: "Tokenizer",
    asked: list[dict[str, Any]],
    batch: int | None,
    settings: dict[str, Any],
    origins: Mapping[str, str],
    as_json: bool,
) -> None:
    """One JSON line per prompt on stdout, with its line's other keys, in order, `batch` side by side; the totals on stderr.

    as_json: all lines in one object. Every prompt is encoded, and told if it is too long, before the first is answered.
    """
    import time

    from lowq_cli.serving.offline import answers

    settings.pop("images", None)
    contents = [line.get("prompt", line.get("messages")) for line in asked]
    ids = _encode_all(model, tokenizer, contents, settings.pop("chat"), settings.pop("think", None))
    lines, tokens, began = [], 0, time.perf_counter()
    for given, a in zip(asked, answers(model, tokenizer, ids, settings, batch), strict=True):
        line = {**given, "text": a.text, "tokens": a.tokens, "finish_reason": a.finish_reason}
        if as_json:
            lines.append(line)
        else:
            console.out(console.to_json(line))
        tokens += len(a.tokens)
    speed = tokens / max(time.perf_counter() - began, 1e-9)
    if as_json:
        console.out_json({"results": lines, "new_tokens": tokens, "tps": round(speed, 2), "seed": settings["seed"]})
    totals = f"{_count(len(asked), 'prompt')}, {_count(tokens, 'new token')}"
    drawn = (
        f"; {_sampling({n: settings[n] for n in origins}, origins)}, seed {settings['seed']}" if settings["temperature"] else ""
    )
    console.say(f"{totals} at {speed:.1f}/s, prefill included{drawn}")


def _encode_all(
    model: "CausalModel", tokenizer: "Tokenizer", prompts: list[Any], chat: bool, think: bool | None
) -> list[list[int]]:
    """The token ids of each prompt, a text or messages. Raises UsageError naming the first that cannot be answered."""
    from lowq_cli.engine.prompts import check_length, encode, encode_messages

    encoded = []
    for number, text in enumerate(prompts, 1):
        try:
            one = isinstance(text, str)
            ids = encode(tokenizer, text, chat, think=think) if one else encode_messages(tokenizer, text, think=think)
            encoded.append(ids)
            check_length(model, len(encoded[-1]))
        except UsageError as e:
            raise UsageError(f"prompt {number} of {len(prompts)}: {e}") from None
    return encoded


def _exhausted(pieces: Iterable[Any]) -> bool:
    """Wait for a text; whether Ctrl-C ended it."""
    try:
        for _ in pieces:
            pass
    except KeyboardInterrupt:
        return True
    return False


def _apart(text: str, marks: Any) -> dict[str, str]:
    """An answer, and where a model thinks before it what it thought."""
    if marks is None:
        return {"text": text}
    thoughts, answer = thinking.split(text, marks)
    return {"text": answer, "thoughts": thoughts}


def _write_text(generation: "Generation", live: bool, batch: int) -> bool:
    """Stream the text to stdout (one sequence live, several as blocks at the end); whether Ctrl-C ended it."""
    interrupted = thinking.write(generation, generation.marks) if live and batch == 1 else _exhausted(generation.pieces())
    if live and batch == 1:
        console.out("")
    elif live:
        for i, text in enumerate(generation.texts):
            console.out(f"[{i + 1}] {text}")
    return interrupted


def _numbers(model: "CausalModel", generation: "Generation", kernels: bool) -> dict[str, Any]:
    """What --json prints."""
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
        **_apart(g.text, g.marks),
        "tokens": g.tokens[0],
        "finish_reason": g.finish_reason,
        "prompt_tokens": len(g.prompts[0]),
        "prefill_tps": round(g.prefill_tps, 2),
        "decode_tps": round(g.decode_tps, 2),
        "ttft_s": round(g.ttft_s, 4),
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


def _count(n: int, what: str) -> str:
    return f"{n} {what}" + "s" * (n != 1)


def _show_numbers(numbers: dict[str, Any], generation: "Generation") -> None:
    n = numbers
    new_tokens = sum(map(len, generation.tokens))
    speed = f" at {n['prefill_tps']:.0f}/s" if n["prompt_tokens"] >= TIMED else ""
    read = f"{speed}, first token after {n['ttft_s']:.2f} s" if n["ttft_s"] else ""  # there may be no first token
    line = f"{_count(n['prompt_tokens'], 'prompt token')}{read}; "
    speed = f" at {n['decode_tps']:.1f}/s" if n["decode_tps"] else ""
    line += f"{_count(new_tokens, 'new token')}{speed} ({ENDED.get(n['finish_reason'], n['finish_reason'])})"
    if n["roofline_pct"] is not None:
        line += f", {n['roofline_pct']:.0f}% of the memory's speed"
    if n["drafts"] and n["drafts"]["drafted"]:
        d = n["drafts"]
        line += f"; {d['drafter']} drafts: {d['accepted']} of {d['drafted']} right, {d['tokens_per_step']:.2f} tokens a step"
    drawn = "" if generation.sampling.greedy else f"; {_sampling(n['sampling'], n['sampling_from'])}, seed {n['seed']}"
    console.say(f"{line}; peak memory {console.size(n['peak_memory_bytes'])}; decoder {n['decoder']}{drawn}")


def _show_profile(model: "CausalModel", generation: "Generation", timeline: Path) -> None:
    """--profile: the timeline into a file, where a step's time goes on stderr."""
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
    """One row of --explain; a config as its values alone, the kernel's file names them."""
    config = ",".join(str(v) for v in r.config.values())
    return r.layers, r.count, f"{r.N}x{r.K}", r.scheme, r.layout, r.kernel, config, r.chosen


def _show_kernels(model: "CausalModel", generation: "Generation") -> None:
    """--explain: one row per distinct layer on stderr, then the reasons of those that refused."""
    from lowq_cli.engine import explain

    decoder = generation.decoder
    about = getattr(decoder, "about", lambda batch: "")(len(generation.prompts))
    console.say(
        f"decoder: {decoder.name}" + (f" ({decoder.reason})" if decoder.reason else "") + (f"; {about}" if about else "")
    )
    console.say(f"drafts: {generation.drafting.about() if generation.drafting else generation.why_no_drafts}")
    rows = explain.kernels_of(explain.called(model, decoder), len(generation.prompts), model.dtype)
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
    """The names, or of many how many there are of each kind."""
    if len(kernels) <= NAMED:
        return ", ".join(kernels)
    kinds = [name.split("/")[0] for name in kernels]
    return f"{len(kernels)} kernels (" + ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)) + ")"
