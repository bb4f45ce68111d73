"""docs/serving.md: vLLM with its own kernels and with lowq's; lowq's own engine, also over HTTP. Results: SPEED to EXPERTS."""

from typing import Any

from pages import RESULTS, Row, milliseconds, part, read, shown, table

SPEED = "h200/vllm_8b*.json"  # a run of vllm_speed.py each
HTTP = "h?00/serve_http_8b*.json"  # a run each
QUALITY, OWN, TEXTS, EXPERTS = (f"h200/{name}.json" for name in ("vllm_quality", "serve_8b", "serve_texts", "experts"))
MIXTURE, SEVERAL, RANKS = "h?00/vllm_a3b.json", "h100/vllm_70b_tp2.json", "h100/vllm_ranks.json"
WHOSE = {"export": "vLLM's", "lowq": "lowq's"}


def reports() -> list[tuple[str, Row, dict[str, Row]]]:
    """(bits, report, its engines by kernels) of every width in every file, the widest first; only one file's are compared."""
    found = []
    for report in newest_last(SPEED):
        # a run with fewer batches than another of its file was cut off: left out
        most = max(len(rows(run, "decode")) for run in report["runs"])
        runs = [run for run in report["runs"] if len(rows(run, "decode")) == most]
        widths = {run["bits"] for run in runs}
        found += [(bits, report, {r["kernels"]: r for r in runs if r["bits"] == bits}) for bits in widths]
    return sorted(found, key=lambda r: (-int(r[0]), r[1]["date"]))


def rows(run: Row | None, what: str) -> list[Row]:
    """The rows of a run that measure `what`; none of no run."""
    return [row for row in run["rows"] if row["what"] == what] if run else []


@part
def vllm_speed() -> str:
    """Tokens per second by both kernels, and what else an engine took."""
    lines, ends = [], []
    for bits, report, runs in reports():
        export, own = runs.get("export"), runs.get("lowq")
        theirs = {r["batch"]: r for r in rows(export, "decode")}
        for row in rows(own, "decode"):
            work = f"{row['batch']} x {row['prompt']} + {row['new']} new"
            lines.append((f"{bits} bits", work, *pair(theirs.get(row["batch"]), row)))
        for long, row in zip(rows(export, "prefill"), rows(own, "prefill"), strict=False):
            lines.append((f"{bits} bits", f"prompts of {row['batch']} x {row['prompt']:,}", *pair(long, row)))
        where = f"{report['device']}, vLLM {report['vllm']}, torch {report['torch']}, {report['date'][:10]}"
        starts = {
            k: f" start {r['start_s']:.0f} s," if "start_s" in r else ":" for k, r in runs.items()
        }  # or measured while other work ran
        took = (f"{WHOSE[k]} kernels{starts[k]} weights {r['weights_gb']:.2f} GB" for k, r in runs.items())
        ends.append(f"- {bits} bits: {where}; {'; '.join(took)}.\n")
    facts = (
        "8B, Llama 3.1's shape, random weights, groups of 128, 16-bit head and fp16; tokens per second, the reading of prompts "
    )
    columns = ("weights", "work", ">vLLM's kernels", ">lowq's", ">ratio")
    return f"{facts}in the time of answers:\n\n{table(columns, lines)}\n{''.join(ends)}"


def both(report: Row) -> str:
    """A table of one report's two engines; what a run that was cut off did not reach stays empty."""
    runs, lines = {r["kernels"]: r for r in report["runs"]}, []
    for what, form in (("decode", "{batch} x {prompt} + {new} new"), ("prefill", "prompts of {batch} x {prompt:,}")):
        own = {r["batch"]: r for r in rows(runs["lowq"], what)}
        for theirs in rows(runs["export"], what):
            cells = pair(theirs, own[theirs["batch"]]) if theirs["batch"] in own else (f"{theirs['tokens_per_s']:,.0f}", "", "")
            lines.append((form.format(**theirs), *cells))
    return table(("work", ">vLLM's kernels", ">lowq's", ">ratio"), lines)


def alike(report: Row) -> str:
    """How far two kernels' log-probabilities are apart."""
    (found,) = report["agreement"]
    apart = f"{found['rms']:.3f} apart (rms), of a spread of {found['spread']:.2f}"
    return f"Log-probabilities of {found['tokens']} tokens are {apart}.\n"


@part
def vllm_mixture() -> str:
    """A mixture by both kernels, a run each."""
    parts = []
    for report in newest_last(MIXTURE):
        runs = {r["kernels"]: r for r in report["runs"]}
        export, own = runs["export"], runs["lowq"]
        where = f"{report['device']}, vLLM {report['vllm']}, {report['date'][:10]}"
        parts.append(
            f"{where}, {report['layers']} of {report['of_layers']} layers:\n\n{both(report)}\n{alike(report)}"
            f"Start {export['start_s']:.0f} s by vLLM's kernels, which the driver compiles, {own['start_s']:.0f} s by lowq's; "
            f"weights of {own['weights_gb']:.2f} GB take {own['loaded_gb']:.2f}.\n"
        )
    facts = "Qwen3-30B-A3B's shape, random weights of 4 bits g128, fp16, tokens per second; empty cells were not reached."
    return f"{facts}\n\n" + "\n".join(parts)


