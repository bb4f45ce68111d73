"""Sample one request's next token from its logits by its Draw: the reference that tests compare the batched sampler with.

Everything stays on the device: only a mask, which the host fills, and reading log-probabilities wait for the device.
"""

from collections.abc import Sequence

import torch

from lowq_cli.engine.sampling import penalise, restrict
from lowq_cli.serving.request import Draw, Mask
from lowq_kernels.decode import ops


class Picker:
    """Samples the tokens of one request, by its seed and the position of the new token as `engine.sampling.Sampler` does.

    Args:
        draw, mask: those of the request.
        prompt: its tokens, which repetition_penalty takes into account.
        V: columns of the logits.
    """

    def __init__(self, draw: Draw, mask: Mask | None, prompt: Sequence[int], V: int, device: torch.device) -> None:
        self.draw, self.mask, self.device = draw, mask, device
        self.seed = torch.tensor([draw.seed], device=device)
        self.pos = torch.tensor([len(prompt) - 1], dtype=torch.int32, device=device)  # position of the newest token
        self.token = torch.zeros(1, dtype=torch.int64, device=device)
        self.counts = torch.zeros(V, dtype=torch.int32, device=device)  # counts of the tokens generated so far
        self.seen = torch.zeros(1, V, dtype=torch.bool, device=device)
        self.seen[0, torch.tensor(prompt, device=device)] = True
        self.bias = torch.zeros(V, device=device)
        for token, bias in draw.logit_bias.items():
            self.bias[token] = bias
        self.words = torch.zeros(-(-V // 32), dtype=torch.int32)
        self.bits = torch.arange(32, dtype=torch.int32)
        self.raw: torch.Tensor | None = None

    def pick(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the next token, (1,) int64 on the device, for logits (1, V) of any float dtype."""
        d = self.draw
        self.raw = logits = logits.float()
        if d.logit_bias:
            logits = logits + self.bias
        if d.repetition_penalty != 1:
            logits = penalise(logits, self.seen, d.repetition_penalty)
        if d.presence_penalty or d.frequency_penalty:
            logits = logits - d.presence_penalty * (self.counts > 0) - d.frequency_penalty * self.counts
        if self.mask is not None:
            logits = logits.masked_fill(~self._allowed(), float("-inf"))
        temperature = d.temperature
        if not d.greedy and (d.top_k or d.top_p < 1 or d.min_p):
            logits, temperature = restrict(logits / temperature, d.top_k, d.top_p), 1.0
            p = logits.softmax(-1)
            logits = logits.masked_fill(p < d.min_p * p.amax(-1, keepdim=True), float("-inf"))
        ops(self.device.type).choose(logits.contiguous(), self.token, self.pos, self.seed, temperature, 1)
        self.counts[self.token] += 1
        self.seen[0, self.token] = True
        return self.token

    def logprobs(self) -> tuple[float | None, tuple[tuple[int, float], ...]]:
        """Return (the last token's log-probability, the likeliest tokens and theirs); waits for the device."""
        if self.draw.logprobs is None or self.raw is None:
            return None, ()
        logs = self.raw.log_softmax(-1)[0]
        best = logs.topk(min(self.draw.logprobs, logs.numel()))
        top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        return logs[self.token].item(), top

    def _allowed(self) -> torch.Tensor:
        assert self.mask is not None
        self.words.zero_()
        self.mask.fill(self.words.numpy())
        bits = (self.words[:, None] >> self.bits) & 1
        return bits.reshape(-1)[: self.counts.numel()].bool().to(self.device)
