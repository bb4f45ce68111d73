"""QuantExperts: the packed experts of a mixture layer; it replaces transformers' module of stacked 3-D parameters.

Its tensors are `gate_up_proj` (E, 2I, words) with `gate_up_proj_scale` and `gate_up_proj_zero` (E, 2I, groups), and
`down_proj` likewise. With these names transformers stacks the files' tensors of single experts, and splits them on saving.
All rows of gate come before those of up, in whichever order transformers has them (`expert_kinds`).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lowq_cli.hf.expert_kinds import DOWN, Kind, between, kind_of
from lowq_kernels.decode import mixture_cpu
from lowq_kernels.decode.activation import UNGATED
from lowq_kernels.decode.mixture import ExpertsCall, takes_any_number
from lowq_kernels.decode.mixture import mixture as mixture_gpu
from lowq_kernels.dispatch.layouts import best_layout
from lowq_kernels.dispatch.registry import Choice, find, select
from lowq_kernels.lasting import kept
from lowq_kernels.modules.linear import blank_table, only_moved
from lowq_kernels.modules.ops import through_autograd
from lowq_kernels.modules.stack import Shared, Stack
from lowq_packers import bitstream
from lowq_packers.layouts import DISK, pack_facts, read_facts
from lowq_packers.scheme import Act, Scheme

LEAVES = ("", "_scale", "_zero", "_table")  # suffixes of a stack's name that give the names of its tensors
FEW_ROWS = 32  # max. tokens x experts per token (decoding) where copying experts is cheaper than a device sync
COPIED = 256 << 20  # max. bytes of experts copied at once in that case
ACTS = {"SiLU": "silu", "SiLUActivation": "silu", "GELUTanh": "gelu_tanh"}  # class names in transformers and torch

UNGATED_ACTS = ACTS | {"ReLUSquaredActivation": "relu2", "ReLU": "relu", "GELUActivation": "gelu"}  # for experts without a gate
FUSED = (*ACTS.values(), "clamped_swiglu")  # gates that the kernels support


class QuantExperts(nn.Module):
    """Computes each token's weighted sum of its experts, down(act(gate(x)) * up(x)), from packed weights.

    Args:
        experts: transformers' module, of a known kind; its gating is reused, its parameters are taken (where dense) or dropped.
        schemes: "gate_up_proj" and/or "down_proj" -> Scheme; a stack that is absent stays dense, in transformers' form.
        dtype: dtype of scales, zeros and dense parameters.
        tables: for table schemes, tables per expert of a stack that files hold as several matrices.
        top_k: experts per token; needed for the kind `every_token`, whose calls do not give it.
    """

    def __init__(
        self,
        experts: nn.Module,
        schemes: dict[str, Scheme],
        dtype: torch.dtype,
        tables: Mapping[str, int] | None = None,
        top_k: int = 1,
    ) -> None:
        super().__init__()
        kind = kind_of(experts)
        assert isinstance(kind, Kind), kind
        self.kind, self.schemes, self.top_k = kind, dict(schemes), top_k
        self.shapes: dict[str, tuple[int, int, int]] = {}
        self.layouts: dict[str, str] = {}
        self._ordered: dict[tuple[object, ...], torch.Tensor] = {}  # kept: decoding would copy biases per step and layer
        for name in kind.stacks:
            dense = getattr(experts, name)
            delattr(experts, name)
            E, N, K = self.shapes[name] = kind.shape(dense)
            scheme = schemes.get(name)
            bias = getattr(experts, f"{name}_bias") if kind.bias else None
            self.register_parameter(f"{name}_bias", None if bias is None else nn.Parameter(bias.detach().to(dtype), False))
            if scheme is None:
                self.set_stack(name, Stack(dense.detach().to(dtype), None, None, None, None, N, K, DISK))
                continue
            words = torch.zeros(E, N, bitstream.words_per_row(K, scheme.bits), dtype=torch.int32, device=dense.device)
            of_scale = dtype if scheme.scale == "float" else torch.uint8
            meta = torch.zeros(E, N, scheme.groups(K), dtype=of_scale, device=dense.device)
            zeros = None if scheme.zero == "none" else meta.clone()
            table = blank_table(scheme, dense.device, E, (tables or {}).get(name, 1))
            self.set_stack(name, Stack(words, meta, zeros, None, scheme, N, K, DISK, table))
        self.dtype = dtype
        self.act: Act = "none"
        self.__dict__["gating"] = experts  # not a submodule: only its gate function is used, it has no parameters left

    def set_stack(self, name: str, stack: Stack) -> None:
        """Keep `stack` as the tensors called `name`."""
        for suffix, t in zip(LEAVES, (stack.words, stack.scales, stack.zeros, stack.table), strict=True):
            setattr(self, name + suffix, None if t is None else nn.Parameter(t, requires_grad=False))
        self.register_buffer(f"{name}_aux", stack.aux, persistent=False)
        self.layouts[name] = stack.layout

    def stack(self, name: str) -> Stack:
        """The weights called `name` in their present layout; dense ones are in the order of the module's gate."""
        _, N, K = self.shapes[name]
        words, scales, zeros, table, aux = (getattr(self, name + suffix) for suffix in (*LEAVES, "_aux"))
        if name not in self.schemes and self.kind.transposed:
            words = words.mT
        return Stack(words, scales, zeros, aux, self.schemes.get(name), N, K, self.layouts[name], table, self.bias(name))

    def bias(self, name: str) -> torch.Tensor | None:
        """The bias (E, N) of a stack, in the order of its rows; None without one."""
        bias = getattr(self, f"{name}_bias")
        if bias is None or not self.kind.interleaved or name not in self.schemes:
            return bias
        return kept(self._ordered, (name, bias.data_ptr(), bias.device), lambda: self.kind.in_order(name, bias.data))

    def _move(self, name: str, layout: str) -> None:
        if layout != self.layouts[name]:
            self.set_stack(name, self.stack(name).repacked(layout))

    def prepare(self, dtype: torch.dtype | None = None) -> "QuantExperts":
        """Move the weights into the layout that this device computes in. Called after loading; idempotent."""
        self._ordered.clear()
        for name, scheme in self.schemes.items():
            now = self.stack(name)
            assert now.scales is not None
            scale_dtype = now.scales.dtype if scheme.scale == "float" else self.dtype
            self._move(name, best_layout(scheme, now.N, now.K, dtype or scale_dtype, now.words.device))
        return self

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor | list[int] | None = None,
        top_k_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """hidden_states (T, H), top_k_index and top_k_weights (T, top_k) -> (T, H). For other calls see EVERY_TOKEN and LISTED.

        Sums a token's experts in fp32 in the order of top_k_index, so that two runs agree bit for bit. On a GPU, kernels that
        need no device sync compute the layer (`mixture`) if they support it; otherwise the host groups tokens by expert.
        """
        if isinstance(top_k_index, list):  # number of rows per expert
            experts = torch.arange(len(top_k_index)).repeat_interleave(torch.tensor(top_k_index))
            return self._product(hidden_states, experts.to(hidden_states.device), "weight")
        if top_k_index is None or top_k_weights is None:
            return self._every_token(hidden_states)
        top_k = top_k_index.shape[-1]
        fused = hidden_states.dim() == 2 and self.activation and not through_autograd(hidden_states)
        if fused and hidden_states.device.type in ("cuda", "cpu"):
            up, down = (self.stack(name) for name in self.kind.stacks)
            layer = (hidden_states, top_k_index, top_k_weights, up, down, self.activation)
            y = mixture_gpu(*layer, self.act) if hidden_states.is_cuda else mixture_cpu.experts(*layer)
            if y is not None:
                return y
        x, experts = hidden_states.repeat_interleave(top_k, 0), top_k_index.reshape(-1)
        weighted = self._each(x, experts).float() * top_k_weights.reshape(-1, 1).float()
        return weighted.reshape(*hidden_states.shape[:-1], top_k, -1).sum(-2).to(hidden_states.dtype)

    def _each(self, x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Row s of x (S, H) through expert `experts[s]` -> (S, H)."""
        first, down = self.kind.stacks
        gating, last = self.__dict__["gating"], self.shapes[down][0] - 1
        computed = experts.clamp(max=last) if self.kind.identities else experts
        h = self._product(x, computed, first)
        h = self.kind.as_gated(h) if first in self.schemes else h
        y = self._product(between(gating, h), computed, down)
        return torch.where((experts > last)[:, None], x, y) if self.kind.identities else y

    def _every_token(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(E * T, H) -> (E * T, H): all tokens for expert 0, then all for expert 1, ...; only nonzero rows are computed.

        On a GPU, where finding them needs a device sync, the `num_experts_per_tok` largest rows of each token are computed.
        """
        E = self.shapes[DOWN][0]
        by_expert = hidden_states.reshape(E, -1, hidden_states.shape[-1])
        visits = by_expert.abs().amax(-1)
        if hidden_states.is_cuda:
            experts = visits.topk(self.top_k, 0).indices.flatten()
            tokens = torch.arange(visits.shape[1], device=visits.device).repeat(self.top_k)
        else:
            experts, tokens = visits.nonzero(as_tuple=True)
        y = torch.zeros_like(by_expert)
        y[experts, tokens] = self._each(by_expert[experts, tokens], experts)
        return y.reshape(hidden_states.shape)

    @property
    def activation(self) -> str:
        """The kernels' name for the operation between the two matmuls; "" if they do not support it."""
        gating: Any = self.__dict__["gating"]
        described = getattr(gating, "act", "")  # set by `native_loader`
        if not getattr(gating, "has_gate", True):
            ungated = described or UNGATED_ACTS.get(type(gating.act_fn).__name__, "")
            return UNGATED + ungated if ungated and self.kind == Kind(self.kind.first) else ""
        if described:
            return described if described in FUSED else ""
        if self.kind.interleaved and self.kind.first not in self.schemes:
            return ""
        if type(gating).__name__ == "GptOssExperts" and (gating.alpha, gating.limit) == (1.702, 7.0):
            return "clamped_swiglu"
        usual = getattr(getattr(type(gating), "_apply_gate", None), "__name__", "") == "_default_apply_gate"
        usual = usual and self.kind == Kind()
        return ACTS.get(type(gating.act_fn).__name__, "") if usual else ""

    def set_act(self, act: Act) -> None:
        """Set to what products of many tokens round what they multiply, where a kernel does."""
        self.act = act

    def call(
        self, dtype: torch.dtype, top_k: int, M: int, shared: Shared | None = None, act: Act | None = None
    ) -> ExpertsCall | None:
        """What dispatch is asked for M tokens, rounded to `act` or else as set; None where no kernel has the activation."""
        if not self.activation:
            return None
        up, down = (self.stack(name) for name in self.kind.stacks)
        return ExpertsCall.of(up, down, top_k, self.activation, dtype, M, shared, act or self.act)

    def fused(self, dtype: torch.dtype, top_k: int, M: int = 1, shared: Shared | None = None) -> Choice | None:
        """The kernel that computes the layer, and a shared expert, for M tokens without a device sync, or None."""
        call = self.call(dtype, top_k, M, shared)
        return find(call) if call else None

    def takes(self, act: Act, M: int) -> bool:
        """Whether a kernel computes the layer of M tokens in 8 bits under `act`."""
        call = self.call(self.dtype, self.top_k, M, act=act)
        chosen = find(call) if call else None
        return chosen is not None and act in chosen[0].acts

    def with_shared(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, shared: Shared) -> torch.Tensor:
        """As `forward`, with the output of a shared expert added; for calls for which `fused` has a kernel."""
        up, down = (self.stack(name) for name in self.kind.stacks)
        spec, config = select(ExpertsCall.of(up, down, ids.shape[-1], self.activation, x.dtype, x.shape[0], shared))
        return spec.launch(x, ids, weights, up, down, self.activation, config, shared)  # type: ignore[no-any-return]

    def grouped(self, dtype: torch.dtype) -> bool:
        """Whether any number of tokens is computed without a device sync, so that a CUDA graph can capture it."""
        return bool(self.activation) and takes_any_number(self.stack(self.kind.first), self.stack(DOWN), self.activation, dtype)

    def _product(self, x: torch.Tensor, experts: torch.Tensor, name: str) -> torch.Tensor:
        """The matmul of each row s of x with the weight of expert `experts[s]`."""
        s, bias = self.stack(name), self.bias(name)
        facts = pack_facts(s.scheme, s.N, s.K, s.layout)
        y = experts_linear(x, experts, s.words, s.scales, s.zeros, s.aux, facts, s.table)
        return y if bias is None else y + bias[experts]

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def]
        """Moves to another device by way of the layout that every device supports, because layouts depend on the device."""
        before = getattr(self, self.kind.stacks[-1]).device
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=before)).dtype
        after = before if before.type == "meta" else fn(torch.empty(0, device=before)).device
        if after.type == before.type:
            with only_moved(self, *(f"{name}_{leaf}" for name in self.kind.stacks for leaf in ("aux", "table"))):
                super()._apply(fn, recurse)
            return self
        for name in self.schemes:
            self._move(name, DISK)
        with only_moved(self, *(f"{name}_table" for name in self.kind.stacks)):
            super()._apply(fn, recurse)
        return self if after.type == "meta" else self.prepare()

    def _save_to_state_dict(self, destination, prefix, keep_vars):  # type: ignore[no-untyped-def]
        for name in self.kind.stacks:
            stack = self.stack(name).repacked(DISK)
            words = stack.words if name in self.schemes else getattr(self, name)
            tensors = (words, stack.scales, stack.zeros, stack.table, getattr(self, f"{name}_bias"))
            for suffix, t in zip((*LEAVES, "_bias"), tensors, strict=True):
                if t is not None:
                    destination[f"{prefix}{name}{suffix}"] = t if keep_vars else t.detach()

    def _load_from_state_dict(self, state_dict, prefix, *args):  # type: ignore[no-untyped-def]
        ready = any(layout != DISK for layout in self.layouts.values())
        for name in self.schemes:
            self._move(name, DISK)
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._ordered.clear()
        if ready:
            self.prepare()

    def extra_repr(self) -> str:
        """The text in print(model)."""
        E, _, _ = self.shapes[DOWN]
        return f"{E} experts, " + ", ".join(f"{k} {s} {self.layouts[k]}" for k, s in self.schemes.items())


