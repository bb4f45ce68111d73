"""The text that a model writes itself: the same for a seed, kept, gone on with after a kill, in conversations too."""

import json
import os
import shutil
import signal
from dataclasses import replace

import forking
import pytest
import torch
from checkpoints import RARE, WORDS, write_byte_tokenizer
from folders import files
from safetensors.torch import load_file
from typer.testing import CliRunner

from lowq_cli import main
from lowq_cli.calibrate import texts
from lowq_cli.calibrate.expert_usage import Visits
from lowq_cli.engine import open_model
from lowq_cli.files.folder import unfinished
from lowq_cli.files.source import open_source
from lowq_cli.main import app
from lowq_cli.plan.recipe import make_recipe
from lowq_cli.quantizers import FEW_TOKENS
from lowq_cli.run import own_text, own_text_plan, pipeline
from lowq_cli.run.events import TextStep
from lowq_cli.run.prepare import prepare
from lowq_packers.errors import DoesNotFitError, UnsupportedError, UsageError

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def dense(family_checkpoints):
    return family_checkpoints("llama").dense


@pytest.fixture
def cache(own_cache):
    """Holds nothing yet."""
    return own_cache / "own-text"


def recipe(**more):
    return make_recipe(**({"bits": 3, "group": 16, "method": "gptq", "calib": "self", "calib_tokens": 4096} | more))


def written(dense, **more):
    """(text, steps) of a recipe; torch's threads are afterwards as many as before."""
    threads = torch.get_num_threads()
    with open_source(dense) as source:
        outlook = own_text_plan.outlook(str(dense), source, recipe(**more), CPU)
    steps = []

    generator = own_text.write(outlook, None)
    while True:
        try:
            steps.append(next(generator))
        except StopIteration as e:
            assert torch.get_num_threads() == threads
            return e.value, steps


def test_it_is_the_same_for_a_seed_and_another_for_another(dense, cache):
    text, steps = written(dense)
    assert text.ids.shape == (4096,)
    assert text.ids[0] == 1  # the beginning of a text
    assert [s.total for s in steps if isinstance(s, TextStep)]
    again, none = written(dense)
    assert again.digest == text.digest
    assert not none  # kept
    for path in cache.rglob("*.safetensors"):
        path.unlink()
    assert written(dense)[0].digest == text.digest
    other, _ = written(dense, calib_seed=1)
    assert (other.ids != text.ids).float().mean() > 0.5


def test_rows_of_a_round_differ_and_a_longer_text_begins_with_a_shorter_one(dense):
    short, _ = written(dense)
    long, _ = written(dense, calib_tokens=8192)
    assert torch.equal(long.ids[:4096], short.ids)
    starts = (long.ids == 1).nonzero().flatten()
    heads = {tuple(long.ids[i : i + 6].tolist()) for i in starts}
    assert len(heads) > 0.9 * len(starts)


def test_a_text_in_parts_begins_with_the_text_of_one(dense, tmp_path):
    """The first part is the whole text of other methods. In later ones a random token begins every second plain sequence."""
    chat = shutil.copytree(dense, tmp_path / "chat")
    write_byte_tokenizer(chat, "[user]{{ messages[0]['content'] }}[model]")
    for folder in (dense, chat):
        one, _ = written(folder)
        with open_source(folder) as source:
            outlook = own_text_plan.outlook(str(folder), source, recipe(), CPU, parts=3)
        several = own_text.whole(outlook, None)
        assert outlook.total == 3 * 4096
        assert torch.equal(several.ids, one.ids)
        assert several.later.shape == (2, 4096)
        assert several.digest != one.digest
        rows = torch.cat([several.ids[None], several.later]).reshape(3, 8, 512)
        assert len({tuple(row.tolist()) for row in rows.flatten(0, 1)}) == 24
        if folder is chat:
            assert all("[user]" in bytes(part[2048:].tolist()).decode("latin-1") for part in several.later)
        begun = [load_file(p)["ids"] for p in sorted(outlook.folder.glob("begun-*"))]
        plain = 1024 if folder is chat else 2048
        assert torch.equal(several.later[:, plain : 2 * plain].flatten(), torch.cat(begun)[: 2 * plain])
        with open_source(folder) as source:
            tokenizer = open_model.tokenizer(source)
        words = set(tokenizer.get_vocab().values()) - {t.token for t in tokenizer.added_tokens().values()}
        pairs, at = begun[0].unfold(0, 2, 1).tolist(), 0
        for token in texts.random_tokens(words, 160, (outlook.side,), 1).tolist():
            at = pairs.index([1, token], at) + 1  # raises where no sequence begins so


