"""Every family that takes pictures, by its plan and the tower apart, in fp32: transformers' logits of texts with pictures.

A control for each fact of its description: swapped pictures, places of one part, causal pictures, features of the last layer
alone give other logits.
"""

import queue
import statistics
import sys
import threading
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import pictured
from described import model as random_model
from folded import Fold
from native import off, planned, texts

from lowq_cli.engine import folding, weights
from lowq_cli.engine.model_record import owned
from lowq_cli.engine.native import NativeDecoder
from lowq_cli.engine.pictures import Shown
from lowq_cli.engine.plan import plan_of
from lowq_cli.engine.prefill import prompt_passes
from lowq_cli.engine.recorded_tower import RecordedTower
from lowq_cli.engine.sampling import Sampling
from lowq_cli.engine.steps import AddFeatures
from lowq_cli.engine.vision import Sight
from lowq_cli.files.source import open_source
from lowq_cli.hf.pictures import packed
from lowq_cli.hf.tower import Tower, load_tower
from lowq_cli.serving.continuous import ContinuousEngine
from lowq_cli.serving.host_memory import HostMemory
from lowq_cli.serving.measurements import Measurements
from lowq_cli.serving.pass_sizes import PICTURED, RECORDED
from lowq_cli.serving.request import Request
from lowq_packers.errors import UnsupportedError, UsageError

CLOSE = 1e-4  # relative, of logits in fp32: twenty times the largest seen, 5e-6
SEEN = 1e-3
OTHERS = (8, 7)  # tokens of videos and of sound
WITH_FACTS = [n for n in pictured.NAMES if n not in ("gemma4", "mistral3", "llama4", "llava", "llava/pixtral", "internvl")]


class Both:
    """transformers' model of a name, and a decoder of the same weights that has its tower apart."""

    def __init__(self, name, described=None):
        self.theirs = pictured.shared(name)
        self.decoder = NativeDecoder(planned(pictured.model(name), described))
        self.images, self.tower = self.decoder.plan.model.images, Tower(pictured.model(name))

    def shown(self, ids, pictures):
        """The pictures of a text as the decoder takes them, None for none."""
        if not pictures:
            return None
        features = [self.tower(p.inputs) for p in pictures]
        return Shown(self.images, ids, pictures).see(features, self.decoder.device, self.decoder.dtype)

    def logits(self, ids, pictures):
        """The decoder's logits of a whole text."""
        return self.decoder.logits(torch.tensor([ids]), [self.shown(ids, pictures)])[0]

    def wanted(self, ids, pictures):
        """transformers'."""
        return pictured.logits_of(self.theirs, ids, pictures)


def some(name):
    """Texts with pictures: one alone, two with text around, the first of them twice, none."""
    a, b = pictured.picture(name, 1), pictured.picture(name, 2, 3, 2)
    words = texts(pictured.VOCAB, 5, 4, 6)
    return [
        pictured.text(words[0], a, words[1]),
        pictured.text(words[2], a, words[1], b, words[0]),
        pictured.text(a, words[2], a, words[0]),
        pictured.text(words[2] + words[0]),
    ]


@pytest.mark.parametrize("name", pictured.NAMES)
def test_logits_of_whole_texts_are_those_of_transformers(name):
    both = Both(name)
    for ids, pictures in some(name):
        assert off(both.logits(ids, pictures), both.wanted(ids, pictures)) < CLOSE


