"""lowq generate as a person meets it: text on stdout, numbers on stderr, one JSON object, one line per mistake."""

import io
import json
import sys
from types import SimpleNamespace

import pytest

from lowq_cli import main
from lowq_cli.commands import generate
from lowq_cli.engine import explain

KEYS = {"text", "tokens", "prefill_tps", "decode_tps", "ttft_s", "peak_memory_bytes", "roofline_pct", "kernels"}
SHORT = ["demo", "--device", "cpu", "--max-new-tokens", "8"]


@pytest.fixture
def run(monkeypatch, capsys):
    """lowq generate with these arguments, in this process: what it returned and wrote."""

    def generate(*args, stdin=""):
        monkeypatch.setattr(sys, "argv", ["lowq", "generate", *args])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = main._run()
        out, err = capsys.readouterr()
        return SimpleNamespace(returncode=code, stdout=out, stderr=err)

    return generate


def test_text_and_numbers_go_their_own_ways(run):
    done = run(*SHORT, "--prompt", "Once upon a time", "--explain")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "prompt tokens" not in done.stdout
    assert "8 new tokens" in done.stderr
    assert "decoder: fused" in done.stderr
    assert "layers.*.qkv" in done.stderr


def test_kernels_that_refuse_for_one_reason_share_a_line(monkeypatch, capsys):
    far = dict.fromkeys(("cuda/a", "cuda/b", "triton/c", "triton/d"), "runs on cuda, not on cpu")
    rows = [
        explain.LayerKernel("qkv", 2, 64, 64, "4-bit g64", "cpu_int4", "cpu/int4", {}, "rule", far | {"dequant": "is slow"}),
        explain.LayerKernel("down", 2, 64, 64, "4-bit g64", "cpu_int4", "cpu/int4", {}, "rule", far),
        explain.LayerKernel("head", 1, 64, 64, "bfloat16", "dense", "torch", {}, "", {}),
    ]
    monkeypatch.setattr(explain, "kernels_of", lambda *_: rows)
    generation = SimpleNamespace(decoder=SimpleNamespace(name="fused", reason=""), prompts=["a"])
    generate._show_kernels(SimpleNamespace(dtype=None), generation)
    told = [line.strip() for line in capsys.readouterr().err.splitlines() if ": " in line][1:]
    assert told == ["4 kernels (2 cuda, 2 triton): runs on cuda, not on cpu", "dequant: is slow (qkv)"]


def test_json_is_one_object_with_the_promised_keys(run):
    done = run(*SHORT, "--prompt", "-", "--json", "--batch", "2", stdin="Once upon a time")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.keys() >= KEYS
    assert len(found["tokens"]) == 8
    assert found["texts"][0] == found["texts"][1] == found["text"]
    assert "all 2 texts will be the same" in done.stderr
    assert found["peak_memory_bytes"] > 1e8
    assert found["roofline_pct"] is None or found["roofline_pct"] > 0
    assert sum(k["count"] for k in found["kernels"]) == 6 * 4 + 1


def test_many_prompts_come_out_in_order(tmp_path, run):
    file = tmp_path / "p.jsonl"
    file.write_text('"Once upon a time"\n\n{"prompt": "The whale", "id": 7}\n"A"\n')
    done = run(*SHORT, "--prompts", str(file), "--batch", "2")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [r["prompt"] for r in rows] == ["Once upon a time", "The whale", "A"]
    assert all(len(r["tokens"]) == 8 or r["finish_reason"] == "stop" for r in rows)


@pytest.mark.parametrize(
    ("args", "stdin", "code", "message"),
    [
        (["demo"], None, 2, "one of --prompt TEXT and --prompts"),
        (["demo", "--prompt", "a", "--prompts", "b"], None, 2, "one of --prompt TEXT and --prompts"),
        (["demo", "--prompt", "-"], "", 2, "stdin held no prompt"),
        (["demo", "--prompts", "no-such-file.jsonl"], None, 3, "cannot read the prompts"),
        (["demo", "--prompts", "-"], "not json\n", 2, "line 1 of - is not JSON"),
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


def test_profile_writes_a_timeline_and_says_what_took_longest(run, tmp_path):
    timeline = tmp_path / "deep" / "steps.json"
    done = run(*SHORT, "--prompt", "Once upon a time", "--profile", str(timeline))
    assert done.returncode == 0, done.stderr
    events = json.loads(timeline.read_text())["traceEvents"]
    assert any("mm" in e.get("name", "") or "linear" in e.get("name", "") for e in events)
    assert "(between operators)" in done.stderr
    assert "(a step)" in done.stderr


def test_ctrl_c_keeps_what_was_said(monkeypatch, run):
    from lowq_cli.engine.fused import FusedDecoder

    step, calls = FusedDecoder.step, []

    def interrupted(self):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(FusedDecoder, "step", interrupted)
    done = run(*SHORT, "--prompt", "Once upon a time")
    assert done.returncode == 130
    assert done.stdout.strip()
    assert "4 new tokens" in done.stderr
    calls.clear()
    done = run(*SHORT, "--prompt", "Once upon a time", "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, len(found["tokens"]), found["finish_reason"]) == (130, 4, "interrupted")
