"""Compile what a generation will launch before its first token, several kernels at a time.

A kernel is compiled by launching it once, on zeros and in a thread of its own: NVRTC and most of Triton's compiler run
without the interpreter's lock. Exactly the kernels of this decoder, batch and prompt are launched; where all of them are
in the caches on disk, that takes some milliseconds and nothing is shown.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from lowq_cli.engine import explain
from lowq_cli.engine.blocks import Mixture, Mlp
from lowq_cli.engine.fused import FusedDecoder, passes
from lowq_cli.engine.sampling import Sampling
from lowq_kernels.decode.attend import LONG
from lowq_kernels.decode.kv import Cache, zeros
from lowq_kernels.decode.mixture import FEW_TOKENS
from lowq_kernels.dispatch.precompile import launch_all
from lowq_kernels.modules import dense
from lowq_kernels.modules.fp8_linear import Fp8Linear
from lowq_kernels.modules.linear import QuantLinear

SLOTS = 64  # of caches that attention is compiled on; from LONG on it is another instance


def warm(
    model: Any,
    decoder: Any,
    prompts: list[list[int]],
    sampling: Sampling,
    done: Callable[[int, int], None] = lambda n, of: None,
) -> int:
    """Compile in parallel what this decoder has not met; returns how many launches that took, 0 on a CPU.

    A generation asks for it before it reads its prompts, so that another batch size or length of prompt waits for the slowest
    kernel, not for one after the other. `done(n, of)` is called where it is slow.
    """
    if model.device.type != "cuda" or not prompts:
        return 0
    met = _met.setdefault(decoder, set())
    work = launches(model, decoder, len(prompts), max(map(len, prompts)), sampling, met)
    return launch_all(work, done) if work else 0


def warm_texts(model: Any, decoder: FusedDecoder, rows: int) -> int:
    """Compile in parallel what the logits of whole texts, `rows` tokens at a time, take; as `warm`, told to nobody."""
    if model.device.type != "cuda":
        return 0
    return launch_all([*products(model, decoder, {rows}), *_of_texts(decoder, rows)], lambda n, of: None)


_met: WeakKeyDictionary[Any, set[object]] = WeakKeyDictionary()  # decoder -> rows of products and steps that it has launched


def launches(
    model: Any, decoder: Any, batch: int, longest: int, sampling: Sampling, met: set[object] | None = None
) -> list[Callable[[], object]]:
    """One launch of each kernel that `batch` prompts of up to `longest` tokens and what follows them will take.

    What is in `met` is left out, and what is launched joins it.
    """
    met = set() if met is None else met
    rows = {batch} | {(some.stop - some.start) * (tokens.stop - tokens.start) for some, tokens in passes(batch, 0, longest)}
    step, new = (batch, replace(sampling, seed=0)), rows - met
    work = [*products(model, decoder, new)]
    if isinstance(decoder, FusedDecoder) and step not in met:
        work += _between(decoder, batch, new, sampling)
    met |= {*rows, step}
    return work


def products(model: Any, decoder: Any, rows: set[int]) -> Iterator[Callable[[], object]]:
    """One launch for each distinct matmul and number of rows: a step has one for each sequence, a prompt one a token."""
    seen = set()
    for layer in explain.called(model, decoder).modules():
        if isinstance(layer, QuantLinear | Fp8Linear | nn.Linear):
            shape = (layer.out_features, layer.in_features, _compiled_for(layer), layer.bias is None)
            for M in rows:
                if (M, shape) not in seen and (M <= dense.MOST_ROWS or not isinstance(layer, nn.Linear)):
                    seen.add((M, shape))
                    yield partial(_multiply, layer, M, model.dtype)


def _compiled_for(layer: QuantLinear | Fp8Linear | nn.Linear) -> tuple[object, ...]:
    if isinstance(layer, QuantLinear):
        return layer.scheme, layer.layout, layer.kernel
    return (layer.block, layer.act) if isinstance(layer, Fp8Linear) else (layer.weight.dtype,)


def _multiply(layer: QuantLinear | Fp8Linear | nn.Linear, M: int, dtype: torch.dtype) -> None:
    dense.linear(layer, torch.zeros(M, layer.in_features, dtype=dtype, device=layer.weight.device))


def _between(decoder: FusedDecoder, batch: int, rows: set[int], sampling: Sampling) -> list[Callable[[], object]]:
    """One launch for each kernel that a step has between its matmuls, and for a mixture's layer."""
    blocks, ops = decoder.blocks, decoder.ops
    first = blocks.layers[0]
    make = partial(torch.zeros, dtype=decoder.dtype, device=decoder.device)
    heads = first.heads

    def attend(sequences: int, slots: int) -> None:
        caches = [_held(decoder, sequences, slots) for _ in range(2)]
        pos = torch.zeros(sequences, dtype=torch.int32, device=decoder.device)
        cos, sin = blocks.rope_tables(slots, decoder.device, decoder.dtype)[first.rope]
        ops.attend(make(sequences, (heads.HQ + 2 * heads.HKV) * heads.D), *caches, pos, cos, sin, heads)

    def choose(advance: int) -> None:
        logits = make(batch, blocks.head.out_features)
        token = torch.zeros(batch, dtype=torch.int64, device=decoder.device)
        pos, seed = token.to(torch.int32), token[:1].clone()
        ops.choose(logits, token, pos, seed, sampling.temperature, advance)

    work: list[Callable[[], object]] = [partial(attend, batch, SLOTS), partial(attend, 1, LONG)]
    work += [partial(choose, 0), partial(choose, 1), *_of_texts(decoder, batch)]
    if decoder.folds(batch):
        work += _folded(decoder, batch)
    for M in rows - {batch} if isinstance(first.mlp, Mixture) else ():
        work += _second_half(decoder, M)
    return work


