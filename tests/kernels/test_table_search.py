"""Tables in Triton against torch's: the search of scales, the loop over columns, the fit of the table itself.

Interpreted on the CPU, compiled where a GPU is.
"""

import os
import subprocess
import sys
from functools import partial

import pytest
import torch

pytest.importorskip("triton")

import weight_groups
from weight_groups import DEVICE, DTYPES, Poisoned

from lowq_cli.quantizers import _table_book, _table_fit, gptq, lsq, yaqa
from lowq_cli.quantizers._table_book import TINY, Book
from lowq_kernels.gptq import fit_scales_triton, lloyd_triton, round_block_triton
from lowq_kernels.gptq.round_block import carry
from lowq_packers.scheme import Scheme
from lowq_packers.tables import values

case = partial(weight_groups.case, side=0.005)
KINDS = [(4, "nf4"), (4, "iq4_nl"), (4, "e2m1"), (4, "fitted"), (3, "fitted"), (2, "fitted")]
KINDS += [(4, "e2m1/e4m3"), (4, "nf4/e4m3"), (4, "fitted/e4m3"), (3, "fitted/e4m3"), (2, "fitted/e4m3")]
KINDS += [(4, "e2m1/e8m0"), (4, "iq4_nl/e8m0"), (2, "fitted/e8m0")]


def use(monkeypatch, kernels, fits=DEVICE == "cuda"):
    """Take the kernels, or torch. fits: that of a table's fit, too, which takes the interpreter 2 s."""
    for module, name, kernel in (
        (_table_book, "implementation", fit_scales_triton),
        (_table_book, "rounding", round_block_triton),
        (_table_fit, "implementation", lloyd_triton if fits else None),
    ):
        monkeypatch.setattr(module, name, lambda device, kernel=kernel: kernel if kernels else None)


@pytest.fixture
def by_kernel(monkeypatch):
    """Book takes the kernels on this device, too; scales and codes that the search does not write show."""
    use(monkeypatch, True)
    monkeypatch.setattr(fit_scales_triton, "_fit_scales_kernel", Poisoned(fit_scales_triton._fit_scales_kernel, slice(5, 8)))


def book_of(groups, scheme, dtype):
    W = groups.flatten(1)
    return Book(scheme, _table_fit.companion_of(W, scheme), W.device, dtype)


def loss(book, groups, codes, wide, weights):
    """Squared errors (R, G) of codes and the values of scales."""
    table = book.values.new_zeros(16)
    table[book.codes] = book.values
    errors = (groups - table[codes.long()] * wide.unsqueeze(-1)).double().square()
    return (errors if weights is None else errors * weights).sum(-1)


def compare(groups, scheme, dtype, weights):
    """Scales, losses and codes of the kernel against torch's."""
    book = book_of(groups, scheme, dtype)
    codes, stored = book.search(groups, weights)
    scales, wide = book.scales(groups, weights)
    expected, wanted = book.search_torch(groups, weights)
    assert stored.dtype == wanted.dtype
    assert torch.equal(stored, scales)
    assert torch.equal(wide, book.wide(stored))
    assert torch.equal(codes.long(), book.nearest(groups, wide))
    now, before = (loss(book, groups, q, book.wide(s), weights) for q, s in ((codes, stored), (expected, wanted)))
    few = now.numel() < 100
    # where fp32 rounding takes a fitted scale to the other neighbour in 16 bits, the next codes and scales differ
    assert ((now - before).abs() <= (0.02 if few else 0.2) * before).all()
    assert ((now - before).abs() <= 1e-5 * before).float().mean() > (0.9 if few else 0.99)
    assert abs(now.sum() - before.sum()) <= (1e-3 if few else 1e-4) * before.sum()
    assert (codes != expected).float().mean() < (0.01 if few else 1e-3)
    if dtype in (torch.float16, torch.bfloat16) or scheme.scale != "float":  # fp32 scales differ in their last bits
        assert (stored != wanted).float().mean() <= (0.1 if few else 0.01)


@pytest.mark.parametrize(("bits", "kind", "dtype"), [(*k, d) for k in KINDS for d in (DTYPES if "/" not in k[1] else [None])])
def test_scales_are_torchs(by_kernel, bits, kind, dtype):
    scheme = Scheme.of(bits, 48, kind)
    groups, weights = case(11, 3, 48, seed=bits)
    for given in (None, weights[0], weights):
        compare(groups, scheme, dtype, given)


