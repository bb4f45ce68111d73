"""Functions that several formats share: typed config fields, schemes that lowq holds, integer zeros, companion tensors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lowq_packers import bitstream, layouts
from lowq_packers.arch.towers import TOWERS, anywhere
from lowq_packers.errors import DamagedError, SchemeError, UnsupportedError
from lowq_packers.formats import FUSED, Config, Header, Headers, Tensors, WriteWords
from lowq_packers.formats._rules import Rules
from lowq_packers.layouts import PackedWeight
from lowq_packers.lazy import torch
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import BITS, GROUP_STEP, Scheme, ZeroKind

FLOATS = ("F32", "F16", "BF16")
TORCH = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # safetensors' name of a dtype -> torch's
NAMES = {f"torch.{theirs}": name for name, theirs in TORCH.items()}
PATTERN = "+:"  # key in a rule's settings: the pattern, for messages
EXCLUDED = "-:"  # key in a rule's settings: modules that match it are not quantized
GATHERED = re.compile(r"(^|\.)(embed_tokens|wte|shared)$")  # modules that look up rows instead of multiplying


def section(config: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """The first table with one of these names in a config; an empty one if there is none."""
    return next((config[k] for k in keys if isinstance(config.get(k), Mapping)), {})


def number(table: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """The first of these fields as an integer. Raises DamagedError if it is missing or of another type."""
    for name in names:
        value = table.get(name)
        if value is not None:
            if type(value) is not int:
                raise DamagedError(f"quantization_config has {name}={value!r}, which is not a whole number")
            return value
    if default is None:
        raise DamagedError(f"quantization_config lacks {' or '.join(names)}")
    return default


def check_fields(table: Mapping[str, Any], used: Iterable[str], harmless: Iterable[str], where: str = "") -> None:
    """Raise UnsupportedError for a field that is neither `used` nor `harmless` (changes no weight). null counts as absent."""
    leaves = {*used, *harmless}
    for key, value in table.items():
        if key not in leaves and value is not None:
            named = f"{where}{key}={str(value)[:80]}"
            raise UnsupportedError(f"quantization_config has {named}, which lowq does not know: it might change weights")


def refusal(table: Mapping[str, Any], *keys: str, reads: str = "", module: str = "") -> UnsupportedError:
    """The error for settings of a config that lowq does not read: their names and values, the module, and what it reads."""
    rule = f"dynamic {table[PATTERN]!r}: " if PATTERN in table else ""
    settings = ", ".join(f"{k}={table[k]!r:.80}" for k in keys if table.get(k) is not None) or f"{keys[0]}=None"
    where, instead = f" for {module}" if module else "", f"; lowq reads {reads}" if reads else ""
    return UnsupportedError(f"quantization_config: {rule}{settings}{where} is not supported{instead}")


def flag(table: Mapping[str, Any], name: str, default: bool) -> bool:
    """A field that is true or false. Raises DamagedError for anything else: some readers take "false" as true."""
    value = table.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise DamagedError(f"quantization_config has {name}={value!r}, which is neither true nor false")
    return value


def names(table: Mapping[str, Any], field: str) -> Sequence[str]:
    """A field that is a list of names, () if it is missing. Raises DamagedError for anything else."""
    listed = table.get(field) or ()
    if isinstance(listed, str) or not isinstance(listed, Sequence) or not all(isinstance(n, str) for n in listed):
        raise DamagedError(f"quantization_config has {field}={str(listed)[:80]}, which is not a list of names")
    return listed


def pair(value: object, where: str) -> tuple[int, int]:
    """A field that is a pair of sizes. Raises DamagedError for anything else."""
    if not isinstance(value, Sequence) or len(value) != 2 or not all(type(v) is int and v > 0 for v in value):
        raise DamagedError(f"{where}={value!r}, which is not a pair of sizes")
    return value[0], value[1]


def check_absent(table: Mapping[str, Any], *names: str) -> None:
    """Raise UnsupportedError if one of these fields, which lowq does not support, is set and neither empty nor false."""
    for name in names:
        if table.get(name):
            raise refusal(table, name)


def overridden(q: Mapping[str, Any], rules: Rules[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    """The settings of one module: the config's, overridden by the first `dynamic` rule that matches its name.

    Raises DamagedError if that rule says that the module is not quantized.
    """
    rule = rules.first(name)
    if rule is None:
        return q
    if EXCLUDED in rule:
        raise DamagedError(f"a dynamic rule in quantization_config says that {name} is not quantized, but it is")
    return {**q, **rule}


def dynamic_rules(q: Mapping[str, Any], used: Iterable[str], harmless: Iterable[str]) -> Rules[Mapping[str, Any]]:
    """The rules of the `dynamic` table: "+:pattern" or "pattern" -> settings; "-:pattern" excludes modules."""
    dynamic = q.get("dynamic")
    if dynamic is not None and not isinstance(dynamic, Mapping):
        raise DamagedError(f"quantization_config has dynamic={str(dynamic)[:80]}, which is not a table of rules")
    rules: list[tuple[str, Mapping[str, Any]]] = []
    for pattern, values in (dynamic or {}).items():
        if pattern.startswith("-:"):
            rules.append((pattern[2:], {EXCLUDED: True}))
            continue
        if not isinstance(values, Mapping):
            raise DamagedError(f"quantization_config: the dynamic rule {pattern!r} is not a table")
        check_fields(values, used, harmless, f"dynamic {pattern!r}: ")
        rules.append((pattern.removeprefix("+:"), {**values, PATTERN: pattern}))
    return Rules(rules)


def model_dtype(config: Mapping[str, Any], default: str) -> str:
    """The safetensors name of the model's float dtype in config.json; `default` if it has none."""
    tables = (config, section(config, "text_config"))
    name = next((str(t[k]) for t in tables for k in ("dtype", "torch_dtype") if t.get(k)), "")
    return NAMES.get(f"torch.{name.removeprefix('torch.')}", default)


