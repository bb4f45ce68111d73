"""lowq inspect: show the content of a model folder."""

from typing import Annotated

import typer

from lowq_cli import completion, console
from lowq_cli.commands import AsJson

EXAMPLES = """Examples:
  lowq inspect
  lowq inspect my-model-gptq
  lowq inspect my-model-lowq-4b --verify
  lowq inspect ./downloaded --strict
  lowq inspect Qwen/Qwen3-8B --json"""


def inspect(
    path: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Model folder, hub id or demo. Default: the checkpoint written last.",
            autocompletion=completion.models,
        ),
    ] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="Print one line per tensor.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Read every weight; fail unless it is what lowq wrote.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Read every weight; fail on anything suspicious.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what a checkpoint holds and who can serve it: format, bits per weight, size, schemes, errors; reads no codes."""
    from lowq_cli import state
    from lowq_cli.interop.inspection import inspect_model

    name = state.checkpoint_or_last(path)
    inspection = inspect_model(name)
    unhashed = _verify(name) if verify else []
    if strict:
        _strict(name)
    if as_json:
        console.out_json(inspection.to_json() | ({"verified": True, "without_hash": unhashed} if verify else {}))
        return
    params = sum(r.params for r in inspection.rows)
    of_quantized = f" ({inspection.quantized_bpw:.3f} over the quantized ones)" if inspection.quantized_bpw is not None else ""
    console.out_line(f"{inspection.path}: {inspection.format}, {inspection.model_type}, {params:,} weights")
    console.out_line(f"{console.size(inspection.bytes)}, {inspection.bpw:.3f} bits per weight{of_quantized}")
    top = max(inspection.histogram.values())
    rows: list[tuple[object, ...]] = [
        (bits, f"{n:,}", f"{n / params:.1%}", "#" * max(1, round(30 * n / top))) for bits, n in inspection.histogram.items()
    ]
    console.table("bits", (">bits", ">weights", ">share", ""), rows, on_stdout=True)
    rows = [
        (c["kind"], c["tensors"], f"{c['params']:,}", console.size(c["bytes"]), f"{c['bpw']:.2f}", ", ".join(c["schemes"]))
        for c in inspection.classes
    ]
    console.table("classes", ("class", ">tensors", ">weights", ">size", ">bits", "schemes"), rows, on_stdout=True)
    errors = sorted((r for r in inspection.rows if r.rel_error is not None), key=lambda r: -(r.rel_error or 0))
    shown = list(inspection.rows) if tensors else errors[:5]
    if shown:
        rows = []
        for r in shown:
            error = "-" if r.rel_error is None else f"{r.rel_error:.4f}"
            rows.append((r.name, r.scheme, " x ".join(map(str, r.shape)), console.size(r.bytes), error))
        title = "tensors" if tensors else f"largest errors of {len(errors)} (all: --tensors)"
        console.table(title, ("tensor", "scheme", "shape", ">size", ">error"), rows, on_stdout=True)
    console.out_line(f"serves in: {', '.join(inspection.engines)}")
    if inspection.format == "lowq":
        console.out_line(f"tuned for: {', '.join(inspection.tuned) or 'nothing yet (lowq tune)'}")
    for note in inspection.notes:
        console.out_line(f"note: {note}")


def _strict(name: str) -> None:
    """Raise DamagedError where anything about a folder is odd, after a line for each such thing."""
    from lowq_cli.interop.oddities import oddities
    from lowq_packers.errors import DamagedError

    problems = oddities(name)
    for line in problems:
        console.warn(line)
    if problems:
        raise DamagedError(f"{name} has {len(problems)} problems; the first: {problems[0]}")


def _verify(name: str) -> list[str]:
    """The files that a report of an older lowq has no hash of.

    Raises DamagedError naming what is not as lowq wrote it; UnsupportedError where nothing says what was.
    """
    from lowq_cli.files.checkpoint import open_checkpoint
    from lowq_packers.errors import UnsupportedError

    checkpoint = open_checkpoint(name)
    with checkpoint.source:
        if not checkpoint.report:
            raise UnsupportedError(f"{name} has no lowq_report.json, which holds the checksums; nothing to verify against")
        unhashed = checkpoint.check_files()
        with console.progress("verify", checkpoint.nbytes) as advance:
            checkpoint.check_values(advance)
    console.say(f"verified: {len(checkpoint.tensors)} tensors, {console.size(checkpoint.nbytes)}, are what lowq wrote")
    if unhashed:
        console.warn(f"not verified: {', '.join(unhashed)}, which this older report has no hash of")
    return unhashed
