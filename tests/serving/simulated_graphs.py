"""CUDA graphs on a CPU: the operations of a recorded function are noted and computed again, from and into the same tensors.

As with a GPU's graphs, Python does not run in a replay: numbers that it computed stay those of the recording. What is recorded
changes nothing, and may neither read a value on the host nor send one. Tensors that were made inside hold nothing between two
replays; a tensor from outside, at whose address the graph reads or writes, has to be kept by somebody else.

Kernels in Triton are launched again, in its interpreter, in as many programs and with the numbers that the recording had. So
what their launchers decide on the host is tested where no GPU is.
"""

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from unittest.mock import patch
from weakref import ref

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from lowq_cli.engine import lora_product
from lowq_cli.engine.graph import Captured
from lowq_cli.hf import experts
from lowq_cli.serving import device_drafts, draft_graphs
from lowq_kernels import decode, lasting
from lowq_kernels.decode import TORCH, latent, reference
from lowq_kernels.decode.latent import step_fixed
from lowq_kernels.products.cpu import native

try:
    from triton.runtime.interpreter import GridExecutor
except ImportError:  # no kernel is in Triton then
    GridExecutor = None

aten = torch.ops.aten
READS = {aten._local_scalar_dense, aten.item, aten.is_nonzero, aten.equal}
READS |= {aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim, aten.bincount}  # their results' sizes are values
SENDS = {aten.lift_fresh, aten.lift_fresh_copy}  # of `torch.tensor`
UNSET = {aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided}


class NotRecordedError(RuntimeError):
    """Something that no graph holds."""


def _tensors(values):
    return [t for t in tree_flatten(values)[0] if isinstance(t, torch.Tensor)]


def _place(t):
    return t.untyped_storage().data_ptr()


def spoil(t):
    """Fill a tensor with what nobody should read."""
    t.fill_(float("nan") if t.is_floating_point() else True if t.dtype == torch.bool else 1 << 30)


