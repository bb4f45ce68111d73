"""Better codes and scales inside another tool's file: its format and zeros stay, outputs come closer, refusals are shown."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import write_byte_tokenizer
from exported import HEAD, INT4, SYM, dense_tensors
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig
from vocabularies import tokenizer

from lowq_cli import main
from lowq_cli.calibrate.requirements import LayerDone, MatrixDone
from lowq_cli.files.source import DEMO, open_source
from lowq_cli.interop import gguf_bytes
from lowq_cli.interop.exporter import export
from lowq_cli.interop.foreign import fetcher, foreign_matrices, open_decoded, open_foreign
from lowq_cli.interop.gguf_file import GgufTensor, f32, head, padded, u32
from lowq_cli.interop.gguf_file import text as text_value
from lowq_cli.plan.recipe import make_recipe
from lowq_cli.run import pipeline
from lowq_cli.run.mixture import CalibratedMixture
from lowq_cli.run.refine import Refining
from lowq_packers.errors import UnsupportedError, UsageError
from lowq_packers.formats._gguf_blocks import BLOCK_KINDS
from lowq_packers.formats.gguf import permute_heads
from lowq_packers.home import cache_dir
from lowq_packers.scheme import Scheme

AFFINE = {"attention": Scheme(4, 32, "float"), "mlp": Scheme(4, 32, "float")}


pytestmark = pytest.mark.usefixtures("own_cache")


def recipe(text):
    return make_recipe(method="gptq", group="channel", dtype="float32", lm_head="keep", calib=text)


def refined(folder, model, text, out):
    refining = Refining(str(folder), str(model), recipe(text), str(out), "cpu")
    list(refining.run())
    return refining.export()


def parts(path):
    """(codes, all else) of every quantized matrix."""
    with open_foreign(path) as source:
        _, matrices = foreign_matrices(source)
        result = {m.name: m.read(fetcher(source)) for m in matrices}
    return {n: q.W_q for n, q in result.items()}, {n: (q.scheme, q.scales, q.zeros) for n, q in result.items()}


def equal(a, b):
    return a is b is None or (a.dtype == b.dtype and torch.equal(a, b))


@pytest.mark.parametrize(
    ("to", "schemes"),
    [("gptq", INT4), ("compressed-tensors", SYM | HEAD), ("mlx", AFFINE)],
)
def test_codes_and_scales_change_and_nothing_else(to, schemes, bf16_checkpoints, text, tmp_path):
    folders = bf16_checkpoints("llama", schemes)
    export(folders.packed, to, tmp_path / "file", rounding=to == "mlx")
    done = refined(tmp_path / "file", folders.dense, text, tmp_path / "refined")
    assert done.exported.format == to
    assert_grids_stay(tmp_path / "file", tmp_path / "refined", done)
    if "head" in schemes:
        assert torch.equal(parts(tmp_path / "file")[0]["lm_head"], parts(tmp_path / "refined")[0]["lm_head"])


def test_a_gguf_file_keeps_all_but_codes_and_scales(demo_gguf, text, tmp_path):
    model = shutil.copytree(DEMO, tmp_path / "demo")
    config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 32}  # windows of as many tokens
    (model / "config.json").write_text(json.dumps(config))
    done = refined(demo_gguf, model, text, tmp_path / "refined.gguf")
    assert_grids_stay(demo_gguf, tmp_path / "refined.gguf", done)


def assert_grids_stay(old, new, done):
    """Other codes and scales in as many matrices as `done` says, scales of the same dtype, and nothing else."""
    assert done.better > 0
    (before, kept), (after, still) = parts(old), parts(new)
    assert before.keys() == after.keys()
    changed = [n for n in before if not torch.equal(before[n], after[n]) or not equal(kept[n][1], still[n][1])]
    assert len(changed) == done.better
    for n, (scheme, scales, zeros) in kept.items():
        assert still[n][0] == scheme
        assert still[n][1].dtype == scales.dtype
        assert equal(scales, still[n][1]) or scheme.zero != "float"  # which are one with an offset
        assert equal(zeros, still[n][2])
    with open_decoded(old) as a, open_decoded(new) as b:
        first, second = dense_tensors(a), dense_tensors(b)
    assert all(torch.equal(first[n], second[n]) for n in first if n.removesuffix(".weight") not in before)


def errors_of(model, text, *files):
    """Mean squared errors of the logits with each file's weights."""
    tokens = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    ids = torch.tensor([tokens.encode(Path(text).read_text()[:600], add_special_tokens=False).ids])
    model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        expected, errors = model(ids).logits, []
        for file in files:
            with open_decoded(file) as source:
                model.load_state_dict({n: t.float() for n, t in dense_tensors(source).items()}, strict=False)
            errors.append(float((model(ids).logits - expected).square().mean()))
    return errors


