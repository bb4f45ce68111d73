"""Requests drawn at random, with drafts and in one batch: adapters, stop texts, schemas, penalties, choices, log-probabilities,
beginnings that are read already, and a small cache. Each answer is that of the request alone, without drafts.

It takes 10 to 50 s for each kind of drafts.
"""

import random

import pytest
from asking import ON_GPU, adapter
from saying import byte_tokenizer
from test_device_drafts import made, prompts
from test_draft_combinations import asked
from transformers import AutoModelForCausalLM

from lowq_cli.engine.lora import adapt
from lowq_cli.engine.plan import plan_of
from lowq_cli.files.adapter import read_adapter
from lowq_cli.serving.http.served_model import Facts

DRAFTERS = ("itself", "ngram", "ngram, launched ahead", "EAGLE-3, launched ahead")
ALPHABET = [chr(c) for c in range(33, 127)] + ["\u0120", "\u010a"]  # a space and a newline are written so
ENDS = frozenset([len(ALPHABET)])
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
NAMES = ("base", "a", "b")
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"enum": ["one", "two"]}}, "required": ["n", "s"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA}}


def drawn(rng, begin):
    """(kind, fields) of a request."""
    piece = [rng.randrange(64, 90) for _ in range(rng.randint(4, 20))]
    prompt = rng.choice([begin + piece, piece * rng.randint(2, 6), begin[: rng.randint(1, len(begin))]])
    fields = {"model": rng.choice(NAMES), "max_tokens": rng.randint(1, 40), "seed": rng.randrange(100)}
    for field, values in {
        "temperature": (0, 0, 0.7, 1.2), "top_p": (1, 1, 0.8), "n": (1, 1, 1, 3), "logit_bias": ({}, {}, {"70": 4, "80": -100}),
        "presence_penalty": (0, 0, 1.5), "frequency_penalty": (0, 0, 0.5), "stop": (None, "a", ["e", "q", "zz"]),
    }.items():  # fmt: skip
        if (value := rng.choice(values)) is not None:
            fields[field] = value
    if rng.random() < 0.3:
        text = bytes(97 + p % 26 for p in prompt).decode()
        chat = {"messages": [{"role": "user", "content": text[:60]}], "logprobs": True, "top_logprobs": rng.randint(0, 3)}
        return "chat", fields | chat | ({"response_format": FORMAT} if rng.random() < 0.6 else {})
    return "text", fields | {"prompt": prompt} | ({"logprobs": rng.randint(0, 3)} if rng.random() < 0.5 else {})


@pytest.mark.parametrize(
    ("kind", "device"),
    [
        *(pytest.param(kind, "cpu", marks=pytest.mark.more) for kind in DRAFTERS),
        *(pytest.param(kind, "cuda", marks=ON_GPU) for kind in ("MTP of glm4_moe", "ngram for glm4_moe")),
    ],
)
def test_each_answer_is_that_alone(kind, device, tmp_path):
    kind, _, ahead = kind.partition(", ")
    kind, _, family = kind.partition(" for ")
    heads = f"MTP of {family}" if family else "another model"
    model, drafter = made(heads if kind == "ngram" else kind, tmp_path, device)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    adapt(plan_of(model), [read_adapter(adapter(tmp_path / n, whole, i), n) for i, n in enumerate(NAMES[1:])])
    rng = random.Random(2)
    begin = prompts(100)[0]
    requests = [drawn(rng, begin) for _ in range(24)]
    facts, tokenizer = Facts(adapters=NAMES[1:]), byte_tokenizer(template=TEMPLATE, alphabet=ALPHABET)
    expected, _, _ = asked(model, tokenizer, requests, "none", facts, ends=ENDS, running=12)
    assert len(set(expected)) > 12
    draft = "ngram" if kind == "ngram" else drafter
    result, _, counts = asked(
        model, tokenizer, requests, draft, facts, ends=ENDS, ahead=bool(ahead), running=5, cache_tokens=768
    )
    assert result == expected * 2
    assert counts.drafted > counts.accepted >= (kind != "EAGLE-3")
