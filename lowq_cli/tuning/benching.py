"""`lowq bench` without its printing: rows of measured products, and the plot of them."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lowq_cli import drawing
from lowq_kernels.dispatch.layouts import best_layout
from lowq_kernels.dispatch.measure import call_for, copies, random_weight
from lowq_kernels.dispatch.registry import forced, kernels, select
from lowq_kernels.dispatch.timing import Roofline, call_bytes, rotation, timed
from lowq_kernels.dispatch.tuning import Shape
from lowq_packers.errors import UnsupportedError, UsageError
from lowq_packers.layouts import PackedWeight
from lowq_packers.scheme import Scheme

SPEEDUP_TICKS = (0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12)


@dataclass(frozen=True)
class Row:
    """One measured product. gbs counts the stored weight, x and y once; roofline_pct is the floor's share of the time."""

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
    roofline_pct: float
    cublas_us: float  # the dense product in 16 bits: cuBLAS on a GPU, the CPU library's on a CPU

    def to_json(self) -> dict[str, Any]:
        """The row of `lowq bench --json`."""
        return asdict(self)


def parse_shape(text: str) -> tuple[int, int]:
    """The (N, K) that "4096x14336" names. Raises UsageError."""
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(p.isdecimal() and int(p) > 0 for p in parts):
        raise UsageError(f"--shape {text!r} is not NxK, out by in features, such as 4096x14336")
    return int(parts[0]), int(parts[1])


def shape_for(text: str, bits: int, group: str, dtype: torch.dtype) -> Shape:
    """A shape from the flags. Raises UsageError for one that no group divides."""
    N, K = parse_shape(text)
    if group != "channel" and not group.isdecimal():
        raise UsageError(f"--group {group!r} is neither a number nor channel")
    scheme = Scheme(bits, K if group == "channel" else int(group))
    scheme.groups(K)
    return Shape(N, K, scheme, dtype)


def measure(
    shapes: Sequence[Shape], batches: Sequence[int], device: torch.device, ceiling: Roofline, kernel: str | None
) -> Iterator[Row]:
    """Rows in order: per shape and M, the kernel that dispatch takes in its best layout; `kernel` names one, or "all".

    Raises UnsupportedError where the named kernel cannot take one of them.
    """
    names = list(kernels()) if kernel == "all" else [kernel]
    for shape in shapes:
        dense = _dense_times(shape, batches, device)
        weights: dict[str, list[PackedWeight]] = {}
        for M in batches:
            for name in names:
                try:
                    yield _row(shape, M, name, weights, device, ceiling, dense[M])
                except UnsupportedError:
                    if kernel != "all":
                        raise


def _row(
    shape: Shape,
    M: int,
    name: str | None,
    weights: dict[str, list[PackedWeight]],
    device: torch.device,
    ceiling: Roofline,
    dense: float,
) -> Row:
    """M rows by the kernel called `name` (None: dispatch's), on copies of a weight in its layout, which `weights` keeps."""
    layout = best_layout(shape.scheme, shape.N, shape.K, shape.dtype, device, kernel=name)
    asked = forced(name)
    act = asked.acts[0] if asked else "none"  # a kernel that multiplies 8-bit activations is timed on such
    spec, config = select(call_for(shape, M, layout, device, act), name)
    if layout not in weights:
        weights[layout] = copies(random_weight(shape, layout, device))
    x = torch.randn(M, shape.K, device=device).to(shape.dtype)
    us = timed([partial(spec.launch, x, w, None, config) for w in weights[layout]], device)
    flops, moved = 2.0 * M * shape.N * shape.K, call_bytes(M, shape.N, shape.K, shape.scheme.bits_per_weight())
    place = (shape.N, shape.K, M, shape.scheme.bits, shape.scheme.group_size, spec.name, layout)
    percent = 100 * ceiling.floor_us(moved, flops) / us
    return Row(*place, round(us, 2), round(moved / us / 1e3, 4), round(flops / us / 1e6, 6), round(percent, 1), round(dense, 2))


def _dense_times(shape: Shape, batches: Sequence[int], device: torch.device) -> dict[int, float]:
    n = rotation(2 * shape.N * shape.K, device)
    dense = [torch.randn(shape.N, shape.K, device=device, dtype=shape.dtype) / 64 for _ in range(n)]
    times = {}
    for M in batches:
        x = torch.randn(M, shape.K, device=device).to(shape.dtype)
        times[M] = timed([partial(torch.nn.functional.linear, x, w) for w in dense], device)
    return times


def plot(rows: Sequence[Row], ceiling: Roofline, path: Path) -> None:
    """Two panels: speed-up over the dense 16-bit product against M, and the roofline with every row on it.

    Raises what `drawing.save` raises.
    """
    figure = drawing.figure(13, 5.2, layout="constrained")
    left, right = figure.subplots(1, 2)
    series: dict[str, list[Row]] = {}
    for r in rows:
        series.setdefault(f"{r.N}x{r.K} {r.bits}-bit", []).append(r)
    for label, found in series.items():
        best = {m: min((r for r in found if m == r.M), key=lambda r: r.us) for m in sorted({r.M for r in found})}
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
