"""Read the rows of a planned matrix from its source."""

from collections.abc import Callable
from dataclasses import replace

import torch

from lowq_cli.files.source import Source
from lowq_cli.plan.candidates import Candidate
from lowq_cli.plan.plan import Item


def read_rows(item: Item | Candidate, source: Source) -> Callable[[int, int], torch.Tensor]:
    """A function (first, last) -> those rows of the item's matrix, read from the source."""
    shape, cut = source.headers[item.source].shape, item.cut
    A, B = shape[-2:]
    start = (cut.expert or 0) * A * B
    if cut.transposed or cut.step > 1:  # the rows are columns of the file, or not consecutive: read all of it once
        matrix = replace(cut, expert=None).of(source.read(item.source, start, A * B).reshape(A, B))
        return lambda first, last: matrix[first:last].contiguous()
    start += cut.rows[0] * B if cut.rows else 0
    return lambda first, last: source.read(item.source, start + first * B, (last - first) * B).reshape(last - first, B)
