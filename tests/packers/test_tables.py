"""Values from a table: the definition by hand, scales of 8 bits, every layout, and what no scheme or tensor may be."""

import pytest
import torch

from lowq_packers import tables
from lowq_packers.errors import SchemeError
from lowq_packers.layouts import LAYOUTS, PackedWeight, pack, read_facts, unpack
from lowq_packers.qtensor import QuantizedTensor, plausible
from lowq_packers.scheme import Scheme

NVFP4, MXFP4 = Scheme(4, 16, "none", "e2m1", "e4m3"), Scheme(4, 32, "none", "e2m1", "e8m0")
SCHEMES = [
    NVFP4,
    MXFP4,
    Scheme(4, 64, "none", "nf4"),
    Scheme(4, 32, "none", "iq4_nl"),
    Scheme(3, 32, "none", "fitted"),
    Scheme(2, 16, "none", "fitted", "e4m3"),
]


def random_table(s: Scheme, N: int, K: int, dtype: torch.dtype = torch.float16, T: int = 1) -> QuantizedTensor:
    """Every code, scales around 0.01 and, where the scheme has them, T tables or factors that differ."""
    g = torch.Generator().manual_seed(N * 31 + K + s.bits)
    W_q = torch.randint(0, s.levels, (N, K), generator=g).to(torch.uint8)
    scales = torch.rand(N, s.groups(K), generator=g) * 0.02 + 0.001
    if tables.signed(s):
        scales[:, ::2] *= -1
    scales = scales.to(dtype) if s.scale == "float" else tables.to_bytes(scales, s.scale)
    table = torch.rand(T, s.table_width, generator=g) * 2 + 0.05 if s.table_width else None
    if table is not None and s.table == "fitted":
        table -= 1
    return QuantizedTensor.of(s, W_q, scales, None, table)


def test_values_are_those_of_the_definition():
    codes = torch.arange(16, dtype=torch.uint8).repeat(2, 2)  # (2, 32)
    scales = torch.tensor([[56, 64], [1, 126]], dtype=torch.uint8)  # 1, 2; 2^-9, 448
    q = QuantizedTensor.of(NVFP4, codes, scales, None, torch.tensor([[0.25]]))
    e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    expected = torch.stack([torch.cat([e2m1 * 0.25, e2m1 * 0.5]), torch.cat([e2m1 * 2.0**-11, e2m1 * 112])])
    assert torch.equal(q.dequantize(), expected)
    scales = torch.tensor([[127], [120]], dtype=torch.uint8)
    expected = torch.stack([torch.cat([e2m1, e2m1]), torch.cat([e2m1, e2m1]) / 128])
    assert torch.equal(QuantizedTensor.of(MXFP4, codes, scales, None).dequantize(), expected)
    own = torch.tensor([[0.5, -3.0, 7.0, 1.25]])
    q = QuantizedTensor.of(Scheme(2, 32, "none", "fitted"), codes % 4, torch.tensor([[2.0], [1.0]]), None, own)
    assert torch.equal(q.dequantize()[:, :5], torch.tensor([[1.0, -6, 14, 2.5, 1], [0.5, -3, 7, 1.25, 0.5]]))


def test_all_bytes_are_the_scales_that_their_formats_say():
    every = torch.arange(256, dtype=torch.uint8)
    e8m0 = tables.from_bytes(every, "e8m0")
    assert torch.equal(e8m0[:255].double(), torch.tensor([2.0 ** (i - 127) for i in range(255)], dtype=torch.float64))
    assert e8m0[255].isnan()
    e4m3 = [(i & 7) / 512 if i < 8 else (1 + (i & 7) / 8) * 2.0 ** ((i >> 3) - 7) for i in range(127)]
    assert torch.equal(tables.from_bytes(every[:127], "e4m3"), torch.tensor(e4m3))
    for kind, count in tables.BYTES.items():
        first = 1 if kind == "e4m3" else 0  # a scale of 0 is read, never written
        assert torch.equal(tables.to_bytes(tables.from_bytes(every[first:count], kind), kind), every[first:count])
    assert torch.equal(tables.to_bytes(-tables.from_bytes(every[1:127], "e4m3"), "e4m3"), every[129:255])
    between = torch.tensor([1.49, 1.51, 2.99, 3.01])
    assert tables.to_bytes(between, "e8m0").tolist() == [127, 128, 128, 129]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("s", SCHEMES, ids=str)
def test_every_layout_is_lossless(layout, s):
    q = random_table(s, 48, 128, T=3)
    if LAYOUTS[layout].why_not(s, 48, 128):
        with pytest.raises(SchemeError, match=f"cannot hold.*{s.table}|multiples of 32"):
            pack(q, layout)
        return
    p = pack(q, layout)
    back = unpack(PackedWeight.from_facts(p.words, p.scales, p.zeros, p.aux, p.facts, p.table))
    assert back.scheme == s
    assert torch.equal(back.W_q, q.W_q)
    assert torch.equal(back.scales, q.scales)
    assert torch.equal(back.dequantize(), q.dequantize())
    assert read_facts(p.facts)[0] == s


