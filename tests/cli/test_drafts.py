"""Drafts by n-grams: the guesses, when a guess is worth its rows, and that texts equal those without drafts."""

import json
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

import lowq
from lowq_cli.engine import stream
from lowq_cli.engine.drafts import drafting
from lowq_cli.engine.drafts.draft_length import AGAIN, ENOUGH, TableCosts, TimedCosts, worth
from lowq_cli.engine.drafts.drafter import Guess, NoDrafts
from lowq_cli.engine.drafts.drafter_choice import settled
from lowq_cli.engine.drafts.ngram import SIZES, NGram
from lowq_cli.engine.open_model import ready
from lowq_cli.engine.plan import plan_of
from lowq_cli.engine.sampling import Sampling
from lowq_cli.engine.stream import Generation
from lowq_cli.files.source import DEMO
from lowq_cli.files.weight_files import SINGLE
from lowq_cli.run.draft_head import Learner, Sizes
from lowq_packers.errors import LowqError, NotFoundError, UnsupportedError


@pytest.fixture(scope="module")
def demo():
    return ready("demo", "cpu")


def longest(tokens):
    """By definition: the place after the last occurrence of the longest run at the end that SIZES has and that stood before."""
    for size in SIZES:
        run = tokens[-size:]
        for place in range(len(tokens) - 1, size - 1, -1):
            if len(tokens) >= size and tokens[place - size : place] == run:
                return place
    return -1


@pytest.mark.parametrize("seed", range(6))
def test_a_guess_follows_the_longest_match_until_it_is_wrong(seed):
    rng = random.Random(seed)
    drafter, tokens, place = NGram(), [], -1
    for _ in range(400):
        token = tokens[place] if place >= 0 and rng.random() < 0.7 else rng.randrange(4 + 3 * seed)
        right = place >= 0 and tokens[place] == token
        tokens.append(token)
        drafter.extend([token])
        place = place + 1 if right else longest(tokens)
        guess = drafter.guess(8)
        if place < 0:
            assert not guess.tokens
            continue
        whole = list(tokens)
        for token in guess.tokens:
            assert token == whole[place + len(whole) - len(tokens)]
            whole.append(token)
        assert len(guess.tokens) == 8
        assert all(0 <= c <= 1 for c in guess.chances)


def test_chances_follow_accepted_drafts():
    sure, never = NGram(), NGram()
    sure.extend([1, 2, 3, 4] * 60)
    never.extend([t for i in range(200) for t in (1, 2, 10 + i)])
    assert sure.guess(4).tokens == [1, 2, 3, 4]
    assert min(sure.guess(4).chances) > 0.9
    never.extend([1, 2])
    assert never.guess(1).chances[0] < 0.05


def test_drafts_are_worth_their_tokens_less_the_cost_of_their_rows():
    flat, steep = TableCosts({1: 1.0, 16: 1.4}), TableCosts({1: 1.0, 2: 1.9, 16: 15.0})
    sure, doubtful = Guess([1] * 15, [0.95] * 15), Guess([1] * 15, [0.3] * 15)
    assert worth(sure, flat, (4, 8, 16)) == 15
    assert worth(sure, steep, (2, 4, 8, 16)) == 0
    assert worth(doubtful, flat, (4, 8, 16)) == 3
    assert worth(doubtful, flat, (4, 8, 16), apart=0.5) == 0
    assert worth(Guess(), flat, (4, 8, 16)) == 0
    assert worth(Guess([1, 2], [0.9, 0.9]), flat, (4, 8, 16)) == 2


