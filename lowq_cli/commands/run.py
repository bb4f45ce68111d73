"""lowq run: a model and a prompt -> an answer; a model that is not quantized is first quantized into the cache."""

import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowq_cli import completion, console, recipes
from lowq_cli.commands import Device, Draft, KeepAlive, NoThink, Seed, Temperature
from lowq_cli.run_output import follow
from lowq_packers.errors import UsageError

if TYPE_CHECKING:
    from lowq_cli.plan.recipe import Recipe

EXAMPLES = """Examples:
  lowq run demo 'Once upon a time'
  lowq run meta-llama/Llama-3.1-8B-Instruct 'Why is the sky blue?'
  lowq run ./my-model 'What is this?' photo.jpg
  lowq run ./my-model --recipe small   (no text: a conversation)"""


def run(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="Model folder, hub id, demo, a checkpoint or a GGUF file.", autocompletion=completion.models
        ),
    ],
    words: Annotated[str | None, typer.Argument(metavar="TEXT", help="The prompt. Default: a conversation.")] = None,
    pictures: Annotated[
        list[str] | None, typer.Argument(metavar="PICTURE", help="Picture files that the text is about.")
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE.toml",
            help=f"How to quantize it: {', '.join(recipes.names())}, or a file.  [default: 4 bits, no calibration]",
            autocompletion=completion.words(*recipes.names()),
        ),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="As TEXT.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Stop after this many tokens.")] = 256,
    temperature: Temperature = None,
    seed: Seed = None,
    device: Device = "auto",
    draft: Draft = "auto",
    keep_alive: KeepAlive = None,
    no_think: NoThink = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing streamed.")] = False,
) -> None:
    """Answer a prompt with a model; the first run quantizes it into the cache. Without a prompt: a conversation."""
    from lowq_cli import state
    from lowq_cli.commands.chat import chat
    from lowq_cli.commands.generate import answer, check_pictures

    if prompt is None:
        text, pictures = _prompt_and_pictures(words, pictures or [], model)
    else:  # what stands behind the model are pictures then
        text, pictures = prompt, [*([] if words is None else [words]), *(pictures or [])]
    check_pictures(model, pictures)
    folder = state.run_of(model, recipe) or _quantized(model, recipe, device)
    state.remember_run(model, recipe, folder)
    if text is None and sys.stdin.isatty() and not as_json:
        drawn = {"temperature": temperature, "seed": seed, "no_think": no_think}
        chat(folder, max_new_tokens=max_new_tokens, **drawn, device=device, draft=draft, keep_alive=keep_alive)  # type: ignore[arg-type]
        return
    settings: dict[str, Any] = {"temperature": temperature, "max_new_tokens": max_new_tokens, "chat": None}
    settings |= {"images": pictures, "draft": draft, "think": False if no_think else None}
    here = "--draft and pictures do not go to a running server" if draft != "auto" or pictures else ""
    text = "-" if text is None else text
    answer(folder, text, None, settings, seed, "conversation", device=device, as_json=as_json, keep_alive=keep_alive, here=here)


def _prompt_and_pictures(text: str | None, pictures: list[str], model: str) -> tuple[str | None, list[str]]:
    """The prompt and the pictures, which may come first.

    Raises UsageError for pictures without a prompt, and what `read_picture` raises for a name of a picture that is none.
    """
    from lowq_cli.files.picture_file import is_picture, named_as_picture, read_picture
    from lowq_cli.state import as_argument

    for given in () if text is None else (text, *pictures):
        if named_as_picture(given) and not is_picture(given):
            read_picture(given)
    if text is None or not is_picture(text):
        return text, pictures
    prompts = [given for given in pictures if not Path(given).expanduser().is_file()]
    if not prompts:
        line = f"lowq run {as_argument(model)} 'What is this?' {as_argument(text)}"
        raise UsageError(f"{text} is a picture; say what you ask about it: {line}")
    return prompts[0], [text, *(given for given in pictures if given is not prompts[0])]


def _quantized(model: str, recipe: str | None, device: str) -> str:
    """The model itself where its weights are low-bit already, or the checkpoint in the cache, made now if it is not there."""
    from lowq_cli import state
    from lowq_cli.devices import pick_device, wake
    from lowq_cli.files.checkpoint import is_checkpoint
    from lowq_cli.files.source import check_there
    from lowq_cli.plan.recipe import make_recipe
    from lowq_packers import home

    parsed = make_recipe(recipe)
    check_there(model)
    if is_checkpoint(state.user_path(model)):
        return model
    wake(device)
    with console.status(f"reading {model}"):
        if parsed.layout == "auto" and not parsed.in_blocks and pick_device(device).type == "cpu":
            parsed = replace(parsed, layout="cpu")  # it will be read here, and needs no repacking then
        from lowq_cli.interop.foreign import coded_types, open_foreign, stays_packed
        from lowq_cli.plan.plan import default_out

        with open_foreign(model) as source:
            if recipe is None and stays_packed(source):
                return model  # quantized by another tool: `generate` imports it
            rounded_again = coded_types(source)
            target = home.cache_dir() / "runs" / f"{default_out(model, parsed).name}-{source.identity}"
    while not is_checkpoint(target) and not _quantize(model, parsed, target, device, rounded_again):
        pass  # another process wrote it meanwhile; if that ended early, this one continues its work
    return str(target)


def _quantize(model: str, recipe: "Recipe", target: Path, device: str, rounded_again: str) -> bool:
    """Quantize into the cache; False after waiting for another process that did so already, or that ended early.

    rounded_again: what the weights are stored as, if they are quantized already.
    """
    from lowq_cli import state
    from lowq_cli.commands.quantize import compiling, maker
    from lowq_cli.files.folder import BusyError
    from lowq_cli.files.locks import is_held
    from lowq_cli.files.waiting import wait
    from lowq_cli.run.output_folder import params_written
    from lowq_cli.run.pipeline import execute, prepare

    with ExitStack() as stack:
        try:
            with console.status(f"reading {model}"):
                prepared = stack.enter_context(prepare(model, recipe, target, device, make=maker(model, device)))
            plan = prepared.plan
            if is_held(target):
                wait(target, plan.params, lambda: params_written(target, plan))
                return False
            size = console.size(plan.nbytes)
            console.say(f"quantizing {plan.source} into the cache (lowq ls): {size}, {plan.bpw:.2f} bits per weight")
            if rounded_again:
                kept = f"lowq generate {state.as_argument(model)}"
                console.say(
                    f"note: {plan.source} is quantized already ({rounded_again}) and is rounded once more; "
                    f"closer to it: --recipe best (8 bits), or {kept}, which does not round again"
                )
            with compiling(prepared):
                follow(execute(prepared), plan)
        except BusyError as e:  # by a process that began meanwhile, or whose search this one needs the result of
            if e.held is None:
                raise
            wait(e.held)
            return False
    return True
