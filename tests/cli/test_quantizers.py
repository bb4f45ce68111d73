"""Every quantizer: right codes for its scales, small memory, the same answer twice; hqq against its package."""

import pytest
import torch

from lowq_cli import quantizers
from lowq_cli.quantizers import _slabs, hqq
from lowq_packers import tables
from lowq_packers.errors import DamagedError, SchemeError, UsageError
from lowq_packers.scheme import BITS, ZERO_KINDS, Scheme

METHODS = tuple(quantizers.methods())
DTYPES = (None, torch.float16, torch.bfloat16)


def quantize(method, W, scheme, dtype=None):
    """The method's result, or a skip where the method has no such kind of zero."""
    if method == "hqq" and scheme.zero == "none":
        pytest.skip("hqq has no symmetric form")
    return quantizers.get(method)(W, scheme, dtype)


def weight(N=24, K=256, seed=0):
    g = torch.Generator().manual_seed(seed)
    W = torch.randn(N, K, generator=g) * 0.02
    W[0, 3] = 0.4  # an outlier
    return W


def relative_error(q, W):
    return float((q.dequantize() - W.float()).norm() / W.float().norm())


@pytest.mark.parametrize("method", ["rtn", "lsq", "hqq"])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("zero", ZERO_KINDS)
def test_groups_of_one_value_are_exact(method, bits, zero):
    """Outliers of either sign and any size; without a zero the upper end of the range is not a level; it was cut before."""
    values = torch.tensor([0.5, -0.5, 0.0078125, -3.0, 1024.0, -0.25])
    W = values.repeat_interleave(64).reshape(3, 128).contiguous()
    back = quantize(method, W, Scheme(bits, 64, zero), torch.bfloat16).dequantize()
    tolerance = 0.0 if zero == "none" else 2**-7
    assert ((back - W).abs() <= tolerance * W.abs()).all()


def test_the_folder_is_the_list():
    assert {"rtn", "hqq"} <= set(METHODS)
    assert all(summary and len(summary) < 130 for summary in quantizers.methods().values())
    assert set(quantizers.DEFAULT) == set(BITS)
    assert set(quantizers.DEFAULT.values()) <= set(METHODS)
    with pytest.raises(UsageError, match="rtn"):
        quantizers.get("nope")


@pytest.mark.half_of("method", "bits", "zero", "dtype")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("zero", ZERO_KINDS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("method", METHODS)
def test_codes_are_nearest_for_the_stored_scales(method, bits, zero, dtype):
    W, scheme = weight(), Scheme(bits, 64, zero)
    q = quantize(method, W, scheme, dtype)
    assert q.scheme == scheme
    assert q.scales.dtype == torch.float32
    assert (q.scales > 0).all()
    if dtype:
        assert torch.equal(q.scales.to(dtype).float(), q.scales)
        if q.zeros is not None:
            assert torch.equal(q.zeros.to(dtype).float(), q.zeros)
    if zero == "int":
        assert torch.equal(q.zeros, q.zeros.round().clamp(0, scheme.levels - 1))
    z = scheme.mid if q.zeros is None else q.zeros.unsqueeze(-1)
    levels = (torch.arange(scheme.levels) - z) * q.scales.unsqueeze(-1)
    nearest = (W.reshape(24, 4, 64, 1) - levels.unsqueeze(2)).abs().amin(-1)
    mine = (W - q.dequantize()).abs().reshape(24, 4, 64)
    assert (mine <= nearest + 1e-4 * q.scales.unsqueeze(-1)).all()


@pytest.mark.parametrize("bits", BITS)
def test_rtn_error_is_at_most_half_a_step(bits):
    W = weight()
    q = quantizers.get("rtn")(W, Scheme(bits, 64))
    assert ((q.dequantize() - W).abs().reshape(24, 4, 64) <= q.scales.unsqueeze(-1) * 0.5001).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group_size", [16, 64, 256])
def test_hqq_exact_equals_the_package(bits, group_size):
    from hqq.core.quantize import Quantizer

    W = weight(40, 256, seed=bits)
    theirs, meta = Quantizer.quantize(
        W, nbits=bits, group_size=group_size, axis=1, round_zero=bits == 4, device="cpu", bitpack=False
    )
    q = hqq.quantize(W, Scheme(bits, group_size), exact=True)
    assert torch.equal(q.W_q, theirs.reshape(40, 256).to(torch.uint8))
    assert torch.equal(q.scales, meta["scale"].reshape(40, -1))
    assert torch.equal(q.zeros, meta["zero"].reshape(40, -1))


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_hqq_lowers_the_l1_error_of_rtn(bits):
    W, scheme = weight(64, 512), Scheme(bits, 64)
    l1 = {m: float((quantizers.get(m)(W, scheme).dequantize() - W).abs().mean()) for m in ("rtn", "hqq")}
    assert l1["hqq"] < l1["rtn"]


@pytest.mark.parametrize("zero", ZERO_KINDS)
@pytest.mark.parametrize("bits", BITS)
def test_lsq_is_never_worse_than_rtn_in_any_group(bits, zero):
    W, scheme = weight(64, 512), Scheme(bits, 64, zero)
    per_group = {m: (quantizers.get(m)(W, scheme).dequantize() - W).square().reshape(-1, 64).sum(1) for m in ("rtn", "lsq")}
    assert (per_group["lsq"] <= per_group["rtn"] * 1.0001).all()


@pytest.mark.parametrize("bits", BITS)
def test_lsq_finds_the_grid_that_made_the_weights(bits):
    """Weights that lie on a grid exactly, all levels in use: nothing is lost, at any offset."""
    g = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 2**bits, (8, 128), generator=g)
    codes[:, 0], codes[:, 1] = 0, 2**bits - 1
    W = (codes + 0.3) * 0.01
    q = quantizers.get("lsq")(W, Scheme(bits, 128))
    assert torch.equal(q.W_q, codes.to(torch.uint8))
    assert relative_error(q, W) < 1e-5


