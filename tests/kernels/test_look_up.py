"""Rows of packed tables: Triton against torch, bit for bit, and every layout against the definition.

Interpreted on the CPU, compiled where a GPU is.
"""

import pytest
import torch

pytest.importorskip("triton")

from weight_groups import DEVICE, Poisoned

from lowq_cli import quantizers
from lowq_kernels.modules import look_up_triton
from lowq_kernels.modules.look_up import look_up
from lowq_packers.layouts import LAYOUTS, pack
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import Scheme

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
WITH_ROWS = sorted(name for name, layout in LAYOUTS.items() if layout.rows)


def table(N, K, bits, group, zero="float", dtype=torch.float16, seed=0):
    g = torch.Generator().manual_seed(seed)
    scheme, shape = Scheme(bits, group, zero), (N, K // group)
    codes = torch.randint(0, 2**bits, (N, K), generator=g, dtype=torch.uint8)
    scales = (torch.rand(shape, generator=g) * 0.3 + 0.01).to(dtype)
    zeros = torch.randn(shape, generator=g) * 2**bits
    zeros = {"none": None, "int": zeros.abs().round().clamp(max=2**bits - 1), "float": zeros}[zero]
    zeros = None if zeros is None else zeros.to(dtype)
    return QuantizedTensor.of(scheme, codes, scales, zeros).to(DEVICE)


def rows(q, ids, dtype, factor):
    """The definition."""
    y = q.dequantize()[ids].to(dtype)
    return y if factor == 1.0 else y * torch.tensor(factor, dtype=dtype, device=y.device)


@pytest.mark.parametrize("layout", WITH_ROWS)
@pytest.mark.parametrize("bits", [8, 4, 3, 2, 1])
@pytest.mark.parametrize("zero", ["none", "int", "float"])
def test_every_layout_with_rows_has_the_rows_of_the_definition(layout, bits, zero):
    q, ids = table(83, 320, bits, 64, zero, seed=bits), torch.tensor([[82, 0, 7], [8, 15, 64]], device=DEVICE)
    p = pack(q, layout)
    assert torch.equal(look_up(p, ids, torch.float16), rows(q, ids, torch.float16, 1.0))
    assert look_up(p, ids[:, :0], torch.float16).shape == (2, 0, 320)


@pytest.mark.parametrize("layout", look_up_triton.LAYOUTS)
@pytest.mark.parametrize("bits", [8, 4, 2, 1])
@pytest.mark.parametrize(("zero", "group"), [("none", 32), ("int", 96), ("float", 1056)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_has_the_bits_of_the_definition(layout, bits, zero, group, dtype, monkeypatch):
    monkeypatch.setattr(look_up_triton, "_look_up_kernel", Poisoned(look_up_triton._look_up_kernel, slice(4, 5)))
    q = table(149, 1056, bits, group, zero, dtype, seed=bits)
    p, ids = pack(q, layout), torch.tensor([148, 0, 77, 8, 77, 127], device=DEVICE)
    assert look_up_triton.takes(p)
    for factor in (1.0, 33.941125):
        assert torch.equal(look_up_triton.look_up(p, ids, dtype, factor), rows(q, ids, dtype, factor))


@pytest.mark.parametrize("scheme", [Scheme(3, 32), Scheme.of(4, 32, "nf4"), Scheme.of(4, 16, "e2m1")])
def test_other_schemes_take_torch(scheme):
    g = torch.Generator().manual_seed(0)
    W = torch.randn(40, 64, generator=g)
    q = quantizers.get("rtn")(W, scheme=scheme, dtype=torch.float16).to(DEVICE)
    p, ids = pack(q, "rowstream"), torch.tensor([39, 3], device=DEVICE)
    assert not look_up_triton.takes(p)
    assert torch.equal(look_up(p, ids, torch.float16), rows(q, ids, torch.float16, 1.0))
