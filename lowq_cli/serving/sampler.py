"""Sampling for requests that need more than a temperature: their rows are sampled separately, at no cost for other rows.

Those other rows are sampled inside the pass, by `choose_rows` at the end of `ModelRunner.forward`. The definition is in
sampler_reference.py; here a few rows are computed together, without waiting for the device.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from lowq_cli.engine.batch import upload
from lowq_cli.engine.sampling import penalise, restrict
from lowq_cli.serving.batch_state import BatchState
from lowq_cli.serving.request import MOST_LOGPROBS, Draw, allow
from lowq_cli.serving.sequence import Sequence
from lowq_packers.errors import device_lost

BITS = 32  # bits per word of a mask
Drafts = list[int] | tuple[()]  # of a sequence, the draft tokens after its newest token
# log-probability of the token, None where it was not asked for; (id, log-probability) of the likeliest ones
Logs = tuple[float | None, tuple[tuple[int, float], ...]]
NO_LOGS: Logs = None, ()


def restrict_rows(scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Apply `sampling.restrict` with settings (n, 1) by row, then min_p: scores (n, V) fp32 with excluded tokens at -inf."""
    V = scores.shape[-1]
    if scores.is_cpu:
        settings = torch.cat((top_k, top_p, min_p), 1).tolist()
        kept = [restrict(row, int(k), p) for row, (k, p, _) in zip(scores.split(1), settings, strict=True)]
        return torch.cat([_apply_min_p(row, m) if m else row for row, (_, _, m) in zip(kept, settings, strict=True)])
    ordered = torch.sort(scores, dim=-1, descending=True).values
    floor = ordered.gather(1, torch.where(top_k == 0, V, top_k).clamp(max=V) - 1)
    truncated = ordered.masked_fill(ordered < floor, float("-inf"))
    p = truncated.softmax(-1)
    before = p.cumsum(-1) - p
    out = (before >= top_p) | (p == 0)
    out[:, 0] = False
    least = truncated.masked_fill(out, float("inf")).amin(-1, keepdim=True)
    floor = torch.where(top_p < 1, least, floor)
    scores = scores.masked_fill(scores < floor, float("-inf"))
    return _apply_min_p(scores, min_p)


def _apply_min_p(scores: torch.Tensor, min_p: torch.Tensor | float) -> torch.Tensor:
    """Scores with those at -inf whose probability is below min_p of the likeliest token's."""
    return scores.masked_fill((scores - scores.amax(-1, keepdim=True)).exp() < min_p, float("-inf"))


def restricted(scores: torch.Tensor, draws: list[Draw]) -> torch.Tensor:
    """Logits (n, V) fp32 with what `restrict_rows` excludes under the settings of each row at -inf, the others as they were: a
    row's draw does not depend on whether another row is restricted, and is the one of `generate`."""
    V = scores.shape[-1]
    settings = [[min(d.top_k, V), d.top_p, d.min_p, d.temperature or 1.0] for d in draws]
    s = upload(np.array(settings, np.float32), scores.device)
    excluded = torch.isneginf(restrict_rows(scores / s[:, 3:], s[:, :1].long(), s[:, 1:2], s[:, 2:3]))
    return scores.masked_fill(excluded, float("-inf"))


