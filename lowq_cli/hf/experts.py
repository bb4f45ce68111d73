"""QuantExperts: the experts of a mixture layer, packed, in the place of transformers' module of stacked 3-D parameters.

Its tensors are `gate_up_proj` (E, 2I, words) with `gate_up_proj_scale` and `gate_up_proj_zero` (E, 2I, groups), and
`down_proj` likewise: the names that let transformers stack per-expert files into them and cut them up again on saving.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lowq_kernels.dispatch.layouts import best_layout
from lowq_kernels.dispatch.registry import Choice
from lowq_kernels.modules.linear import blank_table, only_moved
from lowq_kernels.modules.ops import through_autograd
from lowq_kernels.modules.stack import Stack, fused
from lowq_packers import bitstream
from lowq_packers.layouts import DISK, pack_facts, read_facts
from lowq_packers.scheme import Scheme

STACKS = ("gate_up_proj", "down_proj")
LEAVES = ("", "_scale", "_zero", "_table")  # what follows a stack's name in those of its tensors
FEW_ROWS = 32  # tokens x experts per token: decoding, where waiting for the device outweighs copying packed experts
FEW_TOKENS = 128  # up to here reading an expert once a token costs less than 256 launches, one or two for every expert
ACTS = {"SiLU": "silu", "SiLUActivation": "silu", "GELUTanh": "gelu_tanh"}  # classes of transformers and torch


def why_not_experts(module: nn.Module, leaf: str) -> str | None:
    """The reason `module.leaf` cannot be a stack of QuantExperts, or None."""
    if leaf not in STACKS:
        return f"an expert parameter that is not {' or '.join(STACKS)}"
    others = [name for name, _ in module.named_parameters() if name not in STACKS]
    if others:
        return f"experts with further parameters ({others[0]})"
    if not callable(getattr(module, "_apply_gate", None)):
        return f"experts of a kind lowq does not know ({type(module).__name__})"
    facts = {
        "is_transposed": False,
        "is_concatenated": True,
        "has_gate": True,
        "has_bias": False,
        "has_post_expert_norm": False,
    }
    for fact, wanted in facts.items():
        if getattr(module, fact, wanted) != wanted:
            return f"experts with {fact}={not wanted}"
    return None


class QuantExperts(nn.Module):
    """For each token the weighted sum of its experts, down(act(gate(x)) * up(x)), from packed weights.

    Args:
        experts: transformers' module; its gating is reused, its 3-D parameters are taken (where dense) or dropped.
        schemes: "gate_up_proj" and/or "down_proj" -> Scheme; one that is absent stays dense.
        dtype: of scales, zeros and dense parameters.
        tables: of a table scheme: how many an expert's stack has, where it is made of several matrices in the files.
    """

    def __init__(
        self, experts: nn.Module, schemes: dict[str, Scheme], dtype: torch.dtype, tables: Mapping[str, int] | None = None
    ) -> None:
        super().__init__()
        self.schemes = dict(schemes)
        self.shapes: dict[str, tuple[int, int, int]] = {}
        self.layouts: dict[str, str] = {}
        for name in STACKS:
            dense = getattr(experts, name)
            delattr(experts, name)
            E, N, K = self.shapes[name] = tuple(dense.shape)
            scheme = schemes.get(name)
            if scheme is None:
                self._hold(name, Stack(dense.detach().to(dtype), None, None, None, None, N, K, DISK))
                continue
            words = torch.zeros(E, N, bitstream.words_per_row(K, scheme.bits), dtype=torch.int32, device=dense.device)
            of_scale = dtype if scheme.scale == "float" else torch.uint8
            meta = torch.zeros(E, N, scheme.groups(K), dtype=of_scale, device=dense.device)
            zeros, table = (
                None if scheme.zero == "none" else meta.clone(),
                blank_table(scheme, dense.device, E, (tables or {}).get(name, 1)),
            )
            self._hold(name, Stack(words, meta, zeros, None, scheme, N, K, DISK, table))
        self.dtype = dtype
        self.__dict__["gating"] = experts  # not a submodule: no parameters are left in it, only its way of gating

    def _hold(self, name: str, stack: Stack) -> None:
        """Keep `stack` as the tensors called `name`."""
        for suffix, t in zip(LEAVES, (stack.words, stack.scales, stack.zeros, stack.table), strict=True):
            setattr(self, name + suffix, None if t is None else nn.Parameter(t, requires_grad=False))
        self.register_buffer(f"{name}_aux", stack.aux, persistent=False)
        self.layouts[name] = stack.layout

    def stack(self, name: str) -> Stack:
        """The weights called `name` as they are held now."""
        _, N, K = self.shapes[name]
        words, scales, zeros, table, aux = (getattr(self, name + suffix) for suffix in (*LEAVES, "_aux"))
        return Stack(words, scales, zeros, aux, self.schemes.get(name), N, K, self.layouts[name], table)

    def _move(self, name: str, layout: str) -> None:
        if layout != self.layouts[name]:
            self._hold(name, self.stack(name).repacked(layout))

    def prepare(self, dtype: torch.dtype | None = None) -> "QuantExperts":
        """Move the weights into the layout this device computes in. Called after loading; idempotent."""
        for name, scheme in self.schemes.items():
            now = self.stack(name)
            assert now.scales is not None
            own = now.scales.dtype if scheme.scale == "float" else self.dtype
            self._move(name, best_layout(scheme, now.N, now.K, dtype or own, now.words.device))
        return self

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """hidden_states (T, H), top_k_index and top_k_weights (T, top_k) -> (T, H).

        Sums a token's experts in fp32 in the order of top_k_index, so two runs agree bit for bit. A few tokens on a GPU take
        one kernel that reads nothing but their experts; the rest is grouped by expert.
        """
        top_k, few = top_k_index.shape[-1], hidden_states.dim() == 2 and hidden_states.shape[0] <= FEW_TOKENS
        few = hidden_states.is_cuda and (few or torch.cuda.is_current_stream_capturing())
        if few and not through_autograd(hidden_states) and (chosen := self.fused(hidden_states.dtype, top_k)):
            spec, config = chosen
            stacks = (self.stack(name) for name in STACKS)
            return spec.launch(hidden_states, top_k_index, top_k_weights, *stacks, self.act, config)
        experts = top_k_index.reshape(-1)
        gate: Any = self.__dict__["gating"]._apply_gate
        h = gate(self._product(hidden_states.repeat_interleave(top_k, 0), experts, "gate_up_proj"))
        weighted = self._product(h, experts, "down_proj").float() * top_k_weights.reshape(-1, 1).float()
        return weighted.reshape(*hidden_states.shape[:-1], top_k, -1).sum(-2).to(hidden_states.dtype)

    @property
    def act(self) -> str:
        """The activation between gate and up, as the kernels call it; "" where the gating is not the usual one."""
        gating: Any = self.__dict__["gating"]
        usual = type(gating)._apply_gate.__name__ == "_default_apply_gate"
        return ACTS.get(type(gating.act_fn).__name__, "") if usual else ""

    def fused(self, dtype: torch.dtype, top_k: int) -> Choice | None:
        """The kernel that computes the layer from the chosen experts alone, where there is one for this device and shape."""
        up, down = (self.stack(name) for name in STACKS)
        return fused(up, down, top_k, self.act, dtype)

    def _product(self, x: torch.Tensor, experts: torch.Tensor, name: str) -> torch.Tensor:
        """Row s of x times the weight of expert `experts[s]`."""
        s = self.stack(name)
        facts = pack_facts(s.scheme, s.N, s.K, s.layout)
        return experts_linear(x, experts, s.words, s.scales, s.zeros, s.aux, facts, s.table)

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def]
        """Moving to another kind of device changes the layout; go through the one that every device knows."""
        before = getattr(self, STACKS[0]).device
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=before)).dtype
        after = before if before.type == "meta" else fn(torch.empty(0, device=before)).device
        if after.type == before.type:
            with only_moved(self, *(f"{name}_{leaf}" for name in STACKS for leaf in ("aux", "table"))):
                super()._apply(fn, recurse)
            return self
        for name in self.schemes:
            self._move(name, DISK)
        with only_moved(self, *(f"{name}_table" for name in STACKS)):
            super()._apply(fn, recurse)
        return self if after.type == "meta" else self.prepare()

    def _save_to_state_dict(self, destination, prefix, keep_vars):  # type: ignore[no-untyped-def]
        for name in STACKS:
            stack = self.stack(name).repacked(DISK)
            for suffix, t in zip(LEAVES, (stack.words, stack.scales, stack.zeros, stack.table), strict=True):
                if t is not None:
                    destination[f"{prefix}{name}{suffix}"] = t if keep_vars else t.detach()

    def _load_from_state_dict(self, state_dict, prefix, *args):  # type: ignore[no-untyped-def]
        ready = any(layout != DISK for layout in self.layouts.values())
        for name in self.schemes:
            self._move(name, DISK)
        super()._load_from_state_dict(state_dict, prefix, *args)
        if ready:
            self.prepare()

    def extra_repr(self) -> str:
        """What print(model) shows."""
        E, _, _ = self.shapes[STACKS[0]]
        return f"{E} experts, " + ", ".join(f"{k} {s} {self.layouts[k]}" for k, s in self.schemes.items())


def rows_by_expert(x: torch.Tensor, experts: torch.Tensor, stack: Stack) -> torch.Tensor:
    """One product per expert that is hit, over all of its rows. Waits for the device once, to learn which those are."""
    y = torch.empty(x.shape[0], stack.N, dtype=x.dtype, device=x.device)
    order = torch.argsort(experts, stable=True)
    start = 0
    for e, count in enumerate(torch.bincount(experts, minlength=stack.words.shape[0]).tolist()):
        if count:
            rows = order[start : start + count]
            y[rows] = stack.product(x[rows], e)
            start += count
    return y


def row_by_row(x: torch.Tensor, experts: torch.Tensor, stack: Stack) -> torch.Tensor:
    """One product per row, on a copy of its expert's packed weight. Never waits for the device, so a CUDA graph can hold it."""
    chosen = stack.take(experts)
    return torch.cat([chosen.product(x[s : s + 1], s) for s in range(x.shape[0])])


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
    """x (S, K), experts (S,) -> (S, N): row s times the weight of its expert. No scheme in the facts: `words` is dense."""
    stack = Stack(words, scales, zeros, aux, *read_facts(facts), table)
    if x.is_cuda and (x.shape[0] <= FEW_ROWS or torch.cuda.is_current_stream_capturing()):
        return row_by_row(x, experts, stack)
    return rows_by_expert(x, experts, stack)


@experts_linear.register_fake
def _(x, experts, words, scales, zeros, aux, facts, table=None):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], read_facts(facts)[1])
