"""Spoilt tensors and configs: one clear error or a correct read, never a crash."""

import contextlib
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowq_packers import formats
from lowq_packers.errors import LowqError

sys.path.insert(0, str(Path(__file__).parent))
from format_support import HELD, NAME, WRITERS, fetcher, headers, random_q, read, written

HOW = ("drop", "row", "column", "dtype", "flat", "empty", "one", "deeper")
INT8, FP8 = torch.int8, torch.float8_e4m3fn
READ_ONLY = {  # dtype of the weight (N, K) = (8, 64), shapes of scales and zeros, the config's weights
    "int8, a scale a row": (INT8, (8, 1), None, {"strategy": "channel"}),
    "int8, groups and zeros": (INT8, (8, 4), (8, 4), {"strategy": "group", "group_size": 16, "symmetric": False}),
    "int8, one scale and zero": (INT8, (1,), (1,), {"strategy": "tensor", "symmetric": False}),
    "fp8, a scale a row": (FP8, (8, 1), None, {"type": "float", "strategy": "channel"}),
    "fp8, one scale": (FP8, (1,), None, {"type": "float", "strategy": "tensor"}),
    "fp8, blocks": (FP8, (2, 4), None, {"type": "float", "strategy": "block", "block_structure": [4, 16]}),
}


def spoilt(tensors, name, how):
    """The tensors, one of them not what it was."""
    t = tensors[name]
    kinds = {
        "row": lambda: t[:-1] if t.dim() else t,
        "column": lambda: t[..., :-1] if t.dim() else t,
        "dtype": lambda: t.to(torch.int32 if t.is_floating_point() else torch.float32),
        "flat": t.flatten,
        "empty": lambda: t.flatten()[:0],
        "one": lambda: t.flatten()[:1].reshape(()),
        "deeper": lambda: t.unsqueeze(0),
    }
    rest = {n: x for n, x in tensors.items() if n != name}
    return rest if how == "drop" else rest | {name: kinds[how]().contiguous()}


def read_or_refuse(tensors, config):
    """Whatever is read has the shape that was promised."""
    with contextlib.suppress(LowqError):
        result = formats.detect(config, headers(tensors))
        for m in result.matrices(config, headers(tensors), fetcher(tensors)) if result else ():
            assert tuple(m.read(fetcher(tensors)).shape) == m.shape


@settings(max_examples=300, deadline=None)
@given(fmt=st.sampled_from(WRITERS), victim=st.integers(0, 30), how=st.sampled_from(HOW))
def test_a_spoilt_tensor_is_refused_or_read_but_never_a_crash(fmt, victim, how):
    bits, zero = HELD[fmt.name][0]
    tensors, config = written(fmt, random_q(bits, 64, zero, 64, 128))
    read_or_refuse(spoilt(tensors, sorted(tensors)[victim % len(tensors)], how), config)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("case", READ_ONLY)
def test_so_is_one_of_a_form_that_is_only_read(case, how):
    dtype, of_scales, of_zeros, weights = READ_ONLY[case]
    tensors = {f"{NAME}.weight": torch.zeros(8, 64).to(dtype), f"{NAME}.weight_scale": torch.rand(of_scales)}
    if of_zeros:
        tensors[f"{NAME}.weight_zero_point"] = torch.zeros(of_zeros, dtype=torch.int8)
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "symmetric": True, **weights}}
    config = {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}}
    assert list(read(tensors, config)) == [NAME]
    for name in tensors:
        read_or_refuse(spoilt(tensors, name, how), config)


@pytest.mark.parametrize("targets", [5, [5], [None], None, [["Linear"]]], ids=str)
def test_targets_that_are_no_names_are_refused(targets):
    tensors, config = written(formats.get("compressed-tensors"), random_q(4, 64, "int", 64, 128))
    config["quantization_config"]["config_groups"]["group_0"]["targets"] = targets
    with pytest.raises(LowqError, match="no config group targets"):
        read(tensors, config)


@pytest.mark.parametrize("fmt", [f.name for f in WRITERS if f.name != "gemlite"])
@pytest.mark.parametrize("value", [None, "4", -1, 3.5, [], 10**9, True])
def test_a_spoilt_config_is_refused_or_read_but_never_a_crash(fmt, value):
    bits, zero = HELD[fmt][0]
    tensors, config = written(formats.get(fmt), random_q(bits, 64, zero, 64, 128))
    section = "quantization" if fmt == "mlx" else "quantization_config"
    for key in config[section]:
        if key == "quant_method":
            continue
        spoilt = {**config, section: {**config[section], key: value}}
        with contextlib.suppress(LowqError):
            read(tensors, spoilt)
