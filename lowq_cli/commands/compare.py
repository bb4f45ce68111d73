"""lowq compare: models side by side."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lowq_cli import completion, console, drawing
from lowq_cli.commands import AsJson, Device, JudgeText, JudgeTokens

if TYPE_CHECKING:
    from lowq_cli.evaluate.comparison import Compared

EXAMPLES = """Examples:
  lowq compare demo demo-lowq-4b-g64 demo-lowq-2b-g64
  lowq compare my-model a b c --plot size.png"""


def compare(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL",
            help="Two or more models; the others are compared with the first.",
            autocompletion=completion.models,
        ),
    ],
    text: JudgeText = None,
    max_tokens: JudgeTokens = None,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate for the speed.")] = 64,
    device: Device = "auto",
    plot: Annotated[str | None, typer.Option(metavar="FILE.png", help="Plot perplexity against size.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare models by size, quality and speed: bits per weight, perplexity, KL divergence, agreement, tokens/s."""
    from lowq_cli.files.source import check_there
    from lowq_packers.errors import UsageError

    if len(models) < 2:
        raise UsageError("compare takes two or more models; for one model: lowq eval")
    if plot:
        drawing.check(Path(plot))
    check_there(*models)

    from lowq_cli.evaluate import comparison
    from lowq_cli.evaluate.perplexity import read_text

    contents = read_text(text)
    rows = []
    with console.progress("compare", len(models)) as advance:
        for row in comparison.compare(models, contents, device, max_tokens, new_tokens):
            rows.append(row)
            advance(len(rows), row.model)
    if as_json:
        console.out_json({"rows": [vars(r) for r in rows]})
    else:
        _show(rows)
    if plot:  # last, so that the results are printed even if the plot cannot be written
        comparison.plot(rows, Path(plot))
        console.say(f"drew {plot}")


def _show(rows: "list[Compared]") -> None:
    """A line per model."""
    from lowq_cli import cached_models

    short = {str(folder): name for folder, name in cached_models.names().items()}
    shown = [
        (
            short.get(r.model, r.model), console.size(r.bytes), f"{r.bpw:.2f}", f"{r.ppl:.3f}",
            "" if r.ppl_increase_pct is None else f"{r.ppl_increase_pct:+.2f}%", "" if r.kl is None else f"{r.kl:.5f}",
            "" if r.top1_agreement is None else f"{r.top1_agreement:.2%}", f"{r.decode_tps:,.0f}",
        )
        for r in rows
    ]  # fmt: skip
    columns = ("model", ">size", ">bits per weight", ">perplexity", ">increase", ">KL", ">same top-1", ">tokens/s")
    first = rows[0]
    title = f"{first.tokens} tokens in windows of {first.window}, against {short.get(first.model, first.model)}"
    console.table(title, columns, shown, on_stdout=True, spare=(">increase",))
