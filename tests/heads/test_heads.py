"""Draft heads as published, run by the engine's plans: the tokens, logits and acceptance of a plain torch reference."""

import copy
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))
import publishing as pub
from plain_torch import Eagle3, Mtp, PEagle

from lowq_cli.engine import heads, native_loader
from lowq_cli.engine.batch import Batch, Rectangle
from lowq_cli.engine.drafts.drafter import DraftRows
from lowq_cli.engine.drafts.heads import load, takes
from lowq_cli.engine.open_model import ready
from lowq_cli.engine.plan import plan_of
from lowq_cli.engine.state import static_state
from lowq_cli.files.source import open_source
from lowq_cli.interop.inspection import inspect_model
from lowq_packers.errors import DamagedError, UnsupportedError, UsageError
from lowq_packers.heads import is_head, read_head

CPU = torch.device("cpu")
TEXT = torch.randint(3, pub.VOCAB, (14,), generator=torch.Generator().manual_seed(9))


def native(folder, device=CPU):
    with open_source(str(folder)) as source:
        return native_loader.read(source, device)


def states_of(model, layers, ids=TEXT, slots=32):
    """The hidden states that a head reads, by the engine: streams entering layers, or the last one normed."""
    plan = plan_of(model)
    plan.tap(tuple(i for i in layers if i >= 0))
    there, device = Rectangle(slice(0, 1), 0, len(ids), [len(ids)], 1), ids.device
    start = torch.zeros(1, dtype=torch.int32, device=device)
    batch = Batch(plan.ops, ids, 0, start, plan.angles(slots, device), rectangle=there)
    taps = []
    y = plan.hidden(plan.embed(ids), batch, static_state(plan, 1, slots, "16"), taps)
    return taps or [y]


def guessed(plan, ids, states, K):
    """(drafts, logits of each) of K tokens by a head's plan, its rows after the first pass one by one."""
    state, angles, n = static_state(plan, 1, 64, "16"), plan.angles(64, CPU), len(ids)
    batch = Batch(plan.ops, ids, 0, torch.zeros(1, dtype=torch.int32), angles, rectangle=Rectangle(slice(0, 1), 0, n, [n], 1))
    y, x = plan.guess(ids, plan.entering(states), batch, state)
    drafts, logits = [], []
    for k in range(K):
        logits.append(plan.logits(y[-1:])[0])
        drafts.append(int(plan.ids(logits[-1].argmax()[None])))
        token = torch.tensor([drafts[-1]])
        batch = Batch(plan.ops, token, 1, torch.tensor([n + k], dtype=torch.int32), angles, torch.tensor([1]))
        y, x = plan.guess(token, x[-1:].clone(), batch, state)
    return drafts, torch.stack(logits)


def theirs(model, layers):
    """The same hidden states from transformers: streams entering layers of `TEXT`, past the last layer before its norm."""
    kept, inner = {}, model.model

    def keep(i):
        def hook(module, args, kwargs):
            kept[i] = (args[0] if args else kwargs["hidden_states"])[0]

        return hook

    places = enumerate([*inner.layers, inner.norm])
    hooks = [layer.register_forward_pre_hook(keep(i), with_kwargs=True) for i, layer in places]
    with torch.no_grad():
        kept[-1] = inner(TEXT[None]).last_hidden_state[0]
    for hook in hooks:
        hook.remove()
    return [kept[i].float() for i in layers]


