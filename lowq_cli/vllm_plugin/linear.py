"""Packed linear layers in vLLM: vLLM's loaders split them over tensor-parallel ranks, lowq's kernels compute them.

A row of words, scales and zeros belongs to one output, so vLLM's parameter classes split column-parallel, merged and q/k/v
layers along dim 0. They split row-parallel layers along dim 1, where each rank must get whole groups and words.
"""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method
from vllm.model_executor.parameter import (
    ChannelQuantScaleParameter,
    GroupQuantScaleParameter,
    PackedvLLMParameter,
    PerTensorScaleParameter,
)

from lowq_cli.files.tensor_parallel import row_problem
from lowq_cli.vllm_plugin.precompiling import warm
from lowq_kernels.counters import reserve
from lowq_kernels.dispatch.layouts import best_layout
from lowq_kernels.dispatch.registry import matmul
from lowq_kernels.modules import ops
from lowq_packers import tables
from lowq_packers.bitstream import words_per_row
from lowq_packers.errors import DamagedError, UnsupportedError
from lowq_packers.layouts import DISK, PackedWeight, pack_facts, repack
from lowq_packers.scheme import Act, Scheme

LEAVES = ("weight", "weight_scale", "weight_zero", "weight_table")
COUNTERS = 1 << 23  # counters to reserve, 32 MiB: enough for 102 graphs of 32 layers of 4 products of 2 x 264 counters


class Held(NamedTuple):
    """Scheme, shape and layout of a layer's tensors. The tensors themselves are attributes of the layer; vLLM may move them."""

    scheme: Scheme
    N: int
    K: int
    layout: str = DISK

    def blank(self, dtype: torch.dtype, parts: int = 1) -> dict[str, torch.Tensor]:
        """Empty tensors for vLLM's loaders, on the default device. parts: the number of checkpoint matrices in the layer."""
        s, shape = self.scheme, (self.N, self.scheme.groups(self.K))
        tensors = {"weight": torch.empty(self.N, words_per_row(self.K, s.bits), dtype=torch.int32)}
        tensors["weight_scale"] = torch.empty(shape, dtype=dtype if s.scale == "float" else torch.uint8)
        if s.zero != "none":
            tensors["weight_zero"] = torch.empty(shape, dtype=dtype)
        if s.table_width:  # each matrix has its own table, which every rank needs whole
            tensors["weight_table"] = torch.empty(parts, s.table_width, dtype=torch.float32)
        return tensors


