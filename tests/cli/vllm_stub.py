"""The part of vLLM's interface that the plugin stands on, written from vLLM 0.33's, for machines where vLLM is not installed.

Shapes, arguments and the way loaders cut tensors are vLLM's; what it does besides (communication, compilation) is left out.
`RANK` and `SIZE` stand for its tensor-parallel group.
"""

import sys
import types

import torch
from torch import nn

RANK, SIZE = 0, 1


class QuantizationConfig:
    def __init__(self):
        self.packed_modules_mapping = {}


class LinearMethodBase:
    pass


class UnquantizedLinearMethod(LinearMethodBase):
    def create_weights(
        self, layer, input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype, **attrs
    ):
        layer.weight = nn.Parameter(torch.empty(sum(output_partition_sizes), input_size_per_partition, dtype=params_dtype))


class UnquantizedFusedMoEMethod:
    def __init__(self, moe):
        self.moe = moe


class FusedMoEMethodBase:
    def __init__(self, moe):
        self.moe = moe


WEIGHT_LOADER_V2_SUPPORTED, QUANTIZATION_METHODS = [], {}


def register_weight_loader_v2_supported_method(cls):
    WEIGHT_LOADER_V2_SUPPORTED.append(cls.__name__)
    return cls


def register_quantization_config(name):
    def add(cls):
        assert issubclass(cls, QuantizationConfig)
        QUANTIZATION_METHODS[name] = cls
        return cls

    return add


class Column(nn.Parameter):
    """Cut along output_dim."""

    def __new__(cls, data, **kwargs):
        return super().__new__(cls, data, requires_grad=False)

    def __init__(self, data, weight_loader, output_dim, **more):
        self.weight_loader, self.output_dim, self.more = weight_loader, output_dim, more

    def _copy(self, into, loaded, start):
        part = loaded.narrow(self.output_dim, start, into.shape[self.output_dim])
        assert into.shape == part.shape
        into.copy_(part)

    def load_column_parallel_weight(self, loaded):
        self._copy(self.data, loaded, RANK * self.data.shape[self.output_dim])

    def load_merged_column_weight(self, loaded, shard_offset, shard_size, shard_id):
        self._copy(self.data.narrow(self.output_dim, shard_offset, shard_size), loaded, RANK * shard_size)

    def load_qkv_weight(self, loaded, shard_offset, shard_size, shard_id, num_heads):
        place = RANK if shard_id == "q" else RANK // num_heads
        self._copy(self.data.narrow(self.output_dim, shard_offset, shard_size), loaded, place * shard_size)

    def load_row_parallel_weight(self, loaded):
        assert self.data.shape == loaded.shape
        self.data.copy_(loaded)


class ColumnAndRow(Column):
    """Cut along output_dim, or in row-parallel layers along input_dim."""

    def __init__(self, input_dim, **more):
        self.input_dim = input_dim
        super().__init__(**more)

    def load_row_parallel_weight(self, loaded):
        size = self.data.shape[self.input_dim]
        part = loaded.narrow(self.input_dim, RANK * size, size)
        assert self.data.shape == part.shape
        self.data.copy_(part)


class PerTensor(Column):
    """A row for each matrix that a layer is made of, whole on every rank."""

    def __init__(self, data, weight_loader):
        self.weight_loader = weight_loader

    def load_merged_column_weight(self, loaded, shard_id, **more):
        assert loaded.shape == self.data[:1].shape
        self.data[shard_id].copy_(loaded[0])

    def load_qkv_weight(self, loaded, shard_id, **more):
        self.load_merged_column_weight(loaded, "qkv".index(shard_id))

    load_column_parallel_weight = Column.load_row_parallel_weight


class LinearBase(nn.Module):
    def __init__(self, input_size, output_size, quant_config, prefix, params_dtype):
        super().__init__()
        self.input_size, self.output_size = input_size, output_size
        self.params_dtype = torch.get_default_dtype() if params_dtype is None else params_dtype
        self.quant_method = quant_config.get_quant_method(self, prefix)

    def make(self, sizes, per_partition):
        loader = self.weight_loader_v2 if type(self.quant_method).__name__ in WEIGHT_LOADER_V2_SUPPORTED else None
        self.quant_method.create_weights(
            self, per_partition, sizes, self.input_size, self.output_size, self.params_dtype, weight_loader=loader
        )

    def forward(self, x):
        return self.quant_method.apply(self, x, None), None


