"""What deploy/ says to systemd and Docker holds for the commands that there are."""

import configparser
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lowq_cli.serving.catalog import read_config

DEPLOY = Path(__file__).parents[1] / "deploy"
LOWQ = Path(sys.executable).with_name("lowq")


def unit():
    result = configparser.ConfigParser(interpolation=None, strict=False)
    result.optionxform = str
    result.read(DEPLOY / "lowq.service")
    return result


def entry_point():
    line = re.search(r"^ENTRYPOINT (\[.*\])$", (DEPLOY / "Dockerfile").read_text(), re.M)[1]
    return [w.strip('" ') for w in line.strip("[]").split(",")]


@pytest.mark.parametrize("words", [shlex.split(unit()["Service"]["ExecStart"]), entry_point()], ids=["systemd", "docker"])
def test_the_command_line_is_one_that_serve_takes(words):
    known = subprocess.run([LOWQ, "serve", "--help"], capture_output=True, text=True, check=True).stdout
    assert Path(words[0]).name == "lowq"
    assert words[1] == "serve"
    flags = [w for w in words if w.startswith("--")]
    assert flags
    assert all(re.search(rf"{flag}\b", known) for flag in flags)


def test_the_example_of_models_can_be_read_and_so_can_the_lines_in_its_comments(tmp_path):
    text = (DEPLOY / "models.toml").read_text()
    assert read_config(DEPLOY / "models.toml").folders == ["/var/lib/lowq/models"]
    (tmp_path / "m.toml").write_text(re.sub(r"^# (?=[\w\[])(?!What)", "", text, flags=re.M))
    result = read_config(tmp_path / "m.toml")
    assert result.default == "small"
    assert result.models["small"].pin
    assert result.memory == 40 * 10**9


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_takes_the_unit(tmp_path):
    text = (DEPLOY / "lowq.service").read_text().replace("/opt/lowq/bin/lowq", str(LOWQ))
    (tmp_path / "lowq.service").write_text(text)
    done = subprocess.run(["systemd-analyze", "verify", tmp_path / "lowq.service"], capture_output=True, text=True)
    assert "Unknown" not in done.stderr, done.stderr
