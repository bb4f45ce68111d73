"""bitsandbytes' 4-bit formats: codes of NF4 or FP4 in blocks of consecutive weights, and a scale (absmax) per block.

    weight (N * K / 2, 1) uint8, the first code in a byte's high half, or the same bytes filed under bnb_4bit_quant_storage
    weight.absmax (blocks) fp32 · weight.quant_map (16)
    weight.quant_state.bitsandbytes__nf4: JSON in bytes: shape, blocksize, dtype, quant_type

Double quantization: absmax is uint8, an index into weight.nested_quant_map (256), times weight.nested_absmax of every 256
blocks, plus nested_offset of the JSON. Blocks run over the ends of rows: a K that they do not divide is read dense. FP4 (whose
values are not e2m1's) is lowq's fitted table, the same in every weight.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from lowq_packers import tables
from lowq_packers.errors import DamagedError, UnsupportedError
from lowq_packers.formats import Config, Export, Fetch, Format, Headers, Matrix, Tensors, WrongGroup, register, served_by
from lowq_packers.formats import _common as c
from lowq_packers.lazy import torch
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import GROUP_STEP, Scheme

NAME, STATE = "bitsandbytes", "weight.quant_state.bitsandbytes__"
TABLES = {  # the tables of bitsandbytes' kernels, which do not read quant_map
    "nf4": tables.FIXED["nf4"],
    # sign, then 0, 1/192, 2/3, 1, 1/3, 1/2, 1/6, 1/4
    "fp4": tuple(sign * v / 12 for sign in (1, -1) for v in (0, 0.0625, 8, 12, 4, 6, 2, 3)),
}
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
NESTED = 256  # number of blocks that share a nested_absmax
DTYPES = {theirs: name for name, theirs in c.TORCH.items()}
FIELDS = ("shape", "blocksize", "dtype", "quant_type", "nested_blocksize", "nested_dtype", "nested_offset")
STORAGE = {"U8": 1, "I8": 1, "F16": 2, "BF16": 2, "F32": 4}  # storage dtypes of the bytes -> bytes per element
MAX_STATE = 4096  # max. bytes of the JSON; it usually has 200
USED = ("quant_method", "bnb_4bit_quant_type", "load_in_8bit", "_load_in_8bit")
HARMLESS = (
    *("load_in_4bit", "_load_in_4bit", "bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage"),
    *("llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight", "llm_int8_skip_modules", "llm_int8_threshold"),
)


@dataclass(frozen=True)
class State:
    """The JSON of one weight. offset: the nested_offset of double quantization; None without it."""

    kind: str
    shape: tuple[int, int]
    block: int
    dtype: str
    offset: float | None

    @property
    def blocks(self) -> int:
        """Number of blocks, and of scales."""
        return -(-prod(self.shape) // self.block)

    @property
    def scheme(self) -> Scheme | None:
        """The scheme in which lowq holds the codes; None if blocks cross the ends of rows."""
        fits = self.shape[1] % self.block == 0 and self.block % GROUP_STEP == 0
        return Scheme(4, self.block, "none", "nf4" if self.kind == "nf4" else "fitted") if fits else None


def _matrices(config: Config, headers: Headers, fetch: Fetch | None) -> list[Matrix]:
    q = c.section(config, "quantization_config")
    c.check_fields(q, USED, HARMLESS)
    if q.get("load_in_8bit") or q.get("_load_in_8bit"):
        raise c.refusal(q, "load_in_8bit", "_load_in_8bit", reads="nf4 and fp4")
    states = [(name.partition(f".{STATE}")[0], name) for name in headers if f".{STATE}" in name]
    if states and fetch is None:
        raise UnsupportedError("bitsandbytes says the shapes of its weights inside their files; download the model first")
    return [_matrix(p, name, q, headers, fetch) for p, name in states if fetch is not None]


def _state(name: str, q: Mapping[str, Any], headers: Headers, fetch: Fetch) -> State:
    """Read and check the JSON of one weight. Raises DamagedError, UnsupportedError."""
    size = c.need(headers, name, dtypes=("U8",)).shape
    if len(size) != 1 or size[0] > MAX_STATE:
        raise DamagedError(f"{name} has the shape {tuple(size)}; it must be some {MAX_STATE} bytes of JSON at most")
    try:
        state = json.loads(bytes(fetch(name).tolist()))
    except (ValueError, RecursionError):
        raise DamagedError(f"{name} is not JSON; fetch the model again") from None
    if not isinstance(state, Mapping):
        raise DamagedError(f"{name} is not a table of settings; fetch the model again")
    c.check_fields(state, FIELDS, (), f"{name}: ")
    kind, shape, dtype = state.get("quant_type"), state.get("shape"), state.get("dtype")
    if isinstance(kind, str) and kind not in TABLES:
        raise UnsupportedError(f"{name} says quant_type={kind[:40]}, which is not supported; lowq reads nf4 and fp4")
    if kind not in TABLES or name.rpartition("__")[2] != kind or q.get("bnb_4bit_quant_type", kind) != kind:
        raise DamagedError(f"{name} says quant_type={str(kind)[:40]}, config.json {str(q.get('bnb_4bit_quant_type'))[:40]}")
    if not isinstance(shape, Sequence) or len(shape) != 2 or not all(type(n) is int and 0 < n < 1 << 40 for n in shape):
        raise DamagedError(f"{name} says shape={str(shape)[:40]}; a matrix has two dimensions")
    if type(state.get("blocksize")) is not int or not isinstance(dtype, str):
        raise DamagedError(f"{name} says blocksize={str(state.get('blocksize'))[:40]}, dtype={str(dtype)[:40]}")
    if state["blocksize"] not in BLOCKS or dtype not in DTYPES:
        raise UnsupportedError(f"{name} says blocksize={state['blocksize']}, dtype={dtype[:40]}, which lowq does not read")
    offset = state.get("nested_offset")
    nested = state.get("nested_blocksize", NESTED), state.get("nested_dtype", "float32")
    if nested != (NESTED, "float32"):
        raise UnsupportedError(
            f"{name} says nested_blocksize, nested_dtype = {str(nested)[:80]}; lowq reads {NESTED} and float32"
        )
    if offset is not None and not isinstance(offset, float):
        raise DamagedError(f"{name} says nested_offset={str(offset)[:40]}, which is not a number")
    return State(kind, (shape[0], shape[1]), state["blocksize"], DTYPES[dtype], offset)


def _matrix(p: str, state: str, q: Mapping[str, Any], headers: Headers, fetch: Fetch) -> Matrix:
    s, w = _state(state, q, headers, fetch), f"{p}.weight"
    N, K = s.shape
    stored = c.need(headers, w, dtypes=STORAGE)
    count = -(-N * K // 2) / STORAGE[stored.dtype]  # number of elements of the stored tensor
    if tuple(stored.shape) not in ((count, 1), (1, count)):
        raise DamagedError(
            f"{w} is {tuple(stored.shape)} {stored.dtype}; {N} x {K} codes of 4 bits fill {-(-N * K // 2)} bytes"
        )
    parts = [w, f"{w}.absmax", f"{w}.quant_map", state]
    c.need(headers, parts[1], (s.blocks,), ("U8",) if s.offset is not None else ("F32",))
    c.need(headers, parts[2], (16,), ("F32",))
    if s.offset is not None:
        parts += [f"{w}.nested_absmax", f"{w}.nested_quant_map"]
        c.need(headers, parts[4], (-(-s.blocks // NESTED),), ("F32",))
        c.need(headers, parts[5], (256,), ("F32",))

    def read(fetch: Fetch) -> QuantizedTensor | torch.Tensor:
        table = torch.tensor([TABLES[s.kind]], dtype=torch.float32)
        if not torch.allclose(fetch(parts[2]), table[0], rtol=0, atol=1e-6):
            raise DamagedError(f"{parts[2]} is not the table of {s.kind}; lowq does not know which of them counts")
        scales = fetch(parts[1])
        if s.offset is not None:
            shared = fetch(parts[4]).repeat_interleave(NESTED)[: s.blocks]
            scales = fetch(parts[5])[scales.long()] * shared + torch.tensor(s.offset, dtype=torch.float32)
        if not bool(torch.isfinite(scales).all()):
            raise DamagedError(f"{p} holds NaN or infinite scales; fetch the model again")
        stored = fetch(w).contiguous().view(torch.uint8).flatten()
        codes = torch.stack((stored >> 4, stored & 15), -1).flatten()[: N * K]
        if s.scheme is None:
            wide = scales.repeat_interleave(s.block)[: N * K]
            return (table[0][codes.long()] * wide).reshape(N, K).to(getattr(torch, c.TORCH[s.dtype]))
        own_table = table if s.scheme.table_width else None
        return QuantizedTensor.of(s.scheme, codes.reshape(N, K), scales.reshape(N, -1), None, own_table)

    facts = f"{s.kind} g{s.block}" + (" double" if s.offset is not None else "")
    return Matrix(p, (N, K), tuple(parts), read, facts, 4, s.scheme, s.dtype)


def _why_not(s: Scheme, N: int, K: int) -> str | None:
    if s.table != "nf4" or s.scale != "float":
        return f"bitsandbytes holds nf4, not {s}; nearest: --format nf4"
    return None if s.group_size in BLOCKS else WrongGroup(f"bitsandbytes holds groups of {BLOCKS}, not {s.group_size}", 64)


def _config(schemes: Mapping[str, Scheme], shapes: Mapping[str, tuple[int, int]], dense_names: Sequence[str]) -> dict[str, Any]:
    q = {
        "quant_method": NAME, "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": False, "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": c.dense_modules(schemes, dense_names),
    }  # fmt: skip
    return {"quantization_config": q}


def _write(name: str, q: QuantizedTensor, config: Config) -> Tensors:
    codes = q.W_q.flatten()
    state = {"quant_type": "nf4", "blocksize": q.group_size, "dtype": config.get("dtype", "bfloat16"), "shape": list(q.shape)}
    if state["dtype"] not in DTYPES:
        state["dtype"] = "bfloat16"
    return {
        f"{name}.weight": (codes[0::2] << 4 | codes[1::2]).reshape(-1, 1),
        f"{name}.weight.absmax": q.scales.float().flatten(),
        f"{name}.weight.quant_map": torch.tensor(TABLES["nf4"], dtype=torch.float32),
        f"{name}.{STATE}nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }


ENGINES = served_by("lowq", "transformers (with bitsandbytes)", "vLLM")
register(Format(NAME, NAME, _matrices, ENGINES, _why_not, _write, _config, export=Export(9), tables=("nf4",)))
