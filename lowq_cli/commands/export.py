"""lowq export: a lowq checkpoint in the format of another engine."""

from typing import TYPE_CHECKING, Annotated

import typer

from lowq_cli import completion, console
from lowq_cli.commands import AsJson, checkpoint_argument

if TYPE_CHECKING:
    from lowq_cli.interop.exported import Exported

EXAMPLES = """Examples:
  lowq export
  lowq quantize ./my-model --export compressed-tensors
  lowq export my-lowq --to gguf --out my.gguf
  lowq export my-model-gptq --to mlx
  lowq export my-lowq --to compressed-tensors --check-tp 8"""

READERS = {  # formats.EXPORTED, which takes 30 ms to import, with the command that takes an export where there is one
    **dict.fromkeys(("compressed-tensors", "gptq", "awq"), "vllm serve {}"),
    **{"humming": None, "mlx": "mlx_lm.generate --model {}", "hqq": None, "gguf": "llama-cli -m {}"},
    **dict.fromkeys(("modelopt", "bitsandbytes")),
}


def export(
    ckpt: Annotated[str | None, checkpoint_argument("Checkpoint folder, also another tool's.")] = None,
    to: Annotated[
        str | None,
        typer.Option(
            help=f"{', '.join(READERS)}.  [default: the first that holds it exactly]",
            autocompletion=completion.exports,
        ),
    ] = None,
    out: Annotated[
        str | None, typer.Option("--out", "-o", help="Folder (gguf: file) to write.  [default: ./CKPT-FORMAT]")
    ] = None,
    check_tp: Annotated[int | None, typer.Option(help="Refuse what N tensor-parallel ranks could not share.")] = None,
    rounding: Annotated[
        bool, typer.Option("--round", help="mlx, gguf: round -zero * scale to 16 bits where it is not exact.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint for vLLM, transformers, llama.cpp or MLX: bit for bit the same weights, or refused."""
    from lowq_cli import state

    found = write(state.checkpoint_or_last(ckpt), to, out, check_tp, rounding)
    if as_json:
        console.out_json(vars(found))
    else:
        show(found)
    if to is None:
        console.say(f"{found.format} is the first format that holds it; --to names another")


def write(
    source: str, to: str | None, out: str | None = None, check_tp: int | None = None, rounding: bool = False
) -> "Exported":
    """Export a checkpoint behind a progress bar."""
    from lowq_cli.interop.exporter import export as run

    try:
        with console.progress("export", 100) as advance:
            return run(source, to, out, check_tp, rounding, lambda percent, name: advance(percent, name))
    except KeyboardInterrupt:
        raise KeyboardInterrupt("run the same command again to continue") from None


def show(found: "Exported") -> None:
    """The folder on stdout, what is in it on stderr."""
    from lowq_cli import state

    console.out(found.out)
    there = " (was already there)" if found.already_done else ""
    console.say(f"{found.matrices} weights, {console.size(found.bytes)}{there}; serves in: {', '.join(found.engines)}")
    for note in found.notes:
        console.say(f"note: {note}")
    if program := READERS.get(found.format):
        console.say(f"next: {program.format(state.as_argument(found.out))}")
