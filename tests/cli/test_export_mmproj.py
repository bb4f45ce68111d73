"""Models that take pictures as GGUF: the tower in a file of its own, which llama.cpp reads where it is installed."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import lowq
from lowq_cli.files.checkpoint import CheckpointTensor
from lowq_cli.interop.export_checks import check
from lowq_cli.interop.exporter import export
from lowq_cli.main import main
from lowq_cli.run.pipeline import quantize
from lowq_packers import formats
from lowq_packers.errors import DamagedError, UnsupportedError
from lowq_packers.formats.gguf import permute_heads
from lowq_packers.scheme import Scheme

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
    """The family, its quantized folder, and its GGUF file, next to which lies the tower's file."""
    at = tmp_path_factory.mktemp("mmproj")
    dense = written(request.param, at / "dense")
    quantize(dense, out=at / "m", bits=8, group=32, method="rtn", zero="none", dtype="float16")
    done = export(at / "m", "gguf", at / "m.gguf")
    assert "mmproj-m.gguf" in done.notes[0]
    assert export(at / "m", "gguf", at / "m.gguf").already_done
    return request.param, at / "m", at / "m.gguf"


@pytest.mark.parametrize("to", ["gguf", "mlx"])
@pytest.mark.parametrize(
    ("name", "K", "keep"),
    [
        ("model.visual.blocks.0.mlp.linear_fc2", 48, "--vision keep"),
        ("model.visual.merger.linear_fc1", 48, "--override 'model.visual.merger.linear_fc1=keep'"),
        ("model.layers.0.mlp.down_proj", 48, "--override 'model.layers.0.mlp.down_proj=keep'"),
        ("model.visual.blocks.0.mlp.linear_fc2", 96, ""),
    ],
)
def test_a_group_that_a_format_does_not_hold_has_a_way_out_that_helps(to, name, K, keep):
    """48 weights of a row have no group of 32, and 96 none of 64."""
    shapes = {"model.layers.1.mlp.up_proj": (64, 96), name: (64, K)}
    like = [CheckpointTensor(n, shape, Scheme(4, 16, "none"), "F16", 1) for n, shape in shapes.items()]
    checkpoint = SimpleNamespace(config={"model_type": "llama"}, tensors=like)
    way = rf"no group that .* holds divides K=48; nearest: {re.escape(keep)}" if keep else "nearest: --group 32"
    with pytest.raises(UnsupportedError, match=rf"{way} \(2 such weights\)"):
        check(checkpoint, formats.get(to))


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
    result = {t.name: t for t in reader.tensors}
    assert {n.removesuffix(".1").removesuffix(".weight").removesuffix(".bias") for n in result} <= known
    ours = load_file(folder / "model.safetensors")
    tower = {n: t for n, t in ours.items() if any(part in n for part in ("visual.", "vision_tower.", "multi_modal"))}
    numbers = sum(t.numel() for t in tower.values()) + (64 if family == "mistral3" else 0)
    assert sum(t.n_elements for t in reader.tensors) == numbers
    if family == "mistral3":
        q = next(t for n, t in ours.items() if n.endswith("vision_tower.transformer.layers.0.attention.q_proj.weight"))
        theirs = torch.from_numpy(result["v.blk.0.attn_q.weight"].data.copy())
        assert torch.equal(permute_heads(theirs, 2, inverse=True), q)
        return
    patches = next(t for n, t in ours.items() if n.endswith("patch_embed.proj.weight"))
    for frame, end in enumerate(("weight", "weight.1")):
        theirs = torch.from_numpy(result[f"v.patch_embd.{end}"].data.copy())
        assert torch.equal(theirs.float().flatten(), patches[:, :, frame].float().flatten())


def test_llama_cpp_sees_as_we_do(exported, tmp_path):
    """The first token's log-probabilities after a picture and after other pictures; llama.cpp rounds activations to 8 bits."""
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

    for i, result in enumerate(theirs):
        others = [apart(result, own) for j, own in enumerate(ours) if j != i]
        assert apart(result, ours[i]) < 0.05, family
        assert min(others) > 0.15


@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_towers_of_other_families_are_refused(family, tmp_path):
    sighted.write(family, tmp_path / "dense", dtype=torch.float16)
    quantize(tmp_path / "dense", out=tmp_path / "m", bits=8, group=32, method="rtn", zero="none", dtype="float16")
    with pytest.raises(UnsupportedError, match=f"'{family}' cannot be written as GGUF"):
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
def test_towers_that_llama_cpp_computes_differently_are_refused(exported, part, changes, message, tmp_path):
    shutil.copytree(exported[1], tmp_path / "m")
    edit(tmp_path / "m", **{part: changes})
    with pytest.raises(UnsupportedError, match=message):
        export(tmp_path / "m", "gguf", tmp_path / "m.gguf")
    assert not list(tmp_path.glob("*.gguf*"))


