"""Descriptions of families: names and shapes are those of transformers, tiny and as published, in modules and in files."""

import ast
import math
import sys
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors import safe_open
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

sys.path.insert(0, str(Path(__file__).parent))
from described import COPIES, NAMES, auto, config, here, model
from sizes import BILLIONS, CLASS_SIZES, CONFIGS
from start import printed

from emulation import sampled
from lowq_cli.engine.rope import by_kind
from lowq_cli.engine.state import BLOCK, static_state
from lowq_cli.files.source import open_source
from lowq_cli.hf.structure import roles
from lowq_cli.serving.cache_allocator import Sizes
from lowq_packers.arch import families
from lowq_packers.arch.common import NotDescribed
from lowq_packers.arch.config import read_config
from lowq_packers.arch.names import tensors

OWN = [name for name in NAMES if "/" not in name]
KINDS = {  # of some tensors, where names alone do not say it: what a description says -> what they are held for without one
    ("router", "mlp"), ("router", "other"), ("mlp", "other"), ("other", "mlp"), ("attention", "other"),
    ("recurrent", "attention"), ("recurrent", "other"),
}  # fmt: skip
# Files that transformers writes in another form than publishers do; it reads both.
OTHERWISE = {
    "qwen3_5_moe": "published with the experts of a layer in two tensors, written one by one",
    "qwen3_5_moe_text": "the same",
    "qwen3_vl_moe": "published with the stacks of experts transposed, written as the module has them",
    "kimi_k25": "transformers 5.23 writes the language model's layers as blocks, a name of its tower",
}


def family_of(name):
    return families()[name.partition("/")[0]]


def class_of(model_type):
    return CONFIG_MAPPING[COPIES.get(model_type, model_type)]


def on_meta(c):
    with torch.device("meta"):
        return auto(c).from_config(c)


def shapes(model, d):
    """The tensors of the text part of a transformers model, without the head if it is the embedding."""
    held = {k: tuple(v.shape) for k, v in model.state_dict().items() if not k.startswith(d.outside_text or "/")}
    return {k: v for k, v in held.items() if not (d.tied and k == f"{d.head}.weight")}


def assert_same(ours, theirs):
    """Compare names and shapes; a failure lists what differs, the first ten."""
    missing = [f"{n} {theirs[n]} is transformers', not described" for n in theirs.keys() - ours.keys()]
    beyond = [f"{n} {ours[n]} is described, not transformers'" for n in ours.keys() - theirs.keys()]
    odd = [f"{n} is {theirs[n]} in transformers, described as {s}" for n, s in ours.items() if theirs.get(n, s) != s]
    different = sorted(missing + beyond + odd)
    assert not different, "\n".join(("", *different[:10]))


def forms(d, form):
    """Names and shapes in one form, for each place that files may have."""
    return [{k: t.shape for k, t in tensors(d, form, place).items()} for place in (None, *d.files)]


def published(name):
    return class_of(name.partition("/")[0]).from_dict(deepcopy(CONFIGS[name]))


def test_every_family_has_a_tiny_model_and_a_published_size():
    inside = {name for name in families() if name.endswith("vl_text") or name == "qwen3_vl_moe_text"}
    without = set(filter(here, families())) - inside - {n.partition("/")[0] for n in NAMES}
    assert not without, "give each an entry in TEXTS of tests/families/described.py"
    without = families().keys() - inside - {n.partition("/")[0] for n in CONFIGS} - {"qwen3_5_moe_text", *CLASS_SIZES}
    assert not without, "give each an entry in CONFIGS and BILLIONS of tests/families/sizes.py"
    assert {n.partition("/")[0] for n in (*NAMES, *CONFIGS, *CLASS_SIZES)} <= families().keys()
    assert CONFIGS.keys() <= BILLIONS.keys()


@pytest.mark.parametrize("name", NAMES)
def test_a_tiny_models_names_and_shapes_are_those_of_transformers(name):
    c = config(name)
    d = family_of(name).describe(c)
    assert_same(forms(d, "modules")[0], shapes(on_meta(c), d))
    assert {*map(type, forms(d, "modules")[0].values())} == {tuple}


