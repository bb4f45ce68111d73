"""Open a GGUF file of the Llama or Qwen families as a model source with Hugging Face's names, row order and config.

Tensors of the types in `formats.gguf.TYPES` are supported; an error names the first other one. A config.json next to the file
is used; without one, the metadata give the config. Counts, strings and tensor spans of the file are checked first.
"""

import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from lowq_cli.files.resolution import check_config
from lowq_cli.files.safetensors_io import FileHeader, TensorHeader, read_bytes, read_json
from lowq_cli.files.shapes import whole
from lowq_cli.files.source import Source
from lowq_cli.interop.gguf_file import ALIGNMENT, ARRAY, BOOL, MAGIC, STRING
from lowq_cli.interop.gguf_names import CLASSES, LAYER, PERMUTED, TOP
from lowq_cli.interop.gguf_tokenizer import STOPS, tokenizer_folder
from lowq_packers import home
from lowq_packers.errors import DamagedError, UnsupportedError
from lowq_packers.formats.gguf import PLAIN, TYPES
from lowq_packers.regular import open_regular

SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
MAX_HEAD = 1 << 28  # max. bytes of metadata and tensor table; a vocabulary of 256k tokens takes 10 MB
MAX_COUNT = 1 << 22
MAX_NAME = 64  # max. characters of a tensor's name; ggml's limit
KNOWN = {t.number: t.name for t in TYPES.values()}
FIELDS = {  # field of config.json -> metadata key, without the architecture's prefix
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}


ARCH_KEYS = (  # an architecture's metadata keys that `_config` reads, or that have one value in all its models
    *(*FIELDS.values(), "attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base"),
    *("rope.scaling.type", "vocab_size", "tensor_data_layout", "attention.causal"),
)


@dataclass(frozen=True)
class Entry:
    """One tensor of a GGUF file: shape (N, K) or (N,), type, and absolute position."""

    shape: tuple[int, ...]
    kind: str
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return prod(self.shape) // TYPES[self.kind].elements * TYPES[self.kind].nbytes


