"""The tensors of a packed matrix in files: names, and shapes and dtypes for a given scheme, layout, N and K."""

from collections.abc import Mapping

from lowq_cli.files.quant_config import Stored
from lowq_cli.files.safetensors_io import E4M3, TensorHeader
from lowq_packers import scheme
from lowq_packers.errors import SchemeError
from lowq_packers.layouts import DISK, get

WEIGHT, SCALE, ZERO, TABLE = ".weight", ".weight_scale", ".weight_zero", ".weight_table"
OF_BLOCKS = ".weight_scale_inv"  # suffix of block scales; despite the name, weights are multiplied by them
WORDS, COMPANIONS, BYTES, TABLES = ("I32",), ("F16", "BF16", "F32"), ("U8",), ("F32",)  # allowed safetensors dtypes
Tensors = dict[str, tuple[tuple[int, ...], tuple[str, ...]]]  # suffix -> shape, and allowed dtypes


def tensors(how: Stored, N: int, K: int) -> Tensors:
    """The tensors of an (N, K) matrix in this format. Raises SchemeError if the format does not allow N or K."""
    form = get(how.layout)
    assert form.shapes
    if N % form.row_step:
        raise SchemeError(f"files hold {how.layout} only for multiples of {form.row_step} rows, not for {N}")
    words, companion = form.shapes(how.scheme, N, K)
    if how.scheme.table == scheme.E4M3:
        return {WEIGHT: (words, (E4M3,)), OF_BLOCKS: (companion, ("F32",))}
    zeros: Tensors = {} if how.scheme.zero == "none" else {ZERO: (companion, COMPANIONS)}
    table: Tensors = {TABLE: ((1, how.scheme.table_width), TABLES)} if how.scheme.table_width else {}
    scales = COMPANIONS if how.scheme.scale == "float" else BYTES
    return {WEIGHT: (words, WORDS), SCALE: (companion, scales)} | zeros | table


def rows(how: Stored, words: tuple[int, ...]) -> int:
    """The number of rows of a matrix whose words have this shape."""
    form = get(how.layout)
    assert form.shapes
    each = form.shapes(how.scheme, form.row_step, how.scheme.group_size)[0][0]
    return words[0] * form.row_step // each if words else 0


def misfit(stem: str, how: Stored, N: int, K: int, headers: Mapping[str, TensorHeader]) -> str | None:
    """A message if the tensors of an (N, K) matrix do not match this format, else None."""
    try:
        expected = tensors(how, N, K)
    except SchemeError as e:
        return f"{stem} cannot be {how.scheme}: {e}"
    for suffix in (SCALE, ZERO, TABLE, OF_BLOCKS):
        if suffix in expected and stem + suffix not in headers:
            return f"{stem}{suffix} is missing; {how.scheme} needs it"
        if suffix not in expected and stem + suffix in headers:
            return f"{stem}{suffix} is in the files, but {how.scheme} stores none"
    for suffix, (shape, dtypes) in expected.items():
        header = headers[stem + suffix]
        if tuple(header.shape) != shape or header.dtype not in dtypes:
            form = "" if how.layout == DISK else f" in layout {how.layout}"
            needs = f"{how.scheme} of a row of {K}{form} needs {'/'.join(dtypes)} {shape}"
            return f"{stem}{suffix} is {header.dtype} {tuple(header.shape)}; {needs}"
    return None
