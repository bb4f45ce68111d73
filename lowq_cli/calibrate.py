"""Calibrated quantization: walk the model layer by layer on a text, quantize each layer's linears on the inputs they get.

Two streams of hidden states go through the model: x through the original layers, x' through the quantized ones. The inputs
of one stage (linears that share an input: q/k/v, o, gate/up, down) are measured behind everything quantized before it. One
decoder layer is in memory at a time, with both streams. Each finished layer is set down in a folder beside the checkpoint, so
a rerun continues behind it; the pipeline then takes its rows from there and writes as it always does.
"""

import hashlib
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from lowq_cli import quantizers
from lowq_cli.perplexity import tokenize, windows
from lowq_cli.plan import Item, Plan
from lowq_cli.quantizers.gptq import SLAB, Moments
from lowq_cli.safetensors_io import TORCH_NAMES
from lowq_cli.source import Source
from lowq_cli.writer import writing
from lowq_packers.errors import DamagedError, NotFoundError, UsageError
from lowq_packers.qtensor import QuantizedTensor

WINDOW = 512
BATCH = 8  # windows at a time
DEFAULT_TEXT = Path(__file__).parent / "demo" / "calibration.txt"
STAGED = "lowq-calibrated-"  # + run hash: the folder of finished layers
Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class LayerDone:
    """One decoder layer is quantized. error: mean over its linears of ||W X' - W_q X'||^2 / ||W X'||^2, 0 where resumed."""

    index: int
    total: int
    error: float
    seconds: float
    resumed: bool


def is_calibrated(plan: Plan) -> bool:
    """Whether a plan holds matrices whose method reads a text."""
    return any(i.method and quantizers.needs_text(i.method) for i in plan.items)


def identity(plan: Plan) -> str:
    """A hash of the text and the number of tokens, for the name of the run; "" where nothing is calibrated."""
    if not is_calibrated(plan):
        return ""
    digest = hashlib.sha256(read_text(plan.recipe.calib).encode()).hexdigest()[:16]
    return f"{digest} {plan.recipe.calib_tokens}"


def working_bytes(plan: Plan) -> int:
    """Bytes that calibrating takes on the device: a layer's weights twice, its moments, both streams, a slab being rounded."""
    items = [i for i in plan.items if i.method and quantizers.needs_text(i.method)]
    if not items:
        return 0
    layers: dict[str, int] = {}
    for i in items:
        number = re.search(r"\.(\d+)\.", i.name)
        layers[number[1] if number else ""] = layers.get(number[1] if number else "", 0) + i.params
    widest = max(i.shape[1] for i in items)
    hidden = min(i.shape[1] for i in items)
    inputs = 8 * BATCH * WINDOW * widest
    streams = 2 * plan.recipe.calib_tokens * hidden
    return 4 * (2 * max(layers.values()) + 5 * widest**2 + inputs + streams + 4 * min(SLAB, max(i.params for i in items)))


def read_text(path: str | None) -> str:
    """The calibration text: a .txt file, a .jsonl file of {"text": ...}, all such files in a folder, or the bundled one.

    Raises NotFoundError, UsageError.
    """
    root = DEFAULT_TEXT if path is None else Path(path).expanduser()
    if root.is_dir():
        files = sorted(p for p in root.iterdir() if p.suffix in (".txt", ".jsonl"))
        if not files:
            raise NotFoundError(f"{root} holds no .txt or .jsonl file to calibrate on")
        return "\n\n".join(read_text(str(p)) for p in files)
    try:
        text = root.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise UsageError(f"{root} is not UTF-8 text ({e.reason} at byte {e.start})") from None
    except OSError as e:
        raise NotFoundError(f"cannot read the calibration text {root}: {e.strerror}") from None
    if root.suffix == ".jsonl":
        try:
            text = "\n\n".join(json.loads(line)["text"] for line in text.splitlines() if line.strip())
        except (ValueError, KeyError, TypeError):
            raise UsageError(f'{root} must hold one JSON object with a "text" per line') from None
    if not text.strip():
        raise UsageError(f"the calibration text {root} is empty")
    return text


