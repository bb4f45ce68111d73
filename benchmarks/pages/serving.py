"""docs/serving.md: the soaks. Results: cpu/serve_soak.json and cpu/serve_soak_small.json, of tests/fuzz/soak.py."""

from pages import part, read

BAD = ("json", "types", "large", "long", "utf8", "half", "slow")


@part
def soak() -> str:
    """What the long soak met, and the one with a cache too small for its users."""
    return f"{told('cpu/serve_soak.json')}\n{told('cpu/serve_soak_small.json')}"


def told(file: str) -> str:
    """One soak in a paragraph."""
    r = read(file)
    bad = sum(n for kind, n in r["counts"].items() if kind.split()[0] in BAD)
    rss, again = r["rss_mb"], f" {r['preemptions']:.0f} times a text gave back its blocks and was computed again."
    return (
        f"{r['requests']:,} requests of {r['users']} users to the bundled model on a CPU ({r['date']}, {r['seconds']:.0f} s, "
        f"`{r['flags']}`): {r['counts']['left']:,} broken off by the client, {bad:,} malformed or slow, "
        f"{r['counts']['equal']:,} answers, each the text of its prompt alone. {r['wrong']} wrong or lost, "
        f"{r['internal_errors']} internal errors; the process held {rss['after_a_quarter']} MB after a quarter of the time and "
        f"{rss['end']} MB at its end.{again if r['preemptions'] else ''}\n"
    )
