"""One thing bent in valid files: a field of a config, an entry of a header, a tensor, some bytes."""

import copy
import json
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

ODD: list[Any] = [
    *(None, True, False, -1, 0, 1, 2, 3, 7, 8, 16, 31, 32, 33, 64, 65, 127, 128, 255, 4096, 2**31, 2**53, 2**63, 10**30),
    *(0.5, -1.5, 1e30, 1e-30, "", "x", "4", "true", "false", "none", "int", "float", "group", "channel", "auto", "\x1b[31m"),
    *("[/b]", "\u202e", "../x", "/etc/passwd", "a" * 3000, "(a+)+$", "re:(a+)+$", "{{ x }}", "org/kernel:fn", "F16", "BF16"),
    *([], [1], [[]], [None], ["x"], {}, {"x": 1}, {"a": {"b": {"c": []}}}, [[[[[[]]]]]]),
]
NAMES = [
    *("model.layers.{n}.x", "model.layers.{n}.mlp.up_proj.weight", "lm_head.weight", "x.weight_scale"),
    *("[/b]", "\x1b[2J", "x" * 999),
]
UNKNOWN = ("unknown", "transformers_weights", "transform_config", "auto_map", "symmetric", "dynamic")
BESIDE = {
    **{"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128, "vocab_size": 256},
    **{"intermediate_size": 128, "num_hidden_layers": 1, "rms_norm_eps": 1e-6, "architectures": ["LlamaForCausalLM"]},
}
DTYPES = ["F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "U32", "X9"]


def bend(model: Path, out: Path, rng: Random) -> dict[str, Any]:
    """Make `out` a copy of `model` (a folder, or a file's folder) with one thing bent; what was."""
    mend(model, out)
    if model.suffix == ".gguf":
        return _gguf(out / model.name, rng)
    files = [
        p for p in sorted(out.iterdir()) if p.suffix == ".json" and p.name not in ("tokenizer.json", "generation_config.json")
    ]
    kind = rng.choice(("config", "config", "config", "header", "header", "tensor", "bytes", "file"))
    if kind == "config":
        path = rng.choice([out / "config.json", out / "config.json", *files])
        return {"kind": kind, "file": path.name, **bent_field(path, rng)}
    weights = rng.choice(sorted(out.glob("*.safetensors")))
    if kind == "file":
        return {"kind": kind, **_whole_file(rng.choice([weights, out / "config.json"]), rng)}
    if kind == "bytes":
        return {"kind": "values" if (at := bent_bits(weights, rng)) >= 0 else "header", "at": at}
    return {"kind": kind, **bent_header(weights, rng, kind == "tensor")}


def mend(model: Path, out: Path) -> None:
    """Make `out` a copy of the folder of `model`: the files that differ, a hundredth of a copy of all."""
    folder = model if model.is_dir() else model.parent
    out.mkdir(exist_ok=True)
    expected = {p.name: p for p in folder.iterdir()}
    for path in out.iterdir():
        if path.name not in expected:
            path.unlink()
    for name, path in expected.items():
        made, facts = out / name, path.stat()
        if not made.exists() or (made.stat().st_size, made.stat().st_mtime_ns) != (facts.st_size, facts.st_mtime_ns):
            shutil.copy2(path, made)


def _places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every field of a JSON value, as a path."""
    result = [at] if at else []
    items = value.items() if isinstance(value, dict) else enumerate(value[:20]) if isinstance(value, list) else ()
    for key, inner in items:
        result += _places(inner, (*at, key))
    return result


def bent_field(path: Path, rng: Random, more: Sequence[Any] = ()) -> dict[str, Any]:
    """Set, drop, add or swap a field of a JSON file. more: values besides ODD."""
    value = json.loads(path.read_text())
    places = _places(value)
    quantization = [p for p in places if str(p[0]).startswith(("quantiz", "compress"))]
    where = rng.choice(quantization or places) if rng.random() < 0.7 else rng.choice(places)
    table = value
    for key in where[:-1]:
        table = table[key]
    how = rng.choice(("set", "set", "set", "near", "drop", "add", "swap"))
    odd = copy.deepcopy(rng.choice([*ODD, *more]))
    if how == "near" and isinstance(table[where[-1]], int):
        odd = table[where[-1]] + rng.choice((-1, 1, table[where[-1]], -2 * table[where[-1]]))
    if how == "drop":
        del table[where[-1]]
    elif how == "add" and isinstance(table, dict):
        where = (
            *where[:-1],
            rng.choice(UNKNOWN),
        )
        table[where[-1]] = odd
    elif how == "swap":
        other = rng.choice(places)
        odd = other
        table[where[-1]] = copy.deepcopy(_at(value, other))
    else:
        table[where[-1]] = odd
    try:
        path.write_text(json.dumps(value))
    except ValueError:  # a table put into itself
        path.write_text("{}")
    return {"how": how, "place": [str(p) for p in where], "value": repr(odd)[:80]}


def _at(value: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def _whole_file(path: Path, rng: Random) -> dict[str, Any]:
    raw, how = path.read_bytes(), rng.choice(("cut", "longer", "empty", "noise"))
    new = {
        "cut": raw[: rng.randrange(len(raw))],
        "longer": raw + b"x" * rng.randrange(1, 99),
        "empty": b"",
        "noise": rng.randbytes(99),
    }
    path.write_bytes(new[how])
    return {"file": path.name, "how": how}


def bent_bits(path: Path, rng: Random) -> int:
    """Flip a bit; its place behind the header, or a negative number within it."""
    raw = bytearray(path.read_bytes())
    header = 8 + struct.unpack("<Q", raw[:8])[0]
    at = rng.randrange(len(raw)) if rng.random() < 0.5 else rng.randrange(header)
    raw[at] ^= 1 << rng.randrange(8)
    path.write_bytes(raw)
    return at - header


def bent_header(path: Path, rng: Random, whole: bool) -> dict[str, Any]:
    """Bend an entry of a safetensors header (or, with `whole`, take tensors out, rename or add them, data and all)."""
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    table, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    name = rng.choice([n for n in table if n != "__metadata__"])
    entry = table[name]
    how = rng.choice(("drop", "rename", "add", "twin") if whole else ("dtype", "shape", "turn", "offsets", "field", "zero"))
    if how == "drop":
        table, data = _without(table, data, name)
    elif how == "rename":
        new = rng.choice([*NAMES, name + "x", rng.choice(list(table))]).format(n=rng.choice((0, 1, 7, 10**10, "9" * 400)))
        table = {new if n == name else n: e for n, e in table.items()}
    elif how == "add":
        new = rng.choice([*NAMES, name.rpartition(".")[0] + ".odd"]).format(n=rng.choice((0, 1, 7, 10**10, "9" * 400)))
        table[new] = {"dtype": "U8", "shape": [0], "data_offsets": [len(data), len(data)]}
    elif how == "twin":
        other = rng.choice([n for n in table if n != "__metadata__"])
        table[name], table[other] = table[other], table[name]
    elif how == "dtype":
        entry["dtype"] = rng.choice(DTYPES)
    elif how == "shape":
        odd = [entry["shape"][::-1], [*entry["shape"], 1], [2**40, 2**40], [0, 2**61], [-1], [1] * 99, rng.choice(ODD)]
        entry["shape"] = rng.choice(odd)
    elif how == "turn" and len(entry["shape"]) == 2:
        n, k = entry["shape"]
        entry["shape"] = rng.choice([[2 * n, k // 2], [n // 2, 2 * k], [k, n], [n * k, 1], [1, n * k]])
    elif how == "offsets":
        entry["data_offsets"] = [o + rng.choice((-8, -1, 1, 8, 2**40)) for o in entry["data_offsets"]]
    elif how == "field":
        entry[rng.choice(("dtype", "shape", "data_offsets", "more"))] = copy.deepcopy(rng.choice(ODD))
    else:
        entry["shape"], entry["data_offsets"] = [0], [0, 0]
    head = json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)
    return {"how": how, "tensor": name}


def _without(table: dict[str, Any], data: bytes, name: str) -> tuple[dict[str, Any], bytes]:
    begin, end = table.pop(name)["data_offsets"]
    for n, e in table.items():
        if n != "__metadata__":
            e["data_offsets"] = [o - (end - begin) if o >= end else o for o in e["data_offsets"]]
    return table, data[:begin] + data[end:]


def _gguf(path: Path, rng: Random) -> dict[str, Any]:
    """Bytes of the head (or of the data), numbers at any place in it, the end; or its config.json."""
    raw = bytearray(path.read_bytes())
    head = raw.find(b"token_embd.weight") + 4000
    how = rng.choice(("bit", "bit", "number", "number", "value", "cut", "beside"))
    at = rng.randrange(min(head, len(raw) - 8))
    if rng.random() < 0.5:  # where few names of tokens are: the first pairs, and the tensors
        at = rng.choice((rng.randrange(2000), raw.find(b"output_norm") + rng.randrange(1500)))
    if how == "bit":
        raw[at] ^= 1 << rng.randrange(8)
    elif how == "number":
        raw[at : at + 8] = struct.pack("<Q", rng.choice((0, 1, 2**16, 2**32, 2**63, 2**64 - 1)))
    elif how == "value":
        at = rng.randrange(head, len(raw))
        raw[at] ^= 1 << rng.randrange(8)
    elif how == "cut":
        del raw[rng.randrange(len(raw)) :]
    else:
        key = rng.choice(list(BESIDE))
        odd = rng.choice([*ODD, 1, 2, 4, 8])
        path.with_name("config.json").write_text(json.dumps({**BESIDE, key: odd}))
        return {"kind": "config", "how": how, "place": [key], "value": repr(odd)[:80]}
    path.write_bytes(raw)
    return {"kind": "values" if how == "value" else "gguf", "how": how, "at": at}
