"""Drafts of requests with top_k, top_p or min_p: a pass draws without these, so their rows are drawn once more after it."""

import numpy as np
import torch

from lowq_cli.engine.batch import upload
from lowq_cli.serving.draft_passes import Checked
from lowq_cli.serving.model_runner import ModelRunner
from lowq_cli.serving.sampler import restricted
from lowq_cli.serving.sequence import Sequence
from lowq_packers.errors import device_lost

Place = tuple[int, int, Checked, Sequence]  # of a sequence in a pass: its number there, its first row, its rows, and itself


def draw_restricted(runner: ModelRunner, result: torch.Tensor, logits: torch.Tensor, places: list[Place]) -> None:
    """Draw after each row of these sequences, as plain passes would; write the tokens and the numbers of right drafts into
    `result`, which `DraftPasses.run` returned together with `logits`.

    If that fails, each sequence is drawn alone, and one that fails again has `failed` set while the others go on.
    """
    try:
        _draw(runner, result, logits, places)
    except Exception as e:  # no memory for all at once, or for this sequence
        if device_lost(e):
            raise  # no sequence can go on
        for place in places if len(places) > 1 else ():
            draw_restricted(runner, result, logits, [place])
        if len(places) == 1:
            places[0][-1].failed = e


def _draw(runner: ModelRunner, result: torch.Tensor, logits: torch.Tensor, places: list[Place]) -> None:
    """Draw, and move the sequences on only after everything that can fail: the call may be repeated."""
    r, (numbers, starts, checked, texts) = runner.rows, zip(*places, strict=True)
    n, state_row = np.array([len(c.tokens) for c in checked]), [c.state_row for c in checked]
    first = np.cumsum(n) - n  # of each sequence among the rows that are drawn here
    after = np.arange(n.sum()) - np.repeat(first, n)
    of_rows = [after + np.repeat(starts, n), np.repeat(state_row, n), after, [t for c in checked for t in c.tokens]]
    at, row, after_newest, ids = upload(np.array(of_rows), r.device)
    of_texts = [first, n, state_row, np.add(numbers, len(result) // 2)]
    firsts, counts, rows, outputs = upload(np.array(of_texts), r.device)
    draws = [t.request.draw for t, rows_of_text in zip(texts, n.tolist(), strict=True) for _ in range(rows_of_text)]
    scores = restricted(logits.index_select(0, at).float(), draws)
    drawn, accepted = torch.zeros_like(at), torch.zeros_like(rows)
    each, pos = torch.arange(len(at), dtype=torch.int32, device=r.device), r.pos.index_select(0, row) + after_newest.int()
    runner.ops.choose_rows(scores, each, drawn, pos, r.seed.index_select(0, row), r.temperature.index_select(0, row))
    result.index_copy_(0, at, drawn)
    runner.ops.accept(drawn, ids, firsts, counts, rows, r.token, r.pos, accepted)
    result.index_copy_(0, outputs, accepted)
