"""compressed-tensors: pack-quantized (1 to 8 bits), int-quantized (int8), their "naive" form, and `_compressed_floats`.

pack-quantized: weight_packed (N, ceil(K*bits/32)) int32, codes q = signed + 2**(bits-1) as a dense bit stream along K: lowq's
words. weight_scale (N, G); weight_shape [N, K]; asymmetric also weight_zero_point (ceil(N*bits/32), G), packed along N.

Trap: before mid-2026, widths that do not divide 32 (3, 5, 6, 7) were stored as 32 // bits codes per word, with the rest of the
word empty. The number of words per row distinguishes the layouts; if it is the same, the bits after a dense stream do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lowq_packers import bitstream
from lowq_packers.errors import DamagedError
from lowq_packers.formats import Config, Export, Fetch, Format, Header, Headers, Matrix, Tensors, _fp4, method, register
from lowq_packers.formats import _common as c
from lowq_packers.formats import _compressed_floats as floats
from lowq_packers.formats._rules import Rules
from lowq_packers.layouts import PackedWeight
from lowq_packers.lazy import torch
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import Scheme, ZeroKind

NAME = "compressed-tensors"
INTS = ("I32",)
TOP = ("quant_method", "config_groups", "format", "quantization_status", "ignore", "sparsity_config", "transform_config")
TOP_HARMLESS = ("kv_cache_scheme", "global_compression_ratio", "run_compressed", "version")
GROUP, GROUP_HARMLESS = ("targets", "weights", "format"), ("input_activations", "output_activations")
WEIGHTS = ("num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic", "actorder")
WEIGHTS_HARMLESS = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")  # the dtypes are read from the tensors
ORDERS = (None, True, False, "group", "weight", "static", "dynamic")  # orders in which columns were quantized
STRATEGIES: dict[str, tuple[str | None, ...]] = {  # form of the tensors -> its strategies (which weights share a scale)
    "pack-quantized": ("group", "channel", "tensor", None),
    "int-quantized": ("group", "channel", "tensor", None),
    "float-quantized": ("block", "channel", "tensor", None),
    "nvfp4-pack-quantized": ("tensor_group",),
    "mxfp4-pack-quantized": ("group",),
}

# Towers for which transformers sets weights that may be missing by attributes of their linears, which packed ones lack.
ASKS_EARLY = ("siglip_vision_model", "siglip2_vision_model")


def _section(config: Config) -> Mapping[str, Any]:
    return c.section(config, "quantization_config", "compression_config")


class Groups:
    """The config groups. A module is in the first group whose targets match its name, else the first that names its class."""

    def __init__(self, q: Mapping[str, Any]) -> None:
        groups = q.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            raise DamagedError("quantization_config has no config_groups")
        by_name: list[tuple[str, Mapping[str, Any]]] = []
        self.by_class: Mapping[str, Any] | None = None
        for group in groups.values():
            targets = group.get("targets") if isinstance(group, Mapping) else None
            if isinstance(group, Mapping):
                c.check_fields(group, GROUP, GROUP_HARMLESS)
            for target in (t for t in targets if isinstance(t, str)) if isinstance(targets, Sequence) else ():
                if target[:1].isupper():  # a class, such as Linear; module names are lower case
                    self.by_class = self.by_class or group
                else:
                    by_name.append((_pattern(target), group))
        self.rules = Rules(by_name)
        self.ignored = Rules((_pattern(name), True) for name in c.names(q, "ignore") if not name[:1].isupper())

    def weights(self, name: str, form: str, q: Mapping[str, Any]) -> Mapping[str, Any]:
        """The weights' settings of a module whose tensors have this form. Raises DamagedError, UnsupportedError."""
        if self.ignored.first(name):
            raise DamagedError(f"ignore in quantization_config names {name}, but it is quantized")
        group = self.rules.first(name) or self.by_class
        if group is None:
            raise DamagedError(f"no config group targets {name}, though it is quantized")
        weights = group.get("weights")
        if not isinstance(weights, Mapping):
            raise DamagedError(f"the config group of {name} does not say how weights are quantized")
        declared = group.get("format") or q.get("format")
        if declared not in (None, *STRATEGIES, "naive-quantized", "mixed-precision"):
            raise c.refusal(group if group.get("format") else q, "format", module=name)
        if weights.get("actorder") not in ORDERS:
            raise c.refusal(weights, "actorder", module=name)
        if declared not in (None, form, "naive-quantized", "mixed-precision"):
            raise DamagedError(f"quantization_config says {name} is {declared!r}, but its tensors are {form}")
        c.check_fields(weights, WEIGHTS, WEIGHTS_HARMLESS)
        c.check_absent(weights, "dynamic")
        if weights.get("strategy") not in STRATEGIES[form]:
            raise c.refusal(weights, "strategy", module=f"{form} {name}")
        return weights


