"""Answers in a form and tool calls, by OpenAI's client; calls in Hermes' syntax are read (others: test_answers_read.py)."""

import json

import pytest

from lowq_cli.output.parts import joined
from lowq_cli.output.read import Reader
from lowq_cli.output.syntaxes import syntax_of
from lowq_cli.serving.http.tools import Tools

openai = pytest.importorskip("openai", reason="OpenAI's own package is not installed")

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a town",
        "parameters": {
            "type": "object",
            "properties": {
                "town": {"type": "string", "maxLength": 12},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["town", "days"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}}
SAID = [{"role": "user", "content": "What will the weather be?"}]


@pytest.fixture
def make(server):
    pytest.importorskip("llguidance", reason="forms need the extra lowq[grammar]")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    how = {"model": "talk", "messages": SAID, "max_tokens": 200, "seed": 5}
    return lambda **more: client.chat.completions.create(**how | more)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{2,8}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_an_answer_follows_its_schema(make, temperature):
    form = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA}}
    for choice in make(response_format=form, temperature=temperature, n=4).choices:
        assert choice.finish_reason == "stop"
        pet = json.loads(choice.message.content)
        assert list(pet) == ["name", "age", "kind", "tags"]
        assert pet["name"][0].isupper()
        assert 3 <= len(pet["name"]) <= 9
        assert 0 <= pet["age"] <= 120
        assert pet["kind"] in ("cat", "dog")
        assert 2 <= len(pet["tags"]) <= 3
        assert all(isinstance(t, bool) for t in pet["tags"])


MANY = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(2000)}, "additionalProperties": False}


FIRST = {"const": "once upon a time there was a king"}
LATE = {"type": "object", "properties": {"a": FIRST, "b": MANY}, "required": ["a", "b"]}


@pytest.mark.parametrize("schema", [MANY, {"$ref": "#"}], ids=["2000 properties", "itself"])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
def test_a_form_that_no_answer_can_begin_is_refused_before_anything_runs(make, server, schema, streamed):
    form = {"type": "json_schema", "json_schema": {"name": "much", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match="cannot keep to its form") as refused:
        make(response_format=form, stream=streamed)
    assert (refused.value.status_code, refused.value.param) == (400, "response_format.json_schema.schema")
    assert not server.stats()["running"]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
def test_a_form_that_the_library_gives_up_midway_is_an_error_and_no_stop(make, streamed):
    form = {"type": "json_schema", "json_schema": {"name": "much", "schema": LATE}}
    with pytest.raises(openai.APIError, match="cannot keep to its form") as refused:
        list(make(response_format=form, stream=streamed))
    assert refused.value.type == "invalid_request_error"  # asked again it would fail again: a server's error would be
    assert streamed or refused.value.status_code == 400
    assert make(max_tokens=2).choices[0].finish_reason == "length"  # the others are answered


def test_any_json_object_and_plain_text(make):
    whole = make(response_format={"type": "json_object"}, temperature=0, max_tokens=12).choices[0].message.content
    assert whole.startswith("{")
    plain = make(temperature=0, max_tokens=12).choices[0].message.content
    assert make(response_format={"type": "text"}, temperature=0, max_tokens=12).choices[0].message.content == plain != whole


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=["any", "named"])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
def test_a_forced_call_has_its_arguments(make, choice, streamed):
    tools = [WEATHER, TIME] if choice == "required" else [TIME, WEATHER]
    how = {"tools": tools, "tool_choice": choice, "temperature": 1.0}
    if streamed:
        chunks = [c.choices[0] for c in make(**how, stream=True)]
        call, *rest = [call for c in chunks for call in c.delta.tool_calls or ()]
        assert len(rest) > 1  # piece by piece
        call.function.arguments += "".join(more.function.arguments for more in rest)
        reason = chunks[-1].finish_reason
        assert not "".join(c.delta.content or "" for c in chunks).strip()
    else:
        result = make(**how).choices[0]
        (call,), reason = result.message.tool_calls, result.finish_reason
        assert result.message.content is None
    assert reason == "tool_calls"
    assert call.id.startswith("call_")
    assert call.function.name == "weather" or choice == "required"
    arguments = json.loads(call.function.arguments)
    if call.function.name == "weather":
        assert set(arguments) == {"town", "days"}
        assert 1 <= arguments["days"] <= 9


@pytest.mark.parametrize("more", [{"tools": []}, {"tool_choice": "auto"}, {"tools": [], "tool_choice": "none"}], ids=str)
def test_no_tools_are_no_tools_however_a_client_says_so(make, more):
    assert make(max_tokens=3, temperature=0, **more).choices[0].message == make(max_tokens=3, temperature=0).choices[0].message


