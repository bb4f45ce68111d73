"""Plan: the whole of a run, known to the byte before it starts. `planner.make_plan` makes one; `lowq quantize` shows it.

Every source tensor becomes one or more items. An item is a matrix to quantize, or a tensor to keep, with the reason. Items are
written in the order of the source's bytes, so the run reads forwards; each file's header is known before the file is written.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lowq_cli.files.quant_config import compact
from lowq_cli.files.safetensors_io import ITEMSIZE, TensorHeader
from lowq_cli.files.source import Cut, Source
from lowq_cli.files.storage import fp8_config
from lowq_cli.plan.recipe import Recipe
from lowq_packers.layouts import DISK
from lowq_packers.scheme import Scheme

KINDS = ("attention", "mlp", "expert", "head", "embedding", "router", "norm", "vision", "projector", "audio", "other")


@dataclass(frozen=True)
class Item:
    """One quantized matrix, or one kept tensor (scheme None).

    name: checkpoint name, without ".weight" if quantized. shape: (N, K), or that of the tensor. note: why it is kept, or how it
    differs from the recipe. outputs: the tensors to write (words, scales, zeros in this order), in `layout`. nbytes: their sum.
    """

    name: str
    source: str
    kind: str
    shape: tuple[int, ...]
    source_dtype: str
    scheme: Scheme | None
    method: str | None
    note: str
    cut: Cut
    outputs: tuple[tuple[str, TensorHeader], ...]
    layout: str = DISK

    @property
    def spelled(self) -> str | None:
        """The scheme in words; None for a kept tensor."""
        return str(self.scheme) if self.scheme else None

    @cached_property
    def params(self) -> int:
        """Number of weights."""
        return TensorHeader(self.shape, "U8").numel

    @cached_property
    def nbytes(self) -> int:
        """Bytes to write for this item."""
        return sum(h.nbytes for _, h in self.outputs)

    @property
    def kept_name(self) -> str:
        """The name as `quant_config` lists it, without ".weight"."""
        return self.name.removesuffix(".weight")


@dataclass(frozen=True)
class Shard:
    """One output file: its header bytes, the place of each tensor, and its items."""

    name: str
    header: bytes
    placed: Mapping[str, TensorHeader]
    size: int
    items: tuple[Item, ...]


@dataclass(frozen=True)
class ClassRow:
    """One line of the plan's table: a class of weights. bits: stored bits per weight of the class, scales included."""

    kind: str
    tensors: int
    params: int
    quantized_params: int
    source_bytes: int
    nbytes: int
    schemes: tuple[str, ...]

    @property
    def bits(self) -> float:
        """Bits stored per weight."""
        return 8 * self.nbytes / max(self.params, 1)


