"""Every described family with drafts that are right to each depth: the tokens and states of plain steps, in fp32.

Both ways of counting what was right, and steps with drafts and without them in turn. A state that is not taken back shows.
"""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from described import NAMES
from described import model as random_model
from native import planned, texts

from emulation import sampled
from lowq_cli.engine.drafts.verify import Verification
from lowq_cli.engine.native import NativeDecoder
from lowq_cli.engine.sampling import Sampling
from lowq_cli.engine.state import tensors_of

VOCAB, NEW, WIDE = 160, 13, 4  # NEW: a step with each depth of right drafts, and one without
DRAWN = (Sampling(), Sampling(temperature=1.0, top_k=40, top_p=0.95, repetition_penalty=1.2, seed=7))


def plain(decoder, prompt, sampling):
    decoder.start([prompt], sampling, NEW + 1)
    tokens = [int(decoder.token)]
    while len(tokens) <= NEW:
        tokens.append(int(decoder.step()))
    return tokens


def drafted(decoder, prompt, sampling, known, make):
    """The text with drafts of `known` that are right for 0, 1, 2 and 3 tokens in turn; every fifth step has none."""
    decoder.held = []
    decoder.start([prompt], sampling, NEW + 1)
    decoder.wide[WIDE] = make(decoder)
    tokens, depth = [int(decoder.token)], 0
    while len(tokens) <= NEW:
        n, right = len(tokens), depth % 5
        depth += 1
        if right > WIDE - 1 or n + WIDE > len(known):
            tokens.append(int(decoder.step()))
            continue
        drafts = known[n : n + WIDE - 1]
        if right < len(drafts):
            drafts[right] = (drafts[right] + 1) % VOCAB
        step = decoder.verify(drafts, WIDE)
        tokens += step.drawn[: int(step.accepted) + 1].tolist()
        assert int(step.accepted) == right
    return tokens


def row_by_row(decoder):
    return Verification(decoder, WIDE)


def all_at_once(decoder):
    """As a recorded step does it."""
    made = Verification(decoder, WIDE)
    made.lazy = False
    return made


def recurrent(decoder):
    """Copies of the sequence's recurrent states."""
    return [t[int(decoder.places[0])].clone() for t in tensors_of(decoder.state)]


def never_back(decoder):
    """A fault: recurrent states stay those after all rows."""
    made = Verification(decoder, WIDE)
    made.plain = True
    return made


@pytest.mark.parametrize("name", sampled(NAMES))
def test_a_text_with_drafts_is_the_text_without(name):
    decoder = NativeDecoder(planned(random_model(name)))
    decoder.drafts = True
    prompt = texts(VOCAB, 21)[0]
    for sampling, make in zip(DRAWN, (row_by_row, all_at_once), strict=True):
        known = plain(decoder, prompt, sampling)
        states = recurrent(decoder)
        assert drafted(decoder, prompt, sampling, known, make) == known
        for found, wanted in zip(recurrent(decoder), states, strict=True):
            assert torch.allclose(found.float(), wanted.float(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text", "mamba2", "lfm2", "falcon_h1"])
def test_a_state_that_is_not_taken_back_shows(name):
    decoder = NativeDecoder(planned(random_model(name)))
    decoder.drafts = True
    prompt = texts(VOCAB, 21)[0]
    known = plain(decoder, prompt, DRAWN[0])
    states = recurrent(decoder)
    try:
        drafted(decoder, prompt, DRAWN[0], known, never_back)
    except AssertionError:
        return  # a right draft was refused: the state is another's
    there = zip(recurrent(decoder), states, strict=True)
    assert not all(torch.allclose(found, wanted, rtol=1e-3, atol=1e-4) for found, wanted in there)


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "mamba2", "gemma3_text"])
def test_a_conversation_goes_on_after_drafts_as_if_it_were_read_anew(name):
    """The next turn finds in the cache the prompt and the accepted tokens."""
    decoder = NativeDecoder(planned(random_model(name)))
    decoder.drafts = True
    prompt, more = texts(VOCAB, 21, 5)
    known = plain(decoder, prompt, DRAWN[0])
    for make in (None, row_by_row):
        said = plain(decoder, prompt, DRAWN[0]) if make is None else drafted(decoder, prompt, DRAWN[0], known, make)
        decoder.held = [prompt + said[:-1]]
        decoder.start([prompt + said + more], DRAWN[0], NEW)
        found = decoder.sampler.logits.clone()
        decoder.held = []
        decoder.start([prompt + said + more], DRAWN[0], NEW)
        torch.testing.assert_close(found, decoder.sampler.logits, rtol=1e-3, atol=1e-3)
        decoder.wide.clear()
