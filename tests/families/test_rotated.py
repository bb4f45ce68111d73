"""A rotation of every described family: the same logits where its description says so, else a reason."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

sys.path.insert(0, str(Path(__file__).parent))
from described import NAMES, VOCAB, auto
from described import model as random_model

from emulation import sampled
from lowq_cli.calibrate.rotation import rotated
from lowq_cli.files.source import open_source
from lowq_packers.errors import UnsupportedError

REASONS = {
    "subtracts the mean": (
        *("cohere", "cohere2", "gpt_neox", "gpt_neox/one_after_the_other", "jais2", "nemotron", "olmo"),
        *("persimmon", "phi", "stablelm", "stablelm/side_by_side", "starcoder2"),
    ),
    "norms behind": (
        *("gemma2", "gemma3", "gemma3_text", "gemma4", "gemma4_text", "gemma4_text/31b", "gemma4_text/e2b"),
        *("glm4", "olmo2", "olmo3", "flex_olmo", "hyperclovax", "afmoe", "exaone4", "exaone4/no_window"),
    ),
    "biases of its experts": ("gpt_oss",),
    "would have to be rotated as well": (
        *("mistral3", "mistral3/ministral3", "mistral3/mistral4", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
        *("qwen3_5", "qwen3_5_moe", "llama4", "gemma3", "gemma4", "llava", "internvl"),
    ),
}


def write(name: str, folder: Path) -> Path:
    made = random_model(name)
    made.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "name", sampled(n for n in NAMES if n != "kimi_k25")
)  # transformers 5.23 does not read what it wrote of that
def test_a_rotated_model_has_the_same_logits_or_a_reason(name, tmp_path):
    reasons = [reason for reason, names in REASONS.items() if name in names]
    with open_source(write(name, tmp_path / "dense")) as raw:
        if reasons:
            with pytest.raises(UnsupportedError) as refused:
                rotated(raw)
            assert any(reason in str(refused.value) for reason in reasons)
            return
        turned = rotated(raw)
        changed = {n for n, h in raw.headers.items() if n in turned.changes and len(h.shape) > 1}
        assert all(float((turned.read(n) - raw.read(n)).norm() / raw.read(n).norm()) > 0.3 for n in changed)
        (tmp_path / "rotated").mkdir()
        tensors = {n: turned.read(n).reshape(h.shape).contiguous() for n, h in turned.headers.items()}
        save_file(tensors, tmp_path / "rotated" / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / "rotated" / "config.json").write_text(json.dumps(turned.config))
    expected, result = logits(tmp_path / "dense"), logits(tmp_path / "rotated")
    assert float((expected - result).norm() / expected.norm()) < 1e-4


def logits(folder: Path) -> torch.Tensor:
    ids = torch.arange(96).reshape(3, 32) % VOCAB
    made = auto(AutoConfig.from_pretrained(folder)).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return made(input_ids=ids).logits
