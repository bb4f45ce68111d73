"""The native decoder: the tokens of transformers' own greedy decoding, for every family it claims, packed or not."""

import copy
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import emulation

sys.path.append(str(Path(__file__).parents[1] / "families"))
from folded import Fold

from lowq_cli.engine import explain, folding, plan, stream
from lowq_cli.engine import steps as s
from lowq_cli.engine.decoders import decoder_of
from lowq_cli.engine.hf_eager import HfEagerDecoder
from lowq_cli.engine.native import NativeDecoder
from lowq_cli.hf.experts import QuantExperts
from lowq_cli.quantizers import rtn
from lowq_kernels.activations import STEPS
from lowq_kernels.decode import reference
from lowq_kernels.dispatch.registry import KernelSpec
from lowq_kernels.modules.linear import QuantLinear
from lowq_kernels.modules.stack import Stack
from lowq_packers.layouts import pack, unpack
from lowq_packers.scheme import Scheme

SMALL = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
TOKENIZER = SimpleNamespace(eos_token_id=None, decode=lambda ids, **kw: "".join(chr(64 + i) for i in ids))
FAMILIES = {
    "llama": {},
    "llama biases": {"attention_bias": True, "mlp_bias": True},
    "llama tied": {"tie_word_embeddings": True},
    "llama3 rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "mistral": {"sliding_window": 8},
    "mistral wide": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False},
    "qwen2 windows": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen3": {},
    "phi3": {"partial_rotary_factor": 0.5},
    "gemma3_text": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
}


def build(name):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    config = AutoConfig.for_model(name.split()[0].replace("llama3", "llama"), **SMALL, **(FAMILIES | MIXTURES)[name])
    model = AutoModelForCausalLM.from_config(config).float().eval()
    for path, p in model.named_parameters():  # larger than the initialisation, so that every path matters to the tokens
        if p.dim() == 1:
            p.data += (0.1 if "bias" in path else 0.3) * torch.randn_like(p)
        elif "embed" not in path:
            p.data *= 4
    model.generation_config.eos_token_id = None
    return model


def prompts():
    g = torch.Generator().manual_seed(3)
    return [torch.randint(2, 320, (n,), generator=g).tolist() for n in (11, 5)]


def tokens(model, decoder, n=14, **kw):
    g = stream(model, TOKENIZER, prompts(), max_new_tokens=n, decoder=decoder, **kw)
    list(g.pieces())
    return g.tokens


def transformers_tokens(model, n=14, **kw):
    out = []
    for p in prompts():
        ids = torch.tensor([p])
        o = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False, pad_token_id=0, **kw)
        out.append(o[0, len(p) :].tolist())
    return out


@pytest.mark.parametrize("name", FAMILIES)
def test_families_give_the_tokens_of_transformers(name):
    model = build(name)
    lively = {"repetition_penalty": 1.5}  # random models repeat themselves, which would test little
    wanted = transformers_tokens(model, **lively)
    assert len({t for row in wanted for t in row}) > 8
    assert plan.why_not(model) is None
    decoder = NativeDecoder(model)
    assert tokens(model, decoder, **lively) == wanted
    assert tokens(model, NativeDecoder(model, most=4), **lively) == wanted
    assert transformers_tokens(model, **lively) == wanted  # the model still works through its views


@pytest.mark.parametrize("name", FAMILIES)
def test_folding_changes_no_token(name):
    """Models whose residual add, norm and activation are fused into the products; Gemma's norm after a half cannot be."""
    lively = {"repetition_penalty": 1.5}
    wanted = tokens(model := build(name), NativeDecoder(model), **lively)
    decoder = NativeDecoder(model := build(name))
    decoder.plan.ops = replace(decoder.plan.ops, fold=Fold)
    assert any(isinstance(step, folding.ProductAdd) for step in decoder.plan.program(2)) == (name != "gemma3_text")
    assert decoder.about(2).endswith("into the matmuls, with config 4,2 for gate_up") == (name != "gemma3_text")
    assert tokens(model, decoder, **lively) == wanted


