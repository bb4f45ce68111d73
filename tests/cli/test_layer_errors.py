"""lowq eval --layers: errors of layers against values taken from the models themselves."""

import json

import pytest
import torch
from typer.testing import CliRunner

from lowq_cli.evaluate.layer_errors import layer_errors
from lowq_cli.evaluate.perplexity import read_text
from lowq_cli.main import app
from lowq_cli.run import pipeline
from lowq_packers.errors import UsageError


@pytest.fixture(scope="module")
def demo_4b(tmp_path_factory):
    """Only layers 3 and later are quantized."""
    out = tmp_path_factory.mktemp("layers") / "demo-4b"
    pipeline.quantize("demo", out, bits=4, method="rtn", device="cpu", skip=[f"layers.{i}" for i in range(3)])
    return str(out)


def test_errors_begin_where_quantizing_does(demo_4b):
    from lowq_cli.loading import load

    text = read_text(None)[:2500]
    result = layer_errors(demo_4b, "demo", text, "cpu")
    assert [e.index for e in result] == list(range(6))
    assert all(e.weights is None and e.worst == "" for e in result[:3])
    assert all(0.05 < e.weights < 0.15 and "proj" in e.worst for e in result[3:])
    assert max(e.output for e in result[:3]) < 1e-4 < result[3].output < result[5].output < 0.1
    ids = torch.tensor(load("demo")[1](text, add_special_tokens=False)["input_ids"])[:512].unsqueeze(0)
    states = [load(m, device="cpu")[0](ids, output_hidden_states=True).hidden_states for m in (demo_4b, "demo")]
    h, h0 = (s[4].float() for s in states)  # behind layer 3
    assert result[3].output == pytest.approx(float((h - h0).square().sum() / h0.square().sum()), rel=1e-3)


def test_the_command_prints_them(demo_4b):
    done = CliRunner().invoke(
        app, ["eval", demo_4b, "--against", "demo", "--layers", "--max-tokens", "16", "--device", "cpu", "--json"]
    )
    assert done.exit_code == 0, done.output
    output = json.loads(done.stdout)
    assert (output["window"], output["stride"]) == (16, 16)
    assert len(output["layers"]) == 6
    assert isinstance(CliRunner().invoke(app, ["eval", demo_4b, "--layers"]).exception, UsageError)
