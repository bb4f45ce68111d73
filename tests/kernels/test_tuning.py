"""Tables: what an entry answers for, when it is stale, how files survive, and that dispatch listens."""

import dataclasses
import json
import os
from functools import partial
from pathlib import Path

import forking
import pytest
import torch

from lowq_kernels import gpu
from lowq_kernels.activations import STEPS
from lowq_kernels.dispatch import measure, registry, sources, tuning, tuning_file
from lowq_kernels.dispatch.layouts import ranked
from lowq_kernels.dispatch.measure import Budget
from lowq_kernels.dispatch.precompile import MOST_ROWS, Work
from lowq_kernels.dispatch.registry import Call, select
from lowq_kernels.dispatch.sources import code_of, source_hash
from lowq_kernels.dispatch.tuning import Shape, Table
from lowq_kernels.dispatch.tuning_file import Entry, Machine
from lowq_kernels.products.cpu import native
from lowq_packers.errors import DamagedError
from lowq_packers.scheme import Scheme

CPU = torch.device("cpu")
HERE = Machine.here(CPU)


@pytest.fixture(autouse=True)
def no_tables_left():
    yield
    tuning.forget()


def entry(M: int, kernel: str = "dequant", layout: str = "rowstream", us: float = 10.0, **changed: object) -> Entry:
    facts = Entry(4, 64, "float", "bfloat16", layout, 256, 512, M, kernel, {}, us, source_hash(kernel))
    return dataclasses.replace(facts, **changed)


def call(M: int, layout: str = "rowstream", N: int = 256, K: int = 512) -> Call:
    return Call(M, N, K, Scheme(4, 64), layout, torch.bfloat16, "cpu")


def test_lookup_takes_the_next_larger_M_and_else_the_largest():
    table = Table([entry(1, "reference"), entry(16, "dequant")])
    assert table.lookup(call(1)) == ("reference", {})
    assert table.lookup(call(2)) == ("dequant", {})
    assert table.lookup(call(32)) == ("dequant", {})
    assert table.lookup(call(33)) is None  # a table made for decoding does not choose for prompts


def test_entries_of_another_shape_scheme_or_layout_do_not_answer():
    table = Table([entry(1)])
    assert table.lookup(call(1, N=128)) is None
    assert table.lookup(call(1, layout="strided")) is None
    assert table.lookup(dataclasses.replace(call(1), scheme=Scheme(4, 32))) is None
    assert table.lookup(dataclasses.replace(call(1), dtype=torch.float16)) is None


def test_a_near_shape_answers_only_where_asked_and_only_within_reach():
    table = Table([entry(1)])
    assert table.lookup(call(1, N=512), near=True) == ("dequant", {})
    assert table.lookup(call(1, N=256 * 64), near=True) is None


def test_entries_of_changed_sources_and_unknown_kernels_are_stale():
    table = Table([entry(1, source="0" * 12), entry(2), entry(4, source="x", kernel="dequant")])
    assert (len(table), table.stale) == (1, 2)
    gone = dataclasses.replace(entry(1), kernel="triton/of_last_year")
    assert Table([gone]).stale == 1


def test_a_comment_leaves_entries_fresh_and_code_does_not():
    before = '"""What it does."""\nX = 3  # because\n\n\ndef f():\n    """Doc."""\n    # why\n    return "# kept"\n'
    after = 'X = 3\ndef f():\n    """Another."""\n    return "# kept"\n'
    assert code_of(before, "a.py") == code_of(after, "a.py") == 'X = 3\ndef f():\n    return "# kept"'
    assert code_of(before, "a.py") != code_of(before.replace("3", "4"), "a.py")
    assert code_of("int a; // one\n/* two\n three */ int b;\n", "a.cu") == "int a;\n int b;"


def test_a_kernel_is_hashed_with_its_imports_and_without_its_neighbours():
    pytest.importorskip("triton")
    result = {Path(name).name for name in sources.closure("lowq_kernels.products.triton.gemm")}
    assert {"gemm.py", "product.py", "decode.py", "partial.py", "fit.py", "overlap.py"} <= result
    assert not {"gemv_splitk.py", "gemm_streamk.py", "read.py", "registry.py"} & result
    result = {Path(name).name for name in sources.closure("lowq_kernels.products.cuda.tile_mma")}
    assert {"tile_mma.py", "tile_mma.cu", "tile.cuh", "driver.py", "nvrtc.py"} <= result
    assert not {"tile_wgmma.cu", "gemv.cuh", "gemv_rows.py", "registry.py"} & result


