"""Rotations: orthogonal at every size, and a rotated model is the same function."""

import json
import shutil

import pytest
import torch

from lowq_cli.calibrate.orthogonal import Rotation
from lowq_cli.calibrate.rotation import rotated
from lowq_cli.files.source import open_source
from lowq_cli.hf import register
from lowq_cli.plan.recipe import make_recipe
from lowq_cli.run import pipeline
from lowq_packers.errors import UnsupportedError, UsageError

FAMILIES = ["llama", "llama-tied", "mistral", "qwen2", "qwen3", "phi3", "mixtral", "qwen3-moe"]


@pytest.mark.parametrize("n", [1, 15, 22, 60, 64, 80, 96, 100, 512, 896, 1408, 1536])
def test_every_size_is_orthogonal(n):
    rotation = Rotation(n, 3)
    R = rotation.apply(torch.eye(n))
    assert torch.allclose(R @ R.T, torch.eye(n), atol=2e-6)
    assert torch.equal(R, Rotation(n, 3).apply(torch.eye(n)))
    assert torch.allclose(R.abs(), torch.full((n, n), n**-0.5), atol=1e-6) == (n not in (15, 22, 100))
    assert n == 1 or not torch.equal(R, Rotation(n, 4).apply(torch.eye(n)))


def materialize(source, folder):
    """The source written as an ordinary dense checkpoint."""
    from safetensors.torch import save_file

    folder.mkdir()
    tensors = {n: source.read(n).reshape(h.shape).contiguous() for n, h in source.headers.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(source.config))
    return folder


def logits(folder):
    from transformers import AutoModelForCausalLM

    ids = torch.arange(96).reshape(3, 32)
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(input_ids=ids).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rotated_model_has_the_same_logits(family, family_checkpoints, tmp_path):
    dense = family_checkpoints(family, schemes={}).dense
    with open_source(dense) as raw:
        turned = rotated(raw)
        before = raw.read("model.layers.1.self_attn.o_proj.weight")
        assert float((turned.read("model.layers.1.self_attn.o_proj.weight") - before).norm() / before.norm()) > 0.5
        folder = materialize(turned, tmp_path / "rotated")
    expected, result = logits(dense), logits(folder)
    assert expected.std() > 0.05
    assert float((expected - result).abs().max()) < 1e-4


def test_parts_of_a_tensor_are_read_as_the_whole(family_checkpoints):
    with open_source(family_checkpoints("phi3").dense) as raw:
        turned, again = rotated(raw), rotated(raw)  # two: one keeps the last tensor that it has turned
        for name, header in turned.headers.items():
            whole = turned.read(name)
            first, count = header.numel // 3, header.numel // 5
            assert torch.allclose(again.read(name, first, count), whole[first : first + count], atol=1e-6)
            raw_bytes = again.read_raw(name, 4 * first, 4 * count)
            assert torch.allclose(torch.frombuffer(raw_bytes, dtype=torch.float32), whole[first : first + count], atol=1e-6)


def test_a_refusal_comes_before_anything_is_written_and_says_the_way_out(family_checkpoints, tmp_path):
    dense = family_checkpoints("gemma3").dense
    with pytest.raises(UnsupportedError, match="leave it out"):
        list(pipeline.run(dense, make_recipe(rotate=True), tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    with pytest.raises(UsageError, match="rotate='yes' must be true or false"):
        make_recipe(rotate="yes")


def test_rotated_weights_have_no_outliers(family_checkpoints, tmp_path):
    """A large channel of the stream and of a norm is shared out over all."""
    from safetensors.torch import load_file, save_file

    dense = tmp_path / "dense"
    shutil.copytree(family_checkpoints("llama").dense, dense)
    tensors = load_file(dense / "model.safetensors")
    tensors["model.layers.0.input_layernorm.weight"][5] = 40.0
    save_file(tensors, dense / "model.safetensors", metadata={"format": "pt"})
    name = "model.layers.0.self_attn.q_proj.weight"
    with open_source(dense) as raw:
        before, after = (s.read(name).reshape(64, 64) for s in (raw, rotated(raw)))
    before = before * tensors["model.layers.0.input_layernorm.weight"]
    assert torch.allclose(before.norm(), after.norm(), rtol=1e-4)
    kurtosis = [float((W / W.std()).pow(4).mean()) for W in (before, after)]
    assert kurtosis[0] > 20
    assert kurtosis[1] < 4


def test_a_rotated_checkpoint_is_an_ordinary_one(family_checkpoints, tmp_path):
    register()
    dense = family_checkpoints("llama-tied").dense
    with pipeline.prepare(dense, make_recipe(bits=8, group=32, rotate=True), tmp_path / "out") as prepared:
        assert any("output head a matrix of its own" in note for note in prepared.plan.notes)
        list(pipeline.execute(prepared))
    result, expected = logits(tmp_path / "out"), logits(dense)
    assert float((result - expected).norm() / expected.norm()) < 0.02
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    again = list(pipeline.run(dense, make_recipe(bits=8, group=32, rotate=True), tmp_path / "out"))
    assert again[-1].result.already_done
