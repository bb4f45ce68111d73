"""AWQ "gemm", 4 bits: qweight (K, N/8) int32, qzeros (G, N/8), scales (G, N); w = (q - z) * scales, z stored without an offset.

Word c of a row holds output columns 8c .. 8c+7, nibble i (least significant first) the column 8c + (0,2,4,6,1,3,5,7)[i].
The activation-aware scaling is already folded into the previous layer, so it need not be undone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lowq_packers import bitstream
from lowq_packers.errors import DamagedError, UnsupportedError
from lowq_packers.formats import Config, Export, Fetch, Format, Headers, Matrix, Tensors, register, served_by
from lowq_packers.formats import _common as c
from lowq_packers.lazy import torch
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import Scheme

USED = (
    *("quant_method", "bits", "w_bit", "group_size", "q_group_size", "version", "zero_point", "desc_act", "sym"),
    *("checkpoint_format", "format", "pack_dtype", "modules_to_not_convert"),
)
HARMLESS = (  # settings of other engines that change no weight
    *("backend", "do_fuse", "modules_to_fuse", "fuse_max_seq_len", "exllama_config", "lm_head", "meta", "method"),
    *("damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "mse"),
)
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column of each nibble
INVERSE = (0, 4, 1, 5, 2, 6, 3, 7)  # nibble of each column


def _columns(words: torch.Tensor) -> torch.Tensor:
    """(R, N/8) int32 words -> (R, N) uint8 codes in column order."""
    nibbles = bitstream.unpack(words, 4, words.shape[1] * 8).reshape(words.shape[0], -1, 8)
    return nibbles[..., list(INVERSE)].reshape(words.shape[0], -1)


def _words(codes: torch.Tensor) -> torch.Tensor:
    """Inverse of `_columns`."""
    nibbles = codes.reshape(codes.shape[0], -1, 8)[..., list(ORDER)]
    return bitstream.pack(nibbles.reshape(codes.shape), 4)


def _matrices(config: Config, headers: Headers, fetch: Fetch | None) -> list[Matrix]:
    q = c.section(config, "quantization_config")
    c.check_fields(q, USED, HARMLESS)
    c.check_absent(q, "desc_act", "sym")
    if q.get("zero_point", True) is not True:  # null is rejected too: other readers take it as false
        raise c.refusal(q, "zero_point", reads="true, because other readers ignore the zeros of such a file")
    if q.get("checkpoint_format", q.get("format", "gemm")) != "gemm":
        raise c.refusal(q, "checkpoint_format", "format", reads="gemm")
    if q.get("pack_dtype", "int32") != "int32":
        raise c.refusal(q, "pack_dtype", reads="int32")
    if str(q.get("version", "gemm")).lower() != "gemm":
        raise c.refusal(q, "version", reads="gemm")
    if c.number(q, "bits", "w_bit") != 4:
        raise c.refusal(q, "bits", "w_bit", reads="4")
    matrices = []
    excluded = c.names(q, "modules_to_not_convert")
    for p in c.modules(headers, ".qweight"):
        if any(name == p or p.startswith(f"{name}.") for name in excluded):
            raise DamagedError(f"modules_to_not_convert in quantization_config names {p}, but it is quantized")
        K, words = c.matrix(headers, f"{p}.qweight", ("I32",))
        N = words * 8
        g, G = c.group_count(K, c.number(q, "group_size", "q_group_size"), p)
        c.need(headers, f"{p}.qzeros", (G, words), ("I32",))
        dtype = c.need(headers, f"{p}.scales", (G, N)).dtype
        parts = tuple(f"{p}.{leaf}" for leaf in ("qweight", "qzeros", "scales"))
        matrices.append(Matrix(p, (N, K), parts, _reader(p, g), f"4-bit g{g} int zero", 4, c.held(4, g, "int", K), dtype))
    return matrices


def _reader(p: str, g: int) -> Callable[[Fetch], QuantizedTensor | torch.Tensor]:
    def read(fetch: Fetch) -> QuantizedTensor | torch.Tensor:
        codes = _columns(fetch(f"{p}.qweight")).t().contiguous()
        scales = fetch(f"{p}.scales").t().contiguous()
        zeros = _columns(fetch(f"{p}.qzeros")).t().to(scales.dtype)
        return c.decoded(codes, scales, zeros, 4, g, "int")

    return read


def _why_not(s: Scheme, N: int, K: int) -> str | None:
    if s.bits != 4:
        return f"AWQ holds 4 bits, not {s.bits}; nearest: --bits 4 --zero int"
    if s.zero != "int":
        return f"AWQ holds whole-number zeros, not {s.zero} ones; nearest: quantize with --zero int"
    return f"AWQ packs 8 columns to a word, N={N} is not a multiple; nearest: compressed-tensors" if N % 8 else None


def _config(schemes: Mapping[str, Scheme], shapes: Mapping[str, tuple[int, int]], dense_names: Sequence[str]) -> dict[str, Any]:
    groups = {-1 if s.group_size == shapes[n][1] else s.group_size for n, s in schemes.items()}
    if len(groups) > 1:
        raise UnsupportedError(
            f"AWQ has one group size for all layers, these have {sorted(groups)}; nearest: compressed-tensors"
        )
    q = {
        "quant_method": "awq", "bits": 4, "group_size": groups.pop(), "zero_point": True, "version": "gemm",
        "modules_to_not_convert": list(dense_names) or None,
    }  # fmt: skip
    return {"quantization_config": q}


def _write(name: str, q: QuantizedTensor, config: Config) -> Tensors:
    return {
        f"{name}.qweight": _words(q.W_q.t().contiguous()),
        f"{name}.qzeros": _words(c.whole_zeros(q, name).t().contiguous()),
        f"{name}.scales": q.scales.t().contiguous(),
    }


ENGINES = served_by("lowq", "vLLM", "SGLang", "transformers (with gptqmodel)")
EXPORT = Export(3, towers=lambda config: "AWQ has one group size for all layers, of which most towers' widths are no multiples")
register(Format("awq", "AWQ (gemm)", _matrices, ENGINES, _why_not, _write, _config, export=EXPORT))
