"""The tile layout: every code where the docstring says, unpack the inverse of pack, padding zero."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowq_packers.layouts import pack, repack, unpack
from lowq_packers.layouts.tile import CHUNK, WORDS, expected_shapes
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import BITS


def weight(N, K, bits, group, zero="float", dtype=torch.float16, seed=0):
    g = torch.Generator().manual_seed(seed)
    W_q = torch.randint(0, 1 << bits, (N, K), dtype=torch.uint8, generator=g)
    G = K // group
    scales = (torch.rand(N, G, generator=g) + 0.1).to(dtype)
    zeros = None if zero == "none" else (torch.rand(N, G, generator=g) * (1 << bits)).to(dtype)
    if zero == "int":
        zeros = zeros.floor()
    return QuantizedTensor(W_q, scales, zeros, bits, group, zero)


def same(a: QuantizedTensor, b: QuantizedTensor):
    assert torch.equal(a.W_q, b.W_q)
    assert torch.equal(a.scales, b.scales)
    assert (a.zeros is None) == (b.zeros is None)
    assert a.zeros is None or torch.equal(a.zeros, b.zeros)
    assert a.scheme == b.scheme


@pytest.mark.parametrize("bits", BITS)
def test_each_code_lies_where_the_docstring_says(bits):
    """The docstring's formulas, one code at a time, against the vectorised pack."""
    N, K = 70, 2 * CHUNK[bits] - 16
    q = weight(N, K, bits, K)
    p = pack(q, "tile")
    T, C, W = 128 // 16, 2, WORDS[bits]
    words = p.words.reshape(T, C, W).numpy().view("uint32")
    g = torch.Generator().manual_seed(1)
    for n, k in zip(
        torch.randint(0, N, (400,), generator=g).tolist(), torch.randint(0, K, (400,), generator=g).tolist(), strict=True
    ):
        t, row, c, kk = n // 16, n % 16, k // CHUNK[bits], k % CHUNK[bits]
        f, kf = kk // 16, kk % 16
        lane, j, e = 4 * (row % 8) + kf % 8 // 2, row // 8 + 2 * (kf // 8), kf % 2
        chunk = words[t, c]
        if bits == 8:
            code = int(chunk[(f // 2) * 128 + lane * 4 + j]) >> (8 * (2 * e + f % 2)) & 255
        elif bits == 3:
            low = int(chunk[lane * 4 + j]) >> (16 * e + 2 * f) & 3
            high = int(chunk[128 + lane * 2 + j // 2]) >> (16 * e + 2 * f + j % 2) & 1
            code = low | high << 2
        else:
            code = int(chunk[lane * 4 + j]) >> (16 * e + f * bits) & ((1 << bits) - 1)
        assert code == q.W_q[n, k], (n, k)


def test_four_bit_words_by_hand():
    """Row 0 holds k % 16: lane 0's first register has k = 0, 1 of the four fragments, its third k = 8, 9."""
    W_q = (torch.arange(64) % 16).to(torch.uint8).expand(64, 64).contiguous()
    p = pack(QuantizedTensor(W_q, torch.ones(64, 1), None, 4, 64), "tile")
    assert p.words[0, 0:4].tolist() == [0x11110000, 0x11110000, -0x66667778, -0x66667778]  # 0x99998888 as int32


@pytest.mark.parametrize("zero", ["float", "int", "none"])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    ("N", "K", "group"), [(1, 16, 16), (33, 96, 48), (64, 192, 96), (65, 272, 16), (130, 100, 100), (16, 4096, 128)]
)
def test_unpack_is_the_inverse(bits, zero, N, K, group):
    q = weight(N, K, bits, group, zero, torch.bfloat16 if N % 2 else torch.float16)
    p = pack(q, "tile")
    words, meta = expected_shapes(q.scheme, N, K)
    assert tuple(p.words.shape) == words
    assert tuple(p.scales.shape) == meta
    same(unpack(p), q)
    same(unpack(repack(repack(p, "rowstream"), "tile")), q)


@given(st.sampled_from(BITS), st.integers(1, 150), st.integers(1, 40), st.integers(1, 4), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_round_trip_of_any_shape(bits, N, steps, groups, seed):
    q = weight(N, 16 * steps * groups, bits, 16 * steps, seed=seed)
    same(unpack(pack(q, "tile")), q)


@pytest.mark.parametrize("bits", BITS)
def test_padding_is_zero_and_changes_nothing(bits):
    """Padded rows and columns hold code 0 and scale 0, so a kernel that reads them adds nothing."""
    N, K = 5, CHUNK[bits] + 16
    q = QuantizedTensor(torch.full((N, K), (1 << bits) - 1, dtype=torch.uint8), torch.ones(N, 1), torch.ones(N, 1), bits, K)
    p = pack(q, "tile")
    ones = sum(bin(int(w) & 0xFFFFFFFF).count("1") for w in p.words.flatten())
    assert ones == N * K * bits
    assert p.scales.sum() == N
    assert p.zeros.sum() == N


@pytest.mark.parametrize("bits", BITS)
def test_bytes_are_the_codes_and_nothing_more(bits):
    """No padding where N is a multiple of 64 and K of the chunk: exactly bits/8 bytes a weight."""
    p = pack(weight(128, 1024, bits, 128), "tile")
    assert p.words.numel() * 4 == 128 * 1024 * bits // 8
