"""Finds where the inverse of a linear's input scales can go: into the norm before it, into v for o, into up for down.

Mappings are found from the flow of data and from module names that transformers uses for all families. A `ScaleMapping` is only
a proposal: the caller tests it by running the layer with a random scale (see scaling.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowq_cli.hf.layers import Spot


@dataclass(frozen=True)
class ScaleMapping:
    """Scales s (K,): columns of the matrices `after` (checkpoint names) are multiplied, outputs of `before` divided by s.

    label: the two sides, the same for all experts of a mixture.
    norm: path of the norm module whose weight (as `weight + offset`) and bias are divided; "" if a matrix is divided.
    before: checkpoint name of each divided matrix and the range of its divided rows. bias: parameter divided with them.
    heads: (key/value heads, queries per key head, head size) where a row serves several columns, which then share s.
    expert: the expert's index in a mixture.
    """

    label: str
    after: tuple[str, ...]
    norm: str = ""
    offset: float = 0.0
    before: tuple[tuple[str, int, int], ...] = ()
    bias: str = ""
    bias_rows: tuple[int, int] = (0, 0)
    heads: tuple[int, int, int] | None = None
    expert: int | None = None


def find(layer: nn.Module, spots: dict[str, Spot], run: Callable[[], object]) -> tuple[list[ScaleMapping], list[str]]:
    """The proposed mappings of a decoder layer for the matrices in `spots`, and the inputs without one.

    run: runs the layer, which has its weights, once on some text.
    """
    by_module: dict[str, list[str]] = {}
    for name, spot in spots.items():
        by_module.setdefault(spot.module, []).append(name)
    norms, inputs = _flow(layer, list(by_module), run)
    mappings, missing = [], []
    seen: set[str] = set()
    for module, names in by_module.items():
        if module in seen:
            continue
        if any(spots[n].cut.expert is not None for n in names):
            experts = _experts(module, names, spots)
            mappings += experts
            missing.append(f"{module}.gate_up_proj")
            missing += [] if experts else [f"{module}.down_proj"]
            continue
        norm = norms.get(inputs[module]) if module in inputs else None
        if norm is not None:
            together = sorted(m for m in by_module if inputs.get(m) == inputs[module])
            seen.update(together)
            after = tuple(n for m in together for n in by_module[m])
            mappings.append(ScaleMapping(f"{norm} -> {', '.join(together)}", after, norm, _offset(layer, norm)))
            continue
        mapping = _linear(layer, module, by_module, spots)
        if mapping:
            mappings.append(mapping)
        else:
            missing.append(module)
    return mappings, missing


def _flow(layer: nn.Module, modules: list[str], run: Callable[[], object]) -> tuple[dict[int, str], dict[str, int]]:
    """{id of a norm's output: the norm's path} and {linear's path: id of its input}."""
    norms: dict[int, str] = {}
    inputs: dict[str, int] = {}
    alive: list[Any] = []  # kept alive, so that no two tensors get the same id

    def after(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: object, out: torch.Tensor) -> None:
            alive.append(out)
            norms[id(out)] = name

        return hook

    def before(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            alive.append(args[0])
            inputs[name] = id(args[0])

        return hook

    hooks = [
        m.register_forward_hook(after(n))
        for n, m in layer.named_modules()
        if isinstance(w := getattr(m, "weight", None), nn.Parameter) and w.dim() == 1
    ]
    hooks += [layer.get_submodule(n).register_forward_pre_hook(before(n)) for n in modules]
    try:
        run()
    finally:
        for h in hooks:
            h.remove()
    return norms, inputs


def _offset(layer: nn.Module, norm: str) -> float:
    """The number that a norm adds to its weight (1 in Gemma), found from the norm's output for a weight of 0."""
    module: Any = layer.get_submodule(norm)
    weight = module.weight.data
    x = torch.ones(1, weight.shape[0], device=weight.device)
    x[:, ::2] = -1
    bias = module.bias.data if getattr(module, "bias", None) is not None else 0.0
    module.weight.data = torch.zeros_like(weight)
    try:
        return 0.0 if float((module(x) - bias).abs().max()) == 0 else 1.0
    finally:
        module.weight.data = weight


def _linear(layer: nn.Module, module: str, by_module: dict[str, list[str]], spots: dict[str, Spot]) -> ScaleMapping | None:
    """The mapping of o after v, or down after up: v and up are a linear of the same parent or the last rows of a fused one."""
    parent, _, leaf = module.rpartition(".")
    sources = {"o_proj": ("v_proj", "qkv_proj"), "down_proj": ("up_proj", "gate_up_proj")}.get(leaf, ())
    source = next((f"{parent}.{s}" for s in sources if f"{parent}.{s}" in by_module), None)
    if (
        source is None
        or len(by_module[source]) != 1
        or any(spots[n].cut.transposed for m in (source, module) for n in by_module[m])
    ):
        return None
    linear: Any = layer.get_submodule(source)
    K, N = layer.get_submodule(module).in_features, linear.out_features
    heads = None
    rows = K
    if leaf == "o_proj":
        size = getattr(layer.get_submodule(parent), "head_dim", 0)
        config = getattr(layer.get_submodule(parent), "config", None)
        kv = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", 0)
        if not size or not kv or K % (size * kv):
            return None
        heads, rows = (int(kv), K // (size * kv), int(size)), size * kv
    if rows > N:
        return None
    bias = f"{source}.bias" if linear.bias is not None else ""
    before = ((by_module[source][0], N - rows, N),)
    label = f"{source} -> {module}"
    return ScaleMapping(label, tuple(by_module[module]), before=before, bias=bias, bias_rows=(N - rows, N), heads=heads)


def _experts(module: str, names: list[str], spots: dict[str, Spot]) -> list[ScaleMapping]:
    """The mappings of down after up within each expert."""
    mappings = []
    for expert in sorted({e for n in names if (e := spots[n].cut.expert) is not None}):
        mine = [n for n in names if spots[n].cut.expert == expert]
        down = [n for n in mine if spots[n].leaf == "down_proj"]
        ups = [(n, *(spots[n].cut.rows or (0, 0))) for n in mine if spots[n].leaf == "gate_up_proj"]
        end = max((last for _, _, last in ups), default=0)
        half = end // 2
        if len(down) != 1 or not ups or sum(last - first for _, first, last in ups) != end:
            continue
        before = tuple((n, max(half, first) - first, last - first) for n, first, last in ups if last > half)
        mappings.append(ScaleMapping(f"{module}.up -> {module}.down", tuple(down), before=before, expert=expert))
    return mappings
