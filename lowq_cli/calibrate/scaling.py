"""Activation-aware scales: large inputs get a finer step, by moving a factor from the preceding layer into the weights.

The scale of an input is s = mean|x| ** ratio. The ratio with the least output error is searched per group of linears that share
the input. Source: AWQ (arXiv:2306.00978). Every mapping is tested on the layer before it is used: random scales must not change
the layer's output.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from lowq_cli.calibrate.layer_walk import Hidden, Layer
from lowq_cli.hf.scale_mappings import ScaleMapping, find
from lowq_cli.quantizers import rtn
from lowq_packers.scheme import Scheme

RATIOS = 20  # number of ratios: 0, 1/20, ..., the grid of AWQ
ROWS = 512  # max. rows of a weight that the search uses
EXACT = 1e-4  # max. relative change of a layer's output by an exact mapping; measured: exact 4e-7 or less, wrong 0.12


@dataclass
class Scaled:
    """The scales that were folded into a layer.

    rows, columns: checkpoint name -> factors of a matrix. kept: parameter -> new values of a norm or a bias, as they will
    be stored. missing: inputs that could not be scaled.
    """

    rows: dict[str, torch.Tensor] = field(default_factory=dict)
    columns: dict[str, torch.Tensor] = field(default_factory=dict)
    kept: dict[str, torch.Tensor] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


def scale(
    layer: Layer, x_quant: Hidden, schemes: Mapping[str, Scheme], dtypes: Mapping[str, torch.dtype], few_tokens: int
) -> Scaled:
    """Fold the best scales into a layer's original weights, before any of them is quantized.

    Args:
        x_quant: the layer's inputs (windows, T, H) in the so far quantized model.
        schemes: schemes of all matrices, by checkpoint name. dtypes: dtypes of unquantized parameters, by path in the layer.
        few_tokens: experts that fewer tokens visit are not scaled.
    """
    done = Scaled()
    exact: dict[str, bool] = {}
    window = x_quant[0][:1]  # one is enough; 8 took a fifth of a layer's CPU time (1B shape: 316 s instead of 250 s)
    with layer.one_window(len(x_quant[0])):
        mappings, done.missing = find(layer.module, layer.spots, lambda: layer.run(window, layer.original))
        for mapping in mappings:
            if mapping.label not in exact:
                exact[mapping.label] = is_exact(layer, mapping, window, dtypes)
    done.missing += [label.partition(" -> ")[2] for label, good in exact.items() if not good]
    usable = (m for m in mappings if exact[m.label])
    mappings = sorted(usable, key=lambda m: bool(m.norm))  # rows before columns, like `repeat`
    for mapping, x in _inputs(layer, mappings, x_quant):
        if mapping.expert is not None and x.tokens < few_tokens:
            continue
        s = _search(layer, mapping, x, schemes)
        if s is not None:
            _apply(layer, mapping, s, dtypes, done)
    layer.quantized = dict(layer.original)
    return done


def repeat(layer: Layer, done: Scaled) -> None:
    """Fold the scales that were found before into a layer: the weights are the same bit for bit."""
    for name in layer.spots:
        layer.scale(name, done.rows.get(name), done.columns.get(name))
    for path, values in done.kept.items():
        layer.replace(path, values)
    layer.quantized = dict(layer.original)


@dataclass
class _Inputs:
    """Sums over tokens of a linear's inputs: |x| (K,) and x x^T (K, K)."""

    size: torch.Tensor
    second: torch.Tensor
    tokens: int = 0

    @classmethod
    def like(cls, x: torch.Tensor) -> "_Inputs":
        K = x.shape[1]
        return cls(torch.zeros(K, device=x.device), torch.zeros(K, K, device=x.device))

    def add(self, x: torch.Tensor) -> None:
        self.size += x.abs().sum(0)
        self.second.addmm_(x.T, x)
        self.tokens += x.shape[0]


