"""Unusual homes: none, a damaged record of the last checkpoint, a ~ of an unknown user."""

import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import forking
import pytest
import torch

from lowq_cli import state
from lowq_cli.engine import bandwidth
from lowq_cli.files.source import open_source
from lowq_cli.run.output_folder import writing
from lowq_packers import home
from lowq_packers.errors import NotFoundError, UsageError


@pytest.mark.parametrize("how", ["here", "process", "fork"])
def test_tests_write_into_temporary_folders_and_not_into_the_users_own(how):
    code = "from lowq_packers import home; print(home.cache_dir(), home.state_dir(), sep='\\n')"
    if how == "here":
        folders = [str(home.cache_dir()), str(home.state_dir())]
    elif how == "process":
        folders = subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()
    else:
        folders = forking.script(code).stdout.splitlines()
    for folder in folders:
        assert Path(folder).is_relative_to(tempfile.gettempdir()), folder
        assert "/lowq-tests-" in folder
    assert len(folders) == 2


@pytest.fixture
def homeless(monkeypatch):
    """A user whom the system knows no home of, as in a container that runs under a number."""

    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)


def test_a_missing_home_is_reported_in_one_line_with_the_way_out(homeless):
    with pytest.raises(NotFoundError, match="XDG_CACHE_HOME=DIR"):
        home.cache_dir()
    with pytest.raises(NotFoundError, match="XDG_STATE_HOME=DIR"):
        state.checkpoint_or_last(None)


def test_a_run_without_a_home_folder_only_warns(homeless, tmp_path, capsys):
    state.remember(tmp_path)
    assert "could not remember" in capsys.readouterr().err


def test_bandwidth_is_measured_without_a_home(homeless):
    assert bandwidth.measured(torch.device("cpu")) > 0


@pytest.mark.parametrize("content", ["{", "[]", "0", "fast", "-1", "NaN"])
def test_a_spoilt_bandwidth_is_measured_again(content, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = bandwidth.measured(torch.device("cpu"))
    file = home.cache_dir() / bandwidth.FILE
    assert bandwidth.measured(torch.device("cpu")) == first, "it is measured once"
    (name,) = json.loads(file.read_text())
    file.write_text(content if content in ("{", "[]") else f'{{"{name}": {content}}}')
    again = bandwidth.measured(torch.device("cpu"))
    assert again > 0
    assert json.loads(file.read_text()) == {name: again}


def test_a_refused_write_names_out_where_there_is_no_home(homeless, tmp_path):
    with pytest.raises(UsageError, match="use another --out"), writing(tmp_path):
        raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize("content", ['{"checkpoint": 7}', '{"known": [{"checkpoint": null}]}', "[]", "{", "", "\xff"])
def test_a_damaged_record_is_reported_and_ignored(content, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    home.state_dir().mkdir(exist_ok=True)
    (home.state_dir() / state.LAST).write_bytes(content.encode("latin-1"))
    with pytest.raises(NotFoundError, match="run: lowq quantize demo"):
        state.checkpoint_or_last(None)
    output = capsys.readouterr().err
    assert output.startswith(f"the list of checkpoints in {home.state_dir() / state.LAST} cannot be read")
    assert output.count("\n") == 1
    (tmp_path / "new").mkdir()
    state.remember(tmp_path / "new")
    capsys.readouterr()
    assert state.checkpoint_or_last(None) == str(tmp_path / "new")
    assert capsys.readouterr().err == f"using {tmp_path / 'new'}\n"


def test_records_of_concurrent_processes_are_all_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    children = []
    for i in range(6):
        (tmp_path / str(i)).mkdir()
        children.append(forking.fork(partial(state.remember, tmp_path / str(i))))
    for pid in children:
        os.waitpid(pid, 0)
    assert sorted(k.checkpoint.name for k in state.known()) == list("012345")


def test_a_tilde_of_an_unknown_user_is_a_missing_folder():
    with pytest.raises(NotFoundError, match="no folder ~nobody-of-this-name/model"):
        open_source("~nobody-of-this-name/model")


@pytest.fixture
def written(tmp_path, monkeypatch):
    """A function: have a checkpoint of this name written from a working folder of that name."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def write(name, where):
        for folder in (tmp_path / name, tmp_path / where):
            folder.mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / where)
        state.remember(tmp_path / name)
        return str(tmp_path / name)

    return write


def test_the_last_checkpoint_is_the_last_of_this_working_folder(written, tmp_path, monkeypatch, capsys):
    mine = written("mine", "here")
    theirs = written("theirs", "there")
    assert state.checkpoint_or_last(None) == theirs
    monkeypatch.chdir(tmp_path / "here")
    assert state.checkpoint_or_last(None) == mine
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert state.checkpoint_or_last(None) == theirs
    assert capsys.readouterr().err == f"using {theirs} (written from {tmp_path / 'there'}; none was from here)\n"


def test_a_checkpoint_that_is_gone_gives_way_to_the_one_before(written, tmp_path):
    older = written("older", "here")
    Path(written("newer", "here")).rmdir()
    assert state.checkpoint_or_last(None) == older
    again = written("older", "here")
    assert [str(k.checkpoint) for k in state.known()] == [again]
