"""Gradient descent on a quantized layer: its codes, scales, zeros and fitted tables follow the error of the layer's output.

What gptq finds matrix by matrix starts it. The loss is the squared distance of the layer's output, behind the layers quantized
so far, to what the original model has there; codes stay whole numbers (straight-through estimate). Nothing changes at run time.
Source: own, of known parts: learnt scales (LSQ, arXiv:1902.08153), a layer at a time (BRECQ, arXiv:2102.05426; EfficientQAT,
arXiv:2407.11062).
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from lowq_cli.calibrate.layer_walk import Hidden, Layer
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.tables import values

EPOCHS = 12
# Width -> Adam's rates: of the scales' logarithms and of the zeros (in codes); of the codes (0: they stay). Faster, 2 bits fit
# the calibration text alone. Base g64, WikiText-2 / mix: gptq 52.3 / 57.8; these 51.0 / 53.7; 5e-3 and 2e-2 54.2 / 54.3,
# with 24 epochs 57.9 / 57.8; 1e-3 and 5e-3 52.4 / 56.1; codes left alone 52.1 / 55.3. One bit has further to go: story g64,
# gptq 692 / 345; these 454 / 188; 2e-3 and 2e-2 655 / 197.
RATES = {1: (5e-3, 5e-2), 2: (2e-3, 1e-2), 3: (2e-3, 1e-2)}
OTHERS = (1e-3, 0.0)
WARM = 5  # steps until the rates are reached; from there on they fall to 0


def learn(
    layer: Layer, found: Mapping[str, QuantizedTensor], dtypes: Mapping[str, torch.dtype], x_ref: Hidden, x_quant: Hidden
) -> dict[str, QuantizedTensor]:
    """Those matrices that came out better, by checkpoint name: all or none.

    Args:
        layer: quantized by `found`; not changed.
        dtypes: of scales and zeros as stored, by name. Experts stay as they are.
        x_ref, x_quant: the layer's inputs (windows, T, H) in the original model, and behind the layers quantized so far.
    """
    dense = {
        n: Grid(q, dtypes[n], q.W_q.device, *RATES.get(q.bits, OTHERS))
        for n, q in found.items()
        if layer.spots[n].cut.expert is None
    }
    if not dense:
        return {}
    wanted = [layer.run(x, layer.original) for x in x_ref]
    sizes = [(y - x).square().sum().clamp(min=1e-30) for x, y in zip(x_ref, wanted, strict=True)]
    with repeatable(), torch.enable_grad():
        layer.put(layer.quantized)
        before = sum(float(_loss(layer, {}, x, y)) for x, y in zip(x_quant, wanted, strict=True))
        optimizer = torch.optim.Adam([g for m in dense.values() for g in m.parameters()], betas=(0.9, 0.95))
        rates = [g["lr"] for g in optimizer.param_groups]
        steps, step = EPOCHS * len(x_quant), 0
        for epoch in range(EPOCHS):
            for i in torch.randperm(len(x_quant), generator=torch.Generator().manual_seed(epoch)).tolist():
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * min((step + 1) / WARM, 1 - step / steps)
                optimizer.zero_grad()
                (_loss(layer, weights_of(layer, dense), x_quant[i], wanted[i]) / sizes[i]).backward()
                optimizer.step()
                step += 1
        better = {n: m.quantized() for n, m in dense.items()}
        fixed = {n: Grid(q, dtypes[n], q.W_q.device, 0, 0) for n, q in better.items()}
        with torch.no_grad():
            after = sum(float(_loss(layer, weights_of(layer, fixed), x, y)) for x, y in zip(x_quant, wanted, strict=True))
    return better if after < before else {}


class Grid:
    """A quantized matrix whose parts have gradients. The dequantized value is that of what will be stored.

    rate, code_rate: Adam's, of the scales' logarithms, of the zeros and a fitted table's values (in codes: a table over
    -1 .. 1 spans `levels`); of the codes (0: they stay). A table is held in ascending order, codes as places in it.
    """

    def __init__(self, q: QuantizedTensor, dtype: torch.dtype, device: torch.device, rate: float, code_rate: float) -> None:
        self.q, self.dtype, self.rate, self.code_rate = q, dtype, rate, code_rate
        N, K = q.W_q.shape
        codes, self.table = q.W_q.to(device), None
        if q.table_kind:
            self.table, self.order = values(q.scheme, q.table, device)[0].sort(stable=True)
            self.table.requires_grad_(q.table_kind == "fitted")
            codes = self.order.argsort().to(torch.uint8)[codes.int()]
        self.codes = codes.reshape(N, K // q.group_size, q.group_size)
        self.moved = torch.zeros(self.codes.shape, device=device, requires_grad=True) if code_rate else None
        self.scales = q.scales.float().to(device).unsqueeze(-1)
        self.stretch = torch.zeros_like(self.scales, requires_grad=True)
        mid = torch.full_like(self.scales, q.scheme.mid)
        self.zeros = mid if q.zeros is None else q.zeros.float().to(device).unsqueeze(-1)
        self.shift = torch.zeros_like(self.scales, requires_grad=q.zero == "float")

    def parameters(self) -> list[dict[str, Any]]:
        """What an optimizer is given."""
        found: list[dict[str, Any]] = [{"params": [t for t in (self.stretch, self.shift) if t.requires_grad], "lr": self.rate}]
        if self.table is not None and self.table.requires_grad:
            found.append({"params": [self.table], "lr": self.rate * 2 / self.q.scheme.levels})
        return found if self.moved is None else [*found, {"params": [self.moved], "lr": self.code_rate}]

    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes (N, K), scales and zeros (N, G) as they would be stored, with gradients as if nothing were rounded."""
        codes = self.codes.float()
        if self.moved is not None:
            codes = codes + self.moved
            codes = codes + (codes.round().clamp(0, 2**self.q.bits - 1) - codes).detach()
        scales, zeros = self.scales * self.stretch.exp(), self.zeros + self.shift
        return codes, stored(scales, self.dtype), stored(zeros, self.dtype)

    def weight(self) -> torch.Tensor:
        """(N, K) fp32."""
        codes, scales, zeros = self.parts()
        return ((codes - zeros if self.table is None else self._look_up(codes)) * scales).reshape(self.q.W_q.shape)

    def _look_up(self, codes: torch.Tensor) -> torch.Tensor:
        """What codes stand for; from one to the next the gradient is the distance of the values on both sides."""
        assert self.table is not None
        at, top = codes.detach().round().int(), self.q.scheme.levels - 1
        found = self.table[at]
        if self.moved is None:
            return found
        high, low = (at + 1).clamp(max=top), (at - 1).clamp(min=0)
        slope = (self.table[high] - self.table[low]).detach() / (high - low)
        return found + slope * (codes - codes.detach())

    def quantized(self) -> QuantizedTensor:
        """What was learnt."""
        codes, scales, zeros = (t.detach() for t in self.parts())
        q = self.q
        kept = None if q.zeros is None else zeros.squeeze(-1)
        W_q, table = codes.round().to(torch.uint8).reshape(q.W_q.shape), None
        if self.table is not None:
            W_q = self.order.to(torch.uint8)[W_q.int()]
            table = self.table.detach()[self.order.argsort()].unsqueeze(0) if q.table_kind == "fitted" else q.table
        return QuantizedTensor.of(q.scheme, W_q, scales.squeeze(-1), kept, table)


