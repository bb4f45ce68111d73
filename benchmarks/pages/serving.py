"""docs/serving.md: soaks (cpu/serve_soak*.json, of tests/fuzz/soak.py), swaps of models, adapters, loads, forms."""

from pages import milliseconds, part, read, table

BAD = ("json", "types", "large", "long", "utf8", "half", "slow")

LOADS = {
    "rag-1": "documents, 1 user",
    "rag-16": "documents, 16 users",
    "rag-64": "documents, 64 users",
    "agents-16": "agents, 16 users",
    "agents-64": "agents, 64 users",
    "chats-128": "short chats, 128 users",
}


@part
def own_loads() -> str:
    """Loads of serve_load.LOADS by the engine alone."""
    run, lines = read("h200/serve_loads.json"), []
    for name, users in LOADS.items():
        r = run[name]
        t, b = r["ttft_ms"], r["between_ms"]
        seen = f"{r['tokens_per_s']:,.0f}", milliseconds(t), milliseconds(b, 1)
        lines.append((users, *seen, f"{b['p99'] / b['p50']:.1f}"))
    columns = ("load", ">tokens/s", ">first token p50 / p99, ms", ">between tokens p50 / p99, ms", ">p99 over p50")
    return table(columns, lines) + f"\n{run['device']}, {run['date'][:10]}.\n"


@part
def soak() -> str:
    """What the long soak met, and those with a cache too small for their users."""
    return "\n".join(told(f"cpu/serve_soak{which}.json") for which in ("", "_small", "_again"))


def told(file: str) -> str:
    """One soak in a paragraph."""
    r = read(file)
    model = "the bundled model" if r["model"] == "demo" else "the bundled model in 4 bits"
    bad = sum(n for kind, n in r["counts"].items() if kind.split()[0] in BAD)
    rss, again = r["rss_mb"], f" {r['preemptions']:.0f} times a text gave back its blocks and was computed again."
    parted = f", and {n} that part from it and are no other's" if (n := r["counts"].get("different", 0)) else ""
    beside = ""
    if r.get("hostile"):
        alone, others = (r["wait_ms"][k] for k in ("alone", "beside"))
        beside = (
            " During most of them 190 clients held connections, halves of bodies and unread answers: half of all "
            f"answers came within {others['p50']:,.0f} ms and 99% within {others['p99']:,.0f}, before that within "
            f"{alone['p50']:,.0f} and {alone['p99']:,.0f}."
        )
    return (
        f"{r['requests']:,} requests of {r['users']} users to {model} on a CPU ({r['date']}, {r['seconds']:.0f} s, "
        f"`{r['flags']}`): {r['counts']['left']:,} broken off by the client, {bad:,} malformed or slow, "
        f"{r['counts']['equal']:,} answers, each the text of its prompt alone{parted}. {r['wrong']} wrong or lost, "
        f"{r['internal_errors']} internal errors; the process held {rss['after_a_quarter']} MB after a quarter of the time and "
        f"{rss['end']} MB at its end.{again if r['preemptions'] else ''}{beside}\n"
    )


@part
def swaps() -> str:
    """Four models over a memory for two."""
    r = read("cpu/serve_swaps.json")
    counts, wait, rss, loads = r["counts"], r["wait_s"], r["rss_mb"], sum(r["loads"].values())
    return (
        f"{r['requests']:,} requests of {r['users']} users at random to four models over a memory for two, on a CPU "
        f"({r['date']}, {r['seconds']:.0f} s): {counts['broken off']:,} broken off while a model was loaded, waited for or "
        f"answering, {counts['answers']:,} answers, each the text of its model and prompt alone. {r['wrong']} wrong or lost, "
        f"{loads:.0f} loads; half of all answers came within {wait['p50']:.0f} s and 99% within {wait['p99']:.0f}; the "
        f"server's own process held {rss['quarter']} MB after a quarter of the answers and {rss['end']} MB at the end "
        f"(`tests/fuzz/swaps.py`).\n\n{kills()}"
    )


