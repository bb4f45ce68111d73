"""Masks of grammars from another process equal those made here, and what happens there holds up and ends nothing else."""

import gc
import json
import os
import random
import re
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from answering import gated
from asking import Client, build, check_all, prompts
from saying import byte_tokenizer
from test_engine_process import Apart, gone

from lowq_cli.engine.tokenizer_file import read_tokenizer
from lowq_cli.serving import mask_process
from lowq_cli.serving.http.grammar import SPACED, Grammars
from lowq_cli.serving.http.refusal import Refusal
from lowq_cli.serving.mask_process import MaskProcess
from lowq_cli.serving.request import Draw, Request
from lowq_cli.serving.token_masks import TokenMasks, allows
from lowq_packers.errors import LowqError, UsageError

library = pytest.importorskip("llguidance", reason="masks need the extra lowq[grammar]")

V, END = 320, 256
WORDS = V // 32
PET = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 30}, "kind": {"enum": ["cat", "dog"]}, "age": {"type": "integer"}},
    "required": ["name", "kind", "age"],
    "additionalProperties": False,
}
GIVEN_UP = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(2000)}, "additionalProperties": False}
A_WORD = {"type": "string", "pattern": "^[a-z]{3,20}$"}
LATE = {"type": "object", "properties": {"a": A_WORD, "b": GIVEN_UP}, "required": ["a", "b"]}


def grammar(schema):
    return library.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=SPACED)


def lark(text):
    return library.LLMatcher.grammar_from_lark(text)


@pytest.fixture(scope="module")
def there():
    made = MaskProcess(byte_tokenizer(), [END], V)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def here():
    return TokenMasks(byte_tokenizer().definition(), V, [END])


def filled(mask, drafts):
    """(Drafts that are taken, the rows of these)."""
    words = np.zeros((1 + len(drafts), WORDS), np.int32)
    taken = mask.fill_drafts(words, drafts)
    return taken, words[: taken + 1].tolist()


def some_token(row, rng):
    return rng.choice([t for t in range(V) if allows(np.array(row, np.int32), t)])


def walked(maker, recipe, rng, steps):
    """Tokens that a grammar allows one after the other, up to an end."""
    mask, tokens = maker.mask(recipe), []
    while len(tokens) < steps:
        token = some_token(filled(mask, [])[1][0], rng)
        if token == END:
            break
        mask.accept(token)
        tokens.append(token)
    return tokens


@pytest.mark.parametrize("seed", range(4))
def test_masks_from_the_process_are_those_made_here_alone_and_several_at_once(there, here, seed):
    """With drafts that are right up to a random depth; the masks after them are those of the tokens themselves."""
    rng = random.Random(seed)
    recipe = [grammar(PET), lark('start: /[a-c]{2,40}/ "." /x*/\n')][seed % 2]
    far, near = [there.mask(recipe) for _ in range(3)], [here.mask(recipe) for _ in range(3)]
    for _ in range(12):
        drafts = []
        for mask in near:
            after = type(mask)(mask.matcher.deep_copy(), mask.ends, "")
            right = [rows[0] for rows in [filled(after, [])[1]]]
            tokens = []
            for _ in range(rng.randrange(5)):
                token = some_token(right[-1], rng)
                after.accept(token)
                tokens.append(token)
                if token == END:
                    break
                right.append(filled(after, [])[1][0])
            wrong = [rng.randrange(V)] * rng.randrange(2)
            drafts.append(tokens + wrong)
            taken, rows = filled(mask, drafts[-1])
            assert rows[: len(right)] == right[: len(rows)]
            assert taken >= min(len(right) - 1, len(tokens))
        for mask, given in zip(far, drafts, strict=True):
            mask.ask(given)
        assert [filled(f, d) for f, d in zip(far, drafts, strict=True)] == [
            filled(n, d) for n, d in zip(near, drafts, strict=True)
        ]
        assert filled(far[0], []) == filled(near[0], [])  # asked for once more, without `ask`
        for f, n in zip(far, near, strict=True):
            token = some_token(filled(n, [])[1][0], rng)
            f.accept(token)
            n.accept(token)


