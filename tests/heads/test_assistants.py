"""Gemma 4's assistants as transformers writes them: guesses of transformers' own class over the model's keys and values."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, GenerationConfig
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator
from transformers.models.gemma4 import Gemma4TextConfig
from transformers.models.gemma4_assistant import Gemma4AssistantConfig, Gemma4AssistantForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
import publishing as pub
from described import config as config_of
from test_heads import CPU, native
from test_packed import ROUND, values
from test_streaming import PROMPTS, SAMPLED, said

import lowq
from lowq_cli.engine import heads, native_loader
from lowq_cli.engine.batch import Batch, KeyValues, Rectangle
from lowq_cli.engine.decoders import decoder_of
from lowq_cli.engine.drafts.drafter import DraftRows
from lowq_cli.engine.drafts.heads import AssistantDrafter, load, takes
from lowq_cli.engine.open_model import ready
from lowq_cli.engine.plan import plan_of
from lowq_cli.engine.sampling import Sampling
from lowq_cli.engine.state import static_state
from lowq_cli.files.source import open_source
from lowq_kernels.modules.linear import QuantLinear
from lowq_packers.errors import DamagedError, UnsupportedError, UsageError
from lowq_packers.heads import read_head
from lowq_packers.heads.assistant import ORDER

S, F, K = "sliding_attention", "full_attention", 4
TEXT = torch.randint(3, pub.VOCAB, (21,), generator=torch.Generator().manual_seed(4))
TARGETS = ("gemma4_text/e2b", "gemma4_text/31b")  # keys shared by the last layers; keys that are values, and none shared
LENT = {"gemma4_text/e2b": (1, 2), "gemma4_text/31b": (4, 5)}  # the last layers with keys: with a window, without
ORDERED = {"use_ordered_embeddings": True, "num_centroids": 16, "centroid_intermediate_top_k": 3}
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
NARROW = ("hidden_size", "intermediate_size", "num_hidden_layers", "layer_types", "num_kv_shared_layers", "per_layer_config")
ABSENT = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "enable_moe_block": False}


def assistant(folder, family, seed=5, text=(), **more):
    """A random assistant of a model of the family, written by transformers' class; and that class."""
    of_model = config_of(family).to_dict()
    inside = {n: v for n, v in of_model.items() if n not in NARROW} | ABSENT | {"use_double_wide_mlp": False}
    inside |= {"num_global_key_value_heads": 1} if of_model["attention_k_eq_v"] else {}  # which to_dict leaves out
    inside |= {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "layer_types": [S, S, F], **dict(text)}
    inside |= {"global_head_dim": 32, "num_kv_shared_layers": inside["num_hidden_layers"]}
    # transformers 5.23 raises for a config whose layers all share, as those of every assistant do
    with mock.patch.object(
        Gemma4TextConfig, "kv_sharing_modes", property(lambda c: ["reuse"] * c.num_hidden_layers), create=True
    ):
        made = Gemma4AssistantForCausalLM(Gemma4AssistantConfig(text_config=inside, backbone_hidden_size=pub.H, **more)).eval()
    g = torch.Generator().manual_seed(seed)
    for name, t in made.state_dict().items():
        if name.endswith("token_ordering"):
            t.copy_(torch.randperm(len(t), generator=g))
        elif t.is_floating_point():
            around = 1.0 if "norm" in name or "scalar" in name else 0.0
            spread = 0.3 if t.dim() < 2 else 1.5 * t.shape[-1] ** -0.5
            t.copy_(torch.randn(t.shape, generator=g) * spread + around)
    made.save_pretrained(folder)
    return made


def reference(made, model, ids, layers, shift=1, K=K):
    """(guesses, logits of each) after a text whose last token is the newest one; every token before it has keys and values."""
    cache, n, W = DynamicCache(), len(ids) - 1, model.config.sliding_window
    with torch.no_grad():
        h = model.model(ids[None, :-1], past_key_values=cache).last_hidden_state[:, -1:]
        keys = [(cache.layers[i].keys, cache.layers[i].values) for i in layers]
        lent = {S: tuple(t[:, :, -W:] for t in keys[0]), F: keys[1]}
        at, token, logits = torch.tensor([[n - 1 + shift]]), ids[None, -1:], []
        for _ in range(K):
            x = torch.cat((model.get_input_embeddings()(token), h), -1)
            out = made(inputs_embeds=x, position_ids=at, shared_kv_states=lent)
            token, h = out.logits.argmax(-1), out.last_hidden_state
            logits.append(out.logits[0, 0])
    return [int(x.argmax()) for x in logits], torch.stack(logits)


