"""Joins layers that read the same x (q, k, v or gate, up) along N: one launch, and enough rows to fill a GPU.

The joined layers are replaced by views into the joined weight, so that memory is not used twice, and the model that owns them
still works, saves and loads.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from lowq_kernels.fp8.matmul import WIDENED
from lowq_kernels.modules.dense import Dense
from lowq_kernels.modules.linear import QuantLinear
from lowq_packers import tables
from lowq_packers.layouts import DISK, LAYOUTS, PackedWeight, repack, unpack


def join(parent: nn.Module, names: tuple[str, ...]) -> nn.Module:
    """One module that computes the products of `names`, concatenated; those modules become views into it."""
    parts: list[Any] = [getattr(parent, name) for name in names]
    if _are_a_whole(parts):  # already joined by an earlier decoder of this model
        return parts[0].whole
    for i, name in enumerate(names):  # an earlier decoder joined these layers, and one of them was replaced since
        if isinstance(parts[i], JoinedRows):
            parts[i] = parts[i].part().prepare()
            setattr(parent, name, parts[i])
    if all(type(p) is nn.Linear for p in parts) and len({(p.weight.dtype, p.bias is None) for p in parts}) == 1:
        return dense(_shared(parts, "weight"), None if parts[0].bias is None else _shared(parts, "bias"))
    if all(type(p) is QuantLinear for p in parts) and len({_kind(p) for p in parts}) == 1 and _whole_blocks(parts):
        module = _join_packed(parts)
        module.set_act(parts[0].act)
        at = 0
        for name, p in zip(names, parts, strict=True):
            setattr(parent, name, JoinedRows(module, at, at + p.out_features, p.bias is not None))
            at += p.out_features
        return module
    return SideBySide(parts)


def _are_a_whole(parts: list[Any]) -> bool:
    """Whether these are all rows of one joined layer, in their order."""
    whole = vars(parts[0]).get("whole")
    if whole is None or not all(isinstance(p, JoinedRows) and p.whole is whole for p in parts):
        return False
    return [p.begin for p in parts] + [whole.out_features] == [0] + [p.end for p in parts]


def _whole_blocks(parts: list[QuantLinear]) -> bool:
    """Whether no block of rows that share a scale would begin inside a part."""
    return all(p.out_features % p.scheme.block_rows == 0 for p in parts[:-1])


def _shared(parts: Sequence[nn.Module], leaf: str) -> torch.Tensor:
    """The parts' tensors of this name, concatenated; the parts keep views."""
    tensors = [getattr(p, leaf).detach() for p in parts]
    joined = _adjacent(tensors)
    if joined is not None:  # by an earlier decoder of this model
        return joined
    joined = torch.cat(tensors)
    at = 0
    for p in parts:
        rows = getattr(p, leaf).shape[0]
        getattr(p, leaf).data = joined[at : at + rows]  # the same parameter: an optimizer may have it, or a gradient be for it
        at += rows
    return joined


def _adjacent(tensors: list[torch.Tensor]) -> torch.Tensor | None:
    """The tensors as one where they follow each other in one storage, or None."""
    first, at = tensors[0], tensors[0].data_ptr()
    whole = first.untyped_storage()
    for t in tensors:
        if t.data_ptr() != at or t.untyped_storage().data_ptr() != whole.data_ptr() or not t.is_contiguous() or t.is_meta:
            return None
        at += t.nbytes
    return first.as_strided((sum(t.shape[0] for t in tensors), *first.shape[1:]), first.stride())


def _kind(p: QuantLinear) -> tuple[object, ...]:
    """The facts that layers must share to be joined."""
    return p.scheme, p.kernel, p.dtype, p.act, p.in_blocks and p.layout


def dense(weight: torch.Tensor, bias: torch.Tensor | None) -> Dense:
    """A linear layer that holds weight (N, K) and bias (N,). Its constructor would draw others, on "meta" by torch._dynamo."""
    layer = Dense.__new__(Dense)
    nn.Module.__init__(layer)
    layer.out_features, layer.in_features = weight.shape
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layer.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))
    return layer


def _join_packed(parts: list[QuantLinear]) -> QuantLinear:
    layout = _side_by_side(parts)
    packed = _one_below_another([repack(p.packed, layout) for p in parts])
    bias = None
    if any(p.bias is not None for p in parts):
        dtype = parts[0].dtype
        nothing = partial(torch.zeros, dtype=dtype, device=packed.words.device)
        bias = torch.cat([nothing(p.out_features) if p.bias is None else p.bias.data.to(dtype) for p in parts])
    return QuantLinear.from_packed(packed, bias, parts[0].layout_wanted, parts[0].kernel, parts[0].dtype)


def _one_below_another(rows: list[PackedWeight]) -> PackedWeight:
    """Weights in one layout, which files may have, as one with all their rows."""
    N, first = sum(p.N for p in rows), rows[0]
    words, scales = torch.cat([p.words for p in rows]), torch.cat([p.scales for p in rows])
    zeros = None if first.zeros is None else torch.cat([p.zeros for p in rows if p.zeros is not None])
    table = tables.joined([p.table for p in rows], [p.N for p in rows])
    return PackedWeight(words, scales, zeros, first.scheme, N, first.K, first.layout, table=table)


