"""`lowq draft train`: what is learnt is what is run, what was killed goes on, and the folder is a published one's."""

import json
import shutil
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent))
import publishing as pub
from plain_torch import Eagle3, PEagle
from torch.nn import functional as F

import lowq
from lowq_cli.engine import native_loader, stream
from lowq_cli.engine.decoders import decoder_of
from lowq_cli.engine.drafts.heads import load
from lowq_cli.engine.plan import plan_of
from lowq_cli.files.folder import BusyError
from lowq_cli.files.source import DEMO, HEAD_STATE, open_source
from lowq_cli.main import app
from lowq_cli.run import draft_training as training
from lowq_cli.run.draft_head import GUESSES, Learner, attended, loss_of, right, sizes
from lowq_cli.run.draft_training_plan import plan_training
from lowq_packers.errors import DamagedError, LowqError, UsageError

J, WORDS = GUESSES["eagle3"], 8192


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small random model with the demo's tokenizer."""
    result = tmp_path_factory.mktemp("model")
    pub.target(result, vocab_size=WORDS, max_position_embeddings=64)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, result)
    return result


@pytest.fixture(scope="module")
def model(folder):
    with open_source(str(folder)) as source:
        return native_loader.read(source, torch.device("cpu"))


def teacher_of(model, of, window):
    return training.Teacher(plan_of(model), of, torch.arange(of.guesses), 2, window)


def test_a_head_in_training_guesses_as_the_reference_on_the_same_words(model):
    of, L = sizes(plan_of(model), WORDS), 16
    learner = Learner(of, {}, torch.device("cpu"), seed=4)
    ids = torch.randint(3, WORDS, (2, L), generator=torch.Generator().manual_seed(2))
    embeddings, features, _, _ = teacher_of(model, of, L)(ids)
    result = learner(embeddings, features, J)
    reference = Eagle3(learner.tensors(), {**of.config(), "rms_norm_eps": of.eps}, plan_of(model).embedding.weight)
    for text, states, t in ((0, features[0], 0), (1, features[1], L - J - 1), (1, features[1], 4)):
        f, rows = F.linear(states[: t + 1], reference.w["fc.weight"]), ids[text, 1:]
        for j in range(J):  # rows up to t, then the words that come, each on the head's own state
            o = reference.layer(rows[: t + 1 + j], f)
            y = torch.nn.functional.rms_norm(o[-1], (of.hidden,), reference.w["norm.weight"], of.eps)
            torch.testing.assert_close(result[j][text, t], F.linear(y, reference.lm_head), rtol=2e-4, atol=2e-4)
            f = torch.cat((f, o[-1:]))


def test_a_head_in_training_guesses_a_block_as_the_reference(model):
    of, L = replace(sizes(plan_of(model), WORDS, "peagle"), mask=9), 16
    learner, teacher = Learner(of, {}, torch.device("cpu"), seed=4), teacher_of(model, of, L)
    ids = torch.randint(3, WORDS, (1, L), generator=torch.Generator().manual_seed(2))
    embeddings, features, _, _ = teacher(ids)
    result = learner(embeddings, features, of.in_a_row, teacher.mask)
    flat = {**of.config()["transformer_layer_config"], **of.config()}
    reference = PEagle(learner.tensors(), flat, plan_of(model).embedding.weight)
    for t in (0, 5, L - of.in_a_row - 1):
        _, expected = reference(ids[0, 1 : t + 2], list(features[0, : t + 1].chunk(3, -1)), of.in_a_row)
        torch.testing.assert_close(torch.stack([x[0, t] for x in result]), expected, rtol=2e-4, atol=2e-4)


