"""A mixture's layer on a GPU, of any number of tokens, by kernels that never wait for the device.

Few slots (a token's experts, over all tokens) read their experts once each (experts.py); more, on Hopper, are sorted by expert,
and each expert is read once (grouped_experts.py).
"""

from functools import cache

import torch

from lowq_kernels.modules.stack import Facts, Stack, fused

FEW_TOKENS = 128  # up to here reading an expert once a token costs less than 256 launches, one or two for every expert
MOST_READS = 0.25  # of all experts: 32 slots of Qwen3-30B's 128 take 42 us a layer, grouped 40; 8 of Mixtral's 8 259 and 163
GROUPED_ACTS = ("silu", "gelu_tanh", "clamped_swiglu")


@cache
def grouped_problem(up: Facts, down: Facts, act: str, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why products grouped by expert do not take such weights, or None."""
    if device.type != "cuda" or dtype.itemsize != 2 or act not in GROUPED_ACTS:
        return f"takes 16 bits on a GPU and {', '.join(GROUPED_ACTS)}, not {dtype} on {device.type} and {act}"
    from lowq_kernels.decode.grouped_experts import why_not  # imports Triton

    return why_not(up, down, device)


def mixture(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, up: Stack, down: Stack, act: str) -> torch.Tensor | None:
    """For each row of x (M, H) the sum over its experts ids (M, top_k) of weights (M, top_k) * down(act(gate x) * up x).

    None where no kernel takes the call without waiting for the device.
    """
    if not x.is_cuda:
        return None
    few = ids.numel() <= MOST_READS * up.words.shape[0]
    if not few and grouped_problem(up.facts, down.facts, act, x.dtype, x.device) is None:
        from lowq_kernels.decode.grouped_experts import grouped_experts

        return grouped_experts(x, ids, weights, up, down, act)
    if x.shape[0] > FEW_TOKENS and not torch.cuda.is_current_stream_capturing():
        return None
    chosen = fused(up, down, ids.shape[-1], act, x.dtype)
    return chosen[0].launch(x, ids, weights, up, down, act, chosen[1]) if chosen else None
