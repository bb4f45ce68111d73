"""While a checkpoint is written, the kernels that will decode it are compiled: of its shapes, each kind of layer once."""

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lowq_cli import devices
from lowq_cli.commands.quantize import compiling
from lowq_cli.engine import light
from lowq_cli.engine.reading import Blank
from lowq_cli.plan.recipe import make_recipe
from lowq_cli.run.prepare import prepare
from lowq_cli.serving import ahead
from lowq_kernels.modules import linear

CPU = torch.device("cpu")


def planned(folder, **recipe):
    """The model that kernels are compiled with for the demo's plan, and the plan."""
    with prepare("demo", make_recipe(None, **recipe), folder, "cpu") as prepared:
        source = ahead.stand_in(prepared.source, prepared.plan, folder)
        return light.read(source, CPU, Blank), prepared.plan


def test_one_layer_of_each_kind(tmp_path):
    uniform, plan = planned(tmp_path)
    assert len(uniform.blocks.layers) == 1
    assert uniform.blocks.layers[0].o.scheme == next(i.scheme for i in plan.items if "o_proj" in i.name)
    mixed, plan = planned(tmp_path, overrides=["layers.2.mlp.down_proj=8", "layers.3.mlp.down_proj=8"])
    assert len(plan.items) > 4 * len(uniform.blocks.layers)
    assert [layer.mlp.down.scheme.bits for layer in mixed.blocks.layers] == [4, 8]


def test_everything_that_decoding_takes_is_launched(tmp_path, monkeypatch):
    model, _ = planned(tmp_path)
    seen = set()
    whole = linear.matmul
    monkeypatch.setattr(linear, "matmul", lambda x, p, *rest: seen.add((x.shape[0], p.N)) or whole(x, p, *rest))
    with torch.inference_mode():
        for launch in ahead.launches(model):
            launch()
    layer = model.blocks.layers[0]
    for rows in (1, 2, 16, 128, 512, 4096):  # of a text's step, of a server's, of prompts
        assert {m.out_features for m in (layer.qkv, layer.o, layer.mlp.gate_up, layer.mlp.down)} <= {
            N for M, N in seen if rows == M
        }


def process(change=""):
    """The process that compiles for the demo, told so; `change`: to what it does."""
    line = f"import time; from lowq_cli.serving import ahead; ahead.AFTER_S = 0.1; {change}ahead.main()"
    found = subprocess.Popen(
        [sys.executable, "-P", "-c", line], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    found.stdin.write(pickle.dumps(("demo", make_recipe(None), None, "cpu")))
    found.stdin.flush()
    return found


def test_the_process_ends_shortly_after_the_run_whatever_it_is_at():
    working = process("ahead.compile_ahead = lambda prepared: (print(prepared.plan.source, flush=True), time.sleep(600)); ")
    try:
        assert working.stdout.readline() == b"demo\n"
        assert working.poll() is None
        said, _ = working.communicate(timeout=60)  # closes its stdin
        assert (said, working.returncode) == (b"", 0)
    finally:
        working.kill()


def test_the_process_ends_when_all_is_compiled_and_says_nothing_of_what_fails():
    for change in ("ahead.compile_ahead = lambda prepared: None; ", "ahead.compile_ahead = lambda prepared: 1 / 0; "):
        working = process(change)
        assert working.wait(120) == 0
        assert working.stdout.read() == b""
        working.stdin.close()


def test_quantize_tells_it_what_for_and_does_not_wait_for_its_end(tmp_path, monkeypatch):
    told, begun = tmp_path / "told", time.monotonic()
    other = tmp_path / "python"
    other.write_text(f"#!/bin/sh\ncat > {told}; sleep 600 & echo $! > {tmp_path}/asleep; wait\n")
    other.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(other))
    monkeypatch.setattr(devices, "gpus", lambda: 1)
    given = ("demo", make_recipe(None, bits=3), None, "auto")
    with pytest.raises(KeyError), compiling(*given):
        raise KeyError  # the command's own, which stays what it is
    while not (tmp_path / "asleep").exists() and time.monotonic() < begun + 60:
        time.sleep(0.01)
    os.kill(int((tmp_path / "asleep").read_text()), signal.SIGKILL)
    assert pickle.loads(told.read_bytes()) == given
    for device in ("cpu", "cpu:0"):
        told.unlink(missing_ok=True)
        with compiling("demo", given[1], None, device):
            pass
        assert not told.exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_first_text_after_quantize_compiles_nothing(tmp_path):
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "XDG_STATE_HOME": str(tmp_path / "state")}
    env["TRITON_CACHE_DIR"] = str(tmp_path / "triton")

    def lowq(*words):
        subprocess.run([Path(sys.executable).with_name("lowq"), *words], env=env, check=True, capture_output=True)
        time.sleep(ahead.AFTER_S + 1)  # what compiles may go on for so long
        return {p for kind in ("cache/lowq/cubin/*", "triton/*/*.cubin") for p in tmp_path.glob(kind)}

    # gptq: long enough for all kernels of so small a model
    before = lowq(
        "quantize", "demo", "--method", "gptq", "--calib", "bundled", "--group", "32", "--out", str(tmp_path / "demo")
    )
    assert before
    for prompt in ("Once", "Once upon a time there was a child who"):
        assert lowq("generate", str(tmp_path / "demo"), "--prompt", prompt, "--max-new-tokens", "8") == before
