"""QuantExperts: the experts of a mixture layer, packed, in the place of transformers' module of stacked 3-D parameters.

Its tensors are `gate_up_proj` (E, 2I, words) with `gate_up_proj_scale` and `gate_up_proj_zero` (E, 2I, groups), and
`down_proj` likewise: the names that let transformers stack per-expert files into them and cut them up again on saving.
"""

from typing import Any

import torch
from torch import nn

from lowq_kernels.linear import DISK, best_layout
from lowq_kernels.registry import matmul
from lowq_packers import bitstream
from lowq_packers.layouts import PackedWeight, repack
from lowq_packers.scheme import Scheme

STACKS = ("gate_up_proj", "down_proj")


def why_not_experts(module: nn.Module, leaf: str) -> str:
    """The reason `module.leaf` cannot be a stack of QuantExperts, or ""."""
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
    return ""


class QuantExperts(nn.Module):
    """For each token the weighted sum of its experts, down(act(gate(x)) * up(x)), from packed weights.

    Args:
        experts: transformers' module, whose 3-D parameters are only looked at for their shapes; its gating is reused.
        schemes: "gate_up_proj" and/or "down_proj" -> Scheme; one that is absent stays dense.
        dtype: of scales, zeros and dense parameters.
    """

    def __init__(self, experts: nn.Module, schemes: dict[str, Scheme], dtype: torch.dtype) -> None:
        super().__init__()
        self.schemes = dict(schemes)
        self.shapes: dict[str, tuple[int, int, int]] = {}
        self.layouts: dict[str, str] = {}
        for stack in STACKS:
            dense = getattr(experts, stack)
            E, N, K = self.shapes[stack] = tuple(dense.shape)
            scheme = schemes.get(stack)
            if scheme is None:
                setattr(self, stack, nn.Parameter(dense.detach().to(dtype), requires_grad=False))
            else:
                words = torch.zeros(E, N, bitstream.words_per_row(K, scheme.bits), dtype=torch.int32, device=dense.device)
                meta = torch.zeros(E, N, scheme.groups(K), dtype=dtype, device=dense.device)
                self._hold(stack, words, meta, None if scheme.zero == "none" else meta.clone(), None, DISK)
            delattr(experts, stack)
        self.num_experts = self.shapes["down_proj"][0]
        self.__dict__["gating"] = experts  # no submodule: it has no parameters left, only its way of gating

    def _hold(
        self,
        stack: str,
        words: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        aux: torch.Tensor | None,
        layout: str,
    ) -> None:
        """Keep these tensors, experts along dim 0, as the stack."""
        setattr(self, stack, nn.Parameter(words, requires_grad=False))
        setattr(self, f"{stack}_scale", nn.Parameter(scales, requires_grad=False))
        setattr(self, f"{stack}_zero", None if zeros is None else nn.Parameter(zeros, requires_grad=False))
        self.register_buffer(f"{stack}_aux", aux, persistent=False)
        self.layouts[stack] = layout

    def tensors(self, stack: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """words, scales, zeros and aux of a packed stack, experts along dim 0, in its present layout."""
        return tuple(getattr(self, stack + suffix) for suffix in ("", "_scale", "_zero", "_aux"))  # type: ignore[return-value]

    def _repacked(self, stack: str, layout: str) -> list[torch.Tensor | None]:
        """`tensors(stack)` in another layout, expert by expert."""
        _, N, K = self.shapes[stack]
        meta = self.schemes[stack], N, K, self.layouts[stack]
        moved = [repack(p, layout) for p in _experts(self.tensors(stack), *meta)]
        fields = zip(*((p.words, p.scales, p.zeros, p.aux) for p in moved), strict=True)
        return [None if f[0] is None else torch.stack(f) for f in fields]

    def _move(self, stack: str, layout: str) -> None:
        if layout != self.layouts[stack]:
            words, scales, zeros, aux = self._repacked(stack, layout)
            assert words is not None  # only zeros and aux may be absent
            assert scales is not None
            self._hold(stack, words, scales, zeros, aux, layout)

    def prepare(self, dtype: torch.dtype | None = None) -> "QuantExperts":
        """Move the weights into the layout this device computes in. Called after loading; idempotent."""
        for stack, scheme in self.schemes.items():
            _, N, K = self.shapes[stack]
            words, scales, _, _ = self.tensors(stack)
            self._move(stack, best_layout(scheme, N, K, dtype or scales.dtype, words.device))
        return self

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """hidden_states (T, H), top_k_index and top_k_weights (T, top_k) -> (T, H).

        Sums a token's experts in fp32 in the order of top_k_index, so two runs agree bit for bit.
        """
        top_k = top_k_index.shape[-1]
        experts = top_k_index.reshape(-1)
        x = hidden_states.repeat_interleave(top_k, 0)
        gate: Any = self.__dict__["gating"]._apply_gate
        y = self._product(gate(self._product(x, experts, "gate_up_proj")), experts, "down_proj")
        weighted = y.float() * top_k_weights.reshape(-1, 1).float()
        return weighted.reshape(*hidden_states.shape[:-1], top_k, -1).sum(-2).to(hidden_states.dtype)

    def _product(self, x: torch.Tensor, experts: torch.Tensor, stack: str) -> torch.Tensor:
        """Row s of x times the weight of expert `experts[s]`."""
        scheme = self.schemes.get(stack)
        if scheme is None:
            weight = getattr(self, stack)
            empty = weight.new_empty(0)
            return experts_linear(x, experts, weight, empty, None, None, *weight.shape[1:], 0, 0, "", "")
        _, N, K = self.shapes[stack]
        meta = N, K, scheme.bits, scheme.group_size, scheme.zero, self.layouts[stack]
        return experts_linear(x, experts, *self.tensors(stack), *meta)

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def]
        """Moving to another kind of device changes the layout; go through the one that every device knows."""
        before = getattr(self, STACKS[0]).device.type
        if before != "meta":
            after = fn(torch.empty(0, device=before)).device.type
            if after != before:
                for stack in self.schemes:
                    self._move(stack, DISK)
                super()._apply(fn, recurse)
                return self if after == "meta" else self.prepare()
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, destination, prefix, keep_vars):  # type: ignore[no-untyped-def]
        for stack in STACKS:
            packed = stack in self.schemes
            tensors = self.tensors(stack) if packed else (getattr(self, stack),)
            if packed and self.layouts[stack] != DISK:
                tensors = self._repacked(stack, DISK)  # type: ignore[assignment]
            for suffix, t in zip(("", "_scale", "_zero"), tensors, strict=False):
                if t is not None:
                    destination[f"{prefix}{stack}{suffix}"] = t if keep_vars else t.detach()

    def _load_from_state_dict(self, state_dict, prefix, *args):  # type: ignore[no-untyped-def]
        ready = any(layout != DISK for layout in self.layouts.values())
        for stack in self.schemes:
            self._move(stack, DISK)
        super()._load_from_state_dict(state_dict, prefix, *args)
        if ready:
            self.prepare()

    def extra_repr(self) -> str:
        """What print(model) shows."""
        return f"{self.num_experts} experts, " + ", ".join(f"{k} {s} {self.layouts[k]}" for k, s in self.schemes.items())


