"""Every kind of file that compressed-tensors 0.20 writes, by its own compressors and config, decoded as it decodes them."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from library_files import decoded, leaves, refused, there_and_back, write

from emulation import sampled

pytest.importorskip("compressed_tensors", reason="needs the package compressed-tensors (extra test)")
from compressed_tensors.compressors import BaseCompressor, compress_module
from compressed_tensors.compressors.model_compressors import ModelCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme, QuantizationStatus
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.lifecycle.initialize import initialize_module_for_quantization
from compressed_tensors.quantization.utils import calculate_range
from compressed_tensors.utils import get_direct_state_dict

INT, FLOAT = {"type": "int"}, {"type": "float"}
SPANS: dict[str, dict[str, Any]] = {  # what shares a scale
    "tensor": {"strategy": "tensor"},
    "channel": {"strategy": "channel"},
    "g16": {"strategy": "group", "group_size": 16},
    "g32": {"strategy": "group", "group_size": 32},
    "g128": {"strategy": "group", "group_size": 128},
    "block": {"strategy": "block", "block_structure": [16, 32]},
}
SHAPES = [(96, 128), (65, 256), (9, 384)]  # of up to 8 rows the library fails on its own 4-bit zeros, which fill one word
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@dataclass
class Variant:
    """What the library is asked to write. refusal: what lowq says of it, None where it decodes it; kept: in its codes."""

    form: str
    args: dict[str, Any]
    activations: bool = False
    refusal: str | None = None
    kept: bool = True
    shapes: list[tuple[int, int]] = field(default_factory=lambda: SHAPES)


def variants():
    for bits in range(1, 9):
        for span, how in SPANS.items():
            for symmetric in (True, False):
                refusal = "strategy='block' for pack-quantized" if span == "block" else None
                args = {"num_bits": bits, "symmetric": symmetric, **INT, **how}
                yield f"pack{bits}-{span}-{symmetric}", Variant("pack-quantized", args, refusal=refusal)
    for form in ("int-quantized", "naive-quantized"):
        for bits in (4, 8):
            for span, how in SPANS.items():
                for symmetric in (True, False):
                    refusal = "strategy='block' for int-quantized" if span == "block" else None
                    args = {"num_bits": bits, "symmetric": symmetric, **INT, **how}
                    yield f"{form}{bits}-{span}-{symmetric}", Variant(form, args, form == "int-quantized", refusal)
    for form in ("float-quantized", "naive-quantized"):
        for span, how in SPANS.items():
            refusal = "strategy='group' for float-quantized" if span in ("g16", "g32", "g128") else None
            args = {"num_bits": 8, **FLOAT, **how}
            yield f"{form}-fp8-{span}", Variant(form, args, form == "float-quantized", refusal, kept=False)
    nv = {"num_bits": 4, **FLOAT, "strategy": "tensor_group", "group_size": 16}
    mx = {**FLOAT, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    whole = [(96, 128), (9, 384)]
    yield "nvfp4", Variant("nvfp4-pack-quantized", nv, shapes=whole)
    yield "mxfp4", Variant("mxfp4-pack-quantized", {"num_bits": 4, **mx}, shapes=whole)
    for bits, form in ((6, "mxfp6-pack-quantized"), (8, "mxfp8-quantized")):
        yield form, Variant(form, {"num_bits": bits, **mx}, refusal=f"format='{form}'", shapes=whole)
    for order in ("weight", "static"):
        yield f"actorder-{order}", Variant("pack-quantized", {"num_bits": 4, **INT, **SPANS["g32"], "actorder": order})


VARIANTS = dict(variants())


def module(v: Variant, N: int, K: int, dtype: torch.dtype) -> torch.nn.Linear:
    """A linear layer in the state in which the library compresses it: random weights, scales and zeros of all values."""
    args = QuantizationArgs(**v.args)
    inputs = QuantizationArgs(num_bits=8, type=args.type, dynamic=True, strategy="token") if v.activations else None
    layer = torch.nn.Linear(K, N, bias=False, dtype=dtype)
    layer.weight.requires_grad_(False)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=inputs, format=v.form)
    initialize_module_for_quantization(layer, scheme)
    low, high = (int(x) if args.type == "int" else float(x) for x in calculate_range(args, "cpu"))
    if "scale_dtype" in v.args:  # powers of two
        layer.weight_scale.copy_(torch.exp2(torch.randint(-6, 3, layer.weight_scale.shape).float()))
    else:
        layer.weight_scale.copy_(torch.rand_like(layer.weight_scale.float()) * 0.01 + 0.001)
    if args.strategy == "tensor_group":
        layer.weight_scale.copy_(torch.randint(1, 400, layer.weight_scale.shape).float())
        layer.weight_global_scale.copy_(torch.rand(1) * 1000 + 1)
    if hasattr(layer, "weight_zero_point") and not args.symmetric:
        layer.weight_zero_point.copy_(torch.randint(low, high + 1, layer.weight_zero_point.shape))
    layer.weight.copy_(torch.randn(N, K) * 0.01 * (high - low) / 4)
    return layer


def saved(folder: Path, v: Variant, N: int, K: int, dtype: torch.dtype) -> torch.Tensor:
    """A folder that the library wrote, and the matrix as it decodes it."""
    layer = module(v, N, K, dtype)
    compress_module(layer)
    state = {n: t for n, t in get_direct_state_dict(layer).items() if t is not None}
    write(folder, state, {"dtype": str(dtype).removeprefix("torch.")})
    config = QuantizationConfig(config_groups={"group_0": layer.quantization_scheme}, format=v.form, ignore=["lm_head"])
    config.quantization_status = QuantizationStatus.COMPRESSED
    ModelCompressor(config).update_config(str(folder))
    return by_library(folder)


def by_library(folder: Path) -> torch.Tensor:
    """The matrix of a folder as the library decodes it, by what config.json says."""
    q = json.loads((folder / "config.json").read_text())["quantization_config"]
    scheme = next(iter(QuantizationConfig(**q).config_groups.values()))
    tensors, form = leaves(folder), scheme.format or q["format"]
    if form == "nvfp4-pack-quantized":  # its compressor computes in bf16 what its kernels do in fp32
        codes = unpack_fp4_from_uint8(tensors["weight_packed"], *layer_shape(tensors), torch.float32)
        factor = tensors["weight_global_scale"]
        return dequantize(codes, tensors["weight_scale"].float(), args=scheme.weights, global_scale=factor)
    return BaseCompressor.get_value_from_registry(form).decompress(tensors, scheme)["weight"]


def layer_shape(tensors: dict[str, torch.Tensor]) -> tuple[int, int]:
    """(N, K) of packed fp4."""
    N, half = tensors["weight_packed"].shape
    return N, 2 * half


@pytest.mark.parametrize("name", sampled(VARIANTS))
def test_every_variant(name, tmp_path):
    v = VARIANTS[name]
    torch.manual_seed(len(name))
    size, number = v.args.get("group_size") or 1, list(VARIANTS).index(name)
    pairs = [(dtype, shape) for dtype in DTYPES for shape in v.shapes]
    if len(v.shapes) == len(DTYPES):  # each dtype with one shape, with another one in the next variant
        pairs = [(DTYPES[(i + number) % 3], shape) for i, shape in enumerate(v.shapes)]
    for dtype, (N, K) in pairs:
        if K % size:
            continue
        folder = tmp_path / f"{dtype}-{N}-{K}"
        expected = saved(folder, v, N, K, dtype)
        if v.refusal:
            refused(folder, v.refusal)
            continue
        result = decoded(folder)
        assert torch.equal(result.float(), expected.to(result.dtype).float()), (dtype, N, K)
        nv = "nvfp4" in v.form  # whose factors are reciprocals, of which 17% are none
        assert there_and_back(folder, "compressed-tensors", by_library, 1e-6 * nv, nv) == v.kept
