"""Time the kernels and configs that can take a call, and select the fastest: the work of `lowq tune`.

`measure` times one shape over batch sizes and layouts. A cost model drops configs that cannot win, a coarse timing ranks the
rest, and the full protocol of timing.py decides among the best few.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from lowq_kernels import gpu
from lowq_kernels.activations import act_of, rounded
from lowq_kernels.dispatch.layouts import ranked
from lowq_kernels.dispatch.registry import Call, Config, KernelSpec, kernels, select
from lowq_kernels.dispatch.sources import source_hash
from lowq_kernels.dispatch.timing import WALL_SECONDS, graph_time, rotation, wall_time
from lowq_kernels.dispatch.tuning import Shape
from lowq_kernels.dispatch.tuning_file import Entry
from lowq_kernels.gpu import capability
from lowq_packers import tables
from lowq_packers.errors import UnsupportedError, device_lost
from lowq_packers.layouts import DISK, PackedWeight, pack
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import Act

NEVER_TUNED = {"cpu": ("reference",), "cuda": ("reference", "dequant")}  # the definition, and a fallback slower than triton's
COARSE_REPLAYS, COARSE_US = 3, 200.0  # replays, and microseconds of each, of the coarse timing
FINALISTS = 5
RUNNERS_UP = 4  # configs kept for a comparison within whole decode steps
IMPLAUSIBLE = 1.5  # a time this many times off what other batch sizes allow is noise (`implausible`)
CPU_ROUNDS = 3  # rounds in which all kernels of a call take turns, each with a third of a timing
CLEARLY = 1.05  # a kernel must be this many times faster than dispatch's own choice to replace it
AGAIN = 3  # retries for an implausible time: on a busy machine the first retry was wrong too (52 ms instead of 0.2 ms)
PRUNE = 2.5  # configs this many times costlier than the kernel's cheapest, by the model of `candidates`, are not timed
failed: dict[str, str] = {}  # "kernel config" -> why it could not be compiled or launched: reported, then skipped


def random_weight(shape: Shape, layout: str, device: torch.device) -> PackedWeight:
    """A weight of this shape with random codes, for timing: real data takes as long (zeros would not)."""
    gen = torch.Generator(device).manual_seed(shape.N * 31 + shape.K)
    s, G = shape.scheme, shape.scheme.groups(shape.K)
    W_q = torch.randint(0, s.levels, (shape.N, shape.K), dtype=torch.uint8, device=device, generator=gen)
    scales = torch.rand(shape.N, G, device=device, generator=gen) * 0.009 + 0.001
    scales = scales.to(shape.dtype) if s.scale == "float" else tables.to_bytes(scales, s.scale)
    table = torch.rand(1, s.table_width, device=device, generator=gen) + 0.1 if s.table_width else None
    zeros = None
    if s.zero != "none":
        zeros = torch.randint(0, s.levels, (shape.N, G), device=device, generator=gen).to(shape.dtype)
    return pack(QuantizedTensor.of(s, W_q, scales, zeros, table), layout)


def copies(p: PackedWeight) -> list[PackedWeight]:
    """p and enough clones of it to exceed every cache."""
    weights = [p]
    for _ in range(rotation(p.nbytes, p.words.device) - 1):
        words, scales, zeros, aux = (None if t is None else t.clone() for t in (p.words, p.scales, p.zeros, p.aux))
        assert words is not None
        assert scales is not None
        weights.append(replace(p, words=words, scales=scales, zeros=zeros, aux=aux))
    return weights


def call_for(shape: Shape, M: int, layout: str, device: torch.device, act: Act = "none") -> Call:
    """The dispatch question for M rows of this shape, rounded as `act` says by the kernel itself."""
    return Call(M, shape.N, shape.K, shape.scheme, layout, shape.dtype, device.type, capability(device), act)


def layouts_for(shape: Shape, device: torch.device) -> list[str]:
    """Layouts worth measuring for this shape here. On a GPU the one that the rule ranks first (tile took 1.05 to 1.97 times
    less than strided in all 21 cells of an 8B model on an H100); on a CPU what files hold, too."""
    first = ranked(shape.scheme, shape.N, shape.K, shape.dtype, device)[0]
    return [first] if device.type == "cuda" else list(dict.fromkeys((first, DISK)))


def candidates(call: Call, exhaustive: bool = False) -> list[tuple[KernelSpec, Config]]:
    """Kernels and configs to time for a call; unless `exhaustive`, without those that a cost model rules out.

    The model counts, per config, the rows it multiplies beyond M, how often it decodes each weight, and how much of the GPU
    its programs fill; a config worse than another of its kernel by PRUNE in their product is not timed.
    """
    choices = []
    for spec in kernels().values():
        if spec.name in NEVER_TUNED.get(call.device, ()) or spec.why_not(call):
            continue
        legal = spec.legal_configs(call)
        if exhaustive or len(legal) < 4:
            choices += [(spec, c) for c in legal]
            continue
        cost = [_cost(call, c) for c in legal]
        limit = PRUNE * min(cost)
        choices += [(spec, c) for c, t in zip(legal, cost, strict=True) if t <= limit]
    return choices


def _cost(call: Call, c: Config) -> float:
    """Relative time of a tiled config by the model of `candidates`; 1 for configs without tiles."""
    if "BLOCK_N" not in c or "BLOCK_M" not in c:
        return 1.0
    tiles_m = math.ceil(call.M / c["BLOCK_M"])
    programs = tiles_m * math.ceil(call.N / c["BLOCK_N"]) * c.get("SPLIT_K", 1)
    sms = gpu.of(call.capability).sms
    slots = sms * max(1, 8 // c.get("num_warps", 4))
    fill = min(1.0, programs / sms) * programs / (math.ceil(programs / slots) * slots) ** 0.5 / programs**0.5
    padded = tiles_m * c["BLOCK_M"]
    work = tiles_m + padded / 128  # decoding once per tile of rows, multiplying once per padded row
    least = 1 + call.M / 128
    return work / least / max(fill, 1e-3)


@dataclass
class Budget:
    """A budget of seconds; infinite by default."""

    seconds: float = math.inf
    started: float = field(default_factory=time.monotonic)

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    @property
    def left(self) -> bool:
        """Whether any time is left."""
        return self.spent < self.seconds


def measure(
    shape: Shape, batches: Sequence[int], device: torch.device, budget: Budget, exhaustive: bool = False
) -> Iterator[Entry]:
    """Time one shape over batch sizes and layouts; yields an Entry per (M, layout) as soon as it is known, and again where a
    time that does not fit the others was a disturbance. Stops where the budget ends.
    """
    weights: dict[str, list[PackedWeight]] = {}
    by_layout: dict[str, list[Entry]] = {}
    for M in batches:
        layouts = layouts_for(shape, device)
        if not budget.left:
            return
        for layout in layouts:
            if layout not in weights:
                weights[layout] = copies(random_weight(shape, layout, device))
        rounds = best_of_rounds(shape, M, {layout: weights[layout] for layout in layouts}, device, exhaustive)
        for layout in layouts:
            if entry := rounds.get(layout):
                known = by_layout.setdefault(layout, [])
                again = partial(best, shape, weights=weights[layout], device=device, exhaustive=exhaustive)
                yield from settle(known, entry, again)
                if shape.act != "none" and (entry := rounding(shape, known[-1], weights[layout], device, exhaustive)):
                    yield entry


def best_of_rounds(
    shape: Shape, M: int, weights: dict[str, list[PackedWeight]], device: torch.device, exhaustive: bool
) -> dict[str, Entry]:
    """`best` of each layout: on a CPU of several rounds, in which all layouts and kernels take turns, the least of each.

    A disturbance then delays all of them alike; timed one after another, a moment of other work decided between them.
    """
    least: dict[str, dict[str, tuple[float, KernelSpec, Config]]] = {layout: {} for layout in weights}
    for _ in range(1 if device.type == "cuda" else CPU_ROUNDS):
        for layout, clones in weights.items():
            call = call_for(shape, M, layout, device)
            for us, spec, config in _fastest(call, torch.randn(M, shape.K, device=device).to(shape.dtype), clones, exhaustive):
                key = f"{spec.name} {config}"
                if key not in least[layout] or us < least[layout][key][0]:
                    least[layout][key] = us, spec, config
    entries = {}
    for layout, timed in least.items():
        final = sorted(timed.values(), key=lambda t: t[0])
        if entry := _entry(shape, call_for(shape, M, layout, device), _default_first(final, shape, M, layout, device)):
            entries[layout] = entry
    return entries


def _default_first(
    final: list[tuple[float, KernelSpec, Config]], shape: Shape, M: int, layout: str, device: torch.device
) -> list[tuple[float, KernelSpec, Config]]:
    """The finalists; on a CPU with dispatch's own choice in front where none is clearly faster."""
    default = _default(call_for(shape, M, layout, device))
    current = next((t for t in final if (t[1], t[2]) == default), None)
    if device.type == "cuda" or current is None or current[0] > CLEARLY * final[0][0]:
        return final
    return [current, *(t for t in final if t is not current)]


