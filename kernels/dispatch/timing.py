"""How long a kernel takes where it matters: inside a CUDA graph, on weights that are not in the cache.

`graph_time` is the one protocol that tuning, bench and every script in benchmarks/ share. `rotation` says how many
copies of a weight to rotate through so that no cache level serves it twice; `roofline` measures the two ceilings
(bytes per second read, floating-point operations per second multiplied) that percentages are percentages of.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache, partial

import torch

from lowq_kernels import counters, workspaces
from lowq_kernels.graphs import Graph
from lowq_kernels.optional import optional

Thunk = Callable[[], object]
ROTATION_BYTES = 256 << 20  # five times the 50 MB second-level cache of an H100, four times the third-level one of a CPU
REPLAY_US = 1500.0  # a replay shorter than this measures the launch of the graph
# Under products at full power an H100 lowers its clocks after 25 to 60 ms: 28672x4096, M = 4096, 1220 us before and 1425 us
# after (cuBLAS 1258 and 1471), again so after a rest of 0.1 s or 0.8 s. Timings with a rest end before that.
LOAD_US = 25_000.0
MAX_COPIES, MAX_CPU_COPIES = 24, 512  # max. copies; on a CPU each call is timed alone, so copies need not fit into a graph
PIECE = 16 << 20  # bytes that a CPU reads per timing: 1 to 4 ms, short enough to run undisturbed at times on a busy machine
MAX_NODES = 960
WALL_SECONDS, LEAST_CALLS = 0.1, 5  # duration and min. calls of `wall_time`


def rotation(nbytes: int, device: torch.device | str = "cuda") -> int:
    """Copies of an object of `nbytes` bytes that together outgrow the caches: 2 .. 24 on a GPU, 1 .. 512 on a CPU."""
    copies = math.ceil(ROTATION_BYTES / max(nbytes, 1))
    return min(MAX_COPIES, max(2, copies)) if torch.device(device).type == "cuda" else min(MAX_CPU_COPIES, copies)


def graph_time(calls: Sequence[Thunk], replays: int = 12, replay_us: float = REPLAY_US, rest: float = 0.0) -> float:
    """Median microseconds per call over replays of one CUDA graph that runs all `calls` in turn, many times over.

    Args:
        calls: thunks doing the same work on distinct weights; they must be safe to capture (no host sync).
        replays: timed replays; the median is returned.
        replay_us: the least length of one replay.
        rest: seconds of quiet before the timed replays, of which there are then no more (but three) than fit LOAD_US.
    It excludes the cost of launching from Python, and includes the gaps between graph nodes.
    """
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def between(work: Thunk) -> float:
        start.record()
        work()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) * 1e3

    def captured(rounds: int) -> Graph:
        graph = Graph()
        with counters.serial(), graph.recording(side):
            for _ in range(rounds):
                for call in calls:
                    call()
        return graph

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # first calls compile, allocate and pick algorithms: not while capturing
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    once = captured(1)
    once.replay()
    once_us = max(between(once.replay), 1e-3)
    rounds = math.ceil(replay_us / once_us)
    rounds = min(rounds, max(1, MAX_NODES // len(calls)))
    graph = captured(rounds) if rounds > 1 else once
    if rest:
        replays = min(replays, max(3, int(LOAD_US / (once_us * rounds)) - 1))
        torch.cuda.current_stream().synchronize()
        time.sleep(rest)
    graph.replay()
    times = [between(graph.replay) for _ in range(replays)]
    workspaces.release()  # else every `side` so far keeps one
    return statistics.median(times) / (rounds * len(calls))


def wall_time(calls: Sequence[Thunk], seconds: float = WALL_SECONDS) -> float:
    """Least microseconds per call by the host's clock: for CPU kernels. Runs about `seconds`, at least LEAST_CALLS times.

    The least, not the median: on a busy machine the median of 20 us calls was 3,248 us, and a slower kernel was chosen.
    """
    calls[0]()
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(times) < LEAST_CALLS or time.perf_counter() < deadline:
        call = calls[len(times) % len(calls)]
        t0 = time.perf_counter()
        call()
        times.append((time.perf_counter() - t0) * 1e6)
    return min(times)


def timed(calls: Sequence[Thunk], device: torch.device | str) -> float:
    """Microseconds per call by the protocol that fits the device."""
    return graph_time(calls) if torch.device(device).type == "cuda" else wall_time(calls)


@dataclass(frozen=True)
class Roofline:
    """Measured ceilings of one device."""

    device: str
    read_gbs: float  # bytes read per second from device memory, 1e9
    tflops: float  # dense 16-bit multiply-adds counted twice, per second, 1e12

    def floor_us(self, nbytes: float, flops: float) -> float:
        """Microseconds below which no kernel moving and multiplying this much can get."""
        return max(nbytes / self.read_gbs / 1e3, flops / self.tflops / 1e6)

    def percent(self, nbytes: float, flops: float, us: float) -> float | None:
        """The floor's share of `us`, in percent. None on a CPU that multiplies for longer than it reads: `tflops` is its speed
        with floats, and kernels that multiply integers were at 124 to 138% of that."""
        floor = self.floor_us(nbytes, flops)
        return None if self.device == "cpu" and floor > nbytes / self.read_gbs / 1e3 else 100 * floor / us


def call_bytes(M: int, N: int, K: int, bits_per_weight: float) -> float:
    """Bytes that y (M, N) = x (M, K) @ W^T must move: the stored weight once, 16-bit x and y once."""
    return N * K * bits_per_weight / 8 + 2 * M * (N + K)


@cache
def roofline(device: torch.device) -> Roofline:
    """Measure both ceilings (under a second): `read_gbs`, and a product of 8192^3 (512^3 on a CPU).

    A CPU multiplies in whichever of bf16 and fp32 is faster there.
    """
    speed = read_gbs(device)
    if device.type != "cuda":
        squares = [torch.randn(512, 512, dtype=d) for d in (torch.bfloat16, torch.float32)]
        dot_us = min(wall_time([partial(torch.matmul, a, a)]) for a in squares)
        return Roofline("cpu", speed, 2 * 512**3 / dot_us / 1e6)
    a = torch.randn(8192, 8192, dtype=torch.float16, device=device)
    dot_us = graph_time([lambda: a @ a])
    return Roofline(torch.cuda.get_device_name(device), speed, 2 * 8192**3 / dot_us / 1e6)


def read_gbs(device: torch.device, timer: Callable[[Sequence[Thunk]], float] = wall_time) -> float:
    """1e9 bytes per second that a read of 1 GiB reaches, of 256 MiB on a CPU (whose caches hold 64).

    timer: microseconds per call, on a CPU.
    """
    if device.type != "cuda":
        pieces = torch.ones(256 << 20, dtype=torch.uint8).view(torch.int64).split(PIECE // 8)
        return PIECE / timer([piece.sum for piece in pieces]) / 1e3
    data = torch.empty(1 << 30, dtype=torch.uint8, device=device).random_().view(torch.int32)
    readers = _readers(data)
    with ThreadPoolExecutor() as pool:  # they compile in parallel
        wait([pool.submit(read) for read in readers])
    return data.nbytes / min(graph_time([read]) for read in readers) / 1e3


def _readers(data: torch.Tensor) -> list[Thunk]:
    """Ways to read all of `data` (int32) as fast as the device allows; a copy, counted once, where triton is absent."""
    read = optional("lowq_kernels.products.triton.read", "triton")
    if read is None:
        half = torch.empty(data.numel() // 2, dtype=data.dtype, device=data.device)
        return [lambda: half.copy_(data[: half.numel()])]  # moves data.nbytes in all
    return [partial(read.read_all, data, c) for c in read.READ_CONFIGS]
