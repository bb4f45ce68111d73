"""Calibration: the walk sees what the model sees, its bytes are the same on every run and after a kill."""

import json

import pytest
import torch
from checkpoints import RARE
from folders import files

from lowq_cli import quantizers
from lowq_cli.calibrate import calibration, texts
from lowq_cli.calibrate.layer_walk import Layer
from lowq_cli.files.checkpoint import open_checkpoint
from lowq_cli.files.source import open_source
from lowq_cli.hf.layers import DecoderLayers, run
from lowq_cli.plan.recipe import make_recipe
from lowq_cli.quantizers import gptq, lsq
from lowq_cli.quantizers.gptq import Moments
from lowq_cli.run import pipeline
from lowq_packers.errors import DamagedError, NotFoundError, SchemeError, UsageError
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import ZERO_KINDS, Scheme

WALKED = ["llama", "llama-tied", "qwen2", "qwen3", "mistral", "gemma3", "phi3", "gpt2", "mixtral", "qwen3-moe"]
MIXTURES = ["mixtral", "qwen3-moe"]


def correlated(N=48, K=128, seed=0):
    """A weight and the second moments of inputs of which a few directions carry most."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(512, 12, generator=g) @ torch.randn(12, K, generator=g) + 0.3 * torch.randn(512, K, generator=g)
    return torch.randn(N, K, generator=g) * 0.02, x.T @ x


def output_error(q, W, second):
    E = W - q.dequantize()
    return float(((E @ second) * E).sum() / ((W @ second) * W).sum())


@pytest.mark.parametrize(
    "scheme",
    [
        *(Scheme(bits, group, zero) for bits in (4, 3, 2) for group in (16, 64, 128) for zero in ZERO_KINDS),
        *(Scheme.of(bits, 64, "fitted") for bits in (4, 3, 2)),
        *(Scheme.of(4, *of) for of in ((16, "e2m1/e4m3"), (32, "e2m1/e8m0"), (64, "nf4"), (16, "fitted/e4m3"))),
    ],
    ids=str,
)
def test_gptq_halves_the_output_error_of_lsq(scheme):
    W, second = correlated()
    free = output_error(lsq.quantize(W, scheme), W, second)
    assert output_error(gptq.quantize(W, scheme, torch.bfloat16, Moments(second)), W, second) < 0.5 * free


@pytest.mark.parametrize("kind", ["float", "fitted"])
def test_gptq_without_moments_is_near_lsq(kind):
    W, _ = correlated()
    scheme = Scheme.of(3, 32, kind)
    q = gptq.quantize(W, scheme)
    assert float((q.dequantize() - W).norm()) <= 1.001 * float((lsq.quantize(W, scheme).dequantize() - W).norm())


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_gptq_over_a_table_of_even_steps_is_gptq_over_the_grid(bits):
    W, second = correlated()
    even = gptq.quantize(W, Scheme(bits, 32, "none"), None, Moments(second))
    scheme, mid = Scheme.of(bits, 32, "fitted"), even.scheme.mid
    table = ((torch.arange(scheme.levels) - mid) / mid).unsqueeze(0)
    held = QuantizedTensor.of(scheme, torch.zeros_like(even.W_q), even.scales * mid, None, table)
    result = gptq.quantize(W, scheme, None, Moments(second), held)
    assert torch.equal(result.W_q, even.W_q)
    assert torch.equal(result.dequantize(), even.dequantize())
    assert not torch.equal(result.W_q, gptq.quantize(W, scheme, None, None, held).W_q)  # moments do count


def test_rows_rounded_apart_are_as_rounded_together():
    W, second = correlated()
    whole = gptq.quantize(W, Scheme(3, 32), torch.float16, Moments(second))
    W, rounded = gptq.rounder(W, Scheme(3, 32), torch.float16, Moments(second), None)
    parts = [rounded(rows) for rows in W.split(7)]
    assert torch.equal(whole.scales, torch.cat([p.scales for p in parts]))
    codes = torch.cat([p.W_q for p in parts])
    assert float((whole.W_q != codes).float().mean()) < 0.01  # a product's rounding may differ with its number of rows


def test_gptq_makes_up_for_the_drift_of_earlier_layers():
    """Inputs x' = A x: the target is W x, so a full correction would be W A^-1."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(4096, 64, generator=g)
    seen = x * (1 + 0.2 * torch.rand(64, generator=g))
    W = torch.randn(32, 64, generator=g)
    moments = Moments(seen.T @ seen, (x - seen).T @ seen)
    loss = [
        float((x @ W.T - seen @ gptq.quantize(W, Scheme(8, 16), None, m).dequantize().T).norm())
        for m in (Moments(moments.second), moments)
    ]
    assert loss[1] < 0.6 * loss[0]