def modules(headers: Headers, suffix: str) -> list[str]:
    """Modules that have a tensor with this suffix, such as ".qweight", in file order."""
    return [name.removesuffix(suffix) for name in headers if name.endswith(suffix)]


def need(headers: Headers, name: str, shape: tuple[int, ...] | None = None, dtypes: Iterable[str] = FLOATS) -> Header:
    """The header of a companion tensor. Raises DamagedError for a missing one or another shape, else UnsupportedError."""
    header = headers.get(name)
    if header is None:
        raise DamagedError(f"{name} is missing; fetch the model again")
    if shape is not None and tuple(header.shape) != shape:
        raise DamagedError(f"{name} has the shape {tuple(header.shape)}; the rest of its layer asks for {shape}")
    if header.dtype not in tuple(dtypes):
        raise UnsupportedError(
            f"{name} has dtype {header.dtype}, which lowq does not read there; it reads {' or '.join(dtypes)}"
        )
    return header


def matrix(headers: Headers, name: str, dtypes: Iterable[str]) -> tuple[int, int]:
    """The two dimensions of a required tensor. Raises DamagedError if it is missing or not a matrix."""
    shape = need(headers, name, dtypes=dtypes).shape
    if len(shape) != 2 or 0 in shape:
        raise DamagedError(f"{name} has the shape {tuple(shape)}; a packed matrix has two dimensions")
    return shape[0], shape[1]


