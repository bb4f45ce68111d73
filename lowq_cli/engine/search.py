"""Choose among kernels by the time of a whole decode step.

Alone, the fastest kernel is the one that fills every register of a GPU; in a step it leaves no room for the kernel after it
to start early. So the few best of each shape are tried in place, the shapes with most weights first.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from lowq_cli.engine.graph import capture
from lowq_cli.engine.stream import StepDecoder
from lowq_kernels.dispatch import registry
from lowq_kernels.dispatch.registry import Call
from lowq_kernels.dispatch.tuning import Named
from lowq_kernels.gpu import capability
from lowq_kernels.modules.linear import QuantLinear
from lowq_packers.errors import LowqError, device_lost, log_error

REPLAYS = 30  # of a recorded step that is timed
WORTH = 0.998  # of the best time so far: a gain that is not the clock's
_trial: dict[Call, Named] = {}


def calls_of(decoder: StepDecoder, batch: int, dtype: torch.dtype) -> dict[Call, Named]:
    """The products of a step of `batch` sequences, and what dispatch takes for each now; those with most weights first."""
    found: dict[Call, int] = {}
    for m in decoder.linears.modules():
        if isinstance(m, QuantLinear):
            p, device = m.packed, m.weight.device
            call = Call(batch, p.N, p.K, p.scheme, p.layout, dtype, device.type, capability(device))
            found[call] = found.get(call, 0) + p.N * p.K
    chosen = {call: registry.select(call) for call in sorted(found, key=lambda c: -found[c])}
    return {call: (spec.name, config) for call, (spec, config) in chosen.items()}


@torch.inference_mode()
def step_us(decoder: StepDecoder) -> float:
    """Microseconds of one recorded step at a started decoder's position, which stays; kernels are chosen anew."""
    registry.forget_choices()
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    at, token = decoder.pos.clone(), decoder.token.clone()
    run = capture(decoder.forward_step)
    run.replay()
    start.record()
    for _ in range(REPLAYS):
        run.replay()
    stop.record()
    stop.synchronize()
    decoder.pos.copy_(at)
    decoder.token.copy_(token)
    return 1e3 * start.elapsed_time(stop) / REPLAYS


def search(
    decoder: StepDecoder,
    now: Mapping[Call, Named],
    candidates: Mapping[Call, Sequence[Named]],
    left: Callable[[], bool] = lambda: True,
) -> tuple[dict[Call, Named], float, float]:
    """(kernel and config for each call, microseconds of a step with `now`, and with these), tried one call after the other.

    Args:
        decoder: started, with room for the position to stand still.
        now: what each call takes at present.
        candidates: what else it may take.
        left: whether there is time for another trial.

    Raises what loses the GPU; another error of a trial only keeps its kernels from being chosen.
    """
    if _trial.get not in registry.TABLES:
        registry.TABLES.insert(0, _trial.get)

    def tried(trial: Mapping[Call, Named]) -> float:
        _trial.clear()
        _trial.update(trial)
        try:
            return step_us(decoder)
        except (RuntimeError, LowqError) as e:  # it cannot be launched or recorded: never chosen
            if device_lost(e):
                raise  # each later trial would count as slow
            log_error("a trial of kernels within a step", e)
            return float("inf")

    try:
        chosen = dict(now)
        before = best = tried(chosen)
        for call in now:
            for candidate in candidates.get(call, ()):
                if candidate != chosen[call] and left() and (us := tried(chosen | {call: candidate})) < WORTH * best:
                    best, chosen = us, chosen | {call: candidate}
        return chosen, before, best
    finally:
        registry.TABLES.remove(_trial.get)
        registry.forget_choices()
