"""Helpers of the tests of formats: checkpoints in memory, random matrices, and the schemes that each format holds."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from gemlite_writer import GEMLITE

from lowq_packers import formats
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import BITS, ZERO_KINDS, Scheme

NAME = "model.layers.3.mlp.up_proj"
ST = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint32: "U32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int16: "I16",
}
OF_TABLES = {
    "e2m1/e4m3": 16,
    "e2m1/e8m0": 32,
    "nf4": 32,
    "iq4_nl": 32,
    "fitted": 32,
    "fitted/e4m3": 16,
}  # kinds of schemes with a table that formats hold, and the groups of tests
KINDS = [(b, z) for b in BITS for z in ("float", "int", "none")] + [(4, kind) for kind in OF_TABLES]
WRITERS = [*(f for f in formats.FORMATS.values() if f.write), GEMLITE]


class Header:
    def __init__(self, t):
        self.shape, self.dtype = tuple(t.shape), ST[t.dtype]


def headers(tensors):
    return {name: Header(t) for name, t in tensors.items()}


def fetcher(tensors):
    """U32 tensors arrive as int32, as the file reader gives them."""

    def fetch(name, index=None, /):
        t = tensors[name].view(torch.int32) if tensors[name].dtype == torch.uint32 else tensors[name]
        return t if index is None else t[index]

    return fetch


def read(tensors, config):
    """The matrices of a checkpoint, decoded, by name."""
    fmt = formats.detect(config, headers(tensors))
    result = fmt.matrices(config, headers(tensors), fetcher(tensors))
    for m in result:
        q = m.read(fetcher(tensors))
        assert (q.scheme if isinstance(q, QuantizedTensor) else None) == m.scheme, "what was promised is what is read"
        assert tuple(q.shape) == m.shape
        assert set(m.parts) <= tensors.keys()
    return {m.name: m.read(fetcher(tensors)) for m in result}


def scheme_of(bits, kind, group):
    """The scheme of a kind; of OF_TABLES with its own group."""
    return Scheme.of(bits, OF_TABLES.get(kind, group), kind)


def random_q(bits, group, zero, N, K, seed=0, dtype=torch.float16):
    """Random codes, all of them drawn; scales of three digits and zeros of five, products exact in bf16 too.

    zero: or a kind of OF_TABLES, which has groups of its own. A factor is the reciprocal of a number with many digits.
    """
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (N, K), generator=g, dtype=torch.uint8)
    if zero not in ZERO_KINDS:
        s = scheme_of(bits, zero, group)
        table = torch.randn(1, s.levels, generator=g) if s.table == "fitted" else None
        if s.scale == "float":
            return QuantizedTensor.of(s, codes, torch.rand(N, s.groups(K), generator=g) + 0.001, None, table)
        scales = torch.randint(1 if s.scale == "e4m3" else 100, 127, (N, s.groups(K)), generator=g, dtype=torch.uint8)
        factor = 1 / (torch.rand(1, 1, generator=g) * 1000 + 1) if s.table_width else None
        return QuantizedTensor.of(s, codes, scales, None, factor if table is None else table)
    scales = (torch.randint(1, 8, (N, K // group), generator=g) / 1024).to(dtype)
    zeros = None
    if zero != "none":
        levels = torch.randint(0, min(1 << bits, 15), (N, K // group), generator=g)
        zeros = (levels + (0.5 if zero == "float" else 0)).to(dtype)
    return QuantizedTensor(codes, scales, zeros, bits, group, zero)


def assert_same(a, b, kinds=True):
    assert torch.equal(a.W_q, b.W_q)
    assert torch.equal(a.scales, b.scales)
    assert a.scales.dtype == b.scales.dtype
    assert (a.bits, a.group_size) == (b.bits, b.group_size)
    assert a.scheme.table == b.scheme.table
    assert (a.table is None) == (b.table is None)
    if a.table is not None:
        assert torch.equal(a.table, b.table)
    if kinds:
        assert a.zero == b.zero
        assert (a.zeros is None) == (b.zeros is None)
    if a.zeros is not None or b.zeros is not None:
        zeros = [torch.full_like(x.scales, x.scheme.mid) if x.zeros is None else x.zeros for x in (a, b)]
        assert torch.equal(zeros[0].float(), zeros[1].float())


def written(fmt, q, **more):
    config = {**fmt.config({NAME: q.scheme}, {NAME: q.shape}, ["lm_head"]), **more}
    return fmt.write(NAME, q, config), config


HOLDS_KINDS = ("gptq", "awq", "compressed-tensors", "humming", "modelopt", "bitsandbytes")  # the others have one kind of zero
HELD = {
    "gptq": [(b, z) for b in (8, 4, 3, 2) for z in ("int", "none")],
    "awq": [(4, "int")],
    "compressed-tensors": [(b, "int") for b in BITS]
    + [(b, "none") for b in (8, 4, 3, 2)]
    + [(4, "e2m1/e4m3"), (4, "e2m1/e8m0")],
    "modelopt": [(4, "e2m1/e4m3")],
    "humming": [(b, z) for b in BITS for z in ("float", "int", "none")],
    "mlx": [(b, z) for b in (8, 4, 3, 2) for z in ("float", "int", "none")],
    "hqq": [(b, z) for b in BITS for z in ("float", "int", "none")],
    "gemlite": [(b, z) for b in (8, 4, 2, 1) for z in ("float", "int", "none")],
}
for fmt in WRITERS:  # of a new format, what it says itself
    HELD.setdefault(fmt.name, [kind for kind in KINDS if fmt.why_not(scheme_of(*kind, 64), 64, 128) is None])
    assert HELD[fmt.name], f"{fmt.name} holds none of KINDS, so no test would write it: add its kind and group to OF_TABLES"


def dense(codes, bits):
    """A little-endian stream of codes, by whole numbers of any size: slow, and nothing shared with bitstream."""
    rows = []
    for row in codes.tolist():
        stream = sum(q << (bits * k) for k, q in enumerate(row))
        rows.append([(stream >> (32 * i)) & 0xFFFFFFFF for i in range(-(-len(row) * bits // 32))])
    return torch.tensor(rows).to(torch.int32)
