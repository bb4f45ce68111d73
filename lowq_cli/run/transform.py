"""Process one item of a plan, one slab at a time: read from the source -> quantize -> pack -> write to the output."""

import zlib
from collections.abc import Callable
from functools import partial
from typing import NoReturn

import torch

from lowq_cli import quantizers
from lowq_cli.files.safetensors_io import FLOATS, ITEMSIZE, TORCH_NAMES, as_tensor
from lowq_cli.files.source import Source
from lowq_cli.plan.plan import Item
from lowq_cli.plan.rows import read_rows
from lowq_cli.quantizers._slabs import UNHELD, unheld
from lowq_cli.quantizers._table_fit import Companion
from lowq_cli.run.budget import scale_dtype, slab_rows
from lowq_cli.run.output_folder import ShardFile
from lowq_packers.errors import DamagedError
from lowq_packers.layouts import get, pack
from lowq_packers.qtensor import QuantizedTensor, dequantized

COPY = 1 << 24  # max. bytes of a kept tensor in memory at a time
# Max. weights whose error is computed at a time. On one core 3.2 ns per weight while they fit in cache, 9.4 ns at 1 << 21.
ERROR_SLAB = {"cpu": 1 << 17, "cuda": 1 << 22}

LARGEST = 1e17  # max. magnitude of a weight: float32 can hold the sum of 30,000 of its squares


