"""Tensor parallelism with transformers' plans: each process of torchrun holds its share of the packed weights.

transformers has a plan for each family (module -> style). It turns the parameters into DTensors before files are read, reads
only this process's slices, and wraps each module's forward: "colwise" modules hold some of the rows and return some of the
features; "rowwise" modules hold some of the columns, and their outputs are summed over the processes. Along rows, words,
scales and zeros of `rowstream` are cut at the same places. Along columns each process must get whole groups and whole words;
otherwise the model is refused before any weight is read.
"""

import re
from dataclasses import replace
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lowq_cli.files.tensor_parallel import column_problem, row_problem, table_problem
from lowq_cli.hf.embedding import QuantEmbedding, TiedHead
from lowq_cli.hf.expert_kinds import Kind
from lowq_cli.hf.experts import QuantExperts
from lowq_kernels.modules.linear import QuantLinear
from lowq_packers.errors import UnsupportedError
from lowq_packers.layouts import DISK, PackedWeight
from lowq_packers.scheme import Scheme

COLUMN = ("colwise", "colwise_rep", "colwise_gather_output", "packed_colwise")
ROW = ("rowwise", "rowwise_rep", "rowwise_split_input")
UNCUT = (None, "mla_kv_a_proj", "replicate")
EXPERTS = {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"}
TENSORS = ("weight", "weight_scale", "weight_zero")
# these styles sum the experts' outputs over processes only while parameters are DTensors, which `settle` ends
SUMS_DTENSORS_ONLY = Version(transformers.__version__) < Version("5.23")


def ranks(model: PreTrainedModel) -> int:
    """The number of processes that transformers was asked to spread a model's weights over."""
    return getattr(getattr(model.config, "distributed_config", None), "tp_size", None) or 1


class ShardedLinear(nn.Module):
    """This process's rows or columns of a packed linear layer; transformers joins the processes' outputs.

    Until `settle` its parameters have the whole layer's shapes, which transformers cuts while loading. `out_features` and
    `in_features` keep the whole layer's sizes, for transformers; `local` computes.
    """

    _hf_quantized_needs_local_tp = True  # forward takes and returns local tensors, not DTensors
    weight: Any  # a Parameter; a DTensor of transformers; None once settled
    bias: Any

    def __init__(self, whole: QuantLinear) -> None:
        super().__init__()
        self.out_features, self.in_features, self.scheme = whole.out_features, whole.in_features, whole.scheme
        self.dtype = whole.dtype
        for leaf in (*TENSORS, "bias"):
            self.register_parameter(leaf, getattr(whole, leaf))
        self.local: QuantLinear | None = None

    def settle(self) -> None:
        """Make `local` from the loaded share. A rowwise layer's bias stays in this module: transformers adds it once."""
        weight = self.weight
        assert isinstance(weight, DTensor)
        by_columns = _dim(weight) == 1
        scheme, K = _share(self.scheme, self.in_features, weight.device_mesh.size() if by_columns else 1)
        words, scales, zeros = (_local(getattr(self, leaf), self.scheme) for leaf in TENSORS)
        assert words is not None
        assert scales is not None
        own_bias = self.bias is not None and not by_columns
        local = QuantLinear(words.shape[0], K, scheme, own_bias, self.dtype, "meta")
        local._hold(PackedWeight(words, scales, zeros, scheme, words.shape[0], K, DISK))
        if own_bias:
            local.bias = nn.Parameter(self.bias.to_local().detach(), requires_grad=False)
            self.bias = None
        for leaf in TENSORS:
            setattr(self, leaf, None)
        self.local = local

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., this process's K) -> (..., this process's N)."""
        assert self.local is not None
        return self.local(x)

    def _save_to_state_dict(self, destination, prefix, keep_vars):  # type: ignore[no-untyped-def]
        if self.local is not None:
            raise UnsupportedError("a model that is spread over processes is not saved; load it in one process")
        super()._save_to_state_dict(destination, prefix, keep_vars)


def split(model: PreTrainedModel) -> None:
    """Prepare a model on the meta device, which has its packed modules, for tensor parallelism. No effect without torchrun.

    Raises UnsupportedError: other kinds of parallelism, a user's plan, a family without a plan, and weights that this number
    of processes cannot share; the message names numbers that work.
    """
    if ranks(model) == 1:
        return
    n, plan = ranks(model), _plan(model)
    _check_heads(model, n)
    for path, module in list(model.named_modules()):
        pattern = re.sub(r"\.\d+(?=\.|$)", ".*", path)
        if isinstance(module, QuantEmbedding | TiedHead):
            plan.pop(pattern, None)  # look-ups read whole tables, so every process has a copy
        elif isinstance(module, QuantExperts):
            _split_experts(module, path, pattern, plan, n)
        elif type(module) is QuantLinear:
            style = plan.get(pattern)
            if style not in (*COLUMN, *ROW, *UNCUT):
                raise UnsupportedError(f"{path} is packed, and lowq does not know how to cut it {style!r}")
            if style not in UNCUT:
                _check(path, module, style, n)
                model.set_submodule(path, ShardedLinear(module))


def settle(model: PreTrainedModel) -> None:
    """Turn the loaded shares into modules that compute."""
    for module in model.modules():
        if isinstance(module, ShardedLinear):
            module.settle()
        elif isinstance(module, QuantExperts):
            _settle_experts(module)


def _plan(model: PreTrainedModel) -> dict[str, Any]:
    config: Any = model.config.distributed_config
    others = {k: getattr(config, k, None) for k in ("fsdp_size", "pp_size", "ep_size", "dp_replicate_size")}
    if unsupported := [k for k, size in others.items() if size not in (None, 1)]:
        raise UnsupportedError(f"{unsupported[0]}={others[unsupported[0]]}: lowq spreads packed weights by tp_size only")
    if isinstance(config.tp_plan, dict) or getattr(config, "enable_expert_parallel", False):
        raise UnsupportedError("lowq cuts packed weights by the family's own tp_plan; leave tp_plan and experts' plans out")
    if not model._tp_plan:
        raise UnsupportedError(f"transformers has no tensor-parallel plan for {type(model).__name__}; use one process")
    return model._tp_plan


def _check_heads(model: PreTrainedModel, n: int) -> None:
    config = model.config.get_text_config()
    for what in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, what, None)
        if isinstance(heads, int) and heads % n:
            raise UnsupportedError(f"{what} = {heads} cannot be shared by {n} processes; use a number that divides it")


def _check(path: str, module: QuantLinear, style: str, n: int) -> None:
    N, K = module.out_features, module.in_features
    if module.layout != DISK:
        raise UnsupportedError(f"{path} is stored in layout {module.layout}, which processes cannot share; use {DISK}")
    reason = row_problem(path, module.scheme, K, n) if style in ROW else column_problem(path, N, n)
    if problem := table_problem(path, module.scheme) or reason:
        raise UnsupportedError(problem)


def _split_experts(module: QuantExperts, path: str, pattern: str, plan: dict[str, Any], n: int) -> None:
    """Extend the plan: scales, zeros and tables of packed stacks are cut like the stacks."""
    if module.kind != Kind():
        raise UnsupportedError(f"{path} is packed, and lowq does not cut experts of {type(module.__dict__['gating']).__name__}")
    for stack in module.kind.stacks:
        style, name = plan.get(f"{pattern}.{stack}"), f"{path}.{stack}"
        if style is None:
            continue
        if style != EXPERTS[stack]:
            raise UnsupportedError(f"{name} is packed, and lowq does not know how to cut it {style!r}")
        _, N, K = module.shapes[stack]
        scheme = module.schemes.get(stack)
        if scheme and (problem := table_problem(name, scheme)):
            raise UnsupportedError(problem)
        cut_rows = style in COLUMN
        if problem := column_problem(name, N // 2, n) if cut_rows else row_problem(name, scheme, K, n) if scheme else None:
            raise UnsupportedError(problem)
        plan |= {f"{pattern}.{stack}_{companion}": style for companion in ("scale", "zero")}


def _settle_experts(module: QuantExperts) -> None:
    if SUMS_DTENSORS_ONLY and isinstance(down := getattr(module, module.kind.stacks[-1]), DTensor):
        group = down.device_mesh.get_group()
        module.register_forward_hook(lambda _module, _args, y: funcol.all_reduce(y, "sum", group))
    for stack in module.kind.stacks:
        if not isinstance(words := getattr(module, stack), DTensor):
            continue
        now, cut = module.stack(stack), words.device_mesh.size() if _dim(words) == 2 else 1
        scheme, K = (None, now.K // cut) if now.scheme is None else _share(now.scheme, now.K, cut)
        local = [_local(t, now.scheme) for t in (now.words, now.scales, now.zeros)]
        assert local[0] is not None
        E, N = local[0].shape[:2]
        if scheme:
            module.schemes[stack] = scheme
        module.shapes[stack] = E, N, K
        module.set_stack(stack, replace(now, words=local[0], scales=local[1], zeros=local[2], scheme=scheme, N=N, K=K))


def _share(scheme: Scheme, K: int, parts: int) -> tuple[Scheme, int]:
    """The scheme and the width of one of `parts` runs of columns. A single scale per row applies to each run."""
    return (replace(scheme, group_size=K // parts) if scheme.group_size == K else scheme), K // parts


def _dim(t: DTensor) -> int:
    """The dimension along which a tensor is cut."""
    placement: Any = t.placements[0]
    return placement.dim % t.ndim


def _local(t: torch.Tensor | None, scheme: Scheme | None) -> torch.Tensor | None:
    """This process's part of a tensor; a row's only scale, which only the first process has loaded, is gathered."""
    if not isinstance(t, DTensor):
        return None if t is None else t.detach()
    alone = scheme is not None and _dim(t) == t.ndim - 1 and t.shape[-1] == 1
    return (t.full_tensor() if alone else t.to_local()).detach().contiguous()