def _held(decoder: FusedDecoder, sequences: int, slots: int) -> Cache:
    heads = decoder.blocks.layers[0].heads
    return zeros(decoder.kv, (sequences, heads.HKV, slots, heads.D), decoder.dtype, decoder.device)


def _of_texts(decoder: FusedDecoder, rows: int) -> Iterator[Callable[[], object]]:
    """One launch for each kernel between the matmuls of prompts; for that of steps, too, but for its attention."""
    blocks, ops, first = decoder.blocks, decoder.ops, decoder.blocks.layers[0]
    make = partial(torch.zeros, dtype=decoder.dtype, device=decoder.device)
    norm, heads = first.before_attention, first.heads
    x = make(rows, norm.weight.shape[0])

    def attend_prompt() -> None:  # neither the number of tokens nor of slots is compiled in
        caches = [_held(decoder, 1, SLOTS) for _ in range(2)]
        tables = blocks.rope_tables(SLOTS, decoder.device, decoder.dtype)[first.rope]
        ops.attend_prompt(make(1, 2, (heads.HQ + 2 * heads.HKV) * heads.D), *caches, 0, *tables, heads)

    yield attend_prompt
    yield partial(ops.add_norm, x, None, norm.weight, norm.eps, None)
    yield partial(ops.add_norm, x.clone(), x.clone(), norm.weight, norm.eps, first.post_attention)
    if isinstance(first.mlp, Mlp):
        yield partial(ops.gated, make(rows, first.mlp.gate_up.out_features), blocks.act)
    yield from _second_half(decoder, rows)


def _second_half(decoder: FusedDecoder, rows: int) -> Iterator[Callable[[], object]]:
    """One launch of a layer's second half; none of a mixture of so many rows that the host chooses its kernels."""
    first = decoder.blocks.layers[0]
    if isinstance(first.mlp, Mlp) or rows <= FEW_TOKENS or first.mlp.experts.grouped(decoder.dtype):
        x = torch.zeros(rows, first.before_attention.weight.shape[0], dtype=decoder.dtype, device=decoder.device)
        yield partial(decoder.mlp, x, first.mlp)


def _folded(decoder: FusedDecoder, batch: int) -> Iterator[Callable[[], object]]:
    """One launch of each distinct product that does more than multiply."""
    fold, layers, act, seen = decoder.ops.fold, decoder.blocks.layers, decoder.blocks.act, set()
    assert fold is not None  # `decoder.folds` has asked
    make = partial(torch.zeros, dtype=decoder.dtype, device=decoder.device)
    row = torch.ones(batch, dtype=torch.float32, device=decoder.device)
    for layer in layers:
        mlp: Any = layer.mlp
        for role, m in (("qkv", layer.qkv), ("o", layer.o), ("gate_up", mlp.gate_up), ("down", mlp.down)):
            key = (role, m.out_features, m.in_features, getattr(m, "scheme", None), m.bias is None)
            if key in seen:
                continue
            seen.add(key)
            x, norm = make(batch, m.in_features), layer.before_mlp
            if role in ("o", "down"):
                yield partial(fold.product_add, m, x, make(batch, m.out_features), norm.weight, norm.eps, row)
                continue
            squares = torch.ones(batch, x.shape[1] // fold.SQUARES, dtype=torch.float32, device=decoder.device)
            stream = fold.Residual(x, squares, row, norm.eps)
            if role == "gate_up":
                yield partial(fold.norm_product_gate, m, stream, act)
            else:
                yield partial(fold.norm_product, m, stream)
