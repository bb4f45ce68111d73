"""lowq push: upload a checkpoint to the Hugging Face hub, with a model card made from its report."""

from pathlib import Path
from typing import Annotated, Any

import typer

from lowq_cli import completion, console
from lowq_cli.commands import AsJson, option

EXAMPLES = """Examples:
  lowq push me/my-model-4bit --dry-run
  lowq push me/my-model-4bit --against org/my-model"""


def push(
    repo: Annotated[str, typer.Argument(metavar="REPO", help="Repository on the hub, as name/model.")],
    ckpt: Annotated[str | None, option("Checkpoint folder. Default: the last one written.", completion.checkpoints)] = None,
    against: Annotated[str | None, option("The original, to state both perplexities on the card.", completion.models)] = None,
    private: Annotated[bool, typer.Option("--private", help="Make a private repository.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the card and the files, and send nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Upload a checkpoint with a model card: recipe, size, measured perplexity change, how to load it."""
    from lowq_cli import state
    from lowq_cli.interop.publish import publish

    with console.progress("eval", 100) as advance:

        def measure(folder: Path) -> dict[str, Any]:
            from lowq_cli.evaluate import perplexity

            return vars(perplexity.measure(folder, perplexity.read_text(None), against, progress=advance))

        published = publish(state.checkpoint_or_last(ckpt), repo, against, private, dry_run, measure if against else None)
    if as_json:
        console.out_json(published)
    elif dry_run:
        console.out(published["card"])
        for name in published["files"]:
            console.say(f"would send {name}")
    else:
        console.out(published["url"])