def test_a_damaged_or_torn_file_is_written_again(dense, cache):
    text, _ = written(dense)
    first = sorted(cache.rglob("text-*.safetensors"))[0]
    raw = bytearray(first.read_bytes())
    raw[-3] ^= 1
    for content in (bytes(raw), bytes(raw)[:100], b""):
        first.write_bytes(content)
        assert written(dense)[0].digest == text.digest


def test_texts_end_where_the_model_ends_them(dense):
    text, _ = written(dense)
    ends, starts = (text.ids == 2).nonzero().flatten()[:-1] + 1, (text.ids == 1).nonzero().flatten()
    assert len(ends) > 5
    assert set(ends.tolist()) <= set(starts.tolist())


def test_a_chat_model_writes_half_as_conversations(dense, cache, tmp_path):
    folder = shutil.copytree(dense, tmp_path / "chat")
    write_byte_tokenizer(folder, "[user]{{ messages[0]['content'] }}[model]")
    text, _ = written(folder)
    plain, chat = text.ids[:2048], text.ids[2048:]
    assert plain[0] == 1
    words = bytes(chat.tolist()).decode("latin-1")
    assert words.startswith("[user]")
    assert "[model]" in words
    assert {p.name[:4] for p in cache.rglob("*.safetensors")} == {"text", "chat"}


def test_a_checkpoint_is_the_same_again_and_its_report_names_the_text(dense, cache, tmp_path):
    list(pipeline.run(dense, recipe(), tmp_path / "a"))
    for path in cache.rglob("*.safetensors"):
        path.unlink()
    list(pipeline.run(dense, recipe(), tmp_path / "b"))
    assert files(tmp_path / "a") == files(tmp_path / "b")
    report = json.loads((tmp_path / "a" / "lowq_report.json").read_text())
    assert report["recipe"]["calib"] == "self"
    assert report["calibration"] == {"text": "self", "hash": written(dense)[0].digest, "tokens": 4096, "seed": 0}
    assert list(pipeline.run(dense, recipe(), tmp_path / "a"))[-1].result.already_done
    with pytest.raises(UsageError, match="another lowq run"):
        list(pipeline.run(dense, recipe(calib_seed=1), tmp_path / "a"))


def test_a_folder_of_another_run_or_tool_is_refused_before_the_text_is_written(dense, cache, tmp_path):
    list(pipeline.run(dense, recipe(calib="bundled"), tmp_path / "out"))
    with pytest.raises(UsageError, match="holds another lowq run; use --fresh or another --out"):
        list(pipeline.run(dense, recipe(bits=4), tmp_path / "out"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"files that lowq did not write, such as thesis\.txt"):
        list(pipeline.run(dense, recipe(), tmp_path / "mine"))
    assert not cache.exists()
    with pytest.raises(UsageError, match="holds another lowq run"):  # the text alone differs: known only once it is there
        list(pipeline.run(dense, recipe(), tmp_path / "out"))
    assert cache.exists()


@pytest.mark.parametrize(("family", "quick"), [("llama", True), (WORDS, False)], ids=["quick", "slow"])
def test_without_a_text_it_is_the_default_where_it_is_quick(family, quick, family_checkpoints, tmp_path):
    """Whatever the cache holds, and whatever rate it says that the text is written at."""
    dense = family_checkpoints(family).dense
    with open_source(dense) as source:
        outlook = own_text_plan.outlook(str(dense), source, recipe(), CPU)
    for tokens_per_s in (None, 1e-9, 1e12):
        if tokens_per_s:
            (outlook.folder / "rate.json").write_text(json.dumps({"tokens_per_s": tokens_per_s}))
        with prepare(dense, recipe(calib=None), tmp_path / "o", device="cpu") as prepared:
            assert prepared.plan.recipe.calib == ("self" if quick else "bundled")
            assert prepared.out == tmp_path / "o"
            note = prepared.plan.notes[-1]
            assert ("own text, 4,096 tokens" if quick else "calibrated on the bundled text: writing its own") in note
        if not tokens_per_s:
            own_text.whole(outlook, None)


def test_a_model_that_writes_empty_texts_falls_back_to_the_bundled_text(dense, tmp_path):
    dense = shutil.copytree(dense, tmp_path / "silent")
    (dense / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(160))}))
    with pytest.raises(UnsupportedError, match="writes only empty texts"):
        list(pipeline.run(dense, recipe(), tmp_path / "a"))
    list(pipeline.run(dense, recipe(calib=None), tmp_path / "b"))
    assert json.loads((tmp_path / "b" / "lowq_report.json").read_text())["calibration"]["text"] == "bundled"


