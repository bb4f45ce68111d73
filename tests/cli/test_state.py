"""Homes that are odd: none at all, a spoilt note of the last checkpoint, a ~ that names nobody."""

from pathlib import Path

import pytest
import torch

from lowq_cli import state
from lowq_cli.engine import bandwidth
from lowq_cli.files.source import open_source
from lowq_cli.run.writer import writing
from lowq_packers.errors import NotFoundError, UsageError


@pytest.fixture
def homeless(monkeypatch):
    """A user whom the system knows no home of, as in a container that runs under a number."""

    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)


def test_no_home_is_said_in_one_line_with_the_way_out(homeless):
    with pytest.raises(NotFoundError, match="XDG_CACHE_HOME=DIR"):
        state.cache_dir()
    with pytest.raises(NotFoundError, match="XDG_STATE_HOME=DIR"):
        state.checkpoint_or_last(None)


def test_a_finished_run_is_no_failure_for_want_of_a_home(homeless, tmp_path, capsys):
    state.remember(tmp_path)
    assert "could not remember" in capsys.readouterr().err


def test_bandwidth_is_measured_without_a_home(homeless, monkeypatch):
    monkeypatch.setattr(bandwidth, "measure", lambda device: 5e9)
    assert bandwidth.measured(torch.device("cpu")) == 5e9


@pytest.mark.parametrize("content", ["{", "[]", "0", "fast", "-1", "NaN"])
def test_a_spoilt_bandwidth_is_measured_again(content, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(bandwidth, "measure", lambda device: 5e9)
    monkeypatch.setattr(bandwidth, "_name", lambda device: "here")
    state.cache_dir().mkdir()
    whole = content if content in ("{", "[]") else f'{{"here": {content}}}'
    (state.cache_dir() / bandwidth.FILE).write_text(whole)
    assert bandwidth.measured(torch.device("cpu")) == 5e9


def test_a_refused_write_names_out_where_there_is_no_home(homeless, tmp_path):
    with pytest.raises(UsageError, match="use another --out"), writing(tmp_path):
        raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize("content", ['{"checkpoint": 7}', '{"checkpoint": null}', "[]", "{", ""])
def test_a_spoilt_note_counts_as_none(content, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    state.state_dir().mkdir()
    (state.state_dir() / state.LAST).write_text(content)
    with pytest.raises(NotFoundError, match="none written yet"):
        state.checkpoint_or_last(None)


def test_a_tilde_that_names_nobody_is_a_folder_that_is_not_there():
    with pytest.raises(NotFoundError, match="no folder ~nobody-of-this-name/model"):
        open_source("~nobody-of-this-name/model")
