"""Short names of models in the cache: every argument and option that takes a model understands one."""

import importlib
import inspect
import json
import os
import shutil
import time
from functools import wraps

import pytest
import typer
from typer.testing import CliRunner

import lowq
from lowq_cli import cached_models, completion, main, state

# Parameters that hold a text and no model, by their names in commands
NO_MODELS = {
    *("words", "prompt", "prompts", "system", "stop", "pictures", "image", "images", "text", "calib", "judge", "tasks", "file"),
    *("out", "plot", "profile", "config", "session", "repo", "host", "api_key", "name", "args", "recipe"),
    *("device", "keep_alive", "kv", "kv_host", "act", "memory", "engine", "prefer", "batch", "group", "method", "zero", "size"),
    *("max_ppl", "fit", "widths", "layout", "overrides", "skip", "lm_head", "embedding", "vision", "format", "block", "dtype"),
    *("to", "kind", "shard_size", "shape", "kernel", "op", "action", "head"),
    "lora",  # a folder of PEFT, which the cache does not hold
}


def taking(command):
    """The function of a command, and its parameters that hold texts: name -> what Typer knows of it."""
    function = getattr(importlib.import_module(f"lowq_cli.commands.{command}"), command)
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if "str" in str(getattr(parameter.annotation, "__origin__", "")):
            found[name] = next(m for m in parameter.annotation.__metadata__ if hasattr(m, "autocompletion"))
    return function, found


TAKE = [
    (command, name, shown)
    for command in main.ORDER
    for name, shown in taking(command)[1].items()
    if shown.autocompletion in main.NAMES_MODELS and command != "rm"
]


def test_every_parameter_takes_a_model_or_is_known_to_take_none():
    for command in main.ORDER:
        for name, shown in taking(command)[1].items():
            takes = shown.autocompletion in main.NAMES_MODELS
            assert takes != (name in NO_MODELS) or (command, name) == ("stop", "models"), (command, name)  # names of lowq ps
    assert {"--draft", "--model", "--models", "--against", "--ckpt"} <= {flag(name, shown) for _, name, shown in TAKE}


def flag(name, shown):
    given = [n for n in (shown.default, *(shown.param_decls or ())) if str(n).startswith("--")]
    return given[0] if given else f"--{name}"


