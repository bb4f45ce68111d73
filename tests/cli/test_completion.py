"""Completion at a press of Tab: what shells get, how soon, and whatever the cache and the folders hold."""

import os
import pty
import select
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

import pytest

from lowq_cli import cached_models, completion, inventory, state
from lowq_cli.serving import catalog

HOSTILE = (
    "my model",
    "it's",
    'say "hi"',
    "a$(touch pwned)b",
    "`touch pwned`",
    "col:on=1",
    "star*[a]?",
    r"back\slash",
    "~x",
    "é",
)
LOST = ("two\nlines", os.fsdecode(b"caf\xe9"), "bell\a")  # what no shell can show and hand back


def cached(name):
    """A model in the cache, whose short name this is."""
    folder = cached_models.home.cache_dir() / "runs" / f"{name}-0123456789abcdef"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def here(own_cache, tmp_path, monkeypatch):
    """An empty working folder and home, and bash's completion as `lowq --install-completion bash` leaves it there."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "lowq"
    program.write_text(f"#!{sys.executable}\nfrom lowq_cli.start import run\nrun()\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    subprocess.run(["lowq", "--install-completion", "bash"], check=True, stdout=subprocess.DEVNULL)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def in_bash(words, after=""):
    """The completions of the last of these words in bash (its COMPREPLY), and what it writes to stderr."""
    script = 'source ~/.bashrc; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _lowq_completion lowq; '
    script += after or "printf '%s\\n' \"${COMPREPLY[@]}\""
    done = subprocess.run(["bash", "-c", script, "bash", *words], capture_output=True, check=True)
    return os.fsdecode(done.stdout).splitlines(), done.stderr.decode()


def test_values_complete(here):
    state.remember(cached("far").rename(here / "mine"))
    cached("mistral")
    assert completion.checkpoints("m") == ["mine", "mistral"]
    assert completion.models("d") == completion.originals("d") == ["demo"]
    assert completion.methods("g") == ["gptq"]
    assert completion.zeros("") == ["float", "int", "none"]
    assert completion.exports("g") == ["gptq", "gguf"]
    assert completion.drafts("n") == ["ngram", "none"]
    (here / "m.gguf").touch()
    assert completion.models("m") == ["mine", "mistral", "m.gguf"]
    for line, found in (
        ("lowq quantize demo --method h", ["hqq"]),
        ("lowq quantize demo --method = h", ["hqq"]),  # bash's words of --method=h
        ("lowq generate mis", ["mistral"]),
        ("lowq generate x --draft = mis", ["mistral"]),
        ("lowq chat x --draft mis", ["mistral"]),
        ("lowq compare x y mis", ["mistral"]),
        ("lowq serve --models mis", ["mistral"]),
        ("lowq eval --against mis", ["mistral"]),
        ("lowq push me/x --ckpt mis", ["mistral"]),
        ("lowq gen", ["generate"]),
        ("lowq run", ["run"]),
        ("lowq generate --dr", ["--draft"]),
        ("lowq refine ", ["mine", "m.gguf"]),
        ("lowq quantize mis", [""]),  # it takes no model of lowq
    ):
        assert in_bash(line.split(" ")) == (found, ""), line


@pytest.mark.parametrize("mark", ["", "'", '"'])
def test_bash_reads_back_every_name_that_is_offered(here, mark):
    for name in (*HOSTILE, *LOST):
        cached(name)
    again = f'for name in "${{COMPREPLY[@]}}"; do eval "set -- {mark or ""}$name{mark or ""}"; printf \'%s\\n\' "$@"; done'
    again = again.replace(f"{mark}$name{mark}", f"\\{mark}$name\\{mark}") if mark == '"' else again
    names, err = in_bash(["lowq", "generate", mark], again)
    assert err == ""
    assert sorted(names) == sorted(HOSTILE)
    assert list(here.iterdir()) == []
    assert in_bash(["lowq", "generate", f"{mark}my"])[0] == ["my model" if mark else r"my\ model"]


def test_a_person_presses_tab(here):
    cached("my model")
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp("bash", ["bash", "--rcfile", Path.home() / ".bashrc", "-i"])
    seen = b""

    def until(text):
        nonlocal seen
        end = time.monotonic() + 60
        while text not in seen:
            assert time.monotonic() < end, seen
            if select.select([terminal], [], [], 0.1)[0]:
                seen += os.read(terminal, 1 << 16)

    try:
        os.write(terminal, b"PS1=ready; TERM=dumb\n")
        until(b"\rready")
        os.write(terminal, b"lowq generate m\t")
        until(rb"lowq generate my\ model ")
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(terminal)
    assert b"rror" not in seen


def test_zsh_is_given_no_name_with_quotes(here):
    for name in (*HOSTILE, *LOST):
        cached(name)
    env = {**os.environ, completion.ASKED: "complete_zsh", "_TYPER_COMPLETE_ARGS": "lowq generate "}
    done = subprocess.run(["lowq"], env=env, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert "my model" in done.stdout
    assert not any(name in done.stdout for name in ("it", "say", "slash", "lines", "caf", "bell"))


def test_fish_asks_whether_and_what(here):
    cached("my model")
    for action, line, expected in (
        ("is-args", "lowq generate m", (0, "")),
        ("is-args", "lowq generate q", (1, "")),
        ("get-args", "lowq generate m", (0, "my model\n")),
        ("get-args", "lowq generate --draft m", (0, "mtp\nmy model\n")),
    ):
        env = {**os.environ, completion.ASKED: "complete_fish", "_TYPER_COMPLETE_FISH_ACTION": action}
        done = subprocess.run(["lowq"], env=env | {"_TYPER_COMPLETE_ARGS": line}, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (*expected, "")


def nothing(cache):
    shutil.rmtree(cache)


def a_file(cache):
    shutil.rmtree(cache / "runs")
    (cache / "runs").write_text("x")


def a_loop(cache):
    shutil.rmtree(cache / "runs")
    (cache / "runs").symlink_to(cache / "runs")


def half_written(cache):
    (cache / "runs" / "half-0123456789abcdef").mkdir()
    (cache / "runs" / "half-1123456789abcdef" / "config.json").mkdir(parents=True)
    (cache / "runs" / "half-2123456789abcdef").write_text("x")
    os.mkfifo(cache / "runs" / "half-3123456789abcdef")
    (cache / "runs" / "half-4123456789abcdef").symlink_to("/nowhere")


def a_damaged_list(cache):
    state.state_dir().joinpath(state.LAST).write_text('{"known": [{"checkpoint": 1}]}')


BROKEN = {"nothing": set(), "a_file": {"other"}, "a_loop": {"other"}, "half_written": {"mine", "other"}}
BROKEN |= {"a_damaged_list": {"mine", "other"}}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_cache_costs_only_what_is_broken(here, how):
    cached("mine")
    other = cached("other")
    (cached_models.home.cache_dir() / "imports").mkdir()
    other.rename(cached_models.home.cache_dir() / "imports" / other.name)
    globals()[how](cached_models.home.cache_dir())
    names, err = in_bash(["lowq", "generate", ""])
    assert (set(filter(None, names)), err) == (BROKEN[how], "")


PLACES = ("", "runs", "runs/mine-0123456789abcdef", "runs/mine-0123456789abcdef/config.json")


@pytest.mark.parametrize(("place", "mode"), [*product(PLACES, (0, 0o444, 0o111))])
def test_what_may_not_be_read_costs_only_itself(place, mode, monkeypatch):
    """As a user whom permissions bind, which they do not bind root."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("XDG_CACHE_HOME", folder)
        monkeypatch.setenv("XDG_STATE_HOME", folder)
        monkeypatch.chdir("/")
        cache = cached("mine").parent.parent
        (cache / "imports").mkdir()
        cached("other").rename(cache / "imports" / "other-0123456789abcdef")
        for path in (Path(folder), *Path(folder).rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        changed = cache / place
        changed.chmod(mode)
        before = os.geteuid()
        try:
            if before == 0:
                os.seteuid(65534)
            if not stat.S_IMODE(changed.stat().st_mode):
                assert not os.access(changed, os.R_OK, effective_ids=True)
            found, offered = cached_models.names().values(), completion.checkpoints("")
            cached_models.model_path("mine")
            holdings, served = inventory.holdings(), catalog.gather(catalog.Config())
        finally:
            os.seteuid(before)
            changed.chmod(0o755)
        assert {*found} <= {*offered} & {"mine", "other"}
        assert ("other" in found) or not place
        assert "mine" in found or place.count("/") < 2
        assert {h.path.name[:-17] for h in holdings} >= {"mine", "other"} or place.count("/") < 1
        assert "other" in served or place.count("/") < 1


def test_completion_fails_in_silence(here, capfd, monkeypatch):
    monkeypatch.setenv(completion.ASKED, "complete_bash")

    def damaged(verb):
        print("half a line")
        print("a warning", file=sys.stderr)
        raise ValueError

    assert completion.answer(damaged) == ("half\\ a\\ line\n", 0)
    assert capfd.readouterr() == ("", "")
    monkeypatch.setenv("LOWQ_DEBUG", "1")
    completion.answer(damaged)
    assert capfd.readouterr() == ("", "lowq: ValueError: \n")
    here.rmdir()
    assert "demo" in completion.models("")


def test_nothing_heavy_is_imported(here):
    cached("mine")
    code = "import sys; from lowq_cli import completion, main\n"
    code += "print(completion.answer(lambda verb: main._parser(verb)([], prog_name='lowq'))[0], *sys.modules)"
    env = {**os.environ, completion.ASKED: "complete_bash", "COMP_WORDS": "lowq\ngenerate\nm", "COMP_CWORD": "2"}
    said = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout.split()
    assert said[0] == "mine"
    assert not {"torch", "numpy", "transformers", "rich", "lowq_cli.inventory", "lowq_cli.files", "asyncio"} & {*said}
