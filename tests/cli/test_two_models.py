"""Two models in one process: each runs the kernels of its own folder's tuning table, and has its own decoder."""

import shutil
from unittest.mock import patch

import pytest
import torch

from lowq_cli.engine import native_loader
from lowq_cli.engine.decoders import decoder_of
from lowq_cli.engine.model_record import owned
from lowq_cli.engine.open_model import ready
from lowq_cli.engine.sampling import Sampling
from lowq_cli.hf import load
from lowq_cli.loading import load as loaded
from lowq_cli.run.pipeline import quantize
from lowq_cli.serving import cache_allocator
from lowq_cli.serving.engines import engine_of
from lowq_kernels import graphs
from lowq_kernels.dispatch import registry, tuning
from lowq_kernels.dispatch.sources import source_hash
from lowq_kernels.dispatch.tuning_file import FILE, Entry, Machine, write_file
from lowq_packers.errors import DoesNotFitError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_tables_left():
    yield
    tuning.forget()


@pytest.fixture
def twins(tmp_path):
    """Two folders with the same model; the table of the first names a kernel that no rule takes for the products of one row."""
    quantize("demo", tmp_path / "a", method="rtn", embedding="keep", device="cpu")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    first, _ = ready(tmp_path / "b", "cpu")
    layers = [m for m in first.linears.modules() if hasattr(m, "scheme") and hasattr(m, "layout")]
    places = {(m.scheme, m.layout, m.out_features, m.in_features) for m in layers}
    named = ("bfloat16", 1, "reference", {}, 1.0, source_hash("reference"))
    entries = [Entry(s.bits, s.group_size, s.kind, named[0], layout, N, K, *named[1:]) for s, layout, N, K in places]
    write_file(tmp_path / "a" / FILE, Machine.here(CPU), entries)
    return tmp_path / "a", tmp_path / "b"


def taken(model, monkeypatch):
    """Names of the kernels that a step of a model's products takes."""
    seen, resolve = set(), registry.resolve

    def noted(call, kernel):
        result = resolve(call, kernel)
        seen.update({result[1][0].name} if isinstance(call, registry.Call) and call.M == 1 else ())
        return result

    decoder = decoder_of(model)
    decoder.start([[5, 6, 7]], Sampling(), 4)
    with monkeypatch.context() as m:
        m.setattr(registry, "resolve", noted)
        with torch.inference_mode():
            decoder.forward_step()
    return seen


def test_each_takes_its_own_tables_kernels(twins, monkeypatch):
    a, b = (ready(folder, "cpu")[0] for folder in twins)
    for _ in range(2):
        assert taken(a, monkeypatch) == {"reference"}
        assert "reference" not in taken(b, monkeypatch)


def test_data_stored_with_a_model_are_not_shared(twins):
    a, b = (ready(folder, "cpu")[0] for folder in twins)
    assert decoder_of(a) is not decoder_of(b)
    assert decoder_of(a) is decoder_of(a)
    assert {owned(m).tuned for m in (a, b)} == {str(f) for f in twins}
    assert not any(name.startswith("_lowq") for name, _ in a.named_modules())


LOADED = {  # what takes much memory -> where it is full at first, and what another model is loaded by
    "a model": (native_loader, "_read", lambda: ready("demo", "cpu")),
    "a model by transformers": (load, "prepare", lambda: loaded("demo", "cpu")),
    "a cache": (cache_allocator, "_runner", lambda: engine_of(ready("demo", "cpu")[0], 4, running=2)),
}


@pytest.mark.parametrize("what", LOADED)
@pytest.mark.parametrize("recorded", [True, False])
def test_a_model_finds_memory_that_another_ones_recording_kept(what, recorded):
    """torch gives cached memory back to the device only where no thread records."""
    module, name, begin = LOADED[what]
    real, calls = getattr(module, name), []

    def full_at_first(*args, **kwargs):
        calls.append(name)
        if len(calls) == 1:
            graphs._recorded += recorded  # by another thread, as tests/kernels/test_graphs.py shows
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*args, **kwargs)

    with patch.object(module, name, full_at_first):
        if recorded:
            assert begin()
        else:
            with pytest.raises(DoesNotFitError):
                begin()
    assert (len(calls) > 1) == recorded
