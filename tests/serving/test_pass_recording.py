"""Recording of passes at the start and later: which sizes, in which memory, and what a recording that fails leaves."""

import shutil
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch
from asking import Client, Replayed, alone, build, prompts

import lowq
from lowq_cli.engine.open_model import ready
from lowq_cli.engine.plan import plan_of
from lowq_cli.files.source import DEMO
from lowq_cli.serving import pass_sizes
from lowq_cli.serving.continuous import ContinuousEngine
from lowq_kernels.decode import latent as definition
from lowq_kernels.decode import reference

NOT_RECORDED = "operation not permitted when stream is capturing"


@pytest.fixture
def passes():
    """The passes of a small model, of few sizes as on a GPU."""
    result = ContinuousEngine(build("llama"), 4, running=4).passes
    result.sizes.padded, result.sizes.totals = True, (32, 64)
    return result


def capturing(passes, failures, pools):
    """Recordings that are computed again; the first ones raise the given errors."""

    def capture(step, pool):
        pools.append(pool)
        if failures:
            raise failures.pop(0)
        result = Replayed(step, passes.rows)
        result.graph = SimpleNamespace(pool=lambda: "shared")
        return result

    return capture


def test_the_start_records_all_sizes_in_one_pool_and_tries_a_failure_once_more(passes):
    pools, done = [], []
    passes.capture = capturing(passes, [RuntimeError(NOT_RECORDED)], pools)
    with torch.inference_mode():
        passes.record(lambda n, of: done.append((n, of)))
    keys = passes.sizes.keys
    assert passes.reason == ""
    assert list(passes.captured) == keys
    assert pools == [None, None, *["shared"] * (len(keys) - 1)]
    assert done == [(n + 1, len(keys)) for n in range(len(keys))]
    assert {rows for _, rows, _ in passes.token_budget.known} == {rows for _, rows, _ in keys}


def test_a_size_that_cannot_be_recorded_ends_the_recording_with_a_reason(passes):
    passes.capture = capturing(passes, [RuntimeError(NOT_RECORDED)] * 2, [])
    with torch.inference_mode():
        passes.record()
    assert passes.captured == {}
    assert NOT_RECORDED in passes.reason


@pytest.mark.parametrize("met", [False, True])
def test_a_lack_of_memory_is_an_error_at_the_start_and_a_reason_later(passes, met):
    passes.capture, passes.pool = capturing(passes, [torch.OutOfMemoryError("no room")], []), object()
    passes.met = set() if met else None
    with torch.inference_mode():
        if met:
            assert not passes.record_next()
            assert "no room" in passes.reason
            assert passes.met is None
        else:
            with pytest.raises(torch.OutOfMemoryError):
                passes.record()


def test_logits_of_a_recording_are_its_own_or_in_the_memory_that_is_given(passes):
    passes.capture, made, given = capturing(passes, [], []), [], torch.zeros(2, 3)

    def step():
        made.append(torch.full((2, 3), float(len(made) + 1)))
        return made[-1]

    with torch.inference_mode():
        own, shared = passes.graph_of(step, None), passes.graph_of(step, given, first=True)
    assert own.logits is made[0]
    assert shared.logits is given
    assert given.eq(3.0).all()  # run once before it was recorded
    shared.replay()
    assert given.eq(4.0).all()
    passes.capture = capturing(passes, [RuntimeError(NOT_RECORDED)], [])
    with pytest.raises(RuntimeError, match="capturing"), torch.inference_mode():
        passes.graph_of(step, None)


LATENT = {"q_lora_rank": None, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}