def test_costs_are_those_that_were_timed_once_they_are_known():
    costs = TimedCosts(TableCosts({1: 1.0, 4: 1.3}))
    for _ in range(ENOUGH + 1):
        costs.note(1, 1.0)
    assert costs(4) == 1.3
    for seconds in (90.0, 50.0, 2.0, 2.0):  # the first prepares it
        costs.note(4, seconds)
    assert costs(4) == 1.3  # not enough of them: one may have waited for another process
    costs.note(4, 2.0)
    assert costs(4) == 2.0
    assert costs(2) == pytest.approx(1 + 0.1 * 1.0 / 0.3)  # what the table says of 2 rows, by as much more as 4 took
    assert costs(16) == pytest.approx(1 + 4.2 * 1.0 / 0.3)
    for _ in range(AGAIN):
        costs.note(1, 1.0)
    assert costs(4) < 2.0  # it is tried again


def test_a_width_without_timings_costs_its_entry_of_the_table_until_a_neighbour_is_timed():
    costs = TimedCosts(TableCosts({1: 1.0, 2: 1.5, 16: 8.5}))
    for rows, seconds in ((1, 1.0), (2, 1.25), (8, 2.75)):
        for _ in range(ENOUGH + 1):
            costs.note(rows, seconds)
    assert [costs(n) for n in (2, 3, 8, 12, 16)] == pytest.approx([1.25, 1.5, 2.75, 3.75, 4.75])  # half of what the table says
    cheap = TimedCosts(TableCosts({1: 1.0, 2: 1.5}))
    for rows, seconds in ((1, 1.0), (2, 0.9)):
        for _ in range(ENOUGH + 1):
            cheap.note(rows, seconds)
    assert cheap(3) == 1  # more rows never cost less than one


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def measured(name, part):
    rows = json.loads((RESULTS / name).read_text())["rows"]
    return [r for r in rows if r.get("part", r.get("variant")) == part]


def test_the_first_costs_on_a_cpu_are_those_of_base():
    (row,) = measured("cpu/drafts.json", "steps")
    ms = dict(zip(row["rows"], row["cpu_ms"], strict=True))
    for rows, cost in drafting.STARTING_COSTS.items():
        assert cost == pytest.approx(ms[rows] / ms[1], rel=0.1)


def test_the_costs_on_a_gpu_are_those_of_an_8b_model_and_of_base():
    ms = {r["rows"]: r["ms"] for r in measured("h200/drafts.json", "rows") if (r["variant"], r["context"]) == ("4h8", 512)}
    assert pytest.approx(1e-3 * (ms[2] - ms[1]) / 32, rel=0.05) == drafting.WIDE_LAYER_S
    assert pytest.approx((ms[16] - ms[2]) / 14 / ms[1], rel=0.05) == drafting.ROW
    reads = []
    for card in ("h100", "h200"):
        step = next(r for r in measured(f"{card}/decode_8b.json", "4h8") if r["batch"] == 1)
        reads.append(step["bytes_per_step"] / (1e-3 * step["ms_per_step"] - 32 * drafting.LAYER_S))
    assert reads[0] < drafting.READ < reads[1]
    (base, *_) = (r for r in measured("h200/draft_heads.json", "steps") if r["model"] == "base")
    weights = 2 * (6 * (1024 + 512 + 2816 + 1408) * 512 + 8192 * 512)  # bytes of base's products in 16 bits
    assert pytest.approx((1e-6 * base["step_us"] - weights / drafting.READ) / 6, rel=0.1) == drafting.LAYER_S


WAYS = ({}, {"temperature": 0.9, "seed": 5}, {"temperature": 1.2, "top_k": 9, "top_p": 0.9, "repetition_penalty": 1.3})


@pytest.mark.parametrize("how", WAYS, ids=["greedy", "drawn", "restricted"])
def test_a_text_is_the_same_with_drafts(demo, how):
    prompt = "Once upon a time there was a fox. Once upon a time there was a fox. Once upon"
    for new in (1, 2, 7, 60):
        with_drafts = stream(*demo, prompt, max_new_tokens=new, draft="ngram", **how)
        pieces = list(with_drafts)
        without = stream(*demo, prompt, max_new_tokens=new, draft="none", **how)
        assert "".join(without) == "".join(pieces)
        assert with_drafts.tokens == without.tokens
        assert with_drafts.finish_reason == without.finish_reason


