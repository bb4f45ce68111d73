"""Rounding on both sides: gptq where rows are independent, with a lower loss by its own measure where not; and its moments."""

from functools import partial

import pytest
import torch

from lowq_cli.calibrate import curvature, requirements, texts
from lowq_cli.calibrate.curvature import output_moments
from lowq_cli.calibrate.requirements import CurvatureDone
from lowq_cli.files.source import open_source
from lowq_cli.hf.layers import DecoderLayers
from lowq_cli.hf.load import load_model
from lowq_cli.plan.planner import make_plan
from lowq_cli.plan.recipe import make_recipe
from lowq_cli.quantizers import gptq, yaqa
from lowq_cli.quantizers.gptq import Moments
from lowq_cli.run import pipeline
from lowq_packers.scheme import Scheme


def moments(K, tokens=4096, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, K, generator=g) @ (torch.eye(K) + 0.3 * torch.randn(K, K, generator=g) / K**0.5)
    return Moments(x.T @ x)


def sides(*sizes, seed=1):
    g = torch.Generator().manual_seed(seed)
    result = []
    for n in sizes:
        y = torch.randn(4 * n, n, generator=g) @ torch.randn(n, n, generator=g)
        H = y.T @ y / len(y)
        result.append(H + 0.05 * H.diagonal().mean() * torch.eye(n))
    return result


def cost(E, H_O, H_I):
    return float(torch.einsum("ij,jk,kl,il->", H_O, E, H_I, E))


@pytest.mark.parametrize(
    "scheme", [Scheme(4, 16), Scheme(2, 32, "none"), Scheme(3, 16, "int"), Scheme.of(4, 16, "nf4")], ids=str
)
def test_with_independent_rows_it_is_gptq_bit_for_bit(scheme):
    W, m = torch.randn(80, 64, generator=torch.Generator().manual_seed(3)), moments(64)
    diagonal = [torch.diag(torch.rand(n, generator=torch.Generator().manual_seed(n)) + 0.1) for n in (48, 32)]
    expected = gptq.quantize(W, scheme, torch.bfloat16, m)
    for outputs in (None, diagonal):
        q = yaqa.quantize(W, scheme, torch.bfloat16, m, outputs=outputs)
        for name in ("W_q", "scales", "zeros"):
            a, b = getattr(q, name), getattr(expected, name)
            assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("scheme", [Scheme(4, 16), Scheme(3, 32), Scheme(2, 16)], ids=str)
@pytest.mark.parametrize("sizes", [(70,), (33, 5, 60)])
def test_it_costs_less_by_the_whole_measure_and_a_wrong_sign_costs_more(scheme, sizes):
    N = sum(sizes)
    W, m, outputs = torch.randn(N, 64, generator=torch.Generator().manual_seed(5)), moments(64), sides(*sizes)
    H_O, H_I = torch.block_diag(*outputs), gptq.damp(m)
    others = [2 * torch.diag(H.diagonal()) - H for H in outputs]  # of the wrong sign between rows
    others = [H + max(0.0, 1e-3 - float(torch.linalg.eigvalsh(H)[0])) * torch.eye(len(H)) for H in others]
    one, both, wrong = (yaqa.quantize(W, scheme, None, m, outputs=o, fewest=1).dequantize() for o in (None, outputs, others))
    assert cost(W - both, H_O, H_I) < 0.8 * cost(W - one, H_O, H_I)
    assert cost(W - wrong, H_O, H_I) > cost(W - one, H_O, H_I)


def test_a_row_of_two_is_the_best_given_the_other():
    """Two weights, one in each row: the second row's code is the best of all, given the first's."""
    scheme, m = Scheme(4, 1, "none"), Moments(torch.ones(1, 1))
    outputs = [torch.tensor([[2.0, 1.5], [1.5, 3.0]])]
    W = torch.tensor([[0.37], [-0.81]])
    q = yaqa.quantize(W, scheme, None, m, outputs=outputs, fewest=1)
    E = W - q.dequantize()
    for code in range(16):
        other = E.clone()
        other[0] = W[0] - (code - scheme.mid) * q.scales[0]
        assert cost(E, outputs[0], m.second) <= cost(other, outputs[0], m.second) + 1e-6


def test_a_moment_that_is_not_of_these_rows_is_refused():
    with pytest.raises(AssertionError):
        yaqa.quantize(torch.randn(8, 16), Scheme(4, 16), None, moments(16), outputs=sides(7))


def note(seen, name, module, args, output):
    """A forward hook."""
    seen[name] = output


