"""Requests as coding agents send them, and what they look for in answers.

Recorded from Claude Code 2.1.197 and 2.1.332, Codex CLI 0.171.0, qwen-code 0.24.4, and the agents in RECORDED.
"""

import json
import re

import pytest
from saying import Saying, opened, posts, served_by
from talking import PLACE, TEMPLATE, Heard

from lowq_cli.serving.request import Event, Limits

EXEC = {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}
GRAMMAR = 'start: begin_patch hunk+ end_patch\nbegin_patch: "*** Begin Patch" LF\n'
PATCH = '*** Begin Patch\n*** Add File: a.txt\n+say "hello"\n*** End Patch\n'
CLOSE = {"type": "object", "properties": {"target": {"type": "string"}}, "required": ["target"]}
CODEX_TOOLS = [
    {"type": "function", "name": "exec_command", "description": "Runs a command", "strict": False, "parameters": EXEC},
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Use the `apply_patch` tool to edit files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR},
    },
    {
        "type": "namespace",
        "name": "multi_agent_v1",
        "description": "Tools for sub-agents.",
        "tools": [{"type": "function", "name": "close_agent", "strict": False, "parameters": CLOSE}],
    },
    {
        "type": "namespace",
        "name": "mcp__shell__",
        "description": "",
        "tools": [{"type": "function", "name": "exec_command", "strict": False, "parameters": EXEC}],
    },
    {"type": "tool_search"},
    {"type": "web_search", "external_web_access": True},
]


def said(text, role="user"):
    return {"type": "message", "id": "msg_1", "role": role, "content": [{"type": "input_text", "text": text}]}


CODEX_INPUT = [said("You are a coding agent.", "developer"), said("## Skills", "developer"), said("<cwd>/a</cwd>"), said("go")]
CODEX = {
    **{"model": "m", "stream": True, "input": CODEX_INPUT, "tools": CODEX_TOOLS, "tool_choice": "auto"},
    **{"parallel_tool_calls": True, "reasoning": {"summary": "auto"}, "store": False},
    **{"include": ["reasoning.encrypted_content"], "prompt_cache_key": "k", "client_metadata": {"turn_id": "t"}},
}


def hermes(*calls):
    return "".join(f"\n<tool_call>\n{json.dumps({'name': name, 'arguments': given})}\n</tool_call>" for name, given in calls)


def asked(engine, path, body, **how):
    ((status, answer),) = posts(served_by(engine, engine.tokenizer, **how), (path, body))
    return status, answer


@pytest.mark.parametrize("streamed", [False, True])
def test_codex_gets_its_calls_as_it_offered_the_tools(streamed):
    """In a namespace, as a text instead of JSON, and of two tools of one name the one that was called."""
    close, run = {"target": "t"}, {"cmd": "ls"}
    output = "<think>\nhm\n</think>\n\nI patch." + hermes(
        ("apply_patch", {"input": PATCH}), ("close_agent", close), ("exec_command", run), ("mcp__shell____exec_command", run)
    )
    engine = Heard(output)
    status, answer = asked(engine, "responses", CODEX | {"stream": streamed})
    assert status == 200, answer
    response = answer[-1]["response"] if streamed else answer
    thought, text, *calls = response["output"]
    assert (thought["type"], text["content"][0]["text"]) == ("reasoning", "I patch.")
    assert [(c["type"], c["name"], c.get("namespace"), c.get("input") or json.loads(c["arguments"])) for c in calls] == [
        ("custom_tool_call", "apply_patch", None, PATCH),
        ("function_call", "close_agent", "multi_agent_v1", close),
        ("function_call", "exec_command", None, run),
        ("function_call", "exec_command", "mcp__shell__", run),
    ]
    if streamed:
        of = {e["type"]: e for e in answer if e.get("output_index") == 2}
        assert of["response.output_item.added"]["item"]["input"] == ""
        assert (
            of["response.custom_tool_call_input.delta"]["delta"] == of["response.custom_tool_call_input.done"]["input"] == PATCH
        )
        assert of["response.output_item.done"]["item"]["input"] == PATCH
        assert [e["sequence_number"] for e in answer] == list(range(len(answer)))