@dataclass(frozen=True)
class Plan:
    """The whole of a run, known in advance."""

    source: str
    recipe: Recipe
    items: tuple[Item, ...]
    shards: tuple[Shard, ...]
    source_bytes: int
    untie: bool  # whether the output gets a separate head although the source's head is its embedding
    notes: tuple[str, ...]  # fallbacks and policies to show to the user, a line each
    warnings: tuple[str, ...]

    @cached_property
    def params(self) -> int:
        """Number of weights to write; more than in the source only if a tied head is written separately."""
        return sum(i.params for i in self.items)

    @cached_property
    def quantized_params(self) -> int:
        """Number of quantized weights."""
        return sum(i.params for i in self.items if i.scheme)

    @property
    def coverage(self) -> float:
        """Quantized share of the weights, 0 .. 1."""
        return self.quantized_params / max(self.params, 1)

    @property
    def nbytes(self) -> int:
        """Bytes of the output's weight files."""
        return sum(s.size for s in self.shards)

    @property
    def bpw(self) -> float:
        """Bits per weight over the whole model, kept tensors included."""
        return 8 * sum(i.nbytes for i in self.items) / max(self.params, 1)

    @property
    def quantized_bpw(self) -> float:
        """Bits per weight over the quantized weights, scales and zeros included."""
        return 8 * sum(i.nbytes for i in self.items if i.scheme) / max(self.quantized_params, 1)

    @cached_property
    def classes(self) -> tuple[ClassRow, ...]:
        """One row per class of weights that the model has, in the order of KINDS."""
        rows = []
        for kind in KINDS:
            some = [i for i in self.items if i.kind == kind]
            if some:
                schemes = Counter(i.spelled or "kept" for i in some)
                quantized = sum(i.params for i in some if i.scheme)
                source_bytes = sum(i.params * ITEMSIZE[i.source_dtype] for i in some)
                params, nbytes = sum(i.params for i in some), sum(i.nbytes for i in some)
                spelled = tuple(s for s, _ in schemes.most_common())
                rows.append(ClassRow(kind, len(some), params, quantized, source_bytes, nbytes, spelled))
        return tuple(rows)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything that determines the bytes to write, except the weights themselves."""
        facts = [[i.name, i.source, str(i.spelled), i.method, asdict(i.cut)] for i in self.items]
        h = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
        h.update(b"" if self.recipe.act == "none" else self.recipe.act.encode())
        for shard in self.shards:
            h.update(shard.name.encode() + shard.header)
        return h.hexdigest()[:16]

    def quantization_config(self) -> dict[str, Any]:
        """The `quantization_config` of the output's config.json."""
        recipe, schemes = self.recipe, {i.name: i.scheme for i in self.items if i.scheme}
        if recipe.in_blocks:
            dense = {i.kept_name for i in self.items if not i.scheme and i.name.endswith(".weight") and len(i.shape) == 2}
            return fp8_config(recipe.in_blocks.block, recipe.act, {"lm_head", *dense} - schemes.keys())
        layouts = {i.name: i.layout for i in self.items if i.scheme}
        config = compact(schemes, [i.kept_name for i in self.items if not i.scheme], layouts)
        return config if recipe.act == "none" else config | {"activations": recipe.act}

    def to_json(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        return {
            "source": self.source,
            "recipe": self.recipe.to_json(),
            "params": self.params,
            "quantized_fraction": self.coverage,
            "source_bytes": self.source_bytes,
            "bytes": self.nbytes,
            "bpw": self.bpw,
            "quantized_bpw": self.quantized_bpw,
            "classes": [{**asdict(c), "bits": c.bits} for c in self.classes],
            "files": [{"name": s.name, "bytes": s.size} for s in self.shards],
            "notes": list(self.notes),
            "warnings": list(self.warnings),
            "tensors": [
                {"name": i.name, "kind": i.kind, "shape": list(i.shape), "scheme": i.spelled, "note": i.note,
                 "bytes": i.nbytes} for i in self.items
            ],
        }  # fmt: skip


def index_json(plan: Plan) -> dict[str, Any] | None:
    """The content of model.safetensors.index.json; None for a single file."""
    if len(plan.shards) == 1:
        return None
    total = sum(i.nbytes for i in plan.items)
    return {"metadata": {"total_size": total}, "weight_map": {name: s.name for s in plan.shards for name in sorted(s.placed)}}


def output_config(source: Source, plan: Plan) -> dict[str, Any]:
    """The config.json to write: the source's, plus quantization_config, with the fields that the plan changes."""
    config = json.loads(json.dumps(source.config))
    if plan.recipe.dtype != "source":
        config.pop("torch_dtype", None)
        config["dtype"] = plan.recipe.dtype
    if plan.untie:
        config["tie_word_embeddings"] = False
        if "tie_word_embeddings" in (config.get("text_config") or {}):
            config["text_config"]["tie_word_embeddings"] = False
    config["quantization_config"] = plan.quantization_config()
    return config


def common_group(plan: Plan, recipe: Recipe) -> int | None:
    """The group size of most weights of the recipe's width; it differs from the recipe's if that does not divide their K."""
    sizes = Counter[int]()
    for i in plan.items:
        if i.scheme and i.scheme.bits == recipe.bits:
            sizes[i.scheme.group_size] += i.params
    return None if not sizes or recipe.group_for(recipe.bits) == "channel" else sizes.most_common(1)[0][0]


def default_out(source: Source | str, recipe: Recipe, group: int | None = None) -> Path:
    """The default output folder of a run: ./MODEL-lowq-4b-g64, plus a suffix for each setting that differs from its default.

    group: the group size from `common_group`, which replaces the recipe's.
    """
    name = source if isinstance(source, str) else source.name
    stem = Path(os.path.abspath(name)).name if os.path.isdir(name) else name.rstrip("/").rpartition("/")[2]
    if recipe.in_blocks:
        return Path(f"{stem}-fp8-{recipe.block}")
    if recipe.bpw is not None:
        width = f"{recipe.bpw:g}bpw"
    elif recipe.size is not None:
        width = f"{recipe.size / 1e9:.3g}GB"
    elif recipe.bounded:
        width = f"kl{recipe.max_kl:g}" if recipe.max_kl else f"ppl{recipe.max_ppl:g}"
    else:
        size: int | str = group or recipe.group_for(recipe.bits)
        width = f"{recipe.bits}b-{'channel' if size == 'channel' else f'g{size}'}"
        if recipe.table:
            width = recipe.format if size == recipe.table.group else f"{recipe.format}-g{size}"
    return Path("-".join((stem, "lowq", width, *_unusual(recipe))))


def _unusual(recipe: Recipe) -> list[str]:
    """The folder-name parts that distinguish recipes of one width; other non-default settings become a short hash."""
    r = recipe
    parts = [] if r.method == "auto" else [r.method]
    parts += {"float": [], "none": ["sym"]}.get(r.zero, [r.zero])
    parts += [] if r.lm_head == "auto" else [f"head{16 if r.lm_head == 'keep' else r.lm_head}"]
    if r.embedding != "auto" and r.embedding != replace(r, embedding="auto").tied:
        parts += [f"emb{16 if r.embedding == 'keep' else r.embedding}"]
    parts += [] if r.vision == "keep" else [f"vis{r.vision}"]
    parts += [] if r.act == "none" else [r.act]
    parts += ["rot"] * r.rotate
    usual = Recipe()
    names = ["overrides", "skip", "dtype", "layout", "calib", "calib_tokens", "calib_seed"]
    names += ["widths", "group", "fit", "tokens_per_s", "judge"] if r.budgeted else []
    rest = {n: str(getattr(r, n)) for n in names if getattr(r, n) != getattr(usual, n)}
    return parts + [hashlib.sha256(json.dumps(rest).encode()).hexdigest()[:4]] * bool(rest)
