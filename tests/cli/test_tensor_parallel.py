"""Packed weights over two processes (gloo): the logits and tokens of one; unshareable weights are refused."""

import json
import os
import re
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import forking
import pytest
import torch

from lowq_cli.files.source import open_source
from lowq_cli.hf.load import load_model
from lowq_packers.scheme import Scheme

WORKER = Path(__file__).with_name("tensor_parallel_worker.py")
ATTENTION, MLP = Scheme(4, 32, "float"), Scheme(2, 16, "none")
SAME = {
    "llama": {"attention": ATTENTION, "mlp": MLP, "head": Scheme(8, 64, "float")},
    "llama-tied": {"attention": Scheme(1, 16, "int"), "mlp": MLP, "embedding": Scheme(4, 32, "float")},
    "qwen2": {"attention": Scheme(8, 64, "int"), "mlp": MLP},  # o_proj has one scale a row, and is cut along K; biases
    "qwen3": {"attention": Scheme(3, 16, "float"), "mlp": Scheme(4, 16, "int")},
    "phi3": {"attention": ATTENTION, "mlp": MLP},
    "mixtral": {"attention": ATTENTION, "expert": Scheme(2, 16, "int")},
}
REFUSED = {
    "mistral": ({"mlp": Scheme(3, 16, "none")}, r"layers\.0\.mlp\.down_proj: K=96 .* 48 3-bit codes, not whole words"),
    "qwen3-moe": ({"expert": Scheme(2, 16, "int")}, r"down_proj: K=48 over 2 ranks is 24, not a multiple of group_size=16"),
    "gpt2": ({"mlp": Scheme(4, 32, "float")}, "no tensor-parallel plan for GPT2LMHeadModel"),
    "gemma3": ({"mlp": Scheme(4, 32, "float")}, r"down_proj: K=96 over 2 ranks is 48, .*--override 'down_proj=4:16'"),
}


def launch(folders, processes=2):
    """Run the worker on all folders at once, in processes with the environment that torchrun would give them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    shared = os.environ | address | {"WORLD_SIZE": str(processes), "OMP_NUM_THREADS": "1"}
    shared["CUDA_VISIBLE_DEVICES"] = ""  # gloo, also where there are GPUs
    ranks = [{"RANK": str(i), "LOCAL_RANK": str(i)} for i in range(processes)]
    with ThreadPoolExecutor(processes) as threads:
        all_done = threads.map(lambda rank: forking.script(WORKER.read_text(), *folders, env=shared | rank), ranks)
        for done in all_done:
            assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def folders(family_checkpoints, tmp_path_factory):
    """Every case's folder, with what two processes found in it."""
    cases = {name: family_checkpoints(name, "float32", schemes).packed for name, schemes in SAME.items()}
    cases |= {name: family_checkpoints(name, "float32", schemes).packed for name, (schemes, _) in REFUSED.items()}
    root = tmp_path_factory.mktemp("parallel")
    copies = {name: Path(shutil.copytree(folder, root / name)) for name, folder in cases.items()}
    (copies["llama"] / "both").touch()
    launch(copies.values())
    return copies


def of_two(folders, name, through="lowq"):
    return json.loads((folders[name] / f"{through}.json").read_text())


@pytest.fixture
def of_one(folders):
    def run(name):
        with open_source(folders[name]) as source:
            model = load_model(source, "cpu", "float32")
        with torch.inference_mode():
            tokens = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=8, do_sample=False, eos_token_id=[])
            return model, model(input_ids=torch.arange(3, 19)[None]).logits, tokens

    return run


@pytest.mark.parametrize(("name", "through"), [*((n, "lowq") for n in SAME), ("llama", "transformers")])
def test_two_processes_answer_as_one_does(folders, of_one, name, through):
    result = of_two(folders, name, through)
    assert "error" not in result, result
    model, logits, tokens = of_one(name)
    assert torch.allclose(torch.tensor(result["logits"]), logits, atol=2e-5, rtol=1e-5)
    assert result["tokens"] == tokens.tolist()
    assert "not saved" in result["saved"]
    cut = {n.removesuffix(".local"): shape for n, shape in result["packed"].items() if n.endswith(".local")}
    whole = {n: m for n, m in model.named_modules() if n in cut}
    assert set(cut) == set(whole)
    assert any("o_proj" in n for n in cut)
    for n, module in whole.items():
        p = module.packed
        assert torch.Size(cut[n]).numel() < p.words.numel() * p.words.element_size() / 2, "each process holds about half"


@pytest.mark.parametrize("name", REFUSED)
def test_weights_that_two_processes_cannot_share_are_refused_by_name(folders, name):
    assert re.search(REFUSED[name][1], of_two(folders, name)["error"])
