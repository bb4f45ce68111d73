"""`--type Q4_K_M`: which tensor gets which type, the codes that are chosen, and files that the gguf package reads."""

import json
import re

import pytest
import torch

from lowq_cli import main
from lowq_cli.files.checkpoint import open_checkpoint
from lowq_cli.files.source import open_source
from lowq_cli.interop.exporter import export
from lowq_cli.interop.foreign import open_decoded
from lowq_cli.plan import gguf_types
from lowq_cli.plan.gguf_types import MIXTURES, Facts, type_of
from lowq_cli.quantizers._block_search import quantize_blocks
from lowq_packers.errors import DamagedError, SchemeError, UnsupportedError, UsageError
from lowq_packers.formats._gguf_blocks import BLOCK_KINDS, Blocks
from lowq_packers.formats.gguf import TYPES

pytestmark = pytest.mark.usefixtures("own_cache")


def cli(*args):
    return main.main([*map(str, args)])


LLAMA_8B = {"attn_q": (4096, 4096), "attn_k": (1024, 4096), "attn_v": (1024, 4096), "attn_output": (4096, 4096),
            "ffn_gate": (14336, 4096), "ffn_up": (14336, 4096), "ffn_down": (4096, 14336)}  # fmt: skip
PUBLISHED = {"Q2_K": 3.18, "Q3_K_S": 3.66, "Q3_K_M": 4.02, "Q3_K_L": 4.32, "Q4_K_S": 4.69, "Q4_K_M": 4.92, "Q5_K_S": 5.60,
             "Q5_K_M": 5.73, "Q6_K": 6.60, "Q8_0": 8.54}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_llama_8b_is_as_large_as_published_files_of_the_type(name):
    """GB of Meta-Llama-3.1-8B-Instruct's files by llama.cpp, 8 MB of which are the tokenizer."""
    facts, total = Facts(32, 4, 0, False), 0
    shapes = {f"blk.{i}.{t}.weight": shape for i in range(32) for t, shape in LLAMA_8B.items()}
    for tensor, (N, K) in {**shapes, "token_embd.weight": (128256, 4096), "output.weight": (128256, 4096)}.items():
        kind = TYPES[type_of(MIXTURES[name], tensor, K, facts)]
        total += N * K // kind.elements * kind.nbytes
    assert (total / 1e9 + 0.008) == pytest.approx(PUBLISHED[name], abs=0.006)


@pytest.mark.parametrize(
    ("name", "tensor", "K", "facts", "kind"),
    [
        ("Q4_K_M", "blk.0.attn_v.weight", 4096, Facts(32, 4, 0, False), "Q6_K"),
        ("Q4_K_M", "blk.5.attn_v.weight", 4096, Facts(32, 4, 0, False), "Q4_K"),
        ("Q4_K_M", "blk.6.ffn_down.weight", 4096, Facts(32, 4, 0, False), "Q6_K"),
        ("Q4_K_M", "token_embd.weight", 4096, Facts(32, 4, 0, True), "Q6_K"),
        ("Q4_K_M", "token_embd.weight", 4096, Facts(32, 4, 0, False), "Q4_K"),
        ("Q4_K_M", "blk.0.ffn_gate.weight", 1408, Facts(32, 4, 0, False), "Q5_0"),
        ("Q4_K_M", "token_embd.weight", 1408, Facts(32, 4, 0, True), "Q8_0"),
        ("Q4_K_M", "blk.0.ffn_gate.weight", 1400, Facts(32, 4, 0, False), "F16"),
        ("Q2_K", "blk.3.attn_v.weight", 4096, Facts(32, 1, 0, False), "Q3_K"),
        ("Q2_K", "blk.3.attn_v.weight", 4096, Facts(80, 8, 0, False), "Q5_K"),
        ("Q4_K_M", "blk.5.attn_k.weight", 4096, Facts(32, 4, 8, False), "Q8_0"),
        ("Q4_K_M", "blk.5.attn_output.weight", 4096, Facts(32, 4, 8, False), "Q5_K"),
        ("Q3_K_M", "blk.0.ffn_down_exps.weight", 4096, Facts(32, 4, 8, False), "Q5_K"),
        ("Q8_0", "output.weight", 4096, Facts(32, 4, 0, False), "Q8_0"),
    ],
)
def test_the_type_of_a_tensor_in_a_mixture(name, tensor, K, facts, kind):
    assert type_of(MIXTURES[name], tensor, K, facts) == kind


