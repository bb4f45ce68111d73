"""The verdict on an altered file: it must be refused in one line within 5 s and 1 GB, or be read as the reference reads it."""

import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from reference import gguf, reading
from valid import Valid, weights

from lowq_cli.interop.inspection import inspect_model
from lowq_packers.errors import LowqError

SECONDS, BYTES = 5.0, 1 << 30  # of processor time: others may be on the machine
HANGS = 20.0  # after so many a case is ended
NEAR = 2**-8  # parts of a matrix's largest weight: dense copies are rounded to fp16 or bf16


@dataclass(frozen=True)
class Verdict:
    """The result of one altered file. fault: the fault, or ""; seconds: of processor time."""

    accepted: bool
    fault: str
    seconds: float


class Hang(BaseException):
    """A case that goes on for ever."""


def read_all(model: Path) -> dict[str, torch.Tensor]:
    """Inspect a model and read all its weights."""
    inspect_model(str(model))
    return weights(model)


def judge(
    valid: Valid,
    model: Path,
    read: Callable[[Path], dict[str, torch.Tensor]] = read_all,
    seconds: float = SECONDS,
    hangs: float = HANGS,
) -> Verdict:
    """What became of a bent model, which `read` reads."""
    began, memory = time.process_time(), _peak()
    fault, result = "", None
    try:
        with _ended(hangs):
            result = read(model)
    except LowqError as e:
        if not str(e) or "\n" in str(e).strip():
            fault = f"an error of several lines: {e}"
    except (Exception, Hang):
        fault = "internal error: " + traceback.format_exc().strip().splitlines()[-1] + " " + _where()
    spent = time.process_time() - began
    if spent > seconds:
        fault = fault or f"took {spent:.1f} s"
    if (more := _peak() - memory) > BYTES:
        fault = fault or f"took {more >> 20} MB"
    if result is not None and not fault:
        fault = _other_weights(valid, model, result)
    return Verdict(result is not None, fault, spent)


def _other_weights(valid: Valid, model: Path, found: dict[str, torch.Tensor]) -> str:
    """Which weight is not what the format's own reader makes of the file; where that makes nothing of it, not what it was.

    Then a tensor under a name that the valid file has not (a config that is gone, a renamed part) is nobody's weight, and the
    one that it was is missing, which is an error when the model is loaded: there is nothing to compare it with.
    """
    changed = {n for n, now in found.items() if (b := valid.weights.get(n)) is not None and not torch.equal(now, b)}
    one_file = valid.model.suffix == ".gguf"
    ask = not one_file or changed  # the gguf package takes 20 ms: only where lowq reads anything else than before
    theirs = (gguf(model) if one_file else reading(valid.format, model)) if ask else None
    for name, now in found.items():
        if theirs is not None and name in theirs:
            if not _same(now, theirs[name]):
                return f"{name} has other weights than its own reader reads"
        elif name in changed:
            return f"{name} has other weights"
    return ""


def _same(now: torch.Tensor, theirs: torch.Tensor) -> bool:
    if now.shape != theirs.shape:
        return False
    if torch.equal(now, theirs):
        return True
    most = torch.finfo(torch.float16).max  # what half a precision holds is all that a dense copy in it can
    now, theirs = now.clamp(-most, most), theirs.clamp(-most, most)
    near = NEAR * torch.nan_to_num(theirs).abs().max()
    return bool(torch.where(theirs.isnan(), now.isnan(), (now - theirs).abs() <= near).all())


@contextmanager
def _ended(seconds: float) -> Iterator[None]:
    """End a read that hangs, by the processor time of this process."""

    def end(*_: object) -> None:
        raise Hang(f"not done after {seconds:.1f} s")

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _where() -> str:
    frames = traceback.extract_tb(sys.exc_info()[2])
    return " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames[-3:]))
