"""A command that needs what another process is writing into the cache waits for it, and takes over if that ends early."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import forking
import pytest
import torch

from lowq_cli import inventory, main
from lowq_cli.files import folder, locks
from lowq_cli.interop import importer
from lowq_cli.run import output_folder, pipeline

WORDS = ("--max-new-tokens", "4", "--device", "cpu", "--temperature", "0")
HALF = 20  # items of the demo that are written before a process stops
SECONDS = 60  # after which what a test waits for has hung


@pytest.fixture
def begin(tmp_path, monkeypatch, own_cache):
    """A function: fork `lowq ARGS`, stopped before call `times` of `stop_in` -> (its process id, the file of its output)."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    pids = []

    def fork(*args, stop_in=None, times=HALF):
        said = tmp_path / f"output-{len(pids)}"

        def work():
            torch.set_num_threads(1)
            os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 1)
            os.dup2(1, 2)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if stop_in:
                stop_at(*stop_in, times)
            code = main.main([*map(str, args)])
            print(f"exit code {code}", flush=True)

        pids.append(forking.fork(work))
        return pids[-1], said

    yield fork
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def stop_at(owner, name, times):
    """This process stops itself before the call of this number of a method."""
    call, calls = getattr(owner, name), iter(range(1, 1 << 20))

    def counted(*args, **how):
        if next(calls) == times:
            os.kill(os.getpid(), signal.SIGSTOP)
        return call(*args, **how)

    setattr(owner, name, counted)


def until(there):
    end = time.monotonic() + SECONDS
    while not there():
        assert time.monotonic() < end
        time.sleep(0.02)


def is_stopped(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def text_of(said):
    return said.read_text() if said.exists() else ""


def test_a_second_run_of_a_new_model_waits_and_answers_with_the_first_ones_checkpoint(begin):
    first, its = begin("run", "demo", "Once", *WORDS, stop_in=(output_folder.OutputFolder, "record"))
    until(lambda: is_stopped(first))
    _, said = begin("run", "demo", "Once", *WORDS)
    until(lambda: "waiting " in text_of(said))
    os.kill(first, signal.SIGCONT)
    until(lambda: "exit code" in text_of(said) and "exit code" in text_of(its))
    text = text_of(said)
    assert "exit code 0" in text
    assert f"process {first} is writing {inventory.holdings()[0].path}; waiting for it" in text
    assert f"for process {first}" in text
    assert 20 < int(re.search(r"waiting +(\d+)%", text)[1]) < 90, text
    assert "quantizing" not in text
    assert text_of(its).splitlines()[-3] == text.splitlines()[-3]  # the answers


def test_a_second_run_counts_the_layers_that_the_first_one_has_calibrated(begin, tmp_path):
    recipe = tmp_path / "r.toml"
    recipe.write_text('bits = 4\nmethod = "gptq"\ncalib = "bundled"\ncalib_tokens = 4096\n')
    words = ("run", "demo", "Once", "--recipe", recipe, *WORDS)
    first, _ = begin(*words, stop_in=(pipeline, "log_line"), times=4)  # three layers of six are in their files
    until(lambda: is_stopped(first))
    _, said = begin(*words)
    until(lambda: "%" in text_of(said))
    share = re.search(r"waiting +(\d+)%.*eta \?", text_of(said))  # no estimate before it has seen the other process work
    assert share, text_of(said)
    assert 25 < int(share[1]) < 75


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_second_run_takes_over_when_the_first_ends_early(begin, number):
    first, its = begin("run", "demo", "Once", *WORDS, stop_in=(output_folder.OutputFolder, "record"))
    until(lambda: is_stopped(first))
    _, said = begin("run", "demo", "Once", *WORDS)
    until(lambda: "waiting " in text_of(said))
    os.kill(first, number)
    os.kill(first, signal.SIGCONT)
    until(lambda: "exit code" in text_of(said))
    text = text_of(said)
    assert "exit code 0" in text
    assert "quantizing demo into the cache" in text
    assert not its.exists() or "exit code 0" not in text_of(its)


def test_ctrl_c_while_waiting_leaves_nothing_and_disturbs_nobody(begin, tmp_path):
    first, its = begin("run", "demo", "Once", *WORDS, stop_in=(output_folder.OutputFolder, "record"))
    until(lambda: is_stopped(first))
    files = lambda: sorted(p for p in tmp_path.rglob("*") if "output-" not in p.name)  # noqa: E731
    before = files()
    second, said = begin("run", "demo", "Once", *WORDS)
    until(lambda: "waiting " in text_of(said))
    os.kill(second, signal.SIGINT)
    until(lambda: "exit code" in text_of(said))
    assert text_of(said).splitlines()[-2:] == [f"lowq: interrupted; process {first} goes on writing", "exit code 130"]
    assert files() == before
    os.kill(first, signal.SIGCONT)
    until(lambda: "exit code 0" in text_of(its))


def test_a_second_import_of_a_file_waits_for_the_first(begin, demo_gguf):
    words = ("generate", demo_gguf, "--prompt", "Once", *WORDS)
    first, its = begin(*words, stop_in=(importer, "_imported"))
    until(lambda: is_stopped(first))
    _, said = begin(*words)
    until(lambda: "waiting for it" in text_of(said))
    os.kill(first, signal.SIGCONT)
    until(lambda: "exit code" in text_of(said) and "exit code" in text_of(its))
    assert "exit code 0" in text_of(said)
    assert f"process {first} is writing" in text_of(said)
    assert "importing" not in text_of(said)


def test_the_refusal_of_a_folder_in_use_names_its_process(tmp_path):
    mine = rf"is writing to {tmp_path} \(process {os.getpid()}\); wait"
    with folder.held(tmp_path), pytest.raises(folder.BusyError, match=mine) as refused:
        folder.held(tmp_path).__enter__()
    assert refused.value.held == tmp_path
    assert locks.holder(tmp_path) is None
    assert not locks.is_held(tmp_path)
    assert not locks.is_held(tmp_path / "missing")
