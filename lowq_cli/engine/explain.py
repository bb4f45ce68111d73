"""Report each layer's kernel while decoding, the bytes read per step, and the share of the memory's bandwidth in use."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from lowq_cli.engine import bandwidth
from lowq_cli.engine.stream import Decoder
from lowq_cli.hf.embedding import QuantEmbedding
from lowq_cli.hf.experts import QuantExperts
from lowq_cli.models import CausalModel
from lowq_kernels.activations import act_of
from lowq_kernels.dispatch.registry import Call, Config, after_rounding, find, refusals, select
from lowq_kernels.dispatch.tuning import chosen_by
from lowq_kernels.fp8.matmul import kernel_for
from lowq_kernels.gpu import capability
from lowq_kernels.modules.dense import choice
from lowq_kernels.modules.linear import QuantLinear
from lowq_kernels.products.dense_call import DenseCall

DENSE = "torch"  # reported as the kernel of an unquantized layer that no kernel of lowq takes
EXPERT = re.compile(r"\bexperts\b")  # matches the module names of a mixture's experts


@dataclass(frozen=True)
class LayerKernel:
    """The layers of one name pattern, shape and scheme: their number, kernel, config, and why other kernels refused them.

    chosen: the source of the choice, "tuned", "shipped", "rule" or "name" (`tuning.chosen_by`); "" without a choice.
    """

    layers: str
    count: int
    N: int
    K: int
    scheme: str
    layout: str
    kernel: str
    config: dict[str, int]
    chosen: str
    refused: dict[str, str]


def kernels_of(model: nn.Module, M: int, dtype: torch.dtype) -> list[LayerKernel]:
    """One entry per distinct linear layer of `model`, in the model's order, for calls with M rows of `dtype`."""
    counts: dict[tuple[Any, ...], int] = {}
    for name, count, what in _products(model, M, dtype):
        key = (_pattern(name), *what)
        counts[key] = counts.get(key, 0) + count
    rows = []
    for (pattern, N, K, scheme, layout, forced, device, act, experts), count in counts.items():
        kernel, chosen = DENSE if layout == "dense" else forced, ""
        config, refused = Config(), dict[str, str]()
        if experts and (fused := find(experts)):
            kernel, config, chosen, refused = fused[0].name, fused[1], chosen_by(experts), refusals(experts)
        elif layout not in ("dense", "fp8"):
            call = after_rounding(Call(M, N, K, scheme, layout, dtype, device.type, capability(device), act), forced)
            spec, config = select(call, forced)
            config = {k: config[k] for k in spec.configs[0]}  # a tuning table's file may have another order
            kernel, chosen, refused = spec.name, chosen_by(call, forced), refusals(call)
            if experts and device.type == "cuda":  # a product for each expert: no kernel takes the layer
                refused |= refusals(experts)
        elif layout == "dense" and (
            dense := choice(DenseCall(M, N, K, getattr(torch, scheme), device.type, capability(device)))
        ):
            kernel, config = dense[0].name, dense[1]
        weight = str(scheme) if act == "none" else f"{scheme}, activations {act}"
        rows.append(LayerKernel(pattern, count, N, K, weight, layout, kernel, config, chosen, refused))
    return rows


def _pattern(name: str) -> str:
    """A module's name with "*" for its numbers, such as layers.*.qkv."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _products(model: nn.Module, M: int, dtype: torch.dtype) -> Iterator[tuple[str, int, tuple[Any, ...]]]:
    """(name, count, (N, K, scheme or dtype, layout, forced kernel, device, act, call of experts)) of every weight."""
    for name, m in model.named_modules():
        if isinstance(m, QuantLinear) and m.in_blocks:
            kernel = kernel_for(m.packed, m.act)
            yield name, 1, (m.out_features, m.in_features, m.scheme, "fp8", kernel, m.weight.device, m.act, None)
        elif isinstance(m, QuantLinear):
            shape, act = (m.out_features, m.in_features), act_of(m.act, M)
            yield name, 1, (*shape, m.scheme, m.layout, m.kernel, m.weight.device, act, None)
        elif isinstance(m, nn.Linear):
            dense = str(m.weight.dtype).removeprefix("torch.")
            yield name, 1, (*m.weight.shape, dense, "dense", None, m.weight.device, "none", None)
        elif isinstance(m, QuantExperts):
            call = m.call(dtype, m.top_k, M)
            act = chosen[0].acts[0] if call and (chosen := find(call)) else "none"
            for leaf in m.schemes:
                s = m.stack(leaf)
                yield f"{name}.{leaf}", s.words.shape[0], (s.N, s.K, s.scheme, s.layout, None, s.words.device, act, call)


def called(model: CausalModel, decoder: Decoder) -> nn.Module:
    """The module whose linear layers a decode step calls: the decoder's joined layers, or the model itself."""
    return cast(nn.Module, getattr(decoder, "linears", model))


