"""Dynamic 8-bit activations (`--act`): each row of x is rounded with a scale of its own.

Packed layers round x in products of more than STEPS rows, which are those of prompts; decode steps multiply 16-bit x.

int8   symmetric, one scale per token: x ~ q * max / 127
fp8    e4m3, one scale per token and 128 values (against block-scaled weights), or per token
"""

from collections.abc import Callable
from functools import cache

import torch

from lowq_kernels import gpu
from lowq_kernels.optional import optional
from lowq_packers import fp8
from lowq_packers.errors import UsageError
from lowq_packers.scheme import ACTS, Act

INT8_MAX = 127.0
# Max. rows for which packed layers leave x in 16 bits. 8192 x 8192 in 4 bits on an H100 (docs/fp8.md): 128 rows take 30.6 us in
# fp8 (with the rounding) and 30.3 us in 16 bits, 256 rows 43.2 and 50.4 us. So decode steps lose no accuracy either.
STEPS = 128


def check_act(act: object) -> Act:
    """`act` if it is a mode. Raises UsageError."""
    if act not in ACTS:
        raise UsageError(f"act={act!r} does not exist; use one of {', '.join(ACTS)}")
    return act  # type: ignore[return-value]


def act_of(act: Act, M: int) -> Act:
    """How a packed layer with this mode rounds x of M rows."""
    return act if M > STEPS else "none"


def int8_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x (M, K) -> int8 (M, K), half to even, and fp32 scales (M, 1)."""
    amax = x.abs().amax(1, keepdim=True).float().clamp(min=fp8.LEAST)
    most = torch.full_like(amax, INT8_MAX)  # with a plain number torch would multiply by a rounded reciprocal
    q = (x.float() * (most / amax)).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8)
    return q, amax / most


@cache
def _launcher(act: Act, dtype: torch.dtype, device: torch.device) -> Callable[[torch.Tensor, Act], torch.Tensor] | None:
    """The kernel that rounds all rows in one launch, or None (torch takes 31 us for 64 rows, 870 us for 4,096)."""
    on = gpu.here(device.index)
    if on.capability < gpu.LEAST or (act == "fp8" and not on.fp8) or dtype not in (torch.float16, torch.bfloat16):
        return None
    act_rows = optional("lowq_kernels.products.cuda.act_rows", "cuda")
    return act_rows and act_rows.rounded_rows  # it needs the conversion instruction of GPUs with fp8


def rounded(x: torch.Tensor, act: Act, group: int | None = None) -> torch.Tensor:
    """x (M, K) quantized and dequantized, in its own dtype: the definition, and the path of every other device.

    group: values of a token that share a scale (fp8); None: all of them.
    """
    if act == "none" or x.shape[0] == 0:
        return x
    if group is None and x.is_cuda and not torch.compiler.is_compiling() and (launch := _launcher(act, x.dtype, x.device)):
        return launch(x, act)
    if act == "int8":
        q, scales = int8_rows(x)
        return (q.float() * scales).to(x.dtype)
    return fp8.quantize(x, (1, group or x.shape[1])).dequantize(x.dtype)
