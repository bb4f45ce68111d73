"""lowq eval: perplexity of a checkpoint, and how far it is from the model it was made from."""

from typing import TYPE_CHECKING, Annotated

import typer

from lowq_cli import console
from lowq_cli.commands import AsJson, Device, JudgeText, JudgeTokens, KvCache, Threads, checkpoint_argument

if TYPE_CHECKING:
    from lowq_cli.evaluate.layer_errors import LayerError

EXAMPLES = """Examples:
  lowq eval --against demo
  lowq eval my-lowq --text book.txt --against my-model --max-ppl-increase 3
  lowq eval --act all
  lowq eval my-lowq --against my-lowq --kv 4   (what a cache in 4 bits costs)"""


BAR = "#"


def eval(
    ckpt: Annotated[str | None, checkpoint_argument("Checkpoint, model folder or hub id.")] = None,
    text: JudgeText = None,
    against: Annotated[str | None, typer.Option(help="Model to compare with, usually the original.")] = None,
    max_ppl_increase: Annotated[
        float | None, typer.Option(min=0, help="Exit 6 if perplexity is more than this many percent above --against.")
    ] = None,
    max_tokens: JudgeTokens = None,
    layers: Annotated[bool, typer.Option("--layers", help="With --against: also the error of every decoder layer.")] = False,
    act: Annotated[
        str | None,
        typer.Option(help="Activations: none, int8, fp8, or all to compare them.  [default: as the checkpoint says]"),
    ] = None,
    kv: KvCache = "16",
    device: Device = "auto",
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Measure perplexity on a text, in windows of 512 tokens; with --against also KL divergence and top-1 agreement."""
    from lowq_cli import state
    from lowq_cli.devices import wake
    from lowq_cli.files.source import check_there
    from lowq_packers.errors import QualityError, UsageError

    if max_ppl_increase is not None and against is None:
        raise UsageError("--max-ppl-increase compares with another model; add --against MODEL")
    if layers and against is None:
        raise UsageError("--layers compares the layers with another model's; add --against MODEL")
    if act == "all" and against is not None:
        raise UsageError("--act all compares modes with each other; leave --against out")
    if act == "all" and kv != "16":
        raise UsageError("--act all compares activations in a cache of 16 bits; leave --kv out")
    name = state.checkpoint_or_last(ckpt)
    check_there(name, against)
    wake(device)

    with console.status("starting"):
        from lowq_cli.evaluate.perplexity import measure, measure_modes, read_text
        from lowq_kernels.decode.kv import check

    check(kv)
    contents = read_text(text)
    if act == "all":
        with console.progress("eval", 100) as advance:
            modes = measure_modes(name, contents, device, max_tokens, advance)
        if as_json:
            console.out_json({"modes": {mode: vars(r) for mode, r in modes.items()}})
        else:
            plain = modes["none"].ppl
            lines = [(mode, f"{r.ppl:.3f}", f"{100 * (r.ppl / plain - 1):+.2f}%") for mode, r in modes.items()]
            tokens = modes["none"].tokens
            console.table(f"{name}, {tokens} tokens", ("activations", ">perplexity", ">against none"), lines, on_stdout=True)
        return
    with console.progress("eval", 100) as advance:
        report = measure(name, contents, against, device, max_tokens, advance, act, kv)
    increase = report.ppl_increase_pct
    errors = []
    if layers and against is not None:
        from lowq_cli.evaluate.layer_errors import layer_errors

        with console.status("comparing layers"):
            errors = layer_errors(name, against, contents, device)
    failure = None
    if increase is not None and max_ppl_increase is not None and not increase <= max_ppl_increase:
        failure = QualityError(
            f"perplexity {report.ppl:.3f} is {increase:.2f}% above {against} ({report.base_ppl:.3f}); "
            f"the limit is {max_ppl_increase:g}%; try more bits or a smaller group"
        )
    if as_json:
        found = {**vars(report), "stride": report.window, "kv": kv}
        if layers:
            found["layers"] = [vars(e) for e in errors]
        if failure:
            found |= {"error": str(failure), "exit_code": failure.exit_code}
        console.out_json(found)
    else:
        rows = [
            ("perplexity", f"{report.ppl:.3f}", f"{report.tokens} tokens, windows of {report.window}, stride {report.window}")
        ]
        if increase is not None:
            rows += [
                ("perplexity of " + str(against), f"{report.base_ppl:.3f}", f"{increase:+.2f}%"),
                ("KL divergence", f"{report.kl:.5f}", "nats per token"),
                ("top-1 agreement", f"{100 * (report.top1_agreement or 0):.2f}%", "same likeliest next token"),
            ]
        console.table("", ("", ">value", ""), rows, on_stdout=True)
    if errors and not as_json:
        table = [
            (e.index, "" if e.weights is None else f"{e.weights:.4f}", e.worst, f"{e.output:.6f}", BAR * _bar(e.output, errors))
            for e in errors
        ]
        columns = ("layer", ">weights, relative", "largest of", ">output, squared relative", "")
        console.table("errors by layer, those before it included", columns, table, on_stdout=True, spare=("",))
    if failure:
        raise failure


def _bar(output: float, errors: "list[LayerError]") -> int:
    """Its length, 30 for the largest."""
    return round(30 * output / max(max(e.output for e in errors), 1e-30))