@pytest.mark.parametrize("name", pictured.NAMES)
def test_placeholders_that_are_only_typed_are_read_as_transformers_reads_them(name):
    """A picture's token without a picture, whole and as a step; tokens of videos and sound behind a picture."""
    both, (a, b) = Both(name), texts(pictured.VOCAB, 5, 4)
    typed = [*a, pictured.TOKEN, *b, pictured.TOKEN, pictured.TOKEN]
    assert off(both.logits(typed, []), both.wanted(typed, [])) < CLOSE
    both.decoder.make_room(1, 40)
    both.decoder.start([typed], Sampling(), 2)
    with torch.inference_mode():
        both.decoder.token[0] = pictured.TOKEN
    both.decoder.step()
    assert off(both.decoder.sampler.logits[0], both.wanted([*typed, pictured.TOKEN], [])[-1]) < CLOSE
    ids, pictures = pictured.text(a, pictured.picture(name, 1), b)
    behind = [*ids, *OTHERS, 5]
    assert off(both.logits(behind, pictures), both.wanted(behind, pictures)) < CLOSE
    with pytest.raises(UsageError, match="leave the token that stands for a picture out of the text"):
        both.logits([*ids, pictured.TOKEN], pictures)


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_vl", "mistral3"])
def test_passes_with_pictures_fold_their_neighbours(name):
    """Residual adds, norms and activations are part of the products, as for texts; features are added in between."""
    both, (ids, pictures) = Both(name), some(name)[1]
    plan = both.decoder.plan
    plan.ops = replace(plan.ops, fold=Fold)
    kinds = (folding.ProductAdd, folding.ProductGate)
    assert any(isinstance(step, kinds) for step in plan.program(len(ids), shows=True))
    added = [sum(isinstance(step, AddFeatures) for step in plan.program(len(ids), shows)) for shows in (True, False)]
    assert added == [both.images.deepstack, 0]
    assert off(both.logits(ids, pictures), both.wanted(ids, pictures)) < CLOSE


@pytest.mark.parametrize("name", pictured.NAMES)
def test_texts_side_by_side_in_pieces_and_token_by_token(name):
    """With pictures and without in one batch, prompts in pieces of nine tokens, then greedy tokens."""
    both, cases = Both(name), [(list(ids), pictures) for ids, pictures in some(name)]
    decoder, n = both.decoder, len(cases)
    decoder.make_room(n, 80)
    decoder.chunk = 9
    decoder.start([ids for ids, _ in cases], Sampling(), 20, shown=[both.shown(*case) for case in cases])
    open_ = set(range(n))
    for _ in range(6):
        for i in open_:
            ids, pictures = cases[i]
            assert off(decoder.sampler.logits[i], both.wanted(ids, pictures)[-1]) < CLOSE
            ids.append(int(decoder.token[i]))
        open_ = {i for i in open_ if cases[i][0][-1] != pictured.TOKEN}  # which transformers takes for a picture
        decoder.step()
    assert max(len(ids) - len(before) for (ids, _), (before, _) in zip(cases, some(name), strict=True)) == 6


@pytest.mark.parametrize("name", pictured.NAMES)
def test_a_conversation_continues_from_the_cached_tokens(name):
    """The same picture again is not read again; another in its place is. A second picture comes after the first."""
    both, (a, b) = Both(name), (pictured.picture(name, 1), pictured.picture(name, 2))
    words = texts(pictured.VOCAB, 5, 4, 6)
    decoder = both.decoder
    decoder.make_room(1, 90)
    recurrent = name.startswith("qwen3_5")  # whose state is that of whole prompts
    first, longer, other = (
        pictured.text(words[0], a, words[1]),
        pictured.text(words[0], a, words[1], b, words[2]),
        pictured.text(words[0], b, words[1], b, words[2]),
    )
    before = 0
    for ids, pictures in (first, longer, other):
        shown = both.shown(ids, pictures)
        known = decoder.reusable([shown.names])
        assert known == before
        decoder.start([ids], Sampling(), 2, shown=[shown])
        assert off(decoder.sampler.logits[0], both.wanted(ids, pictures)[-1]) < CLOSE
        before = len(first[0]) if ids is first[0] else (0 if recurrent else len(words[0]) + 1)


@pytest.mark.parametrize("name", pictured.NAMES)
def test_another_picture_gives_other_logits(name):
    both, (ids, pictures) = Both(name), some(name)[1]
    other = pictured.picture(name, 7, 3, 2)
    assert off(both.logits(ids, [pictures[0], other]), both.wanted(ids, pictures)) > SEEN
    swapped = pictured.text(texts(pictured.VOCAB, 6)[0], *pictures[::-1])
    assert off(both.logits(*swapped), both.wanted(*swapped)) < CLOSE


