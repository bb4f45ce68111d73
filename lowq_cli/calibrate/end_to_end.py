"""End-to-end training after the layers are quantized: minimizes the KL divergence from the original's predictions.

It trains scales and zeros, the norms' weights and, in few bits, codes (`need.TOGETHER`), embedding and head (outside.py).
Training a layer alone cannot see that errors of different layers add up or cancel; this can. The original's predictions come
from its last hidden states, which the walk leaves behind. The quantized model runs layer by layer, forwards without gradients
and backwards with them, and a layer is updated as soon as it has its gradients: only one layer's activations and gradients are
held at a time, next to the codes of all weights (a byte each), the trained parameters and Adam's averages of them. Source:
lowq's; EfficientQAT (arXiv:2407.11062) is the known part.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch.func import functional_call

from lowq_cli.calibrate import texts
from lowq_cli.calibrate.cuda_graph import Recorded, adam, set_rate
from lowq_cli.calibrate.layer_file import load_item, load_notes, save_item
from lowq_cli.calibrate.layer_walk import Hidden
from lowq_cli.calibrate.learn import WARM, Grid, repeatable, stored, weights_of
from lowq_cli.calibrate.outside import Outside
from lowq_cli.calibrate.requirements import STRAIGHT_CODES, PassDone, can_move, pass_count, rates, starts_straight, table_rate
from lowq_cli.hf.layers import DecoderLayers, Others, following, is_norm, run
from lowq_cli.plan.plan import Item
from lowq_cli.state import writing
from lowq_packers.atomic import write_whole
from lowq_packers.regular import opened

Words = Sequence[torch.Tensor]  # token ids of each batch

STATE = "end-to-end.safetensors"
AROUND = "around.safetensors"  # the values of what outside.py trains, `NAME.values` each


class EndToEnd:
    """The end-to-end training of one model.

    Args:
        blocks: its layers. items: the matrices that are trained, by checkpoint name; dtypes: those of their scales.
        files: checkpoint name -> file with the result of training the layer alone. kept: checkpoint name -> dtype of the
            tensors that are not quantized, norms among them. batches: number of steps of a pass; codes that cannot move in all
            of them are not trained, which saves 12 bytes a weight.
    """

    def __init__(
        self,
        blocks: DecoderLayers,
        items: dict[str, Item],
        dtypes: dict[str, torch.dtype],
        files: dict[str, Path],
        kept: dict[str, torch.dtype],
        batches: int,
    ) -> None:
        self.blocks, self.files, self.dtypes, self.kept, device = blocks, files, dtypes, kept, blocks.device
        self.layers: list[SimpleNamespace] = []
        self.optimizers: list[torch.optim.Adam | None] = []
        weights = sum(i.params for i in items.values())
        self.passes = pass_count((items[n] for n in files if n in items), weights)
        fastest = 0.0  # the rate of norms
        for number in range(len(blocks)):
            spots = {n: s for n, s in blocks.linears(number).items() if n in files and n in items}
            with blocks.layer(number) as module:
                quantized = {n: p.detach().clone() for n, p in module.named_parameters()}
            mine = {}
            for name, spot in spots.items():
                q = load_item(files[name], items[name])
                if spot.cut.expert is None:
                    rate, _, code_rate = rates(q.bits, weights)
                    straight = starts_straight(items[name], weights)
                    near = spot.cut.of(quantized[spot.path]) if straight else None
                    if straight:
                        code_rate = min(code_rate, STRAIGHT_CODES)
                    elif not can_move(code_rate, self.passes * batches):
                        code_rate = 0.0
                    mine[name] = Grid(q, dtypes[name], device, rate, code_rate, near)
                    if spot.cut.rows is None and not spot.cut.transposed:
                        quantized[spot.path] = quantized[spot.path].to("meta")  # all of its values come from the grid
                else:
                    spot.cut.of(quantized[spot.path]).copy_(q.dequantize().to(device))
            module = blocks.layers[number]
            norm_rate = rates(min(g.q.bits for g in mine.values()), weights)[1] if mine else 0.0
            norms = {p: n for p, n in blocks.kept(number).items() if norm_rate and n in kept and _is_norm(module, p)}
            fastest = max(fastest, norm_rate)
            learnt = {p: quantized[p].float().requires_grad_() for p in norms}
            groups = [g for m in mine.values() for g in m.parameters()]
            groups += [{"params": list(learnt.values()), "lr": norm_rate}] if learnt else []
            self.optimizers.append(adam(groups, device) if groups else None)
            self.layers.append(
                SimpleNamespace(
                    spots=spots,
                    quantized=quantized,
                    grids=mine,
                    norms=learnt,
                    names=norms,
                    module=module,
                    forward=module.forward,
                )
            )
        self.outside = Outside(blocks, kept, table_rate(weights), fastest)
        self.optimizers.append(self.outside.optimizer)

    def run(
        self,
        parts: Sequence[torch.Tensor],
        start: Hidden,
        targets: Hidden,
        others: list[Others],
        tables: dict[str, torch.Tensor],
        folder: Path,
    ) -> Iterator[PassDone]:
        """Train, and write a file next to each layer's; `files` then names the new ones. Yields after each pass over a part.

        Args:
            parts: (n, T) token ids of each part of the text; passes read them in turn.
            start: the first layer's inputs in the quantized model, one tensor per batch of the first part.
            targets: the last layer's outputs in the original; both lists then take those of other parts.
            others: see `DecoderLayers.start`. tables: embeddings that are quantized, by the model's parameter.
            folder: finished passes are saved here, so that a killed run continues after them.
        """
        groups = [g for o in self.optimizers if o for g in o.param_groups]
        full = [float(g["lr"]) for g in groups]
        batches = [len(ids.split(texts.BATCH)) for ids in parts]
        of_pass = [number % len(parts) for number in range(self.passes)]
        words, read = parts[0].to(self.blocks.device).split(texts.BATCH), 0
        with repeatable(), fast_products(), self.blocks.tail() as logits:
            done, before = self._resume(folder / STATE)
            if done == 0:
                before = self.loss(logits, words, start, targets, others)
            train = self._recorded(partial(self._step, logits, others), others)
            steps, step = sum(batches[p] for p in of_pass), sum(batches[p] for p in of_pass[:done])
            for number in range(done, self.passes):
                if of_pass[number] != read:
                    read = of_pass[number]
                    words = self._enter(parts[read], start, targets, others, tables)
                total = torch.zeros((), dtype=torch.float64, device=self.blocks.device)
                for i in torch.randperm(len(start), generator=torch.Generator().manual_seed(number)).tolist():
                    for group, rate in zip(groups, full, strict=True):
                        set_rate(group, rate * min((step + 1) / WARM, 1 - step / steps))
                    total += train(words[i], start[i], targets[i], number=i)
                    step += 1
                self._keep(folder / STATE, number + 1, before)
                yield PassDone(number + 1, self.passes, float(total) / len(start), read + 1 if len(parts) > 1 else 0)
            if read:
                words = self._enter(parts[0], start, targets, others, tables)
            after = self.loss(logits, words, start, targets, others)
        self._write(after < before, folder)

    @torch.no_grad()
    def _enter(
        self, ids: torch.Tensor, start: Hidden, targets: Hidden, others: list[Others], tables: dict[str, torch.Tensor]
    ) -> Words:
        """Fill both lists for another part of the text, and return its batches. What they held goes first."""
        words = ids.to(self.blocks.device).split(texts.BATCH)
        start.clear()
        targets.clear()
        for batch in words:
            start.append(self.blocks.entering(batch, tables))
            targets.append(self.blocks.entering(batch, {}) if tables else start[-1])
        for number, layer in enumerate(self.layers):
            with self.blocks.layer(number) as module:
                module.forward = layer.forward  # `entering` replaced it
                for i in range(len(targets)):
                    targets[i] = following(run(module, targets[i], others[number]), others[number], i)
        return words

    def _forward(self, number: int, x: torch.Tensor, others: Others) -> torch.Tensor:
        """One quantized layer's output."""
        layer = self.layers[number]
        layer.module.forward = layer.forward  # `DecoderLayers.tail` replaces it
        weights = {n: p for n, p in layer.quantized.items() if not p.is_meta} | weights_of(layer, layer.grids)
        weights |= {p: stored(t, self.kept[layer.names[p]]) for p, t in layer.norms.items()}
        out = functional_call(layer.module, weights, (x, *others.args), others.kwargs)
        return out[0] if isinstance(out, tuple) else out

    def _through(self, x: torch.Tensor, others: list[Others], i: int) -> list[torch.Tensor]:
        """Each layer's input for batch i, and the last one's output."""
        entered = [x.detach()]  # a new tensor: `x` is kept for the next pass and would keep its gradient, too
        with torch.no_grad():
            for number in range(len(self.layers)):
                entered.append(following(self._forward(number, entered[-1], others[number]), others[number], i))
        return entered

    def _recorded(self, work: Callable[..., torch.Tensor], others: list[Others]) -> Callable[..., torch.Tensor]:
        """`work` as a CUDA graph, unless a model adds something of each batch's own between its layers.

        A model with experts is not recorded either: the rows that an expert computes depend on values.
        """
        eager = self.blocks.has_experts or any(o.added for o in others)
        return work if eager else Recorded(work, self.blocks.device, self._forget)

    def _forget(self) -> None:
        for optimizer in self.optimizers:
            if optimizer:
                optimizer.zero_grad()

    def _step(
        self, logits: Any, others: list[Others], words: torch.Tensor, x: torch.Tensor, targets: torch.Tensor, number: int
    ) -> torch.Tensor:
        """Update every layer by the gradients of the mean KL divergence of batch `number`, and return that divergence."""
        self.outside.begin()
        with torch.enable_grad():
            x = self.outside.entering(words, x)
        entered = self._through(x, others, number)
        last = entered.pop().requires_grad_()
        loss = torch.zeros((), device=x.device)
        for b in range(len(last)):  # one window at a time, because logits are large
            with torch.enable_grad():
                kl = self._kl(logits, words[b], last[b], targets[b]) / len(last)
                kl.backward()
            loss += kl.detach()
        g = last.grad
        for layer in reversed(range(len(self.layers))):
            with torch.enable_grad():
                h = entered.pop().requires_grad_()
                self._forward(layer, h, others[layer]).backward(g)
            g = h.grad
            if optimizer := self.optimizers[layer]:
                optimizer.step()
                optimizer.zero_grad()
        if x.requires_grad:
            x.backward(g)
        self.outside.step()
        return loss

    def loss(self, logits: Any, words: Words, start: Hidden, targets: Hidden, others: list[Others]) -> float:
        """The mean KL divergence over the text."""

        def of_batch(words: torch.Tensor, x: torch.Tensor, targets: torch.Tensor, number: int) -> torch.Tensor:
            self.outside.begin()
            last = self._through(self.outside.entering(words, x), others, number)[-1]
            return sum(self._kl(logits, *w) for w in zip(words, last, targets, strict=True)) / len(last)  # type: ignore[return-value]

        measure = self._recorded(of_batch, others)
        total = torch.zeros((), dtype=torch.float64, device=self.blocks.device)
        with torch.no_grad():
            for i, batch in enumerate(zip(words, start, targets, strict=True)):
                total += measure(*batch, number=i)
        return float(total) / len(start)

    def _kl(self, logits: Any, window: torch.Tensor, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The KL divergence of one window (T, K), in nats per token."""
        window = window.unsqueeze(0)
        with torch.no_grad():
            p = torch.log_softmax(logits(window, targets.unsqueeze(0)).float(), -1)
        q = torch.log_softmax(logits(window, hidden.unsqueeze(0), self.outside.used).float(), -1)
        return (p.exp() * (p - q)).sum(-1).mean()

    def _leaves(self) -> Iterator[tuple[str, torch.optim.Adam, torch.Tensor]]:
        """The trained parameters: a unique key, the optimizer, the parameter."""
        for number, optimizer in enumerate(self.optimizers):
            if optimizer:
                for i, t in enumerate([t for g in optimizer.param_groups for t in g["params"]]):
                    yield f"{number}.{i}", optimizer, t

    def _resume(self, path: Path) -> tuple[int, float]:
        """The number of passes that an earlier run finished, and the loss before them; restores leaves and averages."""
        if not path.is_file():
            return 0, 0.0
        tensors = load_own(path)
        done, before = (float(x) for x in tensors["facts"])
        for key, optimizer, t in self._leaves():
            t.data.copy_(tensors[f"{key}.value"])
            averages = {k: tensors[f"{key}.{k}"].to(t.device) for k in ("exp_avg", "exp_avg_sq")}
            optimizer.state[t] = {"step": tensors[f"{key}.step"].to(t.device), **averages}
        return int(done), before

    def _keep(self, path: Path, done: int, before: float) -> None:
        tensors = {"facts": torch.tensor([done, before], dtype=torch.float64)}
        for key, optimizer, t in self._leaves():
            state = optimizer.state[t]
            tensors |= {f"{key}.{k}": state[k].detach().cpu().contiguous() for k in ("step", "exp_avg", "exp_avg_sq")}
            tensors[f"{key}.value"] = t.detach().cpu().contiguous()
        with writing(path):
            write_whole(path, save(tensors))

    def _write(self, better: bool, folder: Path) -> None:
        """Write a file with the trained values next to each layer's; with the old values where the loss did not fall."""
        around = {f"{name}.values": t.cpu() for name, t in self.outside.learnt().items()} if better else {}
        with writing(folder / AROUND):  # before the layers' files, which tell a resumed run that this one is there
            write_whole(folder / AROUND, save(around))
        learnt: dict[Path, dict[str, torch.Tensor]] = {path: {} for path in sorted(set(self.files.values()))}
        for layer in self.layers if better else ():
            for name, grid in layer.grids.items():
                learnt[self.files[name]] |= save_item(grid.quantized(), name, self.dtypes[name])
            for p, t in layer.norms.items():
                name = layer.names[p]
                learnt[self.files[next(iter(layer.grids))]][f"{name}.values"] = t.detach().to(self.kept[name]).cpu()
        for path, tensors in learnt.items():
            with writing(path):
                write_whole(polished(path), save(load_own(path) | tensors, {"notes": json.dumps(load_notes(path))}))


@contextmanager
def fast_products() -> Iterator[None]:
    """Inside this context a GPU multiplies fp32 in TF32, several times as fast; gradients of rounded weights need no more."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def load_own(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file that this run wrote."""
    with opened(path) as name:
        return load_file(name)


def _is_norm(module: torch.nn.Module, path: str) -> bool:
    """Whether a layer's parameter is the weight of a norm."""
    owner, _, leaf = path.rpartition(".")
    return leaf == "weight" and is_norm(module.get_submodule(owner))


def polished(path: Path) -> Path:
    """The file, next to a layer's, that holds the layer after end-to-end training."""
    return path.with_name(f"polished-{path.name}")
