"""`quantize --bpw 3.2` or `--size 4GB`: the recipe that spends the bits where they matter most.

Matrices that engines merge into one weight form a group and share a scheme: q/k/v, gate/up, all experts of a layer.
Sensitivities (sensitivity.py) are measured once per model and kept in the user's cache; allocation.py then finds the best
choice for the budget. The result is an ordinary recipe with an override per group.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from math import gcd
from pathlib import Path
from typing import Any

import torch

from lowq_cli import console, drawing, quantizers
from lowq_cli.calibrate import sensitivity, texts
from lowq_cli.calibrate.allocation import Choice, allocate
from lowq_cli.files import memo
from lowq_cli.files.safetensors_io import ITEMSIZE, TORCH_NAMES
from lowq_cli.files.source import Source
from lowq_cli.plan.candidates import Candidate
from lowq_cli.plan.planner import free_candidates, make_plan, scale_dtype
from lowq_cli.plan.recipe import BUDGETS, Recipe
from lowq_cli.plan.values import Override
from lowq_packers.bitstream import words_per_row
from lowq_packers.errors import NotFoundError, UnsupportedError, UsageError
from lowq_packers.formats import FUSED
from lowq_packers.scheme import Scheme, fit_group

GROUPS = (32, 64, 128)
KEPT = "kept"
LABELLED = 48  # max. layers of a plot with a number in each cell; with more the cells are too narrow


@dataclass(frozen=True)
class Share:
    """One group in a mixed plan. scheme None: not quantized. error: the predicted KL divergence in nats per token."""

    group: str
    kind: str
    params: int
    nbytes: int
    scheme: Scheme | None
    error: float


@dataclass(frozen=True)
class Allocation:
    """A mixed plan. bpw: bits per weight of the groups in it.

    in_nats: True if `error` is a KL divergence; False (no text could be read) if it is a relative error of weights.
    """

    shares: tuple[Share, ...]
    in_nats: bool
    why_not_nats: str

    @property
    def bpw(self) -> float:
        """Bits per weight, scales and zeros included."""
        return 8 * sum(s.nbytes for s in self.shares) / sum(s.params for s in self.shares)

    @property
    def error(self) -> float:
        """The sum of all errors."""
        return sum(s.error for s in self.shares)

    @property
    def histogram(self) -> list[tuple[str, int, int]]:
        """(scheme, groups, weights), most bytes per weight first."""
        by_scheme: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for s in sorted(self.shares, key=lambda s: -s.nbytes / s.params):
            one = by_scheme[str(s.scheme or KEPT)]
            one[0], one[1] = one[0] + 1, one[1] + s.params
        return [(scheme, groups, params) for scheme, (groups, params) in by_scheme.items()]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        rows = [
            {"group": s.group, "kind": s.kind, "params": s.params, "bytes": s.nbytes, "scheme": str(s.scheme or KEPT),
             "error": s.error} for s in self.shares
        ]  # fmt: skip
        return {"bpw": self.bpw, "expected_kl": self.error if self.in_nats else None, "groups": rows}


@dataclass(frozen=True)
class Spread:
    """The groups that a budget is spread over, and the bytes and the error of every choice.

    plain: the recipe without its budget. groups: name -> matrices that share a scheme. choices: group name -> its choices.
    """

    source: Source
    plain: Recipe
    groups: dict[str, list[Candidate]]
    choices: dict[str, list[Choice]]
    why_not_nats: str

    @property
    def params(self) -> int:
        """The number of weights in all groups."""
        return sum(c.shape[0] * c.shape[1] for members in self.groups.values() for c in members)

    @property
    def least(self) -> int:
        """The bytes of all groups, each with its smallest choice."""
        return sum(min(c.nbytes for c in cs) for cs in self.choices.values())

    @property
    def most(self) -> int:
        """The bytes of all groups, each with its largest choice."""
        return sum(max(c.nbytes for c in cs) for cs in self.choices.values())

    def budget(self, size: int) -> int:
        """The bytes left for the groups in weight files of `size` bytes, up to a few bytes of numbers in headers."""
        plan = make_plan(self.source, self.plain)
        chosen_bytes = sum(i.nbytes for i in plan.items if _group_of(i.kept_name) in self.choices)
        return size - (plan.nbytes - chosen_bytes)

    def at(self, budget: int) -> tuple[Recipe, Allocation]:
        """The recipe with an override per group; all groups take at most `budget` bytes. Raises the errors of `allocate`."""
        chosen = allocate(self.choices, budget)
        overrides = [o for name, c in chosen.items() if c.what for o in _overrides(self.groups[name], c.what)]
        head = "keep" if self.plain.lm_head == "auto" else self.plain.lm_head
        resolved = replace(self.plain, lm_head=head, overrides=(*self.plain.overrides, *overrides))
        shares = []
        for name, c in chosen.items():
            members = self.groups[name]
            shares.append(Share(name, members[0].kind, _params(members), c.nbytes, c.what, c.error))
        return resolved, Allocation(tuple(shares), not self.why_not_nats, self.why_not_nats)


def resolve(
    source: Source, recipe: Recipe, text: texts.Text, device: torch.device, watch: sensitivity.Watch | None = None
) -> tuple[Recipe, Allocation]:
    """The recipe with an override for each group, within its --bpw or --size. Reads weights, writes no model.

    watch: called with the number of measured layers and of all layers.
    Raises UsageError for a budget below the smallest choices, and the errors of `make_plan`.
    """

    def budget_of(groups: Spread) -> int:
        return groups.budget(recipe.size) if recipe.size else int(groups.params * (recipe.bpw or 0) / 8)

    def check(groups: Spread) -> None:  # runs first, because measuring takes minutes
        if (budget := budget_of(groups)) < groups.least:
            raise UsageError(_too_small(recipe, groups.least, budget, groups.params))

    groups = spread(source, recipe, text, device, watch, check)
    budget = budget_of(groups)
    while True:
        try:
            resolved, mixed = groups.at(budget)
        except UsageError:
            raise UsageError(_too_small(recipe, groups.least, budget, groups.params)) from None
        if recipe.size is None or (over := make_plan(source, resolved).nbytes - recipe.size) <= 0:
            return resolved, mixed
        budget -= over  # headers vary by a few bytes with the numbers in them


def spread(
    source: Source,
    recipe: Recipe,
    text: texts.Text,
    device: torch.device,
    watch: sensitivity.Watch | None = None,
    check: Callable[[Spread], None] = lambda unmeasured: None,
) -> Spread:
    """The groups, with the bytes and the measured error of every choice. check: called before measuring, with all errors 0.

    Raises UsageError where no weight is left to choose for, and the errors of `make_plan`.
    """
    plain = recipe.uniform
    groups = grouped(free_candidates(source, plain))
    options = {name: _options(members, plain) for name, members in groups.items()}
    groups = {name: members for name, members in groups.items() if options[name]}
    if not groups:
        flag = next(name for name in BUDGETS if getattr(recipe, name) is not None).replace("_", "-")
        raise UsageError(f"--{flag} has no width to choose: --override and --skip fix every weight; leave some of them out")
    schemes = {c.name: options[name] for name, members in groups.items() for c in members}
    candidates = [c for members in groups.values() for c in members]
    unmeasured = {c.name: dict.fromkeys(schemes[c.name], 0.0) for c in candidates}  # bytes need no errors

    def of_errors(errors: sensitivity.Errors, why: str) -> Spread:
        choices = {name: _choices(members, options[name], errors, source, plain) for name, members in groups.items()}
        return Spread(source, plain, groups, choices, why)

    check(of_errors(unmeasured, ""))
    return of_errors(*_measured(source, plain, text, candidates, schemes, device, watch))


def _params(members: Sequence[Candidate]) -> int:
    return sum(c.shape[0] * c.shape[1] for c in members)


def grouped(candidates: Sequence[Candidate]) -> dict[str, list[Candidate]]:
    """Group name -> the matrices that must share a scheme."""
    groups: dict[str, list[Candidate]] = defaultdict(list)
    for c in candidates:
        groups[_group_of(c.name)].append(c)
    return dict(groups)


def _options(members: Sequence[Candidate], recipe: Recipe) -> list[Scheme]:
    """The schemes that all members can have."""
    K, t = gcd(*(c.shape[1] for c in members)), recipe.table

    def sizes(bits: int) -> set[int]:
        if recipe.group == "channel":
            return {K} if all(c.shape[1] == K for c in members) else set()
        group_sizes = [recipe.group] if recipe.group else t.groups if t and bits in t.bits else GROUPS
        return {g for size in group_sizes if (g := fit_group(K, int(size)))}

    return [recipe.scheme(bits, g) for bits in recipe.widths for g in sorted(sizes(bits))]


def _choices(
    members: Sequence[Candidate], schemes: Sequence[Scheme], errors: sensitivity.Errors, source: Source, recipe: Recipe
) -> list[Choice]:
    """The choices of a group; head and embedding may also stay unquantized."""
    choices = []
    for s in schemes:
        stored = (1 if s.zero == "none" else 2) * (ITEMSIZE[scale_dtype(source, recipe)] if s.scale == "float" else 1)
        rows = ((c.shape[0], 4 * words_per_row(c.shape[1], s.bits) + stored * s.groups(c.shape[1])) for c in members)
        size = sum(N * each + 4 * s.table_width for N, each in rows)
        choices.append(Choice(s, size, sum(errors[c.name][s] for c in members)))
    if members[0].kind in ("head", "embedding"):
        choices.append(Choice(None, sum(c.shape[0] * c.shape[1] * ITEMSIZE[c.source_dtype] for c in members), 0.0))
    return choices


def _group_of(name: str) -> str:
    stem, dot, leaf = re.sub(r"\.experts\.\d+\.", ".experts.", name).rpartition(".")
    return f"{stem}{dot}{FUSED.get(leaf, leaf)}"


def _too_small(recipe: Recipe, least: int, budget: int, params: int) -> str:
    if recipe.size is None:
        return (
            f"--bpw {recipe.bpw:g} is too little: the smallest widths take {8 * least / params:.3f}; --widths may allow smaller"
        )
    given, smallest = console.size(recipe.size), console.size(recipe.size - budget + least)
    if given == smallest:
        given, smallest = f"{recipe.size:,} B", f"{recipe.size - budget + least:,} B"
    return f"--size {given} is too little: the smallest widths take {smallest}; --widths may allow smaller"


def _overrides(members: Sequence[Candidate], scheme: Scheme) -> list[Override]:
    names = dict.fromkeys(re.sub(r"\.experts\.\d+\.", ".experts.*.", c.name) for c in members)
    return [Override(n, scheme.bits, scheme.group_size) for n in names]


def _measured(
    source: Source,
    recipe: Recipe,
    text: texts.Text,
    candidates: list[Candidate],
    schemes: dict[str, list[Scheme]],
    device: torch.device,
    watch: sensitivity.Watch | None,
) -> tuple[sensitivity.Errors, str]:
    """(errors, why they are not in nats): from the user's cache, or measured now and put into the cache."""
    dtype = getattr(torch, TORCH_NAMES[scale_dtype(source, recipe)])
    calibrated = recipe.method != "auto" and quantizers.carries_errors(recipe.method)
    facts = [calibrated, version("lowq"), source.identity, text.digest, str(dtype), device.type]
    facts += [sensitivity.TOKENS, sensitivity.ROWS, *([n, list(map(str, s))] for n, s in schemes.items())]
    file = f"sensitivity/{memo.key(facts)}.json"
    with suppress(ValueError, KeyError, TypeError, AttributeError):  # the cache has no entry, or a damaged one
        entry = memo.recall(file)
        named = {n: {str(s): s for s in some} for n, some in schemes.items()}
        read = {n: {named[n][k]: float(e) for k, e in row.items()} for n, row in entry["errors"].items()}
        return read, str(entry["why_not_nats"])

    def rounded(W: torch.Tensor, s: Scheme) -> torch.Tensor:
        return quantizers.get(quantizers.default_method(s.bits, s.group_size, s.zero))(W, s, dtype).dequantize()

    try:
        from lowq_cli.hf.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(source)
        walk = sensitivity.Sensitivities(source, candidates, schemes, rounded, device, calibrated)
        ids = text.windows(tokenizer, sensitivity.TOKENS, walk.blocks.model)
        errors, why = walk.measure(ids, texts.BATCH, watch), ""
    except (UnsupportedError, NotFoundError) as e:
        errors, why = sensitivity.from_weights(source, candidates, schemes, rounded, device), str(e)
    entry = {"why_not_nats": why, "errors": {n: {str(s): e for s, e in row.items()} for n, row in errors.items()}}
    memo.keep(file, entry)
    return errors, why


