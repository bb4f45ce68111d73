"""`--format nvfp4`, mxfp4 and nf4: the files, read both ways, resumed; bits counted; hostile files and wrong flags."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from lowq_cli import quantizers
from lowq_cli.engine import native_loader
from lowq_cli.files.checkpoint import open_checkpoint
from lowq_cli.files.source import open_source
from lowq_cli.hf.load import load_model
from lowq_cli.plan.recipe import make_recipe
from lowq_cli.plan.table_formats import TABLE_FORMATS
from lowq_cli.quantizers import _table_book, _table_fit, rtn
from lowq_cli.run.pipeline import quantize
from lowq_kernels.modules.linear import QuantLinear
from lowq_packers import tables
from lowq_packers.arch.config import NotPlain
from lowq_packers.errors import DamagedError, LowqError, SchemeError, UnsupportedError, UsageError
from lowq_packers.scheme import Scheme

from .folders import files

Q = "model.layers.0.self_attn.q_proj"
IDS = torch.arange(3, 35).unsqueeze(0)
SCHEMES = {name: f.scheme(4, f.group) for name, f in TABLE_FORMATS.items()}


@pytest.fixture(scope="module")
def made(family_checkpoints, tmp_path_factory):
    """A family's checkpoint in a format, made once. Tests must not write into it."""
    result = {}

    def make(form, family="llama", **recipe):
        key = form, family, str(recipe)
        if key not in result:
            result[key] = tmp_path_factory.mktemp(form) / "out"
            quantize(family_checkpoints(family).dense, result[key], format=form, **recipe)
        return result[key]

    return make


def dequantized(folder):
    """Full name -> the tensor that the files stand for."""
    result = open_checkpoint(folder)
    return {
        f"{t.name}.weight" if t.scheme else t.name: result.read_matrix(t).dequantize() if t.scheme else result.read_plain(t)
        for t in result.tensors
    }


def dense_copy(folder, dense, to):
    """The model that a checkpoint stands for, as plain floats."""
    shutil.copytree(dense, to)
    save_file({n: t.float().contiguous() for n, t in dequantized(folder).items()}, to / "model.safetensors", {"format": "pt"})
    return to


def logits(folder, transformers=True):
    with open_source(str(folder)) as source, torch.inference_mode():
        if transformers:
            return load_model(source, "cpu", torch.float32)(IDS).logits
        return native_loader.read(source, torch.device("cpu"))(IDS).logits.float()


@pytest.mark.parametrize("form", TABLE_FORMATS)
def test_logits_are_those_of_the_dequantized_model(made, form, family_checkpoints, tmp_path):
    folder = made(form, lm_head=4, embedding=4)
    schemes = open_checkpoint(folder).schemes
    assert {schemes[n] for n in (Q, "lm_head", "model.embed_tokens")} == {SCHEMES[form]}
    wanted = logits(dense_copy(folder, family_checkpoints("llama").dense, tmp_path / "dense"))
    assert (logits(folder) - wanted).norm() <= 1e-4 * wanted.norm()
    bf16 = logits(folder, transformers=False)
    assert (bf16 - wanted).norm() <= 0.02 * wanted.norm()  # what rounding to bf16 costs


@pytest.mark.parametrize("form", ["nvfp4", "mxfp4"])
def test_experts_have_a_factor_each(made, form, family_checkpoints, tmp_path):
    folder = made(form, "mixtral")
    tensors = load_file(folder / "model.safetensors")
    factors = [t for n, t in tensors.items() if n.endswith("weight_table") and "experts" in n]
    assert len(factors) == (2 * 4 * 3 if form == "nvfp4" else 0)
    assert len(set(map(float, factors))) == len(factors)
    wanted = logits(dense_copy(folder, family_checkpoints("mixtral").dense, tmp_path / "dense"))
    assert (logits(folder) - wanted).norm() <= 1e-4 * wanted.norm()
    errors = (logits(folder, transformers=False) - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert errors.median() <= 0.05  # by token: in bf16 a few choose other experts


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_saved_by_transformers_and_read_back_equal(made, family, tmp_path):
    folder = made("nvfp4", family)
    with open_source(str(folder)) as source:
        model = load_model(source, "cpu")
    model.save_pretrained(tmp_path / "saved")
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "saved" / "model.safetensors")
    packed = [n for n, t in before.items() if n.endswith("_table") or t.dtype in (torch.int32, torch.uint8)]
    assert any(n.endswith("_table") for n in packed)
    assert all(torch.equal(after[n], before[n]) and after[n].dtype == before[n].dtype for n in packed)
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]["version"] == 2


def test_a_factor_stays_in_fp32_where_a_layer_is_cast():
    q = quantizers.get("rtn")(torch.randn(32, 64) * 1e-6, SCHEMES["nvfp4"])
    layer = QuantLinear.from_quantized(q, dtype=torch.bfloat16)
    x = torch.randn(3, 64)
    wanted = x @ q.dequantize().t()
    assert layer.half().dtype == torch.float16
    assert torch.equal(layer.weight_table, q.table)
    assert (layer.float()(x) - wanted).norm() <= 1e-5 * wanted.norm()
    assert torch.equal(layer.packed.table, q.table)


