"""Checkpoints read without transformers: the same tokens, configs, angles and ids as by way of it, and who goes that way."""

import json
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from checkpoints import FAMILIES, MIXTURES, write_dense, write_packed
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from lowq_cli.engine import native_loader, open_model, plan, rope, stream
from lowq_cli.engine.contents import contents_of
from lowq_cli.engine.decoders import decoder_of
from lowq_cli.engine.native import NativeDecoder
from lowq_cli.engine.open_model import ready, tokenizer
from lowq_cli.engine.tokenizer_file import read_tokenizer
from lowq_cli.files.source import open_source
from lowq_cli.hf.load import load_model
from lowq_cli.interop import importer
from lowq_cli.plan.recipe import make_recipe
from lowq_cli.run import pipeline
from lowq_kernels.modules.joined import SideBySide
from lowq_packers.arch import families
from lowq_packers.arch.config import NotPlain, read_config
from lowq_packers.arch.parts import Rope, walk
from lowq_packers.errors import DamagedError, LowqError, NotFoundError
from lowq_packers.scheme import Scheme

CPU = torch.device("cpu")
PLAIN = [
    name
    for name, (kind, _) in FAMILIES.items()
    if kind in families() and families()[kind].defaults is not None and name not in MIXTURES
]
SAME = {"attention": Scheme(4, 32, "float"), "mlp": Scheme(4, 16, "int"), "head": Scheme(8, 64, "none")}
PROMPTS = [list(range(3, 20)), list(range(40, 45))]
DEMO = Path(native_loader.__file__).parents[1] / "demo"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES = {
    "none": {},
    "old linear": {"rope_theta": 20000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "llama3": {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0, "original_max_position_embeddings": 32}},
    "llama3, no length": {"rope_scaling": LLAMA3, "rope_theta": 500000.0},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    "yarn, scaled": {
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
        | {"mscale": 0.7, "mscale_all_dim": 1.2, "beta_fast": 16, "truncate": False}
    },
}


def tokens(model, n=12):
    g = stream(model, Letters(), PROMPTS, max_new_tokens=n, decoder=NativeDecoder(model), temperature=1.5, seed=5)
    list(g.pieces())
    return g.tokens


class Letters:
    """A tokenizer that only writes."""

    eos_token_id = None

    def decode(self, ids, **_):
        return "".join(chr(64 + i) for i in ids)


@pytest.mark.parametrize("family", PLAIN)
@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_the_tokens_are_those_by_way_of_transformers(tmp_path, family, kind):
    folder = write_dense(tmp_path / "dense", family, "bfloat16")
    if kind == "packed":
        folder = write_packed(folder, tmp_path / "made", SAME).packed
    with open_source(folder) as source:
        model, heavy = native_loader.read(source, CPU), load_model(source, CPU)
    assert (model.dtype, model.device) == (heavy.dtype, heavy.device)
    assert model.generation_config.eos_token_id == heavy.generation_config.eos_token_id
    expected = tokens(heavy)
    assert len({t for row in expected for t in row}) > 8
    assert tokens(model) == expected
    theirs = dict(NativeDecoder(heavy).linears.named_modules())
    for name, m in model.linears.named_modules():  # each is held as it would be, joined and in the device's layout
        assert isinstance(m, type(theirs[name]))
        assert getattr(m, "layout", None) == getattr(theirs[name], "layout", None)


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("experts", [Scheme(4, 16, "float"), SAME["mlp"], None], ids=["float", "int", "dense"])
def test_mixtures_give_the_logits_and_tokens_by_way_of_transformers(tmp_path, family, experts):
    schemes = SAME | {"expert": experts} if experts else SAME
    folder = write_packed(write_dense(tmp_path / "dense", family, "bfloat16"), tmp_path / "made", schemes).packed
    with open_source(folder) as source:
        model, heavy = native_loader.read(source, CPU), load_model(source, CPU)
    ids = torch.randint(3, 150, (2, 50), generator=torch.Generator().manual_seed(1))
    assert torch.equal(model(input_ids=ids).logits, NativeDecoder(heavy).logits(ids))
    assert tokens(model) == tokens(heavy)
    assert model.linears.state_dict().keys() == NativeDecoder(heavy).linears.state_dict().keys()


