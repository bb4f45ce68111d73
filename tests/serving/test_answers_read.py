"""Thoughts, text and calls out of what models write, family by family, however the text is cut into pieces."""

import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from saying import strict

from lowq_cli.output import braces, elements, harmony, headed_json, key_values, python_calls, tagged_json
from lowq_cli.output.parts import Offered, joined
from lowq_cli.output.read import Reader
from lowq_cli.output.syntaxes import MARKS, Syntax, syntax_of
from lowq_cli.output.thoughts import THOUGHT_MARKS

KINDS = {"x": "string", "n": "integer", "l": "array", "r": "number", "o": "object"}
PROPERTIES = {**{name: {"type": kind} for name, kind in KINDS.items()}, "u": {"anyOf": [{"type": "number"}, {"type": "null"}]}}
SCHEMA = {"type": "object", "properties": PROPERTIES}
OFFERED = Offered({"f": SCHEMA, "get.it-2": {}, "g": SCHEMA})
TEXTS = st.text(st.sampled_from("ab\"\\é😀\n {}[],:='"), max_size=8)
NUMBERS = st.one_of(st.integers(-9, 99), st.floats(allow_nan=False, allow_infinity=False))
OPTIONAL = {"x": TEXTS, "n": st.integers(-9, 99), "l": st.lists(TEXTS, max_size=2), "r": NUMBERS}
OPTIONAL |= {"o": st.dictionaries(st.sampled_from("ab"), st.one_of(TEXTS, NUMBERS), max_size=2), "u": st.none() | NUMBERS}
ARGUMENTS = st.fixed_dictionaries({}, optional=OPTIONAL)
CALLS = st.tuples(st.sampled_from(list(OFFERED.functions)), ARGUMENTS)


def as_json(value):
    return json.dumps(value, ensure_ascii=False)


def elements_of(e):
    def written(calls):
        def argument(key, value):
            end = e.key_ends[0]
            return f"{e.key}{key}{end}\n{value if isinstance(value, str) else as_json(value)}\n{e.value_end}\n"

        def one(name, arguments):
            return f"{e.call}{name}{e.name_end}\n{''.join(argument(*a) for a in arguments.items())}{e.call_end}\n"

        return "".join(f"{e.section}\n{one(*c)}{e.section_end}" for c in calls)

    return written


def key_values_of(p):
    open_, close, key, key_end, value, value_end = p.tags

    def one(name, arguments):
        result = [
            f"{key}{k}{key_end}\n{value}{v if isinstance(v, str) else as_json(v)}{value_end}\n" for k, v in arguments.items()
        ]
        return f"{open_}{name}\n{''.join(result)}{close}"

    return lambda calls: "".join(one(*c) for c in calls)


def braces_of(b):
    def text(value):
        if isinstance(value, str):
            return f"{b.quote}{value}{b.quote}"
        if isinstance(value, dict):
            return f"{{{','.join(f'{k}:{text(v)}' for k, v in value.items())}}}"
        return f"[{','.join(map(text, value))}]" if isinstance(value, list) else as_json(value)

    def one(name, arguments):
        return f"{b.open}call:{name}{text(arguments)}{b.close}"

    return lambda calls: "".join(one(*c) for c in calls)


def tagged(t, name="name", key="arguments"):
    def written(calls):
        whole = [as_json({name: n, key: a}) for n, a in calls]
        if t is tagged_json.HERMES:
            return "\n".join(f"{t.open}\n{c}\n{t.close}" for c in whole)
        return f"{t.open}[{', '.join(whole)}]{t.close}"

    return written


def python(p):
    def one(name, arguments):
        return f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})"

    return lambda calls: f"{p.open}[{', '.join(one(*c) for c in calls)}]{p.close}"


def deepseek_old(calls):
    d = headed_json.DEEPSEEK
    whole = [f"{d.call}function{d.mark}{n}\n```json\n{as_json(a)}\n```{d.end}" for n, a in calls]
    return d.section + "\n".join(whole) + d.section_end


def headed_of(h):
    def written(calls):
        whole = [
            f"{h.call}{f'functions.{n}:{i}' if h.named else n}{h.mark}{as_json(a)}{h.end}" for i, (n, a) in enumerate(calls)
        ]
        return h.section + "".join(whole) + h.section_end

    return written


def harmony_of(calls):
    head = "<|start|>assistant<|channel|>commentary to=functions."
    return "".join(f"{head}{n} <|constrain|>json<|message|>{as_json(a)}<|call|>" for n, a in calls)


