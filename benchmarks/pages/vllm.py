"""docs/serving.md: vLLM with its own kernels and with lowq's; lowq's own engine, also over HTTP. Results: SPEED to EXPERTS."""

from typing import Any

from pages import RESULTS, Row, part, read, shown, table

SPEED, QUALITY, OWN, HTTP, EXPERTS = (
    f"h200/{name}.json" for name in ("vllm_8b", "vllm_quality", "serve_8b", "serve_http_8b", "experts")
)


def rows_of(bits: str, kernels: str, what: str) -> list[Row]:
    """The rows of one run."""
    runs = read(SPEED)["runs"]
    return [
        row for run in runs if (run["bits"], run["kernels"]) == (bits, kernels) for row in run["rows"] if row["what"] == what
    ]


@part
def vllm_speed() -> str:
    """Tokens per second by both kernels, and what else an engine took."""
    report, lines = read(SPEED), []
    for bits in sorted({run["bits"] for run in report["runs"]}, key=int, reverse=True):
        export, own = ({r["batch"]: r for r in rows_of(bits, kernels, "decode")} for kernels in ("export", "lowq"))
        for batch, row in own.items():
            theirs = export.get(batch)
            lines.append((f"{bits} bits", f"{batch} x {row['prompt']} + {row['new']} new", *pair(theirs, row)))
        for theirs, row in zip(rows_of(bits, "export", "prefill"), rows_of(bits, "lowq", "prefill"), strict=False):
            lines.append((f"{bits} bits", f"prompts of {row['batch']} x {row['prompt']:,}", *pair(theirs, row)))
    where = f"one {report['device']}, vLLM {report['vllm']}, torch {report['torch']}, {report['date'][:10]}"
    facts = f"8B, Llama 3.1's shape, random weights, groups of 128, 16-bit head and fp16; {where}; "
    facts += "tokens per second, the reading of prompts in the time of answers:"
    starts = {run["kernels"]: run for run in report["runs"]}
    whose = {"export": "vLLM's kernels", "lowq": "lowq's"}
    end = "".join(
        f"{whose[kernels]}: start {run['start_s']:.0f} s, weights {run['weights_gb']:.2f} GB. "
        for kernels, run in starts.items()
    )
    columns = ("weights", "work", ">vLLM's kernels", ">lowq's", ">ratio")
    return f"{facts}\n\n{table(columns, lines)}\n{end.strip()}\n"


def pair(theirs: Row | None, own: Row) -> tuple[str, str, str]:
    """Both speeds and their ratio."""
    speeds = (theirs["tokens_per_s"] if theirs else None, own["tokens_per_s"])
    return shown(speeds[0], ",.0f"), shown(speeds[1], ",.0f"), shown(speeds[1] / speeds[0] if speeds[0] else None, ".2f")


PLACES = {  # what a kernel does -> words in its name, the first that fit: Triton's names tell what they are fused with
    "norms, rotation, activation, cache": ("triton_", "reshape_and_cache"),
    "products": ("tile_", "GemmUniversal", "machete", "marlin", "Marlin"),
    "attention": ("flash::",),
    "head (16 bits)": ("nvjet",),
}


@part
def vllm_step() -> str:
    """Where the GPU's time goes in a step, by both kernels."""
    lines = []
    for kernels, whose in (("export", "vLLM's"), ("lowq", "lowq's")):
        for row in rows_of("4", kernels, "step"):
            us = dict.fromkeys(PLACES, 0.0)
            for k in row["kernels"]:
                if place := next((p for p, words in PLACES.items() if any(w in k["kernel"] for w in words)), None):
                    us[place] += k["us"]
            rest = row["busy_us"] - sum(us.values())
            lines.append((row["batch"], whose, *(f"{v:,.0f}" for v in (*us.values(), rest, row["busy_us"]))))
    return table(
        (">sequences", "kernels", *(f">{p}" for p in PLACES), ">rest", ">us in all"), sorted(lines, key=lambda r: r[0])
    )


def users_of_engines() -> dict[str, dict[int, Row]]:
    """The rows of the closed loop by number of users: lowq's own engine, and vLLM by both kernels."""
    engines: dict[str, dict[int, Row]] = {}
    if (RESULTS / OWN).is_file():
        engines["lowq's own engine"] = {r["users"]: r for key, r in read(OWN).items() if key.startswith("users_")}
    for kernels, engine in (("export", "vLLM, its kernels"), ("lowq", "vLLM, lowq's")):
        engines[engine] = {r["users"]: r for r in rows_of("4", kernels, "users")}
    return engines