@pytest.mark.parametrize("name", WITH_FACTS)
def test_each_fact_of_how_pictures_enter_shows(name):
    ids, pictures = some(name)[1]
    described = weights.describe(pictured.shared(name).config)[0]
    wanted = Both(name).wanted(ids, pictures)
    tested = 0
    for fact, value in {"sections": (), "deepstack": 0, "whole": "", "interleaved": not described.images.interleaved}.items():
        if getattr(described.images, fact) not in (value, "", ()) and (fact != "interleaved" or "vl" in name):
            both = Both(name, replace(described, images=replace(described.images, **{fact: value})))
            shown = Shown(both.images, ids, pictures)
            features = [(rows, more[: both.images.deepstack]) for rows, more in (both.tower(p.inputs) for p in pictures)]
            shown.see(features, both.decoder.device, both.decoder.dtype)
            assert off(both.decoder.logits(torch.tensor([ids]), [shown])[0], wanted) > SEEN, fact
            tested += 1
    assert tested


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_vl"])
def test_places_that_are_shifted_give_other_logits(name):
    both, (ids, pictures) = Both(name), some(name)[1]
    shown = both.shown(ids, pictures)
    shown.places = shown.places.clone()
    shown.places[1:, shown.at] += 1
    assert off(both.decoder.logits(torch.tensor([ids]), [shown])[0], both.wanted(ids, pictures)) > SEEN


@pytest.mark.parametrize("name", pictured.NAMES)
def test_the_tower_of_a_folder_computes_as_in_the_whole_model(name, tmp_path):
    """Also where the pad token is beyond the small vocabulary of the text model that the tower is loaded with."""
    theirs = pictured.model(name)
    theirs.config.get_text_config().pad_token_id = pictured.VOCAB - 1
    theirs.save_pretrained(tmp_path)
    with open_source(tmp_path) as source:
        text = source.config["text_config"]
        if "rope_theta" in text["rope_parameters"]:  # as published configs have it
            text |= {"rope_theta": text["rope_parameters"].pop("rope_theta"), "rope_scaling": text.pop("rope_parameters")}
        before = deepcopy(source.config)
        own = load_tower(source, torch.device("cpu"), torch.float32)
    assert source.config == before  # transformers' classes write into what they are made of
    inputs = pictured.picture(name, 1).inputs
    (rows, layers), (wanted, theirs_layers) = own(inputs), Tower(theirs)(inputs)
    assert off(rows, wanted) < 1e-5  # their attention is eager
    assert all(off(a, b) < 1e-5 for a, b in zip(layers, theirs_layers, strict=True))


def test_tokens_and_pictures_that_do_not_fit_are_refused_in_one_line():
    both, (ids, pictures) = Both("gemma3"), some("gemma3")[0]
    with pytest.raises(UsageError, match=r"has 5 picture tokens, but its 1 pictures need 4"):
        Shown(both.images, [*ids, pictured.TOKEN], pictures)
    with pytest.raises(UnsupportedError, match="longer than the 4 tokens"):
        prompt_passes(1, 0, 20, 4, [(3, 9)])


def served(model, asked, n, **how):
    """The greedy tokens of texts with pictures that are asked for at once; the engine's statistics; pictures seen."""
    return answers(ContinuousEngine(model, 64, **how), asked, n)


def answers(engine, asked, n, begun=lambda: None):
    """As `served`, of an engine that has not started; `begun` is called before anything is asked."""
    events, ended, numbers = {}, threading.Event(), []

    def sink(batch):
        for number, e in batch:
            events.setdefault(number, []).append(e)
        if len(numbers) == len(asked) and all(events.get(i) and events[i][-1].finish_reason for i in numbers):
            ended.set()

    engine.start(sink)
    begun()
    numbers += [engine.submit(Request(tuple(ids), n, pictures=tuple(map(packed, pictures)))) for ids, pictures in asked]
    sink([])
    assert ended.wait(120)
    stats = engine.stats()
    engine.stop(1)
    assert {events[i][-1].finish_reason for i in numbers} == {"length"}, events[numbers[0]][-1]
    return [[e.token for e in events[i]] for i in numbers], stats


