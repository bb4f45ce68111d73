"""Check that tuned kernels speed up whole decode steps on a CPU: time steps with and without the tuning table, alternating.

On a busy machine some timings are delayed by milliseconds; entries from such timings once made a checkpoint decode
1.8 tokens/s instead of 103. Both models are loaded, from views of the checkpoint's folder, because the layout of each weight
is chosen at load time.
"""

import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lowq_cli.memory import available_memory
from lowq_cli.tuning.tuner import IN_PLACE_TOKENS
from lowq_kernels.dispatch import tuning, tuning_file
from lowq_kernels.dispatch.tuning_file import Entry, Machine
from lowq_packers.atomic import scratch

ROUNDS, STEPS = 6, 8  # rounds of each model, alternating; steps per round
DOUBT = 4  # factor of rounds if the table seems slower: on a busy machine, the minimum of a few rounds is not reliable
SECONDS = 20.0  # seconds after which no further round begins
SLOWER = 1.1  # the table is dropped if a step takes this many times as long as without it
MODELS = 2.5  # memory of two models, relative to the bytes of the files


@dataclass(frozen=True)
class Trial:
    """Min. microseconds of a step without and with the table, for one batch size."""

    M: int
    plain_us: float
    tuned_us: float

    @property
    def lost(self) -> bool:
        """Whether the table makes steps slower."""
        return self.tuned_us > SLOWER * self.plain_us


def fits(nbytes: int) -> bool:
    """Whether two models of a checkpoint of `nbytes` bytes fit into memory."""
    room = available_memory()
    return room is None or MODELS * nbytes < room


def kept(entries: Sequence[Entry], trials: Sequence[Trial]) -> list[Entry]:
    """The entries to write, by the times of whole steps: all, or none if any batch size is slower with them.

    This is checked when a table is made: at first use it would need a second model in memory and far more time than a token.
    """
    return [] if any(t.lost for t in trials) else list(entries)


def race(folder: Path, device: torch.device, entries: Sequence[Entry], batches: Sequence[int]) -> list[Trial]:
    """Time steps with dispatch's own choices and with `entries`, for the smallest and the largest of `batches`."""
    with ExitStack() as stack:
        plain, tuned = (stack.enter_context(_view(folder)) for _ in range(2))
        tuning_file.write_file(tuned / tuning_file.FILE, Machine.here(device), entries)
        decoders = [(_decoder(view, device), view) for view in (plain, tuned)]
        trials = [_trial(decoders, device, M) for M in dict.fromkeys((batches[0], batches[-1]))]
        tuning.forget()
        return trials


@contextmanager
def _view(folder: Path) -> Any:
    """A folder with all files of the checkpoint except its tuning table."""
    with scratch(Path(tempfile.gettempdir()), "lowq-tune") as held:
        view = held / folder.resolve().name  # not `held` itself, which is locked, because writing a table locks its folder
        view.mkdir()
        for path in folder.resolve().iterdir():
            if path.name != tuning_file.FILE and path.is_file():
                (view / path.name).symlink_to(path)
        yield view


def _decoder(view: Path, device: torch.device) -> Any:
    from lowq_cli.engine.decoders import decoder_of
    from lowq_cli.engine.open_model import ready

    tuning.forget()
    return decoder_of(ready(str(view), device.type, lambda text: None)[0])


def _trial(decoders: Sequence[tuple[Any, Path]], device: torch.device, M: int) -> Trial:
    from lowq_cli.engine.sampling import Sampling

    least, end = [float("inf")] * len(decoders), time.monotonic() + SECONDS
    for n in range(DOUBT * ROUNDS):
        if n >= ROUNDS and not Trial(M, *least).lost:
            break
        for i, (decoder, view) in enumerate(decoders):
            tuning.forget()
            tuning.use(view, device)
            decoder.start([[1] * IN_PLACE_TOKENS] * M, Sampling(), IN_PLACE_TOKENS)
            for _ in range(STEPS):
                began = time.perf_counter()
                decoder.step()
                least[i] = min(least[i], 1e6 * (time.perf_counter() - began))
        if time.monotonic() > end:
            break
    return Trial(M, *least)
