"""Models that take pictures as GGUF: the tower in a file of its own, which llama.cpp reads where it is installed."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lowq_cli.interop.exporter import export
from lowq_cli.run.pipeline import quantize
from lowq_packers.errors import UnsupportedError
from lowq_packers.formats.gguf import permute_heads

sys.path.append(str(Path(__file__).parents[1] / "families"))
import sighted

pytestmark = pytest.mark.usefixtures("own_cache")
FAMILIES = ("mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
QUESTION, SIDE = "Once upon", 32  # pixels: 16 rows, more than the 8 below which llama.cpp enlarges a picture
FACTS: dict = {
    "mistral3": ("pixtral", {"spatial_merge_size": 2}),
    "qwen2_vl": ("qwen2vl_merger", {"spatial_merge_size": 2}),
    "qwen2_5_vl": ("qwen2.5vl_merger", {"spatial_merge_size": 2, "n_wa_pattern": 2}),
    "qwen3_vl": ("qwen3vl_merger", {"spatial_merge_size": 2, "is_deepstack_layers": [True, False, True]}),
}


def edit(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for part, more in changes.items():
        config[part] |= more
    path.write_text(json.dumps(config))


def written(family, folder):
    """A folder without what llama.cpp's graphs do not have, with weights so small that 8 bits of activations do not decide."""
    from safetensors.torch import load_file, save_file

    sighted.write(family, folder, dtype=torch.float16)
    text = {"sliding_window": None, "use_sliding_window": False, "rms_norm_eps": 1e-6}  # qwen2vl of llama.cpp reads no eps
    layers = json.loads((folder / "config.json").read_text())["text_config"]["num_hidden_layers"]
    if family in ("qwen2_vl", "qwen2_5_vl"):
        text["layer_types"] = ["full_attention"] * layers
    edit(folder, text_config=text, vision_config={"window_size": 112} if family == "qwen2_5_vl" else {})
    g, weights = torch.Generator().manual_seed(1), load_file(folder / "model.safetensors")
    for name, t in weights.items():
        norm = t.dim() == 1 and "bias" not in name
        t.copy_(torch.randn(t.shape, generator=g) * (0.3 if "bias" in name else 0.1) + norm)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module", params=FAMILIES)
def exported(request, tmp_path_factory):
    """The family, its quantized folder, and the file beside which there is the tower's."""
    at = tmp_path_factory.mktemp("mmproj")
    dense = written(request.param, at / "dense")
    quantize(dense, out=at / "m", bits=8, group=32, method="rtn", zero="none", dtype="float16")
    done = export(at / "m", "gguf", at / "m.gguf")
    assert "mmproj-m.gguf" in done.notes[0]
    assert export(at / "m", "gguf", at / "m.gguf").already_done
    return request.param, at / "m", at / "m.gguf"


def test_a_tower_by_the_names_of_llama_cpp(exported):
    gguf = pytest.importorskip("gguf", reason="needs the package gguf (extra test)")
    from safetensors.torch import load_file

    family, folder, file = exported
    reader = gguf.GGUFReader(file.with_name("mmproj-m.gguf"))
    fields = {k: f.contents() for k, f in reader.fields.items()}
    projector, facts = FACTS[family]
    known = {k: fields[f"clip.vision.{k}"] for k in facts}
    assert (fields["general.architecture"], fields["general.type"]) == ("clip", "mmproj")
    assert (fields["clip.projector_type"], known) == (projector, facts)
    assert fields["clip.vision.projection_dim"] == 64
    names = [gguf.TENSOR_NAMES[t] for t in gguf.MODEL_TENSORS[gguf.MODEL_ARCH.MMPROJ]]
    known = {n.format(bid=i) for n in names for i in range(4)}
    found = {t.name: t for t in reader.tensors}
    assert {n.removesuffix(".1").removesuffix(".weight").removesuffix(".bias") for n in found} <= known
    ours = load_file(folder / "model.safetensors")
    tower = {n: t for n, t in ours.items() if any(part in n for part in ("visual.", "vision_tower.", "multi_modal"))}
    numbers = sum(t.numel() for t in tower.values()) + (64 if family == "mistral3" else 0)
    assert sum(t.n_elements for t in reader.tensors) == numbers
    if family == "mistral3":
        q = next(t for n, t in ours.items() if n.endswith("vision_tower.transformer.layers.0.attention.q_proj.weight"))
        theirs = torch.from_numpy(found["v.blk.0.attn_q.weight"].data.copy())
        assert torch.equal(permute_heads(theirs, 2, inverse=True), q)
        return
    patches = next(t for n, t in ours.items() if n.endswith("patch_embed.proj.weight"))
    for frame, end in enumerate(("weight", "weight.1")):
        theirs = torch.from_numpy(found[f"v.patch_embd.{end}"].data.copy())
        assert torch.equal(theirs.float().flatten(), patches[:, :, frame].float().flatten())