def seeing(name, *where):
    """A planned model whose tower is there already. where: as `Module.to` takes it."""
    model, tower = pictured.model(name), pictured.model(name)
    if where:  # `to` makes complex buffers real
        model, tower = model.to(*where), tower.to(*where)
    model, tower = planned(model), Tower(tower)
    images = plan_of(model).model.images
    owned(model).sight = sight = Sight(Path(), images, model.device, model.dtype, RecordedTower(tower))
    return model, sight


@pytest.mark.parametrize("name", pictured.NAMES)
def test_served_side_by_side_they_are_as_alone(name):
    """With pictures and without, the same picture twice, long ones, in a cache that is too small for all."""
    both, (a, b) = Both(name), (pictured.picture(name, 1, 4, 5), pictured.picture(name, 2))
    long, short = texts(pictured.VOCAB, 70, 5)
    asked = [*some(name), pictured.text(long, a, short), pictured.text(long, a, short, b), (short, [])]
    asked.append(pictured.text(long, b, short))
    wanted = []
    for ids, pictures in asked:
        both.decoder.make_room(1, 160)
        made = [int(both.decoder.start([ids], Sampling(), 8, shown=[both.shown(ids, pictures)])[0])]
        wanted.append(made + [int(both.decoder.step()[0]) for _ in range(7)])
    model, sight = seeing(name)
    found, _ = served(model, asked, 8, running=8)
    assert found == wanted
    assert sight.computed == len({p.name for _, pictures in asked for p in pictures})
    assert served(model, asked, 8, running=3, cache_tokens=320)[0] == wanted
    assert sight.computed == len({p.name for _, pictures in asked for p in pictures})


class Replayed:
    """A recorded pass on a CPU: it is computed again from the same tensors."""

    noted, count = None, 0

    def __init__(self, step, pool):
        self.step = step
        step()

    def replay(self):
        Replayed.count += 1
        self.logits.copy_(self.step())


WHOLE, MIXTURES = ("gemma3", "gemma4/whole"), ("qwen3_vl_moe", "qwen3_5_moe", "llama4")  # unpacked experts are not recorded
RECURRENT = ("qwen3_5",)  # on a CPU the rows of each sequence have to be on the host


def record_pictures(engine):
    """Record on a CPU, as a later load in a server does whose passes without pictures are recorded."""
    passes = engine.passes
    passes.capture = Replayed
    passes.met, passes.captured = set(), {(b, M, False): None for b, M in passes.sizes.recorded()}
    with torch.inference_mode():
        while passes.record_next():
            pass
    passes.met, passes.captured = None, {}


@pytest.mark.parametrize("name", [n for n in pictured.NAMES if n not in (*WHOLE, *MIXTURES, *RECURRENT)])
def test_recorded_passes_with_pictures_give_the_tokens_of_unrecorded_ones(name):
    """All sizes are recorded that are for texts; a recorded pass reads its pictures from the same tensors each time."""
    long, short = texts(pictured.VOCAB, 70, 5)
    a, b = pictured.picture(name, 1, 4, 5), pictured.picture(name, 2)
    asked = [*some(name), pictured.text(long, a, short), pictured.text(long, a, short, b), (short, [])]

    def made(recorded):
        engine = ContinuousEngine(seeing(name)[0], 64, running=4)
        runner = engine.passes
        runner.sizes.padded, runner.sizes.most_recorded = True, RECORDED
        if recorded:
            record_pictures(engine)
            steps = {(b, b, False) for b in runner.sizes.steps if runner.plan.model.images.sections}
            alone = {(0, M, False) for M in PICTURED}
            assert set(runner.showing) == steps | {(b, M, False) for b, M in runner.sizes.recorded() if b != M} | alone
        return answers(engine, asked, 6)

    wanted, before = made(False), Replayed.count
    assert made(True)[0] == wanted[0]
    assert Replayed.count > before