IDS = "eagle_aux_hidden_state_layer_ids"
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLMEagle3"]}
BEFORE_FC = {"norm_before_fc": True, "norm_before_residual": False}
EAGLES = {  # name -> (folder's writer, tensors, config, what it reads of a model of 6 layers)
    "SpecForge": (pub.specforge, {}, {}, (2, 3, 3)),
    "SafeAILab, prefixed": (pub.specforge, {"prefix": "model."}, {}, (2, 3, 3)),
    "all of the vocabulary": (pub.specforge, {"guesses": pub.VOCAB}, {}, (2, 3, 3)),
    "its own embedding": (pub.specforge, {"embed": True}, {}, (2, 3, 3)),
    "q and k normed": (pub.specforge, {"qk_norm": True}, QWEN3, (2, 3, 3)),
    "layers by what enters them": (pub.specforge, {}, {IDS: [1, 4, 6]}, (1, 4, 6)),
    "layers by what leaves them": (pub.specforge, {}, {"eagle_config": {IDS: [0, 2, 4]}}, (1, 3, 5)),
    "layers with the end": (pub.specforge, {}, {"eagle_config": {IDS: [3, 5, 6]}}, (3, 5, 6)),
    "EAGLE-3.1": (pub.specforge, {"fc_norm": True}, {"norm_output": True, "fc_norm": True}, (2, 3, 3)),
    "speculators": (pub.speculators, {"layer": "layers.0"}, {}, (2, 3, 3)),
    "speculators, norm before fc": (pub.speculators, {"layer": "layers.0", "input_norm": True}, BEFORE_FC, (2, 3, 3)),
    "no features of layers": (pub.specforge, {"taps": 1}, {"eagle_config": {"use_aux_hidden_state": False}}, (-1,)),
}


def eagle(folder, name):
    """A head's folder, its tensors by published names, and its flat config for the reference."""
    write, how, config, taps = EAGLES[name]
    how = dict(how)
    prefix, embed, fc_norm, input_norm = (how.pop(n, None) for n in ("prefix", "embed", "fc_norm", "input_norm"))
    tensors = pub.eagle3_tensors(**how)
    if how.get("taps") == 1:
        del tensors["fc.weight"]
    if embed:
        tensors |= pub.drawn({"embed_tokens.weight": (pub.VOCAB, pub.H)}, 11)
    if fc_norm:
        tensors |= pub.drawn({f"fc_norm.{i}.weight": (pub.H,) for i in range(3)}, 12)
    if input_norm:
        tensors |= pub.drawn({"input_norm.weight": (3 * pub.H,)}, 13)
    named = {n if n in ("d2t", "t2d", "lm_head.weight") else (prefix or "") + n: t for n, t in tensors.items()}
    write(folder, named, **config)
    flat = {**pub.FLAT, "norm_before_residual": write is pub.speculators, **config}
    return tensors, flat, taps


@pytest.mark.parametrize("name", EAGLES)
def test_inspect_does_not_take_a_head_for_a_model(name, tmp_path):
    eagle(tmp_path, name)
    found = inspect_model(str(tmp_path))
    assert found.engines == ("none as a model",)
    assert found.notes[-1].startswith("a draft head: ")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    return pub.target(folder), native(folder)


@pytest.mark.parametrize("name", EAGLES)
def test_eagle3_guesses_as_the_reference(name, llama, tmp_path):
    model, ours = llama
    tensors, config, taps = eagle(tmp_path / "head", name)
    plan = heads.load(str(tmp_path / "head"), ours)
    assert plan.layers == taps
    reference = Eagle3(tensors, config, model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach())
    expected = reference(TEXT[1:], [x[:-1] for x in theirs(model, taps)], 5)
    states = states_of(ours, plan.layers)
    torch.testing.assert_close(states, theirs(model, taps), rtol=2e-4, atol=2e-4)
    result = guessed(plan, TEXT[1:], [x[:-1] for x in states], 5)
    assert result[0] == expected[0]
    torch.testing.assert_close(result[1], expected[1], rtol=1e-3, atol=1e-3)


def _first(head, **changed):
    """The head with another Beside in its first layer."""
    (attend, then), *rest = head.model.layers
    return replace(
        head, model=replace(head.model, layers=((replace(attend, beside=replace(attend.beside, **changed)), then), *rest))
    )


def _swapped(head):
    beside = head.model.layers[0][0].beside
    return _first(head, embedding=beside.hidden, hidden=beside.embedding)


WRONG = {  # what of a head is read otherwise than it is meant
    "the hidden state first": lambda r: _first(r, hidden_first=True),
    "the norms exchanged": _swapped,
    "the residual stream normed": lambda r: _first(r, replaces=True),
    "the embedding of position 0 left out": lambda r: _first(r, zero_first=True),
    "the normed state goes round": lambda r: replace(r, recycled="normed"),
    "another layer": lambda r: replace(r, taps=(1, 4, 5)),
    "layers in another order": lambda r: replace(r, taps=(4, 1, 6)),
}


