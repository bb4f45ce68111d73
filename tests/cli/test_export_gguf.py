"""GGUF files: read with the gguf package and, where it is installed, run by llama.cpp itself."""

import importlib.util
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import lowq
from lowq_cli.files.checkpoint import open_checkpoint
from lowq_cli.files.source import open_source
from lowq_cli.interop import gguf_export
from lowq_cli.interop.exporter import export
from lowq_cli.interop.gguf_file import GgufTensor, array, head, padded, text, u32
from lowq_packers.errors import DamagedError, UnsupportedError, UsageError
from lowq_packers.formats.gguf import permute_heads
from lowq_packers.scheme import Scheme

DEMO = Path(gguf_export.__file__).parents[1] / "demo"
pytestmark = pytest.mark.usefixtures("own_cache")


def test_the_head_by_hand():
    raw = head([("a", u32(7)), ("b", text("xy")), ("c", array([1, 2], 4))], [GgufTensor("t", (2, 64), "Q4_0")])
    expected = b"GGUF" + bytes([3, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0])
    expected += bytes([1]) + bytes(7) + b"a" + bytes([4, 0, 0, 0, 7, 0, 0, 0])
    expected += bytes([1]) + bytes(7) + b"b" + bytes([8, 0, 0, 0, 2]) + bytes(7) + b"xy"
    expected += bytes([1]) + bytes(7) + b"c" + bytes([9, 0, 0, 0, 4, 0, 0, 0, 2]) + bytes(7) + bytes([1, 0, 0, 0, 2, 0, 0, 0])
    expected += (
        bytes([1])
        + bytes(7)
        + b"t"
        + bytes([2, 0, 0, 0, 64])
        + bytes(7)
        + bytes([2])
        + bytes(7)
        + bytes([2, 0, 0, 0])
        + bytes(8)
    )
    assert raw == expected + bytes(padded(len(expected)) - len(expected))
    assert GgufTensor("t", (2, 64), "Q4_0").nbytes == 2 * 2 * 18


def test_the_gguf_reader_finds_our_weights(demo4, demo_gguf):
    package = pytest.importorskip("gguf", reason="needs the package gguf (extra interop)")
    reader = package.GGUFReader(demo_gguf)
    fields = {k: f.contents() for k, f in reader.fields.items()}
    assert fields["general.architecture"] == "llama"
    assert fields["llama.attention.head_count_kv"] == 4
    assert fields["llama.rope.freq_base"] == 10000.0
    assert fields["tokenizer.ggml.pre"] == "llama-bpe"
    assert len(fields["tokenizer.ggml.tokens"]) == 8192
    assert not fields["tokenizer.ggml.add_bos_token"]
    result = {t.name: t for t in reader.tensors}
    assert len(result) == 6 * 9 + 2  # tied: no output.weight
    checkpoint = open_checkpoint(demo4)
    kinds = set()
    for t in checkpoint.tensors:
        if not t.scheme:
            continue
        layer, leaf = ("", "embed_tokens") if t.name.endswith("embed_tokens") else t.name.split(".")[2::2]
        names = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
        ours = names.get(leaf, "ffn_" + leaf.removesuffix("_proj"))
        theirs = result[f"blk.{layer}.{ours}.weight" if layer else "token_embd.weight"]
        kinds.add(theirs.tensor_type.name)
        w = torch.from_numpy(package.quants.dequantize(theirs.data, theirs.tensor_type).copy())
        if leaf in ("q_proj", "k_proj"):
            w = permute_heads(w, 8 if leaf == "q_proj" else 4, inverse=True)
        assert torch.equal(w, checkpoint.read_matrix(t).dequantize()), t.name
    assert kinds == {"Q4_0", "Q8_0"}


def test_llama_cpp_predicts_as_we_do(demo4, demo_gguf):
    """Perplexity of one window; llama.cpp rounds activations to 8 bits, so logits agree only roughly."""
    if importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("needs llama-cpp-python (extra interop; builds from source)")
    import llama_cpp

    from lowq_cli.evaluate.perplexity import evaluate, read_text, tokenize

    model, tokenizer = lowq.load(demo4, device="cpu", dtype="float32")
    story = read_text(None)
    ids = tokenize(tokenizer, story)[:257]
    theirs = llama_cpp.Llama(str(demo_gguf), n_ctx=512, logits_all=True, verbose=False, n_threads=2)
    assert theirs.tokenize(story[:400].encode(), add_bos=False) == tokenize(tokenizer, story[:400]).tolist()
    theirs.eval(ids.tolist())
    log_p = torch.log_softmax(torch.tensor(theirs.scores[: len(ids) - 1]).float(), -1)
    ppl = (-log_p.gather(1, ids[1:, None]).mean()).exp().item()
    assert ppl == pytest.approx(evaluate(model, ids, window=257).ppl, rel=0.005)


LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GRAPHS = {
    "llama": {"tie_word_embeddings": False},
    "llama-3": {"rope_parameters": LLAMA_3},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 64},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.0, "sliding_window": None},
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "head_dim": 32,
        "norm_topk_prob": True,
    },
}


