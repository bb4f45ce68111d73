"""A model's description and weights as a flat list of operations, which every pass runs: prompts, steps and drafts.

Decoder and server use a model through its `Plan`: the steps, the state that its layers need per sequence, embedding and head.
Folding, compiling in advance, `--explain` and the timeline are loops over the list.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lowq_cli.engine import folding, lora_folding, rope
from lowq_cli.engine import steps as s
from lowq_cli.engine import weights as of_model
from lowq_cli.engine.batch import Batch, KeyValues, States
from lowq_cli.engine.compiling import Compiler, Weights
from lowq_cli.engine.expert_steps import Experts, Route
from lowq_cli.engine.mixer_steps import Attend
from lowq_cli.engine.model_record import note, up_to_date
from lowq_cli.engine.rope import Rotation, Tables
from lowq_cli.hf.embedding import embed_scale
from lowq_cli.hf.experts import FEW_ROWS, QuantExperts
from lowq_kernels.activations import STEPS
from lowq_kernels.decode import Ops, ops
from lowq_kernels.decode.prepare import unrotated
from lowq_kernels.decode.reference import tile_rows
from lowq_kernels.dispatch.registry import scope
from lowq_kernels.lasting import kept
from lowq_kernels.modules import dense
from lowq_packers.arch.parts import Model, Pages, Rope


class Plan:
    """The operations of a model.

    Attributes:
        steps: from the embedded tokens x to the normed hidden states y. states: the state that each stateful step needs per
        sequence. kept_by: layer -> number of its keys and values in the state. linears: the layers that multiply, under short
        names ("layers.0.qkv"), for `--explain`.
    """

    def __init__(self, model: Model, config: Any, weights: Weights, device: torch.device, dtype: torch.dtype) -> None:
        self.model, self.config, self.device, self.dtype = model, config, device, dtype
        self.ops: Ops = ops(device.type)
        self.embedding, self.head = weights.embed, weights.head
        module_scale = (
            embed_scale(self.embedding) if isinstance(self.embedding, nn.Embedding) else getattr(self.embedding, "scale", None)
        )
        self.scale = (
            1.0 if module_scale not in (None, 1.0) else model.embed_scale
        )  # an embedding module with a scale already multiplies
        compiled = Compiler(model, weights, dtype)
        self.states, self.kept_by, self.taps = compiled.states, compiled.layer_state, tuple[int, ...]()
        self._entered, self._untapped = compiled.entered, compiled.steps
        self._set(compiled.steps)
        self.tokens = compiled.token_table(model.tokens) if model.tokens else None
        self.embed_norm = compiled.norm(model.embed_norm) if model.embed_norm else None
        named = nn.ModuleList(nn.ModuleDict(products) for products in compiled.products)
        self.linears = nn.ModuleDict({"layers": named, "head": self.head})
        self.rotations = _rotations(compiled.ropes, config)
        self.vocabulary = int(self.head.out_features)  # type: ignore[arg-type]
        self.read_as: torch.Tensor | None = None  # (V,) int64: the token whose embedding each token has; None: its own
        if model.read_as:
            self.read_as = torch.arange(model.vocab, device=device)
            for token, other in model.read_as:
                self.read_as[token] = other
        widest = max((spec.k_dim for spec in self.states if isinstance(spec, Pages)), default=0)
        self.tile = tile_rows(widest)
        self.adapters: Any = None  # `lora_product.Adapters`, or None
        self.adds_in_gates = device.type == "cuda"  # whether steps of few rows with adapters are those of `lora_folding`
        self.tuned = ""  # as in `model_record.Owned`
        self._folded: dict[tuple[int, bool, bool], Sequence[s.Step]] = {}
        self._ones: dict[int, torch.Tensor] = {}  # number of rows -> ones in fp32, kept because recorded steps read them

    @property
    def grouped_by_host(self) -> bool:
        """Whether the host groups the tokens of some layer's experts in large passes; such a pass cannot be recorded."""
        routed = [step.experts for step in self.steps if isinstance(step, Experts)]
        return not all(isinstance(experts, QuantExperts) and experts.grouped(self.dtype) for experts in routed)

    @property
    def most_recorded(self) -> float:
        """Rows of the largest step worth recording: where no kernel takes the experts, a graph copies each row's experts."""
        chosen = [step.facts.top_k for step in self.steps if isinstance(step, Route)]  # one before each step of experts
        routed = [step.experts for step in self.steps if isinstance(step, Experts)]
        alone = [k for k, e in zip(chosen, routed, strict=True) if e.fused(self.dtype, k) is None]
        return max(1, FEW_ROWS // max(alone)) if alone else math.inf

    def program(self, M: int, shows: bool = False, adapted: bool | None = None) -> Sequence[s.Step]:
        """The steps for M rows, with neighbours folded into products where possible.

        shows: with the steps for images. adapted: with adapters; None: as for rows that do not state one.
        """
        M, adapted = min(M, STEPS + 1), self.everywhere if adapted is None else adapted  # more rows are folded alike
        key = M, shows, adapted
        if key not in self._folded:
            steps: Sequence[s.Step] = folding.fold(self._unfolded[shows, adapted], self.ops, M, self.dtype)
            self._folded[key] = lora_folding.fold(steps) if adapted and self.adds_in_gates and M <= STEPS else steps
        return self._folded[key]

    def refold(self) -> None:
        """Fold anew what later passes run: a product is folded only while dispatch chooses a kernel that folds."""
        self._folded.clear()

    @property
    def everywhere(self) -> bool:
        """Whether rows that do not state an adapter have one."""
        return self.adapters is not None and bool(self.adapters.all)

    def about(self, batch: int) -> str:
        """Facts about a step of `batch` sequences that the kernels' names do not show, for `--explain`; "" without any."""
        fold = self.ops.fold
        gates = [step for step in self.program(batch) if isinstance(step, folding.NormProduct) and step.act]
        if fold is None or not gates:
            return ""
        config = fold.config_of(gates[0].layer, batch, self.dtype, fold.NORMED | fold.ACTS[gates[0].act])
        values = ",".join(map(str, config.values()))
        return f"norms, residual adds and activations are fused into the matmuls, with config {values} for gate_up"

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings (..., H) of token ids (...), scaled and normed for the first layer."""
        x = self.embedding(self._read(ids))
        x = x if self.scale == 1.0 else x * self.scale
        return x if self.embed_norm is None else self.ops.normed(x, self.embed_norm)

    def _set(self, steps: list[s.Step]) -> None:
        """Set the steps; passes without images leave out the steps that only images need, and passes in which no row has an
        adapter run the steps of the base."""
        self.of_pictures, self.steps = steps, [step for step in steps if not isinstance(step, s.AddFeatures)]
        self._unfolded = {(shows, True): each for shows, each in ((False, self.steps), (True, self.of_pictures))}
        self._unfolded |= {(shows, False): [step.base for step in each] for (shows, _), each in self._unfolded.items()}

    def rewrite(self, step_of: Callable[[s.Step], s.Step]) -> None:
        """Replace each step by step_of(step), permanently."""
        taps, self._untapped = self.taps, [step_of(step) for step in self._untapped]
        self.taps = ()
        self._set(self._untapped)
        self.refold()
        self.tap(taps)

    def tap(self, layers: tuple[int, ...]) -> None:
        """Make passes copy the residual stream that enters these layers, in this order; one past the last layer: its output.

        The stream is copied after the product that reads it, so that norms and sums stay folded into their products.
        """
        if layers == self.taps:
            return
        steps, self.taps = list(self._untapped), layers
        for layer in sorted(set(layers), reverse=True):
            at = self._entered[layer]
            steps.insert(at + (at < len(steps) and steps[at].what == "product"), s.Tap(layer))
        self._set(steps)
        self.refold()

    def hidden(
        self,
        x: torch.Tensor,
        batch: Batch,
        state: Sequence[KeyValues | States],
        taps: list[torch.Tensor] | None = None,
        state_only: bool = False,
    ) -> torch.Tensor:
        """Run embeddings x (M, H) through every layer and the last norm; returns (M, H). State is read and written.

        taps: a list to which the streams of `tap` are appended, (M, H) each. state_only: as `run` takes it.
        """
        frame = s.Frame(x.contiguous(), batch, state, taps=None if taps is None else {})
        if batch.pictures is not None and batch.shows:
            frame.x = batch.pictures.shown(frame.x)
        if self.tokens is not None:
            frame.kept["table"] = self.tokens(self._read(batch.ids), frame.x).flatten(1)
        self.run(frame, state_only)
        if taps is not None and frame.taps is not None:
            taps += [frame.taps[i] for i in self.taps]
        return frame.y

    def run(self, frame: s.Frame, state_only: bool = False) -> s.Frame:
        """Run every step on a frame; returns the frame. state_only: none after the last that writes state, as nothing else
        counts."""
        x, shows, adapted = frame.x, frame.batch.shows, frame.batch.adapters is not None or self.everywhere
        steps = self.program(x.shape[0], shows, adapted)
        if steps is not self._unfolded[shows, adapted] and x.shape[0] <= STEPS:
            frame.kept[folding.SCALE] = self._row_of_ones(x.shape[0])
        if state_only:
            steps = steps[: 1 + max(i for i, step in enumerate(steps) if step.state)]
        outer, pause = scope.set(self.tuned), frame.batch.pause
        try:
            for step in steps:
                if pause is not None:
                    pause()
                step.run(frame)
        finally:
            scope.reset(outer)
        return frame

    def _read(self, ids: torch.Tensor) -> torch.Tensor:
        return ids if self.read_as is None else self.read_as[ids]

    def make_ready(self, M: int) -> None:
        """Make what the plan keeps for passes of M rows, before such a pass is recorded without being run."""
        if M <= STEPS:
            self._row_of_ones(M)
        self.program(M)

    def _row_of_ones(self, M: int) -> torch.Tensor:
        return kept(self._ones, M, lambda: torch.ones(M, dtype=torch.float32, device=self.device))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Logits (M, V) of normed hidden states (M, H), before factor and soft cap (`capped`)."""
        return dense.linear(self.head, x)

    def capped(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits with the model's factor and soft cap."""
        if self.model.logit_scale != 1.0:
            logits = logits * self.model.logit_scale
        return self.ops.softcapped(logits, cap) if (cap := self.model.softcap) else logits

    def angles(self, slots: int, device: torch.device, length: int | None = None) -> Mapping[Rope | int, Tables]:
        """Tables cos, sin (slots, R) of each kind of rotation, rounded as in transformers, for a sequence of `length` tokens.
        Under a head dim D: tables (slots, D) that do not rotate."""
        tables: dict[Rope | int, Tables] = {}
        for step in self.steps:
            if isinstance(step, Attend) and (step.rope is None or (self.model.images and self.model.images.sections)):
                tables[step.heads.D] = unrotated(slots, step.heads.D, torch.empty(0, dtype=self.dtype, device=device))
        for kind, r in self.rotations.items():
            tables[kind] = r.tables(slots, device, self.dtype, length)
        return tables


def _rotations(ropes: Iterable[Rope], config: Any) -> dict[Rope, Rotation]:
    kinds, limit = rope.by_kind(getattr(config, "rope_parameters", None)), getattr(config, "max_position_embeddings", None)
    return {r: Rotation(kinds[r.kind], r.dims, r.of, limit) for r in ropes}


@torch.inference_mode(False)  # joined weights become the model's, which may be trained
def plan_of(model: Any) -> Plan:
    """The plan of a model for which `why_not` is None; a transformers model's is kept with it until the model is changed."""
    record = up_to_date(model)
    plan = record.plan
    if plan is None or (plan.device, plan.dtype) != (model.device, model.dtype):
        described, _ = of_model.describe(model.config)
        plan = Plan(
            described, model.config.get_text_config(), of_model.ModelWeights(model, described), model.device, model.dtype
        )
        plan.tuned, record.plan = record.tuned, plan
        record.adapt(plan)
        note(model)
    return plan


def why_not(model: Any) -> str | None:
    """The reason why this model has no plan, or None."""
    return None if isinstance(getattr(model, "plan", None), Plan) else of_model.why_not(model)