@pytest.mark.parametrize("fact", WRONG)
def test_a_fact_of_eagle3_that_is_read_otherwise_shows(fact, llama, tmp_path):
    model, ours = llama
    tensors, config, taps = eagle(tmp_path / "head", "layers by what enters them")
    expected = Eagle3(tensors, config, model.model.embed_tokens.weight.detach())(
        TEXT[1:], [x[:-1] for x in theirs(model, taps)], 5
    )
    plan = heads.load(
        str(tmp_path / "head"), ours, lambda *given: replace(r := heads.read_head(*given), head=WRONG[fact](r.head))
    )
    _, logits = guessed(plan, TEXT[1:], [x[:-1] for x in states_of(ours, plan.layers)], 5)
    assert float((logits - expected[1]).norm() / expected[1].norm()) > 0.005


def rounds(drafter, model, text, K):
    """Drafts of a head after every place of a text that ends there: read up to it, then asked; as the decoder does."""
    drafter.make_room(2, 64)
    states = states_of(model, drafter.layers, text)
    there = torch.zeros(1, dtype=torch.int64) + 1  # the second place: rows name their place
    result = []
    for t in range(2, len(text) - 1):
        drafter.make_room(2, 64)
        at = torch.arange(t, dtype=torch.int32)
        hidden = dict(zip(drafter.layers, (x[:t] for x in states), strict=True))
        drafter.read(text[1 : t + 1], hidden, DraftRows(at, there.expand(t), t))
        hidden = dict(zip(drafter.layers, (x[t - 2 : t + 1] for x in states), strict=True))
        ids, last = text[t - 1 : t + 2].clone(), torch.tensor([1])
        ids[2] = 3  # drawn after a draft that was wrong: the row is of no use, and was written
        result.append(
            drafter.draft(ids, hidden, DraftRows(at[-1:] + torch.arange(-1, 2).int(), there.expand(3), 3), last, K)[0].tolist()
        )
    return result


def test_rounds_of_p_eagle_are_those_of_the_reference(llama, tmp_path):
    model, ours = llama
    tensors, more = pub.peagle_tensors(), {"speculators_model_type": "peagle", "mask_token_id": 7}
    config = {**pub.FLAT, "norm_before_residual": True, **more}
    pub.speculators(tmp_path / "head", tensors, architectures=["PEagleSpeculator"], **more)
    drafter, reference = load(str(tmp_path / "head"), ours), PEagle(tensors, config)
    assert drafter.name == "P-EAGLE"
    states = theirs(model, drafter.layers)
    expected = [reference(TEXT[1 : t + 1], [x[:t] for x in states], 4)[0] for t in range(2, len(TEXT) - 1)]
    assert rounds(drafter, ours, TEXT, 4) == expected
    other = PEagle(tensors, config | {"mask_token_id": 8})
    assert [other(TEXT[1 : t + 1], [x[:t] for x in states], 4)[0] for t in range(2, len(TEXT) - 1)] != expected


def test_rounds_of_a_drafter_are_those_of_the_reference(llama, tmp_path):
    model, ours = llama
    tensors, config, taps = eagle(tmp_path / "head", "SpecForge")
    drafter = load(str(tmp_path / "head"), ours)
    reference = Eagle3(tensors, config, model.model.embed_tokens.weight.detach())
    states = theirs(model, taps)
    expected = [reference(TEXT[1 : t + 1], [x[:t] for x in states], 4)[0] for t in range(2, len(TEXT) - 1)]
    assert rounds(drafter, ours, TEXT, 4) == expected