def test_bits_are_counted_with_scales(made):
    for form, bits in {"nvfp4": 4.5, "mxfp4": 4.25}.items():
        t = next(t for t in open_checkpoint(made(form)).tensors if t.name == Q)
        assert t.bpw == pytest.approx(bits + (32 / t.params if form == "nvfp4" else 0))
        assert SCHEMES[form].bits_per_weight() == bits


@pytest.mark.parametrize("form", TABLE_FORMATS)
def test_the_same_bytes_whatever_the_slabs_and_after_an_interruption(made, form, family_checkpoints, tmp_path, monkeypatch):
    from lowq_cli.run import pipeline, transform

    whole = files(made(form))
    monkeypatch.setattr(transform, "slab_rows", lambda K, device: 24)
    dense = family_checkpoints("llama").dense
    events = pipeline.run(dense, make_recipe(format=form), tmp_path / "out")
    for _ in range(4):
        next(events)
    events.close()
    assert quantize(dense, tmp_path / "out", format=form)["resumed"]
    again = files(tmp_path / "out")
    assert {n: again[n] for n in whole if n != "lowq_report.json"} == {n: whole[n] for n in whole if n != "lowq_report.json"}


@pytest.mark.parametrize("form", TABLE_FORMATS)
def test_codes_are_the_nearest_and_a_search_does_better(form):
    W = torch.randn(8, 128, generator=torch.Generator().manual_seed(1)) * 0.02
    s = SCHEMES[form]
    q = rtn.quantize(W, s, torch.float16)
    every = tables.values(s, q.table)[0] * q.wide_scales.repeat_interleave(s.group_size, 1).unsqueeze(-1)
    least = (every - W.unsqueeze(-1)).abs().amin(-1)
    assert torch.allclose((q.dequantize() - W).abs(), least, atol=1e-9)
    errors = [float((quantizers.get(m)(W, s, torch.float16).dequantize() - W).norm()) for m in ("rtn", "lsq")]
    assert errors[1] < 0.98 * errors[0]
    if form == "nvfp4":  # the largest weight is reached with the largest scale
        assert int(q.scales.max()) == 126
        assert float(q.dequantize().abs().max()) == pytest.approx(float(W.abs().max()))
    zero = quantizers.get("lsq")(torch.zeros(2, 128), s, torch.float16)
    assert zero.dequantize().abs().max() <= (2.0**-24 if "table" in form else 0)  # fp16's least scale: a fitted table has no 0


@pytest.mark.parametrize(("form", "last"), [("nvfp4", 0x7E), ("mxfp4", 0xFE)])
@pytest.mark.parametrize("weighed", [False, True])
def test_no_scale_of_a_byte_is_better_than_the_one_chosen(form, last, weighed):
    """Every byte is tried here; the search tries few, and loses nothing by it where weights are as a model's."""
    scheme = TABLE_FORMATS[form].scheme(4, TABLE_FORMATS[form].group)
    W = torch.randn(64, 4 * scheme.group_size, generator=torch.Generator().manual_seed(0)) * 0.02
    importance = torch.rand(scheme.group_size, generator=torch.Generator().manual_seed(1)) + 0.1 if weighed else None
    book = _table_book.Book(scheme, _table_fit.companion_of(W, scheme), W.device, None)
    groups, best = W.reshape(64, 4, -1), torch.full((64, 4), torch.inf)

    def losses(stored):
        wide = book.wide(stored)
        off = groups - tables.values(scheme, None, W.device)[0][book.nearest(groups, wide).int()] * wide.unsqueeze(-1)
        return (off.square() if importance is None else off.square() * importance).sum(-1)

    for byte in range(1, last + 1):
        best = torch.minimum(best, losses(torch.full((64, 4), byte, dtype=torch.uint8)))
    codes, stored = book.search(groups, importance)
    assert torch.equal(codes, book.nearest(groups, book.wide(stored)))
    assert losses(stored).sum() <= 1.0005 * best.sum()
    assert losses(stored).sum() < 0.95 * losses(book.start(groups)[0]).sum() or form == "mxfp4"


def test_weights_of_other_widths_keep_the_grid(made):
    result = open_checkpoint(made("nvfp4", overrides=["down_proj=8:32", "v_proj=4"], lm_head=8)).schemes
    assert result["model.layers.0.mlp.down_proj"] == Scheme(8, 32)
    assert result["lm_head"].table == ""
    assert result["model.layers.1.self_attn.v_proj"] == SCHEMES["nvfp4"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"format": "nvfp4", "bits": 3}, "has 4 bits, not 3"),
        ({"format": "mxfp4", "group": 64}, "has groups of 32, not 64"),
        ({"format": "nvfp4", "overrides": ["q_proj=4:64"]}, "has groups of 16, not 64"),
        ({"format": "nf4", "bpw": 3.5}, "--bpw chooses among widths"),
        ({"format": "fp4"}, "does not exist"),
    ],
    ids=str,
)
def test_recipes_that_contradict_themselves(flags, said):
    with pytest.raises(UsageError, match=said):
        make_recipe(**flags)
    assert make_recipe(**make_recipe(format="nf4", group=32).to_json()) == make_recipe(format="nf4", group=32)


