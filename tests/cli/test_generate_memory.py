"""Memory of a generation beyond weights and cache: a bounded pass over the prompts, and nothing that is no longer needed."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from lowq_cli import memory
from lowq_cli.engine import explain, graph, precompiling, stream
from lowq_cli.engine.hf_eager import HfEagerDecoder
from lowq_cli.engine.native import NativeDecoder
from lowq_cli.engine.prefill import prompt_passes, reusable
from lowq_cli.engine.sampling import Sampling
from lowq_cli.generation import statistics
from lowq_kernels import workspaces
from lowq_kernels.dispatch import precompile

TOKENIZER = SimpleNamespace(eos_token_id=None, decode=lambda ids, **kw: "x" * len(ids))
PROMPTS = [[(7 * b + t) % 150 + 3 for t in range(11 - b)] for b in range(5)]
MB = 1 << 20


def model(**facts):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    small = {"vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": None}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **small | heads | facts)).float().eval()


@pytest.mark.parametrize("kind", [NativeDecoder, HfEagerDecoder])
@pytest.mark.parametrize("most", [24, 11, 5], ids=["two prompts a pass", "one prompt", "parts of a prompt"])
def test_a_pass_over_many_prompts_holds_a_bounded_number_of_tokens(kind, most):
    net = model()
    expected = stream(net, TOKENIZER, PROMPTS, max_new_tokens=6, decoder=kind(net))
    list(expected.pieces())
    decoder, rows = kind(net, most=most), []
    for layer in explain.called(net, decoder).modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_pre_hook(lambda m, x: rows.append(x[0].numel() // m.in_features))
    g = stream(net, TOKENIZER, PROMPTS, max_new_tokens=6, decoder=decoder)
    list(g.pieces())
    assert g.tokens == expected.tokens
    assert max(rows) <= most  # 5 prompts of 11 tokens are 55


def test_kernels_compiled_first_are_those_of_the_passes(monkeypatch):
    assert [(s.stop - s.start, t.stop - t.start) for s, t in prompt_passes(5, 0, 11, most=24)] == [(2, 11), (2, 11), (1, 11)]
    pieces = [(s.start, t.start, t.stop) for s, t in prompt_passes(2, 3, 40, most=24)]
    assert pieces == [(0, 3, 27), (0, 27, 40), (1, 3, 27), (1, 27, 40)]
    seen = set()
    monkeypatch.setattr(precompiling, "products", lambda model, decoder, rows: seen.update(rows) or ())
    precompiling.launches(SimpleNamespace(dtype=torch.float32), None, 5, 1000, Sampling())
    assert seen == {5, 2000, 1000}


def test_a_prompt_is_read_from_the_first_token_that_the_cache_does_not_hold_for_all_texts():
    held = [[1, 2, 3, 4, 5], [1, 2, 9]]
    assert reusable([], [[1, 2]]) == 0
    assert reusable(held, [[1, 2, 3, 4, 5, 6], [1, 2, 9, 9]]) == 3
    assert reusable(held, [[1, 2, 3, 4, 5], [1, 2, 9]]) == 2  # the last token is always read, for its logits
    assert reusable(held, [[7, 2, 3], [1, 2, 9, 9]]) == 0
    assert reusable(held[:1], [[1, 2, 3, 4, 5, 6]], [[1, 2, 3]]) == 3  # recurrent states are those after the last prompt
    assert reusable(held[:1], [[1, 2, 3]], [[1, 2, 3]]) == 0
    assert reusable(held, [[1, 2, 3, 4], [1, 2, 9, 9]], [[1, 2, 3], [1, 2]]) == 0


@pytest.fixture
def log(monkeypatch):
    """Which of torch.cuda's doings happen in which order, on a machine without."""
    output = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(workspaces, "_clear", lambda: output.append("release"))
    return output


@pytest.mark.parametrize("pool", [None, (0, 1)])
def test_a_recording_owns_its_scratch_memory(log, monkeypatch, pool):
    stream_of_work = SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None)

    class Graph:
        def capture_begin(self, **how):
            log.append("begin")

        def capture_end(self):
            log.append("end")

    fakes = {"current_device": lambda: 0, "current_stream": lambda: stream_of_work, "synchronize": lambda: None}
    fakes |= {"stream": lambda s: contextlib.nullcontext(), "CUDAGraph": Graph}
    fakes |= {"empty_cache": lambda: log.append("give back")}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(graph, "_stream", lambda device: stream_of_work)
    graph.capture(lambda: log.append("step"), pool)
    before = ["step", "release", "give back"] if pool is None else ["release"]  # many recordings: their kernels were launched
    assert log == [*before, "begin", "step", "end", "release"]


def test_threads_that_compiled_leave_no_scratch_memory(log):
    precompile.launch_all([lambda: log.append("launch")] * 3, lambda n, of: None)
    assert log == ["launch"] * 3 + ["release"]


def test_measuring_the_roofline_is_not_the_models_peak(monkeypatch):
    net, peak = model(), [100]
    monkeypatch.setattr(memory, "peak_bytes", lambda device: peak[0])
    monkeypatch.setattr(explain, "roofline", lambda *a: peak.append(peak.pop() + (1 << 30)) or (None, ""))
    g = stream(net, TOKENIZER, PROMPTS[0], max_new_tokens=2)
    list(g)
    assert statistics.numbers_of(net, g, kernels=False)["peak_memory_bytes"] == 100


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_recording_again_holds_no_more():
    """Before, each recording had a stream of its own, and left 32 MiB of cuBLAS's scratch memory behind on an H100."""
    net = model(hidden_size=256, intermediate_size=512).half().cuda()
    decoder = NativeDecoder(net)

    def held():
        decoder.captured.clear()
        decoder.held = []
        list(stream(net, TOKENIZER, PROMPTS[0], max_new_tokens=4, decoder=decoder))
        assert decoder.reason == ""
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    first = held()
    assert max(held() for _ in range(4)) <= first + MB
    precompile.launch_all([lambda: net.lm_head(net.lm_head.weight)] * 8, lambda n, of: None)
    list(stream(net, TOKENIZER, PROMPTS[0], max_new_tokens=4, decoder=decoder))  # its graph still has what it needs
    assert held() <= first + MB
