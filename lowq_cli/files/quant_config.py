"""The `quantization_config` of a lowq checkpoint's config.json, which gives the scheme of each quantized tensor.

    {"quant_method": "lowq", "version": 1,
     "schemes": {"w4g64": {"bits": 4, "group_size": 64, "zero": "float", "layout": "rowstream"}},
     "tensors": {"model.layers.*.self_attn.q_proj": "w4g64", "model.layers.0.mlp.down_proj": "w8g64"}}

Version 2 has schemes of values from a table, {"bits": 4, "group_size": 16, "zero": "none", "table": "e2m1", "scale": "e4m3"}
(packers/tables.py); a checkpoint without such schemes has version 1, which every lowq reads.

Keys of `tensors` are checkpoint names without ".weight". The optional `activations` ("int8", "fp8") says how
layers round their inputs, per token, at run time. "*" matches one component of a name; an exact name takes precedence over
a pattern, and a pattern with fewer stars over one with more. Tensors that match no key are not quantized. `layout` is
the order of the words in the files: rowstream, or tile or cpu (schemes named w4g64_tile), which kernels read directly.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from lowq_packers.errors import DamagedError, SchemeError, UnsupportedError
from lowq_packers.layouts import DISK, stored
from lowq_packers.scheme import ACTS, Scheme

METHOD = "lowq"
VERSION, TABLES = 1, 2  # version of a config without table schemes, and with any
KEYS = {"quant_method", "version", "schemes", "tensors", "activations"}
FIELDS = {"bits", "group_size", "zero", "table", "scale", "layout"}  # allowed fields of a scheme
_SUFFIX = {"float": "", "int": "_int", "none": "_sym"}
Pattern = tuple[str, ...]


class Stored(NamedTuple):
    """The stored format of a matrix: scheme and layout."""

    scheme: Scheme
    layout: str = DISK

    @property
    def name(self) -> str:
        """Its key in the config, e.g. "w4g64"."""
        s = self.scheme
        kind = f"_{s.kind.replace('/', '_')}" if s.table else _SUFFIX[s.zero]
        return f"w{s.bits}g{s.group_size}{kind}{'' if self.layout == DISK else f'_{self.layout}'}"


def compact(
    schemes: Mapping[str, Scheme], dense: Iterable[str] = (), layouts: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The `quantization_config` that `expand` turns back into `schemes`.

    Args:
        schemes: tensor name (without ".weight") -> scheme.
        dense: names of unquantized tensors, which no pattern may match.
        layouts: tensor name -> layout, for tensors that are not stored in rowstream.
    Returns:
        a JSON-ready dict; layers and experts with the same scheme share one pattern.
    """
    facts = {name: Stored(s, (layouts or {}).get(name, DISK)) for name, s in schemes.items()}
    named = {name: fact.name for name, fact in facts.items()}
    groups: dict[Pattern, dict[Pattern, str | None]] = defaultdict(dict)
    for name, scheme in (dict.fromkeys(dense) | named).items():
        parts = tuple(name.split("."))
        groups[tuple("*" if p.isdigit() else p for p in parts)][parts] = scheme
    tensors: dict[str, str] = {}
    for pattern, members in groups.items():
        _share(pattern, members, tensors)
    used = {fact.name: fact for fact in facts.values()}
    return {
        "quant_method": METHOD,
        "version": TABLES if any(how.scheme.table for how in used.values()) else VERSION,
        "schemes": {key: _fields(how) for key, how in sorted(used.items())},
        "tensors": tensors,
    }


def _fields(how: Stored) -> dict[str, Any]:
    s = how.scheme
    of_table = {"table": s.table, "scale": s.scale} if s.table else {}
    return {"bits": s.bits, "group_size": s.group_size, "zero": s.zero, **of_table, "layout": how.layout}


def _share(pattern: Pattern, members: dict[Pattern, str | None], out: dict[str, str]) -> None:
    """Add one entry if all members have the same scheme; otherwise split them at the leftmost star and recurse."""
    values = set(members.values())
    if len(values) == 1:
        (value,) = values
        if value is not None:
            out[".".join(pattern if len(members) > 1 else next(iter(members)))] = value
        return
    star = pattern.index("*")  # there is a star, because members differ
    split: dict[str, dict[Pattern, str | None]] = defaultdict(dict)
    for parts, scheme in members.items():
        split[parts[star]][parts] = scheme
    for component, some in split.items():
        _share((*pattern[:star], component, *pattern[star + 1 :]), some, out)


def expand(config: Mapping[str, Any], names: Iterable[str]) -> dict[str, Scheme]:
    """The scheme of each tensor that the config quantizes; see `expand_stored`."""
    return {name: fact.scheme for name, fact in expand_stored(config, names).items()}