def test_a_model_is_offered_codex_tools_as_functions():
    engine = Heard("x")
    asked(engine, "responses", CODEX)
    lines = engine.prompts[0].splitlines()
    offers = dict(line.rstrip(")").split("(", 1) for line in lines[:4])
    assert list(offers) == ["exec_command", "apply_patch", "close_agent", "mcp__shell____exec_command"]
    assert json.loads(offers["close_agent"]) == CLOSE
    parameter = json.loads(offers["apply_patch"])["properties"]["input"]
    assert parameter["type"] == "string"
    assert parameter["description"].endswith(GRAMMAR)


def test_codex_history_is_one_message_of_the_assistant():
    """Its text before and after the calls, also those of tools in namespaces and of custom tools."""
    history = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I patch."}]},
        {"type": "custom_tool_call", "status": "completed", "call_id": "c1", "name": "apply_patch", "input": PATCH},
        {"type": "function_call", "call_id": "c2", "namespace": "mcp__shell__", "name": "exec_command", "arguments": "{}"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": " Done."}]},
        {"type": "custom_tool_call_output", "id": "ctco_1", "call_id": "c1", "output": "Exit code: 0"},
        {"type": "function_call_output", "id": "fco_1", "call_id": "c2", "output": "a.txt"},
    ]
    engine = Heard("x")
    status, answer = asked(engine, "responses", CODEX | {"input": [*CODEX_INPUT, *history]})
    assert status == 200, answer
    patch = json.dumps({"input": PATCH}).replace("'", "\\u0027")
    assert engine.prompts[0].splitlines()[-4:] == [
        f"assistant[hm]: I patch. Done.<c1|apply_patch|{patch}><c2|mcp__shell____exec_command|{{}}>",
        "tool[]: Exit code: 0(c1)",
        "tool[]: a.txt(c2)",
        "assistant:",
    ]


class Broken(Heard):
    def submit(self, request):
        number = super().submit(request)
        self.sink([(number, Event(self.tokens[0]))])
        self.sink([(number, Event(finish_reason="error", message="the engine broke"))])
        return number


def test_a_response_that_breaks_off_fails_with_the_event_that_codex_reads():
    engine = Broken("x")
    engine.tokens = engine.tokens[:1]
    _, events = asked(engine, "responses", CODEX)
    last = events[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["message"] == "the engine broke"
    assert last["sequence_number"] == len(events) - 1


CLAUDE = {
    **{
        "model": "m",
        "max_tokens": 32000,
        "stream": True,
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
    },
    "metadata": {"user_id": '{"device_id":"d","session_id":"s"}'},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.b27; cc_entrypoint=sdk-cli;"},
        {"type": "text", "text": "You are a Claude agent.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "\nYou help.", "cache_control": {"type": "ephemeral"}},
    ],
    "messages": [
        {
            "role": "user",
            "content": [{"type": "text", "text": "<system-reminder>\n</system-reminder>"}, {"type": "text", "text": "go"}],
        },
        {"role": "system", "content": "Available agent types"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "c1", "name": "Bash", "input": {"cmd": "ls"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"tool_use_id": "c1", "type": "tool_result", "content": "a.txt", "is_error": False},
                {"type": "text", "text": "<system-reminder>\nNow?\n</system-reminder>", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ],
    "tools": [{"name": "Bash", "description": "Runs", "input_schema": {"$schema": "https://json-schema.org", **EXEC}}],
}


def test_claude_codes_request_reaches_the_template_without_the_line_for_billing():
    engine = Heard("x")
    status, answer = asked(engine, "/v1/messages?beta=true", CLAUDE)
    assert status == 200, answer
    assert engine.prompts[0].split("\n", 1)[1].startswith("system[]: You are a Claude agent.\n\n\nYou help.\nuser[]: <system")
    assert "\nsystem[]: Available agent types\n" in engine.prompts[0]
    assert "billing" not in engine.prompts[0]


REFERENCES = {
    "messages": [
        CLAUDE["messages"][0],
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "c1", "name": "ToolSearch", "input": {"query": "select:CronList"}}],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "tool_reference", "tool_name": "CronList"}]}
            ],
        },
    ],
    "tools": [
        *CLAUDE["tools"],
        {"name": "CronList", "description": "Lists jobs", "input_schema": EXEC, "defer_loading": True},
        {"name": "DeferredToolPlaceholder", "description": "", "input_schema": {"type": "object"}, "defer_loading": True},
    ],
}


