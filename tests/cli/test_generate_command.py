"""lowq generate as a person meets it: text on stdout, numbers on stderr, one JSON object, one line per mistake."""

import json
import logging
import os
import shutil
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from lowq_cli import main
from lowq_cli.engine import explain
from lowq_cli.files.source import DEMO
from lowq_cli.generation import statistics
from lowq_cli.main import app
from lowq_cli.state import remember

KEYS = {"text", "tokens", "prefill_tps", "decode_tps", "ttft_s", "peak_memory_bytes", "roofline_pct", "seed"}
SHORT = ["demo", "--device", "cpu", "--max-new-tokens", "8"]


@pytest.fixture
def run():
    """Run lowq generate with these arguments in this process: its exit code and its output."""

    def generate(*args, stdin=""):
        with CliRunner().isolation(stdin) as (out, err, _):
            code = main.main(["generate", *args])
            return SimpleNamespace(returncode=code, stdout=out.getvalue().decode(), stderr=err.getvalue().decode())

    return generate


def test_text_and_numbers_go_their_own_ways(run):
    done = run(*SHORT, "--prompt", "Once upon a time", "--explain")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "prompt tokens" not in done.stdout
    assert "8 new tokens" in done.stderr
    assert "decoder: native" in done.stderr
    assert "layers.*.qkv" in done.stderr


def test_kernels_that_refuse_for_one_reason_share_a_line(capsys):
    far = dict.fromkeys(("cuda/a", "cuda/b", "triton/c", "triton/d"), "runs on cuda, not on cpu")
    rows = [
        explain.LayerKernel("qkv", 2, 64, 64, "4-bit g64", "cpu_int4", "cpu/int4", {}, "rule", far | {"dequant": "is slow"}),
        explain.LayerKernel("down", 2, 64, 64, "4-bit g64", "cpu_int4", "cpu/int4", {}, "rule", far),
        explain.LayerKernel("head", 1, 64, 64, "bfloat16", "dense", "torch", {}, "", {}),
    ]
    statistics.show_rows(rows)
    output = [line.strip() for line in capsys.readouterr().err.splitlines() if ": " in line]
    assert output == ["4 kernels (2 cuda, 2 triton): runs on cuda, not on cpu", "dequant: is slow (qkv)"]


def test_a_piped_text_leads_to_the_option_that_reads_it(run):
    done = run("demo", stdin="Once upon a time")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--prompt - reads the text from stdin" in done.stderr


def test_json_is_one_object_with_the_promised_keys(run):
    done = run(*SHORT, "--prompt", "-", "--json", "--batch", "2", stdin="Once upon a time")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result.keys() >= KEYS
    assert result["model"] == "demo"
    assert len(result["tokens"]) == 8
    assert result["texts"][0] == result["texts"][1] == result["text"]
    assert "all 2 texts will be the same" in done.stderr
    assert result["peak_memory_bytes"] > 1e8
    assert result["roofline_pct"] is None or result["roofline_pct"] > 0
    assert "kernels" not in result
    result = json.loads(run(*SHORT, "--prompt", "x", "--json", "--explain").stdout)
    assert sum(k["count"] for k in result["kernels"]) == 6 * 4 + 1
    assert 0 < result["explain_s"] < result["ttft_s"]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({}, "first token after 1.25 s; "),
        ({"pictures_s": 0.5}, "first token after 1.25 s (with 0.50 s for the pictures); "),
        ({"pictures_s": 0.5, "explain_s": 0.25}, "1.25 s (with 0.50 s for the pictures and 0.25 s for --explain); "),
        ({"pictures_s": 0.5, "ttft_s": 0.0}, "3 prompt tokens; "),
        ({"drafts": {"drafter": "model x", "drafted": 0}}, "; model x: no drafts, as none promised to save time; "),
        (
            {
                "drafts": {
                    "drafter": "x",
                    "drafted": 6,
                    "accepted": 1,
                    "steps": 98,
                    "steps_with_drafts": 3,
                    "tokens_per_step": 1.02,
                }
            },
            "; x drafts in 3 of 98 steps: 1 of 6 right, 1.02 tokens a step; ",
        ),
    ],
)
def test_what_is_reported_beside_the_speed(more, told, capsys):
    numbers = {"ttft_s": 1.25, "prompt_tokens": 3, "prefill_tps": 9.0, "decode_tps": 7.0, "finish_reason": "stop", "seed": 0}
    numbers |= {
        "roofline_pct": None,
        "drafts": None,
        "peak_memory_bytes": 1,
        "decoder": "native",
        "sampling": {"temperature": 0},
    }
    statistics.show_numbers({**numbers, "sampling_from": {}, **more}, SimpleNamespace(tokens=[[1]]))
    assert told in capsys.readouterr().err