@pytest.mark.parametrize("name", WHOLE)
def test_passes_whose_pictures_are_seen_whole_are_not_recorded(name):
    """No kernel takes them."""
    engine = ContinuousEngine(seeing(name)[0], 64, running=4)
    record_pictures(engine)
    assert engine.passes.showing == {}


def test_texts_are_answered_while_the_tower_is_at_work():
    """A picture's tower does not take a pass of others: they end, however long it takes."""
    model, sight = seeing("qwen3_vl")
    tower, go_on, begun = sight.load().tower, threading.Event(), threading.Event()
    run = tower.run

    def slow(there):
        begun.set()
        assert go_on.wait(60)
        return run(there)

    tower.run = slow
    engine, heard = ContinuousEngine(model, 8), queue.SimpleQueue()
    engine.start(lambda batch: [heard.put(pair) for pair in batch])
    ids, pictures = some("qwen3_vl")[0]
    seen = engine.submit(Request(tuple(ids), 2, pictures=tuple(map(packed, pictures))))
    assert begun.wait(60)
    text = engine.submit(Request(tuple(ids[:3]), 20))
    assert [heard.get(timeout=60)[0] for _ in range(20)] == [text] * 20
    assert engine.stats().steps == 20
    go_on.set()
    assert [heard.get(timeout=60)[0] for _ in range(2)] == [seen] * 2
    engine.stop(1)


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3", "mistral3"])
def test_blocks_of_a_picture_are_found_by_its_name_alone(name):
    a, b = pictured.picture(name, 1, 4, 5), pictured.picture(name, 2, 4, 5)
    long, more = texts(pictured.VOCAB, 70, 60)
    first, other = pictured.text(a, long, more), pictured.text(b, long, more)
    model, _ = seeing(name)
    engine, heard = ContinuousEngine(model, 8, cache_tokens=2000), queue.SimpleQueue()
    engine.start(lambda batch: [heard.put(e) for _, e in batch])

    def cached(ids, pictures):
        engine.submit(Request(tuple(ids), 1, pictures=tuple(map(packed, pictures))))
        return heard.get(timeout=60).cached

    assert [cached(*first), cached(*first), cached(*other), cached(*other), cached(*first)] == [0, 128, 0, 128, 128]
    engine.stop(1)


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5", "gemma3"])
def test_blocks_of_a_picture_come_back_from_host_memory(name):
    """In a cache for one text; also in the next engine, and never for a text with another picture in the same place."""
    memory, drawn = HostMemory(8 << 20, 1), [pictured.picture(name, i, 4, 5) for i in (1, 2)]
    long, more = texts(pictured.VOCAB, 70, 60)
    asked = [pictured.text(p, long, more) for p in drawn]
    wanted = [served(seeing(name)[0], [one], 8)[0][0] for one in asked]
    for hits in (256, 512):
        engine, heard = ContinuousEngine(seeing(name)[0], 8, 2, 256, host=(lent := memory.lend("m"))), queue.SimpleQueue()
        engine.start(lambda batch, heard=heard: [heard.put(e) for _, e in batch])
        for i in (0, 1, 0, 1):
            ids, pictures = asked[i]
            engine.submit(Request(tuple(ids), 8, pictures=tuple(map(packed, pictures))))
            assert [heard.get(timeout=60).token for _ in range(8)] == wanted[i]
        assert engine.stats().prefix_hits == hits
        assert engine.stats().host_hits > 0
        engine.stop(1)
        memory.take_back("m", lent, engine.keep())
    memory.close()


def test_a_picture_that_cannot_be_seen_ends_its_own_text_alone():
    model, sight = seeing("qwen3_vl")
    a = pictured.picture("qwen3_vl", 1)
    ids, pictures = pictured.text(texts(pictured.VOCAB, 5)[0], a)
    engine, heard = ContinuousEngine(model, 8), queue.SimpleQueue()
    engine.start(lambda batch: [heard.put(pair) for pair in batch])
    wrong = engine.submit(Request((*ids, pictured.TOKEN), 2, pictures=(packed(a),)))
    number, event = heard.get(timeout=60)
    assert (number, event.finish_reason) == (wrong, "refused")
    assert "picture tokens" in event.message
    right = engine.submit(Request(tuple(ids), 1, pictures=tuple(map(packed, pictures))))
    number, event = heard.get(timeout=60)
    assert (number, event.finish_reason) == (right, "length")
    engine.stop(1)
    assert sight.computed == 1