@pytest.mark.parametrize("to", ["gptq", "awq"])
def test_outputs_come_nearer(to, bf16_checkpoints, text, tmp_path):
    folders = bf16_checkpoints("llama", INT4)
    export(folders.packed, to, tmp_path / "file")
    refined(tmp_path / "file", folders.dense, text, tmp_path / "refined")
    old, new = errors_of(folders.dense, text, tmp_path / "file", tmp_path / "refined")
    assert 0 < new < 0.9 * old


@pytest.mark.parametrize(
    ("form", "to"), [("nvfp4", "modelopt"), ("nvfp4", "compressed-tensors"), ("mxfp4", "compressed-tensors")]
)
def test_four_bit_floats_get_better_codes_and_scales(form, to, bf16_checkpoints, text, tmp_path):
    dense = bf16_checkpoints("llama", INT4).dense
    pipeline.quantize(dense, tmp_path / "m", format=form, method="rtn", lm_head="keep", device="cpu")
    export(tmp_path / "m", to, tmp_path / "file")
    done = refined(tmp_path / "file", dense, text, tmp_path / "refined")
    assert_grids_stay(tmp_path / "file", tmp_path / "refined", done)
    old, new = errors_of(dense, text, tmp_path / "file", tmp_path / "refined")
    assert 0 < new < 0.9 * old


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A Llama of one layer whose rows are whole blocks of 256."""
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=256, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=402, max_position_embeddings=32)  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    for p in model.parameters():
        torch.nn.init.normal_(p, 1.0 if p.dim() == 1 else 0.0, 0.05)
    model.save_pretrained(folder := tmp_path_factory.mktemp("wide"))
    return write_byte_tokenizer(folder)


def write_blocks_of(folder, path, kind):
    """The model as a GGUF file, all matrices of its layer in one type."""
    with open_source(folder) as source:
        tensors = dense_tensors(source)
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "mlp.up_proj": "ffn_up",
             "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.down_proj": "ffn_down",
             "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}  # fmt: skip
    names = {f"model.layers.0.{ours}": f"blk.0.{theirs}" for ours, theirs in names.items()}
    names |= {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    rows, raw = [], []
    for name, W in tensors.items():
        theirs = names[name.removesuffix(".weight")]
        packed = W.dim() == 2 and theirs.startswith("blk")
        W = permute_heads(W, 4 if theirs.endswith("q") else 2) if theirs in ("blk.0.attn_q", "blk.0.attn_k") else W
        rows.append(GgufTensor(f"{theirs}.weight", tuple(W.shape), kind if packed else "F32"))
        raw.append(gguf_bytes.encoded_rows(W, kind, name) if packed else W.float().contiguous().flatten().view(torch.uint8))
    facts = {"context_length": 32, "embedding_length": 256, "block_count": 1, "feed_forward_length": 256, "vocab_size": 402,
             "attention.head_count": 4, "attention.head_count_kv": 2}  # fmt: skip
    metadata = [("general.architecture", text_value("llama")), ("general.name", text_value("kept as it is"))]
    metadata += [(f"llama.{k}", u32(v)) for k, v in facts.items()]
    metadata.append(("llama.attention.layer_norm_rms_epsilon", f32(1e-6)))
    with open(path, "wb") as f:
        f.write(head(metadata, rows))
        for row, part in zip(rows, raw, strict=True):
            f.write(part.numpy().tobytes() + bytes(padded(row.nbytes) - row.nbytes))


LIKE_ANOTHER = ("Q5_K", "Q5_0")  # scales and minima as Q4_K and IQ4_NL have them, with codes of another width


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=[pytest.mark.more] * (k in LIKE_ANOTHER)) for k in (*BLOCK_KINDS, "IQ4_NL", "MXFP4")],
)
def test_gguf_blocks_get_better_codes_and_scales(kind, wide, text, tmp_path):
    write_blocks_of(wide, tmp_path / "m.gguf", kind)
    done = refined(tmp_path / "m.gguf", wide, text, tmp_path / "n.gguf")
    assert (done.matrices, done.better) == (7, 7)
    old, new = errors_of(wide, text, tmp_path / "m.gguf", tmp_path / "n.gguf")
    assert 0 < new < 0.8 * old
    before, after = (tmp_path / "m.gguf").read_bytes(), (tmp_path / "n.gguf").read_bytes()
    assert len(before) == len(after)
    with open_foreign(tmp_path / "m.gguf") as source:
        first = min(h.offset for h in source.headers.values())
        spans = [(h.offset, h.offset + h.nbytes) for n, h in source.headers.items() if "proj" not in n]
    assert before[:first] == after[:first]
    assert all(before[a:b] == after[a:b] for a, b in spans)
    package = pytest.importorskip("gguf", reason="needs the package gguf (extra interop)")
    read = {t.name: t for t in package.GGUFReader(tmp_path / "n.gguf").tensors}["blk.0.attn_q.weight"]
    theirs = torch.from_numpy(package.quants.dequantize(read.data, read.tensor_type).copy())
    with open_decoded(tmp_path / "n.gguf") as source:
        ours = source.read("model.layers.0.self_attn.q_proj.weight").reshape(256, 256)
    assert torch.equal(permute_heads(theirs, 4, inverse=True).to(ours.dtype), ours)


def llama3_model(wide, tmp_path):
    """A copy of the model with a tokenizer that a GGUF file can hold."""
    model = shutil.copytree(wide, tmp_path / "wide")
    tokenizer("llama3", ("<|begin|>", "<|end|>")).save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return model


def test_a_mixture_is_calibrated_on_a_text(wide, text, tmp_path, capsys):
    """`quantize --type --calib`: the plain mixture's types and bytes, outputs nearer; the same call again finds the file."""
    plain, made = tmp_path / "plain.gguf", tmp_path / "made.gguf"
    model = llama3_model(wide, tmp_path)
    export(model, None, plain, kind="Q3_K_M")
    line = ["quantize", str(model), "--type", "q3_k_m", "--calib", text, "--device", "cpu", "--out", str(made), "--json"]
    output = []
    for _ in range(2):
        assert main.main(line) == 0
        result, plan = capsys.readouterr()
        output.append(json.loads(result))
        assert f"calibrated on {text}, 65,536 tokens" in plan
        assert re.search(r"on cpu, about [\d:. s]+ \(within 2x\)", plan)
        assert f"lies in {cache_dir()} twice" in plan
        assert copies_in_the_cache() == []
    assert output[0]["after"] < output[0]["before"]
    assert output[1] == {**output[0], "already_done": True}
    assert [t["already_done"] for t in output] == [False, True]
    assert [t["out"] for t in output] == [str(made)] * 2
    assert made.stat().st_size == plain.stat().st_size
    with open_foreign(plain) as a, open_foreign(made) as b:
        assert a.config["gguf"] == b.config["gguf"]
        assert {f["type"] for f in a.config["gguf"].values()} == {"Q3_K", "Q4_K", "Q5_K", "Q6_K"}  # of a model in fp32, too
    old, new = errors_of(model, text, plain, made)
    assert 0 < new < 0.9 * old


