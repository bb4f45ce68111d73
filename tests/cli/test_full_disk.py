"""A disk that fills up (here: a limit on the size of a file) ends a command in one line, and leaves nothing half-written."""

import json
import re
import resource
from contextlib import contextmanager

import pytest

from lowq_cli import drawing, main
from lowq_kernels.dispatch import tuning, tuning_file
from lowq_packers.errors import DoesNotFitError, UsageError


@contextmanager
def files_of_at_most(limit):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def run(capsys):
    """lowq with these arguments in this process, on a nearly full disk: its exit code and its output."""

    def run(*args, limit=1000):
        with files_of_at_most(limit):
            code = main.main([*map(str, args)])
        return code, capsys.readouterr().err

    return run


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    from lowq_cli.run.pipeline import quantize

    folder = tmp_path_factory.mktemp("full") / "packed"
    quantize("demo", folder, bits=4, group=32, method="rtn", device="cpu")
    return folder


def test_tune_leaves_the_table_that_was_there(run, packed):
    before = b'{"format": 1, "machines": []}'
    (packed / tuning_file.FILE).write_bytes(before)
    files = sorted(p.name for p in packed.iterdir())
    code, output = run("tune", packed, "--batch", "1", "--device", "cpu")
    tuning.forget()
    assert code == 4
    assert re.search(rf"lowq: the disk is full \(\S+/{tuning_file.FILE}\)", output)  # the trial's, which comes first
    assert (packed / tuning_file.FILE).read_bytes() == before
    assert sorted(p.name for p in packed.iterdir()) == files


def test_a_timeline_is_whole_or_not_there(run, tmp_path):
    code, output = run(
        "generate", "demo", "--device", "cpu", "--prompt", "x", "--max-new-tokens", "4", "--profile", tmp_path / "t.json"
    )
    assert code == 2
    assert "cannot be written: is the disk full?" in output
    assert "timeline:" not in output
    assert not list(tmp_path.iterdir())


def test_a_plot_is_whole_or_not_there(tmp_path):
    pytest.importorskip("matplotlib", reason="--plot needs matplotlib")
    for name in ("plot.png", "plot.svg"):
        with files_of_at_most(100), pytest.raises(DoesNotFitError, match=f"the disk is full .*{name}"):
            drawing.save(drawing.figure(2, 2), tmp_path / name)
        assert not list(tmp_path.iterdir())
        drawing.save(drawing.figure(2, 2), tmp_path / name)
        (tmp_path / name).unlink()


def test_fp8_is_continued_like_any_other(run, tmp_path):
    command = ("quantize", "demo", "--format", "fp8", "--out", tmp_path / "out")
    code, output = run(*command, limit=2_000_000)
    assert code == 4
    assert output.endswith("make room and run the same command again\n")
    assert not (tmp_path / "out" / "config.json").exists()
    assert run(*command, limit=resource.RLIM_INFINITY)[0] == 0
    assert (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize(
    "command",
    ["bench --shape 256x256", "compare demo demo", "quantize demo --bpw 4 --dry-run"],
    ids=lambda c: c.split()[0],
)
def test_a_plot_that_cannot_be_drawn_is_reported_before_the_work(command, tmp_path, capsys):
    """The work would have a result on stdout."""
    pytest.importorskip("matplotlib", reason="--plot needs matplotlib")
    for path, why in ((tmp_path / "x.xyz", "use .png, .svg or .pdf"), (tmp_path / "no" / "x.png", "there is no folder")):
        assert main.main([*command.split(), "--plot", str(path)]) == 2
        out, err = capsys.readouterr()
        assert why in err
        assert out == ""


def test_a_plot_that_the_system_refuses_is_one_line(tmp_path):
    pytest.importorskip("matplotlib", reason="--plot needs matplotlib")
    (tmp_path / "p.png").mkdir()
    with pytest.raises(UsageError, match=r"p\.png cannot be written: Is a directory"):
        drawing.save(drawing.figure(1, 1), tmp_path / "p.png")


@pytest.mark.parametrize(
    "command", ["bench --shape 256x256 --batch 1 --device cpu", "compare demo demo --max-tokens 64 --new-tokens 2"]
)
def test_measurements_are_printed_before_a_plot_fails(command, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="--plot needs matplotlib")
    for more in ([], ["--json"]):
        with files_of_at_most(100):
            assert main.main([*command.split(), "--plot", str(tmp_path / "p.png"), *more]) == 4
        out, err = capsys.readouterr()
        assert re.search(r"lowq: the disk is full \(.*p\.png", err.splitlines()[-1])
        assert json.loads(out)["rows"] if more else "tokens/s" in out or "roofline" in out


def test_the_report_of_a_table_that_could_be_written(run, packed, capsys):
    """The tests above fail because of the limit: without it the same command writes."""
    code, output = run("tune", packed, "--batch", "1", "--device", "cpu", limit=10_000_000)
    tuning.forget()
    assert code == 0, output
    assert json.loads((packed / tuning_file.FILE).read_text())["machines"]
