"""The sensitivity of each matrix: the KL divergence from the original model that rounding it causes, per scheme.

With p the original's predictions, a small change d of a linear's outputs costs KL = E[(g . d)^2] / 2 nats per token, where g is
the gradient of ln p(y) with respect to those outputs for a token y sampled from p (Fisher information). One forward and one
backward pass over a text give E[x x^T] of the inputs and E[g^2] of each output; every scheme's error then follows from the
weights alone:
KL = sum_n E[g_n^2] (dW_n E[x x^T] dW_n^T) / 2. One decoder layer is in memory at a time.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowq_cli.calibrate.gradients import backward, by_outputs, entered
from lowq_cli.files.source import Source
from lowq_cli.hf.embedding import embed_scale
from lowq_cli.hf.layers import DecoderLayers, Spot, run
from lowq_cli.plan.candidates import Candidate
from lowq_cli.plan.recipe import NOT_CALIBRATED
from lowq_cli.plan.rows import read_rows
from lowq_cli.quantizers.gptq import Moments, column_costs
from lowq_packers.errors import UnsupportedError
from lowq_packers.scheme import Scheme

TOKENS = 8192  # tokens of the calibration text that are read
ROWS = 2048  # max. rows per matrix whose errors are computed: those with the largest gradients, scaled up to all rows
Errors = dict[str, dict[Scheme, float]]  # checkpoint name -> scheme -> nats per token
Watch = Callable[[int, int], None]  # called with the number of layers done and of all layers


@dataclass
class _Place:
    """Sums over tokens for one module: second moments of inputs (K, K), squared gradients of outputs (N,)."""

    second: torch.Tensor | None = None
    grads: torch.Tensor | None = None
    power: float = 0.0  # mean squared gradient x squared output, for mixtures, whose experts' matmuls have no hook

    def note(self, module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
        """A forward hook."""
        x = args[0].detach().reshape(-1, args[0].shape[-1])
        if isinstance(module, nn.Embedding):
            return
        if self.second is None:
            self.second = torch.zeros(x.shape[1], x.shape[1], device=x.device)
        self.second.addmm_(x.T, x)
        values = output.detach()
        output.register_hook(lambda g: self.note_gradient(g, values))

    def note_gradient(self, g: torch.Tensor, values: torch.Tensor) -> None:
        """Add the gradient with respect to an output that `note` saw."""
        g, values = g.reshape(-1, g.shape[-1]), values.reshape(-1, g.shape[-1])
        squares = g.square().sum(0)
        self.grads = squares if self.grads is None else self.grads + squares
        self.power += float((g.square().mean(-1) * values.square().sum(-1)).sum())


class Sensitivities:
    """Measures the sensitivity of candidates on token ids (n, T).

    Args:
        schemes: candidate's name -> the schemes to measure.
        rounded: (weight rows, scheme) -> the rows rounded to that scheme, fp32.
        calibrated: columns that are rounded later will compensate the linears' rounding errors, as in GPTQ.
    Raises UnsupportedError for a family whose layers cannot be walked.
    """

    def __init__(
        self,
        source: Source,
        candidates: Sequence[Candidate],
        schemes: Mapping[str, Sequence[Scheme]],
        rounded: Callable[[torch.Tensor, Scheme], torch.Tensor],
        device: torch.device,
        calibrated: bool = False,
    ) -> None:
        self.source, self.schemes, self.rounded, self.device, self.calibrated = source, schemes, rounded, device, calibrated
        self.blocks = DecoderLayers(source, device)
        self.candidates = {c.name: c for c in candidates}

    def measure(self, ids: torch.Tensor, batch: int, watch: Watch | None = None) -> Errors:
        """The cost in nats per token of each candidate's schemes. watch: called with the numbers of done and of all layers.

        Raises UnsupportedError for a model whose layers cannot be run one by one, or whose embedding is projected.
        """
        inputs, others = entered(self.blocks, ids, batch)
        for name, c in self.candidates.items():
            if c.kind == "embedding" and c.shape[1] != inputs[0][0].shape[-1]:  # OPT-350m: no gradient here is by its rows
                raise UnsupportedError(f"{name} is projected before the first layer, so the error of its rows is not measured")
        errors, grads = self._head(ids, inputs.pop())
        if watch:
            watch(0, len(self.blocks))
        tokens = ids.numel()
        for number in reversed(range(len(self.blocks))):
            spots = {n: s for n, s in self.blocks.linears(number).items() if n in self.candidates}
            with self.blocks.layer(number) as module:
                places = {s.module: _Place() for s in spots.values()}
                with _hooked(module, places):
                    grads = [
                        backward(lambda h: run(module, h, others[number]), h, g)  # noqa: B023  (called here)
                        for h, g in zip(inputs.pop(), grads, strict=True)
                    ]
                for name, spot in spots.items():
                    errors[name] = self._linear(name, spot, places[spot.module], tokens)
            if watch:
                watch(len(self.blocks) - number, len(self.blocks))
        for name, c in self.candidates.items():
            if c.kind == "embedding":
                table = self._table(name, ids, grads, tokens)
                errors[name] = {s: e + errors.get(name, {}).get(s, 0.0) for s, e in table.items()}
        return errors

    def _head(self, ids: torch.Tensor, last: list[torch.Tensor]) -> tuple[Errors, list[torch.Tensor]]:
        """The head's errors (under the embedding's name if tied), and the gradients with respect to the last hidden states."""
        head = self.blocks.model.get_output_embeddings()
        name = next((n for n, c in self.candidates.items() if c.kind == "head"), None)
        tied = name is None and self.blocks.skeleton.tied
        name = next((n for n, c in self.candidates.items() if c.kind == "embedding"), None) if tied else name
        place = _Place()
        with _hooked(head, {"": place} if name else {}):
            grads = by_outputs(self.blocks, ids, last, torch.Generator().manual_seed(0))
        if name is None:
            return {}, grads
        return {name: self._linear(name, Spot(""), place, ids.numel())}, grads

    def _linear(self, name: str, spot: Spot, place: _Place, tokens: int) -> dict[Scheme, float]:
        """The errors of one matrix."""
        c = self.candidates[name]
        read = read_rows(c, self.source)
        if place.grads is None:  # an expert that no token visits
            return dict.fromkeys(self.schemes[name], 0.0)
        if spot.cut.expert is not None:  # only the whole mixture is hooked: errors are taken as proportional to its outputs
            W = read(0, min(ROWS, c.shape[0])).to(self.device)
            return {s: 0.5 * place.power / tokens * _relative(W, self.rounded(W, s)) for s in self.schemes[name]}
        importance = place.grads if spot.cut.rows is None else place.grads[slice(*spot.cut.rows)]
        rows = importance.topk(min(ROWS, len(importance))).indices.sort().values
        scale = float(importance.sum() / importance[rows].sum().clamp(min=1e-30)) / tokens**2
        W = _take(read, rows).to(self.device, torch.float32)
        assert place.second is not None
        made_up = self.calibrated and c.kind not in NOT_CALIBRATED
        costs = column_costs(Moments(place.second, tokens=tokens)) if made_up else None
        errors = {}
        for s in self.schemes[name]:
            d = self.rounded(W, s) - W
            squares = (d @ place.second) * d if costs is None else d.square() * costs
            errors[s] = 0.5 * scale * float((squares.sum(1) * importance[rows]).sum())
        return errors

    def _table(self, name: str, ids: torch.Tensor, grads: list[torch.Tensor], tokens: int) -> dict[Scheme, float]:
        """The errors of the embedding's rows as the first layer's input."""
        c = self.candidates[name]
        table: Any = self.blocks.model.get_input_embeddings()
        used, at = ids.reshape(-1).unique(return_inverse=True)
        W = _take(read_rows(c, self.source), used).to(self.device, torch.float32)
        g = torch.cat([x.reshape(-1, x.shape[-1]) for x in grads]) * (embed_scale(table) or 1.0)
        at = at.reshape(-1).to(self.device)
        errors = {}
        for s in self.schemes[name]:
            d = self.rounded(W, s) - W
            errors[s] = 0.5 * float((d[at] * g).sum(-1).square().sum()) / tokens
        return errors


def _take(read: Callable[[int, int], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """The rows of a matrix with these indices, which ascend."""
    numbers = rows.tolist()
    if not numbers:
        raise UnsupportedError("a matrix without rows")
    whole = read(numbers[0], numbers[-1] + 1)
    return whole[(rows - numbers[0]).cpu()]


def _relative(W: torch.Tensor, rounded: torch.Tensor) -> float:
    W = W.float()
    return float((W - rounded).square().sum() / W.square().sum().clamp(min=1e-30))


@contextmanager
def _hooked(root: Any, places: Mapping[str, _Place]) -> Iterator[None]:
    """Inside this context, hooks sum up the inputs and gradients of some modules of `root`."""
    hooks = [root.get_submodule(path).register_forward_hook(place.note) for path, place in places.items()]
    try:
        yield
    finally:
        for h in hooks:
            h.remove()


def from_weights(
    source: Source,
    candidates: Sequence[Candidate],
    schemes: Mapping[str, Sequence[Scheme]],
    rounded: Callable[[torch.Tensor, Scheme], torch.Tensor],
    device: torch.device,
) -> Errors:
    """Errors without a text: each matrix's relative squared error times its share of all weights. Not in nats."""
    total = sum(c.shape[0] * c.shape[1] for c in candidates)
    errors: Errors = defaultdict(dict)
    for c in candidates:
        W = read_rows(c, source)(0, min(ROWS, c.shape[0])).to(device)
        share = c.shape[0] * c.shape[1] / total
        errors[c.name] = {s: share * _relative(W, rounded(W, s)) for s in schemes[c.name]}
    return dict(errors)