def read(ours, ids, slots=40):
    """The engine's state after a text, and its last hidden states."""
    plan, device = plan_of(ours), ids.device
    there = Rectangle(slice(0, 1), 0, len(ids), [len(ids)], 1)
    state, start = static_state(plan, 1, slots, "16"), torch.zeros(1, dtype=torch.int32, device=device)
    batch = Batch(plan.ops, ids, 0, start, plan.angles(slots, device), rectangle=there)
    return state, plan.hidden(plan.embed(ids), batch, state)


def guessed(drafter, ours, ids, K=K, slots=40):
    """The guesses of a drafter after a text; its last token was drawn, and is not read yet."""
    state, y = read(ours, ids[:-1], slots)
    drafter.make_room(1, slots, state)
    n, device = len(ids) - 1, ids.device
    pos, zero = torch.arange(n, dtype=torch.int32, device=device), torch.zeros(n, dtype=torch.int64, device=device)
    return drafter.draft(ids[1:], {-1: y}, DraftRows(pos, zero, n), torch.tensor([n - 1], device=device), K)[0].tolist()


def logits_of(drafter, ours, ids, drafts):
    """Logits of each guess, for given guesses."""
    plan, (state, y) = drafter.plan, read(ours, ids[:-1])
    x, held, logits = y[-1:], [replace(one, table=torch.zeros(1, 1).int()) for one in drafter.lent(state)], []
    for token in [int(ids[-1]), *drafts[:-1]]:
        token = torch.tensor([token])
        batch = Batch(plan.ops, token, 1, torch.tensor([len(ids) - 2], dtype=torch.int32), plan.angles(40, CPU))
        y, x = plan.guess(token, x, batch, held)
        logits.append(plan.logits(y)[0])
    return torch.stack(logits)


def close(ours, theirs):
    """Whether logits agree; transformers gives the least of the others to tokens that are in no chosen group."""
    seen = ours > -torch.inf
    torch.testing.assert_close(ours[seen], theirs[seen], rtol=2e-3, atol=2e-3)
    return int(seen.sum())


