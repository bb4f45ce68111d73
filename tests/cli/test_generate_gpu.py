"""Decoding on a GPU: recorded steps and Triton kernels give transformers' tokens, and keep giving them."""

import copy
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lowq_cli import demo
from lowq_cli.engine import native_loader, stream
from lowq_cli.engine.folding import SharedExperts
from lowq_cli.engine.native import NativeDecoder
from lowq_cli.engine.sampling import Sampling
from lowq_cli.files.source import open_source
from lowq_cli.hf.expert_kinds import Kind
from lowq_cli.hf.experts import QuantExperts
from lowq_cli.quantizers import rtn
from lowq_cli.serving.continuous import ContinuousEngine
from lowq_cli.serving.offline import answer_all
from lowq_cli.serving.request import Request
from lowq_kernels.modules.linear import QuantLinear
from lowq_kernels.modules.stack import Stack
from lowq_packers.layouts import pack
from lowq_packers.scheme import Scheme

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
PROMPTS = ["Once upon a time there was a", "The whale"]
NEW = 200
TIE = 0.05  # two logits nearer than this (of about 10) change places with the rounding of 16-bit sums
ROUTER_TIE = (
    0.02  # so do the last expert taken and the first not, and what follows is another text: transformers' own in fp16, too
)


def story(dtype):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = demo.__path__[0]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).cuda().eval()
    return model, AutoTokenizer.from_pretrained(folder)


def agrees(model, prompt, tokens):
    """Whether each of `tokens` is the argmax after those before it, or ties with it, by one forward in fp32.

    Where a mixture's router ties, and so another expert may be taken, any token is right.
    """
    ids, ties = torch.tensor([prompt + tokens], device="cuda"), []

    def of_router(_, __, out):
        by_size = (out[0] if isinstance(out, tuple) else out).float().sort(-1, descending=True).values
        top_k = model.config.num_experts_per_tok
        ties.append((by_size[:, top_k - 1] - by_size[:, top_k] < ROUTER_TIE)[len(prompt) - 1 : -1])

    hooks = [m.register_forward_hook(of_router) for name, m in model.named_modules() if name.endswith(".gate")]
    with torch.inference_mode():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    for hook in hooks:
        hook.remove()
    got = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
    tied = torch.stack(ties).any(0) if ties else torch.zeros_like(got, dtype=torch.bool)
    assert tied.float().mean() < 0.5
    return bool(((logits.max(-1).values - got < TIE) | tied).all())


@pytest.mark.parametrize("kind", ["native", "native without graphs"])
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_tokens_are_those_of_the_model(kind, batch):
    model, tokenizer = story(torch.float16)
    truth = story(torch.float32)[0]
    decoder = NativeDecoder(model, graphs=kind == "native")
    for prompt in (PROMPTS[0], PROMPTS[1], PROMPTS[0]):
        g = stream(model, tokenizer, prompt, max_new_tokens=NEW, batch=batch, decoder=decoder)
        list(g)
        assert decoder.reason in ("", "without CUDA graphs, as asked")
        assert decoder.name == kind.split()[0]
        assert all(agrees(truth, p, t) for p, t in zip(g.prompts, g.tokens, strict=True))


def test_recorded_and_launched_steps_give_the_same_tokens():
    model, tokenizer = story(torch.float16)
    graphs, launched = NativeDecoder(model), NativeDecoder(model, graphs=False)
    for how in (
        {},
        {"temperature": 0.8, "seed": 3},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "repetition_penalty": 1.1},
    ):
        texts = [stream(model, tokenizer, PROMPTS, max_new_tokens=60, decoder=d, **how) for d in (graphs, launched, graphs)]
        for g in texts:
            list(g.pieces())
        assert texts[0].tokens == texts[1].tokens == texts[2].tokens


