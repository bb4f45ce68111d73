"""Drafts of requests that need more than a temperature: a pass draws by that alone, so their rows are drawn once more after it.

A row's penalties count the drafts before it, and its mask is the one after them.
"""

from functools import partial

import numpy as np
import torch

from lowq_cli.engine.batch import upload
from lowq_cli.serving.draft_passes import Checked
from lowq_cli.serving.model_runner import ModelRunner
from lowq_cli.serving.sampler import LogProbs, Special, drawn_for
from lowq_cli.serving.sequence import Sequence

Place = tuple[int, int, Checked, Sequence]  # of a sequence in a pass: its number there, its first row, its rows, and itself
NO_TOKEN = -1  # a draft that no token equals, so that it counts as wrong


def draw_special(
    runner: ModelRunner, special: Special, result: torch.Tensor, logits: torch.Tensor, places: list[Place]
) -> list[LogProbs]:
    """Draw after each row of these sequences, as plain passes would; write the tokens and the numbers of right drafts into
    `result`, which `DraftPasses.run` returned together with `logits`. Return the log-probabilities that they ask for."""
    return drawn_for(places, partial(_draw, runner, special, result, logits))


def _draw(
    runner: ModelRunner, special: Special, result: torch.Tensor, logits: torch.Tensor, places: list[Place]
) -> list[LogProbs]:
    """Draw, and move the sequences on only after everything that can fail: the call may be repeated."""
    r, (numbers, starts, checked, texts) = runner.rows, zip(*places, strict=True)
    n, state_row = np.array([len(c.tokens) for c in checked]), [c.state_row for c in checked]
    first = np.cumsum(n) - n  # of each sequence among the rows that are drawn here
    after = np.arange(n.sum()) - np.repeat(first, n)
    of_rows = [after + np.repeat(starts, n), np.repeat(state_row, n), after, np.repeat(np.arange(len(n)), n)]
    at, row, after_newest, text_of_row = upload(np.array(of_rows), r.device)
    raw = logits.index_select(0, at).float()
    scores, most = special.scores(raw, list(texts), row, [list(c.tokens[1:]) for c in checked])
    logs = special.log_probs(raw, [t for t, count in zip(texts, n, strict=True) for _ in range(count)])
    ids = [t if i <= taken else NO_TOKEN for c, taken in zip(checked, most, strict=True) for i, t in enumerate(c.tokens)]
    of_texts = [first, n, state_row, np.add(numbers, len(result) // 3)]
    firsts, counts, rows, outputs = upload(np.array(of_texts), r.device)
    drawn, accepted = torch.zeros_like(at), torch.zeros_like(rows)
    each, pos = torch.arange(len(at), dtype=torch.int32, device=r.device), r.pos.index_select(0, row) + after_newest.int()
    seed, temperature = r.seed.index_select(0, row), r.temperature.index_select(0, row)
    runner.ops.choose_rows(scores.contiguous(), each, drawn, pos, seed, temperature)
    for one in logs:
        one.drew(drawn)
    result.index_copy_(0, at, drawn)
    runner.ops.accept(drawn, upload(np.array(ids, np.int64), r.device), firsts, counts, rows, r.token, r.pos, accepted)
    special.count([t.request.draw for t in texts], row, drawn, after_newest <= accepted.index_select(0, text_of_row))
    result.index_copy_(0, outputs, accepted)
    return logs
