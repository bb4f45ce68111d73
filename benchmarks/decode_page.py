"""The tables of docs/decode.md: every decode_*.json of results/h100."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import summary

RESULTS = Path(__file__).parent / "results"
Table = Callable[[Sequence[str], Iterable[Sequence[object]]], str]
MODELS = {
    "8b": "8B, Llama 3.1's shape",
    "1b": "1B, Llama 3.2's shape (tied head)",
    "70b": "70B, Llama 3.1's shape",
    "30b-a3b": "30B mixture, Qwen3-30B-A3B's shape: 8 of 128 experts a token",
}
SPENT = ("16", "8", "4", "4h8", "2", "2h4")  # variants whose steps are taken apart


def page(table: Table) -> str:
    """One or two tables a model."""
    parts = []
    for model, title in MODELS.items():
        path = RESULTS / "h100" / f"decode_{model}.json"
        if not path.is_file():
            continue
        report = json.loads(path.read_text())
        rows = sorted((r for r in report["rows"] if "error" not in r), key=lambda r: _order(r["variant"]))
        about = f"{report['device']}, prompt {report['prompt']}, {report['date'][:10]}, torch {report['versions']['torch']}"
        parts += [f"**{title}** ({about}), batch 1:\n", table(*_one(rows))]
        if batched := _batched(rows):
            parts += ["\nAll sequences together, tokens/s:\n", table(*batched)]
        if told := summary.other_runs(rows):
            parts.append(told)
        if spent := _spent(rows, report["read_gbs"]):
            about = "Microseconds of a step, in brackets the share of the read roofline (`--profile`; at 140 tokens of text):"
            parts += [f"\n{about}\n", table(*spent)]
        parts.append("")
    return "\n".join(parts)


def same_tokens(table: Table) -> str:
    """Greedy tokens of a packed model beside the dequantized one's, and every place where they are not its likeliest."""
    lines = []
    for path in sorted(RESULTS.glob("*/same_tokens_*.json")):
        report = json.loads(path.read_text())
        rows = report["rows"]
        tokens, missed = sum(r["tokens"] for r in rows), [tie for r in rows for tie in r["not_the_argmax_of_fp32"]]
        ties = ", ".join(f"{t['gap']:.3f} below {t['logit']:.1f}" for t in missed)
        theirs = sum(r["same_as_generate_until"] == r["tokens"] for r in rows)
        what = f"{report['device'].upper()}, {report['dtype']}, {report['bits']}-bit g{report['group']}"
        lines.append((what, f"{tokens - len(missed):,} of {tokens:,}", ties or "none", f"{theirs} of {len(rows)}"))
    columns = ("", ">the likeliest token in fp32", "the others: logits apart", ">prompts with `generate`'s very tokens")
    return table(columns, lines)


def first_token(table: Table) -> str:
    """Seconds of fresh processes from the checkpoint's files to the first token."""
    path = RESULTS / "h100" / "first_token.json"
    if not path.is_file():
        return "(not measured yet)\n"
    report = json.loads(path.read_text())
    what = f"{report['model'].upper()}, `{report['variant']}`, {report['checkpoint_gb']:.1f} GB in the page cache"
    stages = {"import_s": "imports", "load_s": "load", "join_s": "join", "compile_s": "compile", "prompt_s": "prompt"}
    columns = ("fresh process", *(f">{name}" for name in stages.values()), ">load to first token", ">whole process")
    totals = ("load_to_first_token_s", "process_s")
    lines = [(i, *(f"{r[s]:.2f}" for s in (*stages, *totals))) for i, r in enumerate(report["runs"], 1)]
    return f"{what}, prompt {report['prompt']}, {report['device']}, {report['date'][:10]}; seconds:\n\n{table(columns, lines)}"


def label(variant: str) -> str:
    """A variant of e2e_decode.py as a reader would name it."""
    if variant in summary.DECODERS:
        return summary.DECODERS[variant]
    bits, group, head = summary.widths(variant)
    return f"lowq, {bits}-bit g{group}" + (f", {head}-bit head" if head else "")


def _order(variant: str) -> tuple[Any, ...]:
    """transformers first, then by bits, wide groups before narrow, a 16-bit head before a quantized one."""
    if variant.startswith("transformers"):
        return (0, variant.endswith("compile"), variant.endswith("static"))
    bits, group, head = summary.widths(variant)
    return (1, -bits, -group, -(head or 16))


def _one(rows: list[dict[str, Any]]) -> tuple[Sequence[str], list[Sequence[object]]]:
    columns = ("", ">tokens/s", ">ms per token", ">GB read", ">of the read roofline", ">ms to the first token", ">peak GB")
    found = []
    for r in rows:
        if r["batch"] == 1:
            first, peak = r.get("ttft_s"), r.get("peak_gb")
            cells = (f"{r['tokens_per_s']:.0f}", f"{r['ms_per_step']:.2f}", f"{r['bytes_per_step'] / 1e9:.2f}")
            tail = ("" if first is None else f"{1e3 * first:.0f}", "" if peak is None else f"{peak:.2f}")
            found.append((label(r["variant"]) + summary.mark(r), *cells, f"{r['roofline_pct']:.0f}%", *tail))
    return columns, found


def _spent(rows: list[dict[str, Any]], gbs: float) -> tuple[Sequence[str], list[Sequence[object]]] | None:
    """What the parts of a step take, for the variants that were profiled."""
    profiled = {r["variant"]: {p["what"]: p for p in r["parts"]} for r in rows if "parts" in r and r["variant"] in SPENT}
    profiled = {v: parts for v, parts in profiled.items() if "attention" in parts}  # others are by kernel: too long a story
    if not profiled:
        return None

    def cell(p: dict[str, Any] | None) -> str:
        if p is None:
            return ""
        return f"{p['us']:,.0f}" + (f" ({p['bytes'] / p['us'] / gbs / 10:.0f}%)" if p["bytes"] else "")

    names = dict.fromkeys(name for parts in profiled.values() for name in parts)
    names = [*(n for n in names if not n.startswith("(")), *(n for n in names if n.startswith("("))]
    lines = [(name, *(cell(parts.get(name)) for parts in profiled.values())) for name in names]
    return ("", *(f">{label(v)}" for v in profiled)), lines


def _batched(rows: list[dict[str, Any]]) -> tuple[Sequence[str], list[Sequence[object]]] | None:
    batches = sorted({r["batch"] for r in rows})
    if batches == [1]:
        return None
    cells = {(r["variant"], r["batch"]): f"{r['tokens_per_s']:,.0f}{summary.mark(r)}" for r in rows}
    variants = [v for v in dict.fromkeys(r["variant"] for r in rows) if any((v, b) in cells for b in batches if b > 1)]
    return ("", *(f">batch {b}" for b in batches)), [(label(v), *(cells.get((v, b), "") for b in batches)) for v in variants]
