"""lowq serve: the right export, the right command line, a clear word where vLLM is missing or cannot."""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lowq_cli import main
from lowq_cli.files.checkpoint import open_checkpoint
from lowq_cli.interop import serving
from lowq_cli.interop.foreign import open_foreign
from lowq_packers.errors import UnsupportedError, UsageError
from lowq_packers.scheme import Scheme

SYM = {"attention": Scheme(4, 16, "none"), "mlp": Scheme(4, 16, "none")}
INT = {"attention": Scheme(4, 32, "int"), "mlp": Scheme(4, 32, "int")}
FLOAT = {"attention": Scheme(4, 32, "float"), "mlp": Scheme(4, 32, "float")}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def vllm(tmp_path, monkeypatch):
    """A program of that name which writes down how it was called, and exits with 7."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "vllm"
    script.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/called\nexit 7\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return tmp_path / "called"


def cli(*args):
    return main.main(["serve", *map(str, args), "--engine", "vllm"])


def test_a_checkpoint_is_exported_once_and_served(family_checkpoints, vllm, capsys):
    folders = family_checkpoints("llama", "bfloat16", SYM)
    assert cli(folders.packed, "--export", "--tp", 2, "--args", "--max-model-len 64") == 7
    called = vllm.read_text().split("\n")
    assert called[0] == "serve"
    assert " ".join(called[2:]) == "--served-model-name=packed --port 8000 --tensor-parallel-size 2 --max-model-len 64 "
    with open_foreign(called[1]) as source:
        assert source.config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert "exporting to" in capsys.readouterr().err
    assert cli(folders.packed, "--export") == 7
    assert "exporting to" not in capsys.readouterr().err


def test_a_server_that_ends_by_itself_is_an_error(family_checkpoints, vllm, capsys):
    """As vLLM's does where one of its workers was killed: with 0."""
    script = vllm.parent / "bin" / "vllm"
    script.write_text(script.read_text().replace("exit 7", "exit 0"))
    assert cli(family_checkpoints("llama", "bfloat16", SYM).packed, "--native") == 1
    assert "ended with exit code 0" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_vllm_ends_with_lowq(family_checkpoints, tmp_path, vllm, number):
    """SIGTERM, and SIGHUP of a terminal that closes, left vLLM's server running by itself."""
    output = tmp_path / "told"
    script = vllm.parent / "bin" / "vllm"
    script.write_text(
        f"#!/bin/sh\ntrap 'echo told > {output}; exit 0' TERM INT\necho $$ > {vllm}\nwhile :; do sleep 0.05; done\n"
    )
    folder = family_checkpoints("llama", "bfloat16", SYM).packed
    run = "from lowq_cli.main import run; run()"
    process = subprocess.Popen([sys.executable, "-P", "-c", run, "serve", str(folder), "--engine", "vllm", "--native"])
    try:
        for _ in range(600):
            if vllm.is_file() and vllm.read_text():
                break
            time.sleep(0.1)
        process.send_signal(number)
        assert process.wait(60) == 0
        assert output.read_text() == "told\n"
    finally:
        process.kill()
        if not output.exists():
            os.kill(int(vllm.read_text()), signal.SIGKILL)


def test_a_chat_template_that_changed_is_served(family_checkpoints, tmp_path, vllm):
    folder = shutil.copytree(family_checkpoints("llama", "bfloat16", SYM).packed, tmp_path / "packed")
    for template in ("old", "new"):
        (folder / "chat_template.jinja").write_text(template)
        assert cli(folder, "--export") == 7
        assert (Path(vllm.read_text().split("\n")[1]) / "chat_template.jinja").read_text() == template


def test_an_export_killed_when_it_had_its_name_is_swept(demo4, monkeypatch):
    """Before, `prepare` used it unchanged, and its owner's file stayed."""
    real = os.unlink

    def killed(path, *args, **how):
        if Path(path).name == "lowq-run":
            raise KeyboardInterrupt
        real(path, *args, **how)

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            serving.prepare(demo4, native=False)
    target, _ = serving.prepare(demo4, native=False, write=False)
    assert (target / "lowq-run").is_file()
    serving.prepare(demo4, native=False)
    assert (target / "config.json").is_file()
    assert not (target / "lowq-run").exists()


def test_dry_run_writes_nothing_and_needs_no_vllm(family_checkpoints, tmp_path, capsys):
    folders = family_checkpoints("llama", "bfloat16", INT)
    assert cli(folders.packed, "--dry-run", "--json") == 0
    line = json.loads(capsys.readouterr().out)["command"]
    assert line[:2] == ["vllm", "serve"]
    assert not (tmp_path / "cache").exists()


def test_other_models_are_served_as_they_are():
    assert serving.command("org/model", 1, 80)[2] == "org/model"


def test_a_folders_name_is_no_option_of_vllm(tmp_path, monkeypatch, capsys):
    """`lowq serve ./--trust-remote-code` gave vLLM that option."""
    (tmp_path / "--trust-remote-code").mkdir()
    monkeypatch.chdir(tmp_path)
    for named in ("./--trust-remote-code", str(tmp_path / "--trust-remote-code"), "--trust-remote-code"):
        line = serving.command(named)
        assert "--trust-remote-code" not in line
        assert not line[2].startswith("-")
        asked = argparse.ArgumentParser()
        asked.add_argument("--served-model-name", nargs="+")
        assert asked.parse_known_args(line[3:])[0].served_model_name == ["--trust-remote-code"]
    with pytest.raises(UsageError, match="begins with a dash"):
        serving.command("--api-key=x")


def test_the_bundled_model_is_served_from_its_folder():
    """vLLM would ask the hub for a model called demo."""
    line = serving.command("demo", 1, 80)
    assert Path(line[2], "model.safetensors").is_file()
    assert line[3] == "--served-model-name=demo"