@part
def vllm_several() -> str:
    """Over two GPUs: answers, a killed worker, speeds."""
    report, ranks = read(SEVERAL), read(RANKS)
    names = {"tp2": "tensor parallel 2", "pp2": "pipeline 2", "ep2": "experts over 2"}
    models = {"dense": "4 bits g64, table 8 bits", "nvfp4": "NVFP4", "mixture": "mixture, 4 bits g128"}
    lines = []
    for r in ranks["answers"]:
        gaps = ", ".join("not among five" if g is None else f"{g:.3f}" for g in r["gaps_where_they_part"])
        same = sum(a == n for a, n in zip(r["equal_tokens"], r["of"], strict=True))
        apart = f"{r['logprobs']['rms']:.3f} of {r['logprobs']['spread']:.2f}"
        lines.append((models[r["model"]], names[r["layout"]], f"{same} of {len(r['of'])}", gaps, apart))
    columns = (
        "model",
        "two GPUs",
        ">equal greedy texts",
        ">gap of log-probabilities where they part",
        ">rms apart, of a spread",
    )
    k = ranks["killed"]
    return (
        f"Two {ranks['device']}, vLLM {ranks['vllm']}, {ranks['date'][:10]}, bf16, and one GPU:\n\n{table(columns, lines)}\n"
        f"A worker of `lowq serve --engine vllm --tp 2` killed while it answered: the client had an error after "
        f"{k['client_told_after_s']:.0f} s,\n`lowq serve` ended with {k['exit_code']} after {k['server_ended_after_s']:.0f} s, "
        f"{len(k['left_running'])} processes stayed, the checkpoint's files were "
        f"{'unchanged' if k['checkpoint_whole'] else 'CHANGED'}.\n\n"
        f"{report['layers']} of Llama 3.1 70B's {report['of_layers']} layers by tensor parallelism, 4 bits g128, fp16, tokens "
        f"per second ({report['date'][:10]}):\n\n{both(report)}\n{alike(report)}"
    )


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
    for bits, _, runs in reports():
        steps = [(row["batch"], whose, row) for k, whose in WHOSE.items() for row in rows(runs.get(k), "step")]
        for batch, whose, row in sorted(steps, key=lambda step: step[0]):
            us = dict.fromkeys(PLACES, 0.0)
            for k in row["kernels"]:
                if place := next((p for p, words in PLACES.items() if any(w in k["kernel"] for w in words)), None):
                    us[place] += k["us"]
            rest = row["busy_us"] - sum(us.values())
            lines.append((f"{bits} bits", batch, whose, *(f"{v:,.0f}" for v in (*us.values(), rest, row["busy_us"]))))
    return table(("weights", ">sequences", "kernels", *(f">{p}" for p in PLACES), ">rest", ">us in all"), lines)


def users_of_engines() -> dict[str, dict[int, Row]]:
    """The rows of the closed loop by number of users, 4 bits: lowq's own engine, and vLLM by both kernels."""
    engines: dict[str, dict[int, Row]] = {}
    if (RESULTS / OWN).is_file():
        engines["lowq's own engine"] = {r["users"]: r for key, r in read(OWN).items() if key.startswith("users_")}
    four = [runs for bits, _, runs in reports() if bits == "4"][-1]
    for kernels, engine in (("export", "vLLM, its kernels"), ("lowq", "vLLM, lowq's")):
        engines[engine] = {r["users"]: r for r in rows(four[kernels], "users")}
    return engines


@part
def vllm_users() -> str:
    """The closed loop: tokens per second, and how long users wait."""
    engines = users_of_engines()
    lines: list[tuple[Any, ...]] = []
    for users in sorted({n for found in engines.values() for n in found}):
        for engine, found in engines.items():
            if row := found.get(users):
                times = (milliseconds(row[k], 1) for k in ("ttft_ms", "between_ms"))
                lines.append((users, engine, f"{row['tokens_per_s']:,.0f}", *times))
    return table((">users", "engine", ">tokens/s", ">first token, ms p50 / p99", ">between tokens"), lines)


HTTP_SERVERS = {"lowq": "`lowq serve`", "export": "vLLM, its kernels", "plugin": "vLLM, lowq's"}


def newest_last(pattern: str) -> list[Row]:
    """Every report of such a name."""
    return sorted((read(str(path.relative_to(RESULTS))) for path in RESULTS.glob(pattern)), key=lambda r: r["date"])