@pytest.mark.half_of("size", "kind")
@pytest.mark.parametrize("size", [7, 16, 33, 80, 500, 1024])
@pytest.mark.parametrize("kind", ["fitted", "fitted/e4m3", "fitted/e8m0"])
def test_groups_of_any_size(by_kernel, size, kind):
    groups, weights = case(5, 2, size)
    compare(groups, Scheme.of(3, size, kind), torch.bfloat16, weights)


def test_larger_groups_take_torch(by_kernel, monkeypatch):
    monkeypatch.setattr(fit_scales_triton, "fit_scales_triton", None)
    groups, _ = case(2, 1, 1040)
    assert book_of(groups, Scheme.of(4, 1040, "nf4"), None).search(groups)[1].isfinite().all()


@pytest.mark.parametrize(("bits", "kind"), [(4, "nf4"), (2, "fitted/e4m3"), (4, "e2m1/e4m3"), (4, "e2m1/e8m0")])
def test_constant_zero_large_and_tiny_groups(by_kernel, bits, kind):
    groups = torch.zeros(9, 1, 32, device=DEVICE)
    noise = case(1, 1, 32)[0][0, 0]
    constants = [torch.full_like(noise, v) for v in (0.3, -0.3, 1e-20, 1e12)]
    groups[1:, 0] = torch.stack(constants + [noise * v for v in (1e12, 1e-12, 1e-4, 50)])
    for weights in (None, torch.linspace(1, 2, 32, device=DEVICE)):
        for dtype in DTYPES:
            book = book_of(groups, Scheme.of(bits, 32, kind), dtype)
            (codes, stored), (expected, wanted) = book.search(groups, weights), book.search_torch(groups, weights)
            assert book.wide(stored).isfinite().all()
            now, before = (loss(book, groups, q, book.wide(s), weights) for q, s in ((codes, stored), (expected, wanted)))
            # several scales hold a constant group exactly, so losses are compared, up to a scale's rounding to bf16, squared
            weighted = groups.double().square() * (1 if weights is None else weights)
            assert ((now - before).abs() <= 2**-16 * weighted.sum(-1)).all()


@pytest.mark.parametrize("mirrored", [False, True])
def test_float_scales_of_both_signs(by_kernel, mirrored):
    """As the fit of a table whose scales have signs takes them."""
    groups, _ = case(20, 2, 32)
    free = Scheme.of(2, 32, "fitted")
    table = torch.tensor([[-0.4, -0.1, 0.2, 1.0]], device=DEVICE)
    book = Book(free, table, groups.device, None, mirrored)
    (codes, stored), (expected, wanted) = book.search(groups), book.search_torch(groups)
    assert (stored < 0).any() == mirrored
    assert torch.equal(stored < 0, wanted < 0)
    torch.testing.assert_close(stored, wanted, rtol=1e-5, atol=0)
    assert torch.equal(codes.long(), expected)


def test_every_byte_of_a_scale_comes_back(by_kernel):
    """Groups that a scale holds exactly get it, from the smallest to the largest."""
    for kind, least, last in (("e2m1/e4m3", 1, 126), ("e2m1/e8m0", 64, 187)):  # squares of others leave fp32
        scheme = Scheme.of(4, 32, kind)
        stored = torch.arange(least, last + 1, dtype=torch.uint8, device=DEVICE).unsqueeze(-1)
        book = Book(scheme, torch.ones(1, 1, device=DEVICE), torch.device(DEVICE), None)
        table = values(scheme, None, torch.device(DEVICE))[0].repeat(2)
        groups = (table * book.wide(stored)).unsqueeze(1)
        codes, scales = book.search(groups)
        assert torch.equal(scales, stored)
        assert torch.equal(loss(book, groups, codes, book.wide(scales), None), torch.zeros_like(scales, dtype=torch.float64))


def test_a_wrong_scale_shows(by_kernel, monkeypatch):
    groups, _ = case(17, 3, 48)
    for scheme, name, value in (
        (Scheme.of(4, 48, "nf4"), "REFINE", 0),
        (Scheme.of(2, 48, "fitted/e4m3"), "TRIED_BY_FOUR", range(1)),
    ):
        book = book_of(groups, scheme, torch.bfloat16)
        with monkeypatch.context() as few:
            few.setattr(_table_book, name, value)
            fewer = book.search(groups)
        del book._constants
        now, before = (loss(book, groups, q, book.wide(s), None).sum() for q, s in (fewer, book.search_torch(groups)))
        assert now > before * (1 + 1e-3)


