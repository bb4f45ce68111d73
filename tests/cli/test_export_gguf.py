"""GGUF files: read with the gguf package and, where it is installed, run by llama.cpp itself."""

import contextlib
import importlib.util
import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lowq
from lowq_cli.files.checkpoint import open_checkpoint
from lowq_cli.files.inspection import inspect_model
from lowq_cli.files.source import open_source
from lowq_cli.interop import gguf_export, gguf_tokenizer
from lowq_cli.interop.exporter import export, read_matrix
from lowq_cli.interop.foreign import open_decoded
from lowq_cli.interop.gguf_export import MIXTURES
from lowq_cli.interop.gguf_file import GgufTensor, array, head, padded, text, u32
from lowq_packers.errors import DamagedError, LowqError, NotFoundError, UnsupportedError, UsageError
from lowq_packers.formats.gguf import permute_heads
from lowq_packers.scheme import Scheme

DEMO = Path(gguf_export.__file__).parents[1] / "demo"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def demo4(tmp_path_factory):
    """The demo at 4 bits without a zero (Q4_0), its down projections at 8 (Q8_0)."""
    out = tmp_path_factory.mktemp("demo") / "demo4"
    lowq.quantize("demo", out=out, bits=4, group=32, method="rtn", zero="none", overrides=["down_proj=8:32"])
    return out


@pytest.fixture(scope="module")
def demo_gguf(demo4):
    out = demo4.with_name("demo.gguf")
    export(demo4, "gguf", out)
    return out


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
    found = {t.name: t for t in reader.tensors}
    assert len(found) == 6 * 9 + 2  # tied: no output.weight
    checkpoint = open_checkpoint(demo4)
    kinds = set()
    for t in checkpoint.tensors:
        if not t.scheme:
            continue
        _, _, layer, _, leaf = t.name.split(".")
        names = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
        ours = names.get(leaf, "ffn_" + leaf.removesuffix("_proj"))
        theirs = found[f"blk.{layer}.{ours}.weight"]
        kinds.add(theirs.tensor_type.name)
        w = torch.from_numpy(package.quants.dequantize(theirs.data, theirs.tensor_type).copy())
        if leaf in ("q_proj", "k_proj"):
            w = permute_heads(w, 8 if leaf == "q_proj" else 4, inverse=True)
        assert torch.equal(w, read_matrix(checkpoint, t).dequantize()), t.name
    assert kinds == {"Q4_0", "Q8_0"}


def test_llama_cpp_predicts_as_we_do(demo4, demo_gguf):
    """Perplexity of one window; llama.cpp rounds activations to 8 bits, so logits agree only roughly."""
    if importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("needs llama-cpp-python (extra interop; builds from source)")
    import llama_cpp

    from lowq_cli.accuracy.perplexity import evaluate, read_text, tokenize

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
    found = torch.from_numpy(theirs.scores[: len(ids)].copy())
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    if family in MIXTURES:  # llama.cpp rounds activations to 8 bits, so a token near a tie may visit another expert
        assert errors.median() < 0.05
        assert (errors < 0.1).float().mean() > 0.7
    else:
        assert (found - expected).norm() / expected.norm() < 0.03


