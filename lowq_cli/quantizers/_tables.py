"""Codes and scales for table schemes, for the methods `rtn` and `lsq`."""

import torch

from lowq_cli.quantizers._slabs import Solution, quantize_rows
from lowq_cli.quantizers._table_book import Book
from lowq_cli.quantizers._table_fit import companion_of
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import Scheme


def quantize_by_table(
    W: torch.Tensor, scheme: Scheme, dtype: torch.dtype | None, companion: torch.Tensor | None, search: bool
) -> QuantizedTensor:
    """The nearest codes of a table for W (N, K), with scales that reach each group's largest weight or (search) fit best.

    companion: the table or factor of the whole matrix that has W's rows; None: W is the whole matrix. Raises the errors of
    `quantize_rows`.
    """
    companion = companion_of(W, scheme) if companion is None else companion.to(W.device)
    book = Book(scheme, companion, W.device, dtype)

    def solve(groups: torch.Tensor, scheme: Scheme, dtype: torch.dtype | None) -> Solution:
        if search:
            return *book.search(groups), None
        stored, scales = book.start(groups)
        return book.nearest(groups, scales), stored, None

    return quantize_rows(W, scheme, solve, dtype, table=companion)