@register_weight_loader_v2_supported_method
class LowqLinearMethod(LinearMethodBase):
    """y = x @ dequantize(weight)^T + bias for one of vLLM's linear layers.

    Args:
        scheme: the scheme of the whole layer.
        name: the layer's name, for messages.
        act: the rounding of the rows of x to 8 bits.
    """

    def __init__(self, scheme: Scheme, name: str, act: Act = "none") -> None:
        self.scheme, self.name, self.act = scheme, name, act

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register this rank's `weight`, `weight_scale`, `weight_zero`. Raises UnsupportedError if the split cuts a group."""
        layer.lowq = weight = self.share(sum(output_partition_sizes), input_size_per_partition, input_size)
        self.dtype, self.rows = params_dtype, output_partition_sizes
        for leaf, data in weight.blank(params_dtype, len(output_partition_sizes)).items():
            dims: dict[str, Any] = {"input_dim": 1, "output_dim": 0}
            kind: Any = GroupQuantScaleParameter
            loader = extra_weight_attrs["weight_loader"]
            if leaf == "weight":
                loader = _in_rows(loader)
                kind, dims = PackedvLLMParameter, dims | {"packed_dim": 1, "packed_factor": Fraction(32, weight.scheme.bits)}
            elif leaf == "weight_table":
                kind, dims = PerTensorScaleParameter, {}
            elif self.scheme.group_size == input_size:  # one scale per row: every rank with a part of the row needs it
                kind, dims = ChannelQuantScaleParameter, {"output_dim": 0}
            layer.register_parameter(leaf, kind(data=data, weight_loader=loader, **dims))

    def share(self, N: int, K: int, whole_K: int) -> Held:
        """The share of a rank that holds K of each row's `whole_K` codes. Raises UnsupportedError if a group is cut."""
        if whole_K != K and (problem := row_problem(self.name, self.scheme, whole_K, whole_K // K)):
            raise UnsupportedError(problem)
        s = self.scheme
        return Held(replace(s, group_size=K) if s.group_size == whole_K else s, N, K)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Convert the loaded weight to the layout of the device's kernels. Raises DamagedError for invalid scales."""
        hold(layer, loaded(layer, self.name, self.rows), self.dtype, self.act)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x (..., K) -> (..., N), through a custom op that works in torch.compile and CUDA graphs."""
        p = layer.lowq
        tensors = (layer.weight, layer.weight_scale, layer.weight_zero, layer.weight_aux, bias)
        facts = pack_facts(p.scheme, p.N, p.K, p.layout)
        return ops.linear(x.reshape(-1, p.K), *tensors, facts, None, self.act, layer.weight_table).reshape(*x.shape[:-1], p.N)


def _in_rows(loader: Callable[..., None]) -> Callable[..., None]:
    """A loader of words that turns them back where vLLM has transposed them: it does so with all weights of GPT-2's layers."""

    def load(param: Any, words: torch.Tensor, *shard: Any, **more: Any) -> None:
        turned = not words.is_contiguous() and words.t().is_contiguous()
        loader(param, words.t() if turned else words, *shard, **more)

    return load


def loaded(layer: Any, name: str, rows: list[int]) -> PackedWeight:
    """The weight that the loaders filled. rows: the number of rows of each checkpoint matrix in it."""
    weight = layer.lowq
    words, scales, zeros, table = tensors(layer)
    check_companions(scales, zeros, table, weight.scheme, name)
    if table is not None:
        table = tables.joined(table.split(1), rows)
    return PackedWeight(words, scales, zeros, weight.scheme, weight.N, weight.K, weight.layout, table=table)


def tensors(layer: Any, prefix: str = "") -> Any:
    """A layer's words, scales, zeros and table; None for each that its scheme does not have."""
    return tuple(None if (t := getattr(layer, prefix + leaf, None)) is None else t.data for leaf in LEAVES)


def check_companions(
    scales: torch.Tensor, zeros: torch.Tensor | None, table: torch.Tensor | None, scheme: Scheme, name: str
) -> None:
    """Raise DamagedError for scales, zeros or tables that no quantizer writes: kernels would silently compute with them."""
    good = scales.isfinite().all() if scheme.scale == "float" else tables.good_scales(scales, scheme)
    if table is not None:
        good = good & tables.good_companion(scheme, table)
    if zeros is not None:
        good = good & zeros.isfinite().all()
        if scheme.zero == "int":
            good = good & (zeros == zeros.round()).all() & (zeros >= 0).all() & (zeros < scheme.levels).all()
    if not good:
        raise DamagedError(
            f"{name} holds scales, zeros or a table that are not finite or out of range; quantize the model again"
        )


def note(facts: str) -> None:
    """Add facts about a weight that compiled graphs depend on to vLLM's config.

    vLLM caches compiled graphs on disk by a hash of its config, which does not include the layout. LOWQ_KERNEL, another GPU or
    a later lowq can change the layout, and a cached graph would read the new words in the old layout.
    """
    known = get_current_vllm_config().additional_config
    if isinstance(known, dict):
        known["lowq"] = sorted({*known.get("lowq", ()), facts})


def hold(layer: Any, p: PackedWeight, dtype: torch.dtype, act: Act = "none") -> None:
    """Set `p` as the layer's tensors, in the layout that its device's kernels read for that dtype."""
    p = repack(p, best_layout(p.scheme, p.N, p.K, dtype, p.words.device))
    reserve(COUNTERS, p.words.device)
    for leaf, t in zip((*LEAVES, "weight_aux"), (p.words, p.scales, p.zeros, p.table, p.aux), strict=True):
        setattr(layer, leaf, None if t is None else nn.Parameter(t, requires_grad=False))
    layer.lowq = Held(p.scheme, p.N, p.K, p.layout)
    note(pack_facts(*layer.lowq))

    def launch(rows: int) -> None:
        matmul(torch.zeros(rows, p.K, dtype=dtype, device=p.words.device), p, act=act)

    warm((layer.lowq, dtype, act), launch, p.words.device)
