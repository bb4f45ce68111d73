"""How errors of a linear's outputs add up in the KL divergence from the original model; `yaqa` rounds rows with it.

With g the gradient of ln p(y) by a linear's outputs and x its inputs, taken as independent of each other, an error E (N, K) of
the weight costs tr(H_O E H_I E^T) / 2 nats per token, where H_O = E[g g^T] (N, N) and H_I = E[x x^T] (K, K). H_I is what GPTQ
works with; this file measures H_O at the original weights: all layers in one forward and one backward pass per batch of
windows, until the text is read. Source: K-FAC (arXiv:1503.05671); for rounding, YAQA (arXiv:2505.22988, sketch A, one step).
"""

from collections.abc import Callable, Generator, Iterable
from typing import Any

import torch
from torch import nn

from lowq_cli.calibrate.gradients import backward, by_outputs, entered
from lowq_cli.calibrate.learn import repeatable
from lowq_cli.calibrate.requirements import CURVED_TOKENS, HELD_BYTES, CurvatureDone
from lowq_cli.hf.layers import DecoderLayers, Spot, run

ROWS = 2048  # max. rows per block; rows in different blocks are taken as independent
STORED = 1 << 33  # max. bytes of host memory for all moments together; blocks are smaller where ROWS would take more
# Damping: added to the diagonal, relative to its mean, and scaled by rows per token. Base, 3 bits g64, 262,144 tokens, KL
# on WikiText-2 / mix: 0.126 / 0.141 at 0.03, 0.125 / 0.140 at 0.1.
DAMP = 0.03

Sides = dict[str, list[torch.Tensor]]  # checkpoint name -> H_O by blocks of rows (n, n), in order; fp32 on the host


def output_moments(
    blocks: DecoderLayers,
    ids: torch.Tensor,
    batch: int,
    names: Iterable[str],
    held_bytes: int = HELD_BYTES,
    most_rows: int = ROWS,
) -> Generator[CurvatureDone, None, Sides]:
    """H_O of each named linear that its model calls as a whole, damped to be invertible; experts of mixtures have none.

    ids: (n, T) token ids, read `batch` windows at a time; an incomplete last batch is dropped. The same ids give the same bits
    on one machine. held_bytes: max. for hidden states of a forward pass; most_rows: max. per block. Yields progress events.
    """
    chosen = set(names)
    spots = [{n: s for n, s in blocks.linears(i).items() if n in chosen and s.cut.expert is None} for i in range(len(blocks))]
    batch = min(batch, len(ids))
    ids = ids[: max(1, min(len(ids), CURVED_TOKENS // ids.shape[1]) // batch) * batch]
    generator, moments = torch.Generator().manual_seed(0), _Moments(blocks, spots, most_rows)
    hidden = _hidden_size(blocks)
    windows = max(1, held_bytes // (4 * ids.shape[1] * hidden * (len(blocks) + 1)) // batch) * batch
    rounds = ids.split(windows)
    with repeatable():
        for turn, part in enumerate(rounds):
            inputs, others = entered(blocks, part, batch)
            grads = by_outputs(blocks, part, inputs.pop(), generator)
            for number in reversed(range(len(blocks))):
                with blocks.layer(number) as module:
                    place = _Place(module, spots[number], moments.rows)
                    grads = [
                        place.through(lambda h: run(module, h, others[number]), h, g)  # noqa: B023  (called here)
                        for h, g in zip(inputs.pop(), grads, strict=True)
                    ]
                moments.add(place)
                yield CurvatureDone(len(blocks) * (turn + 1) - number, len(blocks) * len(rounds))
    return moments.damped(ids.numel())


def _hidden_size(blocks: DecoderLayers) -> int:
    return int(blocks.model.get_input_embeddings().weight.shape[1])


class _Place:
    """Outer products of one layer's gradients, per linear and block of rows, summed over batches on the layer's device."""

    def __init__(self, module: nn.Module, spots: dict[str, Spot], rows: int) -> None:
        self.module, self.spots, self.rows = module, spots, rows  # rows: max. per block
        self.sums: dict[str, list[torch.Tensor]] = {}

    def through(self, forward: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        """The gradient with respect to `hidden`; the gradients at the linears' outputs are added to the sums."""
        hooks = [self.module.get_submodule(s.module).register_forward_hook(self._noting(n, s)) for n, s in self.spots.items()]
        try:
            return backward(forward, hidden, g)
        finally:
            for hook in hooks:
                hook.remove()

    def _noting(self, name: str, spot: Spot) -> Callable[..., None]:
        def note(g: torch.Tensor) -> None:
            g = g.reshape(-1, g.shape[-1]).float()
            g = g if spot.cut.rows is None else g[:, slice(*spot.cut.rows)]
            products = [b.T @ b for b in g.chunk(-(-g.shape[1] // self.rows), 1)]
            before = self.sums.get(name)
            self.sums[name] = products if before is None else [a + b for a, b in zip(before, products, strict=True)]

        def hook(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
            output.register_hook(note)

        return hook


class _Moments:
    """The sums over all layers, in host memory."""

    def __init__(self, blocks: DecoderLayers, spots: list[dict[str, Spot]], most_rows: int) -> None:
        rows = 0
        for number, layer in enumerate(spots):
            parameters = dict(blocks.layers[number].named_parameters())
            for s in layer.values():
                n, k = parameters[s.path].shape
                first, last = s.cut.rows or (0, k if s.cut.transposed else n)
                rows += last - first
        self.rows = max(1, min(most_rows, STORED // (4 * max(rows, 1))))
        self.sums: Sides = {}

    def add(self, place: _Place) -> None:
        for name, sums in place.sums.items():
            on_host = [t.cpu() for t in sums]
            self.sums[name] = [a + b for a, b in zip(self.sums[name], on_host, strict=True)] if name in self.sums else on_host

    def damped(self, tokens: int) -> Sides:
        """Each mean over the tokens, damped so that it is positive definite."""
        for sums in self.sums.values():
            for H in sums:
                H /= tokens
                mean = H.diagonal().mean()
                H.diagonal().add_((DAMP + len(H) / tokens) * mean if mean > 0 else 1.0)
        return self.sums
