"""HQQ: tensors W_q (packed in slabs), scale, zero (float), and one for every setting; w = (q - zero) * scale.

With axis 1 the matrix is viewed as (N*K/g, g), a group per row; with axis 0 as (g, N*K/g), a group per column. Codes are packed
along the rows of that view in equal slabs, the first in the highest bits: uint8 with two, four or eight slabs at 4, 2 and 1
bits, int32 with ten (rows padded to a multiple of ten, two bits unused) at 3. Strings and dtypes are stored as character
codes; they are compared with known values, never evaluated. Groups of axis 0 run down the rows: such weights are read dense.

`qmodel.pt`, the file of the hqq library, is {module: {name: tensor or number}}; `flatten` gives it the same names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lowq_packers.errors import DamagedError, UnsupportedError
from lowq_packers.formats import (
    Config,
    Export,
    Fetch,
    Format,
    Headers,
    Matrix,
    Tensors,
    WrongGroup,
    method,
    register,
    served_by,
)
from lowq_packers.formats import _common as c
from lowq_packers.lazy import torch
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import Scheme

SLABS = {8: 1, 4: 2, 3: 10, 2: 4, 1: 8}
PACKINGS = {"8bit_u8": 8, "4bit_u8": 4, "3bit_32": 3, "2bit_u8": 2, "1bit_u8": 1}
NAMES: dict[float, str] = {bits: name for name, bits in PACKINGS.items()}
FIELDS = (
    *("W_q", "nbits", "group_size", "shape", "scale", "zero", "axis", "packing", "unpack_view_dtype", "view_as_float"),
    *("quant_scale", "quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config"),
    *("channel_wise", "optimize", "round_zero"),
)


def pack_slabs(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """(R, g) uint8 codes -> (R / slabs, g) words; at 3 bits int32, with R padded by zeros to a multiple of ten."""
    E, wide = SLABS[bits], torch.int32 if bits == 3 else torch.uint8
    short = -codes.shape[0] % E
    if short:
        codes = torch.nn.functional.pad(codes, (0, 0, 0, short))
    slabs = codes.reshape(E, -1, codes.shape[1]).to(wide)
    words = torch.zeros_like(slabs[0])
    for i in range(E):
        words |= slabs[i] << (bits * (E - 1 - i))
    return words


def unpack_slabs(words: torch.Tensor, bits: int, rows: int) -> torch.Tensor:
    """Inverse of `pack_slabs`: (rows, g) uint8 codes."""
    E = SLABS[bits]
    slabs = [(words >> (bits * (E - 1 - i))) & ((1 << bits) - 1) for i in range(E)]
    return torch.cat(slabs)[:rows].to(torch.uint8)


def encode(value: object) -> torch.Tensor:
    """The tensor that stores a setting in a file."""
    if isinstance(value, torch.Tensor):
        return value
    if kind := {bool: torch.uint8, int: torch.int32, float: torch.float32}.get(type(value)):
        return torch.tensor(value, dtype=kind)
    if isinstance(value, (str, torch.dtype)):
        return torch.tensor(list(str(value).encode()), dtype=torch.uint8)
    if isinstance(value, (tuple, list)) and all(type(v) is int for v in value):
        return torch.tensor(list(value), dtype=torch.int64)
    raise UnsupportedError(f"HQQ setting {value!r} is of no kind that lowq reads")


def flatten(qmodel: Mapping[str, Any]) -> Tensors:
    """The tensors of a loaded qmodel.pt by full name, with encoded settings. Raises DamagedError for any other content."""
    tensors = {}
    for module, state in qmodel.items():
        if not isinstance(module, str) or not isinstance(state, Mapping):
            raise DamagedError("qmodel.pt does not map module names to their tensors; it is not an HQQ checkpoint")
        nested = state.get("meta")
        meta = nested if isinstance(nested, Mapping) else {}
        for leaf, value in {**state, **meta}.items():
            if leaf != "meta" and value is not None:
                tensors[f"{module}.{leaf}"] = encode(value)
    return tensors


def _claims(config: Config, headers: Headers) -> bool:
    return method(config) == "hqq" or (
        method(config) is None and any(n.endswith(".W_q") and f"{n[:-4]}.nbits" in headers for n in headers)
    )


def _matrices(config: Config, headers: Headers, fetch: Fetch | None) -> list[Matrix]:
    q = c.section(config, "quantization_config")
    c.check_fields(q, ("quant_method", "quant_config"), ("skip_modules", "dynamic_config"))  # the tensors repeat all settings
    matrices = [_matrix(p, headers, fetch) for p in c.modules(headers, ".W_q")]
    for m in matrices:
        assert fetch  # _matrix has checked it
        _check_config(q, m.name, headers, fetch)
    return matrices


def _check_config(q: Mapping[str, Any], p: str, headers: Headers, fetch: Fetch) -> None:
    """Raise DamagedError if the config and the tensors of a module have different settings."""
    quant = q.get("quant_config")
    settings = quant.get(_tag(p), quant) if isinstance(quant, Mapping) else {}
    params = settings.get("weight_quant_params") if isinstance(settings, Mapping) else None
    for field, declared in params.items() if isinstance(params, Mapping) else ():
        if field in ("nbits", "group_size", "axis") and declared is not None and f"{p}.{field}" in headers:
            stored = _number(f"{p}.{field}", fetch)
            if declared != stored:
                raise DamagedError(f"quantization_config says {field}={declared!r} of {p}; its tensors say {stored}")


def _setting(p: str, leaf: str, headers: Headers, fetch: Fetch, default: int | None = None) -> int:
    name = f"{p}.{leaf}"
    if name not in headers:
        if default is None:
            raise DamagedError(f"{name} is missing; fetch the model again")
        return default
    value = _number(name, fetch)
    if isinstance(value, float):
        raise DamagedError(f"{name} is not a whole number")
    return value


def _number(name: str, fetch: Fetch) -> int | float:
    """A setting that is one number. Fractions are rounded to two digits, e.g. 1.58 bits for three values (in 2-bit words)."""
    value = fetch(name).flatten()
    if value.numel() != 1:
        raise DamagedError(f"{name} is not a number")
    return round(float(value), 2) if value.is_floating_point() else int(value)


def _text(name: str, headers: Headers, fetch: Fetch) -> str:
    return bytes(fetch(name).flatten().to(torch.uint8).tolist()).decode("ascii", "replace") if name in headers else ""


def _matrix(p: str, headers: Headers, fetch: Fetch | None) -> Matrix:
    if fetch is None:
        raise UnsupportedError("the settings of an HQQ checkpoint are in its tensors; fetch the model first (hf download)")
    shape = [int(v) for v in fetch(f"{p}.shape").flatten().tolist()] if f"{p}.shape" in headers else []
    if len(shape) != 2 or min(shape) < 1 or shape[0] * shape[1] > 1 << 40:
        raise DamagedError(f"{p}.shape says {shape}; a linear weight has two dimensions")
    N, K = shape
    nbits = _number(f"{p}.nbits", fetch) if f"{p}.nbits" in headers else _setting(p, "nbits", headers, fetch)
    packing = _text(f"{p}.packing", headers, fetch) or NAMES.get(nbits, "")
    if packing not in PACKINGS or not 1 <= nbits <= 8:
        raise UnsupportedError(f"{p}: HQQ packing {packing!r} with {nbits} bits is not supported")
    bits, axis = PACKINGS[packing], _setting(p, "axis", headers, fetch, 1)
    group = _setting(p, "group_size", headers, fetch, 0) or (K if axis else N)
    for leaf in ("quant_scale", "quant_zero"):
        if _setting(p, leaf, headers, fetch, 0):
            raise UnsupportedError(f"{p}: HQQ with quantized scales or zeros is not supported, nor by hqq itself any more")
    if axis not in (0, 1) or group < 1 or N * K % group:
        raise DamagedError(f"{p}: axis {axis} and group_size {group} do not fit {N} x {K}")
    if not _setting(p, "channel_wise", headers, fetch, 1):
        raise UnsupportedError(f"{p}: HQQ with one scale for all weights is not supported")
    groups = N * K // group
    rows, columns = (groups, group) if axis else (group, groups)
    view = bool(_setting(p, "view_as_float", headers, fetch, 0))
    words = torch.int32 if bits == 3 else torch.uint8
    c.need(headers, f"{p}.W_q", dtypes=("U8", "I32", *c.FLOATS))
    word_rows = -(-rows // SLABS[bits])
    if rows % SLABS[bits] and bits != 3:
        raise DamagedError(f"{p}: {rows} rows cannot be cut into {SLABS[bits]} slabs")
    dtype = c.need(headers, f"{p}.scale").dtype
    c.need(headers, f"{p}.zero")
    for leaf in ("scale", "zero"):
        if tuple(headers[f"{p}.{leaf}"].shape) != ((groups, 1) if axis else (1, groups)):
            raise DamagedError(f"{p}.{leaf} has the shape {tuple(headers[f'{p}.{leaf}'].shape)}; there are {groups} groups")

    def read(fetch: Fetch) -> QuantizedTensor | torch.Tensor:
        W_q = fetch(f"{p}.W_q")
        if view or W_q.is_floating_point():
            W_q = W_q.contiguous().view(torch.uint8).view(words)
        if W_q.dtype != words or tuple(W_q.shape) != (word_rows, columns):
            raise DamagedError(f"{p}.W_q has {W_q.numel()} words of {W_q.dtype}; {bits}-bit codes of {N} x {K} need otherwise")
        codes = unpack_slabs(W_q.reshape(word_rows, columns), bits, rows)
        scale, zero = fetch(f"{p}.scale").flatten(), fetch(f"{p}.zero").flatten()
        if axis == 1 and K % group == 0:
            G = K // group
            return c.decoded(codes.reshape(N, K), scale.reshape(N, G), zero.to(scale.dtype).reshape(N, G), bits, group, "float")
        shape = (-1, 1) if axis else (1, -1)
        w = (codes.float() - zero.float().reshape(shape)) * scale.float().reshape(shape)
        return w.reshape(N, K).to(scale.dtype)

    scheme = c.held(bits, group, "float", K) if axis == 1 and K % group == 0 else None
    parts = tuple(n for leaf in FIELDS if (n := f"{p}.{leaf}") in headers)
    stored = f"{nbits}-bit g{group} float zero" + ("" if axis else " axis 0")
    return Matrix(p, (N, K), parts, read, stored, bits, scheme, dtype)


def _why_not(s: Scheme, N: int, K: int) -> str | None:
    rows = N * (K // s.group_size)
    if s.bits != 3 and rows % SLABS[s.bits]:
        return f"HQQ cuts its {rows} groups into {SLABS[s.bits]} equal slabs, which does not go; nearest: a smaller --group"
    return WrongGroup(f"HQQ groups are multiples of 8, not {s.group_size}", 64) if s.group_size % 8 else None


def _config(schemes: Mapping[str, Scheme], shapes: Mapping[str, tuple[int, int]], dense_names: Sequence[str]) -> dict[str, Any]:
    def settings(s: Scheme) -> dict[str, Any]:
        weight = {
            "nbits": s.bits, "channel_wise": True, "group_size": s.group_size, "optimize": True, "round_zero": False, "axis": 1,
            "view_as_float": False,
        }  # fmt: skip
        return {"weight_quant_params": weight, "scale_quant_params": None, "zero_quant_params": None, "offload_meta": False}

    tags = {_tag(name): settings(s) for name, s in schemes.items()}
    every = list(tags.values())
    quant_config = every[0] if all(t == every[0] for t in every) else tags
    return {"quantization_config": {"quant_method": "hqq", "quant_config": quant_config, "skip_modules": list(dense_names)}}


def _tag(name: str) -> str:
    """A module's name as HQQ configs key it: without "model", "layers" and numbers."""
    return ".".join(part for part in name.split(".") if part not in ("model", "layers") and not part.isdigit())


