"""QuantEmbedding: a token embedding whose table is packed, and TiedHead, the output layer that shares it."""

import torch
from torch import nn

from lowq_kernels.modules.linear import QuantLinear, blank_table, only_moved
from lowq_kernels.modules.look_up import look_up
from lowq_packers.layouts import DISK, PackedWeight, get, repack, stored
from lowq_packers.scheme import Scheme


def embed_scale(embedding: nn.Embedding) -> float | None:
    """The factor that an embedding multiplies its rows with (1 for torch's own); None for a kind that lowq does not know."""
    if type(embedding) is nn.Embedding:
        return 1.0
    scale = getattr(embedding, "scalar_embed_scale", getattr(embedding, "embed_scale", None))
    return float(scale) if isinstance(scale, int | float) else None


class QuantEmbedding(nn.Module):
    """ids (...) -> rows (..., K) of the dequantized table, times the factor of the embedding it replaces.

    Its tensors are `weight` int32, `weight_scale` and `weight_zero`, shaped as its layout says, which has `rows`: look-ups take
    a few rows from it. It is saved in rowstream.
    """

    heads: "tuple[TiedHead, ...]" = ()  # output layers that share its table

    def __init__(self, embedding: nn.Embedding, scheme: Scheme, dtype: torch.dtype, stored_in: str = DISK) -> None:
        super().__init__()
        V, K = embedding.weight.shape
        self.num_embeddings, self.embedding_dim, self.padding_idx = V, K, embedding.padding_idx
        self.scheme, self.scale, self.layout = scheme, embed_scale(embedding), stored_in
        device, shapes = embedding.weight.device, stored(stored_in).shapes
        assert shapes is not None
        of_words, of_scales = shapes(scheme, V, K)
        words = torch.zeros(of_words, dtype=torch.int32, device=device)
        of_scale = dtype if scheme.scale == "float" else torch.uint8
        meta = torch.zeros(of_scales, dtype=of_scale, device=device)
        self.weight = nn.Parameter(words, requires_grad=False)
        self.weight_scale = nn.Parameter(meta, requires_grad=False)
        self.dtype = dtype
        self.weight_table = blank_table(scheme, device, 1)
        self.weight_zero = None if scheme.zero == "none" else nn.Parameter(meta.clone(), requires_grad=False)

    @property
    def packed(self) -> PackedWeight:
        """The table as a weight (V, K)."""
        zeros, table = (None if t is None else t.data for t in (self.weight_zero, self.weight_table))
        tensors = (self.weight.data, self.weight_scale.data, zeros)
        return PackedWeight(*tensors, self.scheme, self.num_embeddings, self.embedding_dim, self.layout, table=table)

    def hold(self, p: PackedWeight) -> None:
        """Set `p` as its tensors."""
        self.layout = p.layout
        self.weight = nn.Parameter(p.words, requires_grad=False)
        self.weight_scale = nn.Parameter(p.scales, requires_grad=False)
        self.weight_zero = None if p.zeros is None else nn.Parameter(p.zeros, requires_grad=False)
        self.weight_table = None if p.table is None else nn.Parameter(p.table, requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of `ids`, rounded once to the scales' dtype, then multiplied by the embedding's factor."""
        dtype = self.weight_scale.dtype if self.scheme.scale == "float" else self.dtype
        return look_up(self.packed, ids, dtype, 1.0 if self.scale is None else self.scale)

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def]
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.weight.device)).dtype
        with only_moved(self, "weight_table"):
            return super()._apply(fn, recurse)

    def _save_to_state_dict(self, destination, prefix, keep_vars):  # type: ignore[no-untyped-def]
        p = self.packed if self.weight.is_meta else repack(self.packed, DISK)
        for leaf, t in (("weight", p.words), ("weight_scale", p.scales), ("weight_zero", p.zeros), ("weight_table", p.table)):
            if t is not None:
                destination[prefix + leaf] = t

    def _load_from_state_dict(self, state_dict, prefix, *args):  # type: ignore[no-untyped-def]
        if self.layout != DISK and not self.weight.is_meta:  # a state dict is in rowstream
            self.hold(repack(self.packed, DISK))
        super()._load_from_state_dict(state_dict, prefix, *args)
        for head in () if self.weight.is_meta else self.heads:
            head.share(self)
            head.prepare()

    def extra_repr(self) -> str:
        """The text in print(model)."""
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.scheme}, layout={self.layout}"


class TiedHead(QuantLinear):
    """The output layer of a model with a packed, tied embedding: it has the embedding's weight and is absent from files.

    Both are one packed table in the layout that products need; two where look-ups cannot read that one.
    """

    def share(self, embedding: QuantEmbedding) -> None:
        """Take the embedding's weight, and give it back in another layout if `prepare` changes that."""
        self._table, embedding.heads = (embedding,), (self,)  # in tuples, as their tensors are not this module's
        self._hold(embedding.packed)

    def prepare(self, dtype: torch.dtype | None = None) -> "TiedHead":
        """As `QuantLinear.prepare`, for the embedding too."""
        super().prepare(dtype)
        (embedding,) = self._table
        if embedding.layout != self.layout and get(self.layout).rows is not None:
            embedding.hold(self.packed)
        return self

    def _save_to_state_dict(self, destination, prefix, keep_vars):  # type: ignore[no-untyped-def]
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias if keep_vars else self.bias.detach()

    def _load_from_state_dict(self, state_dict, prefix, *args):  # type: ignore[no-untyped-def]
        bias = state_dict.get(prefix + "bias")
        if bias is not None and self.bias is not None:
            self.bias.data.copy_(bias)
