"""Before a generation starts, each of its kernels is launched once: the right ones, side by side, and failures wait."""

import threading
from types import SimpleNamespace

import pytest
import torch

from lowq_cli.engine import precompiling
from lowq_cli.engine.native import NativeDecoder
from lowq_cli.engine.sampling import Sampling
from lowq_cli.quantizers import rtn
from lowq_kernels.dispatch.precompile import launch_all
from lowq_kernels.modules import ops
from lowq_kernels.modules.linear import QuantLinear
from lowq_packers.layouts import pack
from lowq_packers.scheme import Scheme

PROMPTS = [[1] * 5, [1] * 3]


@pytest.fixture
def decoder():
    """A two-layer model of packed layers behind the native decoder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    small = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **small, **heads)).float().eval()
    for parent in model.modules():
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear and name != "lm_head":
                packed = pack(rtn.quantize(child.weight.detach(), Scheme(4, 32)), "rowstream")
                setattr(parent, name, QuantLinear.from_packed(packed))
    return NativeDecoder(model)


def test_each_product_of_prompt_and_step_is_launched_once(decoder, monkeypatch):
    seen = []
    whole = ops.product
    monkeypatch.setattr(ops, "product", lambda x, p, *rest: seen.append((x.shape[0], p.N, p.K)) or whole(x, p, *rest))
    model = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32)  # on a CPU there would be nothing to do
    output = []
    n = precompiling.warm(model, decoder, PROMPTS, Sampling(), lambda *progress: output.append(progress))
    shapes = [(128, 64), (64, 64), (192, 64), (64, 96)]  # q with k and v, o, gate with up, down
    expected = [(M, N, K) for M in (2, 2 * 5) for N, K in shapes]
    assert sorted(seen) == sorted(expected)
    between = 8  # attention of steps (short, long) and prompts, both choices, two norms, activation
    assert n == len(seen) + 1 + between  # the head, in 16 bits, takes the step's rows
    assert precompiling.warm(model, decoder, PROMPTS, Sampling(seed=3)) == 0  # all of it was launched before
    n = len(seen)
    precompiling.warm(model, decoder, [[1] * 7] * 2, Sampling())
    assert {M for M, _, _ in seen[n:]} == {2 * 7}  # of a prompt of another length its own products alone
    assert precompiling.warm(SimpleNamespace(device=torch.device("cpu")), decoder, PROMPTS, Sampling(), output.append) == 0


def test_prompts_launch_their_own_products_and_the_steps_between(decoder, monkeypatch):
    seen, work = [], []
    whole = ops.product
    monkeypatch.setattr(ops, "product", lambda x, p, *rest: seen.append((x.shape[0], p.N, p.K)) or whole(x, p, *rest))
    monkeypatch.setattr(precompiling, "launch_all", lambda launches, done: work.extend(launches) or len(work))
    model = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32)
    assert precompiling.warm_texts(model, decoder, 14) == 4 + 4  # attention, both norms, activation
    for launch in work:
        launch()
    shapes = [(128, 64), (64, 64), (192, 64), (64, 96)]
    assert sorted(seen) == sorted((14, N, K) for N, K in shapes)
    assert precompiling.warm_texts(SimpleNamespace(device=torch.device("cpu")), decoder, 14) == 0


def test_the_launches_between_products_are_the_steps_own(decoder):
    """They run without an error, so their shapes are right; launch_all would hide one."""
    for launch in precompiling.launches_between_products(decoder, 2, {2, 6}, Sampling(temperature=0.7)):
        launch()


def test_launches_run_side_by_side_and_a_failure_is_left_for_later():
    together = threading.Barrier(2, timeout=60)

    def fails() -> None:
        raise RuntimeError("no such kernel")

    output = []
    assert launch_all([together.wait, together.wait, fails], lambda n, of: output.append((n, of)), 2, 0.0) == 3
    assert output == [(1, 3), (2, 3), (3, 3)]
    assert not together.broken  # one thread alone would have waited in vain


def test_a_launch_that_loses_the_gpu_is_not_left_for_later():
    def lost() -> None:
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        launch_all([lost, lambda: None], lambda n, of: None, workers=2)
