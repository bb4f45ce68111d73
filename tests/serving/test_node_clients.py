"""OpenAI's, Anthropic's and ollama's packages for node, where node finds them (`npm install openai`, NODE_PATH)."""

import json
import shutil
import subprocess

import pytest
from talking import Heard, running

ANSWER = (
    '<think>\nhm\n</think>\n\nIt <b>depends</b>.<tool_call>\n{"name": "weather", "arguments": {"town": "Ulm"}}\n</tool_call>'
)
TOWN = '{type: "object", properties: {town: {type: "string"}}, required: ["town"]}'
OPENAI = (
    """
const OpenAI = require("openai").default;
const client = new OpenAI({baseURL: process.argv[1] + "/v1", apiKey: "none", maxRetries: 0});
const tools = [{type: "function", function: {name: "weather", parameters: TOWN}}];
const asked = {model: "m", messages: [{role: "user", content: "Rain?"}], tools};
(async () => {
  const out = {models: (await client.models.list()).data.map(m => m.id)};
  const whole = (await client.chat.completions.create(asked)).choices[0];
  const m = whole.message;
  out.whole = [m.content, m.reasoning_content, m.tool_calls[0].function, whole.finish_reason];
  const stream = client.chat.completions.stream({...asked, stream_options: {include_usage: true}});
  const final = await stream.finalChatCompletion();
  const f = final.choices[0].message;
  out.stream = [f.content, f.tool_calls[0].function, final.usage.total_tokens > 0];
  const events = [];
  const flat = tools.map(t => ({type: "function", ...t.function}));
  for await (const e of await client.responses.create({model: "m", input: "Rain?", tools: flat, stream: true}))
    events.push([e.type, e.delta, e.response && e.response.output && e.response.output.map(i => i.type)]);
  out.responses = [events[0][0], events.filter(e => e[0] === "response.output_text.delta").map(e => e[1]).join(""),
    events.filter(e => e[0] === "response.function_call_arguments.delta").map(e => e[1]).join(""), events.at(-1)];
  await client.chat.completions.create({...asked, temperature: 9}).catch(
    e => { out.error = [e.constructor.name, e.status, e.param]; });
  console.log(JSON.stringify(out));
})();
"""
).replace("TOWN", TOWN)
ANTHROPIC = (
    """
const Anthropic = require("@anthropic-ai/sdk").default;
const client = new Anthropic({baseURL: process.argv[1], apiKey: "none", maxRetries: 0});
const asked = {model: "m", max_tokens: 500, messages: [{role: "user", content: "Rain?"}],
  tools: [{name: "weather", input_schema: TOWN}]};
(async () => {
  const final = await client.messages.stream(asked).finalMessage();
  const whole = await client.messages.create(asked);
  const n = await client.messages.countTokens({model: "m", messages: asked.messages});
  const blocks = m => m.content.map(b => [b.type, b.thinking || b.text || b.input]);
  const said = [final, whole].map(m => [m.stop_reason, blocks(m)]);
  console.log(JSON.stringify([...said, n.input_tokens > 0]));
})();
"""
).replace("TOWN", TOWN)
OLLAMA = (
    """
const {Ollama} = require("ollama");
const client = new Ollama({host: process.argv[1]});
const tools = [{type: "function", function: {name: "weather", description: "", parameters: TOWN}}];
(async () => {
  let text = "", thought = "", calls = [];
  const asked = {model: "m", messages: [{role: "user", content: "Rain?"}], tools, think: true};
  for await (const part of await client.chat({...asked, stream: true})) {
    text += part.message.content; thought += part.message.thinking || ""; calls.push(...(part.message.tool_calls || []));
  }
  console.log(JSON.stringify([text, thought, calls.map(c => c.function), (await client.list()).models.map(m => m.name)]));
})();
"""
).replace("TOWN", TOWN)
CALL = {"name": "weather", "arguments": '{"town": "Ulm"}'}
TEXT = "It <b>depends</b>."


def said_by(package, script):
    """What a script prints against a server that gives ANSWER; skips where node has no such package."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    if subprocess.run(["node", "-e", f'require("{package}")'], capture_output=True).returncode:
        pytest.skip(f"node has no package {package}: npm install {package}, and NODE_PATH=.../node_modules")
    with running(Heard(ANSWER)) as url:
        done = subprocess.run(["node", "-e", script, url], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_openai():
    output = said_by("openai", OPENAI)
    assert output["models"] == ["m"]
    assert output["whole"] == [TEXT, "hm", CALL, "tool_calls"]
    assert output["stream"] == [TEXT, CALL, True]
    first, text, arguments, last = output["responses"]
    assert (first, text, arguments) == ("response.created", TEXT, CALL["arguments"])
    assert last == ["response.completed", None, ["reasoning", "message", "function_call"]]
    assert output["error"] == ["BadRequestError", 400, "temperature"]


def test_anthropic():
    final, whole, counted = said_by("@anthropic-ai/sdk", ANTHROPIC)
    blocks = [["thinking", "hm"], ["text", TEXT], ["tool_use", {"town": "Ulm"}]]
    assert [final, whole, counted] == [["tool_use", blocks], ["tool_use", blocks], True]


def test_ollama():
    assert said_by("ollama", OLLAMA) == [TEXT, "hm", [{"index": 0, "name": "weather", "arguments": {"town": "Ulm"}}], ["m"]]
