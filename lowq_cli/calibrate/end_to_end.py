"""After the layers, the whole model: scales and zeros follow the KL divergence of its predictions from the original's.

Codes stay. What a layer alone cannot see, that errors of different layers add up or cancel, is what is left to gain. The
original's predictions come from its last hidden states, which the walk leaves behind; the quantized model is run layer by
layer, forwards without and backwards with gradients: one layer's activations are held at a time, and of the weights their
codes (a byte each), scales and zeros with Adam's averages. Source: own, of a known part: EfficientQAT, arXiv:2407.11062.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch.func import functional_call

from lowq_cli.calibrate import texts
from lowq_cli.calibrate.layer_file import load_item, load_notes, save_item
from lowq_cli.calibrate.learn import WARM, repeatable, stored, weights_of
from lowq_cli.calibrate.need import PassDone
from lowq_cli.calibrate.walk import Hidden
from lowq_cli.files.atomic import writing
from lowq_cli.hf.layers import DecoderLayers
from lowq_cli.plan.plan import Item
from lowq_packers.atomic import write_whole
from lowq_packers.qtensor import QuantizedTensor

PASSES = 4
RATE = 1e-3  # of the scales' logarithms and of the zeros, in codes
STATE = "end-to-end.safetensors"


class Grid:
    """A matrix whose scales and zeros have gradients. The dequantized value is that of what will be stored."""

    def __init__(self, q: QuantizedTensor, dtype: torch.dtype, device: torch.device) -> None:
        self.q, self.dtype = q, dtype
        N, K = q.W_q.shape
        self.codes = q.W_q.to(device).reshape(N, K // q.group_size, q.group_size)
        self.scales = q.scales.float().to(device).unsqueeze(-1)
        self.stretch = torch.zeros_like(self.scales, requires_grad=True)
        mid = torch.full_like(self.scales, 2.0 ** (q.bits - 1))
        self.zeros = mid if q.zeros is None else q.zeros.float().to(device).unsqueeze(-1)
        self.shift = torch.zeros_like(self.scales, requires_grad=q.zero == "float")

    @property
    def leaves(self) -> list[torch.Tensor]:
        """What an optimizer moves."""
        return [t for t in (self.stretch, self.shift) if t.requires_grad]

    def parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales and zeros as they will be stored."""
        return stored(self.scales * self.stretch.exp(), self.dtype), stored(self.zeros + self.shift, self.dtype)

    def weight(self) -> torch.Tensor:
        """(N, K) fp32."""
        scales, zeros = self.parts()
        return ((self.codes.float() - zeros) * scales).reshape(self.q.W_q.shape)

    def quantized(self) -> QuantizedTensor:
        """What was learnt."""
        scales, zeros = (t.detach().squeeze(-1).cpu() for t in self.parts())
        q = self.q
        return QuantizedTensor(q.W_q, scales, None if q.zeros is None else zeros, q.bits, q.group_size, q.zero)


