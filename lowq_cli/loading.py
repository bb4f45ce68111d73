"""Any checkpoint that lowq reads, as a transformers model with kernels in place, and its tokenizer: `lowq.load`."""

import os

import torch

from lowq_cli.cached_models import model_path
from lowq_cli.engine.model_record import owned
from lowq_cli.files.source import open_source
from lowq_cli.hf.load import PreTrainedModel, load_model
from lowq_cli.hf.tokenizer import PreTrainedTokenizerBase, load_tokenizer
from lowq_cli.interop.importer import runnable


def load(
    model: str | os.PathLike[str],
    device: str | torch.device = "auto",
    dtype: torch.dtype | str | None = None,
    lora: str | os.PathLike[str] | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model ready for `generate`, and its tokenizer.

    Args:
        model: a folder that lowq wrote, any other safetensors model (folder or hub id), a name of `lowq ls`, or "demo". A
            checkpoint of another tool (GPTQ, AWQ, ...) is imported into the cache folder first.
        device: "auto" is the GPU where there is one, otherwise the CPU.
        dtype: of activations, scales and dense weights. None is the checkpoint's own; packed weights on a CPU get
            bfloat16, the only dtype that its 4-bit kernel takes.
        lora: the folder of an adapter that PEFT wrote: the model computes with it, its packed weights stay as they are.
    Raises:
        NotFoundError, DamagedError, UnsupportedError, DoesNotFitError: in one line each.

    On a CPU weights may be memory-mapped: whoever writes over their files (`cp`; not `mv`) changes the model. `lowq.stream`
    then raises OverwrittenError, a DamagedError, before it yields another piece; the model's own `forward` and `generate` do
    not look.
    """
    with open_source(runnable(model_path(model))) as source:
        loaded, tokenizer = load_model(source, device, dtype), load_tokenizer(source)
        if loaded.device.type == "cpu":
            owned(loaded).mapped = source.all_mapped()
    if lora is not None:
        from lowq_cli.engine.lora import attach
        from lowq_cli.files.adapter import read_adapter

        attach(loaded, [read_adapter(os.fspath(lora))])
    return loaded, tokenizer