def stored(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """t, of any shape, as a dtype holds it, with gradients as if nothing were rounded."""
    return t + (t.to(dtype).float() - t).detach()


def weights_of(layer: Any, learnt: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Parameter's name -> its value (N, K), for those that learnt matrices are all or some rows of."""
    pieces: dict[str, list[tuple[int, int, torch.Tensor]]] = defaultdict(list)
    for name, matrix in learnt.items():
        spot, W = layer.spots[name], matrix.weight()
        first, last = spot.cut.rows or (0, W.shape[0])
        pieces[spot.path].append((first, last, W.T if spot.cut.transposed else W))
    found = {}
    for path, parts in pieces.items():
        rest, at, joined = layer.quantized[path], 0, []
        for first, last, W in sorted(parts, key=lambda p: p[0]):
            joined += [rest[at:first], W]
            at = last
        whole = len(parts) == 1 and parts[0][2].shape == rest.shape
        found[path] = parts[0][2] if whole else torch.cat([*joined, rest[at:]])
    return found


def _loss(layer: Layer, weights: dict[str, torch.Tensor], x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Squared distance of the layer's output; parameters not in `weights` are those it holds."""
    out = functional_call(layer.module, weights, (x, *layer.others[0]), layer.others[1])
    return ((out[0] if isinstance(out, tuple) else out) - wanted).square().sum()


@contextmanager
def repeatable() -> Iterator[None]:
    """Attention whose gradients are the same on every run: the fast kernels' backward adds in the order of arrival."""
    with sdpa_kernel(SDPBackend.MATH):
        yield