def plot(mixed: Allocation, path: Path) -> None:
    """Draw the bits per weight of every group: a column per layer, and one for head and embedding.

    Raises what `drawing.save` raises.
    """
    cells: dict[str, dict[int, float]] = defaultdict(dict)
    others = {}
    for s in mixed.shares:
        number = re.search(r"\.(\d+)\.(.*)", s.group)
        if number:
            cells[number[2]][int(number[1])] = 8 * s.nbytes / s.params
        else:
            others[s.group.rpartition(".")[2]] = 8 * s.nbytes / s.params
    layers = 1 + max((i for row in cells.values() for i in row), default=0)
    table = [[row.get(i, float("nan")) for i in range(layers)] for row in cells.values()]
    fig = drawing.figure(max(6.0, min(24.0, 2.5 + 0.45 * layers)), 1.6 + 0.4 * len(cells))
    axis = fig.subplots()
    low, high = (f([*(b for row in cells.values() for b in row.values()), *others.values()]) for f in (min, max))
    high = max(high, low + 0.5)
    image = axis.imshow(table, aspect="auto", cmap="viridis", vmin=low, vmax=high)
    for y, row in enumerate(table):
        for x, bits in enumerate(row if layers <= LABELLED else []):
            color = "white" if bits < (low + high) / 2 else "black"  # viridis is dark in its lower half
            axis.text(x, y, f"{bits:.3g}", ha="center", va="center", fontsize=8, color=color)
    axis.set_yticks(range(len(cells)), list(cells))
    axis.xaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]  # a MaxNLocator
    rest = ", ".join(f"{name} {bits:.3g}" for name, bits in others.items())
    axis.set(xlabel="layer", title=f"{mixed.bpw:.3f} bits per weight{f' ({rest})' if rest else ''}")
    fig.colorbar(image, label="bits per weight")
    fig.tight_layout()
    drawing.save(fig, path)
