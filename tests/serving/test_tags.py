"""Calls whose tags are tokens of their own, special or not; stops that are special tokens; places of tokens in a text."""

import json

import pytest
from asking import build
from hypothesis import given, settings
from hypothesis import strategies as st
from saying import END, Saying, byte_tokenizer, message, posts, served_by

from lowq_cli.serving.engines import engine_of

TAGS = ("<tool_call>", "</tool_call>")
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} <tool_call></tool_call>{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
)
ONE = {"type": "object", "properties": {"x": {"enum": ["a", "b"]}}, "required": ["x"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": ONE}} for name in ("f", "g")]
CHAT = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "temperature": 0}
KINDS = ("text", "plain", "special")


def tokenizer_with(kind):
    """One whose tags are bytes like any others, plain added tokens, or special ones."""
    return byte_tokenizer(special=TAGS if kind == "special" else (), plain=TAGS if kind == "plain" else (), template=TEMPLATE)


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def call(name, x):
    return "<tool_call>" + json.dumps({"name": name, "arguments": {"x": x}}) + "</tool_call>"


WORDS = st.text(st.sampled_from("ab <é😀\n"), min_size=1, max_size=6).filter(str.strip)
CALLS = st.tuples(st.sampled_from("fg"), st.text(st.sampled_from('ab"é😀\\'), max_size=4))
PARTS = st.lists(st.one_of(WORDS, CALLS), min_size=1, max_size=4).filter(lambda parts: any(isinstance(p, tuple) for p in parts))


@settings(max_examples=150, deadline=None)
@given(parts=PARTS, kind=st.sampled_from(KINDS), streamed=st.booleans(), several=st.booleans())
def test_texts_and_calls_in_any_order_are_separated(parts, kind, streamed, several):
    """However the tags are tokens, the same texts and the same calls come out."""
    tokenizer = tokenizer_with(kind)
    output = "".join(p if isinstance(p, str) else call(*p) for p in parts)
    engine = Saying([*ids(tokenizer, output), tokenizer.eos_token_id])
    body = CHAT | {"stream": streamed, "parallel_tool_calls": several}
    ((status, answer),) = posts(served_by(engine, tokenizer), ("chat/completions", body))
    assert status == 200, answer
    content, calls, finish = message(answer)
    expected = [(name, {"x": x}) for name, x in (p for p in parts if isinstance(p, tuple))]
    assert [(name, json.loads(arguments)) for name, arguments in calls] == (expected if several else expected[:1])
    assert finish == "tool_calls"
    if several:
        text = ""
        for p in parts:  # white space before a call belongs to the call
            text = text + p if isinstance(p, str) else text.rstrip()
        assert content.strip() == text.strip()


@settings(max_examples=100, deadline=None)
@given(
    kept=st.integers(1, 60),
    kind=st.sampled_from(KINDS),
    streamed=st.booleans(),
    choice=st.sampled_from(["auto", "required", "f"]),
)
def test_a_call_that_max_tokens_cuts_is_the_part_of_a_call(kept, kind, streamed, choice):
    """As OpenAI answers it: the name, the arguments so far, finish_reason "length"; its tags are never text."""
    tokenizer = tokenizer_with(kind)
    whole = call("f", "long enough")
    tokens = ids(tokenizer, whole)
    kept = min(kept, len(tokens) - 1)
    chosen = {"type": "function", "function": {"name": "f"}} if choice == "f" else choice
    body = CHAT | {"stream": streamed, "tool_choice": chosen, "max_tokens": kept}
    if choice != "auto":
        pytest.importorskip("llguidance", reason="forced calls need the extra lowq[grammar]")
    ((status, answer),) = posts(served_by(Saying(tokens), tokenizer), ("chat/completions", body))
    assert status == 200, answer
    content, calls, finish = message(answer)
    so_far = tokenizer.decode(tokens[:kept])
    begun = '"name": "f"' in so_far
    if finish == "tool_calls":  # all but the closing tag came
        assert json.loads(calls[0][1]) == {"x": "long enough"}
        return
    assert finish == "length"
    if begun or choice != "auto":
        assert content == ""
    if begun:
        arguments = '{"x": "long enough"}'
        ((name, part),) = calls
        assert name == "f"
        assert arguments.startswith(part) or part.startswith(arguments)
    else:
        assert calls == ([("f", "")] if choice == "f" else [])


Y = {"type": "object", "properties": {"y": {"const": 1}}, "required": ["y"], "additionalProperties": False}
FORMS = {"type": "json_schema", "json_schema": {"name": "y", "schema": Y}}
DEFS = {"type": "object", "properties": {"x": {"$ref": "#/$defs/letter"}}, "required": ["x"], "additionalProperties": False}
DEFS |= {"$defs": {"letter": {"enum": ["a", "b"]}}}


@pytest.fixture(params=KINDS)
def small(request):
    """A random model behind each kind of tags."""
    pytest.importorskip("llguidance", reason="forced calls need the extra lowq[grammar]")
    engine = engine_of(build("llama"), 64)
    yield served_by(engine, tokenizer_with(request.param))
    engine.stop(0)


def test_forced_calls_keep_to_their_form_however_tags_are_tokens(small):
    named = {"type": "function", "function": {"name": "g"}}
    with_refs = [{"type": "function", "function": {"name": "f", "parameters": DEFS}}, TOOLS[1]]
    requests = [
        CHAT | {"tool_choice": choice, "tools": tools, "stream": streamed, "temperature": t, "seed": 3, "max_tokens": 200}
        for choice in ("required", named)
        for tools in (TOOLS, with_refs)
        for streamed in (False, True)
        for t in (0, 1.0)
    ]
    for body, (status, answer) in zip(requests, posts(small, *(("chat/completions", b) for b in requests)), strict=True):
        assert status == 200, answer
        content, calls, finish = message(answer)
        assert (content, finish, len(calls)) == ("", "tool_calls", 1)
        name, arguments = calls[0]
        assert name == "g" or body["tool_choice"] == "required"
        assert json.loads(arguments)["x"] in ("a", "b")


def test_a_forced_call_in_a_form_is_refused_and_a_free_one_keeps_to_either(small):
    refused, *free = posts(
        small,
        ("chat/completions", CHAT | {"tool_choice": "required", "response_format": FORMS}),
        *(
            ("chat/completions", CHAT | {"response_format": FORMS, "temperature": 1.5, "seed": s, "max_tokens": 200})
            for s in range(12)
        ),
    )
    assert refused[0] == 400
    assert refused[1]["error"]["param"] == "response_format"
    for status, answer in free:
        content, calls, _ = message(answer)
        assert status == 200
        assert bool(calls) != bool(content)
        assert json.loads(content) == {"y": 1} if content else json.loads(calls[0][1])["x"] in ("a", "b")


@settings(max_examples=100, deadline=None)
@given(before=st.text(st.sampled_from("ab é😀"), max_size=6), streamed=st.booleans(), several=st.booleans())
def test_a_stop_that_is_a_special_token_ends_the_text(before, streamed, several):
    tokenizer = byte_tokenizer(special=("<|im_end|>",))
    tokens = [*ids(tokenizer, before), tokenizer.tokens.token_to_id("<|im_end|>"), *ids(tokenizer, "xyz")]
    body = {"prompt": "hi", "max_tokens": 40, "stop": ["q", "<|im_end|>"] if several else "<|im_end|>", "stream": streamed}
    ((status, answer),) = posts(served_by(Saying(tokens), tokenizer), ("completions", body))
    parts = answer if streamed else [answer]
    assert status == 200
    assert "".join(c["text"] for a in parts for c in a["choices"]) == before
    assert parts[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_stop_that_no_answer_can_show_is_refused():
    tokenizer = byte_tokenizer(special=("<|im_end|>",))
    body = {"prompt": "hi", "stop": "\n<|im_end|>"}
    ((status, answer),) = posts(served_by(Saying([5]), tokenizer), ("completions", body))
    assert (status, answer["error"]["param"]) == (400, "stop")


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.sampled_from("ab é😀ñ漢\n"), min_size=1, max_size=12), streamed=st.booleans())
def test_text_offset_is_where_a_tokens_text_begins(text, streamed):
    """Also after characters that are cut over several tokens, which begin where the character does."""
    tokenizer = byte_tokenizer()
    tokens = [*ids(tokenizer, text), tokenizer.eos_token_id]
    body = {"prompt": "x", "max_tokens": 100, "logprobs": 0, "stream": streamed}
    ((_, answer),) = posts(served_by(Saying(tokens), tokenizer), ("completions", body))
    parts = [c for a in (answer if streamed else [answer]) for c in a["choices"]]
    assert "".join(c["text"] for c in parts) == text
    result = [
        pair for c in parts if c["logprobs"] for pair in zip(c["logprobs"]["tokens"], c["logprobs"]["text_offset"], strict=True)
    ]
    expected = [i for i, character in enumerate(text) for _ in character.encode()]
    assert [at for _, at in result] == [*expected, len(text)]
    assert result[-1][0] == END