def seen(folder, path):
    """The logits (fp32) behind a picture, its row of features, and the tower's tensors of a model."""
    from lowq_cli.engine.decoders import decoder_of
    from lowq_cli.engine.prompts import encode
    from lowq_cli.engine.vision import sight_of

    model, tokenizer = lowq.load(str(folder), "cpu", dtype="float32")
    picture = sight_of(model).picture(path)
    ids = encode(tokenizer, QUESTION, True, (model, [picture]))
    shown = sight_of(model).shown(ids, [picture])
    tower = sight_of(model).load().tower.model.state_dict()
    return (
        ids,
        decoder_of(model).logits(torch.tensor([ids]), [shown])[0],
        {n: t for n, t in tower.items() if "language_model" not in n and "lm_head" not in n},
    )


def test_a_pair_of_files_sees_as_the_folder_it_was_made_from(exported, tmp_path):
    """Without any other file: processor, config and tokenizer come from the metadata."""
    _, folder, file = exported
    sighted.drawing(3, (60, 44)).save(tmp_path / "a.png")
    ids, expected, tower = seen(folder, tmp_path / "a.png")
    found_ids, result, found_tower = seen(file, tmp_path / "a.png")
    assert found_ids == ids
    assert tower.keys() == found_tower.keys()
    assert [n for n, t in tower.items() if not torch.equal(t, found_tower[n])] == []
    assert ((result - expected).norm() / expected.norm()).item() < 1e-4


def pair(file, into):
    """The two files alone in a folder."""
    into.mkdir()
    for name in (file.name, f"mmproj-{file.name}"):
        shutil.copy(file.with_name(name), into / name)
    return into / file.name


@pytest.mark.parametrize("exported", ["qwen2_vl"], indirect=True)
def test_a_pair_of_files_is_quantized_with_its_tower(exported, tmp_path):
    """A tower in 16 bits stays unchanged, and a quantized tower is written and read back with the same codes."""
    _, folder, file = exported
    sighted.drawing(3, (60, 44)).save(tmp_path / "a.png")
    ids, _, tower = seen(folder, tmp_path / "a.png")
    lowq.quantize(str(file), out=str(tmp_path / "four"), bits=4, group=32, dtype="float16")
    assert seen(tmp_path / "four", tmp_path / "a.png")[0] == ids
    assert all(torch.equal(t, tower[n]) for n, t in seen(tmp_path / "four", tmp_path / "a.png")[2].items())
    lowq.quantize(str(file), out=str(tmp_path / "v"), bits=8, group=32, method="rtn", zero="none", dtype="float16", vision=8)
    export(tmp_path / "v", "gguf", tmp_path / "v.gguf")
    (_, expected, tower), (_, result, again) = (seen(m, tmp_path / "a.png") for m in (tmp_path / "v", tmp_path / "v.gguf"))
    assert [n for n, t in tower.items() if not torch.equal(t, again[n])] == []
    assert ((result - expected).norm() / expected.norm()).item() < 1e-4


@pytest.mark.parametrize("exported", ["mistral3", "qwen2_vl", "qwen3_vl"], indirect=True)
def test_a_text_without_its_tower_is_opened_alone_and_says_so(exported, tmp_path, capsys):
    from lowq_cli.engine.decoders import decoder_of

    family, folder, file = exported
    alone = pair(file, tmp_path / "alone")
    (tmp_path / "alone" / "mmproj-m.gguf").unlink()
    (model, tokenizer), (whole, _) = (lowq.load(str(m), "cpu", dtype="float32") for m in (alone, folder))
    ids = tokenizer(QUESTION, return_tensors="pt").input_ids
    result, expected = decoder_of(model).logits(ids)[0], decoder_of(whole).logits(ids)[0]
    assert ((result - expected).norm() / expected.norm()).item() < 1e-4
    note = "note: m.gguf is opened without its tower, as text alone: there is no mmproj*.gguf in"
    assert (note in capsys.readouterr().err) == (family != "mistral3")  # Llama's files mostly have none
    with pytest.raises(UnsupportedError, match="has no picture inputs"):
        lowq.stream(model, tokenizer, QUESTION, images=[sighted.drawing(1)])