def rows_by_expert(x: torch.Tensor, experts: torch.Tensor, stack: Stack) -> torch.Tensor:
    """x (S, K), experts (S,) -> (S, N): row s times its expert's weight, one matmul per expert in use. One device sync."""
    y = torch.empty(x.shape[0], stack.N, dtype=x.dtype, device=x.device)
    order = torch.argsort(experts, stable=True)
    start = 0
    for e, count in enumerate(torch.bincount(experts, minlength=stack.words.shape[0]).tolist()):
        if count:
            rows = order[start : start + count]
            y[rows] = stack.product(x[rows], e)
            start += count
    return y


def row_by_row(x: torch.Tensor, experts: torch.Tensor, stack: Stack, copied: int = COPIED) -> torch.Tensor:
    """The same with one matmul per row, on a copy of its expert's weight. No device sync: a CUDA graph can capture it.

    copied: max. bytes of experts copied at once.
    """
    at_once, products = max(1, copied // stack.words[0].nbytes), list[torch.Tensor]()
    for first in range(0, x.shape[0], at_once):
        rows = x[first : first + at_once]
        chosen = stack.take(experts[first : first + at_once])
        products += [chosen.product(rows[s : s + 1], s) for s in range(rows.shape[0])]
    return torch.cat(products)


@torch.library.custom_op("lowq::experts_linear", mutates_args=())
def experts_linear(
    x: torch.Tensor,
    experts: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor | None,
    zeros: torch.Tensor | None,
    aux: torch.Tensor | None,
    facts: str,
    table: torch.Tensor | None = None,
) -> torch.Tensor:
    """x (S, K), experts (S,) -> (S, N): row s times its expert's weight. Without a scheme in `facts`, `words` is dense."""
    stack = Stack(words, scales, zeros, aux, *read_facts(facts), table)
    if x.is_cuda and (x.shape[0] <= FEW_ROWS or torch.cuda.is_current_stream_capturing()):
        return row_by_row(x, experts, stack)
    return rows_by_expert(x, experts, stack)


@experts_linear.register_fake
def _(x, experts, words, scales, zeros, aux, facts, table=None):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], read_facts(facts)[1])