@pytest.mark.parametrize(("bits", "kind"), [(4, "nf4"), (2, "fitted/e4m3"), (4, "e2m1/e8m0")])
def test_two_runs_are_the_same(by_kernel, bits, kind):
    groups, weights = case(20, 2, 64)
    book = book_of(groups, Scheme.of(bits, 64, kind), torch.float16)
    for first, second in zip(book.search(groups, weights), book.search(groups, weights), strict=True):
        assert torch.equal(first, second)


@pytest.mark.half_of("B", "kind")
@pytest.mark.parametrize("B", [16, 48, 128])
@pytest.mark.parametrize(("bits", "kind"), [(4, "nf4"), (3, "fitted"), (2, "fitted/e4m3"), (4, "e2m1/e4m3")])
def test_columns_are_rounded_as_torch_rounds_them(monkeypatch, bits, kind, B):
    g = torch.Generator().manual_seed(B)
    x = torch.randn(4 * B, B, generator=g) * torch.linspace(0.5, 2, B)
    factor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(x.T @ x)), upper=True).to(DEVICE)
    whole = torch.randn(21, B + 9, generator=g).to(DEVICE)
    block, before = whole[:, 3 : 3 + B], whole.clone()
    book = book_of(block.unsqueeze(1), Scheme.of(bits, B, kind), None)
    wide = (book.start(block.unsqueeze(1))[1] * 0.9).repeat(1, 3)[:, 1]  # a column of a matrix, as gptq passes it
    use(monkeypatch, False)
    expected, wanted = book.round_block(block, factor, wide)
    use(monkeypatch, True)
    codes, errors = book.round_block(block, factor, wide)
    assert torch.equal(whole, before)
    assert all(torch.equal(a, b) for a, b in zip((codes, errors), book.round_block(block, factor, wide), strict=True))
    same = (codes == expected).all(1)  # a code that falls the other way by fp32 rounding moves every later one of its row
    assert same.float().mean() > 0.9
    torch.testing.assert_close(errors[same], wanted[same], rtol=1e-4, atol=1e-4)
    assert set(codes.unique().int().tolist()) <= set(book.codes.tolist())
    flipped = book.values.flip(0), book.codes
    wrong = round_block_triton.round_by_table_triton(block, factor, wide, flipped[0].sort()[0], book.codes.flip(0), TINY)
    assert (wrong[0] != expected).any()


def test_halves_go_to_the_value_below(by_kernel):
    book = Book(Scheme.of(4, 16, "e2m1"), None, torch.device(DEVICE), None)
    block = torch.tensor([[0.25, 0.75, -0.25, -5.0, 5.0, 0.0, 7.0, -7.0] * 2], device=DEVICE)
    eye, one = torch.eye(16, device=DEVICE), torch.ones(1, device=DEVICE)
    codes, _ = book.round_block(block, eye, one)
    expected, _ = carry(block, eye, lambda column: book.nearest_of(one, column))
    assert torch.equal(codes, expected)
    assert torch.equal(codes[0, :3].int(), torch.tensor([0, 1, 9], dtype=torch.int32, device=DEVICE))


@pytest.mark.parametrize(("bits", "kind"), [(4, "fitted"), (3, "fitted/e4m3"), (2, "fitted/e4m3")])
def test_a_fitted_table_is_torchs(monkeypatch, bits, kind):
    """Bit for bit where the histogram is the same: on a CPU. On a GPU its sums are of any order."""
    W = case(40, 4, 64, seed=bits)[0].flatten(1)
    scheme, tables = Scheme.of(bits, 64, kind), []
    for kernels in (False, True):
        monkeypatch.setattr(_table_fit, "implementation", lambda device, kernels=kernels: lloyd_triton if kernels else None)
        tables.append(_table_fit.companion_of(W, scheme))
    if DEVICE == "cpu":
        assert torch.equal(*tables)
    torch.testing.assert_close(*tables, rtol=1e-6, atol=1e-7)


