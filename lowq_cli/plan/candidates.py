"""The matrices of a source that can be quantized, by the roles of its tensors; reads the config and headers, no tensor."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lowq_cli.files.family_tensors import extra_roles, head_roles, known_roles
from lowq_cli.files.roles import Role
from lowq_cli.files.safetensors_io import read_json
from lowq_cli.files.source import REPORT, Cut, Source
from lowq_cli.files.storage import METHOD, method, method_of_others
from lowq_cli.state import as_argument, source_of
from lowq_packers.arch.towers import PROJECTORS, TOWERS
from lowq_packers.errors import DamagedError, UnsupportedError, UsageError
from lowq_packers.heads import is_head

WEIGHT_DTYPES = ("BF16", "F16", "F32", "F64")
PACKED_SUFFIXES = (".qweight", ".weight_packed", ".W_q", ".weight_scale", ".weight_scale_inv", ".SCB")


@dataclass(frozen=True)
class Candidate:
    """A matrix (N, K) that can be quantized: part of the tensor `source`, and all or part of the model's parameter `target`."""

    name: str
    source: str
    kind: str
    shape: tuple[int, int]
    source_dtype: str
    cut: Cut
    target: str
    extra: bool = False  # whether it belongs to a head that predicts further tokens


def wordless(source: Source) -> list[str]:
    """A note if a model of an unknown family cannot generate text; all known families can."""
    if is_head(source.config) or known_roles(source.config, source.headers) is not None:
        return []
    from lowq_cli.hf.skeleton import model_class

    cls = model_class(source.config)
    if cls.can_generate():
        return []
    return [f"a {cls.__name__} does not generate text: transformers' from_pretrained runs it, lowq generate and serve do not"]


def roles(source: Source) -> dict[str, Role]:
    """The role of every tensor: from the config in known families, else from transformers' model, whose errors it raises."""
    if is_head(source.config):
        return head_roles(source.headers)
    extra = extra_roles(source.config, source.headers)
    headers = {name: header for name, header in source.headers.items() if name not in extra}
    by_name = known_roles(source.config, headers)
    if by_name is None:
        from lowq_cli.hf import structure  # imports transformers: 1.5 to 6 s

        by_name = structure.roles(source.config, headers)
    return {n: of_tower(n, role) for n, role in by_name.items()} | extra


def of_tower(name: str, role: Role) -> Role:
    """The role of a tensor; a tensor of a tower or its projector gets the kind vision, audio or projector instead."""
    if not (part := TOWERS.search(name)):
        return role
    return replace(role, kind="projector" if PROJECTORS.search(name) else "audio" if "audio" in part[0] else "vision")


def refuse_quantized(source: Source) -> None:
    """Raise unless the source's weights are plain floats: UsageError for lowq's format, UnsupportedError for other formats."""
    q = source.config.get("quantization_config")
    if method(source.config) == METHOD:
        folder = source.folder
        report = read_json(folder / REPORT) if folder and (folder / REPORT).is_file() else {}
        original = source_of(folder, report) if folder else None
        anew = f": lowq quantize {as_argument(original)} --bits 3" if original else " give the model it was made from"
        ways = f"run: lowq generate {as_argument(source.name)}; for other bits{anew}"
        raise UsageError(f"{source.name} is already a lowq checkpoint; {ways}")
    if q is not None:
        named = method_of_others(source.name, q)
        raise UnsupportedError(f"{source.name} is already quantized ({named}); give the model it was made from")
    for name, header in source.headers.items():
        if name.endswith(PACKED_SUFFIXES) or header.dtype.startswith("F8"):
            raise UnsupportedError(
                f"{source.name} holds quantized weights ({name}, {header.dtype}) that its config.json does not describe; "
                f"give the model it was made from"
            )


def refuse_empty(source: Source, tensor_roles: Mapping[str, Role]) -> None:
    for name, header in source.headers.items():
        if header.numel == 0 and tensor_roles[name].kind != "other":
            raise DamagedError(f"{name} is empty (shape {list(header.shape)}); fetch the model again")


def candidates_of(source: Source, tensor_roles: Mapping[str, Role]) -> list[Candidate]:
    """All matrices that can be quantized, in source order. Raises UnsupportedError for weights that are not floats."""
    candidates: list[Candidate] = []
    names: set[str] = set()
    for name, header in source.headers.items():
        role = tensor_roles[name]
        if (
            role.kind in ("attention", "mlp", "expert", "head")
            and header.dtype not in WEIGHT_DTYPES
            and name.endswith("weight")
        ):
            raise UnsupportedError(
                f"{name} is {header.dtype}; lowq quantizes {', '.join(WEIGHT_DTYPES)}: give the original model"
            )
        for part in role.parts:
            if part.name in names:
                raise DamagedError(f"{part.name} occurs twice, also in {name}; fetch the model again")
            names.add(part.name)
            shape = _cut_shape(name, header.shape, part.cut)
            target = part.target or part.name
            candidates.append(Candidate(part.name, name, role.kind, shape, header.dtype, part.cut, target, role.extra))
    return candidates


def _cut_shape(name: str, shape: tuple[int, ...], cut: Cut) -> tuple[int, int]:
    """(N, K) of a cut of a tensor. Raises DamagedError if the cut does not fit."""
    inner = shape if cut.expert is None else shape[1:]
    if len(inner) != 2 or (cut.expert is not None and cut.expert >= shape[0]):
        raise DamagedError(
            f"{name} is {' x '.join(map(str, shape))}; a linear weight has two dimensions; fetch the model again"
        )
    N, K = (inner[1], inner[0]) if cut.transposed else inner
    first, last = cut.rows or (0, N)
    if last > N:
        raise DamagedError(f"{name} has {N} rows, its config implies at least {last}; they do not belong together")
    return -(-(last - first) // cut.step), K
