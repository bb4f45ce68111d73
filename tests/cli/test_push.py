"""lowq push: the card agrees with the report; a dry run sends nothing; a refusal is one line."""

import json
import shutil

import huggingface_hub
import pytest

from lowq_cli import main
from lowq_cli.files.checkpoint import open_checkpoint
from lowq_cli.files.front_matter import license_of
from lowq_cli.interop.card import model_card
from lowq_cli.run.pipeline import quantize
from lowq_packers.scheme import Scheme

SYM = {"attention": Scheme(4, 32, "none"), "mlp": Scheme(8, 32, "none")}


@pytest.fixture
def folder(family_checkpoints, tmp_path):
    shutil.copytree(family_checkpoints("llama", "bfloat16", SYM).packed, tmp_path / "m")
    report = {
        "lowq": "0.1.0",
        "source": "org/original",
        "source_bytes": 123_000_000_000,
        "recipe": {"bits": 4, "group": 32, "zero": "none"},
        "tensors": [{"name": "model.layers.0.mlp.up_proj", "crc32": [0], "method": "rtn"}],
    }
    (tmp_path / "m" / "lowq_report.json").write_text(json.dumps(report))
    (tmp_path / "m" / "lowq.log").write_text("private paths")
    return tmp_path / "m"


@pytest.fixture(autouse=True)
def logged_in(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_x")


def cli(*args):
    return main.main(["push", *map(str, args)])


def test_the_card_is_made_from_the_report(folder):
    checkpoint = open_checkpoint(folder)
    card = model_card(checkpoint, "me/small", measured={"ppl": 11.0, "base_ppl": 10.0, "tokens": 99, "window": 9, "kl": 0.5})
    front = card.split("---")[1]
    assert "base_model: org/original\nbase_model_relation: quantized" in front
    assert f"{checkpoint.bpw:.2f}" in card
    assert "kB (before: 123.00 GB)" in card
    assert "4-bit g32 none zero, 8-bit g32 none zero" in card
    assert "11.000, +10.00% of 10.000" in card
    assert 'from_pretrained("me/small"' in card
    assert "lowq export small --to compressed-tensors" in card
    assert "base_model" not in model_card(checkpoint, "me/small", base="a-folder")
    assert "perplexity" not in model_card(checkpoint, "me/small")


def test_the_card_names_the_licence_of_the_source_and_counts_overrides(folder, family_checkpoints, tmp_path):
    overrides = [f"model.layers.{i}.mlp.up_proj={bits}" for i, bits in enumerate((8, 8, 8, 4, 4, 3))]
    report = json.loads((folder / "lowq_report.json").read_text())
    report["recipe"] |= {"overrides": overrides, "widths": [8, 4], "skip": []}
    (folder / "lowq_report.json").write_text(json.dumps(report | {"license": "other", "license_name": "llama3"}))
    card = model_card(open_checkpoint(folder), "me/small")
    assert "license: other\nlicense_name: llama3\n---" in card
    assert "overrides of 6 names (3 in 8, 2 in 4, 1 in 3 bits), widths 8 4 |" in card


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("---\nlicense: mit\ntags:\n- x\n---\n# m", {"license": "mit"}),
        ("---\nlicense:\n- apache-2.0\n---\n", {"license": "apache-2.0"}),
        (
            "---\r\nlicense: other\r\nlicense_name: 'x-y'\r\nlicense_link: https://x.y/LICENSE\r\n---\r\n",
            {"license": "other", "license_name": "x-y", "license_link": "https://x.y/LICENSE"},
        ),
        ("---\nlicense: [mit]\n---\n", {}),
        ("# license: mit\n", {}),
        (None, {}),
    ],
)
def test_a_quantized_models_report_has_the_licence_of_its_sources_readme(text, found, family_checkpoints, tmp_path):
    source = shutil.copytree(family_checkpoints("llama", "bfloat16", SYM).dense, tmp_path / "source")
    if text is not None:
        (source / "README.md").write_text(text, newline="")
    assert license_of(source) == found
    if found:
        quantize(source, tmp_path / "out", bits=4, group=32, method="rtn")
        assert json.loads((tmp_path / "out" / "lowq_report.json").read_text()).items() >= found.items()