@part
def http_users() -> str:
    """The same loop over HTTP: `lowq serve`, and vLLM's server by both kernels."""
    texts, parts = read(TEXTS), []
    for report in newest_last(HTTP):
        servers, lines = report["servers"], []
        for users, ours in ((k, v) for k, v in servers["lowq"].items() if k.startswith("users_")):
            for name, shown_as in HTTP_SERVERS.items():
                if row := servers.get(name, {}).get(users):
                    times = (milliseconds(row[k], 1) for k in ("ttft_ms", "between_ms"))
                    ratio = "" if row is ours else f"{ours['tokens_per_s'] / row['tokens_per_s']:.2f}"
                    lines.append((row["users"], shown_as, f"{row['tokens_per_s']:,.0f}", ratio, *times))
        columns = (">users", "server", ">tokens/s", ">lowq serve over it", ">first token, ms p50 / p99", ">between tokens")
        where = f"{report['device']}, {report['date'][:16].replace('T', ' ')}, torch {report['torch']}, vLLM {report['vllm']}"
        parts.append(f"{where}, one run:\n\n{table(columns, lines)}")
        there = [s for s in HTTP_SERVERS if s in servers]
        long = [(n, f"{row['tokens']:,}") for n, row in servers["lowq"].items() if n.startswith("prompt_")]
        if long:
            heads = (">tokens of a prompt, alone", *(f">{HTTP_SERVERS[s]}, s to the first token" for s in there))
            parts.append(
                table(heads, [(told, *(f"{min(servers[s][n]['first_token_s']):.2f}" for s in there)) for n, told in long])
            )
    gap = max(texts["gaps_where_they_part"], default=0.0)
    return (
        "\n".join(parts)
        + f"\nOf {texts['at_once']} prompts at once by the `openai` client, streamed, {texts['equal_to_generate']} texts\n"
        f"are those of `generate`, the others part where two tokens' log-probabilities are up to {gap:.3f} apart.\n"
    )


@part
def http_loads() -> str:
    """Loads with documents, agents and chats, and adapters, by `lowq serve` and by vLLM's server with its own kernels."""
    names = ("lowq", "plain", "fp8", "vllm")
    ours, plain, eight_bits, theirs = (read(f"h200/http_loads_{name}.json") for name in names)
    other, lines, loads = theirs["servers"]["export"], [], ("rag", "agents", "chats")
    rows = [(n, n, row) for n, row in ours["servers"]["lowq"].items() if n.startswith("adapters")]
    rows += [(n, n, row) for n, row in plain["servers"]["lowq"].items() if n.startswith(loads)]
    rows += [(f"{n}, `--act fp8`", n, row) for n, row in eight_bits["servers"]["lowq"].items() if n.startswith(loads)]
    for label, name, one in rows:
        load = f"16 users, {name.rpartition('_')[2]} adapters" if name.startswith("adapters") else label
        lines.append((load, *_load(one, other.get(name))))
    columns = ("load", ">lowq serve, tokens/s", ">vLLM", ">ratio", *LOAD_TIMES)
    dates = f"{ours['date'][:10]} (`lowq serve` without adapters and vLLM's agents {plain['date'][:10]})"
    where = f"{ours['device']}, {dates}, torch {ours['torch']}, vLLM {theirs['vllm']} with activations of 16 bits"
    how = "one GPU, one server after the other, each with 28 GB of cache; empty cells were not reached"
    return f"{where}, {how}:\n\n{table(columns, lines)}\n{_loads_in_8_bits()}"


LOAD_TIMES = (">first token, ms p50 / p99", ">vLLM", ">between tokens", ">vLLM")


def _load(one: Row, two: Row | None) -> tuple[str, ...]:
    """A load's cells of two servers behind its name: tokens/s, their ratio, times; empty where the second was not reached."""
    both = (one, two)
    speeds = [f"{r['tokens_per_s']:,.0f}" if r else "" for r in both]
    ratio = f"{one['tokens_per_s'] / two['tokens_per_s']:.2f}" if two else ""
    times = ["{p50:.0f} / {p99:.0f}".format(**r["ttft_ms"]) if r else "" for r in both]
    return (*speeds, ratio, *times, *("{p50:.1f} / {p99:.0f}".format(**r["between_ms"]) if r else "" for r in both))


def _loads_in_8_bits() -> str:
    """Both servers with activations of 8 bits, in one run; loads that it lacks are of an earlier one."""
    newest, earlier = (read(f"h200/http_loads_{name}.json") for name in ("w4a8", "export8"))
    lines, long = [], []
    for load in earlier["servers"]["lowq"] | newest["servers"]["lowq"]:
        report = newest if load in newest["servers"]["lowq"] else earlier
        own, other = (report["servers"][name][load] for name in ("lowq", "export8"))
        if load == "prompt_4400":
            long = [" / ".join(f"{1e3 * s:.0f}" for s in one["first_token_s"]) for one in (own, other)]
        elif isinstance(own, dict):
            lines.append((load.replace("_", " "), *_load(own, other)))
    heads = ("load", ">`--act fp8`, tokens/s", ">vLLM's W4A8", ">ratio", *LOAD_TIMES)
    where = f"{newest['device']}, {newest['date'][:10]}, vLLM {newest['vllm']}"
    of = f"agents, and the prompt below the table, were measured on {earlier['date'][:10]} beside other engines"
    told = f"Both with activations of 8 bits, in one run ({where}; {of}):"
    alone = f"A prompt of 4,400 tokens alone, twice: {long[0]} ms, vLLM {long[1]}."
    return f"{told}\n\n{table(heads, lines)}\n{alone}\n"


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