def copies_in_the_cache():
    """What a run leaves there, but for the calibration text."""
    return [p for kind in ("exports", "refined", "tokenizers") for p in (cache_dir() / kind).glob("*")]


def test_a_killed_mixture_goes_on_with_the_same_bytes_and_leaves_nothing(wide, text, tmp_path):
    model = str(llama3_model(wide, tmp_path))

    def mixture(name):
        return CalibratedMixture(model, "q2_k", recipe(text), str(tmp_path / name), "cpu")

    def steps(run, stop=None):
        list(run.text())
        assert not run.done
        run.start()
        for event in run.improve():
            if isinstance(event, stop or ()):
                return None
        return run.export()

    once = steps(mixture("once.gguf"))
    assert not once.exported.already_done
    for killed in ("in a layer", "before it was recorded"):
        (tmp_path / "again.gguf").unlink(missing_ok=True)
        run = mixture("again.gguf")
        if killed == "in a layer":
            assert steps(run, MatrixDone) is None
        else:
            list(run.text())
            run.start()
            list(run.improve())
            run.refining.export()
        again = steps(mixture("again.gguf"))
        assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "once.gguf").read_bytes()
        assert (again.before, again.after) == (once.before, once.after)
        assert copies_in_the_cache() == []
    with pytest.raises(UsageError, match="there already"):  # another kind into the same file
        list(CalibratedMixture(model, "q4_k_m", recipe(text), str(tmp_path / "again.gguf"), "cpu").text())