def test_values_without_weights_stay_and_are_sorted():
    """A value in a gap of the histogram stays, and comes to its place among those that pass it."""
    bins, reach = 64, 2.0
    mass = torch.zeros(bins, dtype=torch.float64, device=DEVICE)
    mass[[3, 4, 40, 60]] = torch.tensor([1.0, 2.0, 3.0, 0.5], dtype=torch.float64, device=DEVICE)
    centres = ((torch.arange(bins, device=DEVICE).double() + 0.5) / (bins / 2) - 1) * reach
    moment = mass * (centres + 0.02)
    zero = torch.zeros(1, dtype=torch.float64, device=DEVICE)
    sums, moments = torch.cat([zero, mass.cumsum(0)]), torch.cat([zero, moment.cumsum(0)])
    start = torch.tensor([-1.9, -1.0, 0.1, 0.11, 0.12, 1.0, 1.1], dtype=torch.float64, device=DEVICE)
    expected = start
    for _ in range(5):
        ends = torch.searchsorted(centres, (expected[1:] + expected[:-1]) / 2)
        edges = torch.cat([torch.zeros_like(ends[:1]), ends, torch.full_like(ends[:1], bins)])
        held = sums[edges].diff()
        expected = torch.where(held > 0, moments[edges].diff() / held.clamp(min=TINY), expected).sort()[0]
    assert torch.equal(lloyd_triton.lloyd_triton(start, sums, moments, 5, reach, TINY), expected)
    assert not torch.equal(lloyd_triton.lloyd_triton(start, sums, moments, 0, reach, TINY), expected)


@pytest.mark.half_of("method", "kind")
@pytest.mark.parametrize(("bits", "kind"), [(4, "nf4"), (3, "fitted/e4m3"), (4, "e2m1/e4m3")])
@pytest.mark.parametrize("method", [lsq, gptq, yaqa])
def test_whole_matrices_lose_as_much(monkeypatch, method, bits, kind):
    g = torch.Generator().manual_seed(1)
    N, K, scheme = 40, 96, Scheme.of(bits, 32, kind)
    W = torch.randn(N, K, generator=g).to(DEVICE)
    x = (torch.randn(4 * K, K, generator=g) * torch.linspace(0.5, 2, K)).to(DEVICE)
    y = torch.randn(4 * N, N, generator=g).to(DEVICE)
    given = {} if method is lsq else {"moments": gptq.Moments(x.T @ x)}
    if method is yaqa:
        given["outputs"] = [y.T @ y]
    losses, codes = [], []
    for kernels in (True, False):
        use(monkeypatch, kernels)
        q = method.quantize(W, scheme, torch.bfloat16, **given)
        E = q.dequantize().float() - W
        side = y if method is yaqa else torch.eye(N, device=DEVICE)
        losses.append(float(((side @ E @ x.T if given else E) ** 2).sum()))
        codes.append(q.W_q)
    # a code that falls the other way by fp32 rounding moves every later one of its row
    assert losses[0] == pytest.approx(losses[1], rel=5e-3)
    assert (codes[0] != codes[1]).float().mean() < 0.05


@pytest.mark.parametrize(("bits", "kind"), [(4, "fitted"), (2, "fitted/e4m3")])
def test_a_gpus_checkpoint_differs_from_a_cpus_by_rounding_alone(monkeypatch, bits, kind):
    """Table, scales and codes, all by kernels on this device, against torch on a CPU."""
    W = case(32, 6, 32, seed=bits)[0].flatten(1)
    scheme, results = Scheme.of(bits, 32, kind), []
    for kernels in (False, True):
        use(monkeypatch, kernels, kernels)
        q = lsq.quantize(W if kernels else W.cpu(), scheme, torch.bfloat16)
        results.append(
            (q.table.cpu(), q.scales.cpu(), q.W_q.cpu(), float((q.dequantize().cpu() - W.cpu()).double().square().sum()))
        )
    (table, scales, codes, loss), (by_kernel, *others, least) = results
    # scales of the fit that differ in their last bits put single weights into other bins of its histogram
    torch.testing.assert_close(by_kernel, table, rtol=0, atol=2e-5 * float(table.abs().max()))
    assert least == pytest.approx(loss, rel=1e-4)
    for one, other in zip((scales, codes), others, strict=True):
        assert (one != other).float().mean() < 0.01