def collected(blocks, ids, names, **limits):
    """The moments, and the progress events."""
    output, work = [], output_moments(blocks, ids, 2, names, **limits)
    while True:
        try:
            output.append(next(work))
        except StopIteration as end:
            return end.value, output


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2"])
def test_the_moments_are_those_of_the_whole_models_gradients(family, family_checkpoints):
    """Against autograd through transformers' model, token by token drawn as they are drawn here."""
    dense = family_checkpoints(family, schemes={}).dense
    ids = torch.randint(0, 60, (4, 24), generator=torch.Generator().manual_seed(2))
    with open_source(dense) as source:
        blocks = DecoderLayers(source, torch.device("cpu"))
        names = {n for i in range(len(blocks)) for n in blocks.linears(i)}
        result, output = collected(blocks, ids, names, held_bytes=1)  # a batch at a time, whatever its size
        spots = {n: (i, s) for i in range(len(blocks)) for n, s in blocks.linears(i).items()}
        assert set(result) == names
        assert output[-1] == CurvatureDone(2 * len(blocks), 2 * len(blocks))
        model = load_model(source, "cpu", torch.float32).requires_grad_(False)
    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == len(blocks))
    sums, generator = dict.fromkeys(names, 0.0), torch.Generator().manual_seed(0)
    for window in ids:
        seen, hooks = {}, []
        for n, (i, s) in spots.items():
            hooks.append(layers[i].get_submodule(s.module).register_forward_hook(partial(note, seen, n)))
        with torch.enable_grad():
            embeds = model.get_input_embeddings()(window.unsqueeze(0)).requires_grad_()
            log_p = model(inputs_embeds=embeds).logits[0].log_softmax(-1)
            u = torch.rand(len(log_p), 1, generator=generator)
            drawn = torch.searchsorted(log_p.exp().cumsum(-1), u).clamp(max=log_p.shape[1] - 1)
            grads = torch.autograd.grad(log_p.gather(1, drawn).sum(), list(seen.values()))
        for hook in hooks:
            hook.remove()
        for (n, _), g in zip(seen.items(), grads, strict=True):
            rows = spots[n][1].cut.rows
            g = g[0] if rows is None else g[0][:, slice(*rows)]
            sums[n] = sums[n] + g.T @ g
    for n, (H,) in result.items():
        expected = sums[n] / ids.numel()
        expected.diagonal().add_((curvature.DAMP + len(expected) / ids.numel()) * expected.diagonal().mean())
        torch.testing.assert_close(H, expected, rtol=2e-3, atol=2e-3 * float(expected.abs().max()))


def test_blocks_of_rows_keep_to_the_memory(family_checkpoints):
    dense = family_checkpoints("llama", schemes={}).dense
    ids = torch.randint(0, 60, (2, 16), generator=torch.Generator().manual_seed(2))
    with open_source(dense) as source:
        blocks = DecoderLayers(source, torch.device("cpu"))
        names = {n for i in range(len(blocks)) for n in blocks.linears(i)}
        whole, _ = collected(blocks, ids, names)
        cut, _ = collected(blocks, ids, names, most_rows=24)
    for n, (H,) in whole.items():
        assert sum(map(len, cut[n])) == len(H)
        assert max(map(len, cut[n])) <= 24
        at = 0
        for part in cut[n]:  # off the diagonal, where nothing is added, it is the same numbers
            same = H[at : at + len(part), at : at + len(part)]
            away = ~torch.eye(len(part), dtype=torch.bool)
            torch.testing.assert_close(part[away], same[away])
            at += len(part)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_run_and_a_rerun_give_the_same_bytes(family, family_checkpoints, text, tmp_path):
    dense = family_checkpoints(family, schemes={}).dense
    recipe = make_recipe(bits=3, group=16, method="yaqa", calib=text)
    events = list(pipeline.run(dense, recipe, tmp_path / "whole"))
    assert any(isinstance(e, CurvatureDone) for e in events)
    work = pipeline.run(dense, recipe, tmp_path / "again")
    for event in work:
        if isinstance(event, requirements.LayerDone):
            break
    work.close()
    list(pipeline.run(dense, recipe, tmp_path / "again"))
    list(pipeline.run(dense, make_recipe(bits=3, group=16, method="gptq", calib=text), tmp_path / "gptq"))
    read = {n: (tmp_path / n / "model.safetensors").read_bytes() for n in ("whole", "again", "gptq")}
    assert read["whole"] == read["again"] != read["gptq"]


@pytest.mark.parametrize(
    ("method", "bits", "both", "alone"),
    [("gptq", 3, False, False), ("yaqa", 2, True, False), ("learn", 3, False, True)]
    + [("distill", b, b in (3, 4), b not in (2, 3, 4)) for b in (1, 2, 3, 4, 8)],
)
def test_the_sides_that_a_width_rounds_and_learns(method, bits, both, alone, family_checkpoints):
    with open_source(family_checkpoints("mixtral", schemes={}).dense) as source:
        plan = make_plan(source, make_recipe(bits=bits, group=16, method=method, calib=texts.BUNDLED))
    for item in plan.items:
        if item.method == method:
            assert requirements.rounds_both_sides(item) == (both and item.kind != "expert")
            few, many = (requirements.learns_alone(item, requirements.MOST_CODES + n) for n in (0, 1))
            assert few == alone or item.kind == "expert"
            assert many == (
                few or (bits in requirements.STRAIGHT and method == "distill")
            )  # no codes are trained together then