@pytest.mark.parametrize("name", [name for name in CONFIGS if here(name)])
def test_a_published_models_names_and_shapes_are_those_of_transformers(name):
    c = published(name)
    d = family_of(name).describe(c)
    result = forms(d, "modules")[0]
    assert_same(result, shapes(on_meta(c), d))
    count = sum(map(math.prod, result.values()))
    print(f"{name}: {count:,} parameters")
    assert abs(count / 1e9 / BILLIONS[name] - 1) < 0.01


@pytest.mark.parametrize("name", sampled(NAMES, left=0))
def test_files_hold_the_described_tensors_with_their_shapes_and_roles(name, tmp_path):
    made = model(name)
    made.save_pretrained(tmp_path)
    d = family_of(name).describe(made.config)
    held = {}
    for path in tmp_path.glob("*.safetensors"):
        with safe_open(path, "pt") as f:
            held |= {k: tuple(f.get_slice(k).get_shape()) for k in f.keys() if not k.startswith(d.outside_text or "/")}  # noqa: SIM118
    assert (held in forms(d, "files")) != (name in OTHERWISE)
    if name == "kimi_k25":
        return
    with open_source(tmp_path) as source:
        theirs = {k: r for k, r in roles(source.config, source.headers).items() if not k.startswith(d.outside_text or "/")}
    ours = max((tensors(d, "files", p) for p in (None, *d.files)), key=lambda found: len(found.keys() & theirs.keys()))
    assert {(t.kind, theirs[k].kind) for k, t in ours.items() if k in theirs and t.kind != theirs[k].kind} <= KINDS
    split = set().union(*(tensors(d, "split", p) for p in (None, *d.files)))
    assert {f"{part.name}.weight" for r in theirs.values() for part in r.parts} <= split


@pytest.mark.parametrize("name", [name for name in families() if here(name)])
def test_defaults_are_those_of_transformers(name):
    family, cls = families()[name], class_of(name)
    made_of = {"global_head_dim", "num_global_key_value_heads"} if name == "gemma4_text" else set()  # of per_layer_config
    alias = {theirs: ours for ours, theirs in cls.attribute_map.items()}
    if Version(transformers.__version__) < Version("5.23"):  # fields that came later
        made_of |= {k for k in family.filled if not hasattr(cls, alias.get(k, k))}
    expected = {k: getattr(cls, k if hasattr(cls, k) else alias[k]) for k in family.filled if k not in made_of}
    assert {k: v for k, v in family.filled.items() if k not in made_of} == expected
    of_kinds = getattr(cls(), "rope_parameters", None) or {}
    if not family.text and name != "gemma4_text":
        bases = cls.default_theta if isinstance(cls.default_theta, dict) else {"global": cls.default_theta}
        assert family.rope_theta == of_kinds.get("full_attention", {}).get("rope_theta", bases["global"])
    assert family.local_rope_theta == of_kinds.get("sliding_attention", {}).get("rope_theta", 0.0)


@pytest.mark.parametrize("name", ["helium", "persimmon"])
def test_start_prints_the_defaults_of_every_family_as_its_file_has_them(name):
    defaults, made = ast.parse(printed(name)).body
    family = families()[name]
    assert ast.literal_eval(defaults.value) == family.defaults
    theta, sizes = (made.value.elts[0].args[3:], made.value.elts[0].keywords[0].value)
    assert [ast.literal_eval(t) for t in theta] in ([], [family.rope_theta])
    assert ast.literal_eval(sizes) == family.sizes


@pytest.mark.parametrize("name", [name for name in CONFIGS if here(name)])
def test_a_config_json_is_described_without_transformers_as_with_it(name):
    theirs = published(name)
    raw = {"model_type": name.partition("/")[0], **deepcopy(CONFIGS[name])}
    c, model, family = read_config(raw, 1 << 20)
    assert model == family.describe(theirs)
    ours, expected = (by_kind(getattr(x.get_text_config(), "rope_parameters", None)) for x in (c, theirs))
    assert {k: (r.get("rope_type"), r.get("rope_theta"), r.get("factor")) for k, r in expected.items() if r} == {
        k: (r.get("rope_type"), r.get("rope_theta"), r.get("factor")) for k, r in ours.items() if expected.get(k)
    }


UNSAID = {  # what a family's class itself has no working value for
    "deepseek_v2": {"num_experts_per_tok": 6},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe"]},
    "glm4_moe": {"head_dim": 128},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "lfm2_moe": {"layer_types": ["full_attention"] * 32},
}
# Their classes have a rotation of their own, which every publisher's config.json says
OWN_ROPE = tuple(name for name, family in families().items() if family.own_rope)