class _Noting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls, self.inside, self.before = [], {}, {}  # `inside`: address -> a tensor, kept so that no other one gets it

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.overloadpacket in READS:
            raise NotRecordedError(f"{func} waits for the device")
        if func.overloadpacket is aten.index and any(t is not None and t.dtype == torch.bool for t in args[1]):
            raise NotRecordedError("how many rows a mask takes is a value on the device")
        if func.overloadpacket in SENDS:
            raise NotRecordedError(f"{func} sends what the host has")
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.hold(value)
        given = {_place(t) for t in _tensors((args, kwargs))}
        out = func(*args, **kwargs)
        made = [t for t in _tensors(out) if t.numel() and _place(t) not in given]
        for t in made:
            self.inside[_place(t)] = t
        if func.overloadpacket in UNSET:
            for t in made:
                spoil(t)
        self.calls.append((func, args, kwargs, out, {_place(t) for t in made}))
        return out

    def hold(self, values):
        """Copy what tensors from outside hold: a recording does not change it."""
        for t in _tensors(values):
            if _place(t) not in self.inside and _place(t) not in self.before:
                with _disable_current_modes():
                    whole = t.new_empty(0).set_(t.untyped_storage(), 0, (t.untyped_storage().nbytes() // t.element_size(),))
                    self.before[_place(t)] = whole, whole.clone()

    def launch(self, executor, *args, **kwargs):
        """A launch of a kernel in Triton, which may write all of its tensors."""
        self.hold((args, kwargs))
        _run(executor, *args, **kwargs)
        self.calls.append((partial(_run, executor), args, kwargs, None, set()))


def _run(executor, *args, **kwargs):
    with _disable_current_modes():
        LAUNCH(executor, *args, **kwargs)


LAUNCH = None if GridExecutor is None else GridExecutor.__call__


class SimulatedGraph:
    """What `step` computes, recorded. Raises NotRecordedError where a GPU could not record it, or replay it."""

    logits = noted = None  # outputs: they stay after a replay

    def __init__(self, step: Callable[[], object]) -> None:
        noting, refused = _Noting(), NotRecordedError("sends or reads a value of the host")
        with ExitStack() as stack:
            for module in (device_drafts, draft_graphs):
                stack.enter_context(patch.object(module, "upload", side_effect=refused))
            stack.enter_context(patch.object(torch, "from_numpy", side_effect=refused))
            for name in ("tolist", "numpy", "cpu", "__array__"):
                stack.enter_context(patch.object(torch.Tensor, name, side_effect=refused))
            stack.enter_context(patch.object(lasting, "recording", return_value=True))
            if GridExecutor is not None:
                stack.enter_context(patch.object(GridExecutor, "__call__", lambda *how, **more: noting.launch(*how, **more)))
            stack.enter_context(noting)
            step()
        for t, before in noting.before.values():
            t.copy_(before)
        self.inside, self.replays = list(noting.inside.values()), 0
        mine, lent = set(noting.inside), lambda t: t if not isinstance(t, torch.Tensor) or _place(t) in mine else ref(t)
        self.calls = [(f, tree_map(lent, (args, kwargs)), out, made) for f, args, kwargs, out, made in noting.calls]
        self.kernels = {f.args[0].fn.__name__ for f, *_ in self.calls if isinstance(f, partial)}
        self._spoil()

    def replay(self) -> None:
        self.replays += 1
        for func, given, out, made in self.calls:
            args, kwargs = tree_map(self._there, given)
            if isinstance(func, partial):
                func(*args, **kwargs)
                continue
            if func.overloadpacket in UNSET:
                continue
            for old, new in zip(_tensors(out), _tensors(func(*args, **kwargs)), strict=True):
                if old.numel() and _place(old) in made:
                    old.copy_(new)
        self._spoil()

    @staticmethod
    def _there(value):
        if not isinstance(value, ref):
            return value
        if (t := value()) is None:
            raise NotRecordedError("a tensor that a graph reads or writes is freed")
        return t

    def _spoil(self):
        outputs = {_place(t) for t in _tensors((self.logits, self.noted))}
        for t in self.inside:
            if _place(t) not in outputs:
                spoil(t)

    def overwrite(self):
        """Spoil all that lies in its memory, which other graphs share."""
        for t in self.inside:
            spoil(t)


class Shared:
    """Simulated graphs whose memory is shared: a replay overwrites what others hold, outputs too. As with `graph.capture`, the
    first is run before it is recorded."""

    def __init__(self) -> None:
        self.graphs = list[SimulatedGraph]()

    def capture(self, step, pool):
        if pool is None:
            step()
        graph = SimulatedGraph(step)
        self.graphs.append(graph)
        return _Sharing(graph, self)


class _Sharing(Captured):
    def __init__(self, graph, shared):
        super().__init__(self)
        self.own, self.shared = graph, shared

    def pool(self):
        return self.shared

    def replay(self):
        for graph in self.shared.graphs:
            graph.overwrite()
        self.own.logits, self.own.noted = self.logits, self.noted
        self.own.replay()


class Recording:
    """The passes of a model, whose `capture` makes simulated graphs."""

    pool, device = None, torch.device("cpu")

    def __init__(self) -> None:
        self.graphs = list[SimulatedGraph]()

    def capture(self, step, pool):
        self.graphs.append(SimulatedGraph(step))
        return self.graphs[-1]


def by_groups(qkv, k_cache, v_cache, at, h, groups=None):
    """As decode/attend_rows.py computes `attend_rows` on a GPU: rows stand where the first one of their group does and behind
    it, in its blocks. A row that is in no group gets nothing that can be used."""
    y = reference.attend_fixed(qkv, k_cache, v_cache, at, h)
    if h.writes:  # now that all rows are written, each sees those of its sequence
        q, h = qkv[:, : h.HQ * h.D], replace(h, writes=False)
        if groups is None or h.chunk:
            return reference.attend_fixed(q, k_cache, v_cache, at, h)
        first, count, most = (*(t.long() for t in groups[:2]), groups[2])
        rows = torch.arange(len(q), device=q.device)
        theirs = (rows[:, None] >= first) & (rows[:, None] < first + count.clamp(max=most))  # no program computes more
        there, group = theirs.any(1), theirs.long().argmax(1)
        start = first.index_select(0, group)
        pos = torch.where(there, at.pos.index_select(0, start) + (rows - start).int(), 0)
        at = at._replace(pos=pos, table=at.table.index_select(0, start))
        y = torch.where(there[:, None], reference.attend_fixed(q, k_cache, v_cache, at, h), float("nan"))
    return y


OPS = replace(
    TORCH, attend=reference.attend_fixed, attend_rows=by_groups, latent=replace(TORCH.latent, step=step_fixed)
)  # what a GPU computes in steps, by operations that can be recorded


@contextmanager
def as_recorded():
    """Products in torch, as C++ is not noted; and experts of mixtures as while a GPU records, not grouped by the host."""
    with patch.object(native, "library", return_value=None), patch.object(experts, "rows_by_expert", experts.row_by_row):
        yield


INTERPRETED = ("triton/attend", "triton/latent", "triton/route", "triton/short_conv", "triton/delta")


@contextmanager
def as_on_a_gpu():
    """`as_recorded`, and dispatch chooses Triton's kernels on a CPU, too."""
    from emulation import changed_kernels  # with Triton, which other tests do without
    from lowq_kernels.decode import low_rank_triton

    with as_recorded(), changed_kernels() as kernels, ExitStack() as stack:
        for name in (*INTERPRETED, *(f"{name}_runs" for name in INTERPRETED[3:])):
            kernels[name] = replace(kernels[name], devices=("cpu",), dtypes=(torch.float32,), rank=-1)
        stack.enter_context(patch.object(lora_product, "add_low_rank", low_rank_triton.add_low_rank_rows))
        stack.enter_context(patch.object(lora_product, "room", low_rank_triton.room))
        yield


def as_a_gpu_computes(plan):
    """The plan with a GPU's operations, but for those in CUDA."""
    from lowq_kernels.decode import latent_prompt

    forms = latent.Forms(latent.dispatched, latent_prompt.prompt, latent_prompt.packed, latent_prompt.refuse)
    unfused = dict.fromkeys(("fold", "attend_prepared", "gate_product", "norm_product"))
    plan.ops, plan.adds_in_gates = replace(decode.ops("cuda"), latent=forms, **unfused), True
    plan.refold()
    return plan
