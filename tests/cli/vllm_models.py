"""Whole models in the real vLLM: logits of a prompt, from `LLM` on a GPU, else from vLLM's model classes and loaders alone.

Without a GPU vLLM must call itself a CPU build (version 0.24.0+cpu in its metadata); of its compiled operations none is
needed: its native ones stand in, and a plain causal softmax stands where its attention backends do.
"""

import gc
import itertools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


def logprobs(folder: Path, ids: list[int], dtype: str) -> torch.Tensor:
    """Log-probabilities (T, V) after each token of a prompt, in fp32."""
    if torch.cuda.is_available():
        return _by_engine(folder, ids, dtype)
    return _by_classes(folder, ids, dtype).log_softmax(-1)


def _by_engine(folder: Path, ids: list[int], dtype: str) -> torch.Tensor:
    """All but the last token's, from which the engine draws."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(str(folder), dtype=dtype, enforce_eager=True, skip_tokenizer_init=True, max_model_len=64, max_logprobs=-1,
              kv_cache_memory_bytes=64 << 20, gpu_memory_utilization=0.2, seed=0)  # fmt: skip
    draw = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1, detokenize=False)
    (out,) = llm.generate([{"prompt_token_ids": ids}], draw, use_tqdm=False)
    rows = [[row[i].logprob for i in sorted(row)] for row in out.prompt_logprobs[1:]]
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    return torch.tensor(rows)


def tables(folder: Path, ids: list[int], dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What vLLM's model class makes of tokens before its layers, and of random states after them: rows and logits (T, V)."""
    with _model(folder, dtype) as (model, _), torch.inference_mode():
        rows = model.embed_input_ids(torch.tensor(ids))
        states = torch.randn(rows.shape, generator=torch.Generator().manual_seed(0)).to(rows.dtype)
        return rows.float(), model.compute_logits(states).float()


_group = itertools.count()


def _by_classes(folder: Path, ids: list[int], dtype: str) -> torch.Tensor:
    from vllm.forward_context import set_forward_context

    with (
        _model(folder, dtype) as (model, config),
        torch.inference_mode(),
        set_forward_context(None, config, num_tokens=len(ids)),
    ):
        return model.compute_logits(model(torch.tensor(ids), torch.arange(len(ids)), None)).float()


@contextmanager
def _model(folder: Path, dtype: str) -> Iterator[tuple[torch.nn.Module, object]]:
    """vLLM's model of a checkpoint, loaded by its loaders, and the config that is current inside."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import destroy_model_parallel, ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model
    from vllm.plugins import load_general_plugins

    _stand_ins()
    load_general_plugins()
    args = EngineArgs(model=str(folder), dtype=dtype, enforce_eager=True, skip_tokenizer_init=True, max_model_len=64,
                      compilation_config={"custom_ops": ["none"], "mode": 0}, use_tqdm_on_load=False)  # fmt: skip
    config = args.create_engine_config()
    with set_current_vllm_config(config):
        if next(_group) == 0:
            init_distributed_environment(1, 0, f"file://{tempfile.mktemp()}", 0, "gloo")
        destroy_model_parallel()
        ensure_model_parallel_initialized(1, 1)
        yield get_model(vllm_config=config), config


def _stand_ins() -> None:
    """For what vLLM would have compiled for a CPU."""
    import vllm._custom_ops as ops
    from vllm.model_executor.layers.attention import Attention

    if Attention.forward is _attend:
        return
    library = torch.library.Library("_C", "FRAGMENT")
    for op in ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"):  # asked for, not called
        if not hasattr(torch.ops._C, op):
            library.define(f"{op}(Tensor! out, Tensor x) -> ()")
    _stand_ins.library = library  # it goes when nothing holds it
    Attention.forward, ops.topk_softmax = _attend, _topk_softmax
    torch.accelerator.empty_cache = lambda: None


def _attend(self, query, key, value, output_shape=None):
    T, heads = query.shape[0], self.num_heads // self.num_kv_heads
    q, k, v = (t.view(T, -1, self.head_size).transpose(0, 1).float() for t in (query, key, value))
    k, v = k.repeat_interleave(heads, 0), v.repeat_interleave(heads, 0)
    far = torch.arange(T)[:, None] - torch.arange(T)
    seen = (far >= 0) & (far < (self.sliding_window or T))
    weights = (q @ k.mT * self.impl.scale).masked_fill(~seen, float("-inf")).softmax(-1)
    return (weights @ v).transpose(0, 1).reshape(T, -1).to(query.dtype)


def _topk_softmax(weights, ids, indices, logits, renormalize=False, correction=None):
    w, i = logits.float().softmax(-1).topk(ids.shape[-1])
    weights.copy_(w / w.sum(-1, keepdim=True) if renormalize else w)
    ids.copy_(i)
