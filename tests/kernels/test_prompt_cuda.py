"""prompt.cu and prompt8.cu against their definitions in fp32. On a GPU they run there; elsewhere emulated, in two orders."""

import dataclasses

import pytest
import torch

import emulation
from lowq_kernels import gpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
emulation.require("cuda/prompt", compiler=DEVICE == "cpu")
from lowq_kernels.decode import prompt8_cuda, prompt_cuda, reference
from lowq_kernels.decode.prompt_call import PromptCall
from lowq_kernels.dispatch.registry import named, select

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
if DEVICE == "cuda" and gpu.no_wgmma(torch.cuda.get_device_capability()):
    pytest.skip("not a Hopper GPU", allow_module_level=True)
F16, BF16 = torch.float16, torch.bfloat16
TOLERANCE = {F16: 1e-3, BF16: 8e-3}
TOLERANCE_8 = 3e-2  # weights of values have three bits behind the first
# HQ, HKV, D, dtype, window, sinks, sequences, tokens, tokens before them
ALONE = {
    "two tiles, two sequences": (2, 1, 128, F16, 0, False, 2, 200, 0),
    "behind a text": (4, 2, 128, BF16, 0, False, 1, 70, 300),
    "one token": (2, 2, 64, F16, 0, False, 1, 1, 130),
    "whole tiles": (1, 1, 64, BF16, 0, False, 2, 256, 128),
    "a window": (2, 1, 128, F16, 100, False, 1, 300, 250),
    "a window of less than a tile, sinks": (3, 1, 64, F16, 20, True, 1, 150, 64),
}
# HQ, HKV, D, dtype, window, sinks, (tokens before, tokens) of each text, slots of a block
PACKED = {
    "one text": (2, 1, 128, F16, 0, False, ((0, 130),), 64),
    "several, one behind a text": (4, 2, 128, BF16, 0, False, ((0, 300), (512, 40), (0, 1), (129, 64)), 64),
    "windows, sinks, wide blocks": (2, 2, 64, F16, 90, True, ((200, 65), (0, 129)), 128),
}
# of prompt8.cu, in the same order
ALONE_8 = {
    "two sequences behind texts": (4, 2, 128, F16, 0, False, 2, 140, 130),
    "whole units": (2, 1, 128, BF16, 0, False, 1, 256, 0),
    "one token": (1, 1, 128, BF16, 0, False, 1, 1, 300),
}
PACKED_8 = {
    "one text, more units than tiles": (4, 2, 128, F16, 0, False, ((900, 100),), 64),
    "several texts": (2, 1, 128, BF16, 0, False, ((0, 300), (512, 40), (0, 1), (129, 64)), 64),
    "wide blocks": (2, 2, 128, F16, 0, False, ((200, 65), (0, 129)), 128),
}


@pytest.fixture(autouse=True, scope="module")
def built():
    def launches(module, cases, pieces):
        for case in cases.values():
            alone(*case, module)
        for case in pieces.values():
            packed(*case, module)

    with (
        emulation.without_a_gpu(prompt_cuda, lambda: launches(prompt_cuda, ALONE, PACKED)),
        emulation.without_a_gpu(prompt8_cuda, lambda: launches(prompt8_cuda, ALONE_8, PACKED_8)),
    ):
        yield


def heads(HQ, HKV, D, window, sinks):
    return reference.Heads(HQ, HKV, D, D**-0.5, window, sinks=torch.randn(HQ, device=DEVICE) + 3 if sinks else None)


def drawn(*shape, dtype):
    """In dtype, and the same numbers in fp32. Some scores are to be far above others, so that tops move."""
    x = (torch.randn(shape, device=DEVICE) * 2).to(dtype)
    return x, x.float()


