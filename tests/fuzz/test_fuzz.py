"""A few rounds of `python -m tests.fuzz`, and every input in which it ever found a fault."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
import judge as judging
import kills
from campaign import FOUND, Ground
from valid import weights

from lowq_kernels.products.cpu import native

BENDS, KILLS = 120, 16  # half of the bends are accepted


@pytest.fixture(scope="module")
def ground(tmp_path_factory):
    before = {name: os.environ.get(name) for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME")}
    native.library()  # compiled once for this user: a draft head's model is read with it
    yield Ground(tmp_path_factory.mktemp("fuzz") / "ground", slow=False)
    for name, value in before.items():
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})
    tempfile.tempdir = None


def test_a_bent_file_is_refused_in_a_line_or_read_as_its_own_reader_reads_it(ground):
    accepted = 0
    for seed in range(BENDS):
        name, what, verdict = ground.bends(seed)
        assert not verdict.fault, f"seed {seed}, {name}: {what}"
        accepted += verdict.accepted
    assert 0 < accepted < BENDS


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 1000), marks=pytest.mark.more)], ids=["few", "many"])
def test_an_altered_file_next_to_weights_is_named_in_a_line_or_changes_nothing_unseen(ground, seeds):
    accepted = 0
    for seed in seeds:
        file, what, verdict = ground.companions(seed)
        assert not verdict.fault, f"seed {seed}, {file}: {what}"
        accepted += verdict.accepted
    assert 0 < accepted < len(seeds)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(which=st.integers(0, 999), draws=st.randoms(use_true_random=False))
def test_files_altered_by_hypothesis_are_refused_or_read(ground, which, draws):
    """As above, through hypothesis, which shrinks an input that fails."""
    every = (*ground.valid, *ground.second.values())
    valid = every[which % len(every)]
    what, model = ground.bend(valid, draws)
    verdict = judging.judge(valid, model)
    assert not verdict.fault, f"{valid.format}: {what}"


@pytest.mark.parametrize(("seed", "name", "second"), json.loads(FOUND.read_text()) if FOUND.is_file() else [])
def test_earlier_findings_stay_fixed(ground, seed, name, second):
    _, what, verdict = ground.bends(seed, only=name, second=second)
    assert not verdict.fault, what


def test_a_fault_is_seen(ground):
    """The judge sees an internal error, other weights, and slow reads."""
    valid = next(v for v in ground.valid if v.format == "gptq")

    def fault(read, **bounds):
        return judging.judge(valid, valid.model, read, **bounds).fault

    def busy(model):
        began = time.process_time()
        while time.process_time() - began < 0.3:
            pass
        return {}

    assert judging.judge(valid, valid.model) == judging.Verdict(True, "", pytest.approx(0, abs=5))
    assert "has other weights" in fault(lambda model: {n: t + 1 for n, t in weights(model).items()})
    assert "internal error: KeyError" in fault(lambda model: {}["x"])
    assert fault(busy, seconds=0.2).startswith("took ")
    assert "Hang: not done after" in fault(busy, hangs=0.1)


def test_a_stopped_command_leaves_the_same_bytes_and_nothing_else(ground):
    for seed in range(KILLS):
        name, how, output = ground.kills(seed)
        assert not output, f"seed {seed}: {name}, {how}: {output}"
    expected, _ = ground.prepared(next(c for c in ground.all_commands() if c.name == "one file"))
    assert kills.differences(expected, {**expected, ".x": b""}, "it") == "it: left .x"
    assert kills.differences(expected, {}, "it").startswith("it: lost")


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.more)])
@pytest.mark.parametrize("name", ["draft train", "draft train, one save", "batch"])
def test_a_command_killed_before_its_nth_call_of_the_system_goes_on(name, step, ground):
    """Heads had been refused after a kill before the first saved state, and the state stayed after one behind the notes."""
    command = next(c for c in ground.all_commands() if c.name == name)
    expected, calls = ground.prepared(command)
    for at in range((calls - 1) % step, calls, step):  # the last one always
        assert not kills.tried(command, ground.out, expected, [at], "kill")


def test_a_head_is_not_written_over_or_finished_with_another_models_state(ground):
    for seed in (1, 3, 4):
        _, output = kills.source_changed(ground.paths, ground.folder / "text.txt", ground.out, Random(seed), "draft train")
        assert not output, seed


def test_it_runs_as_a_module(tmp_path):
    """Although the checkout holds a folder `kernels`, which transformers would take for another package."""
    root = Path(__file__).parents[2]
    numbers = ["--minutes", "60", "--bends", "5", "--kills", "0"]
    line = [sys.executable, "-m", "tests.fuzz", *numbers, "--out", str(tmp_path / "long.json")]
    subprocess.run(line, cwd=root, check=True, capture_output=True)
    assert sum(row["bent"] for row in json.loads((tmp_path / "long.json").read_text())["bends"].values()) == 5


@pytest.mark.parametrize(("folder", "first"), [("fuzz", "campaign"), ("folders", "published")])
def test_a_checkout_tests_its_own_sources(folder, first, tmp_path):
    """In a git worktree, the packages that are installed are another checkout's, and were tested instead of the worktree's."""
    root = Path(__file__).parents[2]
    for name in (f"{folder}/__main__.py", "fuzz/own_tree.py"):
        (tmp_path / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / "tests" / name, tmp_path / "tests" / name)
    for package in ("lowq_cli", "kernels", "packers"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "lowq_cli" / "hf.py").write_text("leave_out = int")
    (tmp_path / "lowq.py").touch()
    names = "lowq, lowq_cli, lowq_kernels, lowq_packers"
    shown = f"import os, {names}; print(*(os.path.realpath(m.__file__) for m in ({names})), flush=True)"
    both = f"{shown}\nimport subprocess, sys\nsubprocess.run([sys.executable, '-P', '-c', {shown!r}])\nsys.exit()"
    (tmp_path / "tests" / folder / f"{first}.py").write_text(both)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-m", f"tests.{folder}"], cwd=tmp_path, env=env, capture_output=True, text=True)
    places = [Path(p) for p in done.stdout.split()]
    assert len(places) == 8, done.stderr
    assert all(p.is_relative_to(tmp_path) for p in places), places


@pytest.mark.parametrize("own", [False, True], ids=["a given text", "its own"])
def test_the_sizes_that_a_campaign_makes_small_exist(own):
    """Those of own texts had moved to another file, and a campaign's command with one ended in an AttributeError."""
    with kills.small(own):
        pass
