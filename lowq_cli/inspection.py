"""What a model folder holds, from config.json, safetensors headers and lowq_report.json: no weights are read."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowq_cli.quant_config import METHOD, expand
from lowq_cli.safetensors_io import ITEMSIZE, TensorHeader, read_json
from lowq_cli.source import Source, open_source
from lowq_packers.bitstream import words_per_row
from lowq_packers.errors import DamagedError
from lowq_packers.scheme import Scheme

if TYPE_CHECKING:
    from lowq_packers.formats import Fetch

REPORT, JOURNAL, TUNED = "lowq_report.json", "lowq-journal.jsonl", "lowq_tune.json"
KINDS = (  # by name alone, so that folders of families that transformers lacks can be looked at too
    ("embedding", r"embed|(^|\.)wte$|(^|\.)wpe$"),
    ("head", r"lm_head|(^|\.)output$"),
    ("norm", r"norm|(^|[._])ln(_|\.|$|\d)"),
    ("router", r"router|\.gate$|(^|\.)gate\.wg$|shared_expert_gate"),
    ("expert", r"experts?\."),
    ("attention", r"attn|attention"),
    ("mlp", r"mlp|ffn|feed_forward"),
)


@dataclass(frozen=True)
class Row:
    """One weight: a quantized matrix with all its tensors, or one tensor kept as it is.

    bits: width of one code, or of one element. scheme: in words, or the dtype. rel_error: ||W - dequantized|| / ||W||.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    scheme: str
    bits: int
    bytes: int
    quantized: bool
    rel_error: float | None = None

    @property
    def params(self) -> int:
        """Weights in it."""
        return TensorHeader(self.shape, "U8").numel


@dataclass(frozen=True)
class Inspection:
    """What a folder holds. `bytes` are those of all tensors; `notes` are traps and oddities worth a line."""

    path: str
    format: str
    model_type: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    engines: tuple[str, ...] = ()
    tuned: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(r.bytes for r in self.rows)

    @property
    def bpw(self) -> float:
        """Bits per weight over the whole model, kept tensors included."""
        return _bpw(self.rows)

    @property
    def quantized_bpw(self) -> float | None:
        """Bits per weight over the quantized weights, scales and zeros included; None where there are none."""
        some = [r for r in self.rows if r.quantized]
        return _bpw(some) if some else None

    @property
    def histogram(self) -> dict[int, int]:
        """Weights by the width of their codes, narrow first."""
        counts: Counter[int] = Counter()
        for r in self.rows:
            counts[r.bits] += r.params
        return dict(sorted(counts.items()))

    @property
    def classes(self) -> list[dict[str, Any]]:
        """One row per class of weights: kind, tensors, params, bytes, bpw, schemes (most frequent first)."""
        found = []
        for kind in dict.fromkeys([*(k for k, _ in KINDS), *(r.kind for r in self.rows)]):
            if some := [r for r in self.rows if r.kind == kind]:
                schemes = [s for s, _ in Counter(r.scheme for r in some).most_common()]
                params, size = sum(r.params for r in some), sum(r.bytes for r in some)
                found.append(
                    {"kind": kind, "tensors": len(some), "params": params, "bytes": size, "bpw": _bpw(some), "schemes": schemes}
                )
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        return {
            "path": self.path,
            "format": self.format,
            "model_type": self.model_type,
            "params": sum(r.params for r in self.rows),
            "bytes": self.bytes,
            "bpw": self.bpw,
            "quantized_bpw": self.quantized_bpw,
            "bits": {str(b): n for b, n in self.histogram.items()},
            "classes": self.classes,
            "engines": list(self.engines),
            "tuned": list(self.tuned),
            "notes": list(self.notes),
            "tensors": [{**asdict(r), "shape": list(r.shape), "bpw": _bpw([r])} for r in self.rows],
        }


def _bpw(rows: Iterable[Row]) -> float:
    rows = list(rows)
    return 8 * sum(r.bytes for r in rows) / max(sum(r.params for r in rows), 1)