@pytest.mark.parametrize(
    ("flags", "message"), [(["--args", 'a "b'], "no closing quotation"), (["--port", "65536"], "must be from 1 to 65535")]
)
def test_mistakes_are_one_line(flags, message, capsys):
    assert cli("demo", "--dry-run", *flags) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("adapters", "message"),
    [
        (("x=typo",), "--lora x=typo: there is no folder typo"),
        (("x=.", "x=.."), "two adapters have the same name"),
        (("x",), "write NAME=DIR"),
    ],
)
def test_a_mistyped_adapter_is_refused_before_the_model_is_loaded(adapters, message, capsys):
    assert main.main(["serve", "demo", "--port", "0", *(f"--lora={one}" for one in adapters)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


def test_without_vllm_the_error_names_the_package(family_checkpoints, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    assert cli(family_checkpoints("llama", "bfloat16", SYM).packed) == 5
    assert "pip install vllm" in capsys.readouterr().err


def test_the_faster_kernels_are_taken_and_why_is_one_line(family_checkpoints, capsys):
    folders = family_checkpoints("llama", "bfloat16", SYM)
    assert serving.command(str(folders.packed))[2] == str(folders.packed.resolve())
    err = capsys.readouterr().err
    assert "lowq's kernels, by its plugin: measured faster; vLLM is not installed here" in err
    with (checkpoint := open_checkpoint(folders.packed)).source:
        untimed = serving.choose(checkpoint, 1, capability=(8, 9))
        assert untimed.format != serving.NATIVE
        assert untimed.why.endswith("not timed in vLLM on this kind of GPU (--native takes them)")
        assert serving.choose(checkpoint, 1, native=True, capability=(8, 9)).format == serving.NATIVE
    mixture = family_checkpoints("qwen3-moe", "bfloat16", {"expert": Scheme(4, 16, "none")})
    with (checkpoint := open_checkpoint(mixture.packed)).source:
        why = "measured faster on mixtures of up to 64 sequences"
        assert serving.choose(checkpoint, 1, capability=(9, 0)) == (serving.NATIVE, why)


@pytest.mark.parametrize(("version", "line"), [("0.24.0", "vLLM 0.24.0"), ("0.99.1", "not tested with (0.24, 0.33 were)")])
def test_the_installed_version_of_vllm_is_named(version, line, tmp_path, monkeypatch):
    package = tmp_path / f"vllm-{version}.dist-info"
    package.mkdir()
    (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert line in serving.installed()


def test_checkpoints_that_only_one_engine_can_serve(family_checkpoints, tmp_path):
    table = {"attention": Scheme(4, 16, "none"), "embedding": Scheme(8, 16, "none")}
    mixtral = family_checkpoints("mixtral", "bfloat16", table).packed
    assert str(mixtral) in serving.command(str(mixtral), native=True), "whose class in vLLM expects a dense table"
    other = shutil.copytree(mixtral, tmp_path / "other")
    (other / "config.json").write_text(
        json.dumps(json.loads((mixtral / "config.json").read_text()) | {"model_type": "minicpm3"})
    )
    with pytest.raises(UnsupportedError, match="some linear layers of vLLM's minicpm3 are always dense; use lowq serve"):
        serving.command(str(other), native=True)
    folders = family_checkpoints("llama", "bfloat16", FLOAT)
    with pytest.raises(UnsupportedError, match="it has none for these schemes"):
        serving.command(str(folders.packed), native=False)


def test_pipeline_stages_are_handed_on(family_checkpoints):
    line = serving.command(str(family_checkpoints("llama", "bfloat16", SYM).packed), 2, stages=2)
    assert line[-4:] == ["--tensor-parallel-size", "2", "--pipeline-parallel-size", "2"]
    with pytest.raises(UsageError, match="--pp 0"):
        serving.command("demo", stages=0)


def test_schemes_without_vllm_kernels_are_served_by_ours(family_checkpoints, capsys):
    three = {"attention": Scheme(4, 32, "none"), "mlp": Scheme(3, 32, "none")}
    for schemes in (FLOAT, three, {"attention": Scheme(1, 16, "int"), "mlp": Scheme(2, 16, "float")}):
        folders = family_checkpoints("llama", "bfloat16", schemes)
        assert serving.command(str(folders.packed))[2] == str(folders.packed.resolve())
    folders = family_checkpoints("llama", "bfloat16", SYM)
    assert cli(folders.packed, "--native", "--tp", 2, "--dry-run") == 0
    out = capsys.readouterr().out.split()
    assert out[:3] == ["vllm", "serve", str(folders.packed.resolve())]
    assert out[-2:] == ["--tensor-parallel-size", "2"]


def test_zeros_that_formats_pack_along_n_do_not_bind_our_plugin(family_checkpoints):
    folders = family_checkpoints("llama", "bfloat16", {"attention": Scheme(1, 16, "int")})  # k_proj: 32 rows, 16 a rank
    assert serving.command(str(folders.packed), 2)[2] == str(folders.packed.resolve())


@pytest.mark.parametrize(
    ("schemes", "ranks", "message"),
    [
        (SYM, 8, "on 8 GPU"),
        ({"mlp": Scheme(4, 32, "float")}, 2, r"down_proj: K=96 over 2 ranks is 48"),
    ],
)
def test_models_that_vllm_cannot_serve_are_refused(family_checkpoints, schemes, ranks, message):
    folders = family_checkpoints("llama", "bfloat16", schemes)
    with pytest.raises(UnsupportedError, match=message):
        serving.command(str(folders.packed), ranks)
    with pytest.raises(UsageError):
        serving.command(str(folders.packed), 0)
