"""Make a Plan from a source and a recipe: the scheme of each matrix, the reason for it, and its output file.

This file reads the config and the headers, but no tensor. Every mistake in a recipe is reported here, before a weight is read.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod

from lowq_cli import quantizers
from lowq_cli.files import packed_tensors
from lowq_cli.files.family_tensors import extra_roles, known_roles
from lowq_cli.files.quant_config import Stored
from lowq_cli.files.roles import TIED, Role
from lowq_cli.files.safetensors_io import ST_NAMES, TORCH_NAMES, TensorHeader, build_header
from lowq_cli.files.source import WHOLE, Source, shard_name
from lowq_cli.plan.candidates import WEIGHT_DTYPES, Candidate, candidates_of, refuse_empty, refuse_quantized, roles, wordless
from lowq_cli.plan.plan import Item, Plan, Shard
from lowq_cli.plan.recipe import Recipe
from lowq_cli.plan.values import Group, Keep, matches
from lowq_packers.errors import DamagedError, SchemeError, UnsupportedError, UsageError
from lowq_packers.heads import is_head
from lowq_packers.layouts import DISK, stored
from lowq_packers.scheme import E4M3, GROUP_STEP, Scheme, fit_group

SHARD_SIZE = 2 << 30
LOW_COVERAGE = 0.6
ASKED_FOR_BY_NAME = ("head", "embedding", "router", "norm", "vision", "projector", "audio")  # `bits` does not quantize these
EXTRA = "heads that predict further tokens are quantized like the layers, without a text"


@dataclass(frozen=True)
class Request:
    """The recipe's settings for one candidate: bits or "keep", a group (None: the width's default), and whether set by name."""

    bits: int | Keep
    group: Group | None = None
    by_name: bool = False


@dataclass(frozen=True)
class Decision:
    """The scheme of one candidate (None: kept) and the plan's note: why it is kept, or which setting was changed."""

    scheme: Scheme | None
    note: str = ""


def make_plan(source: Source, recipe: Recipe, shard_size: int = SHARD_SIZE) -> Plan:
    """What `recipe` does to `source`. Reads no weights.

    Raises:
        UnsupportedError: already quantized in another format; nothing to quantize; a family transformers does not have.
        DamagedError: files at odds with the config; empty tensors.
        UsageError: already a lowq checkpoint; a pattern that fits nothing. SchemeError: an override that cannot hold.
    """
    refuse_quantized(source)
    role_of = roles(source)
    refuse_empty(source, role_of)
    notes = [*source.notes, *wordless(source)]
    candidates = candidates_of(source, role_of)
    _check_parts(recipe, {c.kind for c in candidates}, source)
    requests = _requests(recipe, candidates)
    table = _tied_table(source, candidates) if recipe.embedding == "auto" and recipe.tied != "keep" else None
    if table and not requests[table.name].by_name:
        requests[table.name] = Request(recipe.tied)
    head, stored_head = _tied_head(source, role_of, recipe, requests, candidates)
    if head and (decision := _decide(head, recipe, Request(recipe.head))).scheme is None:
        notes.append(f"the output head stays the embedding: {decision.note}")
        head = stored_head = None
    if head:
        candidates.append(head)
        requests[head.name] = Request(recipe.head)
        notes.append("the output head shared the embedding; it is written separately and no longer tied")
    decisions = {c.name: _decide(c, recipe, requests[c.name]) for c in candidates}
    _check_targets(candidates, decisions)
    items = _items(source, role_of, candidates, decisions, recipe, skip=stored_head)
    if not any(i.scheme for i in items):
        raise UnsupportedError(f"nothing to quantize in {source.name}{_why_nothing(items)}")
    notes += _merged(i for i in items if i.note and (i.scheme or i.note.startswith("K=")))
    untie = any(i.kind == "head" and i.scheme for i in items)
    shards = assign(items, shard_size)
    plan = Plan(source.name, recipe, tuple(items), shards, source.nbytes, untie, tuple(notes), ())
    return replace(plan, warnings=tuple(_warnings(plan)))


def free_candidates(source: Source, recipe: Recipe) -> list[Candidate]:
    """The matrices that no exception of `recipe` names: linears, experts, head, embedding. Raises the errors of `make_plan`."""
    refuse_quantized(source)
    candidates = candidates_of(source, roles(source))
    requests = _requests(recipe, candidates)
    kinds = ("attention", "mlp", "expert", *(("head", "embedding") if recipe.lm_head == "auto" else ()))
    return [c for c in candidates if c.kind in kinds and not c.extra and not requests[c.name].by_name]