@pytest.fixture
def cached(own_cache, tmp_path, monkeypatch):
    """A function: put a model that is said to be so many seconds old into the cache."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def put(name, age=0, config="{}"):
        folder = tmp_path / "cache" / "lowq" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(config)
        os.utime(folder / "config.json", (time.time() - age,) * 2)
        return folder

    return put


@pytest.mark.parametrize(("command", "name", "shown"), TAKE, ids=[f"{c} {n}" for c, n, _ in TAKE])
def test_a_command_is_given_the_folder_of_a_short_name(command, name, shown, cached):
    """And completes the name, except where only models of other tools are taken."""
    mine = cached("imports/mine-0123456789abcdef-0.1.0")
    function, given = taking(command)[0], {}

    @wraps(function)
    def record(**values):
        given.update(values)

    app = typer.Typer()
    app.command(command)(main._guarded(record))
    words = [flag(name, shown), "mine"] if isinstance(shown, typer.models.OptionInfo) else []
    for other, parameter in inspect.signature(function).parameters.items():
        shape = next((m for m in getattr(parameter.annotation, "__metadata__", ()) if hasattr(m, "metavar")), None)
        if isinstance(shape, typer.models.ArgumentInfo) and (other == name or parameter.default is inspect.Parameter.empty):
            words.append("mine" if other == name else "x")
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert given[name] in (str(mine), [str(mine)])
    assert ("mine" in shown.autocompletion("m")) == (shown.autocompletion not in (completion.originals, completion.quantized))


def test_names_that_mean_something_else_are_no_short_names(cached):
    for name in cached_models.OTHERS:
        folder = cached(f"imports/{name}-0123456789abcdef-0.1.0")
        assert cached_models.model_path(name) == name
        assert cached_models.model_path(folder.name) == str(folder)
    assert not {*cached_models.OTHERS} & {*cached_models.names().values()}


def test_the_newest_whole_model_has_the_short_name(cached, tmp_path):
    old = cached("imports/mine-0123456789abcdef-0.1.0", age=60)
    cached("imports/mine-1123456789abcdef-0.1.0.0123456789ab.partial")
    (cached("imports/mine-2123456789abcdef-0.1.0") / "config.json").unlink()
    new = cached("runs/mine-3123456789abcdef", age=30)
    (tmp_path / "cache" / "lowq" / "runs" / "mine-4123456789abcdef").symlink_to(new)
    assert cached_models.names() == {new: "mine", old: old.name}
    assert list(cached_models.names()) == [new, old]
    (tmp_path / "here" / "mine").mkdir()  # commands take this one by that name
    assert cached_models.names() == {new: new.name, old: old.name}
    assert cached_models.model_path("mine") == "mine"


GENERATED = ("--max-new-tokens", "4", "--device", "cpu")


@pytest.fixture
def commands(cached, demo4, tmp_path, capsys):
    """A function: run a command where `mine` is the demo in the cache; (exit code, stdout, stderr on one line)."""
    shutil.copytree(demo4, tmp_path / "cache" / "lowq" / "runs" / "mine-0123456789abcdef")

    def run(*words):
        code = main.main([*map(str, words)])
        out, err = capsys.readouterr()
        return code, out, " ".join(err.split())

    return run


def test_a_draft_model_is_named_by_its_short_name(commands, monkeypatch):
    code, out, err = commands("generate", "mine", "Once upon a time", *GENERATED, "--draft", "mine", "--json")
    assert code == 0, err
    assert "model mine" in out
    for command in ("run", "chat"):
        code, out, err = commands(
            command, "mine", *(["Once upon a time"] * (command == "run")), *GENERATED, "--draft", "nothing"
        )
        assert (code, "a folder, or a name of lowq ls" in err) == (3, True), err
    code, _, err = commands("run", "mine", "Once upon a time", *GENERATED, "--draft", "mine")
    assert (code, "model mine" in err) == (0, True), err
    code, out, err = commands("serve", "mine", "--dry-run", "--device", "cpu", "--draft", "mine", "--json")
    assert (code, "model mine" in json.loads(out)["drafts"]) == (0, True), err


def test_the_file_of_a_server_names_models_of_the_cache(commands, tmp_path):
    (tmp_path / "models.toml").write_text('[models.german]\npath = "mine"\ndraft = "mine"\n')
    code, out, err = commands("serve", "--config", tmp_path / "models.toml", "--dry-run", "--device", "cpu", "--json")
    assert code == 0, err
    plan = json.loads(out)
    assert (plan["model"], plan["models"], "model mine" in plan["drafts"]) == ("german", ["german"], True)


def test_exports_and_uploads_of_a_short_name(commands):
    code, out, err = commands("export", "mine", "--to", "hqq")
    assert (code, out) == (0, "mine-hqq\n"), err
    code, out, err = commands("push", "me/mine", "--ckpt", "mine", "--dry-run")
    assert code == 0, err
    code, _, err = commands("serve", "--models", "mine", "--dry-run", "--device", "cpu")
    assert (code, err.startswith("mine on cpu")) == (0, True), err


def test_what_takes_only_other_models_says_so(commands):
    """The cache holds what lowq wrote."""
    assert commands("export", "mine", "--to", "gptq", "--out", "theirs")[0] == 0
    for words, way_out in (
        (("quantize", "mine"), "is already a lowq checkpoint"),
        (("refine", "mine", "--model", "demo"), "is not a checkpoint of another tool"),
        (("refine", "theirs", "--model", "mine", "--device", "cpu"), "is already a lowq checkpoint"),
        (("generate", "mine", "Hi", "--lora", "mine"), "give the folder that PEFT"),
        (("serve", "mine", "--lora", "german=mine"), "there is no folder mine"),
        (("generate", "mime", "Hi"), "did you mean mine?"),
    ):
        code, _, err = commands(*words)
        assert code in (2, 3), err
        assert way_out in err


TEXT = "Once upon a time there was a girl. " * 20
# (function, parameter) of the Python API -> a call with a model's name there, and what it returns where that is the demo
CALLED = {
    ("load", "model"): lambda name: lowq.load(name, device="cpu")[0].config.model_type,
    ("perplexity", "model"): lambda name: lowq.perplexity(name, TEXT, device="cpu", max_tokens=64)["tokens"],
    ("perplexity", "against"): lambda name: lowq.perplexity("demo", TEXT, name, "cpu", 64)["kl"] > 0,
    ("export", "checkpoint"): lambda name: lowq.export(name, "hqq").out,
    ("quantize", "model"): lambda name: lowq.quantize(name, device="cpu"),
    ("stream", "draft"): lambda name: lowq.stream(*lowq.load("demo", device="cpu"), "Once", draft=name).drafting.drafter.name,
}
RETURNED = {("load", "model"): "llama", ("export", "checkpoint"): "mine-hqq", ("stream", "draft"): "model mine"}
RETURNED |= {("perplexity", "model"): 64, ("perplexity", "against"): True}
ON_A_COMMAND_LINE = {  # the same with a command
    ("load", "model"): ("generate", "MODEL", "Hi"),
    ("perplexity", "model"): ("eval", "MODEL"),
    ("perplexity", "against"): ("eval", "demo", "--against", "MODEL"),
    ("export", "checkpoint"): ("export", "MODEL", "--to", "hqq"),
    ("quantize", "model"): ("quantize", "MODEL"),
    ("stream", "draft"): ("generate", "demo", "Hi", "--draft", "MODEL"),
}


def test_every_parameter_of_the_python_api_that_is_a_path_is_a_model_or_known_to_be_none():
    functions = [(name, value) for name in lowq.__all__ if inspect.isfunction(value := getattr(lowq, name))]
    given = [(name, p.name) for name, f in functions for p in inspect.signature(f).parameters.values() if "Path" in str(p)]
    assert {*given} - {("load", "lora"), ("export", "out"), ("quantize", "out")} == {*CALLED}


@pytest.mark.parametrize("where", CALLED, ids=" ".join)
def test_the_python_api_takes_short_names_and_has_the_errors_of_the_commands(where, commands):
    call = CALLED[where]
    if where in RETURNED:
        assert call("mine") == RETURNED[where]
    else:
        with pytest.raises(lowq.LowqError, match="is already a lowq checkpoint"):
            call("mine")
    for wrong in ("mime", "of/nobody/mine"):
        with pytest.raises(lowq.LowqError) as refused:
            call(wrong)
        assert (
            f"lowq: {refused.value}\n".split()
            == commands(*(wrong if w == "MODEL" else w for w in ON_A_COMMAND_LINE[where]))[2].split()
        )


def test_no_home(cached, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr("pathlib.Path.home", lambda: (_ for _ in ()).throw(RuntimeError))
    assert cached_models.names() == {}
    assert cached_models.model_path("mine") == "mine"
    assert state.is_cached(cached_models.Path("mine")) is False
