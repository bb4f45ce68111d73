"""Runs fp8-block checkpoints without conversion: QuantLinear replaces every linear whose weight is e4m3.

transformers has a reader for quant_method "fp8", too; lowq's also takes partial blocks and blocks of 256, and its kernels
take any number of rows. Unsupported cases (stacked experts, e8m0 scales, static activations) are imported dense; see
importer.py.
"""

from typing import Any

from torch import nn
from transformers import AutoConfig

from lowq_cli.files import fp8_tensors
from lowq_cli.files.checked_view import only_its_files
from lowq_cli.files.fp8_tensors import quantized
from lowq_cli.files.quant_config import METHOD
from lowq_cli.files.source import Source
from lowq_cli.hf.skeleton import Skeleton, build
from lowq_cli.hf.swap import FP8
from lowq_packers.scheme import ACT_KEY


def why_not(source: Source) -> str | None:
    """The reason why a checkpoint cannot run with fp8 kernels without conversion, or None."""
    if why := fp8_tensors.why_not(source.config, source.headers):
        return why
    skeleton = Skeleton(build(source.config))
    for name in quantized(source.headers):
        place = skeleton.place(name)
        if place is None or place.merged or type(skeleton.module(place.param)) is not nn.Linear:
            return f"{name} is not a plain linear weight"
    return None


def native_config(source: Source) -> Any:
    """The `config` for `from_pretrained` that loads the checkpoint with fp8 kernels."""
    given = source.config["quantization_config"]
    with only_its_files(source) as view:
        config = AutoConfig.from_pretrained(str(view), local_files_only=True, trust_remote_code=False)
    config.quantization_config = {"quant_method": METHOD, FP8: given, "activations": given.get(ACT_KEY, "fp8")}
    return config
