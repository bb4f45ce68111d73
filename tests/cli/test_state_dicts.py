"""A model's state dict is the same before and after a generation, and either can be loaded before and after one."""

import copy
import io

import pytest
import torch
from checkpoints import FAMILIES, SCHEMES
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import lowq
from lowq_cli.quantizers import rtn
from lowq_kernels.modules import linear
from lowq_kernels.modules.joined import JoinedRows, join
from lowq_kernels.modules.linear import QuantLinear
from lowq_packers import fp8
from lowq_packers.layouts import PackedWeight, unpack
from lowq_packers.scheme import E4M3, Scheme

N = 12
PROMPTS = [[1, 17, 42, 99, 7], [1, 64, 5, 31, 150, 23]]
TIED = SCHEMES | {"embedding": Scheme(8, 32, "float")}


def opened(folder, dtype):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def tokens(model, tokenizer):
    g = lowq.stream(model, tokenizer, PROMPTS, max_new_tokens=N)
    list(g)
    return g.tokens


def copied(state):
    return {name: t.clone() for name, t in state.items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def other(state):
    """The weights of another model: the rows of each tensor in reverse."""
    return {name: t.flip(0) if t.dim() else t.clone() for name, t in state.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("schemes", [{}, SCHEMES, TIED], ids=["dense", "packed", "embedding"])
@pytest.mark.parametrize("family", FAMILIES)
def test_state_dicts_from_before_and_after_a_generation_are_one(family, schemes, dtype, family_checkpoints, tmp_path):
    c = family_checkpoints(family, schemes=schemes or SCHEMES)
    folder, tokenizer = c.packed if schemes else c.dense, AutoTokenizer.from_pretrained(c.dense)
    model, another = opened(folder, dtype), opened(folder, dtype)
    first = copied(model.state_dict())
    second = other(first)
    another.load_state_dict(second)
    assert same(another.state_dict(), second)
    another.save_pretrained(tmp_path / "another")
    written = opened(tmp_path / "another", dtype)
    here, there = tokens(model, tokenizer), tokens(written, tokenizer)
    assert here != there
    assert tokens(another, tokenizer) == there
    for m, state in ((model, first), (another, second), (written, second)):
        assert same(m.state_dict(), state)
        assert same(m.state_dict(keep_vars=True), state)
    for state, expected in ((copied(another.state_dict()), there), (copied(written.state_dict()), there), (first, here)):
        model.load_state_dict(state)
        assert same(model.state_dict(), state)
        assert tokens(model, tokenizer) == expected


KINDS = [
    Scheme(8, 64, "float"), Scheme(4, 32, "int"), Scheme(3, 16, "none"), Scheme(2, 128, "float"), Scheme(1, 32, "none"),
    Scheme(4, 32, "none", "fitted"), Scheme(3, 16, "none", "fitted", "e4m3"), Scheme(4, 16, "none", "e2m1", "e4m3"),
    Scheme(4, 32, "none", "e2m1", "e8m0"), Scheme.in_blocks((128, 128)),
]  # fmt: skip
NAMES, ROWS, K = ("q_proj", "k_proj", "v_proj"), (256, 128, 64), 128


def layer(scheme, rows, seed, dtype, biased):
    draw = torch.Generator().manual_seed(seed)
    W, bias = torch.randn(rows, K, generator=draw) * 0.1, torch.randn(rows, generator=draw) if biased else None
    if scheme.block_rows > 1:
        m = fp8.quantize(W, scheme.block)
        return QuantLinear.from_packed(PackedWeight(m.q, m.scales, None, scheme, rows, K, E4M3), bias, dtype=dtype)
    return QuantLinear.from_quantized(rtn.quantize(W, scheme, dtype), bias, dtype=dtype)


def attention(scheme, dtype=torch.bfloat16, seed=0, biases=(False, True, False)):
    """A module of three layers that `join` joins."""
    parent = nn.Module()
    for i, (name, rows, biased) in enumerate(zip(NAMES, ROWS, biases, strict=True)):
        setattr(parent, name, layer(scheme, rows, 3 * seed + i, dtype, biased))
    return parent


def products(parent, dtype=torch.bfloat16):
    x = torch.randn(3, K, generator=torch.Generator().manual_seed(9)).to(dtype)
    with torch.no_grad():
        return torch.cat([getattr(parent, name)(x) for name in NAMES], -1), x


def agree(joined, parent, dtype=torch.bfloat16):
    """The joined layer, the views into it and these layers compute the same."""
    expected, x = products(parent, dtype)
    with torch.no_grad():
        return torch.equal(joined(x), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(("scheme", "hardware"), [*((s, False) for s in KINDS), (KINDS[-1], True)], ids=str)
def test_joined_layers_of_each_kind_save_and_load_as_those_that_they_were(scheme, hardware, dtype, monkeypatch):
    """Weights of blocks in fp8 stay as files have them where the hardware multiplies them; elsewhere they are widened."""
    monkeypatch.setattr(linear, "has_fp8", lambda device: hardware)
    parent, second = attention(scheme, dtype), attention(scheme, dtype, seed=1)
    first, other = copied(parent.state_dict()), copied(second.state_dict())
    whole = join(parent, NAMES)
    assert all(type(getattr(parent, name)) is JoinedRows for name in NAMES)
    assert same(parent.state_dict(), first)
    for state, source in ((other, second), (first, attention(scheme, dtype))):
        parent.load_state_dict(state)
        assert same(parent.state_dict(), state)
        assert join(parent, NAMES) is whole
        if not hardware:
            assert agree(whole, source, dtype)
            assert torch.equal(products(parent, dtype)[0], products(source, dtype)[0])
    for name, of in zip(NAMES, ROWS, strict=True):  # one after the other
        rows = {leaf: t for leaf, t in other.items() if leaf.startswith(name)}
        assert set(parent.load_state_dict(rows, strict=False).missing_keys) == other.keys() - rows.keys()
        assert same({leaf: t for leaf, t in parent.state_dict().items() if leaf in rows}, rows)
        assert getattr(parent, name).out_features == of
    assert same(parent.state_dict(), other)


def test_what_does_not_fit_is_refused_by_name():
    parent = attention(Scheme(4, 32, "float"))
    join(parent, NAMES)
    before = copied(parent.state_dict())
    more = {**before, "k_proj.weight": before["q_proj.weight"], "v_proj.bias": before["k_proj.bias"]}
    del more["q_proj.weight_zero"]
    with pytest.raises(RuntimeError) as e:
        parent.load_state_dict(more)
    for said in ('Missing key(s) in state_dict: "q_proj.weight_zero"', 'key(s) in state_dict: "v_proj.bias"', "k_proj.weight:"):
        assert said in str(e.value)
    assert same(parent.state_dict(), before)


@pytest.mark.parametrize("replaced", NAMES)
def test_a_joined_layer_with_a_replaced_part_is_taken_apart_and_joined_again(replaced):
    scheme = Scheme(4, 32, "float")
    parent, expected = attention(scheme), attention(scheme)
    join(parent, NAMES)
    for model in (parent, expected):
        setattr(model, replaced, layer(scheme, ROWS[NAMES.index(replaced)], 77, torch.bfloat16, False))
    assert same(parent.state_dict(), expected.state_dict())
    assert agree(join(parent, NAMES), expected)
    assert same(parent.state_dict(), expected.state_dict())
    assert len({vars(getattr(parent, name))["whole"] for name in NAMES}) == 1


@pytest.mark.parametrize("replaced", NAMES)
def test_the_parts_that_are_left_move_with_the_model(replaced):
    scheme = Scheme(4, 32, "float")
    parent, expected = attention(scheme), attention(scheme)
    join(parent, NAMES)
    for model in (parent, expected):
        setattr(model, replaced, layer(scheme, ROWS[NAMES.index(replaced)], 77, torch.bfloat16, False))
        model.half()
    assert same(parent.state_dict(), expected.state_dict())
    assert torch.equal(products(parent, torch.float16)[0], products(expected, torch.float16)[0])


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("assign", [False, True])
def test_loaded_in_any_mode_after_a_generation_in_another(mode, assign, family_checkpoints):
    c = family_checkpoints("qwen2", "bfloat16", TIED)
    tokenizer, model = AutoTokenizer.from_pretrained(c.dense), opened(c.packed, torch.bfloat16)
    with mode():
        here = tokens(model, tokenizer)
    first = copied(model.state_dict())
    model.load_state_dict(other(first), assign=assign)
    assert tokens(model, tokenizer) != here
    with mode():
        model.load_state_dict(first, assign=assign)
    assert tokens(model, tokenizer) == here


def test_copies_of_a_model_that_generated_load_on_their_own(family_checkpoints, tmp_path):
    c = family_checkpoints("llama-tied", "bfloat16", TIED)
    tokenizer, model = AutoTokenizer.from_pretrained(c.dense), opened(c.packed, torch.bfloat16)
    here, file = tokens(model, tokenizer), io.BytesIO()
    first = copied(model.state_dict())
    model.save_pretrained(tmp_path / "saved")
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), torch.load(file, weights_only=False), opened(tmp_path / "saved", torch.bfloat16)]
    for another in copies:
        assert tokens(another, tokenizer) == here
        assert same(another.state_dict(), first)
        another.load_state_dict(other(first))
        assert tokens(another, tokenizer) == tokens(copies[0], tokenizer) != here
    assert tokens(model, tokenizer) == here
    assert same(model.state_dict(), first)


def test_a_packed_embedding_alone_changes_the_head_that_shares_its_table(family_checkpoints):
    model = opened(family_checkpoints("llama-tied", "bfloat16", TIED).packed, torch.bfloat16)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    embedding.load_state_dict(other(embedding.state_dict()))
    assert torch.equal(unpack(head.packed).W_q, unpack(embedding.packed).W_q)
