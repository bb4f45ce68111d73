"""Packed experts in vLLM: gate and up concatenated and split over ranks like merged columns, down like a row-parallel layer.

For few tokens a kernel reads only the selected experts, once per token. For more tokens, on Hopper, products grouped by expert
read each expert once. Neither synchronizes with the device. On other devices the host groups the tokens by expert.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase

from lowq_cli.hf.experts import FEW_ROWS, experts_linear
from lowq_cli.vllm_plugin.linear import LEAVES, Held, LowqLinearMethod, check_companions, tensors
from lowq_cli.vllm_plugin.precompiling import warm
from lowq_kernels.decode.mixture import mixture
from lowq_kernels.dispatch.layouts import best_layout
from lowq_kernels.modules.stack import Stack
from lowq_packers.errors import UnsupportedError
from lowq_packers.layouts import DISK, pack_facts
from lowq_packers.scheme import Scheme

ACTS = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
}


class LowqExpertsMethod(FusedMoEMethodBase):
    """The weighted sum of each token's experts, from packed weights; vLLM sums over the ranks.

    Args:
        moe: vLLM's config of the layer.
        schemes: the schemes of "w13" (gate and up) and "w2" (down).
        name: the layer's name, for messages.
    """

    def __init__(self, moe: Any, schemes: Mapping[str, Scheme], name: str) -> None:
        super().__init__(moe)
        self.schemes, self.name = schemes, name
        if getattr(moe, "has_bias", False) or not getattr(moe, "is_act_and_mul", True):
            raise UnsupportedError(f"{name}: lowq has no kernel for experts with biases, or without a gate")

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, *others: Any, **more: Any
    ) -> tuple[int, int]:
        """The unchanged sizes: padding would shift the groups."""
        return hidden_size, intermediate_size_per_partition

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register this rank's w13_weight, w13_weight_scale, ... Raises UnsupportedError if the split cuts a group."""
        width = intermediate_size_per_partition
        shapes = {"w13": (2 * width, hidden_size, hidden_size), "w2": (hidden_size, width, width * self.moe.tp_size)}
        layer.lowq, self.dtype = {}, params_dtype
        for weight, (N, K, whole_K) in shapes.items():
            share = LowqLinearMethod(self.schemes[weight], f"{self.name}.{weight}").share(N, K, whole_K)
            layer.lowq[weight] = share
            how = "channel" if self.schemes[weight].group_size == whole_K else "group"
            for leaf, data in share.blank(params_dtype, 2 if weight == "w13" else 1).items():
                param = nn.Parameter(data.new_empty(num_experts, *data.shape), requires_grad=False)
                loader = partial(_load_table, layer) if leaf == "weight_table" else extra_weight_attrs["weight_loader"]
                param.weight_loader = loader  # type: ignore[attr-defined]
                param.quant_method, param.is_transposed = how, False  # type: ignore[attr-defined]
                layer.register_parameter(f"{weight}_{leaf}", param)

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """None: vLLM's own kernels are not used."""
        return None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Convert the loaded experts to the layout of the device's kernels. Raises DamagedError for invalid scales."""
        for weight, p in layer.lowq.items():
            words, scales, zeros, table = tensors(layer, f"{weight}_")
            check_companions(scales, zeros, table, p.scheme, f"{self.name}.{weight}")
            stack = Stack(words, scales, zeros, None, p.scheme, p.N, p.K, DISK, table)
            stack = stack.repacked(best_layout(p.scheme, p.N, p.K, self.dtype, words.device))
            held = (stack.words, stack.scales, stack.zeros, stack.table, stack.aux)
            for leaf, t in zip((*LEAVES, "weight_aux"), held, strict=True):
                setattr(layer, f"{weight}_{leaf}", None if t is None else nn.Parameter(t, requires_grad=False))
            layer.lowq[weight] = Held(p.scheme, p.N, p.K, stack.layout)
        up, down = (_current(layer, weight) for weight in ("w13", "w2"))

        def launch(tokens: int) -> None:
            x = torch.zeros(tokens, up.K, dtype=self.dtype, device=words.device)
            ids = torch.arange(top_k, device=words.device).repeat(tokens, 1)
            mixture(x, ids, torch.ones(ids.shape, device=words.device), up, down, "silu")

        top_k = min(self.moe.experts_per_token, words.shape[0])
        warm((up.facts, down.facts, words.shape[0], top_k, self.dtype), launch, words.device)

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x (T, H), topk_weights and topk_ids (T, top_k) -> (T, H), the sum over this rank's experts."""
        act = getattr(layer.activation, "value", layer.activation)
        limits = ("swiglu_limit", "swiglu_alpha", "swiglu_beta")
        if act not in ACTS or any(getattr(layer, limit, None) is not None for limit in limits):
            raise UnsupportedError(f"{self.name}: lowq computes experts with {', '.join(ACTS)}, not {act} (with limits)")
        ids, weights = topk_ids.long(), topk_weights
        if layer.expert_map is not None:  # expert-parallel: experts of other ranks contribute nothing here
            local = layer.expert_map[ids]
            ids, weights = local.clamp(min=0), weights.masked_fill(local < 0, 0)
        if layer.apply_router_weight_on_input:  # models that set this have one expert per token
            x, weights = x * weights.to(x.dtype), torch.ones_like(weights)
        up, down = (_current(layer, weight) for weight in ("w13", "w2"))
        y = mixture(x, ids, weights, up, down, act)
        if y is not None:
            return y
        top_k, experts = ids.shape[-1], ids.reshape(-1)
        gate, value = _product(x.repeat_interleave(top_k, 0), experts, up).chunk(2, -1)
        h = ACTS[act](gate) * value  # type: ignore[operator]
        weighted = _product(h, experts, down).float() * weights.reshape(-1, 1).float()
        return weighted.reshape(x.shape[0], top_k, -1).sum(1).to(x.dtype)


def _load_table(
    layer: Any,
    param: nn.Parameter,
    loaded_weight: torch.Tensor,
    weight_name: str,
    shard_id: str,
    expert_id: int,
    return_success: bool = False,
) -> bool | None:
    """Load one matrix's table (1, width), as vLLM's loader does for scales. Returns True if this rank has the expert."""
    local_id = expert_id if layer.expert_map is None else int(layer.expert_map[expert_id])
    if local_id >= 0:
        param.data[local_id, int(shard_id == "w3")] = loaded_weight[0]
    return local_id >= 0 if return_success else None


def _current(layer: Any, weight: str) -> Stack:
    """The layer's current weights: vLLM may have moved them."""
    s = layer.lowq[weight]
    words, scales, zeros, table, aux = (getattr(layer, f"{weight}_{leaf}") for leaf in (*LEAVES, "weight_aux"))
    return Stack(words, scales, zeros, aux, s.scheme, s.N, s.K, s.layout, table)


def _product(x: torch.Tensor, experts: torch.Tensor, s: Stack) -> torch.Tensor:
    """Row i of x times the weight of expert `experts[i]`; in chunks of a few rows if a graph must hold copies of experts."""
    facts = (s.words, s.scales, s.zeros, s.aux, pack_facts(s.scheme, s.N, s.K, s.layout), s.table)
    if x.is_cuda and torch.cuda.is_current_stream_capturing() and x.shape[0] > FEW_ROWS:
        parts = zip(x.split(FEW_ROWS), experts.split(FEW_ROWS), strict=True)
        return torch.cat([experts_linear(a, e, *facts) for a, e in parts])
    return experts_linear(x, experts, *facts)
