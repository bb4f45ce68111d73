"""Recipe: the scheme of each tensor, from flags, a TOML file, or both (a flag wins); checked before any weight is read.

    bits = 4
    group = 64
    lm_head = 8
    skip = ["layers.0"]

    [overrides]
    "*.down_proj" = "8:32"
    'layers\\.[01]\\..*v_proj' = 8
    "layers.5.mlp" = "keep"

A pattern is a glob over whole dotted components anywhere in a name: `down_proj`, `layers.0`, `layers.[01].*_proj`. If it
matches no name as a glob, it is tried as a regular expression. Later overrides win over earlier ones; `skip` wins over all.
"""

import tomllib
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from lowq_cli import quantizers, recipes
from lowq_cli.plan import values
from lowq_cli.plan.table_formats import PLACED, TABLE_FORMATS, TableFormat
from lowq_cli.plan.values import Group, Keep, Override, spelled
from lowq_packers.errors import NotFoundError, UsageError, naming
from lowq_packers.regular import MAX_CONFIG, read_given
from lowq_packers.scheme import ACTS, BITS, BLOCKS, DEFAULT_BLOCK, ZERO_KINDS, Act, Scheme, ZeroKind

DEFAULT_GROUP: dict[int, int] = dict.fromkeys(BITS, 64)
Dtype = Literal["source", "float16", "bfloat16", "float32"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
CALIB_TOKENS = 65536  # default number of tokens that calibrated methods read
NOT_CALIBRATED = ("head", "embedding", "router", "vision", "projector", "audio")
# Max. width of the layers -> bits of the head. An 8-bit head raises perplexity by less than 0.03%, a 4-bit head by 0.4 to 1.4%
# (benchmarks/results/accuracy/head.json), which is little compared with 2-bit layers (108%). A decode step reads the whole
# head: in an 8B model 1.05 GB in fp16, next to 3.7 GB of 4-bit layers or 2 GB of 2-bit layers. A tied head has the embedding's
# bits, since a separate copy would make the model larger.
HEAD_BITS = {2: 4, 4: 8}
# Bits of an embedding that is also the head. With 4-bit layers they change the KL divergence by 0.0002 or less
# (benchmarks/notes/accuracy.md). A step of a 1B takes 59 ms of a core instead of 84 (benchmarks/notes/cpu.md), and an H200
# decodes it 1.19 times as fast (benchmarks/notes/decode.md). These and heads of 8 bits have no zeros unless the
# method fits some, so that GGUF and MLX hold them exactly; the KL divergence is 0.00009 instead of 0.00006 (base, g64;
# benchmarks/notes/accuracy.md).
TIED_BITS = 8
EXAMPLE = {"max_kl": "0.02 nats per token", "max_ppl": "1%", "tokens_per_s": "30"}
BUDGETS = ("bpw", "size", "max_kl", "max_ppl")  # fields that replace `bits`
LAYOUTS = ("auto", "rowstream", "tile", "cpu")  # layouts that files can have
FORMATS = ("lowq", "fp8", *TABLE_FORMATS)
OF_GRIDS = {"format", "group", "zero", "act"}  # a recipe that gives one of these fields keeps its format, see `in_its_format`
OF_FP8 = ("format", "block", "act", "lm_head", "skip")  # the fields that the format fp8 accepts


@dataclass(frozen=True)
class Recipe:
    """How a model is quantized. Raises UsageError for values out of range.

    Args:
        bits: width of the codes of every linear weight.
        group: consecutive weights that share a scale; "channel" = a whole row; None = the default of each width.
        method: a file of `quantizers`, or "auto": the best measured method of each width.
        zero: kind of zero.
        layout: order of the words in the files; "auto" = rowstream, which every device repacks while loading; CUDA kernels read
            "tile" and CPU kernels read "cpu" without repacking (experts and odd row counts are not).
        lm_head: bits of the output head, or "keep"; "auto" is 8 without zeros with layers of 4 and 3 bits, 4 with fewer; a tied
            head has the embedding's.
        embedding: bits of the input embedding, or "keep"; a tied embedding is also the head. "auto" is 8 without
            zeros for a tied one with layers of 4 bits or fewer and lm_head "auto", otherwise "keep".
        vision: bits of the linears of the vision tower, or "keep"; the projector of its features is always kept.
        dtype: dtype of scales, zeros and kept tensors; "source" = the model's.
        calib: text (.txt, .jsonl or a folder of them) that calibrated methods read; "self" = text that the model generates;
            "bundled"; None = "self" if generating the text takes no longer than quantizing, else "bundled".
        calib_tokens: max. tokens of that text, or of its part for each pass of distill; None = 65,536, or for distill on a GPU
            up to 524,288, depending on the size.
        calib_seed: seed of the text that the model generates.
        rotate: first rotate the residual stream and the heads, folded into the weights; exact; for most described families.
        act: how layers round their activations at run time, per token: "none", "int8" or "fp8".
        bpw: a budget instead of `bits`: bits per weight of all weights that can be quantized and that no exception names,
            including head and embedding.
        size: a budget instead of `bits`: bytes of the weight files.
        max_kl: a bound instead of `bits`, which the smallest checkpoint meets: max. nats per token of KL divergence.
        max_ppl: a bound instead of `bits`, which the smallest checkpoint meets: max. rise of perplexity on `judge`, in percent.
        fit: with a bound, max. bytes of the weight files.
        tokens_per_s: with a bound, min. decode speed of one sequence in tokens per second, measured on the quantizing machine.
        judge: text on which a bound is measured; None = the bundled sample.
        widths: widths of the codes among which a budget or bound may choose.
        overrides: other bits, and group, for the tensors that a pattern names; or "keep".
        skip: patterns of the tensors that are kept.
        format: "lowq"; "fp8" (e4m3 with a scale for each `block`, like DeepSeek's files), with which `act` "fp8" and "none",
            `skip` and any `lm_head` go; or a name of TABLE_FORMATS, for weights of its widths (others as in "lowq"). Not given:
            "table-e4m3" for distill with a budget or a bound, unless group, zero or act is given.
        block: rows and columns that share a scale with the format "fp8".
    """

    format: str = "lowq"
    block: str = DEFAULT_BLOCK
    bits: int = 4
    group: Group | None = None
    method: str = "auto"
    zero: ZeroKind = "float"
    layout: str = "auto"
    lm_head: int | Keep | Literal["auto"] = "auto"
    embedding: int | Keep | Literal["auto"] = "auto"
    vision: int | Keep = "keep"
    dtype: Dtype = "source"
    calib: str | None = None
    calib_tokens: int | None = None
    calib_seed: int = 0
    act: Act = "none"
    rotate: bool = False
    bpw: float | None = None
    size: int | None = None
    max_kl: float | None = None
    max_ppl: float | None = None
    fit: int | None = None
    tokens_per_s: float | None = None
    judge: str | None = None
    widths: tuple[int, ...] = (8, 4, 3, 2)
    overrides: tuple[Override, ...] = ()
    skip: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        values.check_bits(self.bits, "bits")
        if self.group is not None:
            values.check_group(self.group, "group")
        for name, value, choices in (
            ("method", self.method, ("auto", *quantizers.methods())),
            ("zero", self.zero, ZERO_KINDS),
            ("act", self.act, ACTS),
            ("dtype", self.dtype, DTYPES),
            ("layout", self.layout, LAYOUTS),
            ("format", self.format, FORMATS),
            ("block", self.block, tuple(BLOCKS)),
        ):
            if value not in choices:
                raise UsageError(f"{name}={spelled(value)} does not exist; use one of {', '.join(choices)}")
        if self.calib_tokens is not None:
            self._check_whole("calib_tokens", 4096, 1 << 62, "a whole number of at least 4096")
        self._check_whole("calib_seed", 0, (1 << 32) - 1, "a whole number from 0 to 2^32 - 1")
        if self.calib is not None and not self.budgeted and (self.method == "auto" or not quantizers.needs_text(self.method)):
            raise UsageError(f"--calib is for methods that read a text, not {self.method}: add --method {quantizers.ADVISED}")
        if not isinstance(self.rotate, bool):
            raise UsageError(f"rotate={spelled(self.rotate)} must be true or false")
        if self.lm_head not in ("keep", "auto"):
            values.check_bits(self.lm_head, "lm_head")
        for name, choice in (("embedding", self.embedding), ("vision", self.vision)):
            if choice not in ("keep", "auto"):
                values.check_bits(choice, name)
        if self.in_blocks and self.act == "int8":
            raise UsageError("fp8 weights take activations in fp8 or as they are; --act int8 needs --format lowq")
        self._check_budget()
        self._check_table()
        if not all(isinstance(s, str) and s for s in self.skip):
            raise UsageError(f"skip={spelled(self.skip)} must be a list of patterns")

    @property
    def head(self) -> int | Keep:
        """Bits of an untied head."""
        if self.lm_head != "auto":
            return self.lm_head
        return "keep" if self.in_blocks else next((head for most, head in HEAD_BITS.items() if self.bits <= most), "keep")

    @property
    def tied(self) -> int | Keep:
        """Bits of an embedding that is also the head."""
        if self.embedding != "auto":
            return self.embedding
        chosen = self.lm_head == "auto" and self.head != "keep"
        return TIED_BITS if chosen else "keep"

    @property
    def tokens(self) -> int:
        """Max. number of calibration tokens."""
        return self.calib_tokens or CALIB_TOKENS

    @property
    def distills(self) -> bool:
        """Whether its method trains all layers together."""
        return self.method != "auto" and quantizers.needs_distilling(self.method)

    @property
    def budgeted(self) -> bool:
        """Whether a budget or a bound determines the bits of each weight."""
        return any(getattr(self, name) is not None for name in BUDGETS)

    @property
    def uniform(self) -> "Recipe":
        """The recipe without its budget or bound, and with the text only if its method reads one: before widths are chosen."""
        calib = self.calib if self.method != "auto" and quantizers.needs_text(self.method) else None
        no_budget = dict.fromkeys((*BUDGETS, "fit", "tokens_per_s", "judge"))
        return replace(self, **no_budget, calib=calib)  # type: ignore[arg-type]

    @property
    def bounded(self) -> bool:
        """Whether the recipe bounds the loss (max_kl or max_ppl)."""
        return self.max_kl is not None or self.max_ppl is not None

    def _check_whole(self, name: str, least: int, most: int, allowed: str) -> None:
        value = getattr(self, name)
        if value is not None and (type(value) is not int or not least <= value <= most):
            raise UsageError(f"{name}={spelled(value)} must be {allowed}")

    @property
    def table(self) -> TableFormat | None:
        """The table format; None if the format has no table."""
        return TABLE_FORMATS.get(self.format)

    @property
    def in_blocks(self) -> Scheme | None:
        """The scheme of all weights if the format is fp8, else None."""
        return Scheme.in_blocks(BLOCKS[self.block]) if self.format == "fp8" else None

    def fixed_group(self, bits: int) -> int | None:
        """The group size that the format prescribes at a width, or None."""
        t = self.table
        return t.group if t and t.fixed and bits in t.bits else None

    def scheme(self, bits: int, group: int, kind: str = "") -> Scheme:
        """The scheme of weights of a width and group size. kind: "head" or "embedding" if its own field gives the width."""
        t = self.table
        if t and bits in t.bits:
            return t.scheme(bits, group)
        plain = bits == 8 and {"head": self.lm_head, "embedding": self.embedding}.get(kind) == "auto"
        needed = self.method != "auto" and quantizers.moves_zeros(self.method)
        return Scheme(bits, group, "none" if plain and not needed else self.zero)

    def _check_table(self) -> None:
        t = self.table
        if t is None:
            return
        if self.bits not in t.bits:
            raise UsageError(
                f"--format {self.format} has {' or '.join(map(str, t.bits))} bits, not {self.bits}; leave --bits out"
            )
        for name in (n for n in ("bpw", "size", "max_kl", "max_ppl") if not t.groups and getattr(self, n) is not None):
            raise UsageError(f"--{name.replace('_', '-')} chooses among widths of --format lowq; leave it or --format out")
        groups = {self.group, *(o.group for o in self.overrides if o.bits in t.bits)} - {None}
        if t.fixed and groups - {t.group}:
            odd = next(iter(groups - {t.group}))
            raise UsageError(f"--format {self.format} has groups of {t.group}, not {odd}; leave the group out")

    def _check_budget(self) -> None:
        given = [f"--{name.replace('_', '-')}" for name in BUDGETS if getattr(self, name) is not None]
        if len(given) > 1:
            raise UsageError(f"{' and '.join(given)} are {len(given)} budgets; give one of them")
        for name, most in (("max_kl", 1e3), ("max_ppl", 1e3), ("tokens_per_s", 1e9)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < most):
                raise UsageError(
                    f"{name}={spelled(value)} must be a number above 0 and below {most:.0f}, such as {EXAMPLE[name]}"
                )
        self._check_whole("fit", 1, 1 << 62, "a positive number of bytes")
        for name in ("fit", "tokens_per_s", "judge"):
            if getattr(self, name) is not None and not self.bounded:
                alone = "; alone it is --size" if name == "fit" else ""
                raise UsageError(f"--{name.replace('_', '-')} goes with --max-kl or --max-ppl{alone}")
        if self.bpw is not None and not (isinstance(self.bpw, int | float) and 1 <= self.bpw <= 16):
            raise UsageError(f"bpw={spelled(self.bpw)} must be a number of bits per weight from 1 to 16, such as 3.2")
        self._check_whole("size", 1, 1 << 62, "a positive number of bytes")
        if not self.widths:
            raise UsageError("widths must name at least one width, such as 8,4,3,2")
        for bits in self.widths:
            values.check_bits(bits, "widths")

    def group_for(self, bits: int) -> Group:
        """The group size at a width."""
        if self.table and bits in self.table.bits and (self.group is None or self.table.fixed):
            return self.table.group
        return DEFAULT_GROUP[bits] if self.group is None else self.group

    def method_for(self, bits: int, group_size: int | None = None, kind: str = "") -> str:
        """The quantizer of a matrix. Calibrated methods take linears of decoder layers only; other kinds get the default."""
        if self.method != "auto" and not (kind in NOT_CALIBRATED and quantizers.needs_text(self.method)):
            return self.method
        zero = "none" if self.table and bits in self.table.bits else self.zero
        return quantizers.default_method(bits, group_size, zero)

    def to_json(self) -> dict[str, Any]:
        """Plain values, with the keys of the TOML file. `make_recipe(**plain)` gives an equal recipe."""
        plain = asdict(self)
        plain["overrides"] = list(map(str, self.overrides))
        plain["skip"] = list(self.skip)
        plain["widths"] = list(self.widths)
        left_out = ("block",) if self.table else ("format", "block")
        return {k: v for k, v in plain.items() if (k in OF_FP8 if self.in_blocks else k not in left_out)}


def as_published(recipe: Recipe, stored_as: str) -> tuple[Recipe, list[str]]:
    """The recipe for a source of that format, and its notes. If the recipe sets nothing about the weights, gpt-oss' MXFP4
    experts keep their values (rounding reproduces each one), and the weights published in 16 bits get 8 bits: q, k, v, o and
    the head, which take 0.7 of the 2.0 ms of a step at batch 1.
    """
    free = replace(recipe, dtype="source", layout="auto", lm_head="auto", embedding="auto", skip=())
    if stored_as != "mxfp4" or free != Recipe():
        return recipe, []
    exact = replace(recipe, format="mxfp4", overrides=(Override("self_attn.*", 8),))
    return exact, ["its experts stay as published, in MXFP4; attention gets 8 bits (--group 64 quantizes all to 4 bits anew)"]


READ: dict[str, Callable[[object], Any]] = {  # field -> its parser; other fields are used without parsing
    **{"overrides": values.overrides, "skip": values.patterns, "widths": values.widths, "max_ppl": values.percent},
    **{"bits": partial(values.number, where="bits"), "group": partial(values.group_of, where="group")},
    **dict.fromkeys(("size", "fit"), values.parse_size),
    **{head: partial(values.bits_or_word, where=head) for head in ("lm_head", "embedding", "vision")},
}
ADDED = ("overrides", "skip")  # the entries of the flags follow those of the file


def make_recipe(file: str | Path | None = None, **flags: Any) -> Recipe:
    """The recipe of a TOML file or recipe name (or neither), overridden by every flag that is not None or an empty list.

    `overrides` can be a list of "PATTERN=BITS[:GROUP]", or a table; overrides of flags follow those of the file, so they win.
    Raises NotFoundError, UsageError.
    """
    given = read_recipe(file) if file is not None else {}
    names = [f.name for f in fields(Recipe)]
    values.check_keys(given, names, f"recipe {file}")
    values.check_keys(flags, names, "recipe")
    table: dict[str, Any] = {}
    for source, where in ((given, f"recipe {file}"), (flags, "")):
        for name, value in source.items():
            if value is not None:
                with naming(where):
                    read = READ[name](value) if name in READ else value
                table[name] = (*table.get(name, ()), *read) if name in ADDED else read
    if table.get("format") == "fp8":
        _check_fp8(table)
    elif "block" in table:
        raise UsageError("--block needs --format fp8")
    chosen = [f"--{name.replace('_', '-')}" for name in BUDGETS if table.get(name)]
    if "bits" in table and chosen:
        raise UsageError(f"{chosen[0]} chooses the bits of every weight; leave --bits out, or name its choices with --widths")
    with naming(f"recipe {file}" if given and not any(flags.values()) else ""):
        return in_its_format(Recipe(**table), table.keys())


def in_its_format(recipe: Recipe, given: Collection[str] | None = None) -> Recipe:
    """The recipe in the format in which a budget's bits are trained, unless it names a format, or fields that depend on one.

    given: the names of the fields that it gives; None: of those that differ from their defaults.
    """
    if given is None:
        given = [f.name for f in fields(Recipe) if getattr(recipe, f.name) != f.default]
    free = recipe.budgeted and recipe.distills and OF_GRIDS.isdisjoint(given)
    return replace(recipe, format=PLACED) if free else recipe


def _check_fp8(settings: dict[str, Any]) -> None:
    """Fill in the defaults that differ for fp8. Raises UsageError for a field that fp8 does not accept."""
    for name in settings:
        if name not in OF_FP8:
            raise UsageError(f"--{name.replace('overrides', 'override').replace('_', '-')} is for --format lowq; leave it out")
    settings.setdefault("act", "fp8")
    if settings.get("lm_head", "auto") not in ("auto", "keep", "fp8", 8):
        raise UsageError(f"--lm-head {settings['lm_head']} with --format fp8: write --lm-head fp8, or keep")
    if settings.get("lm_head") == "fp8":
        settings["lm_head"] = 8


def read_recipe(recipe: str | Path) -> dict[str, Any]:
    """The table of a built-in recipe, by name, or of a TOML file. Raises the errors of `read_toml`."""
    return read_toml(recipes.path(str(recipe)) or Path(recipe))


def read_toml(path: Path) -> dict[str, Any]:
    """The table in a TOML file. Raises NotFoundError or UsageError."""
    if not path.exists():
        titles = ", ".join(recipes.names())
        raise NotFoundError(f"recipe {path} does not exist; give a TOML file, or one of {titles}")
    try:
        return tomllib.loads(read_given(path, "recipe", MAX_CONFIG).decode("utf-8").replace("\r\n", "\n"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as e:
        raise UsageError(f"recipe {path} is not valid TOML: {e}") from None