def _inputs(layer: Layer, mappings: list[ScaleMapping], x_quant: Hidden) -> Iterator[tuple[ScaleMapping, _Inputs]]:
    """Pairs of a mapping and its inputs: one pass over the text for the plain linears, then expert by expert."""
    plain = [m for m in mappings if m.expert is None]
    by_label: dict[str, _Inputs] = {}

    def hook(label: str) -> Callable[..., None]:
        def note(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            x = args[0].reshape(-1, args[0].shape[-1])
            by_label.setdefault(label, _Inputs.like(x)).add(x)

        return note

    first = {f.label: layer.spots[f.after[0]].module for f in plain}
    hooks = [layer.module.get_submodule(m).register_forward_pre_hook(hook(label)) for label, m in first.items()]
    try:
        for x in x_quant:
            layer.run(x, layer.original)
    finally:
        for h in hooks:
            h.remove()
    yield from ((f, by_label[f.label]) for f in plain)
    experts = {m.after[0]: m for m in mappings if m.expert is not None}
    for module in dict.fromkeys(layer.spots[n].module for n in experts):
        for name, x in layer.inner(module, x_quant):
            if name in experts:
                inputs = _Inputs.like(x)
                inputs.add(x)
                yield experts[name], inputs


def _search(layer: Layer, mapping: ScaleMapping, x: _Inputs, schemes: Mapping[str, Scheme]) -> torch.Tensor | None:
    """The scales (K,) with the least error; None where not scaling has the least error.

    The error of each linear counts relative to its output's size, and weights are rounded to the nearest: base model, 3 bits
    g64, WikiText-2: see benchmarks/notes/accuracy.md.
    """
    mean = (x.size / max(x.tokens, 1)).clamp(min=1e-8)
    if mapping.heads:
        kv, times, size = mapping.heads
        mean = mean.reshape(kv, times, size).mean(1, keepdim=True).expand(kv, times, size).reshape(-1)
    weights = []
    for name in mapping.after:
        W = layer.matrix(name, layer.original)
        W = W[:: -(-W.shape[0] // ROWS)].contiguous()
        weights.append((W, schemes[name], float(((W @ x.second) * W).sum())))
    best, least = None, float("inf")
    for step in range(RATIOS):
        s = mean ** (step / RATIOS)
        s = s / (s.max() * s.min()).sqrt()
        loss = 0.0
        for W, scheme, power in weights:
            E = rtn.quantize(W * s, scheme).dequantize() / s - W
            loss += float(((E @ x.second) * E).sum()) / max(power, 1e-30)
        if loss < least:
            best, least = s if step else None, loss
    return best


def _apply(layer: Layer, mapping: ScaleMapping, s: torch.Tensor, dtypes: Mapping[str, torch.dtype], done: Scaled) -> None:
    """Multiply the weights of `mapping.after` by s (K,) and divide the norm or matrix that makes their inputs by s."""
    if mapping.norm:
        s = _divide_norm(layer, mapping, s, dtypes, done)
    else:
        divisor = s
        if mapping.heads:
            kv, times, size = mapping.heads
            divisor = s.reshape(kv, times, size)[:, 0].reshape(-1)
        at = 0
        for name, first, last in mapping.before:
            rows = torch.ones(layer.matrix(name, layer.original).shape[0], device=s.device)
            rows[first:last] = 1 / divisor[at : at + last - first]
            at += last - first
            layer.scale(name, rows=rows)
            done.rows[name] = rows * done.rows.get(name, 1.0)
        if mapping.bias:
            _divide_bias(layer, mapping.bias, mapping.bias_rows, divisor, dtypes, done)
    for name in mapping.after:
        layer.scale(name, columns=s)
        done.columns[name] = s * done.columns.get(name, 1.0)


def _divide_norm(
    layer: Layer, mapping: ScaleMapping, s: torch.Tensor, dtypes: Mapping[str, torch.dtype], done: Scaled
) -> torch.Tensor:
    """Divide a norm by s and return the effective factors, which differ from s by the rounding of the stored weight."""
    path = f"{mapping.norm}.weight"
    old = layer.parameter(path) + mapping.offset
    new = (old / s - mapping.offset).to(dtypes[path]).float()
    taken = old / (new + mapping.offset)
    taken = torch.where((taken / s - 1).abs() < 1e-6, s, taken)  # s itself where rounding changed nothing
    usable = torch.isfinite(taken) & (taken > s / 2) & (taken < s * 2)
    taken = torch.where(usable, taken, 1.0)
    new = torch.where(usable, new, old - mapping.offset)
    layer.replace(path, new)
    done.kept[path] = new
    if (bias := f"{mapping.norm}.bias") in dtypes:
        _divide_bias(layer, bias, (0, len(s)), taken, dtypes, done)
    return taken


def _divide_bias(
    layer: Layer, path: str, rows: tuple[int, int], s: torch.Tensor, dtypes: Mapping[str, torch.dtype], done: Scaled
) -> None:
    new = layer.parameter(path).clone()
    new[slice(*rows)] /= s
    done.kept[path] = new.to(dtypes[path]).float()
    layer.replace(path, done.kept[path])


def is_exact(layer: Layer, mapping: ScaleMapping, hidden: torch.Tensor, dtypes: Mapping[str, torch.dtype]) -> bool:
    """Whether random scales leave the layer's output unchanged. They are powers of two, so that undoing them is exact."""
    exactly = dict.fromkeys(dtypes, torch.float32)
    before = layer.run(hidden, layer.original)
    K = layer.matrix(mapping.after[0], layer.original).shape[1]
    g = torch.Generator().manual_seed(0)
    s = 2.0 ** torch.randint(-2, 3, (K,), generator=g).float()
    if mapping.heads:
        kv, times, size = mapping.heads
        s = s.reshape(kv, times, size)[:, :1].expand(kv, times, size).reshape(-1)
    s = s.to(hidden.device)
    done = Scaled()
    parameters = {path: layer.parameter(path) for path in dtypes}
    _apply(layer, mapping, s, exactly, done)
    after = layer.run(hidden, layer.original)
    for name, rows in done.rows.items():
        layer.scale(name, rows=1 / rows)
    for name, columns in done.columns.items():
        layer.scale(name, columns=1 / columns)
    for path in done.kept:
        layer.replace(path, parameters[path])
    change = (after - before).norm() / (before - hidden).norm().clamp(min=1e-30)
    return bool(change < EXACT)
