"""Better codes inside another tool's file: its format, scales and zeros stay, the outputs come nearer, refusals are told."""

import shutil
from pathlib import Path

import pytest
import torch
from conftest import Bytes
from exported import HEAD, INT4, SYM, dense_tensors
from transformers import AutoModelForCausalLM

from lowq_cli.calibrate.need import LayerDone
from lowq_cli.interop.exporter import export
from lowq_cli.interop.foreign import fetcher, foreign_matrices, open_decoded, open_foreign
from lowq_cli.plan.recipe import make_recipe
from lowq_cli.run import refine
from lowq_cli.run.refine import Refining
from lowq_packers.errors import UnsupportedError, UsageError
from lowq_packers.home import cache_dir
from lowq_packers.scheme import Scheme

AFFINE = {"attention": Scheme(4, 32, "float"), "mlp": Scheme(4, 32, "float")}


@pytest.fixture(autouse=True)
def small(small_calibration, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def recipe(text):
    return make_recipe(method="gptq", group="channel", dtype="float32", lm_head="keep", calib=text)


def refined(folder, model, text, out):
    refining = Refining(str(folder), str(model), recipe(text), str(out), "cpu")
    list(refining.run())
    return refining.export()


def parts(path):
    """(codes, all else) of every quantized matrix."""
    with open_foreign(path) as source:
        _, matrices = foreign_matrices(source)
        found = {m.name: m.read(fetcher(source)) for m in matrices}
    return {n: q.W_q for n, q in found.items()}, {n: (q.scheme, q.scales, q.zeros) for n, q in found.items()}


def equal(a, b):
    return a is b is None or (a.dtype == b.dtype and torch.equal(a, b))


@pytest.mark.parametrize(
    ("to", "schemes"),
    [("gptq", INT4), ("compressed-tensors", SYM | HEAD), ("mlx", AFFINE)],
)
def test_codes_change_and_nothing_else(to, schemes, bf16_checkpoints, text, tmp_path):
    made = bf16_checkpoints("llama", schemes)
    export(made.packed, to, tmp_path / "file", rounding=to == "mlx")
    done = refined(tmp_path / "file", made.dense, text, tmp_path / "refined")
    assert done.exported.format == to
    assert_codes_alone(tmp_path / "file", tmp_path / "refined", done)
    if "head" in schemes:
        assert torch.equal(parts(tmp_path / "file")[0]["lm_head"], parts(tmp_path / "refined")[0]["lm_head"])


def test_a_gguf_file_keeps_all_but_codes(demo_gguf, text, tmp_path):
    done = refined(demo_gguf, "demo", text, tmp_path / "refined.gguf")
    assert_codes_alone(demo_gguf, tmp_path / "refined.gguf", done)


def assert_codes_alone(old, new, done):
    """Other codes in as many matrices as `done` says, and nothing else."""
    assert done.better > 0
    (before, kept), (after, still) = parts(old), parts(new)
    assert before.keys() == after.keys()
    assert sum(not torch.equal(before[n], after[n]) for n in before) == done.better
    for n, (scheme, scales, zeros) in kept.items():
        assert still[n][0] == scheme
        assert equal(scales, still[n][1])
        assert equal(zeros, still[n][2])
    with open_decoded(old) as a, open_decoded(new) as b:
        first, second = dense_tensors(a), dense_tensors(b)
    assert all(torch.equal(first[n], second[n]) for n in first if n.removesuffix(".weight") not in before)


def test_outputs_come_nearer(bf16_checkpoints, text, tmp_path):
    made = bf16_checkpoints("llama", INT4)
    export(made.packed, "gptq", tmp_path / "file")
    refined(tmp_path / "file", made.dense, text, tmp_path / "refined")
    model = AutoModelForCausalLM.from_pretrained(made.dense, dtype=torch.float32)
    ids = torch.tensor([Bytes()(Path(text).read_text()[:600])["input_ids"]])
    with torch.no_grad():
        wanted, errors = model(ids).logits, []
        for name in ("file", "refined"):
            with open_decoded(tmp_path / name) as source:
                model.load_state_dict({n: t.float() for n, t in dense_tensors(source).items()}, strict=False)
            errors.append(float((model(ids).logits - wanted).square().mean()))
    assert 0 < errors[1] < 0.9 * errors[0]


def test_a_killed_run_goes_on_with_the_same_bytes(bf16_checkpoints, text, tmp_path):
    made = bf16_checkpoints("llama", INT4)
    export(made.packed, "gptq", tmp_path / "file")
    refined(tmp_path / "file", made.dense, text, tmp_path / "once")
    shutil.rmtree(cache_dir() / "refined")
    events = Refining(str(tmp_path / "file"), str(made.dense), recipe(text), str(tmp_path / "again"), "cpu").run()
    for event in events:
        if isinstance(event, LayerDone):
            break
    with pytest.raises(KeyboardInterrupt):
        events.throw(KeyboardInterrupt)
    resumed = Refining(str(tmp_path / "file"), str(made.dense), recipe(text), str(tmp_path / "again"), "cpu")
    assert [e.resumed for e in resumed.run() if isinstance(e, LayerDone)] == [True, False]
    assert list(Refining(str(tmp_path / "file"), str(made.dense), recipe(text), str(tmp_path / "again"), "cpu").run()) == []
    assert not resumed.export().exported.already_done
    assert refined(tmp_path / "file", made.dense, text, tmp_path / "again").exported.already_done
    for path in (tmp_path / "once").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


def test_a_matrix_keeps_codes_that_are_better(bf16_checkpoints, text, tmp_path):
    """A refined file refined again: gptq finds the same codes, so none is better."""
    made = bf16_checkpoints("llama", INT4)
    export(made.packed, "gptq", tmp_path / "file")
    refined(tmp_path / "file", made.dense, text, tmp_path / "refined")
    assert refined(tmp_path / "refined", made.dense, text, tmp_path / "twice").better == 0


def test_what_it_refuses(bf16_checkpoints, text, tmp_path):
    made = bf16_checkpoints("llama", INT4)
    export(made.packed, "gptq", tmp_path / "file")
    with pytest.raises(UsageError, match="no file that another tool quantized"):
        Refining(str(made.packed), str(made.dense), recipe(text), str(tmp_path / "out"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    with pytest.raises(UsageError, match="there already"):
        Refining(str(tmp_path / "file"), str(made.dense), recipe(text), str(tmp_path / "full"))
    other = bf16_checkpoints("qwen3", INT4)
    with pytest.raises(UnsupportedError):
        list(Refining(str(tmp_path / "file"), str(other.dense), recipe(text), str(tmp_path / "out"), "cpu").run())


def test_scaled_weights_are_refused(bf16_checkpoints, text, tmp_path, monkeypatch):
    made = bf16_checkpoints("llama", INT4)
    export(made.packed, "gptq", tmp_path / "file")
    plain = refine.Checkpoint.read_plain
    monkeypatch.setattr(refine.Checkpoint, "read_plain", lambda self, t: plain(self, t) * (1.5 if "norm" in t.name else 1))
    with pytest.raises(UnsupportedError, match="scaled before"):
        list(Refining(str(tmp_path / "file"), str(made.dense), recipe(text), str(tmp_path / "out"), "cpu").run())