def _pattern(target: str) -> str:
    return target[3:] if target.startswith("re:") else f"^{re.escape(target)}$"


def _matrices(config: Config, headers: Headers, fetch: Fetch | None) -> list[Matrix]:
    q = _section(config)
    c.check_fields(q, TOP, TOP_HARMLESS)
    sparsity = q.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") == "dense":
        sparsity = None
    transforms = q.get("transform_config")
    if isinstance(transforms, Mapping) and not any(transforms.values()):
        transforms = None
    c.check_absent({"sparsity_config": sparsity, "transform_config": transforms}, "sparsity_config", "transform_config")
    if q.get("format") not in (None, *STRATEGIES, "naive-quantized", "mixed-precision"):
        raise c.refusal(q, "format")
    if q.get("quantization_status", "compressed") not in ("compressed", "frozen"):
        raise c.refusal(q, "quantization_status", reads="compressed")
    groups = Groups(q)
    matrices = []
    for name in headers:
        p, _, leaf = name.rpartition(".")
        if leaf == "weight_packed" and headers[name].dtype == "U8":
            form = floats.form_of(p, headers)
            matrices.append(floats.fp4(p, form, groups.weights(p, form, q), headers, config))
        elif leaf == "weight_packed":
            matrices.append(_packed(p, groups.weights(p, "pack-quantized", q), headers, fetch))
        elif leaf == "weight" and f"{p}.weight_scale" in headers and headers[name].dtype == "I8":
            matrices.append(_int8(p, groups.weights(p, "int-quantized", q), headers))
        elif leaf == "weight" and f"{p}.weight_scale" in headers and headers[name].dtype in floats.FLOATS8:
            matrices.append(floats.fp8(p, groups.weights(p, "float-quantized", q), headers, config))
    return matrices


