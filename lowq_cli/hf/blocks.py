"""A causal model's decoder layers, one at a time in memory: what calibration walks through."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from lowq_cli.hf.skeleton import Skeleton, build
from lowq_cli.source import Source
from lowq_packers.errors import UnsupportedError

Hidden = torch.Tensor
Others = tuple[tuple[Any, ...], dict[str, Any]]  # what a layer is called with besides the hidden state


class Blocks:
    """The decoder layers of a source's model, in fp32 on a device; weights are read when a layer is entered.

    Raises UnsupportedError for a model whose layers are not a plain list, or hold weights that transformers rearranges while
    loading (mixtures of experts).
    """

    def __init__(self, source: Source, device: torch.device) -> None:
        self.source, self.device = source, device
        self.skeleton = Skeleton(build(source.config))
        self.model = self.skeleton.model.eval()
        self.base = self.model.base_model
        self.layers, prefix = _find_layers(self.base)
        prefix = f"{self.model.base_model_prefix}.{prefix}." if self.base is not self.model else f"{prefix}."
        self._mine: dict[int, list[tuple[str, str]]] = defaultdict(list)  # layer -> (checkpoint name, parameter in the layer)
        self._rest: list[tuple[str, str]] = []
        for name in source.headers:
            place = self.skeleton.place(name)
            if place is None:
                continue
            if not place.param.startswith(prefix):
                self._rest.append((name, place.param))
                continue
            if place.merged:
                raise UnsupportedError(
                    f"{name} is merged with others while it is loaded; such layers cannot be calibrated, use --method lsq"
                )
            number, _, inside = place.param.removeprefix(prefix).partition(".")
            self._mine[int(number)].append((name, inside))

    def __len__(self) -> int:
        return len(self.layers)

    def linears(self, number: int) -> dict[str, str]:
        """Checkpoint name without ".weight" -> module in the layer, for each of its linear weights."""
        found = {}
        for name, inside in self._mine[number]:
            module, leaf = _owner(self.layers[number], inside)
            if leaf == "weight" and isinstance(module, nn.Linear | Conv1D):
                found[name.removesuffix(".weight")] = inside.rpartition(".")[0]
        return found

    @torch.no_grad()
    def start(self, windows: torch.Tensor, batch: int) -> tuple[list[Hidden], list[Others]]:
        """The first layer's input for each `batch` rows of `windows` (n, T), and every layer's other arguments (of a batch)."""
        _fill_buffers(self.model, self.device)  # before the weights, which transformers' way of doing it would overwrite
        self._fill(self.model, self._rest)
        first: list[Hidden] = []
        others: list[Others] = [((), {})] * len(self.layers)
        forwards = [layer.forward for layer in self.layers]
        for number, layer in enumerate(self.layers):
            layer.forward = _recorder(number, first, others)
        try:
            for i in range(0, len(windows), batch):
                self.base(input_ids=windows[i : i + batch].to(self.device), use_cache=False)
        finally:
            for layer, forward in zip(self.layers, forwards, strict=True):
                layer.forward = forward
            self._empty(self.model, self._rest)
        return first, others

    @contextmanager
    def layer(self, number: int) -> Iterator[nn.Module]:
        """A decoder layer with its weights; they are dropped on leaving."""
        module = self.layers[number]
        self._fill(module, self._mine[number])
        try:
            yield module
        finally:
            self._empty(module, self._mine[number])

    def _fill(self, root: nn.Module, names: list[tuple[str, str]]) -> None:
        for name, inside in names:
            module, leaf = _owner(root, inside)
            if leaf in module._parameters:
                shape = self.source.headers[name].shape
                value = self.source.read(name).reshape(shape).to(self.device, torch.float32)
                module._parameters[leaf] = nn.Parameter(value, requires_grad=False)

    @staticmethod
    def _empty(root: nn.Module, names: list[tuple[str, str]]) -> None:
        for _, inside in names:
            module, leaf = _owner(root, inside)
            value = module._parameters.get(leaf)
            if value is not None:
                module._parameters[leaf] = nn.Parameter(torch.empty_like(value, device="meta"))


def run(layer: nn.Module, hidden: Hidden, others: Others) -> Hidden:
    """The layer's output."""
    out = layer(hidden, *others[0], **others[1])
    return out[0] if isinstance(out, tuple) else out


def _find_layers(base: nn.Module) -> tuple[nn.ModuleList, str]:
    """The longest list of modules directly below the decoder, and its path."""
    decoder: nn.Module = base.get_decoder() if hasattr(base, "get_decoder") else base  # type: ignore[operator]
    path = next((n for n, m in base.named_modules() if m is decoder), "")
    lists = [(n, m) for n, m in decoder.named_children() if isinstance(m, nn.ModuleList)]
    if not lists:
        raise UnsupportedError(f"{type(base).__name__} has no list of decoder layers to calibrate; use --method lsq")
    name, layers = max(lists, key=lambda pair: len(pair[1]))
    return layers, f"{path}.{name}" if path else name


def _owner(root: nn.Module, path: str) -> tuple[nn.Module, str]:
    module, _, leaf = path.rpartition(".")
    return root.get_submodule(module), leaf


def _fill_buffers(model: Any, device: torch.device) -> None:
    """Give buffers that no file holds (rotary frequencies) their values, as transformers does after loading."""
    for module in model.modules():
        missing = [n for n, b in module._buffers.items() if b is not None and b.is_meta]
        if missing:
            for name in missing:
                module._buffers[name] = torch.empty_like(module._buffers[name], device=device)
            model._init_weights(module)


def _recorder(number: int, first: list[Hidden], others: list[Others]) -> Any:
    """A stand-in for a layer's forward: it notes what it was called with and passes the hidden state on."""

    def forward(hidden_states: Hidden, *args: Any, **kwargs: Any) -> Hidden:
        if number == 0:
            first.append(hidden_states)
        others[number] = args, kwargs
        return hidden_states

    return forward
