"""lowq generate: a checkpoint and a prompt -> text on stdout while it is generated, statistics on stderr."""

import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
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
    TemperatureOrGreedy,
    Threads,
    TopK,
    TopP,
    checkpoint_argument,
    seed_or_random,
    unescaped,
)
from lowq_cli.generation.prompt_file import answer_all, read_prompts
from lowq_cli.generation.running_server import answered_by_a_server
from lowq_cli.generation.statistics import exhausted, numbers_of, sampling_text, show_kernels, show_numbers, show_profile
from lowq_packers.errors import UsageError

if TYPE_CHECKING:
    from lowq_cli.engine import Generation
    from lowq_cli.models import CausalModel

EXAMPLES = """Examples:
  lowq generate --prompt 'Once upon a time'
  lowq generate ./my-model-lowq --prompt 'Hi!' --chat
  echo 'Dear Ada,' | lowq generate --prompt - --temperature 0.8
  lowq generate --prompts questions.jsonl
  lowq generate ./my-model-lowq --prompt 'What is this?' --image photo.jpg --chat"""


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
    temperature: TemperatureOrGreedy = None,
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
            min=1, max=4096, help="Texts at once: of --prompts, or copies of the prompt.  [default: 1; of --prompts, many]"
        ),
    ] = None,
    device: Device = "auto",
    threads: Threads = None,
    kv: KvCache = "16",
    act: Activations = None,
    draft: Draft = "auto",
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="The same text with every --draft, also on a GPU; slower there.")
    ] = False,
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
    if prompts is not None and deterministic:
        raise UsageError("--deterministic needs one prompt; give it with --prompt")
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
        "deterministic": deterministic,
        "lora": lora,
        "stop": [unescaped(s) for s in stop or ()],
        "images": image or [],
    }
    here = f"{'--explain' if explain else '--profile'} measures this process" if explain or profile else ""
    here = here or ("several texts need a process of their own" if prompts is not None or (batch or 1) > 1 else "")
    local_only = threads is not None or act is not None or draft != "auto" or deterministic or bool(image) or lora is not None
    here = here or (
        "--threads, --act, --draft, --deterministic, --lora and pictures do not go to a running server" if local_only else ""
    )
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

    many = None if prompts is None else read_prompts(prompts)
    text = sys.stdin.read() if prompt == "-" else prompt
    if prompt == "-" and not text:
        raise UsageError("stdin is empty; pipe some text in, or use --prompt TEXT")
    folder, seed = state.checkpoint_or_last(checkpoint), seed_or_random(seed)
    here = here or ("pictures do not go to a running server" if settings.get("images") else "")
    if not here:
        here, interrupted = answered_by_a_server(folder, text, settings, seed, default, device, as_json, keep_alive)
        if interrupted:
            raise typer.Exit(EXIT_INTERRUPTED)
        if not here:
            return
    if keep_alive is not None:
        console.warn(f"no server is left running: {here}")
    if explain:
        console.say(f"computed in this process: {here}")

    from lowq_cli.engine.generation_config import DEFAULTS, NAMES, settle
    from lowq_cli.engine.sampling import Sampling
    from lowq_cli.files.source import check_there
    from lowq_cli.files.templates import has_template
    from lowq_cli.hf import chat_template

    given = {n: v for n in NAMES if (v := settings.get(n)) is not None}
    Sampling(**given)  # report values out of range before anything is loaded
    check_there(folder)
    check_pictures(folder, settings.get("images", ()))
    if settings["chat"] is None:
        settings["chat"] = has_template(state.user_path(folder))
    if settings["chat"]:
        chat_template.begin(folder)
    model, tokenizer, act = _loaded(folder, settings, device)
    drawn, origins = settle(model, given, DEFAULTS[default])
    generation_settings = {n: v for n, v in settings.items() if n not in NAMES}
    settings = {"kv": "16", "draft": "auto", "stop": []} | generation_settings | drawn | {"seed": seed}
    if many is not None:
        if settings["draft"] not in ("auto", "none"):
            console.warn(f"--draft {settings['draft']} is not used: the texts of --prompts take no drafts")
        answer_all(model, tokenizer, many, batch, settings, origins, act, as_json)
        return
    from lowq_cli.engine import stream

    batch = batch or 1
    if batch > 1 and not settings["temperature"]:
        console.say(f"all {batch} texts will be the same; --temperature 1 samples different ones")
    generation = stream(model, tokenizer, text, batch=batch, **settings)  # type: ignore[arg-type]
    if settings["draft"] not in ("auto", "none") and not generation.drafting:
        console.warn(f"--draft {settings['draft']} is not used: {generation.why_no_drafts.removeprefix('none: ')}")
    _compile(model, generation)
    explain_s = 0.0
    if explain:
        began = time.perf_counter()
        console.say(f"sampling: {sampling_text(drawn, origins)}")
        show_kernels(model, generation)
        explain_s = time.perf_counter() - began
    interrupted = _write_text(generation, live=not as_json, batch=batch)
    numbers = {"model": folder} | numbers_of(model, generation, explain) | {"sampling": drawn, "sampling_from": origins}
    numbers |= act | ({"explain_s": round(explain_s, 4)} if explain else {})
    if as_json:
        console.out_json(numbers)
    else:
        show_numbers(numbers, generation)
    if profile is not None and not interrupted:
        show_profile(model, generation, Path(profile))
    if interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


