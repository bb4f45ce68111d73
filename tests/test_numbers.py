"""Scales and zeros that a dtype cannot hold are an error that names the dtype that can; no rows in, none out."""

import pytest
import torch

import lowq
from lowq_kernels.dispatch.registry import matmul
from lowq_packers.errors import LowqError, SchemeError

W = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))


def norm(t):
    return t.double().norm()


@pytest.mark.parametrize("factor", [1e-6, 1e6, 1e30])
@pytest.mark.parametrize("zero", ["float", "none"])
def test_a_layer_of_weights_beyond_fp16_is_refused_and_bf16_holds_it(factor, zero):
    q = lowq.quantize_tensor(W * factor, zero=zero)
    with pytest.raises(SchemeError, match="do not fit float16; use bfloat16 or float32"):
        lowq.QuantLinear.from_quantized(q)
    wide = lowq.QuantLinear.from_quantized(q, dtype=torch.bfloat16)
    y = wide(torch.eye(128).bfloat16()).float().T
    assert norm(y - q.dequantize()) < 0.02 * norm(q.dequantize())
    with pytest.raises(SchemeError, match="do not fit float16"):
        wide.half()
    assert torch.equal(wide(torch.eye(128).bfloat16()).float().T, y), "the refused change changed nothing"
    wide.float().bfloat16()


@pytest.mark.parametrize("factor", [1e-9, 1e7, 1e30])
def test_so_does_quantize_tensor(factor):
    with pytest.raises(SchemeError, match="do not fit float16; use bfloat16"):
        lowq.quantize_tensor(W * factor, dtype=torch.float16)
    q = lowq.quantize_tensor(W * factor, dtype=torch.bfloat16)
    assert norm(q.dequantize() - W * factor) < 0.2 * norm(W * factor)


def test_rows_that_are_next_to_nothing_do_not_count():
    weight = W.clone()
    weight[:8] = 1e-12
    layer = lowq.QuantLinear.from_quantized(lowq.quantize_tensor(weight, dtype=torch.float16))
    y = layer(torch.eye(128).half()).float().T
    assert (y - weight).norm() < 0.2 * weight.norm()


@pytest.mark.parametrize("factor", [1e-9, 1e7])
def test_so_does_a_run(factor, tmp_path):
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 160}
    AutoModelForCausalLM.from_config(LlamaConfig(**sizes)).save_pretrained(tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name] * factor}, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LowqError, match=f"{name}: its scales do not fit float16; use --dtype bfloat16"):
        lowq.quantize(tmp_path / "m", tmp_path / "half", method="rtn", dtype="float16")
    assert not (tmp_path / "half" / "config.json").exists()
    lowq.quantize(tmp_path / "m", tmp_path / "wide", method="rtn", dtype="float32")


@pytest.mark.parametrize("shape", [(0, 128), (2, 0, 128), (0, 3, 128)])
@pytest.mark.parametrize("bias", [False, True])
def test_no_rows_in_none_out(shape, bias):
    layer = lowq.QuantLinear.from_quantized(lowq.quantize_tensor(W), torch.zeros(64) if bias else None)
    y = layer(torch.zeros(shape, dtype=torch.float16))
    assert y.shape == torch.nn.Linear(128, 64)(torch.zeros(shape)).shape
    assert y.dtype == torch.float16
    assert matmul(torch.zeros(0, 128, dtype=torch.float16), layer.packed).shape == (0, 64)