ELEMENTS = (elements.QWEN, elements.SEED, elements.MINIMAX, elements.DEEPSEEK)
WRITTEN = {
    **{f"tagged {k.open}": (k, tagged(k)) for k in tagged_json.KINDS},
    "command": (tagged_json.KINDS[3], tagged(tagged_json.KINDS[3], "tool_name", "parameters")),
    **{
        f"elements {e.section}": (e, elements_of(e))
        for e in (elements.QWEN, elements.SEED, elements.MINIMAX, elements.DEEPSEEK)
    },
    "glm": (key_values.GLM, key_values_of(key_values.GLM)),
    "longcat": (key_values.LONGCAT, key_values_of(key_values.LONGCAT)),
    "deepseek": (headed_json.DEEPSEEK, headed_of(headed_json.DEEPSEEK)),
    "deepseek, older": (headed_json.DEEPSEEK, deepseek_old),
    "kimi": (headed_json.KIMI, headed_of(headed_json.KIMI)),
    "mistral": (headed_json.MISTRAL, headed_of(headed_json.MISTRAL)),
    "mistral, older": (
        headed_json.MISTRAL,
        lambda calls: "[TOOL_CALLS]" + as_json([{"name": n, "arguments": a} for n, a in calls]),
    ),
    "gemma": (braces.GEMMA, braces_of(braces.GEMMA)),
    "function gemma": (braces.FUNCTION_GEMMA, braces_of(braces.FUNCTION_GEMMA)),
    "lfm": (python_calls.LFM, python(python_calls.LFM)),
    "olmo": (python_calls.OLMO, python(python_calls.OLMO)),
    "llama 4": (python_calls.LLAMA4, python(python_calls.LLAMA4)),
    "llama 3": (None, lambda calls: "; ".join(as_json({"name": n, "parameters": a}) for n, a in calls)),
    "harmony": (harmony.HARMONY, harmony_of),
}
FIRST = ("llama 3", "llama 4", "harmony")  # syntaxes whose answers begin with calls, or separate them by channels


def pieces(text, rng):
    cuts = sorted(rng.sample(range(1, len(text)), min(len(text) - 1, rng.randrange(1, 9)))) if len(text) > 1 else []
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def read(syntax, text, rng=None, offered=OFFERED, inside=False, cut=False):
    reader, result = Reader(syntax, offered, inside), []
    parts = list(text) if rng is None else pieces(text, rng)
    for i, piece in enumerate(parts):
        result += reader.push(piece, i + 1 == len(parts), cut and i + 1 == len(parts))
    return [(p.kind, p.text, p.index) for p in joined(result)]


def calls_in(parts):
    result = []
    for kind, text, index in parts:
        if kind == "call":
            assert index == len(result)
            result.append([text, ""])
        elif kind == "arguments":
            result[index][1] += text
    return [(name, strict(arguments)) for name, arguments in result]


def text_in(parts, kind="text"):
    return "".join(text for k, text, _ in parts if k == kind)


def writable(name, calls):
    """Whether the syntax can hold these arguments: texts in elements have no newline at an end, Python names no dots."""
    if name.startswith("elements"):
        return all(not (v.startswith("\n") or v.endswith("\n")) for _, a in calls for v in a.values() if isinstance(v, str))
    return not (name in ("lfm", "olmo", "llama 4") and any(n == "get.it-2" for n, _ in calls))


@pytest.mark.parametrize("name", WRITTEN)
@settings(max_examples=60, deadline=None)
@given(
    calls=st.lists(CALLS, min_size=1, max_size=3), before=st.sampled_from(["", "I look.", "a <b [c"]), seed=st.integers(0, 999)
)
def test_calls_are_read_as_they_were_written_however_they_are_cut(name, calls, before, seed):
    way, written = WRITTEN[name]
    if not writable(name, calls):
        return
    text = ("" if name in FIRST else before) + written(calls)
    parts = read(Syntax(way, None), text, random.Random(seed))
    typed = [(n, a if n != "get.it-2" or name.split()[0] not in ("elements", "glm", "longcat") else None) for n, a in calls]
    for (result, arguments), (n, a) in zip(calls_in(parts), typed, strict=True):
        assert result == n
        assert a is None or arguments == a
    assert text_in(parts).strip() == ("" if name in FIRST else before)


