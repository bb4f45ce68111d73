"""What GemLite's state_dict would hold, for tests: lowq reads such files, and writes none."""

from dataclasses import replace

import torch

from lowq_packers import bitstream, formats

DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def write(name, q, config):
    """The tensors of one matrix in group mode 3, (q - z) * s."""
    N, K = q.shape
    zeros = torch.full_like(q.scales, q.scheme.mid) if q.zeros is None else q.zeros
    kind, channel = DTYPE_CODES[q.scales.dtype], q.group_size == K
    meta = [0, q.bits, q.group_size, (1 << q.bits) - 1, 32 // q.bits, kind, kind, DTYPE_CODES[torch.float32], kind]
    return {
        f"{name}.W_q": bitstream.pack(q.W_q, q.bits).t().contiguous(),
        f"{name}.scales": q.scales.t().contiguous(),
        f"{name}.zeros": zeros.t().contiguous(),
        f"{name}.metadata": torch.tensor([*meta, *((1, 1, 1) if channel else (0, 3, 1))], dtype=torch.int32),
        f"{name}.orig_shape": torch.tensor([N, K], dtype=torch.int32),
    }


GEMLITE = replace(formats.get("gemlite"), write=write, config=lambda schemes, shapes, kept: {})