def choose_windows(tokenizer: Any, text: str, tokens: int) -> torch.Tensor:
    """(n, WINDOW) token ids: `tokens` of them in windows spread evenly over the text, or all if it has fewer.

    Raises UsageError for a text of fewer tokens than a batch.
    """
    cut = windows(tokenize(tokenizer, text), WINDOW)
    count = min(len(cut), max(1, tokens // WINDOW)) // BATCH * BATCH
    if cut.shape[1] < WINDOW or count == 0:
        raise UsageError(
            f"calibration needs {BATCH * WINDOW} tokens or more, the text has {cut.numel()}; give a longer --calib"
        )
    return cut[torch.linspace(0, len(cut) - 1, count).round().long()]


class Calibration:
    """The calibrated part of one run. `run` does the work; `quantizer` then hands its results to the pipeline.

    Args:
        folder: the output folder. run_hash: names the run, so that only its own finished layers are taken up.
    Raises:
        UnsupportedError: a family whose layers cannot be walked. NotFoundError, UsageError: the text.
    """

    def __init__(self, source: Source, plan: Plan, folder: Path, run_hash: str, device: torch.device) -> None:
        from lowq_cli.hf.blocks import Blocks
        from lowq_cli.hf.load import load_tokenizer

        self.device = device
        self.blocks = Blocks(source, device)
        self.ids = choose_windows(load_tokenizer(source), read_text(plan.recipe.calib), plan.recipe.calib_tokens)
        self.items = {i.name: i for i in plan.items if i.method and quantizers.needs_text(i.method)}
        self.folder = folder / (STAGED + run_hash)
        self.layer_of: dict[str, Path] = {}

    def run(self) -> Iterator[LayerDone]:
        """Quantize every layer that is not done yet, in order."""
        blocks = self.blocks
        for old in self.folder.parent.glob(STAGED + "*"):
            if old != self.folder:
                shutil.rmtree(old)
        with writing(self.folder):
            self.folder.mkdir(exist_ok=True)
        original, others = blocks.start(self.ids, BATCH)
        behind = [x.clone() for x in original]
        for number in range(len(blocks)):
            began = time.monotonic()
            path = self.folder / f"layer-{number:05d}.safetensors"
            mine = {n: m for n, m in blocks.linears(number).items() if n in self.items}
            self.layer_of |= dict.fromkeys(mine, path)
            done = path.is_file()
            error = 0.0
            with torch.no_grad(), blocks.layer(number) as layer:
                walk = _Layer(layer, others[number], {n: layer.get_submodule(m) for n, m in mine.items()})
                if done:
                    for name in mine:
                        walk.set(name, _load(path, self.items[name]).dequantize().to(self.device))
                else:
                    error = self._quantize(walk, original, behind, path)
                if number + 1 < len(blocks):
                    walk.advance(original, behind)
            yield LayerDone(number + 1, len(blocks), error, time.monotonic() - began, done)

    def _quantize(self, walk: "_Layer", original: list[torch.Tensor], behind: list[torch.Tensor], path: Path) -> float:
        """Quantize a layer's linears stage by stage and save them; the mean error."""
        results: dict[str, torch.Tensor] = {}
        errors = []
        for stage in walk.stages(original[0]):
            moments = walk.moments(stage, original, behind)
            for name in stage:
                item = self.items[name]
                assert item.scheme is not None
                dtype = getattr(torch, TORCH_NAMES[item.outputs[1][1].dtype])
                W = walk.original[name]
                q = quantizers.get(str(item.method))(W, item.scheme, dtype, moments)
                restored = q.dequantize()
                errors.append(_output_error(W, restored, moments.second))
                walk.set(name, restored)
                results |= _save(q, name, dtype)
        partial = path.with_suffix(".partial")
        with writing(path):
            partial.write_bytes(save(results))
            partial.replace(path)
        return sum(errors) / max(len(errors), 1)

    def quantizer(self, item: Item) -> Callable[..., QuantizedTensor]:
        """The quantizer of one item: rows of what `run` made, in order; a data-free method for what it did not see."""
        if item.name not in self.layer_of:
            return quantizers.get(str(item.method))
        q = _load(self.layer_of[item.name], item)
        at = 0

        def next_rows(W: torch.Tensor, *_: object) -> QuantizedTensor:
            nonlocal at
            part, at = slice(at, at + W.shape[0]), at + W.shape[0]
            zeros = None if q.zeros is None else q.zeros[part]
            return QuantizedTensor(q.W_q[part], q.scales[part], zeros, q.bits, q.group_size, q.zero).to(W.device)

        return next_rows

    def close(self) -> None:
        """Remove the finished layers; the checkpoint holds them now."""
        shutil.rmtree(self.folder, ignore_errors=True)


class _Layer:
    """One decoder layer in memory: its linears' original weights, and the quantized ones found so far."""

    def __init__(self, layer: nn.Module, others: Any, linears: dict[str, nn.Module]) -> None:
        self.layer, self.others, self.linears = layer, others, linears
        self.flipped = {n for n, m in linears.items() if not isinstance(m, nn.Linear)}  # Conv1D holds (K, N)
        self.original = {n: self._turn(n, m.weight.data) for n, m in linears.items()}  # type: ignore[arg-type]
        self.quantized = dict(self.original)

    def _turn(self, name: str, W: torch.Tensor) -> torch.Tensor:
        return W.T.contiguous() if name in self.flipped else W

    def set(self, name: str, W: torch.Tensor) -> None:
        """Take the quantized weight (N, K) of a linear from now on."""
        self.quantized[name] = W

    def _use(self, weights: Weights) -> None:
        for name, module in self.linears.items():
            module.weight.data = self._turn(name, weights[name])  # type: ignore[union-attr]

    def _run(self, hidden: torch.Tensor, weights: Weights) -> torch.Tensor:
        from lowq_cli.hf.blocks import run

        self._use(weights)
        return run(self.layer, hidden, self.others)

    def stages(self, hidden: torch.Tensor) -> list[list[str]]:
        """The linears in the order in which they run, those that share an input together."""
        order: list[tuple[int, list[str]]] = []
        kept: list[torch.Tensor] = []  # alive, so that no two inputs have one id

        def note(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
                kept.append(args[0])
                if order and order[-1][0] == id(args[0]):
                    order[-1][1].append(name)
                else:
                    order.append((id(args[0]), [name]))

            return hook

        hooks = [m.register_forward_pre_hook(note(n)) for n, m in self.linears.items()]
        try:
            self._run(hidden, self.original)
        finally:
            for h in hooks:
                h.remove()
        return [names for _, names in order]

    def moments(self, stage: list[str], original: list[torch.Tensor], behind: list[torch.Tensor]) -> Moments:
        """The stage's inputs over all batches."""
        moments = None
        for x, x_behind in zip(original, behind, strict=True):
            clean = self._input(stage[0], x, self.original)
            seen = self._input(stage[0], x_behind, self.quantized)
            if moments is None:
                K = seen.shape[1]
                moments = Moments(torch.zeros(K, K, device=seen.device), torch.zeros(K, K, device=seen.device))
            assert moments.drift is not None
            moments.second.addmm_(seen.T, seen)
            moments.drift.addmm_((clean - seen).T, seen)
        assert moments is not None
        return moments

    def _input(self, name: str, hidden: torch.Tensor, weights: Weights) -> torch.Tensor:
        """(tokens, K): what a linear is given. The layer is run no further than to it."""
        found: list[torch.Tensor] = []

        def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            found.append(args[0].reshape(-1, args[0].shape[-1]))
            raise _Reached

        handle = self.linears[name].register_forward_pre_hook(hook)
        try:
            self._run(hidden, weights)
        except _Reached:
            pass
        finally:
            handle.remove()
        return found[0]

    def advance(self, original: list[torch.Tensor], behind: list[torch.Tensor]) -> None:
        """Replace both streams by the layer's outputs."""
        for i in range(len(original)):
            original[i] = self._run(original[i], self.original)
            behind[i] = self._run(behind[i], self.quantized)


class _Reached(Exception):
    """The input asked for has been seen."""


def _output_error(W: torch.Tensor, restored: torch.Tensor, second: torch.Tensor) -> float:
    error = W - restored
    return float(((error @ second) * error).sum() / ((W @ second) * W).sum().clamp(min=1e-30))


def _save(q: QuantizedTensor, name: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Tensors to set down: codes as bytes, scales and zeros in the checkpoint's dtype."""
    found = {f"{name}.codes": q.W_q, f"{name}.scales": q.scales.to(dtype)}
    if q.zeros is not None:
        found[f"{name}.zeros"] = q.zeros.to(dtype)
    return {k: t.cpu().contiguous() for k, t in found.items()}


def _load(path: Path, item: Item) -> QuantizedTensor:
    """One item out of a finished layer. Raises DamagedError if the file is no longer what was written."""
    scheme = item.scheme
    assert scheme is not None
    try:
        with safe_open(path, framework="pt") as saved:
            codes, scales = saved.get_tensor(f"{item.name}.codes"), saved.get_tensor(f"{item.name}.scales").float()
            zeros = None if scheme.zero == "none" else saved.get_tensor(f"{item.name}.zeros").float()
    except (SafetensorError, OSError) as e:
        raise DamagedError(f"{path} is damaged ({e}); delete it and run the same command again") from None
    return QuantizedTensor(codes, scales, zeros, scheme.bits, scheme.group_size, scheme.zero)
