"""fp8-block checkpoints in files: e4m3 weights with float32 block scales, for one block size and one kind of activations."""

from collections.abc import Mapping
from typing import Any

from lowq_cli.files.packed_tensors import OF_BLOCKS, WEIGHT
from lowq_cli.files.quant_config import Stored
from lowq_cli.files.safetensors_io import E4M3, TensorHeader
from lowq_packers import scheme
from lowq_packers.scheme import ACT_KEY, BLOCKS, Scheme

METHOD = "fp8"


def why_not(config: Mapping[str, Any], headers: Mapping[str, TensorHeader]) -> str | None:
    """The reason why fp8 kernels cannot use the e4m3 weights of a checkpoint directly, for any family; None if they can."""
    q = config.get("quantization_config")
    if not isinstance(q, Mapping) or q.get("quant_method") != METHOD:
        return "not an fp8 checkpoint"
    if list(q.get("weight_block_size") or ()) not in [list(b) for b in BLOCKS.values()]:
        return f"blocks of {q.get('weight_block_size')}"
    if q.get("activation_scheme", "dynamic") != "dynamic" or q.get(ACT_KEY, "fp8") not in ("fp8", "none"):
        return "activations with scales of their own"
    scales = quantized(headers)
    for name, header in headers.items():
        if header.dtype.startswith("F8") and (name not in scales or headers[scales[name]].dtype != "F32"):
            return f"{name} has no {OF_BLOCKS[1:]} in float32"
    return None


def stored(config: Mapping[str, Any], headers: Mapping[str, TensorHeader]) -> dict[str, Stored]:
    """The format of each e4m3 matrix, for a `quantization_config` and tensors that `why_not` accepts."""
    rows, columns = config["weight_block_size"]
    how = Stored(Scheme.in_blocks((rows, columns)), scheme.E4M3)
    return {n.removesuffix(WEIGHT): how for n in quantized(headers)}


def quantized(headers: Mapping[str, TensorHeader]) -> dict[str, str]:
    """Map the name of each e4m3 weight to the name of its scales."""
    pairs = {n: n.removesuffix(WEIGHT) + OF_BLOCKS for n in headers if n.endswith(WEIGHT) and headers[n].dtype == E4M3}
    return {n: s for n, s in pairs.items() if s in headers and len(headers[n].shape) == 2}
