"""Rotations and patches of vision towers in one kernel each, against transformers' modules."""

import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the first triton import
pytest.importorskip("triton")

sys.path.insert(0, str(Path(__file__).parent))
import pictured

from emulation import error
from lowq_cli.hf import fused_tower
from lowq_cli.hf.tower import Tower
from lowq_kernels.modules import rotation, rotation_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")])
TURNED = {*pictured.MANY, "mistral3", "llava/pixtral", "gemma4", "gemma4/whole"}


def tensors(order, heads, D, dtype):
    """q, k of 21 tokens, and cos, sin: parts of one product, tokens first; or heads first, as views of other tensors."""
    torch.manual_seed(heads)
    cos, sin = (torch.randn(21, D).to(DEVICE, dtype) for _ in range(2))
    if order == "tokens first":
        q, k, _ = torch.randn(21, 3, heads, D).to(DEVICE, dtype).unbind(1)
        return q, k, cos[:, None], sin[:, None]
    q, k = (torch.randn(21, heads, D).to(DEVICE, dtype).transpose(0, 1) for _ in range(2))
    return q, k, cos[None], sin[None]


@pytest.mark.half_of("wide", "dtype", "heads", "order")
@pytest.mark.parametrize("wide", [True, False], ids=["rounded once", "rounded each time"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "D", "parts"), [(16, 72, 1), (3, 12, 2), (17, 64, 4)])
@pytest.mark.parametrize("order", ["tokens first", "heads first"])
def test_the_kernel_has_the_bits_of_its_definition(order, heads, D, parts, dtype, wide):
    q, k, cos, sin = tensors(order, heads, D, dtype)
    k = k[..., :4, :]  # fewer heads, or tokens
    wanted = [rotation.definition(x, cos[:, : x.shape[1]], sin[:, : x.shape[1]], wide, parts) for x in (q, k)]
    for _ in range(2):
        made = rotation_triton.rotate(q, k, cos, sin, wide, parts)
        if dtype == torch.bfloat16 and DEVICE == "cpu":  # Triton's interpreter truncates to bf16
            assert all(error(y, truth) < 1e-2 for y, truth in zip(made, wanted, strict=True))
        else:
            assert all(map(torch.equal, made, wanted))


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("name", pictured.NAMES)
@torch.inference_mode()
def test_a_fused_tower_computes_what_transformers_computes(name, device, monkeypatch):
    """With rotations of the same bits; products of patches add in another order than a convolution."""
    monkeypatch.setattr("lowq_cli.hf.tower.fuse", lambda model: None)
    tower = Tower(pictured.model(name).to(device, torch.float32 if device == "cpu" else torch.float16))
    p, calls = pictured.picture(name, 1, 4, 5), []
    wanted = tower(p.inputs)
    monkeypatch.setattr(fused_tower, "rotate_heads", lambda *given: calls.append(given[:4]) or rotation.rotate_heads(*given))
    fused_tower._fused.cache_clear()
    fused_tower.rotation.cache_clear()
    fused_tower.fuse(tower.model)
    found = tower(p.inputs)
    for ours, theirs in zip((found[0], *found[1]), (wanted[0], *wanted[1]), strict=True):
        assert (ours - theirs).float().norm() <= (1e-5 if device == "cpu" else 3e-3) * theirs.float().norm()
    assert bool(calls) == (name in TURNED)


def turned_back(q, k, cos, sin):
    return tuple(rotation.definition(x, cos[:, None], -sin[:, None], True) for x in (q, k))


def of_q_alone(q, k, cos, sin):
    return rotation.definition(q, cos[:, None], sin[:, None], True), k


def turned(q, k, cos, sin):
    return tuple(rotation.definition(x, cos[:, None], sin[:, None], True) for x in (q, k))


def test_only_functions_that_rotate_as_the_definition_are_replaced():
    assert fused_tower.rotation(turned) is not None
    assert fused_tower.rotation(turned_back) is None
    assert fused_tower.rotation(of_q_alone) is None
    assert fused_tower.rotation(lambda q, k, cos: (q, k)) is None


def test_calls_that_the_kernel_does_not_take_go_to_the_function():
    fused, (q, k) = fused_tower.rotation(turned), torch.randn(2, 5, 3, 8)
    cos, sin = torch.randn(2, 5, 8)
    assert all(map(torch.equal, fused(q.half(), k, cos, sin), turned(q.half(), k, cos, sin)))  # two dtypes
    assert all(map(torch.equal, fused(q, k[:, :1], cos, sin), turned(q, k[:, :1], cos, sin)))  # fewer heads of keys


CONVOLUTIONS = {
    "of one patch": (nn.Conv3d(3, 7, (2, 4, 4), (2, 4, 4)), (6, 3, 2, 4, 4)),
    "of an image": (nn.Conv2d(3, 7, 4, 4, bias=False), (2, 3, 12, 8)),
    "of an image with a rest": (nn.Conv2d(3, 7, (4, 3), (4, 3), padding="valid"), (2, 3, 13, 11)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
@torch.inference_mode()
def test_patches_are_one_product(name):
    conv, shape = CONVOLUTIONS[name]
    x = torch.randn(shape)
    wanted = conv(x)
    fused_tower.fuse(conv)
    assert "forward" in vars(conv)
    assert torch.allclose(conv(x), wanted, atol=1e-5)
    assert conv(x).shape == wanted.shape


def test_convolutions_whose_patches_overlap_stay():
    for more in ({"stride": 2}, {"stride": 4, "padding": 1}, {"stride": 4, "dilation": 2}, {"stride": 4, "groups": 2}):
        conv = nn.Conv2d(4, 4, 4, **more)
        fused_tower.fuse(conv)
        assert "forward" not in vars(conv)
