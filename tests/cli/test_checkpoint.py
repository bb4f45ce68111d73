"""Reading a lowq folder: a run's output opens; contradictory files are refused, whichever byte is wrong."""

import json
import random
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from lowq_cli import main
from lowq_cli.files.checkpoint import is_checkpoint, open_checkpoint
from lowq_cli.files.shapes import check_shapes
from lowq_cli.run.pipeline import quantize
from lowq_packers.errors import DamagedError, LowqError, NotFoundError, UnsupportedError, UsageError
from lowq_packers.scheme import Scheme

Q = "model.layers.0.self_attn.q_proj"
FLIPS = 1500


@pytest.fixture(scope="session")
def sound(family_checkpoints, tmp_path_factory):
    """A checkpoint with three schemes. Tests must not write into it."""
    folder = tmp_path_factory.mktemp("sound") / "out"
    recipe = {"bits": 4, "group": 32, "lm_head": 8, "overrides": ["down_proj=3:channel"], "method": "rtn"}
    quantize(family_checkpoints("llama").dense, folder, **recipe)
    return folder


@pytest.fixture
def folder(sound, tmp_path):
    return shutil.copytree(sound, tmp_path / "ckpt")


def table(checkpoint):
    return [(t.name, t.shape, t.scheme, t.dtype, t.nbytes) for t in checkpoint.tensors]


def test_a_checkpoint_tells_its_tensors(sound, family_checkpoints):
    checkpoint = open_checkpoint(sound)
    dense = load_file(family_checkpoints("llama").dense / "model.safetensors")
    assert {f"{t.name}.weight" if t.scheme else t.name: t.shape for t in checkpoint.tensors} == {
        n: tuple(t.shape) for n, t in dense.items()
    }
    assert checkpoint.schemes[Q] == Scheme(4, 32)
    assert checkpoint.schemes["lm_head"] == Scheme(8, 32)
    assert checkpoint.schemes["model.layers.1.mlp.down_proj"] == Scheme(3, 96)
    q = next(t for t in checkpoint.tensors if t.name == Q)
    assert q.bpw == pytest.approx(4 + 2 * 32 / 32)
    assert checkpoint.nbytes == sum(t.numel() * t.element_size() for t in load_file(sound / "model.safetensors").values())
    assert checkpoint.check_values() == checkpoint.nbytes
    assert is_checkpoint(sound)
    assert not is_checkpoint(family_checkpoints("llama").dense)


def test_folders_that_are_not_checkpoints_have_different_errors(folder, tmp_path, family_checkpoints):
    with pytest.raises(NotFoundError, match="no folder"):
        open_checkpoint(tmp_path / "none")
    with pytest.raises(UsageError, match="not quantized; run: lowq quantize"):
        open_checkpoint(family_checkpoints("llama").dense)
    edit(folder, lambda c: c["quantization_config"].update(quant_method="awq"))
    with pytest.raises(UnsupportedError, match="awq"):
        open_checkpoint(folder)
    (folder / "config.json").unlink()
    (folder / "lowq-journal.jsonl").write_text("")
    with pytest.raises(NotFoundError, match="has not finished"):
        open_checkpoint(folder)


def edit(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def scheme(**fields):
    return lambda c: c["quantization_config"]["schemes"]["w4g32"].update(fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (scheme(bits=8), "of a row of .* needs"),
        (scheme(bits=3), "of a row of .* needs"),
        (scheme(group_size=64), "of a row of .* needs"),
        (scheme(group_size=33), "group_size=33"),
        (scheme(bits=5), "bits=5"),
        (scheme(zero="none"), "weight_zero is in the files"),
        (scheme(zero="maybe"), "zero='maybe'"),
        (lambda c: c["quantization_config"]["tensors"].pop("lm_head"), "no scheme for"),
        (lambda c: c["quantization_config"]["tensors"].update({"model.norm": "w4g32"}), "model.norm"),
        (lambda c: c["quantization_config"]["tensors"].update({"nowhere": "w4g32"}), "nowhere"),
        (lambda c: c.update(quantization_config=[1]), "must be a table"),
        (lambda c: c.update(hidden_size=128), "config.json implies"),
        (lambda c: c.update(vocab_size=320), "config.json implies"),
        (lambda c: c.update(intermediate_size=48), "config.json implies"),
        (lambda c: c.update(num_hidden_layers=7), "says 7 layers, the files hold 2"),
        (lambda c: c.update(num_hidden_layers=-2), "not a whole number"),
    ],
)
def test_a_config_at_odds_with_the_weights_is_refused(folder, change, message):
    edit(folder, change)
    with pytest.raises(DamagedError, match=message):
        open_checkpoint(folder)


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    (folder / "lowq_report.json").unlink()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{Q}.weight_scale"), "weight_scale is missing"),
        (lambda t: t.pop(f"{Q}.weight_zero"), "weight_zero is missing"),
        (lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].float()}), "F32"),
        (lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"][:, :4].contiguous()}), "of a row of .* needs"),
        (lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"][:32].contiguous()}), "needs"),
        (lambda t: t.update({f"{Q}.weight_zero": t[f"{Q}.weight_zero"].half()}), "weight_zero is F16"),
        (lambda t: t.update({f"{Q}.weight_scale": t[f"{Q}.weight_scale"].to(torch.int32)}), "weight_scale is I32"),
        (lambda t: t.update({"stray.weight_scale": torch.zeros(1, 1)}), "no scheme for stray"),
        (lambda t: [t.pop(n) for n in list(t) if n.startswith("model.layers.0.")], r"layers\.0 is missing"),
    ],
)
def test_weights_at_odds_with_the_config_are_refused(folder, change, message):
    rewrite(folder, change)
    with pytest.raises(DamagedError, match=message):
        open_checkpoint(folder)