def test_the_source_of_the_choice_is_shown(tmp_path, monkeypatch):
    assert tuning.chosen_by(call(1)) == "rule"
    tuning_file.write_file(tmp_path / tuning_file.FILE, HERE, [entry(1, "reference")])
    tuning.use(tmp_path, CPU)
    assert tuning.chosen_by(call(1)) == "tuned"
    assert tuning.chosen_by(call(1), "dequant") == "name"
    monkeypatch.setenv("LOWQ_KERNEL", "dequant")
    assert tuning.chosen_by(call(1)) == "name"


def test_a_file_keeps_other_machines_and_replaces_its_own_entries(tmp_path):
    path = tmp_path / tuning_file.FILE
    other = dataclasses.replace(HERE, gpu="some other GPU")
    tuning_file.write_file(path, other, [entry(1)])
    tuning_file.write_file(path, HERE, [entry(1, us=10.0), entry(2)])
    tuning_file.write_file(path, HERE, [entry(1, us=5.0)])
    machines = {m["gpu"]: m["entries"] for m in tuning_file.read_file(path)}
    assert [e["us"] for e in machines[HERE.gpu]] == [5.0, 10.0]
    assert len(machines["some other GPU"]) == 1
    assert [p.name for p in tmp_path.iterdir()] == [tuning_file.FILE]


def test_using_a_folder_decides_and_deleting_its_file_undoes_it(tmp_path):
    rule = select(call(1, "cpu_int4"))[0].name
    assert rule == "cpu/int4"
    tuning_file.write_file(tmp_path / tuning_file.FILE, HERE, [entry(1, "reference", "cpu_int4")])
    assert tuning.use(tmp_path, CPU) == 1
    assert select(call(1, "cpu_int4"))[0].name == "reference"
    (tmp_path / tuning_file.FILE).unlink()
    tuning.forget()
    assert tuning.use(tmp_path, CPU) == 0
    assert select(call(1, "cpu_int4"))[0].name == rule


def test_an_entry_that_no_longer_fits_its_kernel_falls_back_to_the_rule(tmp_path):
    tuning_file.write_file(tmp_path / tuning_file.FILE, HERE, [entry(1, "cpu/int4", config={"BLOCK_N": 7}, layout="cpu_int4")])
    tuning.use(tmp_path, CPU)
    assert select(call(1, "cpu_int4"))[1] == {}


def test_other_versions_are_ignored_with_a_notice(tmp_path):
    tuning_file.write_file(tmp_path / tuning_file.FILE, dataclasses.replace(HERE, torch="1.0"), [entry(1)])
    output: list[str] = []
    assert tuning.use(tmp_path, CPU, output.append) == 0
    assert "1 entries" in output[0]
    assert "lowq tune" in output[0]


def test_entries_written_by_concurrent_processes_are_all_kept(tmp_path):
    path, children = tmp_path / tuning_file.FILE, []
    for M in range(1, 7):
        children.append(forking.fork(partial(tuning_file.write_file, path, HERE, [entry(M)])))
    for pid in children:
        os.waitpid(pid, 0)
    assert [e["M"] for m in tuning_file.read_file(path) for e in m["entries"]] == [1, 2, 3, 4, 5, 6]
    assert [p.name for p in tmp_path.iterdir()] == [tuning_file.FILE]


@pytest.mark.parametrize(
    "fault",
    [{"M": "1"}, {"M": None}, {"N": 0}, {"us": "fast"}, {"us": 0}, {"us": float("nan")}, {"zero": ["float"]}, {"config": "{}"}],
    ids=str,
)
def test_entries_of_other_types_are_a_damaged_file(tmp_path, fault):
    tuning_file.write_file(tmp_path / tuning_file.FILE, HERE, [entry(1)])
    content = json.loads((tmp_path / tuning_file.FILE).read_text())
    content["machines"][0]["entries"][0] |= fault
    (tmp_path / tuning_file.FILE).write_text(json.dumps(content))
    output: list[str] = []
    assert tuning.use(tmp_path, CPU, output.append) == 0
    assert "is not a tuning file" in output[0]


