"""A model's later loads in one server: they take over the measurements of its first load."""

import time

import counting
import pytest
import torch
from asking import Client, build, prompts

from lowq_cli.serving.catalog import Offer
from lowq_cli.serving.http.loading import Loader, keyed
from lowq_cli.serving.measurements import Measurements


def test_a_later_load_gets_the_measurements_of_the_one_before(tmp_path):
    loader = Loader("cpu", {}, make=counting.load)
    for name in "abaa":
        model = loader.begin(Offer(name, str(tmp_path)))
        model.made().engine.start(lambda batch: None)
        model.stop()
    assert {name: one.beside for name, one in loader.measurements.items()} == {"a": 3, "b": 1}
    begun = loader.begin(Offer("a", str(tmp_path)))  # a load that is broken off changes nothing
    begun.stop()
    assert loader.measurements["a"].beside == 3


def test_measurements_hold_for_the_same_files_and_options(tmp_path):
    (tmp_path / "config.json").write_text("{}")

    def known(earlier, **how):
        return keyed({"kv": "16", "earlier": earlier, "host": None} | how, "m", str(tmp_path))["earlier"]

    first = known(Measurements())
    assert first.key
    assert not first.passes
    full = Measurements(first.key, 7, {(1, 1, False): 0.1})
    assert known(full) == full
    assert known(full, running=3) != full
    assert not known(full, running=3).passes
    assert not known(full, lora={"german": "there"}).passes
    (tmp_path / "config.json").write_text("{ }")
    assert not known(full).passes
    assert keyed({"kv": "16"}, "m", str(tmp_path)) == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("draft", ["none", "ngram"])
def test_a_later_load_on_a_gpu_answers_before_its_passes_are_recorded(draft):
    model = build("llama").cuda().half()
    how = {"running": 4, "cache_tokens": 4096, "draft": draft}
    given, clients = prompts(3, 130, 64, 65, 200, 17), []
    try:
        first = Client(model, earlier=Measurements(b"key"), **how)
        clients.append(first)
        expected = first.tokens(*(first.ask(p, 24) for p in given))
        measured = first.engine.measurements
        assert measured.key == b"key"
        assert measured.beside
        assert measured.passes
        assert bool(measured.drafts) == (draft == "ngram")
        later = Client(model, earlier=measured, **how)
        clients.append(later)
        assert later.engine.measurements is measured
        assert later.tokens(*(later.ask(p, 24) for p in given)) == expected
        passes, until = later.engine.passes, time.monotonic() + 60
        while len(passes.captured) < len(list(passes.sizes.recorded())):  # recorded while there is nothing to do
            assert time.monotonic() < until
            time.sleep(0.05)
        assert later.tokens(*(later.ask(p, 24) for p in given)) == expected
        assert not passes.reason
        assert later.engine.limits == first.engine.limits
    finally:
        for one in clients:
            one.engine.stop(0)
