"""The tensors of a described model (name, shape and kind), as in transformers' modules and as in files.

There are three forms. "modules": names in transformers' module tree, experts in stacks. "files": as published, experts
separate unless the publisher stacks them. "split": as "files", but every expert separate; lowq writes checkpoints so.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from lowq_packers.arch import parts
from lowq_packers.arch.common import GATED
from lowq_packers.arch.parts import Linear, Model, Norm

Form = Literal["modules", "files", "split"]


@dataclass(frozen=True)
class Tensor:
    """kind: attention, mlp, expert, router, norm, embedding, head, recurrent (a state's vectors and convolutions) or other."""

    shape: tuple[int, ...]
    kind: str


Named = Iterator[tuple[str, Tensor]]


def tensors(model: Model, form: Form, place: tuple[str, str] | None = None) -> dict[str, Tensor]:
    """Every tensor by its full name.

    place: (prefix, head) that the names have, where not transformers': one of `model.files`.
    """
    prefix, head = place or (model.prefix, model.head)
    inside = dict(part_tensors(model.layers, form, "other"))
    inside |= {f"{model.embed}.weight": Tensor((model.vocab, model.hidden), "embedding")}
    inside |= dict(part_tensors((model.norm, model.embed_norm, model.tokens), form, "other"))
    if form != "modules":
        inside = {renamed(model, name): t for name, t in inside.items()}
    by_name = {prefix + name: t for name, t in inside.items()}
    if not model.tied:
        by_name[f"{head}.weight"] = Tensor((model.vocab, model.hidden), "head")
    if model.head_bias:
        by_name[f"{head}.bias"] = Tensor((model.vocab,), "head")
    return by_name


def renamed(model: Model, name: str) -> str:
    """The name in files of a tensor of modules; experts' names are already those of files."""
    pair = next((pair for pair in model.renamed if pair[0] in name), None)
    return name.replace(*pair) if pair else name


def part_tensors(part: Any, form: Form, kind: str = "other") -> Named:
    """The tensors of one part and of its inner parts. kind: of its linear layers."""
    match part:
        case tuple():
            for one in part:
                yield from part_tensors(one, form, kind)
        case Linear():
            for name, rows in zip(part.parts, part.rows, strict=True):
                yield f"{name}.weight", Tensor((rows, part.columns), kind)
                if part.bias:
                    yield f"{name}.bias", Tensor((rows,), kind)
        case Norm() if part.name:
            for leaf in ("weight", "bias")[: 1 + part.bias]:
                yield f"{part.name}.{leaf}", Tensor(part.shape or (part.size,), "norm")
        case parts.Beside():
            yield from part_tensors((part.embedding, part.hidden), form, kind)
        case parts.Merge():
            yield from part_tensors((part.beside, part.project), form, kind)
        case parts.Conv():
            yield f"{part.name}.weight", Tensor((part.channels, 1, part.width), "recurrent")
            if part.bias:
                yield f"{part.name}.bias", Tensor((part.channels,), "recurrent")
        case parts.Update():
            yield from part_tensors((part.beside, part.norm, part.post, part.mixers), form, kind)
            yield from _vectors("other", (part.after, 1))
        case parts.Branch():
            yield from part_tensors((part.norm, part.post, part.mixer), form, kind)
        case parts.Attention():
            yield from part_tensors((part.qkv, part.gate, part.o, part.q_norm, part.k_norm, part.v_norm), form, "attention")
            yield from _vectors("attention", (part.sinks, part.heads))
        case parts.LatentAttention():
            yield from part_tensors((part.down, part.q_norm, part.q_up, part.kv_norm, part.kv_up, part.o), form, "attention")
        case parts.GatedDelta():
            yield from part_tensors((part.inputs, part.conv, part.out, part.norm), form, "attention")
            yield from _vectors("recurrent", (part.a_log, part.v_heads), (part.dt_bias, part.v_heads))
        case parts.Mamba2():
            yield from part_tensors((part.inputs, part.conv, part.out, part.norm), form, "attention")
            yield from _vectors("recurrent", *((name, part.heads) for name in (part.a_log, part.dt_bias, part.d)))
        case parts.ShortConv():
            yield from part_tensors((part.inputs, part.conv, part.out), form, "attention")
        case parts.Mlp():
            yield from part_tensors((part.up, part.down), form, "mlp")
            if part.scalars:
                sizes = (1,), (1,), (), ()
                yield from _vectors("other", *((f"{part.scalars}.{n}", *s) for n, s in zip(parts.SCALARS, sizes, strict=True)))
        case parts.PerLayer():
            yield from part_tensors((part.gate, part.up), form, "mlp")
        case parts.Experts():
            yield from part_tensors((part.router, part.shared, part.latent), form, "mlp")
            yield from _vectors("router", (part.shared_gate and f"{part.shared_gate}.weight", 1, part.router.hidden))
            yield from _experts(part, form)
        case parts.Router():
            yield f"{part.name}.weight", Tensor((part.experts, part.hidden), "router")
            bias = (part.bias, *(part.bias_shape or (part.experts,)))
            biases = (f"{part.name}.bias" if part.logits_bias else "", part.experts)
            yield from _vectors("router", biases, bias, (part.scale, part.hidden), (part.each, part.experts))
        case parts.TokenTable():
            yield f"{part.embed}.weight", Tensor((part.vocab, part.layers * part.dims), "embedding")
            yield from part_tensors((part.project, part.norm), form, "other")


def _vectors(kind: str, *given: tuple[Any, ...]) -> Named:
    """Parameters by (name, *shape), those without a name left out."""
    for name, *shape in given:
        if name:
            yield name, Tensor(tuple(shape), kind)


def _experts(part: parts.Experts, form: Form) -> Named:
    """The matrices of experts: two stacks, or separate ones."""
    E, N, K, stacks = part.router.experts, part.inner, part.hidden, ("gate_up_proj" if part.gated else "up_proj", "down_proj")
    if form == "modules" or (form == "files" and part.stacked):
        turned = part.transposed == "both" or (form == "files" and part.transposed == "files")
        names = stacks if form == "modules" else part.leaves
        sizes = ((2 * N if part.gated else N, K), (K, N))
        for name, (rows, columns) in zip(names, sizes, strict=True):
            path = f"{part.module if form == 'modules' else part.files}.{name}"
            yield path, Tensor((E, columns, rows) if turned else (E, rows, columns), "expert")
            if part.bias:
                yield f"{path}_bias", Tensor((E, rows), "expert")
        return
    path, leaves = (part.module, GATED if part.gated else GATED[1:]) if part.stacked else (part.files, part.leaves)
    for e in range(E):
        for leaf in leaves:
            rows, columns = (K, N) if leaf == leaves[-1] else (N, K)
            yield f"{path}.{e}.{leaf}.weight", Tensor((rows, columns), "expert")
            if part.bias:
                yield f"{path}.{e}.{leaf}.bias", Tensor((rows,), "expert")