def test_drafts_that_were_asked_for_and_are_not_made_are_reported(tmp_path, run):
    file = tmp_path / "p.jsonl"
    file.write_text('"Once"\n"A"\n')
    for texts, why in (
        (("--prompts", str(file)), "the texts of --prompts take no drafts"),
        (("--prompt", "x", "--batch", "2"), "2 texts side by side step together"),
    ):
        assert f"--draft ngram is not used: {why}" in run(*SHORT, *texts, "--draft", "ngram").stderr
        for none in ((), ("--draft", "none")):
            assert "is not used" not in run(*SHORT, *texts, *none).stderr


def test_many_prompts_come_out_in_order(tmp_path, run):
    file = tmp_path / "p.jsonl"
    file.write_text('"Once upon a time"\n\n{"prompt": "The whale", "id": 7}\n"A"\n')
    done = run(*SHORT, "--prompts", str(file), "--batch", "2")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [r["prompt"] for r in rows] == ["Once upon a time", "The whale", "A"]
    assert [r.get("id") for r in rows] == [None, 7, None]
    assert all(len(r["tokens"]) == 8 or r["finish_reason"] == "stop" for r in rows)


@pytest.mark.parametrize(
    ("args", "stdin", "code", "message"),
    [
        (["demo"], None, 2, "one of --prompt TEXT and --prompts"),
        (["demo", "--prompt", "a", "--prompts", "b"], None, 2, "one of --prompt TEXT and --prompts"),
        (["demo", "--prompt", "-"], "", 2, "stdin is empty"),
        (["demo", "--prompts", "no-such-file.jsonl"], None, 3, "cannot read the prompts"),
        (["demo", "--prompts", "/dev/zero"], None, 2, "is a device"),  # memory grew without an end
        (["demo", "--prompts", "-"], "{not json\n", 2, "line 1 of - is not JSON"),
        (["demo", "--prompts", "-"], '"ok"\n{"text": 3}\n', 2, "line 2 of - holds no text"),
        (["demo", "--prompts", "-"], "\n", 2, "holds no prompts"),
        (["no/such/model", "--prompt", "a"], None, 3, "no/such/model"),
    ],
)
def test_mistakes_are_one_line(run, args, stdin, code, message):
    done = run(*args, stdin=stdin or "")
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_many_prompts_with_json_are_one_object(run):
    done = run(*SHORT, "--prompts", "-", "--batch", "2", "--json", stdin='"Once upon a time"\n"The whale"\n"A"\n')
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [r["prompt"] for r in result["results"]] == ["Once upon a time", "The whale", "A"]
    assert result["new_tokens"] == sum(len(r["tokens"]) for r in result["results"])


@pytest.fixture
def talking(tmp_path):
    """The demo with a chat template that refuses a system's message."""
    folder = shutil.copytree(DEMO, tmp_path / "talking")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    )
    return str(folder)


