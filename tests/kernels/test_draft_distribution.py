"""Tokens drawn with drafts have the model's own distribution: three tokens of a model of 16, jointly, by chi-square.

The drafts are of two kinds, a fixed guess and a random one, each right for some and wrong for most; a fault that takes one
draft too many shows.
"""

import torch

from lowq_kernels.decode import reference

V, NEW = 16, 3
FAR = 6.0  # standard deviations of a chi-square: once in a thousand million


def races(n):
    """As `reference.choose_rows`, all rows at once: what a seed draws at a position is always the same."""
    noise = torch.empty(n, NEW + 3, V).exponential_(generator=torch.Generator().manual_seed(2))

    def choose_rows(logits, rows, token, pos, seed, temperature):
        pos += 1
        token.copy_((logits.softmax(-1) / noise[seed, pos]).argmax(-1))

    return choose_rows


def drawn_texts(n, table, fault, choose_rows):
    """(n, NEW) tokens after token 0 of a model whose next token depends on the last one alone, two drafts a step."""
    g = torch.Generator().manual_seed(1)
    token, pos, seeds = torch.zeros(n, dtype=torch.int64), torch.zeros(n, dtype=torch.int32), torch.arange(n)
    rows, first, count = torch.arange(n), 3 * torch.arange(n), torch.full((n,), 3)
    made, length = torch.zeros(n, NEW + 4, dtype=torch.int64), torch.zeros(n, dtype=torch.int64)
    while (active := length < NEW).any():
        some = rows[active]
        m = len(some)
        guess = torch.where(some % 2 == 0, table[token[some]].argmax(-1), torch.randint(V, (m,), generator=g))
        ids = torch.stack((token[some], guess, torch.randint(V, (m,), generator=g)), 1).flatten()
        drawn, accepted = torch.zeros(3 * m, dtype=torch.int64), torch.zeros(m, dtype=torch.int64)
        places = (pos[some][:, None] + torch.arange(3, dtype=torch.int32)).flatten()
        how = seeds[some].repeat_interleave(3), torch.ones(3 * m)
        choose_rows(table[ids], torch.arange(3 * m, dtype=torch.int32), drawn, places, *how)
        reference.accept(drawn, ids, first[:m], count[:m], some, token, pos, accepted)
        if fault:
            wrong = accepted < 2
            accepted += wrong.long()
            token[some], pos[some] = drawn[first[:m] + accepted], pos[some] + wrong.int()
        for i in range(3):
            here = accepted >= i
            made[some[here], (length[some] + i)[here].clamp(max=NEW + 3)] = drawn[first[:m] + i][here]
        length[some] += accepted + 1
    return made[:, :NEW]


def deviations(texts, table):
    """How many standard deviations the chi-square of the joint distribution lies above its mean."""
    p = table.double().softmax(-1)
    joint = (p[0][:, None, None] * p[:, :, None] * p[None, :, :]).flatten()
    result = torch.bincount((texts[:, 0] * V + texts[:, 1]) * V + texts[:, 2], minlength=V**3).double()
    expected = joint * len(texts)
    many = expected >= 5  # the rest count as one kind
    terms = ((result - expected) ** 2 / expected)[many].sum()
    rest = expected[~many].sum()
    terms += (result[~many].sum() - rest) ** 2 / rest if rest else 0
    df = int(many.sum())
    return float((terms - df) / (2 * df) ** 0.5)


def check_distribution(n, choose_rows):
    table = torch.randn(V, V, generator=torch.Generator().manual_seed(5))
    assert abs(deviations(drawn_texts(n, table, False, choose_rows), table)) < FAR
    assert deviations(drawn_texts(n, table, True, choose_rows), table) > 4 * FAR


def test_tokens_with_drafts_are_drawn_as_the_model_has_them_and_one_too_many_shows():
    check_distribution(6_000, reference.choose_rows)


def test_a_million_draws():
    check_distribution(160_000, races(160_000))
