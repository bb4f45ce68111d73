"""Thoughts apart from answers, over HTTP: as fields of their own, switched off, and before forms and calls."""

import json

import pytest
from saying import Saying, byte_tokenizer, message, posts, served_by

PLACE = "{% if false %}<think></think><tool_call></tool_call>{{ tools }}{% endif %}"  # what shows how the model writes
THINKS = (
    "{% for m in messages %}{{ m.role }}:{{ m.reasoning_content or '' }}|{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}A:{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}" + PLACE
)
OPENS = "{% for m in messages %}{{ m.content }}{% endfor %}" + PLACE + "<think>\n"
HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "<|start|>assistant{% if false %}<|channel|>{{ tools }}{% endif %}"
)
MARKS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|constrain|>")
ASKED = {"messages": [{"role": "user", "content": "x"}], "temperature": 0}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}}}
]


def ask(template, said, special=(), plain=(), **more):
    """(what was answered, the prompt that the engine was asked with)."""
    tokenizer = byte_tokenizer(special=special, plain=plain, template=template)
    engine = Saying([*tokenizer(said, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id])
    requests = []
    submit = engine.submit
    engine.submit = lambda request: requests.append(request) or submit(request)
    ((status, answer),) = posts(served_by(engine, tokenizer), ("chat/completions", ASKED | more))
    assert status == 200, answer
    return answer, tokenizer.decode(list(requests[0].prompt))


def thought(answer):
    if isinstance(answer, dict):
        return answer["choices"][0]["message"].get("reasoning_content", "")
    return "".join(c["delta"].get("reasoning_content", "") for chunk in answer for c in chunk["choices"])


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("special", [(), ("<think>", "</think>")], ids=["text", "tokens"])
def test_thoughts_are_apart(streamed, special):
    for template, output in ((THINKS, "<think>\nhm, é\n</think>\n\nYes."), (OPENS, "hm, é\n</think>\n\nYes.")):
        answer, _ = ask(template, output, special, stream=streamed)
        assert (thought(answer), message(answer)) == ("hm, é", ("Yes.", [], "stop"))
    assert (thought(ask(OPENS, "hm", max_tokens=2, stream=streamed)[0])) == "hm"


def test_thoughts_are_counted():
    usage = ask(OPENS, "hm</think>Yes.")[0]["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len("hm</think>")
    assert ask(THINKS, "Yes.")[0]["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


@pytest.mark.parametrize("more", [{"reasoning_effort": "none"}, {"thinking_budget": 0}], ids=str)
def test_a_model_that_is_not_to_think_begins_with_its_answer(more):
    for template, special in ((THINKS, ()), (OPENS, ("<think>", "</think>")), (OPENS, ())):
        answer, prompt = ask(template, "Yes.", special, **more)
        assert prompt.endswith("" if special else "</think>\n\n")
        assert (thought(answer), message(answer)[0]) == ("", "Yes.")
    answer, _ = ask(HARMONY, "Yes.", MARKS, **more)
    assert (thought(answer), message(answer)[0]) == ("", "Yes.")


def test_the_templates_own_switch_is_used():
    assert "A:<think>\n\n</think>\n\n" in ask(THINKS, "Yes.", chat_template_kwargs={"enable_thinking": False})[1]
    assert ask(THINKS, "Yes.", chat_template_kwargs={"enable_thinking": True})[1].endswith("A:")


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_earlier_thoughts_go_back_to_the_model(name):
    output = [*ASKED["messages"], {"role": "assistant", name: "hm", "content": "Yes."}, {"role": "user", "content": "Why?"}]
    assert "assistant:hm|Yes.;" in ask(THINKS, "So.", messages=output)[1]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
def test_channels(streamed):
    output = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json"
    answer, _ = ask(HARMONY, output + '<|message|>{"n": 1}<|call|>', MARKS, tools=TOOLS, stream=streamed)
    assert (thought(answer), message(answer)) == ("hm", ("", [("f", '{"n": 1}')], "tool_calls"))


FORM = {"type": "json_schema", "json_schema": {"schema": {"type": "object", "properties": {}, "additionalProperties": False}}}


@pytest.mark.parametrize("special", [(), ("<think>", "</think>")], ids=["text", "tokens"])
@pytest.mark.parametrize("template", [THINKS, OPENS], ids=["thinks", "opens"])
@pytest.mark.parametrize("forced", [False, True], ids=["form", "call"])
def test_a_form_begins_after_the_thoughts(template, special, forced):
    """The mask lets all of it pass: thoughts, and then the form; nothing but the form where there are to be none."""
    pytest.importorskip("llguidance", reason="forms need the extra lowq[grammar]")
    tokenizer = byte_tokenizer(special=special, template=template)
    end = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>' if forced else "{}"
    more = {"tools": TOOLS, "tool_choice": "required"} if forced else {"response_format": FORM}
    head = "" if template is OPENS else "<think>"
    for text, effort in ((f"{head}hm {{</think>\n\n{end}", "high"), (end, "none")):
        tokens = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        engine = Masked(tokens)
        ((status, answer),) = posts(
            served_by(engine, tokenizer), ("chat/completions", ASKED | more | {"reasoning_effort": effort})
        )
        assert status == 200, answer
        content, calls, _ = message(answer)
        assert (content, calls) == (("", [("f", "{}")]) if forced else ("{}", []))
        assert thought(answer) == ("hm {" if effort == "high" else "")


class Masked(Saying):
    """Says its tokens where the request's mask lets each of them pass."""

    def submit(self, request):
        import numpy as np

        for token in self.tokens:
            words = np.zeros(-(-self.vocabulary // 32), np.int32)
            request.mask.fill(words)
            assert words[token // 32] >> token % 32 & 1, token
            request.mask.accept(token)
        return super().submit(request)


def test_log_probabilities_of_a_chat_are_of_its_text():
    """And not of the token that ended it, which has none."""
    for streamed in (False, True):
        answer, _ = ask("{{ messages[0].content }}", "ab", logprobs=True, stream=streamed)
        parts = answer if streamed else [answer]
        rows = [c["logprobs"]["content"] for a in parts for c in a["choices"] if c["logprobs"]]
        assert [r["token"] for row in rows for r in row] == ["a", "b"]
        assert json.dumps(rows)