@part
def vllm_users() -> str:
    """The closed loop: tokens per second, and how long users wait."""
    engines = users_of_engines()
    lines: list[tuple[Any, ...]] = []
    for users in sorted({n for found in engines.values() for n in found}):
        for engine, found in engines.items():
            if row := found.get(users):
                first, between = row["ttft_ms"], row["between_ms"]
                times = (f"{t['p50']:.1f} / {t['p99']:.1f}" for t in (first, between))
                lines.append((users, engine, f"{row['tokens_per_s']:,.0f}", *times))
    return table((">users", "engine", ">tokens/s", ">first token, ms p50 / p99", ">between tokens"), lines)


@part
def http_users() -> str:
    """The same loop through `lowq serve`, over HTTP."""
    report = read(HTTP)
    lines = []
    for row in (v for k, v in report["servers"]["lowq"].items() if k.startswith("users_")):
        times = (f"{t['p50']:.1f} / {t['p99']:.1f}" for t in (row["ttft_ms"], row["between_ms"]))
        lines.append((row["users"], row["requests"], f"{row['tokens_per_s']:,.0f}", *times))
    columns = (">users", ">requests", ">tokens/s", ">first token, ms p50 / p99", ">between tokens")
    return f"{report['device']}, {report['date'][:10]}, torch {report['torch']}:\n\n{table(columns, lines)}"


@part
def vllm_quality() -> str:
    """Perplexity and greedy tokens by lowq and through vLLM."""
    report, lines = read(QUALITY), []
    for r in report["rows"]:
        if "error" in r:
            lines.append((scheme(r), r["error"], "", "", "", ""))
            continue
        same = sum(a == n for a, n in r["same_tokens"])
        gap = f"{max(r['gaps']):.3f}" if r["gaps"] else ""
        change = f"{100 * (r['vllm_ppl'] / r['ppl'] - 1):+.3f}%"
        lines.append((scheme(r), f"{r['ppl']:.3f}", f"{r['vllm_ppl']:.3f}", change, f"{same} of {len(r['same_tokens'])}", gap))
    columns = ("scheme", ">perplexity", ">in vLLM", ">change", ">equal greedy texts", ">largest gap of logits where they part")
    return f"The bundled model, {report['device']}, vLLM {report['vllm']}, {report['date'][:10]}:\n\n{table(columns, lines)}"


def scheme(r: Row) -> str:
    """A row's scheme in words."""
    dtype = {"float16": "fp16", "bfloat16": "bf16"}[r["dtype"]]
    if "format" in r:
        return f"fp8 blocks (vLLM's own kernel), {dtype}"
    if "bpw" in r:
        return f"{r['bpw']} bits a weight, mixed, {dtype}"
    more = [
        f"{r['zero']} zeros" if r.get("zero", "float") != "float" else "",
        f"table {r['embedding']} bits" if "embedding" in r else "",
    ]
    more.append(f"x in {r['act']}" if "act" in r else "")
    return ", ".join(filter(None, (f"{r['bits']}-bit g{r['group']}".replace("gchannel", "a row"), *more, dtype)))


@part
def vllm_experts() -> str:
    """A mixture's layer by both kernels."""
    report = read(EXPERTS)
    names = list(dict.fromkeys(r["model"] for r in report["rows"]))
    found = {(r["model"], r["tokens"]): r for r in report["rows"]}
    lines = [
        (tokens, *(shown(found[name, tokens].get(f"{way}_us"), ",.0f") for name in names for way in ("single", "grouped")))
        for tokens in dict.fromkeys(r["tokens"] for r in report["rows"])
    ]
    columns = (">tokens", *(f">{name}, {way}" for name in names for way in ("once a token", "grouped")))
    worst = max(v for r in report["rows"] for k, v in r.items() if k.endswith("_error"))
    where = f"{report['device']}, {report['date'][:10]}"
    facts = f"4 bits g128, us a layer in a CUDA graph, {where}; relative error against fp32 up to {worst:.1e}:"
    return f"{facts}\n\n{table(columns, lines)}"
