"""bitsandbytes' nf4 and fp4: files that it wrote, with the weights that it reads from them; its own reader; what is refused."""

import json
import sys
from pathlib import Path

import pytest
import torch

from lowq_packers import formats
from lowq_packers.errors import DamagedError, LowqError

sys.path.insert(0, str(Path(__file__).parent))
from format_support import NAME, assert_same, random_q, read, written
from test_fields import decoded
from test_fp4 import fixture

STATE = "weight.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize(
    ("name", "kind"), [("nf4", "nf4"), ("nf4-double", "nf4"), ("fp4-double", "fitted"), ("nf4-double-rows", None)]
)
def test_files_of_bitsandbytes_are_read_as_bitsandbytes_reads_them(name, kind):
    tensors, config, dense = fixture(f"bitsandbytes-{name}")
    ((module, q),) = read(tensors, config).items()
    values = q if kind is None else q.dequantize(dense[module].dtype)
    assert torch.equal(values, dense[module])
    assert kind is None or q.scheme.table == kind


def test_bitsandbytes_reads_our_tensors():
    functional = pytest.importorskip("bitsandbytes.functional", reason="needs bitsandbytes")
    q = random_q(4, 32, "nf4", 40, 128)
    tensors, _ = written(formats.get("bitsandbytes"), q)
    leaves = {n.removeprefix(f"{NAME}.weight."): t for n, t in tensors.items() if n != f"{NAME}.weight"}
    state = functional.QuantState.from_dict(leaves, "cpu")
    theirs = functional.dequantize_4bit(tensors[f"{NAME}.weight"], state)
    assert torch.equal(theirs, q.dequantize(torch.bfloat16))


def test_codes_by_hand():
    """High half first: byte 0x0F is -1 and 1, times absmax 0.5."""
    tensors, config = written(formats.get("bitsandbytes"), random_q(4, 32, "nf4", 1, 32))
    stored = torch.zeros(16, 1, dtype=torch.uint8)
    stored[0] = 0x0F
    (q,) = read({**tensors, f"{NAME}.weight": stored, f"{NAME}.weight.absmax": torch.tensor([0.5])}, config).values()
    assert q.dequantize()[0, :3].tolist() == [-0.5, 0.5, -0.5]


def _with(edit):
    def bend(t):
        output = json.loads(bytes(t.tolist()))
        return torch.tensor(list(json.dumps({**output, **edit}).encode()), dtype=torch.uint8)

    return bend


BAD = {
    "not JSON": (STATE, lambda t: t[:-1], "not JSON"),
    "a list": (STATE, lambda t: torch.tensor(list(b"[1]"), dtype=torch.uint8), "not a table of settings"),
    "nested": (STATE, lambda t: torch.tensor(list(b"[" * 4000), dtype=torch.uint8), "not JSON"),
    "long": (STATE, lambda t: t.repeat(99), "4096 bytes"),
    "another kind": (STATE, _with({"quant_type": "fp4"}), "quant_type=fp4"),
    "another shape": (STATE, _with({"shape": [8, 32]}), "codes of 4 bits fill 128"),
    "a huge shape": (STATE, _with({"shape": [2**60, 2**60]}), "two dimensions"),
    "one dimension": (STATE, _with({"shape": 512}), "two dimensions"),
    "another block": (STATE, _with({"blocksize": 64}), "asks for"),
    "no block": (STATE, _with({"blocksize": 0}), "blocksize=0"),
    "another field": (STATE, _with({"rotation": "hadamard"}), "might change weights"),
    "an offset alone": (STATE, _with({"nested_offset": 0.1}), "U8"),
    "an odd offset": (STATE, _with({"nested_offset": "1"}), "nested_offset=1"),
    "blocks of another size": (STATE, _with({"nested_blocksize": 64}), "nested_blocksize"),
    "another table": ("weight.quant_map", lambda t: t * 2, "not the table of nf4"),
    "scales that are NaN": ("weight.absmax", lambda t: t * torch.nan, "NaN or infinite"),
    "scales in bytes": ("weight.absmax", lambda t: t.to(torch.uint8), "F32"),
    "words": ("weight", lambda t: t.int(), "U8"),
    "more": ("weight.rotation", lambda t: torch.zeros(2), "does not know what it does"),
}


@pytest.mark.parametrize("what", BAD)
def test_hostile_tensors_are_refused_in_one_line(what):
    tensors, config = written(formats.get("bitsandbytes"), random_q(4, 32, "nf4", 8, 64))
    leaf, bend, output = BAD[what]
    with pytest.raises(LowqError, match=output) as e:
        decoded({**tensors, f"{NAME}.{leaf}": bend(tensors.get(f"{NAME}.{leaf}"))}, config, (8, 64))
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    "edit", [{"load_in_8bit": True}, {"_load_in_8bit": True}, {"bnb_4bit_quant_type": "fp4"}, {"x": 1}], ids=str
)
def test_a_config_of_other_weights_is_refused(edit):
    tensors, config = written(formats.get("bitsandbytes"), random_q(4, 32, "nf4", 8, 64))
    with pytest.raises(LowqError):
        read(tensors, {"quantization_config": {**config["quantization_config"], **edit}})


@pytest.mark.parametrize("storage", [torch.int8, torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_bytes_filed_under_another_dtype_are_the_same_codes(storage):
    """bnb_4bit_quant_storage, as FSDP needs it; the library's own files: tests/libraries/test_by_bitsandbytes.py."""
    fmt = formats.get("bitsandbytes")
    q = random_q(4, 32, "nf4", 24, 96)
    tensors, config = written(fmt, q)
    config["quantization_config"]["bnb_4bit_quant_storage"] = str(storage).removeprefix("torch.")
    tensors[f"{NAME}.weight"] = tensors[f"{NAME}.weight"].flatten().view(storage).reshape(-1, 1)
    (back,) = read(tensors, config).values()
    assert_same(back, q)
    tensors[f"{NAME}.weight"] = tensors[f"{NAME}.weight"][1:]
    with pytest.raises(DamagedError, match="codes of 4 bits fill 1152 bytes"):
        read(tensors, config)