def scale_dtype(source: Source, recipe: Recipe) -> str:
    """The safetensors name of the dtype of scales and zeros, one for the whole checkpoint.

    It is the recipe's; else the config's if that has 16 bits (loaders cast to it); else that of most weight bytes.
    """
    if recipe.dtype != "source":
        return ST_NAMES[recipe.dtype]
    named = str(source.config.get("dtype") or source.config.get("torch_dtype")).removeprefix("torch.")
    if named in ("float16", "bfloat16"):
        return ST_NAMES[named]
    totals: Counter[str] = Counter()
    for h in source.headers.values():
        if h.dtype in WEIGHT_DTYPES:
            totals[h.dtype] += h.nbytes
    most = totals.most_common(1)[0][0] if totals else "F32"
    return "F32" if most == "F64" else most


def _requests(recipe: Recipe, candidates: list[Candidate]) -> dict[str, Request]:
    """The settings of each candidate: its class's default, then lm_head, then the overrides in their order, then skip."""
    requests = {}
    owners: dict[str, list[str]] = defaultdict(list)  # a pattern may name the matrix, or the source tensor that holds it
    for c in candidates:
        default: int | Keep = "keep" if c.kind in ASKED_FOR_BY_NAME else recipe.bits
        table = "keep" if recipe.embedding == "auto" else recipe.embedding
        of_kind: dict[str, int | Keep] = {"head": recipe.head, "embedding": table, "vision": recipe.vision}
        requests[c.name] = Request(of_kind.get(c.kind, default))
        for name in dict.fromkeys((c.name, c.source.removesuffix(".weight"))):
            owners[name].append(c.name)
    patterns = [(o.pattern, Request(o.bits, o.group, by_name=True)) for o in recipe.overrides]
    for pattern, request in [*patterns, *((p, Request("keep", by_name=True)) for p in recipe.skip)]:
        for name in matches(pattern, owners):
            requests |= dict.fromkeys(owners[name], request)
    return requests


def _check_parts(recipe: Recipe, kinds: Collection[str], source: Source) -> None:
    """Raise UsageError if the recipe quantizes a part of the model by its name, and the model has none."""
    for name, part in (("embedding", "input embedding"), ("vision", "vision tower")):
        bits = getattr(recipe, name)
        if bits not in ("keep", "auto") and name not in kinds:
            raise UsageError(f"{name} {bits}: {source.name} has no {part} to quantize; leave --{name} out")


def _decide(c: Candidate, recipe: Recipe, request: Request) -> Decision:
    """The scheme of one candidate. Raises SchemeError for an override that does not fit the matrix."""
    if request.bits == "keep":
        by_flag = () if recipe.in_blocks else ("head", "embedding", "vision")
        hint = {k: f"--{k.replace('head', 'lm-head')} BITS quantizes it" for k in by_flag}.get(c.kind)
        return Decision(None, "the recipe keeps it" if request.by_name else f"{c.kind}; {hint}" if hint else c.kind)
    if recipe.in_blocks:
        why = "other" if c.kind == "other" else "stored stacked, transposed or fused" if c.cut != WHOLE else ""
        return Decision(None if why else recipe.in_blocks, why)
    K, kind = c.shape[1], "" if request.by_name else c.kind
    size = recipe.group_for(request.bits) if request.group is None else request.group
    group = K if size == "channel" else size
    if group == K or K % group == 0:
        return Decision(recipe.scheme(request.bits, group, kind))
    fitting = None if recipe.fixed_group(request.bits) else fit_group(K, group)
    if request.group is not None or (request.by_name and fitting is None):
        raise SchemeError(
            f"override on {c.name}: group {group} does not divide K={K}; use {request.bits}:{fitting or 'channel'}"
        )
    if fitting is None and recipe.fixed_group(request.bits):
        return Decision(None, f"K={K} is not a multiple of {group}, the group size of {recipe.format}")
    if fitting is None:
        return Decision(None, f"K={K} is not a multiple of {GROUP_STEP}, so no group divides it (--group channel takes it)")
    return Decision(recipe.scheme(request.bits, fitting, kind), f"group {fitting}, because {group} does not divide K={K}")