def expand_stored(config: Mapping[str, Any], names: Iterable[str]) -> dict[str, Stored]:
    """Scheme and layout of each tensor that the config quantizes; other names are absent.

    Args:
        config: a `quantization_config`.
        names: tensor names without ".weight".
    Raises:
        DamagedError: a malformed config, an exact name in it that `names` lacks, or two patterns that contradict each other.
        UnsupportedError: another quant_method, a newer version or a layout that lowq does not store on disk.
    """
    schemes, tensors = _checked(config)
    by_length: dict[int, list[tuple[int, Pattern, str]]] = defaultdict(list)
    for key, scheme in tensors.items():
        parts = tuple(key.split("."))
        if "*" in parts:
            by_length[len(parts)].append((parts.count("*"), parts, scheme))
    for patterns in by_length.values():
        patterns.sort()
    names = list(names)
    allowed = set(names)
    if missing := [key for key in tensors if "*" not in key.split(".") and key not in allowed]:
        raise DamagedError(f"quantization_config names {missing[0]}, which the checkpoint does not hold ({len(missing)} such)")
    by_name: dict[str, Stored] = {}
    for name in names:
        chosen = tensors.get(name)
        if chosen is None:
            parts = tuple(name.split("."))
            stars = None
            for count, pattern, scheme in by_length[len(parts)]:
                if stars is not None and count > stars:
                    break
                if all(p in ("*", q) for p, q in zip(pattern, parts, strict=True)):
                    if chosen not in (None, scheme):
                        raise DamagedError(f"quantization_config gives {name} two schemes, {chosen} and {scheme}")
                    chosen, stars = scheme, count
        if chosen is not None:
            by_name[name] = schemes[chosen]
    return by_name


def _checked(config: Mapping[str, Any]) -> tuple[dict[str, Stored], dict[str, str]]:
    """Schemes and layouts by key, and the `tensors` table, after checking every field."""
    if config.get("quant_method") == "fp8":
        raise UnsupportedError(
            "the weights are in fp8 blocks, which vLLM, SGLang and transformers read as they are; "
            "make a lowq checkpoint of them with: lowq quantize MODEL"
        )
    if config.get("quant_method") != METHOD:
        raise UnsupportedError(
            f"quant_method is {config.get('quant_method')!r}, not {METHOD!r}; make a lowq checkpoint of it: lowq quantize MODEL"
        )
    version = config.get("version")
    if type(version) is not int or version not in (VERSION, TABLES):
        raise UnsupportedError(f"checkpoint version {version!r}; this lowq reads {VERSION} and {TABLES}: upgrade lowq")
    if config.get("activations", "none") not in ACTS:
        raise UnsupportedError(f"activations {config['activations']!r}; this lowq rounds them to {', '.join(ACTS)}")
    raw, tensors = config.get("schemes"), config.get("tensors")
    if not isinstance(raw, Mapping) or not isinstance(tensors, Mapping):
        raise DamagedError("quantization_config needs `schemes` and `tensors`, each a table")
    if unknown := sorted(config.keys() - KEYS):
        raise UnsupportedError(f"quantization_config has {unknown[0]!r}, which this lowq does not know; upgrade lowq")
    schemes = {}
    for key, fields in raw.items():
        if not isinstance(fields, Mapping) or not {"bits", "group_size", "zero"} <= fields.keys():
            raise DamagedError(f"scheme {key!r} in quantization_config needs bits, group_size and zero")
        if unknown := sorted(fields.keys() - FIELDS):
            raise UnsupportedError(
                f"scheme {key!r} in quantization_config has {unknown[0]!r}, unknown to this lowq; upgrade lowq"
            )
        try:
            layout = stored(fields.get("layout", DISK)).name
        except (SchemeError, TypeError) as e:
            raise UnsupportedError(f"scheme {key!r} in quantization_config: {e}") from e
        if version == VERSION and {"table", "scale"} & fields.keys():
            raise DamagedError(f"scheme {key!r} in quantization_config has a table, which version {VERSION} does not")
        values = fields["bits"], fields["group_size"], fields["zero"]
        of_table = fields.get("table", ""), fields.get("scale", "float")
        if [type(v) for v in values] != [int, int, str]:
            raise DamagedError(f"scheme {key!r} in quantization_config has bits, group_size, zero = {values}")
        if [type(v) for v in of_table] != [str, str]:
            raise DamagedError(f"scheme {key!r} in quantization_config has table, scale = {of_table}")
        try:
            schemes[key] = Stored(Scheme(*values, *of_table), layout)
        except SchemeError as e:
            raise DamagedError(f"scheme {key!r} in quantization_config: {e}") from e
    for name, key in tensors.items():
        if not isinstance(key, str) or key not in schemes:
            raise DamagedError(f"{name} has the scheme {key!r}, which quantization_config does not define")
    return schemes, dict(tensors)