class EndToEnd:
    """One model's phase.

    Args:
        blocks: its layers. items: the matrices that learn, by checkpoint name; dtypes: of their scales.
        files: checkpoint name -> file that holds what the layer's own phase found.
    """

    def __init__(
        self, blocks: DecoderLayers, items: dict[str, Item], dtypes: dict[str, torch.dtype], files: dict[str, Path]
    ) -> None:
        self.blocks, self.files, self.dtypes, device = blocks, files, dtypes, blocks.device
        self.layers: list[SimpleNamespace] = []
        self.grids: dict[str, Grid] = {}
        for number in range(len(blocks)):
            spots = {n: s for n, s in blocks.linears(number).items() if n in files and n in items}
            with blocks.layer(number) as module:
                held = {n: p.detach().clone() for n, p in module.named_parameters()}
            mine = {}
            for name, spot in spots.items():
                q = load_item(files[name], items[name])
                if spot.cut.expert is None:
                    mine[name] = Grid(q, dtypes[name], device)
                    if spot.cut.rows is None and not spot.cut.transposed:
                        held[spot.path] = held[spot.path].to("meta")  # all of it is the grid's
                else:
                    spot.cut.of(held[spot.path]).copy_(q.dequantize().to(device))
            self.grids |= mine
            module = blocks.layers[number]
            self.layers.append(SimpleNamespace(spots=spots, quantized=held, grids=mine, module=module, forward=module.forward))

    def run(self, ids: torch.Tensor, start: Hidden, wanted: Hidden, others: list[Any], folder: Path) -> Iterator[PassDone]:
        """Learn, and write a file beside each layer's; `files` then names those. Yields after each pass over the text.

        Args:
            ids: (n, T) token ids; start: the first layer's inputs in the quantized model, a batch each.
            wanted: the last layer's outputs in the original. others: see `DecoderLayers.start`.
            folder: where the passes done are kept, so that a killed run goes on behind them.
        """
        leaves = [t for g in self.grids.values() for t in g.leaves]
        optimizer = torch.optim.Adam(leaves, lr=RATE, betas=(0.9, 0.95))
        with repeatable(), self.blocks.tail() as logits:
            done, before = self._resume(folder / STATE, leaves, optimizer)
            if done == 0:
                before = self._loss(logits, ids, start, wanted, others)
            steps, step = PASSES * len(start), done * len(start)
            for number in range(done, PASSES):
                total = 0.0
                for i in torch.randperm(len(start), generator=torch.Generator().manual_seed(number)).tolist():
                    optimizer.param_groups[0]["lr"] = RATE * min((step + 1) / WARM, 1 - step / steps)
                    optimizer.zero_grad()
                    total += self._step(logits, ids, i, start[i], wanted[i], others)
                    optimizer.step()
                    step += 1
                self._keep(folder / STATE, leaves, optimizer, number + 1, before)
                yield PassDone(number + 1, PASSES, total / len(start))
            after = self._loss(logits, ids, start, wanted, others)
        self._write(after < before)

    def _forward(self, number: int, x: torch.Tensor, others: Any) -> torch.Tensor:
        """One quantized layer's output."""
        layer = self.layers[number]
        layer.module.forward = layer.forward  # `DecoderLayers.tail` puts another there
        weights = {n: p for n, p in layer.quantized.items() if not p.is_meta} | weights_of(layer, layer.grids)
        out = functional_call(layer.module, weights, (x, *others[0]), others[1])
        return out[0] if isinstance(out, tuple) else out

    def _through(self, x: torch.Tensor, others: list[Any]) -> list[torch.Tensor]:
        """Each layer's input, and the last one's output."""
        entered = [x.detach()]  # a tensor of its own: `x` is kept for the next pass and would keep its gradient too
        with torch.no_grad():
            for number in range(len(self.layers)):
                entered.append(self._forward(number, entered[-1], others[number]))
        return entered

    def _step(self, logits: Any, ids: torch.Tensor, i: int, x: torch.Tensor, wanted: torch.Tensor, others: list[Any]) -> float:
        """The gradients of a batch's mean KL divergence; that."""
        entered = self._through(x, others)
        last = entered.pop().requires_grad_()
        loss = 0.0
        for b in range(len(last)):  # a window at a time: logits are large
            with torch.enable_grad():
                kl = self._kl(logits, ids[i * texts.BATCH + b], last[b], wanted[b]) / len(last)
                kl.backward()
            loss += float(kl.detach())
        g = last.grad
        for number in reversed(range(len(self.layers))):
            with torch.enable_grad():
                h = entered.pop().requires_grad_()
                self._forward(number, h, others[number]).backward(g)
            g = h.grad
        return loss

    def _loss(self, logits: Any, ids: torch.Tensor, start: Hidden, wanted: Hidden, others: list[Any]) -> float:
        """The mean KL divergence over the text."""
        total = 0.0
        with torch.no_grad():
            for i, x in enumerate(start):
                last = self._through(x, others)[-1]
                for b in range(len(last)):
                    total += float(self._kl(logits, ids[i * texts.BATCH + b], last[b], wanted[i][b])) / len(last)
        return total / len(start)

    @staticmethod
    def _kl(logits: Any, window: torch.Tensor, hidden: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Nats a token, of one window (T, K)."""
        window = window.unsqueeze(0)
        with torch.no_grad():
            p = torch.log_softmax(logits(window, wanted.unsqueeze(0)).float(), -1)
        q = torch.log_softmax(logits(window, hidden.unsqueeze(0)).float(), -1)
        return (p.exp() * (p - q)).sum(-1).mean()

    def _resume(self, path: Path, leaves: list[torch.Tensor], optimizer: torch.optim.Adam) -> tuple[int, float]:
        """Passes done before, and the loss before them; leaves and averages are put back."""
        if not path.is_file():
            return 0, 0.0
        found = load_file(path)
        done, before = (float(x) for x in found["facts"])
        for i, t in enumerate(leaves):
            t.data.copy_(found[f"{i}.value"])
            averages = {k: found[f"{i}.{k}"].to(t.device) for k in ("exp_avg", "exp_avg_sq")}
            optimizer.state[t] = {"step": found[f"{i}.step"], **averages}
        return int(done), before

    @staticmethod
    def _keep(path: Path, leaves: list[torch.Tensor], optimizer: torch.optim.Adam, done: int, before: float) -> None:
        found = {"facts": torch.tensor([done, before], dtype=torch.float64)}
        for i, t in enumerate(leaves):
            state = optimizer.state[t]
            found |= {f"{i}.{k}": state[k].detach().cpu().contiguous() for k in ("step", "exp_avg", "exp_avg_sq")}
            found[f"{i}.value"] = t.detach().cpu().contiguous()
        with writing(path):
            write_whole(path, save(found))

    def _write(self, better: bool) -> None:
        """A file with the new scales and zeros beside each layer's; the old numbers where the loss did not fall."""
        for path in sorted(set(self.files.values())):
            tensors = load_file(path)
            for name, grid in self.grids.items() if better else ():
                if self.files[name] == path:
                    tensors |= save_item(grid.quantized(), name, self.dtypes[name])
            with writing(path):
                write_whole(polished(path), save(tensors, {"notes": json.dumps(load_notes(path))}))


def polished(path: Path) -> Path:
    """The file beside a layer's that holds what the whole model's phase made of it."""
    return path.with_name(f"polished-{path.name}")