def _check_targets(candidates: list[Candidate], decisions: Mapping[str, Decision]) -> None:
    """Raise SchemeError if matrices that the model holds in one parameter get different schemes."""
    first: dict[str, Candidate] = {}
    for c in candidates:
        other = first.setdefault(c.target, c)
        if decisions[c.name].scheme != decisions[other.name].scheme:
            a, b = (str(decisions[x.name].scheme or "kept") for x in (other, c))
            raise SchemeError(
                f"{other.name} ({a}) and {c.name} ({b}) are one parameter of the model; give both the same bits and group"
            )


def _tied_table(source: Source, candidates: list[Candidate]) -> Candidate | None:
    """The embedding that is also the output head, if there is one and products with it can be packed."""
    has_bias = any(name.endswith("lm_head.bias") for name in source.headers)  # a packed tied head takes none
    if has_bias or any(c.kind == "head" for c in candidates) or _why_not_head(source):
        return None
    return next((c for c in candidates if c.kind == "embedding"), None)


def _tied_head(
    source: Source,
    tensor_roles: Mapping[str, Role],
    recipe: Recipe,
    requests: Mapping[str, Request],
    candidates: list[Candidate],
) -> tuple[Candidate | None, str | None]:
    """The separate head that `lm_head` requests for a model with a tied head, and the name of its stored copy to leave out."""
    if recipe.in_blocks or recipe.lm_head in ("keep", "auto") or any(c.kind == "head" for c in candidates):
        return None, None
    stored = next((n for n, r in tensor_roles.items() if r.kind == "head" and n.endswith("lm_head.weight")), None)
    why = _why_not_head(source) if stored is None or tensor_roles[stored].reason == TIED else tensor_roles[stored].reason
    if why:
        raise UsageError(f"lm_head: the output head stays as it is, because {why}; leave --lm-head out")
    table = next((c for c in candidates if c.kind == "embedding"), None)
    if table is None:
        raise UsageError("lm_head: this model has no output head to quantize; leave --lm-head out")
    if requests[table.name].bits != "keep":
        raise UsageError("lm_head: the embedding, which is the head too, is quantized already; leave --lm-head out")
    return replace(table, name="lm_head", kind="head", target="lm_head.weight"), stored


def _why_not_head(source: Source) -> str | None:
    """Why an output head made from the embedding cannot be packed, or None."""
    if is_head(source.config):
        return "a draft head without one uses the model's"
    extra = extra_roles(source.config, source.headers)
    if known_roles(source.config, {n: h for n, h in source.headers.items() if n not in extra}) is not None:
        return None
    from lowq_cli.hf import structure

    return structure.why_not_head(source.config)


def _items(
    source: Source,
    tensor_roles: Mapping[str, Role],
    candidates: list[Candidate],
    decisions: Mapping[str, Decision],
    recipe: Recipe,
    skip: str | None,
) -> list[Item]:
    """The items of all matrices and kept tensors in the order of the source's bytes; a head made from the embedding is last."""
    mine: dict[str, list[Candidate]] = defaultdict(list)
    for c in candidates:
        mine[c.source].append(c)
    scales = scale_dtype(source, recipe)
    shared = {target for target, n in Counter(c.target for c in candidates).items() if n > 1}
    items, others = [], []
    for name, header in source.headers.items():
        matrices = [c for c in mine[name] if c.name != "lm_head" or c.source.endswith("lm_head.weight")]
        others += [c for c in mine[name] if c not in matrices]
        if matrices and decisions[matrices[0].name].scheme:
            items += [_quantized(c, decisions[c.name], recipe, scales, shared) for c in matrices]
        elif name != skip:
            why = decisions[matrices[0].name].note if matrices else tensor_roles[name].reason or "not a linear weight"
            items.append(_kept(name, header, tensor_roles[name].kind, why, recipe))
    return items + [_quantized(c, decisions[c.name], recipe, scales, shared) for c in others]


def _quantized(c: Candidate, decision: Decision, recipe: Recipe, scales: str, shared: Collection[str]) -> Item:
    """The item of a matrix that gets a scheme. shared: model parameters that consist of several matrices."""
    scheme = decision.scheme
    assert scheme is not None, c.name  # _check_targets: the parts of one tensor have one scheme
    layout, why = _layout(c, scheme, recipe, shared)
    tensors = packed_tensors.tensors(Stored(scheme, layout), *c.shape).items()
    outputs = [(c.name + n, TensorHeader(shape, scales if scales in dtypes else dtypes[0])) for n, (shape, dtypes) in tensors]
    method = None if recipe.in_blocks else recipe.method_for(scheme.bits, scheme.group_size, c.kind)
    if method and c.extra and quantizers.needs_text(method):  # calibration runs no extra head, so it cannot record its inputs
        method = quantizers.default_method(scheme.bits, scheme.group_size, scheme.zero)
    if method:
        quantizers.check_scheme(method, scheme)
    note = "; ".join(filter(None, (EXTRA if c.extra else "", decision.note, why)))
    return Item(c.name, c.source, c.kind, c.shape, c.source_dtype, scheme, method, note, c.cut, tuple(outputs), layout)