@pytest.mark.parametrize("name", ["gpu", "capability", "torch", "triton"])
@pytest.mark.parametrize("value", [[1], {}, None, 1, 1.5, True, [1, "0"], [[0], 0]], ids=str)
def test_machines_of_other_types_are_a_damaged_file(tmp_path, name, value):
    tuning_file.write_file(tmp_path / tuning_file.FILE, HERE, [entry(1)])
    content = json.loads((tmp_path / tuning_file.FILE).read_text())
    content["machines"][0][name] = value
    (tmp_path / tuning_file.FILE).write_text(json.dumps(content))
    with pytest.raises(DamagedError, match="is not a tuning file"):
        tuning_file.read_file(tmp_path / tuning_file.FILE)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 9, "machines": []}', '{"format": 2, "machines": [{"gpu": 3}]}'])
def test_a_damaged_file_is_ignored_with_a_notice_and_refused_by_the_reader(tmp_path, text):
    (tmp_path / tuning_file.FILE).write_text(text)
    output: list[str] = []
    assert tuning.use(tmp_path, CPU, output.append) == 0
    assert tuning_file.FILE in output[0]
    with pytest.raises(DamagedError, match="lowq tune"):
        tuning_file.read_file(tmp_path / tuning_file.FILE)


def test_the_preferred_layout_is_the_faster_one_over_the_batches_that_all_have():
    shape = Shape(256, 512, Scheme(4, 64), torch.bfloat16)
    both = ("rowstream", "cpu_int4")
    slow_at_one = [entry(1, us=20), entry(64, us=20)]
    fast_at_one = [entry(m, "reference", "cpu_int4", us) for m, us in ((1, 5), (64, 30))]
    assert tuning.preferred_layout(Table([*slow_at_one, *fast_at_one]), shape, both) == "cpu_int4"
    dropped_out = fast_at_one[:1]
    assert tuning.preferred_layout(Table([*slow_at_one, *dropped_out]), shape, both) == "rowstream"
    assert tuning.preferred_layout(Table(slow_at_one), shape, both) is None


def test_measuring_a_shape_gives_a_winner_per_layout_and_M_that_dispatch_accepts():
    shape = Shape(32, 64, Scheme(4, 32), torch.bfloat16)
    result = list(measure.measure(shape, (1, 4), CPU, Budget()))
    first = ranked(shape.scheme, shape.N, shape.K, shape.dtype, CPU)[0]
    assert {(e.layout, e.M) for e in result} >= {("rowstream", 1), ("rowstream", 4), (first, 1)}
    for e in result:
        assert e.us > 0
        assert e.kernel != "reference"
        spec = registry.kernels()[e.kernel]
        assert spec.why_not(measure.call_for(shape, e.M, e.layout, CPU)) is None


def test_no_budget_measures_nothing():
    assert list(measure.measure(Shape(32, 64, Scheme(4, 32), torch.bfloat16), (1,), CPU, Budget(0))) == []


def test_work_is_the_same_where_the_binary_is():
    """Triton's kernels are compiled once for every M, CUDA's once for one row, two, four and each number of tiles of 8 rows."""
    rows = {kernel: [Work.of(kernel, {}, Scheme(4, 64), "tile", torch.float16, M, 64, 64).M for M in (1, 3, 8, 9, 64, 5000)]
            for kernel in ("triton/gemm", "cuda/tile_mma")}  # fmt: skip
    assert rows == {"triton/gemm": [1] * 6, "cuda/tile_mma": [1, 4, 8, 16, 64, MOST_ROWS]}


@pytest.mark.parametrize("M", [1, 2, 3, 4, 6, 8, 16, 32])
def test_work_is_that_of_a_launch(M):
    """The binary that is compiled ahead for M rows is the one that they launch: else tuning compiles it while it times."""
    spec, scheme = registry.kernels().get("cuda/tile_mma"), Scheme(4, 128)
    if spec is None:
        pytest.skip("NVRTC is not installed")
    from lowq_kernels.products.cuda import tile_mma

    def instance(rows, config):
        cut = tile_mma.plan(Call(rows, 4096, 4096, scheme, "tile", torch.float16, "cuda", (9, 0)), config)
        return cut and tile_mma.expression(scheme, 4096, torch.float16, config, cut.M_TILES, cut.copies, gpu.HOPPER.sms)

    asked = Call(M, 4096, 4096, scheme, "tile", torch.float16, "cuda", (9, 0))
    for config in spec.legal_configs(asked):
        ahead = Work.of(spec.name, config, scheme, "tile", torch.float16, M, 4096, 4096)
        assert instance(ahead.M, config) == instance(M, config), config


