"""lowq export, interrupted: the next call goes on behind the last whole file and leaves the bytes of an uninterrupted one."""

import json
import os
from pathlib import Path

import forking
import pytest

from lowq_cli import main
from lowq_cli.interop.exporter import export
from lowq_cli.interop.foreign import open_foreign
from lowq_cli.plan.recipe import make_recipe
from lowq_cli.run import pipeline
from lowq_packers.errors import UsageError
from lowq_packers.scheme import Scheme

SCHEMES = {"attention": Scheme(4, 32, "none"), "mlp": Scheme(8, 32, "none")}
SMALL_FILES = 12_000  # bytes of a shard, so that an export has many


def killed(*words):
    """The exit code of a process that exports and is killed: see `forking.export_until`."""
    process = forking.begin(forking.export_until, *words)
    process.join(forking.SECONDS)
    return process.exitcode


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_a_killed_export_goes_on_and_leaves_the_same_files(family_checkpoints, tmp_path):
    made, out = family_checkpoints("llama", "bfloat16", SCHEMES), tmp_path / "out"
    export(made.packed, "compressed-tensors", tmp_path / "whole", file_bytes=SMALL_FILES)
    assert len(list((tmp_path / "whole").glob("*.safetensors"))) > 3
    for at in (2, 6, 9):
        assert killed(made.packed, "compressed-tensors", out, SMALL_FILES, at) == -9
        assert not out.exists()
    parts = {p.stat().st_ino for p in tmp_path.glob("out.*.partial/part-*.safetensors")}
    assert len(parts) > 1
    export(made.packed, "compressed-tensors", out, file_bytes=SMALL_FILES)
    assert parts < {p.stat().st_ino for p in out.iterdir()}, "files that were written are renamed, not written again"
    assert contents(out) == contents(tmp_path / "whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "whole"]


def test_another_exports_files_are_not_continued(family_checkpoints, tmp_path):
    folders = family_checkpoints("llama", "bfloat16", SCHEMES)

    def stop(percent, name):
        if percent > 50:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(folders.packed, "compressed-tensors", tmp_path / "out", progress=stop, file_bytes=SMALL_FILES)
    (left,) = tmp_path.glob("out.*.partial")
    assert list(left.glob("part-*"))
    export(folders.packed, "gptq", tmp_path / "out")
    with open_foreign(tmp_path / "out") as source:
        assert source.config["quantization_config"]["quant_method"] == "gptq"
        assert not any(n.endswith("weight_packed") for n in source.headers)
    assert not left.exists()


def test_one_process_at_a_time(family_checkpoints, tmp_path):
    folders = family_checkpoints("llama", "bfloat16", SCHEMES)

    def second(percent, name):
        with pytest.raises(UsageError, match="another lowq is writing"):
            export(folders.packed, "compressed-tensors", tmp_path / "out")

    export(folders.packed, "compressed-tensors", tmp_path / "out", progress=second)
    assert (tmp_path / "out" / "config.json").is_file()


def test_a_killed_gguf_goes_on_and_leaves_the_same_file(tmp_path):
    pipeline.quantize("demo", tmp_path / "m", bits=4, group=32, method="rtn", zero="none", dtype="float16", device="cpu")
    export(tmp_path / "m", "gguf", tmp_path / "all" / "out.gguf")
    out, small = tmp_path / "out.gguf", 1 << 20
    for at in (5, 20, 30):
        assert killed(tmp_path / "m", "gguf", out, small, at) == -9
        assert not out.exists()
    (partial,) = tmp_path.glob("out.gguf.*.partial")
    left = json.loads((partial / "note.json").read_text())
    assert 5 < left["tensors"] < 60
    changed, whole = left["bytes"] - 1, bytearray((tmp_path / "all" / "out.gguf").read_bytes())
    whole[changed] ^= 1
    with open(partial / "file", "r+b") as f:
        f.seek(changed)
        f.write(whole[changed : changed + 1])
        f.seek(0, os.SEEK_END)
        f.write(b"what was written after the note does not count")
    export(tmp_path / "m", "gguf", out)
    assert out.read_bytes() == whole, "a byte that was changed stays: what was written is not written again"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["all", "m", "out.gguf"]


@pytest.mark.parametrize("flags", [("--export", "gguf"), ("--export", "mlx")], ids=lambda f: f[-1])
def test_the_same_command_again_finds_checkpoint_and_export_done(flags, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    command = ["quantize", "demo", "--method", "rtn", *flags, "--device", "cpu", "--json"]
    output = []
    for _ in range(2):
        assert main.main(command) == 0
        output.append(json.loads(capsys.readouterr().out)["export"])
    assert [s.pop("already_done") for s in output] == [False, True]
    assert output[0] == output[1]
    out = Path(output[0]["out"])
    (out / "note" if out.is_dir() else out).write_bytes(b"somebody else's")
    assert main.main(command) == 2  # what is there is not what was written
    assert "is there already" in capsys.readouterr().err


def test_fp8_is_read_as_it_is(tmp_path, capsys):
    assert main.main(["quantize", "demo", "--format", "fp8", "--export", "compressed-tensors"]) == 2
    assert "read --format fp8 as it is; leave --for and --export out" in capsys.readouterr().err


def test_a_bias_that_was_written_does_not_stand_for_its_matrix(family_checkpoints, tmp_path):
    """In fp32 a checkpoint's biases come before their matrices."""
    recipe = make_recipe(bits=4, method="rtn", group=32, zero="none")
    list(pipeline.run(family_checkpoints("qwen2").dense, recipe, tmp_path / "q"))
    export(tmp_path / "q", "compressed-tensors", tmp_path / "whole", file_bytes=1)  # a file each

    def stop(percent, name, seen=[]):  # noqa: B006 (kept between the calls)
        if seen and seen[-1].endswith(".bias"):
            raise KeyboardInterrupt
        seen.append(name)

    with pytest.raises(KeyboardInterrupt):
        export(tmp_path / "q", "compressed-tensors", tmp_path / "out", progress=stop, file_bytes=1)
    export(tmp_path / "q", "compressed-tensors", tmp_path / "out", file_bytes=1)
    assert contents(tmp_path / "out").keys() == contents(tmp_path / "whole").keys()
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