def test_a_draft_that_is_not_allowed_or_ends_the_answer_is_the_last_one_taken(there, here):
    for maker in (there, here):
        mask = maker.mask(lark("start: /ab*/\n"))
        a, b = byte_tokenizer()("ab")["input_ids"]
        assert filled(mask, [a, b, a, b])[0] == 2
        assert filled(mask, [a, END, a])[0] == 1
        assert filled(mask, [b])[0] == 0
        assert filled(mask, [a, b, b])[0] == 3


def test_where_the_library_gives_up_after_a_draft_only_that_draft_is_not_taken(there, here):
    """The request goes on, as the draft may be wrong; it ends where its own tokens come there."""
    text = byte_tokenizer()('{"a": "abcdef", "b": {"')["input_ids"]
    for maker in (there, here):
        mask = maker.mask(grammar(LATE))
        taken = filled(mask, text)[0]
        assert 9 < taken < len(text)
        assert filled(mask, text[:3])[0] == 3
        for token in text:
            mask.accept(token)
        with pytest.raises(UsageError, match="cannot keep to its form"):
            filled(mask, [])
        other = maker.mask(grammar(PET))  # the process goes on
        assert filled(other, [])[0] == 0


def test_a_grammar_that_no_answer_can_begin_is_refused_and_others_go_on(there):
    for recipe in (grammar(GIVEN_UP), lark("start: (\n")):
        with pytest.raises(UsageError):
            there.mask(recipe)
    assert filled(there.mask(grammar(PET)), [])[0] == 0


def test_masks_that_are_gone_are_let_go_there(there):
    masks = [there.mask(grammar(PET)) for _ in range(5)]
    numbers = {mask._number for mask in masks}
    del masks
    gc.collect()
    assert numbers <= set(there._running._dropped)
    mask = there.mask(grammar(PET))
    filled(mask, [])
    assert not there._running._dropped


def test_a_process_that_was_killed_ends_its_masks_and_the_next_request_gets_another():
    made = MaskProcess(byte_tokenizer(), [END], V)
    old = made.mask(grammar(PET))
    pid = made._running.process.pid
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(LowqError, match="has ended; ask again"):
        filled(old, [])
    assert filled(made.mask(grammar(PET)), [])[0] == 0
    with pytest.raises(LowqError, match="has ended"):
        filled(old, [])
    pid = made._running.process.pid
    made.stop()
    assert gone(pid)
    with pytest.raises(LowqError, match="stopping"):
        made.mask(grammar(PET))


@pytest.fixture
def impatient(monkeypatch):
    """A process that is given up after 1 s without an answer."""
    for name in ("MAKES_S", "FILLS_S"):
        monkeypatch.setattr(mask_process, name, 1)
    monkeypatch.setattr(mask_process, "TICK_S", 0.1)
    made = MaskProcess(byte_tokenizer(), [END], V)
    yield made
    made.stop()


def stop(process):
    """Stop a process, which may be at work, and wait until it has."""
    os.kill(process.pid, signal.SIGSTOP)
    until = time.monotonic() + 30
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < until


# 1 s, and 0.04 s more for each row of a pass, which a draft brings
HANGS = r"^the process that computes the masks of grammars gave no answer for [12] s and was ended; ask again$"


@pytest.mark.parametrize(
    "recipe", [grammar(PET), lark('start: "' + "a" * 2_000_000 + '"\n')], ids=["small", "more than a pipe holds"]
)
def test_a_process_that_hangs_is_ended_and_the_next_request_gets_another(impatient, recipe):
    masks = [impatient.mask(grammar(PET)) for _ in range(3)]
    assert filled(masks[0], [])[0] == 0
    process = impatient._running.process
    stop(process)
    with pytest.raises(LowqError, match=HANGS):  # while the first mask of an answer is made
        impatient.mask(recipe)
    assert gone_or_dead(process)
    for mask in masks:
        with pytest.raises(LowqError, match=HANGS):
            filled(mask, [])
    masks = [impatient.mask(grammar(PET)) for _ in range(3)]
    process = impatient._running.process
    stop(process)
    for mask in masks:
        mask.ask()
    for mask in masks:  # while those of a pass are
        with pytest.raises(LowqError, match=HANGS):
            filled(mask, [])
    assert gone_or_dead(process)
    assert filled(impatient.mask(grammar(PET)), [])[0] == 0


