"""Checkpoints of other tools behind the interface of a model source: their tensors by name, decoded matrices by row."""

from typing import TYPE_CHECKING

from lowq_cli.source import Source
from lowq_packers.errors import NotFoundError, UnsupportedError

if TYPE_CHECKING:
    import torch

    from lowq_packers.formats import Fetch

DTYPES = {  # safetensors name -> torch name, of everything that a foreign format stores
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "F64": "float64",
}


def fetcher(source: Source) -> "Fetch":
    """A function from a full tensor name to the tensor as stored, in fresh memory. U32 words come as int32."""
    import torch

    def fetch(name: str) -> "torch.Tensor":
        header = source.headers.get(name)
        if header is None:
            raise NotFoundError(f"{source.name} has no tensor {name}")
        if header.dtype not in DTYPES:
            raise UnsupportedError(f"{name} has dtype {header.dtype}, which torch does not have")
        kind = torch.int32 if header.dtype == "U32" else getattr(torch, DTYPES[header.dtype])
        raw = source.read_raw(name, 0, header.nbytes)
        return torch.frombuffer(raw, dtype=kind).reshape(header.shape) if raw else torch.empty(header.shape, dtype=kind)

    return fetch
