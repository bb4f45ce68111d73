"""`lowq quantize --layout tile`: the words of the files are those that CUDA kernels read; everything works from them."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from lowq_cli.files.checkpoint import open_checkpoint
from lowq_cli.files.source import open_source
from lowq_cli.hf.load import load_model
from lowq_cli.interop.exporter import export
from lowq_cli.interop.inspection import inspect_model
from lowq_cli.plan.planner import make_plan
from lowq_cli.plan.recipe import Recipe
from lowq_cli.run import transform
from lowq_cli.run.pipeline import quantize
from lowq_kernels.modules.joined import join
from lowq_kernels.modules.linear import QuantLinear
from lowq_packers.errors import DamagedError, LowqError, UnsupportedError
from lowq_packers.layouts import pack
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import Scheme

Q = "model.layers.0.self_attn.q_proj"  # 64 x 64: tile; k_proj (32 rows) and gate_proj (96) stay rowstream
RECIPE = {"bits": 3, "group": 32, "method": "rtn", "lm_head": 8, "overrides": ["o_proj=2:16", "down_proj=1:channel"]}


@pytest.fixture(scope="session")
def both(family_checkpoints, tmp_path_factory):
    """(rowstream, tile) checkpoints of one model and recipe; the tile one quantized in slabs of 24 rows."""
    folder, dense = tmp_path_factory.mktemp("tile"), family_checkpoints("llama").dense
    quantize(dense, folder / "row", **RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transform, "slab_rows", lambda K, device: 24)
        quantize(dense, folder / "tile", layout="tile", **RECIPE)
    return folder / "row", folder / "tile"


@pytest.fixture
def tile(both, tmp_path):
    return shutil.copytree(both[1], tmp_path / "ckpt")


def test_the_same_weights_in_another_order(both):
    row, tile = map(open_checkpoint, both)
    assert [(t.name, t.shape, t.scheme, t.dtype) for t in row.tensors] == [
        (t.name, t.shape, t.scheme, t.dtype) for t in tile.tensors
    ]
    layouts = {t.name: t.layout for t in tile.tensors if t.scheme}
    assert layouts[Q] == layouts["model.layers.1.mlp.down_proj"] == "tile"
    assert layouts["lm_head"] == "rowstream"  # 160 rows
    assert layouts["model.layers.0.self_attn.k_proj"] == layouts["model.layers.0.mlp.up_proj"] == "rowstream"
    for a, b in zip(row.tensors, tile.tensors, strict=True):
        if a.scheme:
            p, q = row.read_matrix(a), tile.read_matrix(b)
            assert torch.equal(p.W_q, q.W_q), a.name
            assert torch.equal(p.scales, q.scales)
            assert torch.equal(p.zeros, q.zeros)
    assert tile.check_values() == tile.nbytes
    config = json.loads((both[1] / "config.json").read_text())["quantization_config"]
    assert config["schemes"]["w3g32_tile"]["layout"] == "tile"
    assert config["tensors"]["model.layers.*.self_attn.q_proj"] == "w3g32_tile"
    words = load_file(both[1] / "model.safetensors")[f"{Q}.weight"]
    assert words.dtype == torch.int32
    assert words.shape == (4, 192)  # 64 rows are 4 tiles; 64 k at 3 bits are one chunk of 128 k, 192 words


def test_it_computes_the_same(both):
    x = torch.arange(12)[None] % 160
    models = []
    for folder in both:
        with open_source(folder) as source:
            models.append(load_model(source, "cpu"))
    assert torch.equal(models[0](x).logits, models[1](x).logits)


def test_saving_brings_it_back_to_rowstream(both, tmp_path):
    with open_source(both[1]) as source:
        model = load_model(source, "cpu", "float32")
    model.save_pretrained(tmp_path / "saved")
    saved, row = open_checkpoint(tmp_path / "saved"), open_checkpoint(both[0])
    assert {t.layout for t in saved.tensors} == {"rowstream"}
    for t in row.tensors:
        if t.scheme:
            mine = next(s for s in saved.tensors if s.name == t.name)
            assert torch.equal(saved.read_matrix(mine).dequantize(), row.read_matrix(t).dequantize()), t.name


def test_inspect_and_export(family_checkpoints, both, tmp_path):
    assert any("layout tile" in note for note in inspect_model(str(both[1])).notes)
    assert not any("layout" in note for note in inspect_model(str(both[0])).notes)
    made = {}
    for layout in ("rowstream", "tile"):
        quantize(
            family_checkpoints("llama").dense, tmp_path / layout, bits=4, group=32, zero="int", method="rtn", layout=layout
        )
        export(tmp_path / layout, "compressed-tensors", tmp_path / f"{layout}-export")
        made[layout] = load_file(tmp_path / f"{layout}-export" / "model.safetensors")
    assert made["tile"].keys() == made["rowstream"].keys()
    assert all(torch.equal(t, made["rowstream"][n]) for n, t in made["tile"].items())


def test_weights_read_by_rows_stay_in_rowstream(family_checkpoints):
    recipe = Recipe(bits=4, group=16, method="rtn", layout="tile")
    with open_source(family_checkpoints("mixtral").dense) as source:
        plan = make_plan(source, recipe)
    assert {i.layout for i in plan.items if i.kind == "expert"} == {"rowstream"}
    assert "tile" in {i.layout for i in plan.items if i.kind == "attention"}
    assert any("stored in rowstream" in note for note in plan.notes)


def change(folder, **changes):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, t in changes.items():
        tensors[f"{Q}.{name}"] = t(tensors[f"{Q}.{name}"])
    save_file({k: v.contiguous() for k, v in tensors.items()}, file)
    (folder / "lowq_report.json").unlink()


@pytest.mark.parametrize(
    "changes",
    [
        {"weight": lambda t: t[:, :-1]},
        {"weight": lambda t: t[:3]},
        {"weight_scale": lambda t: t[:, :1], "weight_zero": lambda t: t[:, :1]},
        {"weight_scale": lambda t: t.flatten(1), "weight_zero": lambda t: t.flatten(1)},
        {"weight_zero": lambda t: t[..., :8]},
        {n: lambda t: t[:3] for n in ("weight", "weight_scale", "weight_zero")},
        {n: lambda t: torch.cat([t, t]) for n in ("weight", "weight_scale", "weight_zero")},
    ],
    ids=["words a chunk", "a tile", "a group", "scales of rows", "half the zeros", "48 rows", "128 rows"],
)
def test_wrong_sizes_are_refused_in_one_line(tile, changes):
    change(tile, **changes)
    for attempt in (lambda: open_checkpoint(tile), lambda: load_model(open_source(tile), "cpu")):
        with pytest.raises(DamagedError) as caught:
            attempt()
        assert "\n" not in str(caught.value)
        assert Q in str(caught.value)


def test_a_config_that_says_another_layout_is_refused(tile, both, tmp_path):
    row = shutil.copytree(both[0], tmp_path / "row")
    for folder, layout in ((tile, "rowstream"), (row, "tile")):
        config = json.loads((folder / "config.json").read_text())
        for scheme in config["quantization_config"]["schemes"].values():
            scheme["layout"] = layout
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(LowqError):
            open_checkpoint(folder)
        with pytest.raises(LowqError):
            load_model(open_source(folder), "cpu")
        for layout in ("strided", "nonsense", 7):
            for scheme in config["quantization_config"]["schemes"].values():
                scheme["layout"] = layout
            (folder / "config.json").write_text(json.dumps(config))
            with pytest.raises(UnsupportedError, match="layout"):
                open_checkpoint(folder)


def packed(N, seed, layout="tile"):
    g = torch.Generator().manual_seed(seed)
    W_q = torch.randint(0, 16, (N, 128), dtype=torch.uint8, generator=g)
    q = QuantizedTensor(W_q, torch.rand(N, 2, generator=g) + 0.5, torch.rand(N, 2, generator=g) * 15, 4, 64)
    return q, pack(q, layout)


def test_a_device_that_reads_tile_gets_the_tensors_of_the_file():
    """No repacking: the layer's words are the very tensor that was loaded; so is a join along N, but for the copy."""
    layers = []
    for N in (64, 128):
        _, p = packed(N, N)
        lin = QuantLinear(N, 128, Scheme(4, 64), dtype=torch.float32, device="meta", layout="tile", stored_in="tile")
        lin.weight, lin.weight_scale, lin.weight_zero = (torch.nn.Parameter(t, False) for t in (p.words, p.scales, p.zeros))
        assert lin.prepare().weight.data_ptr() == p.words.data_ptr()
        layers.append(lin)
    parent = torch.nn.Module()
    parent.a, parent.b = layers
    words = torch.cat([lin.weight for lin in layers])
    whole = join(parent, ("a", "b"))
    assert whole.layout == "tile"
    assert torch.equal(whole.weight, words)
    x = torch.randn(3, 128)
    ref = torch.cat([x @ packed(N, N)[0].dequantize().t() for N in (64, 128)], 1)
    torch.testing.assert_close(whole(x), ref)
