"""The weights that the format fp8 quantizes: every linear weight of the decoder, and the output head if requested."""

from collections.abc import Mapping

from lowq_cli.files.packed_tensors import tensors
from lowq_cli.files.quant_config import Stored
from lowq_cli.files.roles import Role
from lowq_cli.files.safetensors_io import TensorHeader
from lowq_cli.files.source import WHOLE, Source
from lowq_cli.plan.plan import Item
from lowq_cli.plan.recipe import Recipe
from lowq_cli.plan.values import matches
from lowq_packers.scheme import BLOCKS, E4M3, Scheme

KEPT = ("norm", "embedding", "router", "vision", "projector", "audio", "other")


def fp8_items(source: Source, roles: Mapping[str, Role], recipe: Recipe) -> list[Item]:
    """The items of all tensors of `source`, in its order. Stacked experts and (K, N) matrices are kept (not in the layout).

    Raises UsageError for a pattern that matches no weight.
    """
    reasons = {name: why for name in source.headers if (why := _why_kept(name, source, roles[name], recipe))}
    stems = [n.removesuffix(".weight") for n in source.headers if n not in reasons]
    for pattern in recipe.skip:
        reasons |= {f"{stem}.weight": "the recipe keeps it" for stem in matches(pattern, stems)}
    return [_item(name, header, roles[name].kind, recipe.block, reasons.get(name)) for name, header in source.headers.items()]


def _why_kept(name: str, source: Source, role: Role, recipe: Recipe) -> str:
    if role.kind in KEPT or (role.kind == "head" and recipe.lm_head in ("keep", "auto")):
        return role.kind
    if not name.endswith(".weight") or len(source.headers[name].shape) != 2 or len(role.parts) != 1:
        return role.reason or "stored stacked or fused"
    return (role.reason or "stored transposed or fused") if role.parts[0].cut != WHOLE else ""


def _item(name: str, header: TensorHeader, kind: str, block: str, kept: str | None) -> Item:
    if kept is not None:
        same = ((name, TensorHeader(header.shape, header.dtype)),)
        return Item(name, name, kind, header.shape, header.dtype, None, None, kept, WHOLE, same)
    stem, how = name.removesuffix(".weight"), Stored(Scheme.in_blocks(BLOCKS[block]), E4M3)
    outputs = ((stem + n, TensorHeader(s, dtypes[0])) for n, (s, dtypes) in tensors(how, *header.shape).items())
    return Item(stem, name, kind, header.shape, header.dtype, how.scheme, None, "", WHOLE, tuple(outputs), how.layout)
