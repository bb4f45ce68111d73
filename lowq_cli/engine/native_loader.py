"""Load a checkpoint as a model that decodes, directly from config.json and the tensors, without importing transformers.

It loads safetensors folders of a described family that hold exactly the tensors that config.json asks for; the folder may
also hold a vision tower and heads that lowq does not run, which are not read. Everything else (another family, another tool's
format, missing, extra or damaged tensors) is left to transformers, which also reports what is wrong with it: `NotPlain` gives
the reason. The weights of one product are read from the files into one tensor, which is converted to the device's layout
once; several products are converted in parallel.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from lowq_cli.devices import say_widened
from lowq_cli.engine.contents import BIAS, Contents, contents_of, expert_biases
from lowq_cli.engine.model_record import owned
from lowq_cli.engine.parallel_read import Reader
from lowq_cli.engine.plan import Plan
from lowq_cli.files.family_tensors import Matrix
from lowq_cli.files.packed_tensors import OF_BLOCKS, SCALE, TABLE, WEIGHT, ZERO
from lowq_cli.files.safetensors_io import read_json
from lowq_cli.files.source import Source
from lowq_cli.hf.embedding import QuantEmbedding, TiedHead
from lowq_cli.hf.experts import QuantExperts
from lowq_kernels.activations import check_act
from lowq_kernels.decode import activation
from lowq_kernels.graphs import retried
from lowq_kernels.modules.joined import SideBySide, dense, weight_of
from lowq_kernels.modules.linear import QuantLinear
from lowq_kernels.modules.stack import Stack
from lowq_packers.arch.config import Config
from lowq_packers.arch.parts import Experts, Linear
from lowq_packers.errors import DoesNotFitError
from lowq_packers.layouts import DISK, PackedWeight
from lowq_packers.regular import MAX_CONFIG
from lowq_packers.scheme import E4M3
from lowq_packers.tables import joined


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


@retried
def read(source: Source, device: torch.device, by: type[Reader] = Reader) -> NativeModel:
    """Load the model of an open source, with a reader of the class `by`.

    Raises NotPlain where transformers has to load it, DoesNotFitError where the device's memory is too small.
    """
    contents = contents_of(source, device)
    try:
        return _read(source, contents, by(source, device))
    except torch.OutOfMemoryError as e:
        raise DoesNotFitError(f"{source.name} does not fit into the memory of {device}; use fewer bits, or --device cpu") from e


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
        name: reader.read(tensor, dtype).reshape(shape) for name, (tensor, shape) in expert_biases(part, contents.named).items()
    }
    if part.interleaved and part.gated and biases:  # the matrices' rows are all of gate, then all of up
        mixed = biases["gate_up_proj"]
        biases["gate_up_proj"] = torch.cat([mixed[:, 0::2], mixed[:, 1::2]], 1)
    experts = QuantExperts(_Gating(part, stacks, biases), schemes, dtype, top_k=part.router.top_k)
    for name, stack in packed.items():
        experts.set_stack(name, stack)
    experts.set_act(check_act(contents.act))
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
    embedding = QuantEmbedding(table, packed.scheme, contents.dtype, packed.layout)
    embedding.hold(packed)
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
    settings = read_json(path, MAX_CONFIG) if path.exists() else {}
    ends = settings.get("eos_token_id")
    return {**settings, "eos_token_id": getattr(config.get_text_config(), "eos_token_id", None) if ends is None else ends}