def test_a_tool_that_claude_code_loads_later_is_described_where_it_was_found_and_can_be_called():
    """Among the other tools it would change the prompt from its beginning on, which the cache holds."""
    engine = Heard(hermes(("CronList", {"cmd": "all"})))
    status, answer = asked(engine, "/v1/messages?beta=true", CLAUDE | REFERENCES | {"stream": False})
    assert status == 200, answer
    assert [(b["name"], b["input"]) for b in answer["content"]] == [("CronList", {"cmd": "all"})]
    first, *_, found, end, ask = engine.prompts[0].splitlines()
    assert first.startswith("Bash(")
    assert engine.prompts[0].splitlines()[1].startswith("system[]")
    described = {"name": "CronList", "parameters": EXEC, "description": "Lists jobs"}
    assert found == f"<function>{json.dumps(described)}</function>"
    assert (end, ask) == ("</functions>(c1)", "assistant:")


def test_a_function_without_parameters_has_an_empty_schema_in_the_prompt():
    engine = Heard(hermes(("get_goal", {})))
    tools = [{"type": "function", "function": {"name": "get_goal", "description": "Reads it."}}]
    status, answer = asked(engine, "chat/completions", {"messages": [{"role": "user", "content": "go"}], "tools": tools})
    assert status == 200, answer
    assert engine.prompts[0].startswith('get_goal({"type": "object", "properties": {}})\n')
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"] == {"name": "get_goal", "arguments": "{}"}


class Short(Saying):
    limits = Limits(64, 8, 64, 4096, 0)


@pytest.mark.parametrize("path", ["/v1/messages?beta=true", "/v1/responses", "/v1/chat/completions"])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_agents_look_for(path, streamed):
    """The words and the code: `too_long` in engine_requests.py names who reads which."""
    engine = Heard("x")
    engine.limits = Short.limits
    body = (
        CLAUDE
        if "messages?" in path
        else CODEX
        if "responses" in path
        else {"messages": [{"role": "user", "content": "go" * 99}]}
    )
    status, answer = asked(engine, path, body | {"stream": streamed})
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    line = answer["error"]["message"]
    assert re.search(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", line)[2] == "63"  # one more has to fit
    assert "this model's maximum context length is 64 tokens" in line
    assert "messages" in path or answer["error"]["code"] == "context_length_exceeded"


def strict(checks):
    return checks + TEMPLATE


SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}"
)
TURNS = (  # Mistral's check, which counts users' messages and answers without calls
    "{% set ns = namespace(n=0) %}{% for m in (messages[1:] if messages[0].role == 'system' else messages) %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}{% if (m.role == 'user') != (ns.n % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
FIRST_ALONE = (  # gpt-oss: the first message may be a system's, later ones are left out
    "{% for m in messages %}{% if loop.first or m.role != 'system' %}{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}"
) + PLACE
SYSTEM, CWD, SKILLS = "You are a coding agent.", "<cwd>/a</cwd>\n\ngo", "## Skills"


@pytest.mark.parametrize(
    ("template", "begin"),
    [
        (TEMPLATE, f"system[]: {SYSTEM}\nsystem[]: {SKILLS}\nuser[]: <cwd>/a</cwd>\nuser[]: go\n"),
        (strict(SYSTEM_FIRST), f"system[]: {SYSTEM}\n\n{SKILLS}\nuser[]: {CWD}\n"),
        (strict(TURNS), f"system[]: {SYSTEM}\n\n{SKILLS}\nuser[]: {CWD}\n"),
        (strict(SYSTEM_FIRST + TURNS + NO_SYSTEM), f"user[]: {SYSTEM}\n\n{SKILLS}\n\n{CWD}\n"),
        (FIRST_ALONE, f"system: {SYSTEM}\n\n{SKILLS}\nuser: {CWD}\n"),
    ],
    ids=["as they are", "system first", "turns", "no system", "later system left out"],
)
def test_codex_messages_reach_templates_that_take_fewer_roles(template, begin):
    engine = Heard("x", template=template)
    status, answer = asked(engine, "responses", CODEX)
    assert status == 200, answer
    assert begin in engine.prompts[0]


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (TEMPLATE, "tool[]: a.txt(c1)\nuser[]: <system-reminder>\nNow?\n</system-reminder>\n"),
        (strict(SYSTEM_FIRST), "tool[]: a.txt(c1)\nuser[]: <system-reminder>\nNow?\n</system-reminder>\n"),
        (strict(TURNS), "tool[]: a.txt\n\n<system-reminder>\nNow?\n</system-reminder>(c1)\n"),
    ],
    ids=["as they are", "system first", "turns"],
)
def test_claude_codes_messages_reach_templates_that_take_fewer_roles(template, end):
    engine = Heard("x", template=template)
    status, answer = asked(engine, "/v1/messages", CLAUDE)
    assert status == 200, answer
    prompt = engine.prompts[0]
    assert prompt.endswith(end + "assistant:")
    if template != TEMPLATE:
        assert "go\n\nAvailable agent types\nassistant[hm]: I look." in prompt