@torch.inference_mode()
def quantize_matrix(
    item: Item,
    source: Source,
    file: ShardFile,
    device: torch.device,
    quantizer: quantizers.Quantize | None = None,
    factors: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    values: torch.Tensor | None = None,
) -> tuple[float, list[int]]:
    """Quantize one matrix into `file`, slab by slab; returns its relative error and the CRC-32 of each tensor written.

    quantizer: called with the matrix's rows in order; None uses the item's method. factors: rows are first multiplied by the
    first (N,), columns by the second (K,). values: the matrix (N, K) if not the source's.
    """
    assert item.scheme
    dtype = scale_dtype(item)
    by_row, by_column = factors
    N, K = item.shape
    step = slab_rows(K, device.type)
    if item.scheme.block_rows > 1:  # whole rows of blocks; their fp32 copies take twice the memory of groups' codes
        step = max(1, step // 2 // item.scheme.block_rows) * item.scheme.block_rows
    crc, at = [0] * len(item.outputs), [0] * len(item.outputs)
    squared_error = squared_norm = lost = 0.0
    rows = read_rows(item, source) if values is None else lambda first, last: values.reshape(item.shape)[first:last]
    unit = get(item.layout).row_step
    if quantizer is None:
        quantizer = quantizers.get(item.method)
        if item.scheme.table and item.method:
            quantizer = partial(quantizer, table=_table(item, rows, step))
    rest: QuantizedTensor | None = None  # rows short of a whole unit of the layout: packed with the next slab
    for first in range(0, N, step):
        W = rows(first, min(N, first + step)).to(device, non_blocking=True)
        for factor in (f for f in (by_row, by_column) if f is not None):
            W = W.float() * (factor[first : first + step].unsqueeze(1) if factor is by_row else factor).to(device)
        try:
            q = quantizer(W, item.scheme, dtype)
        except DamagedError as e:
            raise DamagedError(f"{item.source}: {e}") from None
        q = q.held(dtype)
        lost += unheld(W, q, dtype)
        e2, w2 = _squares(W, q)
        squared_error, squared_norm = squared_error + e2, squared_norm + w2
        if not squared_error < float("inf"):
            if (largest := float(W.abs().max())) > LARGEST and q.scales.isfinite().all():
                raise DamagedError(
                    f"{item.source} holds weights of {largest:.2g}, whose squares float32 cannot sum; the model file is damaged"
                )
            _refuse_scales(item)
        whole, rest = _cut(q, rest, unit)
        if not whole.shape[0]:
            continue
        p = pack(whole, item.layout)
        table = p.table if at[-1] == 0 else None  # one table for the whole matrix, written once
        for i, tensor in enumerate(t for t in (p.words, p.scales, p.zeros, table) if t is not None):
            raw = _bytes(tensor)
            file.write(item.outputs[i][0], at[i], raw)
            crc[i], at[i] = zlib.crc32(raw, crc[i]), at[i] + len(raw)
    assert at == [h.nbytes for _, h in item.outputs], item.name
    if lost > UNHELD * squared_norm:
        _refuse_scales(item)
    relative = (squared_error / squared_norm) ** 0.5 if squared_norm else float(squared_error > 0)
    return float(f"{relative:.6g}"), crc


def _table(item: Item, rows: Callable[[int, int], torch.Tensor], step: int) -> torch.Tensor | None:
    """The table that a matrix stores besides its scales, computed from all of its rows."""
    assert item.scheme
    if not item.scheme.table_width:
        return None
    N, companion = item.shape[0], Companion(item.scheme, *item.shape)
    for first in range(0, N, step):
        companion.see(rows(first, min(N, first + step)))
    return companion.result()


def _refuse_scales(item: Item) -> NoReturn:
    of_scales = item.outputs[1][1].dtype
    then = "use --dtype bfloat16" if of_scales == "F16" else "such weights are those of a damaged file"
    raise DamagedError(f"{item.source}: its scales do not fit {TORCH_NAMES[of_scales]}; {then}")


def _cut(q: QuantizedTensor, before: QuantizedTensor | None, unit: int) -> tuple[QuantizedTensor, QuantizedTensor | None]:
    """Concatenate `before` and `q` and split them after the last whole `unit` of rows."""
    if before is not None:
        zeros = None if q.zeros is None or before.zeros is None else torch.cat([before.zeros, q.zeros])
        codes, scales = torch.cat([before.W_q, q.W_q]), torch.cat([before.scales, q.scales])
        q = QuantizedTensor.of(q.scheme, codes, scales, zeros, q.table)
    N = q.shape[0]
    cut = N // unit * unit
    return (q, None) if cut == N else (q.rows(0, cut), q.rows(cut, N))


def _squares(W: torch.Tensor, q: QuantizedTensor) -> tuple[float, float]:
    """||W - dequantized||^2 and ||W||^2; row sums in fp32, rows added in fp64."""
    N, K = q.shape
    sums = torch.zeros(2, dtype=torch.float64, device=W.device)
    r = q.block_rows
    rows = -(-max(1, ERROR_SLAB[W.device.type] // K) // r) * r
    for i in range(0, N, rows):
        part = slice(i, i + rows)
        w = W[part].float()
        difference = dequantized(
            q.scheme, q.W_q[part], q.scales[i // r : -(-(i + rows) // r)], None if q.zeros is None else q.zeros[part], q.table
        ).sub_(w)
        sums += torch.stack([t.sum(-1).double().sum() for t in (difference.square_(), w.square())])
    error, norm = sums.tolist()
    return error, norm


def _bytes(t: torch.Tensor) -> memoryview:
    """The bytes of a tensor, without a copy if it is contiguous and on the CPU."""
    if t.is_cuda:  # through pinned pages, which torch caches: allocating new ones takes longer than the copy
        t = torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t)
    return memoryview(t.contiguous().view(torch.uint8).numpy()).cast("B")  # type: ignore[arg-type]


@torch.inference_mode()
def copy(item: Item, source: Source, file: ShardFile, values: torch.Tensor | None = None) -> tuple[None, list[int]]:
    """Copy a kept tensor into `file` in pieces, checking for NaN and infinities unless it is a buffer ("other").

    values: written instead of the source's values if calibration changed the tensor.
    """
    name, target = item.outputs[0]
    if values is not None:
        raw: bytearray | memoryview = _bytes(values.to(getattr(torch, TORCH_NAMES[target.dtype])))
        file.write(name, 0, raw)
        return None, [zlib.crc32(raw)]
    size = ITEMSIZE[item.source_dtype]
    floats = item.source_dtype in FLOATS
    cast = target.dtype != item.source_dtype
    crc = at = 0
    for first in range(0, item.params * size, COPY):
        raw = source.read_raw(item.source, first, min(COPY, item.params * size - first))
        if floats and (cast or item.kind != "other"):
            t = as_tensor(raw, item.source_dtype, (len(raw) // size,))  # type: ignore[arg-type]
            if not torch.isfinite(t.sum()) and not torch.isfinite(t).all():  # in bf16 a sum takes 1/30 of a full check
                raise DamagedError(f"{item.name} holds NaN or infinite values; the model file is damaged")
            if cast:
                t = t.to(getattr(torch, TORCH_NAMES[target.dtype]))
                if not torch.isfinite(t).all():
                    raise DamagedError(f"{item.name} does not fit {TORCH_NAMES[target.dtype]}; use --dtype bfloat16")
                raw = _bytes(t)
        file.write(name, at, raw)
        crc, at = zlib.crc32(raw, crc), at + len(raw)
    assert at == target.nbytes, item.name
    return None, [crc]
