"""Codes and scales for a table: what `rtn` and `lsq` do with schemes that have one."""

import torch

from lowq_cli.quantizers._slabs import Solution, quantize_rows
from lowq_cli.quantizers._table_book import Book
from lowq_cli.quantizers._table_fit import companion_of
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import Scheme


def quantize_by_table(
    W: torch.Tensor, scheme: Scheme, dtype: torch.dtype | None, companion: torch.Tensor | None, search: bool
) -> QuantizedTensor:
    """W's (N, K) nearest codes of a table, for scales that reach each group's largest weight, or (search) that fit it best.

    companion: of the matrix that W's rows are part of; None takes W for the whole. Raises as `quantize_rows`.
    """
    companion = companion_of(W, scheme) if companion is None else companion.to(W.device)
    book = Book(scheme, companion, W.device, dtype)

    def solve(groups: torch.Tensor, scheme: Scheme, dtype: torch.dtype | None) -> Solution:
        if search:
            return *book.search(groups), None
        stored, scales = book.start(groups)
        return book.nearest(groups, scales), stored, None

    return quantize_rows(W, scheme, solve, dtype, table=companion)
