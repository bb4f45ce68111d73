"""Check what `export` would refuse, without writing: used by `export` itself, `inspect`, model cards and hints.

All of them call `check_all`, so that suggested commands work.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from lowq_cli.files.checkpoint import Checkpoint, CheckpointTensor
from lowq_cli.files.family_tensors import extra_prefixes
from lowq_cli.files.safetensors_io import FLOATS, TensorHeader
from lowq_cli.files.source import Source
from lowq_cli.plan import targets
from lowq_cli.plan.plan import Plan
from lowq_cli.state import as_argument, source_of
from lowq_packers import formats
from lowq_packers.arch.towers import PROJECTORS, TOWERS
from lowq_packers.errors import LowqError, NotFoundError, SchemeError, UnsupportedError
from lowq_packers.formats import EXPORTED, Format, WrongGroup
from lowq_packers.scheme import fit_group

WRITTEN = {f.name: f.export for f in formats.FORMATS.values() if f.export}
GATHERED = ("embed_tokens", "wte", "word_embeddings")
TRANSPOSED = ("gpt2", "openai-gpt")  # families that store (K, N), which no other tool packs


def as_held(checkpoint: Checkpoint, fmt: Format) -> Checkpoint:
    """The checkpoint as the format's readers support it: perhaps without heads that predict further tokens, and with the vision
    tower or the embedding unpacked."""
    prefixes = () if WRITTEN[fmt.name].extra else extra_prefixes(checkpoint.config, checkpoint.source.headers)
    tensors = tuple(t for t in checkpoint.tensors if not prefixes or not t.name.startswith(prefixes))
    towers = {t for t in tensors if TOWERS.search(t.name)}
    if WRITTEN[fmt.name].towers(checkpoint.config) and any(t.scheme for t in tensors if t not in towers):
        dtype = next((t.dtype for t in tensors if t in towers and not t.scheme), "BF16")  # of its norms: the model's
        tensors = tuple(_unpacked(t, dtype) if t in towers and t.scheme else t for t in tensors)
    if not WRITTEN[fmt.name].embeddings:
        dtype = next((t.dtype for t in tensors if not t.scheme and t.dtype in FLOATS), "BF16")  # of its norms
        tensors = tuple(_unpacked(t, dtype) if t.scheme and t.name.endswith(GATHERED) else t for t in tensors)
    return replace(checkpoint, tensors=tensors)


def _unpacked(t: CheckpointTensor, dtype: str) -> CheckpointTensor:
    return CheckpointTensor(f"{t.name}.weight", t.shape, None, dtype, TensorHeader(t.shape, dtype).nbytes, packed=t)


def check(checkpoint: Checkpoint, fmt: Format) -> None:
    """Raise UnsupportedError, with the first weight and the number of others, unless `fmt` can hold every weight."""
    family = str(checkpoint.config.get("model_type"))
    if family in TRANSPOSED:
        raise UnsupportedError(f"{family} keeps its weights transposed, which no engine reads packed; export another model")
    if otherwise := WRITTEN[fmt.name].otherwise(checkpoint.config):
        raise UnsupportedError(f"cannot export to {fmt.title}: {otherwise}")
    problems: list[tuple[bool, str]] = []  # of each weight: whether another group helps, as it does some of them only
    for t in checkpoint.tensors:
        if t.scheme is None:
            continue
        reason = _with_a_group_that_fits(t, fmt)
        if ".experts." in t.name and not WRITTEN[fmt.name].experts and not fmt.stack(t.name, family):
            reason = f"lowq does not know how {fmt.title} holds the experts of {family}; nearest: --to compressed-tensors"
        if reason:
            problems.append((isinstance(reason, WrongGroup), f"{t.name} ({t.scheme}): {reason}"))
    if problems:
        more = f" ({len(problems)} such weights)" if len(problems) > 1 else ""
        raise UnsupportedError(f"cannot export {min(problems, key=lambda p: p[0])[1]}{more}")
    stacks(checkpoint, fmt)


def _with_a_group_that_fits(t: CheckpointTensor, fmt: Format) -> str | None:
    """`Format.why_not`; where `quantize` cannot take the group that it names, another group, or how to keep the weight."""
    assert t.scheme is not None
    reason, K = fmt.why_not(t.scheme, *t.shape), t.shape[1]
    if t.scheme.table or not isinstance(reason, WrongGroup):
        return reason
    for group in (reason.group, 32):
        chosen = group if K % group == 0 else fit_group(K, group) or K  # as `quantize` does
        if not fmt.why_not(replace(t.scheme, group_size=chosen), *t.shape):
            return WrongGroup(reason.fact, group)
    tower = TOWERS.search(t.name) and not PROJECTORS.search(t.name)
    keep = "--vision keep" if tower else f"--override '{t.name}=keep'"
    return f"{reason.fact}, and no group that {fmt.title} holds divides K={K}; nearest: {keep}"


def stacks(checkpoint: Checkpoint, fmt: Format) -> dict[str, list[CheckpointTensor]]:
    """Name of each stack that `fmt` makes of experts -> the experts' matrices, in order.

    Raises UnsupportedError unless a stack has all its experts and they share a scheme.
    """
    family, members = str(checkpoint.config.get("model_type")), dict[str, dict[int, CheckpointTensor]]()
    for t in checkpoint.tensors:
        if place := fmt.stack(t.name, family) if t.scheme else None:
            members.setdefault(place[0], {})[place[1]] = t
    for name, experts in members.items():
        schemes = {str(t.scheme) for t in experts.values()}
        if len(schemes) > 1 or sorted(experts) != list(range(len(experts))):
            wrong = f"of {' and '.join(sorted(schemes))}" if len(schemes) > 1 else "with gaps between them"
            raise UnsupportedError(
                f"cannot export {name}: {fmt.title} stacks {len(experts)} experts, here {wrong}; give all one scheme"
            )
    dense = [t.name for t in checkpoint.tensors if not t.scheme and fmt.stack(t.name.removesuffix(".weight"), family)]
    if members and dense:
        raise UnsupportedError(f"cannot export {dense[0]}: {fmt.title} reads all experts packed or none, and this one is not")
    return {name: [experts[e] for e in sorted(experts)] for name, experts in members.items()}


Modules = dict[str, tuple[str, list[CheckpointTensor]]]


def described(checkpoint: Checkpoint, fmt: Format) -> tuple[Modules, dict[str, Any]]:
    """First matrix -> name and matrices of each packed module of an export, and the config.json fields for them.

    Raises UnsupportedError for schemes that the format's config cannot distinguish.
    """
    if fmt.config is None:
        return {}, {}
    dense = [t.name for t in checkpoint.tensors if not t.scheme and t.name.endswith(".weight") and len(t.shape) == 2]
    dense_names = [name.removesuffix(".weight") for name in dense]
    stacked = stacks(checkpoint, fmt)
    inside = {t.name for experts in stacked.values() for t in experts}
    modules = {t.name: (t.name, [t]) for t in checkpoint.tensors if t.scheme and t.name not in inside}
    modules |= {experts[0].name: (name, experts) for name, experts in stacked.items()}  # at its first expert's position
    return modules, fmt.config(
        {name: checkpoint.schemes[first] for first, (name, _) in modules.items()}, checkpoint.shapes, dense_names
    )


def check_schemes(checkpoint: Checkpoint, fmt: Format) -> Checkpoint:
    """`as_held`, after the checks of `export` that need only names, shapes, schemes and the config; raises its errors."""
    checkpoint = as_held(checkpoint, fmt)
    check(checkpoint, fmt)
    described(checkpoint, fmt)
    if WRITTEN[fmt.name].one_file:
        from lowq_cli.interop.gguf_export import prepared

        prepared(checkpoint, checkpoint.folder.name)
    return checkpoint


def check_plan(plan: Plan, source: Source, to: str) -> None:
    """Raise UnsupportedError if `export` would refuse, by names, shapes, schemes and config, what a plan makes of `source`.

    Files that are not in the source's folder are not missed: a tokenizer, for example, can come out of a GGUF file.
    """
    if source.folder is None:
        return
    tensors = (CheckpointTensor(i.name, i.shape, i.scheme, i.outputs[-1][1].dtype, i.nbytes, i.layout) for i in plan.items)
    with suppress(NotFoundError):
        check_schemes(Checkpoint(source, tuple(tensors), {}), formats.get(to))


def check_all(checkpoint: Checkpoint, fmt: Format, rounding: bool = False) -> None:
    """Raise the errors of `export` before anything is written; scales and zeros are read only if they matter."""
    for t in check_schemes(checkpoint, fmt).tensors:
        if t.scheme and fmt.check_values:
            try:
                fmt.check_values(checkpoint.read_companions(t), t.name, rounding)
            except SchemeError as e:
                raise UnsupportedError(f"cannot export {e}") from None


def refusal(checkpoint: Checkpoint, to: str, rounding: bool = False) -> str | None:
    """The reason why `export` refuses to write a checkpoint in the format `to`; None if it does not."""
    try:
        check_all(checkpoint, formats.get(to), rounding)
    except LowqError as e:
        return str(e)
    return None


def commands(checkpoint: Checkpoint) -> dict[str, str]:
    """Format -> options of `lowq export` ("--to mlx --round"), for the formats that can hold a checkpoint.

    The checks are those of `check_all`, but read the scales and zeros of a matrix only once for all formats.
    """
    ways: dict[tuple[str, bool], set[str]] = {}  # (format, rounding) -> the matrices whose values have to be checked
    for to in EXPORTED:
        fmt = formats.get(to)
        with suppress(LowqError):
            packed = {t.name for t in check_schemes(checkpoint, fmt).tensors if t.scheme}
            ways |= {(to, r): packed for r in (False, True)} if fmt.check_values else {(to, False): set()}
    for t in checkpoint.tensors:
        if asking := [way for way, names in ways.items() if t.name in names]:
            for way in _refusing(checkpoint, t, asking):
                del ways[way]
    least: dict[str, bool] = {}
    for to, rounding in ways:  # for each format, the way without rounding comes first
        least.setdefault(to, rounding)
    return {to: f"--to {to}{' --round' if rounding else ''}" for to, rounding in least.items()}


def _refusing(checkpoint: Checkpoint, t: CheckpointTensor, ways: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """The ways, (format, rounding), that cannot hold the values of a matrix."""
    try:
        companions = checkpoint.read_companions(t)
    except LowqError:
        return ways
    refusing = []
    for to, rounding in ways:
        values_of = formats.get(to).check_values
        assert values_of is not None
        try:
            values_of(companions, t.name, rounding)
        except LowqError:
            refusing.append((to, rounding))
    return refusing


def exportable(checkpoint: Checkpoint) -> list[str]:
    """The formats that `export` can write a checkpoint in without changing it."""
    return [to for to, command in commands(checkpoint).items() if "--round" not in command]


def reachable(checkpoint: Checkpoint, to: str) -> bool:
    """Whether the same model could be exported to `to` after quantizing with the defaults of `quantize --export`."""
    target, fmt = next((t for t in targets.TARGETS.values() if t.export == to), None), formats.get(to)
    if target is None:
        return False

    def expected(t: CheckpointTensor) -> CheckpointTensor:
        if t.scheme is None:
            return t
        if t.name.endswith((*GATHERED, "lm_head")):
            return _unpacked(t, "BF16")
        groups = [t.shape[1] if g == "channel" else int(g) for g in target.groups]
        schemes = (target.scheme(target.bits[0], g) for g in groups if t.shape[1] % g == 0)
        return replace(t, scheme=next((s for s in schemes if not fmt.why_not(s, *t.shape)), t.scheme))

    like = replace(checkpoint, tensors=tuple(map(expected, checkpoint.tensors)))
    try:
        check_schemes(like, fmt)
    except LowqError:
        return False
    return True


def first_that_holds(checkpoint: Checkpoint) -> str:
    """The first format that holds every weight unchanged."""
    fitting = next((to for to in EXPORTED if refusal(checkpoint, to) is None), None)
    if fitting is None:
        raise UnsupportedError(
            f"no format holds {checkpoint.folder} as it is (lowq and transformers run it; --to NAME says why)"
        )
    return fitting


@contextmanager
def way_out(checkpoint: Checkpoint, to: str | None) -> Iterator[None]:
    """Add to a refusal inside the block the command that quantizes the same model for the format `to`, if it is known."""
    try:
        yield
    except UnsupportedError as e:
        source, bits = source_of(checkpoint.folder, checkpoint.report), checkpoint.report.get("recipe", {}).get("bits")
        form = to or next((name for name in EXPORTED if reachable(checkpoint, name)), EXPORTED[0])
        if source is None or not reachable(checkpoint, form):
            raise
        fits = any(t.export == form and bits in t.bits for t in targets.TARGETS.values())
        width = f" --bits {bits}" if fits and bits != 4 else ""
        raise UnsupportedError(f"{e}; from the original: lowq quantize {as_argument(source)}{width} --export {form}") from None
