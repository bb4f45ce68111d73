"""Load a checkpoint as a model that decodes, directly from config.json and the tensors, without importing transformers.

It loads safetensors folders of a described family that hold exactly the tensors that config.json asks for; the folder may
also hold a vision tower and heads that lowq does not run, which are not read. Everything else (another family, another tool's
format, missing, extra or damaged tensors) is left to transformers, which also reports what is wrong with it: `NotPlain` gives
the reason. The weights of one product are read from the files into one tensor, which is converted to the device's layout
once; several products are converted in parallel.
"""

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from lowq_cli.devices import say_widened
from lowq_cli.engine import rope
from lowq_cli.engine.model_record import owned
from lowq_cli.engine.parallel_read import Reader
from lowq_cli.engine.plan import Plan
from lowq_cli.files.family_tensors import Matrix, Named
from lowq_cli.files.packed_tensors import OF_BLOCKS, SCALE, TABLE, WEIGHT, ZERO, Tensors, tensors
from lowq_cli.files.quant_config import Stored
from lowq_cli.files.safetensors_io import FLOATS, TensorHeader, torch_dtype
from lowq_cli.files.shapes import text_config
from lowq_cli.files.source import Source
from lowq_cli.files.storage import method, storage
from lowq_cli.hf.embedding import QuantEmbedding, TiedHead
from lowq_cli.hf.experts import QuantExperts
from lowq_kernels.activations import check_act
from lowq_kernels.decode import activation
from lowq_kernels.modules.joined import SideBySide, dense, weight_of
from lowq_kernels.modules.linear import QuantLinear
from lowq_kernels.modules.stack import Stack
from lowq_packers.arch.config import Config, NotPlain, read_config
from lowq_packers.arch.parts import Experts, Linear, Model, walk
from lowq_packers.errors import DamagedError, DoesNotFitError, LowqError, SchemeError, UnsupportedError
from lowq_packers.layouts import DISK, PackedWeight
from lowq_packers.regular import MAX_CONFIG, read_text
from lowq_packers.scheme import E4M3
from lowq_packers.tables import joined

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


class NativeModel(nn.Module):
    """A model as commands and decoders use it: config, device, dtype, plan, embeddings, logits of sequences."""

    def __init__(self, contents: Contents, weights: "FileWeights", device: torch.device, generation: dict[str, Any]) -> None:
        super().__init__()
        self.config, self.dtype, self.device = contents.config, contents.dtype, device
        self.generation_config = SimpleNamespace(**generation)
        self.embed, self.vectors = weights.embed, nn.ParameterList(weights.vectors.values())
        self.plan = Plan(contents.model, contents.config.get_text_config(), weights, device, contents.dtype)
        owned(self).plan, self.linears = self.plan, self.plan.linears

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding."""
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        """The output head."""
        return self.plan.head

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> SimpleNamespace:
        """`logits` (B, T, V) of sequences (B, T), in an object like that of transformers' models."""
        from lowq_cli.engine.decoders import decoder_of

        decoder: Any = decoder_of(self)  # always the native one for this class
        return SimpleNamespace(logits=decoder.logits(input_ids))