class ColumnParallelLinear(LinearBase):
    def __init__(
        self, input_size, output_size, bias=True, *, quant_config=None, prefix="", params_dtype=None, output_sizes=None
    ):
        super().__init__(input_size, output_size, quant_config, prefix, params_dtype)
        self.output_sizes = output_sizes or [output_size]
        self.make([n // SIZE for n in self.output_sizes], input_size)

    def weight_loader_v2(self, param, loaded):
        param.load_column_parallel_weight(loaded)


class MergedColumnParallelLinear(ColumnParallelLinear):
    def __init__(self, input_size, output_sizes, bias=True, **more):
        super().__init__(input_size, sum(output_sizes), bias, output_sizes=output_sizes, **more)

    def weight_loader_v2(self, param, loaded, shard_id):
        offset, size = sum(self.output_sizes[:shard_id]) // SIZE, self.output_sizes[shard_id] // SIZE
        param.load_merged_column_weight(loaded, shard_offset=offset, shard_size=size, shard_id=shard_id)


class QKVParallelLinear(LinearBase):
    def __init__(
        self, hidden_size, head_size, total_num_heads, total_num_kv_heads, bias=True, *, quant_config, prefix, params_dtype=None
    ):
        self_kv = max(1, total_num_kv_heads // SIZE)
        heads, self.replicas = total_num_heads // SIZE, max(1, SIZE // total_num_kv_heads)
        self.sizes = {"q": heads * head_size, "k": self_kv * head_size, "v": self_kv * head_size}
        output = sum(self.sizes.values()) * SIZE
        sizes, replicas = self.sizes, self.replicas
        super().__init__(hidden_size, output, quant_config, prefix, params_dtype)
        self.sizes, self.replicas = sizes, replicas
        self.make(list(sizes.values()), hidden_size)

    def weight_loader_v2(self, param, loaded, shard_id):
        names = list(self.sizes)
        offset = sum(self.sizes[n] for n in names[: names.index(shard_id)])
        param.load_qkv_weight(
            loaded, shard_offset=offset, shard_size=self.sizes[shard_id], shard_id=shard_id, num_heads=self.replicas
        )


class RowParallelLinear(LinearBase):
    def __init__(
        self, input_size, output_size, bias=True, *, quant_config=None, prefix="", params_dtype=None, reduce_results=True
    ):
        super().__init__(input_size, output_size, quant_config, prefix, params_dtype)
        self.make([output_size], input_size // SIZE)

    def weight_loader_v2(self, param, loaded):
        param.load_row_parallel_weight(loaded)


class VocabParallelEmbedding(nn.Module):
    """Rows of a vocabulary that is padded to a multiple of 64 for each rank."""

    def __init__(self, num_embeddings, embedding_dim, params_dtype=None, *, quant_config=None, prefix=""):
        super().__init__()
        self.org_vocab_size, self.params_dtype = num_embeddings, params_dtype or torch.get_default_dtype()
        self.embedding_dim = embedding_dim
        own = -(-num_embeddings // 64) * 64 // SIZE
        self.start = min(RANK * own, num_embeddings)
        self.end = min(self.start + own, num_embeddings)
        self.quant_method = quant_config.get_quant_method(self, prefix) if quant_config else None
        if self.quant_method is not None:
            self.quant_method.create_weights(
                self,
                embedding_dim,
                [own],
                embedding_dim,
                own * SIZE,
                params_dtype=self.params_dtype,
                weight_loader=self.weight_loader,
            )

    def weight_loader(self, param, loaded):
        assert loaded.shape[param.output_dim] == self.org_vocab_size
        part = loaded.narrow(param.output_dim, self.start, self.end - self.start)
        param.data[: part.shape[0]].copy_(part)
        param.data[part.shape[0] :].fill_(0)


class ParallelLMHead(VocabParallelEmbedding):
    def tie_weights(self, table):
        return self.quant_method.tie_weights(self, table)


class RoutedExperts(nn.Module):
    """Loads one expert's tensor at a time: w1 and w3 into the halves of w13, w2 cut along its columns."""

    def weight_loader(self, param, loaded, weight_name, shard_id, expert_id, return_success=False):
        into, dim, size, rank = param.data[expert_id], int(shard_id == "w2"), self.moe_config.tp_size, self.moe_config.tp_rank
        companion = "scale" in weight_name or "zero" in weight_name
        if not (companion and param.quant_method == "channel" and shard_id == "w2"):
            own = loaded.shape[dim] // size
            loaded = loaded.narrow(dim, rank * own, own)
        if shard_id != "w2":
            half = into.shape[0] // 2
            into = into.narrow(0, half * (shard_id == "w3"), half)
        assert into.shape == loaded.shape
        into.copy_(loaded)
        return True if return_success else None


LINEAR = (
    "LinearBase", "LinearMethodBase", "UnquantizedLinearMethod", "ColumnParallelLinear", "RowParallelLinear",
    "MergedColumnParallelLinear", "QKVParallelLinear", "register_weight_loader_v2_supported_method",
    "WEIGHT_LOADER_V2_SUPPORTED",
)  # fmt: skip


def install() -> None:
    """Put these names where vLLM has them."""
    layers = "vllm.model_executor.layers."
    here = sys.modules[__name__]
    named = {
        "vllm.config": (),
        layers + "linear": LINEAR,
        layers + "quantization": ("register_quantization_config", "QUANTIZATION_METHODS"),
        layers + "quantization.base_config": ("QuantizationConfig",),
        layers + "vocab_parallel_embedding": ("VocabParallelEmbedding", "ParallelLMHead"),
        layers + "fused_moe": ("RoutedExperts", "FusedMoEMethodBase"),
        layers + "fused_moe.unquantized_fused_moe_method": ("UnquantizedFusedMoEMethod",),
    }  # fmt: skip
    for name, members in named.items():
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            path = ".".join(parts[:i])
            if path not in sys.modules:
                sys.modules[path] = types.ModuleType(path)
                sys.modules[path].__path__ = []
        for member in members:
            setattr(sys.modules[name], member, getattr(here, member))
    config = types.SimpleNamespace(additional_config={}, quant_config=None)  # the rest is asked for on a GPU only
    sys.modules["vllm.config"].get_current_vllm_config = lambda: config
    sys.modules["vllm.config"].get_current_vllm_config_or_none = lambda: config
    parameter = types.ModuleType("vllm.model_executor.parameter")
    parameter.PackedvLLMParameter = parameter.GroupQuantScaleParameter = ColumnAndRow
    parameter.ChannelQuantScaleParameter, parameter.PerTensorScaleParameter = Column, PerTensor
    sys.modules[parameter.__name__] = parameter
