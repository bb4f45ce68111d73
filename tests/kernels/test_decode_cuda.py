"""The CUDA kernels of decoding: attend.cu against its definition, experts.cu against fp32 truth.

On a GPU they run there; elsewhere emulated on the CPU thread by thread, every launch twice, with the threads in two orders.
"""

import dataclasses
from unittest import mock

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import emulation

emulation.require("cuda/attend", compiler=not torch.cuda.is_available())
from machine_code import used

import simt
from emulation import error
from lowq_kernels import gpu
from lowq_kernels.decode import activation, attend_cuda, attend_prepared, kv, prepare, reference
from lowq_kernels.decode import experts as mixture
from lowq_kernels.decode.attend import AttendCall
from lowq_kernels.decode.kv_triton import NUMBERS
from lowq_kernels.decode.mixture import ExpertsCall
from lowq_kernels.decode.norms import Norm
from lowq_kernels.decode.reference import Places
from lowq_kernels.dispatch import registry
from lowq_kernels.dispatch.registry import find, named, select
from lowq_kernels.modules.stack import Shared

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
F16, BF16 = torch.float16, torch.bfloat16
TOLERANCE = {F16: 2e-3, BF16: 1.2e-2}
SMS = 8  # as the emulated GPU has
# HQ, HKV, D, R, window, q/k norm (0 none, 1 of the dtype, 2 fp32), positions, dtype, blocks of a cluster, slots
HEADS = {
    "8b": (4, 1, 128, 128, 0, 0, [0, 600], F16, 8, 700),
    "norm, windows, part turned": (4, 2, 128, 64, 40, 2, [39, 40, 95], BF16, 4, 100),
    "eight queries, bf16 norm, round twice": (8, 1, 64, 64, 0, 1, [1100], BF16, 8, 1200),
    "long, blocks meet in memory": (3, 1, 64, 64, 0, 0, [300, 15], F16, 8, 4096),
    "long, more heads than SMs by half": (8, 4, 128, 128, 0, 0, [4095, 0], BF16, 8, 4096),
    "long, a window": (2, 1, 128, 128, 50, 0, [4000], F16, 8, 4096),
    "sinks": (6, 2, 64, 64, 0, 0, [130, 5], F16, 4, 200),
    "long, with sinks": (2, 1, 128, 128, 0, 0, [300], BF16, 8, 4096),
    "no cluster": (3, 1, 64, 64, 0, 0, [16, 15], F16, 1, 100),
    "many heads, some blocks each": (8, 4, 128, 128, 0, 1, [0, 1100, 130], BF16, 8, 4096),
    "many heads, long texts cut": (18, 9, 64, 64, 0, 0, [2100, 15, 0, 64], F16, 8, 4096),
    "many heads, windows, sinks": (8, 4, 64, 64, 40, 2, [39, 40, 395, 5, 100, 77, 63, 64, 65], F16, 8, 400),
    "twelve queries": (24, 2, 128, 128, 0, 0, [0, 600], F16, 8, 700),
    "nine queries, a window, sinks": (18, 2, 64, 64, 40, 2, [39, 95], BF16, 4, 100),
    "sixteen queries, long": (16, 1, 64, 64, 0, 0, [300, 15], F16, 8, 4096),
    "256 dims": (8, 1, 256, 256, 0, 2, [0, 600], BF16, 8, 700),
    "256 dims, part turned, sinks": (12, 2, 256, 64, 40, 1, [39, 130], F16, 8, 200),
    "256 dims, long": (3, 1, 256, 128, 0, 0, [700, 15], BF16, 8, 4096),
    "512 dims": (8, 1, 512, 512, 0, 1, [0, 130], F16, 8, 200),
    "512 dims, long, keys of another layer": (3, 1, 512, 512, 0, 0, [700, 16], BF16, 8, 4096),
    "256 dims, keys of another layer": (4, 2, 256, 256, 40, 0, [0, 130], F16, 8, 200),
}
PAGES = {
    "8b": 64, "norm, windows, part turned": 16, "long, more heads than SMs by half": 64, "long, a window": 32,
    "many heads, some blocks each": 64, "many heads, long texts cut": 64, "many heads, windows, sinks": 16,
    "twelve queries": 32, "256 dims, part turned, sinks": 16, "512 dims, long, keys of another layer": 64,
}  # fmt: skip
# rows of one sequence: HQ, HKV, D, R, window, q/k norm, the first position, rows, dtype, blocks of a cluster, slots, of a block
DRAFTED = {
    "8b": (8, 2, 128, 128, 0, 0, 600, 8, F16, 8, 700, 700),
    "8b, at the start": (4, 1, 128, 128, 0, 0, 0, 2, BF16, 8, 64, 64),
    "16 rows over two tiles": (4, 1, 128, 128, 0, 0, 41, 16, F16, 4, 100, 100),
    "eight queries, norms, part turned": (8, 1, 128, 64, 0, 1, 30, 3, BF16, 4, 100, 100),
    "two queries, a window, paged": (4, 2, 64, 64, 40, 2, 70, 8, F16, 8, 128, 16),
    "a window shorter than the rows": (2, 1, 64, 64, 5, 0, 27, 16, F16, 4, 64, 64),
    "seven queries, sinks": (7, 1, 64, 64, 0, 0, 15, 5, F16, 4, 64, 64),
    "one query, sinks, long": (2, 2, 64, 64, 0, 0, 300, 16, BF16, 8, 4096, 4096),
    "long, blocks meet in memory, paged": (4, 1, 128, 128, 0, 0, 1500, 4, F16, 8, 4096, 64),
    "long, a window": (4, 1, 128, 128, 50, 1, 4000, 4, BF16, 8, 4096, 4096),
    "no cluster": (3, 1, 64, 64, 0, 0, 62, 6, F16, 1, 100, 100),
    "wide, a window": (4, 1, 256, 256, 40, 1, 41, 16, F16, 8, 100, 100),
    "wide, gates, paged": (12, 2, 256, 64, 0, 2, 60, 4, BF16, 8, 128, 16),
    "wide, gates, blocks meet in memory": (8, 1, 256, 64, 0, 1, 700, 3, F16, 8, 4096, 4096),
}
# HQ, HKV, D, R, window, q/k norm, positions, dtype, slots, slots of a block (0: a cache each), kind
CODED = {
    f"{name}, {kind}": (*case, kind)
    for kind in kv.KINDS[1:]
    for name, case in {
        "8b": (8, 2, 128, 128, 0, 0, [0, 600], F16, 704, 0),
        "bf16, paged": (8, 2, 128, 128, 0, 0, [15, 130, 64], BF16, 192, 64),
        "norms, part turned": (4, 2, 128, 64, 0, 1, [37, 96], BF16, 128, 32),
        "64 dims, a window, sinks": (7, 1, 64, 64, 50, 2, [95, 333], BF16, 384, 16),
        "64 dims, one query": (2, 2, 64, 64, 0, 0, [170], F16, 176, 0),
        "a head a block": (18, 9, 64, 64, 0, 0, [40], F16, 48, 0),
        "long": (4, 1, 128, 128, 0, 0, [3000], F16, 4096, 0),
        "long, paged, a window": (8, 1, 64, 64, 700, 0, [2100], BF16, 4096, 32),
        "many heads": (16, 8, 128, 128, 0, 0, [300, 15, 64, 900], F16, 2112, 64),
        "twelve queries": (12, 1, 128, 128, 0, 0, [37, 300], F16, 320, 0),
        "nine queries, keys of another layer": (9, 1, 64, 64, 0, 0, [37, 96], BF16, 128, 32),
    }.items()
}
# as HEADS, and of `Prepared`: gated, v_norm, v_is_k, writes
PREPARED = {
    "gates": ((12, 2, 256, 64, 0, 1, [39, 130], F16, 8, 200), (True, False, False, True)),
    "gates, long": ((6, 1, 256, 256, 0, 0, [700, 15], BF16, 8, 4096), (True, False, False, True)),
    "normed values": ((4, 2, 256, 256, 40, 2, [0, 95], BF16, 8, 200), (False, True, False, True)),
    "keys as values": ((8, 1, 512, 128, 0, 1, [0, 130], F16, 8, 200), (False, True, True, True)),
    "queries alone": ((8, 1, 512, 128, 0, 1, [16, 130], F16, 8, 200), (False, False, False, False)),
}
# bits, group (0: a row), zero, act, dtype, H, I
LAYERS = {
    "4": (4, 128, "float", "silu", F16, 512, 128),
    "4, rows of two steps a warp, within groups": (4, 128, "float", "silu", F16, 2304, 64),
    "4 small groups": (4, 32, "int", "gelu_tanh", BF16, 288, 48),
    "8": (8, 64, "float", "silu", F16, 192, 64),
    "3": (3, 48, "float", "silu", F16, 336, 48),
    "2": (2, 0, "none", "silu", F16, 640, 32),
    "1": (1, 128, "none", "silu", F16, 768, 256),
    "gpt-oss": (4, 32, "e2m1/e8m0", "clamped_swiglu", BF16, 288, 96),
    "mxfp4": (4, 32, "e2m1/e8m0", "clamped_swiglu", F16, 320, 32),
    "nvfp4": (4, 16, "e2m1/e4m3", "silu", F16, 288, 48),
    "nf4": (4, 64, "nf4", "gelu_tanh", F16, 192, 64),
    "3 bits, tables": (3, 48, "fitted", "silu", BF16, 288, 48),
    "2 bits, tables": (2, 32, "fitted", "clamped_swiglu", F16, 288, 32),
    "without a gate": (4, 64, "float", "ungated relu2", BF16, 704, 176),
    "without a gate, gelu, tables": (3, 48, "fitted", "ungated gelu", F16, 288, 96),
    "without a gate, 8 bits": (8, 32, "none", "ungated silu", F16, 96, 48),
    "without a gate, rows of two steps a warp": (4, 64, "int", "ungated relu", F16, 4224, 32),
    "without a gate, 2 bits": (2, 64, "none", "ungated gelu_tanh", BF16, 576, 128),
}