@pytest.mark.parametrize("family", GRAPHS)
def test_llama_cpp_computes_the_same_graph(family, tmp_path):
    """Random weights, so that a row, a bias or a frequency in the wrong place changes every logit."""
    if importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("needs llama-cpp-python (extra interop; builds from source)")
    import llama_cpp
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    small = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 8192,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "tie_word_embeddings": True,
    }
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family.split("-")[0]](**(small | GRAPHS[family]))
    model = AutoModelForCausalLM.from_config(config).float()
    for p in model.parameters():
        torch.nn.init.normal_(p, 1.0 if p.dim() == 1 and p.mean() == 1 else 0.0, 0.3 if p.dim() == 1 else 0.1)
    model.save_pretrained(tmp_path / "dense")
    for path in DEMO.glob("tokenizer*"):
        shutil.copy(path, tmp_path / "dense" / path.name)
    lowq.quantize(tmp_path / "dense", out=tmp_path / "m", bits=8, group=32, method="rtn", zero="none", dtype="float16")
    export(tmp_path / "m", "gguf", tmp_path / "m.gguf")
    ours, _ = lowq.load(tmp_path / "m", device="cpu", dtype="float32")
    ids = torch.arange(7, 7 + 96 * 31, 31)
    theirs = llama_cpp.Llama(str(tmp_path / "m.gguf"), n_ctx=128, logits_all=True, verbose=False, n_threads=2)
    theirs.eval(ids.tolist())
    with torch.inference_mode():
        expected = ours(ids[None]).logits[0]
    result = torch.from_numpy(theirs.scores[: len(ids)].copy())
    errors = (result - expected).norm(dim=-1) / expected.norm(dim=-1)
    if family in ("mixtral", "qwen3_moe"):  # activations in 8 bits: near a tie another expert is visited
        assert errors.median() < 0.05
        assert (errors < 0.1).float().mean() > 0.7
    else:
        assert (result - expected).norm() / expected.norm() < 0.03


def test_float_zeros_go_as_q4_1_when_rounding_is_allowed(tmp_path):
    lowq.quantize("demo", out=tmp_path / "m", bits=4, group=64, method="rtn")
    with pytest.raises(UnsupportedError, match="--round"):
        export(tmp_path / "m", "gguf", tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()
    done = export(tmp_path / "m", "gguf", tmp_path / "m.gguf", rounding=True)
    assert done.bytes == (tmp_path / "m.gguf").stat().st_size
    assert not list(tmp_path.glob("*.partial"))


def _edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma3_text"}, "cannot be written as GGUF"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0, "factor": 2.0}}, "'yarn'"),
        ({"model_type": "mistral", "sliding_window": 64}, "sliding window"),
        ({"model_type": "mistral"}, "sliding window"),
        ({"hidden_act": "gelu"}, "activation is gelu"),
    ],
    ids=["family", "rope", "window", "Mistral's own window", "activation"],
)
def test_models_that_llama_cpp_computes_differently_are_refused(demo4, tmp_path, changes, message):
    shutil.copytree(demo4, tmp_path / "m")
    _edit(tmp_path / "m", **changes)
    with pytest.raises((UnsupportedError, DamagedError), match=message):
        export(tmp_path / "m", "gguf", tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()


def test_tokenizers_that_it_would_split_otherwise_are_refused(demo4, tmp_path):
    shutil.copytree(demo4, tmp_path / "m")
    path = tmp_path / "m" / "tokenizer.json"
    content = json.loads(path.read_text())
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\w+"
    path.write_text(json.dumps(content))
    with pytest.raises(UnsupportedError, match="no name for"):
        export(tmp_path / "m", "gguf", tmp_path / "m.gguf")
    content["model"]["byte_fallback"] = True
    path.write_text(json.dumps(content))
    with pytest.raises(UnsupportedError, match="not a byte-level BPE"):
        export(tmp_path / "m", "gguf", tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("file", "change", "line"),
    [
        ("tokenizer.json", lambda c: c["model"]["vocab"].update(a="x"), "tokenizer.json: token 'a' has the number x"),
        ("tokenizer.json", lambda c: c["model"].update(merges=[[1, 2]]), "tokenizer.json is not a tokenizer"),
        ("tokenizer.json", lambda c: c.update(added_tokens=[{"id": 1}]), "tokenizer.json is not a tokenizer"),
        (
            "generation_config.json",
            lambda c: c.update(eos_token_id=[[1]]),
            r"generation_config.json has eos_token_id = \[\[1\]\]",
        ),
    ],
)
def test_tokens_of_other_types_are_refused(demo4, tmp_path, file, change, line):
    path = shutil.copytree(demo4, tmp_path / "m") / file
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(DamagedError, match=line):
        export(tmp_path / "m", "gguf", tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()


def test_an_existing_file_is_not_overwritten(demo4, tmp_path):
    (tmp_path / "m.gguf").write_text("data")
    with pytest.raises(UsageError, match="is there already"):
        export(demo4, "gguf", tmp_path / "m.gguf")


def test_llama_3_frequencies():
    """Short waves stay, long ones are slowed by the factor, those between lie between."""
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = SimpleNamespace(head_dim=128, rope_parameters=rope | {"original_max_position_embeddings": 8192})
    factors = gguf_export.rope_factors(config)
    assert factors.shape == (64,)
    assert (factors[0], factors[-1]) == (1, 8)
    assert ((factors[1:] - factors[:-1]) >= 0).all()
    assert factors[30:40].unique().numel() > 1
    with open_source("demo") as source:
        assert gguf_export.rope_factors(gguf_export.config_and_model(source.config)[0]) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_topk_prob": False}, "does not normalise"),
        ({"norm_topk_prob": None}, "does not normalise"),
        ({"mlp_only_layers": [0]}, "have no experts"),
    ],
)
def test_mixtures_that_llama_cpp_would_compute_otherwise_are_refused(family_checkpoints, tmp_path, changes, message):
    folders = family_checkpoints("qwen3-moe", "float16", {"attention": Scheme(4, 32, "none")})
    shutil.copytree(folders.packed, tmp_path / "m")
    for path in DEMO.glob("tokenizer*"):
        shutil.copy(path, tmp_path / "m" / path.name)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps({**config, "norm_topk_prob": True, **changes}))
    with pytest.raises(UnsupportedError, match=message):
        export(tmp_path / "m", "gguf", tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()
