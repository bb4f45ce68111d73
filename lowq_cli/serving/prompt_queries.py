"""What an engine tells of a prompt itself, not of how it goes on: how likely its tokens are, or its hidden states as a vector.

The prompt is read by itself, beside the texts that run: by the decoder of `generate`, as `lowq eval` reads texts.
"""

from collections.abc import Sequence
from typing import Any

import torch

from lowq_cli.engine.decoders import decoder_of
from lowq_cli.engine.native import NativeDecoder
from lowq_cli.engine.plan import plan_of
from lowq_cli.engine.sampling import check_finite
from lowq_cli.evaluate.perplexity import LOGITS_AT_ONCE
from lowq_cli.serving.request import Likelihood, Read


class PromptReader:
    """Reads prompts with a model; kv: what keys and values are held in."""

    def __init__(self, model: Any, kv: str) -> None:
        self.model, self.kv = model, kv
        self._decoder: Any = None

    def __call__(self, ids: Sequence[int], asked: Read, adapter: int = 0) -> list[Likelihood] | list[float]:
        """What is asked of a prompt, computed with one of the model's adapters."""
        if not adapter:
            return self._read(ids, asked)
        adapters = plan_of(self.model).adapters
        adapters.all = adapter
        try:
            return self._read(ids, asked)
        finally:
            adapters.all = 0

    def _read(self, ids: Sequence[int], asked: Read) -> list[Likelihood] | list[float]:
        """Of each token but the first how likely it is after those before; of the next what it may be; the vector of all."""
        prompt = torch.tensor([list(ids)], device=self.model.device)
        if asked.kind == "likelihoods":
            return self._likelihoods(prompt, asked.top)
        if asked.kind == "next":
            guess = torch.cat([prompt, prompt[:, -1:]], 1)  # any token may stand in its place
            return self._likelihoods(guess, asked.top, first=len(ids) - 1)
        hidden = self._hidden(prompt).float()
        found = {"last": hidden[-1], "first": hidden[0], "mean": hidden.mean(0)}[asked.pooling]
        check_finite(found[None])
        return found.tolist()

    def release(self) -> None:
        """Give back what reading holds."""
        self._decoder = None

    def _native(self) -> NativeDecoder | None:
        self._decoder = self._decoder or decoder_of(self.model, self.kv)
        return self._decoder if isinstance(self._decoder, NativeDecoder) else None

    def _hidden(self, prompt: torch.Tensor) -> torch.Tensor:
        """The last hidden states (T, H), normed."""
        decoder = self._native()
        if decoder is not None:
            return decoder.hidden_states(prompt)[0]
        return self.model(input_ids=prompt, use_cache=False, output_hidden_states=True).hidden_states[-1][0]

    def _likelihoods(self, prompt: torch.Tensor, top: int, first: int = 0) -> list[Likelihood]:
        decoder, T = self._native(), prompt.shape[1]
        if T < 2:
            return []
        hidden = None if decoder is None else decoder.hidden_states(prompt)[0]
        logits = self.model(input_ids=prompt, use_cache=False).logits[0] if decoder is None else None
        vocabulary = self.model.get_output_embeddings().weight.shape[0] if logits is None else logits.shape[-1]
        found, most = list[Likelihood](), max(1, LOGITS_AT_ONCE // vocabulary)
        for at in range(first, T - 1, most):
            end = min(T - 1, at + most)
            part = decoder.head(hidden[at:end]) if hidden is not None and decoder is not None else logits[at:end]  # type: ignore[index]
            check_finite(part)
            logs = part.float().log_softmax(-1)
            own = logs.gather(1, prompt[0, at + 1 : end + 1, None])[:, 0].tolist()
            best = logs.topk(min(top, logs.shape[-1]))
            rows = zip(own, best.indices.tolist(), best.values.tolist(), strict=True)
            found += [(p, tuple(zip(ids, values, strict=True))) for p, ids, values in rows]
        return found