def test_a_tools_result_goes_back_to_the_model(make):
    call = make(tools=[WEATHER], tool_choice="required").choices[0].message
    answered = [
        *SAID,
        call.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "rain"},
    ]
    result = make(messages=answered, tools=[WEATHER], max_tokens=4)
    assert result.usage.prompt_tokens > 60  # the tools, the call and what came of it are in the prompt


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"response_format": {"type": "xml"}}, "must be one of text, json_object, json_schema"),
        ({"response_format": {"type": "json_schema"}}, "json_schema: must be an object"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "thing"}}}}, "json_schema.schema: "),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/x"}}}}, "does not exist"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"pattern": "(["}}}}, "regex parse error"),
        ({"response_format": {"type": "json_object"}, "extra_body": {"ignore_eos": True}}, "leave one out"),
        ({"tool_choice": "required"}, "tool_choice: required needs tools"),
        ({"tool_choice": "always"}, "tool_choice: must be"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "is not one of the tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "up to 64 letters"),
    ],
    ids=lambda v: v[:12] if isinstance(v, str) else "",
)
def test_invalid_response_formats_are_refused(make, more, line):
    with pytest.raises(openai.BadRequestError, match=line):
        make(**more)


CALL = '{"name": "weather", "arguments": {"town": "Ulm"}}'
TEXTS = [
    ("Just text, a < b and <tool> too.", "Just text, a < b and <tool> too.", 0),
    (f"I look.\n<tool_call>\n{CALL}\n</tool_call>", "I look.", 1),
    (f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", "", 2),
    (f"<tool_call>{CALL}", "", 1),
    ("<tool_call>not a call</tool_call> so", "<tool_call>not a call</tool_call> so", 0),
    ("<tool_call>unfinished", "<tool_call>unfinished", 0),
    ("ends in <tool_ca", "ends in <tool_ca", 0),
    (CALL, "", 1),
    (CALL.replace("arguments", "parameters"), "", 1),
    (f"[{CALL}, {CALL}]", "", 2),
    ('{"name": "nobody", "arguments": {}}', '{"name": "nobody", "arguments": {}}', 0),
    ('{"just": "JSON"}', '{"just": "JSON"}', 0),
    ("{ not JSON", "{ not JSON", 0),
    ("[" * 9999, "[" * 9999, 0),
]
HERMES = syntax_of("<tool_call>", {})


def pushed(text, tools, size=1000):
    """The parts of a text that comes in pieces of a size."""
    reader, result = Reader(HERMES, tools.offered), []
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    for i, piece in enumerate(pieces):
        result += reader.push(piece, i + 1 == len(pieces))
    return joined(result)


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("text", "said", "calls"), TEXTS, ids=range(len(TEXTS)))
def test_calls_are_read_out_of_text(text, said, calls, size):
    parts = pushed(text, Tools([WEATHER, TIME], "auto"), size)
    assert "".join(p.text for p in parts if p.kind == "text") == said
    assert [(p.text, p.index) for p in parts if p.kind == "call"] == [("weather", i) for i in range(calls)]
    assert [(p.text, p.index) for p in parts if p.kind == "arguments"] == [('{"town": "Ulm"}', i) for i in range(calls)]


UNCLOSED = [  # arguments as the model wrote them -> those of the call, and the text behind it
    ('{"town": "Ulm"', '{"town": "Ulm"', " so"),  # a brace is missing: the tag is no JSON, and ends the call
    ('{"town": ["Ulm", 1', '{"town": ["Ulm", 1', " so"),
    ('{"town": "a </tool_call> b"}}', '{"town": "a </tool_call> b"}', " so"),  # a tag in a string is text
    (
        '{"town": "Ulm',
        '{"town": "Ulm</tool_call> so',
        "",
    ),  # a quote is missing: the tag may be text
    ('"{\\"town\\": \\"Ulm', '{\\"town\\": \\"Ulm</tool_call> so', ""),
]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize(("written", "arguments", "behind"), UNCLOSED, ids=range(len(UNCLOSED)))
def test_a_closing_tag_ends_arguments_except_within_quotes(written, arguments, behind, size):
    """However the text is cut into pieces; a call behind a missing brace is a call."""
    text = f'<tool_call>{{"name": "weather", "arguments": {written}</tool_call> so'
    parts = pushed(text, Tools([WEATHER], "auto"), size)
    assert "".join(p.text for p in parts if p.kind == "arguments") == arguments
    assert "".join(p.text for p in parts if p.kind == "text") == behind
    assert len([p for p in parts if p.kind == "call"]) == 1
    if behind:
        parts = pushed(f"{text}<tool_call>{CALL}</tool_call>", Tools([WEATHER], "auto"), size)
        assert [p.text for p in parts if p.kind == "arguments" and p.index == 1] == ['{"town": "Ulm"}']


def test_only_the_first_call_where_several_are_not_wanted():
    parts = pushed(f"[{CALL}, {CALL}]", Tools([WEATHER], "auto", several=False))
    assert [p.kind for p in parts] == ["call", "arguments"]
