"""Loads a model folder, hub id or "demo" as a transformers model that runs with lowq's kernels."""

from importlib.util import find_spec
from typing import Any

import torch
from transformers import PreTrainedModel

from lowq_cli import console, ranks
from lowq_cli.devices import pick_device, say_widened
from lowq_cli.files.checked_view import only_its_files
from lowq_cli.files.family_tensors import extra_of
from lowq_cli.files.source import Source
from lowq_cli.files.storage import FP8, as_lowq, method, method_of_others
from lowq_cli.files.text_alone import way_out
from lowq_cli.hf import register
from lowq_cli.hf.quiet import quiet
from lowq_cli.hf.skeleton import model_class
from lowq_cli.hf.structure import check_affordable, check_plausible
from lowq_cli.hf.swap import prepare, unprepared
from lowq_kernels.dispatch import tuning
from lowq_kernels.graphs import retried
from lowq_packers.errors import DamagedError, DoesNotFitError, UnsupportedError, UsageError, library_errors, naming
from lowq_packers.heads import is_head
from lowq_packers.qtensor import check_fits, float_dtype


def pick_dtype(dtype: torch.dtype | str | None, packed: bool, device: torch.device) -> torch.dtype | str:
    """The dtype argument for transformers. Raises UsageError for a dtype that is not a 16- or 32-bit float."""
    if dtype is None:
        return torch.bfloat16 if packed and device.type == "cpu" else "auto"
    return float_dtype(dtype)


@retried
def load_model(source: Source, device: str | torch.device = "auto", dtype: torch.dtype | str | None = None) -> PreTrainedModel:
    """The model of an open source; see `lowq_cli.loading.load`."""
    register()
    config = source.config
    if is_head(config):
        raise UsageError(f"{source.name} is a draft head, not a model; name it with --draft, and the model that it drafts for")
    quantization = config.get("quantization_config")
    stored_by = method(config)
    if quantization is not None and stored_by is None:
        named = method_of_others(source.name, quantization)
        raise UnsupportedError(f"{source.name} is quantized as {named!r}; run on the original model: lowq quantize MODEL")
    stray = next((n for n in source.headers if n.endswith(".weight_scale")), None)
    if stray is not None and stored_by in (None, FP8):
        raise DamagedError(f"{source.name} holds packed weights ({stray}), but its config.json has no quantization_config")
    cls = model_class(config)
    if not cls.can_generate():
        raise UnsupportedError(f"{source.name} is a {cls.__name__}, which generates no text")
    check_plausible(config, len(source.headers))
    check_affordable(config, source.nbytes)
    chosen = pick_device(device)
    kind = pick_dtype(dtype, stored_by is not None, chosen)
    if isinstance(dtype := getattr(torch, kind, kind) if isinstance(kind, str) else kind, torch.dtype):
        check_dtype(source, dtype)
    loaded: Any
    info: dict[str, Any]
    # directly to a GPU if accelerate, which transformers needs for that, is installed; otherwise through host memory
    direct: dict[str, Any] = {"device_map": {"": chosen}} if chosen.type != "cpu" and find_spec("accelerate") else {}
    if ranks.world() > 1:
        if stored_by == FP8:
            raise UnsupportedError("lowq does not split fp8 weights over processes; run one, or quantize to lowq's own format")
        direct = {"distributed_config": _over_processes(chosen)}
    renamed = {"quantization_config": as_lowq(quantization)} if quantization and stored_by == FP8 else {}
    try:
        with (
            naming(source.name),
            library_errors(DamagedError, f"{source.name} cannot be loaded as {cls.__name__}"),
            unprepared(),
            quiet(),
            only_its_files(source, **renamed) as view,
        ):
            loaded, info = cls.from_pretrained(  # type: ignore[misc]  # a pair, with output_loading_info
                str(view),
                dtype=kind,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported below, by name
                **direct,
            )
        loaded.name_or_path = loaded.config._name_or_path = str(source.folder)
        _check_filled(source, loaded.config, info)
        if not all(b.isfinite().all() for name, b in loaded.named_buffers() if name.endswith("inv_freq")):
            raise DamagedError("rope_parameters in config.json give angles that are not finite")
        if source.folder is not None:
            tuning.use(source.folder, chosen, console.warn)  # before `prepare`, which reads the layouts from it
        prepare(loaded if ranks.world() > 1 else loaded.to(chosen))
        say_widened(chosen, loaded)
    except torch.OutOfMemoryError as e:
        raise DoesNotFitError(f"{source.name} does not fit into the memory of {chosen}; use fewer bits, or --device cpu") from e
    return loaded.eval()


def check_dtype(source: Source, dtype: torch.dtype) -> None:
    """Raise SchemeError if scales of the files exceed a narrower dtype's range; the message names a dtype that fits."""
    for name in (n for n in source.headers if dtype == torch.float16 and n.endswith(".weight_scale")):
        if source.headers[name].dtype != "F16":
            check_fits(name, dtype, source.read(name))


def _check_filled(source: Source, config: Any, loading: dict[str, Any]) -> None:
    """Raise DamagedError if weights are missing or have the wrong shape; warn of weights that the model does not know."""
    line = f"{source.name} does not fill the model its config.json describes"
    for name, have, expected in sorted(loading.get("mismatched_keys", ()), key=str):
        raise DamagedError(f"{line}: {name} is {_spelled(have)}, not {_spelled(expected)}")
    for name in sorted(map(str, loading.get("missing_keys", ()))):
        raise DamagedError(f"{line}: {name} is missing; {way_out(name, source.headers)}")
    for fault in ("error_msgs", "conversion_errors"):
        if names := loading.get(fault):
            raise DamagedError(f"{line}: {fault} {sorted(map(str, names))[0]}")
    extra = extra_of(config, source.headers)
    if unknown := sorted(k for k in map(str, loading.get("unexpected_keys", ())) if not extra or not k.startswith(extra)):
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        console.warn(f"{source.name} holds weights that its model does not have, which are ignored: {unknown[0]}{more}")


def _spelled(shape: Any) -> str:
    return " x ".join(map(str, shape))


def _over_processes(device: torch.device) -> Any:
    """The arguments for tensor parallelism over the processes of torchrun. Raises UsageError if a device is named."""
    from transformers.distributed import DistributedConfig

    if device.index is not None or device.type != ("cuda" if torch.cuda.is_available() else "cpu"):
        raise UsageError("under torchrun each process takes the GPU of its number; leave --device out")
    return DistributedConfig(tp_size=ranks.world())
