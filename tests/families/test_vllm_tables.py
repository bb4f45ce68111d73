"""A default checkpoint in the real vLLM: rows and logits of the table, for every family of which vLLM has a class.

The table is the head, too. What it must equal is vLLM's own result from a dense checkpoint of the same values.
"""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import tiny
from checkpoints import write_dequantized

import lowq
from lowq_cli.files.tensor_parallel import OTHER_LAYERS
from lowq_packers.errors import UnsupportedError

INSTALLED = importlib.util.find_spec("vllm") is not None
pytestmark = [
    pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM's classes run without its engine on a CPU"),
]
BF16 = 1.2e-2  # as of a kernel's product
IDS = [1, 17, 42, 99, 7, 3, 150, 23, 64, 5]
REFUSED = dict.fromkeys(OTHER_LAYERS, "are always dense") | {"gpt_oss": "all of an expert's weights packed"}
LEFT_OUT = {  # the rest of vLLM's families
    **dict.fromkeys(
        ("deepseek_v2", "jamba", "olmoe", "qwen3_next", "dbrx"), "its head is never tied: vLLM's class has no word for it"
    ),
    **dict.fromkeys(("deepseek_v4", "hrm_text", "hy_v4"), "lowq does not quantize what transformers saves of it"),
}
MORE = {"lfm2": {"block_dim": 64, "conv_dim": 64}, "falcon": {"ffn_hidden_size": 256}}  # what vLLM reads of published configs
USUAL = (
    "llama",
    "qwen3",
    "gemma",
    "gemma3_text",
    "gpt2",
    "cohere2",
    "granitemoehybrid",
    "lfm2_moe",
    "mixtral",
    "glm4",
    "bloom",
)


def families() -> list:
    """Model types that vLLM has a class for, with a text model alone."""
    if not INSTALLED:
        return []
    from vllm.model_executor.models.registry import ModelRegistry

    classes = tiny.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    supported = set(ModelRegistry.get_supported_archs())
    names = [
        n
        for n in tiny.model_types()
        if classes[n] in supported and n not in LEFT_OUT and not classes[n].endswith("ConditionalGeneration")
    ]
    return [pytest.param(n, marks=() if n in USUAL else pytest.mark.more) for n in names]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    for key, value in {"HF_HUB_OFFLINE": "1", "VLLM_PLUGINS": "lowq"}.items():
        monkeypatch.setenv(key, value)


@pytest.mark.parametrize("name", families())
def test_a_tied_familys_default_checkpoint_is_served(name, tmp_path):
    from vllm_models import tables

    tiny.build(name, tie_word_embeddings=True, **MORE.get(name, {})).to(torch.bfloat16).save_pretrained(tmp_path / "dense")
    lowq.quantize(tmp_path / "dense", out=tmp_path / "packed", device="cpu", bits=4, group=16, method="rtn")
    if name in REFUSED:
        with pytest.raises((UnsupportedError, ValueError), match=REFUSED[name]):  # pydantic makes a ValueError of some
            tables(tmp_path / "packed", IDS, "bfloat16")
        return
    write_dequantized(tmp_path / "dense", tmp_path / "packed", tmp_path / "values")
    try:
        rows, logits = tables(tmp_path / "values", IDS, "bfloat16")
    except Exception as e:
        pytest.skip(f"this vLLM does not load the dense model: {e!r}"[:300])
    packed_rows, packed_logits = tables(tmp_path / "packed", IDS, "bfloat16")
    assert torch.equal(packed_rows, rows)
    assert float((packed_logits - logits).norm() / logits.norm()) < BF16