def test_a_plan_comes_first_and_the_error_before_and_after_last(wide, text, tmp_path, capsys):
    write_blocks_of(wide, tmp_path / "m.gguf", "Q4_K")
    line = ["refine", str(tmp_path / "m.gguf"), "--model", str(wide), "--calib", text, "--device", "cpu"]
    line += ["--out", str(tmp_path / "n.gguf")]
    assert main.main([*line, "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["rows"] == [["Q4_K", 7, 4 * 256 * 256 + 2 * 128 * 256 + 256 * 256]]
    assert plan["budget"]["seconds"] > 0
    assert not (tmp_path / "n.gguf").exists()
    assert main.main(line) == 0
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'n.gguf'}\n"
    order = ["Q4_K  ", "65,536 tokens", "(within 2x)", "calibrate ", "matrices have a smaller error now", "next: lowq compare"]
    assert [err.index(what) for what in order] == sorted(err.index(what) for what in order)
    before, after = map(float, re.search(r"mean of all: (\S+) -> (\S+)", err).groups())
    assert 0 < after < before
    layer = re.search(r"calibrated layer 1 of 1: output error (\S+) -> (\S+)", err)
    assert [float(x) for x in layer.groups()] == pytest.approx([before, after], abs=1e-3)
    assert all(row.startswith(("calibrate ", "export ")) for row in err.splitlines() if "eta" in row)  # one for each bar
    assert main.main([*line, "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["already_done"]
    assert (again["before"], again["after"]) == pytest.approx((before, after), rel=0.01)
    assert copies_in_the_cache() == []


def test_a_dry_run_of_a_folder_writes_nothing(bf16_checkpoints, text, tmp_path, capsys):
    """The run itself imports the folder into the cache."""
    folders = bf16_checkpoints("llama", INT4)
    export(folders.packed, "gptq", tmp_path / "file")
    line = ["refine", str(tmp_path / "file"), "--model", str(folders.dense), "--calib", text, "--device", "cpu", "--dry-run"]
    assert main.main([*line, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["rows"] == [["4-bit g32 int zero", 14, plan["rows"][0][2]]]
    assert plan["budget"]["seconds"] > 0
    assert not [p for p in cache_dir().rglob("*") if p.suffix == ".safetensors" or p.parent.name in ("imports", "refined")]


def test_a_killed_run_of_blocks_goes_on_with_the_same_bytes(wide, text, tmp_path):
    write_blocks_of(wide, tmp_path / "m.gguf", "Q2_K")
    refined(tmp_path / "m.gguf", wide, text, tmp_path / "once.gguf")
    shutil.rmtree(cache_dir() / "refined")
    events = Refining(str(tmp_path / "m.gguf"), str(wide), recipe(text), str(tmp_path / "again.gguf"), "cpu").run()
    for event in events:
        if isinstance(event, LayerDone):
            break
    with pytest.raises(KeyboardInterrupt):
        events.throw(KeyboardInterrupt)
    resumed = Refining(str(tmp_path / "m.gguf"), str(wide), recipe(text), str(tmp_path / "again.gguf"), "cpu")
    assert [e.resumed for e in resumed.run() if isinstance(e, LayerDone)] == [True]
    assert not resumed.export().exported.already_done
    assert refined(tmp_path / "m.gguf", wide, text, tmp_path / "again.gguf").exported.already_done
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "once.gguf").read_bytes()


def test_a_killed_run_goes_on_with_the_same_bytes(bf16_checkpoints, text, tmp_path):
    folders = bf16_checkpoints("llama", INT4)
    export(folders.packed, "gptq", tmp_path / "file")
    refined(tmp_path / "file", folders.dense, text, tmp_path / "once")
    shutil.rmtree(cache_dir() / "refined")
    events = Refining(str(tmp_path / "file"), str(folders.dense), recipe(text), str(tmp_path / "again"), "cpu").run()
    for event in events:
        if isinstance(event, LayerDone):
            break
    with pytest.raises(KeyboardInterrupt):
        events.throw(KeyboardInterrupt)
    resumed = Refining(str(tmp_path / "file"), str(folders.dense), recipe(text), str(tmp_path / "again"), "cpu")
    assert [e.resumed for e in resumed.run() if isinstance(e, LayerDone)] == [True, False]
    assert list(Refining(str(tmp_path / "file"), str(folders.dense), recipe(text), str(tmp_path / "again"), "cpu").run()) == []
    assert not resumed.export().exported.already_done
    assert refined(tmp_path / "file", folders.dense, text, tmp_path / "again").exported.already_done
    for path in (tmp_path / "once").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


def test_refining_twice_makes_no_matrix_worse(bf16_checkpoints, text, tmp_path):
    """Refined again, where the layers before have moved a little: hardly anything is better, and nothing is worse."""
    folders = bf16_checkpoints("llama", INT4)
    export(folders.packed, "gptq", tmp_path / "file")
    refined(tmp_path / "file", folders.dense, text, tmp_path / "refined")
    refined(tmp_path / "refined", folders.dense, text, tmp_path / "twice")
    first, once, twice = errors_of(folders.dense, text, *(tmp_path / n for n in ("file", "refined", "twice")))
    assert twice < 1.1 * once < first


def test_other_files_models_and_full_folders_are_refused(bf16_checkpoints, text, tmp_path):
    folders = bf16_checkpoints("llama", INT4)
    export(folders.packed, "gptq", tmp_path / "file")
    with pytest.raises(UsageError, match="not a checkpoint of another tool"):
        Refining(str(folders.packed), str(folders.dense), recipe(text), str(tmp_path / "out"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    with pytest.raises(UsageError, match="there already"):
        Refining(str(tmp_path / "file"), str(folders.dense), recipe(text), str(tmp_path / "full"))
    other = bf16_checkpoints("qwen3", INT4)
    with pytest.raises(UnsupportedError):
        list(Refining(str(tmp_path / "file"), str(other.dense), recipe(text), str(tmp_path / "out"), "cpu").run())


def test_learnt_norms_are_refused(bf16_checkpoints, text, tmp_path):
    folders = bf16_checkpoints("llama", INT4)
    export(folders.packed, "gptq", tmp_path / "file")
    tensors = load_file(tmp_path / "file" / "model.safetensors")
    tensors = {n: t * 1.5 if "norm" in n else t for n, t in tensors.items()}
    save_file(tensors, tmp_path / "file" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedError, match="no AWQ scales explain"):
        list(Refining(str(tmp_path / "file"), str(folders.dense), recipe(text), str(tmp_path / "out"), "cpu").run())


def scaled_as_awq_does(dense, folder, pairs):
    """The model with scales of 1/3 to 3 between norms and linears and between `pairs` of linears: the same function."""
    shutil.copytree(dense, folder)
    with open_source(dense) as source:
        tensors = {n: t.float() for n, t in dense_tensors(source).items()}
    g = torch.Generator().manual_seed(0)
    moves = {"input_layernorm": ("q_proj", "k_proj", "v_proj"), "post_attention_layernorm": ("gate_proj", "up_proj")} | pairs
    for before, W in tensors.items():
        stem, _, leaf = before.removesuffix(".weight").rpartition(".")
        for after in moves.get(leaf, ()):
            s = torch.exp(2.2 * torch.rand(len(W), generator=g.manual_seed(len(stem))) - 1.1)
            name = next(n for n in tensors if n.startswith(stem) and n.endswith(f"{after}.weight"))
            tensors[name] = tensors[name] * s
        if leaf in moves:
            tensors[before] = W / (s if W.dim() == 1 else s.unsqueeze(-1))
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("pairs", [{}, {"up_proj": ("down_proj",)}], ids=["norms", "norms and up"])
def test_weights_scaled_before_they_were_quantized_are_improved(pairs, bf16_checkpoints, text, tmp_path):
    """As AWQ's tools do it: the norms' scales are exact, those between up and down are estimated, and norms stay."""
    dense = bf16_checkpoints("llama", INT4).dense
    scaled = scaled_as_awq_does(dense, tmp_path / "scaled", pairs)
    assert errors_of(dense, text, scaled)[0] < 1e-6
    pipeline.quantize(
        scaled, tmp_path / "m", bits=4, group=32, zero="int", method="rtn", dtype="float16", lm_head="keep", device="cpu"
    )
    export(tmp_path / "m", "awq", tmp_path / "file")
    done = refined(tmp_path / "file", dense, text, tmp_path / "refined")
    assert_grids_stay(tmp_path / "file", tmp_path / "refined", done)
    old, new = errors_of(dense, text, tmp_path / "file", tmp_path / "refined")
    assert 0 < new < 0.8 * old
