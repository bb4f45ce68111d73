"""Sampling settings: flags first, then the publisher's generation_config.json, then the command's default."""

import json
import re
import shutil
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from lowq_cli.engine.generation_config import CONVERSATION, DEFAULT, FILE, FLAG, GREEDY, described, published, settle
from lowq_cli.files.source import DEMO
from lowq_cli.main import app
from lowq_cli.serving.http import fields
from lowq_packers.errors import DamagedError


def model(**said):
    return SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=0, **said))


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({}, {}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9}),
        ({"top_k": 64}, {"temperature": 1.0, "top_k": 64}),
        ({"top_k": -1, "temperature": None}, {"temperature": 1.0, "top_k": 0}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0}),
        ({"repetition_penalty": 1.05}, {"repetition_penalty": 1.05}),
    ],
)
def test_settings_of_a_file_are_read(said, found):
    assert published(model(**said)) == found


def test_flags_go_before_the_file_and_the_file_before_the_default():
    file = model(do_sample=True, temperature=0.6, top_k=20)
    assert settle(file, {}, CONVERSATION)[0] == {"temperature": 0.6, "top_k": 20}
    settings, origins = settle(file, {"temperature": 0.0, "top_p": None}, CONVERSATION)
    assert (settings["temperature"], origins) == (0.0, {"temperature": FLAG, "top_k": FILE})
    assert settle(model(), {}, GREEDY) == ({"temperature": 0.0}, {"temperature": DEFAULT})
    settings, origins = settle(model(repetition_penalty=1.1), {"top_p": 0.5}, CONVERSATION)
    assert settings == {"temperature": 0.7, "top_p": 0.5, "repetition_penalty": 1.1}
    assert described(settings, origins) == (
        "top_p 0.5 (given), repetition_penalty 1.1 (generation_config.json), temperature 0.7 (default)"
    )


def test_a_value_out_of_range_is_the_files_fault_unless_a_flag_replaces_it():
    with pytest.raises(DamagedError, match=r"generation_config.json says top_p=1.5"):
        settle(model(top_p=1.5), {}, GREEDY)
    with pytest.raises(DamagedError, match="temperature=hot"):
        settle(model(temperature="hot"), {}, GREEDY)
    assert settle(model(top_p=1.5), {"top_p": 0.5}, GREEDY)[0]["top_p"] == 0.5


def test_fields_that_a_request_leaves_out_are_the_models():
    default = {"temperature": 0.6, "top_k": 20}
    assert fields.read({"prompt": "x"}, False).drawn(default) == default
    assert fields.read({"prompt": "x", "temperature": 0}, False).drawn(default) == {"temperature": 0.0, "top_k": 20}
    assert fields.read({"prompt": "x", "top_k": -1}, False).drawn({}) == {"temperature": 1.0, "top_k": 0}


def test_commands_draw_as_the_file_says_and_say_so(tmp_path):
    folder = tmp_path / "m"
    shutil.copytree(DEMO, folder)
    file = folder / "generation_config.json"

    def asked(*args):
        done = CliRunner().invoke(app, ["generate", str(folder), "--device", "cpu", "--max-new-tokens", "12", *args])
        assert done.exit_code == 0, done.output
        return done

    greedy = json.loads(asked("--prompt", "Once", "--json").stdout)
    assert (greedy["sampling"], greedy["sampling_from"]) == ({"temperature": 0.0}, {"temperature": "default"})
    file.write_text(json.dumps(json.loads(file.read_text()) | {"do_sample": True, "temperature": 1.5}))
    drawn = json.loads(asked("--prompt", "Once", "--json", "--seed", "3").stdout)
    assert (drawn["sampling"], drawn["sampling_from"]) == ({"temperature": 1.5}, {"temperature": FILE})
    assert drawn["tokens"] != greedy["tokens"]
    assert "temperature 1.5 (generation_config.json), seed 3" in asked("--prompt", "Once", "--seed", "3").stderr
    assert json.loads(asked("--prompt", "Once", "--json", "--temperature", "0").stdout)["tokens"] == greedy["tokens"]


def test_run_draws_and_generate_does_not_where_the_file_says_nothing():
    def asked(*args):
        done = CliRunner().invoke(app, [*args, "--device", "cpu", "--max-new-tokens", "3", "--json"])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)["sampling"]

    assert asked("run", "demo", "Once", "--seed", "1") == CONVERSATION
    assert asked("run", "demo", "Once", "--temperature", "0")["temperature"] == 0
    assert asked("generate", "demo", "Once") == GREEDY


@pytest.mark.parametrize("name", ["generation_config.json", "special_tokens_map.json", "preprocessor_config.json"])
def test_quantize_refuses_settings_with_which_its_result_could_not_be_loaded(tmp_path, name):
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(DEMO, model)
    (model / name).write_text('{"temperature": ')
    with pytest.raises(DamagedError, match=re.escape(str(model / name))):
        CliRunner().invoke(app, ["quantize", str(model), "--method", "rtn", "--out", str(out)], catch_exceptions=False)
    assert not out.exists()


@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.999])
def test_quantize_refuses_a_vocabulary_that_is_cut_off(tmp_path, share):
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(DEMO, model)
    path = model / "tokenizer.json"
    written = path.read_bytes()
    path.write_bytes(written[: int(len(written) * share)])
    with pytest.raises(DamagedError, match=re.escape(str(path))):
        CliRunner().invoke(app, ["quantize", str(model), "--method", "rtn", "--out", str(out)], catch_exceptions=False)
    assert not out.exists()
    path.write_bytes(b"\xef\xbb\xbf" + written + b" \n" * 100)
    assert not CliRunner().invoke(app, ["quantize", str(model), "--method", "rtn", "--out", str(out)]).exit_code