def test_float_zeros_go_as_q4_1_when_rounding_is_allowed(tmp_path):
    lowq.quantize("demo", out=tmp_path / "m", bits=4, group=64, method="rtn")
    with pytest.raises(UnsupportedError, match="--round"):
        export(tmp_path / "m", "gguf", tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()
    done = export(tmp_path / "m", "gguf", tmp_path / "m.gguf", rounding=True)
    assert done.bytes == (tmp_path / "m.gguf").stat().st_size
    assert not list(tmp_path.glob("*.partial"))


def test_a_gguf_file_is_a_source(demo4, demo_gguf, tmp_path):
    """Without a config.json beside it, and in Hugging Face's order of rows."""
    alone = tmp_path / "alone.gguf"
    shutil.copy(demo_gguf, alone)
    found = open_checkpoint(demo4)
    with open_decoded(alone) as source:
        assert source.config["model_type"] == "llama"
        assert source.config["num_key_value_heads"] == 4
        assert source.config["tie_word_embeddings"]
        for t in found.tensors:
            name = f"{t.name}.weight" if t.scheme else t.name
            wanted = read_matrix(found, t).dequantize() if t.scheme else found.source.read(t.name).reshape(t.shape)
            assert torch.equal(
                source.read(name).reshape(t.shape), wanted.to(torch.float16) if t.scheme else wanted.to(source.read(name).dtype)
            ), name
    shown = inspect_model(str(alone))
    assert shown.format == "gguf"
    assert {r.scheme for r in shown.rows if r.quantized} == {"Q4_0", "Q8_0"}
    assert "llama.cpp" in shown.engines
    lowq.quantize(alone, out=tmp_path / "again", bits=3, group=32, method="rtn")


def test_a_gguf_file_runs_alone(demo_gguf, demo4):
    """With the tokenizer that its metadata stand for."""
    ours, tokenizer = lowq.load(demo4, device="cpu", dtype="float32")
    theirs, made = lowq.load(demo_gguf, device="cpu", dtype="float32")
    text = 'Once upon a time, in 1897, there was  a naïve <|endoftext|> 模型\n\n\tHe\'d said "yes".'
    ids = tokenizer(text, return_tensors="pt").input_ids
    assert made(text).input_ids == ids[0].tolist()
    assert made.decode(ids[0]) == tokenizer.decode(ids[0])
    assert (made.bos_token, made.eos_token, made.pad_token) == (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token)
    with torch.inference_mode():
        a, b = ours(ids).logits, theirs(ids).logits
    assert (a - b).norm() / a.norm() < 1e-4


HEAD = b"GGUF" + struct.pack("<IQQ", 3, 1, 0)
ROW = struct.pack("<Q", 1) + b"t" + struct.pack("<I", 2)


@pytest.mark.parametrize(
    ("raw", "error", "message"),
    [
        (b"", DamagedError, "ends inside"),
        (b"GGUF", DamagedError, "ends inside"),
        (b"PK\x03\x04" + bytes(40), DamagedError, "no GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), UnsupportedError, "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), DamagedError, "1152921504606846976 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 40), DamagedError, "characters"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a" + struct.pack("<I", 99),
            DamagedError,
            "unknown type 99",
        ),
        (HEAD + ROW + struct.pack("<QQIQ", 64, 1, 16, 0), UnsupportedError, "GGUF type 16"),
        (HEAD + ROW + struct.pack("<QQIQ", 33, 1, 2, 0), DamagedError, "whole blocks"),
        (HEAD + ROW + struct.pack("<QQIQ", 1 << 39, 1 << 39, 0, 0), DamagedError, "beyond the end"),
        (HEAD + ROW + struct.pack("<QQIQ", 64, 1, 0, 1 << 50), DamagedError, "beyond the end"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), UnsupportedError, "architecture None"),
    ],
)
def test_hostile_gguf_files(tmp_path, raw, error, message):
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    with pytest.raises(error, match=message):
        open_decoded(path)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 3000), value=st.integers(0, 255))
def test_any_flipped_byte_of_a_head_is_an_error_or_a_file(demo_gguf, tmp_path, at, value):
    path = tmp_path / "m.gguf"
    raw = bytearray(demo_gguf.read_bytes())
    raw[at] = value
    path.write_bytes(raw)
    with contextlib.suppress(LowqError), open_decoded(path) as source:
        source.read("model.layers.0.mlp.up_proj.weight")


def _edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma3_text"}, "not one that lowq writes as GGUF"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "'yarn'"),
        ({"sliding_window": 64}, "sliding window"),
    ],
    ids=["family", "rope", "window"],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(demo4, tmp_path, changes, message):
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
    with pytest.raises(UnsupportedError, match="no byte-level BPE"):
        export(tmp_path / "m", "gguf", tmp_path / "m.gguf")


def test_an_existing_file_is_not_overwritten(demo4, tmp_path):
    (tmp_path / "m.gguf").write_text("data")
    with pytest.raises(UsageError, match="is there already"):
        export(demo4, "gguf", tmp_path / "m.gguf")


