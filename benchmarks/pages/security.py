"""docs/security.md: the long run of the fuzzers. Result: fuzz/long.json (`python -m tests.fuzz`)."""

from pages import part, read, table


@part
def fuzz_bends() -> str:
    """Files bent, by format: how many were still read, what should not have happened, the slowest refusal or read."""
    found = read("fuzz/long.json")
    rows = [
        (k, f"{v['bent']:,}", f"{v['accepted']:,}", v["faults"], f"{v['slowest_s']:.2f}") for k, v in found["bends"].items()
    ]
    sums = [sum(v[field] for v in found["bends"].values()) for field in ("bent", "accepted", "faults")]
    rows.append(("all", f"{sums[0]:,}", f"{sums[1]:,}", sums[2], f"{max(v['slowest_s'] for v in found['bends'].values()):.2f}"))
    versions = ", ".join(f"{name} {v}" for name, v in found["versions"].items())
    told = f"{found['date']}, {found['minutes']:.0f} minutes of {found['machine']}, seed {found['seed']}; {versions}.\n"
    return told + "\n" + table(("format", ">bent", ">read all the same", ">faults", ">slowest, s"), rows)


@part
def fuzz_kills() -> str:
    """Runs stopped, by command and by what stopped them."""
    found = read("fuzz/long.json")["kills"]
    hows = ("kill", "int", "term", "hup", "two", "source")
    rows = [(name, *(row.get(how, 0) for how in hows), row.get("faults", 0)) for name, row in found.items()]
    rows.append(("all", *(sum(row.get(how, 0) for row in found.values()) for how in (*hows, "faults"))))
    titles = (">kill -9", ">SIGINT", ">SIGTERM", ">SIGHUP", ">two at once", ">source changed", ">faults")
    return table(("command", *titles), rows)
