"""What distill learnt besides codes and scales (norms, the embedding) is in every export: the logits are the checkpoint's."""

import shutil

import pytest
import torch
from checkpoints import write_byte_tokenizer
from exported import FLOAT, INT4, SYM
from safetensors.torch import load_file, save_file

import lowq
from lowq_cli.interop.exporter import export
from lowq_cli.run.pipeline import quantize

pytestmark = pytest.mark.usefixtures("own_cache")
IDS = torch.arange(3, 43).reshape(2, 20)


def learnt(packed, folder, share):
    """A copy of a checkpoint whose norms and embedding are changed by up to this fraction."""
    shutil.copytree(packed, folder)
    tensors, draw = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    names = [n for n, t in tensors.items() if t.is_floating_point() and ("norm" in n or n.endswith("embed_tokens.weight"))]
    assert len(names) > 5
    for n in names:
        moved = 1 + share * (2 * torch.rand(tensors[n].shape, generator=draw) - 1)
        tensors[n] = (tensors[n].float() * moved).to(tensors[n].dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@torch.inference_mode()
def logits(model):
    return lowq.load(model, device="cpu")[0](input_ids=IDS, use_cache=False).logits.float()


def differ(a, b):
    return float((a - b).norm() / b.norm())


def check(packed, to, folder):
    """An export of a checkpoint with learnt values has the checkpoint's logits; with the original ones it would not."""
    source = learnt(packed, folder / "learnt", 0.3)
    expected = logits(source)
    done = export(source, to, folder / ("out.gguf" if to == "gguf" else "out"))
    assert differ(logits(done.out), expected) < 1e-2
    assert differ(logits(packed), expected) > 5e-2


CASES = [("gptq", SYM), ("awq", INT4), ("compressed-tensors", INT4), ("hqq", FLOAT), ("mlx", SYM)]


@pytest.mark.parametrize(("to", "schemes"), CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_learnt_values_are_exported(bf16_checkpoints, tmp_path, to, schemes):
    packed = shutil.copytree(bf16_checkpoints("llama", schemes).packed, tmp_path / "packed")
    check(write_byte_tokenizer(packed), to, tmp_path)


@pytest.mark.parametrize("to", ["gguf", "humming"])
def test_learnt_values_are_exported_from_the_demo(demo4, tmp_path, to):
    check(demo4, to, tmp_path)


@pytest.mark.parametrize("layout", ["rowstream", "cpu"])
@pytest.mark.parametrize("family", ["llama", "llama-tied"])
@pytest.mark.parametrize(("to", "schemes"), CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_a_packed_embedding_is_exported(family_checkpoints, tmp_path, to, schemes, family, layout):
    """As it is, or unpacked where the format has no place for it."""
    dense, scheme = family_checkpoints(family, "bfloat16").dense, next(iter(schemes.values()))
    how = {"bits": scheme.bits, "group": scheme.group_size, "zero": scheme.zero, "method": "rtn", "lm_head": "keep"}
    quantize(dense, tmp_path / "packed", embedding=8 if to == "mlx" else 4, layout=layout, **how)
    done = export(tmp_path / "packed", to, tmp_path / "out")
    said = [note for note in done.notes if "embed_tokens.weight is written unpacked, as BF16" in note]
    assert bool(said) == (to != "mlx")
    assert differ(logits(done.out), logits(tmp_path / "packed")) < 1e-2
    assert differ(logits(dense), logits(tmp_path / "packed")) > 2e-2