def of_latents(device):
    """A model with latent attention, and texts and their answers by a decoder of its own."""
    model = build("deepseek_v2", **LATENT, first_k_dense_replace=2, n_routed_experts=4, n_group=1, topk_group=1).to(device)
    long, short, other = prompts(75, 20, 9)
    asked = [long, [*long[:70], *other], short, other]
    return model, asked, [alone(model, ids, 6) for ids in asked]


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run in Triton's interpreter")
@pytest.mark.parametrize("steps", [False, True], ids=["alone", "beside steps"])
def test_passes_with_prompts_over_latents_are_recorded(steps):
    """By the kernels of a GPU, in Triton's interpreter: prompts in pieces, of one pass and after a prefix that is reused, give
    the tokens of each text alone, by a decoder in torch."""
    latent_prompt = pytest.importorskip("lowq_kernels.decode.latent_prompt")
    model, asked, expected = of_latents("cpu")
    plan = plan_of(model)
    assert ContinuousEngine(model, 4, running=4).passes.sizes.most_recorded == 0  # torch's form reads lengths on the host
    latent = replace(plan.ops.latent, packed=latent_prompt.packed, refuse=latent_prompt.refuse)
    plan.ops = replace(plan.ops, latent=latent)
    engine = ContinuousEngine(model, 4, running=4)
    passes, gathered = engine.passes, Mock(side_effect=AssertionError("latents are gathered"))
    assert passes.sizes.most_recorded == 1024
    passes.sizes.padded, passes.sizes.totals = True, (32, 64)
    passes.token_budget.totals, passes.capture = (32, 64), capturing(passes, [], [])
    with torch.inference_mode(), patch.multiple(latent_prompt, _held=gathered), patch.object(definition, "packed", gathered):
        passes.record()
        assert {M for b, M, _ in passes.captured if b < M} == {32, 64}
        client = Client(model, engine=lambda *_, **__: engine)
        if steps:
            assert client.tokens(*[client.ask(ids, 6) for ids in asked]) == expected
        else:
            assert [client.tokens(client.ask(ids, 6))[0] for ids in asked] == expected
            assert engine.stats().prefix_hits >= 64
    mixed = [one.count for (b, M, _), (one, _) in passes.captured.items() if b < M]
    assert sum(mixed) > 3
    engine.stop(1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run in Triton's interpreter")
@pytest.mark.parametrize(
    ("dtype", "kv", "dims", "taken"),
    [
        ("float32", "16", 16, True), ("bfloat16", "16", 16, True), ("float16", "4", 16, True), ("float16", "16", 512, True),
        ("float32", "16", 512, False), ("float16", "4", 512, False),
    ],
)  # fmt: skip
def test_passes_with_prompts_are_recorded_where_a_kernel_takes_them(dtype, kv, dims, taken):
    prompt = pytest.importorskip("lowq_kernels.decode.prompt")
    model = build("llama", head_dim=dims).to(getattr(torch, dtype))
    plan = plan_of(model)
    plan.ops = replace(plan.ops, attend_packed=prompt.attend_packed, packed_waits=prompt.waits)
    passes = ContinuousEngine(model, 4, running=4, kv=kv).passes
    assert passes.sizes.most_recorded == (1024 if taken else 0)
    waiting = Mock(side_effect=reference.attend_packed)  # reads on the host which tokens belong together
    with torch.inference_mode(), patch.object(reference, "attend_packed", waiting):
        passes.measure(0, 32)
    assert waiting.called != taken


def test_a_server_whose_passes_are_not_recorded_says_why_it_takes_no_drafts(monkeypatch):
    engine = ContinuousEngine(build("llama"), 4, running=2, draft="ngram")
    engine.device, passes = SimpleNamespace(type="cuda"), engine.passes
    monkeypatch.setattr(passes, "record", lambda done: setattr(passes, "reason", NOT_RECORDED))
    assert engine.drafts_by == "ngram"
    engine.start(lambda events: None)
    assert engine.drafts_by == f"none ({NOT_RECORDED})"
    engine.stop(0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_passes_with_prompts_over_latents_are_replayed():
    """In fp32, in which no two tokens are as likely but for chance."""
    model, asked, expected = of_latents("cuda")
    client = Client(model, running=4, cache_tokens=4096)
    try:
        assert client.engine.passes.sizes.most_recorded == 1024
        assert any(b < M for b, M, _ in client.engine.passes.captured)
        assert client.tokens(*[client.ask(ids, 6) for ids in asked]) == expected
    finally:
        client.engine.stop(0)


def test_no_pass_of_a_recorded_size_takes_a_kernel_that_allocates_by_lengths():
    prompt8_cuda = pytest.importorskip("lowq_kernels.decode.prompt8_cuda")
    assert max(pass_sizes.RECORDED, *pass_sizes.PICTURED) < prompt8_cuda.LEAST


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("act", ["none", "fp8", "int8"])
def test_on_a_gpu_prompts_that_fill_a_recorded_pass_are_answered_as_without_recordings(act, tmp_path):
    """With heads and widths that the fastest kernels take: some of these allocate by the sequences' lengths, which nobody knows
    while a pass is recorded. A prompt of 1,024 tokens under fp8 once wrote outside of its memory."""
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "head_dim": 128,
        "max_position_embeddings": 2048,
        "vocab_size": 8192,
    }
    build("llama", **sizes).half().save_pretrained(tmp_path / "dense")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, tmp_path / "dense")
    lowq.quantize(tmp_path / "dense", out=tmp_path / "packed", bits=4, group=128, method="rtn", act=act)
    model, _ = ready(str(tmp_path / "packed"), "cuda")
    found = []
    for recorded in (True, False):
        client = Client(model, running=4)
        try:
            passes = client.engine.passes
            totals = [M for b, M, _ in passes.captured if b == 0]
            assert max(totals) == 1024
            if not recorded:
                passes.captured.clear()
            found.append([client.tokens(client.ask(ids, 4))[0] for M in totals for ids in prompts(M, M - 1, seed=M)])
        finally:
            client.engine.stop(0)
    assert found[0] == found[1]
