"""A chat template that loops for ever or asks for all memory: its request gets one line, others what they asked for."""

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from lowq_cli.hf.chat_template import BYTES, SECONDS

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
CHATS = {"loops": 2}  # at once: they wait for each other, SECONDS each; one chat of the other bombs


@pytest.fixture(params=BOMBS)
def bomb(request, talk, tmp_path):
    folder = tmp_path / "bomb"
    shutil.copytree(talk, folder)
    template, line = BOMBS[request.param]
    (folder / "chat_template.jinja").write_text(template)
    return folder, line, CHATS.get(request.param, 1)


def test_a_template_bomb_costs_its_request_and_no_other(bomb, start_on):
    folder, line, many = bomb
    server = start_on(folder)
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    with ThreadPoolExecutor(many) as pool, httpx.Client(base_url=server.url, timeout=120) as client:
        client.get("/health")  # connected: the next ones do not wait for that
        chats = [pool.submit(server.post, "chat/completions", body) for _ in range(many)]
        meanwhile = 0  # answers that came before the first chat's
        while not all(c.done() for c in chats):
            assert client.get("/health").status_code == 200
            meanwhile += not any(c.done() for c in chats)
            time.sleep(0.05)
        assert meanwhile > 3 or "5 s" not in line
        answers = [c.result() for c in chats]
    for answer in answers:
        assert answer.status_code == 400
        said = answer.json()["error"]["message"]
        assert line in said
        assert "chat template" in said
        assert "\n" not in said
        assert len(said) < 300
    assert server.post("completions", {"prompt": "Once", "max_tokens": 2}).status_code == 200
    assert _memory(server) < 2 * BYTES + (2 << 30)
    assert json.loads(httpx.get(f"{server.url}/health").text)["running"] == 0


def _memory(server):
    """Resident bytes of the server's own process at its largest."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def test_the_limit_is_the_one_that_is_documented():
    words = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    assert f"{SECONDS:g} s" in words
