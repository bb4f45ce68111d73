"""Answer queries about a prompt itself: log-probabilities of its tokens, or its hidden states as a vector.

The prompt is computed separately from the running sequences, by the decoder of `generate`, as `lowq eval` computes texts.
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
    """Answers queries about prompts with a model; kv: storage format of keys and values."""

    def __init__(self, model: Any, kv: str) -> None:
        self.model, self.kv = model, kv
        self._decoder: Any = None

    def __call__(self, ids: Sequence[int], query: Read, adapter: int = 0) -> list[Likelihood] | list[float]:
        """Return the answer to a query about a prompt, computed with one of the model's adapters (0 for none)."""
        if not adapter:
            return self._read(ids, query)
        adapters = plan_of(self.model).adapters
        adapters.all = adapter
        try:
            return self._read(ids, query)
        finally:
            adapters.all = 0

    def _read(self, ids: Sequence[int], query: Read) -> list[Likelihood] | list[float]:
        """Return the log-probabilities of all tokens but the first, those of the next token, or the prompt's vector."""
        prompt = torch.tensor([list(ids)], device=self.model.device)
        if query.kind == "likelihoods":
            return self._likelihoods(prompt, query.top)
        if query.kind == "next":
            guess = torch.cat([prompt, prompt[:, -1:]], 1)  # a dummy next token: any token would do
            return self._likelihoods(guess, query.top, first=len(ids) - 1)
        hidden = self._hidden(prompt).float()
        pooled = {"last": hidden[-1], "first": hidden[0], "mean": hidden.mean(0)}[query.pooling]
        check_finite(pooled[None])
        return pooled.tolist()

    def release(self) -> None:
        """Free the decoder's memory."""
        self._decoder = None

    def _native(self) -> NativeDecoder | None:
        self._decoder = self._decoder or decoder_of(self.model, self.kv)
        return self._decoder if isinstance(self._decoder, NativeDecoder) else None

    def _hidden(self, prompt: torch.Tensor) -> torch.Tensor:
        """Return the last hidden states (T, H), after the final norm."""
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
        likelihoods, most = list[Likelihood](), max(1, LOGITS_AT_ONCE // vocabulary)
        for at in range(first, T - 1, most):
            end = min(T - 1, at + most)
            part = decoder.head(hidden[at:end]) if hidden is not None and decoder is not None else logits[at:end]  # type: ignore[index]
            check_finite(part)
            logs = part.float().log_softmax(-1)
            of_prompt = logs.gather(1, prompt[0, at + 1 : end + 1, None])[:, 0].tolist()
            best = logs.topk(min(top, logs.shape[-1]))
            rows = zip(of_prompt, best.indices.tolist(), best.values.tolist(), strict=True)
            likelihoods += [(p, tuple(zip(ids, values, strict=True))) for p, ids, values in rows]
        return likelihoods