@pytest.mark.parametrize(("bits", "limit"), [(4, 0.0975), (3, 0.185), (2, 0.345), (1, 0.604)])
def test_lsq_comes_near_the_best_grid_for_a_normal_weight(bits, limit):
    """Max's optimum for an infinite normal sample: 0.107, 0.194, 0.345, 0.603 (square roots of his table II)."""
    W = torch.randn(256, 1024, generator=torch.Generator().manual_seed(1))
    assert relative_error(quantizers.get("lsq")(W, Scheme(bits, 64)), W) < limit


@pytest.mark.parametrize(("bits", "limit"), [(4, 0.067), (3, 0.138), (2, 0.285)])
def test_groups_that_mirror_the_table_lose_less(bits, limit):
    """Scales of both signs. With positive ones alone 0.0703, 0.1449 and 0.3057 are lost."""
    W = torch.randn(128, 512, generator=torch.Generator().manual_seed(1))
    q = quantizers.get("lsq")(W, Scheme(bits, 16, "none", "fitted", "e4m3"))
    assert relative_error(q, W) < limit
    assert 0.4 < (q.scales >= tables.SIGN).float().mean() < 0.6


@pytest.mark.parametrize("method", METHODS)
def test_slabs_and_input_dtype_change_nothing(method):
    rows = _slabs.SLAB["cpu"] // 1024
    W, scheme = weight(rows + 7, 1024).to(torch.bfloat16), Scheme(4, 32)
    whole = quantize(method, W, scheme)  # in two slabs
    parts = [quantize(method, part.float(), scheme) for part in (W[: rows - 5], W[rows - 5 :])]
    for field in ("W_q", "scales", "zeros"):
        assert torch.equal(getattr(whole, field), torch.cat([getattr(part, field) for part in parts]))


@pytest.mark.half_of("method", "bits", "zero", "dtype")
@pytest.mark.parametrize("zero", ZERO_KINDS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_odd_groups_stay_finite_and_close(method, bits, zero, dtype):
    """All zero, constant, nearly constant, one-sided, tiny and huge groups."""
    rows = [
        torch.zeros(32),
        torch.full((32,), 0.5),
        0.5 + 1e-4 * torch.rand(32),
        torch.rand(32) + 3,
        -torch.rand(32) - 3,
        torch.randn(32) * 1e-6,
        torch.randn(32) * 1e4,
    ]
    W = torch.stack(rows)
    q = quantize(method, W, Scheme(bits, 32, zero), dtype)
    out = q.dequantize()
    assert torch.isfinite(out).all()
    assert torch.isfinite(q.scales).all()
    assert out[0].abs().max() <= (1e-7 if bits == 1 and zero == "none" else 0)  # two levels around 0 cannot hold 0
    if zero == "float":
        assert torch.allclose(out[1:3], W[1:3], rtol=6e-3)
    if bits == 8:
        error = (out - W).norm(dim=1) / W.norm(dim=1).clamp(min=1e-12)
        assert error[[1, 2, 3, 4, 6]].max() < 0.01


@pytest.mark.parametrize("method", METHODS)
def test_refusals(method):
    q = quantizers.get(method)
    with pytest.raises(SchemeError, match="group_size=48"):
        q(weight(), Scheme(4, 48))
    with pytest.raises(SchemeError, match="must be"):
        q(torch.zeros(4, 4, 4), Scheme(4, 16))
    W = weight()
    W[3, 3] = torch.nan
    W[5, 5] = torch.inf
    with pytest.raises(DamagedError, match="holds 2 NaN or infinite"):
        q(W, Scheme(4, 64))


def test_hqq_has_no_symmetric_form():
    with pytest.raises(SchemeError, match="--zero float"):
        hqq.quantize(weight(), Scheme(4, 64, "none"))