class Special:
    """The sampler of these rows, and its state on the device.

    Args:
        rows: the state of all rows. V: columns of the logits. choose_rows: the decode operation that samples.
    """

    def __init__(self, rows: BatchState, V: int, choose_rows: Callable[..., None]) -> None:
        self.rows, self.V, self.choose_rows, self.device = rows, V, choose_rows, rows.device
        self.counts: torch.Tensor | None = None  # (R, V) int16, counts of sampled tokens; created for the first penalty
        self.prompted: torch.Tensor | None = None  # (R, V) bool
        self.bits = torch.arange(BITS, dtype=torch.int32, device=self.device)
        self.biases: dict[int, torch.Tensor] = {}  # row -> (V,)

    def begin(self, text: Sequence) -> None:
        """Set up the state of a sequence that got its row."""
        self.biases.pop(text.row, None)
        try:
            self._begin(text.request.draw, text.row, text)
        except Exception as e:  # such as no memory for its penalties: the sequence ends with this error
            if device_lost(e):
                raise  # no sequence can go on
            text.failed = e

    def _begin(self, d: Draw, row: int, text: Sequence) -> None:
        if d.logit_bias:
            bias = np.zeros(self.V, np.float32)
            bias[list(d.logit_bias)] = list(d.logit_bias.values())
            self.biases[row] = upload(bias, self.device)
        if not _penalised(d):
            return
        if self.counts is None or self.prompted is None:
            shape = (self.rows.null_row + 1, self.V)
            self.counts = torch.zeros(shape, dtype=torch.int16, device=self.device)
            self.prompted = torch.zeros(shape, dtype=torch.bool, device=self.device)
        prompted, counts = np.zeros(self.V, np.bool_), np.zeros(self.V, np.int16)
        prompted[text.tokens[: text.prompt]] = True
        np.add.at(counts, text.tokens[text.prompt :], 1)
        self.prompted[row].copy_(upload(prompted, self.device))
        self.counts[row].copy_(upload(counts, self.device))

    def move(self, source: int, target: int) -> None:
        """Move a row's state to another row, in which an ended sequence may have left its bias."""
        self.biases.pop(target, None)
        if source in self.biases:
            self.biases[target] = self.biases.pop(source)
        for table in (self.counts, self.prompted):
            if table is not None:
                table[target].copy_(table[source])

    def draw(self, logits: torch.Tensor, places: list[tuple[int, Sequence]]) -> "list[LogProbs]":
        """Sample for sequences, given with their rows of `logits`, into `rows`; return the log-probabilities they ask for."""
        return drawn_for(places, partial(self._draw, logits))

    def _draw(self, logits: torch.Tensor, places: list[tuple[int, Sequence]]) -> "list[LogProbs]":
        """Sample, and write lasting state only after everything that can fail: the call may be repeated."""
        texts = [t for _, t in places]
        draws = [t.request.draw for t in texts]
        index = upload(np.array([[i for i, _ in places], [t.row for t in texts]], np.int64), self.device)
        at, row = index[0], index[1]
        raw = logits.index_select(0, at).float()
        scores, _ = self.scores(raw, texts, row, [()] * len(texts))
        logs, r = self.log_probs(raw, texts), self.rows
        self.choose_rows(scores.contiguous(), row.to(torch.int32), r.token, r.pos, r.seed, r.temperature)
        token = r.token.index_select(0, row)
        self.count(draws, row, token, torch.ones_like(token))
        for one in logs:
            one.drew(token)
        return logs

    def log_probs(self, raw: torch.Tensor, texts: list[Sequence]) -> "list[LogProbs]":
        """Return the log-probabilities by logits `raw` (n, V) fp32 in the rows of sequences that ask for them; [] if none
        does. texts: the sequence of each row."""
        asking = [i for i, t in enumerate(texts) if t.request.draw.logprobs is not None]
        if len(asking) == len(texts):
            return [LogProbs(raw, texts, None)]
        at = upload(np.array(asking, np.int64), self.device) if asking else None
        return [] if at is None else [LogProbs(raw.index_select(0, at), [texts[i] for i in asking], at)]

    def scores(
        self, raw: torch.Tensor, texts: list[Sequence], row: torch.Tensor, drafts: list[Drafts]
    ) -> tuple[torch.Tensor, list[int]]:
        """Return the scores to sample from, for logits `raw` (n, V) fp32; and for each sequence, how many of its drafts can be
        right: the tokens that its mask allows after a later one are not known.

        A sequence has a row, in which its newest token was computed, and one for each of its drafts. row (n,): the row of its
        state.
        """
        n = [1 + len(d) for d in drafts]
        each = [t for t, count in zip(texts, n, strict=True) for _ in range(count)]
        draws, most = [t.request.draw for t in each], [len(d) for d in drafts]
        scores = self._penalised(self._biased(raw, each), draws, row, drafts)
        if any(t.request.mask is not None for t in texts):
            allowed, most = self._allowed(texts, drafts)
            scores = scores.masked_fill(~allowed, float("-inf"))
        if any(not d.greedy and (d.top_k or d.top_p < 1 or d.min_p) for d in draws):
            scores = restricted(scores, draws)
        return scores, most

    def count(self, draws: list[Draw], row: torch.Tensor, token: torch.Tensor, n: torch.Tensor) -> None:
        """Count tokens that were sampled n times (0 or 1) in these rows of the state, for penalties. draws: settings of any."""
        if self.counts is not None and any(map(_penalised, draws)):
            self.counts.index_put_((row, token), n.to(torch.int16), accumulate=True)

    def _biased(self, scores: torch.Tensor, texts: list[Sequence]) -> torch.Tensor:
        if not any(t.row in self.biases for t in texts):
            return scores
        nothing = torch.zeros(self.V, device=self.device)
        return scores + torch.stack([self.biases.get(t.row, nothing) for t in texts])

    def _penalised(self, scores: torch.Tensor, draws: list[Draw], row: torch.Tensor, drafts: list[Drafts]) -> torch.Tensor:
        if self.counts is None or self.prompted is None or not any(map(_penalised, draws)):
            return scores
        given = [[d.repetition_penalty, d.presence_penalty, d.frequency_penalty] for d in draws]
        p, counts = upload(np.array(given, np.float32), self.device), self.counts.index_select(0, row)
        if before := _before(drafts):  # a row also counts the drafts before it
            at, token = upload(np.array(before, np.int64).T, self.device)
            counts.index_put_((at, token), torch.ones_like(token, dtype=torch.int16), accumulate=True)
        seen = self.prompted.index_select(0, row) | (counts > 0)
        if scores.is_cpu:  # a GPU would have to wait for the number of these tokens
            at, token = seen.nonzero(as_tuple=True)
            one_each = scores[at, token][:, None], seen[at, token][:, None], p[at], counts[at, token][:, None]
            return scores.index_put((at, token), _penalise(*one_each)[:, 0])
        return _penalise(scores, seen, p, counts)

    def _allowed(self, texts: list[Sequence], drafts: list[Drafts]) -> tuple[torch.Tensor, list[int]]:
        """Return (n, V) bool, the tokens that the masks allow, and the number of drafts that each mask takes; the host has
        read every token before."""
        most, ends = [len(d) for d in drafts], np.cumsum([1 + len(d) for d in drafts]).tolist()
        words = np.full((ends[-1], -(-self.V // BITS)), -1, np.int32)
        for text, given in zip(texts, drafts, strict=True):
            if text.request.mask is not None and text.repeated is None:
                text.request.mask.ask(given)
        for i, (text, end) in enumerate(zip(texts, ends, strict=True)):
            if text.request.mask is None:
                continue
            rows = words[end - 1 - most[i] : end]
            rows[0] = 0
            if text.repeated is not None:  # its grammar is already past this token
                allow(rows[0], text.repeated)
                continue
            try:
                if drafts[i]:
                    taken = text.request.mask.fill_drafts(rows, drafts[i])
                    rows[taken + 1 :], most[i] = -1, taken
                else:
                    text.request.mask.fill(rows[0])
            except Exception as e:  # an error of its own grammar: the others are sampled all the same
                text.failed = e
                rows[:] = -1
        on_device = upload(words, self.device)
        return ((on_device[:, :, None] >> self.bits) & 1).flatten(1)[:, : self.V].bool(), most


def _penalise(scores: torch.Tensor, seen: torch.Tensor, p: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return scores (n, V) with the penalties p (n, 3) of tokens `seen` in the text, and of those sampled `counts` times."""
    scores = penalise(scores, seen, p[:, :1])  # type: ignore[arg-type]  # a column of them
    return scores - p[:, 1:2] * (counts > 0) - p[:, 2:3] * counts


def _before(drafts: list[Drafts]) -> list[tuple[int, int]]:
    """Return (row, token) for each draft and each row of its sequence after it."""
    pairs, first = [], 0
    for given in drafts:
        pairs += [(first + i, token) for i in range(1, len(given) + 1) for token in given[:i]]
        first += 1 + len(given)
    return pairs


def drawn_for(places: list[Any], draw: "Callable[[list[Any]], list[LogProbs]]") -> "list[LogProbs]":
    """The result of `draw` for these places, whose last value is the sequence that samples there.

    If that fails, `draw` is called for each alone, and a sequence that fails again has `failed` set while the others go on.
    """
    try:
        return draw(places)
    except Exception as e:  # an error of one sequence's settings, or no memory for all at once: that sequence ends with it
        if device_lost(e):
            raise  # no sequence can go on
        if len(places) > 1:
            return [logs for place in places for logs in drawn_for([place], draw)]
        places[0][-1].failed = e
        return []


class LogProbs:
    """Log-probabilities in some rows of a pass, of the likeliest tokens and of those sampled there, being copied to the host.

    Args:
        raw: logits (n, V) fp32. texts: the sequence of each row. at (n,): these rows among those that are sampled; None: all.
    """

    def __init__(self, raw: torch.Tensor, texts: list[Sequence], at: torch.Tensor | None) -> None:
        self.texts, self._at, self._logs = texts, at, raw.log_softmax(-1)
        best = self._logs.topk(min(MOST_LOGPROBS, raw.shape[1]))
        self._parts = [fetch(best.values), fetch(best.indices)]

    def drew(self, token: torch.Tensor) -> None:
        """Take the tokens that were sampled in all rows."""
        token = token if self._at is None else token.index_select(0, self._at)
        self._parts.append(fetch(self._logs.gather(1, token[:, None])))
        del self._logs

    def read(self) -> dict[int, list[Logs]]:
        """Return number -> for each row of the sequence (log-probability of the token, likeliest tokens and theirs); call it
        once the pass has ended."""
        by_text = dict[int, list[Logs]]()
        for text, values, indices, (chosen,) in zip(self.texts, *(p.tolist() for p in self._parts), strict=True):
            n = text.request.draw.logprobs or 0
            by_text.setdefault(text.number, []).append((chosen, tuple(zip(indices[:n], values[:n], strict=True))))
        return by_text


def fetch(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the host, valid once the device has made it."""
    if not tensor.is_cuda:
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _penalised(d: Draw) -> bool:
    return d.repetition_penalty != 1 or bool(d.presence_penalty or d.frequency_penalty)