def gone_or_dead(process):
    process.join(10)
    return process.exitcode == -signal.SIGKILL


def test_a_process_that_hangs_while_it_starts_is_ended(impatient, monkeypatch):
    made = mask_process._Running

    class Stopped(made):
        def __init__(self, *given):
            super().__init__(*given)
            os.kill(self.process.pid, signal.SIGSTOP)

    monkeypatch.setattr(mask_process, "STARTS_S", 1)
    monkeypatch.setattr(mask_process, "_Running", Stopped)
    with pytest.raises(LowqError, match=HANGS):
        impatient.mask(grammar(PET))
    monkeypatch.setattr(mask_process, "STARTS_S", 60)
    monkeypatch.setattr(mask_process, "_Running", made)
    assert filled(impatient.mask(grammar(PET)), [])[0] == 0


def test_a_process_that_stops_for_less_goes_on(impatient, monkeypatch):
    monkeypatch.setattr(mask_process, "FILLS_S", 30)
    mask = impatient.mask(grammar(PET))
    os.kill(impatient._running.process.pid, signal.SIGSTOP)
    threading.Timer(0.5, os.kill, (impatient._running.process.pid, signal.SIGCONT)).start()
    assert filled(mask, [])[0] == 0
    assert not impatient._running._waits


@pytest.mark.parametrize("draft", ["none", "ngram"])
def test_a_hanging_process_ends_the_answers_in_a_form_and_the_others_go_on(impatient, draft):
    asked, recipe = prompts(5, 9, 4), lark("start: /[a-z]*/\n")
    c = Client(build("llama"), draft=draft, running=4)
    if draft == "ngram":
        check_all(c.engine.drafts)
    expected = c.tokens(c.ask(asked[2], 60))

    def formed(prompt):
        return c.engine.submit(Request(tuple(prompt), 200, mask=impatient.mask(recipe)))

    forms = [formed(p) for p in asked[:2]]
    while not all(n in c.heard for n in forms):
        c.hear()
    os.kill(impatient._running.process.pid, signal.SIGSTOP)
    other = c.ask(asked[2], 60)
    for events in c.follow(*forms):
        assert len(events) > 1
        assert (events[-1].finish_reason, events[-1].token) == ("error", None)
        assert re.match(HANGS, events[-1].message)
    assert c.tokens(other) == expected
    assert c.follow(formed(asked[0]))[0][-1].finish_reason == "length"
    c.engine.stop(0)


def test_a_tokenizer_that_the_library_refuses_is_tried_once():
    made = MaskProcess(byte_tokenizer(), [END], 160)  # logits for fewer tokens than it has
    for _ in range(2):
        with pytest.raises(UsageError, match="does not support answers in a form"):
            made.mask(grammar(PET))
    process = made._running.process
    process.join(60)
    with pytest.raises(UsageError, match="does not support answers in a form"):
        made.mask(grammar(PET))
    assert made._running.process is process
    made.stop()


def test_a_form_is_tested_without_the_models_tokens(monkeypatch):
    tokenizer = byte_tokenizer(special=["<call>"], plain=["<b>"])
    monkeypatch.setattr(tokenizer, "definition", lambda: 1 / 0)
    grammars = Grammars(tokenizer, frozenset([END]), 150_000)
    recipe = grammars.schema(PET, "response_format")().recipe
    assert recipe == grammar(PET)
    added = tokenizer.added_tokens()
    recipe = grammars.lark(
        lambda ids: f'start: <[{ids["<call>"].token}]> "x" <[{ids["<b>"].token}]>\n', added, "tools"
    )().recipe
    assert f"<[{added['<call>'].token}]>" in recipe
    with pytest.raises(Refusal, match="cannot keep to its form"):
        grammars.schema(GIVEN_UP, "response_format")


