"""The public Python API: cheap to import, everything it promises is there and works on the bundled model."""

import subprocess
import sys

import pytest
import torch

import lowq


def test_import_is_cheap():
    code = "import sys, lowq; sys.exit(bool({'torch', 'transformers', 'triton', 'rich'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("name", lowq.__all__)
def test_every_name_is_there(name):
    assert getattr(lowq, name) is getattr(lowq, name)
    assert name in dir(lowq)


def test_the_error_of_an_unknown_name_lists_the_known_ones():
    with pytest.raises(AttributeError, match=r"it has .*quantize_tensor"):
        _ = lowq.quantise


def test_a_weight_through_quantize_tensor_and_quant_linear():
    W = torch.randn(48, 128, generator=torch.Generator().manual_seed(0))
    qt = lowq.quantize_tensor(W, bits=8, group_size=64, method="rtn", zero="float")
    lin = lowq.QuantLinear.from_quantized(qt, dtype=torch.float32)
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(1))
    y, truth = lin(x), x @ W.t()
    assert (y - truth).norm() / truth.norm() < 0.01


def test_errors_are_lowq_errors():
    with pytest.raises(lowq.LowqError, match="use --group 48"):
        lowq.quantize_tensor(torch.randn(4, 96), group_size=64)
    with pytest.raises(lowq.LowqError, match="method='magic'"):
        lowq.quantize_tensor(torch.randn(4, 64), method="magic")


def test_the_whole_journey(tmp_path):
    result = lowq.quantize("demo", out=tmp_path / "out", bits=4, group=64)
    assert {"out", "bpw", "bytes", "source_bytes", "quantized_fraction", "seconds", "peak_rss_bytes"} <= set(result)
    assert result["bytes"] < result["source_bytes"]
    model, tokenizer = lowq.load(tmp_path / "out", device="cpu")
    pieces = list(lowq.stream(model, tokenizer, "Once upon a time", max_new_tokens=8))
    assert "".join(pieces)
    score = lowq.perplexity(tmp_path / "out", "It was the best of times, it was the worst of times. " * 20)
    assert 1 < score["ppl"] < 1e4