def alone(HQ, HKV, D, dtype, window, sinks, B, T, start, module=prompt_cuda, old=float("nan")):
    """(y, truth) of T tokens of each sequence. old: what lies behind them in the caches."""
    torch.manual_seed(5)
    h, end = heads(HQ, HKV, D, window, sinks), start + T
    (k, k32), (v, v32) = (drawn(B, HKV, end + 70, D, dtype=dtype) for _ in range(2))
    for cache in (k, v):
        cache[:, :, end:] = emulation.left_over(old, 70, DEVICE)
    y, q = drawn(B * T, HQ * D, dtype=dtype)
    ours = module.attend(y, k, v, None, h, (T, start, k.shape[2], 0), {})
    mask = seen(torch.arange(start, end, device=DEVICE), end, window)
    q, *whole = exactly(module, q.reshape(B, T, HQ, D).transpose(1, 2), k32[:, :, :end], v32[:, :, :end])
    truth = attended(q, *(c.repeat_interleave(HQ // HKV, 1) for c in whole), mask, h)
    return ours, truth.transpose(1, 2).reshape(B * T, HQ * D)


def exactly(module, *operands):
    """q, k and v as the module's kernel rounds them."""
    return operands if module is prompt_cuda else reference.in_e4m3(*operands)


def attended(q, k, v, mask, h):
    """By plain products: what torch has for it is full of hazards by compute-sanitizer's racecheck."""
    scores = (q @ k.transpose(-1, -2) * h.scale).masked_fill(~mask, float("-inf"))
    if h.sinks is not None:
        scores = torch.cat([scores, h.sinks[:, None, None].expand(*scores.shape[:-2], scores.shape[-2], 1)], -1)
    return scores.softmax(-1)[..., : k.shape[-2]] @ v


def seen(own, end, window):
    slots, own = torch.arange(end, device=DEVICE), own[:, None]
    return (slots <= own) & (slots > own - (window or end + 1))


def packed(HQ, HKV, D, dtype, window, sinks, pieces, page, module=prompt_cuda, old=float("nan")):
    """(y, truth) of pieces of several texts one after another, over blocks that lie in any order. old: as in `alone`."""
    torch.manual_seed(6)
    h, width = heads(HQ, HKV, D, window, sinks), -(-max(map(sum, pieces)) // page)
    n = len(pieces) * width
    table = (torch.randperm(n) + 1).reshape(len(pieces), width).to(torch.int32).to(DEVICE)
    pools = [emulation.left_over(old, page, DEVICE).to(dtype).repeat(n + 1, HKV, 1, D) for _ in range(2)]
    M = sum(new for _, new in pieces)
    y, q = drawn(M + 3, HQ * D, dtype=dtype)
    rows, pos, tiles, truth = [], [], [], []
    for b, (start, new) in enumerate(pieces):
        first, end = len(rows), start + new
        whole = []
        for pool in pools:
            own, exact = drawn(HKV, end, D, dtype=dtype)
            for slot in range(0, end, page):
                part = own[:, slot : slot + page]
                pool[table[b, slot // page], :, : part.shape[1]] = part
            whole.append(exact[None])
        mask = seen(torch.arange(start, end, device=DEVICE), end, window)
        mine = q[None, first : first + new].reshape(1, new, HQ, D).transpose(1, 2)
        mine, *whole = exactly(module, mine, *whole)
        whole = (c.repeat_interleave(HQ // HKV, 1) for c in whole)
        truth.append(attended(mine, *whole, mask, h)[0].transpose(0, 1).reshape(new, HQ * D))
        rows += [b] * new
        pos += range(start, end)
        tiles += [[t, min(t + reference.TILE, first + new)] for t in range(first, first + new, reference.TILE)]
    filled = (rows + [0] * 3, pos + [0] * 3, [*tiles, [0, 0]])  # what only fills up is in no tile
    units = sum(-(-sum(piece) // reference.TILE) for piece in pieces)
    p = reference.Packed(table, *(torch.tensor(t, dtype=torch.int32, device=DEVICE) for t in filled), units)
    ours = module.attend(y, *pools, p, h, (1 << 30, 0, page, width), {})
    return ours[:M], torch.cat(truth)


def check(made, most):
    """Held to the truth; and what the caches hold behind a prompt changes no bit."""
    old = iter(emulation.LEFT)
    y, truth = emulation.twice(lambda: made(next(old)))
    assert emulation.error(y, truth) < most


@pytest.mark.parametrize("name", ALONE)
def test_a_cache_a_sequence(name):
    check(lambda old: alone(*ALONE[name], old=old), TOLERANCE[ALONE[name][3]])


@pytest.mark.parametrize("name", PACKED)
def test_caches_in_blocks(name):
    check(lambda old: packed(*PACKED[name], old=old), TOLERANCE[PACKED[name][3]])


@pytest.mark.parametrize("name", ALONE_8)
def test_a_cache_a_sequence_in_fp8(name):
    check(lambda old: alone(*ALONE_8[name], prompt8_cuda, old), TOLERANCE_8)


@pytest.mark.parametrize("name", PACKED_8)
def test_caches_in_blocks_in_fp8(name):
    check(lambda old: packed(*PACKED_8[name], prompt8_cuda, old), TOLERANCE_8)


CALL = PromptCall(256, 128, 64, "16", F16, "cuda", (9, 0))


def test_unsupported_calls_are_refused():
    why = named("cuda/prompt").why_not
    assert why(CALL) is None
    assert "not D=80" in why(dataclasses.replace(CALL, D=80))
    assert "whole 64 slots" in why(dataclasses.replace(CALL, page=16))
    assert "fp8" in why(dataclasses.replace(CALL, kv="fp8"))
    assert why(dataclasses.replace(CALL, capability=(8, 0)))


def test_supported_calls_choose_it():
    assert select(CALL)[0].name == "cuda/prompt"
    assert select(dataclasses.replace(CALL, kv="fp8"))[0].name == "triton/prompt"
    eight = dataclasses.replace(CALL, M=2048, act="fp8", units=96, sequences=2)
    assert select(eight)[0].name == "cuda/prompt8"
    recorded = {"units": 0, "sequences": 0}  # the host knows of no sequence then
    for other in ({"act": "none"}, {"act": "int8"}, {"units": 0}, {"units": 95}, {"M": 1280}, {"D": 64}, recorded):
        assert select(dataclasses.replace(eight, **other))[0].name == "cuda/prompt", other


@pytest.mark.skipif(DEVICE == "cuda", reason="counts the kernels of the emulator")
def test_the_kernels_of_long_prompts_are_loaded_without_one():
    call = dataclasses.replace(CALL, M=4096, act="fp8", units=64)
    prompt8_cuda._kernel.cache_clear()
    select(call)[0].load(call, torch.device(DEVICE))
    assert prompt8_cuda._kernel.cache_info().misses == 2
    packed(*PACKED_8["several texts"][:3], F16, *PACKED_8["several texts"][4:], prompt8_cuda)
    assert prompt8_cuda._kernel.cache_info().misses == 2