@pytest.mark.parametrize("taken", [False, True])
def test_gates_and_norms_of_prompts_go_to_the_products_behind_them(taken):
    """In passes of more than STEPS rows, whether a kernel computes both or none does."""
    asked, norms = [], []

    def norm_product(layer, x, delta, weight, eps):
        norms.append((layer.out_features, delta is None))
        return layer(reference.add_norm(x, delta, weight, eps)) if taken else None

    def gate_product(layer, gate_up, act):
        asked.append((layer.in_features, act))
        return layer(reference.gated(gate_up, act)) if taken else None

    prompt = [torch.randint(2, 320, (STEPS + 9,), generator=torch.Generator().manual_seed(4)).tolist()]
    steps = {"max_new_tokens": 3, "repetition_penalty": 1.5}
    g = stream(model := build("llama"), TOKENIZER, prompt, decoder=NativeDecoder(model), **steps)
    list(g.pieces())
    decoder = NativeDecoder(model := build("llama"))
    decoder.plan.ops = replace(decoder.plan.ops, fold=Fold, gate_product=gate_product, norm_product=norm_product)
    found = stream(model, TOKENIZER, prompt, decoder=decoder, **steps)
    list(found.pieces())
    assert found.tokens == g.tokens
    assert asked == [(96, "silu")] * 3  # a layer each; none in steps
    assert [first for _, first in norms] == [True] + [False] * 5


@pytest.mark.parametrize("name", ["llama", "qwen2", "phi3"])
@pytest.mark.parametrize("mixed", [False, True])
def test_packed_models_give_the_tokens_of_the_dequantized_model(name, mixed):
    model = build(name)
    dense = copy.deepcopy(model)
    for path, lin in list(model.named_modules()):
        if isinstance(lin, torch.nn.Linear) and "lm_head" not in path:
            q = rtn.quantize(lin.weight.data, Scheme(8 if mixed and "k_proj" in path else 4, 32))
            new = QuantLinear.from_quantized(q, lin.bias, dtype=torch.float32, layout="rowstream")
            model.set_submodule(path, new)
            dense.get_submodule(path).weight.data = q.dequantize()
    wanted = transformers_tokens(dense)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    decoder = NativeDecoder(model)
    assert tokens(model, decoder) == wanted
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert transformers_tokens(model) == wanted
    names = [k.layers for k in explain.kernels_of(explain.called(model, decoder), 1, torch.float32)]
    assert ("layers.*.qkv" in names) == (not mixed or name == "phi3")


def test_a_model_may_change_its_dtype_between_two_texts():
    """The joined layers, which no module owns, change with it, and so does the cache."""
    model = build("llama")
    for path, lin in list(model.named_modules()):
        if isinstance(lin, torch.nn.Linear):
            q = rtn.quantize(lin.weight.data, Scheme(4, 32))
            model.set_submodule(path, QuantLinear.from_quantized(q, dtype=torch.float32, layout="rowstream"))
    other = copy.deepcopy(model).half()
    wanted = tokens(other, decoder_of(other))
    tokens(model, decoder_of(model))
    assert tokens(model.half(), decoder_of(model)) == wanted
    assert decoder_of(model).linears["layers"][0]["qkv"].weight_scale.dtype == torch.float16


MIXTURES = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "norm_topk_prob": True}
    | {"decoder_sparse_step": 1, "mlp_only_layers": [1]},
    "qwen2_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [1]}
    | {"shared_expert_intermediate_size": 48, "decoder_sparse_step": 1},
    "qwen3_moe unnormed": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": False},
}


