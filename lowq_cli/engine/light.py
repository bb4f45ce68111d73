"""A checkpoint as a model that decodes, straight from config.json and the tensors: no transformers is imported.

Taken are safetensors folders of a known family whose tensors are exactly those that config.json asks for. Anything else
(another family, another tool's format, tensors that are missing, extra or damaged) goes by way of transformers, which also
says what is wrong with it: `NotPlain` gives the reason. A product's weight is read from its places in the files into one
tensor, and moved into its device's layout once, several at a time.
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
from lowq_cli.engine.blocks import Blocks, why_not_config
from lowq_cli.engine.reading import Reader
from lowq_cli.files import family_tensors, fp8_tensors
from lowq_cli.files.family_config import ACTS, Config, NotPlain, read_config
from lowq_cli.files.family_tensors import EMBED, HEAD, NORM, Matrix, Place
from lowq_cli.files.fp8_tensors import InBlocks, in_blocks
from lowq_cli.files.packed_tensors import SCALE, TABLE, WEIGHT, ZERO, Tensors, tensors
from lowq_cli.files.quant_config import METHOD, Stored, expand_stored
from lowq_cli.files.safetensors_io import FLOATS, TensorHeader
from lowq_cli.files.source import Source
from lowq_cli.hf.embedding import QuantEmbedding, TiedHead
from lowq_cli.hf.experts import QuantExperts
from lowq_kernels.modules.fp8_linear import Fp8Linear
from lowq_kernels.modules.joined import SideBySide, dense
from lowq_kernels.modules.linear import QuantLinear
from lowq_kernels.modules.stack import Stack
from lowq_packers.errors import DamagedError, DoesNotFitError, LowqError, SchemeError, UnsupportedError
from lowq_packers.families import Family
from lowq_packers.fp8 import Fp8Matrix
from lowq_packers.layouts import DISK, PackedWeight
from lowq_packers.regular import MAX_CONFIG, read_text
from lowq_packers.tables import joined

BIAS = ".bias"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Contents:
    """What is read: parent module and leaves -> the matrices side by side, and the vectors by name."""

    config: Config
    family: Family
    dtype: torch.dtype
    act: str
    linears: dict[Place, list[Matrix]]
    experts: dict[str, tuple[Matrix, dict[str, list[Matrix]]]]  # by the name of an MLP, as `family_tensors.experts`
    vectors: dict[str, int]
    embed: Matrix
    head: Matrix | None  # None: tied to the embedding


class LightModel(nn.Module):
    """What commands and decoders ask of a model: config, device, dtype, blocks, embeddings, logits of whole texts."""

    def __init__(self, contents: Contents, tensors: "_FileTensors", embed: nn.Module, head: nn.Module, stops: Any) -> None:
        super().__init__()
        self.config, self.dtype = contents.config, contents.dtype
        self.generation_config = SimpleNamespace(eos_token_id=stops)
        self.embed, self.vectors = embed, nn.ParameterList(tensors.vectors.values())
        self.blocks = Blocks(contents.config, contents.family, tensors, embed, head)
        self.linears = self.blocks.linears

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return self.vectors[0].device

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding."""
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        """The output head."""
        return self.blocks.head

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> SimpleNamespace:
        """`logits` (B, T, V) of whole texts (B, T), as transformers' models give them."""
        from lowq_cli.engine.decoders import decoder_of

        decoder: Any = decoder_of(self)  # the fused one: a model like this has no other
        return SimpleNamespace(logits=decoder.logits(input_ids))


