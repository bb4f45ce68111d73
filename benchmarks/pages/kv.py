"""What a cache in few bits costs: accuracy, and time on a GPU (h100/kv.json) and on a CPU (cpu/kv.json, of kv_cpu.py)."""

import json

from pages import RESULTS, Row, part, read, shown, table


@part
def kv() -> str:
    """Perplexity compared with a cache in 16 bits."""
    rows = json.loads((RESULTS / "accuracy" / "kv.json").read_text())["rows"]
    columns = (
        "model",
        ">dims of a head",
        ">`--kv`",
        ">of 16 bits' bytes",
        ">perplexity",
        ">in 16 bits",
        ">change",
        ">KL",
        ">top-1",
    )
    cells = [
        (
            r["model"],
            r["head_dim"],
            r["kv"],
            f"{r['bytes_of_16_bits']:.3f}",
            f"{r['ppl']:.2f}",
            f"{r['ppl_16']:.2f}",
            f"{r['increase_pct']:+.2f}%",
            f"{r['kl']:.4f}",
            f"{100 * r['top1']:.1f}%",
        )
        for r in rows
    ]
    return table(columns, cells)


@part
def kv_speed() -> str:
    """One layer's attention in a step, and an 8B's whole step, over each kind of cache."""
    found, kinds = read("h100/kv.json"), ("16", "fp8", "4")
    us = {(r["B"], r["tokens"], r["kv"]): r for r in found["kv"] if not r["page"]}
    lines = []
    for B, tokens in dict.fromkeys((B, tokens) for B, tokens, _ in us):
        rows = [us[B, tokens, kind] for kind in kinds]
        cells = (f"{shown(r['us'])} ({shown(r['read_us'])})" for r in rows)
        lines.append((B, f"{tokens:,}", *cells))
    layer = table((">sequences", ">tokens so far", *(f">{kind}" for kind in kinds)), lines)
    steps = {(r["tokens"], r["kv"]): f"{r['step_us']:,.0f}" for r in found["decode"]}
    whole = [(f"{t:,}", *(steps[t, kind] for kind in kinds)) for t in dict.fromkeys(t for t, _ in steps)]
    head = f"{found['gpu']}, {found['date']}, torch {found['torch']}, reading {found['read_gbs']:,} GB/s"
    text = f"Attention of one layer of an 8B in a step, us, with what reading the cache alone takes ({head}):\n\n{layer}\n"
    steps_table = table((">tokens so far", *(f">{kind}" for kind in kinds)), whole)
    return f"{_pays(found)}\n\n{text}A whole step of that model by 4 bits, one sequence, us:\n\n{steps_table}"


@part
def kv_cpu() -> str:
    """Milliseconds of attention and of whole steps on a CPU, by kind of cache."""
    found, kinds = read("cpu/kv.json"), ("16", "fp8", "4")
    works = {"step": "attention of a step", "drafts": "of 4 draft rows", "prompt": "of 256 tokens of a prompt"}
    lines = []
    for r in sorted(found["rows"], key=lambda r: (r["tokens"], "layers" in r)):
        what = works[r["what"]] if "heads" in r else f"whole step of {r['layers']} layers"
        dims = f", {r['heads'][0]} / {r['heads'][1]} heads of {r['heads'][2]}" if "heads" in r else ""
        cells = (f"{r['ms'][kind]:.3g}" for kind in kinds)
        ratios = (f"{r['ms'][kind] / r['ms']['16']:.2f}" for kind in kinds[1:])
        lines.append((f"{r['tokens']:,}", f"{r['model']}{dims}", what, *cells, *ratios))
    columns = (">tokens so far", "model", "ms", *(f">{kind}" for kind in kinds), *(f">{kind} / 16" for kind in kinds[1:]))
    about = f"{found['cpu']}, {found['isa']}, one thread, CPU time, {found['measured']}, torch {found['torch']}"
    return f"One layer unless said otherwise ({about}):\n\n{table(columns, lines)}"


def _pays(found: Row) -> str:
    """The least length measured from which on a kind of cache is faster than 16 bits."""
    layers = {(r["B"], r["tokens"], r["kv"]): r["us"] for r in found["kv"] if not r["page"]}
    us = layers | {(1, r["tokens"], r["kv"]): r["step_us"] for r in found["decode"]}
    steps = {r["tokens"] for r in found["decode"]}

    def since(B: int, kind: str) -> str:
        lengths = sorted({t for b, t, _ in us if b == B and (B > 1 or t in steps)}, reverse=True)
        slow = next((i for i, t in enumerate(lengths) if us[B, t, kind] >= us[B, t, "16"]), len(lengths))
        return f"{lengths[slow - 1]:,}" if slow else "no length measured"

    told = "Faster than 16 bits, of the lengths measured: "
    told += f"a step of one sequence from {since(1, 'fp8')} tokens of text on by fp8, from {since(1, '4')} by 4 bits; "
    return told + f"attention of eight sequences from {since(8, 'fp8')} tokens each by fp8, from {since(8, '4')} by 4 bits."
