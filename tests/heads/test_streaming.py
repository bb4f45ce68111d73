"""Texts that are decoded with every kind of head are those without, whatever is accepted; a head that learnt is accepted."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import publishing as pub
from test_blocks import made as block
from test_heads import TEXT, WITH_MTP, eagle, native, states_of

from lowq_cli.engine import stream
from lowq_cli.engine.decoders import decoder_of
from lowq_cli.engine.drafts import draft_length
from lowq_cli.engine.drafts import drafting as drafting_of
from lowq_cli.engine.drafts.drafter import DraftRows
from lowq_cli.engine.drafts.drafting import OnDevice
from lowq_cli.engine.drafts.heads import load
from lowq_cli.engine.model_record import tuned_by
from lowq_cli.engine.plan import plan_of
from lowq_cli.engine.sampling import Sampling
from lowq_cli.files.source import HEAD_NOTES
from lowq_cli.run import draft_training as training
from lowq_cli.run.draft_head import Learner, loss_of, sizes
from lowq_packers.errors import DamagedError

WORDS = SimpleNamespace(eos_token_id=None, decode=lambda ids, **kw: "".join(chr(64 + i) for i in ids))
PROMPTS = [torch.randint(3, pub.VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (9, 23, 2)]
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 11}
ALLOWED = drafting_of.Drafting.allowed
pytestmark = pytest.mark.usefixtures("every_step")


def said(model, prompt, draft, **how):
    g = stream(model, WORDS, prompt, max_new_tokens=30, draft=draft, **how)
    for _ in g:
        pass
    return g.tokens[0], g.drafting


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    pub.target(folder)
    return native(folder)


def kinds(folder):
    """A folder of each kind of head."""
    for name in ("SpecForge", "EAGLE-3.1", "speculators, norm before fc"):
        eagle(folder / name, name)
    for name in ("z-lab's", "DeepSpec, rnn", "speculators, fewer tokens"):
        block(folder / name, name)
    pub.speculators(folder / "P-EAGLE", pub.peagle_tensors(), speculators_model_type="peagle", mask_token_id=7)
    return sorted(folder.iterdir())


def test_texts_with_heads_are_those_without(llama, tmp_path):
    folders = kinds(tmp_path)
    assert len(folders) == 7
    for prompt, how in (*((prompt, {}) for prompt in PROMPTS), (PROMPTS[0], SAMPLED)):
        plain, _ = said(llama, prompt, "none", **how)
        for folder in folders:
            tokens, drafting = said(llama, prompt, str(folder), **how)
            assert tokens == plain, (folder.name, how)
            assert drafting.steps > 0, folder.name


def test_a_second_turn_goes_on_from_the_first_with_a_head(llama, tmp_path):
    eagle(tmp_path / "head", "SpecForge")
    first, _ = said(llama, PROMPTS[1], "none")
    longer = PROMPTS[1] + first[:12] + [5, 6, 7]
    plain, _ = said(llama, longer, "none")
    for _ in range(2):
        assert said(llama, PROMPTS[1], str(tmp_path / "head"))[0] == first
        assert said(llama, longer, str(tmp_path / "head"))[0] == plain


@pytest.mark.parametrize(  # their tensors are named and joined as those of qwen3_5_text and glm4_moe
    "family", [pytest.param(f, marks=[pytest.mark.more] * (f in ("qwen3_5_moe_text", "deepseek_v3"))) for f in WITH_MTP]
)
def test_texts_with_mtp_layers_are_those_without(family, tmp_path):
    make, _, more = WITH_MTP[family]
    pub.target(tmp_path, family, **more)
    pub.with_heads(tmp_path, make, *([4] if make is pub.nextn else []))
    model = native(tmp_path)
    tuned_by(model, str(tmp_path))
    for prompt, how in (*((prompt, {}) for prompt in (*PROMPTS, PROMPTS[0] + [5, 4])), (PROMPTS[0], SAMPLED)):
        plain, _ = said(model, prompt, "none", **how)
        tokens, drafting = said(model, prompt, "mtp", **how)
        assert tokens == plain
        assert drafting.steps > 0


def learnt(model, folder):
    """A head that knows one text by heart, as training writes it."""
    plan = plan_of(model)
    text = torch.tensor([PROMPTS[0] + said(model, PROMPTS[0], "none")[0]])
    of = sizes(plan, pub.VOCAB)
    teacher = training.Teacher(plan, of, torch.arange(pub.VOCAB), 1, text.shape[1])
    learner = Learner(of, {}, torch.device("cpu"))
    adam = torch.optim.Adam(learner.parameters(), 3e-3)
    for _ in range(150):
        embeddings, features, wanted, _ = teacher(text)
        loss = loss_of(learner(embeddings, features, of.in_a_row), wanted)
        adam.zero_grad()
        loss.backward()
        adam.step()
    pub.written(folder, of.config(), {n: t.clone() for n, t in learner.tensors().items()})
    return text, learner, teacher


def test_drafts_of_a_trained_head_are_accepted_and_the_text_is_that_without(llama, tmp_path):
    learnt(llama, tmp_path / "head")
    plain, _ = said(llama, PROMPTS[0], "none")
    tokens, drafting = said(llama, PROMPTS[0], str(tmp_path / "head"))
    assert tokens == plain
    assert drafting.accepted > 12
    assert decoder_of(llama).attached is not None
    assert said(llama, PROMPTS[0], "ngram")[0] == plain
    assert decoder_of(llama).attached is None


def test_a_folder_beside_the_checkpoint_is_taken_by_itself(tmp_path):
    pub.target(tmp_path)
    eagle(tmp_path / "draft", "SpecForge")
    model = native(tmp_path)
    tuned_by(model, str(tmp_path))
    assert said(model, PROMPTS[0], "auto")[1].drafter.name == "EAGLE-3"


@pytest.mark.parametrize(
    ("notes", "drafter"),
    [
        ({}, "EAGLE-3"),
        ({"length": 1.2}, "ngram"),
        ({"length": 1.3}, "EAGLE-3"),
        ({"length": 3.0, "device": "cpu", "speed": [1437.0, 667.0]}, "ngram"),
        ({"length": 3.0, "device": "cpu", "speed": [667.0, 1437.0]}, "EAGLE-3"),
        ({"length": 3.0, "device": "cuda", "speed": [1437.0, 667.0]}, "EAGLE-3"),
        ({"length": 1.2, "device": "cpu", "speed": [667.0, 668.0]}, "ngram"),
        ({"length": 3.0, "device": "cpu", "speed": []}, "EAGLE-3"),
        ({"length": 3.0, "device": "cpu", "speed": {"without": 1437.0, "with": 667.0}}, "ngram"),
        ({"length": 3.0, "device": "cpu", "speed": {"without": 667.0, "with": 1437.0}}, "EAGLE-3"),
        ({"length": 3.0, "device": "cpu", "speed": {}}, "EAGLE-3"),
    ],
)
def test_a_head_that_saved_no_time_in_training_is_not_taken_by_itself(notes, drafter, tmp_path):
    pub.target(tmp_path)
    eagle(tmp_path / "draft", "SpecForge")
    (tmp_path / "draft" / HEAD_NOTES).write_text(json.dumps(notes))
    model = native(tmp_path)
    tuned_by(model, str(tmp_path))
    assert said(model, PROMPTS[0], "auto")[1].drafter.name == drafter
    assert said(model, PROMPTS[0], str(tmp_path / "draft"))[1].drafter.name == "EAGLE-3"


@pytest.mark.parametrize("content", ["{", "[]", '{"length": "long"}', '{"length": 3, "device": "cpu", "speed": [1]}', "7"])
def test_damaged_notes_of_a_head_are_named(content, tmp_path):
    pub.target(tmp_path)
    eagle(tmp_path / "draft", "SpecForge")
    (tmp_path / "draft" / HEAD_NOTES).write_text(content)
    model = native(tmp_path)
    tuned_by(model, str(tmp_path))
    with pytest.raises(DamagedError, match=f"{HEAD_NOTES} is not what lowq draft train writes"):
        said(model, PROMPTS[0], "auto")


def test_texts_in_a_batch_guess_as_each_alone(llama, tmp_path):
    texts, ends = (TEXT, TEXT.flip(0)), (9, 6)
    for folder in kinds(tmp_path):
        drafter = load(str(folder), llama)
        K, states = min(4, drafter.most), [states_of(llama, drafter.layers, text) for text in texts]

        def rows(places, ids=drafter.layers, states=states):
            """Of some texts: what was drawn after their last rows, hidden states, where they stand, the last right one."""
            drawn = torch.cat([texts[p][ends[p] - 1 : ends[p] + 2] for p in places])
            hidden = {i: torch.cat([states[p][n][ends[p] - 2 : ends[p] + 1] for p in places]) for n, i in enumerate(ids)}
            pos = torch.cat([torch.arange(ends[p] - 2, ends[p] + 1, dtype=torch.int32) for p in places])
            there = torch.tensor(places).repeat_interleave(3)
            return drawn, hidden, DraftRows(pos, there, 3), torch.arange(len(places)) * 3 + 1

        def fresh(drafter=drafter, states=states):
            drafter.make_room(2, 64)
            for p, text in enumerate(texts):
                t, place = ends[p], torch.full((ends[p],), p, dtype=torch.int64)
                hidden = {i: states[p][n][:t] for n, i in enumerate(drafter.layers)}
                drafter.read(text[1 : t + 1], hidden, DraftRows(torch.arange(t, dtype=torch.int32), place, t))

        fresh()
        both = drafter.draft(*rows([0, 1]), K).tolist()
        alone = []
        for p in range(2):
            fresh()
            alone += drafter.draft(*rows([p]), K).tolist()
        assert both == alone, folder.name


@pytest.mark.parametrize(("seconds", "right", "goes_on"), [(3.0, 0, False), (2.0, 3, True), (9.0, 3, False)])
def test_on_a_cpu_a_head_that_is_not_worth_its_time_is_let_go(seconds, right, goes_on, tmp_path, monkeypatch):
    pub.target(tmp_path / "model")
    eagle(tmp_path / "head", "SpecForge")
    model = native(tmp_path / "model")
    said(model, PROMPTS[0], str(tmp_path / "head"))
    decoder = decoder_of(model)
    decoder.timed.clear()
    decoder.balances.clear()
    for of in (drafting_of, draft_length):
        monkeypatch.setattr(of, "ENOUGH", 4)
    monkeypatch.setattr(drafting_of.Drafting, "allowed", ALLOWED)
    drafting = OnDevice(decoder.attached.drafter, decoder)
    decoder.start([PROMPTS[0]], Sampling(), 200)
    taken = []
    for _ in range(400):
        _, rows, fresh = drafting.launch()
        tokens = drafting.read([right, *range(rows)] if rows > 1 else [0], rows, fresh)
        drafting.took(len(tokens), seconds if rows > 1 else 1.0)
        taken.append(rows)
    assert taken[:5] == [1] * 5
    assert goes_on or sum((seconds - 1) * (rows > 1) for rows in taken) < 25  # in plain steps
    assert (max(taken[-20:]) > 1) == goes_on
    again = OnDevice(decoder.attached.drafter, decoder)
    decoder.start([PROMPTS[0]], Sampling(), 200)
    assert (again.launch()[1] > 1) == goes_on