@pytest.fixture(scope="module", params=TARGETS)
def gemma(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma") / "model"
    return request.param, pub.target(folder, request.param), native(folder)


@pytest.mark.parametrize("more", [{}, ORDERED, {"tie_word_embeddings": False}], ids=["plain", "centroids", "untied"])
def test_an_assistant_guesses_as_transformers_class_does(more, gemma, tmp_path):
    family, model, ours = gemma
    made = assistant(tmp_path / "head", family, **more)
    drafter = load(str(tmp_path / "head"), ours)
    assert drafter.plan.model.lent == LENT[family]
    assert drafter.plan.states == []  # no keys and values of its own
    shifted = 0
    for n in range(2, len(TEXT) + 1):  # windows of 4 tokens are passed by most
        drafts, logits = reference(made, model, TEXT[:n], LENT[family])
        assert guessed(drafter, ours, TEXT[:n]) == drafts
        seen = close(logits_of(drafter, ours, TEXT[:n], drafts), logits)
        assert seen == K * (3 * pub.VOCAB // 16 if more is ORDERED else pub.VOCAB)
        shifted += reference(made, model, TEXT[:n], LENT[family], 0)[0] != drafts
    assert shifted  # the position of the newest token, not of the last one with keys


def test_the_loop_over_guesses_is_that_of_transformers(tmp_path):
    model = pub.target(tmp_path / "model", TARGETS[0], sliding_window=64)
    ours = native(tmp_path / "model")
    made = assistant(tmp_path / "head", TARGETS[0], text={"sliding_window": 64})
    drafter = load(str(tmp_path / "head"), ours)
    for n in (2, 5, 20):  # the model has read all tokens but the newest
        with torch.no_grad():
            outputs = model(TEXT[None, : n - 1], output_hidden_states=True, return_shared_kv_states=True)
        settings = GenerationConfig(max_length=100)
        made.generation_config.num_assistant_tokens = K
        loop = SinglePositionMultiTokenCandidateGenerator(made, model.get_input_embeddings(), settings)
        ids, _ = loop.get_candidates(TEXT[None, :n], {}, outputs, False, 0)
        assert guessed(drafter, ours, TEXT[:n]) == ids[0, n:].tolist()


WRONG = {  # what of an assistant is read otherwise than it is meant
    "the hidden state first": lambda m: replace(m, merge=replace(m.merge, beside=replace(m.merge.beside, hidden_first=True))),
    "another layer's keys": lambda m: _of_layer(m, 0),
    "no scalar of the first layer": lambda m: replace(m, layers=(_unscaled(m.layers[0]), *m.layers[1:])),
}


def _of_layer(m, number):
    first, *rest = m.layers[0]
    first = replace(first, mixers=(replace(first.mixers[0], shares=number),))
    return replace(m, layers=((first, *rest), *m.layers[1:]), lent=(number, *m.lent))


def _unscaled(layer):
    return (*layer[:-1], replace(layer[-1], after=""))


@pytest.mark.parametrize("fact", WRONG)
def test_a_fact_that_is_read_otherwise_shows(fact, gemma, tmp_path):
    family, model, ours = gemma
    made = assistant(tmp_path / "head", family)
    drafts, expected = reference(made, model, TEXT, LENT[family])

    def wrong(*given):
        read = read_head(*given)
        return replace(read, head=replace(read.head, model=WRONG[fact](read.head.model)))

    drafter = AssistantDrafter(heads.load(str(tmp_path / "head"), ours, wrong))
    logits = logits_of(drafter, ours, TEXT, drafts)
    assert float((logits - expected).norm() / expected.norm()) > 0.005


def test_guesses_behind_a_prompt_longer_than_the_ring_of_a_window(tmp_path):
    long = {"max_position_embeddings": 4096}
    model = pub.target(tmp_path / "model", TARGETS[0], **long)
    ours = native(tmp_path / "model")
    made = assistant(tmp_path / "head", TARGETS[0])
    drafter, decoder = load(str(tmp_path / "head"), ours), decoder_of(ours)
    text = torch.randint(3, pub.VOCAB, (1300,), generator=torch.Generator().manual_seed(8))
    decoder.drafts = True
    decoder.attach(drafter)
    token = decoder.start([text.tolist()], Sampling(), 16)
    assert any(isinstance(one, KeyValues) and one.table is not None for one in decoder.state)
    assert decoder.attached.guesses[:K].tolist() == reference(made, model, torch.cat((text, token)), LENT[TARGETS[0]])[0]


def test_texts_with_an_assistant_are_those_without(gemma, tmp_path, every_step):
    family, _, ours = gemma
    assistant(tmp_path / "plain", family)
    assistant(tmp_path / "ordered", family, **ORDERED)
    for prompt, how in (*((prompt, {}) for prompt in (*PROMPTS, PROMPTS[0] + [5, 4])), (PROMPTS[0], SAMPLED)):
        plain, _ = said(ours, prompt, "none", **how)
        for name in ("plain", "ordered"):
            tokens, drafting = said(ours, prompt, str(tmp_path / name), **how)
            assert tokens == plain
            assert drafting.steps > 0


def on_a_device(tmp_path, family, device, dtype, more):
    """A model and an assistant of it on a device, and transformers' classes of both, of the same weights."""
    model, made = pub.target(tmp_path / "model", family), assistant(tmp_path / "head", family, **more)
    for folder, written in (("model", model), ("head", made)):
        written.to(dtype).save_pretrained(tmp_path / folder)
    with open_source(str(tmp_path / "model")) as source:
        return native_loader.read(source, torch.device(device)), model.float(), made.float()


@pytest.mark.parametrize("more", [{}, ORDERED], ids=["plain", "centroids"])
@pytest.mark.parametrize("family", TARGETS)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])])
def test_an_assistant_on_a_device(device, family, more, tmp_path, every_step):
    """Recorded steps on a GPU: texts are those without drafts, and the first guesses those of transformers' class."""
    ours, model, made = on_a_device(tmp_path, family, device, torch.float16 if device == "cuda" else torch.float32, more)
    for prompt in PROMPTS:
        plain, _ = said(ours, prompt, "none")
        tokens, drafting = said(ours, prompt, str(tmp_path / "head"))
        assert tokens == plain
        assert drafting.steps > 0
    decoder, guesses, expected = decoder_of(ours), [], []
    decoder.drafts = True
    decoder.attach(load(str(tmp_path / "head"), ours))
    for n in range(8, len(TEXT) + 1):
        token = decoder.start([TEXT[:n].tolist()], Sampling(), 16).cpu()
        guesses += decoder.attached.guesses[:K].tolist()
        expected += reference(made, model, torch.cat((TEXT[:n], token)), LENT[family])[0]
    same = sum(a == b for a, b in zip(guesses, expected, strict=True)) / len(expected)
    assert same == 1 if device == "cpu" else same > 0.9  # in fp16 a near tie may fall the other way


