"""The decoder for Llama-like families: static cache, joined weights, few kernels per layer; on a GPU one graph per step.

The cache has a number of slots from a short list of buckets and is kept between texts, so the step captured as a CUDA
graph for one (batch, bucket, way of sampling) is replayed for every later text that fits. Sequence b's next token sits at
slot pos[b]; prompts of different lengths need no padding there. Sampling, the step in position and the new token's
embedding are inside the graph: a token costs the host one launch and one asynchronous copy. Where angles depend on how long
a text is (`rope`), prompts past that length are read one by one, each by a table of its own, and nothing of them is kept.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from lowq_cli.engine.blocks import Layer, Mixture, Mlp, blocks_of
from lowq_cli.engine.graph import Captured, bucket, capture, keep
from lowq_cli.engine.plain import CHUNK
from lowq_cli.engine.rope import Tables
from lowq_cli.engine.sampling import Sampler, Sampling
from lowq_cli.engine.stream import nothing
from lowq_kernels.decode import FoldedProducts, ops
from lowq_kernels.decode.kv import PLAIN, Cache, part, zeros
from lowq_kernels.modules import dense
from lowq_kernels.products.cpu.repeated import Repeated

KEPT_GRAPHS = 8


class FusedDecoder:
    """A transformers model of a known family, decoded from its joined weights. See `blocks.why_not` for which.

    Args:
        model: the model, which keeps working: its layers become views into the joined weights.
        graphs: capture each step as a CUDA graph; only meaningful on a GPU.
        kv: what keys and values are held in (`decode.kv.KINDS`).
    """

    name = "fused"

    def __init__(self, model: Any, graphs: bool = True, kv: str = PLAIN) -> None:
        self.device, self.dtype, self.kv = model.device, model.dtype, kv
        self.blocks = blocks_of(model)
        self.steady = min(r.steady for r in self.blocks.rotations.values())
        self.rereads = any(r.rereads for r in self.blocks.rotations.values())
        self.ahead = self.device.type == "cuda"
        self.graphs = graphs and self.ahead
        self.reason = "" if self.graphs or not self.ahead else "without CUDA graphs, as asked"
        self.ops = ops(self.device.type)
        self.slots = self.batch = 0
        self.captured: dict[Sampling, Captured] = {}
        self.run: Captured | None = None
        self.ones: dict[int, torch.Tensor] = {}  # fp32, of so many rows: recorded steps hold them
        self.long = False  # whether something the cache holds is turned as a text past `steady` is
        self.held: list[list[int]] = []  # token ids whose keys and values the cache holds, per sequence

    @property
    def linears(self) -> nn.Module:
        """The layers that a step calls, for `--explain`."""
        return self.blocks.linears

    @torch.inference_mode()
    def start(
        self, prompts: list[list[int]], sampling: Sampling, room: int, between: Callable[[], None] = nothing
    ) -> torch.Tensor:
        """Read the prompts side by side; the first new token of each, (B,) int64 on the device.

        What all of them share with `held` is in the cache already and not read again.
        """
        longest = max(map(len, prompts))
        self._make_room(len(prompts), longest + room)
        known = min((shared(h, p) for h, p in zip(self.held, prompts, strict=True)), default=0) if self.held else 0
        if self.long or longest > self.steady:
            known = 0
        self.held, self.long = [], longest > self.steady
        self.prompts, grows = prompts, any(len(p) <= self.steady < len(p) + room - 1 for p in prompts)
        self.said: list[torch.Tensor] | None = [] if self.rereads and grows else None
        ids = torch.tensor([p + [0] * (longest - len(p)) for p in prompts])
        lengths = torch.tensor([len(p) for p in prompts])
        self.sampler.start(sampling, ids, torch.arange(longest) < lengths[:, None])
        x = self._read(ids.to(self.device), lengths.tolist(), known, between)
        self.held = [list(p) for p in prompts]
        self.sampler.choose(self.head(x), advance=0)
        self.run = self._graph() if self.graphs and room > 1 else None
        return self.token

    @torch.inference_mode()
    def step(self) -> torch.Tensor:
        """The next token of each sequence, (B,) int64 on the device; the same tensor every time."""
        if self.said is not None:
            self._follow(self.said)
        if self.run is None:
            self.forward_step()
        else:
            self.run.replay()
            self.sampler.logits = self.run.logits
        return self.token

    @torch.inference_mode()
    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits (B, T, V) at every place of whole texts (B, T)."""
        B, T = ids.shape
        self._make_room(B, T)
        self.held = []
        x = self.blocks.embed(ids).reshape(B * T, -1)
        hidden = self._layers(x, partial(self._attend_prompt, slice(0, B), 0, self._tables(T)))
        return self.head(hidden).reshape(B, T, -1)

    def _make_room(self, batch: int, length: int) -> None:
        """A cache with at least `length` slots for `batch` sequences, kept from the last text where it fits."""
        if batch == self.batch and length <= self.slots:
            return
        slots = bucket(length)
        self.captured.clear()  # graphs hold the old cache's addresses
        self.run, self.held = None, []
        self.caches: list[tuple[Cache, Cache]] = []
        self.slots, self.batch = slots, batch
        for layer in self.blocks.layers:
            shape = (batch, layer.heads.HKV, slots, layer.heads.D)
            pair = [zeros(self.kv, shape, self.dtype, self.device) for _ in range(2)]
            self.caches.append((pair[0], pair[1]))
        self.rope = self.blocks.rope_tables(slots, self.device, self.dtype)
        self.sampler = Sampler(self.ops.choose, batch, self.blocks.head.out_features, self.device)
        self.token, self.pos = self.sampler.token, self.sampler.pos
        self.repeated = Repeated() if self.device.type == "cpu" else None

    def _tables(self, length: int) -> dict[str, Tables]:
        """The angles of a prompt of so many tokens."""
        if length <= self.steady:
            return self.rope
        return self.blocks.rope_tables(self.slots, self.device, self.dtype, length)

    def _read(self, ids: torch.Tensor, lengths: list[int], known: int, between: Callable[[], None]) -> torch.Tensor:
        """Fill the cache from prompts (B, T), right-padded, from token `known` on; the last normed hidden states, (B, H)."""
        B, T = ids.shape
        if self.steady >= T:
            return self._prompt(slice(0, B), ids, lengths, known, self.rope, between)
        each = ((b, b + 1, n) for b, n in enumerate(lengths))
        read = [self._prompt(slice(b, c), ids[b:c, :n], [n], 0, self._tables(n), between) for b, c, n in each]
        return torch.cat(read)

    def _follow(self, said: list[torch.Tensor]) -> None:
        """Note the token that a step will read; where it takes a text past `steady`, read that anew, turned as a long one."""
        for b, prompt in enumerate(self.prompts):
            if len(prompt) + len(said) == self.steady:
                ids = prompt + (torch.stack(said)[:, b].tolist() if said else [])
                n, self.long = len(ids), True
                row, there = slice(b, b + 1), torch.tensor([ids], device=self.device)
                self._prompt(row, there, [n], 0, self._tables(n + 1), nothing)
        said.append(self.token.clone())
        if all(len(prompt) + len(said) > self.steady for prompt in self.prompts):
            self.said = None

    def _prompt(
        self,
        rows: slice,
        ids: torch.Tensor,
        lengths: list[int],
        known: int,
        tables: dict[str, Tables],
        between: Callable[[], None],
    ) -> torch.Tensor:
        """`_read` of some rows of the cache, by one table.

        What padding writes into the cache lies past the sequence's position and is overwritten before it is read.
        """
        B, T = ids.shape
        last = torch.empty(B, self.blocks.norm.weight.shape[0], dtype=self.dtype, device=self.device)
        ends = torch.tensor(lengths, device=self.device) - 1
        for some, tokens in passes(B, known, T):
            between()
            piece = ids[some, tokens]
            b, t = piece.shape
            x = self.blocks.embed(piece).reshape(b * t, -1)
            here = slice(rows.start + some.start, rows.start + some.stop)
            hidden = self._layers(x, partial(self._attend_prompt, here, tokens.start, tables)).reshape(b, t, -1)
            at = ends[some] - tokens.start
            inside = (at >= 0) & (at < t)
            found = hidden[torch.arange(b, device=self.device), at.clamp(0, t - 1)]
            last[some] = torch.where(inside[:, None], found, last[some])
        return last

    def _attend_prompt(
        self, some: slice, start: int, tables: dict[str, Tables], qkv: torch.Tensor, i: int, layer: Layer
    ) -> torch.Tensor:
        """Attention of a pass: of these sequences, from token `start` on."""
        k, v = (part(cache, some) for cache in self.caches[i])
        split = qkv.reshape(k.shape[0], -1, qkv.shape[-1])
        return self.ops.attend_prompt(split, k, v, start, *tables[layer.rope], layer.heads).flatten(0, 1)

    def _layers(self, x: torch.Tensor, attend: Any) -> torch.Tensor:
        """The residual stream x (M, H) through every layer and the last norm."""
        o, blocks = self.ops, self.blocks
        x = x.contiguous()
        delta = post = None
        for i, layer in enumerate(blocks.layers):
            y = o.add_norm(x, delta, layer.before_attention.weight, layer.before_attention.eps, post)
            delta = layer.o(attend(layer.qkv(y), i, layer))
            y = o.add_norm(x, delta, layer.before_mlp.weight, layer.before_mlp.eps, layer.post_attention)
            delta = self.mlp(y, layer.mlp)
            post = layer.post_mlp
        return o.add_norm(x, delta, blocks.norm.weight, blocks.norm.eps, post)

    def about(self, batch: int) -> str:
        """What a step of `batch` sequences does other than its kernels' names tell, for `--explain`."""
        fold = self.ops.fold
        if fold is None or not self.folds(batch):
            return ""
        gate_up = self.blocks.layers[0].mlp.gate_up  # type: ignore[union-attr]
        config = fold.config_of(gate_up, batch, self.dtype, fold.NORMED | fold.ACTS[self.blocks.act])
        values = ",".join(map(str, config.values()))
        return f"norms, residual sums and activations are done by the products, which takes config {values} for gate_up"

    def folds(self, M: int) -> bool:
        """Whether products of M rows can do what lies between them, in every layer."""
        fold = self.ops.fold
        return fold is not None and all(self._layer_folds(fold, layer, M) for layer in self.blocks.layers)

    def _layer_folds(self, fold: FoldedProducts, layer: Layer, M: int) -> bool:
        mlp, dtype = layer.mlp, self.dtype
        if layer.post_attention is not None or any(n.weight.dtype != dtype for n in (layer.before_attention, layer.before_mlp)):
            return False
        if fold.why_not(layer.qkv, M, dtype, fold.NORMED) or fold.why_not(layer.o, M, dtype, fold.ADDED):
            return False
        if isinstance(mlp, Mixture):  # its router, too, would have to take the stream: measured slower
            return False
        gate_up = fold.NORMED | fold.ACTS[self.blocks.act]
        return not (fold.why_not(mlp.gate_up, M, dtype, gate_up) or fold.why_not(mlp.down, M, dtype, fold.ADDED))

    def _folded(self, x: torch.Tensor, attend: Any) -> torch.Tensor:
        """As `_layers`, what lies between the products done by them (`folds`)."""
        fold, blocks = self.ops.fold, self.blocks
        assert fold is not None  # `_folds` has asked
        x, layers, act = x.contiguous(), blocks.layers, blocks.act
        first = layers[0].before_attention
        qkv, scale = layers[0].qkv(self.ops.add_norm(x, None, first.weight, first.eps)), self._ones(x.shape[0])
        for i, layer in enumerate(layers):
            mlp, inner = layer.mlp, layer.before_mlp
            assert isinstance(mlp, Mlp)
            stream = fold.product_add(layer.o, attend(qkv, i, layer), x, inner.weight, inner.eps, scale)
            h, scale = fold.norm_product_gate(mlp.gate_up, stream, act)
            if i + 1 < len(layers):
                norm = layers[i + 1].before_attention
                stream = fold.product_add(mlp.down, h, x, norm.weight, norm.eps, scale)
                qkv, scale = fold.norm_product(layers[i + 1].qkv, stream)
            else:  # what follows is the head, which may be of any kind
                delta = mlp.down(h)
        return self.ops.add_norm(x, delta, blocks.norm.weight, blocks.norm.eps)

    def _ones(self, M: int) -> torch.Tensor:
        if M not in self.ones:
            self.ones[M] = torch.ones(M, dtype=torch.float32, device=self.device)
        return self.ones[M]

    def mlp(self, x: torch.Tensor, mlp: Mlp | Mixture) -> torch.Tensor:
        """What a layer's second half adds to the residual stream, from its normed input x (M, H)."""
        if isinstance(mlp, Mlp):
            fold, act = self.ops.fold, self.blocks.act
            if fold is not None and not fold.why_not(mlp.gate_up, x.shape[0], self.dtype, fold.ACTS[act]):
                return mlp.down(fold.product_gate(mlp.gate_up, x, act))
            return mlp.down(self.ops.gated(mlp.gate_up(x), act))
        return mlp.experts(x, *self.ops.route(x, *mlp.route))

    def forward_step(self) -> None:
        """One token for each sequence; everything it reads and writes stays at fixed addresses."""
        x = self.blocks.embed(self.token)
        logits = self.repeated(self._whole, x) if self.repeated else self._whole(x)
        self.sampler.choose(self._capped(logits), advance=1)

    def _whole(self, x: torch.Tensor) -> torch.Tensor:
        """From the newest tokens' embeddings x (B, H) to logits."""

        def attend(qkv: torch.Tensor, i: int, layer: Layer) -> torch.Tensor:
            return self.ops.attend(qkv, *self.caches[i], self.pos, *self.rope[layer.rope], layer.heads)

        return dense.linear(self.blocks.head, self.hidden(x, attend))

    def hidden(self, x: torch.Tensor, attend: Callable[[torch.Tensor, int, Layer], torch.Tensor]) -> torch.Tensor:
        """Embeddings x (M, H) through every layer and the last norm; attend(qkv, index, layer) -> (M, HQ * D)."""
        return (self._folded if self.folds(x.shape[0]) else self._layers)(x, attend)

    def head(self, x: torch.Tensor) -> torch.Tensor:
        return self._capped(dense.linear(self.blocks.head, x))

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        if self.blocks.softcap:
            logits = self.blocks.softcap * torch.tanh(logits.float() / self.blocks.softcap)
        return logits

    def _graph(self) -> Captured | None:
        """This step as a CUDA graph, captured once per way of sampling; None, with a reason, where that fails."""
        key = replace(self.sampler.sampling, seed=0)
        if key not in self.captured:
            if len(self.captured) >= KEPT_GRAPHS:
                self.captured.clear()
            back = keep(self.sampler.state)
            try:
                found = capture(self.forward_step)
            except RuntimeError as e:
                self.graphs, self.reason = False, f"no CUDA graph: {str(e).splitlines()[0]}"
                found = None
            back()
            if found is None:
                return None
            found.logits = self.sampler.logits
            self.captured[key] = found
        return self.captured[key]


def passes(batch: int, known: int, longest: int) -> list[tuple[slice, slice]]:
    """(sequences, tokens) of each pass over prompts, from token `known` on: at most CHUNK tokens, whole prompts if they fit."""
    at_once = max(1, CHUNK // (longest - known))
    groups = [slice(b, min(b + at_once, batch)) for b in range(0, batch, at_once)]
    return [(g, slice(t, min(t + CHUNK, longest))) for g in groups for t in range(known, longest, CHUNK)]


def shared(held: list[int], prompt: list[int]) -> int:
    """Leading tokens that both have, short of the whole prompt: its last token is always read, for its logits."""
    most = min(len(held), len(prompt) - 1)
    return next((i for i in range(most) if held[i] != prompt[i]), most)
