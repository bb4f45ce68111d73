"""A cache in few bits: decode/kv.py's definition, its errors, and the reference's attention over it."""

import pytest
import torch

from lowq_kernels.decode import kv, reference
from lowq_kernels.decode.reference import Heads, Packed, Places
from lowq_packers.errors import UsageError

CODED = kv.KINDS[1:]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # of what Triton runs: interpreted without a GPU
SIZES = [(16, "fp8"), (96, "fp8"), (128, "fp8"), (16, "4"), (32, "4"), (64, "4"), (96, "4"), (128, "4"), (256, "4")]


def heads(*shape, outliers=False):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(3))
    if outliers:
        x[..., [1, shape[-1] // 2]] = x[..., [1, shape[-1] // 2]] * 4 + 25
    return x


def error(y, x):
    return float((y.double() - x.double()).norm() / x.double().norm())


@pytest.mark.parametrize("D", [16, 80, 96, 128])
def test_the_turn_is_orthogonal_and_its_own_inverse(D):
    x = heads(5, D)
    assert torch.allclose(kv.turn(kv.turn(x)), x, atol=1e-5)
    assert torch.allclose(kv.turn(x).norm(dim=-1), x.norm(dim=-1), rtol=1e-5)
    one = torch.zeros(D)
    one[0] = kv.part_of(D) ** 0.5
    assert torch.allclose(kv.turn(one), (torch.arange(D) < kv.part_of(D)).float(), atol=1e-6)


@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize(("D", "kind"), SIZES)
def test_cached_values_are_close_to_the_originals(D, kind, outliers):
    x = heads(500, D, outliers=outliers)
    held = kv.decode(kind, *kv.encode(kind, x))
    assert error(held, x) < {"fp8": 0.026, "4": 0.105}[kind]
    wrong = kv.encode(kind, x)
    wrong[0][:, D // 4] ^= 0x40  # 4 bits: a code by 4; e4m3: 2^8 times, or a 2^8th, and where that is past 448 no number
    assert not error(kv.decode(kind, *wrong), x) < 0.15 * D**-0.25


def test_rotation_makes_4_bits_usable_with_outliers():
    x = heads(500, 128, outliers=True)
    rest = torch.ones(128, dtype=torch.bool)
    rest[[1, 64]] = False
    turned = kv.decode("4", *kv.encode("4", x))
    straight = kv.turn(kv.decode("4", *kv.encode("4", kv.turn(x))))  # a turn turned again
    assert error(turned[:, rest], x[:, rest]) < 0.7 * error(straight[:, rest], x[:, rest])


def test_e4m3_by_hand():
    x = torch.tensor([[448.0, 1.0, -15.0, 0.0], [450.0, -450.0, 0, 225], [0.0] * 4, [3e38, 0, 0, -3e38], [1e-39, 0, 0, 0]])
    codes, scales = kv.encode("fp8", kv.turn(x))
    assert codes[0].tolist() == [0x7E, 0x38, 0xD7, 0]  # 448, 1, -15, 0 are of e4m3's own
    assert scales.tolist() == [24 * 8, 24 * 8 + 7, 0, 255, 0]  # 1; 15 / 8, of which 450 is 240; the smallest; the largest
    held = kv.turn(kv.decode("fp8", codes, scales))
    assert torch.equal(held[:2], x[:2])
    assert held[3].tolist() == [448 * 240.0, 0, 0, -448 * 240.0]
    assert not held[2].any()


def test_bytes_are_those_that_are_held():
    for D in (64, 128):
        for kind in kv.KINDS:
            made = kv.zeros(kind, (3, 2, 7, D), torch.bfloat16, torch.device("cpu"))
            held = [made] if kind == kv.PLAIN else [made.codes, made.scales]
            assert sum(t.nbytes for t in held) == 3 * 2 * 7 * kv.slot_bytes(kind, D, torch.bfloat16)
            assert made.shape == (3, 2, 7, D)
            assert kv.kind_of(made) == kind
    with pytest.raises(UsageError, match="--kv 8 must be one of 16, fp8, 4"):
        kv.check("8")


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("kind", CODED)
def test_attention_is_over_the_cached_tokens_and_the_newest(kind, window):
    """Steps, prompts and packed pieces over contiguous and paged caches, against attention over what `decode` gives."""
    B, S, T, D, page = 2, 48, 37, 32, 16
    h = Heads(4, 2, D, D**-0.5, window)
    qkv, (cos, sin) = heads(B, S, 8 * D), torch.rand(2, S, D, generator=torch.Generator().manual_seed(0))
    _, k, v = reference.split_heads(qkv, cos, sin, h)
    plain = [kv.decode(kind, *kv.encode(kind, t.transpose(1, 2))) for t in (k, v)]
    stale = [c.clone() for c in plain]  # in "16 bits" what is written anew is the same again only where it is not rounded
    whole = torch.empty(B, S, 4 * D)
    for t in range(S):
        q = reference.split_heads(qkv[:, t], cos[t], sin[t], h)[0]
        first = max(0, t + 1 - window) if window else 0
        keys, values = (c[:, :, first : t + 1].repeat_interleave(2, 1) for c in stale)
        p = (torch.einsum("bhd,bhsd->bhs", q, keys) * h.scale).softmax(-1)
        whole[:, t] = torch.einsum("bhs,bhsd->bhd", p, values).flatten(1)
    own = [kv.zeros(kind, (B, 2, S, D), torch.float32, qkv.device) for _ in range(2)]
    assert error(reference.attend_prompt(qkv[:, :T], *own, 0, cos, sin, h), whole[:, :T]) < 1e-5
    pool = [kv.zeros(kind, (2 * 3 + 1, 2, page, D), torch.float32, qkv.device) for _ in range(2)]
    table = torch.tensor([[1, 5, 3], [4, 2, 6]], dtype=torch.int32)
    rows, pos = torch.tensor([0] * T + [1] * T), torch.arange(T).repeat(2)
    p = Packed(table, rows.int(), pos.int(), torch.tensor([[0, T], [T, 2 * T]]))
    y = reference.attend_packed(qkv[:, :T].flatten(0, 1), *pool, p, cos, sin, h)
    assert error(y, whole[:, :T].flatten(0, 1)) < 1e-5
    for t in range(T, S):
        at = torch.full((B,), t, dtype=torch.int32)
        for caches, paged in ((own, None), (pool, table)):
            assert error(reference.attend(qkv[:, t], *caches, Places(at, cos, sin, paged), h), whole[:, t]) < 1e-5


ATTENTION = {"llama": (8, 2, 32, 32, 0, False, [0, 40]), "phi3, windows, norms": (3, 1, 96, 72, 20, True, [41, 18])}


def attention_case(name, kind, page, dtype=torch.float16):
    """(qkv, two equal pairs of caches of any contents, pos, tables, heads, table) for a step of two sequences."""
    HQ, HKV, D, R, window, norm, places = ATTENTION[name]
    norms = [heads(D).to(DEVICE, dtype) + 1 if norm else None for _ in range(2)]
    h = Heads(HQ, HKV, D, D**-0.5, window, 1e-6, *norms)
    blocks = [(7, HKV, 16, D), torch.randperm(6, generator=torch.Generator().manual_seed(0)).reshape(2, 3).int() + 1]
    shape, table = blocks if page else ((2, HKV, 48, D), None)
    pairs = [[kv.zeros(kind, shape, dtype, torch.device(DEVICE)) for _ in range(2)] for _ in range(2)]
    for pair in pairs:
        for i, cache in enumerate(pair):
            cache[:] = (heads(*shape, outliers=True) * (1 - 0.9 * i)).to(DEVICE)
    cos, sin = torch.rand(2, 48, R, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    qkv, pos = heads(2, (HQ + 2 * HKV) * D).to(DEVICE, dtype), torch.tensor(places, dtype=torch.int32, device=DEVICE)
    return qkv, *pairs, pos, (cos, sin), h, None if table is None else table.to(DEVICE)


@pytest.mark.half_of("name", "kind", "page")
@pytest.mark.parametrize("page", [False, True])
@pytest.mark.parametrize("kind", CODED)
@pytest.mark.parametrize("name", ATTENTION)
def test_tritons_step_reads_and_writes_codes(name, kind, page):
    triton, cut = pytest.importorskip("lowq_kernels.decode.attend_triton"), {"SPLITS": 4 if page else 2, "LEAST": 0}
    qkv, ours, theirs, pos, tables, h, table = attention_case(name, kind, page)
    expected = reference.attend(qkv, *theirs, Places(pos, *tables, table), h)
    assert error(triton.attend(qkv, *ours, Places(pos, *tables, table), h, config=cut), expected) < 2e-3
    for a, b in zip(ours, theirs, strict=True):
        assert error(a[:], b[:]) < 1e-3  # sums of q/k norms may round one value otherwise
    ours[0].codes[:] ^= 0x11
    assert not error(triton.attend(qkv, *ours, Places(pos, *tables, table), h, config=cut), expected) < 2e-2


@pytest.mark.half_of("name", "kind", "page")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
@pytest.mark.parametrize("page", [False, True])
@pytest.mark.parametrize("kind", CODED)
@pytest.mark.parametrize("name", ATTENTION)
def test_tritons_prompts_read_and_write_codes(name, kind, page, dtype):
    """Two sequences of 19 tokens, the second pass from a place inside a tile on."""
    prompt = pytest.importorskip("lowq_kernels.decode.prompt")
    config = {"BLOCK_M": 32, "BLOCK_N": 16, "num_warps": 4, "num_stages": 2}
    _, ours, theirs, _, tables, h, table = attention_case(name, kind, page, dtype)
    for start, new in ((0, 19), (19, 5)):
        qkv = heads(2, new, (h.HQ + 2 * h.HKV) * h.D).to(DEVICE, dtype)
        if table is None:
            y = prompt.attend_prompt(qkv, *ours, start, *tables, h, config)
            expected = reference.attend_prompt(qkv, *theirs, start, *tables, h)
        else:
            rows, pos = torch.tensor([0, 1]).repeat_interleave(new).int(), torch.arange(start, start + new).repeat(2).int()
            spans = torch.tensor([[0, new], [new, 2 * new]], dtype=torch.int32)
            p = Packed(table, *(t.to(DEVICE) for t in (rows, pos, spans)))
            y = prompt.attend_packed(qkv.flatten(0, 1), *ours, p, *tables, h, config)
            expected = reference.attend_packed(qkv.flatten(0, 1), *theirs, p, *tables, h)
        assert error(y, expected) < 2e-3
    for a, b in zip(ours, theirs, strict=True):
        assert error(a[:], b[:]) < 1e-3
