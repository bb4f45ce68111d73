"""Describe a model folder from config.json, safetensors headers and lowq_report.json, without reading codes or dense weights.

Scales, zeros and other small tensors are read only to interpret another tool's format or to check possible exports.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lowq_cli.files.checkpoint import is_checkpoint, open_checkpoint
from lowq_cli.files.quant_config import METHOD
from lowq_cli.files.safetensors_io import ITEMSIZE, TensorHeader
from lowq_cli.files.source import REPORT, Source
from lowq_cli.interop.export_checks import commands
from lowq_cli.interop.foreign import fetcher, foreign_matrices, open_foreign
from lowq_cli.state import user_path
from lowq_kernels.dispatch import tuning_file
from lowq_packers.errors import DamagedError
from lowq_packers.heads import is_head
from lowq_packers.layouts import DISK

SHOWN = 3  # max. notes of one kind that are printed
KINDS = (  # kinds by tensor name alone, so that families unknown to transformers can be inspected
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
    """One weight: a quantized matrix with all its tensors, or one unquantized tensor.

    bits: width of one code, or of one element. scheme: a description, or the dtype. rel_error: ||W - dequantized|| / ||W||.
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
    """The contents of a folder. `bytes`: of all tensors; `notes`: problems and unusual facts, one per line."""

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
        """Bits per weight over the quantized weights, scales and zeros included; None without quantized weights."""
        some = [r for r in self.rows if r.quantized]
        return _bpw(some) if some else None

    @property
    def histogram(self) -> dict[int, int]:
        """Number of weights by the width of their codes, narrowest first."""
        counts: Counter[int] = Counter()
        for r in self.rows:
            counts[r.bits] += r.params
        return dict(sorted(counts.items()))

    @property
    def classes(self) -> list[dict[str, Any]]:
        """One row per class of weights: kind, tensors, params, bytes, bpw, schemes (most frequent first)."""
        rows = []
        for kind in dict.fromkeys([*(k for k, _ in KINDS), *(r.kind for r in self.rows)]):
            if some := [r for r in self.rows if r.kind == kind]:
                schemes = [s for s, _ in Counter(r.scheme for r in some).most_common()]
                params, size = sum(r.params for r in some), sum(r.bytes for r in some)
                rows.append(
                    {"kind": kind, "tensors": len(some), "params": params, "bytes": size, "bpw": _bpw(some), "schemes": schemes}
                )
        return rows

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
    """The kind of a tensor, by its name."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, name)), "other")


def inspect_model(model: str) -> Inspection:
    """Inspect a folder, a hub id (only headers are downloaded, so notes that need scales are omitted) or "demo".

    Raises NotFoundError, DamagedError (headers, index or config contradict each other), UnsupportedError (pickles).
    """
    folder = user_path(model)
    if is_checkpoint(folder):
        return _lowq(folder, model)
    with open_foreign(model, headers_only=True) as source:
        return _foreign_or_dense(source)


def _of_head(found: Inspection) -> Inspection:
    """The inspection of a draft head: no engine answers with a head alone."""
    note = "a draft head: lowq generate MODEL --draft, with the model that it drafts for"
    return replace(found, engines=("none as a model",), notes=(*found.notes, note))


def _lowq(folder: Path, name: str) -> Inspection:
    """Inspect a lowq checkpoint; its files are checked against each other."""
    checkpoint = open_checkpoint(folder)
    known = {t["name"]: t for t in checkpoint.report.get("tensors", ())}
    rows = []
    for t in checkpoint.tensors:
        facts = known.get(t.name, {})
        kind = facts.get("kind", kind_of(t.name.removesuffix(".weight")))
        if t.scheme:
            rows.append(Row(t.name, kind, t.shape, str(t.scheme), t.scheme.bits, t.nbytes, True, facts.get("rel_error")))
        else:
            rows.append(_kept(t.name, checkpoint.source.headers[t.name], kind))
    notes: tuple[str, ...] = () if known else (f"no {REPORT}, so the errors of the tensors are unknown",)
    for layout in sorted({t.layout for t in checkpoint.tensors} - {DISK}):
        n = sum(t.layout == layout for t in checkpoint.tensors)
        notes += (f"{n} of {len(checkpoint.schemes)} packed matrices are stored in layout {layout}: as kernels read them",)
    act = checkpoint.config["quantization_config"].get("activations", "none")
    if act != "none":
        notes += (f"linear layers round their inputs to {act} while running",)
    rounded = {t: " --round" if "--round" in command else "" for t, command in commands(checkpoint).items()}
    engines = ("lowq", "transformers (with lowq installed)", *(f"{t} (lowq export{how})" for t, how in rounded.items()))
    checkpoint.source.close()
    tuned, ignored = _tuned(folder)
    found = Inspection(name, METHOD, _family(checkpoint.source), tuple(rows), notes + ignored, engines, tuned)
    return _of_head(found) if is_head(checkpoint.config) else found


def _foreign_or_dense(source: Source) -> Inspection:
    """Inspect a checkpoint of another tool, or plain floats."""
    packed = foreign_matrices(source)
    if packed is None:
        rows = [_kept(n, h) for n, h in source.headers.items()]
        found = Inspection(source.name, "dense", _family(source), tuple(rows), (), ("lowq", "transformers", "vLLM", "SGLang"))
        return _of_head(found) if is_head(source.config) else found
    fmt, matrices = packed
    used = Counter(part for m in matrices for part in m.parts)  # experts of a stack share tensors
    place = {name: i for i, name in enumerate(source.headers)}  # rows come in the order of their first tensors in the files
    placed = [(place[n], _kept(n, h)) for n, h in source.headers.items() if n not in used]
    for m in matrices:
        size = sum(source.headers[p].nbytes // used[p] for p in m.parts)
        row = Row(m.name, kind_of(m.name), m.shape, m.stored, m.bits, size, m.bits < 16)
        placed.append((min(place[p] for p in m.parts), row))
    placed.sort(key=lambda at_row: at_row[0])
    notes = fmt.notes(source.config, source.headers)
    if source.folder is not None:
        fetch = fetcher(source)
        traps = [line for m in matrices for line in m.check(fetch)]
        notes += traps[:SHOWN] + ([f"and {len(traps) - SHOWN} more such"] if len(traps) > SHOWN else [])
    notes += _hybrid_experts(source)
    engines = fmt.engines(source.config, matrices)
    return Inspection(source.name, fmt.name, _family(source), tuple(row for _, row in placed), tuple(notes), tuple(engines))


def _hybrid_experts(source: Source) -> list[str]:
    """A note if packed experts are stored individually but their scales stacked, as transformers 5 may save them."""
    stacked = [n for n in source.headers if re.search(r"experts\.(gate_up|down)_proj_(scale|zero)", n)]
    single = any(re.search(r"experts\.\d+\.", n) for n in source.headers)
    return (
        [f"{stacked[0]}: scales of stacked experts and of single experts; only transformers reads this mix"]
        if stacked and single
        else []
    )


def _kept(name: str, header: TensorHeader, kind: str | None = None) -> Row:
    kind = kind or kind_of(name.removesuffix(".weight"))
    return Row(name, kind, header.shape, header.dtype, 8 * ITEMSIZE[header.dtype], header.nbytes, False)


def _family(source: Source) -> str:
    return str(source.config.get("model_type", "unknown"))


def _tuned(folder: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """GPUs with entries in the checkpoint's tuning table; a note if the table's file is damaged, as runs print it too."""
    if not (folder / tuning_file.FILE).is_file():
        return (), ()
    try:
        return tuple(dict.fromkeys(m["gpu"] for m in tuning_file.read_file(folder / tuning_file.FILE))), ()
    except DamagedError as e:
        return (), (f"ignoring {e}",)
