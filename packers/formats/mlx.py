"""MLX affine: weight (N, K*bits/32) uint32, lowq's words; scales and biases (N, G); w = q * scales + biases.

biases = -zeros * scales. Without a zero (zeros = 2**(bits-1)) that is exact in any float dtype. Other zeros can need more
digits than the scales' dtype has; they raise an error unless rounding is allowed. Experts of a layer are stacked, (E, N, ...),
under mlx-lm's name switch_mlp.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from lowq_packers import bitstream
from lowq_packers.arch import families
from lowq_packers.arch.config import NotPlain, read_config
from lowq_packers.arch.parts import Attention, Experts, Linear, Mlp, walk
from lowq_packers.errors import DamagedError, UnsupportedError
from lowq_packers.formats import Config, Export, Fetch, Format, Headers, Matrix, Tensors, WrongGroup, register, served_by
from lowq_packers.formats import _common as c
from lowq_packers.formats._older_config import spelled_out
from lowq_packers.layouts import PackedWeight
from lowq_packers.lazy import torch
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import Scheme

FIELDS = ("bits", "group_size", "mode")
WIDTHS = (8, 4, 3, 2)  # the widths that lowq has too; MLX also has 5 and 6
GROUPS = (32, 64, 128)
FAMILIES = [f.model_type for f in families().values() if f.mlx]  # the only families that mlx-lm stacks as below
UNSCALED = ("mixtral", "qwen2_moe", "qwen3_moe")  # families for which mlx-lm ignores a scaled RoPE
UNSIZED = ("mixtral", "qwen2", "qwen2_moe")  # families for which mlx-lm ignores head_dim
_QKV = ("q_proj", "k_proj", "v_proj")
BIASED: dict[str, tuple[str, ...]] = {
    "qwen2": _QKV,
    "qwen2_moe": _QKV,
    **dict.fromkeys(("mixtral", "qwen3", "qwen3_moe"), ()),
}  # family -> modules that can have a bias in mlx-lm
LEAVES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}  # Mixtral's name of a matrix -> its stack's name


def _claims(config: Config, headers: Headers) -> bool:
    q = config.get("quantization")
    return isinstance(q, Mapping) and "group_size" in q and ("mode" in q or any(n.endswith(".biases") for n in headers))


def _matrices(config: Config, headers: Headers, fetch: Fetch | None) -> list[Matrix]:
    q = c.section(config, "quantization")
    if config.get("quantization_config") not in (None, q):
        raise UnsupportedError(
            "config.json has a quantization and another quantization_config; it is not clear which one counts"
        )
    simple = {k: v for k, v in q.items() if not isinstance(v, Mapping | bool)}  # others: settings of modules
    c.check_fields(simple, FIELDS, ("quant_method",))
    return [m for p in c.modules(headers, ".scales") for m in _module(p, q, headers)]


def _stack(name: str, family: str) -> tuple[str, int] | None:
    match = re.fullmatch(r"(.+)\.experts\.(\d+)\.(\w+)", name)
    if match is None or family not in FAMILIES:
        return None
    return f"{match[1]}.switch_mlp.{LEAVES.get(match[3], match[3])}", int(match[2])


def _experts(stack: str, count: int) -> list[str]:
    """The names of the matrices in a stack: the inverse of `_stack`. Raises UnsupportedError for any other stack."""
    match = re.fullmatch(r"(.+)\.switch_mlp\.(gate_proj|up_proj|down_proj)", stack)
    if match is None:
        raise UnsupportedError(f"{stack}.weight is a stack of a kind that lowq does not read")
    theirs = {v: k for k, v in LEAVES.items()} if match[1].endswith("block_sparse_moe") else {}
    return [f"{match[1]}.experts.{e}.{theirs.get(match[2], match[2])}" for e in range(count)]


def _module(p: str, q: Mapping[str, Any], headers: Headers) -> list[Matrix]:
    """The matrix of a module, or the matrices of its experts."""
    entry = q.get(p)
    if entry is False:
        raise DamagedError(f"quantization in config.json says that {p} is not quantized, but it is")
    if isinstance(entry, Mapping):
        c.check_fields(entry, FIELDS, (), f"{p}: ")
    settings = {**q, **entry} if isinstance(entry, Mapping) else q
    if settings.get("mode", "affine") != "affine":
        raise c.refusal(settings, "mode", reads="affine", module=p)
    bits = c.number(settings, "bits")
    if bits not in (2, 3, 4, 5, 6, 8):
        raise c.refusal(settings, "bits", reads="2, 3, 4, 5, 6 and 8", module=p)
    shape = c.need(headers, f"{p}.weight", dtypes=("U32",)).shape
    if len(shape) not in (2, 3) or 0 in shape:
        raise DamagedError(f"{p}.weight has the shape {tuple(shape)}; a packed matrix has two dimensions, a stack three")
    *stacked, N, words = shape
    K = words * 32 // bits
    g, G = c.group_count(K, c.number(settings, "group_size"), p)
    dtype = c.need(headers, f"{p}.scales", (*stacked, N, G)).dtype
    c.need(headers, f"{p}.biases", (*stacked, N, G))
    parts = (f"{p}.weight", f"{p}.scales", f"{p}.biases")

    def read(fetch: Fetch, index: tuple[int, ...] = ()) -> QuantizedTensor | torch.Tensor:
        words, scales, biases = (fetch(part, *index) for part in parts)
        codes, scales, zeros = c.offset_to_zeros(c.unpack(words, bits, K), scales, biases, g)
        return c.decoded(codes, scales, zeros, bits, g, "float")

    facts = f"{bits}-bit g{g} affine", bits, c.held(bits, g, "float", K), dtype
    if not stacked:
        return [Matrix(p, (N, K), parts, read, *facts)]
    names = _experts(p, stacked[0])
    return [Matrix(name, (N, K), parts, partial(read, index=(e,)), *facts) for e, name in enumerate(names)]


def _why_not(s: Scheme, N: int, K: int) -> str | None:
    if s.bits not in WIDTHS:
        return f"MLX holds 8, 4, 3 and 2 bits, not {s.bits}; nearest: --bits 2"
    if s.group_size not in GROUPS:
        return WrongGroup(f"MLX holds groups of 32, 64 and 128, not {s.group_size}", 64)
    return None


def _config(schemes: Mapping[str, Scheme], shapes: Mapping[str, tuple[int, int]], dense_names: Sequence[str]) -> dict[str, Any]:
    main = c.schemes_agree(schemes)
    if main is None:
        raise DamagedError("nothing is quantized")
    q: dict[str, Any] = {"group_size": main.group_size, "bits": main.bits, "mode": "affine"}
    for name, s in schemes.items():
        if (s.bits, s.group_size) != (main.bits, main.group_size):
            q[name] = {"group_size": s.group_size, "bits": s.bits, "mode": "affine"}
    return {"quantization": q, "quantization_config": q}


def _biases(q: QuantizedTensor | PackedWeight, name: str, rounding: bool) -> torch.Tensor:
    """The biases, in the dtype of the scales. Raises SchemeError if they need more digits, unless `rounding`."""
    dtype = q.scales.dtype if q.scales.dtype != torch.float32 else c.narrowest(q, name)  # fp32: from imported zeros
    return c.zeros_to_offset(q, name, dtype, rounding)


def _check_values(p: PackedWeight, name: str, rounding: bool) -> None:
    _biases(p, name, rounding)


def _write(name: str, q: QuantizedTensor, config: Config) -> Tensors:
    biases = _biases(q, name, bool(config.get("round")))
    words = bitstream.pack(q.W_q, q.bits).view(torch.uint32)
    return {f"{name}.weight": words, f"{name}.scales": q.scales.to(biases.dtype), f"{name}.biases": biases}


def _parts(config: Config) -> tuple[Any, list[Any]]:
    """(the config with defaults, the model's parts); no parts for a model whose graph in mlx-lm is not known here."""
    try:
        read, model, _ = read_config(config)
    except NotPlain:
        return config, []
    return read, [*walk(model.layers)] if config.get("model_type") in FAMILIES else []


def _computed_otherwise(config: Config) -> str | None:
    """The part of a model's computation that mlx-lm 0.32 ignores or replaces, which makes every token wrong; or None."""
    family, (read, parts) = str(config.get("model_type")), _parts(config)
    if family == "mistral" and parts and (unread := [n for n in ("attention_bias", "mlp_bias") if config.get(n)]):
        return f"mlx-lm reads mistral as a llama, whose {unread[0]} asks for biases that this model does not have"
    for part in parts:
        if isinstance(part, Mlp | Experts) and part.act != "silu":
            return f"mlx-lm computes {family} with silu, not with this model's {read.hidden_act}: wrong numbers"
        if isinstance(part, Attention) and part.rope and family in UNSCALED and read.rope_parameters["rope_type"] != "default":
            return f"mlx-lm computes {family} without its {read.rope_parameters['rope_type']} rotary scaling: wrong numbers"
        if isinstance(part, Attention) and part.rope and part.rope.dims != part.dim:
            return f"mlx-lm turns all values of a head of {family}, this model {part.rope.dims} of {part.dim}"
        if isinstance(part, Attention) and family in UNSIZED and part.dim * part.heads != read.hidden_size:
            return f"mlx-lm computes {family} with heads of {read.hidden_size // part.heads}, this model's have {part.dim}"
        biased = part.parts if isinstance(part, Linear) and part.bias else ()
        if family in BIASED and (odd := [p for p in biased if not p.endswith(BIASED[family])]):
            return f"mlx-lm's {family} has no place for the bias of {odd[0]}"
    return None


def _notes(config: Config, headers: Headers) -> list[str]:
    """The differences of mlx-lm 0.32's computation, including windows of attention, which it ignores."""
    otherwise = _computed_otherwise(config)
    window = max((part.window for part in _parts(config)[1] if isinstance(part, Attention)), default=0)
    late = f"mlx-lm computes {config.get('model_type')} without its sliding window: other numbers from token {window} on"
    return ([late] if window else []) + ([otherwise] if otherwise else [])


EXPORT = Export(5, embeddings=True, experts=False, library="mlx", whole=spelled_out, extra=False, otherwise=_computed_otherwise)
ENGINES = served_by("lowq", "MLX (mlx-lm)")
register(Format(
    "mlx", "MLX affine", _matrices, ENGINES, _why_not, _write, _config, _notes, _stack, EXPORT, claims=_claims,
    check_values=_check_values,
))  # fmt: skip
