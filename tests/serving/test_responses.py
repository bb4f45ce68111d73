"""OpenAI's own package against /v1/responses."""

import json

import pytest
from talking import Heard, running

openai = pytest.importorskip("openai", reason="OpenAI's own package is not installed")
CALL = '<think>\nhm\n</think>\n\nI look.<tool_call>\n{"name": "weather", "arguments": {"town": "Ulm"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"town": {"type": "string"}}}
TOOL = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}
ITEMS = [("reasoning", "hm"), ("message", "I look."), ("function_call", "weather", {"town": "Ulm"})]


def ask(engine, asked, **how):
    with running(engine, **how) as url:
        return asked(openai.OpenAI(api_key="none", base_url=f"{url}/v1", max_retries=0))


def created(engine, **more):
    return ask(engine, lambda client: client.responses.create(**{"model": "m", "input": "Hi"} | more))


def facts(output):
    result = []
    for item in output:
        if item.type == "function_call":
            result.append((item.type, item.name, json.loads(item.arguments)))
        else:
            result.append((item.type, item.content[0].text))
    return result


def test_thoughts_text_and_calls_are_items():
    result = created(Heard(CALL), tools=[TOOL])
    assert facts(result.output) == ITEMS
    assert (result.status, result.output_text) == ("completed", "I look.")
    assert result.usage.output_tokens == len(Heard(CALL).tokens)
    assert result.usage.output_tokens_details.reasoning_tokens > 0


def test_items_come_as_they_are_written():
    def asked(client):
        with client.responses.stream(model="m", input="Hi", tools=[TOOL]) as stream:
            events = list(stream)
            return events, stream.get_final_response()

    events, last = ask(Heard(CALL), asked)
    assert facts(last.output) == ITEMS
    kinds = [e.type for e in events]
    assert (kinds[0], kinds[-1], kinds.count("response.output_item.done")) == ("response.created", "response.completed", 3)
    assert [e.sequence_number for e in events] == list(range(len(events)))
    deltas = {k: "".join(e.delta for e in events if e.type == k) for k in set(kinds) if k.endswith(".delta")}
    assert deltas["response.output_text.delta"] == "I look."
    assert deltas["response.reasoning_text.delta"] == "hm"
    assert json.loads(deltas["response.function_call_arguments.delta"]) == {"town": "Ulm"}


def test_a_conversation_goes_on_from_an_answer():
    engine = Heard(CALL)

    def asked(client):
        first = client.responses.create(model="m", input="Rain?", instructions="Be kind.", tools=[TOOL])
        call = first.output[-1].call_id
        result = [{"type": "function_call_output", "call_id": call, "output": "wet"}]
        client.responses.create(model="m", input=result, previous_response_id=first.id, tools=[TOOL])
        kept = client.responses.create(model="m", input="x", store=False)
        with pytest.raises(openai.NotFoundError, match="not kept"):
            client.responses.create(model="m", input="x", previous_response_id=kept.id)
        return call

    call = ask(engine, asked)
    assert engine.prompts[1].splitlines()[1:] == [
        "user[]: Rain?",
        f'assistant[hm]: I look.<{call}|weather|{{"town": "Ulm"}}>',
        f"tool[]: wet({call})",
        "assistant:",
    ]


def test_items_of_an_input_reach_the_template():
    engine = Heard("Yes.")
    items = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "Rain?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"town": "Ulm"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "wet"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes.", "annotations": []}]},
    ]
    created(engine, input=items, reasoning={"effort": "none"})
    assert engine.prompts[0].splitlines()[:5] == [
        "system[]: Be kind.",
        "user[]: Rain?",
        'assistant[hm]: <c1|weather|{"town": "Ulm"}>',
        "tool[]: wet(c1)",
        "assistant[]: Yes.",
    ]


def test_an_answer_that_was_cut_is_incomplete():
    result = created(Heard("Yes."), max_output_tokens=2)
    assert (result.status, result.incomplete_details.reason, result.output_text) == ("incomplete", "max_output_tokens", "Ye")


def test_a_form_and_a_forced_call_are_masks():
    pytest.importorskip("llguidance", reason="forms need the extra lowq[grammar]")
    engine = Heard("x")
    form = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}
    for more in ({"text": form}, {"tools": [TOOL], "tool_choice": {"type": "function", "name": "weather"}}):
        created(engine, **more)
    assert all(r.mask is not None for r in engine.requests)


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"previous_response_id": "resp_x"}, "not kept"),
        ({"background": True}, "background"),
        ({"temperature": 9}, "temperature"),
        ({"input": [{"role": "robot", "content": "x"}]}, "role"),
    ],
    ids=str,
)
def test_unsupported_fields_are_refused(more, line):
    with pytest.raises(openai.APIStatusError, match=line):
        created(Heard("x"), **more)


def test_tools_of_openais_servers_are_left_out():
    engine = Heard("Yes.")
    created(engine, tools=[{"type": "web_search"}, TOOL], include=["reasoning.encrypted_content"], truncation="auto")
    assert engine.prompts[0].startswith("weather(")