def test_prompts_may_be_messages(run, talking):
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "Go on"},
    ]
    how = (talking, "--device", "cpu", "--max-new-tokens", "8", "--prompts", "-")
    done = run(*how, stdin=json.dumps({"id": 7, "messages": messages}) + "\n" + json.dumps({"prompt": "<user>Hi<assistant>"}))
    assert done.returncode == 0, done.stderr
    first, second = map(json.loads, done.stdout.splitlines())
    assert (first["id"], first["messages"]) == (7, messages)
    text = "<user>Hi<assistant>Yes?<user>Go on<assistant>"
    alone = run(*how[:-2], "--prompt", text, "--json")
    assert json.loads(alone.stdout)["tokens"] == first["tokens"]
    assert second["tokens"]


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "line 1 of -: messages must be"),
        ("Hi", "messages must be"),
        ([{"role": "user"}], "messages must be"),
        ([{"role": "user", "content": ["x"]}], "messages must be"),
        ([{"role": "user", "content": "\ud800"}], "prompt 1 of 1: the prompt is not UTF-8"),
        ([{"role": "\ud800", "content": "x"}], "prompt 1 of 1: the prompt is not UTF-8"),
    ],
)
def test_invalid_messages_are_refused_in_one_line(run, talking, messages, said):
    done = run(talking, "--device", "cpu", "--prompts", "-", stdin=json.dumps({"messages": messages}))
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_messages_that_the_template_refuses_are_one_line(run, talking):
    asked = json.dumps({"messages": [{"role": "system", "content": "x"}]})
    done = run(talking, "--device", "cpu", "--prompts", "-", stdin=asked)
    assert (done.returncode, done.stdout) == (3, "")
    assert "chat template cannot write this conversation" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_line_of_jsonl_ends_at_a_newline_only(run):
    """str.splitlines also cuts at U+2028 and U+0085, which JSON allows inside a text; Windows starts a file with a mark."""
    done = run(*SHORT, "--prompts", "-", stdin='\ufeff"one\u2028line"\n"an\u0085other"\r\n')
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["prompt"] for line in done.stdout.split("\n")[:-1]] == ["one\u2028line", "an\u0085other"]


@pytest.mark.parametrize(
    ("second", "message"),
    [("word " * 2000, "prompt 2 of 2: the prompt has 2001 tokens"), ("\ud800", "prompt 2 of 2: the prompt is not UTF-8")],
    ids=["too-long", "half-a-character"],
)
def test_an_unanswerable_prompt_is_reported_before_any_answer(run, second, message):
    done = run(*SHORT, "--prompts", "-", stdin=f'"fine"\n{json.dumps(second)}\n')
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1  # transformers' warning about long texts is not there


def test_a_prompt_longer_than_the_context_is_one_line(run, caplog):
    """transformers' own warning, which goes past capsys, would be a second."""
    logging.getLogger("transformers.tokenization_utils_base").addHandler(caplog.handler)
    done = run(*SHORT, "--prompt", "word " * 2000)
    assert done.returncode == 2
    assert done.stderr == "lowq: the prompt has 2001 tokens and the model's context ends at 1024; shorten the prompt\n"
    assert not caplog.records


