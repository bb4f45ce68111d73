"""`lowq quantize --layout cpu`: the words of the files are those that CPU kernels read."""

import shutil

import forking
import pytest
import torch
from safetensors.torch import load_file

from lowq_cli.engine import native_loader
from lowq_cli.files.checkpoint import open_checkpoint
from lowq_cli.files.source import open_source
from lowq_cli.hf.embedding import QuantEmbedding, TiedHead
from lowq_cli.hf.load import load_model
from lowq_cli.plan.planner import make_plan
from lowq_cli.plan.recipe import make_recipe
from lowq_cli.run import transform
from lowq_cli.run.pipeline import quantize
from lowq_kernels.products.cpu import native
from lowq_packers.arch.config import NotPlain
from lowq_packers.errors import LowqError

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


# --- an embedding that is also the head: one table for look-ups and products

TIED = ["llama-tied", "gemma3"]
TABLE, IDS = "model.embed_tokens", torch.tensor([[0, 15, 16, 159, 16, 3]])


@pytest.fixture(scope="module")
def tied(family_checkpoints, tmp_path_factory):
    """family -> (embedding in rowstream, in the layout cpu by default) checkpoints of one model."""
    made = {}

    def make(family):
        if family not in made:
            folder, dense = tmp_path_factory.mktemp("tied"), family_checkpoints(family, "bfloat16").dense
            quantize(dense, folder / "row", bits=4, group=32, method="rtn")
            quantize(dense, folder / "cpu", bits=4, group=32, method="rtn", layout="cpu")
            made[family] = folder / "row", folder / "cpu"
        return made[family]

    return make


def by_lowq(folder):
    with open_source(folder) as source:
        return native_loader.read(source, torch.device("cpu"))


def by_transformers(folder):
    with open_source(folder) as source:
        return load_model(source, "cpu", "bfloat16")


@pytest.mark.parametrize("family", TIED)
@pytest.mark.parametrize("load", [by_lowq, by_transformers])
def test_a_tied_table_is_packed_once_and_computes_the_same(load, family, tied):
    row, cpu = (load(folder) for folder in tied(family))
    table, head = cpu.get_input_embeddings(), cpu.get_output_embeddings()
    assert isinstance(table, QuantEmbedding)
    assert isinstance(head, TiedHead)
    assert table.layout == "cpu"
    assert torch.equal(table(IDS), row.get_input_embeddings()(IDS))
    with torch.inference_mode():
        assert torch.equal(cpu(IDS).logits, row(IDS).logits)
    if native.library() is not None:
        assert head.layout == "cpu"
        assert held_once(cpu)
        assert held_once(row)


def held_once(model):
    """Whether look-ups read the words that products read."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    return table.layout == head.layout and table.weight.data_ptr() == head.weight.data_ptr()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("family", TIED)
def test_a_gpu_holds_a_tied_table_once(family, tied):
    folder, _ = tied(family)
    with open_source(folder) as source:
        here, there = native_loader.read(source, torch.device("cuda")), by_lowq(folder)
        moved = load_model(source, "cpu", "bfloat16").to("cuda")
    ids = IDS.to("cuda")
    for model in (here, moved):
        assert held_once(model)
        assert torch.equal(model.get_input_embeddings()(ids).cpu(), there.get_input_embeddings()(IDS))
    assert (here(ids).logits.cpu() - there(IDS).logits).norm() < 2e-2 * there(IDS).logits.norm()


@pytest.mark.parametrize("family", TIED)
def test_it_is_saved_in_rows_and_read_back(family, tied, tmp_path):
    row, cpu = tied(family)
    model = by_transformers(cpu)
    model.save_pretrained(tmp_path / "saved")
    before, after = load_file(row / "model.safetensors"), load_file(tmp_path / "saved" / "model.safetensors")
    assert {k for k in before if k.startswith(TABLE)} == {k for k in after if k.startswith(TABLE)}
    assert all(torch.equal(before[k], after[k]) for k in before if k.startswith(TABLE))
    wanted = model(IDS).logits
    assert torch.equal(by_transformers(tmp_path / "saved")(IDS).logits, wanted)
    state = {k: torch.zeros_like(v) for k, v in model.state_dict().items()}
    other = by_transformers(cpu)
    other.load_state_dict(state)
    assert not other.get_input_embeddings()(IDS).any()
    assert other.load_state_dict(model.state_dict())
    assert torch.equal(other.get_input_embeddings()(IDS), model.get_input_embeddings()(IDS))


@pytest.mark.parametrize("load", [by_lowq, by_transformers])
def test_a_table_in_a_layout_that_cannot_hold_it_is_refused(load, tied, tmp_path):
    shutil.copytree(tied("llama-tied")[1], tmp_path / "bad")
    config = (tmp_path / "bad" / "config.json").read_text()
    (tmp_path / "bad" / "config.json").write_text(config.replace('"layout": "cpu"', '"layout": "tile"'))
    with pytest.raises((NotPlain, LowqError), match="tile only for multiples of 64 rows"):
        load(tmp_path / "bad")


@pytest.mark.parametrize(("settings", "layouts"), [("", {"cpu", "rowstream"}), ('layout = "rowstream"', {"rowstream"})])
def test_run_quantizes_in_the_order_of_this_cpu(settings, layouts, tmp_path, own_cache, family_checkpoints):
    (tmp_path / "recipe.toml").write_text(settings)
    how = ("--recipe", tmp_path / "recipe.toml", "--device", "cpu", "--max-new-tokens", 1)
    done = forking.lowq("run", family_checkpoints("llama-tied").dense, "Hi", *how)
    assert done.returncode == 0, done.stderr
    (config,) = own_cache.rglob("config.json")
    made = {t.layout for t in open_checkpoint(config.parent).tensors if t.scheme}
    assert made == layouts  # heads of a few rows stay rowstream


@pytest.mark.parametrize(
    ("recipe", "bits"),
    [
        ({}, 8), ({"bits": 2}, 8), ({"bits": 8}, None), ({"lm_head": "keep"}, None), ({"embedding": "keep"}, None),
        ({"embedding": 4}, 4), ({"overrides": ["embed_tokens=keep"]}, None), ({"layout": "auto"}, 8),
    ],
)  # fmt: skip
def test_when_a_tied_table_is_packed_by_default(recipe, bits, family_checkpoints):
    with open_source(family_checkpoints("llama-tied").dense) as source:
        plan = make_plan(source, make_recipe(**{"group": 32, "layout": "cpu", **recipe}))
    item = next(i for i in plan.items if i.name.startswith(TABLE))
    assert (item.scheme and item.scheme.bits) == bits
    with open_source(family_checkpoints("llama").dense) as source:  # not tied
        plan = make_plan(source, make_recipe(**{"group": 32, "layout": "cpu", "bits": 4}))
    assert not next(i for i in plan.items if i.name.startswith(TABLE)).scheme