def settle(known: list[Entry], new: Entry, again: Callable[[int], Entry | None]) -> Iterator[Entry]:
    """Adds the entry of another M to those `known` of one shape and layout. Yields it, and before it those whose times a second
    measurement (`again` of an M) corrects: such as others contradict."""
    for doubted in implausible(known, new):
        tries = [again(doubted.M) for _ in range(AGAIN)]
        better = min(filter(None, tries), key=lambda e: e.us, default=None)
        if better and better.us < doubted.us:
            known[:] = [better if e.M == better.M else e for e in known]
            yield better
            new = better if better.M == new.M else new
    known.append(new)
    yield new


def implausible(before: Sequence[Entry], new: Entry) -> list[Entry]:
    """The entries of one shape, `new` included, that contradict another one.

    More rows cannot take much less time than fewer, nor n times the rows much more than n times as long. On a busy machine
    M = 1 once took 7,886 us, M = 8 66 us.
    """
    slow = [e for e in before if e.M < new.M and e.us > IMPLAUSIBLE * new.us]
    fewer = [e for e in before if e.M < new.M and new.us > IMPLAUSIBLE * e.us * new.M / e.M]
    return [*slow, *([new] if fewer else [])]


def best(shape: Shape, M: int, weights: list[PackedWeight], device: torch.device, exhaustive: bool = False) -> Entry | None:
    """The fastest kernel and config for M rows of these copies of one weight; None where none runs."""
    call = call_for(shape, M, weights[0].layout, device)
    return _entry(shape, call, _fastest(call, torch.randn(M, shape.K, device=device).to(shape.dtype), weights, exhaustive))