def bytes_per_token(model: CausalModel, decoder: Decoder, batch: int = 1) -> int:
    """Bytes of weights that one decode step of `batch` sequences reads.

    Every weight counts once: a quantized weight with its packed size in memory, an embedding with one row per sequence (all
    rows where the head is tied to it), a mixture's experts with the share that `batch` tokens can choose. The KV cache is not
    counted.
    """
    chosen = _chosen(model, batch)
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding | QuantEmbedding)]  # Gemma 4 has two
    total, seen = 0.0, set()
    for name, m in (*called(model, decoder).named_modules(), *model.named_modules()):
        if m in embeddings:
            continue
        share = chosen if EXPERT.search(name) else 1.0
        for t in (t for tensors in _read(m).values() for t in tensors):
            place = t.untyped_storage().data_ptr()  # the parts of a joined weight are views with one storage
            if place not in seen:
                seen.add(place)
                total += share * t.numel() * t.element_size()
    for embedding in embeddings:
        tables = [_own(t) for t in embedding.parameters(recurse=False)]
        rows = embedding.num_embeddings
        total += sum(batch * t.nbytes / rows for t in tables if t.untyped_storage().data_ptr() not in seen)
    return round(total)


def bytes_by_layer(model: CausalModel, decoder: Decoder, batch: int = 1) -> dict[str, float]:
    """Bytes of weights that one decode step of `batch` sequences reads in the layers of each pattern (`LayerKernel.layers`)."""
    chosen, by_layer = _chosen(model, batch), dict[str, float]()
    for name, m in called(model, decoder).named_modules():
        share = chosen if EXPERT.search(name) else 1.0
        for leaf, tensors in _read(m).items():
            pattern = _pattern(f"{name}.{leaf}" if leaf else name)
            by_layer[pattern] = by_layer.get(pattern, 0.0) + share * sum(t.nbytes for t in tensors)
    return by_layer


def _chosen(model: CausalModel, batch: int) -> float:
    """The share of a mixture's experts that `batch` tokens can choose; 1 for other models."""
    config = model.config.get_text_config()

    def of_a_layer(*names: str) -> float:
        count = next((v for n in names if (v := getattr(config, n, None))), 0)
        return sum(count) / len(count) if isinstance(count, list) else count  # Hunyuan has one number per layer

    experts = of_a_layer("num_local_experts", "num_experts")
    return min(1.0, batch * (of_a_layer("num_experts_per_tok", "top_k_experts") or 1) / experts) if experts else 1.0


def _own(t: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor that is distributed over several processes."""
    return t.to_local() if hasattr(t, "to_local") else t  # a DTensor, whose class takes 0.6 s to import


def _read(m: nn.Module) -> dict[str, list[torch.Tensor]]:
    """The tensors of one module, without its children, that its products read, by product; "" is the module itself."""
    if not isinstance(m, QuantLinear | QuantExperts):
        parameters = [_own(p) for p in m.parameters(recurse=False)]
        return {"": parameters} if parameters else {}
    weights: dict[str, Any] = {"": m.packed} if isinstance(m, QuantLinear) else {name: m.stack(name) for name in m.shapes}
    tensors_of = {}
    for leaf, p in weights.items():
        # torch's CPU kernel has a second copy of scales and zeros in aux, and reads that one
        tensors = [p.words, p.aux] if p.layout == "cpu_int4" else [p.words, p.scales, p.zeros, p.aux]
        tensors += [m.bias] if isinstance(m, QuantLinear) else []
        tensors_of[leaf] = [t for t in tensors if t is not None]
    return tensors_of


def memory_speed(device: torch.device, n: int, cache: int | None = None) -> tuple[float | None, str]:
    """(bytes per second of memory for a step that reads n bytes, or None; the reason for None).

    cache: bytes of the last-level cache; None asks the system.
    """
    cache = cache or bandwidth.last_level_cache(device)
    if cache is None:
        return None, "the size of this processor's last cache is not known"
    if n < 2 * cache:
        return None, f"a step reads {n / 1e6:.1f} MB, which stays in the {cache / 1e6:.0f} MB cache: memory is not the limit"
    try:
        return bandwidth.measured(device), ""
    except torch.OutOfMemoryError:
        return None, "too little free memory to measure how fast it is"


def roofline(
    model: CausalModel, decoder: Decoder, decode_tps: float, batch: int, cache: int | None = None
) -> tuple[float | None, str]:
    """(percent of the speed at which this machine's memory could deliver the weights, or None; the basis, or the reason).

    cache: bytes of the last-level cache; None asks the system.
    """
    if not decode_tps:
        return None, "no token was decoded after the first"
    n = bytes_per_token(model, decoder, batch)
    speed, why_not = memory_speed(model.device, n, cache)
    if speed is None:
        return None, why_not
    percent = 100 * n * decode_tps / batch / speed
    return round(percent, 1), f"a step reads {n / 1e9:.2f} GB of weights, memory gives {speed / 1e9:.0f} GB/s here"