def pack_experts(model):
    """Quantize every expert of `model`, and set its dense weights to the dequantized values."""
    dense = copy.deepcopy(model)
    for path, module in list(model.named_modules()):
        if not hasattr(module, "gate_up_proj") or not hasattr(module, "num_experts"):
            continue
        packed, scheme = {}, Scheme(4, 16)
        for leaf in ("gate_up_proj", "down_proj"):
            qs = [rtn.quantize(w, scheme) for w in getattr(module, leaf).data]
            getattr(dense.get_submodule(path), leaf).data = torch.stack([q.dequantize() for q in qs])
            packed[leaf] = [pack(q, "rowstream") for q in qs]
        experts = QuantExperts(module, dict.fromkeys(packed, scheme), torch.float32)
        for leaf, ps in packed.items():
            words, scales, zeros = (torch.stack([getattr(p, f) for p in ps]) for f in ("words", "scales", "zeros"))
            experts.set_stack(leaf, Stack(words, scales, zeros, None, scheme, ps[0].N, ps[0].K, "rowstream"))
        model.set_submodule(path, experts)
    return dense


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_give_the_tokens_of_the_dequantized_model(name):
    model = build(name)
    dense = pack_experts(model)
    lively = {"repetition_penalty": 1.5}
    wanted = transformers_tokens(dense, **lively)
    assert len({t for row in wanted for t in row}) > 8
    assert plan.why_not(model) is None
    alone = explain.bytes_per_token(model, None)
    decoder = NativeDecoder(model)
    assert tokens(model, decoder, **lively) == wanted
    assert explain.bytes_per_token(model, decoder) == alone
    rows = {k.layers: k.count for k in explain.kernels_of(explain.called(model, decoder), 1, torch.float32)}
    assert rows["layers.*.experts.down_proj"] % MIXTURES[name].get("num_experts", 4) == 0


def both(x, ids, weights, up, down, act, config, shared):
    """The op "experts" with a shared expert, by its definition."""

    def mlp(x, gate_up, down):
        return reference.gated(x @ unpack(gate_up).dequantize().T, act) @ unpack(down).dequantize().T

    rows = [
        sum(w * mlp(one, up.expert(e), down.expert(e)) for w, e in zip(of, row, strict=True))
        for one, row, of in zip(x[:, None], ids.tolist(), weights, strict=True)
    ]
    return torch.cat(rows) + mlp(x, shared.gate_up, shared.down) * (x @ shared.opening).sigmoid()[:, None]


@pytest.mark.parametrize("named", ["", "few"])
def test_explain_says_which_kernel_computes_experts_and_why_the_others_do_not(named, monkeypatch):
    model = build("qwen3_moe")
    pack_experts(model)
    decoder = NativeDecoder(model)
    if named:
        monkeypatch.setenv("LOWQ_KERNEL", named)
    with emulation.changed_kernels() as kernels:
        how = {"op": "experts", "devices": ("cpu",), "dtypes": (torch.float32,)}
        kernels["few"] = KernelSpec("few", both, **how, rank=50, configs=({"WARPS": 2},))
        kernels["many"] = KernelSpec("many", both, **how, rank=10, refuse=lambda call: f"{call.M} tokens are few")
        rows = explain.kernels_of(explain.called(model, decoder), 2, torch.float32)
    experts = [row for row in rows if ".experts." in row.layers]
    assert [(row.kernel, row.config, row.chosen) for row in experts] == 2 * [("few", {"WARPS": 2}, "name" if named else "rule")]
    assert all(row.refused["many"] == "2 tokens are few" for row in experts)
    assert all("few" not in row.refused for row in experts)


@pytest.mark.parametrize("why", ["", "another scheme", "a kernel forced"])
def test_a_shared_expert_joins_the_others_where_a_kernel_takes_both(why):
    model = build("qwen2_moe")
    pack_experts(model)
    for path, module in list(model.named_modules()):
        if ".shared_expert." in path and isinstance(module, torch.nn.Linear):
            scheme = Scheme(8 if why == "another scheme" else 4, 16)
            forced = "reference" if why == "a kernel forced" else None
            packed = QuantLinear.from_quantized(rtn.quantize(module.weight, scheme), dtype=torch.float32)
            packed.kernel = forced
            model.set_submodule(path, packed)
    decoder = NativeDecoder(model)
    apart = decoder.plan.steps
    wanted = tokens(model, decoder)
    with emulation.changed_kernels() as kernels:

        def refuse(call):
            return None if call.shared and len({s for _, _, s, _ in (call.gate_up, *call.shared)}) == 1 else "no"

        kernels["joined"] = KernelSpec("joined", both, "experts", ("cpu",), dtypes=(torch.float32,), refuse=refuse)
        steps = folding.with_shared(apart, 1, torch.float32)
        if why:
            assert steps == apart
            return
        assert sum(isinstance(step, folding.SharedExperts) for step in steps) == 2
        assert len(apart) - len(steps) == 2 * 8  # of 11 steps the router, the experts and the norm are left
        assert isinstance(steps[-1], s.AddNorm)
        decoder.plan.steps = steps
        assert tokens(model, decoder) == wanted


