"""Bit streams: words worked out by hand from the specification, the inverse, the speed that the pipeline counts on."""

import time

import pytest
import torch

from lowq_packers import bitstream
from lowq_packers.scheme import BITS

CONTAINERS = [torch.uint8, torch.int16, torch.int32, torch.int64]


def codes(N: int, K: int, bits: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(K * 10 + bits)
    return torch.randint(0, 1 << bits, (N, K), generator=g).to(torch.uint8)


@pytest.mark.parametrize(
    ("bits", "container", "word"),
    [  # formats/gemlite_hqq.md 1.1: a row with q = k mod 2^bits, its first word
        (8, torch.int32, 0x03020100),
        (4, torch.int32, 0x76543210),
        (2, torch.int32, 0xE4E4E4E4 - (1 << 32)),
        (1, torch.int32, 0xAAAAAAAA - (1 << 32)),
        (4, torch.uint8, 0x10),
        (4, torch.int16, 0x3210),
    ],
)
def test_documented_words(bits, container, word):
    row = (torch.arange(64) % (1 << bits)).to(torch.uint8)
    assert bitstream.pack(row, bits, container)[0].item() == word


def test_three_bits_are_a_dense_stream():
    # 32 codes 0..7 repeated; bit j of the stream is bit j % 3 of code j // 3: computed with Python integers
    row = [i % 8 for i in range(32)]
    stream = sum(q << (3 * i) for i, q in enumerate(row))
    words = bitstream.pack(torch.tensor(row, dtype=torch.uint8), 3)
    assert [w & 0xFFFFFFFF for w in words.tolist()] == [(stream >> (32 * i)) & 0xFFFFFFFF for i in range(3)]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("K", [1, 5, 8, 30, 31, 32, 33, 48, 96, 130])
@pytest.mark.parametrize("container", CONTAINERS, ids=lambda c: str(c).removeprefix("torch."))
def test_unpack_inverts_pack(bits, K, container):
    q = codes(7, K, bits)
    words = bitstream.pack(q, bits, container)
    assert words.shape == (7, bitstream.words_per_row(K, bits, 8 * container.itemsize))
    assert torch.equal(bitstream.unpack(words, bits, K), q)


@pytest.mark.parametrize("bits", BITS)
def test_three_dimensions_pack_like_their_rows(bits):
    q = codes(6, 40, bits).reshape(2, 3, 40)
    assert torch.equal(bitstream.pack(q, bits).reshape(6, -1), bitstream.pack(q.reshape(6, 40), bits))
    assert torch.equal(bitstream.unpack(bitstream.pack(q, bits), bits, 40), q)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("K", [32, 33])
def test_rows_that_begin_anywhere_in_memory(bits, K):
    whole = codes(4, K + 3, bits)
    for q in (whole[1:], whole[:1, 3:]):
        assert torch.equal(bitstream.pack(q, bits), bitstream.pack(q.clone(memory_format=torch.contiguous_format), bits))


@pytest.mark.parametrize("bits", BITS)
def test_padding_is_zero_bits(bits):
    words = bitstream.pack(torch.full((1, 5), (1 << bits) - 1, dtype=torch.uint8), bits)
    stream = sum((w & 0xFFFFFFFF) << (32 * i) for i, w in enumerate(words[0].tolist()))
    assert stream == (1 << (5 * bits)) - 1


@pytest.mark.slow
@pytest.mark.parametrize("bits", BITS)
def test_a_4096_square_weight_packs_in_a_tenth_of_a_second(bits):
    q = codes(4096, 4096, bits)
    seconds = []
    for _ in range(5):  # processor time: 0.2 s of it are 0.1 s on two free cores
        start = time.process_time()
        bitstream.pack(q, bits)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 2 * 0.1
