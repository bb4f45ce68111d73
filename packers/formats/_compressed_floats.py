"""compressed-tensors' floats: float-quantized (fp8 times a scale per tensor, row or block), and e2m1 in two forms (FP4).

The fp4 forms: weight_packed (N, K / 2) uint8, the first code in a byte's low half; weight_scale (N, K / 16) e4m3 and
weight_global_scale [1], which divides them, or (N, K / 32) exponents in uint8. compressed-tensors divides by it; lowq
multiplies by the reciprocal, with the same result to the last bit of fp32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lowq_packers.errors import DamagedError, UnsupportedError
from lowq_packers.formats import Config, Fetch, Header, Headers, Matrix, Tensors, _fp4, fp8_block
from lowq_packers.formats import _common as c
from lowq_packers.layouts import PackedWeight
from lowq_packers.lazy import torch
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import Scheme

FLOATS8 = ("F8_E4M3",)
FP4 = {"nvfp4-pack-quantized": _fp4.NVFP4, "mxfp4-pack-quantized": _fp4.MXFP4}
FACTOR = "weight_global_scale"
_DTYPES = {_fp4.NVFP4: "torch.float8_e4m3fn", _fp4.MXFP4: "torch.uint8"}


def form_of(p: str, headers: Headers) -> str:
    """The name of the FP4 form of a module, by the dtype of its scales."""
    scales = headers.get(f"{p}.weight_scale")
    return "nvfp4-pack-quantized" if scales and scales.dtype == "F8_E4M3" else "mxfp4-pack-quantized"


def form(s: Scheme) -> str:
    """The name of an FP4 scheme."""
    return next(name for name, scheme in FP4.items() if scheme == s)


def fp4(p: str, form: str, w: Mapping[str, Any], headers: Headers, config: Config) -> Matrix:
    """The matrix of an FP4 module. w: the weights' settings in its config group. Raises UnsupportedError, DamagedError."""
    scheme = FP4[form]
    declared = c.number(w, "num_bits"), w.get("type"), c.number(w, "group_size", default=scheme.group_size)
    if declared != (4, "float", scheme.group_size):
        raise c.refusal(w, "num_bits", "type", "group_size", module=f"{form} {p}")
    if not c.flag(w, "symmetric", True):
        raise c.refusal(w, "symmetric", reads="true", module=f"{form} {p}")
    parts = [f"{p}.weight_packed", f"{p}.weight_scale"]
    shape = _fp4.shape(headers, parts[0], parts[1], scheme)
    factored = scheme.scale == "e4m3"
    if factored:
        parts.append(f"{p}.{FACTOR}")
        if c.need(headers, parts[-1], dtypes=("F32",)).shape not in ((), (1,)):
            raise DamagedError(f"{parts[-1]} has the shape {tuple(headers[parts[-1]].shape)}; it must be one number")

    def read(fetch: Fetch) -> QuantizedTensor:
        factor = 1 / fetch(parts[2]) if factored else None
        return _fp4.decoded(scheme, fetch(parts[0]), fetch(parts[1]), p, factor)

    return Matrix(p, shape, tuple(parts), read, _fp4.stored_as(scheme), 4, scheme, _fp4.dtype_of(scheme, config))


def fp4_weights(s: Scheme) -> dict[str, Any]:
    """The weights' settings in a config group, for an FP4 scheme."""
    return {
        "num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group" if s == _fp4.NVFP4 else "group",
        "group_size": s.group_size, "dynamic": False, "scale_dtype": _DTYPES[s], "zp_dtype": _DTYPES[s],
    }  # fmt: skip


def check_values(p: PackedWeight, name: str, rounding: bool) -> None:
    """Raise SchemeError for a factor that is not the reciprocal of an fp32 number, unless `rounding`."""
    if p.scheme.table and p.table is not None:
        _fp4.inverse(p.table, name, rounding)


def write_fp4(name: str, p: PackedWeight, rounding: bool) -> Tensors:
    """The tensors of an FP4 module. Raises SchemeError for a factor that is not the reciprocal of an fp32 number."""
    scales = p.scales.view(torch.float8_e4m3fn) if p.scheme.scale == "e4m3" else p.scales
    tensors = {f"{name}.weight_packed": _fp4.code_bytes(p), f"{name}.weight_scale": scales}
    if p.table is not None:
        tensors[f"{name}.{FACTOR}"] = _fp4.inverse(p.table, name, rounding)
    return tensors


def groups_of(name: str, companion: Header, N: int) -> int:
    """Number of scales (or zeros) per row: 1, which all rows may share, or one per group. Raises DamagedError."""
    shape = tuple(companion.shape)
    if shape in ((), (1,), (1, 1), (N,)):
        return 1
    if len(shape) != 2 or shape[0] != N or not shape[1]:
        raise DamagedError(f"{name} has the shape {shape}; {N} rows were expected")
    return shape[1]


def fp8(p: str, w: Mapping[str, Any], headers: Headers, config: Config) -> Matrix:
    """The matrix of a float-quantized module: fp8 times a scale per tensor, row, or block of `block_structure`."""
    N, K = c.matrix(headers, f"{p}.weight", FLOATS8)
    if w.get("type", "float") != "float" or c.number(w, "num_bits", default=8) != 8:
        raise c.refusal(w, "num_bits", "type", module=f"fp8 {p}")
    if not c.flag(w, "symmetric", True):
        raise c.refusal(w, "symmetric", reads="true", module=f"fp8 {p}")
    if f"{p}.weight_zero_point" in headers:
        raise UnsupportedError(f"{p}: fp8 with zero points is not supported")
    scale = c.need(headers, f"{p}.weight_scale")
    block: tuple[int, int] | None = None
    if w.get("strategy") == "block":
        block = c.pair(w.get("block_structure"), f"{p} has block_structure")
        c.need(headers, f"{p}.weight_scale", (-(-N // block[0]), -(-K // block[1])))
    elif w.get("strategy") == "tensor" and math.prod(scale.shape) != 1:
        raise DamagedError(f"{p}.weight_scale has the shape {tuple(scale.shape)}; quantization_config says one for all")
    elif (G := groups_of(f"{p}.weight_scale", scale, N)) > 1:
        raise UnsupportedError(f"{p}: float-quantized with {G} scales a row is not supported; lowq reads one, or blocks")

    dtype = c.model_dtype(config, "F32") if scale.dtype == "F32" else scale.dtype

    def read(fetch: Fetch) -> torch.Tensor:
        return fp8_block.dequantize(fetch(f"{p}.weight"), fetch(f"{p}.weight_scale"), block, dtype)

    parts = [n for leaf in ("weight", "weight_scale", "input_scale") if (n := f"{p}.{leaf}") in headers]
    kind = f"fp8 {block[0]}x{block[1]} blocks" if block else "fp8"
    return Matrix(p, (N, K), tuple(parts), read, kind, 8, None, dtype)
