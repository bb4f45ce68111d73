"""What to read of a checkpoint: the matrices of each product and the vectors that its description asks for, headers checked."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from lowq_cli.engine import rope
from lowq_cli.files.family_tensors import Matrix, Named
from lowq_cli.files.packed_tensors import WEIGHT, Tensors, tensors
from lowq_cli.files.quant_config import Stored
from lowq_cli.files.safetensors_io import FLOATS, TensorHeader, torch_dtype
from lowq_cli.files.shapes import text_config
from lowq_cli.files.source import Source
from lowq_cli.files.storage import method, storage
from lowq_packers.arch.config import Config, NotPlain, read_config
from lowq_packers.arch.parts import Experts, Linear, Model, walk
from lowq_packers.errors import DamagedError, SchemeError, UnsupportedError
from lowq_packers.layouts import DISK, get

BIAS = ".bias"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Contents:
    """What to read: the matrices of each product, the matrices of experts by their stack, and the vectors by name."""

    config: Config
    model: Model
    named: Named
    dtype: torch.dtype
    act: str
    linears: dict[Linear, list[Matrix]]
    experts: dict[Experts, dict[str, list[Matrix]]]
    stacks: dict[Experts, dict[str, tuple[str, tuple[int, ...]]]]  # of experts in dense stacks: parameter -> name and shape
    vectors: dict[str, tuple[int, ...]]  # full name -> shape
    embed: Matrix | None  # None: a draft head uses its target's
    head: Matrix | None  # None: tied to the embedding, or a draft head uses its target's


def contents_of(source: Source, device: torch.device) -> Contents:
    """What to read of a source, with every header checked. Raises NotPlain."""
    quantization = source.config.get("quantization_config")
    if source.folder is None or (quantization is not None and method(source.config) is None):
        raise NotPlain("not a folder of plain, fp8 or lowq's tensors")
    config, model, _ = read_config(source.config, len(source.headers))
    if reason := rope.why_not(config.get_text_config().rope_parameters):
        raise NotPlain(reason)
    try:
        schemes, act = storage(quantization, source.headers)
    except (DamagedError, UnsupportedError) as e:
        raise NotPlain(str(e)) from None
    named = Named.of_files(model, source.headers)
    dtype = torch.bfloat16 if quantization is not None and device.type == "cpu" else _dtype(source, named)
    if model.tied and named.place[1] + WEIGHT in source.headers:  # tied by default, yet the files hold a head
        model = replace(model, tied=False)
        named = Named(model, named.place)

    table = Matrix(named.place[0] + model.embed, model.vocab, model.hidden)
    head = None if model.tied else Matrix(named.place[1], model.vocab, model.hidden, model.head_bias)
    contents = filled(config, named, source.headers, dtype, schemes, table, head)
    if head is None and contents.embed and contents.embed.how and model.head_bias:
        raise NotPlain("a head with a bias that is the packed embedding")
    check(contents, source.headers)
    return replace(contents, act=act)


def filled(
    config: Config,
    named: Named,
    headers: Mapping[str, TensorHeader],
    dtype: torch.dtype,
    schemes: Mapping[str, Stored],
    table: Matrix | None,
    head: Matrix | None,
    *others: Linear,
) -> Contents:
    """The contents that the description behind `named` asks for, with matrices in the formats that `schemes` gives.

    others: products in addition to the description's. Raises NotPlain.
    """

    def stored(row: list[Matrix]) -> list[Matrix]:
        return [replace(m, how=schemes.get(m.stem)) for m in row]

    model = named.model
    linears = {part: stored(named.matrices(part)) for part in (*walk(model), *others) if isinstance(part, Linear)}
    routed = [part for part in walk(model.layers) if isinstance(part, Experts)]
    for part in routed:
        _check_mixture(part)
    experts = {part: {name: stored(row) for name, row in named.experts(part).items()} for part in routed}
    embed, top = (stored([m])[0] if m else None for m in (table, head))
    rows = [*linears.values(), *(row for stacks in experts.values() for row in stacks.values()), [m for m in (embed, top) if m]]
    matrices = {m.stem for row in rows for m in row}
    vectors = {n: t.shape for n, t in named.tensors.items() if n.rpartition(".")[0] not in matrices}
    stacks = {part: stack for part in routed if (stack := _stacks(part, named, headers))}
    return Contents(config, model, named, dtype, "none", linears, experts, stacks, vectors, embed, top)


def _check_mixture(part: Experts) -> None:
    """Raise NotPlain for a bad number of experts, and for biases that are not stacked."""
    if not 1 <= part.router.top_k <= part.router.experts:
        raise NotPlain("config.json does not say how many experts there are")
    if part.bias and not part.stacked:
        raise NotPlain("experts with biases of their own")


def _stacks(part: Experts, named: Named, headers: Mapping[str, TensorHeader]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Parameter -> name and shape of the tensor that stacks it over a layer's experts; empty where the files have no stacks."""
    if not part.stacked or f"{named.full(part.files)}.{part.leaves[0]}" not in headers:
        return {}
    E, N, K = part.router.experts, part.inner, part.hidden
    stacks: dict[str, tuple[str, tuple[int, ...]]] = {}
    sizes = {"gate_up_proj" if part.gated else "up_proj": (2 * N if part.gated else N, K), "down_proj": (K, N)}
    for (parameter, (rows, columns)), leaf in zip(sizes.items(), part.leaves, strict=True):
        name = f"{named.full(part.files)}.{leaf}"
        forms = {"both": ((E, columns, rows),), "files": ((E, columns, rows), (E, rows, columns)), "": ((E, rows, columns),)}
        held = tuple(headers[name].shape) if name in headers else ()
        stacks[parameter] = name, held if held in forms[part.transposed] else forms[part.transposed][0]
    return stacks


