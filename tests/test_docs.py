"""The generated parts of README.md and docs/ are what benchmarks/render.py makes of the results and of --help today."""

import ast
import importlib.util
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers
import typer

import lowq
from lowq_cli import main, quantizers
from lowq_cli.files.source import DEMO
from lowq_cli.plan import recipe, targets
from lowq_packers.scheme import ACTS, ZERO_KINDS

ROOT = Path(__file__).parent.parent
NOTES = sorted((ROOT / "benchmarks" / "notes").glob("*.md"))
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md", "benchmarks/README.md")),
    *DOCS,
]
MOST_LINES = 120  # of the README


def test_generated_pages_are_fresh():
    done = subprocess.run([sys.executable, "-P", ROOT / "benchmarks" / "render.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def anchors(page):
    """What a heading of the page can be linked by."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", [*PAGES, *NOTES], ids=lambda p: str(p.relative_to(ROOT)))
def test_links_inside_the_repository_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text()):
        if "://" not in target:
            result = page.parent / target if target else page
            assert result.exists(), target
            assert not anchor or anchor in anchors(result), f"{target}#{anchor}"


def test_every_page_of_the_notes_is_in_their_index():
    index = next(p for p in NOTES if p.name == "README.md")
    named = re.findall(r"\]\((\w+\.md)\)", index.read_text())
    assert sorted(named) == sorted(p.name for p in NOTES if p != index)


@pytest.mark.parametrize(
    "folder", ["", "benchmarks", "docs", "examples", "kernels", "lowq_cli", "packers", "tests"], ids=lambda f: f or "root"
)
def test_no_file_names_a_benchmark_that_is_gone(folder):
    """Command lines and comments too, which hold no link."""
    files = [
        p
        for p in (ROOT / folder).glob("**/*" if folder else "*")
        if p.suffix in {".md", ".py", ".cu", ".cuh"} or p.name == "Makefile"
    ]
    named = {(p, name) for p in files for name in re.findall(r"benchmarks/[\w/]+\.(?:py|md|jsonl?|txt|log)\b", p.read_text())}
    assert sorted(f"{p.relative_to(ROOT)}: {name}" for p, name in named if not (ROOT / name).exists()) == []


def test_files_of_the_ranges_page_exist():
    parts = next(
        node.value
        for node in ast.parse((ROOT / "benchmarks" / "ranges.py").read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "PARTS"
    )
    named = [path for tests in eval(ast.unparse(parts), {"CLI": "tests/cli/test_"}).values() for path in tests]
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_page_is_in_the_index_and_the_readme_is_short():
    index = (ROOT / "docs" / "README.md").read_text()
    assert [p.name for p in DOCS if p.name != "README.md" and f"]({p.name})" not in index] == []
    assert len((ROOT / "README.md").read_text().splitlines()) <= MOST_LINES


def test_the_changelog_begins_with_the_version_that_is_built():
    first = re.search(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert first
    assert first[1] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_named_in_the_documentation_exist(page):
    named = re.findall(r"`((?:benchmarks|examples|kernels|lowq_cli|packers|tests)/[\w/]+\.(?:py|cuh?))`", page.read_text())
    assert sorted({name for name in named if not (ROOT / name).exists()}) == []


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "cli.md"], ids=lambda p: str(p.relative_to(ROOT)))
def test_command_lines_are_those_that_lowq_takes(page):
    commands = typer.main.get_command(main.app).commands
    for line in re.findall(r"^(?: {4}|\$ )(lowq .*)$", page.read_text(), re.M):
        line = re.sub(r"[][]|(?<=\w)\|\S+", "", line.partition("     ")[0])  # a synopsis: with its options, their first values
        for one in re.split(r"&&| \| ", line):
            _, verb, *rest = shlex.split(one)
            commands[verb].make_context(verb, rest)


def test_examples_in_help_are_those_that_lowq_takes():
    commands = typer.main.get_command(main.app).commands
    for name, command in commands.items():
        examples = re.findall(r"^  (?:echo .* \| )?lowq (.*?)(?:   .*)?$", command.epilog.partition("Inside:")[0], re.M)
        assert examples, name
        for line in examples:
            verb, *rest = shlex.split(line)
            commands[verb].make_context(verb, rest)


CHOICES = [  # typed by hand in the help, which must not import what knows them
    ("quantize", "--method", ["auto", *quantizers.methods()]),
    ("quantize", "--zero", ZERO_KINDS),
    ("quantize", "--layout", recipe.LAYOUTS),
    ("quantize", "--for", targets.TARGETS),
    ("quantize", "--export", [t.export for t in targets.TARGETS.values()]),
    ("quantize", "--act", ACTS),
    ("eval", "--act", ACTS),
]


@pytest.mark.parametrize(("verb", "flag", "names"), CHOICES, ids=lambda v: v if isinstance(v, str) else "")
def test_help_names_every_choice(verb, flag, names):
    command = typer.main.get_command(main.app).commands[verb]
    output = next(p.help for p in command.params if flag in p.opts)
    assert [n for n in names if not re.search(rf"(?<![\w.-]){re.escape(n)}(?![\w-])", output)] == []


TROUBLES = re.findall(r"^\$ (lowq .*)\n(lowq: .*)$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.M)


@pytest.fixture(scope="module")
def troubled(tmp_path_factory):
    """A folder with the models of docs/troubleshooting.md, and a port that is taken, which the page calls 8000."""
    folder = tmp_path_factory.mktemp("troubled")
    lowq.quantize("demo", out=folder / "ckpt", bits=4, group=64, method="rtn", device="cpu")
    shutil.copytree(folder / "ckpt", folder / "cut")
    os.truncate(folder / "cut/model.safetensors", (folder / "cut/model.safetensors").stat().st_size - 1000)
    shutil.copytree(DEMO, folder / "other")
    config = json.loads((DEMO / "config.json").read_text()) | {
        "model_type": "brand_new",
        "auto_map": {"AutoModelForCausalLM": "m.X"},
    }
    (folder / "other/config.json").write_text(json.dumps(config))
    shutil.copytree(DEMO, folder / "pickled", ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "pickled/pytorch_model.bin").touch()
    shutil.copytree(DEMO, folder / "unread")
    marlin = {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"}
    (folder / "unread/config.json").write_text(
        json.dumps(json.loads((DEMO / "config.json").read_text()) | {"quantization_config": marlin})
    )
    (folder / "lora").mkdir()
    (folder / "lora/adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4}))
    (folder / "lora/adapter_model.safetensors").touch()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield folder, str(taken.getsockname()[1])


@pytest.mark.parametrize(("command", "line"), TROUBLES, ids=lambda v: v[:40])
def test_a_quoted_error_is_printed_by_lowq(command, line, troubled, monkeypatch, capsys):
    if "--tasks" in command and importlib.util.find_spec("lm_eval"):
        pytest.skip("lm-eval is installed")
    if "cuda" in command and torch.cuda.is_available():
        pytest.skip("a GPU is here")
    folder, port = troubled
    monkeypatch.chdir(folder)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert main.main(shlex.split(command.replace("8000", port))[1:]) in (2, 3, 5)
    assert line.replace("8000", port).replace("5.23.0", transformers.__version__) in capsys.readouterr().err.splitlines()


def test_there_are_eleven_of_them():
    assert len(TROUBLES) == 11


def test_a_result_that_no_table_reads_and_no_page_names_is_found(tmp_path):
    import render

    for name in ("cpu/named.json", "cpu/opened.json", "cpu/idle.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    notes = tmp_path / "tree" / "benchmarks" / "notes"
    notes.mkdir(parents=True)
    (notes / "cpu.md").write_text("(results/cpu/named.json)")
    (notes.parent / "plots.py").write_text("")
    unread = render.unread({tmp_path / "cpu" / "opened.json"}, tmp_path, tmp_path / "tree")
    assert "cpu/idle.json" in unread
    assert not {"cpu/named.json", "cpu/opened.json"} & set(unread)
