"""What a person means by a device name."""

import torch

from lowq_packers.errors import UnsupportedError, UsageError


def pick_device(device: str | torch.device) -> torch.device:
    """The torch device of "auto" (a GPU where there is one), "cpu", "cuda" or "cuda:1".

    Raises UsageError for a name that is none, UnsupportedError for a GPU that is not there.
    """
    try:
        chosen = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    except (RuntimeError, TypeError):
        raise UsageError(f"device {device!r} does not exist; use auto, cpu or cuda") from None
    if chosen.type not in ("cpu", "cuda"):
        raise UsageError(f"device {device!r} is not one lowq runs on; use auto, cpu or cuda")
    there = torch.cuda.device_count()
    if chosen.type == "cuda" and (chosen.index or 0) >= there:
        raise UnsupportedError(f"device {device} was asked for, but torch can use {there} CUDA GPU(s) here; use --device cpu")
    return chosen


def pick_devices(names: str | torch.device) -> tuple[torch.device, ...]:
    """The devices of "cuda:0,cuda:1", all of one kind: on another kind the same codes are not promised.

    A name given twice counts twice. Raises as `pick_device`, and UsageError for devices of two kinds.
    """
    given = names.split(",") if isinstance(names, str) else [names]
    found = tuple(pick_device(n.strip() if isinstance(n, str) else n) for n in given)
    if len({d.type for d in found}) > 1:
        raise UsageError(f"device {names!r} names two kinds of device; use GPUs only, or the CPU only")
    return found
