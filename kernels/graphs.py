"""CUDA graphs: one is recorded at a time; meanwhile none is freed, and no thread waits for a whole device.

While any thread records, CUDA refuses to destroy a graph ("operation not permitted when stream is capturing"). A graph can be
dropped at any moment: by a full cache, by a thread that unloads a model, or by the garbage collector, in whichever thread it
runs. So a `Graph` that is dropped meanwhile is kept in a list until the recording has ended.

Other threads may use the GPU while one records, and wait for events and for streams that are not recorded. A wait for the whole
device is refused in any thread then, and spoils the recording: `wait` waits for the end of the recording first. Nor does torch
give cached memory back then, for which it would wait: `retried` loads a model again that found no room.
"""

import ctypes
import gc
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from threading import Lock, get_ident
from typing import Any, ParamSpec, TypeVar
from weakref import finalize

import torch

from lowq_kernels import counters
from lowq_packers.errors import DoesNotFitError

P = ParamSpec("P")
T = TypeVar("T")

_busy = Lock()  # held while a graph is recorded, while graphs are freed, and during a wait for a whole device
_recording: set[int] = set()  # the thread that records
_recorded = 0  # recordings that have ended
_dropped: deque[Any] = deque()  # graphs that nothing uses any more
_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


class Graph:
    """A CUDA graph, which holds the work that is launched inside its `recording`."""

    def __init__(self, graph: Any = None) -> None:
        self._held = [torch.cuda.CUDAGraph() if graph is None else graph]  # `_drop` takes it out: the last reference
        finalize(self, _drop, self._held).atexit = False  # it also keeps the list from the garbage collector
        self._arenas: list[torch.Tensor] = []  # of its launches' counters

    @contextmanager
    def recording(self, stream: torch.cuda.Stream | None, pool: Any = None) -> Iterator[None]:
        """Record what is launched inside, on `stream`. Raises RuntimeError if it cannot be recorded.

        pool: the memory pool of an earlier graph; torch's release of cached memory is then skipped.
        """
        global _recorded
        graph, shared = self._held[0], {} if pool is None else {"pool": pool}
        with _alone():
            if pool is None:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            with torch.cuda.stream(stream):
                graph.capture_begin(**shared, capture_error_mode="thread_local")
                try:
                    yield
                finally:
                    self._arenas = counters.arenas()
                    _recorded += 1
                    _end(graph, stream)

    def replay(self) -> None:
        """Run the recorded work on the current stream."""
        self._held[0].replay()

    def pool(self) -> Any:
        """Its memory pool, which later graphs may share."""
        return self._held[0].pool()


def wait(device: torch.device) -> None:
    """Wait for all work of a device, also of other threads; raises RuntimeError in a recording.

    What only this thread launched needs a wait for its stream, which no recording delays.
    """
    with _alone():
        torch.cuda.synchronize(device)


def empty_cache() -> None:
    """Give torch's cached memory back to the devices, which torch does not do while any thread records."""
    with _alone():
        torch.cuda.empty_cache()


def retried(load: Callable[P, T]) -> Callable[P, T]:
    """`load`, called once more if it found too little memory while a graph was recorded."""

    @wraps(load)
    def loading(*args: P.args, **kwargs: P.kwargs) -> T:
        before = _recorded
        try:
            return load(*args, **kwargs)
        except DoesNotFitError:
            if before == _recorded and not _busy.locked():
                raise
        gc.collect()  # errors of threads refer to themselves, and hold what was loaded until then
        empty_cache()
        return load(*args, **kwargs)

    return loading


def _end(graph: Any, stream: torch.cuda.Stream | None) -> None:
    """End a recording.

    Where CUDA has given up the recording, torch raises before it takes its generator of random numbers and its allocators
    out of recording (2.11): later draws raise, and cached memory is not given back. A second end, of an empty recording,
    does that.
    """
    try:
        graph.capture_end()
    except RuntimeError:
        if stream is not None and not _begin_capture(stream):
            with suppress(RuntimeError), warnings.catch_warnings(action="ignore"):  # "the graph is empty"
                graph.capture_end()
        raise


def _begin_capture(stream: torch.cuda.Stream) -> int:
    """Begin a recording of which torch does not know; returns CUDA's error code, 0 for none."""
    return ctypes.CDLL("libcuda.so.1").cuStreamBeginCapture_v2(ctypes.c_void_p(stream.cuda_stream), _THREAD_LOCAL)


def _drop(held: list[Any]) -> None:
    _dropped.append(held.pop())
    _free()


@contextmanager
def _alone() -> Iterator[None]:
    """Hold `_busy`, once no other thread does: no graph is freed inside, and no garbage is collected."""
    if get_ident() in _recording:  # it would wait for itself
        raise RuntimeError("a CUDA graph is recorded by this thread already")
    try:
        with _busy:
            collects = gc.isenabled()
            gc.disable()
            _recording.add(get_ident())
            try:
                yield
            finally:
                _recording.clear()
                if collects:
                    gc.enable()
    finally:
        _free()


def _free() -> None:
    """Free the dropped graphs, unless one is recorded now: then `_alone` frees them at its end. Never waits."""
    while _dropped and _busy.acquire(blocking=False):  # looked at again after the release: another thread may have dropped one
        try:
            while _dropped:
                _dropped.popleft()
        finally:
            _busy.release()
