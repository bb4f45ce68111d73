"""config.json of every family with fields changed at random: read as transformers reads it, left to it, or refused."""

import json
import random
import sys
from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from described import COPIES, TEXTS, auto, config, here
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lowq_cli.engine.rope import Rotation
from lowq_cli.engine.weights import describe
from lowq_packers.arch import families
from lowq_packers.arch.common import NotDescribed
from lowq_packers.arch.config import NotPlain, read_config
from lowq_packers.arch.parts import Linear, Rope, walk

NAMES = tuple(filter(here, TEXTS))
GONE = ...  # the field is left out; a value that deepcopy keeps
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS = (
    {"type": "linear", "factor": 2.0}, {"rope_type": "dynamic", "factor": 2.0}, {"type": "yarn", "factor": 2.0}, YARN, LLAMA3,
    YARN | {"mscale": 0.7, "mscale_all_dim": 0.9, "beta_fast": 20, "beta_slow": 2}, YARN | {"truncate": False},
    YARN | {"attention_factor": 1.5}, LLAMA3 | {"original_max_position_embeddings": 64},
    {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
)  # fmt: skip
STRAY = {  # fields that some families read and others do not
    "head_dim": (8, 32), "num_key_value_heads": (1, 4), "qk_rope_head_dim": (4,), "rotary_emb_base": (500.0,),
    "original_max_position_embeddings": (32,), "partial_rotary_factor": (0.25, 0.5), "sliding_window": (3,),
    "attention_bias": (True, False), "mlp_bias": (True, False), "use_bias": (True, False), "rope_theta": (77.0, 5e5),
    "tie_word_embeddings": (True, False), "max_position_embeddings": (64, 512),
}  # fmt: skip


@cache
def plain(name):
    """config.json of a name, with every field."""
    model_type = name.partition("/")[0]
    return json.loads(config(name).to_json_string(use_diff=False)) | {"model_type": COPIES.get(model_type, model_type)}


def changed(name, fields):
    raw = deepcopy(plain(name)) | deepcopy(fields)
    return {k: v for k, v in raw.items() if v is not GONE}


def at_random(r, name):
    """One to three changes: a stray field, a field left out or of another value, a rotation in the old spelling or none."""
    fields, by_kind = {}, families()[plain(name)["model_type"]].local_rope_theta
    for _ in range(r.randint(1, 3)):
        how, key = (
            r.choice(("stray", "stray", "value", "gone", "rotation")),
            r.choice(sorted(plain(name).keys() - {"model_type"})),
        )
        value = plain(name)[key]
        if how == "stray":
            key = r.choice(sorted(STRAY))
            fields[key] = r.choice(STRAY[key])
        elif how == "gone":
            fields[key] = GONE
        elif how == "value" and isinstance(value, bool):
            fields[key] = not value
        elif how == "value" and isinstance(value, int):
            fields[key] = r.choice((1, 2, 2 * value, value + 1))
        elif how == "rotation":
            fields["rope_parameters"] = GONE
            fields |= {} if by_kind or r.random() < 0.3 else {"rope_scaling": r.choice(SCALINGS)}
    return fields


def angles(model, c):
    """Tables of each rotation of a described model, for its config."""
    text, by_rope = c.get_text_config(), {}
    for rope in {part for part in walk(model.layers) if isinstance(part, Rope)}:
        given = text.rope_parameters[rope.kind] if rope.kind else text.rope_parameters
        rotation = Rotation(dict(given), rope.dims, rope.of, getattr(text, "max_position_embeddings", None))
        by_rope[rope] = torch.cat(rotation.tables(40, torch.device("cpu"), torch.float32, 40))
    return by_rope


def readings(raw):
    """(model, angles) as lowq reads config.json and by way of transformers' class; None where one of them takes no part."""
    try:
        c, ours, _ = read_config(deepcopy(raw))
        theirs_config = CONFIG_MAPPING[raw["model_type"]].from_dict(deepcopy(raw))
        with torch.device("meta"):
            auto(theirs_config).from_config(theirs_config)
    except NotPlain:
        return None
    except Exception:  # whatever transformers says of a config without sense
        return None
    try:
        theirs = describe(theirs_config)[0]
    except NotDescribed:
        return None
    return (ours, angles(ours, c)), (theirs, angles(theirs, theirs_config))


def alike(both):
    (model, tables), (expected, expected_tables) = both
    return model == expected and all(torch.equal(t, expected_tables[rope]) for rope, t in tables.items())


def test_a_config_json_is_read_as_transformers_reads_it_or_left_to_it():
    r, compared = random.Random(0), 0
    for _ in range(80):
        name = r.choice(NAMES)
        fields = at_random(r, name)
        if both := readings(changed(name, fields)):
            assert alike(both), (name, fields)
            compared += 1
    assert compared > 30


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        *[(name, {"rope_parameters": GONE}) for name in ("gpt_oss", "apertus", "cwm", "ministral3", "mistral4", "gemma4_text")],
        ("mellum", {"rope_parameters": GONE, "rope_theta": 77.0}),
        ("gpt_neox", {"rope_parameters": GONE, "rotary_emb_base": 77.0}),
        ("gpt_neox", {"rope_parameters": GONE, "rope_theta": 77.0}),
        ("gpt_neox", {"rope_parameters": GONE, "rotary_pct": 0.75}),
        ("llama", {"rope_parameters": GONE, "rope_scaling": LLAMA3, "original_max_position_embeddings": 32}),
        ("phi3", {"rope_parameters": GONE, "rope_scaling": YARN, "original_max_position_embeddings": 32}),
        ("dots1", {"head_dim": GONE}),
        ("gemma4_text", {"layer_types": ["full_attention"] * 3 + ["sliding_attention"] * 3}),
    ],
)  # fmt: skip
def test_a_rotation_or_a_layer_that_a_class_fills_in_by_itself(name, fields):
    if here(name) and (both := readings(changed(name, fields))):
        assert alike(both)