STRING, NULL = {"type": "string"}, {"type": "null"}
DEFS = {"Colour": {"enum": ["1", "true"]}, "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}] * 9}, "a/b": {"const": "1"}}
TEXT_ALONE = (  # schemas of texts that are no plain {"type": "string"}
    STRING | {"enum": ["1"]}, {"enum": ["1", "a"]}, {"const": "1"}, {"$ref": "#/$defs/Colour"}, {"$ref": "#/$defs/a~1b"},
    {"allOf": [{"$ref": "#/$defs/Colour"}]}, {"allOf": [{"minLength": 1}, STRING]}, {"anyOf": [STRING, {"const": "a"}]},
)  # fmt: skip
TEXT_OR_NULL = (
    {"anyOf": [STRING, NULL]}, {"oneOf": [NULL, STRING | {"format": "date"}]}, {"type": ["string", "null"]},
    STRING | {"nullable": True}, {"anyOf": [{"$ref": "#/$defs/Colour"}, NULL]}, {"enum": ["1", None]},
    {"anyOf": [{"allOf": [STRING]}, {"type": ["null"]}]},
)  # fmt: skip
OTHERWISE = (  # schema, text -> value
    ({"anyOf": [STRING, {"type": "integer"}]}, "12", 12), ({"anyOf": [{"type": "integer"}, NULL]}, "3.0", 3),
    ({"anyOf": [STRING, {}]}, "12", 12), ({}, "12", 12),
    ({"$ref": "#/$defs/none"}, "12", 12), ({"$ref": "elsewhere"}, "12", 12),
    ({"$ref": "#/$defs/Loop"}, "12", 12), ({"type": "number", "enum": [1, 2]}, "2", 2),
    ({"type": ["number", "string"]}, "true", "true"),
    ({"anyOf": [{"type": "array", "items": STRING}, STRING]}, '["1"]', ["1"]),
    ({"type": ["array", "null"]}, "('a', 1)", ["a", 1]),
    ({"type": "object", "allOf": [{"type": "integer"}]}, "{}", {}), ({"type": 3, "anyOf": 3, "enum": 3, "$ref": 3}, "1", 1),
)  # fmt: skip
TYPED_BY_SCHEMA = [name for name in WRITTEN if name.split()[0] in ("elements", "glm", "longcat")]


@pytest.mark.parametrize("name", TYPED_BY_SCHEMA)
def test_a_value_without_quotes_has_the_type_that_its_schema_allows(name):
    """Alternatives and references, too: pydantic writes an optional text as anyOf, and an enum as $ref."""
    way, written = WRITTEN[name]
    texts = [(schema, text, text) for schema in (*TEXT_ALONE, *TEXT_OR_NULL) for text in ("1", "true", "[1]", "01")]
    for schema, text, expected in (*texts, *((s, "null", None) for s in TEXT_OR_NULL), *OTHERWISE):
        offered = Offered({"f": {"properties": {"x": schema}, "$defs": DEFS}})
        ((_, arguments),) = calls_in(read(Syntax(way, None), written([("f", {"x": text})]), offered=offered))
        assert as_json(arguments["x"]) == as_json(expected), (schema, text)


NOT_FINITE = st.sampled_from([math.nan, math.inf, -math.inf])
TYPED = [name for name in WRITTEN if name.split()[0] in ("elements", "glm", "longcat", "gemma", "function", "lfm", "olmo")]


@pytest.mark.parametrize("huge", ["1e999", "Infinity"])
@pytest.mark.parametrize("name", [*TYPED, "llama 4"])
@settings(max_examples=15, deadline=None)
@given(key=st.sampled_from("nrlou"), number=NOT_FINITE, seed=st.integers(0, 999))
def test_a_number_that_json_lacks_is_the_text_that_the_model_wrote(name, huge, key, number, seed):
    """In syntaxes of which the JSON is ours; where the model writes the JSON, clients get it as it is."""
    way, written = WRITTEN[name]
    value = {"l": [1, number], "o": {"a": number}}.get(key, number)
    text = written([("f", {key: value, "x": "a"})]).replace("Infinity", huge).replace("inf", huge)
    ((_, arguments),) = calls_in(read(Syntax(way, None), text, random.Random(seed)))
    assert arguments["x"] == "a"
    shown = str(arguments[key])
    assert any(word in shown for word in ("NaN", "nan", "Infinity", "1e999", "1e309")), shown


def test_an_empty_value_is_decided_where_it_ends():
    """And not by a token limit that comes later, in the same piece of text or in the next one."""
    text = '<tool_call>{"name": "f", "arguments":}}'
    whole = read(Syntax(tagged_json.HERMES, None), text, None, cut=True)
    assert ("arguments", "{}", 0) in whole
    for at in range(len(text)):
        reader = Reader(Syntax(tagged_json.HERMES, None), OFFERED)
        parts = [*reader.push(text[:at]), *reader.push(text[at:], ended=True, cut=True)]
        assert [(p.kind, p.text, p.index) for p in joined(parts)] == whole


GARBLED = ["", "}", '"', "<", ">", "\n", "[", "{", "null", "name", "f", " ", "call:f{", "to=f", "function"]


@pytest.mark.parametrize("name", WRITTEN)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), seed=st.integers(0, 999), cut=st.booleans(), inside=st.booleans())
def test_any_text_gives_the_same_parts_however_it_is_cut(name, data, seed, cut, inside):
    """Also for a text without a call, with half a call, or with two mixed ones: nothing hangs or is decided too early."""
    way, written = WRITTEN[name]
    whole = written(data.draw(st.lists(CALLS, min_size=1, max_size=2)))
    at = sorted(data.draw(st.lists(st.integers(0, len(whole)), min_size=2, max_size=2)))
    section = data.draw(st.sampled_from(THOUGHT_MARKS))
    texts = st.one_of(st.sampled_from([whole, whole[: at[0]], whole[at[0] :], whole[at[0] : at[1]]]), st.sampled_from(GARBLED))
    text = "".join(data.draw(st.lists(st.one_of(texts, st.sampled_from([section.open, section.close])), max_size=6)))
    syntax = Syntax(way, None if way is harmony.HARMONY else section)
    one = read(syntax, text, None, inside=inside, cut=cut)
    assert one == read(syntax, text, random.Random(seed), inside=inside, cut=cut)
    assert one == read(syntax, text, random.Random(seed + 1), inside=inside, cut=cut)


