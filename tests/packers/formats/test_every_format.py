"""What is written reads back bit for bit, for every format, width and kind of zero that it holds."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowq_cli.interop.exported import same_bytes
from lowq_cli.interop.exporter import encoded
from lowq_packers import formats
from lowq_packers.layouts import pack
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import BITS, Scheme

sys.path.insert(0, str(Path(__file__).parent))
from format_support import HELD, HOLDS_KINDS, KINDS, NAME, OF_TABLES, WRITERS, assert_same, random_q, read, scheme_of, written


@settings(max_examples=300, deadline=None)
@given(
    fmt=st.sampled_from(WRITERS),
    bits=st.sampled_from(BITS),
    zero=st.sampled_from(["float", "int", "none", *OF_TABLES]),
    N=st.integers(1, 9).map(lambda n: 8 * n) | st.integers(1, 70),
    group=st.sampled_from([16, 32, 48, 64, 128]),
    groups=st.integers(1, 3),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    seed=st.integers(0, 9),
)
def test_written_tensors_read_back_bit_for_bit_or_are_refused(fmt, bits, zero, N, group, groups, dtype, seed):
    q = random_q(4 if zero in OF_TABLES else bits, group, zero, N, 2 * group * groups, seed, dtype)
    if reason := fmt.why_not(q.scheme, *q.shape):
        assert "nearest" in reason or "K that is a multiple" in reason
        return
    tensors, config = written(fmt, q)
    (back,) = read(tensors, config).values()
    if isinstance(back, torch.Tensor):
        pytest.fail("a scheme of ours came back dense")
    assert_same(back, q, kinds=fmt.name in HOLDS_KINDS and not (bits == 1 and zero == "none"))
    assert torch.equal(back.dequantize(), q.dequantize())


@pytest.mark.parametrize("name", HELD)
def test_each_format_holds_the_schemes_of_its_specification_and_refuses_the_rest(name):
    fmt = formats.get(name)
    for kind in KINDS:
        reason = fmt.why_not(scheme_of(*kind, 64), 64, 128)
        assert (reason is None) == (kind in HELD[name]), (kind, reason)


@pytest.mark.parametrize("fmt", WRITERS, ids=lambda f: f.name)
def test_a_flipped_code_is_seen(fmt):
    bits, zero = HELD[fmt.name][0]
    q = random_q(bits, 64, zero, 64, 128)
    tensors, config = written(fmt, q)
    W_q = q.W_q.clone()
    W_q[5, 77] ^= 1
    other, _ = written(fmt, QuantizedTensor.of(q.scheme, W_q, q.scales, q.zeros, q.table))
    changed = [
        n for n in tensors if not torch.equal(tensors[n].flatten().view(torch.uint8), other[n].flatten().view(torch.uint8))
    ]
    assert len(changed) == 1
    (back,) = read(other, config).values()
    assert torch.equal(back.W_q, W_q)


@pytest.mark.parametrize("fmt", [f for f in WRITERS if f.write_words], ids=lambda f: f.name)
def test_words_are_exported_as_codes_are_at_any_number_of_rows(fmt):
    """Of more than 256 rows an export takes words as they are and compares the first and the last with its own encoding."""
    for kind in HELD[fmt.name]:
        for N in (64, 192, 256, 320, 384, 448, 704):
            q = random_q(*kind[:1], 64, kind[1], N, 128)
            _, config = written(fmt, q)
            for name, t in encoded(fmt, NAME, pack(q), {**config, "round": True}).items():
                assert same_bytes(t, fmt.write(NAME, q, {**config, "round": True})[name]), (kind, N, name)


def test_an_export_whose_words_are_not_its_codes_is_seen():
    fmt, q = formats.get("compressed-tensors"), random_q(4, 16, "e2m1/e4m3", 320, 128)
    bent = replace(fmt, write_words=lambda name, p, config: {n: t.flip(0) for n, t in fmt.write_words(name, p, config).items()})
    with pytest.raises(AssertionError, match="does not match its encoded codes"):
        encoded(bent, NAME, pack(q), {**written(fmt, q)[1], "round": True})


@pytest.mark.parametrize("fmt", WRITERS, ids=lambda f: f.name)
def test_per_channel(fmt):
    bits, zero = HELD[fmt.name][-1]
    if zero in OF_TABLES or fmt.why_not(Scheme(bits, 128, zero), 64, 128):
        pytest.skip(f"{fmt.name} has no such group")
    q = random_q(bits, 128, zero, 64, 128)
    tensors, config = written(fmt, q)
    (back,) = read(tensors, config).values()
    assert torch.equal(back.dequantize(), q.dequantize())


@pytest.mark.parametrize(
    "fmt", [formats.get(n) for n in ("gptq", "compressed-tensors", "humming", "mlx")], ids=lambda f: f.name
)
def test_several_schemes_in_one_checkpoint(fmt):
    """The config must say which matrix has which, whatever it takes as the default."""
    tensors, schemes, shapes, qs = {}, {}, {}, {}
    for i, (bits, group) in enumerate([(4, 64), (4, 64), (8, 32), (2, 64), (4, 128)]):
        name = f"model.layers.{i}.mlp.up_proj"
        qs[name] = random_q(bits, group, "none", 64, 128, seed=i)
        schemes[name], shapes[name] = qs[name].scheme, (64, 128)
    config = fmt.config(schemes, shapes, ["lm_head"])
    for name, q in qs.items():
        tensors |= fmt.write(name, q, config)
    for name, back in read(tensors, config).items():
        assert_same(back, qs[name], kinds=fmt.name in HOLDS_KINDS)
        assert torch.equal(back.dequantize(), qs[name].dequantize())
