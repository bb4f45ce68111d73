"""Killed, interrupted or out of disk at any instant: nothing half-written looks whole, and the rerun's bytes are the same."""

import contextlib
import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import forking
import pytest
import torch
from folders import files

from lowq_cli.files.checkpoint import open_checkpoint
from lowq_cli.files.folder import held, new_folder
from lowq_cli.files.safetensors_io import read_header
from lowq_cli.files.source import JOURNAL
from lowq_cli.plan.recipe import make_recipe
from lowq_cli.run import output_folder
from lowq_cli.run.pipeline import Finished, TensorDone, quantize, run
from lowq_packers.errors import DamagedError, DoesNotFitError, LowqError, NotFoundError, UsageError

RECIPE = make_recipe(method="rtn")
SHARD = 500_000  # demo becomes a dozen files
WRITES = ("pwrite", "write", "replace", "fsync", "posix_fallocate", "unlink")
KILLS = 20


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """The files of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed") / "out"
    list(run("demo", RECIPE, folder, shard_size=SHARD))
    return files(folder)


def count_calls(act):
    """Wrap each call by which a run changes the disk: act(number, name, call, args) runs in its place. Returns the undo."""
    saved = {name: getattr(os, name) for name in WRITES}
    number = iter(range(1 << 30))

    def wrap(name):
        return lambda *args, **kw: act(next(number), name, saved[name], args)

    for name in WRITES:
        setattr(os, name, wrap(name))
    return lambda: [setattr(os, name, call) for name, call in saved.items()]


def run_and_die(folder, at):
    """Run in a child process that kills itself (SIGKILL) in the middle of its `at`-th change of the disk. True if it died."""

    def act(number, name, call, args):
        if number != at:
            return call(*args)
        if name == "pwrite":
            call(args[0], memoryview(args[1])[: len(args[1]) // 2], *args[2:])
        if name == "write":
            call(args[0], args[1][: len(args[1]) // 2])
        if at % 2 and name not in ("pwrite", "write"):
            with contextlib.suppress(OSError):  # what was to be removed may not be there
                call(*args)
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    def work():
        torch.set_num_threads(1)
        count_calls(act)
        list(run("demo", RECIPE, folder, shard_size=SHARD))

    pid = forking.fork(work)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def assert_not_whole(folder):
    """No config.json, no loadable checkpoint, and every file with a final name is itself whole."""
    assert not (folder / "config.json").exists()
    with pytest.raises(NotFoundError):
        open_checkpoint(folder)
    for path in folder.glob("*.safetensors"):
        read_header(path)


def whole_or_not(folder):
    """A run that went on may be killed behind its last file, too, when all is there."""
    if (folder / "config.json").exists():
        open_checkpoint(folder)
    else:
        assert_not_whole(folder)


@pytest.fixture(scope="session")
def number_of_calls(tmp_path_factory):
    """How often a whole run changes the disk."""
    seen, folder = [0], tmp_path_factory.mktemp("counted") / "out"

    def act(number, name, call, args):
        seen[0] = number + 1
        return call(*args)

    undo = count_calls(act)
    try:
        list(run("demo", RECIPE, folder, shard_size=SHARD))
    finally:
        undo()
    return seen[0]


def test_kill_9_at_20_random_instants(tmp_path, undisturbed, number_of_calls):
    rng = random.Random(2)
    assert number_of_calls > 200
    died = chain = 0
    while died < KILLS:  # chains of kills: a later one hits a run that continues an earlier one
        folder, chain = tmp_path / f"out{chain}", chain + 1
        while died < KILLS and run_and_die(folder, rng.randrange(number_of_calls // 4)):
            died += 1
            whole_or_not(folder)
        *_, finished = run("demo", RECIPE, folder, shard_size=SHARD)
        assert isinstance(finished, Finished)
        assert files(folder) == undisturbed
    assert chain > 1


@pytest.mark.parametrize("back", [1, 2, 3, 4, 5, 6, 7])
def test_killed_during_the_last_steps(tmp_path, undisturbed, number_of_calls, back):
    folder = tmp_path / "out"
    assert run_and_die(folder, number_of_calls - back)
    whole_or_not(folder)
    list(run("demo", RECIPE, folder, shard_size=SHARD))
    assert files(folder) == undisturbed


@pytest.mark.parametrize("seed", range(3))
def test_a_full_disk_is_one_error_and_the_rerun_continues(tmp_path, undisturbed, number_of_calls, seed):
    folder = tmp_path / "out"
    at = random.Random(seed).randrange(10, number_of_calls - 10)

    def act(number, name, call, args):
        if number >= at and name in ("pwrite", "write", "posix_fallocate", "fsync"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return call(*args)

    undo = count_calls(act)
    try:
        with pytest.raises(DoesNotFitError, match=r"the disk is full .* run the same command again"):
            list(run("demo", RECIPE, folder, shard_size=SHARD))
    finally:
        undo()
    assert_not_whole(folder)
    resumed = [e.resumed for e in run("demo", RECIPE, folder, shard_size=SHARD) if isinstance(e, TensorDone)]
    assert files(folder) == undisturbed
    assert resumed == sorted(resumed, reverse=True)


def test_a_file_size_limit_reads_as_a_full_disk(tmp_path):
    def work():
        torch.set_num_threads(1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
        with pytest.raises(DoesNotFitError):
            list(run("demo", RECIPE, tmp_path / "out"))

    assert os.waitstatus_to_exitcode(os.waitpid(forking.fork(work), 0)[1]) == 0
    assert not (tmp_path / "out" / "config.json").exists()


def interrupt_after(tensors, events):
    """Press Ctrl-C after this number of tensors."""
    for event in events:
        tensors -= isinstance(event, TensorDone)
        if tensors == 0:
            os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_stops_at_once_and_the_rerun_continues(tmp_path, undisturbed):
    folder = tmp_path / "out"
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupt_after(20, run("demo", RECIPE, folder, shard_size=SHARD))
    finally:
        signal.signal(signal.SIGINT, before)
    assert_not_whole(folder)
    done = [e for e in run("demo", RECIPE, folder, shard_size=SHARD) if isinstance(e, TensorDone)]
    assert sum(e.resumed for e in done) == 20
    assert files(folder) == undisturbed


def signalled(command, environment, journal, number):
    """Exit code of the command, sent a signal once it has journalled two more tensors."""
    lines = lambda: journal.read_bytes().count(b"\n") if journal.exists() else 0  # noqa: E731
    enough = lines() + 3
    heed = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731  a shell's background jobs start deaf to it
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, env=environment, preexec_fn=heed, **quiet)
    while process.poll() is None and lines() < enough:
        time.sleep(0.001)
    process.send_signal(number)
    return process.wait(60)


@pytest.mark.slow
def test_the_command_exits_with_130_on_ctrl_c_and_survives_kill_9(tmp_path, undisturbed):
    lowq = Path(sys.executable).with_name("lowq")
    command = [lowq, "quantize", "demo", "--method", "rtn", "--shard-size", str(SHARD), "--out", tmp_path / "out"]
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    out = tmp_path / "out"
    for number, code in ((signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)):
        for _ in range(10):  # a run may end before the signal reaches it: on a busy machine this test sleeps too long
            returned = signalled(command, environment, out / JOURNAL, number)
            if returned != 0:
                break
            shutil.rmtree(out)
        assert returned == code
        assert_not_whole(out)
    subprocess.run(command, env=environment, check=True, capture_output=True)
    assert files(tmp_path / "out") == undisturbed


def test_an_interrupt_inside_the_run_is_logged_and_passed_on(tmp_path):
    events = run("demo", RECIPE, tmp_path / "out")
    next(events)
    with pytest.raises(KeyboardInterrupt):
        events.throw(KeyboardInterrupt)
    assert "stopped by KeyboardInterrupt" in (tmp_path / "out" / "lowq.log").read_text()


@pytest.fixture
def half(tmp_path):
    """A run stopped after 30 tensors."""
    events = run("demo", RECIPE, tmp_path / "out", shard_size=SHARD)
    sum(1 for _ in zip(range(40), events, strict=False))
    events.close()
    return tmp_path / "out"


def resumed_count(folder):
    return sum(e.resumed for e in run("demo", RECIPE, folder, shard_size=SHARD) if isinstance(e, TensorDone))


def test_bytes_lost_after_their_journal_line_are_written_again(half, undisturbed):
    partial = sorted(half.glob("*.safetensors.partial"))[0]  # workers have begun the files behind it
    content = bytearray(partial.read_bytes())
    content[len(content) // 3] ^= 1
    partial.write_bytes(content)
    resumed_count(half)
    assert files(half) == undisturbed


@pytest.mark.parametrize(
    "how", ["torn line", "no partial", "short partial", "no journal line", "final truncated", "final gone"]
)
def test_a_damaged_folder_heals(half, undisturbed, how):
    partial = sorted(half.glob("*.safetensors.partial"))[0]  # workers have begun the files behind it
    journal, final = half / JOURNAL, sorted(half.glob("*.safetensors"))[0]
    if how == "torn line":
        journal.write_bytes(journal.read_bytes()[:-9])
    elif how == "no partial":
        partial.unlink()
    elif how == "short partial":
        os.truncate(partial, 1000)
    elif how == "no journal line":
        lines = journal.read_bytes().splitlines(keepends=True)
        journal.write_bytes(b"".join(lines[:5]))
    elif how == "final truncated":
        os.truncate(final, final.stat().st_size - 1)
    else:
        final.unlink()
    resumed_count(half)
    assert files(half) == undisturbed


def test_a_finished_run_is_recognised_and_its_loss_too(tmp_path, undisturbed):
    folder = tmp_path / "out"
    list(run("demo", RECIPE, folder, shard_size=SHARD))
    stamps = {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}
    events = list(run("demo", RECIPE, folder, shard_size=SHARD))
    assert not any(isinstance(e, TensorDone) for e in events)
    assert events[-1].result.already_done
    assert {p.name: p.stat().st_mtime_ns for p in folder.iterdir()} == stamps
    next(folder.glob("*.safetensors")).unlink()
    with pytest.raises(DamagedError, match="run again with --fresh"):
        list(run("demo", RECIPE, folder, shard_size=SHARD))
    list(run("demo", RECIPE, folder, shard_size=SHARD, fresh=True))
    assert files(folder) == undisturbed


def test_files_of_another_recipe_or_tool_are_not_changed(half, tmp_path, undisturbed):
    before = files(half)
    with pytest.raises(UsageError, match="holds another lowq run; use --fresh or another --out"):
        quantize("demo", half, bits=8)
    assert files(half) == before
    (half / "notes.txt").write_text("mine")
    (half / "lowq_tune.json").write_text("{}")  # another command's, about the weights that go
    quantize("demo", half, method="rtn", shard_size=SHARD, fresh=True)
    assert (half / "notes.txt").read_text() == "mine"
    assert {n: b for n, b in files(half).items() if n != "notes.txt"} == undisturbed
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    for fresh in (False, True):
        with pytest.raises(UsageError, match=r"files that lowq did not write, such as thesis\.txt"):
            quantize("demo", other, fresh=fresh)
    assert [p.name for p in other.iterdir()] == ["thesis.txt"]


def test_fresh_stays_inside_its_folder(half, tmp_path):
    (tmp_path / "precious").write_text("mine")
    lines = (half / JOURNAL).read_bytes().splitlines(keepends=True)
    header = json.loads(lines[0])
    header["files"].append("../precious")
    (half / JOURNAL).write_bytes(json.dumps(header).encode() + b"\n" + b"".join(lines[1:]))
    quantize("demo", half, bits=8, method="rtn", fresh=True)
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.parametrize("place", ["files", "cache"])
def test_two_processes_do_not_write_into_one_folder(tmp_path, monkeypatch, place):
    """--out moves only what is not in the cache: `run` has no such option, and `refine` keeps its layers there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    out = tmp_path / place / "lowq" / "out"
    out.mkdir(parents=True)
    with held(out), pytest.raises(UsageError, match="another lowq is writing") as of_run:
        quantize("demo", out)
    assert list(out.iterdir()) == []
    with new_folder(new := out.with_name("new"), "run") as folder:
        with pytest.raises(UsageError, match="another lowq is writing") as of_new:
            new_folder(new, "run").__enter__()
        folder.joinpath("file").touch()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 0))
    with pytest.raises(DoesNotFitError, match="make room") as of_disk:
        quantize("demo", out)
    assert ["--out" in str(e.value) for e in (of_run, of_new, of_disk)] == [place == "files"] * 3


def test_a_folder_that_cannot_be_written_is_one_error(tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UsageError, match=r"cannot write to .*; use another --out"):
            quantize("demo", out)


def test_a_broken_log_does_not_hide_the_reason(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / output_folder.LOG).mkdir()
    with pytest.raises(LowqError, match=r"lowq\.log"):
        quantize("demo", tmp_path / "out")
