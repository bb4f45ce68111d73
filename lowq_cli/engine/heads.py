"""A draft head as a plan of the engine's steps, and its loading: from a folder, or from a model's checkpoint.

The plan runs like a model's: packed or 16-bit products, folded where possible, with keys and values in a separate state. Its
inputs are tokens and the target model's hidden states. `entering` converts these to the head's hidden states, and `guess`
advances by one token.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from lowq_cli.engine import mixer_steps, rope
from lowq_cli.engine import steps as s
from lowq_cli.engine.batch import Batch, KeyValues, States
from lowq_cli.engine.contents import check, filled
from lowq_cli.engine.native_loader import FileWeights, read_weights
from lowq_cli.engine.parallel_read import Reader
from lowq_cli.engine.plan import Plan, plan_of
from lowq_cli.engine.rope import Tables
from lowq_cli.files.family_tensors import Matrix, Named
from lowq_cli.files.packed_tensors import SCALE, TABLE, WEIGHT, ZERO
from lowq_cli.files.quant_config import METHOD, Stored, expand_stored
from lowq_cli.files.source import Source, open_source
from lowq_kernels.decode.norms import Norm
from lowq_packers.arch.config import NotPlain
from lowq_packers.arch.names import Tensor, part_tensors
from lowq_packers.arch.parts import Linear, Rope
from lowq_packers.errors import DamagedError, UnsupportedError, naming
from lowq_packers.heads import assistant, mtp, read_head
from lowq_packers.heads.parts import MAPS, MASK, Read, Target

INTEGERS = {"I64": torch.int64, "I32": torch.int32}
Describe = Callable[..., Read]  # a head's description from a config, the shapes of its tensors, and its Target
STREAM_END = -1  # in a head's `layers`: the target's last hidden state, normed


class HeadPlan(Plan):
    """The operations of a draft head.

    Attributes:
        described: the head's description. layers: the target's hidden states that the head reads; i is the input of layer i,
        STREAM_END the last state, normed. offsets: (Vd,) int64, added to the head's ids to give the target's ids; None where
        both are the same. unknown: (1, H) hidden state for tokens that are not known yet, of a head that guesses all tokens at
        once. note: an assumption about its files.
    """

    def __init__(
        self, read: Read, weights: FileWeights, target: Plan, offsets: torch.Tensor | None, unknown: torch.Tensor | None
    ) -> None:
        head = read.head
        super().__init__(head.model, read.config, weights, target.device, target.dtype)
        self.described, self.offsets, self.note, self.target = head, offsets, read.note, target
        self.layers = head.taps or (STREAM_END,)
        self.fuse = weights.linear(head.fuse.project) if head.fuse else None
        norms = (*head.fuse.before, *([head.fuse.after] if head.fuse.after else [])) if head.fuse else ()
        built = [Norm(weights.vector(f"{n.name}.weight").flatten(), n.eps, n.kind, None, n.groups) for n in norms]
        self.after = built.pop() if head.fuse and head.fuse.after else None
        self.before = built
        if self.fuse is not None:
            self.linears["fuse"] = self.fuse
        self.unknown = None
        if unknown is not None:  # concatenated features: split them into one row per layer of the target
            rows = unknown.to(target.device, target.dtype).reshape(1, -1).split(target.model.hidden, -1)
            self.unknown = self.entering(rows)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings of the target's token ids, from the head's own table or the target's."""
        return super().embed(ids) if self.described.own_embed else self.target.embed(ids)

    def entering(self, states: Sequence[torch.Tensor]) -> torch.Tensor:
        """The head's hidden states (M, H), made of the target's: (M, H) for each of `layers`."""
        if self.fuse is None:
            return states[0].clone()  # the steps add to it in place
        each = list(states)
        if len(self.before) == len(each):
            each = [self.ops.normed(x.contiguous(), norm) for x, norm in zip(each, self.before, strict=True)]
        x = torch.cat(each, -1)
        if len(self.before) == 1 != len(each):
            x = self.ops.normed(x, self.before[0])
        x = self.fuse(x)
        return x if self.after is None else self.ops.normed(x, self.after)

    def guess(
        self, ids: torch.Tensor, x: torch.Tensor, batch: Batch, state: Sequence[KeyValues | States]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Normed hidden states (M, H) for `logits`, and the hidden states that replace the target's for the next guess.

        ids: (M,) the target's id of the token after each row. x: (M, H) hidden states, overwritten. The state is written too.
        """
        frame = self._run(ids, x, batch, state)
        return frame.y, frame.y if self.described.recycled == "normed" else frame.x

    def keep(self, ids: torch.Tensor, x: torch.Tensor, batch: Batch, state: Sequence[KeyValues | States]) -> None:
        """Write the state that `guess` writes, without its results."""
        self._run(ids, x, batch, state, state_only=True)

    def _run(
        self,
        ids: torch.Tensor,
        x: torch.Tensor,
        batch: Batch,
        state: Sequence[KeyValues | States],
        state_only: bool = False,
    ) -> s.Frame:
        frame = s.Frame(x, batch, state)
        frame.kept["embedding"] = self.embed(ids)
        return self.run(frame, state_only)

    def ids(self, guesses: torch.Tensor) -> torch.Tensor:
        """The target's ids of guesses, which are indices into the head's logits."""
        return guesses if self.offsets is None else guesses + self.offsets[guesses]


class BlockPlan(HeadPlan):
    """The operations of a head that guesses a block of tokens at once. tables: its lookup tables by name."""

    def __init__(
        self, read: Read, weights: FileWeights, target: Plan, offsets: torch.Tensor | None, tables: dict[str, torch.Tensor]
    ) -> None:
        super().__init__(read, weights, target, offsets, None)
        assert read.head.block
        self.block = read.head.block
        self.vector, markov = tables.get(self.block.vector), self.block.markov
        self.first = tables[markov.first + WEIGHT] if markov else None
        self.out = weights.linear(markov.out) if markov else None
        self.join = weights.linear(markov.join[0]) if markov and markov.join else None
        if self.out is not None:
            self.linears["markov"] = self.out
        self.context: list[s.Step] = []  # the steps that write every layer's keys and values of the kept "context"
        for i, step in enumerate(self.steps):
            if isinstance(step, mixer_steps.AttendBlock):
                self.context += [s.Take("context"), *self.steps[i - 2 : i + 1]]

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """As `Plan.embed`, except that mask tokens may have a separate vector."""
        x = super().embed(ids)
        return x if self.vector is None else torch.where((ids == self.block.mask)[:, None], self.vector.to(x.dtype), x)

    def remember(self, states: Sequence[torch.Tensor], batch: Batch, state: Sequence[KeyValues | States]) -> None:
        """Write the keys and values of the target's hidden states, (M, H) for each of `layers`, at the rows of a batch."""
        x = self.entering(states)
        frame = s.Frame(x, batch, state)
        frame.kept["context"] = x
        for step in self.context:
            step.run(frame)

    def guesses(
        self, anchor: torch.Tensor, batch: Batch, state: Sequence[KeyValues | States], until: torch.Tensor
    ) -> torch.Tensor:
        """Guesses (B, K), as the target's ids, after the newest tokens `anchor` (B,); the rows of the batch are the blocks."""
        frame, B = s.Frame(self.embed(batch.ids), batch, state), len(anchor)
        if not self.block.causal:
            frame.kept["until"] = until
        y = self.run(frame).y.reshape(B, self.block.size, -1)
        y = y if self.block.earlier else y[:, 1:]
        logits = self.logits(y.flatten(0, 1)).reshape(*y.shape[:2], -1)
        if self.out is None or self.first is None:
            return self.ids(logits.argmax(-1))
        drawn_ids, before, carried = [], anchor, y.new_zeros(B, self.first.shape[1])
        for k in range(y.shape[1]):
            more, carried = self._correction(self.first[before], y[:, k], carried)
            before = self.ids((logits[:, k] + self.out(more)).argmax(-1))
            drawn_ids.append(before)
        return torch.stack(drawn_ids, 1)

    def _correction(self, w: torch.Tensor, h: torch.Tensor, carried: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(input of the `out` product, next `carried`), from the previous token's vector w (B, rank) and the state h (B, H)."""
        if self.join is None:
            return w, carried
        if self.block.markov and self.block.markov.kind == "gated":
            return torch.sigmoid(self.join(torch.cat((h, w), -1))) * w, carried
        a, c, o = self.join(torch.cat((carried, w, h), -1)).chunk(3, -1)
        carried = torch.sigmoid(a) * carried + (1 - torch.sigmoid(a)) * torch.tanh(c)
        return torch.tanh(o), carried


class AssistantPlan(HeadPlan):
    """The operations of a head that attends to the target's keys and values: its state is those of the layers `model.lent`.

    Attributes:
        chosen: (C, number of the likeliest groups that it guesses from), or None. centroids: (C, H of the head), whose products
        with a state tell how likely each group is. groups: (C, V / C) int64, their tokens.
    """

    def __init__(self, read: Read, weights: FileWeights, target: Plan, tables: dict[str, torch.Tensor]) -> None:
        super().__init__(read, weights, target, None, None)
        assert read.head.assistant
        self.back = self.linears["back"] = weights.linear(read.head.assistant.back)
        self.chosen = read.head.assistant.centroids
        if self.chosen:
            self.centroids, self.groups = tables[assistant.CENTROIDS], tables[assistant.ORDER].reshape(self.chosen[0], -1)

    def guess(
        self, ids: torch.Tensor, x: torch.Tensor, batch: Batch, state: Sequence[KeyValues | States]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `HeadPlan.guess`, with the hidden states in the target's width."""
        y, _ = super().guess(ids, x, batch, state)
        return y, self.back(y)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """As `Plan.logits`; tokens outside the likeliest groups get -inf."""
        logits = super().logits(x)
        if not self.chosen:
            return logits
        ids = self.groups[(x @ self.centroids.T).topk(self.chosen[1], -1).indices].flatten(1)
        return torch.full_like(logits, -torch.inf).scatter(1, ids, logits.gather(1, ids))

    def angles(self, slots: int, device: torch.device, length: int | None = None) -> Mapping[Rope | int, Tables]:
        """As `Plan.angles`, one position on: a row attends up to the last token that has keys and is rotated as the next."""
        return {kind: (cos[1:], sin[1:]) for kind, (cos, sin) in super().angles(slots + 1, device, length).items()}


class _Names(Named):
    """A head's tensors by their names in the files. held: the names of all tensors in the files."""

    def __init__(self, read: Read, held: Collection[str]) -> None:
        self.model, self.place, self.files, self.held = read.head.model, ("", ""), read.files, held
        fuse = (read.head.fuse.project, read.head.fuse.before, read.head.fuse.after) if read.head.fuse else ()
        parts = (self.model.layers, self.model.norm, self.model.merge, *fuse)
        self.tensors: dict[str, Tensor] = {self.full(n): t for n, t in part_tensors(parts, "split")}

    def full(self, name: str) -> str:
        """The name in the files for a name, or a prefix of names, of the description."""
        for ours, theirs in self.files.items():
            if ours == name or ours.startswith(f"{name}."):
                return theirs[: len(theirs) - len(ours) + len(name)]
        raise DamagedError(f"the draft head has no tensor {name}")

    def outside_text(self, name: str) -> bool:
        """As `Named.outside_text`."""
        return name in self.held


def load(folder: str, model: Any, describe: Describe = read_head) -> HeadPlan:
    """The head in a folder or hub id, for a model. Raises UnsupportedError, DamagedError or NotFoundError."""
    with open_source(folder) as source, naming(source.name):
        target = _target(model)
        try:
            return _read(source, describe(source.config, _shapes(source), target), plan_of(model))
        except NotPlain as e:
            raise UnsupportedError(f"the draft head {folder} cannot be used: {e}") from None


def inside(source: Source, model: Any, describe: Describe = mtp.read) -> HeadPlan:
    """The MTP layer in a model's checkpoint, an open source. Raises UnsupportedError where it has none that lowq can run."""
    try:
        with naming(source.name):
            return _read(source, describe(source.config, _shapes(source), _target(model)), plan_of(model))
    except NotPlain as e:
        raise UnsupportedError(f"the MTP layer of {source.name} cannot be used: {e}") from None


def _target(model: Any) -> Target:
    plan = plan_of(model)
    return Target(plan.model, plan.config)


def _schemes(source: Source) -> Mapping[str, Stored]:
    given = source.config.get("quantization_config")
    if given is None:
        return {}
    if given.get("quant_method") != METHOD:
        raise NotPlain(f"its tensors are quantized by {given.get('quant_method')}")
    return expand_stored(given, {n.removesuffix(WEIGHT) for n in source.headers if n.endswith(WEIGHT)})


def _shapes(source: Source) -> dict[str, tuple[int, ...] | None]:
    """Name -> shape of the tensors in the files; a packed matrix has one entry, whose shape is None."""
    schemes = _schemes(source)
    parts = {stem + leaf for stem in schemes for leaf in (SCALE, ZERO, TABLE)}
    packed = {stem + WEIGHT for stem in schemes}
    return {n: None if n in packed else tuple(h.shape) for n, h in source.headers.items() if n not in parts}


def _read(source: Source, read: Read, target: Plan) -> HeadPlan:
    if why := rope.why_not(getattr(read.config, "rope_parameters", None)):
        raise NotPlain(why)
    head, named = read.head, _Names(read, source.headers)
    m = head.model
    fuse: tuple[Linear, ...] = (head.fuse.project,) if head.fuse else ()
    markov = head.block.markov if head.block else None
    fuse += (markov.out, *markov.join) if markov else ()
    fuse += (head.assistant.back,) if head.assistant else ()
    rows = target.vocabulary
    embed = Matrix(named.full(m.embed), rows, m.hidden) if head.own_embed else None
    top = Matrix(named.full(m.head), m.vocab, m.hidden) if head.own_head else None
    contents = filled(read.config, named, source.headers, target.dtype, _schemes(source), embed, top, *fuse)
    check(contents, source.headers)
    reader = Reader(source, target.device)
    offsets = _offsets(source, named.full(MAPS[0]), target.vocabulary).to(target.device) if head.mapped else None
    weights = read_weights(contents, reader, target.embedding, target.head)
    if head.block:
        tables = {
            n: reader.read(named.full(n), target.dtype)
            for n in (markov.first + WEIGHT if markov else "", head.block.vector)
            if n
        }
        return BlockPlan(read, weights, target, offsets, tables)
    if head.assistant:
        return AssistantPlan(read, weights, target, _groups(source, named, reader, target) if head.assistant.centroids else {})
    unknown = None if head.parallel is None else reader.read(named.full(MASK))
    return HeadPlan(read, weights, target, offsets, unknown)


def _groups(source: Source, named: _Names, reader: Reader, target: Plan) -> dict[str, torch.Tensor]:
    """Centroids of groups of tokens, and the tokens of each. Raises DamagedError unless each token is in one group."""
    ids = _whole_numbers(source, name := named.full(assistant.ORDER))
    if not torch.equal(ids.sort().values, torch.arange(target.model.vocab)):
        raise DamagedError(f"{name} of the draft head does not name each token of the model once")
    centroids = reader.read(named.full(assistant.CENTROIDS), target.dtype)
    return {assistant.CENTROIDS: centroids, assistant.ORDER: ids.to(target.device)}


def _whole_numbers(source: Source, name: str) -> torch.Tensor:
    header = source.headers[name]
    if header.dtype not in INTEGERS:
        raise DamagedError(f"{name} of the draft head is {header.dtype}; it must hold whole numbers")
    return torch.frombuffer(source.read_raw(name, 0, header.nbytes), dtype=INTEGERS[header.dtype]).long()


def _offsets(source: Source, name: str, vocabulary: int) -> torch.Tensor:
    """The offsets from the head's ids to the target's. Raises DamagedError for ids outside the target's vocabulary."""
    offsets = _whole_numbers(source, name)
    ids = offsets + torch.arange(len(offsets))
    if not bool(((ids >= 0) & (ids < vocabulary)).all()):
        raise DamagedError(f"{name} of the draft head names tokens that the model does not have")
    return offsets
