"""Operation "attend": attention of one new token per sequence over its cache. The torch definition is its last kernel."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from lowq_kernels.decode import reference
from lowq_kernels.decode.kv import PLAIN, Cache, kind_of
from lowq_kernels.decode.prompt_call import PromptCall
from lowq_kernels.decode.reference import Heads, Places
from lowq_kernels.dispatch.registry import LAST_RESORT, Op, capability, register, select

LONG = 4096  # slots: for caches at least this long cuda/attend fills the GPU with blocks; clusters of 8 leave half the SMs idle


@dataclass(frozen=True)
class AttendCall:
    """One token of each of M sequences, over caches of S slots. R: rotated dims of a head; HQ, HKV, D as in `Heads`.

    block: slots of a block of a paged cache, 0 where each sequence has its own contiguous cache. kv: its encoding (`kv.KINDS`).
    Its kernels are launch(qkv, k_cache, v_cache, places, heads, config) -> y, as `reference.attend`; qkv, caches, table and
    order contiguous, positions int32. beyond: see `Heads.beyond`.
    layout: of qkv, see `attend_prepared`; only cuda/attend takes one.
    """

    op: ClassVar[Op] = "attend"
    M: int
    S: int
    R: int
    HQ: int
    HKV: int
    D: int
    norm: torch.dtype | None  # of the weights of q's and k's norms
    dtype: torch.dtype
    device: str
    capability: tuple[int, int]
    block: int = 0
    kv: str = PLAIN
    beyond: tuple[str, ...] = ()
    layout: int = 0

    @classmethod
    def of(cls, qkv: torch.Tensor, S: int, R: int, h: Heads, block: int = 0, kv: str = PLAIN) -> "AttendCall":
        """The call of qkv (M, (HQ + 2 HKV) D)."""
        norm = None if h.q_norm is None else h.q_norm.dtype
        on = qkv.device
        return cls(qkv.shape[0], S, R, h.HQ, h.HKV, h.D, norm, qkv.dtype, on.type, capability(on), block, kv, h.beyond)


def usual(call: AttendCall | PromptCall) -> str | None:
    """Why a kernel without support for any of `Heads.beyond` cannot take the call, or None."""
    return f"takes no attention with {', '.join(call.beyond)}" if call.beyond else None


def attend(qkv: torch.Tensor, k_cache: Cache, v_cache: Cache, at: Places, h: Heads) -> torch.Tensor:
    """As `reference.attend`, by the kernel that dispatch chooses."""
    S, block = k_cache.shape[2], 0
    if at.table is not None:
        S, block = at.table.shape[1] * S, S
    spec, config = select(AttendCall.of(qkv, S, at.cos.shape[1], h, block, kind_of(k_cache)))
    return spec.launch(qkv, k_cache, v_cache, at, h, config)


@dataclass(frozen=True)
class RowsCall(AttendCall):
    """M rows of one sequence over a cache with a block table. Its kernels are launch(qkv, k_cache, v_cache, places,
    heads, groups, config) -> y, as `reference.attend_rows`."""

    op: ClassVar[Op] = "attend_rows"


@register(
    "torch/attend",
    op="attend",
    devices=("cpu", "cuda"),
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    rank=LAST_RESORT,
)
def by_definition(qkv: torch.Tensor, *operands: Any) -> torch.Tensor:
    """See `AttendCall`. On a GPU it uses only operations that a CUDA graph can capture."""
    definition = reference.attend_fixed if qkv.is_cuda else reference.attend
    return definition(qkv, *operands[:-1])  # the last is the config
