"""Other tools read what we write, and we what they write; each test skips where its tool is not installed."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from lowq_packers import formats
from lowq_packers.scheme import BITS

sys.path.insert(0, str(Path(__file__).parent))
from format_support import NAME, random_q, read, written


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("zero", ["none", "int"])
def test_compressed_tensors_unpacks_our_words(bits, zero):
    helpers = pytest.importorskip(
        "compressed_tensors.compressors.pack_quantized.helpers", reason="needs compressed-tensors (extra interop)"
    )
    q = random_q(bits, 32, zero, 40, 96)
    tensors, _ = written(formats.get("compressed-tensors"), q)
    half = 1 << (bits - 1)
    codes = helpers.unpack_from_int32(tensors[f"{NAME}.weight_packed"], bits, torch.Size([40, 96]))
    assert torch.equal(codes.int() + half, q.W_q.int())
    if zero == "int":
        z = helpers.unpack_from_int32(tensors[f"{NAME}.weight_zero_point"], bits, torch.Size([40, 3]), packed_dim=0)
        assert torch.equal((z.int() + half).float(), q.zeros.float())


@pytest.mark.parametrize("zero", ["float", "int", "none"])
@pytest.mark.parametrize("group", [32, 128])
def test_humming_takes_our_config_and_expects_our_tensors(zero, group):
    schema = pytest.importorskip("humming.schema", reason="needs humming-kernels and cuda-bindings", exc_type=ImportError)
    for bits in BITS:
        q = random_q(bits, group, zero, 64, 128)
        tensors, config = written(formats.get("humming"), q)
        expected = schema.BaseWeightSchema.from_config(config["quantization_config"]).get_tensors_attrs(64, 128, torch.float16)
        assert {f"{NAME}.{leaf}": (tuple(e["shape"]), e["dtype"]) for leaf, e in expected.items()} == {
            n: (tuple(t.shape), t.dtype) for n, t in tensors.items()
        }


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("zero", ["int", "none"])
def test_gptqmodel_dequantizes_our_tensors(bits, zero):
    """Version 2 with whole-number zeros, version 1 (which it converts first) without."""
    pytest.importorskip("gptqmodel", reason="needs the package gptqmodel", exc_type=ImportError)
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import FORMAT
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    q = random_q(bits, 32, zero, 64, 128)
    tensors, config = written(formats.get("gptq"), q)
    layer = TorchLinear(bits, 32, zero == "none", False, 128, 64, format=FORMAT.GPTQ_V2)
    for name, t in tensors.items():
        getattr(layer, name.rpartition(".")[2]).copy_(t)
    if config["quantization_config"]["checkpoint_format"] == "gptq":
        convert_gptq_v1_to_v2_format_module(layer, bits=bits, pack_dtype=torch.int32)
    layer.post_init()
    assert torch.equal(layer.dequantize_weight().t().float(), q.dequantize())


def test_autoawq_unpacks_our_words():
    package = importlib.util.find_spec("awq")  # not imported: it wants data sets and models
    if package is None:
        pytest.skip("needs the package autoawq")
    path = Path(package.submodule_search_locations[0]) / "utils" / "packing_utils.py"
    spec = importlib.util.spec_from_file_location("packing_utils", path)
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    q = random_q(4, 32, "int", 40, 96)
    t, _ = written(formats.get("awq"), q)
    codes, zeros = theirs.unpack_awq(t[f"{NAME}.qweight"], t[f"{NAME}.qzeros"], 4)
    codes, zeros = theirs.reverse_awq_order(codes, zeros, 4)
    assert torch.equal((codes & 15).t().to(torch.uint8), q.W_q)
    assert torch.equal((zeros & 15).t().float(), q.zeros.float())


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_mlx_dequantizes_our_files_and_we_read_its_files(bits):
    mx = pytest.importorskip("mlx.core", reason="needs mlx (extra interop)")
    q = random_q(bits, 32, "none", 40, 96)
    tensors, _ = written(formats.get("mlx"), q)
    w, s, b = (mx.array(t.view(torch.uint32).numpy() if t.dtype == torch.uint32 else t.numpy()) for t in tensors.values())
    theirs = mx.dequantize(w, s.astype(mx.float32), b.astype(mx.float32), group_size=32, bits=bits)
    assert theirs.tolist() == q.dequantize().tolist()
    w, s, b = mx.quantize(mx.random.normal((40, 96)).astype(mx.float32), group_size=32, bits=bits)
    tensors = dict(
        zip(
            tensors,
            (torch.tensor(w.tolist(), dtype=torch.int64).to(torch.uint32), torch.tensor(s.tolist()), torch.tensor(b.tolist())),
            strict=True,
        )
    )
    (back,) = read(tensors, {"quantization": {"bits": bits, "group_size": 32}}).values()
    expected = torch.tensor(mx.dequantize(w, s, b, group_size=32, bits=bits).tolist())
    assert (back.dequantize() - expected).abs().max() < 1e-6
