"""QuantEmbedding: a token embedding whose table is packed, and TiedHead, the output layer that shares it."""

import torch
from torch import nn

from lowq_kernels.modules.linear import QuantLinear, blank_table, only_moved
from lowq_packers import bitstream
from lowq_packers.layouts import DISK, PackedWeight
from lowq_packers.qtensor import dequantized
from lowq_packers.scheme import Scheme


def embed_scale(embedding: nn.Embedding) -> float | None:
    """The factor that an embedding multiplies its rows with (1 for torch's own); None for a kind that lowq does not know."""
    if type(embedding) is nn.Embedding:
        return 1.0
    scale = getattr(embedding, "scalar_embed_scale", getattr(embedding, "embed_scale", None))
    return float(scale) if isinstance(scale, int | float) else None


class QuantEmbedding(nn.Module):
    """ids (...) -> rows (..., K) of the dequantized table, times the factor of the embedding it replaces.

    Its tensors are `weight` (V, words) int32, `weight_scale` and `weight_zero` (V, groups); always rowstream, for look-ups.
    """

    def __init__(self, embedding: nn.Embedding, scheme: Scheme, dtype: torch.dtype) -> None:
        super().__init__()
        V, K = embedding.weight.shape
        self.num_embeddings, self.embedding_dim, self.padding_idx = V, K, embedding.padding_idx
        self.scheme, self.scale = scheme, embed_scale(embedding)
        device = embedding.weight.device
        words = torch.zeros(V, bitstream.words_per_row(K, scheme.bits), dtype=torch.int32, device=device)
        of_scale = dtype if scheme.scale == "float" else torch.uint8
        meta = torch.zeros(V, scheme.groups(K), dtype=of_scale, device=device)
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
        return PackedWeight(*tensors, self.scheme, self.num_embeddings, self.embedding_dim, DISK, table=table)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of `ids`, rounded once to the scales' dtype, then multiplied by the embedding's factor."""
        s, flat = self.scheme, ids.reshape(-1)
        dtype = self.weight_scale.dtype if s.scale == "float" else self.dtype
        codes = bitstream.unpack(self.weight[flat], s.bits, self.embedding_dim)
        zeros = None if self.weight_zero is None else self.weight_zero[flat]
        rows = dequantized(s, codes, self.weight_scale[flat], zeros, self.weight_table).to(dtype).reshape(*ids.shape, -1)
        if self.scale in (None, 1.0):
            return rows
        return rows * torch.full((), self.scale, dtype=dtype, device=rows.device)  # type: ignore[arg-type]

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def]
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.weight.device)).dtype
        with only_moved(self, "weight_table"):
            return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        """The text in print(model)."""
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.scheme}"


class TiedHead(QuantLinear):
    """The output layer of a model with a packed, tied embedding: it has the embedding's weight and is absent from files.

    Matmuls need the device's layout and look-ups need rows, so that memory holds two packed copies, which are still smaller
    than the dense table.
    """

    def share(self, embedding: QuantEmbedding) -> None:
        """Copy the embedding's weight."""
        self._hold(embedding.packed)

    def _save_to_state_dict(self, destination, prefix, keep_vars):  # type: ignore[no-untyped-def]
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias if keep_vars else self.bias.detach()

    def _load_from_state_dict(self, state_dict, prefix, *args):  # type: ignore[no-untyped-def]
        bias = state_dict.get(prefix + "bias")
        if bias is not None and self.bias is not None:
            self.bias.data.copy_(bias)
