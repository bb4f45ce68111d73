"""Time attention of decode steps over long caches, and of prompts, against other kernels for it. Needs a GPU.

    python benchmarks/attention.py                    # a minute; writes benchmarks/results/<gpu>/attention.json
    python benchmarks/attention.py --parts kv,decode  # two minutes: caches in 16 bits, fp8 and 4 bits; an 8B's steps over each

32 query heads on 8 key heads of 128 dims (Llama 3.1 8B), bf16. Steps: `dispatch.timing.graph_time`, caches rotated past L2;
`cluster` is attend.cu's launch of short caches, `triton` the portable kernel, `read_us` the cache's bytes over the measured
read bandwidth. Prompts: q/k rotation and cache write included for ours and `triton` (prompt.py), left out for torch's flash and
cuDNN; `first_ms` is the first call of a length that the process has not seen. Each result is checked against
decode/reference.py.
`fp8`: attention of prompts alone in e4m3 (prompt8.cu), with the codes that it makes of keys and values, beside prompt.cu.
`kv`: what dispatch takes beside Triton, over caches of random codes, a cache a sequence (`page` 0) or in blocks; of Triton's
time `place_triton_us` is the kernel that writes new keys and values as codes. `decode`: a recorded step of an 8B by 4 bits with
an 8-bit head, its position set: `grown_us` over the step at the fewest tokens, `read_us` of that many more slots.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import serve_load
import torch
import triton
from pages import results_of
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from lowq_cli.engine import precompiling, search
from lowq_cli.engine.graph import bucket
from lowq_cli.engine.native import NativeDecoder
from lowq_cli.engine.sampling import Sampling
from lowq_kernels.cuda import nvrtc
from lowq_kernels.decode import attend_cuda, attend_triton, kv, kv_triton, prompt, prompt8_cuda, prompt_cuda, reference
from lowq_kernels.decode.attend import AttendCall, attend
from lowq_kernels.decode.kv import Cache, Coded, empty
from lowq_kernels.decode.reference import Heads, Places
from lowq_kernels.dispatch.precompile import launch_all
from lowq_kernels.dispatch.registry import select
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
    (16, 512, (128, 400)),
    (16, 32768, (16000,)),
)
PAGE = 64
PAGED = (  # sequences, slots of the table, tokens so far, in turn
    *((1, 131072, (n,)) for n in (100, 500, 4000, 32000)),
    (1, 2048, (500,)),
    (8, 131072, (500,)),
    (16, 131072, (500,)),
    (16, 131072, (16000,)),
    (24, 131072, (500,)),
    (32, 131072, (500,)),
    (48, 131072, (500,)),
    (64, 131072, (500,)),
    (64, 131072, (100, 300, 700, 100, 300, 700, 100, 8000)),
    (128, 131072, (500,)),
    *((B, 131072, serve_load.under_way(B)) for B in (16, 32, 64, 128)),
)
PACKED = (((0, 300),), ((0, 300), (512, 100), (0, 600)), ((0, 2048),), ((30720, 2048),), tuple((0, 128) for _ in range(16)))
PROMPTS = ((512, 0), (2048, 0), (2048, 2048), (304, 4096), (8192, 0), (2048, 30720))  # tokens, tokens before them
EIGHT = ((1024, 0), (2048, 0), (4096, 0), (8192, 0), (4096, 12288), (4096, 28672), (304, 4096))  # of `fp8`, the same
EIGHT_CHECKED = 4096  # max. tokens and tokens before them for which errors are computed
NO_LENGTH = 1 << 40
KV_TOKENS = (500, 4400, 16000, 32000, 128000)
TRUTHS = 8 * 32000  # slots of all sequences up to which what comes of caches in few bits is checked
KV_PAGED = (4400, 32000)  # tokens so far, of caches in blocks
DECODE_TOKENS = (128, 4400, 16000, 32000, 128000)
LAYERS = 32


def caches(B: int, S: int) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = (torch.randn(B, HEADS.HKV, S, HEADS.D, device=DEVICE, dtype=DTYPE) for _ in range(2))
    return k, v


def tables(S: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.rand(S, HEADS.D // 2, device=DEVICE).repeat(1, 2) * 6
    return angles.cos().to(DTYPE), angles.sin().to(DTYPE)


def error(y: torch.Tensor, truth: torch.Tensor) -> float:
    return ((y.float() - truth.float()).norm() / truth.float().norm()).item()


def copied(call: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same operands, of caches of their own."""
    return (call[0], call[1].clone(), call[2].clone(), *call[3:])


