"""ModelOpt's NVFP4: weight (N, K / 2) uint8 of e2m1 codes, weight_scale (N, K / 16) e4m3 times weight_scale_2.

The settings are in config.json, or in hf_quant_config.json, which `files.source` merges into the config. Shell patterns name
the modules that are not quantized. input_scale is for engines that also round activations.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lowq_packers.errors import DamagedError
from lowq_packers.formats import Config, Export, Fetch, Format, Headers, Matrix, Tensors, _fp4, register, served_by
from lowq_packers.formats import _common as c
from lowq_packers.formats._rules import Rules
from lowq_packers.layouts import PackedWeight
from lowq_packers.lazy import torch
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import Scheme

NAME = "modelopt"
ALGORITHMS = ("NVFP4", "W4A16_NVFP4")  # other algorithms define the scales differently, or rotate the inputs
USED = ("quant_method", "quant_algo", "group_size", "config_groups", "ignore", "exclude_modules")
HARMLESS = ("producer", "kv_cache_scheme", "kv_cache_quant_algo")
GROUP, GROUP_HARMLESS = ("targets", "weights"), ("input_activations",)
WEIGHTS = ("dynamic", "num_bits", "type", "group_size")
SCHEME = _fp4.NVFP4


def _check_section(q: Mapping[str, Any]) -> None:
    """Raise UnsupportedError unless all settings of weights are NVFP4's."""
    c.check_fields(q, USED, HARMLESS)
    if q.get("quant_algo") not in ALGORITHMS:
        raise c.refusal(q, "quant_algo", reads="NVFP4")
    sections = [q]
    groups = q.get("config_groups") or {}
    for group in groups.values() if isinstance(groups, Mapping) else [groups]:
        if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
            raise DamagedError(f"quantization_config has the config group {str(group)[:80]}, which does not describe weights")
        c.check_fields(group, GROUP, GROUP_HARMLESS)
        weights = group["weights"]
        c.check_fields(weights, WEIGHTS, ())
        c.check_absent(weights, "dynamic")
        if (weights.get("num_bits", 4), weights.get("type", "float")) != (4, "float"):
            raise c.refusal(weights, "num_bits", "type", reads="4 and float")
        sections.append(weights)
    for table in sections:
        if c.number(table, "group_size", default=SCHEME.group_size) != SCHEME.group_size:
            raise c.refusal(table, "group_size", reads=f"NVFP4 in groups of {SCHEME.group_size}")


def _left_out(q: Mapping[str, Any]) -> Rules[bool]:
    """Rules that match the modules that are not quantized."""
    named = [n for key in ("ignore", "exclude_modules") for n in c.names(q, key)]
    return Rules((re.escape(name).replace(r"\*", ".*").replace(r"\?", ".") + "$", True) for name in named)


def _matrices(config: Config, headers: Headers, fetch: Fetch | None) -> list[Matrix]:
    q = c.section(config, "quantization_config")
    _check_section(q)
    left_out = _left_out(q)
    matrices = []
    for p in c.modules(headers, ".weight_scale"):
        if left_out.first(p):
            raise DamagedError(f"quantization_config says that {p} is not quantized, but it is")
        matrices.append(_matrix(p, headers, _fp4.dtype_of(SCHEME, config)))
    return matrices


def _matrix(p: str, headers: Headers, dtype: str) -> Matrix:
    parts = f"{p}.weight", f"{p}.weight_scale", f"{p}.weight_scale_2"
    shape = _fp4.shape(headers, parts[0], parts[1], SCHEME)
    if c.need(headers, parts[2], dtypes=("F32",)).shape not in ((), (1,)):
        raise DamagedError(f"{parts[2]} has the shape {tuple(headers[parts[2]].shape)}; it must be one number")

    def read(fetch: Fetch) -> QuantizedTensor:
        return _fp4.decoded(SCHEME, fetch(parts[0]), fetch(parts[1]), p, fetch(parts[2]))

    return Matrix(p, shape, parts, read, _fp4.stored_as(SCHEME), 4, SCHEME, dtype)


def _why_not(s: Scheme, N: int, K: int) -> str | None:
    return _fp4.why_not(s, "ModelOpt", SCHEME)


def _config(schemes: Mapping[str, Scheme], shapes: Mapping[str, tuple[int, int]], dense_names: Sequence[str]) -> dict[str, Any]:
    weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": SCHEME.group_size}
    q = {
        "quant_method": NAME, "quant_algo": "W4A16_NVFP4", "producer": {"name": "lowq"},
        "ignore": c.dense_modules(schemes, dense_names),
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
    }  # fmt: skip
    return {"quantization_config": q}


def _other_files(section: Config) -> dict[str, Any]:
    """hf_quant_config.json, from which older engines recognize such a checkpoint."""
    q = section["quantization_config"]
    facts = {"quant_algo": q["quant_algo"], "group_size": SCHEME.group_size, "exclude_modules": q["ignore"]}
    return {"hf_quant_config.json": {"producer": q["producer"], "quantization": {**facts, "kv_cache_quant_algo": None}}}


def _write(name: str, p: PackedWeight, config: Config) -> Tensors:
    assert p.table is not None
    return {
        f"{name}.weight": _fp4.code_bytes(p),
        f"{name}.weight_scale": p.scales.view(torch.float8_e4m3fn),
        f"{name}.weight_scale_2": p.table.reshape(()),
    }


def _notes(config: Config, headers: Headers) -> list[str]:
    inputs = sum(name.endswith(".input_scale") for name in headers)
    return [f"{inputs} layers have input_scale: engines round their activations too, lowq does not"] if inputs else []


ENGINES = served_by("lowq", "TensorRT-LLM", "vLLM")
register(Format(
    NAME, "ModelOpt NVFP4", _matrices, ENGINES, _why_not, c.from_codes(_write), _config, _notes,
    write_words=_write, export=Export(8, other_files=_other_files), tables=("e2m1",),
))  # fmt: skip
