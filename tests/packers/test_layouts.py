"""Every layout: pack and unpack are inverse bit for bit, the documented words hold, refusals name the way out."""

import pytest
import torch

from lowq_packers import fp8
from lowq_packers.errors import SchemeError
from lowq_packers.layouts import LAYOUTS, PackedWeight, pack, repack, unpack
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import BITS, Scheme, fit_group
from papers.warp32 import WARP32

SHAPES = [(1, 32, 32), (37, 64, 32), (16, 48, 48), (33, 96, 32), (80, 640, 64), (5, 30, 30), (64, 320, 80), (128, 256, 256)]


def random_q(N: int, K: int, group: int, bits: int, zero: str = "float", dtype: torch.dtype = torch.float16) -> QuantizedTensor:
    g = torch.Generator().manual_seed(N * 7919 + K + bits)
    W_q = torch.randint(0, 1 << bits, (N, K), generator=g).to(torch.uint8)
    scales = (torch.rand(N, K // group, generator=g) * 0.02 + 0.001).to(dtype)
    zeros = torch.rand(N, K // group, generator=g) * ((1 << bits) - 1)
    zeros = None if zero == "none" else (zeros.round() if zero == "int" else zeros).to(dtype)
    return QuantizedTensor(W_q, scales, zeros, bits, group, zero)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("zero", ["float", "int", "none"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_unpack_inverts_pack(layout, bits, zero, shape):
    N, K, group = shape
    q = random_q(N, K, group, bits, zero)
    if why := LAYOUTS[layout].why_not(q.scheme, N, K):
        with pytest.raises(SchemeError, match="cannot hold"):
            pack(q, layout)
        assert why
        return
    p = pack(q, layout)
    back = unpack(p)
    assert torch.equal(back.W_q, q.W_q)
    assert torch.equal(back.scales, q.scales)
    assert (back.zeros is None) == (q.zeros is None)
    assert q.zeros is None or torch.equal(back.zeros, q.zeros)
    assert back.scheme == q.scheme
    through_disk = repack(pack(q), layout)
    assert torch.equal(through_disk.words, p.words)
    assert torch.equal(through_disk.scales, p.scales)


@pytest.mark.parametrize("layout", [name for name, layout in LAYOUTS.items() if layout.rows])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("zero", ["float", "int", "none"])
def test_rows_are_those_of_the_whole(layout, bits, zero):
    """Rows in any order and more than once, at both ends of tiles."""
    at = torch.tensor([36, 0, 15, 16, 0, 31, 36])
    for N, K, group in [(37, 64, 32), (37, 96, 96)]:
        q = random_q(N, K, group, bits, zero)
        codes, scales, zeros = LAYOUTS[layout].rows(pack(q, layout), at)
        assert torch.equal(codes, q.W_q[at])
        assert torch.equal(scales, q.scales[at])
        assert (zeros is None) == (zero == "none")
        assert zeros is None or torch.equal(zeros, q.zeros[at])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_flipped_code_changes_the_words(layout):
    q = random_q(64, 128, 64, 4)
    flipped = q.W_q.clone()
    flipped[63, 127] ^= 1
    other = QuantizedTensor(flipped, q.scales, q.zeros, 4, 64)
    assert not torch.equal(pack(q, layout).words, pack(other, layout).words)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_transposed_scales_and_zeros_are_laid_out_anew(layout):
    """GPTQ and GemLite store scales as (G, N): a transposed view has strides that kernels do not support."""
    q = random_q(64, 128, 32, 4)
    view = QuantizedTensor(q.W_q, q.scales.t().contiguous().t(), q.zeros.t().contiguous().t(), 4, 32)
    p, expected = pack(view, layout), pack(q, layout)
    assert (p.scales.stride(), p.zeros.stride()) == (expected.scales.stride(), expected.zeros.stride())


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_strided_words_are_gemlites(bits):
    # formats/gemlite_hqq.md 1.1: word[n, j] = OR_i q[n, j*e + i] << (bits*i), stored as [K/e, N]
    q = random_q(8, 64, 32, bits)
    e = 32 // bits
    words = pack(q, "strided").words
    assert words.shape == (64 // e, 8)
    for n, j in [(0, 0), (7, 64 // e - 1), (3, 1)]:
        want = sum(int(q.W_q[n, j * e + i]) << (bits * i) for i in range(e))
        assert int(words[j, n]) & 0xFFFFFFFF == want


@pytest.mark.parametrize(("bits", "word"), [(4, 0x01234567), (2, 0x1B1B1B1B), (8, 0x00010203), (3, None), (1, None)])
def test_warp32_of_the_papers(bits, word):
    # formats/gemlite_hqq.md 1.5: q = k // 32 (mod 2^bits) makes every word the same
    K = 32 * (32 // bits)
    row = ((torch.arange(K) // 32) % (1 << bits)).to(torch.uint8).reshape(1, K)
    words = WARP32.pack(QuantizedTensor(row, torch.ones(1, 1), None, bits, K)).words
    assert words.shape == (1, 32)
    assert all(w & 0xFFFFFFFF == word for w in words[0].tolist() if word is not None)
    for N, K, group in SHAPES:
        q = random_q(N, K, group, bits)
        assert torch.equal(WARP32.unpack(WARP32.pack(q)).W_q, q.W_q)


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_codes_survive_the_hqq_package(bits):
    # hqq packs slabs of rows into bytes; both must give back the same codes, and hqq's dequantisation must be ours
    bitpack = pytest.importorskip("hqq.core.quantize", reason="the hqq package is a test extra").BitPack
    q = random_q(64, 128, 32, bits)
    rows = q.W_q.reshape(-1, 32)  # hqq groups along K first: (N*K/g, g)
    name = {8: "8bit_u8", 4: "4bit_u8", 2: "2bit_u8", 1: "1bit_u8"}[bits]
    hqq_rows = getattr(bitpack, f"unpack_{name}")(getattr(bitpack, f"pack_{name}")(rows))
    assert torch.equal(hqq_rows.reshape(64, 128).to(torch.uint8), unpack(pack(q)).W_q)
    hqq_w = (hqq_rows.float() - q.zeros.float().reshape(-1, 1)) * q.scales.float().reshape(-1, 1)
    assert torch.equal(hqq_w.reshape(64, 128), q.dequantize())


def test_three_bit_codes_survive_the_hqq_package():
    bitpack = pytest.importorskip("hqq.core.quantize", reason="the hqq package is a test extra").BitPack
    q = random_q(64, 128, 32, 3)
    rows = q.W_q.reshape(-1, 32)
    back = bitpack.unpack_3bit_32(bitpack.pack_3bit_32(rows))[: rows.shape[0]]
    assert torch.equal(back.reshape(64, 128).to(torch.uint8), unpack(pack(q)).W_q)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Scheme(5, 64), "bits=5"),
        (lambda: Scheme(4, -1), "group_size=-1"),
        (lambda: Scheme(4, 64, "half"), "zero='half'"),
        (lambda: Scheme(4, 20).groups(40), "neither a multiple of 16"),
        (lambda: Scheme(4, 64).groups(96), "K=96 is not a multiple of group_size=64; use --group 48"),
        (lambda: Scheme(4, 32).groups(30), "use --group channel"),
        (lambda: pack(random_q(4, 64, 32, 4), "marlin"), "layout 'marlin' does not exist; use one of"),
        (lambda: QuantizedTensor(torch.zeros(2, 32), torch.ones(2, 1), None, 4, 32), "must be .* uint8"),
        (lambda: QuantizedTensor(torch.full((2, 32), 16, dtype=torch.uint8), torch.ones(2, 1), None, 4, 32), "holds code 16"),
        (lambda: QuantizedTensor(torch.zeros(2, 32, dtype=torch.uint8), torch.ones(1, 2), None, 4, 32), "scales must be"),
        (lambda: QuantizedTensor(torch.zeros(2, 32, dtype=torch.uint8), torch.ones(2, 1), None, 4, 32, "float"), "contradict"),
    ],
)
def test_impossible_schemes_and_layouts_are_refused(make, match):
    with pytest.raises(SchemeError, match=match):
        make()


@pytest.mark.parametrize(
    ("K", "wanted", "fits"), [(96, 64, 48), (4864, 128, 128), (640, 128, 128), (30, 64, None), (1152, 256, 192)]
)
def test_fit_group(K, wanted, fits):
    assert fit_group(K, wanted) == fits
    assert fits is None or K % fits == 0


def test_one_bit_without_zero_is_plus_minus_half_a_scale():
    q = QuantizedTensor(torch.tensor([[0, 1] * 16], dtype=torch.uint8), torch.full((1, 1), 2.0), None, 1, 32)
    assert q.dequantize().tolist() == [[-1.0, 1.0] * 16]


@pytest.mark.parametrize(
    ("N", "K", "block"), [(256, 384, (128, 128)), (300, 200, (128, 128)), (96, 64, (256, 256)), (33, 700, (256, 256))]
)
def test_blocks_in_fp8_are_a_weight_like_others(N, K, block):
    """Codes and scales survive their layout and the scheme's name; rows are rows; no other layout takes them, nor they it."""
    scheme = Scheme.in_blocks(block)
    W = torch.randn(N, K, generator=torch.Generator().manual_seed(N))
    w = fp8.quantize(W, block)
    q = QuantizedTensor.of(scheme, w.q.view(torch.uint8), w.scales, None)
    assert torch.equal(q.dequantize(), w.dequantize())
    p = pack(q, "e4m3")
    assert p.words.dtype == torch.float8_e4m3fn
    back = unpack(PackedWeight.from_facts(p.words, p.scales, None, None, p.facts))
    assert back.scheme == scheme
    assert torch.equal(back.dequantize(), q.dequantize())
    first = block[0] if block[0] < N else 0
    assert torch.equal(q.rows(first, N).dequantize(), q.dequantize()[first:])
    with pytest.raises(SchemeError, match="it holds 8-bit floats"):
        pack(random_q(64, 128, 32, 8), "e4m3")
    for layout in LAYOUTS.values():
        with pytest.raises(SchemeError, match="cannot hold"):
            pack(q, layout.name)
    with pytest.raises(SchemeError, match="table='e4m3' does not exist"):
        Scheme(8, 128, "none", "e4m3")
    with pytest.raises(SchemeError, match="128 rows share a scale"):
        Scheme(4, 128, block_rows=128)