def test_a_model_without_a_tower_refuses_pictures_when_they_are_asked_for():
    model = planned(random_model("llama"))
    engine = ContinuousEngine(model, 8)
    engine.start(lambda batch: None)
    with pytest.raises(UnsupportedError, match="llama has no picture inputs"):
        engine.submit(Request((1, 2, 3), 1, pictures=(packed(pictured.picture("qwen3_vl", 1)),)))
    engine.stop(1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", pictured.NAMES)
def test_on_a_gpu_pictures_give_the_logits_of_the_cpu(name):
    """In fp16 beside fp32: a whole text of two pictures, then its steps, next to a text without."""
    a, b, words = pictured.picture(name, 1, 4, 5), pictured.picture(name, 2, 3, 2), texts(pictured.VOCAB, 5, 7, 6)
    ids, pictures = pictured.text(words[0], a, words[1], b, words[2])
    logits = {}
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.float16)):
        decoder, tower = NativeDecoder(planned(pictured.model(name).to(device, dtype))), Tower(pictured.model(name))
        shown = Shown(decoder.plan.model.images, ids, pictures)
        shown.see([tower(p.inputs) for p in pictures], decoder.device, decoder.dtype)
        rows = [*decoder.logits(torch.tensor([ids], device=device), [shown])[0].float().cpu()]
        decoder.start([ids, words[2]], Sampling(), 12, shown=[shown, None])
        assert (decoder.run is not None) == (device == "cuda"), decoder.reason
        for token in (3, 50, 90, 12, 33):
            with torch.inference_mode():
                decoder.token.fill_(token)
            decoder.step()
            rows += decoder.sampler.logits.to("cpu", torch.float32, copy=True)  # the next step writes over it
        logits[device] = torch.stack(rows)
    rows = [off(ours, wanted) for ours, wanted in zip(logits["cuda"], logits["cpu"], strict=True)]
    assert 1e-5 < statistics.median(rows) < 1e-2  # a token may go to other experts where two are nearly as likely
    assert max(rows) < 3e-2 or name in ("qwen3_vl_moe", "qwen3_5_moe", "llama4")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", [n for n in pictured.NAMES if n not in (*WHOLE, *MIXTURES)])
def test_on_a_gpu_recorded_passes_with_pictures_give_the_tokens_of_unrecorded_ones(name):
    """The same kernels of the same sizes of passes."""
    asked, found = some(name), []
    for recorded in (True, False):
        engine = ContinuousEngine(seeing(name, "cuda", torch.float16)[0], 64, running=4, deterministic=True)
        if recorded:
            found.append(answers(engine, asked, 6)[0])
            assert engine.passes.reason == ""
            assert set(engine.passes.showing) == set(engine.passes.sizes.pictured())
        else:
            engine.passes.record_pictured = lambda: False
            found.append(answers(engine, asked, 6)[0])
            assert engine.passes.showing == {}
    assert found[0] == found[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_later_load_records_passes_with_pictures():
    """At its start, as the first load: later loads of models that take pictures have no measurements to take over."""
    asked, found, earlier = some("qwen3_vl"), [], Measurements(b"key")
    for load in ("first", "later"):
        model, later = seeing("qwen3_vl", "cuda", torch.float16)[0], load == "later"
        engine = ContinuousEngine(model, 64, running=4, earlier=earlier, later=later)
        found.append(answers(engine, asked, 6)[0])
        passes = engine.passes
        assert len(passes.showing) == len(list(passes.sizes.pictured())), (
            f"{load} load: {passes.reason or 'no recording of texts has failed'}"
        )
        assert passes.reason == ""
        assert engine.measurements is None
    assert found[0] == found[1]
