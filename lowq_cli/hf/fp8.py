"""fp8-block checkpoints run as they are: Fp8Linear in the place of every linear whose weight is e4m3.

transformers has a reader of its own for quant_method "fp8"; ours takes partial blocks and blocks of 256, and its kernels
work at any number of rows. What it cannot hold (stacked experts, e8m0 scales, static activations) is imported dense:
see importer.py.
"""

from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from lowq_cli.files import fp8_tensors
from lowq_cli.files.family_tensors import extra_of
from lowq_cli.files.fp8_tensors import quantized
from lowq_cli.files.safetensors_io import read_header
from lowq_cli.files.source import Source
from lowq_cli.files.view import only_its_files
from lowq_cli.hf.quantizer import Frozen
from lowq_cli.hf.skeleton import Skeleton, build
from lowq_kernels.activations import Act
from lowq_kernels.modules.fp8_linear import Fp8Linear
from lowq_packers.errors import DamagedError, UnsupportedError
from lowq_packers.scheme import ACT_KEY, scale_shape

METHOD = "lowq_fp8"  # what transformers is told while it loads; files keep saying "fp8"


def why_not(source: Source) -> str | None:
    """Why a checkpoint cannot be run with fp8 kernels as it is, or None."""
    if why := fp8_tensors.why_not(source.config, source.headers):
        return why
    skeleton = Skeleton(build(source.config))
    for name in quantized(source.headers):
        place = skeleton.place(name)
        if place is None or place.merged or type(skeleton.module(place.param)) is not nn.Linear:
            return f"{name} is no plain linear weight"
    return None


def native_config(source: Source) -> Any:
    """What `from_pretrained` takes as `config` to load the checkpoint with fp8 kernels."""
    given = source.config["quantization_config"]
    with only_its_files(source) as view:
        config = AutoConfig.from_pretrained(str(view), local_files_only=True, trust_remote_code=False)
    config.quantization_config = {"quant_method": METHOD, "block": given["weight_block_size"], "act": given.get(ACT_KEY, "fp8")}
    return config


@register_quantization_config(METHOD)
class Fp8Config(QuantizationConfigMixin):
    """Block and activation mode of the checkpoint that is being loaded."""

    def __init__(self, quant_method: str = METHOD, block: tuple[int, int] = (128, 128), act: Act = "fp8", **_: Any) -> None:
        self.quant_method = quant_method  # type: ignore[assignment]  # the base means its own enum
        self.block, self.act = list(block), act


@register_quantizer(METHOD)
class Fp8Quantizer(Frozen):
    """Puts Fp8Linear where the checkpoint holds e4m3 weights."""

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        """Swap the modules (on the meta device), after checking every shape."""
        headers = {n: h for f in checkpoint_files or () for n, h in read_header(Path(f)).tensors.items()}
        skeleton, extra = Skeleton(model), extra_of(model.config, headers)
        facts: Any = self.quantization_config
        swaps: dict[str, Fp8Linear] = {}
        for name, scales in quantized(headers).items():
            place = skeleton.place(name)
            if place is None and extra and name.startswith(extra):
                continue
            if place is None:
                raise DamagedError(f"{name} is in the files, which a {type(model).__name__} does not have")
            module = skeleton.module(place.param)
            assert type(module) is nn.Linear, name  # why_not saw to it
            N, K = module.weight.shape
            block = (facts.block[0], facts.block[1])
            if headers[name].shape != (N, K) or headers[scales].shape != scale_shape((N, K), block):
                got = f"{list(headers[name].shape)} with scales {list(headers[scales].shape)}"
                raise DamagedError(f"{name} is {got}; config.json asks for {N} x {K} in blocks of {block[0]}x{block[1]}")
            path = place.param.rpartition(".")[0]
            swaps[path] = Fp8Linear(N, K, block, module.bias is not None, module.weight.dtype, "meta", facts.act)
        for path, layer in swaps.items():
            model.set_submodule(path, layer)

    def get_state_dict_and_metadata(self, model: Any) -> Any:
        """Saving again is not what this is for."""
        raise UnsupportedError("a loaded fp8 checkpoint is not saved again; copy its folder")

    def is_serializable(self) -> bool:
        """See `get_state_dict_and_metadata`."""
        return False


def prepare_fp8(model: PreTrainedModel) -> int:
    """Ready every Fp8Linear for its device. Returns the bytes of weights that were widened for want of FP8 hardware."""
    widened = 0
    for name, layer in model.named_modules():
        if isinstance(layer, Fp8Linear):
            if not layer.weight_scale_inv.isfinite().all():
                raise DamagedError(f"{name}.weight_scale_inv holds values that are not finite; fetch the model again")
            before = layer.widened
            layer.prepare(model.dtype)
            widened += 0 if before == layer.widened else layer.weight.numel() * layer.weight.element_size()
    return widened
