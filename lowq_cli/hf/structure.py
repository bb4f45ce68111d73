"""The role of each tensor of a checkpoint, from config.json and the safetensors headers; no weights are read."""

import ast
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from lowq_cli.files.roles import TIED, Part, Role
from lowq_cli.files.safetensors_io import FLOATS, TensorHeader
from lowq_cli.files.source import Cut
from lowq_cli.files.text_alone import way_out
from lowq_cli.hf.embedding import embed_scale
from lowq_cli.hf.skeleton import Place, Skeleton, build, is_linear
from lowq_packers.errors import DamagedError


def roles(config: dict[str, Any], headers: Mapping[str, TensorHeader]) -> dict[str, Role]:
    """The role of every tensor in `headers`, by name.

    Args:
        config: the parsed config.json.
        headers: tensor name -> shape and dtype, over all shards.
    Raises:
        UnsupportedError: a model_type or architecture that transformers does not have.
        DamagedError: an invalid config; a tensor whose shape differs from the model's; missing tensors.
    """
    check_plausible(config, len(headers))
    skeleton = Skeleton(build(config))
    by_name: dict[str, Role] = {}
    filled: set[str] = set()
    merged: dict[str, int] = defaultdict(int)  # parameter -> rows of the tensors that are merged into it
    for name, header in headers.items():
        place = skeleton.place(name)
        if place is None:
            by_name[name] = Role("other", reason="the model does not know it")
            continue
        filled.add(place.param)
        check_shape(skeleton, place, name, header)
        if place.merged and not place.why_not and header.shape:
            merged[place.param] += header.shape[0]
        role = _role(skeleton, name, place, tuple(header.shape))
        if role.parts and header.dtype not in FLOATS:
            role = replace(role, parts=(), reason=f"stored as {header.dtype}")
        by_name[name] = role
    check_complete(skeleton, filled, headers)
    for param, rows in merged.items():
        shape, kind = skeleton.params[param].shape, skeleton.kinds.get(param.rpartition(".")[0])
        if rows != (total := shape[::2] if getattr(kind, "transposed", False) else shape[:-1]).numel():
            raise DamagedError(f"the tensors that make up {param} have {rows} rows; config.json asks for {total.numel()}")
    return by_name


def check_shape(skeleton: Skeleton, place: Place, name: str, header: TensorHeader) -> None:
    """Raise DamagedError if a tensor that alone fills a parameter has a different shape."""
    expected = tuple(skeleton.params[place.param].shape)
    transposed = (*expected[:-2], *expected[:-3:-1]) if skeleton.turns(name) else expected
    if not place.merged and tuple(header.shape) not in (expected, transposed):
        raise DamagedError(f"{name} has the shape {tuple(header.shape)}; config.json asks for {expected}")


def check_plausible(config: Mapping[str, Any], tensors: int) -> None:
    """Raise DamagedError for negative sizes, and for more layers or experts than tensors (they would take forever to build)."""
    for key, value in config.items():
        if re.search("^n(um)?_|(?<!^chunk)_(size|dim)$", key) and isinstance(value, int) and value < 0:
            raise DamagedError(f"config.json has {key} = {value}; it cannot be negative")
        most = tensors if re.search("num_.*layers|^n_layer$", key) else max(tensors, 4096)
        if re.search("num_.*(layers|experts)|^n_layer$", key) and isinstance(value, int) and value > most:
            raise DamagedError(f"config.json has {key} = {value}, but the checkpoint holds only {tensors} tensors")
        if isinstance(value, Mapping):
            check_plausible(value, tensors)


def check_affordable(config: dict[str, Any], nbytes: int) -> None:
    """Raise DamagedError if a model has more parameters than `nbytes` bytes of files can hold, before it is built in memory.

    A byte holds 8 codes at most; a parameter may be stored once and tied twice.
    """
    params = sum(p.numel() for p in build(config).parameters())
    if params > (most := 16 * nbytes):
        raise DamagedError(f"config.json describes {params:,} parameters; {nbytes:,} bytes of weights hold {most:,} at most")


