"""A conversation's cache in a file: the next process goes on with the same bits, and uses nothing that does not fit."""

import os
import random

import pytest
import torch
from asking import build, prompts

from lowq_cli.engine import saved_cache
from lowq_cli.engine.decoders import decoder_of
from lowq_cli.engine.drafts.model import ModelDrafter
from lowq_cli.engine.model_record import owned
from lowq_cli.engine.plan import plan_of
from lowq_cli.engine.sampling import Sampling
from lowq_cli.engine.saved_cache import SavedCache, keep, recall
from lowq_packers.errors import DoesNotFitError

KINDS = {
    "llama": {},
    "gemma3_text": {"sliding_window": 70, "layer_types": ["sliding_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"], "conv_bias": True},
}
CASES = {kind: (kind, 100, "16") for kind in KINDS} | {
    "fp8": ("llama", 100, "fp8"),
    "4": ("llama", 100, "4"),
    "ring": ("gemma3_text", 1300, "16"),
    "ring, 4": ("gemma3_text", 1300, "4"),
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def fresh(folder, kind="llama"):
    """A model as another process would load it from the same files."""
    model = build(kind, **KINDS[kind])
    model.config.max_position_embeddings = 2048
    owned(model).folder = str(folder / "model")
    return model


def say(decoder, prompt, n):
    """(new tokens, number of the prompt's tokens that were read); the decoder knows afterwards what its cache holds."""
    read, embed = [], decoder.plan.embed
    decoder.plan.embed = lambda ids: read.append(len(ids)) or embed(ids)
    tokens = [decoder.start([prompt], Sampling(), n).tolist()[0]]
    decoder.plan.embed = embed
    tokens += [decoder.step().tolist()[0] for _ in range(n - 1)]
    decoder.held = [prompt + tokens[:-1]]
    return tokens, sum(read)


def bits(decoder):
    return {name: t.clone() for name, t in SavedCache.of(decoder).tensors.items()}


@pytest.mark.parametrize("case", CASES)
def test_the_next_process_goes_on_with_the_same_bits(case, folder):
    kind, length, kv = CASES[case]
    model, path = fresh(folder, kind), folder / "trip.safetensors"
    first, *others = prompts(length, 9, 11)
    decoder = decoder_of(model, kv)
    say(decoder, first, 12)
    for more in others:  # a conversation of several sittings: each begins with the file that the one before left
        keep(path, model, kv)
        assert 0 < path.stat().st_size < saved_cache.MOST
        asked = decoder.held[0] + more
        later = fresh(folder, kind)
        assert recall(path, later, kv) == ""
        other = decoder_of(later, kv)
        assert say(other, asked, 12) == (expected := say(decoder, asked, 12))
        assert expected[1] < len(asked) - length // 2
        a, b = bits(decoder), bits(other)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[n], b[n]) for n in a)
        assert say(decoder_of(fresh(folder, kind), kv), asked, 12)[0] == expected[0]
        model, decoder = later, other


@pytest.fixture
def saved(folder):
    """A saved cache, and the prompt that goes on after it."""
    model = fresh(folder)
    say(decoder_of(model), prompts(100)[0], 12)
    keep(folder / "trip.safetensors", model, "16")
    return folder / "trip.safetensors", decoder_of(model).held[0] + prompts(9)[0]


def test_a_file_that_is_not_as_it_was_written_is_not_used(folder, saved):
    path, asked = saved
    raw, rng, model = path.read_bytes(), random.Random(1), fresh(folder)
    damaged = [raw[: rng.randrange(len(raw))] for _ in range(12)] + [b"", raw + b"x"]
    places = [*range(0, 8), *(rng.randrange(int.from_bytes(raw[:8], "little")) for _ in range(40))]
    for at in [*places, *(rng.randrange(len(raw)) for _ in range(12)), len(raw) - 1]:
        damaged.append(raw[:at] + bytes([raw[at] ^ 1 << rng.randrange(8)]) + raw[at + 1 :])
    for one in damaged:
        path.write_bytes(one)
        assert "it is" in recall(path, model, "16")
        assert decoder_of(model).saved is None
    path.unlink()
    path.mkdir()
    assert "damaged" in recall(path, model, "16")
    path.rmdir()
    assert recall(path, model, "16") == ""
    path.write_bytes(raw)
    assert recall(path, model, "16") == ""
    assert say(decoder_of(model), asked, 5)[1] == len(asked) - 111