QWEN = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
NEXTN = tuple(f"model.layers.4.{n}" for n in ("enorm", "hnorm", "eh_proj", "shared_head.norm"))
MIMO = tuple(f"model.mtp_layers.0.{n}" for n in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"))
OWN = {pub.qwen_mtp: {"one": True}, pub.nextn: {"zero_first": True}, pub.mimo_mtp: {"zero_first": True, "hidden_first": True}}
WITH_MTP = {  # family -> (its tensors, names of what joins them, config)
    "qwen3_5_text": (pub.qwen_mtp, QWEN, {"linear_value_head_dim": 16, "mtp_num_hidden_layers": 1}),
    "qwen3_5_moe_text": (pub.qwen_mtp, QWEN, {"mtp_num_hidden_layers": 1}),
    "qwen3_next": (pub.qwen_mtp, QWEN, {}),
    "deepseek_v3": (pub.nextn, NEXTN, {"num_nextn_predict_layers": 1}),
    "glm4_moe": (pub.nextn, NEXTN, {"num_nextn_predict_layers": 1}),
    "mimo": (pub.mimo_mtp, MIMO, {"use_sliding_window": False}),
}


def called(model):
    """How a decoder layer of a transformers model runs over rows (rows, H), each of which sees those before it."""

    def call(layer, x):
        n = len(x)
        places = torch.arange(n)[None]
        mask = torch.full((n, n), float("-inf")).triu(1)[None, None]
        with torch.no_grad():
            turned = model.model.rotary_emb(x[None], places)
            out = layer(x[None], attention_mask=mask, position_ids=places, position_embeddings=turned)
        return (out[0] if isinstance(out, tuple) else out)[0]

    return call


@pytest.fixture(scope="module", params=WITH_MTP)
def mtp(request, tmp_path_factory):
    """(family, folder, model of ours, reference) of a checkpoint with an MTP layer."""
    make, names, more = WITH_MTP[request.param]
    folder = tmp_path_factory.mktemp("mtp")
    model = pub.target(folder, request.param, **more)
    tensors = pub.with_heads(folder, make, *([4] if make is pub.nextn else []))
    layer = copy.deepcopy(model.model.layers[3])
    for t in layer.state_dict().values():
        t.copy_(pub.other(t))
    eps, own = model.config.rms_norm_eps, OWN[make]
    embed, lm_head = (m.weight.detach() for m in (model.model.embed_tokens, model.lm_head))
    return request.param, folder, native(folder), Mtp(tensors, names, eps, layer, called(model), embed, lm_head, **own), model


def inside(folder, model, *describe):
    with open_source(str(folder)) as source:
        return heads.inside(source, model, *describe)


def test_mtp_layers_guess_as_the_reference(mtp):
    _, folder, ours, reference, model = mtp
    plan = inside(folder, ours)
    states = states_of(ours, plan.layers)
    torch.testing.assert_close(states, theirs(model, (-1,)), rtol=2e-3, atol=2e-3)
    expected = reference(TEXT[1:], [x[:-1] for x in theirs(model, (-1,))], 4)
    result = guessed(plan, TEXT[1:], [x[:-1] for x in states], 4)
    assert result[0] == expected[0]
    torch.testing.assert_close(result[1], expected[1], rtol=5e-3, atol=5e-3)


def _beside(read, change):
    m = read.head.model
    merge = replace(m.merge, beside=replace(m.merge.beside, **change(m.merge.beside)))
    return replace(read, head=replace(read.head, model=replace(m, merge=merge)))


WRONG_MTP = {
    "the hidden state first, or last": lambda r: _beside(r, lambda b: {"hidden_first": not b.hidden_first}),
    "the norms exchanged": lambda r: _beside(r, lambda b: {"embedding": b.hidden, "hidden": b.embedding}),
    "1 + w of a norm": lambda r: _beside(r, lambda b: {"hidden": replace(b.hidden, add_one=not b.hidden.add_one)}),
    "position 0 the other way": lambda r: _beside(r, lambda b: {"zero_first": not b.zero_first}),
    "the stream goes round": lambda r: replace(r, head=replace(r.head, recycled="stream")),
    "the stream before the last norm": lambda r: replace(r, head=replace(r.head, taps=(4,))),
}  # fmt: skip


@pytest.mark.parametrize("fact", WRONG_MTP)
def test_a_fact_of_mtp_layers_that_is_read_otherwise_shows(fact, mtp):
    _, folder, ours, reference, model = mtp
    _, expected = reference(TEXT[1:], [x[:-1] for x in theirs(model, (-1,))], 4)
    plan = inside(folder, ours, lambda *given: WRONG_MTP[fact](heads.mtp.read(*given)))
    _, logits = guessed(plan, TEXT[1:], [x[:-1] for x in states_of(ours, plan.layers)], 4)
    assert float((logits - expected).norm() / expected.norm()) > 0.005


def without(*names):
    return lambda tensors, config: [tensors.pop(n) for n in names]


REFUSED = {  # what is done to a sound folder -> a part of the line that refuses it
    "a norm is missing": (without("midlayer.hidden_norm.weight"), "no tensor layers.0.hidden_norm.weight"),
    "no map of a reduced vocabulary": (without("d2t", "t2d"), "d2t, the list of these tokens, is missing"),
    "no product of the features": (without("fc.weight"), "no tensor fc.weight"),
    "a tensor of another kind": (lambda t, c: t.update(mask_hidden=torch.ones(1, 1, 8)), "does not use: mask_hidden"),
    "another width": (lambda t, c: t.update({"norm.weight": torch.ones(32)}), "norm.weight of the draft head is (32,)"),
    "a map to nowhere": (lambda t, c: t.update(d2t=t["d2t"] + 1000), "names tokens that the model does not have"),
    "a map of floats": (lambda t, c: t.update(d2t=t["d2t"].float()), "it must hold whole numbers"),
    "another vocabulary": (lambda t, c: c.update(vocab_size=999), "a vocabulary of 999, the model has 160"),
    "another model's width": (lambda t, c: c.update(target_hidden_size=128), "hidden states of 128 values, the model has 64"),
    "layers that are not there": (lambda t, c: c.update({IDS: [2, 3, 99]}), "reads layers [2, 3, 99] of a model that has 6"),
    "four layers, product of three": (lambda t, c: c.update({IDS: [1, 2, 3, 4]}), "fc reads 3 layers, config.json names 4"),
    "layers that are words": (lambda t, c: c.update({IDS: ["a", 2, 3]}), "which are not indices of layers"),
    "layers that are a number": (lambda t, c: c.update({IDS: 3}), "a field of another type"),
    "a bias that is a list": (lambda t, c: c.update(mlp_bias=[]), "mlp_bias = []"),
    "draft_vocab_size of another": (lambda t, c: c.update(draft_vocab_size=40), "says draft_vocab_size = 40"),
}  # fmt: skip
KINDS = {
    "DFlash2": {"architectures": ["DFlash2DraftModel"], "model_type": "qwen3", "dflash_config": {}},
    "stand-alone MTP files": {"architectures": ["SomeMTP"], "model_type": "mtp"},
    "Gemma 4 unified assistants": {
        "architectures": ["Gemma4UnifiedAssistantForCausalLM"],
        "model_type": "gemma4_unified_assistant",
    },
    "SomethingDraftModel": {"architectures": ["SomethingDraftModel"]},
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_head_that_is_not_whole_is_refused_in_a_line(what, llama, tmp_path):
    change, line = REFUSED[what]
    tensors = pub.eagle3_tensors()
    config = json.loads((pub.specforge(tmp_path / "head", tensors) / "config.json").read_text())
    change(tensors, config)
    with pytest.raises((UnsupportedError, DamagedError)) as refused:
        heads.load(str(pub.written(tmp_path / "head", config, tensors)), llama[1])
    assert line in str(refused.value)
    assert str(tmp_path / "head") in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_that_is_not_run_is_refused_by_name(kind, llama, tmp_path):
    assert takes(KINDS[kind])
    pub.written(tmp_path / "head", {**pub.FLAT, **KINDS[kind]}, {"fc.weight": torch.ones(4, 4)})
    with pytest.raises(UnsupportedError, match=f"of the kind {kind} are not supported; supported: EAGLE-3"):
        heads.load(str(tmp_path / "head"), llama[1])


ALONE = {
    "whole": (lambda t: None, None),
    "copies of the model's": (lambda t: t.update({"lm_head.weight": torch.ones(4, 4)}), None),
    "a norm missing": (lambda t: t.pop("mtp_layers.0.hidden_layernorm.weight"), "has no tensor"),
    "all missing": (lambda t: t.clear() or t.update({"lm_head.weight": torch.ones(4, 4)}), "lacks tensors"),
    "another tensor": (lambda t: t.update({"d2t": torch.ones(4)}), "not known: d2t"),
    "another layer": (lambda t: t.update({"mtp_layers.1.input_proj.weight": torch.ones(4, 4)}), "not known: mtp_layers.1"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "what"), [*(("llama", what) for what in ALONE), ("qwen3", "whole"), ("qwen3_5_text", "whole")]
)
def test_an_mtp_layer_of_speculators_guesses_as_the_reference(family, what, tmp_path):
    """The layer of a model without one, in a folder of its own; the first token's embedding is not zeroed there."""
    more = {"linear_value_head_dim": 16} if family == "qwen3_5_text" else {}
    model = pub.target(tmp_path / "model", family, **more)
    tensors = {
        n.removeprefix("model."): t for n, t in pub.mimo_mtp(load_file(tmp_path / "model" / "model.safetensors")).items()
    }
    change, line = ALONE[what]
    names = tuple(f"mtp_layers.0.{n}" for n in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"))
    layer, weights = copy.deepcopy(model.model.layers[3]), dict(tensors)
    for t in layer.state_dict().values():
        t.copy_(pub.other(t))
    change(tensors)
    config = {"architectures": ["MTPDraftModel"], "speculators_model_type": "mtp", "num_nextn_predict_layers": 1}
    ours, folder = native(tmp_path / "model"), pub.written(tmp_path / "head", config, tensors)
    if line is not None:
        with pytest.raises(DamagedError, match=line):
            heads.load(str(folder), ours)
        return
    embed, lm_head = (m.weight.detach() for m in (model.model.embed_tokens, model.lm_head))
    how = {"hidden_first": True, "one": family == "qwen3_5_text"}
    reference = Mtp(weights, names, model.config.rms_norm_eps, layer, called(model), embed, lm_head, **how)
    plan = heads.load(str(folder), ours)
    expected = reference(TEXT[1:], [x[:-1] for x in theirs(model, (-1,))], 4)
    result = guessed(plan, TEXT[1:], [x[:-1] for x in states_of(ours, plan.layers)], 4)
    assert result[0] == expected[0]
    torch.testing.assert_close(result[1], expected[1], rtol=5e-3, atol=5e-3)


def test_a_checkpoint_that_promises_an_mtp_layer_and_has_none_is_refused(mtp, tmp_path):
    family, folder, ours, _, _ = mtp
    tensors = load_file(folder / "model.safetensors")
    prefix = {"mimo": "model.mtp_layers.", "qwen": "mtp."}.get(family[:4], "model.layers.4.")
    config = json.loads((folder / "config.json").read_text())
    pub.written(tmp_path / "none", config, {n: t for n, t in tensors.items() if not n.startswith(prefix)})
    with pytest.raises(UnsupportedError, match="are not in its files"):
        inside(tmp_path / "none", ours)
    half = {n: t for n, t in tensors.items() if not (n.startswith(prefix) and "attn" in n)}
    pub.written(tmp_path / "half", config, half)
    with pytest.raises(DamagedError, match="lacks tensors"):
        inside(tmp_path / "half", ours)


def test_a_model_is_refused_as_a_draft_head(llama):
    assert not takes({"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    assert not takes(
        {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "mtp_num_hidden_layers": 1}
    )


@pytest.mark.parametrize("kind", ["SpecForge", "speculators", *KINDS])
def test_a_draft_head_is_refused_as_a_model(kind, tmp_path):
    if kind in KINDS:
        pub.written(tmp_path / "head", {**pub.FLAT, **KINDS[kind]}, {"fc.weight": torch.ones(4, 4)})
    else:
        (pub.specforge if kind == "SpecForge" else pub.speculators)(tmp_path / "head", pub.eagle3_tensors())
    with pytest.raises(UsageError, match="is a draft head, not a model; name it with --draft"):
        ready(str(tmp_path / "head"), "cpu")


@pytest.mark.parametrize("value", [True, 3, "LlamaForCausalLMEagle3", {"a": 1}, None, []], ids=repr)
def test_class_names_that_are_no_list_name_no_head(value):
    assert not is_head({"model_type": "llama", "architectures": value})
    with pytest.raises(UnsupportedError):
        read_head({"model_type": "llama", "architectures": value, "dflash_config": value}, {}, None)
