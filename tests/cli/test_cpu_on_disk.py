"""`lowq quantize --layout cpu`: the words of the files are those that CPU kernels read."""

import pytest
import torch
from safetensors.torch import load_file

from lowq_cli.files.checkpoint import open_checkpoint
from lowq_cli.files.source import open_source
from lowq_cli.hf.load import load_model
from lowq_cli.run import transform
from lowq_cli.run.pipeline import quantize
from lowq_kernels.products.cpu import native

Q = "model.layers.0.self_attn.q_proj"
RECIPE = {"bits": 3, "group": 32, "method": "rtn", "lm_head": 8, "overrides": ["o_proj=2:16", "down_proj=1:channel"]}


@pytest.fixture(scope="module")
def both(family_checkpoints, tmp_path_factory):
    """(rowstream, cpu) checkpoints of one model and recipe; the cpu one quantized in slabs of 24 rows."""
    folder, dense = tmp_path_factory.mktemp("cpu"), family_checkpoints("llama").dense
    quantize(dense, folder / "row", **RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transform, "slab_rows", lambda K, device: 24)
        quantize(dense, folder / "cpu", layout="cpu", **RECIPE)
    return folder / "row", folder / "cpu"


def test_the_same_weights_in_another_order(both):
    row, cpu = map(open_checkpoint, both)
    layouts = {t.name: t.layout for t in cpu.tensors if t.scheme}
    assert layouts[Q] == layouts["lm_head"] == layouts["model.layers.1.mlp.down_proj"] == "cpu"
    assert layouts["model.layers.0.self_attn.o_proj"] == "rowstream"  # groups of 16
    for a, b in zip(row.tensors, cpu.tensors, strict=True):
        assert (a.name, a.shape, a.scheme, a.dtype) == (b.name, b.shape, b.scheme, b.dtype)
        if a.scheme:
            p, q = row.read_matrix(a), cpu.read_matrix(b)
            assert all(torch.equal(getattr(p, part), getattr(q, part)) for part in ("W_q", "scales", "zeros")), a.name
    assert cpu.check_values() == cpu.nbytes


@pytest.mark.skipif(native.library() is None, reason="own CPU kernels are not built here")
def test_it_computes_the_same_from_the_words_of_the_file(both):
    x = torch.arange(12)[None] % 160
    models = []
    for folder in both:
        with open_source(folder) as source:
            models.append(load_model(source, "cpu", "bfloat16"))
    assert torch.equal(models[0](x).logits, models[1](x).logits)
    layer = models[1].get_submodule(Q)
    assert layer.layout == "cpu"
    assert torch.equal(layer.weight, load_file(both[1] / "model.safetensors")[f"{Q}.weight"])
