"""Conversations: each turn's prompt extends the last, the cache knows its tokens, the command answers."""

import json
from types import SimpleNamespace

import forking
import torch
from safetensors.torch import save_file

from lowq_cli.engine.conversation import Conversation
from lowq_packers.errors import UnsupportedError


class Words:
    """A tokenizer of one token per character, with or without a chat template."""

    def __init__(self, template=None):
        self.chat_template = template

    def __call__(self, text):
        return {"input_ids": [ord(c) for c in text]}

    def apply_chat_template(self, messages, **kw):
        assert kw == {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
        return [ord(c) for c in "".join(f"<{m['role'][0]}>{m['content']}" for m in messages) + "<a>"]


def answer(prompt, text):
    decoder = SimpleNamespace(held=[])
    return SimpleNamespace(decoder=decoder, prompts=[prompt], names=[prompt], tokens=[[ord(c) for c in text] + [0]], text=text)


def text(ids):
    return "".join(map(chr, ids))


def test_turns_follow_the_template():
    talk = Conversation(Words("yes"), "Be kind.")
    first = talk.prompt("Hi")
    assert text(first) == "<s>Be kind.<u>Hi<a>"
    reply = answer(first, "Hello!")
    talk.answered("Hi", reply)
    assert text(reply.decoder.held[0]) == "<s>Be kind.<u>Hi<a>Hello!"
    assert text(talk.prompt("Bye")) == "<s>Be kind.<u>Hi<a>Hello!<u>Bye<a>"


def test_without_a_template_the_text_goes_on():
    talk = Conversation(Words())
    first = talk.prompt("Once")
    talk.answered("Once", answer(first, " upon"))
    assert text(talk.prompt("Then")) == "Once upon\nThen"


def test_the_command_answers_each_line_and_ends_with_its_input():
    output = "Once upon a time\n\n/new\nThe whale\n/quit\nqzxj\n"
    done = forking.lowq("chat", "demo", "--max-new-tokens", 5, "--device", "cpu", given=output)
    assert done.returncode == 0, done.stderr
    assert len([line for line in done.stdout.splitlines() if line.strip()]) >= 2
    assert "qzxj" not in done.stdout  # what stands behind /quit


def test_a_drafter_that_cannot_be_used_ends_the_command_before_the_first_message(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["SomethingDraftModel"], "model_type": "llama"}')
    save_file({"fc.weight": torch.ones(4, 4)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    done = forking.lowq("chat", "demo", "--draft", tmp_path, "--device", "cpu", given="Hi\nHi\n")
    assert done.returncode == UnsupportedError.exit_code
    assert done.stderr.count("draft heads of the kind SomethingDraftModel are not supported") == 1


def test_chat_commands_run_and_are_not_sent_to_the_model(tmp_path):
    file = tmp_path / "talk.json"
    output = "/help\n/set\n/set temperature 0\n/set max-new-tokens 3\n/set top-p 7\n/set nose 7\n/nose\n"
    output += f"/system Be kind.\nOnce\n/save {file}\n"
    done = forking.lowq("chat", "demo", "--device", "cpu", given=output)
    assert done.returncode == 0, done.stderr
    for message in (
        "/save FILE writes",
        "max-new-tokens 256,",  # a quarter of the demo's context
        "temperature 0.0",
        "[cut after 3 tokens: the longest answer that --max-new-tokens or /set max-new-tokens allows]",
        "top_p=7.0 must be",
        "there is no setting 'nose'",
        "there is no command /nose",
    ):
        assert message in done.stderr
    assert done.stderr.count("this model has no chat template") == 1
    assert [m["role"] for m in json.loads(file.read_text())] == ["system", "user", "assistant"]
    assert len(done.stdout.split()) <= 3
