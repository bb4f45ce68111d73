"""Estimate the memory, disk space and time of a run and compare them with what is available, before anything is written."""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowq_cli import quantizers
from lowq_cli.calibrate.requirements import layers_bytes, working_bytes
from lowq_cli.console import size
from lowq_cli.devices import Device
from lowq_cli.files.folder import check_room, free_bytes
from lowq_cli.files.safetensors_io import ITEMSIZE, TORCH_NAMES
from lowq_cli.memory import available_memory, current_rss
from lowq_cli.plan.plan import Item, Plan
from lowq_cli.quantizers._slabs import SLAB as QUANTIZER_SLAB
from lowq_cli.workers import GPU_WORKERS, shared_threads
from lowq_packers.errors import DoesNotFitError
from lowq_packers.lazy import torch
from lowq_packers.scheme import Scheme

if TYPE_CHECKING:
    from lowq_cli.run.own_text_plan import Outlook

SLAB = {"cpu": 1 << 23, "cuda": 1 << 25}  # max. weights quantized at a time, for tensors of any size
BYTES_PER_WEIGHT = 12  # of a slab: weights, codes, packing, fp32 error; measured by benchmarks/quantize_cost.py
WORKING = 160 << 20  # bytes of buffers of the quantizers, the copies and the allocator that do not grow with the slab
TORCH = 225 << 20  # resident bytes of an imported torch, which a plan from headers does not include yet
ROTATING = 12  # bytes per weight of a rotated matrix: a rotation across rows needs the whole matrix in fp32
PROBE = {"cpu": 1 << 19, "cuda": 1 << 22}  # max. weights of the random sample that `probe` times


@dataclass(frozen=True)
class Budget:
    """Bytes and seconds that a run will take. None where the machine does not report a value, or nothing was timed."""

    peak_bytes: int  # resident memory of the whole process
    available_bytes: int | None
    disk_bytes: int  # bytes that are not written yet
    disk_free_bytes: int | None
    seconds: float | None
    within: int = 1  # the run may take this factor longer or shorter than `seconds`; 1 if samples of all the work were timed

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def longer(self, seconds: float) -> Budget:
        """The same with more time, if it was estimated."""
        return self if self.seconds is None else replace(self, seconds=self.seconds + seconds)

    def check(self, out: Path) -> None:
        """Raise DoesNotFitError if memory or disk are too small."""
        if self.available_bytes is not None and self.peak_bytes - current_rss() > self.available_bytes:
            raise DoesNotFitError(
                f"needs {size(self.peak_bytes)} of memory, {size(self.available_bytes)} are available; "
                f"close other programs, or use a machine with more"
            )
        check_room(self.disk_bytes, out, "use fewer bits", self.disk_free_bytes)


def make_budget(
    plan: Plan, out: Path, device: Device, workers: int = 1, written: int = 0, held: int = 0, timed: bool = True
) -> Budget:
    """The budget of `plan` with `workers`; `written` bytes are already on disk, reading keeps `held` bytes in memory.

    timed: whether to time a sample of the work, which imports torch.
    """
    calibrating = working_bytes(plan)
    peak = current_rss() + (0 if "torch" in sys.modules else TORCH) + WORKING + held
    peak += workers * max(slab_bytes(i, device.type) for i in plan.items)
    peak += calibrating if device.type == "cpu" else 0
    peak += ROTATING * max((i.params for i in plan.items if i.scheme), default=0) if plan.recipe.rotate else 0
    time = _seconds(plan, torch.device(str(device)), workers, bool(calibrating)) if timed else (None, 1)
    return Budget(peak, available_memory(), max(0, plan.nbytes + layers_bytes(plan) - written), free_bytes(out), *time)


def _seconds(plan: Plan, device: torch.device, workers: int, calibrating: bool) -> tuple[float, int]:
    """(estimated seconds of the work from a timed sample, the factor by which it may take longer or shorter)."""
    probed = probe(plan, device, workers)
    if not calibrating:
        return probed, 1
    from lowq_cli.calibrate import cost  # imports transformers

    return probed + cost.seconds(plan, device), cost.WITHIN


def with_text(budget: Budget, own: Outlook | None) -> Budget:
    """The budget including the generation of the model's own text, which comes first and on a CPU holds the model in memory."""
    if own is None:
        return budget
    held = current_rss() + WORKING + own.held if own.seconds and own.device.type == "cpu" else 0
    return replace(budget, peak_bytes=max(budget.peak_bytes, held)).longer(own.seconds)


def slab_bytes(item: Item, device: str = "cpu") -> int:
    """Bytes held in memory while an item is processed."""
    if not item.scheme:
        return 0  # copied in small pieces, which WORKING includes
    N, K = item.shape
    weights = min(N, slab_rows(K, device)) * K
    apart = item.cut.transposed or item.cut.step > 1  # its rows are columns of the file, or every second row
    whole = item.cut.step * N * K * ITEMSIZE[item.source_dtype] if apart else 0
    return weights * BYTES_PER_WEIGHT + whole


def slab_rows(K: int, device: str = "cpu") -> int:
    """Rows quantized at a time: whole slabs of the quantizer, so that the split does not change any code."""
    inner = max(1, QUANTIZER_SLAB.get(device, QUANTIZER_SLAB["cpu"]) // K)
    return max(1, SLAB.get(device, SLAB["cpu"]) // (inner * K)) * inner


def probe(plan: Plan, device: torch.device, workers: int) -> float:
    """Seconds that rounding takes with `workers`: each method and scheme of the plan is timed on a random sample.

    This also checks that the method supports the scheme: a SchemeError is raised here, not at the first tensor.
    """
    at_once = max(1, workers // GPU_WORKERS) if device.type == "cuda" else workers
    weights = Counter[tuple[str | None, Scheme, torch.dtype]]()
    for i in plan.items:
        if i.scheme:
            weights[i.method, i.scheme, scale_dtype(i)] += i.params
    sizes = {how: min(PROBE[device.type], 1 << n.bit_length()) for how, n in weights.items()}  # a small model is its own sample
    return sum(n * _sampled(*how, device, workers, sizes[how]) for how, n in weights.items()) / at_once


@cache
def _sampled(method: str | None, scheme: Scheme, dtype: torch.dtype, device: torch.device, workers: int, weights: int) -> float:
    """Seconds per weight, timed once per process: a run makes several plans, and a sample takes 50 ms."""
    quantize, K = partial(quantizers.get(method), scheme=scheme, dtype=dtype), scheme.group_size
    W = torch.randn(max(1, weights // K), K, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    with shared_threads(workers):
        # warm-up: the rate must not include the start-up of libraries, nor on a GPU a kernel's compilation, which may depend on
        # the number of rows (it made an 8B's 66 s of distill 151 to 198)
        quantize(W if device.type == "cuda" else W[:1])
        start = time.perf_counter()
        quantize(W).scales[:1].cpu()  # waits for a GPU
        return (time.perf_counter() - start) / W.numel()


def scale_dtype(item: Item) -> torch.dtype:
    """The dtype of stored scales that a quantizer rounds to; fp32 where scales are stored as bytes."""
    of_scales = item.outputs[1][1].dtype
    return torch.float32 if of_scales == "U8" else getattr(torch, TORCH_NAMES[of_scales])
