"""The decoder for any causal model that transformers loads: the model's forward, once per token, with transformers' cache.

It leaves out the rest of `model.generate` (a mask and position ids per token, a copy of the logits, logits processors, a
growing tensor of ids, stopping criteria). A family with a cache is called with only the new token; a family without one is
called with the whole sequence each time.
"""

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

from lowq_cli.engine.sampling import Sampler, Sampling
from lowq_cli.engine.stream import nothing
from lowq_cli.models import CausalModel
from lowq_kernels.decode import ops
from lowq_kernels.decode.kv import PLAIN

CHUNK = 2048  # max. prompt tokens per forward, over all sequences; bounds the memory of activations
# A forward's argument for its cache: from transformers 5.24 on; before, of attention families and of state-space families. The
# newest comes first: a forward of 5.24 returns its cache by the old name too, but ignores it there.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")


def piece(model: CausalModel, batch: int, most: int) -> int:
    """Prompt tokens per forward for each of `batch` sequences; fewer on a CPU, so that a long prompt can be interrupted.

    All of them for a family that transformers calls stateful: Mamba, Jamba, RecurrentGemma and others drop their state, or part
    of it, between two forwards of more than one token (FalconMamba: logits off by 18%).
    """
    most = sys.maxsize if getattr(model, "_is_stateful", False) else most
    return max(1, (most if model.device.type == "cuda" else most // 4) // batch)


class HfEagerDecoder:
    """Calls transformers' forward once per token. `start` reads the prompts, `step` returns each sequence's next token.

    Args:
        model: a transformers causal model, on one device.
        reason: why no faster decoder was chosen, for `--explain`.
        most: max. prompt tokens per forward, over all sequences; a quarter of it on a CPU.
    """

    name, kv = "hf_eager", PLAIN

    def __init__(self, model: CausalModel, reason: str = "", most: int = CHUNK) -> None:
        self.model, self.reason, self.most = model, reason, most
        self.device = model.device
        self.ahead = self.device.type == "cuda"  # launches are asynchronous, so the host may run one step behind
        self.accepts = set(inspect.signature(model.forward).parameters)

    @torch.inference_mode()
    def start(
        self, prompts: list[list[int]], sampling: Sampling, room: int, between: Callable[[], None] = nothing
    ) -> torch.Tensor:
        """Read the prompts, left-padded to one length; returns the first new token of each, (B,) int64 on the device."""
        longest = max(map(len, prompts))
        padded = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        lengths = torch.tensor([len(p) for p in prompts])
        real = torch.arange(longest) >= longest - lengths[:, None]
        self.mask: torch.Tensor | None = None
        self.position: torch.Tensor | None = None
        if not real.all():
            self.mask = real.long().to(self.device)
            self.position = (self.mask.cumsum(-1) - 1).clamp(min=0)
        self.all_ids = ids = padded.to(self.device)
        self.cache: Any = None
        self.cache_name: str | None = None
        step = piece(self.model, len(prompts), self.most)
        for i in range(0, longest, step):
            between()
            logits = self._forward(ids[:, i : i + step], i)
            if self.cache is None and self.cache_name is None:  # no cache: this forward reads the whole prompt
                logits = self._forward(ids, 0)
                break
        self.sampler = Sampler(ops(self.device.type).choose, logits.shape[0], logits.shape[1], self.device)
        self.sampler.start(sampling, padded, real)
        self.sampler.choose(logits, advance=0)
        return self.sampler.token

    @torch.inference_mode()
    def step(self) -> torch.Tensor:
        """Run one forward; returns the next token of each sequence, (B,) int64 on the device."""
        token = self.sampler.token[:, None]
        if self.mask is not None and self.position is not None:
            self.mask = torch.cat([self.mask, torch.ones_like(token)], 1)
            self.position = self.position[:, -1:] + 1
        if self.cache is None:
            self.all_ids = torch.cat([self.all_ids, token], 1)
            token = self.all_ids
            if self.mask is not None:
                self.position = (self.mask.cumsum(-1) - 1).clamp(min=0)
        self.sampler.choose(self._forward(token, None), advance=1)
        return self.sampler.token

    @torch.inference_mode()
    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits (B, T, V) at every position of sequences (B, T)."""
        return self.model(input_ids=ids, use_cache=False).logits

    def _forward(self, ids: torch.Tensor, offset: int | None) -> torch.Tensor:
        """Logits (B, V) at the last position of `ids`, which begin at `offset` in the prompt (None while decoding)."""
        inputs: dict[str, Any] = {"input_ids": ids}
        if self.mask is not None:
            end = None if offset is None else offset + ids.shape[1]
            inputs["attention_mask"] = self.mask[:, :end]
            if "position_ids" in self.accepts and self.position is not None:
                inputs["position_ids"] = self.position if offset is None else self.position[:, offset:end]
        if "logits_to_keep" in self.accepts:
            inputs["logits_to_keep"] = 1
        if "use_cache" in self.accepts:
            inputs["use_cache"] = True
        if self.cache_name is not None:
            inputs[self.cache_name] = self.cache
        out = self.model(**inputs)
        for name in CACHE_NAMES:
            if getattr(out, name, None) is not None:
                self.cache, self.cache_name = getattr(out, name), name
                break
        return out.logits[:, -1]
