"""The state that a model keeps of its sequences, per layer (`arch.parts`): keys and values, a window of them, or recurrent
states."""

from collections.abc import Sequence

import torch

from lowq_cli.engine.batch import KeyValues, States
from lowq_cli.engine.plan import Plan
from lowq_kernels.decode.kv import Cache, Coded, slot_bytes, zeros
from lowq_packers.arch.parts import Pages, Recurrent

BLOCK = 64  # slots per block of a paged cache: attention reads that many at once
PIECE = 1024  # max. prompt tokens per pass with ring caches, which hold a window and this many tokens


def static_state(plan: Plan, batch: int, slots: int, kind: str, copies: int = 0) -> list[KeyValues | States]:
    """The state of `batch` sequences of up to `slots` tokens, with keys and values in the format `kind` (`decode.kv.KINDS`).

    Each sequence has a separate place. A layer with a window has a ring of n blocks per sequence where that is smaller: block j
    takes the place of block j - n. Recurrent states begin at slot 1; `copies` more slots follow them.
    """
    tables: dict[int, torch.Tensor] = {}
    return [state_of_layer(plan, i, batch, slots, kind, tables, copies) for i in range(len(plan.states))]


def state_of_layer(
    plan: Plan, index: int, batch: int, slots: int, kind: str, tables: dict[int, torch.Tensor] | None = None, copies: int = 0
) -> KeyValues | States:
    """The state of one layer, as in `static_state`. tables: number of blocks -> ring table, which layers share."""
    spec, tables = plan.states[index], {} if tables is None else tables
    if isinstance(spec, Recurrent):
        return recurrent(spec, batch + 1 + copies, plan.dtype, plan.device)
    n = ring(spec.window)
    if not spec.window or n * BLOCK >= slots:
        return _pair(spec, (batch, spec.heads, slots), kind, plan, None)
    if n not in tables:
        tables[n] = _ring_table(batch, n, -(-slots // BLOCK) + 1).to(plan.device)
    return _pair(spec, (batch * n + 1, spec.heads, BLOCK), kind, plan, tables[n])


def ring(window: int) -> int:
    """The number of blocks for a window and a piece of a prompt after it."""
    return -(-(window + PIECE) // BLOCK) + 1


def _ring_table(batch: int, n: int, width: int) -> torch.Tensor:
    """Block tables (batch + 1, width) int32 of rings of n blocks; the last row is for dummies, which use block 0."""
    rows = 1 + torch.arange(batch)[:, None] * n + torch.arange(width) % n
    return torch.cat([rows, torch.zeros(1, width, dtype=torch.int64)]).int()


def _pair(spec: Pages, shape: tuple[int, int, int], kind: str, plan: Plan, table: torch.Tensor | None) -> KeyValues:
    k = zeros(kind, (*shape, spec.k_dim), plan.dtype, plan.device)
    v: Cache | None = zeros(kind, (*shape, spec.v_dim), plan.dtype, plan.device) if spec.v_dim else None
    return KeyValues(k, v, table)


def recurrent(spec: Recurrent, slots: int, dtype: torch.dtype, device: torch.device) -> States:
    """Zeroed recurrent states with `slots` slots."""
    return States(
        {
            name: torch.zeros(slots, *shape, dtype=torch.float32 if name in spec.fp32 else dtype, device=device)
            for name, shape in spec.shapes
        }
    )


def block_bytes(spec: Pages, kind: str, dtype: torch.dtype) -> int:
    """Bytes per block of one layer."""
    return BLOCK * spec.heads * sum(slot_bytes(kind, d, dtype) for d in (spec.k_dim, spec.v_dim) if d)


def state_bytes(spec: Recurrent, dtype: torch.dtype) -> int:
    """Bytes of one sequence's state in one layer."""
    sizes = ((torch.Size(shape).numel(), 4 if name in spec.fp32 else dtype.itemsize) for name, shape in spec.shapes)
    return sum(n * size for n, size in sizes)


def tensors_of(state: Sequence[KeyValues | States]) -> list[torch.Tensor]:
    """The tensors of recurrent layers; a trial run of a pass changes them."""
    return [t for one in state if isinstance(one, States) for t in one.tensors.values()]


def raw_tensors(state: KeyValues | States) -> list[torch.Tensor]:
    """All tensors of one layer's state, of codes too; indexed by sequence, block or slot."""
    if isinstance(state, States):
        return list(state.tensors.values())
    halves = [half for half in (state.k, state.v) if half is not None]
    return [t for half in halves for t in ((half.codes, half.scales) if isinstance(half, Coded) else (half,))]
