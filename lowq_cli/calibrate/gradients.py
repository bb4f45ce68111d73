"""Gradients of ln p(y) with respect to hidden states, for tokens y sampled from the predictions p; one layer in memory.

For a small change d of hidden states or outputs with gradient g, the KL divergence from the original is E[(g . d)^2] / 2 nats
per token (Fisher's information).
"""

from collections.abc import Callable

import torch

from lowq_cli.hf.layers import DecoderLayers, Hidden, Others, following, run

Batches = list[Hidden]  # one (windows, T, H) per batch


def entered(blocks: DecoderLayers, ids: torch.Tensor, batch: int) -> tuple[list[Batches], list[Others]]:
    """Every layer's inputs for token ids (n, T), `batch` windows at a time, followed by the last layer's outputs.

    Also returns what each layer needs besides them.
    """
    hidden, others = blocks.start(ids, batch)
    inputs = [hidden]
    for number in range(len(blocks)):
        with torch.no_grad(), blocks.layer(number) as module:
            needs = others[number]
            inputs.append([following(run(module, h, needs), needs, i) for i, h in enumerate(inputs[-1])])
    return inputs, others


def by_outputs(blocks: DecoderLayers, ids: torch.Tensor, last: Batches, generator: torch.Generator) -> Batches:
    """The gradients with respect to the last layer's outputs `last` for token ids (n, T); `generator` is on the CPU."""
    grads, at = [], 0
    with blocks.tail() as logits:
        for hidden in last:
            parts = []
            for h in hidden:  # one window at a time, because logits are large
                window = ids[at].unsqueeze(0)
                parts.append(backward(lambda h, w=window: _drawn(logits(w, h), generator), h.unsqueeze(0), None))  # type: ignore[misc]
                at += 1
            grads.append(torch.cat(parts))
    return grads


def backward(forward: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, g: torch.Tensor | None) -> torch.Tensor:
    """The gradient with respect to `hidden`, given the gradient of the output of `forward` (None: the output is a scalar)."""
    with torch.enable_grad():
        x = hidden.detach().requires_grad_()
        forward(x).backward(g)
    assert x.grad is not None
    return x.grad


def _drawn(logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The summed log-probability of tokens sampled from the predictions themselves."""
    log_p = torch.log_softmax(logits.float().reshape(-1, logits.shape[-1]), -1)
    u = torch.rand(len(log_p), 1, generator=generator).to(log_p.device)
    with torch.no_grad():
        drawn = torch.searchsorted(log_p.exp().cumsum(-1), u).clamp(max=log_p.shape[1] - 1)
    return log_p.gather(1, drawn).sum()