class ScaledEmbedding(nn.Embedding):
    """An embedding whose rows are multiplied by `scalar_embed_scale`, rounded to their dtype."""

    scalar_embed_scale = 1.0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids (...) -> (..., K)."""
        return super().forward(ids) * torch.tensor(self.scalar_embed_scale, device=self.weight.device).to(self.weight.dtype)


def read(source: Source, device: torch.device, by: type[Reader] = Reader) -> LightModel:
    """The model of an open source, its tensors read by `by`.

    Raises NotPlain where it has to go by way of transformers, DoesNotFitError where the device's memory ends.
    """
    contents = contents_of(source, device)
    try:
        return _read(source, contents, by(source, device))
    except torch.OutOfMemoryError as e:
        raise DoesNotFitError(f"{source.name} does not fit into the memory of {device}; use fewer bits, or --device cpu") from e


def contents_of(source: Source, device: torch.device) -> Contents:
    """What to read, every header checked. Raises NotPlain."""
    quantization = source.config.get("quantization_config")
    in_fp8 = isinstance(quantization, Mapping) and quantization.get("quant_method") == fp8_tensors.METHOD
    if source.folder is None or not (quantization is None or in_fp8 or quantization.get("quant_method") == METHOD):
        raise NotPlain("not a folder of plain, fp8 or lowq's tensors")
    if in_fp8 and (why := fp8_tensors.why_not(source.config, source.headers)):
        raise NotPlain(why)
    config, family = read_config(source.config, len(source.headers))
    if family.stacked:
        raise NotPlain(family.stacked)
    if reason := why_not_config(config):
        raise NotPlain(reason)
    if family.mixture:
        _check_mixture(config, family)
    dtype = torch.bfloat16 if quantization is not None and device.type == "cpu" else _dtype(source.config)
    stems = {n.removesuffix(WEIGHT) for n in source.headers if n.endswith(WEIGHT)}
    schemes: Mapping[str, Stored | InBlocks] = {}
    try:
        if in_fp8:
            blocks = in_blocks(source.config["quantization_config"])
            schemes = {n.removesuffix(WEIGHT): blocks for n in fp8_tensors.quantized(source.headers)}
        elif quantization is not None:
            schemes = expand_stored(quantization, stems)
    except (DamagedError, UnsupportedError) as e:
        raise NotPlain(str(e)) from None

    def stored_as(m: Matrix) -> Matrix:
        return replace(m, how=schemes.get(m.stem))

    linears: dict[Place, list[Matrix]] = {}
    experts = {}
    vectors = {NORM: config.hidden_size}
    for i in range(config.num_hidden_layers):
        for place, row in family_tensors.linears(f"model.layers.{i}", config, family).items():
            if not (family.mixture and place[0].endswith(".mlp")):
                linears[place] = [stored_as(m) for m in row]
        if family.mixture:
            router, stacks = family_tensors.experts(f"model.layers.{i}", config, family)
            experts[f"model.layers.{i}.mlp"] = router, {name: [stored_as(m) for m in row] for name, row in stacks.items()}
        vectors |= family_tensors.vectors(f"model.layers.{i}", config, family)
    table = stored_as(Matrix(EMBED, config.vocab_size, config.hidden_size))
    head = None if config.tie_word_embeddings else stored_as(Matrix(HEAD, config.vocab_size, config.hidden_size))
    act = "none" if quantization is None or in_fp8 else quantization.get("activations", "none")
    contents = Contents(config, family, dtype, act, linears, experts, vectors, table, head)
    _check(contents, source.headers)
    return contents


def _check_mixture(config: Config, family: Family) -> None:
    """Raise NotPlain unless config.json says how experts are chosen, and that they gate as usual."""
    assert family.mixture
    fields = vars(config)
    there, inside = fields.get("num_local_experts") or fields.get("num_experts"), fields.get(family.mixture.width)
    chosen = fields.get("num_experts_per_tok")
    if type(there) is not int or type(chosen) is not int or type(inside) is not int or not 1 <= chosen <= there or inside < 1:
        raise NotPlain("config.json does not say how many experts there are")
    if not family.mixture.normalises and type(fields.get("norm_topk_prob")) is not bool:
        raise NotPlain("config.json has no norm_topk_prob")
    if ACTS[str(fields.get("hidden_act"))] != "silu":
        raise NotPlain("experts with another activation")


def _dtype(config: Mapping[str, Any]) -> torch.dtype:
    named = config.get("dtype") or config.get("torch_dtype")
    if named not in DTYPES:
        raise NotPlain("config.json names no dtype")
    return DTYPES[named]


def _check(contents: Contents, headers: Mapping[str, TensorHeader]) -> None:
    """Raise NotPlain unless the headers are those of `contents`, no more and no fewer."""
    wanted: Tensors = {n + WEIGHT: ((size,), FLOATS) for n, size in contents.vectors.items()}
    singles = [
        contents.embed,
        *([contents.head] if contents.head else []),
        *(router for router, _ in contents.experts.values()),
    ]
    stacks = [row for _, stacks in contents.experts.values() for row in stacks.values()]
    if any(len({m.how for m in row}) > 1 or not (row[0].how is None or _in_rows(row[0])) for row in stacks):
        raise NotPlain("experts of a layer that are not packed alike, in rows")
    if any(all(row[0].how is None for row in stacks.values()) for _, stacks in contents.experts.values()):
        raise NotPlain("experts that are not packed")
    for m in [*(m for row in (*contents.linears.values(), *stacks) for m in row), *singles]:
        if m.bias:
            wanted[m.stem + BIAS] = (m.N,), FLOATS
        if m.how is None:
            wanted[m.stem + WEIGHT] = (m.N, m.K), FLOATS
            continue
        if m is contents.embed and not _in_rows(m):
            raise NotPlain(f"{m.stem} in another layout than rows")
        try:
            own = m.how.tensors(m.N, m.K) if isinstance(m.how, InBlocks) else tensors(m.how, m.N, m.K)
            wanted |= {m.stem + suffix: fact for suffix, fact in own.items()}
        except SchemeError as e:
            raise NotPlain(str(e)) from None
    if odd := wanted.keys() ^ headers.keys():
        raise NotPlain(f"{min(odd)} is missing or not asked for")
    for name, (shape, dtypes) in wanted.items():
        if tuple(headers[name].shape) != shape or headers[name].dtype not in dtypes:
            raise NotPlain(f"{name} is {headers[name].dtype} {tuple(headers[name].shape)}")


def _in_rows(m: Matrix) -> bool:
    """Whether a quantized matrix lies in words, a row after the other: tables and experts are read so alone."""
    return isinstance(m.how, Stored) and m.how.layout == DISK


class _FileTensors:
    """The layers of some `Contents`, read."""

    def __init__(
        self, linears: dict[Place, nn.Module], routed: Mapping[str, tuple[str, QuantExperts]], vectors: dict[str, nn.Parameter]
    ) -> None:
        self.linears, self.routed, self.vectors = linears, routed, vectors

    def linear(self, parent: str, names: tuple[str, ...]) -> nn.Module:
        return self.linears[parent, names]

    def vector(self, name: str, leaf: str = "weight") -> torch.Tensor:
        assert leaf == "weight", leaf  # families with others are `stacked`
        return self.vectors[name].detach()

    def experts(self, parent: str) -> tuple[torch.Tensor, QuantExperts] | None:
        if parent not in self.routed:
            return None
        router, experts = self.routed[parent]
        return self.vector(router), experts


def _read(source: Source, contents: Contents, reader: Reader) -> LightModel:
    """Read in threads: the files' bytes, then each weight into its layout."""
    with reader, ThreadPoolExecutor(reader.threads, initializer=reader.enter_thread) as pool:
        embed = pool.submit(_embedding, contents, reader)
        head = pool.submit(_linear, [contents.head], contents.dtype, reader) if contents.head else None
        futures = {
            key: pool.submit(_linear, row, contents.dtype, reader, contents.act) for key, row in contents.linears.items()
        }
        mixtures = {mlp: pool.submit(_experts, rows, contents, reader) for mlp, (_, rows) in contents.experts.items()}
        names = [*contents.vectors, *(router.stem for router, _ in contents.experts.values())]
        vectors = {n: nn.Parameter(reader.read(n + WEIGHT, contents.dtype), requires_grad=False) for n in names}
        table = embed.result()
        top = head.result() if head else _tied(table, contents)
        linears = {key: f.result() for key, f in futures.items()}
        routed = {mlp: (contents.experts[mlp][0].stem, f.result()) for mlp, f in mixtures.items()}
        reader.check()
    model = LightModel(contents, _FileTensors(linears, routed, vectors), table, top, _stops(source, contents.config)).eval()
    in_fp8 = [m for m in model.modules() if isinstance(m, Fp8Linear) and m.widened]
    say_widened(model.device, sum(m.weight.nbytes for m in in_fp8))
    return model


