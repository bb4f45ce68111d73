"""The tensors of a described family's checkpoint, derived from its config: names, shapes and roles. Does not import
torch.

The plan of `quantize` and lowq's native decoder rely on them for the contents of the files. For a checkpoint with any other
tensors, transformers decides (hf/structure.py) and reports the errors.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lowq_cli.files.quant_config import Stored
from lowq_cli.files.roles import Part, Role
from lowq_cli.files.safetensors_io import FLOATS, TensorHeader
from lowq_cli.files.source import Cut
from lowq_packers.arch import families
from lowq_packers.arch.common import GATED, STACKS, NotDescribed
from lowq_packers.arch.config import NotPlain, read_config
from lowq_packers.arch.names import Form, Tensor, renamed, tensors
from lowq_packers.arch.parts import Experts, Linear, Model, walk

FORMS: tuple[Form, ...] = ("split", "files")
_JUNK = re.compile(r"\.rotary_emb\.inv_freq$|\.attention\.(masked_)?bias$")  # buffers written by older versions of transformers
OF_HEADS = {  # by name
    r"attn\.\w+_proj$": "attention", r"((mlp\.\w+|input|^fc|\.fc)(_proj)?|^(pre|post)_projection)$": "mlp", r"lm_head$": "head",
}  # fmt: skip
_LAYER = re.compile(r".*?layers\.\d+\.")


@dataclass(frozen=True)
class Matrix:
    """One (N, K) weight of the files; name without ".weight". how: its packed format, or None if it is dense."""

    stem: str
    N: int
    K: int
    bias: bool = False
    how: Stored | None = None


class Named:
    """A model's tensors by their names in files, which depend on `place`, a pair (prefix, head)."""

    def __init__(self, model: Model, place: tuple[str, str]) -> None:
        self.model, self.place = model, place
        self.tensors: dict[str, Tensor] = tensors(model, "split", place)

    @classmethod
    def of_files(cls, model: Model, headers: Mapping[str, Any]) -> "Named":
        """The names whose embedding, and head if it is not tied, are in the files."""
        places = ((model.prefix, model.head), *model.files)
        candidates = [p for p in places if any(n.startswith(p[0] + model.embed) for n in headers)]
        return cls(model, next((p for p in candidates if f"{p[1]}.weight" in headers), (candidates or places)[0]))

    def full(self, name: str) -> str:
        """A name of the description, converted to the name in files."""
        return self.place[0] + renamed(self.model, name)

    def matrices(self, part: Linear) -> list[Matrix]:
        """The matrices that one matmul multiplies together."""
        named = zip(part.parts, part.rows, strict=True)
        return [Matrix(self.full(name), rows, part.columns, part.bias) for name, rows in named]

    def experts(self, part: Experts) -> dict[str, list[Matrix]]:
        """The experts' matrices by parameter: gate and up of each expert in turn, and down of each expert."""
        leaves = GATED[0 if part.gated else 1 :] if part.stacked else part.leaves  # lowq splits stacks into single experts
        path = self.full(part.module if part.stacked else part.files)
        rows = [
            Matrix(f"{path}.{e}.{leaf}", part.inner, part.hidden) for e in range(part.router.experts) for leaf in leaves[:-1]
        ]
        down = [Matrix(f"{path}.{e}.{leaves[-1]}", part.hidden, part.inner) for e in range(part.router.experts)]
        return {"gate_up_proj" if part.gated else "up_proj": rows, "down_proj": down}

    @property
    def extra(self) -> tuple[str, ...]:
        """Prefixes of heads that predict further tokens, which are not part of the text model (`lowq_packers.heads`)."""
        ours = self.model.prefix
        return tuple(self.place[0] + e.removeprefix(ours) if e.startswith(ours) else e for e in self.model.extra)

    def outside_text(self, name: str) -> bool:
        """Whether a tensor of the files belongs to a part that text does not use: a tower, a head of `extra`, a buffer."""
        return bool(_JUNK.search(name)) or name.startswith(
            (*self.model.outside_text, *(b.removeprefix("model.") for b in self.model.outside_text), *self.extra)
        )


def extra_prefixes(raw: Mapping[str, Any], headers: Mapping[str, Any]) -> tuple[str, ...]:
    """`Named.extra` of a config.json; empty for a family that is not described."""
    try:
        return Named.of_files(read_config(raw, len(headers))[1], headers).extra
    except NotPlain:
        return ()


def outside_text_prefixes(raw: Mapping[str, Any], headers: Mapping[str, Any]) -> tuple[str, ...]:
    """Prefixes of tensors of towers and projectors, as in files; empty for a family that is not described."""
    try:
        prefixes = read_config(raw, len(headers))[1].outside_text
    except NotPlain:
        return ()
    return (*prefixes, *(b.removeprefix("model.") for b in prefixes))


def extra_of(config: Any, headers: Mapping[str, Any]) -> tuple[str, ...]:
    """The same for a config object of transformers."""
    family = families().get(getattr(type(config), "model_type", ""))
    try:
        return Named.of_files(family.describe(config), headers).extra if family else ()
    except NotDescribed:
        return ()


