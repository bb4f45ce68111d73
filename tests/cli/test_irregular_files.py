"""Any file of a folder as a FIFO, socket, device, folder, or 2 GiB of nothing: no command waits, none takes memory."""

import os
import shutil
import signal
import socket
from pathlib import Path

import pytest

from lowq_cli import main
from lowq_cli.run.pipeline import quantize

NAMES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    *(
        "special_tokens_map.json",
        "added_tokens.json",
        "tokenizer.model",
        "vocab.json",
        "merges.txt",
        "preprocessor_config.json",
    ),
    *("model.safetensors", "model.safetensors.index.json", "hf_quant_config.json", "lowq_report.json", "lowq_tune.json"),
    *("lowq-journal.jsonl", "LICENSE"),
)
SECONDS = 60  # on a machine that others use; a file that waits does so for ever
MEMORY = 1200 << 20  # bytes above what the process has; 2 GiB of JSON took 6.6 GB


def fifo(path: Path) -> None:
    os.mkfifo(path)


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 2 << 30)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()


def bound(path: Path) -> None:
    at = os.getcwd()
    os.chdir(path.parent)  # a socket's name has at most 108 characters
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(at)


KINDS = {"fifo": fifo, "sparse": sparse, "device": device, "folder": folder, "socket": bound}
COMMANDS = {
    "generate": lambda m: ("generate", m, "--prompt", "Once", "--max-new-tokens", "2", "--device", "cpu"),
    "inspect": lambda m: ("inspect", m),
}
CASES = [(name, kind) for name in NAMES for kind in KINDS]


@pytest.fixture(scope="module")
def sound(short_demo, tmp_path_factory):
    out = tmp_path_factory.mktemp("sound") / "demo"
    quantize(short_demo, out=out, bits=4, group=32, method="rtn")
    return out


def peak(reset: bool = False) -> int:
    """The most bytes that were resident since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def bent(sound: Path, to: Path, name: str, kind: str) -> Path:
    to.mkdir()
    for path in sound.iterdir():
        if path.name != name:
            os.link(path, to / path.name) if path.suffix == ".safetensors" else shutil.copy(path, to)
    KINDS[kind](to / name)
    return to


def run(capsys, *words) -> tuple[int, str]:
    """Exit code and stderr of a command that has SECONDS, and its memory."""

    def late(*_):
        raise AssertionError(f"{' '.join(map(str, words))} waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    held = peak(reset=True)
    try:
        code = main.main([*map(str, words)])
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert peak() - held < MEMORY
    return code, capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), CASES, ids=lambda v: v)
def test_a_file_of_another_kind_is_refused_or_not_asked_for(sound, tmp_path, capsys, own_cache, name, kind):
    model = bent(sound, tmp_path / "m", name, kind)
    for command, words in COMMANDS.items():
        code, err = run(capsys, *words(model))
        assert code in (0, 3, 5), (command, err)
        assert "internal" not in err
        if name in ("config.json", "model.safetensors", "tokenizer.json") and command == "generate":
            assert code == 3, err
        if name == "lowq_tune.json":
            assert code == 0, err


def test_the_four_files_that_were_read_whole(sound, tmp_path, capsys, own_cache):
    for name, kind in (
        ("tokenizer_config.json", "fifo"),
        ("lowq_tune.json", "sparse"),
        ("generation_config.json", "sparse"),
        ("chat_template.jinja", "sparse"),
    ):
        model = bent(sound, tmp_path / name, name, kind)
        code, err = run(capsys, *COMMANDS["generate"](model))
        assert code == (0 if name == "lowq_tune.json" else 3), err
        assert name in err, err