@pytest.mark.parametrize("field", ["num_experts_per_tok", "norm_topk_prob", "num_local_experts"])
def test_a_mixture_whose_config_leaves_out_how_it_routes_is_read_as_transformers_reads_it(tmp_path, field):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    schemes = SAME | {"expert": SAME["mlp"]}
    folder = write_packed(write_dense(tmp_path / "dense", "qwen3-moe", "bfloat16"), tmp_path / "made", schemes).packed
    with open_source(folder) as source:
        contents_of(source, CPU)
        del source.config[field]
        try:
            result = contents_of(source, CPU).model
        except NotPlain:
            return
    theirs = families()["qwen3_moe"].describe(CONFIG_MAPPING["qwen3_moe"].from_dict(source.config))
    assert result == theirs


@pytest.mark.parametrize("family", PLAIN)
def test_logits_of_whole_texts_are_those_of_transformers(tmp_path, family):
    with open_source(write_dense(tmp_path / "m", family)) as source:
        model, heavy = native_loader.read(source, CPU), load_model(source, CPU)
    ids = torch.randint(3, 150, (2, 50), generator=torch.Generator().manual_seed(1))
    expected = heavy(input_ids=ids, use_cache=False).logits
    assert ((model(input_ids=ids).logits - expected).norm() / expected.norm()).item() < 1e-5


@pytest.mark.parametrize("other", [{"hidden_activation": "gelu_pytorch_tanh"}, {"final_logit_softcapping": 1.0}], ids=str)
def test_a_field_of_another_family_changes_nothing(tmp_path, other):
    """Before, the native decoder applied Gemma's activation and cap in a Llama whose config has these fields."""
    folder = write_dense(tmp_path / "m", "llama")
    ids = torch.arange(3, 40)[None]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | other))
    with open_source(folder) as source:
        model = load_model(source, CPU)
        expected = model(input_ids=ids).logits
        for fused in (native_loader.read(source, CPU), model):
            assert ((decoder_of(fused).logits(ids) - expected).norm() / expected.norm()).item() < 1e-5


READ = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "phi3", "gemma3_text")


@pytest.mark.parametrize("family", READ)
def test_configs_are_read_as_transformers_reads_them(family):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    sizes = {"vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7, "num_attention_heads": 4}
    sizes |= {"max_position_embeddings": 128, "rms_norm_eps": 1e-5, "model_type": family, "num_key_value_heads": 4}
    for more in ({}, {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}):
        theirs = CONFIG_MAPPING[family].from_dict(sizes | more)
        ours, _, known = read_config(sizes | more, 100)
        for name in known.defaults:
            expected = None if (expected := getattr(theirs, name, None)) == [] else expected
            assert getattr(ours, name) == (64 // 4 if name == "head_dim" and expected is None else expected), name
        for kind, theirs_of_kind in rope.by_kind(theirs.rope_parameters).items():
            ours_of_kind = rope.by_kind(ours.rope_parameters)[kind]
            assert {k: theirs_of_kind[k] for k in ours_of_kind} == ours_of_kind


@pytest.mark.parametrize("family", [f for f in READ if f not in ("phi3", "gemma3_text")])
@pytest.mark.parametrize("name", ROPES)
def test_angles_are_those_of_transformers_bit_for_bit(family, name):
    _compare_angles(family, ROPES[name])


@pytest.mark.parametrize("more", [{}, {"partial_rotary_factor": 0.5}], ids=str)
def test_angles_of_a_part_of_a_head(more):
    _compare_angles("phi3", more)


@pytest.mark.parametrize("more", [{}, {"rope_local_base_freq": 5000.0, "rope_theta": 70000.0}], ids=str)
def test_angles_by_kind_of_layer(more):
    _compare_angles("gemma3_text", more | {"sliding_window_pattern": 2})


def _compare_angles(family, more):
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    raw = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    raw |= {"num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "pad_token_id": 0}
    raw |= {"model_type": family, "num_experts": 2, "num_local_experts": 2, "moe_intermediate_size": 16, "head_dim": 64}
    raw |= {"num_experts_per_tok": 2}
    config, described, _ = read_config(raw | more, 100)
    theirs = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family].from_dict(raw | more)).model.rotary_emb
    for dtype in (torch.bfloat16, torch.float32):
        x, ids = torch.empty(0, dtype=dtype), torch.arange(300)[None]
        for turned in {part for part in walk(described) if isinstance(part, Rope)}:
            kind, of_kind = turned.kind, rope.by_kind(config.rope_parameters)[turned.kind]
            ours = rope.Rotation(of_kind, turned.dims, turned.of, 256).tables(300, CPU, dtype)
            for a, b in zip(ours, theirs(x, ids, kind) if kind else theirs(x, ids), strict=True):
                assert torch.equal(a, b[0])


def _rewritten(folder, change):
    with safe_open(folder / "model.safetensors", "pt") as f:
        result = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118  # not a dict
    change(result)
    save_file(result, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "up_proj.weight is missing or not expected"),
        (lambda t: t.update({"model.extra.weight": torch.zeros(2)}), "model.extra.weight is missing or not expected"),
        (lambda t: t.update({"model.norm.weight": torch.ones(32)}), r"model.norm.weight is F32 \(32,\)"),
    ],
    ids=["missing", "extra", "short"],
)
def test_folders_that_the_native_loader_refuses_are_left_to_transformers(tmp_path, change, why):
    folder = write_dense(tmp_path / "m", "llama")
    _rewritten(folder, change)
    with open_source(folder) as source, pytest.raises(NotPlain, match=why):
        contents_of(source, CPU)


