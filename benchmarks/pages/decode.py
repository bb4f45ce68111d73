"""docs/decode.md: tokens per second of whole models. Results: {h200,h100}/decode_*.json, h100/first_token.json,
*/same_tokens_*.json, h200/attention.json."""

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

from pages import RESULTS, Row, part, read, shown, table

MODELS = {
    "8b": "8B, Llama 3.1's shape",
    "8b_prompt4400": "8B after a long prompt",
    "8b_prompt32000": "8B after a very long prompt",
    "8b_tables": "8B of table weights, and of 4 bits without zeros",
    "gpt-oss-20b": "gpt-oss-20b's shape: 4 of 32 experts a token",
    "1b": "1B, Llama 3.2's shape (tied head)",
    "70b": "70B, Llama 3.1's shape",
    "30b-a3b": "30B mixture, Qwen3-30B-A3B's shape: 8 of 128 experts a token",
}
SPENT = ("16", "8", "4", "4h8", "2", "2h4", "mxfp4h8")  # variants whose steps are taken apart
DECODERS = {  # variants of e2e_decode.py that are no widths
    "transformers": "transformers `generate`, 16-bit",
    "transformers-compile": "transformers `generate`, static cache, its own torch.compile, 16-bit",
    "transformers-static": "transformers, static cache, one CUDA graph, 16-bit",
    "16": "lowq, 16-bit",
    "vllm": "vLLM 0.24, MXFP4 experts, the rest 16-bit",
}
Lines = tuple[Sequence[str], Sequence[Sequence[object]]]


TABLES = {"nvfp4": (4, 16, "e2m1/e4m3"), "mxfp4": (4, 32, "e2m1/e8m0"), "nf4": (4, 64, "nf4")}


def widths(variant: str) -> tuple[int, int, str, int]:
    """(bits, group, kind of scheme, bits of the head or 0) of a variant that e2e_decode.py spells bits[gGROUP][n][hBITS], as
    4g64h8, n where there are no zeros, or one of TABLES[hBITS]."""
    body, _, head = variant.partition("h")
    if body in TABLES:
        return *TABLES[body], int(head or 0)
    bits, _, group = body.removesuffix("n").partition("g")
    return int(bits), int(group or 128), "none" if body.endswith("n") else "float", int(head or 0)


def label(variant: str) -> str:
    """A variant of e2e_decode.py as a reader would name it."""
    if variant in DECODERS:
        return DECODERS[variant]
    bits, group, kind, head = widths(variant)
    body = next((name for name in TABLES if variant.startswith(name)), f"{bits}-bit g{group}")
    return f"lowq, {body}" + (" without zeros" if kind == "none" else "") + (f", {head}-bit head" if head else "")


def order(variant: str) -> tuple[Any, ...]:
    """transformers first, then by bits, wide groups before narrow, a 16-bit head before a quantized one."""
    if variant.startswith("transformers"):
        return (0, variant.endswith("compile"), variant.endswith("static"))
    bits, group, kind, head = widths(variant)
    return (1, -bits, kind != "float", -group, -(head or 16))


def mark(row: Row) -> str:
    """A mark for a row of e2e_decode.py that was measured by another run than the rest of its file."""
    return " †" if "run" in row else ""


def other_runs(rows: Iterable[Row]) -> str:
    """What the sign means, or nothing."""
    runs = sorted({r["run"].replace("T", " ") for r in rows if "run" in r})
    return f"\n† of a run of {', '.join(runs)} UTC\n" if runs else ""


@part
def decode() -> str:
    """One or two tables a model."""
    parts = []
    for gpu, (model, title) in product(("h200", "h100"), MODELS.items()):
        if not (RESULTS / gpu / f"decode_{model}.json").is_file():
            continue
        report = read(f"{gpu}/decode_{model}.json")
        rows = sorted((r for r in report["rows"] if "error" not in r), key=lambda r: order(r["variant"]))
        about = f"{report['device']}, prompt {report['prompt']}, {report['date'][:10]}, torch {report['versions']['torch']}"
        parts += [f"**{title}** ({about}), batch 1:\n", table(*_one(rows))]
        beside = RESULTS / gpu / f"decode_{model}_vllm.json"  # of the same run
        theirs = read(f"{gpu}/{beside.name}") if beside.is_file() else {"rows": []}
        if batched := _batched(rows + theirs["rows"]):
            parts += ["\nAll sequences together, tokens/s:\n", table(*batched)]
        if "about" in theirs:
            parts.append(f"\n{theirs['about']}\n")
        if told := other_runs(rows):
            parts.append(told)
        if spent := _spent(rows, report["read_gbs"]):
            about = "Microseconds of a step, in brackets the share of the read roofline (`--profile`; at 140 tokens of text):"
            parts += [f"\n{about}\n", table(*spent)]
        parts.append("")
    return "\n".join(parts)


