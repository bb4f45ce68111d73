"""lowq compare: the first model is the reference; the printed numbers are the measured ones."""

import json

import pytest
from typer.testing import CliRunner

from lowq_cli.main import app
from lowq_cli.run import pipeline
from lowq_packers.errors import NotFoundError, UsageError


def run(*args):
    return CliRunner().invoke(app, ["compare", *args])


@pytest.fixture(scope="module")
def demo_8b(tmp_path_factory):
    out = tmp_path_factory.mktemp("compare") / "demo-8b"
    pipeline.quantize("demo", out, bits=8, method="rtn", device="cpu")
    return str(out)


def test_rows_against_the_first(demo_8b, tmp_path):
    result = run("demo", demo_8b, "--max-tokens", "256", "--new-tokens", "4", "--device", "cpu", "--json",
                 "--plot", str(tmp_path / "p.png"))  # fmt: skip
    assert result.exit_code == 0, result.output
    first, second = json.loads(result.stdout)["rows"]
    assert first["kl"] is None
    assert second["bytes"] < first["bytes"]
    assert abs(second["ppl_increase_pct"] - 100 * (second["ppl"] / first["ppl"] - 1)) < 1e-6
    assert abs(second["ppl_increase_pct"]) < 2
    assert 0 < second["kl"] < 0.01
    assert second["top1_agreement"] > 0.9
    assert min(first["decode_tps"], second["decode_tps"]) > 0
    assert (tmp_path / "p.png").stat().st_size > 1000


def test_refusals(tmp_path):
    assert isinstance(run("demo").exception, UsageError)
    assert isinstance(run("demo", "demo", "--plot", str(tmp_path / "no" / "p.png")).exception, UsageError)
    assert isinstance(run("demo", str(tmp_path / "none"), "--max-tokens", "16", "--new-tokens", "2").exception, NotFoundError)
