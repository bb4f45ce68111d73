"""Packed token embeddings and output heads in vLLM, cut over ranks by rows of the vocabulary."""

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from lowq_cli.vllm_plugin.linear import LowqLinearMethod, hold, loaded
from lowq_packers import bitstream


class LowqEmbeddingMethod(LowqLinearMethod):
    """Rows of a packed table, and products with it where it is an output head. Rows that pad the vocabulary are zero."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """A head is laid out for products; a table stays in rows, which look-ups read."""
        if not isinstance(layer, ParallelLMHead):
            loaded(layer, self.name)
            return
        table = layer.__dict__.get("lowq_table")
        hold(layer, loaded(layer if table is None else table, self.name))

    def embedding(self, layer: Any, input_: torch.Tensor) -> torch.Tensor:
        """ids (...) -> rows (..., K), rounded once to the dtype of the scales."""
        p, flat = layer.lowq, input_.reshape(-1)
        q = bitstream.unpack(layer.weight[flat], p.scheme.bits, p.K).float().reshape(flat.shape[0], -1, p.scheme.group_size)
        zeros = p.scheme.mid if p.scheme.zero == "none" else layer.weight_zero[flat].float().unsqueeze(-1)
        rows = (q - zeros) * layer.weight_scale[flat].float().unsqueeze(-1)
        return rows.to(layer.weight_scale.dtype).reshape(*input_.shape, p.K)

    def tie_weights(self, layer: Any, embed_tokens: Any) -> nn.Module:
        """The head computes with the table's weight, in a copy laid out for products."""
        for leaf in ("weight", "weight_scale", "weight_zero"):
            if leaf in layer._parameters:
                del layer._parameters[leaf]
        layer.__dict__["lowq_table"] = embed_tokens  # no submodule: its weights are not this layer's
        layer.weight = embed_tokens.weight
        return layer