def _linear(row: list[Matrix], dtype: torch.dtype, reader: Reader, act: str = "none") -> nn.Module:
    """The matrices of a row as one layer where they are alike, as `modules.joined.join` would make it."""
    if len({(m.how, m.bias) for m in row}) > 1:
        return SideBySide([_linear([m], dtype, reader, act) for m in row])
    first, names = row[0], [m.stem for m in row]
    bias = torch.cat([reader.read(n + BIAS, dtype) for n in names]) if first.bias else None
    if first.how is None:
        return dense(reader.join([n + WEIGHT for n in names], dtype), bias)
    if isinstance(first.how, InBlocks):
        if any(m.N % first.how.block[0] for m in row[:-1]):  # a block would begin inside a matrix
            return SideBySide([_linear([m], dtype, reader, act) for m in row])
        scales = reader.finite([n + fp8_tensors.SCALE for n in names])
        w = Fp8Matrix(reader.join([n + WEIGHT for n in names]), scales, first.how.block)
        return Fp8Linear.from_matrix(w, bias, dtype, first.how.act)
    layer = QuantLinear.from_packed(_packed(row, dtype, reader), bias, dtype=dtype)
    layer.set_act(act)  # type: ignore[arg-type]
    return layer


def _packed(row: list[Matrix], dtype: torch.dtype, reader: Reader) -> PackedWeight:
    """The words and companions of matrices that are packed alike, side by side."""
    assert isinstance(row[0].how, Stored)
    names, (scheme, layout) = [m.stem for m in row], row[0].how
    words = reader.join([n + WEIGHT for n in names])
    scales = reader.companion([n + SCALE for n in names], dtype if scheme.scale == "float" else None, scheme, "scale")
    zeros = None if scheme.zero == "none" else reader.companion([n + ZERO for n in names], dtype, scheme, "zero")
    own = reader.companion([n + TABLE for n in names], None, scheme, "table").split(1) if scheme.table_width else ()
    table = joined(own, [m.N for m in row])
    return PackedWeight(words, scales, zeros, scheme, sum(m.N for m in row), row[0].K, layout, table=table)