def test_a_guess_sees_only_its_own_state_and_the_tokens_before():
    q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
    later = [torch.randn(1, 2, 5, 4) for _ in range(2)]
    whole = attended(q, [k, later[0]], [v, later[1]])
    for other in (later[0].clone(), k.clone()):
        other[:, :, 3] = 9.0
        keys = [k, other] if other[0, 0, 0, 0] == later[0][0, 0, 0, 0] else [other, later[0]]
        changed = (attended(q, keys, [v, later[1]]) != whole).any(-1).any(1)[0]
        assert changed.tolist() == ([False, False, False, True, False] if keys[0] is k else [False] * 3 + [True] * 2)


def test_acceptance_counts_guesses_whose_forerunners_were_right():
    best = torch.tensor([[1, 2, 0, 3, 1]])
    logits = [F.one_hot(torch.tensor([row]), 4).float() for row in ([1, 2, 2], [2, 0, 3], [0, 1, 1])]
    assert right(logits, best, torch.arange(4)).tolist() == pytest.approx([2 / 3, 2 / 3, 1 / 3])


def test_it_learns_all_guesses(model):
    of, ids = sizes(plan_of(model), WORDS), torch.randint(3, WORDS, (2, 24), generator=torch.Generator().manual_seed(2))
    teacher, learner = teacher_of(model, of, 24), Learner(of, {}, torch.device("cpu"))
    before, adam = training.judged(learner, teacher, ids), torch.optim.Adam(learner.parameters(), 3e-3)
    for _ in range(120):
        embeddings, features, expected, _ = teacher(ids)
        loss = loss_of(learner(embeddings, features, J), expected)
        adam.zero_grad()
        loss.backward()
        adam.step()
    assert before[0] < 0.1
    assert training.judged(learner, teacher, ids)[-1] > 0.3


def planned(folder, out, **more):
    how = {"tokens": 512, "text": "bundled", "vocabulary": 512, "seed": 3, "device": "cpu", **more}
    return plan_training(str(folder), str(out), **how)


def done(steps):
    while True:
        try:
            next(steps)
        except StopIteration as e:
            return e.value


