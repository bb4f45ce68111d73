"""Better codes inside another tool's file: its format, scales and zeros stay, the outputs come nearer, refusals are told."""

from pathlib import Path

import pytest
import torch
from exported import HEAD, INT4, SYM, dense_tensors

from lowq_cli.calibrate.need import LayerDone
from lowq_cli.evaluate.layer_errors import layer_errors
from lowq_cli.interop.exporter import export
from lowq_cli.interop.foreign import fetcher, foreign_matrices, open_decoded, open_foreign
from lowq_cli.plan.recipe import make_recipe
from lowq_cli.run import refine
from lowq_cli.run.refine import Refining
from lowq_packers.errors import UnsupportedError, UsageError
from lowq_packers.scheme import Scheme

BLOCKS = {"attention": Scheme(4, 32, "none"), "mlp": Scheme(4, 32, "none")}
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
    [("gptq", INT4), ("compressed-tensors", SYM | HEAD), ("mlx", AFFINE), ("gguf", BLOCKS)],
)
def test_codes_change_and_nothing_else(to, schemes, bf16_checkpoints, text, tmp_path):
    made = bf16_checkpoints("llama", schemes)
    name = "file.gguf" if to == "gguf" else "file"
    export(made.packed, to, tmp_path / name, rounding=to in ("mlx", "gguf"))
    done = refined(tmp_path / name, made.dense, text, tmp_path / f"refined-{name}")
    assert done.exported.format == to
    assert done.better > 0
    (before, kept), (after, still) = parts(tmp_path / name), parts(tmp_path / f"refined-{name}")
    assert before.keys() == after.keys()
    assert sum(not torch.equal(before[n], after[n]) for n in before) == done.better
    for n, (scheme, scales, zeros) in kept.items():
        assert still[n][0] == scheme
        assert equal(scales, still[n][1])
        assert equal(zeros, still[n][2])
    with open_decoded(tmp_path / name) as a, open_decoded(tmp_path / f"refined-{name}") as b:
        old, new = dense_tensors(a), dense_tensors(b)
    assert all(torch.equal(old[n], new[n]) for n in old if n.removesuffix(".weight") not in before)
    if "head" in schemes:
        assert torch.equal(before["lm_head"], after["lm_head"])


def test_outputs_come_nearer(bf16_checkpoints, text, tmp_path):
    made = bf16_checkpoints("llama", INT4)
    export(made.packed, "gptq", tmp_path / "file")
    refined(tmp_path / "file", made.dense, text, tmp_path / "refined")
    words = Path(text).read_text()
    before, after = (layer_errors(str(tmp_path / n), str(made.dense), words, "cpu") for n in ("file", "refined"))
    assert after[-1].output < 0.9 * before[-1].output


def test_a_killed_run_goes_on_with_the_same_bytes(bf16_checkpoints, text, tmp_path):
    made = bf16_checkpoints("llama", INT4)
    export(made.packed, "gptq", tmp_path / "file")
    refined(tmp_path / "file", made.dense, text, tmp_path / "once")
    events = Refining(str(tmp_path / "file"), str(made.dense), recipe(text), str(tmp_path / "again"), "cpu").run()
    for event in events:
        if isinstance(event, LayerDone):
            break
    with pytest.raises(KeyboardInterrupt):
        events.throw(KeyboardInterrupt)
    resumed = Refining(str(tmp_path / "file"), str(made.dense), recipe(text), str(tmp_path / "again"), "cpu")
    assert [e.resumed for e in resumed.run() if isinstance(e, LayerDone)] == [True, False]
    assert list(Refining(str(tmp_path / "file"), str(made.dense), recipe(text), str(tmp_path / "again"), "cpu").run()) == []
    resumed.export()
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
