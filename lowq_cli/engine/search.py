"""Select kernels by the time of a whole decode step.

Timed alone, the fastest kernel is one that uses every register of a GPU; within a step it keeps the next kernel from starting
early. So the few best kernels of each shape are timed within a step, beginning with the shapes with the most weights.
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

REPLAYS = 30  # timed replays of a recorded step
WORTH = 0.998  # a trial wins if its time is below this share of the best so far; a smaller gain may be timing noise
_trial: dict[Call, Named] = {}


def calls_of(decoder: StepDecoder, batch: int, dtype: torch.dtype) -> dict[Call, Named]:
    """Each product of a step of `batch` sequences and dispatch's present choice for it; those with the most weights first."""
    sizes: dict[Call, int] = {}
    for m in decoder.linears.modules():
        if isinstance(m, QuantLinear):
            p, device = m.packed, m.weight.device
            call = Call(batch, p.N, p.K, p.scheme, p.layout, dtype, device.type, capability(device))
            sizes[call] = sizes.get(call, 0) + p.N * p.K
    chosen = {call: registry.select(call) for call in sorted(sizes, key=lambda c: -sizes[c])}
    return {call: (spec.name, config) for call, (spec, config) in chosen.items()}


@torch.inference_mode()
def step_us(decoder: StepDecoder) -> float:
    """Microseconds of one recorded step of a started decoder, without advancing it."""
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
    measure: Callable[[StepDecoder], float] = step_us,
) -> tuple[dict[Call, Named], float, float]:
    """(kernel and config for each call, microseconds of a step with `now`, and with the result); calls are tried in turn.

    Args:
        decoder: a started decoder with room for the steps of a trial.
        now: the present kernel and config of each call.
        candidates: other kernels and configs for each call.
        left: returns whether there is time for another trial.
        measure: returns the microseconds of a step.

    Raises an error after which the GPU is lost; after any other error in a trial, its kernels are not selected.
    """

    def tried(trial: Mapping[Call, Named]) -> float:
        _trial.clear()
        _trial.update(trial)
        registry.forget_choices()
        decoder.plan.refold()
        try:
            return measure(decoder)
        except (RuntimeError, LowqError) as e:  # it cannot be launched or recorded, so it is never selected
            if device_lost(e):
                raise  # otherwise each later trial would count as slow
            log_error("a trial of kernels within a step", e)
            return float("inf")

    with registry.asking(_trial.get, *registry.TABLES):
        chosen = dict(now)
        before = best = tried(chosen)
        for call in now:
            for candidate in candidates.get(call, ()):
                if candidate != chosen[call] and left() and (us := tried(chosen | {call: candidate})) < WORTH * best:
                    best, chosen = us, chosen | {call: candidate}
        decoder.plan.refold()
        return chosen, before, best
