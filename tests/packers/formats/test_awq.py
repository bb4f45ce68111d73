"""AWQ: bytes worked out by hand; other layouts of the name are refused."""

import sys
from pathlib import Path

import pytest
import torch

from lowq_packers import formats
from lowq_packers.errors import UnsupportedError
from lowq_packers.qtensor import QuantizedTensor

sys.path.insert(0, str(Path(__file__).parent))
from format_support import NAME, read, written


def test_awq_bytes():
    """Columns 0 .. 7 with the codes 0 .. 7: nibbles hold columns 0, 2, 4, 6, 1, 3, 5, 7, so the word is 0x75316420."""
    codes = torch.arange(8, dtype=torch.uint8).unsqueeze(1).repeat(1, 16)
    q = QuantizedTensor(codes, torch.ones(8, 1), torch.arange(8.0).unsqueeze(1), 4, 16, "int")
    tensors, _ = written(formats.get("awq"), q)
    assert tensors[f"{NAME}.qweight"].tolist() == [[0x75316420]] * 16
    assert tensors[f"{NAME}.qzeros"].tolist() == [[0x75316420]]


def test_awq_of_another_kernel_is_refused():
    with pytest.raises(UnsupportedError, match="gemv"):
        read(
            {f"{NAME}.qweight": torch.zeros(32, 1, dtype=torch.int32)},
            {"quantization_config": {"quant_method": "awq", "version": "gemv"}},
        )