def expert_biases(part: Experts, named: Named) -> dict[str, tuple[str, tuple[int, int]]]:
    """Stack -> name and shape of the tensor with the biases of all its experts; lowq's files keep them stacked too."""
    if not part.bias:
        return {}
    rows = (2 * part.inner if part.gated else part.inner, part.hidden)
    names = [f"{named.full(part.files)}.{leaf}_bias" for leaf in part.leaves]
    stacks = ("gate_up_proj" if part.gated else "up_proj", "down_proj")
    return {s: (n, (part.router.experts, N)) for s, n, N in zip(stacks, names, rows, strict=True)}


def _dtype(source: Source, known: Named) -> torch.dtype:
    """The dtype in config.json, or in its text config; where neither has one, the dtype of the first float tensor."""
    parts = (source.config, text_config(source.config))
    named = next((d for part in parts for name in ("dtype", "torch_dtype") if (d := part.get(name)) is not None), None)
    if named is None:
        held = (source.headers[n].dtype for n in known.tensors if n in source.headers)
        named = next((torch_dtype(d) for d in held if d in FLOATS), None)
    dtype = DTYPES.get(named, named) if isinstance(named, str) else named
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES.values():
        raise NotPlain(f"config.json names the dtype {named!r}")
    return dtype


def check(contents: Contents, headers: Mapping[str, TensorHeader]) -> None:
    """Raise NotPlain unless the headers are those of `contents`, plus at most those of parts that are not run."""
    expected: Tensors = {n: (shape, FLOATS) for n, shape in contents.vectors.items()}
    singles = [m for m in (contents.embed, contents.head) if m]
    stacks = [row for part, matrices in contents.experts.items() if part not in contents.stacks for row in matrices.values()]
    expected |= {name: (shape, FLOATS) for matrices in contents.stacks.values() for name, shape in matrices.values()}
    if any(len({m.how for m in row}) > 1 or not (row[0].how is None or row[0].how.layout == DISK) for row in stacks):
        raise NotPlain("experts of a layer that are not packed alike, in rows")
    for part in contents.experts:
        expected |= {name: (shape, FLOATS) for name, shape in expert_biases(part, contents.named).values()}
    for m in [*(m for row in (*contents.linears.values(), *stacks) for m in row), *singles]:
        if m.bias:
            expected[m.stem + BIAS] = (m.N,), FLOATS
        if m.how is None:
            expected[m.stem + WEIGHT] = (m.N, m.K), FLOATS
            continue
        if m is contents.embed and get(m.how.layout).rows is None:
            raise NotPlain(f"{m.stem} in a layout without rows for look-ups")
        try:
            expected |= {m.stem + suffix: fact for suffix, fact in tensors(m.how, m.N, m.K).items()}
        except SchemeError as e:
            raise NotPlain(str(e)) from None
    if odd := {n for n in expected.keys() ^ headers.keys() if not contents.named.outside_text(n)}:
        raise NotPlain(f"{min(odd)} is missing or not expected")
    for name, (shape, dtypes) in expected.items():
        if tuple(headers[name].shape) != shape or headers[name].dtype not in dtypes:
            raise NotPlain(f"{name} is {headers[name].dtype} {tuple(headers[name].shape)}")
