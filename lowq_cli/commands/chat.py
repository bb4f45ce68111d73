"""lowq chat: talk to a checkpoint; the cache is kept between turns, so an answer never waits for the whole conversation."""

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowq_cli import console
from lowq_packers.errors import UsageError

if TYPE_CHECKING:
    from lowq_cli.engine import Generation

EXAMPLES = """Examples:
  lowq chat
  lowq chat ./my-model-lowq --system 'Answer in one sentence.'

Inside:
  /new starts over
  /quit or Ctrl-D leaves
  Ctrl-C stops an answer"""


def chat(
    checkpoint: Annotated[str | None, typer.Argument(metavar="CKPT", help="Folder or hub id; default: the last one.")] = None,
    system: Annotated[str, typer.Option(help="What the model is told before the conversation.")] = "",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 1024,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.7,
    top_p: Annotated[float, typer.Option(help="Draw among the likeliest tokens that hold this probability.")] = 0.95,
    top_k: Annotated[int, typer.Option(min=0, help="Draw among this many likeliest tokens; 0: all.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="The same seed answers the same way.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Talk to a checkpoint, turn by turn."""
    from lowq_cli import state
    from lowq_cli.files.source import check_there

    folder = state.checkpoint_or_last(checkpoint)
    check_there(folder)
    with console.status(f"loading {folder}"):
        from lowq_cli.engine import stream
        from lowq_cli.engine.conversation import Conversation
        from lowq_cli.engine.ready import ready
        from lowq_cli.engine.sampling import Sampling

        Sampling(temperature, top_k, top_p, seed=seed)  # out of range: told before the model is loaded
        model, tokenizer = ready(folder, device, console.warn)
    if sys.stdin.isatty():
        with suppress(ModuleNotFoundError):  # Windows: no history, nothing else
            import readline  # noqa: F401  # arrow keys and history for `input`
        console.say("/new starts over, /quit or Ctrl-D leaves, Ctrl-C stops an answer")
    talk = Conversation(tokenizer, system)
    settings = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    turn = 0
    while (said := _ask()) is not None:
        if said == "/new":
            talk = Conversation(tokenizer, system)
            continue
        turn += 1
        try:
            answer = stream(model, tokenizer, talk.prompt(said), seed=seed + turn, **settings)  # type: ignore[arg-type]
        except UsageError as e:  # the context is full, or that was no text
            console.say(f"{e}; /new starts over")
            continue
        _write(answer)
        talk.answered(said, answer)


def _ask() -> str | None:
    """The next line a person types; None at the end or on /quit."""
    while True:
        try:
            if sys.stdin.isatty():
                said = input("> ")
            else:
                line = sys.stdin.readline()
                if not line:
                    return None
                said = line.rstrip("\n")
        except EOFError:
            return None
        if said.strip() == "/quit":
            return None
        if said.strip():
            return said.strip()


def _write(answer: "Generation") -> None:
    """Stream an answer; Ctrl-C ends it and leaves the conversation standing."""
    try:
        for piece in answer:
            console.out(piece, end="")
    except KeyboardInterrupt:
        console.say(" (stopped)")
    console.out("")
    _speed(answer)


def _speed(answer: Any) -> None:
    if sys.stderr.isatty():
        console.say(f"[{len(answer.tokens[0])} tokens, {answer.decode_tps:.1f}/s, first after {answer.ttft_s:.2f} s]")