def test_llama_3_frequencies():
    """Short waves stay, long ones are slowed by the factor, those between lie between."""
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = {"head_dim": 128, "rope_parameters": rope | {"original_max_position_embeddings": 8192}}
    factors = gguf_export._rope_factors(config)
    assert factors.shape == (64,)
    assert (factors[0], factors[-1]) == (1, 8)
    assert ((factors[1:] - factors[:-1]) >= 0).all()
    assert factors[30:40].unique().numel() > 1
    with open_source("demo") as source:
        assert gguf_export._rope_factors(source.config) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_topk_prob": False}, "does not normalise"),
        ({"mlp_only_layers": [0]}, "have no experts"),
    ],
)
def test_mixtures_that_llama_cpp_would_compute_otherwise_are_refused(family_checkpoints, tmp_path, changes, message):
    made = family_checkpoints("qwen3-moe", "float16", {"attention": Scheme(4, 32, "none")})
    shutil.copytree(made.packed, tmp_path / "m")
    for path in DEMO.glob("tokenizer*"):
        shutil.copy(path, tmp_path / "m" / path.name)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps({**config, "norm_topk_prob": True, **changes}))
    with pytest.raises(UnsupportedError, match=message):
        export(tmp_path / "m", "gguf", tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()


@pytest.mark.parametrize("rule", ["llama-bpe", "qwen2", "gpt-2"])
@pytest.mark.parametrize("bos", [True, False])
def test_a_tokenizer_there_and_back(rule, bos, tmp_path):
    """tokenizer.json -> metadata -> tokenizer.json: the same tokens of any text, a bos in front where one belongs."""
    from tokenizers import Tokenizer

    content = json.loads((DEMO / "tokenizer.json").read_text())
    split, byte_level = content["pre_tokenizer"]["pretokenizers"]
    if rule == "gpt-2":
        content["pre_tokenizer"] = {**byte_level, "use_regex": True}
    else:
        split["pattern"]["Regex"] = next(r for r, name in gguf_tokenizer.PRE_TOKENIZERS.items() if name == rule)
    if bos:
        content["post_processor"] = gguf_tokenizer._puts_in_front("<|endoftext|>", 0)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    values = gguf_tokenizer.tokenizer_metadata(tmp_path, {"eos_token_id": 0, "bos_token_id": 0}, 8200)
    made = gguf_tokenizer.made_tokenizer({key: v.value for key, v in values})
    assert made["tokenizer_config.json"]["chat_template"] == "{{ messages }}"
    assert made["tokenizer_config.json"]["eos_token"] == "<|endoftext|>"
    ours = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    back = Tokenizer.from_str(json.dumps(made["tokenizer.json"]))
    sample = (DEMO / "sample.txt").read_text()[:20000] + " 1234567 x2 <|endoftext|>\r\n  naïve 模型 don't DON'T"
    assert back.encode(sample).ids == ours.encode(sample).ids
    assert (back.encode("a").ids[0] == 0) == bos


def test_a_tokenizer_that_it_does_not_know_may_be_put_beside_it(demo4, tmp_path, monkeypatch):
    """Also later: the import that was made without it takes it up."""
    monkeypatch.setattr("lowq_cli.interop.gguf_tokenizer.PRE_TOKENIZERS", {})
    out = tmp_path / "m" / "demo.gguf"
    monkeypatch.setattr("lowq_cli.interop.gguf_tokenizer._pre_tokenizer", lambda content: "deepseek-coder")
    export(demo4, "gguf", out)
    with pytest.raises(NotFoundError, match="has no tokenizer; copy"):
        lowq.load(out, device="cpu")
    for path in DEMO.glob("tokenizer*"):
        shutil.copy(path, out.with_name(path.name))
    _, tokenizer = lowq.load(out, device="cpu")
    assert tokenizer("Once").input_ids


@pytest.mark.parametrize("broken", [{"tokens": 3}, {"token_type": [1]}, {"merges": None}, {"model": "llama"}, {"pre": []}])
def test_metadata_that_are_no_tokenizer_make_none(broken):
    sound = {"model": "gpt2", "pre": "qwen2", "tokens": ["a", "b"], "token_type": [1, 1], "merges": []}
    assert gguf_tokenizer.made_tokenizer({f"tokenizer.ggml.{k}": v for k, v in sound.items()})
    assert not gguf_tokenizer.made_tokenizer({f"tokenizer.ggml.{k}": v for k, v in (sound | broken).items()})
