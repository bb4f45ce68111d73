"""Rotation of a model's residual stream before quantizing: the same function, with weights that have no outlier coordinates.

The residual stream h of a pre-norm model may be replaced by h R for an orthogonal R: an RMSNorm without weights commutes with
R. A matrix that reads the stream becomes W diag(norm) R, one that writes it becomes R^T W. The values of each head are rotated
likewise: rows of v by Q^T, columns of o by Q. The result is an ordinary checkpoint of the same family whose norm weights are 1
and whose embedding and head are two matrices. Source: QuaRot (arXiv:2404.00456) and SpinQuant (arXiv:2405.16406), without
their online rotations.
"""

from dataclasses import dataclass, field, replace
from functools import cache, cached_property

import torch

from lowq_cli.calibrate.orthogonal import Rotation
from lowq_cli.calibrate.residual_stream import Turn, turns, why_not
from lowq_cli.files.family_tensors import Named
from lowq_cli.files.safetensors_io import ITEMSIZE, TORCH_NAMES
from lowq_cli.files.source import Source
from lowq_cli.hf.skeleton import Skeleton, build
from lowq_cli.hf.structure import roles
from lowq_cli.plan.candidates import refuse_quantized
from lowq_packers.arch import families
from lowq_packers.arch.common import NotDescribed
from lowq_packers.arch.names import tensors
from lowq_packers.arch.parts import Model
from lowq_packers.errors import UnsupportedError

SEED = 0


@dataclass(frozen=True)
class Change:
    """The change of one tensor of the files: the `Turn` of its parameter. norm: the tensor name of the turn's norm."""

    origin: str
    turn: Turn
    norm: str = ""


@dataclass
class RotatedSource(Source):
    """`raw`, rotated. Changed tensors are read in fp32 (raw bytes: in their dtype), whole where the change mixes rows."""

    raw: Source = field(kw_only=True)
    changes: dict[str, Change] = field(kw_only=True)
    stream: Rotation = field(kw_only=True)
    _last: tuple[str, torch.Tensor] | None = field(default=None, repr=False)

    @cached_property
    def identity(self) -> str:  # type: ignore[override]
        """The identity of `raw`, with the fact that it is rotated and the seed."""
        return f"{self.raw.identity} rotated {SEED}"

    @property
    def held_bytes(self) -> int:
        """The bytes that `raw` holds; the memory for rotated tensors is counted by `budget`."""
        return self.raw.held_bytes

    def read(self, name: str, first: int = 0, count: int | None = None) -> torch.Tensor:
        """The values as `Source.read` gives them, in fp32 where the tensor is changed."""
        change = self.changes.get(name)
        header = self.headers[name]
        count = header.numel - first if count is None else count
        if change is None:
            return self.raw.read(name, first, count)
        if change.turn.becomes is not None:
            return torch.full((count,), change.turn.becomes)
        if change.turn.by_rows and len(header.shape) > 1:
            K = header.shape[-1]
            top, end = first // K, -(-(first + count) // K)
            part = self.raw.read(change.origin, top * K, (end - top) * K).reshape(-1, K)
            return self._turn(part, change).flatten()[first - top * K :][:count]
        if self._last is None or self._last[0] != name:
            self._last = None  # dropped before the next is made, so that two large tensors are never held
            self._last = name, self._turn(self.raw.read(change.origin).reshape(header.shape), change).flatten()
        return self._last[1][first : first + count].clone()

    def _turn(self, W: torch.Tensor, change: Change) -> torch.Tensor:
        """The rotated values of a tensor, or of some rows of a tensor that changes row by row."""
        turn, W = change.turn, W.float()
        transposed = turn.transposed and W.dim() == 3  # files that hold experts one by one are not transposed
        W = W.mT if transposed else W
        if turn.norm:
            W = W * (self.raw.read(change.norm).float() + turn.norm.add_one)
        if turn.columns:
            W = self.stream.apply(W)
        if turn.rows:
            W = self.stream.apply(W) if W.dim() == 1 else self.stream.apply(W.mT).mT
        if turn.mixed:
            W = _of_heads(turn.mixed).apply(W.reshape(*W.shape[:-1], -1, turn.mixed)).reshape(W.shape)
        if turn.values:
            count, size = turn.values
            keep, values = W[: W.shape[0] - count], W[W.shape[0] - count :]
            by_head = values.reshape(-1, size, values[0].numel())
            W = torch.cat([keep, _of_heads(size).apply(by_head.mT).mT.reshape(values.shape)])
        return (W.mT if transposed else W).contiguous()

    def read_raw(self, name: str, first: int, nbytes: int) -> bytearray:
        """The bytes of the rotated values, rounded to the tensor's dtype."""
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


@cache
def _of_heads(size: int) -> Rotation:
    return Rotation(size, SEED + 1)


def rotated(raw: Source) -> RotatedSource:
    """The source of the rotated model.

    Raises UnsupportedError, with the reason, for a model that a rotation would change, and the errors of planning.
    """
    refuse_quantized(raw)
    roles(raw.config, raw.headers)  # raises for tensors that are missing or have the wrong shape
    skeleton = Skeleton(build(raw.config))
    model = _described(raw, skeleton)
    places = {name: place.param for name in raw.headers if (place := skeleton.place(name))}
    at = {param: name for name, param in places.items()}
    turn_of = turns(model)
    if odd := places.values() - tensors(model, "modules").keys() - {f"{model.head}.weight"}:
        raise _refusal(raw, f"lowq does not know what {at[min(odd)]} does")
    changes = {
        name: Change(name, turn, at[f"{model.prefix}{turn.norm.name}.weight"] if turn.norm else "")
        for name, param in places.items()
        if (turn := turn_of.get(param))
    }
    headers, where, notes = dict(raw.headers), dict(raw.where), []
    config = {k: v for k, v in raw.config.items() if k != "tie_word_embeddings"} | {"tie_word_embeddings": False}
    head = f"{model.head}.weight"
    if head in skeleton.tied:
        table, stored = at[f"{model.prefix}{model.embed}.weight"], at.get(head, head)
        headers[stored] = replace(headers[table])
        where.setdefault(stored, where[table])
        norm = at[f"{model.prefix}{model.norm.name}.weight"] if model.norm.name else ""
        changes[stored] = Change(table, turn_of[head], norm)
        notes.append(
            f"--rotate makes the output head a matrix of its own: {headers[table].numel / 1e6:,.1f} M parameters more to store"
        )
    return RotatedSource(
        raw.name, raw.folder, config, headers, raw.files, where,
        raw=raw, changes=changes, stream=Rotation(model.hidden, SEED), notes=tuple(notes),
    )  # fmt: skip


def _described(raw: Source, skeleton: Skeleton) -> Model:
    """The description of a model whose function a rotation does not change. Raises UnsupportedError for other models."""
    family = families().get(str(raw.config.get("model_type")))
    if family is None:
        raise _refusal(raw, "it is not one of the families that lowq has a description of (docs/families.md)")
    try:
        model = family.describe(skeleton.model.config)
    except NotDescribed as e:
        raise _refusal(raw, str(e)) from None
    named = Named.of_files(model, raw.headers)
    if further := next((n for n in raw.headers if named.outside_text(n)), None):
        raise _refusal(raw, f"{further} reads or writes the residual stream and would have to be rotated as well")
    if reason := why_not(model):
        raise _refusal(raw, reason)
    return model


def _refusal(raw: Source, reason: str) -> UnsupportedError:
    return UnsupportedError(f"--rotate does not take model_type {str(raw.config.get('model_type'))!r}: {reason}; leave it out")
