"""Weights that lie in a file as a CPU computes with them are mapped, not copied."""

import json
import queue
import shutil
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import lowq
from lowq_cli.engine import native_loader
from lowq_cli.engine.open_model import ready
from lowq_cli.engine.parallel_read import Reader
from lowq_cli.engine.prompts import stream
from lowq_cli.evaluate.perplexity import evaluate
from lowq_cli.evaluate.tasks import Judge
from lowq_cli.files.mapped_file import OverwrittenError
from lowq_cli.files.source import DEMO, open_source
from lowq_cli.interop.exporter import export
from lowq_cli.plan.recipe import make_recipe
from lowq_cli.run import own_text, own_text_plan
from lowq_cli.run.pipeline import quantize, run
from lowq_cli.serving.continuous import ContinuousEngine
from lowq_cli.serving.request import Request
from lowq_cli.serving.sequential import SequentialEngine
from lowq_kernels.modules.linear import QuantLinear
from lowq_kernels.products.cpu import native
from lowq_packers.errors import DamagedError

CPU = torch.device("cpu")
UP, DOWN = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("up", "down"))


@pytest.fixture(scope="module")
def folder(family_checkpoints, tmp_path_factory):
    out = tmp_path_factory.mktemp("mapped") / "cpu"
    quantize(family_checkpoints("llama").dense, out, bits=4, group=32, method="rtn", layout="cpu")
    return out


