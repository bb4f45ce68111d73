"""A mixture's layer on a GPU, of any number of tokens, by kernels that never wait for the device (op "experts").

Few slots (a token's experts, over all tokens) read their experts once each (experts.py); more, on Hopper, are sorted by expert,
and each expert is read once (grouped_experts.py).

The way of a layer: its module (QuantExperts of hf/experts.py, also in the native decoder; vllm_plugin/experts.py) calls
`mixture`, which asks the registry for the kernel of an `ExpertsCall`: experts.py, grouped_experts.py, or for
rounded inputs grouped_experts8.py. Where `choice` has none, the module multiplies expert by expert; on a CPU it calls
mixture_cpu.py. A shared expert is part of the call where engine/folding.py joined it (`QuantExperts.with_shared`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from lowq_kernels.activations import act_of
from lowq_kernels.decode.activation import UNGATED
from lowq_kernels.dispatch.registry import Choice, Op, find, forced
from lowq_kernels.gpu import capability
from lowq_kernels.modules.stack import Facts, Shared, Stack
from lowq_packers.scheme import Act

FEW_TOKENS = 128  # up to here reading an expert once per token costs less than 256 launches, one or two per expert
# Group by expert where slots are more than this share of all experts. Qwen3-30B, 64 slots of 128 experts: 60 us per layer
# ungrouped, 59 grouped; gpt-oss, 16 slots of 32 experts: 80 us ungrouped, 97 grouped.
MOST_READS = 0.5
# The same for experts without a gate. nemotron_h's whole size, 128 experts, us per layer on an H200 ungrouped (grouped):
# 6 slots 28 with the shared expert (34), 48 slots 89 (83). Nothing between them was measured, so that 8 slots are the most.
MOST_UNGATED = 1 / 16
# Group `wide` experts with a gate from this share of all experts and this many slots on. us of a step of 8 sequences, 64 slots,
# ungrouped (grouped), H200: glm4_moe, three mixtures of 128 experts, 737 (615), minimax_m2, three of 256, 567 (475).
LEAST_WIDE, LEAST_SLOTS = 0.25, 64
WIDE = 1408  # least features between the products of `wide` experts; with qwen3_moe's 768, 8 sequences were not timed


@dataclass(frozen=True)
class ExpertsCall:
    """A mixture's layer of M tokens, top_k of E experts each; the device is not waited for. activation: as
    `activation.gated` has it, or UNGATED and what `activated` has.

    Its kernels are launch(x, ids, weights, gate_up, down, activation, config) -> y: for each row of x (M, H) the sum over its
    experts ids (M, top_k) int64 of weights (M, top_k) * down(activation(gate x) * up x), biases of stacks added. With `shared`,
    the facts of a `Shared`, which is then the last argument, its output is added.
    """

    op: ClassVar[Op] = "experts"
    M: int
    E: int
    gate_up: Facts
    down: Facts
    top_k: int
    activation: str
    dtype: torch.dtype
    device: str
    capability: tuple[int, int]
    shared: tuple[Facts, Facts] | None = None
    biased: bool = False  # whether a stack has biases
    act: Act = "none"  # to what the products may round what they multiply; a kernel that does not keeps 16 bits

    @classmethod
    def of(
        cls,
        up: Stack,
        down: Stack,
        top_k: int,
        activation: str,
        dtype: torch.dtype,
        M: int,
        shared: Shared | None = None,
        act: Act = "none",
    ) -> "ExpertsCall":
        """The call of M tokens on the weights' device; `act`: the layer's mode, for many rows (`act_of`)."""
        device, facts = up.words.device, None if shared is None else shared.facts
        biased, E, to = up.bias is not None or down.bias is not None, up.words.shape[0], act_of(act, M)
        return cls(M, E, up.facts, down.facts, top_k, activation, dtype, device.type, capability(device), facts, biased, to)


def wide(down: Facts) -> bool:
    """Whether experts with this down product are of the kind that was timed with so few slots: of 4 bits, not narrow."""
    _, K, scheme, _ = down
    return scheme is not None and scheme.bits == 4 and not scheme.table and K >= WIDE


def many_slots(call: ExpertsCall) -> bool:
    """Whether the slots are so many that reading each expert once, for all its tokens, is better."""
    slots, ungated = call.M * call.top_k, call.activation.startswith(UNGATED)
    if not ungated and wide(call.down) and slots >= max(LEAST_SLOTS, LEAST_WIDE * call.E):
        return True
    return slots > (MOST_UNGATED if ungated else MOST_READS) * call.E


def choice(call: ExpertsCall, capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing) -> Choice | None:
    """The kernel for a call, without waiting for the device; None where the host should group the tokens by expert: no kernel
    takes the call, or only one made for few tokens. While a CUDA graph is captured (`capturing`) the host cannot wait, so a
    kernel for few tokens is used."""
    chosen = find(call)
    return chosen if chosen and (chosen[0].prefers(call) or forced(op="experts") or capturing()) else None


def mixture(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, up: Stack, down: Stack, activation: str, act: Act = "none"
) -> torch.Tensor | None:
    """For each row of x (M, H) the sum over its experts ids (M, top_k) of weights (M, top_k) * down(activation(gate x) * up x).

    None where the host should group the tokens by expert (`choice`).
    """
    chosen = choice(ExpertsCall.of(up, down, ids.shape[-1], activation, x.dtype, x.shape[0], act=act))
    if chosen is None:
        return None
    spec, config = chosen
    return spec.launch(x, ids, weights, up, down, activation, config)


def takes_any_number(up: Stack, down: Stack, activation: str, dtype: torch.dtype) -> bool:
    """Whether a kernel made for any number of tokens takes such weights."""
    call = ExpertsCall.of(up, down, 1, activation, dtype, 1 << 30)
    chosen = find(call)
    return chosen is not None and chosen[0].prefers(call)
