"""Replaces dense modules with packed ones, after checking the checkpoint against its config and the model."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lowq_cli.files.family_tensors import extra_of
from lowq_cli.files.packed_tensors import OF_BLOCKS, SCALE, TABLE, WEIGHT, ZERO, misfit, rows
from lowq_cli.files.quant_config import Stored, compact
from lowq_cli.files.safetensors_io import FLOATS, TensorHeader, read_header
from lowq_cli.files.source import Cut
from lowq_cli.files.storage import FP8, storage
from lowq_cli.hf import parallel
from lowq_cli.hf.embedding import QuantEmbedding, TiedHead, embed_scale
from lowq_cli.hf.expert_kinds import LEAVES
from lowq_cli.hf.experts import QuantExperts
from lowq_cli.hf.shared import SharedLinear
from lowq_cli.hf.skeleton import Skeleton, is_linear
from lowq_cli.hf.structure import check_complete, check_shape
from lowq_kernels.modules.joined import JoinedRows
from lowq_kernels.modules.linear import QuantLinear, blank_table
from lowq_packers.errors import DamagedError, UnsupportedError
from lowq_packers.layouts import DISK, get
from lowq_packers.qtensor import plausible
from lowq_packers.scheme import Scheme

Packed = QuantLinear | QuantExperts | QuantEmbedding
_PREPARE: ContextVar[bool] = ContextVar("_PREPARE", default=True)


def swap(model: PreTrainedModel, config: Mapping[str, Any], checkpoint_files: list[str] | None) -> None:
    """Replace the modules whose weights the checkpoint holds packed. Only headers are read.

    Args:
        model: on the meta device, as transformers built it.
        config: the checkpoint's `quantization_config`.
        checkpoint_files: its safetensors files.
    Raises:
        DamagedError: config, files and model contradict each other; the message names the tensor.
        UnsupportedError: weights that are not safetensors, or packed weights of modules that lowq does not support.
    """
    headers = _headers(checkpoint_files)
    schemes = _schemes(config, headers)
    skeleton = Skeleton(model)
    by_module: dict[str, dict[str, Stored]] = defaultdict(dict)
    tables: dict[tuple[str, str], int] = {}
    for param, members in _placed(skeleton, headers, schemes).items():
        module, _, leaf = param.rpartition(".")
        slices = skeleton.split(param) if len(members) > 1 else {}
        by_module[module][leaf] = how = _agreed(skeleton, param, members, slices, headers)
        if len(members) > 1 and how.scheme.table_width:
            tables[module, leaf] = _tables(skeleton, param, members, slices)
    for path, leaves in by_module.items():
        packed_module = _packed_module(skeleton, path, leaves, tables)
        if isinstance(packed_module, QuantLinear) and packed_module.in_blocks:  # including the head
            packed_module.set_act(config["activations"])
        model.set_submodule(path, packed_module)
    _share_tied(model, skeleton)
    parallel.split(model)


def _placed(
    skeleton: Skeleton, headers: Mapping[str, TensorHeader], schemes: Mapping[str, Stored]
) -> dict[str, dict[str, Stored]]:
    """Parameter -> checkpoint name -> storage of its packed matrices, after checking that the files fill the model."""
    model, extra = skeleton.model, extra_of(skeleton.model.config, headers)
    targets: dict[str, dict[str, Stored]] = defaultdict(dict)
    filled: set[str] = set()
    for name, header in headers.items():
        stem = name.rpartition(".")[0]
        if stem in schemes and name.endswith((SCALE, ZERO, TABLE, OF_BLOCKS)):
            continue
        place = skeleton.place(name)
        if place is None:
            if stem in schemes and not skeleton.in_other_head(name) and not (extra and name.startswith(extra)):
                raise DamagedError(f"quantization_config names {stem}, which a {type(model).__name__} does not have")
            continue  # transformers warns of unused tensors
        filled.add(place.param)
        if stem in schemes and name.endswith(WEIGHT):
            if place.why_not:
                raise UnsupportedError(f"{stem} is packed, but {place.why_not}")
            targets[place.param][stem] = schemes[stem]
            continue
        check_shape(skeleton, place, name, header)
        if header.dtype not in FLOATS and skeleton.params[place.param].is_floating_point():
            raise DamagedError(f"{name} is {header.dtype}, but quantization_config does not say that it is packed")
    check_complete(skeleton, filled)
    return targets


def _agreed(
    skeleton: Skeleton,
    param: str,
    members: Mapping[str, Stored],
    slices: Mapping[str, Cut],
    headers: Mapping[str, TensorHeader],
) -> Stored:
    """The storage that all matrices of a parameter have. Raises DamagedError if one does not fit, UnsupportedError if they
    differ."""
    N, K = _dense_shape(skeleton, param)
    packed = 0
    for stem, how in members.items():
        packed += (held := rows(how, headers[stem + WEIGHT].shape))
        part = slices.get(stem + WEIGHT)
        expected = N if len(members) == 1 else part.rows[1] - part.rows[0] if part and part.rows else held
        if why := misfit(stem, how, expected, K, headers):
            raise DamagedError(why)
    if packed != N:
        raise DamagedError(f"{param} has {N} rows; the checkpoint packs {packed} for it, in {len(members)} tensors")
    agreed = set(members.values())
    if len(agreed) > 1:
        some = sorted(f"{how.scheme}{'' if how.layout == DISK else f' in {how.layout}'}" for how in agreed)
        raise UnsupportedError(f"{param} is made of tensors with different schemes ({some[0]} and {some[1]}); they must agree")
    return agreed.pop()


def _headers(files: list[str] | None) -> dict[str, TensorHeader]:
    """Name -> header, over all files; each is checked."""
    if not files or not all(str(f).endswith(".safetensors") for f in files):
        raise UnsupportedError("lowq checkpoints are safetensors files; load the folder that `lowq quantize` wrote")
    return {name: header for file in files for name, header in read_header(Path(file)).tensors.items()}


def _schemes(config: Mapping[str, Any], headers: Mapping[str, TensorHeader]) -> dict[str, Stored]:
    """Packed tensor (without ".weight") -> its storage. Raises DamagedError if config and files disagree."""
    schemes = dict(storage(config.get(FP8, config), headers).matrices)
    packed = {n.removesuffix(suffix) for n in headers for suffix in (SCALE, ZERO, TABLE) if n.endswith(suffix)}
    if packed - schemes.keys():
        name = min(packed - schemes.keys())
        raise DamagedError(f"the files hold scales of {name}, but quantization_config does not say how it is packed")
    return schemes


def _dense_shape(skeleton: Skeleton, param: str) -> tuple[int, int]:
    """(N, K) of a parameter, experts along N."""
    shape = torch.Size(skeleton.shape(param))
    return shape[:-1].numel(), shape[-1]


def _tables(skeleton: Skeleton, param: str, members: Mapping[str, Stored], slices: Mapping[str, Cut]) -> int:
    """The number of tables of a merged parameter, per expert if it is a stack. Raises UnsupportedError."""
    shape = skeleton.params[param].shape
    stack = shape[0] if len(shape) == 3 else 1
    cuts = [slices.get(stem + WEIGHT) for stem in members]
    if len({cut.rows[1] - cut.rows[0] if cut and cut.rows else -1 for cut in cuts}) > 1 or len(members) % stack:
        raise UnsupportedError(f"{param} is made of tensors of different sizes with a table each; lowq needs one size")
    return len(members) // stack


def _packed_module(
    skeleton: Skeleton, path: str, leaves: dict[str, Stored], tables: Mapping[tuple[str, str], int]
) -> nn.Module:
    """The replacement of the module at `path`, on the meta device. tables: numbers of tables, where a leaf has several."""
    module = skeleton.model.get_submodule(path)
    if leaves.keys() <= LEAVES.keys() or path in skeleton.kinds:
        if isinstance(kind := skeleton.kinds.get(path, "no experts"), str):
            raise UnsupportedError(f"{path} is packed: {kind}, which lowq cannot compute with")
        for leaf, how in leaves.items():
            if how.layout != DISK:
                raise UnsupportedError(f"{path}.{leaf} is stored in layout {how.layout}; lowq reads experts in {DISK}")
        of_path = {leaf: tables[path, leaf] for leaf in leaves if (path, leaf) in tables}
        schemes = {leaf: how.scheme for leaf, how in leaves.items()}
        config, parent = skeleton.model.config.get_text_config(), skeleton.model.get_submodule(path.rpartition(".")[0])
        top_k = getattr(parent, "top_k", None) or getattr(config, "num_experts_per_tok", None) or 1
        return QuantExperts(module, schemes, skeleton.params[f"{path}.{kind.stacks[-1]}"].dtype, of_path, top_k)
    if leaves.keys() == {"weight"}:
        (scheme, layout), dtype = leaves["weight"], skeleton.params[f"{path}.weight"].dtype
        if isinstance(module, nn.Embedding) and embed_scale(module) is not None:
            if get(layout).rows is None:
                raise UnsupportedError(f"{path}.weight is stored in layout {layout}, which holds no embeddings")
            return QuantEmbedding(module, scheme, dtype, layout)
        if is_linear(module) or type(module) is Conv1D:
            N, K = _dense_shape(skeleton, f"{path}.weight")
            linear = QuantLinear(N, K, scheme, module.bias is not None, dtype, "meta", stored_in=layout)
            linear.weight_table = blank_table(scheme, "meta", tables.get((path, "weight"), 1))
            return linear
    raise UnsupportedError(f"{path}.{min(leaves)} is packed, but lowq cannot compute with a packed {type(module).__name__}")


def _share_tied(model: PreTrainedModel, skeleton: Skeleton) -> None:
    """Give heads tied to a packed embedding its weight in their own layout, and make tied packed linears share one weight."""
    for param, source in skeleton.tied.items():
        embedding = model.get_submodule(source.rpartition(".")[0])
        if isinstance(embedding, QuantLinear):
            if param.endswith(WEIGHT):
                model.set_submodule(param.removesuffix(WEIGHT), SharedLinear(embedding))
            model.all_tied_weights_keys.pop(param)
            continue
        if not isinstance(embedding, QuantEmbedding):
            continue
        path = param.rpartition(".")[0]
        head = model.get_submodule(path)
        if type(head) is not nn.Linear:
            raise UnsupportedError(f"{source} is packed and tied to {param}, whose {type(head).__name__} cannot share it")
        N, K = head.weight.shape
        model.set_submodule(path, TiedHead(N, K, embedding.scheme, head.bias is not None, head.weight.dtype, "meta"))
        model.all_tied_weights_keys.pop(param)
        model._tied_weights_keys = {k: v for k, v in (model._tied_weights_keys or {}).items() if k != param}


def finish(model: PreTrainedModel) -> PreTrainedModel:
    """Check and freeze the packed modules of a loaded model and (unless `unprepared`) repack them for their devices.

    Raises DamagedError for scales or zeros that are not finite, or zeros that do not fit the scheme.
    """
    parallel.settle(model)
    packed = {name: m for name, m in model.named_modules() if isinstance(m, Packed)}
    for module in packed.values():
        for p in module.parameters(recurse=False):
            p.requires_grad_(False)
    offloaded = [name for name, m in packed.items() if next(m.parameters()).is_meta and not isinstance(m, TiedHead)]
    if offloaded:
        raise UnsupportedError(
            f"{offloaded[0]} would be offloaded; lowq keeps packed weights on a device: use fewer bits or the CPU"
        )
    _check_values(packed)
    for module in packed.values():
        if isinstance(module, TiedHead):
            embedding = model.get_input_embeddings()
            assert isinstance(embedding, QuantEmbedding)  # `_share_tied` made it one
            module.share(embedding)
    return prepare(model) if _PREPARE.get() else model


def prepare(model: PreTrainedModel) -> PreTrainedModel:
    """Repack every packed weight for the device that it is on, and return the model."""
    for module in model.modules():
        if isinstance(module, QuantLinear | QuantExperts):
            module.prepare(model.dtype)
    return model


@contextmanager
def unprepared() -> Iterator[None]:
    """Inside this context loaded models keep the layout of the files, because they move to another device afterwards."""
    token = _PREPARE.set(False)
    try:
        yield
    finally:
        _PREPARE.reset(token)


def _check_values(packed: Mapping[str, Packed]) -> None:
    """Raise DamagedError for scales or zeros that no quantizer writes, with one sync per device instead of per tensor."""
    tests: dict[torch.device, list[tuple[str, torch.Tensor]]] = defaultdict(list)
    for name, module in packed.items():
        if isinstance(module, TiedHead):
            continue
        for leaf, p in module.named_parameters(recurse=False):
            stack, _, role = leaf.rpartition("_")
            scheme = module.schemes.get(stack) if isinstance(module, QuantExperts) else module.scheme
            if scheme and role in ("scale", "zero", "table"):
                full = f"{name}{OF_BLOCKS if scheme.block_rows > 1 else f'.{leaf}'}"  # the name in files
                tests[p.device].append((full, plausible(p, scheme, role)))
    for checks in tests.values():
        for (name, _), good in zip(checks, torch.stack([g for _, g in checks]).tolist(), strict=True):
            if not good:
                kind = {"zero": "zeros", "table": "numbers of a table"}.get(name.rpartition("_")[2], "scales")
                raise DamagedError(
                    f"{name} holds {kind} that are not finite or out of range; fetch or quantize the model again"
                )


def saved_config(model: PreTrainedModel) -> dict[str, Any]:
    """The `quantization_config` with the names and the layout that `save_pretrained` will write for this model."""
    skeleton = Skeleton(model)
    schemes: dict[str, Scheme] = {}
    for path, module in model.named_modules():
        if isinstance(module, QuantExperts):
            for stack, scheme in module.schemes.items():
                schemes |= dict.fromkeys(skeleton.saved_names(f"{path}.{stack}", module.shapes[stack][:2]), scheme)
        elif isinstance(module, QuantLinear | QuantEmbedding | JoinedRows) and not isinstance(module, TiedHead):
            shape = (module.num_embeddings,) if isinstance(module, QuantEmbedding) else (module.out_features,)
            schemes |= dict.fromkeys(skeleton.saved_names(f"{path}.weight", shape), module.scheme)
    packed = {n.removesuffix(WEIGHT): s for n, s in schemes.items()}
    dense = {n: p.shape[:-1] for n, p in model.named_parameters() if p.dim() > 1 and p.is_floating_point()}
    dense_names = {saved.removesuffix(WEIGHT) for n, rows in dense.items() for saved in skeleton.saved_names(n, rows)}
    return compact(packed, dense_names - packed.keys())