def plain(W, kind):
    """The type by its definition alone: each sub-block's range, whole numbers rounded to the largest one, nearest codes."""
    b = BLOCK_KINDS[kind]
    x = W.reshape(len(W), -1, b.elements // b.sub, b.sub)
    values, order = b.values().sort()
    least, most = x.amin(-1), x.amax(-1)
    low = -least.clamp(max=0) if b.mins and b.elements != b.sub else -least
    step = (most + low) / (values[-1] - values[0]) if b.mins else x.abs().amax(-1) / values.abs().max()
    top = b.scales[1]
    d = (step.amax(-1, keepdim=True) / top).half()
    dmin = (low.amax(-1, keepdim=True) / max(b.mins, 1)).half() if b.mins and b.elements != b.sub else low.half()
    s = (step / d.float()).round().clamp(0, top)
    m = (low / dmin.float().clamp(min=1e-9)).round().clamp(0, b.mins) if b.mins else None
    m = torch.ones_like(s) if b.mins and b.elements == b.sub else m
    wide, off = d.float() * s, 0 if m is None else (dmin.float() * m).unsqueeze(-1)
    codes = order[torch.bucketize((x + off) / wide.unsqueeze(-1).clamp(min=1e-30), (values[1:] + values[:-1]) / 2)]
    flat = [t if t is None else t.reshape(len(W), -1) for t in (codes.to(torch.uint8), s, m, d, dmin if b.mins else None)]
    return Blocks(kind, *flat)


@pytest.fixture(scope="module")
def weights():
    with open_source("demo") as source:
        return source.read("model.layers.2.mlp.down_proj.weight").reshape(256, 768)[:64].float()


def error(W, q, importance=1.0):
    return float(((q.dequantize() - W).square() * importance).sum())


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_codes_lose_less_than_rounding_by_the_definition(kind, weights):
    importance = torch.rand(768, generator=torch.Generator().manual_seed(0)).pow(4) + 0.01
    reference, result = plain(weights, kind), quantize_blocks(weights, kind)
    assert error(weights, result) < 0.95 * error(weights, reference)
    weighed = quantize_blocks(weights, kind, importance)
    assert error(weights, weighed, importance) < error(weights, result, importance)
    assert torch.equal(quantize_blocks(weights[5:6], kind).codes, result.codes[5:6])  # rows are independent


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_weights_at_the_ends(kind):
    """Zeros, one value, one large weight among small ones, the smallest; what fp16 does not reach is refused."""
    one = torch.zeros(4, 256)
    one[1], one[2, 7], one[2, 100:] = 0.5, 1000.0, 1e-4
    one[3] = 1e-30
    result = quantize_blocks(one, kind).dequantize()
    assert result.isfinite().all()
    assert result[0].abs().max() == 0
    assert torch.allclose(result[1], one[1], rtol=0.02)
    assert abs(float(result[2, 7]) / 1000 - 1) < 0.02
    assert result[3].abs().max() < 1e-7
    with pytest.raises(SchemeError, match="beyond what GGUF's fp16 scales reach"):
        quantize_blocks(torch.full((1, 256), 1e9), kind)
    with pytest.raises(DamagedError, match="1 NaN"):
        quantize_blocks(one.index_fill(1, torch.tensor(3), torch.nan)[:1], kind)
    with pytest.raises(SchemeError, match="not whole blocks"):
        quantize_blocks(one[:, :240], kind)


@pytest.mark.parametrize("name", ["Q4_K_M", "Q2_K"])
def test_the_gguf_package_reads_the_file(name, short_demo, tmp_path, capsys):
    package = pytest.importorskip("gguf", reason="needs the package gguf (extra interop)")
    flags = "--type", name.lower(), "--out", tmp_path / "m.gguf", "--json"
    assert cli("quantize", short_demo, "--export", "gguf", *flags) == 0
    out, err = capsys.readouterr()
    output = json.loads(out)
    assert re.search(r"^on cpu, about [\d.:]+", err, re.M), "the plan names the time"
    reader = package.GGUFReader(tmp_path / "m.gguf")
    assert reader.fields["general.file_type"].contents() == MIXTURES[name].number
    result = {t.name: t for t in reader.tensors}
    assert output["matrices"] == sum(len(t.shape) == 2 for t in reader.tensors) == 15
    assert result["token_embd.weight"].tensor_type.name == "Q6_K"  # tied: it is the head
    facts = Facts(2, 2, 0, True)
    with open_source(short_demo) as dense, open_decoded(tmp_path / "m.gguf") as ours:
        for t in reader.tensors:
            shape = tuple(reversed([int(n) for n in t.shape]))
            if len(shape) == 2:
                assert t.tensor_type.name == type_of(MIXTURES[name], t.name, shape[1], facts)
        for theirs, name_here in (("blk.1.ffn_down", "model.layers.1.mlp.down_proj"), ("token_embd", "model.embed_tokens")):
            t = result[f"{theirs}.weight"]
            W = dense.read(f"{name_here}.weight").float().reshape(tuple(reversed([int(n) for n in t.shape])))
            read = torch.from_numpy(package.quants.dequantize(t.data, t.tensor_type).copy())
            assert torch.equal(read.half(), ours.read(f"{name_here}.weight").reshape(read.shape))
            assert (read - W).norm() < {"Q6_K": 0.03, "Q4_K": 0.1, "Q3_K": 0.2}[t.tensor_type.name] * W.norm()


def test_plans_and_refusals(capsys):
    assert cli("quantize", "demo", "--type", "Q4_K_M", "--dry-run", "--json") == 0
    message = json.loads(capsys.readouterr().out)
    assert [t["type"] for t in message["types"]] == ["Q4_K", "Q6_K", "F32"]
    for wrong, output in (
        (["quantize", "demo", "--type", "Q9_K"], "--type Q9_K does not exist; use one of Q2_K"),
        (["quantize", "demo", "--type", "Q4_K_M", "--bits", "3"], "leave --bits or --type out"),
        (["quantize", "demo", "--type", "Q4_K_M", "--export", "mlx"], "use it with --export gguf"),
        (["export", "demo", "--type", "Q4_K_M", "--to", "mlx"], "leave --to mlx out"),
    ):
        assert cli(*wrong) == 2
        assert output in capsys.readouterr().err
    with pytest.raises(UsageError, match="does not exist"):
        gguf_types.get("Q4_K_XL")


@pytest.mark.parametrize("form", ["lowq", "table-e4m3"])
def test_weights_in_no_type_of_gguf_are_rounded_again(form, short_demo, tmp_path):
    assert cli("quantize", short_demo, "--bits", 3, "--method", "rtn", "--format", form, "--out", tmp_path / "o") == 0
    done = export(tmp_path / "o", None, tmp_path / "m.gguf", kind="Q8_0")
    assert any("quantized before" in note for note in done.notes)
    before = open_checkpoint(tmp_path / "o")
    with before.source, open_decoded(tmp_path / "m.gguf") as after:
        for t in (t for t in before.tensors if t.scheme):
            W, read = before.read_matrix(t).dequantize(), after.read(f"{t.name}.weight").float().reshape(t.shape)
            assert (read - W).norm() < 0.01 * W.norm()


def test_a_checkpoint_is_rounded_again_and_says_so(demo4, tmp_path):
    done = export(demo4, None, tmp_path / "m.gguf", kind="Q8_0")
    assert any("quantized before" in note for note in done.notes)
    assert done.bytes == (tmp_path / "m.gguf").stat().st_size
    again = export(tmp_path / "m.gguf", None, tmp_path / "n.gguf", kind="Q8_0")
    assert any("quantized before" in note for note in again.notes)
    assert again.bytes == done.bytes
    assert not export("demo", None, tmp_path / "d.gguf", kind="Q8_0").notes
    assert done.matrices == 43


@pytest.mark.parametrize("name", ["Q2_K", "Q6_K", "IQ4_XS", "Q8_0"])
def test_a_file_of_blocks_that_lowq_reads_as_dense_is_not_exported(name, short_demo, tmp_path):
    """It was called a model that is not quantized, by the name of its folder in the cache."""
    file = tmp_path / "m.gguf"
    export(short_demo, out=file, kind=name)
    if name == "Q8_0":  # whose codes lowq holds
        assert not any("as dense" in note for note in export(file, "hqq", tmp_path / "out").notes)
        return
    with pytest.raises(UnsupportedError, match=rf"^{file}: lowq reads .*{name}.*no codes to export; .* lowq quantize {file} "):
        export(file, "hqq", tmp_path / "out")