def test_a_file_is_read_there_only_as_long_as_it_is_unchanged(tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text(byte_tokenizer().definition())
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    tokenizer = read_tokenizer(tmp_path, "llama")
    assert tokenizer.unchanged_file() == file
    made = MaskProcess(tokenizer, [END], V)
    assert filled(made.mask(grammar(PET)), [])[0] == 0
    made.stop()
    file.write_text("{}")
    assert tokenizer.unchanged_file() is None
    made = MaskProcess(tokenizer, [END], V)
    assert filled(made.mask(grammar(PET)), [])[0] == 0
    made.stop()
    file.unlink()
    assert tokenizer.unchanged_file() is None


def test_a_mask_that_takes_long_to_make_holds_up_no_other_request_and_can_be_cancelled(tmp_path):
    gate = tmp_path / "gate"
    apart = Apart(gated, str(gate))
    prompt = tuple(prompts(9)[0])

    class Named:
        def __init__(self, recipe):
            self.recipe = recipe

    first, cancelled = (apart.engine.submit(Request(prompt, 8, draw=Draw(), mask=Named(recipe))) for recipe in ("5", "7"))
    assert len(apart.tokens(apart.ask(prompt, 8))[0]) == 8
    assert first not in apart.heard
    apart.engine.cancel(cancelled)
    assert apart.follow(cancelled)[0][-1].finish_reason == "cancelled"
    assert apart.engine.stats().waiting == 1
    gate.touch()
    assert all(token % 5 == 0 for token in apart.tokens(first)[0])
    assert len(apart.follow(cancelled)[0]) == 1
    apart.engine.stop(0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_in_a_form_take_drafts_and_are_those_without(there, temperature):
    model, recipe = build("llama"), grammar(PET | {"properties": PET["properties"] | {"name": {"enum": ["abcabcabcabc"]}}})
    asked = [p + byte_tokenizer()('{"name": "abcabcabcabc", "kind": "dog", "age": 12}')["input_ids"] for p in prompts(5, 9, 4)]

    def answers(c):
        how = [Draw(temperature=temperature, seed=i, repetition_penalty=1.05) for i in range(3)]
        given = [Request(tuple(p), 90, frozenset([END]), h, there.mask(recipe)) for p, h in zip(asked, how, strict=True)]
        return c.follow(*[c.engine.submit(request) for request in given])

    plain = Client(model, running=3)
    wanted = [[e.token for e in events] for events in answers(plain)]
    plain.engine.stop(0)
    assert any(byte_tokenizer().decode(tokens).startswith('{"name": "abcabcabcabc", "kind": "') for tokens in wanted)
    c = Client(model, draft="ngram", running=3)
    check_all(c.engine.drafts)
    heard = answers(c)
    c.engine.stop(0)
    assert [[e.token for e in events] for events in heard] == wanted
    assert all(events[-1].drafted[0] > 9 for events in heard)


def children(pid):
    """The processes that a process has started."""
    tasks = os.listdir(f"/proc/{pid}/task")
    return {int(child) for task in tasks for child in open(f"/proc/{pid}/task/{task}/children").read().split()}


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="processes are listed in /proc")
def test_a_server_starts_the_process_with_the_first_form_and_it_ends_with_the_engine(start):
    server = start(forked=False)
    body = {"model": "talk", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    assert server.post("chat/completions", body).status_code == 200
    before = {pid: children(pid) for pid in children(server.process.pid)}
    assert server.post("chat/completions", body | {"response_format": {"type": "json_object"}}).status_code == 200
    engine, (masks,) = next((pid, children(pid) - before[pid]) for pid in before if children(pid) != before[pid])
    os.kill(engine, signal.SIGKILL)
    assert gone(masks)
