"""A model that is changed after it generated, and several generations of a model at a time."""

import copy
import io
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest

import pytest
import torch
from test_adapters import write
from torch import nn

import lowq
from lowq_cli.engine.model_record import owned
from lowq_cli.engine.native import NativeDecoder
from lowq_cli.hf.activations import set_activations
from lowq_packers.errors import UsageError

TEXTS = "Once upon a time there was", "The king said to his"
N = 16


@pytest.fixture(scope="module")
def folders(short_demo, tmp_path_factory):
    packed = tmp_path_factory.mktemp("changed") / "packed"
    lowq.quantize(short_demo, out=packed, bits=4, group=64, method="rtn", device="cpu", act="int8")
    return {"dense": short_demo, "packed": packed}


def loaded(folder, **how):
    return lowq.load(folder, device="cpu", dtype=torch.float32, **how)


def tokens(model, tokenizer, prompt=TEXTS[0], **how):
    g = lowq.stream(model, tokenizer, prompt, max_new_tokens=N, **how)
    list(g)
    return g.tokens[0]


def of_transformers(model, tokenizer, prompt=TEXTS[0]):
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    return model.generate(ids, max_new_tokens=N, do_sample=False)[0, ids.shape[1] :].tolist()


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def random_linear(layer):
    return lowq.QuantLinear.from_quantized(
        lowq.quantize_tensor(random(layer.out_features, layer.in_features) * 0.05), dtype=torch.float32
    )


def replace_down(model):
    for layer in model.model.layers:
        layer.mlp.down_proj = random_linear(layer.mlp.down_proj)


def replace_query(model):
    for layer in model.model.layers:
        layer.self_attn.q_proj = random_linear(layer.self_attn.q_proj)


def replace_head(model):
    head = nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=False)
    head.weight.data = random(*head.weight.shape)
    model.set_output_embeddings(head)


def replace_norm(model):
    model.model.norm.weight = nn.Parameter(model.model.norm.weight.detach() * random(model.config.hidden_size))


def write_norm(model):
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight.mul_(random(model.config.hidden_size))


def drop_a_layer(model):
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:1], 1


def rotate_otherwise(model):
    model.config.rope_parameters["rope_theta"] = 50.0
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)


def hook(model):
    model.model.layers[0].register_forward_hook(lambda module, given, out: out * 3)


def add_an_adapter(model):
    peft = pytest.importorskip("peft", reason="LoRA needs peft")
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.data = random(*p.shape)


CHANGES = [
    replace_down, replace_query, replace_head, replace_norm, write_norm, drop_a_layer, rotate_otherwise, hook, add_an_adapter,
]  # fmt: skip


@pytest.mark.parametrize("kind", ["dense", "packed"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_a_generation_counts(folders, change, kind):
    model, tokenizer = loaded(folders[kind])
    before = tokens(model, tokenizer)
    change(model)
    after = tokens(model, tokenizer)
    assert after == of_transformers(model, tokenizer)
    assert after != before


@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_adapters_that_are_turned_off_and_on_again_count(folders, kind):
    model, tokenizer = loaded(folders[kind])
    base = tokens(model, tokenizer)
    add_an_adapter(model)
    adapted = tokens(model, tokenizer)
    assert adapted != base
    model.disable_adapters()
    assert tokens(model, tokenizer) == base
    model.enable_adapters()
    assert tokens(model, tokenizer) == adapted


def test_the_cache_of_a_text_is_not_used_with_activations_in_another_mode(folders):
    model, tokenizer = loaded(folders["packed"])
    prompt = TEXTS[0] * 40
    tokens(set_activations(model, "none"), tokenizer, prompt)
    held = owned(model).decoder
    tokens(set_activations(model, "int8"), tokenizer, prompt)
    assert owned(model).decoder is not held


def test_without_a_change_decoder_and_cache_stay(folders):
    for folder in folders.values():
        model, tokenizer = loaded(folder)
        tokens(model, tokenizer)
        decoder = owned(model).decoder
        assert isinstance(decoder, NativeDecoder)
        of_transformers(model, tokenizer)
        tokens(model, tokenizer, TEXTS[1])
        assert owned(model).decoder is decoder


def test_an_adapter_stays_when_the_model_is_cast_or_changed(folders, tmp_path):
    adapter = write(tmp_path / "adapter", 1, layers=("0", "1"))
    model, tokenizer = lowq.load(folders["dense"], device="cpu", dtype=torch.bfloat16, lora=adapter)
    tokens(model, tokenizer)
    model.float()
    expected = of_transformers(model, tokenizer)
    assert tokens(model, tokenizer) == expected
    assert isinstance(owned(model).decoder, NativeDecoder)
    write_norm(model)
    assert tokens(model, tokenizer) == of_transformers(model, tokenizer) != expected


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_an_optimizer_from_before_a_generation_trains_all_weights(folders, mode):
    model, tokenizer = loaded(folders["dense"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with mode():
        tokens(model, tokenizer)
    ids = tokenizer(TEXTS[0], return_tensors="pt").input_ids
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    assert [name for name, p in model.named_parameters() if torch.equal(p, before[name])] == []
    assert tokens(model, tokenizer) == of_transformers(model, tokenizer)


@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_copies_of_a_model_that_generated(folders, kind):
    model, tokenizer = loaded(folders[kind])
    expected, file = tokens(model, tokenizer), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert owned(other).decoder is None
        assert tokens(other, tokenizer) == expected
        write_norm(other)
        assert tokens(other, tokenizer) == of_transformers(other, tokenizer) != expected
    assert tokens(model, tokenizer) == expected


@pytest.mark.parametrize("kind", ["dense", "packed"])
@pytest.mark.parametrize("draft", ["none", "ngram"])
def test_generations_side_by_side_do_not_disturb_each_other(folders, kind, draft):
    model, tokenizer = loaded(folders[kind])
    expected = [tokens(model, tokenizer, text) for text in TEXTS]
    both = [lowq.stream(model, tokenizer, text, max_new_tokens=N, draft=draft) for text in TEXTS]
    list(zip_longest(*both))
    assert [g.tokens[0] for g in both] == expected
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(lambda text: tokens(model, tokenizer, text, draft=draft), TEXTS * 2)] == expected * 2


def test_generations_with_a_draft_model_and_without_side_by_side(folders):
    model, tokenizer = loaded(folders["dense"])
    expected = [tokens(model, tokenizer, text) for text in TEXTS]
    for drafts in ((str(folders["packed"]), "none"), ("none", folders["packed"]), (folders["packed"], folders["packed"])):
        both = [lowq.stream(model, tokenizer, t, max_new_tokens=N, draft=d) for t, d in zip(TEXTS, drafts, strict=True)]
        list(zip_longest(*both))
        assert [g.tokens[0] for g in both] == expected


def test_one_generation_after_another_shares_a_decoder(folders):
    model, tokenizer = loaded(folders["packed"])
    g = lowq.stream(model, tokenizer, TEXTS[0], max_new_tokens=N)
    for _ in g:
        break
    assert lowq.stream(model, tokenizer, TEXTS[0], max_new_tokens=N).decoder is g.decoder


def test_a_generation_that_was_left_does_not_begin_again(folders):
    g = lowq.stream(*loaded(folders["packed"]), TEXTS[0], max_new_tokens=N)
    for _ in g:
        break
    with pytest.raises(UsageError, match="was interrupted"):
        list(g)


def test_a_finished_generation_has_no_more_pieces(folders):
    g = lowq.stream(*loaded(folders["packed"]), TEXTS[0], max_new_tokens=N)
    text = "".join(g)
    assert "".join(g) == ""
    assert g.text == text