class ScaledEmbedding(nn.Embedding):
    """An embedding whose rows are multiplied by `scalar_embed_scale`, rounded to their dtype."""

    scalar_embed_scale = 1.0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids (...) -> (..., K)."""
        scale = torch.full((), self.scalar_embed_scale, dtype=self.weight.dtype, device=self.weight.device)
        return super().forward(ids) * scale


def read(source: Source, device: torch.device, by: type[Reader] = Reader) -> NativeModel:
    """Load the model of an open source, with a reader of the class `by`.

    Raises NotPlain where transformers has to load it, DoesNotFitError where the device's memory is too small.
    """
    contents = contents_of(source, device)
    try:
        return _read(source, contents, by(source, device))
    except torch.OutOfMemoryError as e:
        raise DoesNotFitError(f"{source.name} does not fit into the memory of {device}; use fewer bits, or --device cpu") from e


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
    rows = [
        *linears.values(),
        *(row for stacks in experts.values() for row in stacks.values()),
        [m for m in (embed, top) if m],
    ]
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


def _biases(part: Experts, named: Named) -> dict[str, tuple[str, tuple[int, int]]]:
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
    if any(len({m.how for m in row}) > 1 or not (row[0].how is None or _in_rows(row[0])) for row in stacks):
        raise NotPlain("experts of a layer that are not packed alike, in rows")
    for part in contents.experts:
        expected |= {name: (shape, FLOATS) for name, shape in _biases(part, contents.named).values()}
    for m in [*(m for row in (*contents.linears.values(), *stacks) for m in row), *singles]:
        if m.bias:
            expected[m.stem + BIAS] = (m.N,), FLOATS
        if m.how is None:
            expected[m.stem + WEIGHT] = (m.N, m.K), FLOATS
            continue
        if m is contents.embed and not _in_rows(m):
            raise NotPlain(f"{m.stem} in another layout than rows")
        try:
            expected |= {m.stem + suffix: fact for suffix, fact in tensors(m.how, m.N, m.K).items()}
        except SchemeError as e:
            raise NotPlain(str(e)) from None
    if odd := {n for n in expected.keys() ^ headers.keys() if not contents.named.beside(n)}:
        raise NotPlain(f"{min(odd)} is missing or not expected")
    for name, (shape, dtypes) in expected.items():
        if tuple(headers[name].shape) != shape or headers[name].dtype not in dtypes:
            raise NotPlain(f"{name} is {headers[name].dtype} {tuple(headers[name].shape)}")


def _in_rows(m: Matrix) -> bool:
    """Whether a quantized matrix is stored in the layout DISK, row after row, as embeddings and experts must be."""
    return m.how is not None and m.how.layout == DISK


class FileWeights:
    """The loaded tensors of a `Contents`; implements `compiling.Weights`."""

    def __init__(
        self,
        contents: Contents,
        linears: Mapping[Linear, nn.Module],
        routed: Mapping[Experts, QuantExperts],
        vectors: dict[str, nn.Parameter],
        embed: nn.Module,
        head: nn.Module,
    ) -> None:
        self.named, self.linears, self.routed, self.vectors = contents.named, linears, routed, vectors
        self.dtype = contents.dtype
        self.embed, self.head = embed, head

    def linear(self, part: Linear) -> nn.Module:
        """As `compiling.Weights` says."""
        return self.linears[part]

    def matrix(self, part: Linear) -> torch.Tensor:
        """As `compiling.Weights` says."""
        return weight_of(self.linears[part], self.dtype)

    def vector(self, name: str) -> torch.Tensor:
        """As `compiling.Weights` says."""
        return self.vectors[self.named.full(name)].detach()

    def experts(self, part: Experts) -> QuantExperts:
        """As `compiling.Weights` says."""
        return self.routed[part]


def _read(source: Source, contents: Contents, reader: Reader) -> NativeModel:
    weights = read_weights(contents, reader)
    model = NativeModel(contents, weights, reader.device, _generation(source, contents.config)).eval()
    say_widened(model.device, model)
    return model


def read_weights(
    contents: Contents, reader: Reader, embed_of: nn.Module | None = None, head_of: nn.Module | None = None
) -> FileWeights:
    """Read the contents in threads and convert each weight to its layout. embed_of, head_of: used where it has none."""
    dtype = contents.dtype
    with reader, ThreadPoolExecutor(reader.threads, initializer=reader.enter_thread) as pool:
        embed = pool.submit(_embedding, contents.embed, contents, reader) if contents.embed else None
        of_head = contents.act if contents.head and contents.head.how and contents.head.how.layout == E4M3 else "none"
        head = pool.submit(_linear, [contents.head], dtype, reader, of_head) if contents.head else None
        futures = {key: pool.submit(_linear, row, dtype, reader, contents.act) for key, row in contents.linears.items()}
        mixtures = {part: pool.submit(_experts, part, rows, contents, reader) for part, rows in contents.experts.items()}
        vectors = {n: nn.Parameter(reader.read(n, dtype), requires_grad=False) for n in contents.vectors}
        table: Any = embed.result() if embed else embed_of
        if (top := head.result() if head else head_of) is None:
            top = _tied(table, contents, vectors.get(contents.named.place[1] + BIAS))
        linears = {key: f.result() for key, f in futures.items()}
        routed = {part: f.result() for part, f in mixtures.items()}
        reader.check()
    return FileWeights(contents, linears, routed, vectors, table, top)


def _linear(row: list[Matrix], dtype: torch.dtype, reader: Reader, act: str = "none") -> nn.Module:
    """The matrices as one layer where their formats are the same, as `modules.joined.join` would make it."""
    if len({(m.how, m.bias) for m in row}) > 1:
        return SideBySide([_linear([m], dtype, reader, act) for m in row])
    first, names = row[0], [m.stem for m in row]
    bias = torch.cat([reader.read(n + BIAS, dtype) for n in names]) if first.bias else None
    if first.how is None:
        return dense(reader.join([n + WEIGHT for n in names], dtype), bias)
    if any(m.N % first.how.scheme.block_rows for m in row[:-1]):  # a block of rows would span two matrices
        return SideBySide([_linear([m], dtype, reader, act) for m in row])
    layer = QuantLinear.from_packed(_packed(row, dtype, reader), bias, dtype=dtype)
    layer.set_act(check_act(act))
    return layer


def _packed(row: list[Matrix], dtype: torch.dtype, reader: Reader) -> PackedWeight:
    """Matrices of one format, concatenated along the rows: codes, scales, zeros and tables."""
    assert row[0].how
    names, (scheme, layout) = [m.stem for m in row], row[0].how
    words = reader.join([n + WEIGHT for n in names])
    leaf = OF_BLOCKS if layout == E4M3 else SCALE
    scales = reader.companion([n + leaf for n in names], dtype if scheme.scale == "float" else None, scheme, "scale")
    zeros = None if scheme.zero == "none" else reader.companion([n + ZERO for n in names], dtype, scheme, "zero")
    own_table = reader.companion([n + TABLE for n in names], None, scheme, "table").split(1) if scheme.table_width else ()
    table = joined(own_table, [m.N for m in row])
    return PackedWeight(words, scales, zeros, scheme, sum(m.N for m in row), row[0].K, layout, table=table)


class _Gating(nn.Module):
    """The part of transformers' experts module that `QuantExperts` uses: the stacks that it replaces, and the activation."""

    def __init__(self, part: Experts, stacks: Mapping[str, torch.Tensor], biases: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.act, self.has_gate, self.has_bias = part.act, part.gated, part.bias
        for name, stack in stacks.items():
            self.register_buffer(name, stack)
        for name, bias in biases.items():
            self.register_parameter(f"{name}_bias", nn.Parameter(bias, requires_grad=False))

    def act_fn(self, up: torch.Tensor) -> torch.Tensor:
        """The activation of experts without a gate, rounded as in transformers."""
        return activation.ACTIVATIONS[self.act](up)

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if self.act == activation.CLAMPED:
            gate, up = gate.clamp(max=activation.LIMIT), up.clamp(-activation.LIMIT, activation.LIMIT)
            return (up + 1) * (gate * torch.sigmoid(gate * activation.STEEPNESS))
        return activation.ACTIVATIONS[self.act](gate) * up


def _experts(part: Experts, rows: Mapping[str, list[Matrix]], contents: Contents, reader: Reader) -> QuantExperts:
    """A layer's experts in the device's layout."""
    E, dtype, stacks, packed = len(rows["down_proj"]), contents.dtype, {}, {}
    for name, row in rows.items():
        N, K = sum(m.N for m in row) // E, row[0].K
        if part in contents.stacks:
            stacks[name] = _in_order(part, name, reader.read(contents.stacks[part][name][0], dtype), N)
            continue
        if row[0].how is None:
            stacks[name] = reader.join([m.stem + WEIGHT for m in row], dtype).reshape(E, N, K)
            continue
        p = _packed(row, dtype, reader)
        words, scales, zeros = (None if t is None else t.reshape(E, N, -1) for t in (p.words, p.scales, p.zeros))
        assert words is not None
        table = None if p.table is None else p.table.reshape(E, -1, p.table.shape[1])
        packed[name] = Stack(words, scales, zeros, None, p.scheme, N, K, DISK, table)
        stacks[name] = torch.empty(E, N, K, device="meta")
    schemes = {name: s.scheme for name, s in packed.items() if s.scheme}
    biases = {
        name: reader.read(tensor, dtype).reshape(shape) for name, (tensor, shape) in _biases(part, contents.named).items()
    }
    if part.interleaved and part.gated and biases:  # the matrices' rows are all of gate, then all of up
        mixed = biases["gate_up_proj"]
        biases["gate_up_proj"] = torch.cat([mixed[:, 0::2], mixed[:, 1::2]], 1)
    experts = QuantExperts(_Gating(part, stacks, biases), schemes, dtype, top_k=part.router.top_k)
    for name, stack in packed.items():
        experts._hold(name, stack)
    return experts.prepare(dtype)


def _in_order(part: Experts, name: str, held: torch.Tensor, N: int) -> torch.Tensor:
    """A stack from the files as (E, N, K), with all rows of gate before all rows of up."""
    rows = held if part.transposed != "both" and held.shape[1] == N else held.mT
    if part.interleaved and part.gated and name == "gate_up_proj":
        rows = torch.cat([rows[:, 0::2], rows[:, 1::2]], 1)
    return rows.contiguous()


def _embedding(m: Matrix, contents: Contents, reader: Reader) -> nn.Embedding | QuantEmbedding:
    """The token embedding."""
    scale = contents.model.embed_scale
    kind = nn.Embedding if scale == 1.0 else ScaledEmbedding
    rows = reader.join([m.stem + WEIGHT], contents.dtype) if m.how is None else torch.empty(m.N, m.K, device="meta")
    table = kind(m.N, m.K, _weight=rows).requires_grad_(False)
    if isinstance(table, ScaledEmbedding):
        table.scalar_embed_scale = scale
    if m.how is None:
        return table
    packed = _packed([m], contents.dtype, reader)
    embedding = QuantEmbedding(table, packed.scheme, contents.dtype)
    embedding.weight = nn.Parameter(packed.words, requires_grad=False)
    embedding.weight_scale = nn.Parameter(packed.scales, requires_grad=False)
    embedding.weight_zero = None if packed.zeros is None else nn.Parameter(packed.zeros, requires_grad=False)
    embedding.weight_table = None if packed.table is None else nn.Parameter(packed.table, requires_grad=False)
    return embedding


def _tied(table: nn.Embedding | QuantEmbedding, contents: Contents, bias: torch.Tensor | None) -> nn.Module:
    """A head that shares the embedding's weight."""
    m = contents.embed
    assert m
    if isinstance(table, QuantEmbedding):
        tied = TiedHead(m.N, m.K, table.scheme, False, contents.dtype, "meta")
        tied.share(table)
        return tied.prepare(contents.dtype)
    return dense(table.weight.detach(), bias)


def _generation(source: Source, config: Config) -> dict[str, Any]:
    """The fields of generation_config.json; eos_token_id is config.json's where the file has none."""
    assert source.folder is not None
    path = source.folder / "generation_config.json"
    try:
        settings = json.loads(read_text(path, MAX_CONFIG)) if path.is_file() else {}
        ends = settings.get("eos_token_id")
    except (LowqError, ValueError, AttributeError, RecursionError):
        raise NotPlain("generation_config.json cannot be read") from None
    return {**settings, "eos_token_id": getattr(config.get_text_config(), "eos_token_id", None) if ends is None else ends}
