"""How a rotation of the residual stream changes each tensor of a described model, and for which models it is not exact.

The stream x may be replaced by x R for an orthogonal R if only an RMSNorm lies between the stream and the matrices that read
it: an RMSNorm without weights commutes with R, and its weights move into those matrices. Scalar factors commute with R, too.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from lowq_packers.arch import parts as p
from lowq_packers.arch.parts import Linear, Model, Norm, Update


@dataclass(frozen=True)
class Turn:
    """The changes of one parameter, in this order; its last two axes are rows and columns unless it is `transposed`.

    becomes: the parameter is a norm's weight and is set to this number. norm: columns are multiplied by that norm's weights.
    columns, rows: the side that is the residual stream. values: (number of last rows, head size), which are rotated per head.
    mixed: the size of the heads whose values are the inputs of its columns.
    """

    becomes: float | None = None
    norm: Norm | None = None
    columns: bool = False
    rows: bool = False
    values: tuple[int, int] | None = None
    mixed: int = 0
    transposed: bool = False

    @property
    def by_rows(self) -> bool:
        """Whether each row of the result depends on one row of the source only."""
        return not (self.rows or self.values or self.transposed)


Turns = Iterator[tuple[str, Turn]]


def why_not(model: Model) -> str:
    """The reason why a rotation of the stream would change the model's function; "" if it would not."""
    updates = [update for layer in model.layers for update in layer]
    branches = [(u, m) for u in updates for m in u.mixers if isinstance(m, p.Branch)]
    norms = [n for n in (model.norm, *(u.norm for u in updates), *(b.norm for _, b in branches)) if n]
    experts = [part for part in p.walk(model.layers) if isinstance(part, p.Experts)]
    facts = {
        "its layer norm subtracts the mean, which does not commute with a rotation": any(n.kind == "layer" for n in norms),
        "its norms take the mean over parts of the stream": any(n.groups > 1 for n in norms),
        "its norms have biases": any(n.bias for n in norms),
        "it has norms behind attention and MLP, whose weights do not commute with a rotation": any(
            [*(u.post for u in updates), *(b.post for _, b in branches)]
        ),
        "it normalises values twice, and weights in between do not allow a rotation": any(
            u.norm and b.norm for u, b in branches
        ),
        "it normalises its embedding, with weights that do not commute with a rotation": model.embed_norm is not None,
        "its router normalises or scales its input": any(e.router.norm or e.router.scale for e in experts),
        "biases of its experts would have to be rotated, too": any(e.bias for e in experts),
    }
    return next((fact for fact, there in facts.items() if there), "")


def turns(model: Model) -> dict[str, Turn]:
    """The change of each parameter, by its full name in transformers' module tree; other parameters do not change."""
    inside = {f"{model.embed}.weight": Turn(columns=True), **dict(_freed(model.norm))}
    if model.tokens:
        inside |= dict(_reads(model.tokens.project, None))
    shared = {part.shares for part in p.walk(model.layers) if isinstance(part, p.Attention)}
    for i, layer in enumerate(model.layers):
        for update in layer:
            inside |= dict(_update(update, i in shared))
    return {model.prefix + name: turn for name, turn in inside.items()} | {
        f"{model.head}.weight": Turn(norm=model.norm, columns=True)
    }


def _freed(norm: Norm | None) -> Turns:
    """The turn of a norm whose weights move into the matrices after it."""
    if norm and norm.name:
        yield f"{norm.name}.weight", Turn(becomes=0.0 if norm.add_one else 1.0)


def _reads(part: Linear, norm: Norm | None, values: tuple[int, int] | None = None) -> Turns:
    """The turns of a linear that reads the normed stream. values: `Turn.values` of its last part."""
    norm = norm if norm and norm.name else None
    for name in part.parts:
        of_part = values if name == part.parts[-1] else None
        yield f"{name}.weight", Turn(norm=norm, columns=True, values=of_part)
        if part.bias and of_part:
            yield f"{name}.bias", Turn(values=of_part)


def _writes(part: Linear, mixed: int = 0) -> Turns:
    """The turns of a linear whose output is added to the stream."""
    for name in part.parts:
        yield f"{name}.weight", Turn(rows=True, mixed=mixed)
        if part.bias:
            yield f"{name}.bias", Turn(rows=True)


def _update(update: Update, shared: bool) -> Turns:
    """The turns of one update of the stream. shared: other layers attend to the keys and values of this layer."""
    yield from _freed(update.norm)
    for mixer in update.mixers:
        if isinstance(mixer, p.Branch):
            yield from _freed(mixer.norm)
            yield from _mixer(mixer.mixer, update.norm or mixer.norm, shared)
        else:
            yield from _mixer(mixer, update.norm, shared)


def _mixer(part: p.Mixer, norm: Norm | None, shared: bool) -> Turns:
    match part:
        case p.Attention():
            odd = part.gated or part.gate or part.v_is_k or part.v_norm or part.shares is not None or shared
            odd = odd or part.order != "parts"
            if part.gate is not None:
                yield from _reads(part.gate, norm)
            yield from _reads(part.qkv, norm, None if odd else (part.kv_heads * part.dim, part.dim))
            yield from _writes(part.o, 0 if odd else part.dim)
        case p.LatentAttention():
            for down in part.down:
                yield from _reads(down, norm)
            yield from _writes(part.o)
        case p.GatedDelta() | p.Mamba2() | p.ShortConv():
            yield from _reads(part.inputs, norm)
            yield from _writes(part.out)
        case p.Mlp():
            yield from _reads(part.up, norm)
            yield from _writes(part.down)
        case p.PerLayer():
            yield from _reads(part.gate, norm)
            yield from _writes(part.up)
        case p.Experts():
            yield from _experts(part, norm)


def _experts(part: p.Experts, norm: Norm | None) -> Turns:
    gates = [part.router.name, *([part.shared_gate] if part.shared_gate else [])]
    yield from _reads(Linear(tuple(gates), (part.router.experts,) * len(gates), part.router.hidden), norm)
    if part.shared:
        yield from _mixer(part.shared, norm, False)
    if part.latent:
        yield from _reads(part.latent[0], norm)
        yield from _writes(part.latent[1])
        return
    transposed, weighted = bool(part.transposed), norm if norm and norm.name else None
    first = "gate_up_proj" if part.gated else "up_proj"
    yield f"{part.module}.{first}", Turn(norm=weighted, columns=True, transposed=transposed)
    yield f"{part.module}.down_proj", Turn(rows=True, transposed=transposed)