@pytest.mark.parametrize("more", [{}, ORDERED], ids=["plain", "centroids"])
def test_an_assistant_in_4_bits_guesses_as_its_codes_say(more, gemma, tmp_path):
    family, model, ours = gemma
    made = assistant(tmp_path / "dense", family, **more)
    lowq.quantize(tmp_path / "dense", out=tmp_path / "packed", bits=4, lm_head=4, dtype="float32", **ROUND)
    drafter = load(str(tmp_path / "packed"), ours)
    packed = [m for m in drafter.plan.linears.modules() if isinstance(m, QuantLinear)]
    assert {m.scheme.bits for m in packed} == {4}
    assert len(packed) == 3 * 4 + 3  # q, o, gate and up as one, down of each layer; both projections; the output head
    held = values(tmp_path / "packed")
    made.load_state_dict({n: t for n, t in held.items() if n in made.state_dict()}, strict=False)
    drafts, logits = reference(made, model, TEXT, LENT[family])
    assert guessed(drafter, ours, TEXT) == drafts
    close(logits_of(drafter, ours, TEXT, drafts), logits)


EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8}
REFUSED = {  # what is changed in config.json and in the files, and the line that says so
    "a wider model's": ({"backbone_hidden_size": 128}, "it is for hidden states of 128 values, the model has 64"),
    "another vocabulary": ({"text_config": {"vocab_size": 200}}, "it is for a vocabulary of 200, the model has 160"),
    "other keys": ({"text_config": {"num_key_value_heads": 4}}, "it reads keys of 4 heads of 16 values"),
    "another window": ({"text_config": {"sliding_window": 8}}, "in a window of 8, those of the model's layer 1"),
    "groups of centroids": (ORDERED | {"num_centroids": 7}, "num_centroids = 7"),
    "centroids that are missing": (ORDERED, "no tensor masked_embedding"),
    "experts": ({"text_config": EXPERTS}, "has enable_moe_block"),
    "no text_config": ({"text_config": None}, "no text_config"),
    "a layer missing": ({"text_config": {"num_hidden_layers": 2, "layer_types": [S, F]}}, "keys of 2 heads of 16 values"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_an_assistant_of_another_model_is_refused_in_a_line(what, tmp_path):
    change, line = REFUSED[what]
    pub.target(tmp_path / "model", TARGETS[0])
    assistant(tmp_path / "head", TARGETS[0])
    path = tmp_path / "head" / "config.json"
    config = json.loads(path.read_text())
    if change.get("text_config"):
        change = change | {"text_config": config["text_config"] | change["text_config"]}
    path.write_text(json.dumps(config | change))
    with pytest.raises((UnsupportedError, DamagedError)) as refused:
        load(str(tmp_path / "head"), native(tmp_path / "model"))
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_assistant_of_a_llama_is_refused(tmp_path):
    pub.target(tmp_path / "model")
    assistant(tmp_path / "head", TARGETS[0])
    assert takes(json.loads((tmp_path / "head" / "config.json").read_text()))
    with pytest.raises(UnsupportedError, match="reads keys and values of a Gemma 4 model, and the model is llama"):
        load(str(tmp_path / "head"), native(tmp_path / "model"))


def test_an_assistant_is_refused_as_a_model(tmp_path):
    assistant(tmp_path / "head", TARGETS[0])
    with pytest.raises(UsageError, match="is a draft head, not a model; name it with --draft"):
        ready(str(tmp_path / "head"), "cpu")


def test_a_token_in_two_groups_is_refused(tmp_path):
    pub.target(tmp_path / "model", TARGETS[0])
    assistant(tmp_path / "head", TARGETS[0], **ORDERED)
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    tensors[ORDER][3] = tensors[ORDER][4]
    save_file(tensors, tmp_path / "head" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DamagedError, match="does not name each token of the model once"):
        load(str(tmp_path / "head"), native(tmp_path / "model"))