def test_methods_that_know_no_tables_say_so(family_checkpoints, tmp_path):
    for method in ("hqq", "awq"):
        with pytest.raises(SchemeError, match=f"{method} fits evenly spaced values, not the table nf4; use --method lsq"):
            quantize(family_checkpoints("llama").dense, tmp_path / "out", format="nf4", method=method)
    with pytest.raises(SchemeError, match="use lsq or rtn"):
        quantizers.get("awq")(torch.zeros(2, 64), SCHEMES["nf4"])


def test_matrices_that_no_group_divides_stay(family_checkpoints, tmp_path):
    with pytest.raises(SchemeError, match="group_size=32"):
        SCHEMES["mxfp4"].groups(48)
    from lowq_cli.plan.planner import make_plan

    with open_source(str(family_checkpoints("qwen3-moe").dense)) as source:
        notes = {i.name: i.note for i in make_plan(source, make_recipe(format="mxfp4")).items if not i.scheme}
    assert [n for n in notes.values() if n == "K=48 is not a multiple of 32, the group size of mxfp4"]


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made("nvfp4"), tmp_path / "ckpt")


def config_with(folder, **fields):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["schemes"]["w4g16_e2m1_e4m3"].update(fields)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    "fields",
    [
        *({"table": t} for t in ("fp4", "nf4x", 7, None, ["e2m1"], "fitted", "")),
        *({"scale": s} for s in ("e5m2", 1, "float", "e8m0")),
        {"zero": "float"},
        {"bits": 3},
        {"group_size": 32},
    ],
    ids=str,
)
def test_hostile_configs_are_refused_in_a_line(folder, fields):
    config_with(folder, **fields)
    for read in (open_checkpoint, logits):
        with pytest.raises((DamagedError, UnsupportedError)) as e:
            read(folder)
        assert "\n" not in str(e.value)


def with_tensor(folder, name, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[name] = change(tensors[name].clone())
    save_file({n: t for n, t in tensors.items() if t is not None}, path, {"format": "pt"})
    (folder / "lowq_report.json").unlink()


HOSTILE = {
    "a NaN scale": ("weight_scale", lambda t: t.fill_(127)),
    "a negative scale": ("weight_scale", lambda t: t.fill_(200)),
    "scales of 16 bits": ("weight_scale", lambda t: t.half()),
    "a NaN factor": ("weight_table", lambda t: t * torch.nan),
    "a factor of 0": ("weight_table", lambda t: t * 0),
    "a negative factor": ("weight_table", lambda t: -t),
    "an infinite factor": ("weight_table", lambda t: t + torch.inf),
    "a table of 16": ("weight_table", lambda t: t.expand(1, 16).contiguous()),
    "two factors": ("weight_table", lambda t: t.expand(2, 1).contiguous()),
    "a factor in fp16": ("weight_table", lambda t: t.half()),
    "no factor": ("weight_table", lambda t: None),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_tensors_are_refused_in_a_line(folder, case):
    leaf, change = HOSTILE[case]
    with_tensor(folder, f"{Q}.{leaf}", change)

    def all_read(path):
        open_checkpoint(path).check_values()

    for read in (all_read, dequantized, logits):
        with pytest.raises(LowqError) as e:
            read(folder)
        assert "\n" not in str(e.value)
        assert Q in str(e.value)
    with open_source(str(folder)) as source, pytest.raises((LowqError, NotPlain)):
        native_loader.read(source, torch.device("cpu"))


def test_a_stray_table_and_an_older_version_are_refused(folder, made, tmp_path):
    other = shutil.copytree(made("mxfp4"), tmp_path / "mx")
    path = other / "model.safetensors"
    save_file(load_file(path) | {f"{Q}.weight_table": torch.ones(1, 1)}, path, {"format": "pt"})
    (other / "lowq_report.json").unlink()
    for read in (open_checkpoint, logits):
        with pytest.raises(DamagedError, match="weight_table"):
            read(other)
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"]["version"] == 2  # which a lowq that knows no tables refuses, as this one does 3
    for version, said in ((1, "has a table, which version 1 does not"), (3, "upgrade lowq"), (True, "upgrade lowq")):
        config["quantization_config"]["version"] = version
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises((DamagedError, UnsupportedError), match=said):
            open_checkpoint(folder)


def test_companions_are_found_from_slabs_in_any_order():
    W = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    seen = [_table_fit.Companion(SCHEMES["nvfp4"], 64, 64) for _ in range(2)]
    for part in W.split(7):
        seen[0].see(part)
    for part in reversed(W.split(30)):
        seen[1].see(part)
    assert torch.equal(seen[0].result(), seen[1].result())
    assert float(seen[0].result()) == pytest.approx(float(W.abs().max()) / (448 * 6))