def _loaded(folder: str, settings: dict[str, Any], device: str) -> tuple[Any, Any, dict[str, str]]:
    """The model, its tokenizer and `act_facts`; `lora` and `act`, which are applied to the model, leave the settings."""
    from lowq_cli.devices import wake

    adapter = None
    if (lora := settings.pop("lora", None)) is not None:
        from lowq_cli.files.adapter import read_adapter

        adapter = read_adapter(lora)
    wake(device)
    with console.status(f"loading {folder}"):
        from lowq_cli.engine.drafts.drafter_choice import check as check_draft
        from lowq_cli.engine.open_model import ready
        from lowq_cli.hf.activations import act_facts
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
    return model, tokenizer, act_facts(model, act)


def check_pictures(model: str, files: Sequence[str]) -> None:
    """Raise an error, before a model is loaded, for a picture that cannot be read, and for a model that takes none."""
    if files:
        from lowq_cli.files.picture_file import read_picture
        from lowq_cli.interop.sight import check_sight

        for file in files:
            read_picture(file)
        check_sight(model)


def _compile(model: "CausalModel", generation: "Generation") -> None:
    """Compile this generation's kernels in parallel, with a progress line unless they are in the caches."""
    from lowq_cli.engine.precompiling import warm

    with ExitStack() as shown:
        bar: list[Callable[[int, str], None]] = []

        def advance(n: int, of: int) -> None:
            if not bar:
                bar.append(shown.enter_context(console.progress("compile", of)))
            bar[0](n, f"{n} of {of} kernels")

        warm(model, generation.decoder, generation.prompts, generation.sampling, advance)


def _bare_text(given: str | None) -> tuple[None, str]:
    """A text given in place of the checkpoint, for the last checkpoint to continue. Raises UsageError if it may be either."""
    if given in (None, "demo") or Path(str(given)).exists():
        piped = "" if sys.stdin.isatty() else "; --prompt - reads the text from stdin"
        raise UsageError(f"give one of --prompt TEXT and --prompts FILE.jsonl{piped}")
    assert given
    if not any(map(str.isspace, given)):
        raise UsageError(
            f"{given} may be a text or a model; for a text: --prompt {shlex.quote(given)}, for a model add --prompt"
        )
    return None, given


def _check_writable(timeline: str) -> None:
    """Raise UsageError before the work if --profile cannot write its file."""
    folder = next(p for p in Path(timeline).absolute().parents if p.exists())  # folders below it will be created
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"--profile {timeline}: lowq cannot write to the folder {folder}")


def _write_text(generation: "Generation", live: bool, batch: int) -> bool:
    """Stream the text to stdout (one sequence live, several as blocks at the end); whether Ctrl-C ended it."""
    interrupted = thinking.write(generation, generation.marks) if live and batch == 1 else exhausted(generation.pieces())
    if live and batch == 1:
        console.out("")
    elif live:
        for i, text in enumerate(generation.texts):
            console.out(f"[{i + 1}] {text}")
    return interrupted