class _Reader:
    """Read values from the start of a file; each is checked against the number of remaining bytes."""

    def __init__(self, raw: bytes, where: str) -> None:
        self.raw, self.where, self.at = raw, where, 0

    def take(self, n: int) -> bytes:
        if n < 0 or self.at + n > len(self.raw):
            raise DamagedError(f"{self.where} ends inside its header: truncated, or not a GGUF file; fetch it again")
        self.at += n
        return self.raw[self.at - n : self.at]

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def count(self, what: str) -> int:
        n = self.number("<Q")
        if n > MAX_COUNT:
            raise DamagedError(f"{self.where} says it has {n} {what}; fetch it again")
        return n

    def string(self) -> str:
        return self.take(self.count("characters")).decode("utf-8", "replace")

    def name(self) -> str:
        found = self.string()
        if len(found) > MAX_NAME or not found.isprintable():
            raise DamagedError(f"{self.where} has a tensor of the name {found[:MAX_NAME]!r}; fetch it again")
        return found

    def value(self, kind: int, nested: bool = False) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY and not nested:
            of, n = self.number("<I"), self.count("values")
            return [self.value(of, True) for _ in range(n)]
        if kind not in SCALARS:
            raise DamagedError(f"{self.where} has metadata of the unknown type {kind}")
        return bool(self.number(SCALARS[kind])) if kind == BOOL else self.number(SCALARS[kind])


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Entry], int]:
    """Metadata, tensors and the CRC-32 of a file's head. Raises NotFoundError, DamagedError, UnsupportedError."""
    fd = open_regular(path)
    try:
        size = os.fstat(fd).st_size
        raw = bytes(read_bytes(fd, 0, min(size, MAX_HEAD), str(path)))
    finally:
        os.close(fd)
    r = _Reader(raw, str(path))
    if r.take(4) != MAGIC:
        raise DamagedError(f"{path} is no GGUF file; fetch it again")
    if (version := r.number("<I")) not in (2, 3):
        raise UnsupportedError(f"{path} is GGUF version {version}; lowq reads 2 and 3")
    tensor_count, pair_count = r.count("tensors"), r.count("metadata values")
    metadata = {}
    for _ in range(pair_count):
        key = r.string()
        if key in metadata:
            raise DamagedError(f"{path} says {key[:MAX_NAME]!r} twice; fetch it again")
        metadata[key] = r.value(r.number("<I"))
    rows = [_row(r) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or alignment < 8 or alignment % 8:
        raise DamagedError(f"{path} has the alignment {alignment!r}")
    start = -(-r.at // alignment) * alignment
    tensors = {name: Entry(shape, kind, start + at) for name, shape, kind, at in rows}
    if len(tensors) != len(rows):
        raise DamagedError(f"{path} has two tensors of one name")
    end = start
    for name, t in sorted(tensors.items(), key=lambda item: item[1].offset):
        if t.offset < end or t.offset + t.nbytes > size:
            raise DamagedError(f"{path}: {name} lies at {t.offset}, over another tensor or beyond the end; fetch it again")
        end = t.offset + t.nbytes
    return metadata, tensors, zlib.crc32(raw[: r.at])


def _row(r: _Reader) -> tuple[str, tuple[int, ...], str, int]:
    name, dims = r.name(), r.number("<I")
    if not 1 <= dims <= 4:
        raise DamagedError(f"{r.where}: {name} has {dims} dimensions")
    shape = tuple(reversed([r.number("<Q") for _ in range(dims)]))
    number, at = r.number("<I"), r.number("<Q")
    if number not in KNOWN:
        raise UnsupportedError(f"{r.where}: {name} has the GGUF type {number}; lowq reads {', '.join(TYPES)}: take such a file")
    kind = TYPES[KNOWN[number]]
    if not all(0 < d < 1 << 40 for d in shape) or shape[-1] % kind.elements or dims == 1 < kind.elements:
        raise DamagedError(f"{r.where}: {name} is {kind.name} of the shape {list(shape)}, which is not rows of whole blocks")
    return name, shape, kind.name, at


def open_gguf(name: str, path: Path, headers_only: bool = False) -> Source:
    """The source of a GGUF file. Its `folder` holds the tokenizer, which is written there unless `headers_only`.

    Raises as `read_gguf`, and UnsupportedError for unknown architectures.
    """
    metadata, tensors, crc = read_gguf(path)
    arch = str(metadata.get("general.architecture"))
    if arch not in CLASSES:
        raise UnsupportedError(f"{path} holds the architecture {arch}; lowq reads {', '.join(sorted(CLASSES))}")
    beside = path.with_name("config.json")
    if beside.is_file():
        check_config(config := read_json(beside), beside)
        _check_beside(config, arch, metadata, path)
    else:
        config = _config(path, arch, metadata, tensors)
    heads = _heads(config, path) if arch in PERMUTED else {}
    headers: dict[str, TensorHeader] = {}
    stored: dict[str, dict[str, Any]] = {}
    for theirs, t in tensors.items():
        ours = _name(theirs)
        if ours is None:
            if theirs != "rope_freqs.weight":
                raise UnsupportedError(f"{path}: {theirs} has no place in a Hugging Face model of this family")
            continue
        own = heads.get(ours.split(".")[-2])
        if own and len(t.shape) != 2:
            raise UnsupportedError(f"{path}: {theirs} is a bias in llama.cpp's order of rows, which lowq does not read")
        if t.kind not in PLAIN or own:
            stored[ours] = {"type": t.kind, "shape": list(t.shape), "heads": own}
            headers[ours] = TensorHeader((t.nbytes,), "U8", t.offset)
        else:
            headers[ours] = TensorHeader(t.shape, t.kind, t.offset)
    files = {path.name: FileHeader(path, headers, path.stat().st_size, crc)}
    cache = home.cache_dir() / "tokenizers" / f"{path.stem}-{crc:08x}"
    folder = path.parent if headers_only else tokenizer_folder(path, metadata, cache)
    return Source(name, folder, config | {"gguf": stored}, headers, files, dict.fromkeys(headers, path.name))


def _heads(config: Mapping[str, Any], path: Path) -> dict[str, int]:
    """The numbers of heads for projections that llama.cpp permutes by head. Keys have as many as queries by default."""
    q = whole(config, "num_attention_heads")
    if not q:
        raise DamagedError(
            f"{path.with_name('config.json')} lacks num_attention_heads, by which rows of {path.name} are ordered"
        )
    return {"q_proj": q, "k_proj": whole(config, "num_key_value_heads") or q}


def _check_beside(config: Mapping[str, Any], arch: str, metadata: Mapping[str, Any], path: Path) -> None:
    """Raise DamagedError if the config.json next to a GGUF file contradicts the file's metadata."""
    said = {field: metadata.get(f"{arch}.{key}") for field, key in FIELDS.items() if field != "max_position_embeddings"}
    rope = config.get("rope_parameters") or {}
    ours = {**config, "rope_theta": config.get("rope_theta", rope.get("rope_theta") if isinstance(rope, Mapping) else None)}
    if said["num_attention_heads"] is not None:
        ours["num_key_value_heads"] = ours.get("num_key_value_heads") or ours.get("num_attention_heads")
    said |= {"rope_theta": metadata.get(f"{arch}.rope.freq_base"), "head_dim": metadata.get(f"{arch}.attention.key_length")}
    for field, theirs in said.items():
        mine = ours.get(field)
        numbers = type(mine) in (int, float) and type(theirs) in (int, float)
        if mine is not None and theirs is not None and not (numbers and abs(mine - theirs) <= 1e-5 * abs(theirs)):
            raise DamagedError(f"config.json beside {path} says {field}={str(mine)[:40]}, the file {str(theirs)[:40]}")


def _name(theirs: str) -> str | None:
    """Hugging Face's name of a tensor; None if it has no such tensor."""
    stem, _, leaf = theirs.rpartition(".")
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[1].isdigit():
        ours = next((hf for hf, gg in LAYER.items() if gg == parts[2]), None)
        return None if ours is None else f"model.layers.{parts[1]}.{ours}.{leaf}"
    ours = next((hf for hf, gg in TOP.items() if gg == stem), None)
    return None if ours is None else f"{ours}.{leaf}"


def _config(path: Path, arch: str, metadata: Mapping[str, Any], tensors: Mapping[str, Entry]) -> dict[str, Any]:
    """Make a config.json from metadata. Raises UnsupportedError if the metadata are not sufficient."""
    if "rope_freqs.weight" in tensors or metadata.get(f"{arch}.rope.scaling.type") not in (None, "none"):
        raise UnsupportedError(f"{path} scales its rotary frequencies; put the model's config.json beside it")
    for key, value in metadata.items():
        if key.startswith(f"{arch}.") and key.removeprefix(f"{arch}.") not in ARCH_KEYS:
            raise UnsupportedError(
                f"{path} has {key}={str(value)[:40]}, which lowq does not know; put the model's config.json beside it"
            )
    found: dict[str, Any] = {field: metadata.get(f"{arch}.{key}") for field, key in FIELDS.items()}
    if missing := [FIELDS[f] for f, v in found.items() if v is None]:
        raise DamagedError(f"{path} lacks the metadata {arch}.{missing[0]}; put the model's config.json beside it")
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise DamagedError(f"{path} lacks token_embd.weight")
    found["head_dim"] = metadata.get(f"{arch}.attention.key_length") or found["hidden_size"] // found["num_attention_heads"]
    usual = {"attention.value_length": found["head_dim"], "rope.dimension_count": found["head_dim"], "attention.causal": True}
    for key, value in usual.items():
        if (said := metadata.get(f"{arch}.{key}", value)) != value:
            raise UnsupportedError(f"{path} has {arch}.{key}={str(said)[:40]}; lowq computes such models with {value} only")
    stops = [i for name in STOPS if (i := metadata.get(f"tokenizer.ggml.{name}_token_id")) is not None]
    tokens = {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    tokens["eos_token_id"] = (stops if len(stops) > 1 else stops[0]) if stops else None
    return (
        found
        | {k: v for k, v in tokens.items() if v is not None}
        | {
            "model_type": arch,
            "architectures": [CLASSES[arch]],
            "vocab_size": embedding.shape[0],
            "tie_word_embeddings": "output.weight" not in tensors,
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
            "rope_theta": metadata.get(f"{arch}.rope.freq_base", 10000.0),
            "hidden_act": "silu",
            "dtype": "float16",
        }
    )