@pytest.mark.parametrize("s", [NVFP4, Scheme(3, 32, "none", "fitted")], ids=str)
def test_rows_of_several_matrices_keep_their_own_tables(s):
    parts = [random_table(s, N, 64) for N in (32, 16, 48)]
    table = tables.joined([q.table for q in parts], [32, 16, 48])
    assert table.shape[0] == 6
    codes, scales = (torch.cat([getattr(q, name) for q in parts]) for name in ("W_q", "scales"))
    whole = QuantizedTensor.of(s, codes, scales, None, table)
    assert torch.equal(whole.dequantize(), torch.cat([q.dequantize() for q in parts]))
    assert torch.equal(whole.rows(32, 48).dequantize(), parts[1].dequantize())
    with pytest.raises(SchemeError, match="not whole tables of 16 rows"):
        whole.rows(8, 48)


def test_a_factor_is_multiplied_by_the_scale_first():
    """As the readers of NVFP4 do it: scale * factor is rounded to fp32, then times the value."""
    q = random_table(NVFP4, 64, 256)
    scales = q.scales.view(torch.float8_e4m3fn).float() * q.table
    e2m1 = torch.tensor(tables.FIXED["e2m1"])[q.W_q.long()]
    assert torch.equal(q.dequantize(), e2m1 * scales.repeat_interleave(16, 1))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ((4, 16, "none", "fp4"), "table='fp4' does not exist"),
        ((3, 16, "none", "nf4"), "table nf4 has 4 bits, not 3"),
        ((8, 16, "none", "fitted"), "has 4, 3, 2 bits, not 8"),
        ((4, 16, "float", "nf4"), "with table nf4"),
        ((4, 16, "none", "nf4", "e5m2"), "scale='e5m2' is not a kind"),
        ((4, 16, "none", "", "e4m3"), "scale='e4m3' goes with a table"),
    ],
    ids=str,
)
def test_schemes_that_do_not_exist(fields, said):
    with pytest.raises(SchemeError, match=said):
        Scheme(*fields)


def test_kinds_are_spelled_and_read_back():
    for s in (*SCHEMES, Scheme(4, 64), Scheme(2, 32, "int"), Scheme(8, 64, "none")):
        assert Scheme.of(s.bits, s.group_size, s.kind) == s
    assert [s.bits_per_weight() for s in SCHEMES[:3]] == [4.5, 4.25, 4.25]


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (None, "got none"),
        (torch.ones(1, 2), "got .1, 2. torch.float32"),
        (torch.ones(1, 1, dtype=torch.float16), "float16"),
        (torch.ones(3, 1), "T divides N=16"),
    ],
    ids=["absent", "wide", "fp16", "thirds"],
)
def test_a_table_that_does_not_fit_is_refused(table, said):
    codes, scales = torch.zeros(16, 32, dtype=torch.uint8), torch.ones(16, 2, dtype=torch.uint8)
    with pytest.raises(SchemeError, match=said):
        QuantizedTensor.of(NVFP4, codes, scales, None, table)
    with pytest.raises(SchemeError, match="uint8"):
        QuantizedTensor.of(NVFP4, codes, scales.float(), None, torch.ones(1, 1))
    p = pack(QuantizedTensor(codes, scales[:, :1].float(), None, 4, 32))
    with pytest.raises(SchemeError, match="stray table"):
        PackedWeight(p.words, p.scales, None, p.scheme, 16, 32, p.layout, table=torch.ones(1, 1))


def test_values_that_no_quantizer_writes_are_not_plausible():
    fitted = SCHEMES[4]
    good, nan = torch.tensor([[56, 126]], dtype=torch.uint8), torch.tensor([[56, 127]], dtype=torch.uint8)
    assert plausible(good, NVFP4, "scale")
    assert not plausible(nan, NVFP4, "scale")
    assert not plausible(nan + 1, NVFP4, "scale")  # a negative one
    assert plausible(good + 128, SCHEMES[5], "scale")
    assert not plausible(nan + 128, SCHEMES[5], "scale")
    assert plausible(nan, MXFP4, "scale")
    assert not plausible(nan * 0 + 255, MXFP4, "scale")
    for bad in (0.0, -1.0, torch.inf, torch.nan):
        assert not plausible(torch.tensor([[bad]]), NVFP4, "table")
    assert plausible(torch.tensor([[-1.0, 0.0]]), fitted, "table")
    assert not plausible(torch.tensor([[torch.nan, 0.0]]), fitted, "table")