class _Gating(nn.Module):
    """What `QuantExperts` asks of transformers' experts: stacks to take the place of, and the gate between them."""

    def __init__(self, stacks: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.act_fn = nn.SiLU()
        for name, stack in stacks.items():
            self.register_buffer(name, stack)

    def _default_apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    _apply_gate = _default_apply_gate


def _experts(rows: Mapping[str, list[Matrix]], contents: Contents, reader: Reader) -> QuantExperts:
    """A layer's experts, in their device's layout."""
    E, dtype, stacks, packed = len(rows["down_proj"]), contents.dtype, {}, {}
    for name, row in rows.items():
        N, K = sum(m.N for m in row) // E, row[0].K
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
    experts = QuantExperts(_Gating(stacks), schemes, dtype, top_k=contents.config.num_experts_per_tok)
    for name, stack in packed.items():
        experts._hold(name, stack)
    return experts.prepare(dtype)


def _embedding(contents: Contents, reader: Reader) -> nn.Embedding | QuantEmbedding:
    """The token embedding."""
    m = contents.embed
    kind = ScaledEmbedding if contents.family.scaled_embedding else nn.Embedding
    rows = reader.join([m.stem + WEIGHT], contents.dtype) if m.how is None else torch.empty(m.N, m.K, device="meta")
    table = kind(m.N, m.K, _weight=rows).requires_grad_(False)
    if isinstance(table, ScaledEmbedding):
        table.scalar_embed_scale = contents.config.hidden_size**0.5
    if m.how is None:
        return table
    packed = _packed([m], contents.dtype, reader)
    found = QuantEmbedding(table, packed.scheme, contents.dtype)
    found.weight = nn.Parameter(packed.words, requires_grad=False)
    found.weight_scale = nn.Parameter(packed.scales, requires_grad=False)
    found.weight_zero = None if packed.zeros is None else nn.Parameter(packed.zeros, requires_grad=False)
    found.weight_table = None if packed.table is None else nn.Parameter(packed.table, requires_grad=False)
    return found


def _tied(table: nn.Embedding | QuantEmbedding, contents: Contents) -> nn.Module:
    """The head that shares the embedding's weight."""
    m = contents.embed
    if isinstance(table, QuantEmbedding):
        tied = TiedHead(m.N, m.K, table.scheme, False, contents.dtype, "meta")
        tied.share(table)
        return tied.prepare(contents.dtype)
    return dense(table.weight.detach(), None)


def _stops(source: Source, config: Config) -> Any:
    """The tokens that end a text: generation_config.json's, else config.json's."""
    assert source.folder is not None
    path = source.folder / "generation_config.json"
    try:
        found = json.loads(read_text(path, MAX_CONFIG)).get("eos_token_id") if path.is_file() else None
    except (LowqError, ValueError, AttributeError, RecursionError):
        raise NotPlain("generation_config.json cannot be read") from None
    return config.eos_token_id if found is None else found
