"""A causal model's decoder layers, one at a time in memory; calibration runs them in order."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lowq_cli.files.source import WHOLE, Cut, Source
from lowq_cli.hf.expert_kinds import Kind
from lowq_cli.hf.skeleton import Skeleton, build
from lowq_packers.errors import LowqError, UnsupportedError, one_line

Hidden = torch.Tensor


class Others(NamedTuple):
    """What a layer needs besides the hidden state.

    args, kwargs: its further arguments, the same for every batch. added: what the model adds to the layer's output, for each
    batch (on the CPU, sparse); empty if nothing. Qwen3-VL adds features of images behind its first layers (deepstack).
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    added: list[Hidden]


@dataclass(frozen=True)
class Spot:
    """The place of a checkpoint tensor's matrix in a decoder layer: a parameter, or a cut of one."""

    module: str
    leaf: str = "weight"
    cut: Cut = WHOLE  # `cut.transposed` in Conv1D

    @property
    def path(self) -> str:
        """The parameter's name in the layer."""
        return f"{self.module}.{self.leaf}"


@dataclass(frozen=True)
class _Tensor:
    """A checkpoint tensor, the parameter of the layer (or model) it fills, and which part of it (None: all)."""

    name: str
    inside: str
    cut: Cut | None = None


class DecoderLayers:
    """The decoder layers of a source's model, in fp32 on a device; weights are read when a layer is entered.

    Raises UnsupportedError for a model whose layers are not a plain list, or have weights that transformers transforms while
    loading in other ways than concatenation.
    """

    def __init__(self, source: Source, device: torch.device) -> None:
        self.source, self.device = source, device
        self.skeleton = Skeleton(build(source.config))
        self.model = self.skeleton.model.eval()
        for module in self.model.modules():  # "eager", the loop over experts: the others need a GPU or half precision
            config: Any = getattr(module, "config", None)
            if hasattr(config, "_experts_implementation"):
                config._experts_implementation = "eager"
        self.base = self.model.base_model
        self.pictures: Callable[[torch.Tensor], dict[str, torch.Tensor]] | None = None  # ids (n, T) -> the model's arguments
        self.layers, prefix = find_layers(self.base)
        prefix = f"{self.model.base_model_prefix}.{prefix}." if self.base is not self.model else f"{prefix}."
        self._mine: dict[int, list[_Tensor]] = defaultdict(list)
        self._rest: list[_Tensor] = []
        self._prefix = prefix
        cuts = cache(self.skeleton.inside)
        for name in source.headers:
            place = self.skeleton.place(name)
            if place is None:
                continue
            if not place.param.startswith(prefix):
                self._rest.append(_Tensor(name, place.param))
                continue
            cut = cuts(place.param).get(name) if place.merged else None
            if place.merged and cut is None:
                raise UnsupportedError(
                    f"{name} is rearranged while it is loaded; such layers cannot be calibrated, use --method lsq"
                )
            number, _, inside = place.param.removeprefix(prefix).partition(".")
            self._mine[int(number)].append(_Tensor(name, inside, cut))

    def __len__(self) -> int:
        return len(self.layers)

    def linears(self, number: int) -> dict[str, Spot]:
        """Checkpoint name without ".weight" -> place in the layer, for each linear weight, including those of experts."""
        places = {}
        for tensor in self._mine[number]:
            module, leaf = _owner(self.layers[number], tensor.inside)
            path = tensor.inside.rpartition(".")[0]
            if leaf == "weight" and isinstance(module, nn.Linear | Conv1D):
                rows = tensor.cut.rows if tensor.cut else None
                places[tensor.name] = Spot(path, cut=Cut(rows=rows, transposed=isinstance(module, Conv1D)))
            elif leaf in self._stacks(whole := f"{self._prefix}{number}.{tensor.inside}"):
                cuts = {tensor.name: tensor.cut} if tensor.cut else self.skeleton.inside(whole)
                places |= {name: Spot(path, leaf, cut) for name, cut in cuts.items()}
        return {name.removesuffix(".weight"): spot for name, spot in places.items()}

    def _stacks(self, param: str) -> tuple[str, ...]:
        """The stacks of the parameter's module of experts; empty if calls do not give the experts that a token visits."""
        kind = self.skeleton.kinds.get(param.rpartition(".")[0])
        return kind.stacks if isinstance(kind, Kind) and not kind.every_token and len(kind.stacks) > 1 else ()

    @property
    def has_experts(self) -> bool:
        """Whether some layer runs only the experts that tokens visit: transformers' loop over them asks the GPU which."""
        return bool(self.skeleton.kinds)

    def kept(self, number: int) -> dict[str, str]:
        """Parameter in the layer -> checkpoint name, for parameters that one tensor fills."""
        parameters = dict(self.layers[number].named_parameters())
        return {t.inside: t.name for t in self._mine[number] if t.cut is None and t.inside in parameters}

    def embedding_path(self) -> str:
        """The model's parameter that holds the input embedding."""
        table = self.model.get_input_embeddings()
        return next(f"{path}.weight" for path, module in self.model.named_modules() if module is table)

    def around(self) -> dict[str, str]:
        """The model's parameter -> checkpoint name, for the embedding, the head and the norms next to the list of layers."""
        tables = (self.model.get_input_embeddings(), self.model.get_output_embeddings())
        found, beside = {}, self._prefix.rstrip(".").rpartition(".")[0]
        for t in self._rest:
            module, leaf = _owner(self.model, t.inside)
            norm = t.inside.rpartition(".")[0].rpartition(".")[0] == beside and is_norm(module)
            if t.cut is None and leaf == "weight" and (norm or module in tables):
                found[t.inside] = t.name
        return found

    @torch.no_grad()
    def start(
        self, windows: torch.Tensor, batch: int, instead: Mapping[str, torch.Tensor] | None = None
    ) -> tuple[list[Hidden], list[Others]]:
        """The first layer's input for each batch of `windows` (n, T), and what every layer needs besides it.

        instead: checkpoint name -> values that replace the source's for tensors outside the layers, e.g. a quantized embedding.
        """
        _fill_buffers(self.model, self.device)  # before the weights, which this would overwrite
        self._fill(self.model, self._rest)
        for t in self._rest:
            if instead and t.name in instead:
                module, leaf = _owner(self.model, t.inside)
                module._parameters[leaf] = nn.Parameter(instead[t.name].to(self.device), requires_grad=False)
        first: list[Hidden] = []
        others = [Others((), {}, []) for _ in self.layers]
        forwards = [layer.forward for layer in self.layers]
        record = _recorder(first, others, bool(self.pictures))
        for number, layer in enumerate(self.layers):
            layer.forward = partial(record, number)
        try:
            for i in range(0, len(windows), batch):
                ids = windows[i : i + batch]
                given = self.pictures(ids) if self.pictures else {"input_ids": ids}
                with _layer_errors_as_unsupported(type(self.model).__name__):
                    self.base(**{k: t.to(self.device) for k, t in given.items()}, use_cache=False)
        finally:
            for layer, forward in zip(self.layers, forwards, strict=True):
                layer.forward = forward
            self._empty(self.model, self._rest)
        return first, [o if any(t.values().numel() for t in o.added) else o._replace(added=[]) for o in others]

    @contextmanager
    def tail(self) -> Iterator[Callable[..., torch.Tensor]]:
        """A function of ids (n, T), the last layer's output for them and other values of the model's parameters (by name).

        It returns logits, differentiable in that output and in those values. In this context `entering` can be called, too.
        """
        self._fill(self.model, self._rest)
        tied = {p: s for p, s in self.skeleton.tied.items() if not p.startswith(self._prefix)}
        for param, source in tied.items():
            (module, leaf), (other, theirs) = _owner(self.model, param), _owner(self.model, source)
            module._parameters[leaf] = other._parameters[theirs]
        forwards = [layer.forward for layer in self.layers]
        try:

            def logits(ids: torch.Tensor, hidden: Hidden, values: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor:
                for layer in self.layers:
                    layer.forward = lambda *_, **__: hidden.as_subclass(_Output)
                words = ids.clamp(min=0).to(self.device)  # ids below zero are rows of images, which are already in `hidden`
                given = {"input_ids": words, "use_cache": False}
                return functional_call(self.model, dict(values or {}), (), given).logits

            yield logits
        finally:
            for layer, forward in zip(self.layers, forwards, strict=True):
                layer.forward = forward
            self._empty(self.model, self._rest)

    def inside(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Values by checkpoint name -> by the model's parameter, for tensors outside the layers."""
        return {t.inside: values[t.name] for t in self._rest if t.name in values}

    def entering(self, ids: torch.Tensor, values: Mapping[str, torch.Tensor]) -> Hidden:
        """The first layer's input for ids (n, T), differentiable in `values` of the model's parameters; for use in `tail`.

        It replaces the layers' forwards.
        """
        first: list[Hidden] = []
        others = [Others((), {}, []) for _ in self.layers]
        record = _recorder(first, others, False)
        for number, layer in enumerate(self.layers):
            layer.forward = partial(record, number)
        outer = "" if self.base is self.model else f"{self.model.base_model_prefix}."
        given = {p.removeprefix(outer): t for p, t in values.items()}
        functional_call(self.base, given, (), {"input_ids": ids.to(self.device), "use_cache": False})
        return first[0]

    @contextmanager
    def layer(self, number: int) -> Iterator[nn.Module]:
        """Inside this context the decoder layer has its weights; they are dropped on leaving."""
        module = self.layers[number]
        self._fill(module, self._mine[number])
        try:
            yield module
        finally:
            self._empty(module, self._mine[number])

    def _fill(self, root: nn.Module, tensors: list[_Tensor]) -> None:
        for t in tensors:
            module, leaf = _owner(root, t.inside)
            parameter = module._parameters.get(leaf)
            shape = self.source.headers[t.name].shape
            if parameter is None:
                if (buffer := module._buffers.get(leaf)) is not None:  # e.g. the bias in DeepSeek-V3's choice of experts
                    module._buffers[leaf] = self.source.read(t.name).reshape(shape).to(self.device, _in_fp32(buffer))
                continue
            value = self.source.read(t.name).reshape(shape).to(self.device, torch.float32)
            if t.cut is None:
                module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
                continue
            if parameter.is_meta:
                parameter = nn.Parameter(torch.empty(parameter.shape, device=self.device), requires_grad=False)
                module._parameters[leaf] = parameter
            t.cut.of(parameter.data).copy_(value)

    @staticmethod
    def _empty(root: nn.Module, tensors: list[_Tensor]) -> None:
        for t in tensors:
            module, leaf = _owner(root, t.inside)
            value = module._parameters.get(leaf)
            if value is not None:
                module._parameters[leaf] = nn.Parameter(torch.empty_like(value, device="meta"))


def run(layer: nn.Module, hidden: Hidden, others: Others) -> Hidden:
    """The layer's output. Raises UnsupportedError for a layer that cannot run without its model."""
    with _layer_errors_as_unsupported(type(layer).__name__):
        out = layer(hidden, *others.args, **others.kwargs)
    return out[0] if isinstance(out, tuple) else out


def following(out: Hidden, others: Others, batch: int) -> Hidden:
    """The next layer's input for a layer's output of batch number `batch`."""
    return out + others.added[batch].to(out.device) if others.added else out


def find_layers(base: nn.Module) -> tuple[nn.ModuleList, str]:
    """The longest list of modules directly below the decoder, or below its text model (Llama 4), and its path."""
    decoder: nn.Module = base.get_decoder() if hasattr(base, "get_decoder") else base  # type: ignore[operator]
    for part in (decoder, *(m for m in decoder.children() if isinstance(m, PreTrainedModel))):
        if lists := [m for m in part.children() if isinstance(m, nn.ModuleList)]:
            layers = max(lists, key=len)
            return layers, next(n for n, m in base.named_modules() if m is layers)
    raise UnsupportedError(f"{type(base).__name__} has no list of decoder layers to calibrate; use --method lsq")


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm."""
    return "Norm" in type(module).__name__


def _owner(root: nn.Module, path: str) -> tuple[nn.Module, str]:
    module, _, leaf = path.rpartition(".")
    return root.get_submodule(module), leaf


def _in_fp32(t: torch.Tensor) -> torch.dtype:
    """The dtype that a tensor is converted to here: fp32 if it is floating point, otherwise its own."""
    return torch.float32 if t.is_floating_point() else t.dtype


def _fill_buffers(model: Any, device: torch.device) -> None:
    """Give buffers that no file holds (rotary frequencies) their values, as transformers does after loading: the class of each
    part initializes the part's buffers, e.g. a tower's class those of the tower."""
    owners = {m: part for part in model.modules() if hasattr(part, "_init_weights") for m in part.modules()}  # innermost
    for module in model.modules():
        missing = [n for n, b in module._buffers.items() if b is not None and b.is_meta]
        if missing:
            for name in missing:
                module._buffers[name] = torch.empty_like(module._buffers[name], device=device)
            owners[module]._init_weights(module)


@contextmanager
def _layer_errors_as_unsupported(name: str) -> Iterator[None]:
    """Turns errors of transformers' code, when its layers run separately, into UnsupportedError."""
    try:
        yield
    except (LowqError, torch.OutOfMemoryError):
        raise
    except (TypeError, ValueError, IndexError, KeyError, AttributeError, RuntimeError) as e:
        raise UnsupportedError(
            f"{name} cannot be run layer by layer ({one_line(e)}); use --method lsq, which needs no text"
        ) from e


class _Output(torch.Tensor):
    """A hidden state whose item 0 is itself, because models use either a layer's `out` or its `out[0]`."""

    def __getitem__(self, key: Any) -> Any:
        return self if key == 0 else super().__getitem__(key)


def _recorder(first: list[Hidden], others: list[Others], adds: bool) -> Any:
    """Replaces the forward of layer `number`: records the arguments and returns the hidden state unchanged.

    adds: whether to record what the model adds between two layers.
    """
    before: Hidden

    def forward(number: int, hidden_states: Hidden, *args: Any, **kwargs: Any) -> Hidden:
        nonlocal before
        if number == 0:
            first.append(hidden_states)
        elif adds:
            more = (hidden_states - before).as_subclass(torch.Tensor)
            others[number - 1].added.append(more.to_sparse(2).cpu())
        others[number] = Others(args, kwargs, others[number].added)
        before = hidden_states
        return hidden_states.as_subclass(_Output)

    return forward
