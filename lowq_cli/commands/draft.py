"""lowq draft: train a small head that drafts a model's next tokens, so that the model decodes several of them per step."""

from typing import Annotated

import typer

from lowq_cli import completion, console
from lowq_cli.commands import AsJson, Device, Threads, checkpoint_argument, option
from lowq_packers.errors import UsageError

EXAMPLES = """Examples:
  lowq draft train my-lowq
  lowq draft train my-lowq --tokens 20000000 --out my-head
  lowq draft train demo --text book.txt --dry-run"""


def draft(
    action: Annotated[str, typer.Argument(metavar="train", help="What to do: train.")],
    ckpt: Annotated[str | None, checkpoint_argument("Model that the head drafts for: checkpoint, folder, hub id.")] = None,
    out: Annotated[str | None, typer.Option("--out", "-o", help="Folder to write.  [default: CKPT/draft]")] = None,
    tokens: Annotated[
        int | None, typer.Option(min=2048, help="Tokens of text to learn from.  [default: 4194304, on a CPU 262144]")
    ] = None,
    head: Annotated[
        str,
        option(
            "How the head guesses tokens: eagle3, one after the other, or peagle, all at once.",
            completion.words("eagle3", "peagle"),
            "eagle3|peagle",
        ),
    ] = "eagle3",
    text: Annotated[str, option("Text: self (the model writes it), .txt, .jsonl or bundled.", None, "self|FILE|DIR")] = "self",
    vocab: Annotated[
        int | None,
        typer.Option(min=16, help="Draft only this many most frequent tokens.  [default: all up to 65536, else 32000]"),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the text and its order.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and stop.")] = False,
    device: Device = "auto",
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Train a draft head for a model, on text that it writes itself; the same command again continues."""
    from lowq_cli import state
    from lowq_cli.devices import wake
    from lowq_cli.files.source import check_there

    if head not in ("eagle3", "peagle"):
        raise UsageError(f"--head {head} must be eagle3 or peagle")
    if action != "train":
        raise UsageError(f"{action!r} is not known; lowq draft train CKPT trains a head")
    name = state.checkpoint_or_last(ckpt)
    check_there(name)
    wake(device)
    with console.status("starting"):
        from lowq_cli.engine.drafts.drafter_choice import LITTLE, saves_time
        from lowq_cli.run import draft_training, draft_training_plan

        planned, model, tokenizer = draft_training_plan.plan_training(name, out, tokens, text, vocab, seed, device, head)
    draft_training.check_out(planned)
    console.table("", ("plan", ""), planned.summary)
    if dry_run:
        if as_json:
            console.out_json({"plan": dict(planned.summary), "seconds": planned.seconds, "seconds_8b": planned.big_seconds})
        return
    try:
        result = _followed(draft_training.train(planned, model, tokenizer))
    except KeyboardInterrupt:
        raise KeyboardInterrupt("run the same command again to continue") from None
    if as_json:
        console.out_json(vars(result))
        return
    console.out(result.out)
    shares = ", ".join(f"{100 * a:.0f}%" for a in result.accepted)
    there = " (was already there)" if result.already_done else f" in {console.duration(result.seconds)}"
    console.say(f"drafted tokens accepted, first to last: {shares}; up to {result.length:.2f} tokens per step{there}")
    if result.speed:
        console.say(
            f"{result.speed['with']:,.0f} tokens/s with the head on this device, {result.speed['without']:,.0f} without drafts"
        )
    if not saves_time(vars(result), planned.device.type):
        few = f"that is fewer than {LITTLE:g} tokens per step" if result.length < LITTLE else "the head is not faster"
        console.say(f"{few}, so --draft auto does not take it; train on more than {result.tokens:,} tokens (--tokens)")
        return
    console.say(f"use it: lowq generate {state.as_argument(name)} --draft {state.as_argument(result.out)}")


def _followed(steps):  # type: ignore[no-untyped-def]
    """The result of a training whose steps are shown."""
    doing, shown, advance = "", None, lambda done, note: None
    try:
        while True:
            try:
                step = next(steps)
            except StopIteration as e:
                return e.value
            if step.doing != doing:
                if shown is not None:
                    shown.__exit__(None, None, None)
                doing, shown = step.doing, console.progress(step.doing, step.total)
                advance = shown.__enter__()
            advance(step.done, step.note)
    finally:
        if shown is not None:
            shown.__exit__(None, None, None)
