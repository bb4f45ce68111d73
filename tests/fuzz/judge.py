"""What a bent file may do: be refused in one line within 5 s and 1 GB, or be read as its own reader reads it."""

import resource
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from valid import Valid, gguf_weights, weights

from lowq_cli.interop.inspection import inspect_model
from lowq_packers.errors import LowqError

SECONDS, BYTES = 5.0, 1 << 30
# Fields whose other value is another, sound reading of the same bytes: the format's own reader would follow them too.
MEANT = {
    "gptq": {"checkpoint_format", "format"},
    "lowq": {"group_size", "zero", "bits", "layout"},
    "humming": {"is_fp_zero_point"},
    "fp8": {"weight_block_size"},
}


@dataclass(frozen=True)
class Verdict:
    """What became of one bend. fault: what should not have, or ""."""

    accepted: bool
    fault: str
    seconds: float


def judge(valid: Valid, model: Path, bent: dict[str, Any]) -> Verdict:
    """Inspect a bent model and read all its weights."""
    began, memory = time.monotonic(), _peak()
    fault, found = "", None
    try:
        inspect_model(str(model))
        found = weights(model)
    except LowqError as e:
        if not str(e) or "\n" in str(e).strip():
            fault = f"an error of several lines: {e}"
    except Exception:
        fault = "internal error: " + traceback.format_exc().strip().splitlines()[-1] + " " + _where()
    seconds = time.monotonic() - began
    if seconds > SECONDS:
        fault = fault or f"took {seconds:.1f} s"
    if (more := _peak() - memory) > BYTES:
        fault = fault or f"took {more >> 20} MB"
    if found is not None and not fault and bent["kind"] != "values":
        fault = _other_weights(valid, model, bent, found)
    return Verdict(found is not None, fault, seconds)


def _other_weights(valid: Valid, model: Path, bent: dict[str, Any], found: dict[str, torch.Tensor]) -> str:
    """Which weight is not what it was, unless that is how its format has it; "" where all are."""
    if bent["kind"] == "tensor" or bent.get("how") == "dtype" or set(bent.get("place", ())) & MEANT.get(valid.format, set()):
        return ""  # tensors that are exchanged or gone, dtypes and fields that every reader believes
    for name, now in found.items():
        before = valid.weights.get(name)
        if before is not None and (now.shape != before.shape or not torch.equal(now, before)):
            if valid.format == "gguf" and _as_gguf_has_it(model, name, now):
                continue
            if bent.get("tensor") in (f"{name}.weight", f"{name}.bias") and _is_kept(valid, name):
                continue  # a dtype or shape of a tensor that is not packed: nothing else says which, but for checksums
            return f"{name} has other weights"
    return ""


def _is_kept(valid: Valid, name: str) -> bool:
    return valid.format == "dense" or name.endswith(("norm", "embed_tokens", "lm_head"))


def _as_gguf_has_it(model: Path, name: str, now: torch.Tensor) -> bool:
    """Whether the gguf package reads the same numbers, in any order of rows."""
    theirs = gguf_weights(model)
    if theirs is None:
        return False
    wanted = now.flatten().sort().values
    same = [t for t in theirs.values() if t.numel() == now.numel()]
    return any(torch.allclose(t.flatten().sort().values, wanted, rtol=2e-3, atol=1e-7, equal_nan=True) for t in same)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _where() -> str:
    import sys

    frames = traceback.extract_tb(sys.exc_info()[2])
    return " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames[-3:]))