def extra_roles(raw: Mapping[str, Any], headers: Mapping[str, TensorHeader]) -> dict[str, Role]:
    """Roles of the tensors of heads that predict further tokens: a head's layer has the same roles as a layer of the model."""
    if not (prefixes := extra_prefixes(raw, headers)) or not any(n.startswith(prefixes) for n in headers):
        return {}
    model = read_config(raw, len(headers))[1]
    kinds = {_LAYER.sub("", n): t.kind for form in FORMS for n, t in tensors(model, form).items() if _LAYER.match(n)}
    return {n: _extra_role(n, h, kinds.get(_LAYER.sub("", n), "other")) for n, h in headers.items() if n.startswith(prefixes)}


def _extra_role(name: str, header: TensorHeader, kind: str) -> Role:
    stem, reason = name.removesuffix(".weight"), "of a head that predicts further tokens"
    if kind not in ("attention", "mlp", "expert") or header.dtype not in FLOATS:
        return Role(kind, reason=kind if kind in ("norm", "router") else reason, extra=True)
    if stem != name and len(header.shape) == 2:
        return Role(kind, (Part(stem),), extra=True)
    path, _, stack = name.rpartition(".")
    if kind == "expert" and len(header.shape) == 3 and stack in STACKS:
        E, rows, _ = header.shape
        leaves = GATED[:2] if stack == STACKS[0] else GATED[2:]
        N = rows // len(leaves)
        cuts = {f"{path}.{e}.{leaf}": Cut(e, (i * N, i * N + N)) for e in range(E) for i, leaf in enumerate(leaves)}
        return Role(kind, tuple(Part(n, cut) for n, cut in cuts.items()), extra=True)
    return Role(kind, reason=reason, extra=True)


def head_roles(headers: Mapping[str, TensorHeader]) -> dict[str, Role]:
    """Roles of the tensors in a draft head's folder: its matrices are quantized without calibration, the rest is kept."""
    role_of, of_heads = {}, OF_HEADS
    if "pre_projection.weight" in headers and "lm_head.weight" not in headers:  # an assistant's embedding is its output head
        of_heads = OF_HEADS | {r"embed_tokens$": "head"}
    for name, header in headers.items():
        stem = name.removesuffix(".weight")
        kind = next((kind for mark, kind in of_heads.items() if re.search(mark, stem)), "")
        product = kind and stem != name and len(header.shape) == 2 and header.dtype in FLOATS
        role_of[name] = (
            Role(kind, (Part(stem),), extra=True) if product else Role("other", reason="of a draft head", extra=True)
        )
    return role_of


def known_roles(raw: Mapping[str, Any], headers: Mapping[str, TensorHeader]) -> dict[str, Role] | None:
    """The role of every tensor, as `hf.structure.roles` gives it; None unless the tensors are exactly those of a described
    family."""
    try:
        _, model, _ = read_config(raw, len(headers))
    except NotPlain:
        return None
    if any(part.stacked for part in walk(model.layers) if isinstance(part, Experts)):
        return None
    named = Named.of_files(model, headers)
    expected = named.tensors
    fits = expected.keys() == headers.keys() and all(
        tuple(headers[n].shape) == t.shape and headers[n].dtype in FLOATS for n, t in expected.items()
    )
    if not fits or any(t.kind in ("recurrent", "other") for t in expected.values()):
        return None
    by_name = dict(_roles(named))
    return {name: by_name[name] for name in headers}


def linear_weights(raw: Mapping[str, Any], tensors: int) -> set[str]:
    """Names of the weights of linear layers, without experts, from a described family's config.json. Raises NotPlain for
    other families.

    tensors: the number of tensors in the files, for `read_config`.
    """
    _, model, _ = read_config(raw, tensors)
    if any(part.stacked for part in walk(model.layers) if isinstance(part, Experts)):
        raise NotPlain("its files hold all experts of a layer in one tensor")
    roles = _roles(Named(model, (model.prefix, model.head)))
    return {n for n, role in roles if role.parts and role.kind in ("attention", "mlp", "head")}


def _roles(named: Named) -> Iterator[tuple[str, Role]]:
    """The name and role of every tensor."""
    model = named.model
    stacks = {
        m.stem: f"{model.prefix}{part.module}.{stack}"
        for part in walk(model.layers)
        if isinstance(part, Experts)
        for stack, row in named.experts(part).items()
        for m in row
    }
    modules = {named.full(name): model.prefix + name for part in walk(model) if isinstance(part, Linear) for name in part.parts}
    modules |= {named.place[0] + model.embed: model.prefix + model.embed, named.place[1]: model.head}
    for name, tensor in named.tensors.items():
        stem, _, leaf = name.rpartition(".")
        if leaf == "bias" and tensor.kind != "norm":
            yield name, Role(tensor.kind, reason="bias")
        elif stem in stacks:
            yield name, Role("expert", (Part(stem, target=stacks[stem]),))
        elif stem in modules and leaf == "weight":
            yield name, Role(tensor.kind, (Part(stem, target=f"{modules[stem]}.weight"),))
        else:
            yield name, Role(tensor.kind, reason=tensor.kind if tensor.kind in ("norm", "router") else "not a linear weight")
