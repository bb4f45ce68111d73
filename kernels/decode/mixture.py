"""A mixture's layer on a GPU, of any number of tokens, by kernels that never wait for the device (op "experts").

Few slots (a token's experts, over all tokens) read their experts once each (experts.py); more, on Hopper, are sorted by expert,
and each expert is read once (grouped_experts.py).
"""

import torch

from lowq_kernels.dispatch.registry import find, forced
from lowq_kernels.modules.stack import ExpertsCall, Stack

FEW_TOKENS = 128  # up to here reading an expert once a token costs less than 256 launches, one or two for every expert
MOST_READS = 0.5  # of all experts: 64 slots of Qwen3-30B's 128 take 60 us a layer, grouped 59; 16 of gpt-oss' 32 80 and 97


def many_slots(call: ExpertsCall) -> bool:
    """Whether so many experts are asked for that each is better read once, for all its tokens."""
    return call.M * call.top_k > MOST_READS * call.E


def mixture(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, up: Stack, down: Stack, act: str) -> torch.Tensor | None:
    """For each row of x (M, H) the sum over its experts ids (M, top_k) of weights (M, top_k) * down(act(gate x) * up x).

    None where no kernel takes the call without waiting for the device, or one that is made for few tokens would: then the host
    groups them, unless a graph is being recorded, which cannot wait.
    """
    call = ExpertsCall.of(up, down, ids.shape[-1], act, x.dtype, x.shape[0])
    chosen = find(call)
    if chosen is None:
        return None
    spec, config = chosen
    if spec.prefers(call) or forced(op="experts") or torch.cuda.is_current_stream_capturing():
        return spec.launch(x, ids, weights, up, down, act, config)
    return None


def takes_any_number(up: Stack, down: Stack, act: str, dtype: torch.dtype) -> bool:
    """Whether a kernel that is made for any number of tokens takes such weights."""
    call = ExpertsCall.of(up, down, 1, act, dtype, 1 << 30)
    chosen = find(call)
    return chosen is not None and chosen[0].prefers(call)
