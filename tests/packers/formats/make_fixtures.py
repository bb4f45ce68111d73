"""Files that other tools wrote, tiny, with the weights that those tools read from them: python make_fixtures.py NAME.

Each NAME needs the package that it is called after. A file's metadata says which version wrote it, and the config.json's
quantization section; its tensors are those of a checkpoint, and under "dense." what the tool itself makes of them.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file

FOLDER = Path(__file__).with_name("fixtures")
NAME = "model.layers.0.mlp.up_proj"


def weights(N=24, K=96):
    """Of several magnitudes, and a group of zeros."""
    g = torch.Generator().manual_seed(0)
    W = torch.randn(N, K, generator=g) * torch.logspace(-4, 0, N).unsqueeze(1)
    W[0, :32] = 0
    return W


def compressed_tensors():
    """llm-compressor's way: a global scale of the whole weight, scales of groups, compress."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    W = weights().bfloat16()
    for preset, form in (("NVFP4A16", "nvfp4-pack-quantized"), ("MXFP4A16", "mxfp4-pack-quantized")):
        scheme = preset_name_to_scheme(preset, ["Linear"])
        groups = W.reshape(W.shape[0], -1, scheme.weights.group_size)
        state = {"weight": W}
        factor = None
        if preset == "NVFP4A16":
            factor = state["weight_global_scale"] = generate_gparam(W.min(), W.max()).reshape(1)
        state["weight_scale"], _ = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights, global_scale=factor)
        compressor = BaseCompressor.get_value_from_registry(form)
        stored = compressor.compress(state, scheme)
        dense = compressor.decompress(stored, scheme)["weight"]
        config = QuantizationConfig(config_groups={"group_0": scheme}, format=form, quantization_status="compressed")
        q = json.loads(config.model_dump_json())
        _save(form, {f"{NAME}.{n}": t.detach() for n, t in stored.items()}, dense, q, "compressed-tensors")


def bitsandbytes():
    """Both kinds of codes, with and without double quantization; rows that blocks run over."""
    from bitsandbytes import functional
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute as reference  # its CPU kernel ends blocks with rows

    for kind, double, K in (("nf4", False, 128), ("nf4", True, 128), ("fp4", True, 128), ("nf4", True, 96)):
        W = weights(26, K).bfloat16()  # 26 x 96 is 39 blocks
        stored, state = functional.quantize_4bit(W, blocksize=64, quant_type=kind, compress_statistics=double)
        scales = functional.dequantize_blockwise(state.absmax, state.state2) + state.offset if double else state.absmax
        dense = reference(
            stored.flatten(), scales.float(), functional.get_4bit_type(kind, device="cpu"), 64, state.shape, W.dtype
        )
        if K == 128:
            assert torch.equal(dense, functional.dequantize_4bit(stored, state))
        tensors = {f"{NAME}.weight": stored, **{f"{NAME}.weight.{n}": t for n, t in state.as_dict(packed=True).items()}}
        section = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
        name = f"{kind}-double" if double else kind
        _save(f"bitsandbytes-{name}{'-rows' if K == 96 else ''}", tensors, dense, section, "bitsandbytes")


def _save(name, tensors, dense, section, package):
    metadata = {"written by": f"{package} {version(package)}", "quantization_config": json.dumps(section)}
    tensors = {n: t.contiguous() for n, t in tensors.items()} | {f"dense.{NAME}": dense.contiguous()}
    save_file(tensors, FOLDER / f"{name}.safetensors", metadata)


if __name__ == "__main__":
    globals()[sys.argv[1].replace("-", "_")]()