@part
def swap() -> str:
    """Seconds in which a server exchanges one 8B for another (serve_swaps.py)."""
    run = read("h200/serve_swap.json")
    first, *later = (r["first_token_s"] for r in run["swaps"])
    again = max(r["again_first_token_s"] for r in run["swaps"])
    return (
        f"An 8B in 4 bits, its files in the page cache, a memory for one model ({run['device']}, {run['date'][:10]}, "
        f"`benchmarks/serve_swaps.py`): the first token came {first:.1f} s after the request for a model that had not "
        f"been loaded in this server, and {min(later):.1f} to {max(later):.1f} s after one for a model that had been; that of "
        f"the next request {again:.2f} s after it or sooner.\n"
    )


@part
def adapters() -> str:
    """Users of LoRA adapters over HTTP, lowq and vLLM (serve_http.py --adapters 0,1,8)."""
    run, other, lines = read("h200/http_adapters_lowq.json"), read("h200/http_adapters.json"), []
    lowq, vllm = run["servers"]["lowq"], other["servers"]["export"]
    for several in (0, 1, 8):
        r, v = lowq[f"adapters_{several}"], vllm[f"adapters_{several}"]
        seen = milliseconds(r["ttft_ms"]), milliseconds(r["between_ms"], 2)
        speeds = (
            f"{each['tokens_per_s']:,.0f} ({each['tokens_per_s'] / every['adapters_0']['tokens_per_s']:.2f})"
            for each, every in ((r, lowq), (v, vllm))
        )
        lines.append((str(several), *speeds, *seen))
    columns = (">adapters", ">tokens/s", ">vLLM's", ">first token p50 / p99, ms", ">between tokens p50 / p99, ms")
    about = (
        f"{lowq['adapters_0']['users']} users of an 8B in 4 bits over HTTP, rank 16 in every product, in brackets the share of "
        f"the speed without ({run['device']}, {run['date'][:10]}; vLLM {other['vllm']} in an earlier run of the same load on "
        "such a card; 0: a server with adapters that no request names):"
    )
    return f"{about}\n\n{table(columns, lines)}"


def kills() -> str:
    """The same while engines and clients are killed, and the server at the end."""
    r = read("cpu/serve_kills.json")
    counts, wait, servers = r["counts"], r["wait_s"], r["servers_killed"]
    left, seconds = sum(s["left"] for s in servers), max(s["seconds"] for s in servers)
    return (
        f"{r['requests']:,} requests of {r['users']} users while {counts['engines killed']} of the server's processes and "
        f"{counts['clients killed']} clients were killed at random moments ({r['date']}, {r['seconds']:,.0f} s, with other "
        f"work on the machine): {counts['broken off']:,} broken off, {counts['answers']:,} answers, {r['wrong']} wrong or "
        f"lost; {counts['told of a death']} were refused or ended because a process had died, and were asked again; half of "
        f"all answers came within {wait['p50']:.0f} s and 99% within {wait['p99']:.0f}. Then the server itself was killed "
        f"while it loaded, answered and unloaded: {left} engines were left after {seconds:.0f} s.\n"
    )


@part
def forms_first() -> str:
    """The first requests for an answer in a form (forms_first.py)."""
    run, lines = read("cpu/forms_first.json"), []
    for r in run["rows"]:
        later, memory = range(1, len(r["seconds"])), r["mb_after"]
        waits = (f"{r['seconds'][0]:.1f}", f"{max(r['seconds'][i] for i in later):.1f}")
        gaps = (f"{r['gaps'][0]:.2f}", f"{max(r['gaps'][i] for i in later):.2f}", f"{max(r['gaps_before']):.2f}")
        grown = sum(memory.values()) - sum(r["mb_before"].values())
        lines.append((NAMES[r["tree"]], *waits, *gaps, f"{grown} MB"))
    columns = ("", ">first answer, s", ">later ones", ">longest gap of another answer, s", ">later", ">without", ">memory")
    about = f"{run['tokens']:,} tokens, {run['cpus']} cores that other programs used, too, {run['date']}"
    servers = f"medians of {run['rows'][0]['loads']} servers (`benchmarks/forms_first.py`)"
    return table(columns, lines) + f"\n{about}; {servers}.\n"


NAMES = {"before": "prepared in the processes of the server and the engine", "now": "in a process of its own"}