def test_drafts_are_checked_and_counted(demo):
    g = stream(*demo, "a b c d e f g h " * 6, max_new_tokens=80, draft="ngram")
    g.drafting.timed = None  # so that this machine's load decides on nothing
    g.drafting.costs = TableCosts({1: 1.0, 16: 1.2})
    text = "".join(g)
    assert text == "".join(stream(*demo, "a b c d e f g h " * 6, max_new_tokens=80, draft="none"))
    assert 0 < g.drafting.accepted <= g.drafting.drafted
    assert g.steps < 79
    numbers = g.drafting.numbers(79, g.steps)
    assert numbers["steps"] == g.steps >= numbers["steps_with_drafts"]
    assert numbers["tokens_per_step"] == pytest.approx(79 / g.steps, abs=1e-3)


class Ahead:
    """A decoder that runs ahead, whose model says `answer`; it counts what was launched."""

    name, ahead, device = "simulated", True, torch.device("cuda")

    def __init__(self, answer, plan):
        self.answer, self.plan, self.timed, self.balances = answer, plan, {}, {}
        self.at = self.launched = 0
        self.stale, self.rows = [], []
        self.sampler = SimpleNamespace(logits=torch.zeros(1))

    def start(self, prompts, sampling, room):
        return self.step()

    def step(self):
        self.rows.append(1)
        return self._next([])

    def verify(self, drafts, rows):
        assert len(drafts) < rows
        self.stale = (list(drafts) or self.stale) + [-1] * (rows - 1)  # without new drafts the last ones are checked again
        self.rows.append(rows)
        return SimpleNamespace(new=False, result=self._next(self.stale[: rows - 1]))

    def _next(self, drafts):
        drawn = self.answer[self.at : self.at + len(drafts) + 1]
        right = next((i for i, (a, b) in enumerate(zip(drafts, drawn, strict=False)) if a != b), len(drafts))
        self.at, self.launched = self.at + right + 1, self.launched + 1
        return torch.tensor([right, *drawn] if drafts else drawn)


class Half:
    """A drafter that knows the answer, and is wrong now and then; `tokens` are those of the sequence."""

    name = "half"

    def __init__(self, answer, seed):
        self.answer, self.rng, self.tokens = answer, random.Random(seed), []

    def begin(self, prompt):
        self.tokens = []

    def extend(self, tokens):
        self.tokens += tokens

    def guess(self, most):
        n = 0 if self.rng.random() < 0.5 else min(most, 12)
        tokens = [t if self.rng.random() < 0.9 else t + 1 for t in self.answer[len(self.tokens) : len(self.tokens) + n]]
        return Guess(tokens, [0.97] * len(tokens))


@pytest.fixture
def ahead(demo):
    """(generation, decoder, drafter) of a text of so many tokens on a device that runs ahead."""
    model, tokenizer = demo

    def make(room, seed):
        answer = [random.Random(seed).randrange(5, 900) for _ in range(room + 40)]
        decoder, drafter = Ahead(answer, plan_of(model)), Half(answer, seed)
        how = {"stop_ids": frozenset(), "stop": [], "limited_by": "length", "began": 0.0}
        how |= {"drafting": drafting.FromHost(drafter, decoder)}
        return Generation(decoder, tokenizer, [[1, 2, 3]], Sampling(), room, **how), decoder, drafter

    return make


@pytest.mark.parametrize("room", [1, 2, 17, 200])
@pytest.mark.parametrize("seed", range(3))
def test_the_next_step_computes_while_tokens_become_text(ahead, room, seed):
    generation, decoder, drafter = ahead(room, seed)
    generation.drafting.balance = None  # drafts are always allowed
    for read, tokens in enumerate(generation.new_tokens(), 1):
        generation.tokens[0] += tokens[0]
        assert decoder.launched > read or len(generation.tokens[0]) >= room
    assert generation.tokens[0][:room] == decoder.answer[:room]
    assert drafter.tokens[:room] == decoder.answer[: min(room, len(drafter.tokens))]
    assert decoder.at <= room + 16
    assert room < 100 or generation.drafting.accepted


