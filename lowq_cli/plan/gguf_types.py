"""`--type`: llama.cpp's names for the mixtures of types in a GGUF file, and the type of each tensor in a mixture.

The names, numbers and choices are those of llama.cpp (llama-quantize, without an importance matrix), so a mixture gives a file
of the same size here. Most tensors get the mixture's main type. The more sensitive ones get other types: the value projection
(attn_v), the down projection (ffn_down), the output projection of attention (attn_output), and the head.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from lowq_packers.errors import UsageError
from lowq_packers.formats.gguf import TYPES


@dataclass(frozen=True)
class Facts:
    """Facts of a model: layers, query heads per key head, experts (0: none), whether the embedding is also the head."""

    layers: int
    heads_per_key: int
    experts: int
    tied: bool


Choice = str | Callable[[int, Facts], str | None]  # a type, or a function of the layer's index; None: the mixture's main type


@dataclass(frozen=True)
class Mixture:
    """number: general.file_type. own: the main type. v, down, out: the types of attn_v, ffn_down and attn_output."""

    number: int
    own: str
    v: Choice = ""
    down: Choice = ""
    out: Choice = ""


def _more(wide: str) -> Choice:
    """The wider type in the first and last eighth of the layers, and in every third layer between them."""

    def choose(i: int, f: Facts) -> str | None:
        n = f.layers
        return wide if i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2 else None

    return choose


def _first(wide: str, count: Callable[[int], int], then: str | None = None) -> Choice:
    """The wider type in the first layers."""
    return lambda i, f: wide if i < count(f.layers) else then


def _few_keys(wide: str, else_: str | None = None) -> Choice:
    """The wider type if four or more query heads share a key head: the tensor is then small."""
    return lambda i, f: wide if f.heads_per_key >= 4 else else_


def _eighth(n: int) -> int:
    return n // 8


MIXTURES = {
    "Q2_K": Mixture(10, "Q2_K", _few_keys("Q4_K", "Q3_K"), "Q3_K", "Q3_K"),
    "Q2_K_S": Mixture(21, "Q2_K", _few_keys("Q4_K"), _first("Q4_K", _eighth)),
    "Q3_K_S": Mixture(11, "Q3_K"),
    "Q3_K_M": Mixture(12, "Q3_K", _first("Q5_K", lambda n: 2, "Q4_K"), _first("Q5_K", lambda n: n // 16, "Q4_K"), "Q4_K"),
    "Q3_K_L": Mixture(13, "Q3_K", "Q5_K", "Q5_K", "Q5_K"),
    "Q4_K_S": Mixture(14, "Q4_K", _first("Q5_K", lambda n: 4), _first("Q5_K", _eighth)),
    "Q4_K_M": Mixture(15, "Q4_K", _more("Q6_K"), _more("Q6_K")),
    "Q5_K_S": Mixture(16, "Q5_K"),
    "Q5_K_M": Mixture(17, "Q5_K", _more("Q6_K"), _more("Q6_K")),
    "Q6_K": Mixture(18, "Q6_K"),
    "Q8_0": Mixture(7, "Q8_0"),
    "IQ4_XS": Mixture(30, "IQ4_XS", _few_keys("Q5_K"), _first("Q5_K", _eighth)),
}
SHORTER = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL"}  # blocks of 32
EIGHT = 8  # number of experts (as in Mixtral) with which the tensors that all experts share get wider types
ALL_70B = 80  # number of layers of Llama 70B, in which eight query heads share a key head


def get(name: str) -> Mixture:
    """The mixture of that name, upper or lower case. Raises UsageError with the list of the existing ones."""
    if name.upper() not in MIXTURES:
        raise UsageError(f"--type {name} does not exist; use one of {', '.join(MIXTURES)}")
    return MIXTURES[name.upper()]


def type_of(mixture: Mixture, name: str, K: int, facts: Facts) -> str:
    """The type of a GGUF tensor `name` of two or more dimensions with rows of length K; F16 if no block size divides K."""
    kind = _wanted(mixture, name, K, facts)
    for narrower in (kind, SHORTER.get(kind, "F16"), "F16"):
        if K % TYPES[narrower].elements == 0:
            return narrower
    raise AssertionError("F16 has no blocks")


def _wanted(mixture: Mixture, name: str, K: int, f: Facts) -> str:
    head_type = mixture.own
    if name == "output.weight" or (f.tied and name == "token_embd.weight"):
        return "Q8_0" if K % TYPES[head_type].elements or head_type == "Q8_0" else "Q6_K"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if not match:
        return head_type
    layer, what = int(match[1]), match[2].removesuffix("_exps")
    if what in ("attn_v", "attn_k") and f.experts == EIGHT:
        return "Q8_0"
    if what == "attn_output" and f.experts == EIGHT:
        return "Q5_K" if head_type in ("Q2_K", "Q3_K", "Q4_K", "IQ4_XS") and mixture is not MIXTURES["Q3_K_L"] else head_type
    choice = {"attn_v": mixture.v, "ffn_down": mixture.down, "attn_output": mixture.out}.get(what, "")
    chosen = (choice if isinstance(choice, str) else choice(layer, f)) or head_type
    large = what == "attn_v" and f.layers == ALL_70B and f.heads_per_key == 8
    return "Q5_K" if large and chosen in ("Q3_K", "Q4_K") else chosen