def test_an_unwritable_profile_is_reported_before_the_work(run, tmp_path):
    """A model without a tokenizer, which loading would find out."""
    folder = shutil.copytree(DEMO, tmp_path / "m", ignore=shutil.ignore_patterns("tokenizer*"))
    short = [str(folder), *SHORT[1:]]
    assert run(*short, "--prompt", "x").returncode == 3
    (tmp_path / "file").write_text("")
    done = run(*short, "--prompt", "x", "--profile", str(tmp_path / "file" / "t.json"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "lowq cannot write to the folder" in done.stderr
    done = run(*short, "--prompts", "-", "--explain", stdin='"x"')
    assert (done.returncode, done.stdout) == (2, "")
    assert "--explain measures one prompt" in done.stderr


def test_a_timeline_where_no_file_can_be_made_is_one_line(run):
    """/proc lets root look writable and takes no file."""
    if os.geteuid() != 0 or not os.path.isdir("/proc/self"):
        pytest.skip("only root may write to /proc, and does not succeed")
    done = run(*SHORT, "--prompt", "x", "--profile", "/proc/t.json")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("lowq: the timeline /proc/t.json cannot be written")


def test_profile_writes_a_timeline_and_prints_the_longest_kernels(run, tmp_path):
    timeline = tmp_path / "deep" / "steps.json"
    done = run(*SHORT, "--prompt", "Once upon a time", "--profile", str(timeline))
    assert done.returncode == 0, done.stderr
    events = json.loads(timeline.read_text())["traceEvents"]
    assert any(e.get("name", "") in ("aten::mm", "lowq::product") for e in events)
    assert "(between operators)" in done.stderr
    assert "(a step)" in done.stderr


def test_ctrl_c_keeps_the_answer_so_far(monkeypatch, run):
    from lowq_cli.engine.native import NativeDecoder

    step, calls = NativeDecoder.step, []

    def interrupted(self):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(NativeDecoder, "step", interrupted)
    done = run(*SHORT, "--prompt", "Once upon a time")
    assert done.returncode == 130
    assert done.stdout.strip()
    assert "4 new tokens" in done.stderr
    calls.clear()
    done = run(*SHORT, "--prompt", "Once upon a time", "--json")
    result = json.loads(done.stdout)
    assert (done.returncode, len(result["tokens"]), result["finish_reason"]) == (130, 4, "interrupted")
    none = run(*SHORT, "--prompt", "Once upon a time", "--max-new-tokens", "0").stderr
    assert "0 new tokens" in none
    assert "first token" not in none  # there was none to be after 0.00 s


def test_a_text_ends_before_the_first_stop(run):
    whole = json.loads(run(*SHORT, "--prompt", "Once upon a time", "--json").stdout)["text"]
    stop = whole.strip().split()[1]
    result = json.loads(run(*SHORT, "--prompt", "Once upon a time", "--stop", "never said", "--stop", stop, "--json").stdout)
    assert result["text"] == whole[: whole.index(stop)]
    assert (result["finish_reason"], len(result["tokens"]) < 8) == ("stop", True)
    assert run(*SHORT, "--prompt", "x", "--stop", "").returncode == 2


def test_every_run_draws_another_text_and_says_the_seed_that_repeats_it(run):
    drawn = ["--prompt", "Once upon a time", "--temperature", "1"]
    first, second = (json.loads(run(*SHORT, *drawn, "--json").stdout) for _ in range(2))
    assert first["seed"] != second["seed"]
    again = run(*SHORT, *drawn, "--seed", str(first["seed"]))
    assert again.stdout == first["text"] + "\n"
    assert f"seed {first['seed']}" in again.stderr
    assert "seed" not in run(*SHORT, "--prompt", "x").stderr


def test_a_text_in_the_checkpoints_place_is_the_prompt(run, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    remember(DEMO)
    done = run("Once upon a time", *SHORT[1:])
    assert done.stdout == run(*SHORT, "--prompt", "Once upon a time").stdout
    one_word = run("Hello")
    assert one_word.returncode == 2
    assert one_word.stderr == "lowq: Hello may be a text or a model; for a text: --prompt Hello, for a model add --prompt\n"


def test_a_text_may_follow_the_checkpoint_as_for_run(demo4):
    short = ["--max-new-tokens", "2", "--device", "cpu"]
    with_flag = CliRunner().invoke(app, ["generate", str(demo4), "--prompt", "Once", *short])
    bare = CliRunner().invoke(app, ["generate", str(demo4), "Once", *short])
    assert (bare.exit_code, bare.stdout) == (0, with_flag.stdout), bare.output
    twice = CliRunner().invoke(app, ["generate", str(demo4), "Once", "--prompt", "upon", *short])
    assert "give the text once" in str(twice.exception or twice.output)


def test_lines_of_plain_text_are_prompts(demo4, tmp_path):
    file = tmp_path / "lines.txt"
    file.write_text('Once upon\n"a time"\n\nThere was\n')
    short = ["--max-new-tokens", "2", "--device", "cpu"]
    done = CliRunner().invoke(app, ["generate", str(demo4), "--prompts", str(file), *short])
    assert done.exit_code == 0, done.output
    assert [json.loads(line)["prompt"] for line in done.stdout.splitlines()] == ["Once upon", "a time", "There was"]