@pytest.mark.parametrize("exported", ["mistral3", "qwen3_vl"], indirect=True)
def test_a_picture_for_a_text_without_its_tower_is_refused_before_the_import(exported, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    alone = pair(exported[2], tmp_path / "alone")
    (tmp_path / "alone" / "mmproj-m.gguf").unlink()
    sighted.drawing(3).save(tmp_path / "a.png")
    for line in (["generate", alone, "--prompt", "x", "--image", tmp_path / "a.png"], ["run", alone, "x", tmp_path / "a.png"]):
        assert main([str(a) for a in line]) == 5
        err = capsys.readouterr().err
        assert "takes no pictures" in err
        assert "mmproj*.gguf" in err
        assert err.count("\n") == 1
    assert not [name for name in ("imports", "runs", "tokenizers") if (tmp_path / "cache" / "lowq" / name).exists()]
    assert main(["generate", "demo", "--prompt", "x", "--image", str(tmp_path / "a.png")]) == 5
    assert "demo takes no pictures (llama has no tower); leave them out" in capsys.readouterr().err


@pytest.mark.parametrize("exported", ["qwen2_vl"], indirect=True)
def test_another_models_tower_is_refused_or_passed_over_in_one_line(exported, tmp_path, capsys):
    from lowq_cli.interop.foreign import open_decoded

    file, other = pair(exported[2], tmp_path / "a"), tmp_path / "other"
    quantize(
        written("qwen3_vl", other / "dense"), out=other / "m", bits=8, group=32, method="rtn", zero="none", dtype="float16"
    )
    export(other / "m", "gguf", other / "m.gguf")
    shutil.copy(other / "mmproj-m.gguf", tmp_path / "a" / "mmproj-b.gguf")
    with open_decoded(file) as source:  # its own is chosen by its name
        assert source.config["model_type"] == "qwen2_vl"
    shutil.copy(other / "mmproj-m.gguf", tmp_path / "a" / "mmproj-m.gguf")
    with pytest.raises(DamagedError, match=r"mmproj-m.gguf is the tower of another model: its projector is qwen3vl_merger"):
        open_decoded(file)
    (tmp_path / "a" / "mmproj-m.gguf").unlink()
    with open_decoded(file) as source:
        (note,) = source.notes
    assert "as text alone: mmproj-b.gguf is another model's (its projector is qwen3vl_merger, the model takes" in note
    with pytest.raises(UnsupportedError, match="is the tower of a model; give the file of its text"):
        open_decoded(tmp_path / "a" / "mmproj-b.gguf")
    shutil.copy(exported[2].with_name("mmproj-m.gguf"), tmp_path / "a" / "of-it-mmproj-F16.gguf")
    with open_decoded(file) as source:  # of any name, where it is the one that fits
        assert source.config["model_type"] == "qwen2_vl"


def bent(path, old, new):
    raw = path.read_bytes()
    assert raw.count(old) == 1
    path.write_bytes(raw.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"v.blk.0.attn_k.weight", b"v.blk.0.attn_x.weight", "v.blk.0.attn_x.weight has no place in a tower of qwen2_vl"),
        (
            b"v.blk.0.attn_k.weight",
            b"v.blk.7.attn_k.weight",
            r"the parts of model.visual.blocks.\d.attn.qkv.weight are missing",
        ),
        (b"clip.vision.patch_size", b"clip.vision.patch_sise", "clip.vision.patch_size=None, which must be a positive number"),
        (b"clip.vision.image_mean", b"clip.vision.image_meen", "has no clip.vision.image_mean"),
        (b"clip.vision.projection_dim", b"clip.vision.projection_dym", "its features have None values, the model's 64"),
    ],
)
@pytest.mark.parametrize("exported", ["qwen2_vl"], indirect=True)
def test_a_damaged_tower_is_refused_in_one_line(exported, old, new, message, tmp_path):
    from lowq_cli.interop.foreign import open_decoded

    file = pair(exported[2], tmp_path / "a")
    bent(file.with_name("mmproj-m.gguf"), old, new)
    with pytest.raises((DamagedError, UnsupportedError), match=message):
        open_decoded(file)


def test_a_tower_is_not_offered_as_a_model(tmp_path):
    """By `lowq serve --models`, and by the line about a folder that holds GGUF files alone."""
    from lowq_cli.files.source import open_source
    from lowq_cli.serving.catalog import Config, gather
    from lowq_packers.errors import NotFoundError

    for name in ("mmproj-a.gguf", "z.gguf", "a-mmproj-F16.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert [n for n, offer in gather(Config(), [str(tmp_path)]).items() if offer.path.startswith(str(tmp_path))] == ["z"]
    with pytest.raises(NotFoundError, match=r"GGUF, which is named by its file: .*/z.gguf"):
        open_source(tmp_path)


def test_the_plan_of_a_mixture_lists_the_towers_file(tmp_path, capsys):
    """Both files, with the types and bytes that are then written; --calib, which such a model does not take, is refused."""
    gguf = pytest.importorskip("gguf", reason="needs the package gguf (extra test)")
    dense = written("qwen3_vl", tmp_path / "dense")
    line = ["quantize", str(dense), "--type", "Q8_0", "--out", str(tmp_path / "m.gguf")]
    assert main([*line, "--dry-run"]) == 0
    assert f"{tmp_path / 'mmproj-m.gguf'}: " in capsys.readouterr().out
    assert main([*line, "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["files"]
    assert main([*line, "--calib", "bundled"]) == 5
    assert "leave --calib out" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.gguf"))
    assert main(line) == 0
    assert {Path(p).name for p in plan} == {p.name for p in tmp_path.glob("*.gguf")} == {"m.gguf", "mmproj-m.gguf"}
    for file, types in plan.items():
        tensors = gguf.GGUFReader(file).tensors
        assert {t["type"]: (t["tensors"], t["bytes"]) for t in types} == {
            kind: (len(of), sum(t.n_bytes for t in of))
            for kind in {t.tensor_type.name for t in tensors}
            for of in [[t for t in tensors if t.tensor_type.name == kind]]
        }
