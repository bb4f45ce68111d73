"""gpt-oss' stacks of MXFP4 experts: as transformers unpacks them, and what is refused."""

import sys
from pathlib import Path

import pytest
import torch

from lowq_packers.errors import LowqError

sys.path.insert(0, str(Path(__file__).parent))
from format_support import fetcher, headers, read

from lowq_packers import formats
from lowq_packers.formats import check_used

P = "model.layers.0.mlp.experts"
CONFIG = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}}
E, H, INNER = 3, 64, 96


def stored():
    g = torch.Generator().manual_seed(0)

    def of(name, N, K):
        return {
            f"{P}.{name}_blocks": torch.randint(0, 256, (E, N, K // 32, 16), generator=g, dtype=torch.uint8),
            f"{P}.{name}_scales": torch.randint(110, 130, (E, N, K // 32), generator=g, dtype=torch.uint8),
            f"{P}.{name}_bias": torch.zeros(E, N, dtype=torch.bfloat16),
        }

    return of("gate_up_proj", 2 * INNER, H) | of("down_proj", H, INNER)


def checked(tensors):
    """As the reader of folders: every tensor has to be known."""
    check_used(formats.get("mxfp4").matrices(CONFIG, headers(tensors), fetcher(tensors)), headers(tensors))
    return read(tensors, CONFIG)


def test_experts_are_those_of_transformers():
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    tensors = stored()
    result = checked(tensors)
    assert len(result) == 3 * E
    for stack, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        theirs = mxfp4.convert_moe_packed_tensors(tensors[f"{P}.{stack}_blocks"], tensors[f"{P}.{stack}_scales"])  # (E, K, N)
        for e in range(E):
            ours = [result[f"{P}.{e}.{name}"].dequantize(torch.bfloat16) for name in parts]
            assert torch.equal(torch.stack(ours, 1).flatten(0, 1), theirs[e].T)


@pytest.mark.parametrize(
    ("leaf", "bend", "said"),
    [
        ("down_proj_scales", lambda t: t * 0 + 255, "NaN, infinite or negative"),
        ("down_proj_scales", lambda t: t[:, :-1].contiguous(), "asks for"),
        ("down_proj_scales", lambda t: t.float(), "dtype"),
        ("down_proj_blocks", lambda t: t[..., :8].contiguous(), "experts, rows, blocks, 16"),
        ("down_proj_blocks", lambda t: t[0].contiguous(), "experts, rows, blocks, 16"),
        ("gate_up_proj_blocks", lambda t: t[:, :-1].contiguous(), "asks for"),
        ("side_proj_blocks", lambda t: torch.zeros(1, 2, 1, 16, dtype=torch.uint8), "experts, rows, blocks, 16"),
        ("gate_up_proj_rotation", lambda t: torch.zeros(2), "does not know what it does"),
    ],
)
def test_hostile_stacks_are_refused_in_one_line(leaf, bend, said):
    tensors = stored()
    bent = {**tensors, f"{P}.{leaf}": bend(tensors.get(f"{P}.{leaf}"))}
    with pytest.raises(LowqError, match=said) as e:
        checked(bent)
    assert "\n" not in str(e.value)


def test_settings_that_lowq_does_not_know_are_refused():
    with pytest.raises(LowqError, match="might change weights"):
        read(stored(), {"quantization_config": {**CONFIG["quantization_config"], "rotation": "hadamard"}})
