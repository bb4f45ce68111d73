"""Anthropic's own package against /v1/messages."""

import json

import pytest
from talking import Heard, running

anthropic = pytest.importorskip("anthropic", reason="Anthropic's own package is not installed")
CALL = '<think>\nhm\n</think>\n\nI look.\n<tool_call>\n{"name": "weather", "arguments": {"town": "Ulm"}}\n</tool_call>'
TOWN = {"type": "object", "properties": {"town": {"type": "string"}}}
TOOL = {"name": "weather", "description": "of a town", "input_schema": TOWN}
HI = {"model": "m", "max_tokens": 200, "messages": [{"role": "user", "content": "Hi"}]}


def ask(engine, asked, **how):
    with running(engine, **how) as url:
        return asked(anthropic.Anthropic(api_key="none", base_url=url, max_retries=0))


def created(engine, **more):
    return ask(engine, lambda client: client.messages.create(**HI | more))


def streamed(engine, **more):
    def asked(client):
        with client.messages.stream(**HI | more) as stream:
            return [event.type for event in stream], stream.get_final_message()

    return ask(engine, asked)


def facts(message):
    result = []
    for block in message.content:
        if block.type == "tool_use":
            result.append(("tool_use", block.name, block.input))
        else:
            result.append((block.type, block.thinking if block.type == "thinking" else block.text))
    return result, message.stop_reason


def test_thoughts_text_and_calls_are_blocks_whole_and_as_they_come():
    expected = [("thinking", "hm"), ("text", "I look."), ("tool_use", "weather", {"town": "Ulm"})], "tool_use"
    whole = created(Heard(CALL), tools=[TOOL])
    assert facts(whole) == expected
    kinds, last = streamed(Heard(CALL), tools=[TOOL])
    assert facts(last) == expected
    assert (kinds[0], kinds[-1], kinds.count("content_block_stop")) == ("message_start", "message_stop", 3)
    assert last.usage.output_tokens == whole.usage.output_tokens == len(Heard(CALL).tokens)


@pytest.mark.parametrize("form", [created, lambda engine, **more: streamed(engine, **more)[1]], ids=["whole", "streamed"])
def test_a_client_that_sends_only_signed_thoughts_back_sends_them_all(form):
    """As Copilot CLI 1.0.102 does; the model's thoughts between its calls would be missing in the next prompt."""
    answer, engine = form(Heard(CALL), tools=[TOOL]), Heard("Yes.")
    signed = [b.model_dump() for b in answer.content if b.type != "thinking" or b.signature]
    result = {"type": "tool_result", "tool_use_id": signed[-1]["id"], "content": "wet"}
    history = [{"role": "assistant", "content": signed}, {"role": "user", "content": [result]}]
    created(engine, messages=[*HI["messages"], *history], tools=[TOOL])
    assert "assistant[hm]: I look.<" in engine.prompts[0]


def test_how_an_answer_ended():
    assert created(Heard("Yes.")).stop_reason == "end_turn"
    assert created(Heard("Yes."), max_tokens=2).stop_reason == "max_tokens"
    stopped = created(Heard("one, two"), stop_sequences=["!", ", "])
    assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == ("one", "stop_sequence", ", ")


def test_a_conversation_with_tools_reaches_the_template():
    engine = Heard("Rain.")
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Rain?", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"town": "Ulm"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "wet"}]},
                {"type": "text", "text": "So?"},
            ],
        },
    ]
    created(engine, messages=messages, system=[{"type": "text", "text": "Be kind."}], tools=[TOOL])
    lines = engine.prompts[0].splitlines()
    assert lines[0].startswith("weather(")
    assert lines[1:] == [
        "system[]: Be kind.",
        "user[]: Rain?",
        'assistant[hm]: I look.<t1|weather|{"town": "Ulm"}>',
        "tool[]: wet(t1)",
        "user[]: So?",
        "assistant:",
    ]


def test_thinking_is_switched_off_and_bounded():
    engine = Heard("Yes.")
    created(engine, thinking={"type": "disabled"})
    assert engine.prompts[0].endswith("assistant:<think>\n\n</think>\n\n")
    created(engine, thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=2000)
    assert engine.requests[1].mask is not None
    created(engine, thinking={"type": "adaptive"})
    assert engine.prompts[2].endswith("assistant:")


def test_settings_reach_the_engine():
    engine = Heard("Yes.")
    more = {"temperature": 0.5, "top_p": 0.9, "top_k": 7}  # which the newest clients have no names for
    created(engine, extra_body=more, stop_sequences=["!"], metadata={"user_id": "me"})
    draw = engine.requests[0].draw
    assert (draw.temperature, draw.top_p, draw.top_k) == (0.5, 0.9, 7)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}], ids=lambda c: c["type"])
def test_a_call_is_forced(choice):
    pytest.importorskip("llguidance", reason="forced calls need the extra lowq[grammar]")
    engine = Heard("x")
    created(engine, tools=[TOOL], tool_choice=choice, thinking={"type": "disabled"})
    assert engine.requests[0].mask is not None


def test_tokens_are_counted():
    engine = Heard("Yes.")
    counted = ask(engine, lambda client: client.messages.count_tokens(**{k: v for k, v in HI.items() if k != "max_tokens"}))
    created(engine)
    assert counted.input_tokens == len(engine.requests[0].prompt)


@pytest.mark.parametrize(
    ("more", "kind", "line"),
    [
        ({"model": "other"}, anthropic.NotFoundError, "not served here"),
        ({"messages": []}, anthropic.BadRequestError, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, anthropic.BadRequestError, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "sound"}]}]}, anthropic.BadRequestError, "sound"),
        ({"tool_choice": {"type": "some"}, "tools": [TOOL]}, anthropic.BadRequestError, "tool_choice"),
        ({"extra_body": {"temperature": 9}}, anthropic.BadRequestError, "temperature"),
    ],
    ids=str,
)
def test_refusals_have_anthropics_shape(more, kind, line):
    with pytest.raises(kind, match=line) as refused:
        created(Heard("x"), **more)
    assert refused.value.body["type"] == "error"


def test_the_key_may_come_as_anthropic_sends_it():
    assert ask(Heard("Yes."), lambda client: client.messages.create(**HI), api_key="none").content[0].text == "Yes."
    with pytest.raises(anthropic.AuthenticationError):
        ask(Heard("Yes."), lambda client: client.messages.create(**HI), api_key="another")


def test_an_agents_request_with_long_tools_and_streamed_arguments():
    """As coding agents ask: many tools with large schemas, a cached system prompt, arguments that come piece by piece."""
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string", "description": "x" * 200} for i in range(20)}}
    tools = [{"name": f"tool_{i}", "description": "does it " * 50, "input_schema": schema} for i in range(12)]
    code = "def f():\n    return '<a>'\n" * 40
    output = f"<tool_call>\n{json.dumps({'name': 'tool_7', 'arguments': {'p0': 'a.py', 'p1': code}})}\n</tool_call>"
    engine = Heard(output)
    engine.limits = engine.limits.__class__(1 << 17, 8, 64, 1 << 17, 0)
    system = [{"type": "text", "text": "You are an agent. " * 200, "cache_control": {"type": "ephemeral"}}]
    kinds, last = streamed(engine, tools=tools, system=system, max_tokens=8192, metadata={"user_id": "u"})
    assert facts(last) == ([("tool_use", "tool_7", {"p0": "a.py", "p1": code})], "tool_use")
    assert "input_json" in kinds