def test_where_the_model_does_not_fit_a_quick_copy_writes(dense, cache):
    with open_source(dense) as source:
        outlook = own_text_plan.outlook(str(dense), source, recipe(), CPU)
        with pytest.raises(DoesNotFitError, match="cannot write a text"):
            own_text_plan.outlook(str(dense), source, recipe(), CPU, room=source.nbytes - 1)
    results = []

    def make(recipe, folder):
        results.append(recipe.bits)
        pipeline.maker(str(dense), "cpu")(recipe, folder)

    text = own_text.whole(replace(outlook, bits=8), make)
    assert results == [8]
    assert len(text.ids) == 4096
    assert not list(cache.rglob("copy*"))


def test_a_quick_copy_is_its_process_alone_and_goes_when_that_was_killed(dense):
    with open_source(dense) as source:
        outlook = replace(own_text_plan.outlook(str(dense), source, recipe(), CPU), bits=8)
    with unfinished(outlook.folder / own_text.COPY) as theirs:
        (theirs / "model.safetensors").write_text("in use")
        own_text.whole(outlook, pipeline.maker(str(dense), "cpu"))
        assert [p.name for p in outlook.folder.glob("copy*")] == [theirs.name]
        assert (theirs / "model.safetensors").read_text() == "in use"
    if not (pid := os.fork()):
        try:
            killed = unfinished(outlook.folder / own_text.COPY)
            killed.__enter__()
        finally:  # an error must not let the child run the tests after this one
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert list(outlook.folder.glob("copy*"))
    own_text.whole(outlook, None)  # all is kept: nothing has to be written
    assert not list(outlook.folder.glob("copy*"))


def test_for_a_budget_of_bits_the_text_is_there_before_it_is_measured(dense, tmp_path):
    phases = []
    more = {"bits": None, "bpw": 7.5}
    with prepare(dense, recipe(**more), tmp_path / "o", device="cpu", watch=lambda *p: phases.append(p)) as prepared:
        assert prepared.text.name == "self"
        assert prepared.mixed.in_nats
        assert prepared.plan.notes == ("calibrated on the model's own text, 4,096 tokens, seed 0: already written",)
    assert list(dict.fromkeys(name for name, *_ in phases)) == ["write", "measure"]
    assert phases[0] == ("write", 0, 4096, "0 of 4,096 tokens of its own text")


def test_the_judge_of_a_bound_is_no_matter_of_the_choice_of_the_text(dense, tmp_path):
    asked = make_recipe(method="gptq", max_kl=0.1, judge=str(tmp_path / "novel.txt"))
    with open_source(dense) as source:
        assert own_text_plan.decide(str(dense), source, asked, CPU)[0].judge == asked.judge


def test_for_a_budget_a_model_that_writes_empty_texts_falls_back_to_the_bundled_text(dense, tmp_path):
    dense = shutil.copytree(dense, tmp_path / "silent")
    (dense / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(160))}))
    with prepare(dense, recipe(bits=None, bpw=7.5, calib=None), tmp_path / "o", device="cpu") as prepared:
        assert prepared.text.name == prepared.plan.recipe.calib == "bundled"
        assert prepared.plan.notes == ("calibrated on the bundled text: the model ends its own texts at once",)
    with (
        pytest.raises(UnsupportedError, match="writes only empty texts"),
        prepare(dense, recipe(bits=None, bpw=7.5), tmp_path / "o", device="cpu"),
    ):
        pass


