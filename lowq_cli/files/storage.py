"""How the matrices of a checkpoint are stored, for both kinds of `quantization_config` whose tensors kernels read as they are:
lowq's own (`quant_config`) and fp8, e4m3 weights with a float32 scale for each block, as DeepSeek publishes them.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from lowq_cli.files.packed_tensors import OF_BLOCKS, WEIGHT
from lowq_cli.files.quant_config import METHOD, Stored, expand_stored
from lowq_cli.files.safetensors_io import E4M3, TensorHeader
from lowq_packers import scheme
from lowq_packers.errors import UnsupportedError
from lowq_packers.scheme import ACT_KEY, BLOCKS, Act, Block, Scheme

FP8 = "fp8"  # the format of recipes, and the quant_method, of weights with a scale for each block
Headers = Mapping[str, TensorHeader]


class Storage(NamedTuple):
    """The format of each matrix that is not stored as floats, by name without ".weight", and how layers round activations."""

    matrices: Mapping[str, Stored]
    act: Act = "none"


def method(config: Mapping[str, Any]) -> str | None:
    """The quant_method of a config.json whose tensors kernels read as they are, METHOD or FP8; None for others."""
    q = config.get("quantization_config")
    named = q.get("quant_method") if isinstance(q, Mapping) else None
    return named if named in (METHOD, FP8) else None


def method_of_others(name: str, q: object) -> object:
    """How another tool's `quantization_config` says that the model `name` is quantized.

    Raises UnsupportedError for one that does not say it.
    """
    if isinstance(q, str):
        return q
    named = isinstance(q, Mapping) and (q.get("quant_method") or q.get("quant_type"))
    if not named:
        raise UnsupportedError(
            f"the quantization_config in config.json of {name} names no quant_method; remove that entry if the weights are "
            "plain floats, or give the model that this one was made from"
        )
    return named


def storage(q: Mapping[str, Any] | None, headers: Headers) -> Storage:
    """What a `quantization_config` (None: of a model in floats) says about the tensors with these headers.

    Raises the errors of `expand_stored`, UnsupportedError for fp8 tensors that kernels cannot use as they are.
    """
    if q is None:
        return Storage({})
    if q.get("quant_method") != FP8:
        stems = {n.removesuffix(WEIGHT) for n in headers if n.endswith(WEIGHT)}
        return Storage(expand_stored(q, stems), q.get("activations", "none"))
    if list(q.get("weight_block_size") or ()) not in [list(b) for b in BLOCKS.values()]:
        raise UnsupportedError(f"blocks of {q.get('weight_block_size')}")
    if q.get("activation_scheme", "dynamic") != "dynamic" or q.get(ACT_KEY, FP8) not in ("fp8", "none"):
        raise UnsupportedError("activations with scales of their own")
    scales = in_blocks(headers)
    for name, header in headers.items():
        if header.dtype.startswith("F8") and (name not in scales or headers[scales[name]].dtype != "F32"):
            raise UnsupportedError(f"{name} has no {OF_BLOCKS[1:]} in float32")
    rows, columns = q["weight_block_size"]
    how = Stored(Scheme.in_blocks((rows, columns)), scheme.E4M3)
    return Storage({n.removesuffix(WEIGHT): how for n in scales}, q.get(ACT_KEY, FP8))


def as_lowq(q: Mapping[str, Any]) -> dict[str, Any]:
    """A `quantization_config` by which transformers calls lowq's quantizer, which replaces every linear layer of an fp8 model.

    transformers reads fp8 itself, too; lowq also takes partial blocks and blocks of 256, and its kernels any number of rows.
    """
    return {"quant_method": METHOD, FP8: q, "activations": q.get(ACT_KEY, FP8)}


def in_blocks(headers: Headers) -> dict[str, str]:
    """Map the name of each e4m3 weight to the name of its scales."""
    pairs = {n: n.removesuffix(WEIGHT) + OF_BLOCKS for n in headers if n.endswith(WEIGHT) and headers[n].dtype == E4M3}
    return {n: s for n, s in pairs.items() if s in headers and len(headers[n].shape) == 2}


def fp8_config(block: Block, act: Act, dense: Iterable[str]) -> dict[str, Any]:
    """The `quantization_config` of fp8 weights, as transformers and vLLM read it. dense: names of matrices kept as floats."""
    section: dict[str, Any] = {
        "quant_method": FP8,
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block),
        "modules_to_not_convert": sorted(dense),
    }
    return section if act == "fp8" else section | {ACT_KEY: act}
