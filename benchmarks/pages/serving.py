"""docs/serving.md: the soaks. Results: cpu/serve_soak*.json, of tests/fuzz/soak.py."""

from pages import part, read

BAD = ("json", "types", "large", "long", "utf8", "half", "slow")


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
            " Beside most of them 190 clients held connections, halves of bodies and unread answers: half of all "
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
