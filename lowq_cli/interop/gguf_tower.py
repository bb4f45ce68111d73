"""Read a vision tower from the mmproj file of a GGUF model: the config of the whole model, its processor, its tensors.

The file is mmproj-NAME.gguf in the model's folder, or else the largest *mmproj*.gguf there that fits the model: its projector
belongs to the model's architecture and makes features of the model's hidden size.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowq_cli.files.safetensors_io import DTYPES, TensorHeader, read_bytes, viewed
from lowq_cli.files.source import Source
from lowq_cli.interop.gguf_names import ARCHITECTURES
from lowq_cli.interop.gguf_reader import Entry, read_gguf
from lowq_cli.interop.gguf_towers import FORMS, Facts, Form
from lowq_packers.arch import families
from lowq_packers.atomic import write_whole
from lowq_packers.errors import DamagedError, LowqError, UnsupportedError
from lowq_packers.formats.gguf import PLAIN

if TYPE_CHECKING:
    import torch

CLIP = "clip"  # the architecture of mmproj files
PROCESSOR = "preprocessor_config.json"


@dataclass(frozen=True)
class Joined:
    """A tensor made of tensors of the file, each cut into `runs` equal runs: run i of every part comes before run i + 1.

    1: the parts are concatenated. More: the two frames of a patch kernel are interleaved.
    """

    parts: tuple[Entry, ...]
    runs: int = 1


@dataclass(frozen=True)
class Placed:
    """A tensor of the tower. heads: number of heads if llama.cpp permuted its rows into rotary pairs, else None."""

    shape: tuple[int, ...]
    of: Joined
    heads: int | None = None


@dataclass(frozen=True)
class GgufTower:
    """An mmproj file that fits a model. model_type: of the whole model. facts: the file's metadata under "clip."."""

    path: Path
    crc: int
    model_type: str
    facts: Facts
    tensors: Mapping[str, Entry]

    @property
    def form(self) -> Form:
        """The description of its kind of tower."""
        return FORMS[self.model_type]

    def config(self, text: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
        """The config of the whole model, from that of its text and the metadata of the text's file."""
        vision, more = self.form.fields(self.facts)
        width, patch = self.facts.number("embedding_length"), self.facts.number("patch_size")
        kernel = self.facts.shapes.get("v.patch_embd.weight")
        layers = self.facts.number("block_count")
        if kernel != (width, 3, patch, patch) or layers > len(self.tensors):
            raise DamagedError(f"{self.path}: its tensors contradict the sizes in its metadata; fetch it again")
        tokens = metadata.get("tokenizer.ggml.tokens") or []
        numbers = {name: tokens.index(word) for name, word in self.form.words.items() if word in tokens}
        if missing := [word for name, word in self.form.words.items() if name not in numbers and name.startswith("image")]:
            raise UnsupportedError(f"{self.path} needs the token {missing[0]}, which the model's tokenizer lacks")
        family = families()[self.model_type]
        inside = {k: v for k, v in text.items() if k != "architectures"} | {"model_type": family.text}
        if sections := metadata.get(f"{family.gguf}.rope.dimension_sections"):
            theta = inside.pop("rope_theta")
            inside["rope_parameters"] = {"rope_type": "default", "rope_theta": theta, "mrope_section": list(sections)[:3]}
        else:
            inside["sliding_window"] = None  # transformers' default for Mistral is a window
        return {
            "model_type": self.model_type, "architectures": [self.form.cls], "text_config": inside,
            "vision_config": vision, **{k: text[k] for k in ("tie_word_embeddings", "dtype")}, **numbers, **more,
        }  # fmt: skip

    def processor(self) -> bytes:
        """preprocessor_config.json."""
        facts, least_most = self.facts, self.form.rows
        patch, merge = facts.number("patch_size"), facts.number("spatial_merge_size", 2)
        fields: dict[str, Any] = {"image_processor_type": self.form.processor, "patch_size": patch}
        for name in ("image_mean", "image_std"):
            values = facts.metadata.get(f"vision.{name}")
            if not isinstance(values, list) or len(values) != 3 or not all(type(v) is float for v in values):
                raise DamagedError(f"{self.path} has no clip.vision.{name}; fetch it again")
            fields[name] = [round(v, 8) for v in values]  # the published decimals; fp32 adds digits
        if self.form.projector == "pixtral":
            fields["size"] = {"longest_edge": facts.number("image_size")}
        else:
            area = (patch * merge) ** 2
            edges = (facts.number(f"image_{n}_pixels", rows * area) for n, rows in zip(("min", "max"), least_most, strict=True))
            fields |= {"merge_size": merge, "temporal_patch_size": 2}
            fields["size"] = dict(zip(("shortest_edge", "longest_edge"), edges, strict=True))
        return json.dumps(fields).encode()

    def placed(self) -> Iterator[tuple[str, Placed]]:
        """Every tensor of the tower by its name in the whole model."""
        parts: dict[str, list[Entry | None]] = {}
        for theirs, entry in self.tensors.items():
            if self.form.token and theirs == self.form.token[1]:  # a row of the text's embedding
                continue
            stem, _, leaf = theirs.removesuffix(".1").rpartition(".")
            module = self.form.to_module(stem, self.facts.deep())
            if module is None or leaf not in ("weight", "bias"):
                raise UnsupportedError(f"{self.path}: {theirs} has no place in a tower of {self.model_type}")
            name, i, of = module
            if len(entry.shape) == 4 and self.form.projector != "pixtral":  # one frame of a patch kernel
                i, of = int(theirs.endswith(".1")), 2
            parts.setdefault(f"model.{name}.{leaf}", [None] * of)[i] = entry
        for name, entries in parts.items():
            yield name, self._whole(name, [e for e in entries if e], len(entries))

    def _whole(self, name: str, entries: list[Entry], count: int) -> Placed:
        first = entries[0]
        if len(entries) != count or {(e.kind, e.shape) for e in entries} != {(first.kind, first.shape)}:
            raise DamagedError(f"{self.path}: the parts of {name} are missing or differ; fetch it again")
        heads = self.facts.number("attention.head_count") if name.split(".")[-2].removesuffix("_proj") in ("q", "k") else None
        if len(first.shape) == 4 and count == 2:
            N, C, *sides = first.shape
            return Placed((N, C, 2, *sides), Joined(tuple(entries), N * C))
        return Placed((count * first.shape[0], *first.shape[1:]), Joined(tuple(entries)), heads if self.form.permuted else None)


def find_tower(path: Path, arch: str, metadata: Mapping[str, Any]) -> tuple[GgufTower | None, str]:
    """The vision tower of a model's file and ""; or None and a note if the model should have a tower.

    Raises DamagedError for a file mmproj-NAME.gguf that belongs to another model.
    """
    types = [name for name in FORMS if ARCHITECTURES.get(name) == arch]
    if not types:
        return None, ""
    others = []
    named = path.with_name(f"mmproj-{path.name}")
    candidates = [p for p in path.parent.glob("*mmproj*.gguf") if p != path and p != named and p.is_file()]
    for other in (*([named] if named.is_file() else ()), *sorted(candidates, key=lambda p: (-p.stat().st_size, p.name))):
        tower, why = _open(other, types, metadata.get(f"{arch}.embedding_length"))
        if tower:
            return tower, ""
        if other == named:
            raise DamagedError(f"{other} is the tower of another model: {why}; remove it, or fetch the right one")
        others.append(f"{other.name} is another model's ({why})")
    if arch == "llama":  # most models of this architecture have no tower
        return None, ""
    return None, f"{path.name} is opened without its tower, as text alone: " + (
        others[0] if others else f"there is no mmproj*.gguf in {path.parent}"
    )


def _open(path: Path, types: list[str], width: Any) -> tuple[GgufTower | None, str]:
    """The tower in a file, or None and why it does not fit a model of one of these types and this width."""
    try:
        metadata, tensors, crc = read_gguf(path)
    except LowqError as e:
        return None, str(e)
    facts = {k.removeprefix("clip."): v for k, v in metadata.items() if k.startswith("clip.")}
    projector = facts.get("vision.projector_type", facts.get("projector_type"))
    kind = next((name for name in types if FORMS[name].projector == projector), None)
    if metadata.get("general.architecture") != CLIP or kind is None:
        return None, f"its projector is {str(projector)[:40]}, the model takes {' or '.join(FORMS[n].projector for n in types)}"
    if facts.get("vision.projection_dim") != width:
        return None, f"its features have {str(facts.get('vision.projection_dim'))[:40]} values, the model's {width}"
    shapes = {name: entry.shape for name, entry in tensors.items()}
    return GgufTower(path, crc, kind, Facts(facts, shapes, str(path)), tensors), ""


def with_processor(tower: GgufTower, text: Source, folder: Path) -> Path:
    """Write the companion files of the text's source and the tower's processor into `folder`, and return it."""
    files = {n: raw for n, raw in text.companion_files().items() if "processor_config" not in n}
    for name, raw in (files | {PROCESSOR: tower.processor()}).items():
        write_whole(folder / name, raw)
    return folder


@dataclass
class PairSource(Source):
    """A model in two GGUF files. joined: tensors that are made of several tensors of a file."""

    joined: dict[str, Joined] = field(kw_only=True)

    def read_raw(self, name: str, first: int, nbytes: int) -> bytearray:
        """As `Source.read_raw`."""
        if name not in self.joined:
            return super().read_raw(name, first, nbytes)
        file, of = self.where[name], self.joined[name]
        parts = [memoryview(read_bytes(self._fd(file), p.offset, p.nbytes, file)) for p in of.parts]
        self._check(file)
        step, out = parts[0].nbytes // of.runs, bytearray()
        for i in range(of.runs):
            for part in parts:
                out += part[i * step : (i + 1) * step]
        return out[first : first + nbytes]

    def read(self, name: str, first: int = 0, count: int | None = None) -> "torch.Tensor":
        """As `Source.read`."""
        if name not in self.joined:
            return super().read(name, first, count)
        header = self.headers[name]
        return viewed(self.read_raw(name, 0, header.nbytes), DTYPES[header.dtype], (-1,))[first:][:count].clone()

    def read_into(self, name: str, first: int, view: memoryview) -> None:
        """As `Source.read_into`."""
        if name not in self.joined:
            return super().read_into(name, first, view)
        view[:] = self.read_raw(name, first, view.nbytes)

    def mapped(self, names: Any) -> "torch.Tensor | None":
        """As `Source.mapped`."""
        return None if any(n in self.joined for n in names) else super().mapped(names)


def tower_headers(tower: GgufTower) -> tuple[dict[str, TensorHeader], dict[str, dict[str, Any]], dict[str, Joined]]:
    """(headers of the tower's tensors, entries that the format GGUF decodes: codes and permuted rows, joined tensors)."""
    headers, stored, joined = dict[str, TensorHeader](), dict[str, dict[str, Any]](), dict[str, Joined]()
    for name, placed in tower.placed():
        parts = placed.of.parts
        if parts[0].kind in PLAIN and placed.heads is None:
            headers[name] = TensorHeader(placed.shape, parts[0].kind, parts[0].offset)
        else:
            headers[name] = TensorHeader((sum(p.nbytes for p in parts),), "U8", parts[0].offset)
            stored[name] = {"type": parts[0].kind, "shape": list(placed.shape), "heads": placed.heads}
        if len(parts) > 1:
            joined[name] = placed.of
    return headers, stored, joined
