"""Compile the kernels of a checkpoint while it is being written, so that its first generation and its server start quickly.

The plan's shapes give a model with a layer or two of each kind and uninitialized weights. All kernels that a generation, a
prompt of any length and a server launch are launched once, in threads; the compiled kernels stay in the caches on disk.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from lowq_cli import console
from lowq_cli.engine import native_loader, precompiling
from lowq_cli.engine.drafts import drafting
from lowq_cli.engine.kernel_launches import checks
from lowq_cli.engine.native import NativeDecoder
from lowq_cli.engine.parallel_read import Blank
from lowq_cli.engine.prompts import context_limit
from lowq_cli.engine.sampling import Sampling
from lowq_cli.files.source import Source
from lowq_cli.plan.plan import Item, Plan, output_config
from lowq_cli.run.prepare import Prepared
from lowq_cli.serving import cache_allocator
from lowq_cli.serving.continuous import MOST
from lowq_kernels.dispatch.precompile import launch_all
from lowq_packers.arch.config import read_config
from lowq_packers.errors import device_lost, log_error, one_line

LAYER = re.compile(r"model\.layers\.(\d+)\.")
WAYS = (Sampling(), Sampling(temperature=1.0))


def compile_ahead(prepared: Prepared, stopped: Callable[[], bool]) -> None:
    """Compile on the run's first GPU until `stopped()`. Raises no errors: the first use of a failed kernel reports them."""
    device = torch.device(str(prepared.workers[0]))
    try:
        with torch.inference_mode():
            if torch.cuda.mem_get_info(device)[0] < cache_allocator.ROOM:
                return
            source = stand_in(prepared.source, prepared.plan, prepared.out)
            model = native_loader.read(cast(Source, source), device, Blank)
            launch_all([partial(launch_unless, stopped, one) for one in launches(model)], lambda n, of: None)
    except Exception as e:  # no memory, or a family or kernel that this GPU does not support: the first use reports it
        log_error("kernels are not compiled ahead", e)
        if device_lost(e):
            console.warn(f"{device} was lost while kernels were compiled ahead: {one_line(e)}")


def launch_unless(stopped: Callable[[], bool], launch: Callable[[], object]) -> None:
    """Launch a kernel, but not once `stopped()`."""
    if not stopped():
        launch()


def launches(model: Any) -> list[Callable[[], object]]:
    """Return one launch of each kernel of single generations, of their steps with drafts, and of a server, in this order."""
    decoder, met = NativeDecoder(model), set[object]()
    work = [one for way in WAYS for one in precompiling.launches(model, decoder, 1, 1, way, met)]
    if drafting.is_dense(decoder.plan):
        work += [one for T in drafting.WIDTHS["cuda"] for one in checks(decoder, T)]
    trial = cache_allocator.trial_runner(
        decoder.plan, decoder.kv, MOST["cuda"], context_limit(model) or cache_allocator.NO_LIMIT, False
    )
    return work + cache_allocator.launches(trial)


def stand_in(source: Source, plan: Plan, folder: Path) -> SimpleNamespace:
    """Return the parts of an open checkpoint that `native_loader.read` needs (config, headers), for the plan's output in
    `folder` with one layer of each kind, and a second one of the first layer's: only there is the norm before it fused into
    its products.

    Raises NotPlain where the model's family is unknown.
    """
    config = read_config(source.config, len(source.headers))[0]
    types = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
    layers: dict[int, list[Item]] = {}
    others: list[Item] = []
    for item in plan.items:
        match = LAYER.match(item.name)
        (layers.setdefault(int(match[1]), []) if match else others).append(item)
    kinds: dict[object, list[int]] = {}
    for i, items in sorted(layers.items()):
        kinds.setdefault((types[i], *sorted((LAYER.sub("", m.name), m.spelled or "") for m in items)), []).append(i)
    chosen = sorted({i for same in kinds.values() for i in same[: 2 if min(layers) in same else 1]})
    items = [_moved(m, n) for n, i in enumerate(chosen) for m in layers[i]] + others
    small = output_config(source, replace(plan, items=tuple(items)))
    small |= {"num_hidden_layers": len(chosen)} | ({"layer_types": [types[i] for i in chosen]} if types[0] else {})
    headers = {n: h for m in items for n, h in m.outputs}
    return SimpleNamespace(name=source.name, folder=folder, config=small, headers=headers, mapped=lambda names: None)


def _moved(item: Item, layer: int) -> Item:
    """Return an item renamed to another layer."""

    def name(old: str) -> str:
        return LAYER.sub(f"model.layers.{layer}.", old)

    return replace(item, name=name(item.name), outputs=tuple((name(n), h) for n, h in item.outputs))