def test_a_killed_training_resumes_to_the_same_bytes(folder, tmp_path):
    whole = done(training.train(*planned(folder, tmp_path / "whole")))
    run = training.train(*planned(folder, tmp_path / "killed"), save_s=0.0)
    list(islice(run, 2))
    run.close()
    assert (tmp_path / "killed" / HEAD_STATE).is_file()
    again = done(training.train(*planned(folder, tmp_path / "killed")))
    assert (tmp_path / "killed" / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()
    assert again.accepted == whole.accepted
    assert not (tmp_path / "killed" / HEAD_STATE).exists()
    assert done(training.train(*planned(folder, tmp_path / "killed"))).already_done
    other = done(training.train(*planned(folder, tmp_path / "other", seed=4)))
    assert other.loss != whole.loss


def test_a_finished_head_is_not_written_over(folder, tmp_path):
    """Although a run that was killed in its last step left the mark of an unfinished one beside it."""
    out = tmp_path / "head"
    done(training.train(*planned(folder, out)))
    (out / HEAD_STATE).write_bytes(b"")
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    with pytest.raises(UsageError, match="holds something else"):
        done(training.train(*planned(folder, out, seed=4)))
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    assert done(training.train(*planned(folder, out))).already_done
    assert not (out / HEAD_STATE).exists()


def test_a_folder_that_another_process_trains_into_is_refused(folder, tmp_path):
    of = planned(folder, tmp_path / "head")
    run = training.train(*of, save_s=0.0)
    next(run)
    with pytest.raises(BusyError, match="another lowq is writing to"):
        done(training.train(*of))
    run.close()
    assert done(training.train(*of)).steps == of[0].steps


def _shorter(state):
    tensors = load_file(state)
    name = next(n for n in tensors if n.startswith("w/"))
    with safe_open(state, "pt") as file:
        facts = file.metadata()
    save_file(tensors | {name: tensors[name][:1].clone()}, state, facts)


@pytest.mark.parametrize(
    "damage",
    [lambda f: f.write_bytes(f.read_bytes()[:-9]), lambda f: f.write_bytes(b""), _shorter],
    ids=["cut", "empty", "shape"],
)
def test_a_damaged_state_is_named(damage, folder, tmp_path):
    run = training.train(*planned(folder, tmp_path / "head"), save_s=0.0)
    list(islice(run, 2))
    run.close()
    damage(tmp_path / "head" / HEAD_STATE)
    with pytest.raises(DamagedError, match=rf"{HEAD_STATE} .*remove it to train from the beginning"):
        done(training.train(*planned(folder, tmp_path / "head")))


def test_a_run_that_ends_before_its_first_file_leaves_no_folder(folder, tmp_path):
    run = training.train(*planned(folder, tmp_path / "head"))
    next(run)
    run.close()
    assert not (tmp_path / "head").exists()


@pytest.mark.parametrize("kind", GUESSES)
def test_the_command_writes_a_published_folder_that_is_read_and_run(kind, folder, model, tmp_path):
    out = tmp_path / "head"
    line = ["draft", "train", str(folder), "--head", kind, "--text", "bundled", "--tokens", "2048", "--vocab", "512"]
    shown = CliRunner().invoke(app, [*line, "--out", str(out), "--device", "cpu", "--json"])
    assert shown.exit_code == 0, shown.output
    result = json.loads(shown.stdout)
    tensors = load_file(out / "model.safetensors")
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].sum() == 512
    first = {"eagle3": {"midlayer"}, "peagle": {"layers", "mask_hidden"}}[kind]
    assert {n.split(".")[0] for n in tensors} == {"fc", "norm", "lm_head", "d2t", "t2d"} | first
    assert json.loads((out / "lowq_draft.json").read_text())["model"] == str(folder)
    drafter = load(str(out), model)
    assert drafter.layers == (1, 3, 6)
    assert drafter.name == {"eagle3": "EAGLE-3", "peagle": "P-EAGLE"}[kind]
    assert len(result["accepted"]) == GUESSES[kind]
    again = CliRunner().invoke(app, [*line, "--out", str(out), "--device", "cpu"])
    assert result["length"] < 1.25
    assert all(tps > 0 for tps in result["speed"].values())
    assert result["speed"].keys() == {"without", "with"}
    notes = json.loads((out / "lowq_draft.json").read_text())
    assert notes["speed"] == result["speed"]
    (out / "lowq_draft.json").write_text(json.dumps(notes | {"speed": [947.0, 1113.0]}))  # as an older lowq wrote it
    older = CliRunner().invoke(app, [*line, "--out", str(out), "--device", "cpu", "--json"])
    assert json.loads(older.stdout)["speed"] == {"without": 947.0, "with": 1113.0}
    assert "tokens/s with the head on this device" in again.output
    without = (
        "that is fewer than 1.25 tokens per step, so --draft auto does not take it; train on more than 2,048 tokens (--tokens)"
    )
    assert without in again.output
    assert "use it:" not in again.output


def test_a_folder_with_other_files_is_not_changed(folder, tmp_path):
    (tmp_path / "book.txt").write_text("mine")
    line = ["draft", "train", str(folder), "--text", "bundled", "--out", str(tmp_path), "--device", "cpu"]
    shown = CliRunner().invoke(app, line)
    assert "holds something else" in str(shown.exception)
    assert [p.name for p in tmp_path.iterdir()] == ["book.txt"]


@pytest.mark.parametrize("place", ["a file", "below a file", "a folder of others", "a head of another run"])
def test_a_dry_run_refuses_what_the_run_refuses(place, folder, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "book.txt").write_text("mine")
    out = tmp_path / {"a file": "file", "below a file": "file/head", "a folder of others": "others"}.get(place, "head")
    line = ["draft", "train", str(folder), "--text", "bundled", "--tokens", "2048", "--vocab", "512", "--device", "cpu"]
    if place == "a head of another run":
        done(training.train(*planned(folder, out)))
    runs = [CliRunner().invoke(app, [*line, "--out", str(out), *more]) for more in (["--dry-run"], [])]
    assert [type(r.exception) for r in runs] == [UsageError] * 2
    assert str(runs[0].exception) == str(runs[1].exception)