@pytest.mark.parametrize(
    ("family", "more", "why"),
    [
        (
            "mistral",
            {"sliding_window": 4, "layer_types": ["full_attention"] * 2},
            "None",
        ),  # it is a Ministral, which is described
        ("llama", {"is_causal": False}, "not causal"),
    ],
    ids=["layer_types", "is_causal"],
)
def test_attention_of_another_kind_is_the_one_of_transformers(tmp_path, family, more, why):
    folder = write_dense(tmp_path / "m", family)
    config = json.loads((folder / "config.json").read_text()) | more
    (folder / "config.json").write_text(json.dumps(config))
    with open_source(folder) as source:
        with pytest.raises(NotPlain):
            contents_of(source, CPU)
        model = load_model(source, CPU)
    assert why in str(plan.why_not(model))
    assert type(model) is type(AutoModelForCausalLM.from_pretrained(folder))


def test_a_model_that_is_not_there_is_refused_before_kernels_compile(tmp_path, monkeypatch):
    """Compiling takes a minute on two cores."""
    compiled = []
    monkeypatch.setattr(open_model, "build_kernels", compiled.append)
    with pytest.raises(NotFoundError):
        ready(str(tmp_path / "none"), "cpu")
    assert not compiled
    ready("demo", "cpu")
    assert compiled


