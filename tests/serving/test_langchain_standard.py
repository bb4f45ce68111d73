"""LangChain's own standard tests of chat models, where they are installed: against /v1/chat/completions and /v1/responses.

The engine is one that does what these tests ask for: it calls the tool that they mean, and otherwise tells a joke as JSON.
"""

import inspect
import json
import re
from typing import ClassVar

import numpy as np
import pytest

openai = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
standard = pytest.importorskip("langchain_tests.integration_tests", reason="langchain-tests is not installed")

from talking import Heard, running

from lowq_cli.serving.request import Event

ARGUMENTS = {
    "magic_function": {"input": 3}, "magic_function_no_args": {}, "get_weather": {"location": "San Francisco, CA"},
    "greeting_generator": {"answer_style": "Pirate"}, "my_adder_tool": {"a": 3, "b": 4}, "unicode_customer": None,
    "get_current_weather": {"location": "Ulm"},
}  # fmt: skip
JOKE = json.dumps({"setup": "Why do cats purr?", "punchline": "They are content."})


class Able(Heard):
    """Answers by what it is asked; with a grammar, only as that allows."""

    def __init__(self):
        super().__init__("")

    def submit(self, request):
        prompt = self.tokenizer.decode(list(request.prompt))
        text = self.tokenizer(self.answer(prompt), add_special_tokens=False)["input_ids"]
        self.requests.append(request)
        self.number += 1
        for i, token in enumerate([*text, self.tokenizer.eos_token_id], 1):
            if request.mask is not None:
                words = np.zeros(self.vocabulary // 32, np.int32)
                request.mask.fill(words)
                assert words[token // 32] >> token % 32 & 1, (prompt, self.tokenizer.decode(text[: i + 9]))
                request.mask.accept(token)
            end = "stop" if token in request.stop_ids else "length" if i == request.max_tokens else None
            self.sink([(self.number, Event(token, finish_reason=end))])
            if end:
                break
        return self.number

    def answer(self, prompt):
        tools = re.findall(r"^(\w+)\(\{", prompt, re.M)
        output = prompt.rpartition("\nuser[")[2] if "\nuser[" in prompt else prompt
        if tools and "tool[" not in output:
            name = next((t for t in tools if t in ARGUMENTS), tools[0])
            named = re.search(r"customer named '([^']+)'", output)
            arguments = {"customer_name": named[1], "description": "New"} if named else ARGUMENTS.get(name)
            call = {"name": name, "arguments": json.loads(JOKE) if arguments is None else arguments}
            return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
        return JOKE if "joke" in output.lower() else "It is so. It goes on, " + "and on, " * 4


@pytest.fixture(scope="module")
def url():
    with running(Able()) as result:
        yield result


class Standard(standard.ChatModelIntegrationTests):
    """What both interfaces have in common."""

    more: ClassVar = {}

    def __init_subclass__(cls):
        for name in dir(cls):
            if inspect.iscoroutinefunction(test := getattr(cls, name)):
                setattr(cls, name, pytest.mark.asyncio(loop_scope="module")(test))

    @pytest.fixture(autouse=True)
    def _server(self, url):
        type(self).url = url

    @property
    def chat_model_class(self):
        return openai.ChatOpenAI

    @property
    def chat_model_params(self):
        return {"model": "m", "base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, **self.more}

    supports_json_mode = True
    model_override_value = "m"


class TestChatCompletions(Standard):
    more: ClassVar = {"stream_usage": True}


class TestResponses(Standard):
    more: ClassVar = {"use_responses_api": True}
