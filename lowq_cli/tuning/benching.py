"""The measurements of `lowq bench`: rows of timed operations, and their plot."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from lowq_cli import drawing
from lowq_cli.plan.values import group_of
from lowq_cli.tuning.examples import EXAMPLES, HEAD
from lowq_kernels.decode.kv import PLAIN, check, slot_bytes
from lowq_kernels.dispatch.registry import Op, forced, kernels, named, select
from lowq_kernels.dispatch.timing import Roofline, timed
from lowq_kernels.dispatch.tuning import Shape
from lowq_packers.errors import UnsupportedError, UsageError
from lowq_packers.scheme import Scheme

SPEEDUP_TICKS = (0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12)


@dataclass(frozen=True)
class Row:
    """One timed operation. gbs counts the bytes of the stored weight, x and y once; roofline_pct is as `Roofline.percent`."""

    N: int
    K: int
    M: int
    bits: int
    group: int
    kernel: str
    layout: str
    us: float
    gbs: float
    tflops: float
    roofline_pct: float | None
    cublas_us: float  # the dense 16-bit matmul: cuBLAS on a GPU, torch's library on a CPU


def parse_shape(text: str) -> tuple[int, int]:
    """Parse "4096x14336" as (N, K). Raises UsageError."""
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(p.isdecimal() and int(p) > 0 for p in parts):
        raise UsageError(f"--shape {text!r} is not NxK, out by in features, such as 4096x14336")
    return int(parts[0]), int(parts[1])


def shape_for(text: str, bits: int, group: str, dtype: torch.dtype) -> Shape:
    """The shape given by the flags. Raises UsageError if the group size does not divide K."""
    N, K = parse_shape(text)
    size = group_of(group, "group")
    scheme = Scheme(bits, K if size == "channel" else size)
    scheme.groups(K)
    return Shape(N, K, scheme, dtype)


def measure(
    shapes: Sequence[Shape],
    batches: Sequence[int],
    device: torch.device,
    ceiling: Roofline,
    kernel: str | None,
    op: Op = "product",
    kv: str = PLAIN,
) -> Iterator[Row]:
    """Yield rows: per shape and M, dispatch's kernel; `kernel` names a kernel of any operation, or "all" kernels of `op`.

    kv: the KV cache's format (the rows' bits). Raises UsageError for an unknown format or without attention, and
    UnsupportedError if the named kernel does not support a shape.
    """
    check(kv)
    names = list(kernels(op)) if kernel == "all" else [kernel]
    if kernel and kernel != "all":
        op = named(kernel).op
    if op not in EXAMPLES:
        raise UnsupportedError(f"{op} cannot be timed alone: it is part of a decode step (lowq generate --profile)")
    if kv != PLAIN and op != "attend":
        raise UsageError("--kv needs --op attend")
    more = (kv,) if op == "attend" else ()
    for shape in shapes:
        for M in batches:
            dense: float | None = None
            for name in names:
                try:
                    example = EXAMPLES[op](shape, M, device, forced(name, op), *more)
                    spec, config = select(example.call, name)
                except UnsupportedError:
                    if kernel == "all":
                        continue
                    raise
                us = timed([partial(spec.launch, *operands, config) for operands in example.operands], device)
                dense = dense or timed(example.dense, device)
                storage = (shape.scheme.bits, shape.scheme.group_size)
                if op == "attend":
                    storage = (8 * slot_bytes(kv, HEAD, shape.dtype) // HEAD, HEAD)
                place = (shape.N, shape.K, M, *storage, spec.name, example.layout)
                gbs, tflops = example.nbytes / us / 1e3, example.flops / us / 1e6
                percent = ceiling.percent(example.nbytes, example.flops, us)
                share = None if percent is None else round(percent, 1)
                yield Row(*place, round(us, 2), round(gbs, 4), round(tflops, 6), share, round(dense, 2))


def plot(rows: Sequence[Row], ceiling: Roofline, path: Path) -> None:
    """Plot two panels: speed-up over the dense 16-bit matmul against M, and the roofline with every row.

    Raises as `drawing.save`.
    """
    figure = drawing.figure(13, 5.2, layout="constrained")
    left, right = figure.subplots(1, 2)
    series: dict[str, list[Row]] = {}
    for r in rows:
        series.setdefault(f"{r.N}x{r.K} {r.bits}-bit", []).append(r)
    for label, points in series.items():
        best = {m: min((r for r in points if m == r.M), key=lambda r: r.us) for m in sorted({r.M for r in points})}
        ms = list(best)
        left.plot(ms, [r.cublas_us / r.us for r in best.values()], marker="o", markersize=4, label=label)
        intensity = [2.0 * r.M * r.N * r.K / (max(r.gbs, 1e-4) * r.us * 1e3) for r in best.values()]
        right.plot(intensity, [r.tflops for r in best.values()], marker="o", markersize=4, label=label)
    left.axhline(1.0, color="grey", linewidth=1)
    left.set(xscale="log", yscale="log", xlabel="M (rows of x)", ylabel="speed-up over the dense 16-bit product")
    batches = sorted({r.M for r in rows})
    left.set_xticks(batches, [str(m) for m in batches])
    speedups = [r.cublas_us / r.us for r in rows] + [1.0]
    low, high = min(speedups) / 1.15, max(speedups) * 1.15
    ticks = [t for t in SPEEDUP_TICKS if low <= t <= high]
    left.set_yticks(ticks, [f"{t:g}" for t in ticks])
    left.set_ylim(low, high)
    left.minorticks_off()
    left.grid(alpha=0.3)
    left.legend(fontsize=8)
    left.set_title(ceiling.device)
    ridge = ceiling.tflops * 1e3 / ceiling.read_gbs
    ends = (0.5, ridge, 16 * ridge)
    right.plot(ends, [min(i * ceiling.read_gbs / 1e3, ceiling.tflops) for i in ends], color="black", linewidth=1)
    for text, at, aside in (
        (f"{ceiling.read_gbs:.0f} GB/s", (1, ceiling.read_gbs / 1e3), (6, -8)),
        (f"{ceiling.tflops:.3g} TFLOP/s", (ridge, ceiling.tflops), (0, 5)),
    ):
        right.annotate(text, at, xytext=aside, textcoords="offset points", fontsize=8)
    right.set(xscale="log", yscale="log", xlabel="floating-point operations per byte moved", ylabel="TFLOP/s")
    right.grid(alpha=0.3)
    right.set_title("roofline, both ceilings measured")
    drawing.save(figure, path, dpi=140)