def steps(read_gbs: float) -> Iterator[dict[str, float | int]]:
    for B, S, places in STEPS:
        held = [caches(B, S) for _ in range(max(2, min(24, (300 << 20) // (B * HEADS.HKV * S * HEADS.D * 4))))]
        turned = tables(S)
        qkv = torch.randn(B, (HEADS.HQ + 2 * HEADS.HKV) * HEADS.D, device=DEVICE, dtype=DTYPE)
        for place in places:
            pos = torch.full((B,), place, dtype=torch.int32, device=DEVICE)
            calls = [(qkv, *pair, Places(pos, *turned), HEADS) for pair in held]
            own = error(attend_cuda.attend(*copied(calls[0])), reference.attend(*copied(calls[0])))
            row = {"B": B, "S": S, "tokens": place, "error": own, "us": times(attend_cuda.attend, calls)}
            row["triton_us"] = times(attend_triton.attend, calls)
            if B * HEADS.HKV <= attend_cuda.MOST_HEADS:
                with mock.patch.object(attend_cuda, "LONG", NO_LENGTH):
                    row["cluster_us"] = times(attend_cuda.attend, calls)
            row["read_us"] = round(B * HEADS.HKV * (place + 1) * HEADS.D * 4 / read_gbs / 1e3, 2)
            yield row


def paged(read_gbs: float) -> Iterator[dict[str, float | int | str]]:
    """A server's steps: the kernels that dispatch takes over a cache of its own for each text, and over one in blocks."""
    for B, S, lengths in PAGED:
        places = [lengths[i % len(lengths)] for i in range(B)]
        width, blocks = -(-S // PAGE), B * (max(places) // PAGE + 1) + 1
        qkv = torch.randn(B, (HEADS.HQ + 2 * HEADS.HKV) * HEADS.D, device=DEVICE, dtype=DTYPE)
        pos, turned = torch.tensor(places, dtype=torch.int32, device=DEVICE), tables(S)
        own, pooled = list[tuple[Any, ...]](), list[tuple[Any, ...]]()
        for _ in range(max(2, min(24, (300 << 20) // (blocks * PAGE * HEADS.HKV * HEADS.D * 4)))):
            table = torch.zeros(B, width, dtype=torch.int32, device=DEVICE)
            table[:, : (blocks - 1) // B] = (torch.randperm(blocks - 1, device=DEVICE) + 1).reshape(B, -1)
            pools = [torch.randn(blocks, HEADS.HKV, PAGE, HEADS.D, device=DEVICE, dtype=DTYPE) for _ in range(2)]
            whole = [p[table[:, : (blocks - 1) // B].long()].transpose(1, 2).flatten(2, 3).contiguous() for p in pools]
            own.append((qkv, *whole, Places(pos, *turned), HEADS))
            pooled.append((qkv, *pools, Places(pos, *turned, table, pos.argsort(descending=True).to(torch.int32)), HEADS))
        y, truth = attend(*pooled[0]), reference.attend(*own[0])
        row: dict[str, float | int | str] = {"B": B, "S": S, "lengths": str(lengths), "error": error(y, truth)}
        row["equal_again"] = int(torch.equal(y, attend(*pooled[0])))
        row["kernel"] = select(AttendCall.of(qkv, S, HEADS.D, HEADS, PAGE))[0].name
        row["own_us"], row["paged_us"] = times(attend, own), times(attend, pooled)
        if len(lengths) > 1:
            row["as_they_came_us"] = times(attend, [(*held, at._replace(order=None), h) for *held, at, h in pooled])
        row["cuda_us"], row["triton_us"] = times(attend_cuda.attend, pooled), times(attend_triton.attend, pooled)
        row["read_us"] = round(sum(p + 1 for p in places) * HEADS.HKV * HEADS.D * 4 / read_gbs / 1e3, 2)
        yield row


def codes(kind: str, *shape: int) -> Cache:
    """A cache of random numbers of about 1; in few bits of random codes under equal scales."""
    held = empty(kind, shape, DTYPE, DEVICE)
    if not isinstance(held, Coded):
        return held.normal_()
    held.codes.random_(0, 256)
    if kind == "fp8":
        held.codes.bitwise_and_(0xBF)  # below 2
        held.scales.fill_((127 << 3) - kv.FIRST)  # 1
    else:
        held.scales.copy_(torch.tensor([0.25, -1.875], dtype=torch.bfloat16, device=DEVICE))
    return held


def kv_case(kind: str, B: int, tokens: int, page: int, copies: int) -> list[tuple[Any, ...]]:
    """Operands of attend: one step of B sequences after `tokens` tokens, over so many distinct caches."""
    S, each = bucket(tokens + 1), -(-(tokens + 1) // PAGE)
    qkv = torch.randn(B, (HEADS.HQ + 2 * HEADS.HKV) * HEADS.D, device=DEVICE, dtype=DTYPE)
    pos, calls = torch.full((B,), tokens, dtype=torch.int32, device=DEVICE), []
    for _ in range(copies):
        shape, table = (B, HEADS.HKV, S, HEADS.D), None
        if page:
            shape, table = (B * each + 1, HEADS.HKV, page, HEADS.D), torch.zeros(B, S // page, dtype=torch.int32, device=DEVICE)
            table[:, :each] = (torch.randperm(B * each, device=DEVICE) + 1).reshape(B, each)
        calls.append((qkv, codes(kind, *shape), codes(kind, *shape), Places(pos, *tables(S), table), HEADS))
    return calls


def few_bits(read_gbs: float, batches: Sequence[int]) -> Iterator[dict[str, float | int | str]]:
    """Steps over caches of every kind."""
    cases = [(B, tokens, page) for B in batches for tokens in KV_TOKENS for page in (0, PAGE)]
    cases = [(B, tokens, page) for B, tokens, page in cases if not page or tokens in KV_PAGED]
    small = [kv_case(kind, B, 100, page, 1)[0] for kind in kv.KINDS for B in batches for page in (0, PAGE)]
    launch_all([partial(way, *c) for c in small for way in (attend, attend_triton.attend)], lambda n, of: None)
    for B, tokens, page in cases:
        for kind in kv.KINDS:
            nbytes = 2 * B * HEADS.HKV * kv.slot_bytes(kind, HEADS.D, DTYPE) * (tokens + 1)
            calls = kv_case(kind, B, tokens, page, max(1, min(24, (300 << 20) // nbytes)))
            S, first = bucket(tokens + 1), calls[0]
            row: dict[str, float | int | str] = {"kv": kind, "B": B, "tokens": tokens, "page": page}
            row["kernel"] = select(AttendCall.of(first[0], S, HEADS.D, HEADS, page, kind))[0].name
            if B * tokens <= TRUTHS:
                y = attend(*first)
                row |= {"error": error(y, reference.attend(*first)), "equal_again": int(torch.equal(y, attend(*first)))}
            row["us"] = times(attend, calls)
            if row["kernel"] != "triton/attend":
                row["triton_us"] = times(attend_triton.attend, calls)
            if kind != kv.PLAIN:
                q = torch.empty(B, HEADS.HQ * HEADS.D, dtype=DTYPE, device=DEVICE)
                placing = [(*held, at.cos, at.sin, HEADS, q) for *held, at, _ in calls]
                row["place_triton_us"] = times(partial(kv_triton.place, pos=first[3].pos, table=first[3].table), placing)
            row["read_us"] = round(nbytes / read_gbs / 1e3, 2)
            yield row
            del calls, first
            torch.cuda.empty_cache()


def decode(read_gbs: float) -> Iterator[dict[str, float | int | str]]:
    """Whole steps over caches of every kind."""
    import e2e_decode

    model, _ = e2e_decode.decoder_for("4h8", "8b", torch.float16, "cuda")
    for kind in kv.KINDS:
        decoder = NativeDecoder(model, kv=kind)
        launch_all(precompiling.launches(model, decoder, 1, DECODE_TOKENS[0], Sampling()), lambda n, of: None)
        least = 0.0
        for tokens in DECODE_TOKENS:
            decoder.held = []
            decoder.start([[7] * DECODE_TOKENS[0]], Sampling(), tokens)
            with torch.inference_mode():
                decoder.pos.fill_(tokens)
            us = round(search.step_us(decoder), 1)
            least = us if tokens == DECODE_TOKENS[0] else least
            row: dict[str, float | int | str] = {"kv": kind, "tokens": tokens, "step_us": us, "grown_us": round(us - least, 1)}
            slot = 2 * LAYERS * HEADS.HKV * kv.slot_bytes(kind, HEADS.D, torch.float16)
            row["read_us"] = round((tokens - DECODE_TOKENS[0]) * slot / read_gbs / 1e3, 1)
            yield row
        decoder.captured.clear()
        del decoder
        e2e_decode.free("cuda")


def packed() -> Iterator[dict[str, float | int | str]]:
    """Prompts of several texts one after another over a paged cache, compared with one pass per prompt."""
    for pieces in PACKED:
        M, n = sum(new for _, new in pieces), len(pieces)
        width = -(-max(start + new for start, new in pieces) // PAGE)
        pools = [torch.randn(n * width + 1, HEADS.HKV, PAGE, HEADS.D, device=DEVICE, dtype=DTYPE) for _ in range(2)]
        table = (torch.randperm(n * width, device=DEVICE) + 1).reshape(n, width).to(torch.int32)
        caches = [p[table.long()].transpose(1, 2).flatten(2, 3).contiguous() for p in pools]
        qkv = torch.randn(M, (HEADS.HQ + 2 * HEADS.HKV) * HEADS.D, device=DEVICE, dtype=DTYPE)
        rows, pos, tiles, alone = list[int](), list[int](), [], []
        turned = tables(width * PAGE)
        for b, (start, new) in enumerate(pieces):
            first = len(rows)
            mine: tuple[Any, ...] = (qkv[None, first : first + new], *(c[b : b + 1] for c in caches), start, *turned, HEADS)
            alone.append(partial(prompt.attend_prompt, *mine))
            rows, pos = rows + [b] * new, [*pos, *range(start, start + new)]
            tiles += [(t, min(t + reference.TILE, first + new)) for t in range(first, first + new, reference.TILE)]
        of_rows, at, cuts = (torch.tensor(t, dtype=torch.int32, device=DEVICE) for t in (rows, pos, tiles))
        p = reference.Packed(table, of_rows, at, cuts)
        together = partial(prompt.attend_packed, qkv, pools[0], pools[1], p, *turned, HEADS)
        wrong = error(together(), torch.cat([way()[0] for way in alone]))
        row: dict[str, float | int | str] = {"pieces": str(pieces), "error_beside_own": wrong}
        row["packed_ms"] = round(graph_time([together], 20, 2000.0) / 1e3, 4)
        row["packed_triton_ms"] = round(graph_time([by_triton(together)], 20, 2000.0) / 1e3, 4)
        row["each_ms"] = round(graph_time([lambda: [way() for way in alone]], 20, 2000.0) / 1e3, 4)  # noqa: B023
        yield row


def times(attend: Callable[..., object], calls: Sequence[tuple[Any, ...]]) -> float:
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
            "ours": (ours := partial(prompt.attend_prompt, qkv, k_cache, v_cache, start, *turned, HEADS)),
            "triton": by_triton(ours),
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


def in_fp8() -> Iterator[dict[str, float | int]]:
    """Attention of prompts alone in e4m3, codes of keys and values included, and in 16 bits; errors beside fp32."""
    for T, start in EIGHT:
        k, v = caches(1, start + T)
        drawn = torch.randn(T, HEADS.HQ * HEADS.D, device=DEVICE, dtype=DTYPE)
        sizes, row = (T, start, start + T, 0), dict[str, float | int](T=T, start=start)
        work = 4 * HEADS.HQ * HEADS.D * (T * start + T * T / 2)
        for name, module in (("16", prompt_cuda), ("fp8", prompt8_cuda)):
            ours = partial(module.attend, k_cache=k, v_cache=v, p=None, h=HEADS, sizes=sizes, config={})
            if T + start <= EIGHT_CHECKED:
                q = drawn.reshape(1, T, HEADS.HQ, HEADS.D).transpose(1, 2).float()
                truth = scaled_dot_product_attention(q, k.float(), v.float(), is_causal=True, enable_gqa=True)
                row[f"{name}_error"] = error(ours(drawn.clone()), truth[0].transpose(0, 1).flatten(1))
            y = drawn.clone()  # each call's y is the next one's q
            time.sleep(0.2)
            us = graph_time([partial(ours, y)], 8, 2000.0)
            row |= {f"{name}_us": round(us, 1), f"{name}_tflops": round(work / us / 1e6)}
        yield row


def by_triton(work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """The same by prompt.py."""

    def run() -> torch.Tensor:
        with mock.patch.dict(os.environ, LOWQ_KERNEL="triton/prompt"):
            return work()

    return run


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
    parser.add_argument("--out", type=Path)
    parser.add_argument("--parts", default="steps,prompts,paged,packed")
    parser.add_argument("--batches", default="1,8,64", help="sequences, of `kv`")
    args = parser.parse_args()
    batches = [int(b) for b in args.batches.split(",")]
    ceiling = roofline(DEVICE)
    out = args.out or results_of(ceiling.device) / "attention.json"
    found: dict[str, object] = {"gpu": ceiling.device, "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__}
    found |= {"triton": triton.__version__, "nvrtc": "{}.{}".format(*nvrtc.version()), "read_gbs": round(ceiling.read_gbs)}
    parts = {"steps": lambda: steps(ceiling.read_gbs), "prompts": prompts, "paged": lambda: paged(ceiling.read_gbs)}
    parts |= {
        "packed": packed,
        "fp8": in_fp8,
        "kv": lambda: few_bits(ceiling.read_gbs, batches),
        "decode": lambda: decode(ceiling.read_gbs),
    }
    if out.exists():
        found = json.loads(out.read_text()) | found
    out.parent.mkdir(parents=True, exist_ok=True)
    for part, rows in ((p, parts[p]()) for p in args.parts.split(",")):
        found[part] = []
        for row in rows:
            print(row, flush=True)
            found[part].append(row)  # type: ignore[attr-defined]
            out.write_text(json.dumps(found, indent=1) + "\n")  # what is measured stays, if the time ends


if __name__ == "__main__":
    main()
