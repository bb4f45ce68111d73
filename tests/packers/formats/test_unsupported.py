"""What a format's own writers may say and lowq does not take is unsupported by name, never damaged."""

import json
import sys
from pathlib import Path

import pytest
import torch

from lowq_cli.files.safetensors_io import TensorHeader
from lowq_cli.files.safetensors_writer import name_of
from lowq_packers import formats
from lowq_packers.errors import DamagedError, UnsupportedError
from lowq_packers.scheme import Scheme

sys.path.insert(0, str(Path(__file__).parent))
from format_support import NAME, random_q, written

LINEAR = ("config_groups", "group_0")
KINDS = ("a new kind", "marlin_27", "int4x8")
TEXTS = {  # format -> the fields that name a kind
    "compressed-tensors": [
        ("format",), ("quantization_status",), (*LINEAR, "format"), (*LINEAR, "weights", "strategy"),
        (*LINEAR, "weights", "type"), (*LINEAR, "weights", "actorder"),
    ],
    "gptq": [("checkpoint_format",), ("pack_dtype",)],
    "awq": [("version",), ("pack_dtype",), ("checkpoint_format",)],
    "mlx": [("mode",)],
}  # fmt: skip
SCHEMES = {"awq": "int"}


def made(name):
    """The tensors and config of one matrix."""
    return written(formats.get(name), random_q(4, 32, SCHEMES.get(name, "none"), 64, 64))


def matrices(name, tensors, config):
    headers = {n: TensorHeader(tuple(t.shape), name_of(t)) for n, t in tensors.items()}

    def fetch(tensor, index=None, /):
        return tensors[tensor].view(torch.int32) if tensors[tensor].dtype == torch.uint32 else tensors[tensor]

    result = formats.get(name).matrices(config, headers, fetch)
    formats.check_used(result, headers)
    return [m.read(fetch) for m in result]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "path"), [(name, path) for name, paths in TEXTS.items() for path in paths])
def test_a_kind_of_its_own(name, path, kind):
    tensors, config = made(name)
    changed = json.loads(json.dumps(config))
    for section in {id(s): s for s in (changed.get("quantization_config"), changed.get("quantization")) if s}.values():
        inner = section
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = kind
    if name == "mlx":
        changed["quantization_config"] = changed["quantization"]
    assert matrices(name, tensors, config)
    with pytest.raises(UnsupportedError, match=f"^quantization_config: .*{path[-1]}={kind!r}.* is not supported"):
        matrices(name, tensors, changed)


@pytest.mark.parametrize(
    ("name", "settings", "named"),
    [
        ("gptq", {"bits": 5}, "bits=5 for .*; lowq reads 2, 3, 4 and 8"),
        ("gptq", {"bits": None, "w_bit": 1}, "w_bit=1 for"),
        ("gptq", {"dynamic": {"+:.*down": {}, "+:.*": {"bits": 7}}}, r"dynamic '\+:\.\*': bits=7 for"),
        ("gptq", {"data_type": "mx_fp"}, "data_type='mx_fp'.*; lowq reads int$"),
        ("gptq", {"rotation": "hadamard"}, "rotation='hadamard'"),
        ("awq", {"bits": 3}, "bits=3.*; lowq reads 4"),
        ("awq", {"zero_point": False}, "zero_point=False"),
        ("mlx", {"bits": 7}, "bits=7 for"),
        ("humming", {"dtype": "int4"}, "dtype='int4' for .*; lowq reads uint1 to uint8"),
        ("bitsandbytes", {"load_in_8bit": True}, "load_in_8bit=True"),
    ],
)
def test_a_refused_setting_is_named_with_its_value(name, settings, named):
    q = random_q(4, 64, "none", 64, 64)
    nf4 = type(q).of(Scheme(4, 64, "none", "nf4"), q.W_q, q.scales.float(), None, None)
    tensors, config = written(formats.get(name), nf4) if name == "bitsandbytes" else made(name)
    changed = {key: {**config[key], **settings} for key in ("quantization_config", "quantization") if key in config}
    with pytest.raises(UnsupportedError, match=f"^quantization_config: {named}"):
        matrices(name, tensors, {**config, **changed})


@pytest.mark.parametrize("name", ["gptq", "compressed_tensors", "modelopt"])
def test_every_refusal_names_its_setting(name):
    """They are made by `_common.refusal`, which does."""
    source = Path(formats.__file__).with_name(f"{name}.py").read_text()
    assert "c.refusal(" in source
    assert "UnsupportedError(" not in source


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e5m2, torch.int16])
@pytest.mark.parametrize("name", TEXTS)
def test_a_dtype_of_its_own(name, dtype):
    """And a tensor that is cut off, or gone, is damage."""
    tensors, config = made(name)
    for tensor in tensors:
        if tensor.endswith(("_shape", "g_idx")):
            continue
        other = {**tensors, tensor: torch.zeros(tensors[tensor].shape, dtype=dtype)}
        with pytest.raises(UnsupportedError, match="does not read"):
            matrices(name, other, config)
        cut = {**tensors, tensor: tensors[tensor][: len(tensors[tensor]) // 2]}
        with pytest.raises(DamagedError):
            matrices(name, cut, config)


def test_weights_of_another_float_than_the_format_reads():
    e5m2 = {f"{NAME}.weight": torch.zeros(4, 4, dtype=torch.float8_e5m2), f"{NAME}.weight_scale_inv": torch.ones(1, 1)}
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    with pytest.raises(UnsupportedError, match="F8_E5M2"):
        matrices("fp8", e5m2, config)
    with pytest.raises(DamagedError, match="no other tensor or setting says"):
        matrices("fp8", {f"{NAME}.weight": e5m2[f"{NAME}.weight"]}, config)


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("quant_type", "int4", UnsupportedError), ("blocksize", 16, UnsupportedError), ("dtype", "float64", UnsupportedError),
        ("nested_blocksize", 128, UnsupportedError), ("nested_dtype", "float16", UnsupportedError),
        ("a_new_field", 1, UnsupportedError), ("blocksize", "64", DamagedError), ("shape", [64], DamagedError),
    ],
)  # fmt: skip
def test_settings_of_bitsandbytes(field, value, error):
    q = random_q(4, 64, "none", 64, 64)
    q = type(q).of(Scheme(4, 64, "none", "nf4"), q.W_q, q.scales.float(), None, None)
    tensors, config = written(formats.get("bitsandbytes"), q)
    (state,) = [n for n in tensors if "quant_state" in n]
    output = json.loads(bytes(tensors[state].tolist())) | {field: value}
    changed = tensors | {state: torch.tensor(list(json.dumps(output).encode()), dtype=torch.uint8)}
    assert matrices("bitsandbytes", tensors, config)
    with pytest.raises(error):
        matrices("bitsandbytes", changed, config)
