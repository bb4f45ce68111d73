"""A model turned in its own space: the same function, with weights that no coordinate dominates. Done before quantizing.

The residual stream h of a pre-norm model may be replaced by h R for an orthogonal R: an RMSNorm without weights commutes with
R, so what reads the stream becomes W diag(norm) R and what writes it R^T W. Likewise the values of each head: rows of v by
Q^T, columns of o by Q. The result is an ordinary checkpoint of the same family whose norm weights are 1 and whose embedding
and head are two matrices. Source: QuaRot (arXiv:2404.00456) and SpinQuant (arXiv:2405.16406), without what runs online.
"""

import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from lowq_cli.calibrate.orthogonal import Rotation
from lowq_cli.files.safetensors_io import ITEMSIZE, TORCH_NAMES
from lowq_cli.files.source import Source
from lowq_cli.hf.skeleton import Skeleton, build
from lowq_cli.hf.structure import roles
from lowq_cli.plan.planner import refuse_quantized
from lowq_packers.errors import UnsupportedError
from lowq_packers.families import families

# Pre-norm, RMSNorm times its weight, nothing else on the stream: checked against transformers' code and by tests/cli.
EXACT = tuple(name for name, family in families().items() if not family.not_rotated)
WHY_NOT = {name: family.not_rotated for name, family in families().items()} | {
    "gemma": "its embedding is scaled and its norms multiply by 1 + weight",
    "gemma2": "it has norms behind attention and MLP, whose weights do not commute with a rotation",
    "gemma3": "it has norms behind attention and MLP, whose weights do not commute with a rotation",
    "gpt2": "its LayerNorm subtracts the mean, which does not commute with a rotation",
}
SEED = 0
EMBEDDING, HEAD, LAST_NORM = "embed_tokens.weight", "lm_head.weight", "norm.weight"
READS = {  # inside a layer: what reads the stream -> the norm before it
    r"self_attn\.(q_proj|k_proj|v_proj|qkv_proj)\.weight": "input_layernorm.weight",
    r"mlp\.(gate_proj|up_proj|gate_up_proj|gate|experts\.gate_up_proj)(\.weight)?": "post_attention_layernorm.weight",
}
WRITES = r"(self_attn\.o_proj|mlp\.down_proj|mlp\.experts\.down_proj)(\.weight|\.bias)?"
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
VALUE_BIAS = r"self_attn\.(v_proj|qkv_proj)\.bias"
UNTOUCHED = r"self_attn\.[qk]_proj\.bias|self_attn\.[qk]_norm\.weight|mlp\.(gate|up|gate_up)_proj\.bias"
LAYER = re.compile(r"(.*layers\.\d+\.)(.*)")


@dataclass(frozen=True)
class Change:
    """What happens to one tensor, in this order. norm: the tensor whose values its columns are multiplied by.

    columns, rows: which of its sides is the residual stream. heads: "values" turns rows of v (the last `value_rows` of a
    fused tensor), "mixed" columns of o. ones: the tensor is a norm's weight, and becomes 1.
    """

    origin: str
    norm: str | None = None
    columns: bool = False
    rows: bool = False
    heads: str = ""
    ones: bool = False

    @property
    def by_rows(self) -> bool:
        """Whether a row of the result needs no other row of the source."""
        return not self.rows and self.heads != "values"