@pytest.mark.parametrize("drafts", [True, False])
@pytest.mark.parametrize("tokens", [900, 7])
def test_with_deterministic_all_steps_have_as_many_rows(ahead, drafts, tokens):
    """With 7 different tokens, drafts of earlier steps that are checked again are right now and then."""
    generation, decoder, drafter = ahead(200, 3)
    decoder.answer[:] = drafter.answer[:] = [t % tokens for t in decoder.answer]
    drafter = drafter if drafts else NoDrafts()
    generation.drafting = drafting.FromHost(drafter, decoder, same=True)
    for one in generation.new_tokens():
        generation.tokens[0] += one[0]
    assert generation.tokens[0][:200] == decoder.answer[:200]
    assert set(decoder.rows[1:]) == {drafting.SAME_ROWS}
    assert bool(generation.drafting.accepted) == drafts


def test_a_drafter_is_given_tokens_once_drafts_are_allowed(ahead):
    generation, decoder, drafter = ahead(60, 1)
    switch = generation.drafting.balance = SimpleNamespace(allowed=False, plain_s=0.0, note=lambda *step: None)
    for read, tokens in enumerate(generation.new_tokens()):
        generation.tokens[0] += tokens[0]
        assert (not drafter.tokens) == (read <= 20)
        switch.allowed = read >= 20
    assert generation.tokens[0][:60] == decoder.answer[:60]
    assert drafter.tokens == decoder.answer[: len(drafter.tokens)]
    assert generation.drafting.accepted


def test_a_step_that_was_recorded_first_does_not_turn_drafts_off(ahead):
    """The first step of each width takes as long as thousands of plain steps."""
    generation, decoder, _ = ahead(60, 1)
    noted = []
    generation.drafting.balance = SimpleNamespace(allowed=True, plain_s=0.0, note=lambda *step: noted.append(step[2]))
    verify, widths = decoder.verify, set()

    def recording(drafts, rows):
        step = verify(drafts, rows)
        step.new, _ = rows not in widths, widths.add(rows)
        return step

    decoder.verify = recording
    for tokens in generation.new_tokens():
        generation.tokens[0] += tokens[0]
    assert widths
    assert sum(noted) >= len(widths)
    assert not all(noted)


def test_a_stop_within_a_step_ends_the_text_there(demo):
    prompt = "one two three four. one two three four. one two three four. one two"
    whole = "".join(stream(*demo, prompt, max_new_tokens=60, draft="none"))
    for stop in {whole[i : i + 3] for i in range(5, len(whole) - 3, 7)}:
        g = stream(*demo, prompt, max_new_tokens=60, draft="ngram", stop=stop)
        g.drafting.timed, g.drafting.balance, g.drafting.costs = None, None, TableCosts({1: 1.0, 16: 1.0})
        assert "".join(g) == whole[: whole.index(stop)]
        assert g.finish_reason == "stop"


def test_texts_side_by_side_take_none_and_say_so(demo):
    g = stream(*demo, ["a b a b", "c d c d"], max_new_tokens=4)
    assert g.drafting is None
    assert "side by side" in g.why_no_drafts


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    """The demo's model in 3 bits."""
    folder = tmp_path_factory.mktemp("small") / "demo3"
    lowq.quantize("demo", out=str(folder), bits=3, device="cpu")
    return str(folder)


