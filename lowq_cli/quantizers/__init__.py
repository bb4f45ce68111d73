"""Quantizers: one file = one algorithm with a function `quantize`, which is a `Quantize`; this file finds and names them.

The folder is the list: a file `<name>.py` here is the method `<name>`, its docstring's first line the summary that `--help`
shows. Its facts are lines that begin with `FACT = True`: what its `quantize` takes (TABLES, TEXT, CURVATURE), how it rounds
(MOVES_ZERO, CARRIES), and what `calibrate` does besides (SCALES, LEARN, DISTILL); the functions below say more of each.
All of this is read as text, because importing a method imports torch. A file whose name starts with _ is a helper.
"""

import importlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lowq_packers.errors import SchemeError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from lowq_packers.qtensor import QuantizedTensor
    from lowq_packers.scheme import Scheme

FEW_TOKENS = 128  # min. tokens that visit an expert: below, own text is made longer, and awq finds no scales for it
GPTQ_SLAB = 1 << 24  # weights that gptq rounds at once: few passes over the columns, 64 MB per fp32 copy
ADVISED = "gptq"  # the calibrated method that messages advise: the fastest of them

# Bits -> the data-free method with the lowest perplexity; source: benchmarks/results/accuracy/data_free.json.
DEFAULT: dict[int, str] = {8: "rtn", 4: "lsq", 3: "lsq", 2: "lsq", 1: "lsq"}
DEFAULT_SMALL: dict[tuple[int, int], str] = {(4, 32): "hqq"}  # (bits, max. group size) -> best method


class Quantize(Protocol):
    """The function `quantize` of a method: rounds W (N, K), a matrix or rows of one, to `scheme`.

    dtype: what scales and zeros are stored in, and rounded to before codes are chosen; None keeps fp32.
    moments: for TEXT methods, gptq.Moments of the inputs; None: independent inputs of equal power.
    table: for TABLES methods, the table or factor of the whole matrix; None: it is found from W.
    outputs: for CURVATURE methods, blocks (n, n) that weigh the errors of the outputs of n rows each; None: all alike.
    """

    def __call__(
        self, W: "Tensor", scheme: "Scheme", dtype: Any = None, moments: Any = None, *, table: Any = None, outputs: Any = None
    ) -> "QuantizedTensor": ...


@cache
def methods() -> dict[str, str]:
    """Method name -> one-line summary, for every quantizer file in this folder, sorted by name."""
    titles = {}
    for path in sorted(Path(__file__).parent.glob("[!_]*.py")):
        with path.open(encoding="utf-8") as file:  # parsing whole files would take 20 ms of `lowq --help`
            titles[path.stem] = file.readline().strip().strip('"').rstrip(".")
    return titles


def check(name: str) -> str:
    """`name`, if a file here defines it. Otherwise raises UsageError, which lists the methods."""
    if name not in methods():
        raise UsageError(f"method={name!r} does not exist; use one of {', '.join(methods())}")
    return name


def get(name: str | None) -> Quantize:
    """The `quantize` of a method, which takes the arguments of its facts; None: of fp8 blocks. Raises as `check`."""
    quantize: Quantize = importlib.import_module(f"{__name__}.{check(name) if name else '_blocks'}").quantize
    return quantize


def moves_zeros(name: str) -> bool:
    """Whether a method needs zeros, which it fits: its file says MOVES_ZERO."""
    return _says(name, "MOVES_ZERO")


def check_scheme(name: str, scheme: "Scheme") -> None:
    """Raise SchemeError if a method needs a zero that the scheme does not have, or does not support its table."""
    if scheme.table and not _says(name, "TABLES"):
        raise SchemeError(f"{name} fits evenly spaced values, not the table {scheme.table}; use --method {DEFAULT[4]}")
    if moves_zeros(name) and scheme.zero == "none":
        raise SchemeError(f'{name} moves the zero, and zero="none" has none; use --zero float, or --method rtn')


def needs_text(name: str) -> bool:
    """Whether a method reads a calibration text, and its `quantize` takes `moments`: its file says TEXT."""
    return _says(name, "TEXT")


def needs_scales(name: str) -> bool:
    """Whether `calibrate` folds activation-aware scales into a layer before the method sees it: its file says SCALES."""
    return _says(name, "SCALES")


def needs_learning(name: str) -> bool:
    """Whether `calibrate` trains each layer's codes and scales (calibrate/learn.py): its file says LEARN."""
    return _says(name, "LEARN")


def needs_distilling(name: str) -> bool:
    """Whether all layers are trained together afterwards (calibrate/end_to_end.py): its file says DISTILL."""
    return _says(name, "DISTILL")


def needs_curvature(name: str) -> bool:
    """Whether its `quantize` takes `outputs`, which `calibrate` measures (calibrate/curvature.py): its file says CURVATURE."""
    return _says(name, "CURVATURE")


def carries_errors(name: str) -> bool:
    """Whether later columns compensate the rounding errors of earlier ones: its file says CARRIES."""
    return _says(name, "CARRIES")


@cache
def _says(name: str, fact: str) -> bool:
    text = Path(__file__).with_name(f"{check(name)}.py").read_text(encoding="utf-8")  # read as text: importing it needs torch
    return f"\n{fact} = True" in text


def default_method(bits: int, group_size: int | None = None, zero: str = "float") -> str:
    """The default method of `quantize` for a number of bits and a group size."""
    small = (m for (b, largest), m in DEFAULT_SMALL.items() if group_size and b == bits and group_size <= largest)
    return next(small, DEFAULT[bits]) if zero == "float" else DEFAULT[bits]
