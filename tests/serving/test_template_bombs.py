"""A chat template that loops for ever or asks for all memory: its request gets one line, others what they asked for."""

import json
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from lowq_cli.hf.chat_template import BYTES, SECONDS, render
from lowq_packers.errors import DamagedError

TURNS = "{% for a in range(99999) %}{% for b in range(99999) %}TEXT{% endfor %}{% endfor %}"
BOMBS = {  # what a template does, and what the line says of it
    "loops": (TURNS.replace("TEXT", ""), "takes more than 5 s"),
    "doubles a text": (
        "{% set n = namespace(s='xx') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "takes more than 512 MB",
    ),
    "multiplies a text": ("{{ 'x' * 10 ** 12 }}", "takes more than 512 MB"),
    "writes without end": (TURNS.replace("TEXT", "x" * 1000), "takes more than"),
    "pads a text": ("{{ 'x' | center(10 ** 12) }}", "takes more than 512 MB"),
    "computes a large power": ("{{ 9 ** (9 ** 9) }}", "takes more than 5 s"),
}
SERVED = ("loops", "writes without end")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.more] * ("power" in n)) for n in BOMBS if n not in SERVED])
def test_a_template_bomb_is_refused_in_one_line_and_the_next_conversation_is_rendered(name):
    bomb, line = BOMBS[name]
    output = [{"role": "user", "content": "hi"}]
    with ThreadPoolExecutor(2) as pool:  # two chats at once wait for each other
        chats = [pool.submit(render, bomb, output, True, {}) for _ in range(1 if " s" in line else 2)]
    for chat in chats:
        with pytest.raises(DamagedError, match=line) as refused:
            chat.result()
        check(str(refused.value), line)
    assert render("{{ messages[0].content }}", output, True, {}) == "hi"


def check(message, line):
    assert line in message
    assert "chat template" in message
    assert "\n" not in message
    assert len(message) < 300


@pytest.mark.parametrize("name", [SERVED[0], *(pytest.param(name, marks=pytest.mark.more) for name in SERVED[1:])])
def test_a_template_bomb_costs_its_request_and_no_other(name, talk, tmp_path, start_on):
    folder = tmp_path / "bomb"
    shutil.copytree(talk, folder)
    bomb, line = BOMBS[name]
    (folder / "chat_template.jinja").write_text(bomb)
    server = start_on(folder)
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=server.url, timeout=120) as client:
        client.get("/health")  # connected: the next ones do not wait for that
        chat, meanwhile = pool.submit(server.post, "chat/completions", body), 0  # answers that came before the chat's
        while not chat.done():
            assert client.get("/health").status_code == 200
            meanwhile += not chat.done()
            time.sleep(0.05)
        assert meanwhile > 3 or "5 s" not in line
    assert chat.result().status_code == 400
    check(chat.result().json()["error"]["message"], line)
    assert server.post("completions", {"prompt": "Once", "max_tokens": 2}).status_code == 200
    assert _memory(server) < 2 * BYTES + (2 << 30)
    assert json.loads(httpx.get(f"{server.url}/health").text)["running"] == 0


def _memory(server):
    """Resident bytes of the server's own process at its largest."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def test_the_process_that_renders_starts_while_a_model_with_a_template_is_loaded(talk, tmp_path):
    """`begin` starts it, once and without waiting; the conversation is rendered by that process."""
    script = """
import pathlib, sys
from lowq_cli.hf import chat_template
def children():
    return [p for task in pathlib.Path("/proc/self/task").iterdir() for p in (task / "children").read_text().split()]
chat_template.begin(sys.argv[1])
assert not children()
for _ in range(2):
    chat_template.begin(sys.argv[2])
begun = children()
text = chat_template.render("{{ messages[0].content }}", [{"role": "user", "content": "hi"}], True, {})
print(len(begun), begun == children(), text)
"""
    line = [sys.executable, "-c", script, str(tmp_path), str(talk)]
    assert subprocess.run(line, capture_output=True, text=True, check=True).stdout == "1 True hi\n"


def test_the_limit_is_the_one_that_is_documented():
    words = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    assert f"{SECONDS:g} s" in words
