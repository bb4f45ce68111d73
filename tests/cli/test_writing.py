"""Writing never touches what lowq did not make, writes through no link, and says "already there" to a finished command."""

import json
import os
import shutil

import pytest

from lowq_cli import main
from lowq_cli.files.folder import new_folder
from lowq_cli.interop.exporter import export
from lowq_cli.run.pipeline import quantize
from lowq_packers.atomic import replacing, scratch, write_whole
from lowq_packers.errors import LowqError
from lowq_packers.scheme import Scheme

SYM = {"attention": Scheme(4, 32, "none"), "mlp": Scheme(8, 32, "none")}


def cli(*args):
    return main.main([*map(str, args)])


def tree(folder):
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


@pytest.mark.parametrize("to", ["compressed-tensors", "gguf"])
@pytest.mark.parametrize("what", ["file", "folder", "link"])
def test_an_export_leaves_everything_else_alone(demo4, tmp_path, to, what):
    mine = tmp_path / "mine"
    (mine / "deep").mkdir(parents=True)
    (mine / "deep" / "thesis.tex").write_text("years of work")
    for name in ("out.partial", f"out.{'0' * 12}.partial"):
        if what == "file":
            (tmp_path / name).write_text("mine")
        elif what == "link":
            (tmp_path / name).symlink_to(mine)
        else:
            shutil.copytree(mine, tmp_path / name)
    before = tree(tmp_path)
    export(demo4, to, tmp_path / "out")
    after = tree(tmp_path)
    assert before.items() <= after.items()
    assert {n.split("/")[0] for n in after.keys() - before.keys()} == {"out"}


@pytest.mark.parametrize("to", ["compressed-tensors", "gguf", "mlx"])
def test_an_export_that_is_there_is_not_made_again(demo4, tmp_path, to, capsys):
    out = tmp_path / f"out.{to}"
    line = ("export", demo4, "--to", to, "--out", out)
    assert cli(*line) == 0
    before = out.stat().st_mtime_ns
    capsys.readouterr()
    assert cli(*line) == 0
    assert "already there" in capsys.readouterr().err
    assert out.stat().st_mtime_ns == before
    other = "hqq" if to == "mlx" else "mlx"
    assert cli("export", demo4, "--to", other, "--out", out) == 2
    assert "is there already" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["lowq.log", "lowq-journal.jsonl", "lowq-journal.jsonl.partial", "config.json.partial", "model.safetensors.partial"]
)
@pytest.mark.parametrize("after_a_run", [False, True])
def test_no_link_is_written_through(family_checkpoints, tmp_path, name, after_a_run):
    source, out, victim = family_checkpoints("llama").dense, tmp_path / "out", tmp_path / "victim"
    victim.write_text("precious")
    if after_a_run:  # killed before its last file
        quantize(source, out, method="rtn")
        report = json.loads((out / "lowq_report.json").read_text())
        (out / "config.json").unlink()
        (out / "lowq.log").unlink()
        (out / "lowq-journal.jsonl").write_text(json.dumps({"run": report["run"], "files": report["files"]}) + "\n")
        (out / name).unlink(missing_ok=True)
    out.mkdir(exist_ok=True)
    (out / name).symlink_to(victim)
    try:
        quantize(source, out, method="rtn")
    except LowqError:
        assert not (out / "config.json").exists()
    assert victim.read_text() == "precious"


def test_layers_that_a_kill_left_go_with_the_next_call(family_checkpoints, tmp_path):
    source, out = family_checkpoints("llama").dense, tmp_path / "out"
    quantize(source, out, method="rtn")
    (staged := out / ("lowq-calibrated-" + "0" * 16)).mkdir()
    (staged / "layer-00000.safetensors").write_text("x")
    (out / "lowq-calibrated-mine").mkdir()
    assert quantize(source, out, method="rtn")["already_done"]
    assert not staged.exists()
    assert (out / "lowq-calibrated-mine").exists(), "lowq gives its folders another name"


def test_files_of_a_killed_write_are_removed_by_the_next(tmp_path):
    left, others = tmp_path / f".{'0' * 12}-a", tmp_path / f".{'0' * 12}-b"
    for path in (left, others):
        path.write_text("half")
    with replacing(tmp_path / "a") as made:
        made.write_text("one")
        write_whole(tmp_path / "a", b"two")  # another process's: it leaves ours alone
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"a": "one", others.name: "half"}


