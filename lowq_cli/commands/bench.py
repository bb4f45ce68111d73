"""lowq bench: how fast this machine multiplies by quantized weights, against its measured ceilings and the dense product."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lowq_cli import console, drawing
from lowq_cli.commands import AsJson, Device, KvCache, Threads, checkpoint_argument

if TYPE_CHECKING:
    from lowq_cli.tuning.benching import Row

EXAMPLES = """Examples:
  lowq bench
  lowq bench --shape 4096x14336 --bits 4 --batch 1,16,256 --plot speed.png
  lowq bench --shape 4096x4096 --kernel all --json
  lowq bench my-lowq --vllm --batch 1,16,64   (tokens per second in vLLM: its own kernels and lowq's)
  lowq bench --op attend --shape 4096x8192 --batch 1,4 --kv fp8   (32 heads of 128 over 8192 tokens)"""
BATCHES = "1,2,4,8,16,32,64,128,256"


def bench(
    checkpoint: Annotated[str | None, checkpoint_argument("Checkpoint folder.")] = None,
    shape: Annotated[
        list[str] | None, typer.Option(metavar="NxK", help="A shape to time instead of a checkpoint's; repeatable.")
    ] = None,
    bits: Annotated[list[int] | None, typer.Option(help="Bits for --shape (no tables); repeatable.  [default: 4]")] = None,
    group: Annotated[str, typer.Option(help="Group size for --shape, or channel.")] = "128",
    batch: Annotated[str, typer.Option(metavar="1,2,4,...", help="Rows of x.")] = BATCHES,
    kernel: Annotated[str | None, typer.Option(metavar="NAME|all", help="One kernel, or all.  [default: as dispatch]")] = None,
    op: Annotated[
        str, typer.Option(help="product, fp8_product, dense, attend, experts (2 of 8 a token); all but product need --shape.")
    ] = "product",
    kv: KvCache = "16",
    device: Device = "auto",
    threads: Threads = None,
    vllm: Annotated[
        bool, typer.Option("--vllm", help="Time the whole model in vLLM: --batch sequences of 128 prompt and 256 new tokens.")
    ] = False,
    plot: Annotated[str | None, typer.Option(metavar="FILE.png", help="Plot speed-up against M and the roofline.")] = None,
    as_json: AsJson = False,
) -> None:
    """Time matrix products by shape and batch: us, GB/s, TFLOP/s, share of the measured roofline, ratio to the dense one."""
    from lowq_cli import state

    if vllm:
        _in_vllm(state.checkpoint_or_last(checkpoint), batch, as_json, bool(shape or bits or kernel or plot))
        return
    import torch

    from lowq_cli.devices import pick_device
    from lowq_cli.tuning import benching, tuner, tuning_plan
    from lowq_cli.tuning.examples import EXAMPLES
    from lowq_kernels.dispatch import tuning
    from lowq_kernels.dispatch.timing import roofline
    from lowq_packers.errors import UsageError

    batches, where = tuner.parse_batches(batch), pick_device(device)
    if op not in EXAMPLES:
        raise UsageError(f"--op {op!r} does not exist; use one of {', '.join(EXAMPLES)}")
    if op != "product" and not shape:
        raise UsageError(f"--op {op} needs --shape")
    if plot:
        drawing.check(Path(plot))
    dtype = torch.bfloat16 if where.type == "cpu" else torch.float16
    if shape:
        if checkpoint is not None:
            raise UsageError("give a checkpoint or --shape, not both")
        shapes = [benching.shape_for(s, b, group, dtype) for s in shape for b in bits or [4]]
    else:
        if bits:
            raise UsageError("--bits needs --shape; a checkpoint has its own bits")
        opened = tuning_plan.open_packed(state.checkpoint_or_last(checkpoint))
        shapes = tuning_plan.shapes_of(opened, tuner.compute_dtype(opened, where))
        tuned = tuning.use(opened.folder, where, console.warn)
        console.say(f"{opened.folder}: {len(shapes)} shapes, {tuned or 'no'} tuned entries for this machine")
    ceiling = roofline(where)
    console.say(f"{ceiling.device}: reads {ceiling.read_gbs:.0f} GB/s, multiplies {ceiling.tflops:.3g} TFLOP/s (measured)")
    rows = []
    with console.progress("bench", len(shapes) * len(batches)) as advance:
        for row in benching.measure(shapes, batches, where, ceiling, kernel, op, kv):  # type: ignore[arg-type]
            rows.append(row)
            advance(len({(r.N, r.K, r.bits, r.group, r.M) for r in rows}), f"{row.N}x{row.K} M={row.M}: {row.us:.1f} us")
    if as_json:
        facts = {"read_gbs": round(ceiling.read_gbs), "tflops": round(ceiling.tflops, 3)}
        console.out_json({"gpu": ceiling.device, **facts, "rows": [vars(r) for r in rows]})
    else:
        _show(rows)
    if plot:  # last, so that the results are printed even if the plot cannot be written
        benching.plot(rows, ceiling, Path(plot))
        console.say(f"drew {plot}")


def _in_vllm(checkpoint: str, batch: str, as_json: bool, of_products: bool) -> None:
    """Tokens per second of a checkpoint in vLLM, by its own kernels and by lowq's."""
    from lowq_cli.interop import vllm_speed
    from lowq_cli.tuning import tuner
    from lowq_packers.errors import UsageError

    if of_products:
        raise UsageError("--shape, --bits, --kernel and --plot time single products; leave them or --vllm out")
    batches = vllm_speed.BATCHES if batch == BATCHES else tuple(tuner.parse_batches(batch))
    rows = vllm_speed.compare(checkpoint, batches)
    if as_json:
        console.out_json({"prompt": vllm_speed.PROMPT, "new": vllm_speed.NEW, "rows": rows})
        return
    columns = (">sequences", ">vLLM's kernels", ">lowq's kernels", ">ratio")
    shown = []
    for r in rows:
        vllm, ratio = (f"{r['vllm']:.0f}", f"{r['lowq'] / r['vllm']:.2f}") if r["vllm"] else ("-", "")
        shown.append((r["batch"], vllm, f"{r['lowq']:.0f}", ratio))
    console.table("tokens per second in vLLM", columns, shown, on_stdout=True)


def _show(rows: "list[Row]") -> None:
    """A line per shape, batch and kernel."""
    columns = ("shape", "scheme", ">M", "kernel", ">us", ">GB/s", ">TFLOP/s", ">roofline", ">dense us", ">x dense")
    table = [
        (
            f"{r.N}x{r.K}", f"{r.bits}-bit g{r.group}", r.M, r.kernel, f"{r.us:.1f}", f"{r.gbs:.0f}", f"{r.tflops:.2f}",
            "-" if r.roofline_pct is None else f"{r.roofline_pct:.0f}%", f"{r.cublas_us:.1f}", f"{r.cublas_us / r.us:.2f}",
        )
        for r in rows
    ]  # fmt: skip
    console.table("", columns, table, on_stdout=True, spare=(">dense us", ">TFLOP/s", ">GB/s"))