@pytest.mark.half_of("how")
@pytest.mark.parametrize("how", WAYS, ids=["greedy", "drawn", "restricted"])
def test_a_draft_model_changes_no_token(demo, quantized, how):
    """The model itself is right about every greedy token; one in fewer bits is about some."""
    prompt = "Once upon a time there was a fox who"
    without = stream(*demo, prompt, max_new_tokens=50, draft="none", **how)
    text = "".join(without)
    shares = []
    for draft in ("demo", quantized):
        g = stream(*demo, prompt, max_new_tokens=50, draft=draft, **how)
        g.drafting.timed, g.drafting.balance, g.drafting.costs = None, None, TableCosts({1: 1.0, 16: 1.0})
        assert "".join(g) == text
        assert g.tokens == without.tokens
        shares.append(g.drafting.accepted / g.drafting.drafted)
        assert g.steps < 50
    assert shares[0] == 1 or how
    assert shares[0] > shares[1] > 0 or how


def test_drafts_of_a_device_are_given_up_where_they_are_not_worth_it_and_tried_again(demo, quantized):
    g = stream(*demo, "One day", max_new_tokens=200, draft=quantized)
    g.drafting.timed, g.drafting.balance, g.drafting.costs = None, None, TableCosts({1: 1.0, 2: 3.0, 16: 40.0})
    assert "".join(g) == "".join(stream(*demo, "One day", max_new_tokens=200, draft="none"))
    assert 2 <= g.drafting.steps <= 2 * (1 + 200 // 64)


def other_tokenizer(folder):
    """The demo with two of its tokens exchanged."""
    shutil.copytree(DEMO, folder)
    told = json.loads((folder / "tokenizer.json").read_text())
    vocab = told["model"]["vocab"]
    a, b = sorted(vocab, key=vocab.get)[-2:]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    (folder / "tokenizer.json").write_text(json.dumps(told))


def other_width(folder):
    """A draft head for a model with hidden states of 64 values."""
    of = Sizes(64, 96, 4, 2, 16, 8192, 8192, layers=6, eps=1e-5, theta=1e4, positions=512, taps=(1, 3, 5))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(of.config()))
    save_file({n: t.contiguous() for n, t in Learner(of, {}, torch.device("cpu")).tensors().items()}, folder / SINGLE)


def cut_off(folder):
    shutil.copytree(DEMO, folder)
    with open(folder / SINGLE, "r+b") as file:
        file.truncate(1000)


@pytest.mark.parametrize(
    ("write", "says"), [(other_tokenizer, "another tokenizer"), (other_width, "hidden states of 64 values")]
)
def test_whatever_does_not_fit_the_model_has_one_exit_code(write, says, demo, tmp_path):
    write(tmp_path / "draft")
    with pytest.raises(LowqError, match=says) as told:
        stream(*demo, "a", draft=str(tmp_path / "draft"))
    assert told.value.exit_code == UnsupportedError.exit_code


@pytest.mark.parametrize("write", [None, Path.mkdir, Path.touch, cut_off])
@pytest.mark.parametrize("spelled", ["{}", "./{}", "../here/{}", "{root}/{}", "~/{}", "{}.gguf", "a/b/{}"])
def test_whatever_is_not_there_or_not_whole_has_one_exit_code(spelled, write, demo, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "here"))
    if write is not None:
        write(tmp_path / "here" / "nothing")
    with pytest.raises(LowqError) as told:
        stream(*demo, "a", draft=spelled.format("nothing", root=tmp_path / "here"))
    assert told.value.exit_code == NotFoundError.exit_code
    assert "nothing" in str(told.value)


def test_an_unknown_name_is_refused(demo):
    with pytest.raises(NotFoundError, match="--draft nothing must be auto, ngram, mtp"):
        stream(*demo, "a", draft="nothing")


@pytest.mark.parametrize(("device", "auto"), [("cpu", "ngram"), ("cuda", "none")])
def test_auto_without_a_trained_head(device, auto):
    assert settled("auto", device) == auto
    for name in ("ngram", "none", "mtp", "a/folder"):
        assert settled(name, device) == name


def test_auto_means_n_grams_on_a_gpu_for_large_models():
    assert settled("auto", "cuda", large=True) == "ngram"
    assert settled("none", "cuda", large=True) == "none"