@pytest.mark.parametrize("how", ["files", "kv", "dtype"])
def test_another_models_cache_is_not_used(folder, saved, how):
    path, asked = saved
    if how == "files":
        os.utime(folder / "model" / "model.safetensors", ns=(1, 1))
    model = fresh(folder).bfloat16() if how == "dtype" else fresh(folder)
    kv = "4" if how == "kv" else "16"
    assert "another model's" in recall(path, model, kv)
    assert say(decoder_of(model, kv), asked, 5)[1] == len(asked)


def test_of_another_conversation_the_common_beginning_is_used(folder, saved):
    path, asked = saved
    model, other = fresh(folder), asked[:70] + prompts(60, seed=9)[0]
    assert recall(path, model, "16") == ""
    output, read = say(decoder_of(model), other, 8)
    assert (read, output) == (60, say(decoder_of(fresh(folder)), other, 8)[0])
    assert recall(path, model, "16") == ""
    assert say(decoder_of(model), asked[:20], 8)[1] == 1  # a prompt that ends before the file's does


def test_a_drafters_cache_goes_along(folder):
    """As many tokens are read again as without one: more of them would have other bits. A cache with a drafter is not used by a
    decoder without one: the drafter's part would be missing the next time."""
    path, first, more = folder / "trip.safetensors", *prompts(100, 9)

    def drafting():
        model = fresh(folder)
        decoder_of(model).drafts = True
        decoder_of(model).attach(ModelDrafter(plan_of(fresh(folder)), "itself", model.config.vocab_size))
        return model, decoder_of(model)

    model, decoder = drafting()
    say(decoder, first, 1)
    keep(path, model, "16")
    say(decoder, first + more, 1)
    expected = bits(decoder)
    assert sum(n.startswith("draft.") for n in expected) == sum(n[0].isdigit() for n in expected) > 0
    later, other = drafting()
    assert recall(path, later, "16") == ""
    assert say(other, first + more, 1)[1] == len(more)
    assert all(torch.equal(t, expected[n]) for n, t in bits(other).items())
    plain = fresh(folder)
    assert recall(path, plain, "16") == ""
    assert say(decoder_of(plain), first + more, 1)[1] == len(first + more)


def test_all_files_together_stay_below_the_bound(folder, saved):
    path, _ = saved
    size, model = path.stat().st_size, fresh(folder)
    say(decoder_of(model), prompts(100)[0], 12)
    os.utime(path, ns=(0, 0))
    for i in range(5):
        keep(folder / f"s{i}.safetensors", model, "16", most=5 * size // 2)
        assert sum(p.stat().st_size for p in folder.glob("*.safetensors")) <= 5 * size // 2
    assert sorted(p.stem for p in folder.glob("*.safetensors")) == ["s3", "s4"]
    with pytest.raises(DoesNotFitError, match=r"takes .* kB, and all saved caches take at most"):
        keep(folder / "s5.safetensors", model, "16", most=size // 2)
    assert len(list(folder.glob("*.safetensors"))) == 2


def test_nothing_is_saved_where_nothing_can_be_reused(folder):
    path, model = folder / "trip.safetensors", fresh(folder)
    keep(path, model, "16")  # nothing was read
    decoder_of(model).start(prompts(9, 11), Sampling(), 2)  # two texts
    keep(path, model, "16")
    assert not path.exists()
