"""`--type`: what llama.cpp's users call a GGUF file's mixture of types, and which tensor of a model gets which.

The names, numbers and choices are llama.cpp's (llama-quantize, without an importance matrix), so that a file of a name is as
large here as there. Most tensors get the mixture's own type; values, the way down and the way out of attention, on which more
depends, and the head get others.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from lowq_packers.errors import UsageError
from lowq_packers.formats.gguf import TYPES


@dataclass(frozen=True)
class Facts:
    """Of a model: layers, queries' heads for each of the keys', experts (0: none), whether the embedding is the head."""

    layers: int
    heads_per_key: int
    experts: int
    tied: bool


Choice = str | Callable[[int, Facts], str | None]  # a type, or that of a layer's number; None: the mixture's own


@dataclass(frozen=True)
class Mixture:
    """number: general.file_type. own: most tensors' type. v, down, out: of attn_v, ffn_down and attn_output."""

    number: int
    own: str
    v: Choice = ""
    down: Choice = ""
    out: Choice = ""


def _more(wide: str) -> Choice:
    """The wider type in the first and last eighth of the layers, and in each third one between."""

    def choose(i: int, f: Facts) -> str | None:
        n = f.layers
        return wide if i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2 else None

    return choose


def _first(wide: str, count: Callable[[int], int], then: str | None = None) -> Choice:
    """The wider type in the first layers."""
    return lambda i, f: wide if i < count(f.layers) else then


def _few_keys(wide: str, else_: str | None = None) -> Choice:
    """The wider type where four heads or more share keys and values: the tensor is then small."""
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
EIGHT = 8  # experts, as Mixtral has: what all of them share gets more
ALL_70B = 80  # layers of Llama's 70B, of whose heads eight share a key


def get(name: str) -> Mixture:
    """The mixture of that name, in any case. Raises UsageError naming those that exist."""
    if name.upper() not in MIXTURES:
        raise UsageError(f"--type {name} does not exist; use one of {', '.join(MIXTURES)}")
    return MIXTURES[name.upper()]


def type_of(mixture: Mixture, name: str, K: int, facts: Facts) -> str:
    """The type of a GGUF tensor `name` of two dimensions and more, whose rows are K long; F16 where no blocks divide them."""
    kind = _wanted(mixture, name, K, facts)
    for narrower in (kind, SHORTER.get(kind, "F16"), "F16"):
        if K % TYPES[narrower].elements == 0:
            return narrower
    raise AssertionError("F16 has no blocks")


def _wanted(mixture: Mixture, name: str, K: int, f: Facts) -> str:
    own = mixture.own
    if name == "output.weight" or (f.tied and name == "token_embd.weight"):
        return "Q8_0" if K % TYPES[own].elements or own == "Q8_0" else "Q6_K"
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if not found:
        return own
    layer, what = int(found[1]), found[2].removesuffix("_exps")
    if what in ("attn_v", "attn_k") and f.experts == EIGHT:
        return "Q8_0"
    if what == "attn_output" and f.experts == EIGHT:
        return "Q5_K" if own in ("Q2_K", "Q3_K", "Q4_K", "IQ4_XS") and mixture is not MIXTURES["Q3_K_L"] else own
    choice = {"attn_v": mixture.v, "ffn_down": mixture.down, "attn_output": mixture.out}.get(what, "")
    chosen = (choice if isinstance(choice, str) else choice(layer, f)) or own
    large = what == "attn_v" and f.layers == ALL_70B and f.heads_per_key == 8
    return "Q5_K" if large and chosen in ("Q3_K", "Q4_K") else chosen