@part
def same_tokens() -> str:
    """How many greedy tokens of a packed model are the likeliest in fp32, and how far the others' logits are from it."""
    lines = []
    for path in sorted(RESULTS.glob("*/same_tokens_*.json")):
        report = read(str(path.relative_to(RESULTS)))
        rows = report["rows"]
        tokens, missed = sum(r["tokens"] for r in rows), [tie for r in rows for tie in r["not_the_argmax_of_fp32"]]
        ties = ", ".join(f"{t['gap']:.3f} below {t['logit']:.1f}" for t in missed)
        theirs = sum(r["same_as_generate_until"] == r["tokens"] for r in rows)
        what = f"{report['device'].upper()}, {report['dtype']}, {report['bits']}-bit g{report['group']}"
        lines.append((what, f"{tokens - len(missed):,} of {tokens:,}", ties or "none", f"{theirs} of {len(rows)}"))
    columns = ("", ">the likeliest token in fp32", "the others: logits apart", ">prompts with `generate`'s very tokens")
    return table(columns, lines)


@part
def first_token() -> str:
    """Seconds of fresh processes from the checkpoint's files to the first token."""
    report = read("h100/first_token.json")
    what = f"{report['model'].upper()}, `{report['variant']}`, {report['checkpoint_gb']:.1f} GB in the page cache"
    stages = {"import_s": "imports", "load_s": "load", "join_s": "join", "compile_s": "compile", "prompt_s": "prompt"}
    stages |= {"load_to_first_token_s": "load to first token", "process_s": "whole process"}
    lines = [(i, *(f"{r[s]:.2f}" for s in stages)) for i, r in enumerate(report["runs"], 1)]
    about = f"{what}, prompt {report['prompt']}, {report['device']}, {report['date'][:10]}; seconds:"
    return f"{about}\n\n{table(('fresh process', *(f'>{name}' for name in stages.values())), lines)}"


def _one(rows: list[Row]) -> Lines:
    columns = ("", ">tokens/s", ">ms per token", ">GB read", ">of the read roofline", ">ms to the first token", ">peak GB")
    found = []
    for r in (r for r in rows if r["batch"] == 1):
        cells = (f"{r['tokens_per_s']:.0f}", f"{r['ms_per_step']:.2f}", f"{r['bytes_per_step'] / 1e9:.2f}")
        first = f"{1e3 * r['ttft_s']:.0f}" if "ttft_s" in r else ""
        tail = (f"{r['roofline_pct']:.0f}%", first, shown(r.get("peak_gb"), ".2f"))
        found.append((label(r["variant"]) + mark(r), *cells, *tail))
    return columns, found


def _spent(rows: list[Row], gbs: float) -> Lines | None:
    """What the parts of a step take, for the variants that were profiled."""
    alone = (r for r in rows if r["batch"] == 1 and "parts" in r and r["variant"] in SPENT)
    profiled = {r["variant"]: {p["what"]: p for p in r["parts"]} for r in alone}
    profiled = {v: parts for v, parts in profiled.items() if "attention" in parts}  # others are by kernel: too long a story
    if not profiled:
        return None

    def cell(p: Row | None) -> str:
        if p is None:
            return ""
        return f"{p['us']:,.0f}" + (f" ({p['bytes'] / p['us'] / gbs / 10:.0f}%)" if p["bytes"] else "")

    names = sorted(dict.fromkeys(name for parts in profiled.values() for name in parts), key=lambda n: n.startswith("("))
    lines = [(name, *(cell(parts.get(name)) for parts in profiled.values())) for name in names]
    return ("", *(f">{label(v)}" for v in profiled)), lines


def _batched(rows: list[Row]) -> Lines | None:
    batches = sorted({r["batch"] for r in rows})
    if batches == [1]:
        return None
    cells = {(r["variant"], r["batch"]): f"{r['tokens_per_s']:,.0f}{mark(r)}" for r in rows}
    variants = [v for v in dict.fromkeys(r["variant"] for r in rows) if any((v, b) in cells for b in batches if b > 1)]
    return ("", *(f">batch {b}" for b in batches)), [(label(v), *(cells.get((v, b), "") for b in batches)) for v in variants]


@part
def attention() -> str:
    """Two tables: steps over long caches, and prompts."""
    found = read("h200/attention.json")
    names: tuple[str, ...] = (">sequences", ">tokens so far", ">us", ">by clusters", ">Triton", ">reading alone")
    numbers: tuple[str, ...] = ("us", "cluster_us", "triton_us", "read_us")
    steps = table(names, [(r["B"], f"{r['tokens']:,}", *(shown(r.get(n)) for n in numbers)) for r in found["steps"]])
    names = (">tokens", ">after", ">ms", ">Triton's", ">torch flash", ">torch cuDNN", ">torch's choice")
    names += (">first call", ">torch's", ">TFLOP/s")
    numbers = tuple(f"{way}_ms" for way in ("ours", "triton", "flash", "cudnn", "reference", "ours_first", "reference_first"))
    prompts = table(
        names,
        [
            (f"{r['T']:,}", f"{r['start']:,}", *(shown(r.get(n), ".2f") for n in numbers), f"{r['tflops']:.0f}")
            for r in found["prompts"]
        ],
    )
    head = f"{found['gpu']}, {found['date']}, torch {found['torch']}, reading {found['read_gbs']:,} GB/s"
    return f"One layer's attention in a step ({head}), microseconds:\n\n{steps}\nOf a prompt, milliseconds:\n\n{prompts}"