def rounding(
    shape: Shape, plain: Entry, weights: list[PackedWeight], device: torch.device, exhaustive: bool = False
) -> Entry | None:
    """What layers take that round their inputs (`shape.act`): a kernel of 8-bit products, or the entry `plain` behind a
    rounding of x where that is faster. None where there is nothing to choose: no kernel multiplies 8 bits, or rows are few."""
    if act_of(shape.act, plain.M) == "none":
        return None
    call = call_for(shape, plain.M, weights[0].layout, device, shape.act)
    x = torch.randn(plain.M, shape.K, device=device).to(shape.dtype)
    eight = _entry(shape, call, _fastest(call, x, weights, exhaustive))
    if eight is None:
        return None
    alone = [partial(rounded, x, shape.act)] * 4
    return cheaper(eight, plain, graph_time(alone) if x.is_cuda else wall_time(alone))


def cheaper(eight: Entry, plain: Entry, rounding_us: float) -> Entry:
    """The entry of 8-bit products, or the one of 16 bits behind a rounding of x where that is faster."""
    us = round(plain.us + rounding_us, 2)
    return eight if eight.us <= us else replace(plain, act=eight.act, us=us, runners_up=())


def _fastest(
    call: Call, x: torch.Tensor, weights: list[PackedWeight], exhaustive: bool
) -> list[tuple[float, KernelSpec, Config]]:
    """The candidates of a call that came in first, each with its microseconds."""
    coarse = []
    for spec, config in candidates(call, exhaustive):
        us = _time(spec, config, x, weights, COARSE_REPLAYS, COARSE_US)
        if us is not None:
            coarse.append((us, spec, config))
    coarse.sort(key=lambda t: t[0])
    final = []
    default = _default(call)
    current = [t for t in coarse[FINALISTS:] if (t[1], t[2]) == default]  # always a finalist: the choice that has to be beaten
    for us, spec, config in [*coarse[:FINALISTS], *current]:
        precise = _time(spec, config, x, weights, 12, 1500.0) if x.is_cuda else us
        if precise is not None:
            final.append((precise, spec, config))
    return sorted(final, key=lambda t: t[0])


def _default(call: Call) -> tuple[KernelSpec, Config] | None:
    """The current choice of dispatch; None if no kernel takes the call as it is (under an `act`, x is rounded first)."""
    with suppress(UnsupportedError):
        return select(call)
    return None


def _entry(shape: Shape, call: Call, final: list[tuple[float, KernelSpec, Config]]) -> Entry | None:
    if not final:
        return None
    (us, spec, config), s = final[0], shape.scheme
    default = _default(call)
    rest = [*final[1 : 1 + RUNNERS_UP], *(t for t in final[1 + RUNNERS_UP :] if (t[1], t[2]) == default)]
    others = tuple({"kernel": k.name, "config": c, "us": round(t, 2)} for t, k, c in rest)
    dtype = str(shape.dtype).removeprefix("torch.")
    place = (s.bits, s.group_size, s.kind, dtype, call.layout, shape.N, shape.K, call.M)
    return Entry(*place, spec.name, config, round(us, 2), source_hash(spec.name), others, call.act)


def _time(
    spec: KernelSpec, config: Config, x: torch.Tensor, weights: list[PackedWeight], replays: int, replay_us: float
) -> float | None:
    """Microseconds of one kernel and config, or None where it cannot run."""
    calls = [lambda w=w: spec.launch(x, w, None, config) for w in weights]
    try:
        return graph_time(calls, replays, replay_us) if x.is_cuda else wall_time(calls, WALL_SECONDS / CPU_ROUNDS)
    except Exception as e:  # a config that cannot run: of Triton's compiler, NVRTC or a launch; the caller reads `failed`
        if device_lost(e):
            raise  # later times would be meaningless
        failed[f"{spec.name} {config}"] = f"{type(e).__name__}: {e}"
        return None
