"""OpenAI's /v1/embeddings, ollama's /api/embed and /api/embeddings: a text's vector is the model's pooled hidden states."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lowq_cli.engine.ranges import INT64, Range
from lowq_cli.serving.http import fields
from lowq_cli.serving.http.fields import boolean, inside, shown
from lowq_cli.serving.http.refusal import wrong
from lowq_cli.serving.request import POOLINGS

MOST = 2048  # max. texts of a request, as in OpenAI's API
HARMLESS = ("user", "truncate", "options", "keep_alive", "truncate_prompt_tokens", "add_special_tokens", "priority")


@dataclass(frozen=True)
class Settings:
    """A parsed body. texts: strings or token ids. pooling: None for the model's. size: numbers of a vector, None for all."""

    texts: list[str | list[int]]
    pooling: str | None = None
    size: int | None = None
    unit: bool = True
    encoded: bool = False


def read(body: dict[str, Any]) -> Settings:
    """Parse a body. Raises Refusal."""
    fields.known("", body, {"model", "input", "encoding_format", "dimensions", "pooling", "normalize", *HARMLESS})
    if body.get("input") is None:
        raise wrong("input", "is needed")
    texts = fields.prompts("input", body["input"])
    if len(texts) > MOST:
        raise wrong("input", f"{len(texts)} texts; a request may have {MOST}")
    form, pooling = body.get("encoding_format") or "float", body.get("pooling")
    if form not in ("float", "base64"):
        raise wrong("encoding_format", f"must be float or base64, not {shown(form)}")
    if pooling is not None and pooling not in POOLINGS:
        raise wrong("pooling", f"must be one of {', '.join(POOLINGS)}, not {shown(pooling)}")
    size = body.get("dimensions")
    size = None if size is None else int(inside(Range(1, INT64, whole=True))("dimensions", size))
    unit = body.get("normalize")
    return Settings(texts, pooling, size, True if unit is None else boolean("normalize", unit), form == "base64")


def vectors(pooled: Sequence[list[float]], settings: Settings) -> list[np.ndarray]:
    """The vectors in fp32, truncated to `size` and normalized as requested. Raises Refusal if `size` exceeds the model's."""
    rows = []
    for values in pooled:
        if settings.size is not None and settings.size > len(values):
            raise wrong("dimensions", f"{settings.size} is more than the model's {len(values)}")
        v = np.array(values[: settings.size], np.float64)
        rows.append((v / max(float(np.linalg.norm(v)), 1e-12) if settings.unit else v).astype(np.float32))
    return rows


def whole(model: str, rows: Sequence[np.ndarray], settings: Settings, tokens: int) -> dict[str, Any]:
    """As OpenAI says it."""
    data = [
        {
            "object": "embedding",
            "index": i,
            "embedding": base64.b64encode(v.tobytes()).decode() if settings.encoded else v.tolist(),
        }
        for i, v in enumerate(rows)
    ]
    return {"object": "list", "data": data, "model": model, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