def _packed(p: str, w: Mapping[str, Any], headers: Headers, fetch: Fetch | None) -> Matrix:
    bits = c.number(w, "num_bits")
    if not 1 <= bits <= 8 or w.get("type", "int") != "int":
        raise c.refusal(w, "num_bits", "type", module=f"pack-quantized {p}")
    N, words = c.matrix(headers, f"{p}.weight_packed", INTS)
    scale = c.need(headers, f"{p}.weight_scale")
    G = _groups_of(p, w, scale, N)
    grouped = w.get("strategy") == "group" or (w.get("strategy") is None and bool(w.get("group_size")))
    if not grouped and (G != 1 or (w.get("group_size") or -1) != -1):
        raise DamagedError(
            f"{p} has {G} scales a row; quantization_config says {w.get('strategy')}, group_size={w.get('group_size')}"
        )
    K = c.number(w, "group_size") * G if grouped else words * 32 // bits
    parts = [f"{p}.weight_packed", f"{p}.weight_scale"]
    if f"{p}.weight_shape" in headers:
        parts.append(f"{p}.weight_shape")
        if fetch is not None:
            declared = [int(v) for v in fetch(f"{p}.weight_shape").flatten().tolist()]
            if len(declared) != 2 or declared[0] != N or (grouped and declared[1] != K) or not 0 < declared[1] <= words * 32:
                raise DamagedError(f"{p}.weight_shape says {declared}; its words and scales are {N} x {words} and {N} x {G}")
            K = declared[1]
    g, _ = c.group_count(K, K // G if G and K % G == 0 else 0, p)
    sizes = {bitstream.words_per_row(K, bits): False, -(-K // (32 // bits)): True}
    if words not in sizes:
        raise DamagedError(f"{p}.weight_packed has {words} words a row; {K} codes of {bits} bits fill {min(sizes)}")
    padded = sizes[words] if len(sizes) == 2 else None  # None: both layouts have this number of words
    padded = False if 32 % bits == 0 else padded
    sym, stored_zeros = c.flag(w, "symmetric", True), f"{p}.weight_zero_point" in headers
    zero: ZeroKind = "none" if sym and bits > 1 else "int"
    if not sym or stored_zeros:
        c.need(headers, f"{p}.weight_zero_point", dtypes=("I32", "I8"))
        parts.append(f"{p}.weight_zero_point")
    index = f"{p}.weight_g_idx" if f"{p}.weight_g_idx" in headers else None
    ordered = w.get("actorder") in ("group", "dynamic", True)
    permuted = ordered and index is not None
    if index:
        parts.append(index)
        c.need(headers, index, (K,), ("I32", "I64"))
        permuted = permuted if fetch is None else not torch.equal(fetch(index).long(), torch.arange(K) // g)
        if permuted and not ordered:
            raise DamagedError(f"{index} permutes groups, quantization_config says actorder={w.get('actorder')!r}")

    def read(fetch: Fetch) -> QuantizedTensor | torch.Tensor:
        stored = fetch(f"{p}.weight_packed")
        empty_bits = _is_padded(stored, bits, K) if padded is None else padded
        codes = _unpack(stored, bits, K, empty_bits)
        scales = fetch(f"{p}.weight_scale").reshape(-1, G).expand(N, G).contiguous()
        if not sym or stored_zeros:
            whole = _zeros(fetch(f"{p}.weight_zero_point"), p, bits, N, G, empty_bits)
            if sym and bool((whole != 1 << (bits - 1)).any()):
                raise DamagedError(f"{p} has zero points, but quantization_config says symmetric=true; set it to false there")
        zeros = None if sym else whole.to(scales.dtype)
        if sym and bits == 1:
            zeros = torch.ones_like(scales)
        if permuted and index:
            groups = fetch(index).long()
            if int(groups.min()) < 0 or int(groups.max()) >= G:
                raise DamagedError(f"{index} names group {int(groups.max())}; there are {G}")
            z = float(1 << (bits - 1)) if zeros is None else zeros[:, groups].float()
            return ((codes.float() - z) * scales[:, groups].float()).to(scales.dtype)
        return c.decoded(codes, scales, zeros, bits, g, zero)

    scheme = None if permuted else c.held(bits, g, zero, K)
    stored = (
        f"{bits}-bit g{g} {'sym' if sym else 'int zero'}" + (" padded" if padded else "") + (" act-order" if permuted else "")
    )
    return Matrix(p, (N, K), tuple(parts), read, stored, bits, scheme, scale.dtype)


def _groups_of(p: str, w: Mapping[str, Any], scale: Header, N: int) -> int:
    """Number of scales per row; 1 if the whole matrix has one. Raises DamagedError if it contradicts the config."""
    G = floats.groups_of(f"{p}.weight_scale", scale, N)
    expected = {"group": N * G, "tensor": 1}.get(str(w.get("strategy")))
    if expected not in (None, math.prod(scale.shape)):
        raise DamagedError(f"{p}.weight_scale has the shape {tuple(scale.shape)}; quantization_config says {w['strategy']}")
    return G


def _is_padded(words: torch.Tensor, bits: int, K: int) -> bool:
    """Whether a row's last word has bits after the end of a dense stream of K codes.

    Called only if both layouts have the same number of words, so that a dense stream leaves some bits of its last word empty.
    In padded words those bits belong to the last codes; the result is wrong only if they are 0 in all rows.
    """
    used = K * bits % 32
    return bool((words[:, -1] >> used).bitwise_and((1 << (32 - used)) - 1).any())


def _unpack(words: torch.Tensor, bits: int, K: int, padded: bool) -> torch.Tensor:
    """(R, W) int32 -> (R, K) uint8 codes."""
    if not padded:
        return c.unpack(words, bits, K)
    E = 32 // bits
    shifts = torch.arange(E, dtype=torch.int32) * bits
    codes = words.unsqueeze(-1).bitwise_right_shift(shifts).bitwise_and((1 << bits) - 1)
    return codes.reshape(words.shape[0], -1)[:, :K].to(torch.uint8)


def _zeros(stored: torch.Tensor, p: str, bits: int, N: int, G: int, padded: bool) -> torch.Tensor:
    """(N, G) zeros in code units, from words packed along N or from plain int8. padded: used if N does not tell the layout."""
    one = stored.numel() == 1 and stored.dim() < 2  # strategy "tensor", which is not packed
    if stored.dtype == torch.int8 or one:
        if tuple(stored.shape) != (N, G) and not one:
            raise DamagedError(f"{p}.weight_zero_point has the shape {tuple(stored.shape)}, not {(N, G)}")
        return (stored.to(torch.int16) + (1 << (bits - 1))).to(torch.uint8).expand(N, G)
    rows = {bitstream.words_per_row(N, bits): False, -(-N // (32 // bits)): True}
    if stored.dim() != 2 or stored.shape[0] not in rows or stored.shape[1] != G:
        raise DamagedError(f"{p}.weight_zero_point has the shape {tuple(stored.shape)}, not {(min(rows), G)}")
    return _unpack(stored.t().contiguous(), bits, N, rows[stored.shape[0]] if len(rows) == 2 else padded).t()


def _int8(p: str, w: Mapping[str, Any], headers: Headers) -> Matrix:
    """The matrix of an int-quantized module: int8 codes, with a scale per row, per group, or for the tensor."""
    N, K = c.matrix(headers, f"{p}.weight", ("I8",))
    bits = c.number(w, "num_bits")
    if not 2 <= bits <= 8 or w.get("type", "int") != "int":
        raise c.refusal(w, "num_bits", "type", module=f"int-quantized {p}")
    scale = c.need(headers, f"{p}.weight_scale")
    G = floats.groups_of(f"{p}.weight_scale", scale, N)
    g, _ = c.group_count(K, K // G if K % G == 0 else 0, p)
    parts = [f"{p}.weight", f"{p}.weight_scale"]
    shared = {"group": c.number(w, "group_size", default=0), "None": g}.get(str(w.get("strategy")), K)
    if shared != g or (w.get("strategy") == "tensor" and math.prod(scale.shape) != 1):
        raise DamagedError(f"{p}.weight_scale has the shape {tuple(scale.shape)}; quantization_config says {w.get('strategy')}")
    sym = c.flag(w, "symmetric", True)
    zero: ZeroKind = "none" if f"{p}.weight_zero_point" not in headers else "int"
    if not sym and zero == "none":
        raise DamagedError(f"{p}.weight_zero_point is missing, though quantization_config says symmetric=false")
    if zero == "int":
        parts.append(f"{p}.weight_zero_point")
        if floats.groups_of(parts[-1], c.need(headers, parts[-1], dtypes=("I8", "I32", "I64")), N) != G:
            raise DamagedError(f"{parts[-1]} has the shape {tuple(headers[parts[-1]].shape)}, its scales {tuple(scale.shape)}")

    def read(fetch: Fetch) -> QuantizedTensor | torch.Tensor:
        half = 1 << (bits - 1)
        codes = fetch(f"{p}.weight").to(torch.int16) + half
        if bits < 8 and (int(codes.min()) < 0 or int(codes.max()) >= 2 * half):
            raise DamagedError(f"{p}.weight holds codes beyond {bits} bits")
        scales = fetch(f"{p}.weight_scale").reshape(-1, G).expand(N, G).contiguous()
        zeros = None
        if zero == "int":
            stored = fetch(f"{p}.weight_zero_point").to(torch.int16).reshape(-1, G).expand(N, G)
            if sym and bool((stored != 0).any()):
                raise DamagedError(f"{p} has zero points, but quantization_config says symmetric=true; set it to false there")
            zeros = (stored + half).to(scales.dtype)
        return c.decoded(codes.to(torch.uint8), scales, zeros, bits, g, zero)

    stored = f"int{bits} g{g} {'sym' if zero == 'none' else 'int zero'}"
    return Matrix(p, (N, K), tuple(parts), read, stored, 8, c.held(bits, g, zero, K), scale.dtype)


def _is_asymmetric(group: object) -> bool:
    """Whether a config group stores zero points. transformers dequantizes such weights while loading, all with one group."""
    w = group.get("weights") if isinstance(group, Mapping) else None
    return isinstance(w, Mapping) and w.get("symmetric") is False and w.get("type", "int") == "int"


def _notes(config: Config, headers: Headers) -> list[str]:
    q = _section(config)
    notes = []
    for group in c.section(q, "config_groups").values():
        w = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(w, Mapping) and w.get("num_bits") in (3, 5, 6, 7) and w.get("type", "int") == "int":
            notes.append(f"{w['num_bits']}-bit words: dense since mid-2026, padded before; each tensor's width is checked")
        if _is_asymmetric(group):
            notes.append(
                "asymmetric, in several config groups: transformers 5.23 does not load it"
                if len(c.section(q, "config_groups")) > 1
                else "asymmetric: transformers 5.23 loads it only with CompressedTensorsConfig(dequantize=True)"
            )
        if isinstance(group, Mapping) and group.get("input_activations"):
            notes.append("activations are quantized too when other engines run it; lowq quantizes weights only")
    return list(dict.fromkeys(notes))


def _engines(config: Config, matrices: Sequence[Matrix]) -> list[str]:
    groups = c.section(_section(config), "config_groups")
    loads = len(groups) < 2 or not any(map(_is_asymmetric, groups.values()))
    engines = ["lowq", *(["transformers (with compressed-tensors)"] if loads else [])]
    kinds = {(m.bits, "int zero" in m.stored) for m in matrices if not _fp4.is_fp4(m)}
    if kinds <= {(4, False), (4, True), (8, False), (2, False)}:
        engines.append("vLLM")
    if kinds <= {(4, False), (8, False)} and not any(map(_fp4.is_fp4, matrices)):
        engines.append("SGLang")
    return engines


def _towers(config: Config) -> str | None:
    kind = str(c.section(config, "vision_config").get("model_type"))
    return f"transformers 5.23 asks for each weight of a {kind} tower before it is unpacked" if kind in ASKS_EARLY else None


def _why_not(s: Scheme, N: int, K: int) -> str | None:
    if s.table:
        return _fp4.why_not(s, "compressed-tensors", *floats.FP4.values())
    if s.zero == "float":
        return (
            "compressed-tensors holds whole-number zeros or none; nearest: quantize with --zero none (or int), or --to humming"
        )
    if s.zero == "none" and s.bits == 1:
        return "1-bit codes without a zero stand for -s/2 and +s/2, compressed-tensors' for -s and 0; nearest: --to humming"
    return None


def _config(schemes: Mapping[str, Scheme], shapes: Mapping[str, tuple[int, int]], dense_names: Sequence[str]) -> dict[str, Any]:
    alike: dict[tuple[tuple[str, Any], ...], list[str]] = {}  # settings of weights -> the modules with these settings
    forms: dict[tuple[tuple[str, Any], ...], str] = {}
    for name, s in schemes.items():
        arguments = tuple((floats.fp4_weights(s) if s.table else _weights(s, shapes[name][1])).items())
        alike.setdefault(arguments, []).append(name)
        forms[arguments] = floats.form(s) if s.table else "pack-quantized"
    largest = max(alike, key=lambda arguments: len(alike[arguments]))
    groups = {
        f"group_{i}": {
            "targets": ["Linear"] if arguments == largest else [c.of_tower(n) for n in alike[arguments]],
            "weights": dict(arguments),
            "input_activations": None, "output_activations": None, "format": forms[arguments],
        }
        for i, arguments in enumerate([*(arguments for arguments in alike if arguments != largest), largest])
    }  # fmt: skip
    whole = set(forms.values())
    q = {
        "quant_method": NAME, "format": whole.pop() if len(whole) == 1 else "mixed-precision",
        "quantization_status": "compressed", "kv_cache_scheme": None,
        "ignore": c.dense_modules(schemes, dense_names), "config_groups": groups,
    }  # fmt: skip
    return {"quantization_config": q}


def _weights(s: Scheme, K: int) -> dict[str, Any]:
    """The weights' settings in a config group, for integer codes."""
    channel = s.group_size == K
    return {
        "num_bits": s.bits, "type": "int", "symmetric": s.zero == "none", "strategy": "channel" if channel else "group",
        "group_size": None if channel else s.group_size, "dynamic": False,
    }  # fmt: skip


def _write(name: str, p: PackedWeight, config: Config) -> Tensors:
    if p.scheme.table:
        return floats.write_fp4(name, p, bool(config.get("round")))
    tensors = {
        f"{name}.weight_packed": p.words,
        f"{name}.weight_scale": p.scales,
        f"{name}.weight_shape": torch.tensor((p.N, p.K), dtype=torch.int64),
    }
    if p.zeros is not None:
        tensors[f"{name}.weight_zero_point"] = c.packed_zeros(p, name)
    return tensors


def _claims(config: Config, headers: Headers) -> bool:
    return method(config) == NAME or "compression_config" in config


register(Format(
    NAME, NAME, _matrices, _engines, _why_not, c.from_codes(_write), _config, _notes,
    write_words=_write, export=Export(1, towers=_towers), tables=("e2m1",), claims=_claims, check_values=floats.check_values,
))  # fmt: skip