def test_a_class_of_another_model_type_is_not_taken(tmp_path):
    folder = write_dense(tmp_path / "m", "llama")
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["GemmaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    with open_source(folder) as source:
        assert type(load_model(source, CPU)).__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_that_are_not_finite_are_named(tmp_path, value):
    folder = write_packed(write_dense(tmp_path / "d", "llama", "bfloat16"), tmp_path / "m", SAME).packed
    name = "model.layers.1.mlp.up_proj.weight_scale"
    _rewritten(folder, lambda t: t[name].view(-1)[3:4].fill_(value))
    with open_source(folder) as source, pytest.raises(NotPlain, match="not finite"):
        native_loader.read(source, CPU)
    with pytest.raises(DamagedError, match=r"layers.1.mlp.up_proj.weight_scale holds scales that are not finite"):
        ready(str(folder), "cpu", print)


def test_other_families_go_by_way_of_transformers(tmp_path):
    with open_source(write_dense(tmp_path / "m", "gpt2")) as source, pytest.raises(NotPlain):
        contents_of(source, CPU)


@pytest.mark.parametrize("kind", ["dense", "fp8"])
def test_generate_imports_no_transformers(tmp_path, kind):
    model = "demo" if kind == "dense" else str(in_fp8(DEMO, tmp_path / "fp8"))
    script = """
import sys
from lowq_cli.main import main
assert main(["generate", sys.argv[1], "--prompt", "Once upon a time", "--max-new-tokens", "4"]) == 0
print([m for m in ("transformers", "torch._dynamo", "sympy", "torch.distributed.tensor", "triton") if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script, model], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "[]"


# ---- fp8


def in_fp8(dense, out, **more):
    """`out`, an fp8 checkpoint of a dense model."""
    list(pipeline.run(dense, make_recipe(format="fp8", **more), out, device="cpu"))
    return out


@pytest.mark.parametrize("family", PLAIN)
@pytest.mark.parametrize("more", [{}, {"lm_head": "fp8", "skip": ["layers.0.mlp.up_proj"], "act": "none"}], ids=["", "mixed"])
def test_fp8_gives_the_tokens_by_way_of_transformers(tmp_path, family, more, capfd):
    dense = write_dense(tmp_path / "dense", family, "bfloat16")
    tied = json.loads((dense / "config.json").read_text()).get("tie_word_embeddings", family.startswith("gemma"))
    if tied or family == "phi3":  # which have no head, or no up_proj, of their own
        more = {"act": more["act"]} if more else {}
    folder = in_fp8(dense, tmp_path / "fp8", **more)
    with open_source(folder) as source:
        assert importer.runs_in_fp8(source)
        capfd.readouterr()
        model, heavy = native_loader.read(source, CPU), load_model(source, CPU)
    output = [line for line in capfd.readouterr().err.splitlines() if "weights widened" in line]
    assert len(output) == 2  # both say it, and of as many bytes
    assert len(set(output)) == 1
    theirs = dict(NativeDecoder(heavy).linears.named_modules())
    held = dict(model.linears.named_modules())
    assert all(isinstance(m, type(theirs[name])) for name, m in held.items())
    assert any(getattr(m, "in_blocks", False) for m in held.values())
    expected = tokens(heavy)
    assert len({t for row in expected for t in row}) > 8
    assert tokens(model) == expected


def test_blocks_that_would_begin_inside_a_matrix_are_not_joined(tmp_path):
    dense = write_dense(tmp_path / "dense", "llama", "bfloat16")  # 64 and 32 rows: less than a block of 128 each
    with open_source(in_fp8(dense, tmp_path / "fp8")) as source:
        model = native_loader.read(source, CPU)
    assert {type(model.linears["layers"][0][role]) for role in ("qkv", "gate_up")} == {SideBySide}


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_fp8_scales_that_are_not_finite_are_named(tmp_path, value):
    folder = in_fp8(DEMO, tmp_path / "fp8")
    name = "model.layers.1.mlp.up_proj.weight_scale_inv"
    _rewritten(folder, lambda t: t[name].view(-1)[3:4].fill_(value))
    with open_source(folder) as source, pytest.raises(NotPlain, match="not finite"):
        native_loader.read(source, CPU)
    with pytest.raises(DamagedError, match=r"layers.1.mlp.up_proj.weight_scale_inv holds scales that are not finite"):
        ready(str(folder), "cpu", print)


@pytest.mark.parametrize(
    ("change", "light_says", "says"),
    [
        (
            lambda t, n: t.update({n: t[n][:1]}),
            r"up_proj.weight_scale_inv is F32 \(1, 2\)",
            r"up_proj.* has the shape \(1, 2\)",
        ),
        (lambda t, n: t.update({n: t[n].bfloat16()}), "has no weight_scale_inv in float32", ""),  # imported, dense
        (lambda t, n: t.pop(n), "has no weight_scale_inv in float32", "up_proj"),
        (lambda t, n: t.pop("model.norm.weight"), "model.norm.weight is missing", "lacks model.norm.weight"),
    ],
    ids=["short scales", "scales of 16 bits", "no scales", "no norm"],
)
def test_damaged_fp8_scales_are_refused(tmp_path, change, light_says, says):
    folder = in_fp8(DEMO, tmp_path / "fp8")
    _rewritten(folder, lambda t: change(t, "model.layers.1.mlp.up_proj.weight_scale_inv"))
    with open_source(folder) as source, pytest.raises(NotPlain, match=light_says):
        contents_of(source, CPU)
    with pytest.raises(LowqError, match=says) if says else nullcontext():
        ready(str(folder), "cpu", print)


def test_other_blocks_and_families_in_fp8_are_asked_of_transformers(tmp_path):
    dense = write_dense(tmp_path / "gpt", "mixtral", "bfloat16")
    with open_source(in_fp8(dense, tmp_path / "mixtral")) as source, pytest.raises(NotPlain):
        contents_of(source, CPU)
    folder = in_fp8(DEMO, tmp_path / "fp8", block="256x256")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [64, 64]
    (folder / "config.json").write_text(json.dumps(config))
    with open_source(folder) as source, pytest.raises(NotPlain, match="blocks of"):
        contents_of(source, CPU)


# ---- tokenizers

TEXTS = ["Hello, world!", "  two  spaces\n\nand\tmore ", "naïve café — 北京 🎉", "<|a|>inside<|b|> tokens"]
TEXTS += ["x" * 40, "it's 12345", ""]


def _bpe(folder, model_type="llama", cls="PreTrainedTokenizerFast", qwen=False, **facts):
    """A byte-level tokenizer of 500 tokens with two special ones."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    from lowq_cli.engine.tokenizer_file import QWEN_PATTERN

    folder.mkdir()
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if qwen:
        t.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(QWEN_PATTERN), "isolated", False)
        t.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    t.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<|a|>", "<|b|>"], initial_alphabet=alphabet)
    t.train_from_iterator([(DEMO / "sample.txt").read_text()[:20000]], trainer)
    if not qwen:
        t.post_processor = processors.TemplateProcessing(single="<|a|> $A", special_tokens=[("<|a|>", 0)])
    t.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": cls, "bos_token": "<|a|>", "eos_token": "<|b|>"} | facts
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "architectures": []}))
    return folder


