"""LoRA adapters in PEFT's format: adapter_config.json and adapter_model.safetensors."""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowq_cli.files.safetensors_io import as_tensor, read_bytes, read_header, read_json
from lowq_packers.errors import DamagedError, NotFoundError, UnsupportedError
from lowq_packers.regular import MAX_CONFIG, open_bounded

if TYPE_CHECKING:
    import torch

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # prefix that PEFT's wrappers add to a module's name
FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<which>[AB])(\.default)?\.weight")
# options of PEFT's LoRA under which a layer adds something else than B A x, or adds it to some tokens only, or is kept whole
UNPLAIN = (
    "use_dora", "modules_to_save", "lora_bias", "trainable_token_indices", "layer_replication", "alora_invocation_tokens",
    "use_qalora", "use_bdlora", "kasa_config", "arrow_config",
)  # fmt: skip
DTYPES = ("F64", "F32", "F16", "BF16")  # of factors
DEFAULTS = {"r": 8, "lora_alpha": 8}  # PEFT's, where the config has none
REPEATS = re.compile(r"[*+?{(]")
MOST_REPEATS, LONGEST_PATTERN = 3, 1000  # of a pattern, groups included: with more, or a repeated group, a match may not end
LARGEST_NUMBER = 1e30  # max. absolute value of lora_alpha and r, so that a whole number of any length becomes a float
LARGEST = 1 << 34  # max. bytes of the weight file


@dataclass(frozen=True)
class Adapter:
    """The factors by the full name of their module: A (r, K), B (N, r), both fp32; B includes the scale.

    name: for messages. digest: hash of its files, for cache keys.
    """

    name: str
    factors: Mapping[str, "tuple[torch.Tensor, torch.Tensor]"]
    digest: bytes

    @property
    def rank(self) -> int:
        """The largest rank of its modules."""
        return max(A.shape[0] for A, _ in self.factors.values())


def read_adapter(folder: str | Path, name: str = "") -> Adapter:
    """The adapter in a folder. Raises NotFoundError, DamagedError, UnsupportedError."""
    path = Path(folder).expanduser()
    if not (path / CONFIG).is_file():
        raise NotFoundError(f"{path} holds no {CONFIG}; give the folder that PEFT's save_pretrained wrote")
    config = read_json(path / CONFIG, MAX_CONFIG)
    _check(config, path)
    if not (path / WEIGHTS).is_file():
        raise NotFoundError(f"{path} holds no {WEIGHTS}; save the adapter as safetensors")
    header = read_header(path / WEIGHTS)
    by_module: dict[str, dict[str, torch.Tensor]] = {}
    digest = hashlib.blake2b(repr(sorted(config.items(), key=str)).encode(), digest_size=32)
    with open(open_bounded(path / WEIGHTS, LARGEST), "rb") as file:
        for tensor, facts in header.tensors.items():
            parts = FACTOR.fullmatch(tensor)
            if parts is None:
                raise UnsupportedError(
                    f"{path / WEIGHTS} holds {tensor}; lowq supports only adapters of linear layers (lora_A, lora_B)"
                )
            if facts.dtype not in DTYPES:
                raise UnsupportedError(f"{path / WEIGHTS}: {tensor} is {facts.dtype}; an adapter holds {', '.join(DTYPES)}")
            raw = read_bytes(file.fileno(), facts.offset, facts.nbytes, str(path / WEIGHTS))
            digest.update(raw)
            module = parts["module"].removeprefix(PREFIX)
            by_module.setdefault(module, {})[parts["which"]] = as_tensor(raw, facts.dtype, facts.shape).float()
    if not by_module:
        raise DamagedError(f"{path / WEIGHTS} holds no factors")
    factors = {module: _factors(module, pair, config, path) for module, pair in by_module.items()}
    return Adapter(name or path.resolve().name, factors, digest.digest())


def _check(config: Mapping[str, Any], path: Path) -> None:
    """Raise UnsupportedError unless the adapter is a plain LoRA."""
    path, kind = path / CONFIG, config.get("peft_type")
    if kind != "LORA":
        raise UnsupportedError(f"{path} is of an adapter of the kind {kind}; lowq supports only LORA")
    if given := config.get("target_parameters"):
        what = f"{path} adapts {given[0] if isinstance(given, list) else given} (target_parameters)"
        only = "lowq supports only adapters of linear layers"
        raise UnsupportedError(f"{what}; {only}; merge it into its base (merge_and_unload)")
    if not isinstance(config.get("use_rslora"), bool | None):
        raise DamagedError(f"{path}: use_rslora must be true or false")
    biased = ("bias",) if config.get("bias") not in (None, "none") else ()
    if named := next((name for name in (*UNPLAIN, *biased) if config.get(name)), None):
        raise UnsupportedError(f"{path}: {named} is more than low-rank factors; merge it into its base (merge_and_unload)")


def _factors(
    module: str, pair: Mapping[str, "torch.Tensor"], config: Mapping[str, Any], path: Path
) -> "tuple[torch.Tensor, torch.Tensor]":
    if pair.keys() != {"A", "B"} or pair["A"].dim() != 2 or pair["B"].dim() != 2 or pair["A"].shape[0] != pair["B"].shape[1]:
        raise DamagedError(f"{path / WEIGHTS}: {module} lacks one of the two factors A (r, K) and B (N, r)")
    if not all(bool(t.isfinite().all()) for t in pair.values()):
        raise DamagedError(f"{path / WEIGHTS}: {module} holds numbers that are not finite")
    rank, told = pair["A"].shape[0], _number(module, config, path, "rank_pattern", "r")
    if told != rank:
        raise DamagedError(f"{path}: {module} has factors of rank {rank}, {CONFIG} says {told:g}; their scale is not known")
    alpha = _number(module, config, path, "alpha_pattern", "lora_alpha")
    B = pair["B"] * (alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))
    if not bool(B.isfinite().all()):
        raise DamagedError(f"{path / CONFIG}: lora_alpha of {module} is {alpha:g}, with which its factors are not finite")
    return pair["A"], B


def _number(module: str, config: Mapping[str, Any], path: Path, by_pattern: str, name: str) -> float:
    """config[name], or the module's value in config[by_pattern], whose patterns match the end of its name as in PEFT."""
    patterns, value = config.get(by_pattern) or {}, config.get(name, DEFAULTS[name])
    if not isinstance(patterns, dict):
        raise DamagedError(f"{path / CONFIG}: {by_pattern} must be a table")
    for pattern, given in patterns.items():
        if _matches(pattern, module, path / CONFIG, by_pattern):
            value = given
            break
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST_NUMBER:
        raise DamagedError(f"{path / CONFIG}: {name} of {module} must be a number")
    return float(value)


def _matches(pattern: str, module: str, path: Path, where: str) -> bool:
    if len(pattern) > LONGEST_PATTERN or len(REPEATS.findall(pattern)) > MOST_REPEATS or re.search(r"\)[*+?{]", pattern):
        raise UnsupportedError(f"{path}: {where} has {pattern[:60]!r}, which repeats too much")
    try:
        return re.fullmatch(rf"(.*\.)?({pattern})", module) is not None
    except re.error as e:
        raise DamagedError(f"{path}: {where} has {pattern[:60]!r}, which is no pattern: {e}") from None
