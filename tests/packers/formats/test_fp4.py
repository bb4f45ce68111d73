"""NVFP4 and MXFP4 as vendors publish them: files that their tools wrote, their own readers, bytes by hand, what is refused."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from lowq_packers import formats
from lowq_packers.errors import LowqError, SchemeError
from lowq_packers.formats import _fp4
from lowq_packers.qtensor import QuantizedTensor

sys.path.insert(0, str(Path(__file__).parent))
from format_support import NAME, random_q, read, written

FIXTURES = Path(__file__).with_name("fixtures")


def fixture(name):
    """Tensors, config and, by module, what the tool that wrote a file makes of it."""
    with safe_open(FIXTURES / f"{name}.safetensors", "pt") as f:
        tensors = {n: f.get_tensor(n) for n in f.keys()}  # noqa: SIM118 (no mapping)
        section = json.loads(f.metadata()["quantization_config"])
    dense = {n.removeprefix("dense."): tensors.pop(n) for n in list(tensors) if n.startswith("dense.")}
    return tensors, {"quantization_config": section}, dense


@pytest.mark.parametrize("name", ["nvfp4-pack-quantized", "mxfp4-pack-quantized"])
def test_files_of_compressed_tensors_are_read_as_it_reads_them(name):
    tensors, config, dense = fixture(name)
    result = read(tensors, config)
    assert result.keys() == dense.keys()
    for module, q in result.items():
        assert torch.equal(q.dequantize(dense[module].dtype), dense[module])
        again = formats.get("compressed-tensors").write(module, q, config)
        for n, t in again.items():
            if not n.endswith("global_scale"):
                assert torch.equal(t.view(torch.uint8), tensors[n].view(torch.uint8)), n
        (back,) = read(again, config).values()
        assert torch.equal(back.dequantize(), q.dequantize())


@pytest.mark.parametrize("kind", ["e2m1/e4m3", "e2m1/e8m0"])
def test_compressed_tensors_reads_our_tensors(kind):
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors (extra interop)")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    q = random_q(4, 16, kind, 40, 96)
    tensors, config = written(formats.get("compressed-tensors"), q)
    parsed = QuantizationConfig.model_validate(config["quantization_config"])
    (group,) = parsed.config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(config["quantization_config"]["format"])
    theirs = compressor.decompress({n.removeprefix(f"{NAME}."): t for n, t in tensors.items()}, group)["weight"]
    last_bit = 2**-8 if kind == "e2m1/e4m3" else 0  # of bf16: they divide by what we multiply by the reciprocal of
    assert ((theirs.float() - q.dequantize(torch.bfloat16).float()).abs() <= last_bit * q.dequantize().abs()).all()


def test_bytes_by_hand():
    """Codes 1, 15, 2 in the order low half, high half, low half: 0.5, -6, 1; scale byte 0x40 is 2, divided by 4."""
    codes = torch.zeros(1, 8, dtype=torch.uint8)
    codes[0, 0], codes[0, 1] = 0xF1, 0x02
    scale = torch.tensor([[0x40]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    tensors = {
        f"{NAME}.weight_packed": codes,
        f"{NAME}.weight_scale": scale,
        f"{NAME}.weight_global_scale": torch.tensor([4.0]),
    }
    _, config = written(formats.get("compressed-tensors"), random_q(4, 16, "e2m1/e4m3", 1, 16))
    (q,) = read(tensors, config).values()
    assert q.dequantize()[0, :4].tolist() == [0.25, -3, 0.5, 0]
    tensors = {f"{NAME}.weight": codes, f"{NAME}.weight_scale": scale, f"{NAME}.weight_scale_2": torch.tensor(0.25)}
    _, config = written(formats.get("modelopt"), q)
    (again,) = read({**tensors, f"{NAME}.input_scale": torch.tensor(3.0)}, config).values()
    assert torch.equal(again.dequantize(), q.dequantize())
    tensors = {f"{NAME}.weight_packed": codes.repeat(1, 2), f"{NAME}.weight_scale": torch.tensor([[125]], dtype=torch.uint8)}
    _, config = written(formats.get("compressed-tensors"), random_q(4, 32, "e2m1/e8m0", 1, 32))
    (q,) = read(tensors, config).values()
    assert q.dequantize()[0, :4].tolist() == [0.125, -1.5, 0.25, 0]


def test_a_factor_that_is_no_reciprocal_is_refused_or_rounded():
    q = random_q(4, 16, "e2m1/e4m3", 8, 32)
    odd = torch.tensor([[1.9999999]])  # 2 - 2**-23; 1 / 0.5 is 2, and 1 / (0.5 + 2**-24) is 2 - 2**-22
    q = QuantizedTensor.of(q.scheme, q.W_q, q.scales, None, odd)
    fmt = formats.get("compressed-tensors")
    with pytest.raises(SchemeError, match=r"is 1/x of no fp32 x.*--round"):
        written(fmt, q)
    tensors, config = written(fmt, q, round=True)
    (back,) = read(tensors, config).values()
    assert 0 < (back.dequantize() - q.dequantize()).abs().max() <= 2**-23 * q.dequantize().abs().max()
    (back,) = read(*written(formats.get("modelopt"), q)).values()
    assert torch.equal(back.dequantize(), q.dequantize())


@pytest.mark.parametrize("g", [448 * 6 / 0.37, 1.0, 3.0, 1e-20, 1e20])
def test_every_reciprocal_is_stored_as_a_number_that_gives_it_back(g):
    factor = 1 / torch.tensor([[g]])
    assert torch.equal(1 / _fp4.inverse(factor, NAME, False).reshape(1, 1), factor)


BAD = {
    "a negative scale": ("weight_scale", lambda t: (t.view(torch.uint8) | 128).view(t.dtype), "NaN, infinite or negative"),
    "a scale that is NaN": ("weight_scale", lambda t: (t.view(torch.uint8) | 127).view(t.dtype), "NaN, infinite or negative"),
    "scales of other groups": ("weight_scale", lambda t: t[:, :-1].contiguous(), "asks for"),
    "fp32 scales": ("weight_scale", lambda t: t.float(), "dtype|but its tensors are"),
    "a factor of zero": ("factor", lambda t: t * 0, "NaN, infinite or negative"),
    "a negative factor": ("factor", lambda t: -t, "NaN, infinite or negative"),
    "a factor that is NaN": ("factor", lambda t: t * torch.nan, "NaN, infinite or negative"),
    "two factors": ("factor", lambda t: t.reshape(1).repeat(2), "one number"),
    "no factor": ("factor", None, "missing"),
    "words": ("codes", lambda t: t.view(torch.int32), "dtype|I32|words|but its tensors are"),
    "a bent width": ("codes", lambda t: t[:, :-3].contiguous(), "do not divide|asks for"),
    "a rotation": ("weight_rotation", lambda t: torch.zeros(2), "does not know what it does"),
    "a turned input": ("pre_quant_scale", lambda t: torch.zeros(2), "does not know what it does"),
}
LEAVES = {  # what each format calls the codes and the factor
    "compressed-tensors": {"codes": "weight_packed", "factor": "weight_global_scale"},
    "modelopt": {"codes": "weight", "factor": "weight_scale_2"},
}


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("name", LEAVES)
def test_hostile_tensors_are_refused_in_one_line(name, what):
    from test_fields import decoded

    tensors, config = written(formats.get(name), random_q(4, 16, "e2m1/e4m3", 8, 64))
    leaf, bend, output = BAD[what]
    tensor = f"{NAME}.{LEAVES[name].get(leaf, leaf)}"
    bent = {**tensors, tensor: None if bend is None else bend(tensors.get(tensor))}
    with pytest.raises(LowqError, match=output) as e:
        decoded({n: t for n, t in bent.items() if t is not None}, config, (8, 64))
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ({"quant_algo": "NVFP4_AWQ"}, "quant_algo='NVFP4_AWQ'"),
        ({"quant_algo": "MIXED_PRECISION"}, "MIXED_PRECISION"),
        ({"group_size": 32}, "groups of 16"),
        ({"ignore": ["lm_head", "model.layers.3.*"]}, "is not quantized, but it is"),
        ({"exclude_modules": ["*up_proj"]}, "is not quantized, but it is"),
        ({"ignore": "model"}, "not a list of names"),
        ({"quantized_layers": {NAME: {"quant_algo": "FP8"}}}, "might change weights"),
        ({"config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}}}, "num_bits=8, type='float'"),
        ({"config_groups": {"group_0": {"weights": {"num_bits": 4}, "pre_quant_scale": True}}}, "might change weights"),
        ({"config_groups": [1]}, "does not describe weights"),
    ],
    ids=str,
)
def test_a_modelopt_config_of_other_weights_is_refused(edit, said):
    tensors, config = written(formats.get("modelopt"), random_q(4, 16, "e2m1/e4m3", 8, 64))
    edited = {"quantization_config": {**config["quantization_config"], **edit}}
    with pytest.raises(LowqError, match=said):
        read(tensors, edited)