def _experts(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    scheme: Scheme,
    N: int,
    K: int,
    layout: str,
) -> list[PackedWeight]:
    """Each expert's weight: views into the stacks."""
    words, scales, zeros, aux = tensors
    return [
        PackedWeight(
            words[e], scales[e], None if zeros is None else zeros[e], scheme, N, K, layout, None if aux is None else aux[e]
        )
        for e in range(words.shape[0])
    ]


@torch.library.custom_op("lowq::experts_linear", mutates_args=())
def experts_linear(
    x: torch.Tensor,
    experts: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    aux: torch.Tensor | None,
    N: int,
    K: int,
    bits: int,
    group_size: int,
    zero: str,
    layout: str,
) -> torch.Tensor:
    """x (S, K), experts (S,) -> (S, N): row s times the weight of its expert. bits = 0: `words` (E, N, K) is dense.

    One product per expert that is hit, over its rows together; one synchronisation with the device to learn which are.
    """
    y = torch.empty(x.shape[0], N, dtype=x.dtype, device=x.device)
    order = torch.argsort(experts, stable=True)
    counts = torch.bincount(experts, minlength=words.shape[0]).tolist()
    scheme = Scheme(bits, group_size, zero) if bits else None  # type: ignore[arg-type]
    start = 0
    for e, count in enumerate(counts):
        if count == 0:
            continue
        rows = order[start : start + count]
        start += count
        if scheme is None:
            y[rows] = nn.functional.linear(x[rows], words[e].to(x.dtype))
        else:
            z, a = (None if t is None else t[e] for t in (zeros, aux))
            y[rows] = matmul(x[rows], PackedWeight(words[e], scales[e], z, scheme, N, K, layout, a))
    return y


@experts_linear.register_fake
def _(x, experts, words, scales, zeros, aux, N, K, bits, group_size, zero, layout):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], N)