@pytest.mark.parametrize(("name", "field"), [("dots1", "n_routed_experts"), ("gemma4_text", "num_experts")])
def test_a_mixture_without_a_number_of_experts_is_not_plain(name, field):
    with pytest.raises(NotPlain):
        read_config(changed(name, {field: GONE}))


@pytest.mark.parametrize("name", [n for n in NAMES if "/" not in n])
def test_fields_that_shape_a_matrix_are_those_that_the_class_reads(name):
    """Heads, biases and sizes: a description has the shapes of transformers' modules, or refuses the config."""
    for more in ({"head_dim": 32, "num_key_value_heads": 1}, {"attention_bias": True, "mlp_bias": True, "use_bias": False}):
        try:
            c = config(name, **more)
            with torch.device("meta"):
                held = auto(c).from_config(c).state_dict()
        except Exception:  # heads that do not divide, say
            continue
        try:
            d = describe(c)[0]
        except NotDescribed:
            continue
        for part in (part for part in walk(d) if isinstance(part, Linear)):
            for module, rows in zip(part.parts, part.rows, strict=True):
                if (weight := held.get(f"{d.prefix}{module}.weight")) is not None:
                    assert weight.shape == (rows, part.columns), (module, more)
                    assert (f"{d.prefix}{module}.bias" in held) == bool(part.bias), (module, more)


@pytest.mark.parametrize(
    ("name", "more", "why"),
    [
        ("minimax_m2", {"rotary_dim": 32}, "a rotation of 32 values in heads of 16"),
        ("phi", {"partial_rotary_factor": 0.7}, "a rotation of 11 values"),
        ("falcon_h1", {"hidden_act": "gelu"}, "a convolution with activation gelu"),
        ("granitemoehybrid", {"hidden_act": "gelu"}, "a convolution with activation gelu"),
        ("deepseek_v2", {"mlp_bias": True}, "MLPs with biases"),
        ("stablelm", {"head_dim": 32}, "a head_dim of 32"),
        ("persimmon", {"head_dim": 32}, "a head_dim of 32"),
        ("deepseek_v3", {"n_routed_experts": 9}, "2 of 9 experts in 2 of 4 groups"),
        ("deepseek_v2/groups", {"num_experts_per_tok": 3}, "3 of 8 experts in 1 of 4 groups"),
    ],
)
def test_what_no_step_computes_is_refused_with_the_reason(name, more, why):
    if here(name):
        with pytest.raises(NotDescribed, match=why):
            describe(config(name, **more))