def unpack(words: torch.Tensor, bits: int, K: int) -> torch.Tensor:
    """`bitstream.unpack`, also for 5, 6 and 7 bits, which lowq only reads: (R, W) int32 -> (R, K) uint8 codes."""
    if bits in BITS:
        return bitstream.unpack(words, bits, K)
    R, lanes = words.shape[0], -(-K // 8)
    stream = words.contiguous().flatten().view(torch.uint8).reshape(R, -1)
    stream = torch.nn.functional.pad(stream, (0, max(0, lanes * bits - stream.shape[1])))
    eight = torch.zeros(R, lanes, 8, dtype=torch.uint8)
    eight[..., :bits] = stream[:, : lanes * bits].reshape(R, lanes, bits)
    codes = (eight.view(torch.int64) >> (torch.arange(8) * bits)) & ((1 << bits) - 1)
    return codes.reshape(R, -1)[:, :K].to(torch.uint8)


def group_count(K: int, group_size: int, name: str) -> tuple[int, int]:
    """(group_size, groups per row); -1, 0 and K mean the whole row. Raises DamagedError if the group does not divide K."""
    g = K if group_size in (-1, 0) else group_size
    if g < 1 or K % g:
        raise DamagedError(f"{name}: group_size={group_size} does not divide K={K}")
    return g, K // g


def held(bits: int, group_size: int, zero: ZeroKind, K: int) -> Scheme | None:
    """The scheme in which lowq holds such codes, or None. 5-, 6- and 7-bit codes become 8-bit, with `mid` as a stored zero."""
    if group_size != K and group_size % GROUP_STEP:
        return None
    if bits in BITS:
        return Scheme(bits, group_size, zero)
    return Scheme(8, group_size, "int" if zero == "none" else zero) if 1 < bits < 8 else None


def decoded(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, bits: int, group_size: int, zero: ZeroKind
) -> QuantizedTensor | torch.Tensor:
    """Codes (N, K), scales and zeros (N, G) as a QuantizedTensor if `held` has a scheme, else dense, in the scales' dtype."""
    scheme = held(bits, group_size, zero, codes.shape[1])
    if scheme is None:
        z: torch.Tensor | float = float(1 << (bits - 1)) if zeros is None else zeros.float().unsqueeze(-1)
        w = (codes.float().reshape(codes.shape[0], -1, group_size) - z) * scales.float().unsqueeze(-1)
        return w.reshape(codes.shape).to(scales.dtype)
    if scheme.zero == "none":
        zeros = None
    elif zeros is None:
        zeros = torch.full_like(scales, float(1 << (bits - 1)))
    return QuantizedTensor(codes, scales, zeros, scheme.bits, group_size, scheme.zero)


def offset_to_zeros(
    codes: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor, group_size: int
) -> tuple[torch.Tensor, ...]:
    """(codes, scales, zeros) of w = q * s + m, with zeros = -m / s in fp32, or in the scales' dtype if that is exact.

    A group with scale 0 has the constant value m: it gets code 0, zero -1, scale m.
    """
    zeros, flat = _zeros_of(scales, offsets), scales == 0
    if bool(flat.any()):
        codes = codes.clone()
        codes.reshape(codes.shape[0], -1, group_size)[flat] = 0
        scales = torch.where(flat, offsets.to(scales.dtype), scales)
    rounded = zeros.to(scales.dtype)
    return codes, scales, rounded if torch.equal(rounded.float(), zeros) else zeros


def _zeros_of(scales: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """-m / s in fp32; -1 for groups with s = 0."""
    s, m = scales.float(), offsets.float()
    flat = s == 0
    return torch.where(flat, -torch.ones_like(s), -m / torch.where(flat, torch.ones_like(s), s)) + 0.0  # -0.0 -> 0.0


def zeros_to_offset(q: QuantizedTensor | PackedWeight, name: str, dtype: torch.dtype, rounding: bool = False) -> torch.Tensor:
    """m (N, G) = -zeros * scales in `dtype`. Raises SchemeError if readers would get other zeros from it, unless `rounding`."""
    zeros = torch.full_like(q.scales.float(), q.scheme.mid) if q.zeros is None else q.zeros.float()
    exact = -zeros.double() * q.scales.double()
    offsets = exact.to(dtype)
    if not torch.isfinite(offsets).all():
        raise SchemeError(f"{name}: -zeros * scales does not fit {NAMES[str(dtype)]}")
    read = _zeros_of(q.scales, offsets)
    if not rounding and not torch.equal(offsets.double(), exact) and not torch.equal(read, zeros):
        worst = ((offsets.double() - exact).abs() / q.scales.double().abs().clamp(min=1e-30)).max().item()
        raise SchemeError(
            f"{name}: -zeros * scales needs more digits than {NAMES[str(dtype)]} has (it would move weights by up to "
            f"{worst:.2g} of a quantization step); accept that with --round, or quantize with --zero none, which is exact"
        )
    return offsets


def narrowest(q: QuantizedTensor | PackedWeight, name: str) -> torch.dtype:
    """The dtype of its scales, or a 16-bit dtype if that holds the scales, and the offsets read with them, exactly."""
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(q.scales.to(dtype).float(), q.scales.float()):
            try:
                zeros_to_offset(q, name, dtype)
                return dtype
            except SchemeError:
                continue
    return q.scales.dtype


def from_codes(write_words: WriteWords) -> Callable[[str, QuantizedTensor, Config], Tensors]:
    """`Format.write` of a format that stores lowq's words unchanged, made from its `write_words`."""
    return lambda name, q, config: write_words(name, layouts.pack(q), config)


def packed_zeros(p: PackedWeight, name: str) -> torch.Tensor:
    """(ceil(N * bits / 32), G) words: integer zeros packed along N. Raises the errors of `whole_zeros`."""
    return bitstream.pack(whole_zeros(p, name).t().contiguous(), p.scheme.bits).t().contiguous()


def whole_zeros(q: QuantizedTensor | PackedWeight, name: str) -> torch.Tensor:
    """(N, G) uint8 zeros. Raises SchemeError unless they are integers that fit the codes' bits."""
    if q.zeros is None:
        if q.scheme.bits == 1:
            raise SchemeError(f"{name}: 1-bit codes without a zero stand for -s/2 and +s/2, which no whole-number zero says")
        return torch.full(q.scales.shape, int(q.scheme.mid), dtype=torch.uint8, device=q.scales.device)
    zeros = q.zeros.float()
    if not torch.equal(zeros, zeros.round()) or bool((zeros < 0).any()) or bool((zeros >= q.scheme.levels).any()):
        raise SchemeError(f"{name}: its zeros are not whole numbers 0 .. {q.scheme.levels - 1}; quantize with --zero int")
    return zeros.to(torch.uint8)


def schemes_agree(schemes: Mapping[str, Scheme]) -> Scheme | None:
    """The most frequent scheme of a checkpoint, which its config names as the default; None for an empty one."""
    return next((s for s, _ in Counter(schemes.values()).most_common(1)), None)


def dense_modules(schemes: Mapping[str, Scheme], dense_names: Iterable[str]) -> list[str]:
    """Linear modules that stay dense: `dense_names` without embeddings, and with the head, stored or tied."""
    modules = [of_tower(n) for n in dense_names if not GATHERED.search(n)]
    return modules if "lm_head" in schemes or "lm_head" in modules else [*modules, "lm_head"]


def of_tower(name: str) -> str:
    """A module's name for lists of compressed-tensors; a module of a tower becomes a pattern."""
    return f"re:{anywhere(name)}" if TOWERS.search(name) else name


def exactly(name: str) -> str:
    """A regular expression that matches one module, by its name or by the name of vLLM's fused module."""
    if TOWERS.search(name):
        return f"^{anywhere(name)}"
    stem, dot, leaf = name.rpartition(".")
    pattern = f"({re.escape(leaf)}|{FUSED[leaf]})" if leaf in FUSED else re.escape(leaf)
    return f"^{re.escape(stem + dot)}{pattern}$"
