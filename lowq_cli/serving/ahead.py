"""Kernels of a checkpoint that is being written, compiled meanwhile: its first text and its server start as later ones do.

A model is made of the plan's shapes, with one layer of each kind and whatever the GPU's memory holds for weights. What a
text, a prompt of any length and a server launch is launched once, in threads; what that compiles stays in the caches on disk.
All that in a process of its own, begun before torch is imported: threads of the one that quantizes took the interpreter from
it, and the demo was written after 5.7 s in place of 4.
"""

import os
import pickle
import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any, cast

import torch

from lowq_cli.engine import light, warm
from lowq_cli.engine.fused import FusedDecoder
from lowq_cli.engine.prompts import context_limit
from lowq_cli.engine.reading import Blank
from lowq_cli.engine.sampling import Sampling
from lowq_cli.files.family_config import read_config
from lowq_cli.files.source import Source
from lowq_cli.plan.plan import Item, Plan, output_config
from lowq_cli.plan.recipe import BUDGETS
from lowq_cli.run.prepare import Prepared, prepare
from lowq_cli.serving import paged
from lowq_cli.serving.continuous import MOST
from lowq_kernels.dispatch.precompile import launch_all

LAYER = re.compile(r"model\.layers\.(\d+)\.")
ROOM = 12 << 30  # free bytes of a GPU below which nothing is tried: logits of 4,096 rows take 1 GB a thread
AFTER_S = 3.0  # to go on when the run has ended: the next command imports torch for as long, and then needs the kernels
BEHIND = 5  # how far its threads let others go first
WAYS = (Sampling(), Sampling(temperature=1.0))
PLAIN = {"rotate": False, "calib": None, "fit": None, "tokens_per_s": None, "judge": None, **dict.fromkeys(BUDGETS)}


def main() -> None:
    """The process: what it is for comes on stdin, which ends with the run. Silent: who needs a kernel says what is wrong."""
    model, recipe, out, device = pickle.load(sys.stdin.buffer)
    os.nice(BEHIND)
    Thread(target=_end_after_the_run, daemon=True).start()
    with suppress(Exception), prepare(model, replace(recipe, **PLAIN), out, device, headers_only=True) as prepared:
        compile_ahead(prepared)
    os._exit(0)


def _end_after_the_run() -> None:
    sys.stdin.buffer.read()
    time.sleep(AFTER_S)
    os._exit(0)


def compile_ahead(prepared: Prepared) -> None:
    """Compile on the run's first GPU what decodes its checkpoint."""
    device = torch.device(str(prepared.workers[0]))
    with torch.inference_mode():
        if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < ROOM:
            return
        source = stand_in(prepared.source, prepared.plan, prepared.out)
        model = light.read(cast(Source, source), device, Blank)
        launch_all(launches(model), lambda n, of: None)


def launches(model: Any) -> list[Callable[[], object]]:
    """One launch of each kernel that texts one by one and a server take; those of the first text first."""
    decoder, met = FusedDecoder(model), set[object]()
    work = [one for way in WAYS for one in warm.launches(model, decoder, 1, 1, way, met)]
    trial = paged.trial_passes(decoder, MOST["cuda"], context_limit(model) or paged.NO_LIMIT, False)
    return work + paged.launches(model, trial)


def stand_in(source: Source, plan: Plan, folder: Path) -> SimpleNamespace:
    """What `light.read` asks of an open checkpoint (config, headers), of the plan's in `folder` with one layer of each kind.

    Raises NotPlain where the family is not a known one.
    """
    config = read_config(source.config, len(source.headers))[0]
    types = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
    layers: dict[int, list[Item]] = {}
    others: list[Item] = []
    for item in plan.items:
        found = LAYER.match(item.name)
        (layers.setdefault(int(found[1]), []) if found else others).append(item)
    kinds: dict[object, int] = {}
    for i, items in layers.items():
        kinds.setdefault((types[i], *sorted((LAYER.sub("", m.name), m.spelled or "") for m in items)), i)
    items = [_moved(m, n) for n, i in enumerate(kinds.values()) for m in layers[i]] + others
    small = output_config(source, replace(plan, items=tuple(items)))
    small |= {"num_hidden_layers": len(kinds)} | ({"layer_types": [types[i] for i in kinds.values()]} if types[0] else {})
    headers = {n: h for m in items for n, h in m.outputs}
    return SimpleNamespace(name=source.name, folder=folder, config=small, headers=headers, mapped=lambda names: None)


def _moved(item: Item, layer: int) -> Item:
    """An item as that of another layer."""

    def name(old: str) -> str:
        return LAYER.sub(f"model.layers.{layer}.", old)

    return replace(item, name=name(item.name), outputs=tuple((name(n), h) for n, h in item.outputs))