# bits, group, zero, act, dtype, H, I, experts a token, tokens; width of the shared expert, whether it has a gate
SHARED = {
    "qwen3.5's": (4, 128, "float", "silu", F16, 512, 128, 4, 1, 128, True),
    "without a gate, wider, two tokens": (4, 64, "float", "silu", BF16, 1216, 192, 3, 2, 320, False),
    "narrower": (4, 32, "int", "gelu_tanh", F16, 288, 96, 2, 3, 32, True),
    "many warps": (4, 32, "none", "silu", F16, 64, 1088, 6, 1, 1600, True),
    "8 bits": (8, 64, "none", "silu", BF16, 192, 128, 4, 1, 192, True),
    "3 bits": (3, 48, "float", "silu", F16, 336, 96, 4, 1, 48, False),
    "nemotron's, two tokens": (4, 64, "float", "ungated relu2", F16, 704, 192, 3, 2, 384, False),
    "no gate of its own but an opening": (8, 32, "int", "ungated silu", BF16, 128, 96, 3, 1, 64, True),
}


@pytest.fixture(autouse=True, scope="module")
def a_gpu(request):
    """Where there is none, launchers see a GPU of capability 9.0 behind CPU tensors; all instances are built at once."""
    if DEVICE == "cuda":
        yield
        return
    modules = (attend_cuda, mixture)
    patches = [mock.patch.object(m, "Kernel", simt.Kernel) for m in modules]
    here = dataclasses.replace(gpu.HOPPER, sms=SMS, clusters=())
    patches.append(mock.patch.object(gpu, "capability", return_value=here.capability))
    patches += [mock.patch.object(gpu, name, return_value=here) for name in ("here", "of")]
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):  # round a * b + c once, as a GPU does
        patches.append(mock.patch.object(simt, "FLAGS", (*simt.FLAGS, "-mfma", "-fexpensive-optimizations")))
    for p in patches:
        p.start()
    for m in modules:
        m._kernel.cache_clear()
    with emulation.built_at_once():
        for name in HEADS:
            attend(name)
        for name in PAGES:
            attend(name, PAGES[name])
        for name in PREPARED:
            in_one(name)
        for name in DRAFTED:
            drafted(name)
        for name in CODED.keys() & emulation.selected(request, "name"):
            coded(name)
        for name in LAYERS:
            layer(name)
        for name in SHARED:
            shared(name)
    yield
    for p in patches:
        p.stop()
    for m in modules:
        m._kernel.cache_clear()