def test_llama_cpp_sees_as_we_do(exported, tmp_path):
    """The first token's log-probabilities behind a picture, beside those behind others; activations in 8 bits there."""
    if importlib.util.find_spec("xllamacpp") is None:
        pytest.skip("needs xllamacpp, which has llama.cpp with its reader of pictures (pip install xllamacpp)")
    from lowq_cli.engine.decoders import decoder_of
    from lowq_cli.engine.open_model import ready
    from lowq_cli.engine.prompts import encode
    from lowq_cli.engine.vision import sight_of

    family, folder, file = exported
    pictures = [tmp_path / f"{seed}.png" for seed in range(6)]
    for seed, path in enumerate(pictures):
        sighted.drawing(seed, (SIDE, SIDE)).save(path)
    script = Path(__file__).with_name("llama_cpp_sees.py")
    command = [sys.executable, script, file, file.with_name("mmproj-m.gguf"), QUESTION, *pictures]
    answers = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    (model, tokenizer), ours, theirs = ready(str(folder), "cpu"), [], []
    for path, answer in zip(pictures, map(json.loads, answers.splitlines()), strict=True):
        picture = sight_of(model).picture(path)
        ids = encode(tokenizer, QUESTION, True, (model, [picture]))
        shown = sight_of(model).shown(ids, [picture])
        assert answer[0] == len(ids)
        if answer[1]:
            ours.append(decoder_of(model).logits(torch.tensor([ids]), [shown])[0, -1].float().log_softmax(-1))
            theirs.append(torch.tensor([answer[1].get(str(i), float("nan")) for i in range(len(ours[-1]))]))
    assert len(ours) > 1

    def apart(a, b):
        there = ~a.isnan()
        return ((a - b)[there].norm() / (b[there] - b[there].mean()).norm()).item()

    for i, found in enumerate(theirs):
        others = [apart(found, own) for j, own in enumerate(ours) if j != i]
        assert apart(found, ours[i]) < 0.05, family
        assert min(others) > 0.15


@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_towers_of_other_families_are_refused(family, tmp_path):
    sighted.write(family, tmp_path / "dense", dtype=torch.float16)
    quantize(tmp_path / "dense", out=tmp_path / "m", bits=8, group=32, method="rtn", zero="none", dtype="float16")
    with pytest.raises(UnsupportedError, match=f"'{family}' is not one that lowq writes as GGUF"):
        export(tmp_path / "m", "gguf", tmp_path / "m.gguf")
    assert not list(tmp_path.glob("*.gguf*"))


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("vision_config", {"hidden_act": "relu"}, "its tower's hidden_act is relu"),
        ("vision_config", {"window_size": 56}, "window_size is 56"),
        ("vision_config", {"fullatt_block_indexes": [1, 2]}, r"whole pictures in layers \[1, 2\]"),
        ("vision_config", {"fullatt_block_indexes": [0, 1]}, r"whole pictures in layers \[0, 1\]"),
    ],
)
@pytest.mark.parametrize("exported", ["qwen2_5_vl"], indirect=True)
def test_what_its_graph_of_a_tower_does_otherwise_is_refused(exported, part, changes, message, tmp_path):
    shutil.copytree(exported[1], tmp_path / "m")
    edit(tmp_path / "m", **{part: changes})
    with pytest.raises(UnsupportedError, match=message):
        export(tmp_path / "m", "gguf", tmp_path / "m.gguf")
    assert not list(tmp_path.glob("*.gguf*"))
