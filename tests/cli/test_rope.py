"""Rotations of long texts: transformers' own angles, tokens and logits before and beyond each switch; how far each reaches."""

import copy
from types import SimpleNamespace

import pytest
import torch
from test_generate_native import SMALL, TOKENIZER, prompts

from lowq_cli.engine import plan, rope, stream
from lowq_cli.engine.native import NativeDecoder
from lowq_cli.engine.prompts import context_limit
from lowq_kernels.decode import kv
from lowq_packers.arch.config import NotPlain, read_config
from lowq_packers.arch.parts import Rope, walk
from lowq_packers.errors import DamagedError, UsageError

CPU = torch.device("cpu")
LIMIT, WAS = 200, 16  # of the configs below: max_position_embeddings, and what it was before it was stretched
PAIRS = 8  # of a head of 16 dims
SHORT, LONG = [1.0 + 0.03 * i for i in range(PAIRS)], [1.5 + 0.9 * i for i in range(PAIRS)]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "rope_theta": 10000.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn"}
KINDS = {  # family, fields of config.json, tokens that it reaches
    "default": ("llama", {}, LIMIT),
    "linear": ("qwen2", {"rope_scaling": {"type": "linear", "factor": 2.0}}, LIMIT),
    "linear, said elsewhere": ("llama", {"max_sequence_length": 512, "rope_scaling": {"type": "linear", "factor": 4}}, 512),
    "dynamic": ("llama", {"max_position_embeddings": WAS, "rope_scaling": {"type": "dynamic", "factor": 2.5}}, 40),
    "yarn": ("qwen3", {"rope_scaling": YARN | {"factor": 16.0, "original_max_position_embeddings": 32}}, 512),
    "yarn, stretched": ("qwen3", {"rope_scaling": YARN | {"factor": 4.0, "original_max_position_embeddings": 50}}, LIMIT),
    "llama3": (
        "llama",
        {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": WAS}},
        LIMIT,
    ),
    "longrope": ("phi3", {"original_max_position_embeddings": WAS, "rope_scaling": LONGROPE}, LIMIT),
    "longrope, su": (
        "phi3",
        {"original_max_position_embeddings": WAS}
        | {"rope_scaling": LONGROPE | {"rope_type": "su", "original_max_position_embeddings": WAS}},
        LIMIT,
    ),
    "longrope, its factor": (
        "llama",
        {"rope_scaling": LONGROPE | {"factor": 3.0, "original_max_position_embeddings": WAS, "attention_factor": None}},
        LIMIT,
    ),
}  # fmt: skip
GROWING = ["dynamic", "longrope", "longrope, its factor"]


def configs(name):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    family, more, reached = KINDS[name]
    raw = SMALL | {"max_position_embeddings": LIMIT, "rms_norm_eps": 1e-6, "model_type": family} | copy.deepcopy(more)
    ours, described, _ = read_config(copy.deepcopy(raw), 100)
    (turned,) = {part for part in walk(described) if isinstance(part, Rope)}
    return ours, CONFIG_MAPPING[family].from_dict(raw), turned, reached


def build(name, seed=7):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(configs(name)[1]).float().eval()
    for path, p in model.named_parameters():
        if p.dim() > 1 and "embed" not in path:
            p.data *= 4
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("name", KINDS)
def test_angles_are_those_of_transformers_at_every_length(name):
    ours, theirs, turned, _ = configs(name)
    model = build(name)
    assert plan.why_not(model) is None
    for config in (ours, theirs):
        turning = rope.Rotation(config.rope_parameters, turned.dims, turned.of, config.max_position_embeddings)
        for dtype in (torch.float32, torch.bfloat16):
            x, steps = torch.empty(0, dtype=dtype), turning.tables(LIMIT, CPU, dtype)
            for n in (1, WAS - 1, WAS, WAS + 1, WAS + 2, 39, LIMIT):
                fresh = copy.deepcopy(model.model.rotary_emb)  # it remembers the longest text
                for a, b in zip(turning.tables(n, CPU, dtype, n), fresh(x, torch.arange(n)[None]), strict=True):
                    assert torch.equal(a, b[0]), n
                for a, b in zip(steps, fresh(x, torch.tensor([[n - 1]])), strict=True):
                    # a power of many lengths at once may differ from that of one in its last bit
                    off = torch.finfo(dtype).eps * (200 if dtype == torch.float32 else 1) if name == "dynamic" else 0
                    assert torch.allclose(a[n - 1 : n], b[0], rtol=0, atol=off), n
    assert turning.steady == (WAS if name in GROWING or name == "longrope, su" else float("inf"))


def transformers_tokens(name, prompt, n):
    ids, model = torch.tensor([prompt]), build(name)  # a fresh model: its angles remember the longest text
    how = {"max_new_tokens": n, "do_sample": False, "pad_token_id": 0, "repetition_penalty": 1.5}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **how)[0, len(prompt) :].tolist()


def tokens(decoder, given, n):
    g = stream(decoder.model, TOKENIZER, given, max_new_tokens=n, decoder=decoder, repetition_penalty=1.5)
    list(g.pieces())
    return g.tokens


