"""Triton's step of latent attention against its definition, over caches whose other slots are NaN."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the first triton import
pytest.importorskip("triton")

from latents import DEVICE, DTYPES, FACTS, SHAPES, facts, randn

from emulation import error
from lowq_kernels.decode import kv, latent, latent_triton
from lowq_kernels.decode.latent import LatentCall
from lowq_kernels.decode.reference import Places
from lowq_kernels.dispatch.registry import refusals, select

S, POSITIONS = 160, [0, 31, 97, 32, 150]
INTERPRETED_BF16 = pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter multiplies the bit patterns of bf16")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(41)


def paged(cache, block):
    """A cache (B, 1, S, width) in blocks at random places of a pool, what is between them NaN; (pool, table)."""
    B, _, _, width = cache.shape
    n = S // block
    table = torch.randperm(B * n + 3)[: B * n].reshape(B, n)
    pool = torch.full((B * n + 3, 1, block, width), float("nan"), dtype=cache.dtype, device=cache.device)
    pool[table.flatten()] = cache.reshape(B * n, 1, block, width)
    return pool, table.to(cache.device, torch.int32)


NAMES = [(s, "neighbours") for s in SHAPES] + [("odd", n) for n in FACTS if n != "neighbours"]
PAIRS = [(*name, b, d) for i, name in enumerate(NAMES) for b in range(3) for d in ((i + b) % 2, 2)]  # d: each with all else


@pytest.mark.parametrize(
    ("shape", "name", "block", "dtype"),
    [pytest.param(s, n, (0, 16, 32)[b], list(DTYPES)[d], marks=INTERPRETED_BF16 if d == 2 else ()) for s, n, b, d in PAIRS],
    ids=str,
)
def test_step(shape, name, block, dtype):
    f = facts(SHAPES[shape], dtype, **FACTS[name])
    angles = torch.rand(S, f.rotated // 2).repeat(1, 2) * 6
    tables = angles.cos().to(DEVICE, dtype), angles.sin().to(DEVICE, dtype)
    B, pos = len(POSITIONS), torch.tensor(POSITIONS, dtype=torch.int32, device=DEVICE)
    cache = randn(B, 1, S, f.rank + f.rotated, dtype=dtype)
    for b, p in enumerate(POSITIONS):
        cache[b, :, p:] = float("nan")
    q, x = randn(B, f.heads * (f.nope + f.rotated), dtype=dtype), randn(B, f.rank + f.rotated, dtype=dtype)
    theirs = cache.nan_to_num()
    expected = latent.step_fixed(q, x, theirs, Places(pos, *tables), f)
    ours, table = (cache.clone(), None) if not block else paged(cache, block)
    before = ours.clone()
    # the interpreter runs one program after the other; both forms of the last kernel
    cut = {"SPLITS": 8 if block == 16 else 4} if DEVICE == "cpu" or block else None
    y = latent_triton.step(q, x, ours, Places(pos, *tables, table), f, config=cut)
    assert y.dtype == dtype
    for b in range(B):
        assert error(y[b], expected[b]) < DTYPES[dtype]
    held = ours if table is None else ours[table.long()].transpose(1, 2).flatten(2, 3)
    for b, p in enumerate(POSITIONS):
        assert error(held[b, :, p], theirs[b, :, p]) < DTYPES[dtype]
    assert (ours.nan_to_num(7) != before.nan_to_num(7)).any(-1).sum() == B  # one slot of each sequence


@pytest.mark.parametrize("splits", [1, 64])
def test_however_it_is_split(splits):
    f = facts(SHAPES["odd"], torch.float16)
    tables, pos = [randn(S, 2, dtype=torch.float16) for _ in range(2)], torch.tensor([150], dtype=torch.int32, device=DEVICE)
    cache = randn(1, 1, S, 11, dtype=torch.float16)
    q, x = randn(1, 21, dtype=torch.float16), randn(1, 11, dtype=torch.float16)
    expected = latent.step_fixed(q, x, cache.clone(), Places(pos, *tables), f)
    assert error(latent_triton.step(q, x, cache, Places(pos, *tables), f, config={"SPLITS": splits}), expected) < 2e-3


@pytest.mark.parametrize("splits", [1, 2, 16])
@pytest.mark.parametrize("tiles", [tiles for _, tiles in latent_triton.TILES], ids=lambda t: f"{t.heads}x{t.slots}")
def test_tiles_of_many_sequences(monkeypatch, tiles, splits):
    """More sequences than a product with k_up or v_up takes, of lengths around those of tiles and splits."""
    monkeypatch.setattr(latent_triton, "tiles_for", lambda *_: tiles)
    monkeypatch.setattr(latent_triton, "MOST_ROWS", 16)
    f, B = facts(SHAPES["odd"], torch.float16), 19
    tables = [randn(S, 2, dtype=torch.float16) for _ in range(2)]
    pos = torch.tensor([(31 * b) % (S - 1) for b in range(B)], dtype=torch.int32, device=DEVICE)
    cache = randn(B, 1, S, 11, dtype=torch.float16)
    for b, p in enumerate(pos.tolist()):
        cache[b, :, p:] = float("nan")
    q, x = randn(B, 21, dtype=torch.float16), randn(B, 11, dtype=torch.float16)
    expected = latent.step_fixed(q, x, cache.nan_to_num(), Places(pos, *tables), f)
    y = latent_triton.step(q, x, cache, Places(pos, *tables), f, config={"SPLITS": splits})
    for b in range(B):
        assert error(y[b], expected[b]) < 2e-3


def test_tiles_fit_the_shared_memory():
    assert latent_triton.tiles_for(64, 128, 576, 2).heads == 64
    for narrow in ((64, 128, 640, 2), (1024, 16, 576, 2), (4, 128, 576, 2)):
        assert latent_triton.tiles_for(*narrow) == latent_triton.Tiles(16, 64)
    assert latent_triton.tiles_for(64, 128, 576, 4) == latent_triton.tiles_for(1, 16, 576, 2) == latent_triton.Tiles(16, 32)


def test_dispatch():
    call = LatentCall(1, 4096, 128, 128, 64, 128, 512, "neighbours", False, torch.bfloat16, "cuda", (9, 0), 64)
    assert select(call)[0].name == "triton/latent"
    coded = LatentCall(1, 4096, 128, 128, 64, 128, 512, "neighbours", False, torch.bfloat16, "cuda", (9, 0), 64, kv.KINDS[1])
    assert select(coded)[0].name == "torch/latent"
    assert "not in fp8" in refusals(coded)["triton/latent"]