def check_complete(skeleton: Skeleton, filled: set[str], names: Iterable[str] = ()) -> None:
    """Raise DamagedError if a parameter is not in the checkpoint, not tied to one that is, and not optional.

    `names` are the checkpoint's tensors. A head that the checkpoint was written without may be missing: transformers
    initializes it at random and warns.
    """
    optional = [re.compile(p) for p in getattr(skeleton.model, "_keys_to_ignore_on_load_missing", None) or ()]
    family = {param: {param, source} for param, source in skeleton.tied.items()}
    for param, source in skeleton.tied.items():
        family.setdefault(source, {source}).add(param)
    has_head = skeleton.model.base_model is not skeleton.model
    missing = [
        name
        for name, _ in skeleton.model.named_parameters()
        if not family.get(name, {name}) & filled
        and not any(p.search(name) for p in optional)
        and not (has_head and skeleton.in_other_head(name))
    ]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise DamagedError(
            f"the checkpoint lacks {missing[0]}{more}, which the model in config.json needs; {way_out(missing[0], names)}"
        )


def _role(skeleton: Skeleton, name: str, place: Place, shape: tuple[int, ...]) -> Role:
    """The role of a tensor of this shape, for a tensor that the model knows."""
    param = place.param
    module, leaf = skeleton.module(param), param.rpartition(".")[2]
    kind = _kind(skeleton, param, module)
    stem = name.removesuffix(".weight")
    if param in skeleton.tied:
        return Role(kind, reason=TIED)
    if kind == "router":
        return Role(kind, reason="router")
    if kind == "norm":
        return Role(kind, reason="norm")
    if leaf.endswith("bias"):
        return Role(kind, reason="bias")
    if place.why_not:
        return Role(kind, reason=place.why_not)
    if kind == "expert" and skeleton.params[param].dim() == 3:
        path = param.rpartition(".")[0]
        of_experts = skeleton.kinds.get(path, "an expert parameter of a kind lowq does not know")
        if isinstance(of_experts, str) or leaf not in of_experts.stacks:
            return Role(kind, reason=of_experts if isinstance(of_experts, str) else "not a linear weight")
        if place.merged:
            return Role(kind, (Part(stem, target=param),))
        slices = skeleton.inside(param)
        if not slices or any(not n.endswith(".weight") for n in slices):
            return Role(kind, reason="experts that transformers keeps stacked in files")
        if shape != tuple(skeleton.params[param].shape):  # then it is transposed: `check_shape` has passed
            slices = {n: replace(cut, transposed=not cut.transposed) for n, cut in slices.items()}
        parts = tuple(Part(n.removesuffix(".weight"), cut, param) for n, cut in slices.items())
        return Role(kind, parts)
    if leaf != "weight" or not name.endswith(".weight"):
        return Role(kind, reason="not a linear weight")
    if kind == "embedding":
        if param != _embedding(skeleton):
            return Role(kind, reason="not the token embedding")
        if not isinstance(module, nn.Embedding) or embed_scale(module) is None:
            return Role(kind, reason=f"a special embedding ({type(module).__name__})")
        heads = [head for head, table in skeleton.tied.items() if table == param]
        if reason := next((r for head in heads if (r := _weight_used_directly(skeleton, head))), None):
            return Role(kind, reason=f"it is the head too: {reason}")
        return Role(kind, (Part(stem, target=param),))
    if reason := _weight_used_directly(skeleton, param):
        return Role(kind, reason=reason)
    if is_linear(module) or type(module) is Conv1D:
        return Role(kind, (Part(stem, Cut(transposed=type(module) is Conv1D), param),))
    return Role(kind, reason=f"not a linear weight ({type(module).__name__})")