def fused(name, **how):
    model = build(name)
    decoder = NativeDecoder(model, **how)
    decoder.model = model
    return decoder


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_texts_that_grow_past_the_switch_are_those_of_transformers(name):
    """Prompts of 11 and 5 tokens and one past the switch, side by side; each as if it were alone."""
    given = [*prompts(), list(range(30, 50))]
    expected = [transformers_tokens(name, p, 16) for p in given]
    decoder = fused(name)
    assert tokens(decoder, given, 16) == expected
    assert tokens(decoder, given, 16) == expected  # nothing that is held of long texts misleads
    decoder = fused(name, most=4)
    assert tokens(decoder, given, 16) == expected
    short = [p[:7] for p in given]
    assert tokens(decoder, short, 5) == [transformers_tokens(name, p, 5) for p in short]
    if name == "dynamic":
        assert tokens(fused("default"), given, 16) != expected
    else:
        decoder.steady = float("inf")  # what would come of taking them for short
        assert tokens(decoder, given, 16) != expected


def test_a_prompt_up_to_the_switch_is_read_again_at_its_first_token():
    given = [list(range(20, 20 + WAS)), list(range(60, 59 + WAS))]
    assert tokens(fused("longrope"), given, 6) == [transformers_tokens("longrope", p, 6) for p in given]


def test_keys_rotated_for_long_texts_are_not_reused_for_short_ones():
    """A conversation that crossed the switch, and then a short text that begins as it did."""
    decoder, first = fused("longrope"), prompts()[:1]
    output = tokens(decoder, first, 12)
    decoder.held = [(first[0] + output[0])[: WAS - 2]]
    assert tokens(decoder, [first[0] + [5, 6]], 3) == [transformers_tokens("longrope", first[0] + [5, 6], 3)]


@pytest.mark.parametrize("name", GROWING)
def test_logits_of_whole_texts_are_those_of_transformers(name):
    for n in (WAS, WAS + 1, 39):
        ids = torch.randint(2, 320, (2, n), generator=torch.Generator().manual_seed(1))
        expected, result = build(name)(input_ids=ids, use_cache=False).logits, NativeDecoder(build(name)).logits(ids)
        assert ((result - expected).norm() / expected.norm()).item() < 1e-5


@pytest.mark.parametrize("kind", kv.KINDS[1:])
def test_texts_past_the_switch_are_read_again_into_caches_in_few_bits(kind):
    long, given = fused("longrope", kv=kind), prompts()[:1]
    text = tokens(long, given, 9)[0]
    read = fused("longrope", kv=kind)
    again = given[0] + text[: WAS - len(given[0])]
    assert tokens(read, [again], 9 - len(text[: WAS - len(given[0])])) == [text[WAS - len(given[0]) :]]


@pytest.mark.parametrize("name", KINDS)
def test_a_text_ends_where_the_angles_do(name):
    ours, theirs, _, reached = configs(name)
    for config in (ours, theirs):
        model = SimpleNamespace(config=config)
        assert context_limit(model) == reached
    model = build(name)
    with pytest.raises(UsageError, match=f"the prompt has {reached} tokens and the model's context ends at {reached}"):
        stream(model, TOKENIZER, [5] * reached)
    g = stream(model, TOKENIZER, [5] * (reached - 2), max_new_tokens=9)
    list(g.pieces())
    assert (len(g.tokens[0]), g.finish_reason) == (2, "context")


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 0},
        {"rope_theta": 0},
        {"rope_theta": -5.0},
        LLAMA3 | {"factor": 0},
        LONGROPE | {"long_factor": LONG[:-1]},
        YARN | {"factor": 4.0, "rope_theta": 1},
    ],
    ids=str,
)
def test_angles_that_are_not_finite_are_an_error(scaling):
    """torch's attention made zeros of queries that are NaN, so a text came out; a factor too few was an internal error."""
    given = {"rope_type": "default", "rope_theta": 1e4, "original_max_position_embeddings": WAS} | scaling
    with pytest.raises(DamagedError, match=r"rope_parameters in config\.json give"):
        rope.Rotation(given, 16, 0, LIMIT).tables(99, CPU, torch.float32, 99)


@pytest.mark.parametrize("given", ["x", [1], {"full_attention": {"rope_theta": 1e4}}], ids=str)
def test_rope_parameters_of_another_form_are_left_to_transformers(given):
    raw = SMALL | {"max_position_embeddings": LIMIT, "rms_norm_eps": 1e-6, "model_type": "llama", "rope_parameters": given}
    with pytest.raises(NotPlain, match="rope_parameters of an unusual kind"):
        read_config(raw, 100)


@pytest.mark.parametrize("factors", [None, LONG[:-1], ["1"] * PAIRS])
def test_invalid_factors_are_left_to_transformers(factors):
    raw = SMALL | {"max_position_embeddings": LIMIT, "rms_norm_eps": 1e-6, "model_type": "phi3"}
    with pytest.raises(NotPlain, match="no factors of its rotation"):
        read_config(raw | {"rope_scaling": LONGROPE | {"short_factor": factors}}, 100)