@pytest.mark.parametrize("tokens", [520, 1100, 2048, 5000])
def test_the_plan_counts_the_tokens_that_are_read(tokens, folder, tmp_path):
    """Of a text that is shorter than what is asked for, and of a longer one; in windows of 64 tokens, 8 at a time."""
    for words in (700, 3000):
        (tmp_path / "book.txt").write_text("the " * words)
        of, model, tokenizer = planned(folder, tmp_path / "head", tokens=tokens, text=str(tmp_path / "book.txt"))
        parts = done(training.training_windows(of, model, tokenizer))
        assert of.tokens == sum(p.numel() for p in parts) <= tokens
        assert f"{of.tokens:,} tokens: " in dict(of.summary)["text"]


@pytest.mark.parametrize("given", ["none", "empty.txt", "bytes.txt", "bad.jsonl", "folder"])
def test_a_text_that_cannot_be_learnt_from_is_no_calibration_text(given, folder, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.txt").write_text(" ")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "bad.jsonl").write_text("[]")
    with pytest.raises(LowqError) as told:
        planned(folder, tmp_path / "head", text=str(tmp_path / given))
    assert str(tmp_path / given) in str(told.value)
    assert "calib" not in str(told.value).replace(str(tmp_path), "")


def test_a_model_writes_its_heads_texts_half_of_them_greedily(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    of, model, tokenizer = planned(folder, tmp_path / "head", text="self")
    steps = training.training_windows(of, model, tokenizer)
    message = []
    while True:
        try:
            message.append(next(steps))
        except StopIteration as e:
            drawn, greedy = e.value
            break
    assert message[-1].total == 8192  # the least that is written
    assert len(drawn) == len(greedy) == 64
    teacher = training.Teacher(plan_of(model), of.of, torch.arange(WORDS), 2, 64)
    output, chance = ((teacher(ids[:2])[3][:, 16:-1] == ids[:2, 18:]).float().mean() for ids in (greedy, drawn))
    assert output > 0.9
    assert chance < 0.5
    result = done(training.train(of, model, tokenizer))
    assert result.steps == of.steps
    again = training.training_windows(of, model, tokenizer)
    assert done(again)[1].tolist() == greedy.tolist()


@pytest.mark.parametrize("embedding", [None, 8])
def test_a_head_learns_from_a_packed_checkpoint_as_it_decodes(embedding, folder, tmp_path):
    lowq.quantize(folder, out=tmp_path / "packed", bits=4, group=16, method="rtn", embedding=embedding, lm_head=8)
    of, packed, tokenizer = planned(tmp_path / "packed", tmp_path / "head")
    assert done(training.train(of, packed, tokenizer)).loss > 0
    decoder_of(packed).balances.clear()  # the training has timed it
    texts = [stream(packed, tokenizer, [5, 9, 4], max_new_tokens=12, draft=d) for d in ("none", str(tmp_path / "head"))]
    assert all([*text.pieces()] for text in texts)
    assert texts[0].tokens == texts[1].tokens
    assert texts[1].drafting.steps > 0


def test_a_head_trained_for_a_checkpoint_is_removed_with_it(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["quantize", str(folder), "--bits", "8", "--group", "16", "--out", "packed"]).exit_code == 0
    of, model, tokenizer = planned("packed", tmp_path / "packed" / "draft")
    done(training.train(of, model, tokenizer))
    (tmp_path / "packed" / "draft" / "mine.txt").write_text("mine")
    line = ["rm", "packed", "--yes"]
    shown = CliRunner().invoke(app, line)
    assert shown.exit_code == 0, shown.output
    assert [p.relative_to(tmp_path).as_posix() for p in (tmp_path / "packed").rglob("*")] == [
        "packed/draft",
        "packed/draft/mine.txt",
    ]
    (tmp_path / "packed" / "draft" / "mine.txt").unlink()
