"""Whole checkpoints in the real vLLM compute what lowq's own model computes: every family, kind of head and table, and width.

Where vLLM can be imported: on a GPU through `LLM`, else its model classes and loaders (tests/cli/vllm_models.py says how).
"""

import importlib.util
import os

import pytest
import torch
from checkpoints import FAMILIES, write_dense

import lowq
from lowq_cli.files.source import open_source
from lowq_cli.hf.load import load_model
from lowq_packers.errors import UnsupportedError
from lowq_packers.layouts import pack_facts
from lowq_packers.scheme import Scheme

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
BF16 = 2e-2  # two layers, their sums in other orders
IDS = [1, 17, 42, 99, 7, 3, 150, 23, 64, 5]
DENSE = ("llama", "qwen2", "qwen3", "mistral", "phi3")
TIED = {f"{f}-tied": (FAMILIES[f][0], FAMILIES[f][1] | {"tie_word_embeddings": True}) for f in (*DENSE[1:], "qwen3-moe")}


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    for key, value in {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_PLUGINS": "lowq"}.items():
        monkeypatch.setenv(key, os.environ.get(key, value))


@pytest.fixture
def distance(tmp_path):
    """Quantize a tiny random model; how far vLLM's logits are from those of lowq's own model, less their means."""

    def compare(family: str, dtype: str = "bfloat16", **how: object) -> float:
        from vllm_models import logprobs

        write_dense(tmp_path / "dense", TIED.get(family, family), "bfloat16")
        lowq.quantize(tmp_path / "dense", out=tmp_path / "packed", device="cpu", **how)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        folder = tmp_path / "packed"
        with open_source(folder) as source, torch.no_grad():
            model = load_model(source, device, getattr(torch, dtype))
            own = model(torch.tensor([IDS], device=device)).logits[0].float().cpu()
        result = logprobs(tmp_path / "packed", IDS, dtype)
        own = own[: len(result)]
        assert result.shape == own.shape
        result, own = (rows - rows.mean(-1, keepdim=True) for rows in (result, own))
        return float((result - own).norm() / own.norm())

    return compare


@pytest.mark.parametrize("family", [*DENSE, "llama-tied", *TIED, "gemma3", "mixtral", "qwen3-moe"])
def test_families(family, distance):
    assert distance(family, bits=4, group=16) < BF16


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2-tied", "qwen3-tied", "gemma3", "mixtral", "qwen3-moe-tied"])
def test_packed_tables_and_heads(family, distance):
    tied = family.endswith("tied") or family == "gemma3"
    assert distance(family, bits=4, group=16, embedding=8, **({} if tied else {"lm_head": 4})) < BF16


@pytest.mark.parametrize("bits", [8, 3, 2, 1])
@pytest.mark.parametrize(("group", "zero"), [(32, "float"), ("channel", "int"), (16, "none")])
def test_schemes(bits, group, zero, distance):
    assert distance("llama", "float16" if zero == "int" else "bfloat16", bits=bits, group=group, zero=zero) < BF16


def test_layers_of_several_schemes(distance):
    assert distance("llama", bits=4, group=16, overrides=["layers.0.*=8:32", "down_proj=2:16"]) < BF16


TABLES = [{"format": "nvfp4"}, {"format": "mxfp4"}, {"format": "nf4", "group": 16}, {"format": "table", "bits": 3, "group": 16}]


@pytest.mark.parametrize("how", TABLES, ids=lambda how: how["format"])
@pytest.mark.parametrize("family", ["llama", "phi3", "qwen3-moe"])
def test_tables(family, how, distance):
    """Each matrix that vLLM joins has a table, or a factor, of its own; Phi-3's are joined in the file."""
    if (family, how["format"]) == ("qwen3-moe", "mxfp4"):  # 48 columns of down_proj are no groups of 32
        with pytest.raises(UnsupportedError, match="all of an expert's weights packed, or none"):
            distance(family, **how)
        return
    assert distance(family, **how) < BF16


@pytest.mark.parametrize("act", ["int8", "fp8"])
def test_rounded_activations(act, distance):
    """A coarse rounding of x multiplies what two orders of summing differ by."""
    assert distance("llama", bits=4, group=16, act=act) < (2e-2 if act == "int8" else 4e-2)


def test_another_layout_is_another_compiled_graph():
    """vLLM keeps graphs by the hash of its config; a layer's layout stands in them as a constant."""
    from vllm.config import VllmConfig, set_current_vllm_config

    from lowq_cli.vllm_plugin.linear import note

    hashes = []
    for layouts in (("strided",), ("tile",), ("tile", "strided"), ("strided", "tile", "strided")):
        with set_current_vllm_config(config := VllmConfig()):
            for layout in layouts:
                note(pack_facts(Scheme(4, 128), 256, 256, layout))
        hashes.append(config.compute_hash())
    assert len(set(hashes)) == 3
    assert hashes[2] == hashes[3]
