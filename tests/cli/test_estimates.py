"""The seconds that a plan names for a calibration (calibrate/cost.py)."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import lowq
from lowq_cli.calibrate import cost
from lowq_cli.quantizers import _table_book, gptq, lsq
from lowq_cli.quantizers._table_book import Book
from lowq_cli.quantizers._table_fit import companion_of
from lowq_packers.scheme import ZERO_KINDS, Scheme

# operations that launch nothing on a GPU: views, and tensors that nothing fills
VIEWS = {"view", "slice", "select", "unsqueeze", "squeeze", "t", "transpose", "expand", "detach", "alias", "diagonal"}
VIEWS |= {"empty", "empty_like", "new_empty", "empty_strided", "as_strided", "permute", "unbind", "split"}
VIEWS |= {"_unsafe_view", "lift_fresh"}
KINDS = ((4, 64, "nf4"), (4, 32, "fitted/e4m3"), (2, 16, "fitted/e4m3"), (4, 16, "e2m1/e4m3"), (4, 32, "e2m1/e8m0"))
TABLES = [Scheme.of(*kind) for kind in KINDS]


class Counter(TorchDispatchMode):
    """Counts the launches; `kernel` stands for one, whatever it runs."""

    launches, inside = 0, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.launches += not self.inside and func.overloadpacket.__name__ not in VIEWS
        return func(*args, **(kwargs or {}))

    def kernel(self, f):
        def run(*args):
            self.launches += not self.inside
            before, self.inside = self.inside, True
            out = f(*args)
            self.inside = before
            return out

        return run


def launches(monkeypatch, scheme, fit_too):
    """The launches that one more group takes in gptq."""
    counts = []
    for G in (2, 3):
        W, counter = torch.randn(8, G * scheme.group_size, generator=torch.Generator().manual_seed(0)), Counter()
        with monkeypatch.context() as m:
            m.setattr(gptq, "round_block", counter.kernel(gptq.round_block))
            if fit_too:
                m.setattr(gptq, "fit_grid", counter.kernel(gptq.fit_grid))
                m.setattr(Book, "scales", counter.kernel(Book.scales))
                m.setattr(Book, "round_block", counter.kernel(Book.round_block))
            table = companion_of(W, scheme)
            with counter:
                gptq.quantize(W, scheme, torch.bfloat16, None, None, table)
        counts.append(counter.launches)
    return counts[1] - counts[0]


@pytest.mark.parametrize("zero", ZERO_KINDS)
def test_launches_of_a_group_are_those_that_are_counted(monkeypatch, zero):
    scheme = Scheme(4, 64, zero)
    assert launches(monkeypatch, scheme, True) == pytest.approx(cost.BY_KERNEL, abs=1)
    assert launches(monkeypatch, scheme, False) == pytest.approx(cost.BY_TORCH[zero], rel=0.15)  # the search may end early


def test_launches_of_a_table_are_at_most_those_that_are_counted(monkeypatch):
    counts = {s: launches(monkeypatch, s, False) for s in TABLES}
    assert all(n <= cost._group_launches(s, "cpu") for s, n in counts.items()), counts
    assert any(n >= 0.95 * cost._group_launches(s, "cpu") for s, n in counts.items()), counts


@pytest.mark.parametrize("scheme", TABLES, ids=str)
def test_a_table_takes_as_few_launches_as_a_grid_by_kernel(monkeypatch, scheme):
    assert launches(monkeypatch, scheme, True) == pytest.approx(cost.BY_KERNEL, abs=1)


def test_groups_that_the_kernels_do_not_take_are_counted_by_torch(monkeypatch):
    kernels = SimpleNamespace(MOST=1024)
    for module in (lsq, _table_book):
        monkeypatch.setattr(module, "implementation", lambda device: kernels)
    monkeypatch.setattr(_table_book, "rounding", lambda device: kernels)
    small, large = ([Scheme.of(4, size, kind) for kind in ("float", "nf4")] for size in (1024, 1040))
    assert [cost._group_launches(s, "cuda") for s in small] == [cost.BY_KERNEL] * 2
    assert [cost._group_launches(s, "cuda") for s in large] == [cost.BY_TORCH["float"], cost.TABLE_GROUP]


def plan(scheme, method, shape=(2048, 2048), kind="linear"):
    """A plan of one matrix."""
    item = SimpleNamespace(
        name="model.layers.0.a", kind=kind, shape=shape, params=shape[0] * shape[1], scheme=scheme, method=method
    )
    return SimpleNamespace(items=[item], recipe=SimpleNamespace(tokens=4096))


def test_only_a_gpus_estimate_counts_launches(monkeypatch):
    monkeypatch.setattr(cost, "_operation_s", lambda device: 1e-12)
    monkeypatch.setattr(cost, "_launch_s", lambda device: 1.0)
    gptqs = plan(Scheme(4, 64), "gptq")
    here = cost.seconds(gptqs, torch.device("cpu"))
    assert here == pytest.approx(cost.OVERHEAD["cpu"] * cost.operations(gptqs) * 1e-12)
    layers = here / cost.OVERHEAD["cpu"] * cost.OVERHEAD["cuda"] + cost.SETUP
    there = cost.seconds(gptqs, torch.device("cuda")) - layers
    assert there == pytest.approx(2048 // 64 * cost._group_launches(Scheme(4, 64), "cuda"))
    assert cost.seconds(plan(Scheme(4, 64), "awq"), torch.device("cuda")) == pytest.approx(layers)  # no launches of rounding


def test_attention_runs_as_often_as_it_is_counted(short_demo, tmp_path, monkeypatch):
    attend, positions = torch.nn.functional.scaled_dot_product_attention, []

    def counted(query, *args, **how):
        positions.append(query.shape[0] * query.shape[2])
        return attend(query, *args, **how)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    tokens = 8 * 512  # a batch of windows
    lowq.quantize(short_demo, out=tmp_path / "out", method="gptq", calib="bundled", calib_tokens=tokens, device="cpu")
    assert sum(positions) / (2 * tokens) == pytest.approx(cost.ATTENDED, abs=1)  # two layers


def test_attention_of_narrow_layers_counts_on_a_cpu(monkeypatch):
    """Its operations are those of its two products over a window."""
    monkeypatch.setattr(cost, "_operation_s", lambda device: 1e-12)
    wide = plan(Scheme(4, 64), "gptq", kind="attention")
    assert cost.seconds(wide, torch.device("cpu")) == pytest.approx(
        cost.OVERHEAD["cpu"] * 1e-12 * (cost.operations(wide) + cost.ATTENTION["cpu"] * cost.ATTENDED * 4096 * 4 * 512 * 2048)
    )
    bias = SimpleNamespace(name="model.layers.0.bias", kind="attention", shape=(2048,), params=2048, scheme=None, method=None)
    assert cost._attention(SimpleNamespace(items=[*wide.items, bias])) == cost._attention(wide) > 0
    small = plan(Scheme(4, 64), "distill", kind="attention")
    without = plan(Scheme(4, 64), "distill")
    assert cost.seconds(small, torch.device("cpu")) > cost.seconds(without, torch.device("cpu"))


def test_nothing_to_calibrate_takes_no_time(monkeypatch):
    monkeypatch.setattr(cost, "_operations", lambda plan: (0.0, 0.0))
    monkeypatch.setattr(cost, "_operation_s", lambda device: 1e-12)
    assert cost.seconds(plan(Scheme(4, 64), "gptq"), torch.device("cuda")) == 0


def test_yaqa_takes_a_gptqs_launches_in_each_step():
    matrix, small = (plan(Scheme(4, 64), "yaqa", shape).items[0] for shape in ((2048, 2048), (64, 2048)))
    group = cost._group_launches(Scheme(4, 64), "cpu")
    assert cost._launches(matrix, "cpu") == 32 * 32 * group
    assert cost._launches(small, "cpu") == 4 * 32 * group
    assert cost._launches(plan(Scheme(4, 64), "gptq", (16384, 2048)).items[0], "cpu") == 2 * 32 * group


def test_a_launch_is_timed():
    assert 0 < cost._launch_s(torch.device("cpu")) < 1e-3


def test_a_gpu_is_timed_after_it_has_clocked_up(monkeypatch):
    """A stand-in for a GPU whose work takes a tenth of the time once it has computed for a while."""
    now, worked = [0.0], [0.0]

    class OnGpu(torch.Tensor):
        is_cuda = True

        def __getitem__(self, where):
            worked[0] += (took := 1e-3 if worked[0] > 0.1 else 1e-2)
            now[0] += took
            return torch.zeros(())

    monkeypatch.setattr(cost.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(cost.torch, "ones", lambda *size, device: torch.zeros(2, 2).as_subclass(OnGpu))
    cost._clock_up.cache_clear()
    assert cost.fastest_s(lambda: torch.zeros(2, 2).as_subclass(OnGpu)) == pytest.approx(1e-3)
    cost._clock_up.cache_clear()