@dataclass
class RotatedSource(Source):
    """`raw` rotated. Changed tensors are read in fp32 (raw bytes in their own dtype); one that mixes rows is made whole."""

    raw: Source = field(kw_only=True)
    changes: dict[str, Change] = field(kw_only=True)
    stream: Rotation = field(kw_only=True)
    head: Rotation = field(kw_only=True)
    value_rows: int = field(kw_only=True)
    _last: tuple[str, torch.Tensor] | None = field(default=None, repr=False)

    @cached_property
    def identity(self) -> str:  # type: ignore[override]
        """The source's, and that it is rotated, by which seed."""
        return f"{self.raw.identity} rotated {SEED}"

    @property
    def held_bytes(self) -> int:
        """What the source holds; what is turned is counted by `budget`."""
        return self.raw.held_bytes

    def read(self, name: str, first: int = 0, count: int | None = None) -> torch.Tensor:
        """As `Source.read`, in fp32 where the tensor changed."""
        change = self.changes.get(name)
        header = self.headers[name]
        count = header.numel - first if count is None else count
        if change is None:
            return self.raw.read(name, first, count)
        if change.ones:
            return torch.ones(count)
        if change.by_rows and len(header.shape) > 1:
            K = header.shape[-1]
            top, end = first // K, -(-(first + count) // K)
            part = self.raw.read(change.origin, top * K, (end - top) * K).reshape(-1, K)
            return self._turn(part, change).flatten()[first - top * K :][:count]
        if self._last is None or self._last[0] != name:
            self._last = None  # before the next is made: two large ones are never held
            self._last = name, self._turn(self.raw.read(change.origin).reshape(header.shape), change).flatten()
        return self._last[1][first : first + count].clone()

    def _turn(self, W: torch.Tensor, change: Change) -> torch.Tensor:
        """The new values of a tensor, or of some rows of one that is changed row by row."""
        W = W.float()
        if change.norm:
            W = W * self.raw.read(change.norm).float()
        if change.columns:
            W = self.stream.apply(W)
        if change.rows:
            W = self.stream.apply(W) if W.dim() == 1 else self.stream.apply(W.mT).mT
        if change.heads == "mixed":
            W = self.head.apply(W.reshape(*W.shape[:-1], -1, self.head.n)).reshape(W.shape)
        if change.heads == "values":
            keep, values = W[: W.shape[0] - self.value_rows], W[W.shape[0] - self.value_rows :]
            by_head = values.reshape(-1, self.head.n, values[0].numel())
            W = torch.cat([keep, self.head.apply(by_head.mT).mT.reshape(values.shape)])
        return W.contiguous()

    def read_raw(self, name: str, first: int, nbytes: int) -> bytearray:
        """As `Source.read_raw`: the new values, rounded to the tensor's dtype."""
        if name not in self.changes:
            return self.raw.read_raw(name, first, nbytes)
        dtype = self.headers[name].dtype
        size = ITEMSIZE[dtype]
        values = self.read(name, first // size, nbytes // size).to(getattr(torch, TORCH_NAMES[dtype]))
        return bytearray(values.view(torch.uint8).numpy().tobytes())

    def close(self) -> None:
        """Close the files."""
        self._last = None
        self.raw.close()


def rotated(raw: Source) -> RotatedSource:
    """A source of the rotated model.

    Raises UnsupportedError for a family for which that is not exact, with the reason; else as planning does.
    """
    refuse_quantized(raw)
    family = str(raw.config.get("model_type"))
    if family not in EXACT:
        why = WHY_NOT.get(family, f"it is exact, and checked, for {', '.join(EXACT)}")
        raise UnsupportedError(f"--rotate does not take model_type {family!r}: {why}; leave it out")
    roles(raw.config, raw.headers)  # what is missing or of the wrong shape is named here
    skeleton = Skeleton(build(raw.config))
    attention = next(m for n, m in skeleton.model.named_modules() if n.endswith("layers.0.self_attn"))
    config: Any = skeleton.model.config
    at = {place.param: name for name in raw.headers if (place := skeleton.place(name))}
    changes = {name: c for param, name in _places(raw, skeleton) if (c := _change(param, name, at))}
    headers, where, notes = dict(raw.headers), dict(raw.where), []
    told = {k: v for k, v in raw.config.items() if k != "tie_word_embeddings"} | {"tie_word_embeddings": False}
    if HEAD in skeleton.tied:
        table = next(n for n, c in changes.items() if c.columns and not c.norm)
        stored = at.get(HEAD, HEAD)
        headers[stored] = replace(headers[table])
        where.setdefault(stored, where[table])
        changes[stored] = Change(table, norm=_named(at, LAST_NORM), columns=True)
        notes.append(
            f"--rotate makes the output head a matrix of its own: {headers[table].numel / 1e6:,.1f} M parameters more to store"
        )
    head_dim = int(attention.head_dim)  # type: ignore[arg-type]
    return RotatedSource(
        raw.name, raw.folder, told, headers, raw.files, where,
        raw=raw, changes=changes, stream=Rotation(config.hidden_size, SEED), head=Rotation(head_dim, SEED + 1),
        value_rows=head_dim * config.num_key_value_heads, notes=tuple(notes),
    )  # fmt: skip


def _places(raw: Source, skeleton: Skeleton) -> list[tuple[str, str]]:
    """(parameter, checkpoint name) of every tensor that the model knows."""
    return [(place.param, name) for name in raw.headers if (place := skeleton.place(name))]


def _named(at: dict[str, str], leaf: str) -> str:
    """The checkpoint name of the model's only tensor outside of the layers that ends so."""
    return next(name for param, name in at.items() if param.endswith(leaf) and not LAYER.match(param))


def _change(param: str, name: str, at: dict[str, str]) -> Change | None:
    """What a rotation does to one tensor. Raises UnsupportedError for one of unknown purpose."""
    inside = LAYER.fullmatch(param)
    if not inside:
        if param.endswith(EMBEDDING):
            return Change(name, columns=True)
        if param.endswith(HEAD):
            return Change(name, norm=_named(at, LAST_NORM), columns=True)
        if param.endswith(LAST_NORM):
            return Change(name, ones=True)
        raise UnsupportedError(f"--rotate does not know what {name} does; leave it out")
    layer, leaf = inside.groups()
    if leaf in NORMS:
        return Change(name, ones=True)
    if re.fullmatch(UNTOUCHED, leaf):
        return None
    for pattern, norm in READS.items():
        if re.fullmatch(pattern, leaf):
            heads = "values" if leaf in ("self_attn.v_proj.weight", "self_attn.qkv_proj.weight") else ""
            return Change(name, norm=at[layer + norm], columns=True, heads=heads)
    if re.fullmatch(VALUE_BIAS, leaf):
        return Change(name, heads="values")
    if re.fullmatch(WRITES, leaf):
        return Change(name, rows=True, heads="mixed" if leaf == "self_attn.o_proj.weight" else "")
    raise UnsupportedError(f"--rotate does not know what {name} does; leave it out")
