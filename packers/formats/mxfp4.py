"""gpt-oss' MXFP4: all experts of a layer in one tensor, in blocks of 32 consecutive k of a row.

    experts.gate_up_proj_blocks (E, 2I, H / 32, 16) uint8 · experts.gate_up_proj_scales (E, 2I, H / 32) exponents
    experts.down_proj_blocks (E, H, I / 32, 16) · experts.down_proj_scales (E, H, I / 32)

The first code is in a byte's low half. Rows of gate_up_proj alternate: gate 0, up 0, gate 1, ... Each expert is read as
experts.3.gate_proj, up_proj and down_proj, the names in lowq's files; gate_up_proj_bias and down_proj_bias are not changed.
"""

from __future__ import annotations

from functools import partial

from lowq_packers.errors import DamagedError
from lowq_packers.formats import Config, Fetch, Format, Headers, Matrix, _fp4, register, served_by
from lowq_packers.formats import _common as c
from lowq_packers.qtensor import QuantizedTensor

BLOCK, BYTES = _fp4.MXFP4.group_size, _fp4.MXFP4.group_size // 2
ROWS = {  # a stack's name -> {matrix: (its first row, the distance of its rows)}
    "gate_up_proj": {"gate_proj": (0, 2), "up_proj": (1, 2)},
    "down_proj": {"down_proj": (0, 1)},
}
USED, HARMLESS = ("quant_method",), ("modules_to_not_convert", "dequantize")


def _matrices(config: Config, headers: Headers, fetch: Fetch | None) -> list[Matrix]:
    c.check_fields(c.section(config, "quantization_config"), USED, HARMLESS)
    return [m for p in c.modules(headers, "_blocks") for m in _stack(p, headers)]


def _stack(p: str, headers: Headers) -> list[Matrix]:
    """The matrices of one tensor of blocks. Raises DamagedError if its name or shape is not that of a stack."""
    module, _, leaf = p.rpartition(".")
    blocks, scales = f"{p}_blocks", f"{p}_scales"
    shape = tuple(c.need(headers, blocks, dtypes=("U8",)).shape)
    if leaf not in ROWS or len(shape) != 4 or 0 in shape or shape[3] != BYTES:
        raise DamagedError(f"{blocks} has the shape {shape}; it must be (experts, rows, blocks, {BYTES})")
    c.need(headers, scales, shape[:3], ("U8",))
    E, rows, count, _ = shape
    if rows % len(ROWS[leaf]):
        raise DamagedError(f"{blocks} has {rows} rows, which are not as many of gate as of up")

    def read(fetch: Fetch, expert: int, first: int, step: int) -> QuantizedTensor:
        stored, exponents = fetch(blocks, expert)[first::step], fetch(scales, expert)[first::step]
        return _fp4.decoded(_fp4.MXFP4, stored.flatten(1), exponents, f"{module}.{expert}.{leaf}")

    return [
        Matrix(
            f"{module}.{e}.{name}", (rows // step, count * BLOCK), (blocks, scales),
            partial(read, expert=e, first=first, step=step), _fp4.stored_as(_fp4.MXFP4), 4, _fp4.MXFP4, "BF16",
        )
        for e in range(E)
        for name, (first, step) in ROWS[leaf].items()
    ]  # fmt: skip


ENGINES = served_by("lowq", "transformers", "vLLM", "SGLang", "Ollama")
register(Format("mxfp4", "gpt-oss MXFP4", _matrices, ENGINES))
