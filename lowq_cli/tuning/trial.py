"""Whether measured kernels are faster where it counts: whole decode steps on a CPU, with the table and without, by turns.

A machine with other work delays a timing now and then by milliseconds; entries of such timings once made a checkpoint decode
1.8 tokens/s in place of 103. Both models are loaded from views of the checkpoint's folder: the layout of each weight is chosen
when it is loaded.
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

ROUNDS, STEPS = 6, 8  # of each model, by turns; steps in a round
DOUBT = 4  # times as many rounds where the table seems to lose: beside other work the least of few is not the least
SECONDS = 20.0  # after which no further round begins
SLOWER = 1.1  # times a step without the table: from here on the table is not worth having
MODELS = 2.5  # times the files' bytes that two models take in memory


@dataclass(frozen=True)
class Trial:
    """Least microseconds of a step without the table and with it, for one batch size."""

    M: int
    plain_us: float
    tuned_us: float

    @property
    def lost(self) -> bool:
        """Whether the table makes steps slower."""
        return self.tuned_us > SLOWER * self.plain_us


def fits(nbytes: int) -> bool:
    """Whether two models of a checkpoint of so many bytes find room."""
    room = available_memory()
    return room is None or MODELS * nbytes < room


def kept(entries: Sequence[Entry], found: Sequence[Trial]) -> list[Entry]:
    """The entries worth writing, by what whole steps took: all of them, or none where any batch size is slower with them.

    Asked when a table is made: at first use it would take a second model in memory, and far more time than a first token.
    """
    return [] if any(t.lost for t in found) else list(entries)


def race(folder: Path, device: torch.device, entries: Sequence[Entry], batches: Sequence[int]) -> list[Trial]:
    """Steps of the checkpoint by dispatch's own choices and by `entries`, for the least and the largest of `batches`."""
    with ExitStack() as stack:
        plain, tuned = (stack.enter_context(_view(folder)) for _ in range(2))
        tuning_file.write_file(tuned / tuning_file.FILE, Machine.here(device), entries)
        decoders = [(_decoder(view, device), view) for view in (plain, tuned)]
        found = [_trial(decoders, device, M) for M in dict.fromkeys((batches[0], batches[-1]))]
        tuning.forget()
        return found


@contextmanager
def _view(folder: Path) -> Any:
    """A folder with all files of the checkpoint but its tuning table."""
    with scratch(Path(tempfile.gettempdir()), "lowq-tune") as held:
        view = held / folder.resolve().name  # `held` is locked, and who writes a table locks its folder
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