def _weight_used_directly(skeleton: Skeleton, param: str) -> str | None:
    """The reason why a linear's weight must stay a plain tensor (other modules' code uses the tensor itself), or None.

    Mamba multiplies by `self.dt_proj.weight` and never calls dt_proj; it casts its head's input to the dtype of the head's
    weight, which for packed words is an integer; RWKV divides the weights of some layers in place.
    """
    *parents, leaf, _ = param.split(".")
    around = tuple(type(skeleton.model.get_submodule(".".join(parents[:n]))) for n in range(len(parents) + 1))
    return _read_by(leaf, around)


@cache
def _read_by(leaf: str, around: tuple[Any, ...]) -> str | None:
    """The same by classes, with the linear's parent last; cached because layers are alike and this takes 0.5 ms."""
    name, source = re.escape(leaf), _source(around[-1])
    if re.search(rf"\bself\.{name}\.weight\b", source) and not re.search(rf"\bself\.{name}\(", source):
        return "its model multiplies by the weight itself"
    if re.search(rf"\.to\(self\.{name}\.weight\.dtype\)", source):
        return "its model casts to the weight's dtype"
    if any(re.search(rf"\.{name}\.weight\.[a-z]+_\(", _source(cls)) for cls in around[:-1]):
        return "its model rescales the weight itself"
    return None


def why_not_head(config: dict[str, Any]) -> str | None:
    """The reason why an output head made from the embedding cannot be packed, or None."""
    skeleton = Skeleton(build(config))
    head = skeleton.model.get_output_embeddings()
    name = next((n for n, m in skeleton.model.named_modules() if m is head), None)
    return _weight_used_directly(skeleton, f"{name}.weight") if name else None


def _source(cls: Any) -> str:
    """The source code of a class; "" if there is none, e.g. for classes defined in an interactive session."""
    return _sources(getattr(sys.modules.get(cls.__module__), "__file__", None) or "").get(cls.__qualname__, "")


@cache
def _sources(file: str) -> dict[str, str]:
    """The source code of each class in a file, which is parsed once: `inspect.getsource` parses it for each class (20 ms)."""
    if not file.endswith(".py"):
        return {}
    with tokenize.open(file) as opened:
        text = opened.read()
    lines = text.splitlines(keepends=True)
    classes = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef))
    return {node.name: "".join(lines[node.lineno - 1 : node.end_lineno]) for node in classes}


def _embedding(skeleton: Skeleton) -> str | None:
    """The parameter of the token embedding."""
    table = skeleton.model.get_input_embeddings()
    return next((f"{n}.weight" for n, m in skeleton.model.named_modules() if m is table), None)


def _kind(skeleton: Skeleton, param: str, module: nn.Module) -> str:
    """The kind of weight: "attention", "mlp", "expert", "router", "embedding", "head", "norm" or "other"."""
    path = param.split(".")
    names = path[:-1]
    class_name = type(module).__name__.lower()
    if module is skeleton.model.get_output_embeddings():
        return "head"
    if isinstance(module, nn.Embedding):
        return "embedding"
    if "norm" in class_name or (names and re.search(r"norm|(^|_)ln(_|$)", names[-1])):
        return "norm"
    if _is_router(skeleton, names, class_name):
        return "router"
    if isinstance(skeleton.params[param], torch.Tensor) and ("experts" in names or class_name.endswith("experts")):
        return "expert"
    for component in reversed(names):
        if "attn" in component or "attention" in component:
            return "attention"
        if re.search(r"mlp|ffn|feed_forward|expert|^fc\d*$", component):
            return "mlp"
    return "other"


def _is_router(skeleton: Skeleton, names: list[str], own: str) -> bool:
    """Whether a module chooses the experts that a token visits, or gates a shared expert."""
    if "router" in own or "gating" in own or own.endswith("gate"):
        return True
    parent = skeleton.model.get_submodule(".".join(names[:-1])) if names else None
    if parent is not None and "router" in type(parent).__name__.lower():  # a linear within a router, e.g. Gemma 4's
        return True
    if parent is None or not hasattr(parent, "experts") or names[-1] == "experts":
        return False
    return "router" in names[-1] or names[-1] == "gate" or names[-1].endswith("_gate")
