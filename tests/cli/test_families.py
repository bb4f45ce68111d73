"""Ten families: the packed checkpoint computes what its dequantized weights compute, saves to itself, and generates."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lowq_cli.files.quant_config import expand
from lowq_cli.files.safetensors_io import read_json
from lowq_cli.files.source import open_source
from lowq_cli.hf import register
from lowq_cli.hf.experts import QuantExperts
from lowq_cli.hf.load import load_model
from lowq_kernels.modules.linear import QuantLinear

FAMILIES = ("llama", "llama-tied", "qwen2", "qwen3", "mistral", "gemma3", "phi3", "gpt2", "mixtral", "qwen3-moe")
FP32 = 1e-5  # relative Frobenius; the same fp32 products, summed in another order at most
BF16 = 2e-2  # design section 9's 1.2e-2 per product, through two layers
IDS = torch.tensor([[1, 17, 42, 99, 7, 3, 150, 23, 64, 5]])


def logits(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    with open_source(folder) as source:
        model = load_model(source, "cpu", dtype)
    with torch.no_grad():
        return model(IDS).logits.float()


def distance(y: torch.Tensor, ref: torch.Tensor) -> float:
    return float((y - ref).norm() / ref.norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_dequantized_model(family, family_checkpoints):
    c = family_checkpoints(family)
    expected = logits(c.dequantized, torch.float32)
    assert distance(logits(c.packed, torch.float32), expected) < FP32
    assert distance(logits(c.dense, torch.float32), expected) > 100 * FP32  # quantization changed something to compare


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "qwen3-moe"])
def test_bf16_logits_through_the_int4_kernel(family, family_checkpoints):
    c = family_checkpoints(family, "bfloat16")
    assert distance(logits(c.packed, torch.bfloat16), logits(c.dequantized, torch.float32)) < BF16


@pytest.mark.parametrize("family", FAMILIES)
def test_saves_to_the_same_tensors_and_generates(family, family_checkpoints, tmp_path):
    c = family_checkpoints(family)
    with open_source(c.packed) as source:
        model = load_model(source, "cpu", torch.float32)
    packed = [m for m in model.modules() if isinstance(m, QuantLinear | QuantExperts)]
    assert packed
    assert not any(p.requires_grad for m in packed for p in m.parameters())
    model.save_pretrained(tmp_path)
    before, after = load_file(c.packed / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) and before[k].dtype == after[k].dtype for k in before)
    stems = [k.removesuffix(".weight") for k in after if k.endswith(".weight")]
    assert expand(read_json(tmp_path / "config.json")["quantization_config"], stems) == c.schemes
    with torch.no_grad():
        expected = model(IDS).logits
    assert torch.equal(logits(tmp_path, torch.float32), expected)
    out = model.generate(IDS, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert out.shape == (1, IDS.shape[1] + 4)


def test_a_plain_from_pretrained_is_enough(family_checkpoints):
    from transformers import AutoModelForCausalLM

    register()
    c = family_checkpoints("llama", "bfloat16")
    model = AutoModelForCausalLM.from_pretrained(c.packed)
    assert model.dtype == torch.bfloat16  # dtype=None: the checkpoint's own
    assert model.model.layers[0].self_attn.q_proj.layout in ("cpu", "cpu_int4")  # prepared for this device


@pytest.mark.parametrize("family", FAMILIES)
def test_output_of_the_pipeline_loads(family, family_checkpoints, dequantize_checkpoint, tmp_path):
    from lowq_cli.run.pipeline import quantize

    dense = family_checkpoints(family).dense
    result = quantize(dense, out=tmp_path / "packed", bits=4, group=16, method="rtn", device="cpu")
    assert result["quantized_fraction"] > 0.5
    reference = dequantize_checkpoint(dense, tmp_path / "packed", tmp_path / "dequantized")
    assert distance(logits(tmp_path / "packed", torch.float32), logits(reference, torch.float32)) < FP32


def test_a_tied_head_can_be_written_separately(family_checkpoints, dequantize_checkpoint, tmp_path):
    from lowq_cli.run.pipeline import quantize

    dense = family_checkpoints("llama-tied").dense
    quantize(dense, out=tmp_path / "packed", bits=4, group=16, method="rtn", lm_head=8, device="cpu")
    with open_source(tmp_path / "packed") as source:
        model = load_model(source, "cpu", torch.float32)
    assert isinstance(model.lm_head, QuantLinear)
    reference = dequantize_checkpoint(dense, tmp_path / "packed", tmp_path / "dequantized")
    assert distance(logits(tmp_path / "packed", torch.float32), logits(reference, torch.float32)) < FP32


def test_a_saved_mixture_with_one_dense_layer_loads(family_checkpoints, tmp_path):
    """A pattern of the saved config may not reach the experts that stayed dense, whose stacks are saved one by one."""
    from lowq_cli.run.pipeline import quantize

    dense = family_checkpoints("mixtral").dense
    quantize(dense, out=tmp_path / "packed", bits=4, group=16, method="rtn", skip=["layers.0"], device="cpu")
    with open_source(tmp_path / "packed") as source:
        load_model(source, "cpu", torch.float32).save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(tmp_path / "saved", torch.float32), logits(tmp_path / "packed", torch.float32))