def test_bytes_are_the_same_joined_or_not():
    plain, fused = build("llama"), build("llama")
    joined = NativeDecoder(fused)
    assert explain.bytes_per_token(plain, None) == explain.bytes_per_token(fused, joined)


def test_sampling_with_a_seed_repeats_and_the_cache_is_kept():
    model = build("llama")
    decoder = NativeDecoder(model)
    how = {"temperature": 0.9, "top_p": 0.9, "top_k": 50, "repetition_penalty": 1.2}
    first = tokens(model, decoder, seed=1, **how)
    cache = decoder.state[0].k
    assert tokens(model, decoder, seed=2, **how) != first
    assert tokens(model, decoder, seed=1, **how) == first
    assert decoder.state[0].k is cache
    assert tokens(model, decoder) == transformers_tokens(model)


def test_repetition_penalty_is_that_of_the_plain_decoder():
    model = build("llama")
    plain = tokens(model, HfEagerDecoder(model), repetition_penalty=1.5)
    assert plain != tokens(model, HfEagerDecoder(model)) == transformers_tokens(model)
    assert tokens(model, NativeDecoder(model), repetition_penalty=1.5) == plain


def test_a_longer_text_gets_a_larger_cache(monkeypatch):
    monkeypatch.setattr("lowq_cli.engine.graph.SMALLEST_BUCKET", 16)
    model = build("llama")
    decoder = NativeDecoder(model)
    assert tokens(model, decoder, n=3) == transformers_tokens(model, n=3)
    assert decoder.slots == 64
    assert tokens(model, decoder, n=60) == transformers_tokens(model, n=60)
    assert decoder.slots == 128
    drafting = NativeDecoder(model)
    drafting.drafts = True
    for n, slots in ((3, 64), (60, 128)):
        tokens(model, drafting, n=n)
        assert drafting.slots == slots  # a conversation is read again where it is without drafts


def test_choose_keeps_the_decoder_and_says_why_not_fused():
    from transformers import AutoConfig, AutoModelForCausalLM

    model = build("llama")
    assert isinstance(decoder_of(model), NativeDecoder)
    assert decoder_of(model) is decoder_of(model)
    gpt2 = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", vocab_size=64, n_embd=32, n_layer=1, n_head=2))
    decoder = decoder_of(gpt2)
    assert isinstance(decoder, HfEagerDecoder)
    assert "gpt2" in decoder.reason
    other = build("llama")
    other.config.rope_parameters = {"rope_type": "axial"}
    assert "rotary angles of the kind axial" in plan.why_not(other)


def test_a_text_that_goes_on_is_not_read_again():
    model = build("llama")
    decoder = NativeDecoder(model)
    first = stream(model, TOKENIZER, prompts()[0], max_new_tokens=9, decoder=decoder)
    list(first)
    decoder.held = [first.prompts[0] + first.tokens[0][:-1]]
    longer = first.prompts[0] + first.tokens[0] + [7, 8, 9]
    read = []
    embed = decoder.plan.embed
    decoder.plan.embed = lambda ids: read.append(ids.shape) or embed(ids)
    again = stream(model, TOKENIZER, longer, max_new_tokens=9, decoder=decoder)
    list(again)
    assert read[0] == (4,)  # the last token of the answer and three new ones
    fresh = stream(model, TOKENIZER, longer, max_new_tokens=9, decoder=NativeDecoder(model))
    list(fresh)
    assert again.tokens == fresh.tokens


def test_a_model_that_has_generated_still_saves_and_loads(tmp_path):
    import lowq

    lowq.quantize("demo", out=str(tmp_path / "packed"), bits=4, group=64, device="cpu")
    model, tokenizer = lowq.load(str(tmp_path / "packed"), device="cpu")
    first = lowq.stream(model, tokenizer, "Once upon a time", max_new_tokens=6)
    assert first.decoder.name == "native"
    text = "".join(first)
    model.save_pretrained(tmp_path / "again")
    tokenizer.save_pretrained(tmp_path / "again")
    again, _ = lowq.load(str(tmp_path / "again"), device="cpu")
    assert "".join(lowq.stream(again, tokenizer, "Once upon a time", max_new_tokens=6)) == text