def _write(name: str, q: QuantizedTensor, config: Config) -> Tensors:
    zeros = torch.full_like(q.scales, q.scheme.mid) if q.zeros is None else q.zeros
    settings: dict[str, object] = {
        "W_q": pack_slabs(q.W_q.reshape(-1, q.group_size), q.bits),
        "nbits": q.bits, "group_size": q.group_size, "shape": q.shape,
        "scale": q.scales.reshape(-1, 1).contiguous(), "zero": zeros.reshape(-1, 1).contiguous(), "axis": 1,
        "packing": NAMES[q.bits], "unpack_view_dtype": torch.int32 if q.bits == 3 else torch.uint8, "view_as_float": False,
        "quant_scale": False, "quant_zero": False, "compute_dtype": q.scales.dtype, "offload_meta": False,
        "encoded_state_dict": True, "stores_quant_config": True, "channel_wise": True, "optimize": True, "round_zero": False,
    }  # fmt: skip
    return {f"{name}.{leaf}": encode(value) for leaf, value in settings.items()}


def _notes(config: Config, headers: Headers) -> list[str]:
    return ["transformers 5 and vLLM do not load HQQ checkpoints (transformers 5.23 leaves the weights random, with a warning)"]


ENGINES = served_by("lowq", "hqq")
register(Format("hqq", "HQQ", _matrices, ENGINES, _why_not, _write, _config, _notes, export=Export(6), claims=_claims))
