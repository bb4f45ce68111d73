"""Attention of decode steps over long caches, and of prompts, beside the kernels that could do it instead. Needs a GPU.

    python benchmarks/attention.py            # a minute; writes benchmarks/results/<gpu>/attention.json

32 query heads on 8 key heads of 128 dims (Llama 3.1 8B), bf16. Steps: `dispatch.timing.graph_time`, caches rotated past L2;
`cluster` is attend.cu's launch of short caches, `triton` the portable kernel, `read_us` the cache's bytes over the measured
read bandwidth. Prompts: q/k rotation and cache write included for ours, left out for torch's flash and cuDNN;
`first_ms` is the first call of a length that the process has not seen. Each result is checked against decode/reference.py.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from lowq_kernels.decode import attention, attention_cuda, prompt, reference
from lowq_kernels.decode.attend import AttendCall
from lowq_kernels.decode.reference import Heads
from lowq_kernels.dispatch.registry import kernels
from lowq_kernels.dispatch.timing import graph_time, roofline

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
HEADS = Heads(32, 8, 128, 128**-0.5)
STEPS = (  # sequences, slots, tokens so far
    (1, 512, (100, 400)),
    (1, 4096, (100, 2000, 4000)),
    (1, 32768, (4400, 16000, 32000)),
    (1, 131072, (128000,)),
    (4, 4096, (128, 2000, 4000)),
    (8, 8192, (2000, 8000)),
    (16, 32768, (16000,)),
)
PROMPTS = ((512, 0), (2048, 0), (2048, 2048), (304, 4096), (8192, 0), (2048, 30720))  # tokens, tokens before them
NO_LENGTH = 1 << 40


def caches(B: int, S: int) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = (torch.randn(B, HEADS.HKV, S, HEADS.D, device=DEVICE, dtype=DTYPE) for _ in range(2))
    return k, v


def tables(S: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.rand(S, HEADS.D // 2, device=DEVICE).repeat(1, 2) * 6
    return angles.cos().to(DTYPE), angles.sin().to(DTYPE)


def error(y: torch.Tensor, truth: torch.Tensor) -> float:
    return ((y.float() - truth.float()).norm() / truth.float().norm()).item()


def steps(read_gbs: float) -> Iterator[dict[str, float | int]]:
    for B, S, places in STEPS:
        held = [caches(B, S) for _ in range(max(2, min(24, (300 << 20) // (B * HEADS.HKV * S * HEADS.D * 4))))]
        turned = tables(S)
        qkv = torch.randn(B, (HEADS.HQ + 2 * HEADS.HKV) * HEADS.D, device=DEVICE, dtype=DTYPE)
        for place in places:
            pos = torch.full((B,), place, dtype=torch.int32, device=DEVICE)
            calls = [(qkv, *pair, pos, *turned, HEADS, {}) for pair in held]
            truth = reference.attend(qkv, *[c.clone() for c in held[0]], pos, *turned, HEADS)
            own = error(attention_cuda.attend(qkv, *[c.clone() for c in held[0]], pos, *turned, HEADS, {}), truth)
            row = {"B": B, "S": S, "tokens": place, "error": own, "us": times(attention_cuda.attend, calls)}
            row["triton_us"] = times(attention.attend, calls)
            with mock.patch.object(attention_cuda, "LONG", NO_LENGTH):
                if kernels("attend")["cuda/attend"].why_not(AttendCall.of(qkv, S, HEADS.D, HEADS)) is None:
                    row["cluster_us"] = times(attention_cuda.attend, calls)
            row["read_us"] = round(B * HEADS.HKV * (place + 1) * HEADS.D * 4 / read_gbs / 1e3, 2)
            yield row


def times(attend: Callable[..., torch.Tensor], calls: Sequence[tuple[Any, ...]]) -> float:
    """Microseconds of one call, the calls in turn."""
    return round(graph_time([partial(attend, *call) for call in calls], 8, 2000.0), 2)


def prompts() -> Iterator[dict[str, float | int]]:
    S = max(T + start for T, start in PROMPTS)
    k_cache, v_cache = caches(1, S)
    turned = tables(S)
    for T, start in PROMPTS:
        end = start + T
        qkv = torch.randn(1, T, (HEADS.HQ + 2 * HEADS.HKV) * HEADS.D, device=DEVICE, dtype=DTYPE)
        q, k, v = torch.randn(1, HEADS.HQ, T, HEADS.D, device=DEVICE, dtype=DTYPE), k_cache[:, :, :end], v_cache[:, :, :end]
        mask = causal_lower_right(T, end) if start else None
        ways: dict[str, Callable[[], torch.Tensor]] = {
            "ours": partial(prompt.attend_prompt, qkv, k_cache, v_cache, start, *turned, HEADS),
            "flash": partial(sdpa, SDPBackend.FLASH_ATTENTION, q, k, v, mask),
            "reference": partial(reference.attend_prompt, qkv, k_cache, v_cache, start, *turned, HEADS),
        }
        if not start:  # cuDNN's causal mask begins at the first key
            ways["cudnn"] = partial(sdpa, SDPBackend.CUDNN_ATTENTION, q, k, v, None)
        row: dict[str, float | int] = {"T": T, "start": start, "error": error(ways["ours"](), ways["reference"]())}
        for name, way in ways.items():
            row[f"{name}_first_ms"] = once(way)
            row[f"{name}_ms"] = round(min(once(way) for _ in range(8)), 4)
        row["tflops"] = round(4 * HEADS.HQ * HEADS.D * (T * start + T * T / 2) / row["ours_ms"] / 1e9, 1)
        yield row


def sdpa(backend: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)


def once(work: Callable[[], object]) -> float:
    """Milliseconds of one call by the host's clock, launch to end."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return round((time.perf_counter() - begin) * 1e3, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    name = torch.cuda.get_device_name().lower()
    kind = next((k for k in ("h200", "h100") if k in name), name.replace(" ", "_"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / kind / "attention.json")
    out = parser.parse_args().out
    ceiling = roofline(DEVICE)
    found: dict[str, object] = {"gpu": ceiling.device, "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__}
    found["read_gbs"] = round(ceiling.read_gbs)
    for part, rows in (("steps", steps(ceiling.read_gbs)), ("prompts", prompts())):
        found[part] = []
        for row in rows:
            print(row, flush=True)
            found[part].append(row)  # type: ignore[attr-defined]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
