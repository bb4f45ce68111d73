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
from format_support import HELD, WRITERS, fetcher, headers, random_q, read, written


@settings(max_examples=300, deadline=None)
@given(
    fmt=st.sampled_from(WRITERS),
    victim=st.integers(0, 30),
    how=st.sampled_from(["drop", "row", "column", "dtype", "flat", "empty"]),
)
def test_a_spoilt_tensor_is_refused_or_read_but_never_a_crash(fmt, victim, how):
    bits, zero = HELD[fmt.name][0]
    tensors, config = written(fmt, random_q(bits, 64, zero, 64, 128))
    name = sorted(tensors)[victim % len(tensors)]
    t = tensors.pop(name)
    if how == "row" and t.dim():
        t = t[:-1]
    elif how == "column":
        t = t[..., :-1] if t.dim() else t
    elif how == "dtype":
        t = t.to(torch.float32 if not t.is_floating_point() else torch.int32)
    elif how == "flat":
        t = t.flatten()
    elif how == "empty":
        t = t.flatten()[:0]
    if how != "drop":
        tensors[name] = t.contiguous()
    try:
        found = formats.detect(config, headers(tensors))
        for m in found.matrices(config, headers(tensors), fetcher(tensors)) if found else ():
            m.read(fetcher(tensors))
    except LowqError:
        pass


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
