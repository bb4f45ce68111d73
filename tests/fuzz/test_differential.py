"""Each format's fields, one by one, held against a second reader; a reader that passes over one field is found."""

import json
import os
import sys
from itertools import chain
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import judge as judging
from bend import mend
from safetensors.torch import load_file, save_file
from valid import all_valid, second_of_each, weights
from valid_tables import GGUF_KINDS, all_tables

from lowq_packers import formats
from lowq_packers.qtensor import QuantizedTensor

# format -> which of its files, and a field with a value that gives the same bytes another meaning
EDITS = {
    "gptq": (1, "quantization_config.checkpoint_format", "gptq"),
    "awq": (0, "quantization_config.zero_point", False),
    "compressed-tensors": (0, "quantization_config.config_groups.group_0.weights.symmetric", True),
    "humming": (1, "quantization_config.has_zero_point", False),
    "fp8": (1, "quantization_config.weight_block_size", [150, 128]),
}
LEAVES = {  # of formats whose configs say what shapes say too: a tensor
    **{"mlx": "biases", "hqq": "zero", "gemlite": "zeros", "modelopt": "weight", "bitsandbytes": "weight.absmax"},
    **{"compressed-tensors, e2m1": "weight_packed", "mxfp4": "gate_up_proj_blocks"},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    before, folder = {n: os.environ.get(n) for n in ("XDG_CACHE_HOME", "XDG_STATE_HOME")}, tmp_path_factory.mktemp("second")
    os.environ["XDG_CACHE_HOME"], os.environ["XDG_STATE_HOME"] = str(folder / "cache"), str(folder / "state")
    (folder / "first").mkdir()
    tables, second_tables = all_tables(folder / "tables")
    first = {v.format: v for v in (*all_valid(folder / "first"), *tables)}
    yield first, second_of_each(folder / "second") | second_tables
    for name, value in before.items():
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def edited(valid, out, path, value):
    """A copy of a model with one field of config.json set."""
    mend(valid.model, out)
    config = table = json.loads((out / "config.json").read_text())
    *above, last = path.split(".")
    for key in above:
        table = table[key]
    table[last] = value
    (out / "config.json").write_text(json.dumps(config))


def negated(valid, leaf, out):
    """A copy of a model with one kind of tensors negated: what a reader that takes their sign wrongly makes of the model."""
    mend(valid.model, out)
    tensors = load_file(out / "model.safetensors")
    save_file({n: -t if n.endswith(f".{leaf}") else t for n, t in tensors.items()}, out / "model.safetensors")
    return out


@pytest.mark.parametrize("name", EDITS)
def test_a_reader_that_passes_over_a_field_is_found(files, tmp_path, name):
    which, path, value = EDITS[name]
    valid = files[which][name]
    edited(valid, tmp_path / "m", path, value)
    assert not judging.judge(valid, tmp_path / "m").fault
    verdict = judging.judge(valid, tmp_path / "m", lambda model: valid.weights)
    assert verdict.accepted
    assert "than its own reader reads" in verdict.fault


@pytest.mark.parametrize("name", LEAVES)
def test_a_reader_that_takes_a_tensor_wrongly_is_found(files, tmp_path, name):
    for i, valid in enumerate((files[0][name], files[1][name])):
        assert not judging.judge(valid, valid.model).fault
        wrong = negated(valid, LEAVES[name], tmp_path / str(i))
        assert "than its own reader reads" in judging.judge(valid, valid.model, lambda model, wrong=wrong: weights(wrong)).fault


def test_rows_left_in_llama_cpps_order_are_found(files):
    """As k_proj's rows were with a config.json without num_key_value_heads: relative error 1.37, exit code 0."""
    valid = files[0]["gguf"]

    def left(model):
        return {n: formats.gguf.permute_heads(w, 2) if n.endswith("k_proj") else w for n, w in weights(model).items()}

    assert "k_proj has other weights than its own reader reads" in judging.judge(valid, valid.model, left).fault


@pytest.mark.parametrize("planted", sorted({*chain(*GGUF_KINDS)}))
def test_a_bit_of_gguf_codes_taken_wrongly_is_found(files, monkeypatch, planted):
    valid, real = files[0]["gguf, tables"], formats.gguf.decode

    def wrong(raw, kind, *size):
        q = real(raw, kind, *size)
        return q if kind != planted else QuantizedTensor.of(q.scheme, q.W_q ^ 1, q.scales, q.zeros)

    monkeypatch.setattr(formats.gguf, "decode", wrong)
    assert "than its own reader reads" in judging.judge(valid, valid.model).fault


def test_every_format_that_lowq_reads_is_held_against_a_second_reader(files):
    assert {name.split(",")[0] for name in (*EDITS, *LEAVES, "gguf, tables")} == {*formats.FORMATS}
    assert files[0].keys() == files[1].keys() == {*EDITS, *LEAVES, "gguf", "gguf, tables", "dense", "lowq", "lowq, a table"}
    for valid in (*files[0].values(), *files[1].values()):
        assert judging.judge(valid, valid.model) == judging.Verdict(True, "", pytest.approx(0, abs=5)), valid.format