def test_few_tokens_are_believed_little():
    g = torch.Generator().manual_seed(1)
    mix = torch.eye(128) + 0.05 * torch.randn(128, 128, generator=g)
    draw = lambda n: torch.randn(n, 128, generator=g) @ mix  # noqa: E731
    x, other = draw(160), draw(4096)
    W, scheme = torch.randn(64, 128, generator=g), Scheme(2, 32)
    result = [gptq.quantize(W, scheme, None, Moments(x.T @ x, tokens=tokens)) for tokens in (0, 160)]
    error = [output_error(q, W, other.T @ other) for q in (*result, lsq.quantize(W, scheme))]
    assert error[1] < 0.9 * error[0]
    assert error[1] < error[2] < error[0]


def test_gptq_survives_dead_and_repeated_inputs():
    W, second = correlated()
    second[5], second[:, 5] = 0, 0
    second[9], second[:, 9] = second[8].clone(), second[:, 8].clone()
    q = gptq.quantize(W, Scheme(2, 32), torch.float16, Moments(second))
    assert torch.isfinite(q.dequantize()).all()
    assert torch.isfinite(gptq.quantize(W, Scheme(2, 32), None, Moments(torch.zeros(128, 128))).dequantize()).all()
    with pytest.raises(SchemeError, match="moments are of 64 inputs"):
        gptq.quantize(W, Scheme(2, 32), None, Moments(torch.eye(64)))


@pytest.mark.parametrize("family", WALKED)
def test_layer_by_layer_gives_the_model_output(family, family_checkpoints):
    from transformers import AutoModelForCausalLM

    folder = family_checkpoints(family, schemes={}).dense
    ids = torch.arange(96).reshape(3, 32)
    with open_source(folder) as source, torch.no_grad():
        blocks = DecoderLayers(source, torch.device("cpu"))
        hidden, others = blocks.start(ids, 3)
        for i in range(len(blocks)):
            with blocks.layer(i) as layer:
                hidden = [run(layer, h, others[i]) for h in hidden]
        assert all(p.is_meta for p in blocks.model.parameters())  # nothing stays in memory
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        seen = []
        last = next(m for m in model.base_model.children() if isinstance(m, torch.nn.ModuleList))[-1]
        last.register_forward_hook(lambda m, a, out: seen.append(out[0] if isinstance(out, tuple) else out))
        model(input_ids=ids)
    assert torch.allclose(hidden[0], seen[0], atol=1e-5)


@pytest.mark.parametrize("family", WALKED)
def test_families_are_calibrated_whole(family, family_checkpoints, text, tmp_path):
    dense = family_checkpoints(family, schemes={}).dense
    recipe = make_recipe(bits=2, group=16, method="gptq", calib=text)
    *events, finished = pipeline.run(dense, recipe, tmp_path / "out")
    layers = [e for e in events if isinstance(e, calibration.LayerDone)]
    assert [e.index for e in layers] == [1, 2]
    assert all(0 < e.error < 0.5 for e in layers)
    assert not list((tmp_path / "out").glob("lowq-calibrated-*"))
    report = json.loads((tmp_path / "out" / "lowq_report.json").read_text())
    assert {t["method"] for t in report["tensors"] if "method" in t and t["kind"] not in ("head", "embedding")} == {"gptq"}
    free = pipeline.quantize(dense, tmp_path / "free", bits=2, group=16)
    assert finished.result.bytes == free["bytes"]