def test_experts_that_are_hardly_visited_get_more_text(family_checkpoints, tmp_path):
    dense = family_checkpoints(RARE, schemes={}).dense
    with open_source(dense) as source:
        visits = Visits(source, CPU)
        assert visits(torch.arange(4, 132)).sum() == 2 * 2 * 128  # layers, experts a token
        outlook = own_text_plan.outlook(str(dense), source, recipe(), CPU)
    plain, longer = own_text.whole(outlook, None).ids, own_text.whole(outlook, None, visits).ids
    seen, after = (visits(ids.long()).sum(0) for ids in (plain, longer))
    assert (seen < FEW_TOKENS).any()
    assert torch.equal(longer[:4096], plain)
    assert len(longer) - len(plain) == 1024  # a quarter at most, in batches of 8 windows
    assert ((after > seen) & (seen < FEW_TOKENS)).any()
    assert torch.equal(own_text.whole(outlook, None, visits).ids, longer)  # kept
    list(pipeline.run(dense, recipe(), tmp_path / "o"))
    assert json.loads((tmp_path / "o" / "lowq_report.json").read_text())["calibration"]["tokens"] == len(longer)
    with prepare(dense, recipe(bits=None, bpw=7.5), tmp_path / "b", device="cpu") as prepared:
        assert prepared.text.digest == texts.Text("", ids=longer).digest  # also for a budget, whose trials read that text


def test_the_trials_of_a_bound_read_the_text_of_the_run_that_adopts_one(family_checkpoints, tmp_path):
    """A trial's text was made longer for rare experts and the run's was not: OUT then held "another lowq run"."""
    dense = family_checkpoints(RARE, schemes={}).dense
    asked = recipe(bits=None, max_kl=100.0, widths=(8, 4))
    assert list(pipeline.run(dense, asked, tmp_path / "o", device="cpu"))[-1].result.already_done is False


KILLED = """
import os, signal
from lowq_cli.run import pipeline
from lowq_cli.plan.recipe import make_recipe
replace, left = os.replace, [2]  # the last time: after it nothing else would sweep up
def dying(*a):
    left[0] -= str(a[1]).endswith("rate.json")
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(*a)
os.replace = dying
made = make_recipe(bits=3, group=16, method="gptq", calib="self", calib_tokens=4096)
list(pipeline.run({model!r}, made, {out!r}))
"""


def test_killed_while_it_writes_it_goes_on_with_the_same_bytes(dense, cache, tmp_path):
    script = KILLED.format(model=str(dense), out=str(tmp_path / "a"))
    done = forking.script(script)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (tmp_path / "a").exists()  # nothing half-written where the checkpoint will be
    kept = {p: p.stat().st_mtime_ns for p in cache.rglob("text-*.safetensors")}
    assert kept
    list(pipeline.run(dense, recipe(), tmp_path / "a"))
    assert all(p.stat().st_mtime_ns == t for p, t in kept.items())
    assert not list(cache.rglob(".*"))
    for path in cache.rglob("*.safetensors"):
        path.unlink()
    list(pipeline.run(dense, recipe(), tmp_path / "b"))
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_the_command_shows_the_writing(dense, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ["--bits", "3", "--group", "16", "--method", "gptq", "--calib", "self", "--calib-tokens", "4096", "--out", "o"]
    result = CliRunner().invoke(app, ["quantize", str(dense), *flags])
    assert result.exit_code == 0, result.output
    assert "calibrated on the model's own text, 4,096 tokens, seed 0: about" in " ".join(result.output.split())
    assert "of its own text" in result.output


def test_the_command_shows_the_writing_for_a_budget_and_says_of_a_dry_run_what_it_read(dense, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ["--bpw", "7.5", "--method", "gptq", "--calib", "self", "--calib-tokens", "4096", "--out", "o", "--dry-run"]
    result = CliRunner().invoke(app, ["quantize", str(dense), *flags])
    assert result.exit_code == 0, result.output
    assert "tokens of its own text" in result.output
    assert "layers" in result.output
    assert "seed 0: already written" in " ".join(result.output.split())
    assert "dry run: nothing was written into o" in " ".join(result.output.split())
    assert not (tmp_path / "o").exists()


def test_a_cache_that_cannot_be_written_is_refused_before_the_text_is_generated(tmp_path, monkeypatch, capsys):
    """The text was generated, and lost."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    line = ["quantize", "demo", "--method", "gptq", "--calib", "self", "--calib-tokens", "4096", "--device", "cpu"]
    assert main.main([*line, "--out", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert err.endswith("Not a directory; name another cache folder: XDG_CACHE_HOME=DIR\n")
    assert "50%" not in err
