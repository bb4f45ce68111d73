"""Save the cache of a decoder's only sequence to a file, and restore it bit for bit in another process.

A conversation then continues without being read again. Keys and values are saved by their positions in the sequence, so that
the next decoder may have more slots, or ring buffers where this one had none. Recurrent states are saved as of the end of the
last prompt. A digest covers every byte: a changed file is not used, and the conversation is read again.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from lowq_cli import console
from lowq_cli.engine.batch import KeyValues
from lowq_cli.engine.decoders import decoder_of
from lowq_cli.engine.model_record import file_facts, owned
from lowq_cli.engine.state import BLOCK, raw_tensors, ring, tensors_of
from lowq_cli.models import CausalModel
from lowq_packers.atomic import replacing
from lowq_packers.errors import DoesNotFitError, LowqError, one_line
from lowq_packers.regular import opened

MOST = 8 << 30  # max. bytes of all saved caches of a folder together: 65,536 tokens of an 8B with 8 key heads, in 16 bits


@dataclass(frozen=True)
class SavedCache:
    """A cache read from a file, in host memory.

    held, read: the tokens, or names of image tokens, of the cache and of the last prompt. written: as in the decoder. drafter:
    the name of the drafter whose keys and values are saved too; "" for none. tensors: keys and values (heads, n, ...) of the
    last n tokens by layer, and recurrent states.
    """

    held: list[int]
    read: list[int]
    written: int
    drafter: str
    tensors: dict[str, torch.Tensor]

    @classmethod
    def of(cls, decoder: Any) -> "SavedCache":
        """The cache of a native decoder that has read one sequence; its tensors may be views."""
        ids, tensors = decoder.held[0], dict[str, torch.Tensor]()
        for name, t, table, slots in _pages(decoder):
            first = min(len(ids), max(0, decoder.written - slots)) if slots else 0
            tensors[name] = _at(t, table, first, len(ids))
        tensors |= {f"state.{i}": t for i, t in enumerate(decoder.snapshot)}
        return cls(ids, decoder.read[0], decoder.written, _drafter(decoder), tensors)

    def put(self, decoder: Any) -> bool:
        """Give a decoder this cache before it reads a prompt; returns False and changes nothing if it does not fit."""
        n, pages, states = len(self.held), list(_pages(decoder)), tensors_of(decoder.state)
        if decoder.batch != 1 or n > decoder.slots or self.drafter != _drafter(decoder):
            return False
        expected = {f"state.{i}": (t[:2].shape, t.dtype) for i, t in enumerate(states)}
        for name, t, table, _ in pages:
            count = min(n, self.tensors[name].shape[1]) if table is not None and name in self.tensors else n
            expected[name] = torch.Size((t.shape[1], count, *t.shape[3:])), t.dtype
        if {name: (t.shape, t.dtype) for name, t in self.tensors.items()} != expected:
            return False
        for name, t, table, slots in pages:
            count = min(self.tensors[name].shape[1], slots or n)
            _write(t, table, n - count, self.tensors[name][:, -count:].to(t.device))
        decoder.snapshot = [self.tensors[f"state.{i}"].to(t.device) for i, t in enumerate(states)]
        decoder.held, decoder.read, decoder.written, decoder.long = [self.held], [self.read], self.written, False
        return True


def keep(path: Path, model: CausalModel, kv: str, most: int = MOST) -> None:
    """Save the cache of a model's decoder; the oldest files in the folder make room. Does nothing if nothing can be reused.

    Raises DoesNotFitError above `most` bytes of all of them together, OSError.
    """
    decoder: Any = decoder_of(model, kv)
    identity = _identity(model, kv)
    if not identity or len(getattr(decoder, "held", ())) != 1 or decoder.long:
        return
    with torch.inference_mode():
        saved = SavedCache.of(decoder)
        size = sum(t.nbytes for t in saved.tensors.values())
        if size > most:
            raise DoesNotFitError(f"it takes {console.size(size)}, and all saved caches take at most {console.size(most)}")
        _make_room(path, most - size)
        tensors = {name: t.to("cpu").contiguous() for name, t in saved.tensors.items()}
    facts = {"held": saved.held, "read": saved.read, "written": saved.written, "drafter": saved.drafter}
    header = {"identity": identity, "facts": json.dumps(facts)}
    with replacing(path) as partial:
        save_file(tensors, partial, header | {"digest": _digest(tensors, header)})


def recall(path: Path, model: CausalModel, kv: str) -> str:
    """Restore a model's decoder from the cache in a file; returns the reason if it cannot, "" on success or without a file."""
    decoder: Any = decoder_of(model, kv)
    if not hasattr(decoder, "saved") or not path.exists():
        return ""
    try:
        with opened(path) as name, safe_open(name, framework="pt") as file:
            header: Mapping[str, str] = file.metadata() or {}
            if header["identity"] != _identity(model, kv):
                return "it is another model's, or of another --kv or device"
            tensors = {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118  (not a dict)
        if header["digest"] != _digest(tensors, header):
            return "it is not as it was written"
        decoder.saved = SavedCache(tensors=tensors, **json.loads(header["facts"]))
    except (LowqError, SafetensorError, KeyError, ValueError, TypeError, OSError) as e:
        return f"it is damaged ({one_line(e)})"
    return ""


def _identity(model: CausalModel, kv: str) -> str:
    """The facts that must be equal for a cache to be used: the model's files, the format, dtype, device and lowq's version."""
    files = file_facts(owned(model).folder)
    facts = (version("lowq"), files, kv, str(model.dtype), model.device.type)
    return hashlib.sha256(repr(facts).encode()).hexdigest() if files else ""


def _digest(tensors: Mapping[str, torch.Tensor], facts: Mapping[str, str]) -> str:
    h = hashlib.sha256(repr((facts["identity"], facts["facts"])).encode())
    for name, t in sorted(tensors.items()):
        h.update(repr((name, t.dtype, t.shape)).encode())
        h.update(t.flatten().view(torch.uint8).numpy().data)
    return h.hexdigest()


def _make_room(path: Path, room: int) -> None:
    """Delete the oldest other caches in the folder of `path` until they take at most `room` bytes."""
    others = [(p.stat(), p) for p in path.parent.glob(f"*{path.suffix}") if p != path and not p.name.startswith(".")]
    total_bytes = sum(facts.st_size for facts, _ in others)
    for facts, other in sorted(others, key=lambda o: o[0].st_mtime_ns):
        if total_bytes <= room:
            return
        other.unlink(missing_ok=True)
        total_bytes -= facts.st_size


def _drafter(decoder: Any) -> str:
    return decoder.attached.drafter.name if decoder.attached is not None else ""


def _pages(decoder: Any) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None, int]]:
    """(name, tensor, table of its ring or None, slots of its ring or 0) of all keys and values, a drafter's last."""
    parts = [("", decoder.plan, decoder.state)]
    if decoder.attached is not None:
        parts.append(("draft.", decoder.attached.drafter.plan, decoder.attached.drafter.state))
    for prefix, plan, state in parts:
        for i, (spec, one) in enumerate(zip(plan.states, state, strict=True)):
            if isinstance(one, KeyValues):
                slots = 0 if one.table is None else ring(spec.window) * BLOCK
                yield from ((f"{prefix}{i}.{j}", t, one.table, slots) for j, t in enumerate(raw_tensors(one)))


def _at(t: torch.Tensor, table: torch.Tensor | None, first: int, end: int) -> torch.Tensor:
    """Tokens first .. end of the first sequence, (heads, n, ...)."""
    if table is None:
        return t[0, :, first:end]
    at = torch.arange(first, end, device=t.device)
    return t[table[0, at // BLOCK].long(), :, at % BLOCK].transpose(0, 1)


def _write(t: torch.Tensor, table: torch.Tensor | None, first: int, of: torch.Tensor) -> None:
    """Write tokens from `first` on, as `_at` returns them."""
    at = torch.arange(first, first + of.shape[1], device=t.device)
    if table is None:
        t[0, :, first : first + of.shape[1]] = of
    else:
        t[table[0, at // BLOCK].long(), :, at % BLOCK] = of.transpose(0, 1)
