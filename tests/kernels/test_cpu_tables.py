"""cpu/table: products of codes that stand for a table's values, on every instruction set that this CPU has, against fp64."""

import pytest
import torch

from cpu_sets import ROWS, TOLERANCE, isa, pytestmark, rows
from emulation import error, weight
from lowq_kernels.dispatch import registry
from lowq_kernels.modules.linear import QuantLinear
from lowq_kernels.products.cpu import native, table
from lowq_packers import tables
from lowq_packers.layouts import pack, repack, unpack
from lowq_packers.qtensor import QuantizedTensor

__all__ = ["isa", "pytestmark"]
SCHEMES = [
    *((4, 16, "e2m1/e4m3"), (4, 32, "e2m1/e8m0"), (4, 64, "e2m1"), (4, 64, "nf4"), (4, 32, "iq4_nl"), (4, 0, "nf4/e4m3")),
    *(
        (4, 128, "fitted"),
        (4, 16, "fitted/e4m3"),
        (3, 64, "fitted"),
        (3, 16, "fitted/e8m0"),
        (2, 48, "fitted"),
        (2, 0, "fitted"),
    ),
]
SHAPES = {16: ((33, 80), (96, 384)), 32: ((80, 96), (17, 320)), 48: ((40, 144),), 64: ((95, 192), (64, 320)), 128: ((16, 256),)}


def cases(bits, group, kind, dtype):
    """Weights of each shape; the last of several tables where they are the weight's own."""
    for N, K in SHAPES.get(group, ((1, 100), (48, 30))):
        yield weight(N, K, bits, group, kind, dtype)
    if "fitted" in kind or "e4m3" in kind:
        yield weight(96, 192, bits, group if group in (16, 48, 64) else 0, kind, dtype, tables=3)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_products_against_the_definition(isa, scheme):
    assert native.isa()[1] == isa
    for dtype, tolerance in TOLERANCE.items():
        for q in cases(*scheme, dtype):
            p, (N, K) = pack(q, "cpu"), q.shape
            bias = rows(1, N, dtype)[0]
            for M in ROWS:
                x = rows(M, K, dtype, M)
                truth = x.double() @ q.dequantize().double().t() + bias.double()
                y = table.table(x, p, bias, {})
                assert y.shape == (M, N)
                assert error(y, truth) < tolerance / 4, (q.scheme, q.shape, dtype, M)


@pytest.mark.parametrize("scheme", [(4, 16, "e2m1/e4m3"), (3, 64, "fitted")], ids=str)
def test_a_row_does_not_depend_on_its_batch_or_on_threads(isa, scheme):
    p, x = pack(weight(80, 384 if scheme[1] == 64 else 400, *scheme), "cpu"), rows(19, 384 if scheme[1] == 64 else 400)
    whole, threads = table.table(x, p, None, {}), torch.get_num_threads()
    try:
        for n in (1, 2, 5):
            torch.set_num_threads(n)
            for M in ROWS:
                assert torch.equal(table.table(x[:M], p, None, {}), whole[:M])
    finally:
        torch.set_num_threads(threads)


def test_the_largest_values_do_not_overflow(isa):
    """16 products of a table's largest with the largest whole numbers of x, of both signs: 2**31 but for 0.01%."""
    own = torch.tensor([[-1.0, 1.0, 2.0**-13, 0.0]]) * (1 - 2**-20)
    for code, value in ((0, -1), (1, 1)):
        q = QuantizedTensor.of(
            weight(16, 64, 2, 64, "fitted").scheme,
            torch.full((16, 64), code, dtype=torch.uint8),
            torch.ones(16, 1).half(),
            None,
            own,
        )
        for M in (1, 3):
            y = table.table(torch.full((M, 64), 2 - 2**-10).half(), pack(q, "cpu"), None, {})
            assert (y.double() - value * 64 * 2).abs().max() < 0.2


