"""lowq export: a lowq checkpoint in the format of another engine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lowq_cli import completion, console
from lowq_cli.commands import AsJson, MixtureType, checkpoint_argument

if TYPE_CHECKING:
    from lowq_cli.interop.exported import Exported

EXAMPLES = """Examples:
  lowq export
  lowq quantize ./my-model --export compressed-tensors
  lowq export my-lowq --to gguf --out my.gguf
  lowq export my-model --type Q4_K_M
  lowq export my-model-gptq --to mlx
  lowq export my-lowq --to compressed-tensors --check-tp 8"""

LOAD_COMMANDS = {  # format of formats.EXPORTED (whose import takes 30 ms) -> the command that loads an export, if there is one
    **dict.fromkeys(("compressed-tensors", "gptq", "awq"), "vllm serve {}"),
    **{
        "humming": None,
        "mlx": "mlx_lm.generate --model {}",
        "hqq": None,
        "gguf": "lowq generate {0} --prompt 'Hello', or llama-cli -m {0}",
    },
    **dict.fromkeys(("modelopt", "bitsandbytes")),
}


def export(
    ckpt: Annotated[str | None, checkpoint_argument("Checkpoint folder, also another tool's.")] = None,
    to: Annotated[
        str | None,
        typer.Option(
            help=f"{', '.join(LOAD_COMMANDS)}.  [default: the first that stores it exactly]", autocompletion=completion.exports
        ),
    ] = None,
    out: Annotated[
        str | None, typer.Option("--out", "-o", help="Folder (gguf: file) to write.  [default: ./CKPT-FORMAT]")
    ] = None,
    check_tp: Annotated[int | None, typer.Option(help="Refuse a checkpoint that N tensor-parallel ranks cannot split.")] = None,
    rounding: Annotated[
        bool, typer.Option("--round", help="mlx, gguf: round -zero * scale to 16 bits where it is not exact.")
    ] = False,
    kind: MixtureType = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint for vLLM, transformers, llama.cpp or MLX: the same weights bit for bit, or an error."""
    from lowq_cli import state

    source = state.checkpoint_or_last(ckpt)
    exported = write(source, to, out, check_tp, rounding, kind)
    if kind:  # other weights than the checkpoint's: commands without a checkpoint take the newest ones
        state.remember(Path(exported.out), source=source)
    if as_json:
        console.out_json(vars(exported))
    else:
        show(exported)
    if to is None and kind is None:
        console.say(f"{exported.format} is the first format that stores it exactly; --to picks another")


def write(
    source: str,
    to: str | None,
    out: str | None = None,
    check_tp: int | None = None,
    rounding: bool = False,
    kind: str | None = None,
) -> "Exported":
    """Export a checkpoint behind a progress bar."""
    from lowq_cli.interop.exporter import export as run
    from lowq_cli.interop.exporter import export_path

    if out and (kind or to == "gguf"):
        export_path(source, "gguf", out)  # refuses another suffix
    try:
        with console.progress("export", 100) as advance:
            return run(source, to, out, check_tp, rounding, lambda percent, name: advance(percent, name), kind)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("run the same command again to continue") from None


def show_mixture(
    model: str, kind: str, out: str | None, on_stdout: bool = False, calibrated: bool = False, timed: bool = False
) -> dict[str, list[tuple[str, int, int, int]]]:
    """The plan of a GGUF file of `kind`: a line for each type; the totals by file. Reads no weight.

    timed: whether to add the time that the work takes, from a sample.
    """
    from math import fsum

    from lowq_cli.interop.exporter import export_path, mixture_path, with_weights
    from lowq_cli.interop.gguf_export import rows_of, totals, tower_path
    from lowq_cli.plan.gguf_types import get

    with (opened := with_weights(model)).source:
        rows_of_text, rows_of_tower = rows_of(opened, get(kind))
    text, tower = totals(rows_of_text), totals(rows_of_tower)
    path = export_path(model, "gguf", out or mixture_path(model, kind))
    files = {str(path): text} | ({str(tower_path(path)): tower} if tower else {})
    say = console.out_line if on_stdout else console.say
    for rows, title in ((text, f"{model} as {kind.upper()}"), (tower, "its tower and projector, kept as they are")):
        shown = [(t, n, f"{w / 1e6:,.1f} M", f"{8 * b / w:.2f}", console.size(b)) for t, n, w, b in rows]
        if shown:
            console.table(title, ("type", ">tensors", ">weights", ">bits each", ">size"), shown, on_stdout=on_stdout)
    weights, size = fsum(r[2] for r in text), sum(r[3] for r in text)
    how = "then better codes and scales on the text" if calibrated else "without a text; --calib self chooses better ones"
    say(f"{path}: {console.size(size)}, {8 * size / weights:.2f} bits per weight; codes by least squares, {how}")
    if timed:
        from lowq_cli.run.mixture import writing_s
        from lowq_cli.run_output import time_line

        say(f"on cpu, {time_line(writing_s(rows_of_text))}")
    if tower:
        say(f"{tower_path(path)}: {console.size(sum(r[3] for r in tower))} (llama.cpp: --mmproj)")
    return files


def show(exported: "Exported") -> None:
    """Print the folder on stdout and its contents on stderr."""
    from lowq_cli import state

    console.out(exported.out)
    there = " (was already there)" if exported.already_done else ""
    console.say(f"{exported.matrices} weights, {console.size(exported.bytes)}{there}; serves in: {', '.join(exported.engines)}")
    for note in exported.notes:
        console.say(f"note: {note}")
    if program := LOAD_COMMANDS.get(exported.format):
        console.say(f"next: {program.format(state.as_argument(exported.out))}")
