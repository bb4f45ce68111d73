"""`quantize --for ENGINE`: schemes that `export` can convert for an engine bit for bit, chosen and checked before work starts.

Zeros: no engine holds a float zero exactly (vLLM's kernels accept integer zeros or none; llama.cpp and MLX store
-zero * scale in 16 bits, which is exact only for the constant 2**(bits-1)), so the codes are symmetric. The last four targets
are formats that several engines may read; Humming and HQQ hold float zeros.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lowq_cli.files.tensor_parallel import fusion_problems
from lowq_cli.plan.table_formats import TABLE_FORMATS
from lowq_packers.errors import UsageError
from lowq_packers.scheme import Scheme

if TYPE_CHECKING:
    from lowq_cli.plan.plan import Plan


@dataclass(frozen=True)
class Target:
    """An engine or format: the export format, and the accepted widths and groups (the first ones are the default).

    zero: the kind of zero that it holds exactly. head: the default of `lm_head`.
    """

    engine: str
    export: str
    bits: tuple[int, ...]
    groups: tuple[int | str, ...]
    zero: str = "none"
    head: str = "keep"  # most engines read the head in 16 bits only
    table: str | None = None  # the default --format

    def scheme(self, bits: int, group: int) -> Scheme:
        """The scheme that it accepts at a width and group size."""
        return TABLE_FORMATS[self.table].scheme(bits, group) if self.table else Scheme.of(bits, group, self.zero)

    def why_not(self, scheme: Scheme, N: int, K: int) -> str | None:
        """Why it cannot hold a scheme and shape, or None."""
        from lowq_packers import formats  # takes 30 ms, which an error about a mistyped flag should not cost

        return formats.get(self.export).why_not(scheme, N, K)


TARGETS = {
    t.engine: t
    for t in (
        Target("vllm", "compressed-tensors", (4, 8, 2), (128, 64, 32, "channel")),
        Target("llama.cpp", "gguf", (4, 8), (32, 64, 128)),
        Target("mlx", "mlx", (4, 8, 3, 2), (64, 32, 128)),
        Target("gptq", "gptq", (4, 8, 3, 2), (128, 64, 32, "channel")),
        Target("awq", "awq", (4,), (128, 64, 32), zero="int"),
        Target("humming", "humming", (4, 8, 3, 2, 1), (64, 128, 32, "channel"), zero="float"),
        Target("modelopt", "modelopt", (4,), (16,), table="nvfp4"),
        Target("bitsandbytes", "bitsandbytes", (4,), (64, 128, 32), table="nf4"),
        Target("hqq", "hqq", (4, 8, 3, 2, 1), (64, 128, 32, "channel"), zero="float"),
    )
}


def no_such(flag: str, given: str, known: Sequence[str]) -> UsageError:
    """The error for an engine or format that does not exist, with the one that was probably meant: --to llama.cpp is gguf."""
    pairs = [(t.engine, t.export) for t in TARGETS.values()]
    names = [given.lower(), *(b for pair in pairs for a, b in (pair, pair[::-1]) if a == given.lower())]
    meant = next((f"; did you mean {flag} {name}?" for name in names if name in known), f"; use one of {', '.join(known)}")
    return UsageError(f"{flag} {given} does not exist{meant}")


def get(engine: str) -> Target:
    """The target of that name. Raises UsageError with the list of the existing ones."""
    if engine not in TARGETS:
        raise no_such("--for", engine, tuple(TARGETS))
    return TARGETS[engine]


def of_export(form: str, engine: str | None) -> str:
    """The engine for an export format: the named one, if it reads the format. Raises UsageError."""
    name_of = {t.export: name for name, t in TARGETS.items()}
    if form not in name_of:
        raise no_such("--export", form, tuple(name_of))
    if engine is not None and get(engine).export != form:
        raise UsageError(f"--for {engine} reads {get(engine).export}, not {form}; leave --for out, or --export")
    return engine or name_of[form]


def candidates(engine: str, flags: Mapping[str, Any], file: Mapping[str, Any], asked: str = "") -> list[dict[str, Any]]:
    """Recipe flags to try for `engine`, best first: a set for each group that it has kernels for, or for the requested group.

    flags: flags of the command line, None if not given; file: the table of the recipe file.
    asked: the flag that chose the engine, for messages; "" is --for.
    Raises UsageError if either contradicts the engine.
    """
    t, asked = get(engine), asked or f"--for {engine}"

    def chosen(name: str) -> Any:
        return file.get(name) if flags.get(name) is None else flags[name]

    if chosen("format") == "fp8":
        if engine == "vllm":
            raise UsageError("vLLM, SGLang and transformers read --format fp8 as it is; leave --for and --export out")
        raise UsageError(f"--format fp8 and {asked} contradict each other: {engine} reads {t.export}; leave one out")
    if (form := chosen("format") or t.table) in TABLE_FORMATS:  # `problem` checks its groups against the engine
        choices = {"format": form, "lm_head": chosen("lm_head") or t.head, "embedding": flags.get("embedding") or "keep"}
        free = t.table == form and not TABLE_FORMATS[form].fixed and chosen("group") is None
        return [{**flags, **choices, "group": g} for g in (t.groups if free else (chosen("group"),))]
    zero, bits, group = chosen("zero"), chosen("bits"), chosen("group")
    if zero not in (None, t.zero):
        raise UsageError(f"--zero {zero} and {asked} contradict each other: {engine} takes --zero {t.zero} exactly")
    if str(bits or t.bits[0]) not in map(str, t.bits):
        others = "; --type Q2_K, Q3_K_M, ... makes a file of other widths" if t.export == "gguf" else ""
        raise UsageError(f"--bits {bits} and {asked} contradict each other: {engine} takes {_spell(t.bits)}{others}")
    if str(group or t.groups[0]) not in map(str, t.groups):
        raise UsageError(f"--group {group} and {asked} contradict each other: {engine} takes {_spell(t.groups)}")
    fixed = {"zero": t.zero, "lm_head": chosen("lm_head") or t.head, "embedding": flags.get("embedding") or "keep"}
    if chosen("bpw") or chosen("size"):
        return [{**flags, **fixed, "widths": flags.get("widths") or file.get("widths") or t.bits}]
    return [{**flags, **fixed, "group": g} for g in (t.groups if group is None else (group,))]


def problem(engine: str, plan: "Plan") -> str | None:
    """The first weight of the plan that cannot be exported for `engine`, and why; None if all can."""
    t = get(engine)
    for i in plan.items:
        if i.scheme is None:
            continue
        N, K = i.shape[0], i.shape[1]
        allowed = {K if g == "channel" else g for g in t.groups}
        if i.scheme.group_size not in allowed and not i.scheme.table:
            return (
                f"{i.name} ({i.scheme}): {engine} takes groups of {_spell(t.groups)}; give it one with --override, or --skip it"
            )
        if i.scheme.bits not in t.bits:
            return f"{i.name} ({i.scheme}): {engine} takes {_spell(t.bits)} bits"
        if reason := t.why_not(i.scheme, N, K):
            return f"{i.name} ({i.scheme}): {reason}; or --skip it"
    fused = fusion_problems({i.name: i.scheme for i in plan.items if i.scheme}) if engine == "vllm" else []
    return f"{fused[0]}; give them the same override" if fused else None


def _spell(values: tuple[int | str, ...]) -> str:
    if len(values) == 1:
        return str(values[0])
    return ", ".join(map(str, values[:-1])) + f" and {values[-1]}"