def test_every_scale_of_8_bits_is_read(isa):
    """e4m3 with its subnormals, of both signs where scales have one, e8m0 down to 2**-127: a row of each byte."""
    for kind, most in (("e2m1/e4m3", 127), ("fitted/e4m3", 254), ("e2m1/e8m0", 200)):
        q = weight(most, 32, 4, 16 if "e4m3" in kind else 32, kind)
        numbers = torch.arange(most)
        q.scales.copy_((numbers % 127 + numbers // 127 * 128).unsqueeze(1).expand_as(q.scales))
        x = (rows(1, 32) * 2.0 ** (0 if "e4m3" in kind else 20)).bfloat16()
        y, truth = table.table(x, pack(q, "cpu"), None, {}), x.double() @ q.dequantize().double().t()
        rounded = x.double().abs() @ q.dequantize().double().abs().t() * 2.0**-12 * ("fitted" in kind)  # a table's values
        assert ((y - truth).abs() <= truth.abs() * 2**-7 + rounded + 1e-38).all()


def test_entries_of_tables_are_exact_or_within_their_stated_error(isa):
    """One weight of each code: e2m1 and iq4_nl as they are, any other within 2**-13 of the largest."""
    for kind in ("e2m1", "iq4_nl", "nf4", "fitted"):
        q = weight(16, 32, 4, 32, kind, torch.float16)
        q.W_q.copy_(torch.arange(16, dtype=torch.uint8).unsqueeze(1).expand(16, 32))
        q.scales.fill_(1)
        x = torch.zeros(1, 32, dtype=torch.float16)
        x[0, 21] = 1
        y, expected = table.table(x, pack(q, "cpu"), None, {})[0].float(), tables.values(q.scheme, q.table)[0]
        within = 0 if kind in ("e2m1", "iq4_nl") else 2.0**-13 * expected.abs().max()
        assert ((y - expected).abs() <= within + expected.abs() * 2**-11).all()
        assert within or torch.equal(y, expected)


def test_values_that_are_not_finite_stay_so_and_stay_in_their_row(isa):
    p, x = pack(weight(40, 272, 4, 16, "e2m1/e4m3"), "cpu"), rows(4, 272)
    clean = table.table(x, p, None, {})
    x[1, 7], x[2, 270] = float("inf"), float("nan")
    y = table.table(x, p, None, {})
    assert y[1:3].isnan().all()
    assert torch.equal(y[[0, 3]], clean[[0, 3]])
    assert (table.table(torch.zeros_like(x), p, None, {}) == 0).all()
    assert table.table(x[:0], p, None, {}).shape == (0, 40)


def test_one_wrong_code_is_seen(isa):
    q = weight(32, 64, 4, 32, "nf4")
    wrong, x = q.W_q.clone(), torch.zeros(1, 64).bfloat16()
    wrong[3, 5] ^= 8
    x[0, 5] = 1
    p = pack(QuantizedTensor.of(q.scheme, wrong, q.scales, None), "cpu")
    y, truth = table.table(x, p, None, {}), x.double() @ q.dequantize().double().t()
    assert [n for n in range(32) if abs(y[0, n] - truth[0, n]) > 0.01] == [3]


def test_tiles_of_two_tables_go_another_way():
    q = weight(48, 64, 4, 16, "e2m1/e4m3", tables=6)  # tables of 8 rows
    x = rows(2, 64)
    y = table.table(x, pack(q, "cpu"), None, {})
    assert error(y, x.double() @ q.dequantize().double().t()) < TOLERANCE[torch.bfloat16] / 4


def test_the_layout_is_lossless():
    for scheme in SCHEMES:
        for q in cases(*scheme, torch.bfloat16):
            p = pack(q, "cpu")
            back, moved = unpack(p), repack(pack(q), "cpu")
            assert all(torch.equal(getattr(back, name), getattr(q, name)) for name in ("W_q", "scales"))
            assert all(torch.equal(getattr(moved, name), getattr(p, name)) for name in ("words", "scales"))


def test_it_is_chosen_wherever_it_can_be():
    for scheme in SCHEMES:
        lin = QuantLinear.from_quantized(weight(64, 384, *scheme), dtype=torch.bfloat16)
        assert lin.layout == "cpu"
        for act in ("none", "int8"):  # whose rows are rounded before
            assert registry.select(registry.Call.of(rows(5, 384), lin.packed, act))[0].name == "cpu/table"