def within(t, source):
    """Whether a tensor's bytes are those of a mapped file."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(source.folder) in line]
    spans = [[int(address, 16) for address in line.split()[0].split("-")] for line in lines]
    return any(first <= t.data_ptr() < end for first, end in spans)


def test_neighbours_are_one_view_of_the_file_with_the_tensors_values(tmp_path):
    rows = {name: torch.arange(12, dtype=torch.int32).reshape(3, 4) + at for name, at in (("a", 0), ("b", 100), ("c", 200))}
    save_file(rows, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text("{}")
    with open_source(tmp_path) as source, Reader(source, CPU) as reader:
        for names, there in ((["a"], True), (["b", "c"], True), (["c", "b"], False), (["a", "c"], False)):
            t = reader.join(names)
            assert within(t, source) == there, names
            assert torch.equal(t, torch.cat([rows[n] for n in names]))
        assert not within(reader.join(["a", "b"], torch.float64), source)


def test_writes_to_a_mapped_weight_stay_in_this_process(folder):
    before = (folder / "model.safetensors").read_bytes()
    with open_source(folder) as source, Reader(source, CPU) as reader:
        reader.join([DOWN]).zero_()
        assert (reader.join([DOWN]) == 0).all()
    assert (folder / "model.safetensors").read_bytes() == before
    with open_source(folder) as source, Reader(source, CPU) as reader:
        assert (reader.join([DOWN]) != 0).any()


def test_tensors_at_odd_places_are_read(folder, tmp_path):
    raw = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.dumps(json.loads(raw[8 : 8 + size]), separators=(",", ":")).encode()
    header += b" " * (1 - len(header) % 4)  # words at 4 n + 1
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + size :])
    with open_source(tmp_path) as source, Reader(source, CPU) as reader, open_source(folder) as whole:
        assert source.headers[DOWN].offset % 4
        t = reader.join([DOWN])
        assert not within(t, source)
        assert torch.equal(t.flatten(), whole.read(DOWN))


@pytest.mark.skipif(native.library() is None, reason="own CPU kernels are not built here")
def test_a_model_holds_no_copy_of_mapped_tensors(folder):
    with open_source(folder) as source:
        model = native_loader.read(source, CPU)
        result = [m for m in model.plan.linears.modules() if isinstance(m, QuantLinear)]
        mapped = [m for m in result if within(m.weight, source)]  # others are joined: q, k and v, gate and up
        assert {m.layout for m in mapped} == {"cpu"}
        assert len(mapped) == 2 * len(model.plan.states) + 1  # o and down, and the head


@pytest.fixture
def copied(folder, tmp_path):
    """A copy of the folder that a test may write into, and its weights."""
    copy = shutil.copytree(folder, tmp_path / "model")
    return copy, copy / "model.safetensors"


def written_over(weights):
    """As `cp` of another model's file of the same size over it; the file stays the same one."""
    raw = weights.read_bytes()
    number = weights.stat().st_ino
    weights.write_bytes(raw[: len(raw) // 2] + raw[: len(raw) - len(raw) // 2])
    assert (weights.stat().st_ino, weights.stat().st_size) == (number, len(raw))


def replaced(weights):
    """As `mv` of another file over it."""
    new = weights.with_name("new")
    new.write_bytes(bytes(weights.stat().st_size))
    new.rename(weights)


def test_an_answer_from_weights_that_were_written_over_ends_with_an_error(copied):
    model, tokenizer = ready(copied[0], "cpu")
    pieces = iter(stream(model, tokenizer, "abc", max_new_tokens=40, stop=[], chat=False).pieces())
    next(pieces)
    written_over(copied[1])
    with pytest.raises(DamagedError, match=r"model\.safetensors was written over while its pages are in use"):
        next(pieces)
    with pytest.raises(DamagedError):  # nor is another answer begun
        list(stream(model, tokenizer, "abc", max_new_tokens=4))


def test_a_measurement_of_weights_that_were_written_over_ends_with_an_error(copied):
    model, _ = ready(copied[0], "cpu")
    ids = torch.arange(64) % 50
    assert evaluate(model, ids, window=16).ppl > 1
    with pytest.raises(DamagedError, match="was written over"):
        evaluate(model, ids, window=16, progress=lambda percent, note: written_over(copied[1]), most_logits=16 * 160)


@pytest.mark.parametrize("change", [replaced, Path.unlink], ids=["replaced", "removed"])
def test_a_file_that_is_replaced_or_removed_as_a_whole_changes_no_answer(copied, change):
    model, tokenizer = ready(copied[0], "cpu")
    expected = list(stream(model, tokenizer, "abc", max_new_tokens=8))
    change(copied[1])
    assert list(stream(model, tokenizer, "abc", max_new_tokens=8)) == expected


@pytest.mark.parametrize("kind", [ContinuousEngine, SequentialEngine])
def test_an_engine_ends_when_its_weights_are_written_over(copied, kind):
    model, _ = ready(copied[0], "cpu")
    engine, events = kind(model, waiting=4), queue.Queue()
    engine.start(lambda batch: [events.put(event) for _, event in batch])
    try:
        engine.submit(Request((1, 2, 3), 2))
        assert [events.get(timeout=60).finish_reason for _ in range(2)] == [None, "length"]
        written_over(copied[1])
        engine.submit(Request((1, 2, 3), 2))
        last = events.get(timeout=60)
        assert (last.token, last.finish_reason) == (None, "error")
        assert "was written over" in last.message
        while not engine.closed:
            time.sleep(0.01)
        assert "was written over" in engine.closed
    finally:
        engine.stop(0)


def test_a_model_that_transformers_computes_is_watched_too(family_checkpoints, tmp_path):
    model, tokenizer = ready(shutil.copytree(family_checkpoints("gpt2").dense, tmp_path / "model"), "cpu")
    assert list(stream(model, tokenizer, "abc", max_new_tokens=4))
    written_over(tmp_path / "model" / "model.safetensors")
    with pytest.raises(DamagedError, match="was written over"):
        list(stream(model, tokenizer, "abc", max_new_tokens=4))


@pytest.mark.usefixtures("own_cache")
def test_a_text_by_weights_that_were_written_over_is_not_kept(copied):
    recipe = make_recipe(bits=3, group=16, method="gptq", calib="self", calib_tokens=4096)
    with open_source(copied[0]) as source:
        outlook = own_text_plan.outlook(str(copied[0]), source, recipe, CPU)
    steps = own_text.write(outlook, None)
    next(steps)  # loads the model
    next(steps)
    written_over(copied[1])
    with pytest.raises(DamagedError, match="was written over"):
        list(steps)
    assert not list(outlook.folder.glob("*.safetensors"))


def test_scores_of_weights_that_were_written_over_are_an_error(copied):
    model, tokenizer = ready(copied[0], "cpu")

    @contextmanager
    def changed(label, total):
        yield lambda done, note: written_over(copied[1])

    judge = Judge(model, tokenizer, lambda *_: iter(()), changed)
    with pytest.raises(DamagedError, match="was written over"):
        judge._read([([1, 2], [3, 4]), ([1, 2, 3], [4, 5])], "likelihoods")


@pytest.mark.parametrize("how", ["read", "read_raw", "read_into"])
def test_a_file_that_is_written_over_between_two_reads_ends_the_reading(copied, how):
    with open_source(copied[0]) as source:
        size = source.headers[DOWN].nbytes
        reads = {
            "read": lambda: source.read(DOWN),
            "read_raw": lambda: source.read_raw(DOWN, 0, size),
            "read_into": lambda: source.read_into(DOWN, 0, memoryview(bytearray(size))),
        }
        reads[how]()
        written_over(copied[1])
        with pytest.raises(DamagedError, match=r"model\.safetensors was written over while it is read"):
            reads[how]()


CHANGED = "was written over while it is read|changed while being read"  # the latter where it is shorter at that moment


def test_a_checkpoint_is_never_made_of_two_models(tmp_path):
    dense = shutil.copytree(DEMO, tmp_path / "dense")
    steps = run(dense, make_recipe(bits=4, method="rtn"), tmp_path / "out", "cpu")
    next(steps)
    written_over(dense / "model.safetensors")
    with pytest.raises(DamagedError, match=CHANGED):
        list(steps)
    assert not (tmp_path / "out" / "config.json").exists()


def test_an_export_is_never_made_of_two_models(copied, tmp_path):
    def once(percent, name, left=[1]):  # noqa: B006  # one call changes the file
        if left:
            left.pop()
            written_over(copied[1])

    with pytest.raises(DamagedError, match=CHANGED):
        export(copied[0], "hqq", tmp_path / "out", progress=once)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("when", ["before the text", "within the text"])
def test_a_text_of_a_loaded_model_ends_where_its_file_was_written_over(when, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "m")
    model, tokenizer = lowq.load(tmp_path / "m", device="cpu")
    text = iter(lowq.stream(model, tokenizer, [5, 6, 7], max_new_tokens=20, draft="none"))
    if when == "within the text":
        next(text)
    with open(tmp_path / "m" / "model.safetensors", "r+b") as file:
        file.seek(-64, 2)
        file.write(bytes(64))
    with pytest.raises(OverwrittenError, match=r"model\.safetensors"):
        list(text)


def test_a_loaded_model_whose_file_is_replaced_goes_on(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "m")
    model, tokenizer = lowq.load(tmp_path / "m", device="cpu")
    (tmp_path / "new").write_bytes(b"another file")
    (tmp_path / "new").replace(tmp_path / "m" / "model.safetensors")
    assert "".join(lowq.stream(model, tokenizer, [5, 6, 7], max_new_tokens=5, draft="none"))