@pytest.mark.parametrize("kind", ["nf4", "fitted/e4m3"])
def test_codes_on_a_given_grid(monkeypatch, kind):
    W = case(24, 3, 32)[0].flatten(1)
    scheme = Scheme.of(4, 32, kind)
    grid = lsq.quantize(W, scheme, torch.bfloat16)
    x = torch.randn(400, 96, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    results = []
    for kernels in (True, False):
        use(monkeypatch, kernels)
        results.append(gptq.quantize(W, scheme, torch.bfloat16, gptq.Moments(x.T @ x), grid))
    assert all(torch.equal(q.scales, grid.scales) for q in results)
    assert (results[0].W_q != results[1].W_q).float().mean() < 0.01


COMPILED = """
import os, re, subprocess, sys, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from lowq_kernels.gptq import fit_scales_triton as f, lloyd_triton as l, round_block_triton as r
ptxas = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "ptxas")

def compiled(kernel, types, warps, values):
    types = {n: "*fp32" if n.endswith("_ptr") else "i32" for n in kernel.arg_names} | types | dict.fromkeys(values, "constexpr")
    options = {"num_warps": warps, "enable_fp_fusion": False}
    ptx = triton.compile(ASTSource(kernel, types, values), target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    with open(sys.argv[1], "w") as file:
        file.write(ptx)
    command = [ptxas, "-v", "-arch=sm_90a", sys.argv[1], "-o", sys.argv[1] + ".cubin"]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in log, (values, log)
    print(kernel.__name__, re.search(r"Used (\\d+) registers", log)[0])

values = dict(LIMIT=65504.0, SMALLEST=6e-8, SECOND=0.85, THIRD=0.7, TRIES=9, FITS=3, STEP=-3, LEAST=1, LAST=126, TINY=1e-30)
cases = (0, 16, 64, "bfloat16"), (0, 8, 1024, "float16"), (1, 4, 16, "float32"), (2, 15, 32, "float32")
for kind, levels, block, dtype in cases:
    values |= dict(KIND=kind, LEVELS=levels, WEIGHTED=kind != 0, SCALED=kind == 1, MIRRORED=int(kind < 2))
    values |= dict(DTYPE=getattr(tl, dtype), SIGN=128, BLOCK_R=max(1, f.VALUES // block), BLOCK_B=block)
    types = {"codes_ptr": "*i64", "q_ptr": "*u8", "scales_ptr": "*u8" if kind else "*fp32"}
    compiled(f._fit_scales_kernel, types, 4, values)
for block in (16, 128):
    values = dict(TOP=15, TABLE=True, TINY=1e-30, BLOCK_R=r.BLOCK_R, BLOCK_B=block)
    compiled(r._round_block_kernel, {"order_ptr": "*i64"}, 4, values)
names = dict.fromkeys(("start_ptr", "sums_ptr", "moments_ptr", "values_ptr"), "*fp64")
compiled(l._lloyd_kernel, names, l.WARPS, dict(ITERATIONS=100, BINS=8192, REACH=2.0, TINY=1e-30, BLOCK=16))
"""


def test_they_compile_for_sm_90_without_spills(tmp_path):
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED, str(tmp_path / "kernel.ptx")], capture_output=True, text=True, env=env, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("registers") == 7


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this size takes the interpreter minutes")
@pytest.mark.parametrize(("bits", "kind"), KINDS)
def test_scales_are_torchs_at_a_models_size(bits, kind):
    assert _table_book.implementation("cuda") is fit_scales_triton
    for size in (16, 64, 1024):
        groups, weights = case(2048, 8, size, seed=size)
        compare(groups, Scheme.of(bits, size, kind), torch.bfloat16, weights)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_second_gpu_gives_the_same_codes():
    g = torch.Generator().manual_seed(2)
    W, x = torch.randn(40, 128, generator=g), torch.randn(512, 128, generator=g)
    scheme, table = Scheme.of(4, 64, "nf4"), None
    first, second = (
        gptq.quantize(W.to(d), scheme, None, gptq.Moments((x.T @ x).to(d)), None, table) for d in ("cuda:0", "cuda:1")
    )
    assert second.W_q.device == torch.device("cuda:1")
    assert torch.equal(first.W_q.cpu(), second.W_q.cpu())
    assert torch.equal(first.scales.cpu(), second.scales.cpu())
