"""The files of tuned/: what they name exists, dispatch reads them on an H100 and an H200, and ship.py puts times into them."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

import emulation
from lowq_kernels import gpu
from lowq_kernels.dispatch import policy, registry, tuning, tuning_file
from lowq_kernels.dispatch.registry import Call, select
from lowq_packers.scheme import BITS, Scheme

ROOT = Path(gpu.__file__).resolve().parents[1]
import ship

FILE = ROOT / "kernels" / "tuned" / "h100.json"
MMA, WGMMA = "cuda/tile_mma", "cuda/tile_wgmma"
H200 = dataclasses.replace(gpu.HOPPER, name="NVIDIA H200", l2=60 << 20)
needs_nvrtc = pytest.mark.skipif(MMA not in registry.kernels(), reason="NVRTC is not installed")


def call(M, N=4096, K=4096, bits=4, layout="tile", on=gpu.HOPPER, group=128, dtype=torch.float16):
    return Call(M, N, K, Scheme(bits, group, "float"), layout, dtype, "cuda", on.capability)


@pytest.fixture
def changed():
    """The shipped file as dispatch holds it, which tests may change; afterwards it is read anew."""

    def forget():
        for cached in (policy.files, policy.file_for, tuning.shipped):
            cached.cache_clear()
        registry.forget_choices()

    forget()
    yield policy.file_for(gpu.HOPPER)
    forget()


@needs_nvrtc
def test_everything_that_ships_names_kernels_and_configs_that_exist():
    for file in policy.files():
        assert file["format"] == policy.FORMAT
        for kernel, keys in file["keys"].items():
            known = [tuple(c[k] for k in keys) for c in registry.kernels()[kernel].configs]
            rows = [tuple(v) for row in file["configs"] if row["kernel"] == kernel for _, *v in row["configs"]]
            pairs = [tuple(v) for values in file["gated"].values() for v in values]
            assert rows
            assert set(rows + pairs) <= set(known)
        known = {*registry.kernels(), *registry.kernels("fp8_product"), *registry.kernels("dense"), "fp8_block_quant"}
        assert {row["kernel"] for row in file["prefer"]} | set(file["models"]) <= known
        bounds = {"bits", "M", "N", "least_K", "least_NK", "least_group"}  # another key would bound nothing
        assert set().union(*file["prefer"]) <= {"kernel", *bounds, "why"}
        on = gpu.row(tuple(file["capability"]))
        table = tuning.shipped(on)
        assert len(table) or not file["measured"]  # a new GPU's file begins without any
        assert table.stale == 0
        for e in table:
            asked = call(e.M, e.N, e.K, e.bits, e.layout, on, e.group)
            assert e.config in registry.kernels()[e.kernel].legal_configs(asked), e


@needs_nvrtc
@pytest.mark.parametrize("bits", BITS)
def test_a_larger_row_always_answers(bits):
    """For each width, group and size, and with the most rows of x that a block has."""
    for group, N, K in ((32, 64, 64), (128, 4224, 4096), (128, 1 << 20, 1 << 16), (4096, 8512, 4096)):
        assert policy.configs(MMA, call(1, N, K, bits, group=group), 32, tuple(policy.files()[0]["keys"][MMA]))


@needs_nvrtc
@pytest.mark.parametrize("on", [gpu.HOPPER, H200], ids=lambda g: g.name)
def test_dispatch_follows_the_file(on, changed):
    """As on either GPU, with none here: an H200 is a Hopper, and nothing nearer ships. Another row, another choice."""
    with emulation.installed(on):
        check_choices(changed)


def check_choices(changed):
    for M, N, K, kernel in ((1, 4096, 14336, MMA), (8, 28672, 4096, MMA), (16, 28672, 4096, WGMMA), (512, 4096, 4096, WGMMA)):
        asked = call(M, N, K)
        spec, config = select(asked)
        assert spec.name == kernel
        assert tuning.chosen_by(asked) == "shipped"
        if kernel == MMA:
            row = policy.row_of(changed["configs"], MMA, asked)
            other = next(c for c in spec.legal_configs(asked) if c != config)
            row.insert(0, [32, *other.values()])
            registry.forget_choices()
            assert select(asked)[1] == other
        else:
            changed["prefer"] = [p for p in changed["prefer"] if p["kernel"] != WGMMA]
            registry.forget_choices()
            assert select(asked)[0].name != WGMMA
            changed["prefer"] += json.loads(FILE.read_text())["prefer"]
            registry.forget_choices()


@needs_nvrtc
def test_blocks_that_fill_an_sm_take_no_second_round():
    """160 blocks of 8 warps: two fit an SM in groups of 128, for which the rows are; in groups of 64 they would take turns."""
    assert [select(call(16, 5120, 3840, 8, group=group))[1]["WARPS"] for group in (128, 64, 32)] == [8, 4, 4]
    assert select(call(16, 4096, 3840, 8, group=64))[1]["WARPS"] == 8  # 128 blocks, one round
    by_4_bits = select(call(16, 6144, group=64, dtype=torch.bfloat16))[1]
    assert [*by_4_bits.values()] == [4, 2, 256, 2, 1, 0]  # us on an H200: 8.3; [4, 2, 128, 2, 1] 11.4


@needs_nvrtc
def test_a_models_constants_decide(changed):
    asked = call(512)
    before = select(asked)[1]
    changed["models"][WGMMA]["mma_cycles"] *= 100
    registry.forget_choices()
    assert select(asked)[1] != before


def test_exact_shapes_answer_on_their_architecture_alone():
    pytest.importorskip("triton")
    row = next(row for f in policy.files() for row in f["measured"])
    M, (kernel, config, _) = next(iter(row["M"].items()))
    asked = call(int(M), row["N"], row["K"], row["bits"], row["layout"], group=row["group"])
    assert tuning.shipped(gpu.HOPPER).lookup(asked, near=True) == (kernel, config)
    assert tuning.chosen_by(asked) == "shipped"
    assert tuning.chosen_by(dataclasses.replace(asked, capability=gpu.LEAST)) == "rule"


@needs_nvrtc
def test_rows_of_other_keys_are_left_out(changed):
    """A config whose meaning changed has a new key: until the file is written anew the first legal config is taken."""
    asked = call(1)
    changed["keys"][MMA] = ["WARPS", "ROW_TILES", "BLOCK_K", "STEPS_IN_FLIGHT", "BLOCKS_PER_SM", "ANOTHER"]
    registry.forget_choices()
    spec, config = select(asked)
    assert config == spec.legal_configs(asked)[0]


def test_the_file_of_a_gpu_is_its_own_else_its_architectures_else_the_nearest():
    def file(name, capability, sms):
        return {"file": name, "gpu": name, "capability": list(capability), "sms": sms}

    files = (file("a100", (8, 0), 108), file("h100", (9, 0), 132), file("h20", (9, 0), 78))
    pcie = dataclasses.replace(gpu.HOPPER, name="NVIDIA H100 PCIe", sms=114, clusters=())
    for on, name in ((H200, "h100"), (pcie, "h100"), (dataclasses.replace(H200, name="h20"), "h20"), (gpu.row((8, 6)), "a100")):
        assert policy.nearest(files, on)["file"] == name


def test_a_written_file_is_read_back_and_stands_as_it_is_written():
    assert ship.dumps(json.loads(FILE.read_text())) == FILE.read_text()


@needs_nvrtc
def test_times_of_a_gpu_change_the_file_and_then_dispatch(changed):
    """What `lowq tune` measured, the winner first: it goes in front of its row, and the model comes nearer to its times."""
    from lowq_kernels.products.cuda import tile_wgmma

    asked, large = call(8, 28672, 4096), [call(M, 28672, 4096) for M in (64, 512, 2048)]
    spec, config = select(asked)
    winner = next(c for c in reversed(spec.legal_configs(asked)) if c != config)
    model = policy.model(WGMMA, gpu.HOPPER)
    slower = {**model, "mma_cycles": model["mma_cycles"] * 1.5}

    def entry(c, kernel, configs, us):
        first, *others = zip(configs, us, strict=True)
        rest = [{"kernel": kernel, "config": k, "us": t} for k, t in others]
        place = (4, 128, "float", "float16", "tile", c.N, c.K, c.M)
        return {"act": "none", "source": "0", "runners_up": rest, "kernel": kernel, "config": first[0], "us": first[1]} | dict(
            zip(("bits", "group", "zero", "dtype", "layout", "N", "K", "M"), place, strict=True)
        )

    entries = [entry(asked, MMA, (winner, config), (10.0, 11.0))]
    for c in large:
        legal = registry.kernels()[WGMMA].legal_configs(c)[:6]
        entries.append(entry(c, WGMMA, legal, [tile_wgmma.estimate(c, k, gpu.HOPPER, slower) for k in legal]))
    machine = {"gpu": "x", "capability": [9, 0], "torch": "1", "triton": "1", "date": "today", "entries": entries}
    new = ship.updated(changed, machine)
    for_eight = [v for most, *v in policy.row_of(new["configs"], MMA, asked) if most >= asked.M]
    assert for_eight[0] == list(winner.values())
    times = ship.times_of(WGMMA, tuning_file.entries_of(machine), (9, 0))

    def worst(m):
        return max(abs(tile_wgmma.estimate(c, k, gpu.HOPPER, m) / us - 1) for c, k, us in times)

    assert worst(new["models"][WGMMA]) < 0.25 * worst(model)
    changed.update(new)
    registry.forget_choices()
    tuning.shipped.cache_clear()
    assert select(asked) == (spec, winner)