def _layout(c: Candidate, scheme: Scheme, recipe: Recipe, shared: Collection[str]) -> tuple[str, str]:
    """The layout to store a matrix in, and why it differs from the recipe's."""
    if recipe.in_blocks:
        return E4M3, ""
    layout = DISK if recipe.layout == "auto" else recipe.layout
    step = stored(layout).row_step
    if layout == DISK:
        return layout, ""
    if c.kind == "expert" or c.target in shared or (c.kind == "embedding" and stored(layout).rows is None):
        return DISK, f"stored in {DISK}: {layout} is only for separate linear layers"
    why = stored(layout).why_not(scheme, *c.shape) or (f"N={c.shape[0]} is not a multiple of {step}" * bool(c.shape[0] % step))
    return (DISK, f"stored in {DISK}: {why}") if why else (layout, "")


def _kept(name: str, header: TensorHeader, kind: str, why: str, recipe: Recipe) -> Item:
    """The item of a copied tensor, cast to the recipe's dtype if that is set (except kind "other": buffers)."""
    cast = recipe.dtype != "source" and kind != "other" and header.dtype in WEIGHT_DTYPES
    dtype = ST_NAMES[recipe.dtype] if cast else header.dtype
    assert dtype in TORCH_NAMES or not cast
    return Item(
        name, name, kind, header.shape, header.dtype, None, None, why, WHOLE, ((name, TensorHeader(header.shape, dtype)),)
    )


def assign(items: list[Item], shard_size: int) -> tuple[Shard, ...]:
    """Distribute the items, in order, over files of at most `shard_size` data bytes; a larger item gets a file for itself."""
    if shard_size < 1:
        raise UsageError(f"shard size {shard_size} must be positive")
    names = Counter(name for i in items for name, _ in i.outputs)
    if (twice := names.most_common(1)[0])[1] > 1:
        raise DamagedError(f"two tensors would both be written as {twice[0]}; fetch the model again")
    groups: list[list[Item]] = [[]]
    used = 0
    for item in items:
        if groups[-1] and used + item.nbytes > shard_size:
            groups.append([])
            used = 0
        groups[-1].append(item)
        used += item.nbytes
    shards = []
    for i, group in enumerate(groups, 1):
        name = shard_name(i, len(groups))
        header, placed = build_header(output for item in group for output in item.outputs)
        shards.append(Shard(name, header, placed, len(header) + sum(h.nbytes for h in placed.values()), tuple(group)))
    return tuple(shards)


def _why_nothing(items: Iterable[Item]) -> str:
    """Why the linear weights are kept: the most frequent reason, and the name of one such weight."""
    by_reason: dict[str, list[Item]] = defaultdict(list)
    for i in items:
        if i.kind in ("attention", "mlp", "expert") and len(i.shape) > 1:
            by_reason[i.note].append(i)
    if not by_reason:
        return ": it has no linear weights"
    note, some = max(by_reason.items(), key=lambda entry: sum(prod(i.shape) for i in entry[1]))
    return f": {some[0].kept_name} is kept{f' (and {len(some) - 1} more)' if len(some) > 1 else ''}: {note}"


def _merged(items: Iterable[Item]) -> list[str]:
    """The notes of the items, each once, with the name of the first item and the number of further ones."""
    by_note: dict[str, list[str]] = defaultdict(list)
    for i in items:
        by_note[i.note].append(i.name)
    return [
        f"{note}: {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "") for note, names in by_note.items()
    ]


def _warnings(plan: Plan) -> list[str]:
    if plan.coverage >= LOW_COVERAGE:
        return []
    rest = max(plan.classes, key=lambda c: c.params - c.quantized_params)
    share = (rest.params - rest.quantized_params) / plan.params
    return [f"only {plan.coverage:.0%} of the weights are quantized; most of the rest is {rest.kind} ({share:.0%})"]