def test_a_table_says_where_x_is_rounded_inside_the_product():
    """The rule has 8-bit kernels begin at 97 rows; an entry for the call decides otherwise, either way."""
    eight, sixteen = "cuda/tile_int8", "cuda/tile_wgmma"
    if eight not in registry.kernels():
        pytest.skip("NVRTC is not installed")
    place = {"dtype": "float16", "layout": "tile", "group": 128}
    asked = {M: Call(M, 256, 512, Scheme(4, 128), "tile", torch.float16, "cuda", (9, 0), "int8") for M in (16, 200)}
    config = registry.kernels()[eight].configs[0]
    for entries, rounds in (
        ([], {16: False, 200: True}),
        (
            [entry(16, eight, act="int8", **place, config=config), entry(200, sixteen, act="int8", **place)],
            {16: True, 200: False},
        ),
        ([entry(16, eight, **place, config=config), entry(200, sixteen, **place)], {16: False, 200: True}),  # of 16-bit calls
    ):
        with registry.asking(Table(entries).lookup):
            assert {M: registry.after_rounding(c).act != "none" for M, c in asked.items()} == rounds
            if entries and entries[0].act == "int8":
                assert select(asked[16])[0].name == eight
            assert registry.after_rounding(asked[16], sixteen).act == "none"


def test_eight_bit_products_are_measured_against_rounding_and_sixteen():
    eight, plain = entry(STEPS + 1, "reference", us=9.0, act="int8"), entry(STEPS + 1, us=8.0, runners_up=({"us": 8.5},))
    assert measure.cheaper(eight, plain, 4.0) == eight
    assert measure.cheaper(eight, plain, 0.5) == dataclasses.replace(plain, us=8.5, act="int8", runners_up=())


def test_x_is_rounded_inside_the_product_where_rows_are_many_and_a_kernel_can():
    layout, shape = "cpu" if native.library() else "rowstream", Shape(32, 128, Scheme(4, 128), torch.bfloat16, act="int8")
    weights = [measure.random_weight(shape, layout, CPU)]
    few, plain = (entry(M, us=1e9, group=128, layout=layout) for M in (STEPS, STEPS + 1))
    assert measure.rounding(shape, few, weights, CPU) is None  # x of few rows is not rounded
    measured = measure.rounding(shape, plain, weights, CPU)
    if layout == "rowstream":  # which no kernel of 8-bit products reads
        assert measured is None
    else:
        assert (measured.kernel, measured.act, measured.us < 1e9) == ("cpu/packed_int8", "int8", True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU")
def test_activations_are_tuned_on_the_gpu(tmp_path, monkeypatch):
    """Times of both ways, an entry each, and dispatch that follows them. Of each kernel one config."""
    device, all_of = torch.device("cuda"), measure.candidates
    monkeypatch.setattr(measure, "candidates", lambda *a: list({s.name: (s, c) for s, c in all_of(*a)}.values()))
    shape = Shape(2048, 2048, Scheme(4, 128), torch.float16, act="fp8")
    entries = list(measure.measure(shape, (1, 512), device, Budget(60)))
    by_act = {(e.act, e.M): e for e in entries}
    assert set(by_act) == {("none", 1), ("none", 512), ("fp8", 512)}
    assert by_act["fp8", 512].us > 0
    tuning_file.write_file(tmp_path / tuning_file.FILE, Machine.here(device), entries)
    assert tuning.use(tmp_path, device) == 3
    asked = measure.call_for(shape, 512, "tile", device, "fp8")
    assert (registry.after_rounding(asked).act == "fp8") == ("fp8" in by_act["fp8", 512].kernel)


def test_a_time_that_the_others_contradict_is_measured_again():
    first, again = {1: 7886.0, 8: 66.0, 16: 500.0}, {1: iter([7000.0, 60.0, 61.0]), 16: iter([70.0, 510.0, 71.0])}
    known: list[Entry] = []
    timed: list[Entry] = []
    for M, us in first.items():
        timed += measure.settle(known, entry(M, us=us), lambda M: entry(M, us=next(again[M])))
    assert [(e.M, e.us) for e in timed] == [(1, 7886.0), (1, 60.0), (8, 66.0), (16, 70.0), (16, 70.0)]
    assert [(e.M, e.us) for e in known] == [(1, 60.0), (8, 66.0), (16, 70.0)]
    assert [(e.M, e.us) for e in measure.settle(known, entry(32, us=75.0), lambda M: None)] == [(32, 75.0)]
