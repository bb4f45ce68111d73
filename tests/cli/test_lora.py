"""LoRA by PEFT over packed layers: it trains as over the dequantized model, and unsupported adapters are refused."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import lowq
from lowq_cli.hf import register
from lowq_packers.errors import UnsupportedError

peft = pytest.importorskip("peft", reason="LoRA needs peft")
TEXT = "Once upon a time there was a quiet machine that read every book in the library, one page after another, until dawn. "
STEPS = 12


@pytest.fixture(scope="module")
def checkpoint(short_demo, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora") / "packed"
    lowq.quantize(short_demo, out=folder, bits=4, group=64, method="rtn", device="cpu")
    return folder


def opened(folder, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def ids_of(folder) -> torch.Tensor:
    return AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt").input_ids


def adapted(model, **how):
    torch.manual_seed(0)
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", "target_modules": "all-linear"} | how)
    return peft.get_peft_model(model, config)


def losses(model, ids) -> list[float]:
    """Of STEPS steps of Adam on one text."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    result = []
    model.train()
    for _ in range(STEPS):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        result.append(float(loss))
    return result


def distance(a, b):
    return float((a.float() - b.float()).norm() / b.float().norm())


def test_all_linear_finds_the_layers_that_it_finds_in_the_dense_model(checkpoint):
    packed, dense = adapted(opened(checkpoint)), adapted(opened(checkpoint).dequantize())
    wrapped = [{n for n, m in model.named_modules() if hasattr(m, "lora_A")} for model in (packed, dense)]
    assert wrapped[0] == wrapped[1]
    assert sum(isinstance(m, lowq.QuantLinear) for m in packed.modules()) >= len(wrapped[0]) > 0


def test_it_trains_as_over_the_dequantized_model(checkpoint):
    ids = ids_of(checkpoint)
    model = adapted(opened(checkpoint))
    before = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    result, expected = losses(model, ids), losses(adapted(opened(checkpoint).dequantize()), ids)
    assert result == pytest.approx(expected, rel=1e-3)
    assert result[-1] < 0.8 * result[0]
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters() if n in before)


def test_by_name_and_by_registering_late(checkpoint):
    """PEFT was imported before lowq here: `register` finds it, as often as it is called."""
    register()
    model = adapted(opened(checkpoint), target_modules=["q_proj", "v_proj"])
    assert {n.rpartition(".")[2] for n, m in model.named_modules() if hasattr(m, "lora_A")} == {"q_proj", "v_proj"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_after_prepare_model_for_kbit_training(checkpoint, dtype):
    """It converts all 16-bit tensors to fp32, also those of packed layers."""
    ids = ids_of(checkpoint)
    model = opened(checkpoint, dtype)
    with torch.no_grad():
        expected = copy.deepcopy(model).dequantize(dtype=torch.float32)(ids).logits
        prepared = peft.prepare_model_for_kbit_training(model)
        assert distance(prepared(ids).logits, expected) < 1e-5
    result = losses(adapted(prepared), ids)
    assert result[-1] < 0.8 * result[0]


def test_merging_is_refused_until_the_model_is_dequantized(checkpoint, tmp_path):
    ids = ids_of(checkpoint)
    model = adapted(opened(checkpoint))
    losses(model, ids)
    model.eval()
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        with pytest.raises(UnsupportedError, match=r"call dequantize\(\) on the model first"):
            model.merge_and_unload()
        assert distance(model(input_ids=ids).logits, expected) < 1e-6
        model.save_pretrained(tmp_path / "adapter")
        again = peft.PeftModel.from_pretrained(opened(checkpoint), tmp_path / "adapter").eval()
        assert distance(again(input_ids=ids).logits, expected) < 1e-5
        again.dequantize()
        merged = again.merge_and_unload()
        assert distance(merged(input_ids=ids).logits, expected) < 1e-5
    merged.save_pretrained(tmp_path / "merged")
    assert distance(opened(tmp_path / "merged")(ids).logits, expected) < 1e-5


@pytest.mark.parametrize(
    "config",
    [peft.LoraConfig(use_dora=True, target_modules=["q_proj"]), peft.LoHaConfig(target_modules=["q_proj"])],
    ids=["dora", "loha"],
)
def test_adapters_that_need_dense_weights_are_refused(checkpoint, config):
    with pytest.raises((TypeError, ValueError), match=r"unsupported variant|not supported"):
        peft.get_peft_model(opened(checkpoint), config)