@pytest.mark.parametrize("form", ["nvfp4", "table"])
def test_tables_are_calibrated_from_run_to_rerun(form, family_checkpoints, text, tmp_path):
    """The files hold gptq's results: codes, scales of 8 bits, each matrix's own table or factor."""
    dense, recipe = family_checkpoints("llama").dense, make_recipe(format=form, group=16, method="gptq", calib=text)
    list(pipeline.run(dense, recipe, tmp_path / "whole"))
    whole = open_checkpoint(tmp_path / "whole")
    tables = [whole.read_matrix(t).table for t in whole.tensors if t.scheme and "layers" in t.name]
    assert len({tuple(t.flatten().tolist()) for t in tables}) == len(tables) == 14
    assert all((t.shape[1] == 16) == (form == "table") for t in tables)
    events = pipeline.run(dense, recipe, tmp_path / "killed")
    while not isinstance(next(events), calibration.LayerDone):
        pass
    events.close()
    list(pipeline.run(dense, recipe, tmp_path / "killed"))
    assert (tmp_path / "killed" / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()


def test_a_rerun_continues_behind_the_finished_layers(family_checkpoints, text, tmp_path):
    dense = family_checkpoints("llama").dense
    recipe = make_recipe(bits=3, group=16, method="gptq", calib=text)
    list(pipeline.run(dense, recipe, tmp_path / "whole"))
    for stop in (calibration.LayerDone, pipeline.TensorDone):
        out = tmp_path / stop.__name__
        events = pipeline.run(dense, recipe, out)
        while not isinstance(next(events), stop):
            pass
        events.close()
        again = list(pipeline.run(dense, recipe, out))
        assert next(e for e in again if isinstance(e, calibration.LayerDone)).resumed
        assert files(out) == files(tmp_path / "whole")


def test_progress_is_shown_before_the_first_layer_ends_and_the_plan_has_its_time(family_checkpoints, text, tmp_path):
    dense, recipe = family_checkpoints("llama").dense, make_recipe(bits=3, group=16, method="gptq", calib=text)
    with pipeline.prepare(dense, recipe, tmp_path / "out") as prepared:
        assert prepared.budget.seconds > 0
        steps = [e for e in pipeline.execute(prepared) if isinstance(e, calibration.MatrixDone | calibration.LayerDone)]
    assert [getattr(e, "total", 0) for e in steps if isinstance(e, calibration.MatrixDone)] == [14] * 14
    assert [e.index for e in steps] == [1, 2, 3, 4, 5, 6, 7, 1, 8, 9, 10, 11, 12, 13, 14, 2]


def test_a_damaged_finished_layer_is_named(family_checkpoints, text, tmp_path):
    dense, recipe = family_checkpoints("llama").dense, make_recipe(bits=3, group=16, method="gptq", calib=text)
    events = pipeline.run(dense, recipe, tmp_path / "out")
    while not isinstance(next(events), calibration.LayerDone):
        pass
    events.close()
    (layer,) = (tmp_path / "out").glob("lowq-calibrated-*/*.safetensors")
    layer.write_bytes(layer.read_bytes()[:100])
    with pytest.raises(DamagedError, match="layer-00000"):
        list(pipeline.run(dense, recipe, tmp_path / "out"))
    layer.unlink()
    assert isinstance(list(pipeline.run(dense, recipe, tmp_path / "out"))[-1], pipeline.Finished)


def test_another_text_is_another_run(family_checkpoints, text, tmp_path):
    dense = family_checkpoints("llama").dense
    other = tmp_path / "other.jsonl"
    other.write_text(
        "\n".join(json.dumps({"text": "Call me Ishmael. Some years ago, never mind how long."}) for _ in range(20))
    )
    list(pipeline.run(dense, make_recipe(bits=3, group=16, method="gptq", calib=text), tmp_path / "out"))
    with pytest.raises(UsageError, match="another lowq run"):
        list(pipeline.run(dense, make_recipe(bits=3, group=16, method="gptq", calib=str(other)), tmp_path / "out"))


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("filled", [0, 4], ids=["its own", "all, because 4 per input are more than there are"])
def test_an_expert_gets_the_moments_of_its_own_tokens_and_where_they_are_few_of_others(filled, family, family_checkpoints):
    from transformers import AutoModelForCausalLM

    folder = family_checkpoints(family, schemes={}).dense
    ids = torch.arange(128).reshape(4, 32)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    calls = []
    experts = model.model.layers[0].mlp.experts
    experts.register_forward_pre_hook(lambda m, args: calls.append(args))
    with torch.no_grad(), open_source(folder) as source:
        model(input_ids=ids)
        blocks = DecoderLayers(source, torch.device("cpu"))
        hidden, others = blocks.start(ids, 2)
        spots = {n: s for n, s in blocks.linears(0).items() if s.cut.expert is not None}
        assert len(spots) == 4 * 3
        with blocks.layer(0) as module:
            stages = list(Layer(module, others[0], spots).stages(hidden, hidden, filled))
    x, visits, _ = calls[0]
    assert len(stages) == 4 * 2
    assert filled or sum(stage.moments.tokens for stage in stages) == 2 * visits.numel()
    for stage in stages:
        spot = spots[stage.names[0]]
        mine = x if filled else x[(visits == spot.cut.expert).any(-1)]
        if spot.leaf == "down_proj":
            assert len(stage.names) == 1
            mine = experts._apply_gate(mine @ experts.gate_up_proj[spot.cut.expert].T)
        assert stage.moments.tokens == len(mine)
        assert torch.allclose(stage.moments.second, mine.T @ mine, rtol=1e-4, atol=1e-5)
        assert float(stage.moments.drift.abs().max()) == 0


def test_experts_that_few_tokens_visit_are_calibrated_too(family_checkpoints, text, tmp_path):
    """About 40 tokens visit each of the last two: below 128, experts were quantized without the text."""
    dense = family_checkpoints(RARE, schemes={}).dense
    events = list(pipeline.run(dense, make_recipe(bits=3, group=16, method="gptq", calib=text), tmp_path / "text"))
    pipeline.quantize(dense, tmp_path / "free", bits=3, group=16)
    assert not any(e.notes for e in events if isinstance(e, calibration.LayerDone))
    by, free = (json.loads((tmp_path / n / "lowq_report.json").read_text())["tensors"] for n in ("text", "free"))
    errors, others = ({t["name"]: t["rel_error"] for t in result if ".experts." in t["name"]} for result in (by, free))
    assert len(errors) == 2 * 11 * 3
    assert all(errors[name] != others[name] for name in errors)


def test_heads_and_embeddings_fall_back_to_the_default(family_checkpoints, text, tmp_path):
    recipe = make_recipe(bits=4, group=16, method="gptq", calib=text, lm_head=8)
    assert recipe.method_for(8, 16, "head") == quantizers.default_method(8)
    list(pipeline.run(family_checkpoints("llama").dense, recipe, tmp_path / "out"))
    report = json.loads((tmp_path / "out" / "lowq_report.json").read_text())
    methods = {t["name"]: t["method"] for t in report["tensors"] if "method" in t}
    assert methods["lm_head"] == quantizers.default_method(8)
    assert methods["model.layers.0.mlp.up_proj"] == "gptq"


def test_a_dry_run_tells_of_a_text_that_is_missing(family_checkpoints, tmp_path):
    recipe = make_recipe(method="gptq", calib=str(tmp_path / "none.txt"))
    dense = family_checkpoints("llama").dense
    with (
        pytest.raises(NotFoundError, match="cannot read the calibration text"),
        pipeline.prepare(dense, recipe, tmp_path / "out"),
    ):
        pass


def test_text_errors(tmp_path):
    with pytest.raises(NotFoundError, match="cannot read the calibration text"):
        texts.read_text(str(tmp_path / "none.txt"))
    with pytest.raises(NotFoundError, match="holds no"):
        texts.read_text(str(tmp_path))
    for name, content, why in (
        ("a.txt", b" ", "is empty"),
        ("b.txt", b"\xff", "not UTF-8"),
        ("c.jsonl", b"{}", "one JSON object"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError, match=why):
            texts.read_text(str(tmp_path / name))
    with pytest.raises(UsageError, match="256 tokens of text or more are needed, the text has 32; give a longer text"):
        texts.choose_windows(torch.arange(40), 4096, 32)
    with pytest.raises(UsageError, match="256 tokens of text or more are needed, not 255; ask for more"):
        texts.choose_windows(torch.arange(4096), 255, 32)
    with pytest.raises(UsageError, match="at least 4096"):
        make_recipe(method="gptq", calib_tokens=5)
    for method in ("rtn", "auto"):
        with pytest.raises(UsageError, match=f"methods that read a text, not {method}"):
            make_recipe(method=method, calib="x.txt")
    assert len(texts.read_text(None)) > 200_000


def test_fresh_removes_the_layers_of_a_calibration(family_checkpoints, text, tmp_path):
    dense = family_checkpoints("llama").dense
    events = pipeline.run(dense, make_recipe(bits=3, group=16, method="gptq", calib=text), tmp_path / "out")
    while not isinstance(next(events), calibration.LayerDone):
        pass
    events.close()
    assert list((tmp_path / "out").glob("lowq-calibrated-*"))
    pipeline.quantize(dense, tmp_path / "out", bits=3, group=16, fresh=True)
    assert not list((tmp_path / "out").glob("lowq-calibrated-*"))


def test_a_folder_of_texts_is_read_in_the_order_of_names(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.jsonl").write_text('\ufeff{"text": "first"}\n\n{"text": "and\u2028a half"}\n')  # a line ends at \n only
    (tmp_path / "c.md").write_text("not a text file")
    assert texts.read_text(str(tmp_path)) == "first\n\nand\u2028a half\n\nsecond"


def test_layers_are_calibrated_behind_a_quantized_embedding(family_checkpoints, text, tmp_path):
    """What the checkpoint will hold shows in the moments of the first layer's inputs."""
    dense = family_checkpoints("llama-tied", schemes={}).dense
    codes = []
    for bits in ("keep", "2:16"):
        recipe = make_recipe(bits=4, group=16, method="gptq", calib=text, overrides=[f"embed_tokens={bits}"])
        list(pipeline.run(dense, recipe, tmp_path / f"out{bits[0]}"))
        with open_source(tmp_path / f"out{bits[0]}") as source:
            assert ("model.embed_tokens.weight_scale" in source.headers) == (bits != "keep")
            codes.append(source.read("model.layers.0.self_attn.q_proj.weight"))
    assert not torch.equal(*codes)


def test_the_log_says_of_a_layer_done_before_that_it_was():
    """It printed "error 0" before."""
    assert pipeline.log_line(calibration.LayerDone(2, 6, 0.0, 0.1, True)) == "layer 2 of 6: calibrated before"
    assert pipeline.log_line(calibration.LayerDone(3, 6, 0.0125, 4.2, False)) == "layer 3 of 6: error 0.0125, 4.2 s"