def test_the_first_reason_of_a_template_is_told():
    never = "{% if messages | length > 1 %}{{ raise_exception('first') }}{% else %}{{ raise_exception('second') }}{% endif %}"
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    status, answer = asked(Heard("x", template=never), "chat/completions", {"messages": messages})
    assert status == 400
    assert answer["error"]["message"].endswith("first")


@pytest.mark.parametrize("streamed", [False, True])
def test_white_space_around_calls_is_no_text(streamed):
    """It would come back as a message of its own, and in front of the template's own white space."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    body = {"messages": [{"role": "user", "content": "go"}], "tools": tools, "stream": streamed}

    def content(output):
        _, answer = asked(Heard(output), "chat/completions", body)
        if not streamed:
            return answer["choices"][0]["message"]["content"]
        return "".join(c["choices"][0]["delta"].get("content") or "" for c in answer if c["choices"]) or None

    f = ("f", {})
    assert content("I look.\n" + hermes(f, f) + "\n") == "I look."
    assert content(hermes(f, f)) is None
    assert content("a \n b\n\n") == "a \n b\n\n"


ITEMS = strict(  # arguments as Qwen 3 Coder's and GLM's templates read them
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{% for k, v in c.function.arguments.items() %}{% endfor %}"
    "{% endfor %}{% endfor %}"
)
RUN = [{"type": "function", "function": {"name": "exec_command", "parameters": EXEC}}]
USER = {"role": "user", "content": "go"}


def again_chat(answer):
    """The next request of a client that has not run the calls, as OpenHands sends it."""
    said = answer["choices"][0]["message"]
    results = [{"role": "tool", "tool_call_id": c["id"], "content": "wrong"} for c in said.get("tool_calls", [])]
    return {"messages": [USER, said, *results], "tools": RUN}


def again_responses(answer):
    calls = [item for item in answer["output"] if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": c["call_id"], "output": "wrong"} for c in calls]
    return CODEX | {"stream": False, "input": [said("go"), *answer["output"], *results]}


def again_messages(answer):
    calls = [block for block in answer["content"] if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": c["id"], "content": "wrong"} for c in calls]
    history = [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": results or "go"}]
    return CLAUDE | {"stream": False, "messages": [USER, *history], "max_tokens": 9}


@pytest.mark.parametrize(
    ("path", "body", "limit", "again"),
    [
        ("chat/completions", {"messages": [USER], "tools": RUN}, "max_tokens", again_chat),
        ("responses", CODEX | {"stream": False}, "max_output_tokens", again_responses),
        (
            "messages",
            CLAUDE | {"stream": False, "tools": [{"name": "exec_command", "input_schema": EXEC}]},
            "max_tokens",
            again_messages,
        ),
    ],
)
@pytest.mark.parametrize(
    "arguments", ['{"cmd": "ls"}', "{\"cmd\": 'ls'}", '{"cmd": "l', '{cmd: "ls"}', '["ls"]', '"ls"', "3", "null"]
)
def test_an_answer_can_be_sent_back_whatever_its_calls_say_and_wherever_it_was_cut(path, body, limit, again, arguments):
    """OpenHands repeats a call that it could not parse in every later request. The template reads arguments as an object."""
    output = '<tool_call>\n{"name": "exec_command", "arguments": ' + arguments + "}\n</tool_call>"
    engine = Heard(output, template=ITEMS)
    with opened(served_by(engine, engine.tokenizer)) as ask:
        for cut in range(1, len(output) + 2):
            status, answer = ask(path, body | {limit: cut})
            assert status == 200, answer
            assert ask(path, again(answer))[0] == 200, answer
    called = re.findall(r"exec_command\|({.*?})>", engine.prompts[-1])
    assert called == (['{"cmd": "ls"}'] if arguments == '{"cmd": "ls"}' else ["{}"])


TOOLS = {"tools": RUN, "tool_choice": "auto"}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
SYSTEM_PARTS = {"role": "system", "content": [{"type": "text", "text": "You are an agent."}]}
CALLED = {"id": "c1", "type": "function", "function": {"name": "exec_command", "arguments": '{"cmd": "ls"}'}}
THOUGHT = {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [CALLED]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "a.txt"}
RECORDED = {  # agent -> path, body after one call
    "cline 3.0.65": ("chat/completions", TOOLS | USAGE | {"messages": [USER, THOUGHT, RESULT]}),
    "Copilot CLI 1.0.102": (
        "chat/completions",
        USAGE
        | {"temperature": 0, "top_p": 0.95, "frequency_penalty": 0, "presence_penalty": 0, "tools": RUN}
        | {"messages": [USER, THOUGHT | {"refusal": None}, RESULT, THOUGHT | {"content": None, "refusal": None}, RESULT]},
    ),
    "Copilot CLI 1.0.102, responses": (
        "responses",
        {
            **{"instructions": "You are an agent.", "tools": CODEX_TOOLS[:1], "stream": True, "store": False},
            **{"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"], "parallel_tool_calls": True},
            "prompt_cache_key": "k",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "go"}], "type": "message"},
                {
                    **{"id": "rs_1", "status": "completed", "type": "reasoning", "summary": []},
                    "content": [{"type": "reasoning_text", "text": "hm"}],
                },
                {
                    **{"type": "message", "id": "msg_1", "role": "assistant", "status": "completed"},
                    "content": [{"annotations": [], "type": "output_text", "text": "I look."}],
                },
                {
                    **{"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "exec_command"},
                    **{"arguments": '{"cmd": "ls"}', "status": "completed"},
                },
                {"type": "function_call_output", "call_id": "c1", "output": "a.txt"},
            ],
        },
    ),
    "Kilo CLI 7.7.9": (
        "chat/completions",
        TOOLS
        | USAGE
        | {"max_tokens": 8192, "messages": [{"role": "user", "content": SYSTEM_PARTS["content"] * 2}, THOUGHT, RESULT]},
    ),
    "Mistral Vibe 3.0.2": (
        "chat/completions",
        USAGE
        | {"temperature": 0.2, "tools": RUN}
        | {
            "messages": [
                USER,
                {**THOUGHT, "tool_calls": [CALLED | {"index": 0}]},
                RESULT | {"name": "exec_command"},
                {"role": "assistant", "tool_calls": [CALLED | {"index": 0}]},  # no content
                RESULT | {"name": "exec_command"},
            ]
        },
    ),
    "Hermes Agent 0.19.0": (
        "chat/completions",
        USAGE
        | {"max_tokens": 65536, "options": {"num_ctx": 131072}, "tools": RUN}  # ollama's, whose paths it found
        | {"messages": [USER, THOUGHT, RESULT | {"name": "exec_command"}]},
    ),
    "gptme 0.35.1": (
        "chat/completions",
        USAGE | {"temperature": 0.0, "top_p": 0.1, "tools": RUN} | {"messages": [SYSTEM_PARTS] * 3 + [USER, THOUGHT, RESULT]},
    ),
    "OpenHands 1.16.0": (
        "chat/completions",
        {"tools": RUN, "reasoning_effort": "high", "prompt_cache_key": "k"}
        | {"messages": [SYSTEM_PARTS, USER, THOUGHT, RESULT | {"content": SYSTEM_PARTS["content"], "name": "exec_command"}]},
    ),
}


@pytest.mark.parametrize("agent", RECORDED)
def test_an_agents_request_has_no_unknown_field_and_its_history_reaches_the_template(agent):
    path, body = RECORDED[agent]
    engine = Heard(hermes(("exec_command", {"cmd": "ls"})))
    status, answer = asked(engine, path, body, strict=True)
    assert status == 200, answer
    assert 'assistant[hm]: I look.<c1|exec_command|{"cmd": "ls"}>' in engine.prompts[0]
    assert engine.prompts[0].endswith("(c1)\nassistant:")
    if body.get("stream_options"):
        assert answer[-1]["usage"]["completion_tokens"] == len(engine.tokens)