def _same(folder, model_type):
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(str(folder)), read_tokenizer(folder, model_type)
    for text in TEXTS:
        for special in (True, False):
            ids = theirs(text, add_special_tokens=special)["input_ids"]
            assert ours(text, add_special_tokens=special)["input_ids"] == ids
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                    ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
                )
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    return ours, theirs


def test_the_bundled_tokenizer_gives_the_ids_of_transformers():
    _same(DEMO, "llama")


@pytest.mark.parametrize(
    ("model_type", "cls", "qwen"),
    [
        ("llama", "PreTrainedTokenizerFast", False),
        ("qwen3", "TokenizersBackend", False),
        ("phi3", "LlamaTokenizer", False),
        ("qwen2", "Qwen2Tokenizer", True),
        ("qwen3", "Qwen2TokenizerFast", True),
        ("qwen2", "PreTrainedTokenizerFast", True),
    ],
)
def test_tokenizers_of_several_kinds_give_the_ids_of_transformers(tmp_path, model_type, cls, qwen):
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}[assistant] {% endif %}"
    folder = _bpe(tmp_path / "t", model_type, cls, qwen, chat_template=template)
    ours, theirs = _same(folder, model_type)
    output = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " What is <|b|>? "}]
    facts = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
    assert ours.apply_chat_template(output, **facts) == theirs.apply_chat_template(output, **facts)


@pytest.mark.parametrize(
    ("model_type", "facts", "why"),
    [
        ("llama", {"tokenizer_class": "LlamaTokenizer"}, "builds its own"),
        ("qwen2", {}, "builds another one"),
        ("llama", {"pad_token": "<|pad|>"}, "does not have"),
        ("llama", {"auto_map": {"AutoTokenizer": ["x.Y", None]}}, "an unknown class"),
        ("llama", {"added_tokens_decoder": {"7": {"content": "<|c|>", "special": True}}}, "added tokens"),
        ("llama", {"image_token": "<|a|>"}, "of the model's own"),
    ],
)
def test_a_tokenizer_that_transformers_would_change_is_left_to_it(tmp_path, model_type, facts, why):
    with pytest.raises(NotPlain, match=why):
        read_tokenizer(_bpe(tmp_path / "t", model_type, **facts), model_type)


def test_a_folder_without_tokenizer_json_is_left_to_transformers(tmp_path):
    folder = tmp_path / "m"
    shutil.copytree(DEMO, folder)
    with open_source(folder) as source:
        assert tokenizer(source).source == "tokenizer.json"
    (folder / "tokenizer_config.json").unlink()
    with open_source(folder) as source:
        assert tokenizer(source).source == f"the tokenizer of {folder}"
