"""Packed token embeddings and output heads in vLLM, split over the ranks by rows of the vocabulary.

A tied head computes with a second copy of the embedding, in the layout for products, however the model ties them: by
`tie_weights` (Llama, Gemma 3), by using the embedding module as the head (Qwen 2 and 3), or by setting the head's weight
(Qwen 3 with experts).
"""

from typing import Any

import torch
from torch import nn

from lowq_cli.vllm_plugin.linear import LowqLinearMethod, hold, loaded
from lowq_packers import bitstream
from lowq_packers.qtensor import dequantized


class LowqTableMethod(LowqLinearMethod):
    """Look-ups in a packed embedding. An embedding with a tied head keeps a second copy in the layout for products."""

    tied = False

    def process_weights_after_loading(self, layer: Any) -> None:
        """Keep the embedding in rows for look-ups; with a tied head, also make the copy for products."""
        p = loaded(layer, self.name, self.rows)
        if self.tied:
            layer.head = nn.Module()
            hold(layer.head, p, self.dtype)

    def embedding(self, layer: Any, input_: torch.Tensor) -> torch.Tensor:
        """ids (...) -> rows (..., K), rounded once to the model's dtype."""
        p, flat = layer.lowq, input_.reshape(-1)
        codes = bitstream.unpack(layer.weight[flat], p.scheme.bits, p.K)
        zeros = None if p.scheme.zero == "none" else layer.weight_zero[flat]
        rows = dequantized(p.scheme, codes, layer.weight_scale[flat], zeros, getattr(layer, "weight_table", None))
        return rows.to(self.dtype).reshape(*input_.shape, p.K)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x (..., K) -> logits (..., rows of the table)."""
        return super().apply(layer.head, x, bias)


class LowqTiedHeadMethod(LowqLinearMethod):
    """A tied head without tensors: vLLM loads none for it, and the embedding's method computes its products."""

    def __init__(self, table: Any, name: str) -> None:
        super().__init__(table.quant_method.scheme, name)
        self.table = table

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        """Create no tensors."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Do nothing: models that set the head's weight set the embedding's."""

    def tie_weights(self, layer: Any, embed_tokens: Any) -> nn.Module:
        """The unchanged head."""
        return layer

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x (..., K) -> logits (..., rows of the table)."""
        return self.table.quant_method.apply(self.table, x, bias)