def kind_of(name: str) -> str:
    """The class of weights that a tensor's name says it belongs to."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, name)), "other")


def inspect_model(model: str) -> Inspection:
    """What is in a folder, a hub id (headers only are fetched) or "demo".

    Raises NotFoundError, DamagedError (headers, index or config at odds with each other), UnsupportedError (pickles).
    """
    folder = Path(model).expanduser()
    if (folder / JOURNAL).is_file() and not (folder / "config.json").is_file():
        raise DamagedError(f"{model} is an unfinished lowq run; the same `lowq quantize` command continues it")
    with open_source(model, headers_only=True) as source:
        q = source.config.get("quantization_config")
        if isinstance(q, Mapping) and q.get("quant_method") == METHOD:
            return _lowq(source, q)
        return _foreign_or_dense(source)


def _lowq(source: Source, config: Mapping[str, Any]) -> Inspection:
    """A lowq checkpoint: every quantized matrix held against its scheme."""
    report = _report(source)
    modules = [n.removesuffix(".weight") for n in source.headers]
    schemes = expand(config, modules)
    rows, used = [], set()
    for name, scheme in schemes.items():
        known = report.get(name, {})
        shape, parts = quantized_parts(source.headers, name, scheme, known.get("shape"))
        used |= set(parts)
        size = sum(source.headers[p].nbytes for p in parts)
        rows.append(
            Row(name, known.get("kind", kind_of(name)), shape, str(scheme), scheme.bits, size, True, known.get("rel_error"))
        )
    rows += [_kept(n, h, report.get(n, {})) for n, h in source.headers.items() if n not in used]
    notes = [] if report else [f"no {REPORT}: errors of the tensors are not known"]
    return Inspection(
        source.name,
        METHOD,
        _family(source),
        _sorted(rows, source),
        tuple(notes),
        ("lowq", "transformers (with import lowq)"),
        _tuned(source),
    )


def quantized_parts(
    headers: Mapping[str, TensorHeader], name: str, scheme: Scheme, shape: list[int] | None = None
) -> tuple[tuple[int, int], tuple[str, ...]]:
    """(N, K) and tensor names of one matrix of a lowq checkpoint. Raises DamagedError where they contradict the scheme.

    shape: what the report says; needed only for the K of per-channel rows that do not fill their last word.
    """
    words = headers[f"{name}.weight"]
    if words.dtype != "I32" or len(words.shape) != 2:
        raise DamagedError(f"{name}.weight is {words.dtype} {list(words.shape)}; packed words are I32 and have two dimensions")
    scale = headers.get(f"{name}.weight_scale")
    if scale is None or len(scale.shape) != 2:
        raise DamagedError(f"{name}.weight_scale is missing or no matrix; quantize the model again")
    (N, W), G = words.shape, scale.shape[1]
    K = scheme.group_size * G
    parts = [f"{name}.weight", f"{name}.weight_scale"] + ([] if scheme.zero == "none" else [f"{name}.weight_zero"])
    for part in parts[1:]:
        if part not in headers or headers[part].shape != (N, G):
            found = list(headers[part].shape) if part in headers else "missing"
            raise DamagedError(f"{part} is {found}; {name}.weight asks for {[N, G]}")
    if words_per_row(K, scheme.bits) != W or (shape is not None and list(shape) != [N, K]):
        raise DamagedError(
            f"{name}.weight has {W} words a row; {scheme} and {G} groups ask for {words_per_row(K, scheme.bits)}"
        )
    return (N, K), tuple(parts)


def _foreign_or_dense(source: Source) -> Inspection:
    """A checkpoint of another tool, or plain floats."""
    from lowq_packers import formats

    fmt = formats.detect(source.config, source.headers)
    if fmt is None:
        rows = [_kept(n, h, {}) for n, h in source.headers.items()]
        return Inspection(source.name, "dense", _family(source), tuple(rows), (), ("transformers", "vLLM", "SGLang"))
    fetch = _fetch(source)
    matrices = fmt.matrices(source.config, source.headers, fetch)
    used = {part for m in matrices for part in m.parts}
    rows = []
    for m in matrices:
        size = sum(source.headers[p].nbytes for p in m.parts if p in source.headers)
        rows.append(Row(m.name, kind_of(m.name), m.shape, m.stored, m.bits, size, True))
    rows += [_kept(n, h, {}) for n, h in source.headers.items() if n not in used]
    notes = fmt.notes(source.config, source.headers)
    if fetch is not None:
        traps = [line for m in matrices for line in m.check(fetch)]
        notes += traps[:3] + ([f"and {len(traps) - 3} more such"] if len(traps) > 3 else [])
    engines = fmt.engines(source.config, matrices)
    return Inspection(source.name, fmt.name, _family(source), _sorted(rows, source), tuple(notes), tuple(engines))


def _fetch(source: Source) -> "Fetch | None":
    """Reads tensors of any dtype; None where only headers are here."""
    if source.folder is None:
        return None
    from lowq_cli.foreign import fetcher

    return fetcher(source)


def _kept(name: str, header: TensorHeader, known: Mapping[str, Any]) -> Row:
    return Row(
        name,
        known.get("kind", kind_of(name.removesuffix(".weight"))),
        header.shape,
        header.dtype,
        8 * ITEMSIZE[header.dtype],
        header.nbytes,
        False,
    )


def _sorted(rows: list[Row], source: Source) -> tuple[Row, ...]:
    """Rows in the order in which their first tensor lies in the files."""
    place = {}
    for i, name in enumerate(source.headers):
        place.setdefault(name, i)
        place.setdefault(name.rpartition(".")[0], i)
    return tuple(sorted(rows, key=lambda r: place.get(r.name, len(place))))


def _family(source: Source) -> str:
    return str(source.config.get("model_type", "unknown"))


def _report(source: Source) -> dict[str, dict[str, Any]]:
    """The report's line of each tensor, by name; {} where there is no report. Raises DamagedError for a malformed one."""
    path = None if source.folder is None else source.folder / REPORT
    if path is None or not path.is_file():
        return {}
    lines = read_json(path).get("tensors")
    if not isinstance(lines, list) or not all(isinstance(t, dict) and isinstance(t.get("name"), str) for t in lines):
        raise DamagedError(f"{path} has no list of tensors; quantize the model again")
    return {t["name"]: t for t in lines}


def _tuned(source: Source) -> tuple[str, ...]:
    """GPUs that the checkpoint's tuning table has entries for."""
    if source.folder is None or not (source.folder / TUNED).is_file():
        return ()
    found = re.findall(r'"gpu":\s*("(?:[^"\\]|\\.)*")', json.dumps(read_json(source.folder / TUNED)))
    return tuple(dict.fromkeys(json.loads(name) for name in found))
