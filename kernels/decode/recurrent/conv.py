"""A causal convolution of each channel over the last W tokens, in torch and fp32. State: the last W - 1 inputs in order."""

import torch


def step(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """x (B, C), weight (C, W), bias (C,) or None, state (slots, C, W - 1), slots (B,) -> (B, C) fp32."""
    inputs = torch.cat((state[slots], x.to(state.dtype)[..., None]), -1)
    state[slots] = inputs[..., 1:]
    return _sum(inputs, weight, bias, 1)[..., 0]


def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: torch.Tensor, slot: int) -> torch.Tensor:
    """The next tokens of one sequence: x (T, C) -> (T, C) fp32."""
    T = x.shape[0]
    inputs = torch.cat((state[slot], x.T.to(state.dtype)), -1)
    state[slot] = inputs[:, T:]
    return _sum(inputs, weight, bias, T).T


def _sum(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, T: int) -> torch.Tensor:
    """inputs (..., C, W - 1 + T) -> (..., C, T): the products in one order, whatever T is."""
    taps, by = inputs.float(), weight.float()
    y = taps[..., :T] * by[:, :1]
    for i in range(1, weight.shape[1]):
        y.addcmul_(taps[..., i : i + T], by[:, i : i + 1])
    return y if bias is None else y + bias.float()[:, None]