@pytest.mark.parametrize("name", [n for n, f in families().items() if not f.text and here(n)])
def test_a_config_json_that_says_nothing_is_described_as_its_class_fills_it_in(name):
    """Publishers leave out fields with the class's default: Gemma 3's text_config has six fields."""
    raw = {"model_type": name, **UNSAID.get(name, {})}
    raw |= {"rope_parameters": class_of(name)().rope_parameters} if name in OWN_ROPE else {}
    c, model, family = read_config(raw, 1 << 20)
    theirs = class_of(name).from_dict(deepcopy(raw))
    assert model == family.describe(theirs)
    expected = by_kind(getattr(theirs, "rope_parameters", None) or c.rope_parameters)
    for kind, r in by_kind(c.rope_parameters).items():  # of a share of the head a description knows itself
        assert r == {k: v for k, v in expected[kind].items() if k != "partial_rotary_factor" or k in r}


@pytest.mark.parametrize("name", NAMES)
def test_equal_configs_have_equal_descriptions(name):
    describe = family_of(name).describe
    first, second = describe(config(name)), describe(config(name))
    assert first == second
    assert hash(first) == hash(second)
    assert describe(config(name, vocab_size=168)) != first


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("deepseek_v3", ("model.layers.61.",)), ("glm4_moe", ("model.layers.46.",)), ("glm4_moe_lite", ("model.layers.47.",)),
        ("kimi_k2", ()), ("exaone_moe", ("mtp.",)),
        ("qwen3_next", ("mtp.",)), ("qwen3_5", ("mtp.",)), ("nemotron_h", ("mtp.",)),
    ],
)  # fmt: skip
def test_heads_for_further_tokens_are_named(name, extra):
    assert family_of(name).describe(published(name)).extra == extra


def test_keys_of_layers_that_share_anothers_are_named_too():
    extra = family_of("gemma4").describe(published("gemma4/e2b")).extra
    assert len(extra) == 20 * 4
    assert "model.language_model.layers.15.self_attn.k_proj." in extra


@pytest.mark.parametrize(
    ("name", "more", "why"),
    [
        ("llama", {"hidden_act": "quick_gelu"}, "activation quick_gelu"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "bidirectional attention"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "bidirectional attention"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "other constants"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "chosen by noaux_tc"),
        ("llama", {"is_causal": False}, "not causal"),
        ("llama", {"per_layer_config": {"1": {"intermediate_size": 32}}}, "layers that differ"),
        ("mamba2", {"hidden_act": "gelu"}, "a convolution with activation gelu"),
        ("hunyuan_v1_moe", {"num_experts": [6, 6, 6, 4]}, "different numbers of experts"),
    ],
)
def test_configs_outside_the_vocabulary_are_refused_with_the_reason(name, more, why):
    fields = vars(config(name)) | more
    with pytest.raises(NotDescribed, match=why):
        families()[name].describe(SimpleNamespace(**fields))


def remembered(name, tokens):
    """GB of one text's cache in bf16: in the decoder, in the server during steps, and with pages for all tokens."""
    d = family_of(name).describe(published(name))
    states = [m.state for layer in d.layers for u in layer for m in u.mixers if getattr(m, "state", None) is not None]
    plan = SimpleNamespace(states=states, dtype=torch.bfloat16, device=torch.device("meta"))
    held = {id(t): t.nbytes for one in static_state(plan, 1, tokens, "16") for t in (one.k, one.v)}
    sizes = Sizes.of(plan, "16")
    served = sizes.bytes([g.blocks(tokens, BLOCK) for g in sizes.groups])
    return [n / 1e9 for n in (sum(held.values()), served, sizes.bytes([tokens // BLOCK] * len(sizes.groups)))]


def test_layers_with_a_window_take_no_memory_for_all_tokens():
    """As published: Gemma 3 27B has 52 of 62 layers with a window of 1,024, gpt-oss 20B 12 of 24 with one of 128."""
    assert remembered("gemma3", 32768) == pytest.approx([3.58, 3.18, 16.64], abs=0.05)
    assert remembered("gpt_oss", 32768) == pytest.approx([0.84, 0.81, 1.61], abs=0.03)