def test_two_threads_generate_and_record_at_once():
    model, tokenizer = story(torch.float16)
    alone = stream(model, tokenizer, PROMPTS, max_new_tokens=120, decoder=NativeDecoder(model, graphs=False))
    list(alone.pieces())
    models, results = [model, story(torch.float16)[0]], [[], []]

    def generate(mine):
        for _ in range(4):  # each decoder records steps of its own
            decoder = NativeDecoder(models[mine])
            g = stream(models[mine], tokenizer, PROMPTS, max_new_tokens=120, decoder=decoder)
            list(g.pieces())
            results[mine].append((decoder.reason, g.tokens))

    threads = [threading.Thread(target=generate, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert results == [[("", alone.tokens)] * 4] * 2


def test_many_texts_by_passes_that_are_recorded_as_they_are_met(monkeypatch):
    model, tokenizer = story(torch.float16)
    truth, engines = story(torch.float32)[0], []
    start = ContinuousEngine.start
    monkeypatch.setattr(ContinuousEngine, "start", lambda self, *how: (engines.append(self), start(self, *how)))
    asked = [tokenizer(" ".join(["The whale"] * n)).input_ids for n in (1, 2, 3, 40, 5, 90, 7, 2, 1, 30)]
    answers = list(answer_all(model, tokenizer, asked, 50, Sampling(), at_once=4))
    assert [len(a.tokens) for a in answers] == [50] * 10
    assert all(agrees(truth, p, a.tokens) for p, a in zip(asked, answers, strict=True))
    passes = engines[0].passes
    assert passes.reason == ""
    assert (4, 4, False) in passes.captured
    assert set(passes.captured) <= passes.met
    assert len(passes.captured) < len(list(passes.sizes.recorded()))


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_packed_models(bits, monkeypatch):
    monkeypatch.setattr("lowq_kernels.decode.fold.MOST_ROWS", 8)
    model, tokenizer = story(torch.float16)
    truth = story(torch.float32)[0]
    for path, lin in list(model.named_modules()):
        if isinstance(lin, torch.nn.Linear) and path != "lm_head":
            q = rtn.quantize(lin.weight.data, Scheme(bits, 64))
            packed = QuantLinear.from_quantized(q, dtype=torch.float16)
            model.set_submodule(path, packed)
            truth.get_submodule(path).weight.data = q.dequantize()
    decoder = NativeDecoder(model)
    plan = decoder.plan
    for folding in (True, False):
        plan.ops = plan.ops if folding else replace(plan.ops, fold=None)
        plan.rewrite(lambda step: step)
        assert (len(plan.program(3)) < len(plan.steps)) == folding
        decoder.captured.clear()
        g = stream(model, tokenizer, PROMPTS, max_new_tokens=100, decoder=decoder)
        list(g.pieces())
        assert decoder.reason == ""
        assert all(agrees(truth, p, t) for p, t in zip(g.prompts, g.tokens, strict=True))


@pytest.mark.parametrize(
    ("kind", "bits"), [("qwen3_moe", 4), ("qwen3_moe", 2), ("mixtral", 8), ("mixtral", 3), ("qwen2_moe", 4)]
)
def test_packed_mixtures(kind, bits):
    """The experts' kernel inside recorded steps, for one sequence and for several."""
    from transformers import AutoConfig, AutoModelForCausalLM

    facts = {"vocab_size": 320, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    facts |= {"num_key_value_heads": 2, "head_dim": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    facts |= {"num_local_experts": 8} if kind == "mixtral" else {"num_experts": 8, "moe_intermediate_size": 64}
    facts |= {"shared_expert_intermediate_size": 96} if kind == "qwen2_moe" else {}
    torch.manual_seed(5)
    config = AutoConfig.for_model(kind, **facts, num_experts_per_tok=2)
    truth = AutoModelForCausalLM.from_config(config).float().cuda().eval()
    for p in truth.parameters():
        if p.dim() > 1:
            p.data *= 4
    model, scheme = copy.deepcopy(truth).half(), Scheme(bits, 32)
    for path, module in list(model.named_modules()):
        if type(module) is torch.nn.Linear and path != "lm_head":
            q = rtn.quantize(module.weight.float(), scheme if ".shared_expert." in path else Scheme(8, 64))
            truth.get_submodule(path).weight.data = q.dequantize()
            model.set_submodule(path, QuantLinear.from_quantized(q, dtype=torch.float16))
        if hasattr(module, "gate_up_proj") and hasattr(module, "num_experts"):
            packed = {}
            for leaf in Kind().stacks:
                qs = [rtn.quantize(w.float(), scheme) for w in getattr(module, leaf).data]
                packed[leaf] = [pack(q, "rowstream") for q in qs]
                getattr(truth.get_submodule(path), leaf).data = torch.stack([q.dequantize() for q in qs])
            experts = QuantExperts(module, dict.fromkeys(Kind().stacks, scheme), torch.float16)
            for leaf, ps in packed.items():
                words, scales, zeros = (torch.stack([getattr(p, f) for p in ps]) for f in ("words", "scales", "zeros"))
                experts.set_stack(leaf, Stack(words, scales.half(), zeros.half(), None, scheme, ps[0].N, ps[0].K, "rowstream"))
            model.set_submodule(path, experts.prepare())
            assert experts.fused(torch.float16, 2) is not None
    decoder = NativeDecoder(model)
    joined = [isinstance(step, SharedExperts) for step in decoder.plan.program(1)]
    assert sum(joined) == (2 if kind == "qwen2_moe" else 0)
    tokenizer = SimpleNamespace(eos_token_id=None, decode=lambda ids, **kw: "x" * len(ids))
    for prompts in (
        [5, 6, 7],
        [[9, 8], [1, 2, 3, 4], [7] * 80],
        [list(range(3, 303))],
    ):  # the last by grouped products on Hopper
        g = stream(model, tokenizer, prompts, max_new_tokens=40, decoder=decoder)
        list(g.pieces())
        assert decoder.reason == ""
        assert all(agrees(truth, p, t) for p, t in zip(g.prompts, g.tokens, strict=True))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_mixture_that_is_not_quantized_is_read_recorded_and_served(family, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 64, "num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2}
    config = AutoConfig.for_model(family, **sizes, moe_intermediate_size=64, max_position_embeddings=512, eos_token_id=None)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float16).eval()
    for p in model.parameters():
        p.data.normal_(0, p.shape[-1] ** -0.5) if p.dim() > 1 else p.data.fill_(1.0)
    model.save_pretrained(tmp_path / "m")
    with open_source(str(tmp_path / "m")) as source:
        ours = native_loader.read(source, torch.device("cuda"))
    prompt = list(range(5, 35))
    ids = torch.tensor([prompt], device="cuda")
    wanted = model.cuda()(ids).logits.float()
    assert float((ours(ids).logits.float() - wanted).norm() / wanted.norm()) < 2e-2
    decoder = NativeDecoder(ours)
    alone = [int(decoder.start([prompt], Sampling(), 12)[0]), *(int(decoder.step()[0]) for _ in range(11))]
    assert decoder.reason == ""
    engine, events, ended = ContinuousEngine(ours, 64, running=32, cache_tokens=4096), [], threading.Event()

    def sink(found):
        events.extend(e for _, e in found)
        if sum(e.finish_reason is not None for e in events) == 20:
            ended.set()

    engine.start(sink)
    assert engine.reason == ""
    for _ in range(20):
        engine.submit(Request(tuple(prompt), 12))
    assert ended.wait(60)
    engine.stop(1)
    assert {e.finish_reason for e in events} == {None, "length"}
    assert sum(e.token == alone[0] for e in events) >= 20
