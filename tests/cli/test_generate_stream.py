"""`stream` with the eager decoder: the tokens of transformers' generate, text in pieces, and the right finish reason."""

import copy
import json
import os
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from lowq_cli import demo, main
from lowq_cli.engine import explain, stream
from lowq_cli.engine.bandwidth import FILE, last_level_cache, measured
from lowq_cli.engine.detokenize import Detokenizer
from lowq_cli.engine.hf_eager import HfEagerDecoder
from lowq_cli.engine.open_model import threads
from lowq_cli.engine.sampling import Sampling
from lowq_cli.engine.tokenizer import FastTokenizer
from lowq_kernels.modules.linear import QuantLinear
from lowq_packers.errors import UnsupportedError, UsageError
from lowq_packers.qtensor import QuantizedTensor

PROMPT = "Once upon a time there was a"
NEW = 24


@pytest.fixture(scope="module")
def story():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = demo.__path__[0]
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def greedy(story):
    model, tokenizer = story
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    return model.generate(ids, max_new_tokens=NEW, do_sample=False)[0, ids.shape[1] :].tolist()


def plain(story, prompt, **kw):
    model, tokenizer = story
    return stream(model, tokenizer, prompt, **{"decoder": HfEagerDecoder(model)} | kw)


def altered(story, **parts):
    """The same model with another `config` or `generation_config`, and its tokenizer."""
    model = copy.copy(story[0])
    for name, part in parts.items():
        setattr(model, name, part)
    return model, story[1]


def test_greedy_tokens_are_those_of_transformers(story, greedy):
    g = plain(story, PROMPT, max_new_tokens=NEW)
    pieces = list(g)
    assert g.tokens[0] == greedy
    assert "".join(pieces) == g.text == story[1].decode(greedy, skip_special_tokens=True)
    assert len(pieces) > NEW // 2  # it streams, it does not wait for the end
    assert (g.finish_reason, g.steps) == ("length", NEW - 1)
    assert g.ttft_s > 0
    assert g.prefill_tps > 0
    assert g.decode_tps > 0


def test_prompts_of_different_lengths_do_not_disturb_each_other(story, greedy):
    g = plain(story, ["Hello", PROMPT], max_new_tokens=NEW)
    list(g.pieces())
    assert g.tokens[1] == greedy


def test_long_prompt_in_chunks_gives_the_same_tokens(story, greedy):
    g = plain(story, ["Hello", PROMPT], max_new_tokens=NEW, decoder=HfEagerDecoder(story[0], most=3))
    list(g.pieces())
    assert g.tokens[1] == greedy


def test_a_seed_draws_the_same_text_and_another_another(story):
    def text(seed, **kw):
        return "".join(plain(story, PROMPT, max_new_tokens=NEW, temperature=1.0, seed=seed, **kw))

    assert text(1) == text(1)
    assert text(1) != text(2)
    assert text(1, top_k=1) == text(2, top_k=1) == "".join(plain(story, PROMPT, max_new_tokens=NEW))


def test_end_of_text_stops(story, greedy):
    config = copy.copy(story[0].generation_config)
    config.eos_token_id = [greedy[5], 8191]
    g = plain(altered(story, generation_config=config), PROMPT, max_new_tokens=NEW)
    list(g)
    assert g.finish_reason == "stop"
    assert g.tokens[0] == greedy[: greedy.index(greedy[5]) + 1]


def test_context_limit_is_respected_and_a_longer_prompt_refused(story):
    n = len(story[1](PROMPT).input_ids)
    config = copy.copy(story[0].config)
    config.max_position_embeddings = n + 4
    short = altered(story, config=config)
    g = plain(short, PROMPT, max_new_tokens=NEW)
    list(g)
    assert (len(g.tokens[0]), g.finish_reason) == (4, "context")
    config.max_position_embeddings = n
    with pytest.raises(UsageError, match=f"the prompt has {n} tokens and the model's context ends at {n}"):
        plain(short, PROMPT)


@pytest.mark.parametrize("token", [-1, 4_000_000_000])
def test_tokens_that_the_model_lacks_are_refused(story, token):
    with pytest.raises(UsageError, match=f"token id {token} is not one of the model's ids, 0 to"):
        plain(story, [5, token, 6])


def test_nothing_asked_for_gives_nothing(story):
    g = plain(story, PROMPT, max_new_tokens=0)
    assert (list(g), g.tokens, g.finish_reason, g.decode_tps) == ([], [[]], "length", 0.0)


