"""--act auto: the loss of rounding is measured on the model's own text, and only as many layers round as the limit allows."""

import json

import pytest
import torch
from typer.testing import CliRunner

import lowq
from lowq_cli.engine.open_model import ready
from lowq_cli.evaluate.eight_bits import apply_act, choose, own_text
from lowq_cli.hf.activations import quantized_linears, set_activations
from lowq_cli.hf.experts import QuantExperts
from lowq_cli.main import app
from lowq_kernels.activations import STEPS
from lowq_packers.errors import UsageError


def run(*arguments, code=0):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    return result.stdout


@pytest.fixture(scope="module")
def folder(short_demo, tmp_path_factory):
    out = tmp_path_factory.mktemp("eight") / "demo"
    lowq.quantize(short_demo, out=out, bits=4, group=64, method="rtn", device="cpu")
    return out


@pytest.fixture(scope="module")
def loaded(folder):
    return ready(folder, "cpu")


@pytest.fixture(scope="module")
def text(loaded):
    return own_text(*loaded)[:2, :128]


def divergence(model, ids, act):
    """Nats a token by which predictions differ from those in 16 bits, layers set to `act` by name."""
    layers, logs = {n: m for n, m in model.named_modules() if m in set(quantized_linears(model))}, []
    for taken in ({}, act):
        for name, layer in layers.items():
            layer.set_act(taken.get(name, "none"))
        with torch.inference_mode():
            logs.append(model(input_ids=ids).logits[:, :-1].double().log_softmax(-1))
    return float((logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean())


def test_as_many_layers_as_the_limit_allows(loaded, text):
    model, _ = loaded
    result = [choose(model, text, limit) for limit in (0.0, 5e-4, 2e-3, 1.0)]
    assert [c.act for c in result] == ["none", "int8", "int8", "int8"]
    for choice, limit in zip(result[1:], (5e-4, 2e-3, 1.0), strict=True):
        kl = divergence(model, text, dict.fromkeys(choice.rounded, "int8"))
        assert kl == pytest.approx(choice.kl, rel=0.02)
        assert kl <= limit
    assert 0 < len(result[1].rounded) < len(result[2].rounded) < len(result[3].rounded) == 8
    assert not result[3].kept
    choose(model, text, 5e-4)
    assert {n for n, m in model.named_modules() if getattr(m, "act", "none") == "int8"} == set(result[1].rounded)
    assert "16 bits in" in str(result[1])
    assert "of 0" in str(result[1])


def test_steps_are_exact_and_prompts_are_not(loaded):
    model, _ = loaded
    ids = torch.randint(3, 1000, (1, STEPS + 1), generator=torch.Generator().manual_seed(1))
    result = {}
    for act in ("none", "int8", "fp8"):
        set_activations(model, act)
        with torch.inference_mode():
            result[act] = [model(input_ids=part).logits for part in (ids[:, :STEPS], ids)]
    set_activations(model, "none")
    for act in ("int8", "fp8"):
        assert torch.equal(result[act][0], result["none"][0])
        assert not torch.equal(result[act][1], result["none"][1])


def test_experts_of_a_mixture_round_and_are_measured(family_checkpoints, monkeypatch):
    """Where a kernel takes them in 8 bits, which on a CPU none does: so the experts cost nothing and are all chosen."""
    model, _ = ready(family_checkpoints("qwen3-moe").packed, "cpu")
    experts = {n: m for n, m in model.named_modules() if isinstance(m, QuantExperts)}
    set_activations(model, "fp8")
    assert [m.act for m in experts.values()] == ["fp8", "fp8"]
    ids = torch.randint(3, 120, (2, 100), generator=torch.Generator().manual_seed(2))
    monkeypatch.setattr(QuantExperts, "takes", lambda self, act, M: act == "int8")
    choice = choose(model, ids, 1e-9)
    assert (choice.act, set(choice.rounded)) == ("int8", experts.keys())
    assert [m.act for m in experts.values()] == ["int8", "int8"]


def test_the_choice_of_activations_is_printed(loaded):
    model, tokenizer = loaded
    output = []
    apply_act(model, tokenizer, "auto", output.append, tokens=64)
    first, line = output
    assert first.startswith("--act auto: ")
    assert line.startswith("activations ")
    apply_act(model, tokenizer, None, output.append)
    apply_act(model, tokenizer, "none", output.append)
    assert output == [first, line]
    apply_act(model, tokenizer, "fp8", output.append)
    assert output[2:] == ["cpu has no FP8: activations are rounded to fp8 in software, which takes time instead of saving it"]
    with pytest.raises(UsageError, match="--act int4 must be one of none, int8, fp8, auto"):
        apply_act(model, tokenizer, "int4")


@pytest.mark.parametrize("act", ["int8", "fp8", "auto"])
def test_every_mode_of_a_model_without_quantized_layers_is_one_mistake(act, short_demo):
    model, tokenizer = ready(short_demo, "cpu")
    apply_act(model, tokenizer, "none")
    with pytest.raises(UsageError, match=f"--act {act}: this model has no quantized linear layers; quantize it first"):
        apply_act(model, tokenizer, act)


@pytest.mark.parametrize("act", [None, "none", "int8", "fp8", "auto"])
def test_results_say_which_mode_is_in_use(act, loaded, folder, tmp_path, monkeypatch):
    """`--act auto` is named with the mode that it chose, which is int8 for this model on a CPU."""
    monkeypatch.setattr("lowq_cli.evaluate.eight_bits.TEXTS", 2)
    mode, source = {None: ("none", "checkpoint"), "auto": ("int8", "auto")}.get(act, (act, "given"))
    flags = ["--device", "cpu", "--json", *(() if act is None else ("--act", act))]
    (tmp_path / "p.jsonl").write_text('"Once"\n')
    short = ("--max-new-tokens", "2")
    for words in (
        ("generate", folder, "--prompt", "Once", *short),
        ("generate", folder, "--prompts", tmp_path / "p.jsonl", *short),
        ("eval", folder, "--max-tokens", "600"),
        ("serve", folder, "--port", "0", "--dry-run", "--prefer", "smooth"),
    ):
        result = json.loads(run(*words, *flags))
        assert (result["act"], result["act_from"]) == (mode, source)
    assert result["prefer"] == "smooth"


def test_commands_take_it(folder):
    answers = [
        json.loads(run("generate", folder, "--prompt", "Once", "--max-new-tokens", "8", "--device", "cpu", "--json", *more))
        for more in ((), ("--act", "int8"))
    ]
    assert answers[0]["text"] == answers[1]["text"]  # a short prompt: nothing is rounded
    plain, rounded = (
        json.loads(run("eval", folder, "--max-tokens", "600", "--device", "cpu", "--json", *more))["ppl"]
        for more in ((), ("--act", "int8"))
    )
    assert 0 < abs(rounded / plain - 1) < 0.02
    for words in (
        ("generate", folder, "--prompt", "Once", "--act", "int4"),
        ("serve", folder, "--engine", "vllm", "--act", "int8"),
        ("eval", folder, "--act", "int4"),
    ):
        told = CliRunner().invoke(app, list(map(str, words))).exception
        assert isinstance(told, UsageError)
        assert "--act" in str(told)
