"""lowq chat --session: a conversation goes on where it was left, in this process or by a running server."""

import errno
import io
import json
import os

import pytest
from test_running import home, left_behind, lowq

from lowq_cli import main, sessions
from lowq_packers.errors import DamagedError, UsageError

__all__ = ["home"]
# the seed: with 2, no draw is nearer than 3% to another token, and two engines' logits differ by 0.1%
HOW = ("chat", "demo", "--device", "cpu", "--max-new-tokens", 12, "--seed", 2)
SAID = ("Once upon a time", "And then the king", "At last")


def chat(*lines, flags=()):
    return lowq(*HOW, *flags, given="".join(f"{line}\n" for line in lines)).stdout


def test_it_goes_on_where_it_was_left(home):
    whole, flags = chat(*SAID), ("--session", "trip")
    begun = "".join(chat(line, flags=flags) for line in SAID[:2])
    last = lowq(*HOW, *flags, given=f"{SAID[2]}\n")
    assert begun + last.stdout == whole
    assert "continues after 4 messages, whose saved cache is used" in last.stderr
    kept, cache = sessions.path_of("trip"), sessions.cache_of("trip")
    cache.write_bytes(cache.read_bytes()[:-1])
    result = json.loads(kept.read_text())
    assert [m["content"] for m in result["messages"][::2]] == list(SAID)
    assert not kept.stat().st_mode & 0o077 or not kept.parent.parent.stat().st_mode & 0o077
    output = lowq(*HOW, "--session", "trip", given="/new\n").stderr
    assert "continues after 6 messages" in output
    assert output.count("the saved cache of session trip is not used: it is damaged") == output.count("not used") == 1
    assert sessions.read("trip") == ("", [])
    assert not cache.exists()
    chat("Hello", flags=("--session", "told", "--system", "Be brief."))
    assert sessions.read("told")[0] == "Be brief."
    assert "exists already" in lowq(*HOW, "--session", "told", "--system", "Be long.", code=2, given="").stderr


@pytest.mark.slow
def test_a_running_server_answers_the_same_and_when_it_ends_the_conversation_goes_on(home):
    whole = chat(*SAID)
    assert chat(*SAID, flags=("--keep-alive", "5m")) == whole
    assert chat(*SAID[:2], flags=("--session", "trip")) == chat(*SAID[:2])
    lowq("stop")
    left_behind(home)
    assert chat(*SAID[:2], flags=("--session", "trip2")) + chat(SAID[2], flags=("--session", "trip2")) == whole


def test_bad_names_and_damaged_conversations_are_refused(home):
    for name in ("", "../x", ".hidden", "a/b", "x" * 65):
        with pytest.raises(UsageError, match="must be a name of up to 64"):
            sessions.path_of(name)
    sessions.write("a", "", [{"role": "user", "content": "half \udc80"}, {"role": "assistant", "content": "b"}])
    assert sessions.read("a")[1][0]["content"] == "half ?"
    sessions.path_of("a").write_text("[1]")
    with pytest.raises(DamagedError, match="is not a saved conversation"):
        sessions.read("a")
    if os.getuid():
        sessions.path_of("a").parent.chmod(0o500)
        with pytest.raises(UsageError, match="cannot be written"):
            sessions.write("a", "", [])


def test_a_session_that_cannot_be_saved_is_refused_before_it_begins(monkeypatch, tmp_path, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert main.main(["chat", "demo", "--device", "cpu", "--session", "trip"]) == 2
    assert capsys.readouterr().err.endswith("Not a directory; name another state folder: XDG_STATE_HOME=DIR\n")


def test_a_full_disk_does_not_end_a_conversation(home, monkeypatch, capsys):
    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sessions, "write_whole", full)
    monkeypatch.setattr("sys.stdin", io.StringIO("Once\nTwice\n"))
    assert main.main(["chat", "demo", "--device", "cpu", "--session", "trip", "--max-new-tokens", "3"]) == 0
    assert capsys.readouterr().err.count("No space left on device; the conversation is not kept") >= 2
