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