def test_leaving_early_keeps_the_tokens_so_far(story, greedy):
    g = plain(story, PROMPT, max_new_tokens=NEW)
    for _ in zip(range(3), g, strict=False):
        pass
    assert g.finish_reason == "interrupted"
    assert g.tokens[0] == greedy[: len(g.tokens[0])]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": None}, "temperature=None"),
        ({"top_k": None}, "top_k=None"),
        ({"temperature": 1e-40}, "temperature=1e-40"),
        ({"temperature": 1e40}, r"temperature=1e\+40"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": -0.1}, "top_p=-0.1"),
        ({"top_k": -2}, "top_k=-2"),
        ({"seed": -1}, "seed=-1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
        ({"repetition_penalty": 1e-320}, "repetition_penalty="),
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"batch": 0}, "batch=0"),
        ({"chat": True}, "no chat template"),
    ],
)
def test_settings_out_of_range_are_refused(story, setting, message):
    with pytest.raises(UsageError, match=message):
        plain(story, PROMPT, **setting)


def test_encoder_decoder_models_are_refused(story):
    model = SimpleNamespace(config=SimpleNamespace(is_encoder_decoder=True, model_type="t5"))
    with pytest.raises(UnsupportedError, match="t5 is an encoder-decoder"):
        stream(model, story[1], PROMPT)


def pieces_like():
    """A tokenizer as SentencePiece's are: a space before each word, none before a text's first, bytes of unknown characters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = [
        "<unk>",
        *(f"<0x{b:02X}>" for b in range(256)),
        *"\u2581abcdefghijklmnopqrstuvwxyz.,",
        "\u2581t",
        "\u2581th",
        "\u2581the",
    ]
    merges = [("\u2581", "t"), ("\u2581t", "h"), ("\u2581th", "e")]
    tokenizer = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return FastTokenizer(tokenizer, {}, None)


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
@pytest.mark.parametrize(
    "text", ["naïve café", "日本語のテキスト", "a 👩‍👩‍👧 b", "x\ny  z", "the theatre 👩 the sea, 日 the end. " * 3]
)
def test_pieces_never_hold_half_a_character(story, text, kind):
    """Together they are the whole text's decoding, one token at a time or several, after a prompt or alone."""
    tokenizer = story[1] if kind == "byte-level" else pieces_like()
    ids = list(tokenizer(text)["input_ids"])
    for size, prompt in ((1, []), (2, []), (5, []), (1, tokenizer("the house")["input_ids"])):
        detokenizer = Detokenizer(tokenizer, list(prompt))
        pieces = [detokenizer.extend(ids[i : i + size]) for i in range(0, len(ids), size)]
        pieces.append(detokenizer.flush())
        shown = tokenizer.decode([*prompt, *ids], skip_special_tokens=True).removeprefix("the house" if prompt else "")
        assert "".join(pieces) == shown
        assert not any("\ufffd" in p for p in pieces)


def test_bytes_that_are_no_text_do_not_hold_the_stream_for_ever(story):
    tokenizer = story[1]
    lone = next(i for i in tokenizer("日").input_ids if tokenizer.decode([i]) == "\ufffd")
    detokenizer = Detokenizer(tokenizer, [])
    assert any(detokenizer.push(lone) for _ in range(40))