@pytest.mark.parametrize("name", WRITTEN)
@settings(max_examples=40, deadline=None)
@given(calls=st.lists(CALLS, min_size=1, max_size=2), data=st.data())
def test_events_of_a_truncated_text_are_a_prefix_of_those_of_the_whole(name, calls, data):
    """Calls are sent as they come, so none may be taken back."""
    way, written = WRITTEN[name]
    text = written(calls)
    kept = data.draw(st.integers(1, len(text)))
    reader = Reader(Syntax(way, None), OFFERED)
    sure = [(p.kind, p.text, p.index) for p in joined(reader.push(text[:kept]))]
    whole = read(Syntax(way, None), text)
    assert len(sure) <= len(whole)
    for i, (kind, output, index) in enumerate(sure):
        assert (kind, index) == (whole[i][0], whole[i][2])
        assert whole[i][1].startswith(output) if i + 1 == len(sure) else whole[i][1] == output


@pytest.mark.parametrize("section", THOUGHT_MARKS, ids=lambda s: s.open)
@settings(max_examples=40, deadline=None)
@given(
    thought=st.text(st.sampled_from("ab <é\n"), max_size=9),
    said=st.text(st.sampled_from("ab <é"), min_size=1, max_size=9).filter(lambda t: t.strip()),
    seed=st.integers(0, 999),
    inside=st.booleans(),
)
def test_thoughts_stand_apart_from_the_answer(section, thought, said, seed, inside):
    text = ("" if inside else section.open) + f"\n{thought}\n{section.close}\n\n{said}"
    parts = read(Syntax(None, section), text, random.Random(seed), Offered(), inside)
    assert (text_in(parts, "thought"), text_in(parts)) == (thought.strip(), said.lstrip())


def test_thoughts_that_no_answer_follows_are_all_there_is():
    assert read(Syntax(None, THOUGHT_MARKS[0]), "so and", inside=True, cut=True) == [("thought", "so and", 0)]


def test_an_opener_in_the_midst_of_an_answer_is_text():
    text = "The tag <think> opens a thought, </think> ends it."
    assert read(Syntax(None, THOUGHT_MARKS[0]), text) == [("text", text, 0)]


def test_a_call_ends_thoughts_that_nothing_closed():
    text = 'hm <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    parts = read(Syntax(tagged_json.HERMES, THOUGHT_MARKS[0]), text, inside=True)
    assert parts == [("thought", "hm", 0), ("call", "f", 0), ("arguments", "{}", 0)]


def test_channels_are_thought_answer_and_notes_between():
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    text += "<|start|>assistant<|channel|>final<|message|>Hello<|return|>"
    assert read(Syntax(harmony.HARMONY, None), text) == [("thought", "hm", 0), ("text", "I look.Hello", 0)]
    assert read(Syntax(harmony.HARMONY, None), "no head") == [("text", "no head", 0)]


def test_a_function_that_is_not_offered_is_text():
    for name, (way, written) in WRITTEN.items():
        text = written([("f", {"x": "a"})])
        if name != "harmony":  # whose marks are no text
            assert text_in(read(Syntax(way, None), text, offered=Offered({"other": {}}))) == text


def test_every_syntax_is_found_by_its_marks():
    for marks, calls in MARKS:
        assert syntax_of(" ".join(marks), {}).calls is calls
    assert syntax_of("plain", {}) == Syntax(None, None)
    assert syntax_of("plain", {"<think>": 1, "</think>": 2}).thoughts is THOUGHT_MARKS[0]
    assert syntax_of("{{ x.split('</think>')[-1] }}", {}).thoughts is THOUGHT_MARKS[0]
