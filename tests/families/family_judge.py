"""The quantized tiny model of one family: how much of it is packed, and the error of its logits."""

import re
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tiny import build, is_matrix
from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
from transformers.pytorch_utils import Conv1D

from lowq_cli.engine.decoders import decoder_of
from lowq_cli.engine.sampling import Sampling
from lowq_cli.files.source import open_source
from lowq_cli.hf.experts import QuantExperts
from lowq_cli.hf.load import load_model
from lowq_cli.run.pipeline import quantize
from lowq_kernels.modules.linear import QuantLinear
from lowq_packers.arch.towers import PROJECTORS, TOWERS
from lowq_packers.layouts import unpack

IDS = torch.randint(3, 150, (1, 24), generator=torch.Generator().manual_seed(1))
NEW = 4  # tokens to generate
COVERED, CLOSE, SAME = 0.95, 0.05, 1e-4  # what is asked of `coverage` (at least), `off` and `exact` (at most)
ROUTERS = re.compile(r"router|(^|\.)gate$|gate\.(weight|wg|linear)|_gate$|classifier")


@dataclass
class Verdict:
    """A family's row. coverage: share of its linear weights (no head, no router) that is packed; left: those that are not.

    off: the packed model's logits from the unquantized model's in fp32, relative, of the median token; exact: from the
    dequantized model's, of all. fault: what broke, and at which step, or "".
    """

    family: str
    linear: int = 0
    coverage: float = 0.0
    left: list[str] = field(default_factory=list)
    off: float | None = None
    exact: float | None = None
    saved: bool = False
    decoder: str = ""
    seconds: float = 0.0
    fault: str = ""

    @property
    def unmet(self) -> list[str]:
        """The checks that this family fails."""
        if self.fault:
            return [self.fault]
        result = [] if self.coverage >= COVERED else [f"{self.coverage:.0%} of its linear weights are packed"]
        if self.off is None or not self.off <= CLOSE:
            result.append(f"logits off by {self.off}")
        if self.exact is None or not self.exact <= SAME:
            result.append(f"logits {self.exact} from the dequantized model's")
        return result if self.saved else [*result, "saved, it is another checkpoint"]

    def to_json(self) -> dict[str, Any]:
        """As results hold it."""
        return asdict(self)


def linear_weights(model: PreTrainedModel) -> dict[str, int]:
    """Parameter -> elements, of every matrix but the head, what routes tokens to experts, and towers for pictures and sound."""
    head = model.get_output_embeddings()
    result = {}
    for name, p in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        around = (type(model.get_submodule(path.rsplit(".", n)[0])).__name__.lower() for n in range(3))
        router = any("router" in kind for kind in around) or ROUTERS.search(".".join(path.split(".")[-2:]))
        tower = TOWERS.search(name) or PROJECTORS.search(name)
        if module is not head and not router and not tower and is_matrix(module, leaf, p):
            result[name] = p.numel()
    return result


def packed_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Parameter of the unquantized model -> its dequantized values, (N, K) or (E, N, K), of those that the model packs."""
    result = {}
    for path, module in model.named_modules():
        if isinstance(module, QuantLinear):
            result[f"{path}.weight"] = unpack(module.packed).dequantize()
        elif isinstance(module, QuantExperts):
            for name in module.schemes:
                stack = module.stack(name)
                result[f"{path}.{name}"] = torch.stack(
                    [unpack(stack.expert(e)).dequantize() for e in range(stack.words.shape[0])]
                )
    return result


def judge(family: str, **how: Any) -> Verdict:
    """Quantize a family's tiny model, to 8 bits where `how` says no more, compare, save, read back and generate."""
    verdict, began, step = Verdict(family), time.monotonic(), "build"
    try:
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            dense = build(family)
            step = "the unquantized model"
            expected = logits(dense)
            dense.save_pretrained(f"{folder}/dense")
            step = "quantize"
            quantize(f"{folder}/dense", f"{folder}/packed", method="rtn", device="cpu", **(how or {"bits": 8, "group": 16}))
            step = "load"
            packed = loaded(f"{folder}/packed")
            step = "logits"
            result = logits(packed)
            verdict.off = off_of_a_token(result, expected)
            linear, values = linear_weights(dense), packed_weights(packed)
            verdict.linear = sum(linear.values())
            verdict.coverage = sum(n for name, n in linear.items() if name in values) / max(1, verdict.linear)
            verdict.left = [name for name in linear if name not in values]
            step = "dequantize"
            for name, p in dense.named_parameters():
                if name in values:
                    p.copy_(as_stored(values[name], dense.get_submodule(name.rpartition(".")[0]), name))
            verdict.exact = off(result, logits(dense))
            step = "save"
            packed.save_pretrained(f"{folder}/saved")
            verdict.saved = same_files(f"{folder}/packed", f"{folder}/saved")
            again = loaded(f"{folder}/saved")
            verdict.saved = verdict.saved and torch.equal(logits(again), result)
            step = "generate"
            verdict.decoder = generates(again, result)
    except Exception as e:
        verdict.fault = f"{step}: {type(e).__name__}: {' '.join(str(e).split())[:200]}"
    verdict.seconds = round(time.monotonic() - began, 2)
    return verdict


def as_stored(values: torch.Tensor, module: nn.Module, name: str) -> torch.Tensor:
    """Values (N, K) or (E, N, K), gate before up, in the order that the unquantized parameter has them."""
    if name.endswith("gate_up_proj") and not getattr(module, "is_concatenated", True):
        values = torch.stack(values.chunk(2, 1), 2).flatten(1, 2)
    transposed = getattr(module, "is_transposed", False) or isinstance(module, Conv1D | Llama4TextExperts)
    return values.mT if transposed else values


def logits(model: PreTrainedModel) -> torch.Tensor:
    """Of IDS, (24, V) fp32."""
    return model(input_ids=IDS, use_cache=False).logits[0].float()


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative Frobenius distance; infinite where one is not finite."""
    return finite((found - wanted).norm() / wanted.norm())


def off_of_a_token(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The same token by token, the median of them: where a router's choice is close, another expert makes another token."""
    return finite(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).median())


def finite(distance: torch.Tensor) -> float:
    """As a number; infinity for NaN."""
    return float(distance) if torch.isfinite(distance) else float("inf")


def loaded(folder: str | Path) -> PreTrainedModel:
    """A checkpoint in fp32."""
    with open_source(folder) as source:
        return load_model(source, "cpu", torch.float32)


def same_files(one: str | Path, other: str | Path) -> bool:
    """Whether two checkpoints hold the same tensors."""
    a, b = (load_file(Path(folder) / "model.safetensors") for folder in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def generates(model: PreTrainedModel, of_ids: torch.Tensor) -> str:
    """The name of the decoder that continued IDS. Raises AssertionError where its first token is not the likeliest."""
    decoder = decoder_of(model)
    first = decoder.start(IDS.tolist(), Sampling(), NEW)
    assert int(first[0]) == int(of_ids[-1].argmax()), "the first token is not the likeliest"
    for _ in range(NEW - 1):
        decoder.step()
    return decoder.name
