"""--kv: the same texts from every decoder and engine that holds its cache in fewer bits."""

import json

import pytest
import torch
from coded_cache import OverCoded, logits
from test_generate_native import TOKENIZER, build, prompts, tokens
from transformers import AutoConfig, AutoModelForCausalLM

from lowq_cli import main
from lowq_cli.engine import stream
from lowq_cli.engine.decoders import decoder_of
from lowq_cli.engine.hf_eager import HfEagerDecoder
from lowq_cli.engine.native import NativeDecoder
from lowq_cli.evaluate import perplexity
from lowq_cli.files.source import DEMO
from lowq_kernels.decode import kv
from lowq_packers.errors import UnsupportedError, UsageError

CODED = kv.KINDS[1:]
LIVELY = {"repetition_penalty": 1.5}  # random models repeat themselves, which would test little


@pytest.mark.half_of("kind", "name")
@pytest.mark.parametrize("kind", CODED)
@pytest.mark.parametrize("name", ["llama", "qwen2 windows", "phi3"])
def test_fused_and_plain_decoders_give_the_same_tokens(name, kind):
    model = build(name)
    plain = tokens(model, HfEagerDecoder(OverCoded(model, kind)), **LIVELY)
    assert plain != tokens(model, HfEagerDecoder(model), **LIVELY)
    decoder = NativeDecoder(model, kv=kind)
    assert tokens(model, decoder, **LIVELY) == plain
    assert tokens(model, decoder, **LIVELY) == plain  # what it still holds of the text is what it was
    assert tokens(model, None, kv=kind, **LIVELY) == plain


@pytest.mark.parametrize("kind", CODED)
def test_logits_of_whole_texts_are_those_of_the_steps(kind):
    model, ids = build("llama"), torch.tensor([prompts()[0]])
    fused, plain = NativeDecoder(model, kv=kind).logits(ids), logits(model, kind, ids)
    assert torch.allclose(fused, plain, atol=1e-3)
    exact = model(input_ids=ids, use_cache=False).logits
    assert not torch.allclose(fused, exact, atol=1e-2)
    result = {k: perplexity.evaluate(model, ids[0], window=11, kv=k).ppl for k in kv.KINDS}
    assert len(set(result.values())) == 3


def test_the_choice_is_remembered_by_kind_and_refused_where_no_cache_of_ours_is():
    model = build("llama")
    first = decoder_of(model, "fp8")
    assert first.kv == "fp8"
    assert decoder_of(model, "fp8") is first
    assert decoder_of(model).kv == "16"
    with pytest.raises(UsageError, match="--kv 8 must be one of 16, fp8, 4"):
        stream(model, TOKENIZER, [1, 2], kv="8")
    gpt2 = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", vocab_size=64, n_embd=32, n_layer=1, n_head=2))
    with pytest.raises(UnsupportedError, match="whose cache has 16 bits; leave --kv 4 out"):
        decoder_of(gpt2, "4")


def test_commands_take_it_and_say_it(capsys):
    def run(*args):
        return main.main([*args, "--device", "cpu"])

    held = {}
    for kind in kv.KINDS:
        assert run("serve", str(DEMO), "--port", "0", "--dry-run", "--json", "--kv", kind, "--cache-tokens", "4096") == 0
        plan = json.loads(capsys.readouterr().out)
        assert plan["kv"] == kind
        held[kind] = plan["cache_bytes"] / plan["cache_tokens"]
    assert held["fp8"] < 0.53 * held["16"]
    assert held["4"] < 0.32 * held["16"]
    assert run("generate", str(DEMO), "--prompt", "Once", "--max-new-tokens", "3", "--json", "--kv", "4") == 0
    assert json.loads(capsys.readouterr().out)["kv"] == "4"
    assert run("eval", str(DEMO), "--max-tokens", "600", "--json", "--kv", "fp8") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["kv"] == "fp8"
    assert (report["model"], report["against"], report["text"]) == (str(DEMO), None, None)  # what a sweep's table needs
    assert run("eval", str(DEMO), "--kv", "2") == 2
    assert "--kv 2 must be one of 16, fp8, 4" in capsys.readouterr().err
