"""lowq export for several tensor-parallel ranks: weights that they cannot share are refused or reported before writing."""

import json
import re

import pytest
from exported import SYM

import lowq
from lowq_cli.files.tensor_parallel import fusion_problems, shard_problems
from lowq_cli.interop.exporter import export
from lowq_packers.errors import UnsupportedError
from lowq_packers.scheme import Scheme

QWEN = {"hidden_size": 3584, "num_key_value_heads": 4, "num_attention_heads": 28}
QWEN_SHAPES = {
    "q_proj": (3584, 3584),
    "k_proj": (512, 3584),
    "v_proj": (512, 3584),
    "o_proj": (3584, 3584),
    "gate_proj": (18944, 3584),
    "up_proj": (18944, 3584),
    "down_proj": (3584, 18944),
}


@pytest.mark.parametrize(
    ("group", "ranks", "bad"), [(128, 1, 0), (128, 2, 0), (128, 4, 1), (64, 4, 0), (64, 8, 1), (32, 8, 0), (128, 8, 2)]
)
def test_qwen_7b_over_ranks(group, ranks, bad):
    """down_proj: 18944 / 4 = 37 * 128, / 8 = 2368 = 37 * 64; o_proj: 3584 / 4 = 7 * 128, / 8 = 448 = 3.5 * 128."""
    schemes = {n: Scheme(4, group, "none") for n in QWEN_SHAPES}
    problems = shard_problems(QWEN, schemes, QWEN_SHAPES, ranks)
    bad_rows = {(128, 4): 0, (64, 8): 0}.get((group, ranks), bad)
    assert len(problems) == bad_rows, problems
    if group == 128 and ranks == 8:
        assert any("down_proj" in p and "2368" in p and "down_proj=4:64" in p for p in problems)


def test_fused_weights_must_agree():
    schemes = {"a.q_proj": Scheme(4, 64), "a.k_proj": Scheme(8, 64), "a.v_proj": Scheme(4, 64), "m.gate_proj": Scheme(4, 64)}
    (line,) = fusion_problems(schemes)
    assert "a.qkv_proj" in line


def test_a_checkpoint_that_vllm_would_refuse_is_exported_with_a_note(bf16_checkpoints, tmp_path):
    folders = bf16_checkpoints("llama", SYM)
    assert "vLLM" in export(folders.packed, "gptq", tmp_path / "good").engines
    folder = tmp_path / "mixed"
    lowq.quantize(folders.dense, out=folder, bits=4, group=32, zero="none", overrides=["q_proj=8"])
    done = export(folder, "gptq", tmp_path / "out")
    assert "vLLM" not in done.engines
    assert any("qkv_proj is made of" in note for note in done.notes)
    rules = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["dynamic"]
    assert any(re.match(rule.removeprefix("+:"), "model.layers.0.self_attn.qkv_proj") for rule in rules)


def test_check_tp_refuses_before_writing(bf16_checkpoints, tmp_path):
    folders = bf16_checkpoints("llama", SYM)
    with pytest.raises(UnsupportedError, match="8 tensor-parallel ranks"):
        export(folders.packed, "gptq", tmp_path / "out", check_tp=8)
    assert not list(tmp_path.iterdir())
    folders = bf16_checkpoints("llama", {"attention": Scheme(4, 16, "none"), "mlp": Scheme(4, 16, "none")})
    export(folders.packed, "gptq", tmp_path / "out", check_tp=2)
