"""lowq: quantize a Hugging Face model, run it with fused kernels. The public Python API.

    qt  = lowq.quantize_tensor(W, bits=4, group_size=128, method="hqq", zero="float")
    lin = lowq.QuantLinear.from_quantized(qt, device="cuda")
    y   = lin(x)                                                    # (..., K) -> (..., N)
    lowq.quantize("model-or-path", out="dir", bits=4, group=128)
    model, tokenizer = lowq.load("dir")
    for piece in lowq.stream(model, tokenizer, "prompt", max_new_tokens=64): ...
    lowq.perplexity("dir", text)                                    # {"ppl": ..., "tokens": ...}
    lowq.export("dir", "compressed-tensors")                        # for vLLM; also gptq, awq, humming, mlx, hqq, gguf

`import lowq` makes `transformers.AutoModelForCausalLM.from_pretrained(lowq_dir)` work, and where lowq is installed, so does
importing torch. It imports neither torch nor transformers itself: names below are fetched when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from lowq_cli.hf import register

if TYPE_CHECKING:
    from lowq_cli.engine import Generation, stream
    from lowq_cli.evaluate.perplexity import perplexity
    from lowq_cli.interop.exporter import export
    from lowq_cli.loading import load
    from lowq_cli.run.pipeline import quantize
    from lowq_cli.tensor import quantize_tensor
    from lowq_kernels.modules.linear import QuantLinear
    from lowq_packers.errors import LowqError
    from lowq_packers.qtensor import QuantizedTensor
    from lowq_packers.scheme import Scheme

_HOME = {
    "Generation": "lowq_cli.engine",
    "LowqError": "lowq_packers.errors",
    "QuantLinear": "lowq_kernels.modules.linear",
    "QuantizedTensor": "lowq_packers.qtensor",
    "Scheme": "lowq_packers.scheme",
    "export": "lowq_cli.interop.exporter",
    "load": "lowq_cli.loading",
    "perplexity": "lowq_cli.evaluate.perplexity",
    "quantize": "lowq_cli.run.pipeline",
    "quantize_tensor": "lowq_cli.tensor",
    "stream": "lowq_cli.engine",
}
__all__ = [
    "Generation", "LowqError", "QuantLinear", "QuantizedTensor", "Scheme",
    "export", "load", "perplexity", "quantize", "quantize_tensor", "stream",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("lowq")
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'lowq' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register()