def twice(made, tolerance):
    """`made` gives (y, truth): near each other, and y the same with the threads in either order."""
    y, truth = emulation.twice(made)
    assert error(y, truth) < tolerance


TRUTHS = {}


def once(case, truth):
    """The truth of a case, which its launches share; None while launches are only recorded."""
    if case not in TRUTHS and not simt.Kernel.recording:
        TRUTHS[case] = truth()
    return TRUTHS.get(case)


def on_device(made):
    """`made` with torch's new tensors on DEVICE."""

    def call(*args):
        with torch.device(DEVICE):
            return made(*args)

    return call


@on_device
def attend(name, page=0, left=float("nan")):
    """(y, caches) by the kernel, by the reference, and the caches before; by the kernel paged where `page` is given. left: what
    other texts left in slots that no text has reached yet."""
    HQ, HKV, D, R, window, norm, places, dtype, cluster, S = HEADS[name]
    torch.manual_seed(3)
    weights = [torch.randn(D).to(torch.float32 if norm == 2 else dtype) if norm else None for _ in range(2)]
    sinks = torch.randn(HQ) + 4 if "sinks" in name else None
    writes = reference.SHARED not in name
    h = reference.Heads(HQ, HKV, D, D**-0.5, window, 1e-6, *weights, sinks, writes=writes)
    angles = torch.rand(S, R) * 6
    tables = angles.cos().to(dtype), angles.sin().to(dtype)
    caches = [torch.randn(len(places), HKV, S, D).to(dtype) for _ in range(2)]
    for b, p in enumerate(places):  # what no text has reached yet must not be read
        for cache in caches:
            cache[b, :, p + (not writes) :] = emulation.left_over(left, S - p - (not writes), cache.device)
    qkv, pos = torch.randn(len(places), (HQ + 2 * HKV * writes) * D).to(dtype), torch.tensor(places, dtype=torch.int32)
    order = pos.argsort(descending=True).to(torch.int32)
    ours, theirs = [c.clone() for c in caches], [c.nan_to_num() for c in caches]
    with mock.patch.object(attend_cuda, "CLUSTER", cluster):
        if page:
            width = -(-S // page)
            table = (torch.randperm(len(places) * width) + 1).reshape(len(places), width).to(torch.int32)
            pools = [torch.full((len(places) * width + 1, HKV, page, D), left, dtype=dtype) for _ in range(2)]
            for pool, cache in zip(pools, ours, strict=True):
                whole = torch.nn.functional.pad(cache, (0, 0, 0, width * page - S), value=left)
                pool[table.flatten()] = whole.reshape(len(places), HKV, width, page, D).transpose(1, 2).flatten(0, 1)
            y = attend_cuda.attend(qkv, *pools, Places(pos, *tables, table, order), h)
            ours = [pool[table.long()].transpose(1, 2).flatten(2, 3)[:, :, :S] for pool in pools]
        else:
            y = attend_cuda.attend(qkv, *ours, Places(pos, *tables, None, order), h)
    with sdpa_kernel(SDPBackend.MATH):  # compute-sanitizer finds hazards in cuDNN's
        wanted = reference.attend(qkv, *theirs, Places(pos, *tables), h)
    return y, ours, wanted, theirs, caches, places


@pytest.mark.parametrize(("name", "page"), [*((n, 0) for n in HEADS), *PAGES.items()])
def test_attend(name, page):
    results = []
    for simt.Kernel.order, left in zip((1, -1), emulation.LEFT, strict=True):
        y, ours, wanted, theirs, before, places = attend(name, page, left)
        assert error(y, wanted) < TOLERANCE[HEADS[name][7]]
        for b, p in enumerate(places):
            for cache, truth, old in zip(ours, theirs, before, strict=True):
                assert error(cache[b, :, p], truth[b, :, p]) < TOLERANCE[HEADS[name][7]]
                assert torch.equal(cache[b, :, :p], old[b, :, :p])
                assert torch.equal(cache[b, :, p + 1 :].nan_to_num(7), old[b, :, p + 1 :].nan_to_num(7))
        results.append(y)
    assert torch.equal(*results)


@on_device
def in_one(name):
    """(y, truth) of rows that `prepare` would change, and (cache, truth) of what is written, by one kernel."""
    (HQ, HKV, D, R, window, norm, places, dtype, _, S), (gated, v_normed, v_is_k, writes) = PREPARED[name]
    torch.manual_seed(3)
    weights = [torch.rand(D).to(torch.float32 if norm == 2 else dtype) + 0.5 if norm else None for _ in range(2)]
    q_norm, k_norm = (None if w is None else Norm(w, 1e-6) for w in weights)
    v_norm = Norm(None, 1e-6) if v_normed else None
    p = prepare.Prepared(HQ, HKV, D, gated=gated, v_is_k=v_is_k, writes=writes, q_norm=q_norm, k_norm=k_norm, v_norm=v_norm)
    h = reference.Heads(HQ, HKV, D, D**-0.5, window, writes=writes)
    angles, pos = torch.rand(S, R // 2).repeat(1, 2) * 6, torch.tensor(places, dtype=torch.int32)
    tables = angles.cos().to(dtype), angles.sin().to(dtype)
    ours = [torch.randn(len(places), HKV, S, D).to(dtype) for _ in range(2)]
    theirs = [c.clone() for c in ours]
    for b, place in enumerate(places):
        for cache in ours:
            cache[b, :, place + (not writes) :] = float("nan")
    heads = HQ * (2 if gated else 1) + (HKV * (1 if v_is_k else 2) if writes else 0)
    qkv = torch.randn(len(places), heads * D).to(dtype)
    made, layout = attend_prepared.fused(p, h)
    y = attend_cuda.attend(qkv, *ours, Places(pos, *tables), made, layout=layout)
    rows, gate = prepare.prepare(qkv, p, pos, *tables)
    with sdpa_kernel(SDPBackend.MATH):
        wanted = reference.attend(rows, *theirs, Places(pos, *(t.to(pos.device) for t in prepare.unrotated(S, D, rows))), h)
    at = torch.arange(len(places))
    written = [torch.stack([c[at, :, pos.long()] for c in caches]) for caches in (ours, theirs)]
    return (y, wanted if gate is None else activation.opened(wanted, gate)), written


@pytest.mark.parametrize("name", PREPARED)
def test_attend_of_rows_that_are_not_prepared(name):
    tolerance = TOLERANCE[PREPARED[name][0][7]]
    twice(lambda: in_one(name)[0], tolerance)
    assert error(*in_one(name)[1]) < tolerance


def test_the_kernel_of_prepared_rows_refuses_other_kinds_of_heads():
    weight, h = torch.ones(256), reference.Heads(8, 2, 256, 1.0)
    norm = Norm(weight, 1e-6)
    plain = prepare.Prepared(8, 2, 256, q_norm=norm, k_norm=norm)
    assert attend_prepared.fused(plain, h)[1] == 0
    changes = [
        {"order": "heads"}, {"over": "all"}, {"norm_last": True}, {"pairing": "neighbours"}, {"key_scale": 2.0},
        {"position_scale": prepare.PositionScale(0.1, 8)}, {"k_norm": None}, {"k_norm": Norm(weight, 1e-5)},
        {"k_norm": Norm(weight.half(), 1e-6)}, {"q_norm": Norm(weight, 1e-6, "layer"), "k_norm": Norm(weight, 1e-6, "layer")},
        {"q_norm": Norm(torch.ones(2048), 1e-6)}, {"v_norm": norm},
    ]  # fmt: skip
    for change in changes:
        assert attend_prepared.fused(dataclasses.replace(plain, **change), h) is None, change


@on_device
def drafted(name, left=float("nan")):
    """As `attend`, of rows of one sequence, over a cache of blocks in any order."""
    HQ, HKV, D, R, window, norm, first, M, dtype, cluster, S, block = DRAFTED[name]
    torch.manual_seed(3)
    weights = [torch.randn(D).to(torch.float32 if norm == 2 else dtype) if norm else None for _ in range(2)]
    h = reference.Heads(HQ, HKV, D, D**-0.5, window, 1e-6, *weights, torch.randn(HQ) + 4 if "sinks" in name else None)
    angles = torch.rand(S, R // 2).repeat(1, 2) * 6 if "gates" in name else torch.rand(S, R) * 6
    tables, width = (angles.cos().to(dtype), angles.sin().to(dtype)), S // block
    table = (torch.randperm(width) + 1)[None].to(torch.int32).repeat(M, 1)
    held = [torch.randn(1, HKV, S, D).to(dtype) for _ in range(2)]
    for cache in held:
        cache[:, :, first:] = emulation.left_over(left, S - first, cache.device)
    pools = [torch.full((width + 1, HKV, block, D), left, dtype=dtype) for _ in range(2)]
    for pool, cache in zip(pools, held, strict=True):
        pool[table[0].long()] = cache.reshape(HKV, width, block, D).transpose(0, 1)
    gated, pos = "gates" in name, torch.arange(first, first + M, dtype=torch.int32)
    qkv = torch.randn(M, ((2 if gated else 1) * HQ + 2 * HKV) * D).to(dtype)
    groups = torch.zeros(1, dtype=torch.int64), torch.full((1,), M), M
    with mock.patch.object(attend_cuda, "CLUSTER", cluster):
        y = attend_cuda.attend_rows(qkv, *pools, Places(pos, *tables, table), h, groups, layout=attend_cuda.GATED * gated)
    ours = [pool[table[0].long()].transpose(0, 1).reshape(1, HKV, S, D) for pool in pools]
    theirs, gate = [cache.nan_to_num() for cache in held], None
    if gated:
        q_norm, k_norm = (None if w is None else Norm(w, 1e-6) for w in weights)
        qkv, gate = prepare.prepare(qkv, prepare.Prepared(HQ, HKV, D, gated=True, q_norm=q_norm, k_norm=k_norm), pos, *tables)
        h, tables = dataclasses.replace(h, q_norm=None, k_norm=None), prepare.unrotated(S, D, qkv)
    with sdpa_kernel(SDPBackend.MATH):
        wanted = torch.cat([reference.attend(qkv[i : i + 1], *theirs, Places(pos[i : i + 1], *tables), h) for i in range(M)])
    wanted = wanted if gate is None else activation.opened(wanted, gate)
    return y, ours, wanted, theirs, held, (first, first + M)


@pytest.mark.parametrize("name", DRAFTED)
def test_attend_rows(name):
    """Each row is that of a step, after steps of the rows before it."""
    results = []
    for simt.Kernel.order, left in zip((1, -1), emulation.LEFT, strict=True):
        y, ours, wanted, theirs, before, (first, end) = drafted(name, left)
        assert error(y, wanted) < TOLERANCE[DRAFTED[name][8]]
        for cache, truth, old in zip(ours, theirs, before, strict=True):
            assert error(cache[0, :, first:end], truth[0, :, first:end]) < TOLERANCE[DRAFTED[name][8]]
            assert torch.equal(cache[0, :, :first], old[0, :, :first])
            assert torch.equal(cache[0, :, end:].nan_to_num(7), old[0, :, end:].nan_to_num(7))
        results.append(y)
    assert torch.equal(*results)


@on_device
def coded(name):
    """(y, truth) of a step over caches in few bits, what no text has reached yet at its worst; caches, before, heads."""
    HQ, HKV, D, R, window, norm, places, dtype, S, page, kind = CODED[name]
    torch.manual_seed(3)
    norms = [(torch.rand(D) + 0.5).to(torch.float32 if norm == 2 else dtype) if norm else None for _ in range(2)]
    writes, sinks = reference.SHARED not in name, torch.randn(HQ) + 4 if "sinks" in name else None
    h = reference.Heads(HQ, HKV, D, D**-0.5, window, 1e-6, *norms, sinks, writes=writes)
    angles, own = torch.rand(S, R) * 6, HQ + 2 * HKV * writes
    tables, qkv = (angles.cos().to(dtype), angles.sin().to(dtype)), torch.randn(len(places), own * D).to(dtype)
    pos, table, shape = torch.tensor(places, dtype=torch.int32), None, (len(places), HKV, S, D)
    if page:
        n = len(places) * S // page
        table, shape = (torch.randperm(n) + 1).reshape(len(places), -1).to(torch.int32), (n + 1, HKV, page, D)
    caches = [kv.empty(kind, shape, dtype, pos.device) for _ in range(2)]
    for cache in caches:  # 256 heads, in any order: to encode one for each slot takes longer than all else
        codes, scales = kv.encode(kind, torch.randn(256, D) * 3)
        drawn = torch.randint(256, shape[:3])
        cache.codes[:], cache.scales[:] = codes[drawn], scales[drawn]
    theirs = [dataclasses.replace(c, codes=c.codes.clone(), scales=c.scales.clone()) for c in caches]
    for cache in caches:  # no number in e4m3
        for b, p in enumerate(p + (not writes) for p in places):
            if not page:
                cache.codes[b, :, p:] = 0xFF
            elif p % page < page - 1:
                cache.codes[table[b, p // page], :, p % page :] = 0xFF
    before = [dataclasses.replace(c, codes=c.codes.clone(), scales=c.scales.clone()) for c in caches]
    y = attend_cuda.attend(qkv, *caches, Places(pos, *tables, table, pos.argsort(descending=True).to(torch.int32)), h)
    new = reference.split_heads(qkv, *(t[pos.long()] for t in tables), h)[1:] if writes else caches
    rows = torch.arange(len(places)) if table is None else table[torch.arange(len(places)), pos.long() // page].long()
    at = pos.long() % (page or S)
    truth = once(name, lambda: reference.attend(qkv, *theirs, Places(pos, *tables, table), h))
    return (y, truth), list(zip(caches, before, new, strict=True)), (rows, at)


def in_turn(i):
    """The marks of the i-th case: of all but the first two, one kind of codes or the other is left to `make test-all`."""
    at, kind = i % (len(CODED) // 2), 2 * i // len(CODED)
    return [pytest.mark.more] * (at > 1 and at % 2 == kind)


@pytest.mark.parametrize("name", [pytest.param(name, marks=in_turn(i)) for i, name in enumerate(CODED)])
def test_attend_over_codes(name):
    """The step, and the codes that it writes."""
    made = []

    def step():
        made.append(coded(name))
        return made[-1][0]

    twice(step, TOLERANCE[CODED[name][7]])
    _, caches, (rows, at) = made[-1]
    for ours, before, x in caches:
        if x is ours:  # another layer's
            assert torch.equal(ours.codes, before.codes)
            continue
        codes, scales = kv.encode(ours.kind, x)
        best = error(kv.decode(ours.kind, codes, scales), x)
        # where two scales are as good, or a sum's order turned a value over, either will do
        assert error(ours[rows, :, at], x) < best * 1.001
        assert (ours.codes[rows, :, at] == codes).float().mean() > 0.95
        for a, b in ((ours.codes, before.codes), (ours.scales, before.scales)):  # and no other slot
            a[rows, :, at] = b[rows, :, at]
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


CALL = AttendCall(4, 0, 128, 32, 8, 128, None, F16, "cuda", (9, 0))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, None),
        ({"M": 8, "S": attend_cuda.LONG}, None),  # blocks fill the GPU, however many heads there are
        ({"block": 64}, None),
        ({"kv": "4", "M": 64, "S": 4096}, None),  # however many heads there are
        ({"kv": "fp8", "S": 100}, "a multiple of 16 slots, not 100"),
        ({"block": 24}, "blocks of a power of two"),
        ({"M": 8}, None),  # beyond a cluster each
        ({"M": 17}, "136 key heads"),
        ({"M": 64, "S": 1 << 17, "block": 64}, None),
        ({"HQ": 72}, None),  # three groups
        ({"HQ": 88}, "queries"),
        ({"HQ": 96, "M": 2, "kv": "4", "S": 4096}, None),
        ({"D": 256}, None),
        ({"D": 256, "R": 192}, "R=192"),
        ({"D": 256, "kv": "fp8", "S": 4096}, "caches in fp8"),
        ({"D": 512, "R": 512, "HKV": 2, "M": 1}, None),
        ({"D": 512, "R": 512, "M": 17}, "136 key heads"),
        ({"HQ": 96, "M": 9}, "144 key heads"),
        ({"HQ": 72, "S": 4096}, "96 key heads"),
        ({"beyond": (reference.SHARED,)}, None),
        ({"beyond": ("softcap",)}, "softcap"),
        ({"D": 96, "R": 64}, "D=96"),
        ({"dtype": torch.float32}, "float16"),
        ({"norm": BF16}, "norms"),
        ({"capability": (8, 9)}, "capability"),
    ],
)
def test_heads_it_does_not_take_go_to_triton(changed, why):
    call, cuda = dataclasses.replace(CALL, **changed), named("cuda/attend")
    with mock.patch.object(attend_cuda.gpu, "here", return_value=attend_cuda.gpu.HOPPER):
        assert (cuda.why_not(call) is None) if why is None else why in cuda.why_not(call)
        registry.forget_choices()
        assert select(call)[0].name == ("cuda/attend" if why is None else "triton/attend")
    registry.forget_choices()


@pytest.mark.parametrize(
    ("heads", "S", "kind", "cut"),
    [  # warps, blocks of a cluster, tiles on their way to a warp, blocks of a head, tiles of a block
        (32, 512, "16", (4, 8, 2, 8, 1)),
        (8, 4096, "16", (8, 1, 2, 16, 1)),
        (8, 512, "4", (4, 8, 4, 8, 1)),
        (8, 4096, "4", (8, 1, 4, 16, 1)),
        (64, 512, "16", (8, 1, 2, 2, attend_cuda.LEAST)),
        (128, 1 << 17, "16", (8, 1, 2, 1, attend_cuda.LEAST)),
        (256, 1 << 17, "fp8", (8, 1, 3, 2, attend_cuda.LEAST)),
        (512, 1 << 17, "16", (8, 1, 2, 2, attend_cuda.LEAST_MANY)),
        (512, 1 << 17, "fp8", (4, 1, 3, 2, attend_cuda.LEAST_MANY)),
    ],
)
def test_shape(heads, S, kind, cut):
    assert attend_cuda.shape(heads, S, 128, 4, kind, gpu.HOPPER)[:5] == cut
    ordered = attend_cuda.shape(heads, S, 128, 4, kind, gpu.HOPPER, ordered=True)[:5]
    assert ordered == ((8, 1, 1, 4, attend_cuda.LEAST) if (heads, kind) == (512, "16") else cut)


def test_many_heads_stay_with_triton_where_an_sm_holds_one_block():
    call = dataclasses.replace(CALL, M=64, S=4096, capability=(12, 0))
    with mock.patch.object(attend_cuda.gpu, "here", return_value=gpu.ROWS[12, 0]):
        assert "512 key heads" in named("cuda/attend").why_not(call)


@pytest.mark.parametrize(("kind", "G"), [("16", 4), ("16", 8), ("fp8", 8), ("4", 4), ("4", 1)])
def test_as_many_blocks_fit_an_sm_as_are_counted_on(kind, G):
    on = gpu.HOPPER
    for heads, ordered in ((8, False), (512, False), (512, True)):
        cut = attend_cuda.shape(heads, 4096, 128, G, kind, on, ordered)
        instance = attend_cuda.expression(0, 128, 128, G, 0, cut, 0, NUMBERS[kind])
        needs, count = used("attend.cu", instance, on.arch), attend_cuda.at_once(cut, 128, G, kind, on)
        block = needs["smem"] + cut.shared
        assert count == (2 if cut.stages == 1 else 1) if cut.warps == attend_cuda.WIDE else count > 1
        assert block <= on.smem_block
        assert count * (block + attend_cuda.SYSTEM) <= on.smem_sm
        assert count * 32 * cut.warps * needs["registers"] <= 1 << 16
        assert count > 1 or 2 * (block + attend_cuda.SYSTEM) > on.smem_sm


EXPERTS = named("cuda/experts")


def experts_call(up, down, top_k, act="silu", dtype=F16):
    return dataclasses.replace(ExpertsCall.of(up, down, top_k, act, dtype, 1), device="cuda", capability=(9, 0))


def between(h, act):
    alone = act.removeprefix(activation.UNGATED)
    return reference.gated(h, act) if alone == act else activation.activated(h, alone)


@on_device
def layer(name):
    """(y, truth) of a mixture layer of 5 experts, 4 a token, 3 tokens."""
    bits, group, zero, act, dtype, H, I = LAYERS[name]  # noqa: E741
    torch.manual_seed(bits)
    up, up_weights = emulation.stack(5, mixture.products(act) * I, H, bits, group, zero, dtype, tables=2)
    down, down_weights = emulation.stack(5, H, I, bits, group if group and I % group == 0 else 0, zero, dtype)
    x, weights = torch.randn(3, H).to(dtype) * 0.3, torch.rand(3, 4)
    ids = torch.stack([torch.randperm(5)[:4] for _ in range(3)])
    assert EXPERTS.why_not(experts_call(up, down, 4, act, dtype)) is None
    y = mixture.experts(x, ids, weights, up, down, act, {})
    both = torch.einsum("tkoh,th->tko", up_weights[ids], x.float()) + (0 if up.bias is None else up.bias[ids].float())
    h = between(both.reshape(12, -1), act).to(dtype).float().reshape(3, 4, I)
    bias = 0 if down.bias is None else torch.einsum("tk,tkh->th", weights, down.bias[ids].float())
    return y, torch.einsum("tk,tkhi,tki->th", weights, down_weights[ids], h) + bias


@pytest.mark.parametrize("name", LAYERS)
def test_experts(name):
    twice(lambda: layer(name), TOLERANCE[LAYERS[name][4]])


@pytest.mark.parametrize("name", ["4", "4, rows of two steps a warp, within groups"])
def test_experts_cut_for_another_number_of_multiprocessors(name):
    """Blocks of the down product are wider where all run at once; here on more multiprocessors, on a GPU on fewer."""
    with emulation.sms(132 if DEVICE == "cpu" else SMS):
        twice(lambda: layer(name), TOLERANCE[LAYERS[name][4]])


@on_device
def shared(name, defect=0.0):
    """(y, truth) of a mixture layer with a shared expert."""
    bits, group, zero, act, dtype, H, I, top_k, M, inner, gated = SHARED[name]  # noqa: E741
    torch.manual_seed(bits)
    of_up = mixture.products(act)
    up, up_weights = emulation.stack(13, of_up * I, H, bits, group, zero, dtype)
    down, down_weights = emulation.stack(13, H, I, bits, group, zero, dtype)
    more = [emulation.stack(1, N, K, bits, group, zero, dtype) for N, K in ((of_up * inner, H), (H, inner))]
    (own_up, U), (own_down, D) = ((s.side_by_side(), w[0]) for s, w in more)
    x, weights, opening = torch.randn(M, H).to(dtype) * 0.3, torch.rand(M, top_k), torch.randn(H).to(dtype) / H**0.5
    ids = torch.stack([torch.randperm(13)[:top_k] for _ in range(M)])
    one = Shared(own_up, own_down, opening if gated else None)
    call = dataclasses.replace(experts_call(up, down, top_k, act, dtype), M=M, shared=one.facts)
    assert EXPERTS.why_not(dataclasses.replace(call, E=1000)) is None  # as if these slots were few among all experts
    y = mixture.experts(x, ids, weights, up, down, act, {}, one)
    both = torch.einsum("tkoh,th->tko", up_weights[ids], x.float())
    h = between(both.flatten(0, 1), act).to(dtype).float().reshape(M, top_k, I)
    h_shared = between(x.float() @ U.T, act)
    if gated:
        h_shared = h_shared * (x.float() @ opening.float()).sigmoid()[:, None]
    of_shared = h_shared.to(dtype).float() @ D.T
    return y, torch.einsum("tk,tkhi,tki->th", weights, down_weights[ids], h) + of_shared * (1 - defect)


@pytest.mark.parametrize("name", SHARED)
def test_a_shared_expert(name):
    tolerance = TOLERANCE[SHARED[name][4]]
    twice(lambda: shared(name), tolerance)
    y, other = shared(name, 0.1)
    assert error(y, other) > 2 * tolerance  # a tenth of the shared expert would show


def test_shared_experts_it_does_not_take():
    good, _ = emulation.stack(9, 192, 64, 4, 32, "float", F16)
    down, _ = emulation.stack(9, 64, 96, 4, 32, "float", F16)
    call = experts_call(good, down, 2)

    def why(inner=32, scheme=good.scheme, layout="tile", K=64, M=1, of=call):
        facts = ((2 * inner, K, scheme, layout), (64, inner, scheme, layout))
        return EXPERTS.why_not(dataclasses.replace(of, shared=facts, M=M))

    assert why() is None
    assert why(inner=4096) is None
    assert "width" in why(K=96)
    assert "where the others" in why(scheme=dataclasses.replace(good.scheme, bits=8))
    assert "where the others" in why(layout="rowstream")
    assert "5 tokens" in why(M=5)  # of nine experts, each token's two
    assert "too wide" in why(inner=1 << 16)
    biased = experts_call(good, dataclasses.replace(down, bias=torch.zeros(9, 64)), 2)
    assert EXPERTS.why_not(biased) is None
    assert "biases" in why(of=biased)  # the kernel would add those of the first expert to the shared one


def test_layers_it_does_not_take():
    good, _ = emulation.stack(2, 64, 64, 4, 32, "float", F16)
    assert EXPERTS.why_not(experts_call(good, good, 2)) is None
    assert "activation" in EXPERTS.why_not(experts_call(good, good, 2, ""))
    assert "tile" in EXPERTS.why_not(experts_call(good, dataclasses.replace(good, layout="rowstream"), 2))
    assert "rows of 60" in EXPERTS.why_not(experts_call(dataclasses.replace(good, K=60), good, 2))
    assert "tiles" in EXPERTS.why_not(experts_call(dataclasses.replace(good, N=48), good, 2))
    on_cpu = dataclasses.replace(experts_call(good, good, 2), device="cpu")
    assert EXPERTS.why_not(on_cpu) == "runs on cuda, not on cpu"
    assert find(on_cpu) is None
