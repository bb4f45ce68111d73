"""A vision tower for several images at once, whose work for sizes that come again is recorded as CUDA graphs.

An 8B's tower launches so many small kernels that the host takes 29 ms for an image of 1,024 x 1,024 whose kernels take 21 ms on
an H200; while an engine launches passes it took the host up to 257 ms, since both threads need the interpreter.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lowq_cli.engine.pictures import Features
from lowq_cli.hf.pictures import PIXELS, joined, size_of
from lowq_cli.hf.tower_program import Program, trace
from lowq_kernels.graphs import Graph
from lowq_packers.errors import LowqError, UnsupportedError, device_lost, log_error, one_line

if TYPE_CHECKING:
    from lowq_cli.hf.tower import Tower

TOGETHER = 1024  # max. rows of features that images of one size make in one run: an H200 is busy with 1,024
MOST_ROWS = 2048  # max. rows of features of a recorded run; its memory is kept, and larger images keep a GPU busy anyway
KEPT = 16  # max. sizes whose recordings are kept
MET = 256  # max. sizes of which it is remembered that they came
CLOSE = 1e-2  # max. norm of what a recording differs from transformers' tower, relative; fp16 on two kernels gives 1e-3
Inputs = Mapping[str, torch.Tensor]
Record = Callable[[Callable[[], Any]], Callable[[], None]]


class Recording:
    """The recorded work for images of one size: `pixels` is read, `made` is written by `replay`."""

    def __init__(self, program: Program, pixels: torch.Tensor, record: Record) -> None:
        self.program, self.pixels, self.made = program, pixels.clone(), list[torch.Tensor]()

        def work() -> None:
            self.made = program(self.pixels)

        self.replay = record(work)

    def __call__(self, pixels: torch.Tensor) -> list[torch.Tensor]:
        """The tower's tensors for other pixels."""
        self.pixels.copy_(pixels)
        self.replay()
        return [t.clone() for t in self.made]


class RecordedTower:
    """Computes features of images: by transformers' module when a size comes first, then traced, then recorded.

    Args:
        tower: the module. record: records work and returns what replays it; None: a `Recorder` on a GPU.
        most_rows: max. rows of features of a recorded run. most: max. sizes whose recordings are kept.
    Attributes:
        reason: why the last size that was not recorded was not; "" if none.
    All calls come from one thread, in one stream.
    """

    def __init__(self, tower: "Tower", record: Record | None = None, most_rows: int = MOST_ROWS, most: int = KEPT) -> None:
        self.tower, self.reason, self.most_rows, self.most = tower, "", most_rows, most
        self.record = record or (Recorder(tower.device) if tower.device.type == "cuda" else None)
        self.recordings = OrderedDict[Any, Recording | Program]()
        self._met = OrderedDict[Any, bool]()  # sizes that came, and whether one is to be recorded

    @torch.inference_mode()
    def __call__(self, images: Sequence[Inputs], rows: int) -> list[Features]:
        """The features of images of one size, which have so many rows each."""
        key, there = (len(images), size_of(images[0])), self.tower.arguments(joined(images))
        recording = self.recordings.get(key)
        if isinstance(recording, Recording):
            self.recordings.move_to_end(key)
            made = recording(there[PIXELS])
        elif self.record is None or rows * len(images) > self.most_rows or not self._came(key):
            made = self._transformers(there)
        else:
            try:
                made = self._learn(key, recording, there, self.record)
            except (LowqError, RuntimeError) as e:  # this size runs as transformers calls it, only slower
                if device_lost(e):
                    raise
                self._refuse(key, e)
                made = self._transformers(there)
        each = [t.chunk(len(images)) for t in made]
        return [(rows_of_one, tuple(layers)) for rows_of_one, *layers in zip(*each, strict=True)]

    def _transformers(self, there: Inputs) -> list[torch.Tensor]:
        rows, layers = self.tower.run(there)
        return [rows, *layers]

    def _came(self, key: Any) -> bool:
        """Whether a size came before and can be recorded; notes that it came."""
        if key not in self._met:
            self._met[key] = True
            if len(self._met) > MET:
                self._met.popitem(last=False)
            return False
        return self._met[key]

    def _learn(self, key: Any, known: Program | None, there: Inputs, record: Record) -> list[torch.Tensor]:
        """The tower's tensors; traces a size, or records one that is traced. Raises LowqError, RuntimeError."""
        if known is None:
            program, made = trace(lambda: self._transformers(there), there[PIXELS])
            self._hold(key, program)
            return made
        made, recording = self._transformers(there), Recording(known, there[PIXELS], record)
        for ours, theirs in zip(recording(there[PIXELS]), made, strict=True):
            if not (ours - theirs).float().norm() <= CLOSE * theirs.float().norm():
                raise UnsupportedError("its recording computes other features")
        self._hold(key, recording)
        return made

    def _hold(self, key: Any, known: Recording | Program) -> None:
        self.recordings[key] = known
        self.recordings.move_to_end(key)
        if len(self.recordings) > self.most:
            self.recordings.popitem(last=False)

    def _refuse(self, key: Any, e: Exception) -> None:
        self._met[key] = False
        self.recordings.pop(key, None)
        self.reason = one_line(e)
        log_error("the vision tower is not recorded for a size of images", e)


class Recorder:
    """Records in a stream of its own, in memory that all recordings share: they run one after another."""

    def __init__(self, device: torch.device) -> None:
        self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def __call__(self, work: Callable[[], Any]) -> Callable[[], None]:
        torch.cuda.current_stream(self.stream.device).synchronize()
        graph = Graph()
        with graph.recording(self.stream, self.pool):
            work()
        return graph.replay
