"""The bytes of a GGUF file's tensors: a checkpoint's codes re-encoded unchanged, or weights quantized to GGUF's types."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from lowq_cli import quantizers
from lowq_cli.files.checkpoint import Checkpoint, CheckpointTensor
from lowq_cli.interop.exported import check_same
from lowq_cli.interop.gguf_file import GgufTensor, Value
from lowq_cli.interop.gguf_names import ROUTER
from lowq_cli.quantizers._block_search import quantize_blocks
from lowq_packers.errors import LowqError, UnsupportedError
from lowq_packers.formats import gguf
from lowq_packers.formats._gguf_blocks import BLOCK_KINDS, read_blocks, write_blocks
from lowq_packers.qtensor import QuantizedTensor, check_fits


@dataclass(frozen=True)
class Piece:
    """A tensor of a file: its row of the tensor table, and the part of a checkpoint's tensor that it holds.

    rows: first and end; None: all. frame: index into a patch kernel's two frames. heads: of the rows to permute into pairs.
    """

    row: GgufTensor
    of: CheckpointTensor
    rows: tuple[int, int] | None = None
    frame: int | None = None
    heads: int | None = None


@dataclass(frozen=True)
class File:
    """A file to write. Pieces of one row are consecutive. anew: weights are quantized to the types of their rows.

    factors: Llama 3's divisors of the rotary frequencies, written as the last tensor.
    """

    path: Path
    metadata: list[tuple[str, Value]]
    pieces: list[Piece]
    anew: bool = False
    factors: torch.Tensor | None = None


def chosen(row: GgufTensor) -> bool:
    """Whether a mixture determines the type of a tensor: of a matrix that is not a router."""
    return len(row.shape) > 1 and row.name.endswith(".weight") and not row.name.endswith(f"{ROUTER}.weight")


def stored(checkpoint: Checkpoint, piece: Piece, rounding: bool, anew: bool) -> Iterator[torch.Tensor]:
    """The data to write for a tensor or a part of it, with the rows of heads permuted."""

    def permuted(rows: torch.Tensor) -> torch.Tensor:
        return rows if piece.heads is None else gguf.permute_heads(rows, piece.heads).contiguous()

    t, row = piece.of, piece.row
    if anew and chosen(row):
        W = checkpoint.read_matrix(t).dequantize() if t.scheme else checkpoint.read_plain(t)
        yield from _quantized(permuted(W), row.kind, t.name)
        return
    if t.scheme is None:
        plain = checkpoint.read_plain(t)
        plain = plain[slice(*(piece.rows or (None,)))] if piece.frame is None else plain[:, :, piece.frame]
        yield permuted(plain.float() if row.kind == "F32" else plain).contiguous()
        return
    q = checkpoint.read_matrix(t)
    q = q if piece.rows is None else q.rows(*piece.rows)
    if row.kind == "F32":  # one row of an embedding
        yield q.dequantize().float()
        return
    zeros = None if q.zeros is None else permuted(q.zeros)
    q = QuantizedTensor.of(q.scheme, permuted(q.W_q), permuted(q.scales), zeros, q.table)
    try:
        raw = gguf.encode(q, t.name, rounding)
    except LowqError as e:
        raise UnsupportedError(f"cannot export {e}") from None
    check_same(gguf.decode(raw, row.kind, *q.shape, t.name), q, t.name, rounding)
    yield raw


def _quantized(W: torch.Tensor, kind: str, name: str) -> Iterator[torch.Tensor]:
    """The bytes of a weight (N, K) in a GGUF type, some rows at a time, read back and compared."""
    step = max(1, gguf.ROWS // W.shape[1])
    for i in range(0, len(W), step):
        try:
            yield encoded_rows(W[i : i + step], kind, name)
        except LowqError as e:
            raise type(e)(f"cannot export {name}: {e}") from None


def encoded_rows(W: torch.Tensor, kind: str, name: str) -> torch.Tensor:
    """The bytes of rows (R, K) in a GGUF type."""
    R, K = W.shape
    if kind in BLOCK_KINDS:
        blocks = quantize_blocks(W, kind)
        raw = write_blocks(blocks)
        if not read_blocks(raw, kind, R, K).same(blocks):
            raise AssertionError(f"{name} ({kind}) does not read back as it was written")
        return raw
    if kind in gguf.PLAIN:
        check_fits("its values", torch.float16, W)
        return W.to(torch.float16)
    scheme = gguf.SCHEMES[kind]
    quantized = quantizers.get("rtn" if scheme.bits == 8 else "lsq")(W, scheme, torch.float16).held(torch.float16)
    raw = gguf.encode(quantized, name)
    check_same(gguf.decode(raw, kind, R, K, name), quantized, name, rounding=False)
    return raw