def _some_rows(p: PackedWeight, begin: int, end: int) -> PackedWeight:
    """Rows begin .. end of a weight in `DISK`, or of one of blocks; they are views."""
    rows, step = slice(begin, end), p.scheme.block_rows
    scales, zeros = p.scales[begin // step : -(-end // step)], None if p.zeros is None else p.zeros[rows]
    table = tables.rows_of(p.table, p.N, begin, end)
    return PackedWeight(p.words[rows], scales, zeros, p.scheme, end - begin, p.K, p.layout, table=table)


def _side_by_side(parts: list[QuantLinear]) -> str:
    """A layout in which joining along N is concatenating tensors: the current one if files may have it, else `DISK`."""
    if parts[0].in_blocks:
        return parts[0].layout
    layout = LAYOUTS[parts[0].layout]
    fits = layout.shapes and all(p.layout == layout.name and p.out_features % layout.row_step == 0 for p in parts)
    return layout.name if fits else DISK


class JoinedRows(nn.Module):
    """Rows begin .. end of a joined layer, in place of the original layer.

    It computes the joined product and slices it, so it is slow; the decoder does not use it.
    """

    whole: QuantLinear

    def __init__(self, whole: QuantLinear, begin: int, end: int, has_bias: bool) -> None:
        super().__init__()
        self.__dict__["whole"] = whole  # not a submodule: the first part must not own the others' weight
        self.begin, self.end, self.has_bias = begin, end, has_bias
        self.in_features, self.out_features, self.scheme = whole.in_features, end - begin, whole.scheme

    @property
    def weight(self) -> torch.Tensor:
        """The joined weight's words, for code that asks a layer for its device or dtype."""
        return self.whole.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., K) -> (..., end - begin)."""
        return self.whole(x)[..., self.begin : self.end]

    def part(self) -> QuantLinear:
        """A layer of its own with these rows, as files hold them. They are copies."""
        whole, stored = self.whole, self._stored()
        facts = (self.scheme, self.has_bias, whole.dtype, "meta", whole.layout_wanted, whole.kernel)
        part = QuantLinear(self.out_features, self.in_features, *facts)
        p = _some_rows(stored, self.begin, self.end)
        table = None if p.table is None else p.table[:1].clone()  # one table; the joined tensor repeats it
        zeros = None if p.zeros is None else p.zeros.clone()
        part._hold(replace(p, words=p.words.clone(), scales=p.scales.clone(), zeros=zeros, table=table))
        if self.has_bias:
            assert whole.bias is not None
            part.bias = nn.Parameter(whole.bias.detach()[self.begin : self.end].clone(), requires_grad=False)
        part.set_act(whole.act)
        return part.train(self.training)

    def _stored(self) -> PackedWeight:
        """The joined weight as files hold it."""
        return self.whole.packed if self.whole.in_blocks else repack(self.whole.packed, DISK)

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def]
        """Moves the joined layer with its first part, or the first one that is left: no module of the model owns it."""
        place, kind = self.whole.weight.device, self.whole.dtype
        moved = fn(torch.empty(0, dtype=kind, device=place))
        if self.begin == 0 or (moved.device, moved.dtype) != (place, kind):
            self.whole._apply(fn, recurse)
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, destination, prefix, keep_vars):  # type: ignore[no-untyped-def]
        self.part()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict, prefix, *args):  # type: ignore[no-untyped-def]
        part, whole, stored = self.part(), self.whole, self._stored()
        part._load_from_state_dict(state_dict, prefix, *args)
        above, below = _some_rows(stored, 0, self.begin), _some_rows(stored, self.end, stored.N)
        whole._hold(_one_below_another([p for p in (above, part.packed, below) if p.N]))
        if part.bias is not None:
            assert whole.bias is not None
            bias = whole.bias.detach().clone()
            bias[self.begin : self.end] = part.bias.detach()
            whole.bias = nn.Parameter(bias, requires_grad=False)
        whole.prepare()


class SideBySide(nn.Module):
    """Layers that cannot be joined into one weight (different widths, or only some packed), called one after another."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., K) -> (..., sum of N)."""
        return torch.cat([p(x) for p in self.parts], -1)


def weight_of(layer: nn.Module, dtype: torch.dtype) -> torch.Tensor:
    """The weight (N, K) of a linear layer of any kind, dequantized to `dtype`."""
    if isinstance(layer, SideBySide):
        return torch.cat([weight_of(p, dtype) for p in layer.parts])
    if isinstance(layer, JoinedRows):
        return weight_of(layer.whole, dtype)[layer.begin : layer.end]
    if isinstance(layer, QuantLinear) and layer.layout != WIDENED:
        return unpack(layer.packed).dequantize(dtype)
    assert isinstance(layer, nn.Linear | QuantLinear)
    return layer.weight.detach().to(dtype)
