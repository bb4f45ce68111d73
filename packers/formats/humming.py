"""Humming (vLLM's native low-bit format): lowq's words, scales (N, G), and float zeros, integer zeros or none.

weight (N, K*bits/32) int32; weight_scale (N, G); zero_point (N, G) floats, or int32 packed along N, or absent for the
constant 2**(bits-1). w = (q - zero) * scale. The config names one dtype ("uint4"), with `dynamic` for exceptions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lowq_packers import bitstream
from lowq_packers.errors import DamagedError, UnsupportedError
from lowq_packers.formats import Config, Export, Fetch, Format, Headers, Matrix, Tensors, register, served_by
from lowq_packers.formats import _common as c
from lowq_packers.layouts import PackedWeight
from lowq_packers.lazy import torch
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import Scheme, ZeroKind

DTYPES = ("dtype", "weight_dtype", "b_dtype")
PER_MODULE = (*DTYPES, "group_size", "has_zero_point", "is_fp_zero_point")
USED, HARMLESS = ("quant_method", "dynamic", "ignore", *PER_MODULE), ("a_dtype", "input_dtype", "meta")


def _matrices(config: Config, headers: Headers, fetch: Fetch | None) -> list[Matrix]:
    q = c.section(config, "quantization_config")
    c.check_fields(q, USED, HARMLESS)
    rules = c.dynamic_rules(q, PER_MODULE, HARMLESS)
    matrices = []
    for p in c.modules(headers, ".weight_scale"):
        if f"{p}.weight" not in headers or headers[f"{p}.weight"].dtype != "I32":
            raise UnsupportedError(f"{p}: Humming weights that are not packed integers are not ones that lowq reads")
        matrices.append(_matrix(p, c.overridden(q, rules, p), headers))
    return matrices


def _matrix(p: str, q: Mapping[str, Any], headers: Headers) -> Matrix:
    named = {str(q[k]) for k in DTYPES if q.get(k) is not None}
    if len(named) > 1:
        raise DamagedError(f"quantization_config gives {p} the dtypes {' and '.join(sorted(named))}")
    dtype = next(iter(named), "none")
    if not re.fullmatch("uint[1-8]", dtype):
        raise c.refusal(q, *DTYPES, reads="uint1 to uint8", module=p)
    bits = int(dtype[4:])
    N, words = c.matrix(headers, f"{p}.weight", ("I32",))
    scale = c.need(headers, f"{p}.weight_scale")
    K = words * 32 // bits
    g, groups = c.group_count(K, c.number(q, "group_size", default=0), p)
    c.need(headers, f"{p}.weight_scale", (N, groups))
    parts = [f"{p}.weight", f"{p}.weight_scale"]
    zero: ZeroKind = "none"
    stored_zero = f"{p}.zero_point" in headers
    if c.flag(q, "has_zero_point", False) != stored_zero:
        raise DamagedError(f"quantization_config says has_zero_point={not stored_zero} of {p}; its tensors say otherwise")
    if stored_zero:
        zero = "float" if c.flag(q, "is_fp_zero_point", False) else "int"
        parts.append(f"{p}.zero_point")
        shape = (N, groups) if zero == "float" else (bitstream.words_per_row(N, bits), groups)
        c.need(headers, parts[-1], shape, c.FLOATS if zero == "float" else ("I32",))

    def read(fetch: Fetch) -> QuantizedTensor | torch.Tensor:
        codes, scales = c.unpack(fetch(f"{p}.weight"), bits, K), fetch(f"{p}.weight_scale")
        zeros = None
        if zero == "float":
            zeros = fetch(f"{p}.zero_point")
        elif zero == "int":
            zeros = c.unpack(fetch(f"{p}.zero_point").t().contiguous(), bits, N).t().to(scales.dtype)
        if zero == "none" and bits == 1:
            return QuantizedTensor(codes, scales, torch.ones_like(scales), 1, g, "int")
        return c.decoded(codes, scales, zeros, bits, g, zero)

    kind: ZeroKind = "int" if zero == "none" and bits == 1 else zero
    stored = f"{bits}-bit g{g} " + {"none": "sym", "int": "int zero", "float": "float zero"}[zero]
    return Matrix(p, (N, K), tuple(parts), read, stored, bits, c.held(bits, g, kind, K), scale.dtype)


def _why_not(s: Scheme, N: int, K: int) -> str | None:
    if K * s.bits % 32:
        return f"Humming rows are whole words, which K={K} at {s.bits} bits does not fill; nearest: compressed-tensors"
    if N % 64 or K % 32:
        return (
            f"Humming's kernels need N a multiple of 64 and K of 32, these are {N} and {K}; nearest: keep this layer (--skip)"
        )
    if s.zero == "int" and N * s.bits % 32:
        return f"Humming packs whole-number zeros along N={N}; nearest: quantize with --zero float"
    return None


def _fields(s: Scheme, K: int) -> dict[str, Any]:
    """The config fields of one scheme. 1-bit codes without a zero (-s/2, +s/2) get the float zero 0.5."""
    float_zero = s.zero == "float" or (s.zero == "none" and s.bits == 1)
    return {
        "dtype": f"uint{s.bits}", "group_size": 0 if s.group_size == K else s.group_size,
        "has_zero_point": s.zero == "int" or float_zero, "is_fp_zero_point": float_zero,
    }  # fmt: skip


def _config(schemes: Mapping[str, Scheme], shapes: Mapping[str, tuple[int, int]], dense_names: Sequence[str]) -> dict[str, Any]:
    fields = {name: _fields(s, shapes[name][1]) for name, s in schemes.items()}
    every = list(fields.values())
    main = max(every, key=every.count)
    dynamic: dict[str, Any] = {f"+:{c.exactly(name)}": f for name, f in fields.items() if f != main}
    q = {"quant_method": "humming", **main, "ignore": c.dense_modules(schemes, dense_names)}
    return {"quantization_config": q | ({"dynamic": dynamic} if dynamic else {})}


def _write(name: str, p: PackedWeight, config: Config) -> Tensors:
    tensors = {f"{name}.weight": p.words, f"{name}.weight_scale": p.scales}
    if p.scheme.zero == "float" and p.zeros is not None:
        tensors[f"{name}.zero_point"] = p.zeros
    elif p.scheme.zero == "int":
        tensors[f"{name}.zero_point"] = c.packed_zeros(p, name)
    elif p.scheme.bits == 1:
        tensors[f"{name}.zero_point"] = torch.full_like(p.scales, p.scheme.mid)
    return tensors


ENGINES, EXPORT = served_by("lowq", "vLLM (with humming-kernels)"), Export(4, experts=False)
WRITE = c.from_codes(_write)
register(Format("humming", "Humming", _matrices, ENGINES, _why_not, WRITE, _config, write_words=_write, export=EXPORT))