@pytest.mark.parametrize("family", ["gpt2", "qwen2", "gemma3_text", "mamba", "mixtral", "phi3"])
def test_families(family, story):
    """Random tiny models, two prompts side by side: the same tokens as transformers' generate (left-padded)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    small = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "pad_token_id": 0}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "bos_token_id": 1, "eos_token_id": None}
    if family == "mamba":
        small = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8, "eos_token_id": None}
    if family == "gpt2":
        small = {"vocab_size": 512, "n_embd": 64, "n_layer": 2, "n_head": 4, "eos_token_id": None, "bos_token_id": 1}
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **small)).float().eval()
    model.generation_config.eos_token_id = None
    ids = torch.randint(2, 512, (1, 9), generator=torch.Generator().manual_seed(3))
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, pad_token_id=0)
    tokenizer = SimpleNamespace(eos_token_id=None, decode=lambda ids, **kw: "".join(chr(64 + i) for i in ids))
    g = stream(model, tokenizer, ids[0].tolist(), max_new_tokens=8, decoder=HfEagerDecoder(model))
    list(g)
    assert g.tokens[0] == expected[0, 9:].tolist()


def test_explain_names_the_kernel_and_the_refusals(story):
    model = torch.nn.Module()
    codes = torch.randint(0, 16, (64, 64), dtype=torch.uint8)
    q = QuantizedTensor(codes, torch.rand(64, 1) + 0.1, torch.rand(64, 1), 4, 64)
    model.layers = torch.nn.ModuleList(
        torch.nn.ModuleDict({"q_proj": QuantLinear.from_quantized(q, layout="rowstream", dtype=torch.bfloat16)})
        for _ in range(3)
    )
    model.head = torch.nn.Linear(64, 8, bias=False)
    quantized, head = explain.kernels_of(model, 1, torch.bfloat16)
    assert (quantized.layers, quantized.count, quantized.N, quantized.K) == ("layers.*.q_proj", 3, 64, 64)
    assert quantized.kernel not in quantized.refused
    assert any("reads layout" in why for why in quantized.refused.values())
    assert (head.kernel, head.N, head.K) == ("torch", 8, 64)


def test_bytes_per_token_are_those_of_the_weights(story):
    model = story[0]
    held = {p.data_ptr(): p.numel() * p.element_size() for p in model.parameters()}
    assert explain.bytes_per_token(model, None) == sum(held.values())  # the head is tied, so the embedding is read whole


def test_bytes_per_token_of_the_layers_own_embeddings_are_one_row():
    """Gemma 4's second table holds more than its layers: a token reads one row of it, as of the first."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}

    def read(rows):
        config = AutoConfig.for_model("gemma4_text", **sizes, hidden_size_per_layer_input=16, vocab_size_per_layer_input=rows)
        return explain.bytes_per_token(AutoModelForCausalLM.from_config(config), None)

    assert read(64) == read(4096)


def test_roofline_says_why_it_is_none_for_a_model_inside_the_cache(story):
    percent, why = explain.roofline(story[0], None, 100.0, 1, cache=1 << 30)
    assert percent is None
    assert "stays in" in why


def test_bandwidth_is_measured_once_and_the_roofline_is_bytes_over_it(story, own_cache):
    assert measured(torch.device("cpu")) > 0
    known = json.loads((own_cache / FILE).read_text())
    (own_cache / FILE).write_text(json.dumps(dict.fromkeys(known, 1e9)))
    assert measured(torch.device("cpu")) == 1e9
    percent, _ = explain.roofline(story[0], None, 20.0, 2, cache=1)
    assert percent == pytest.approx(100 * explain.bytes_per_token(story[0], None, 2) * 10 / 1e9, abs=0.1)


def test_roofline_without_room_to_measure_is_none(story, monkeypatch):
    def full(device):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr("lowq_cli.engine.bandwidth.measured", full)
    assert explain.roofline(story[0], None, 20.0, 2, cache=1) == (None, "too little free memory to measure how fast it is")


def test_the_size_of_a_cache_is_known_or_not():
    assert last_level_cache(torch.device("cpu")) is None or last_level_cache(torch.device("cpu")) > 0


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize(("quota", "most"), [("100000 100000", 1), ("max 100000", 3), ("150000 100000", 2), (None, 3)])
def test_threads_are_those_the_container_grants(quota, most, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    file = tmp_path / "cpu.max"
    if quota:
        file.write_text(quota + "\n")
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 3
    assert threads(file) == min(most, processors)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads(file) == 3


@pytest.mark.usefixtures("three_threads")
def test_threads_that_are_asked_for_stand_over_the_containers_share(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    quota = tmp_path / "cpu.max"
    quota.write_text("100000 100000\n")
    result = CliRunner().invoke(main.app, ["bench", "--shape", "64x64", "--op", "none", "--threads", "2"])
    assert "--op 'none' does not exist" in str(result.exception)
    assert threads(quota) == 2


def test_families_with_a_state_read_their_prompts_whole():
    """FalconMamba's forward in transformers drops a part of its state between two pieces of a prompt."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model("falcon_mamba", vocab_size=96, hidden_size=32, num_hidden_layers=2, state_size=8)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    whole = model(input_ids=torch.arange(5, 42)[None]).logits[0, -1]
    decoder = HfEagerDecoder(model, most=8)
    decoder.start([list(range(5, 42))], Sampling(), 2)
    torch.testing.assert_close(decoder.sampler.logits[0], whole)