def test_a_dry_run_sends_nothing(folder, capsys):
    """The hub would refuse this token."""
    assert cli("me/small", "--ckpt", folder, "--dry-run", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["url"] is None
    assert "model.safetensors" in result["files"]
    assert "lowq.log" not in result["files"]


def test_only_files_of_the_report_are_sent(folder, capsys):
    report = json.loads((folder / "lowq_report.json").read_text())
    (folder / "lowq_report.json").write_text(json.dumps(report | {"files": ["config.json", "model.safetensors"]}))
    (folder / "lowq-calibrated-0123456789abcdef").mkdir()
    (folder / "private.txt").write_text("mine")
    assert cli("me/small", "--ckpt", folder, "--dry-run", "--json") == 0
    assert json.loads(capsys.readouterr().out)["files"] == ["config.json", "lowq_report.json", "model.safetensors", "README.md"]
    (folder / "model.txt").symlink_to("/etc/passwd")
    for files, says in ((["../x"], "only files in the same folder"), (["gone.json"], "is missing"), (["model.txt"], "a link")):
        (folder / "lowq_report.json").write_text(json.dumps(report | {"files": files}))
        assert cli("me/small", "--ckpt", folder, "--dry-run") == 3
        assert says in capsys.readouterr().err


def test_a_report_writes_nothing_but_its_line_into_the_card(folder):
    report = json.loads((folder / "lowq_report.json").read_text())
    evil = "org/x\nlicense: evil\n---\n# <b>hi</b> | [x](y)"
    (folder / "lowq_report.json").write_text(json.dumps(report | {"source": evil}))
    card = model_card(open_checkpoint(folder), "me/small")
    assert "\nlicense" not in card
    assert "base_model" not in card
    assert r"org/x license: evil --- # \<b\>hi\</b\> \| \[x\](y), quantized with lowq 0.1.0." in card


@pytest.mark.parametrize("field", ["recipe", "source", "source_bytes", "files", "weights", "lowq", "tensors", "sha256"])
def test_a_report_of_other_types_is_one_line(folder, field, capsys):
    report = json.loads((folder / "lowq_report.json").read_text())
    for value in (5, [5], {"a": 5}, "x", None):
        (folder / "lowq_report.json").write_text(json.dumps(report | {field: value}))
        code = cli("me/small", "--ckpt", folder, "--dry-run")
        output = capsys.readouterr().err
        assert code in (0, 3)
        assert "internal error" not in output


@pytest.mark.parametrize("field", ["name", "kind", "rel_error", "crc32", "method", "scheme"])
def test_so_is_a_line_of_it(folder, field, capsys):
    report = json.loads((folder / "lowq_report.json").read_text())
    for value in (5.5, ["a"], {"a": 5}, None):
        report["tensors"][0][field] = value
        (folder / "lowq_report.json").write_text(json.dumps(report))
        assert cli("me/small", "--ckpt", folder, "--dry-run") in (0, 3)
        assert "internal error" not in capsys.readouterr().err


def test_a_missing_login_is_reported_before_anything_is_measured(folder, monkeypatch, capsys):
    """The demo has another vocabulary, so that measuring would fail."""
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert cli("me/small", "--ckpt", folder, "--against", "demo") == 3
    assert capsys.readouterr().err == "lowq: you are not logged in to the hub; run: hf auth login (or set HF_TOKEN)\n"


def test_files_of_the_report_and_a_card_are_sent(folder, monkeypatch, capsys):
    calls = []

    class Hub:
        def create_repo(self, repo, **how):
            calls.append(("create", repo, how))
            return f"https://huggingface.co/{repo}"

        def upload_folder(self, **how):
            calls.append(("folder", how["folder_path"], how["allow_patterns"]))

        def upload_file(self, **how):
            calls.append(("card", how["path_in_repo"], how["path_or_fileobj"]))

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    assert cli("me/small", "--ckpt", folder, "--private") == 0
    assert capsys.readouterr().out == "https://huggingface.co/me/small\n"
    assert [c[0] for c in calls] == ["create", "folder", "card"]
    assert calls[0][2]["private"]
    assert calls[1][2] == ["config.json", "generation_config.json", "lowq_report.json", "model.safetensors"]
    assert calls[2][2].startswith(b"---\n")


def test_refusals_are_one_line(folder, monkeypatch, capsys):
    for name in ("no-owner", "../x", "me/..", "me/-x", "me/a--b", "me/" + "x" * 95, "me/\u00e9"):
        assert cli(name, "--dry-run", "--ckpt", folder) == 2
        assert "write it as name/model" in capsys.readouterr().err
    assert cli(str(folder), "--dry-run", "--ckpt", folder) == 2
    assert f"; {folder} itself is a folder here: --ckpt {folder} uploads it" in capsys.readouterr().err

    class Hub:
        def create_repo(self, repo, **how):
            raise OSError("401 Client Error\nmore")

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    assert cli("me/small", "--ckpt", folder) == 3
    err = capsys.readouterr().err
    assert "hf auth login" in err
    assert err.count("\n") == 1
