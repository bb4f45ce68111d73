"""Gradient descent on a quantized layer: its codes, scales, zeros and fitted tables follow the error of the layer's output.

Training starts from gptq's result for each matrix. The loss is the squared distance between the layer's output, with the layers
before it quantized, and the original model's output; codes stay integers (straight-through estimate). Inference is unchanged.
Source: lowq's combination of known parts: learned scales (LSQ, arXiv:1902.08153), one layer at a time (BRECQ, arXiv:2102.05426;
EfficientQAT, arXiv:2407.11062).
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from lowq_cli.calibrate.layer_walk import Hidden, Layer
from lowq_cli.quantizers._table_book import divisor
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.tables import from_bytes, to_bytes, values

EPOCHS = 12
# Bits -> Adam's learning rates: one for the scales' logarithms and the zeros (in codes), one for the codes (0: they do not
# change). At higher rates 2 bits overfit the calibration text. Perplexity on WikiText-2 / mix, base, g64, 2 bits: gptq
# 52.3 / 57.8; these rates 51.0 / 53.7; 5e-3 and 2e-2 54.2 / 54.3, with 24 epochs 57.9 / 57.8; 1e-3 and 5e-3 52.4 / 56.1;
# codes unchanged 52.1 / 55.3. One bit needs higher rates: story g64, gptq 692 / 345; these 454 / 188; 2e-3 and 2e-2
# 655 / 197.
RATES = {1: (5e-3, 5e-2), 2: (2e-3, 1e-2), 3: (2e-3, 1e-2)}
OTHERS = (1e-3, 0.0)
MOST = 0.49  # max. distance of a code from its weight at the start, in codes: rounding gives the same code back
TINY = 1e-30  # replaces 0 in divisors
WARM = 5  # warm-up steps until the full rates; after them the rates fall to 0


def learn(
    layer: Layer, matrices: Mapping[str, QuantizedTensor], dtypes: Mapping[str, torch.dtype], x_ref: Hidden, x_quant: Hidden
) -> dict[str, QuantizedTensor]:
    """The trained matrices by checkpoint name: all of them if the layer's loss fell, otherwise none.

    Args:
        layer: the layer, quantized with `matrices`; it is not changed.
        dtypes: dtype of the stored scales and zeros, by name. Experts are not trained.
        x_ref, x_quant: the layer's inputs (windows, T, H) in the original and in the so far quantized model.
    """
    dense = {
        n: Grid(q, dtypes[n], q.W_q.device, *RATES.get(q.bits, OTHERS))
        for n, q in matrices.items()
        if layer.spots[n].cut.expert is None
    }
    if not dense:
        return {}
    targets = [layer.run(x, layer.original) for x in x_ref]
    sizes = [(y - x).square().sum().clamp(min=1e-30) for x, y in zip(x_ref, targets, strict=True)]
    with repeatable(), torch.enable_grad():
        layer.put(layer.quantized)
        before = sum(float(_loss(layer, {}, x, y)) for x, y in zip(x_quant, targets, strict=True))
        optimizer = torch.optim.Adam([g for m in dense.values() for g in m.parameters()], betas=(0.9, 0.95))
        rates = [g["lr"] for g in optimizer.param_groups]
        steps, step = EPOCHS * len(x_quant), 0
        for epoch in range(EPOCHS):
            for i in torch.randperm(len(x_quant), generator=torch.Generator().manual_seed(epoch)).tolist():
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * min((step + 1) / WARM, 1 - step / steps)
                optimizer.zero_grad()
                (_loss(layer, weights_of(layer, dense), x_quant[i], targets[i]) / sizes[i]).backward()
                optimizer.step()
                step += 1
        better = {n: m.quantized() for n, m in dense.items()}
        fixed = {n: Grid(q, dtypes[n], q.W_q.device, 0, 0) for n, q in better.items()}
        with torch.no_grad():
            after = sum(float(_loss(layer, weights_of(layer, fixed), x, y)) for x, y in zip(x_quant, targets, strict=True))
    return better if after < before else {}


class Grid:
    """A quantized matrix whose parts have gradients. Its dequantized value is the value of the rounded, stored parts.

    rate: Adam's learning rate of the scales' logarithms, the zeros and a fitted table's values (in codes: a table over
    -1 .. 1 spans `levels`). code_rate: that of the codes (0: they do not change). A table is sorted; codes index it.
    near: the weight (N, K) that the codes stand for: each starts where its weight lies between two codes, so that it changes
    the sooner, the nearer the other code is. None: in the middle of its interval.
    """

    def __init__(
        self,
        q: QuantizedTensor,
        dtype: torch.dtype,
        device: torch.device,
        rate: float,
        code_rate: float,
        near: torch.Tensor | None = None,
    ) -> None:
        self.q, self.dtype, self.rate, self.code_rate = q, dtype, rate, code_rate
        N, K = q.W_q.shape
        codes, self.table = q.W_q.to(device), None
        if q.table_kind:
            table, self.order = values(q.scheme, q.table, device)[0].to(device).sort(stable=True)
            largest = table.abs().max().clamp(min=TINY)
            self.span = torch.ldexp(torch.ones_like(largest), torch.frexp(largest)[1] - 1)  # a power of 2: divides exactly
            self.table = (table / self.span).requires_grad_(q.table_kind == "fitted")
            codes = self.order.argsort().to(torch.uint8)[codes.int()]
        self.codes = codes.reshape(N, K // q.group_size, q.group_size)
        self.scales = q.wide_scales.to(device).unsqueeze(-1)
        self.factor = 1.0 if q.table is None or q.table_kind == "fitted" else q.table.to(device)  # of scales in bytes
        self.stretch = torch.zeros_like(self.scales, requires_grad=True)
        mid = torch.full_like(self.scales, q.scheme.mid)
        self.zeros = mid if q.zeros is None else q.zeros.float().to(device).unsqueeze(-1)
        self.shift = torch.zeros_like(self.scales, requires_grad=q.zero == "float")
        self.moved = torch.zeros(self.codes.shape, device=device) if code_rate else None
        if self.moved is not None:
            if near is not None:
                self.moved = (self._places(near.float().reshape(self.codes.shape)) - self.codes).clamp(-MOST, MOST)
            self.moved.requires_grad_()

    def _places(self, groups: torch.Tensor) -> torch.Tensor:
        """Weights (N, G, g) in codes, between two of which they lie."""
        over = groups / divisor(self.scales)
        if self.table is None:
            return over + self.zeros
        table = self.table.detach() * self.span
        high = torch.searchsorted(table, over).clamp(1, len(table) - 1)
        step = (table[high] - table[high - 1]).clamp(min=TINY)
        return high - 1 + (over - table[high - 1]) / step

    def parameters(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups."""
        groups: list[dict[str, Any]] = [{"params": [t for t in (self.stretch, self.shift) if t.requires_grad], "lr": self.rate}]
        if self.table is not None and self.table.requires_grad:
            groups.append({"params": [self.table], "lr": self.rate * 2 / self.q.scheme.levels})
        return groups if self.moved is None else [*groups, {"params": [self.moved], "lr": self.code_rate}]

    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes (N, K), scales and zeros (N, G) as they would be stored, with gradients as if nothing were rounded."""
        codes = self.codes.float()
        if self.moved is not None:
            codes = codes + self.moved
            codes = codes + (codes.round().clamp(0, 2**self.q.bits - 1) - codes).detach()
        scales, zeros = self.scales * self.stretch.exp(), self.zeros + self.shift
        held = scales + (self._wide(self._bytes(scales)) - scales).detach() if self.q.scale != "float" else None
        return codes, stored(scales, self.dtype) if held is None else held, stored(zeros, self.dtype)

    def _bytes(self, scales: torch.Tensor) -> torch.Tensor:
        return to_bytes(scales.detach() / self.factor, self.q.scale)

    def _wide(self, held: torch.Tensor) -> torch.Tensor:
        return from_bytes(held, self.q.scale) * self.factor

    def weight(self) -> torch.Tensor:
        """(N, K) fp32."""
        codes, scales, zeros = self.parts()
        values = codes - zeros if self.table is None else _Looked.apply(codes, self.table * self.span)
        return (values * scales).reshape(self.q.W_q.shape)

    def quantized(self) -> QuantizedTensor:
        """What was learnt."""
        codes, scales, zeros = (t.detach() for t in self.parts())
        q = self.q
        zeros_of_rows = None if q.zeros is None else zeros.squeeze(-1)
        W_q, table = codes.round().to(torch.uint8).reshape(q.W_q.shape), q.table
        if self.table is not None:
            W_q = self.order.to(torch.uint8)[W_q.int()]
            if q.table_kind == "fitted":
                table = (self.table.detach() * self.span)[self.order.argsort()].unsqueeze(0)
        held = scales if q.scale == "float" else self._bytes(scales)
        return QuantizedTensor.of(q.scheme, W_q, held.squeeze(-1), zeros_of_rows, table)


class _Looked(torch.autograd.Function):
    """The values of codes in a sorted table. Between two codes the gradient of a code is the difference of their values."""

    @staticmethod
    def forward(ctx: Any, codes: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        at = codes.round().to(torch.uint8)
        ctx.save_for_backward(at, table)
        return table[at.int()]

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # type: ignore[override]
        at, table = ctx.saved_tensors
        of_codes = of_table = None
        if ctx.needs_input_grad[0]:
            high, low = (at.int() + 1).clamp(max=len(table) - 1), (at.int() - 1).clamp(min=0)
            of_codes = g * (table[high] - table[low]) / (high - low)
        if ctx.needs_input_grad[1]:  # level by level: adding up by index sorts all codes on a GPU
            of_table = torch.stack([torch.where(at == i, g, 0.0).sum() for i in range(len(table))])
        return of_codes, of_table


def stored(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """t (any shape) rounded to a dtype, with gradients as if nothing were rounded."""
    return t + (t.to(dtype).float() - t).detach()


def weights_of(layer: Any, learnt: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Parameter's name -> its value (N, K), for the parameters that trained matrices are a part or the whole of."""
    pieces: dict[str, list[tuple[int, int, torch.Tensor]]] = defaultdict(list)
    for name, matrix in learnt.items():
        spot, W = layer.spots[name], matrix.weight()
        first, last = spot.cut.rows or (0, W.shape[0])
        pieces[spot.path].append((first, last, W.T if spot.cut.transposed else W))
    weights = {}
    for path, parts in pieces.items():
        rest, at, joined = layer.quantized[path], 0, []
        for first, last, W in sorted(parts, key=lambda p: p[0]):
            joined += [rest[at:first], W]
            at = last
        whole = len(parts) == 1 and parts[0][2].shape == rest.shape
        weights[path] = parts[0][2] if whole else torch.cat([*joined, rest[at:]])
    return weights


def _loss(layer: Layer, weights: dict[str, torch.Tensor], x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The squared distance of the layer's output; parameters that are not in `weights` keep the layer's values."""
    out = functional_call(layer.module, weights, (x, *layer.others.args), layer.others.kwargs)
    return ((out[0] if isinstance(out, tuple) else out) - target).square().sum()


@contextmanager
def repeatable() -> Iterator[None]:
    """Inside this context attention has reproducible gradients: the fast kernels' backward adds in the order of arrival."""
    with sdpa_kernel(SDPBackend.MATH):
        yield