def test_values_are_checked_on_demand(folder):
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 16
    path.write_bytes(content)
    with pytest.raises(DamagedError, match="checksum"):
        open_checkpoint(folder).check_values()
    rewrite(folder, lambda t: t[f"{Q}.weight_scale"].fill_(torch.nan))
    with pytest.raises(DamagedError, match=r"weight_scale .* NaN"):
        open_checkpoint(folder).check_values()


def test_inspect_verifies(folder, capsys):
    def run():
        return main.main(["inspect", str(folder), "--verify", "--json"]), json.loads(capsys.readouterr().out)

    code, result = run()
    assert (code, result["verified"]) == (0, True)
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 16  # no header, no shape, no scale: nothing but the checksum tells
    path.write_bytes(content)
    code, result = run()
    assert (code, "checksum" in result["error"]) == (DamagedError.exit_code, True)
    (folder / "lowq_report.json").unlink()
    code, result = run()
    assert (code, "no lowq_report.json" in result["error"]) == (UnsupportedError.exit_code, True)


def test_a_file_that_is_not_the_reported_one_is_refused(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file({n: tensors[n] for n in sorted(tensors, reverse=True)}, folder / "model.safetensors", metadata={"by": "another"})
    with pytest.raises(DamagedError, match="not the file that lowq wrote"):
        open_checkpoint(folder)


@pytest.mark.parametrize("file", ["header", "header without report", "config.json", "lowq_report.json"])
def test_a_flipped_byte_is_an_error_or_harmless(folder, file):
    """Any byte of the header, config or report replaced: the same tensors, or a LowqError. Nothing else, ever."""
    rng = random.Random(0)
    before = table(open_checkpoint(folder))
    shapes = {name: shape for name, shape, *_ in before}
    path = folder / ("model.safetensors" if file.startswith("header") else file)
    if file == "header without report":
        (folder / "lowq_report.json").unlink()
    raw = path.read_bytes()
    length = 8 + struct.unpack("<Q", raw[:8])[0] if file.startswith("header") else len(raw)
    refused = 0
    with open(path, "r+b") as f:
        for _ in range(FLIPS // (1 if file.startswith("header") else 2)):
            at = rng.randrange(length)
            new = rng.choice([raw[at] ^ (1 << rng.randrange(8)), rng.randrange(256), rng.choice(b'0123456789"{}[],:\\')])
            f.seek(at)
            f.write(bytes([new]))
            f.flush()
            try:
                after = open_checkpoint(folder)
                if file == "lowq_report.json":
                    after.check_values()
                after.source.close()
                if file == "header without report":  # a kept tensor's name or dtype can change unnoticed; no shape can
                    assert sorted(s for _, s, *_ in table(after)) == sorted(shapes.values())
                    assert all(shapes.get(n, s) == s for n, s, *_ in table(after))
                else:
                    assert table(after) == before
            except LowqError:
                refused += 1
            f.seek(at)
            f.write(raw[at : at + 1])
            f.flush()
    assert path.read_bytes() == raw
    assert refused > (FLIPS // 4 if file.startswith("header") else 20)


def test_a_projected_embedding_fits_its_config():
    """OPT-350m embeds in 512 and computes in 1024: its checkpoints were written, and then refused."""
    config = {"model_type": "opt", "vocab_size": 160, "hidden_size": 64, "word_embed_proj_dim": 32}
    check_shapes(config, {"model.decoder.embed_tokens.weight": (160, 32)})
    with pytest.raises(DamagedError, match="implies 160 x 32"):
        check_shapes(config, {"model.decoder.embed_tokens.weight": (160, 64)})


def test_a_vision_tower_has_shapes_of_its_own():
    """Gemma 3's tower is SigLIP, whose layers also have a q_proj: its checkpoints were written, and then refused, before."""
    text = {"vocab_size": 160, "intermediate_size": 96, "max_position_embeddings": 64, "rms_norm_eps": 1e-6}
    text |= {"model_type": "gemma3_text", "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "num_hidden_layers": 1}
    config = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 32}}
    tower = {"vision_tower.encoder.layers.0.self_attn.q_proj.weight": (32, 32)}
    for prefix in ("model.language_model", "language_model.model"):  # of transformers 5, and of files before it
        check_shapes(config, tower | {f"{prefix}.layers.0.self_attn.q_proj.weight": (64, 64)})
        with pytest.raises(DamagedError, match="implies 64 x 64"):
            check_shapes(config, tower | {f"{prefix}.layers.0.self_attn.q_proj.weight": (64, 32)})