def test_verified_files_are_those_that_run(family_checkpoints, tmp_path, capsys):
    out = tmp_path / "out"
    source = shutil.copytree(family_checkpoints("llama").dense, tmp_path / "source")
    (source / "tokenizer_config.json").write_text("{}")
    quantize(source, out, method="rtn")
    assert cli("inspect", out, "--verify", "--json") == 0
    assert json.loads(capsys.readouterr().out)["without_hash"] == []
    for name, change in (
        ("config.json", lambda s: s.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05')),
        ("tokenizer_config.json", lambda s: '{"add_bos_token": true}'),
        ("tokenizer.json", lambda s: "{}"),  # which came later
    ):
        before = (out / name).read_text() if (out / name).exists() else None
        (out / name).write_text(change(before))
        assert (out / name).read_text() != before
        assert cli("inspect", out, "--verify") == 3, name
        assert name in capsys.readouterr().err
        os.unlink(out / name) if before is None else (out / name).write_text(before)
    report = json.loads((out / "lowq_report.json").read_text())
    lost = report["tensors"].pop()["name"]
    (out / "lowq_report.json").write_text(json.dumps(report))
    assert cli("inspect", out, "--verify") == 3
    assert f"{lost} has no checksum" in capsys.readouterr().err


def test_names_of_files_give_the_terminal_no_orders(tmp_path, capsys):
    import torch
    from safetensors.torch import save_file

    names = ["\x1b[31mred.weight", "\u202eleft.weight", "[/b][bold]x.weight", "\x07.weight", "\x9b2J.weight"]
    save_file({n: torch.zeros(2, 2) for n in names}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "\x1b]0;title\x07"}))
    assert cli("inspect", tmp_path, "--tensors") == 0
    output = "".join(capsys.readouterr())
    assert not set(output) & set("\x1b\u202e\x07\x9b")
    assert r"\x1b[31mred.weight" in output
    assert "[/b][bold]x.weight" in output
    assert cli("quantize", tmp_path, "--dry-run") != 1
    assert "\x1b" not in "".join(capsys.readouterr())


@pytest.mark.parametrize("at", range(4))
def test_a_folder_whose_removal_was_killed_is_removed_by_the_next_call(tmp_path, monkeypatch, at):
    """Found by the fuzzers: the owner's file was removed first, and then the folder was not recognised."""
    killed = new_folder(tmp_path / "out", "run")
    left = killed.__enter__()
    for name in ("a", "z", "model.safetensors"):
        (left / name).write_text("x")
    assert not killed.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert left.exists()
    calls, real = iter(range(99)), os.unlink

    def unlink(*args, **how):
        if next(calls) == at:
            raise KeyboardInterrupt
        real(*args, **how)

    monkeypatch.setattr(os, "unlink", unlink)
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "out", "another run"):
        pass
    monkeypatch.undo()
    with new_folder(tmp_path / "out", "another run") as folder:
        (folder / "whole").write_text("x")
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")] == ["out", "out/whole"]


def test_earlier_internal_errors_are_one_line(demo4, tmp_path, capsys):
    import torch
    from safetensors.torch import load_file, save_file

    (tmp_path / "p.jsonl").write_text("[" * 100_000 + "\n")
    assert cli("generate", "demo", "--prompts", tmp_path / "p.jsonl") not in (0, 1)
    spoilt = shutil.copytree(demo4, tmp_path / "m")
    (spoilt / "lowq_report.json").unlink()
    tensors = load_file(spoilt / "model.safetensors")
    name = next(n for n in tensors if n.endswith("weight_scale"))
    tensors[name] = torch.full_like(tensors[name], torch.nan)
    save_file(tensors, spoilt / "model.safetensors", metadata={"format": "pt"})
    for to in ("compressed-tensors", "gguf", "mlx", "gptq"):
        assert cli("export", spoilt, "--to", to, "--out", tmp_path / f"out.{to}") == 3
        assert "NaN" in capsys.readouterr().err
    from types import SimpleNamespace

    from lowq_cli.engine.prompts import stop_ids

    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=2.5))
    model.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(eos_token_id=None))
    with pytest.raises(LowqError, match=r"eos_token_id is 2\.5"):
        stop_ids(model, SimpleNamespace(eos_token_id=None))


def test_strict_says_all_that_is_odd(family_checkpoints, tmp_path, capsys):
    model = shutil.copytree(family_checkpoints("llama").dense, tmp_path / "m")
    assert cli("inspect", model, "--strict") == 0
    (model / "pytorch_model.bin").write_bytes(b"x")
    (model / "modeling.py").write_text("x")
    (model / "NOTICE").symlink_to("/etc/passwd")
    (model / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": "x.Y"}}')
    shutil.copy(model / "model.safetensors", model / "other.safetensors")
    os.mkfifo(model / "pipe")
    capsys.readouterr()
    assert cli("inspect", model, "--strict") == 3
    output = " ".join(capsys.readouterr().err.split())
    for name in ("pytorch_model.bin", "modeling.py", "NOTICE", "auto_map", "other.safetensors", "pipe is not a regular"):
        assert name in output, name
    assert "has 6 problems" in output
    quantize(family_checkpoints("llama").dense, tmp_path / "q", method="rtn")
    assert cli("inspect", tmp_path / "q", "--strict") == 0
    (tmp_path / "q" / "lowq_report.json").unlink()
    assert cli("inspect", tmp_path / "q", "--strict") == 3


def test_a_damaged_export_is_not_already_there(demo4, tmp_path):
    export(demo4, "gguf", tmp_path / "out.gguf")
    os.truncate(tmp_path / "out.gguf", 1_000_000)
    with pytest.raises(LowqError, match="is there already"):
        export(demo4, "gguf", tmp_path / "out.gguf")


def test_scratch_folders_of_killed_processes_go_with_the_next(tmp_path):
    dead, others = tmp_path / "work-0123456789ab", tmp_path / "work-mine"
    for folder in (dead, others):
        folder.mkdir()
        (folder / "x").write_text("x")
    (tmp_path / "work-ba9876543210").symlink_to(others)
    with scratch(tmp_path, "work") as first:
        (first / "a").write_text("a")
        with scratch(tmp_path, "work") as second:
            assert (first / "a").is_file()  # held by somebody who lives
            assert second.is_dir()
        assert not second.exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["work-ba9876543210", "work-mine"]
    assert (others / "x").is_file()
