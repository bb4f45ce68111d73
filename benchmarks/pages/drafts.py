"""Drafts: what steps of several rows take and what drafts bring (<device>/drafts.json), what is accepted of heads' guesses."""

from itertools import chain, product

from pages import RESULTS, Row, part, read, table

EAGLE3 = (
    "4 to 5"  # tokens a round that EAGLE-3's authors give for their heads of 8B models, drafted as a tree (arXiv:2503.01840)
)
DEVICES = ("h200", "h100", "cpu")


def _rows(name: str, kind: str) -> list[tuple[str, Row]]:
    """(device, row) of a kind, of those devices that were measured on."""
    there = (d for d in DEVICES if (RESULTS / d / name).is_file())
    return [(d, r) for d in there for r in read(f"{d}/{name}")["rows"] if r["part"] == kind]


@part
def draft_heads() -> str:
    """Acceptance by position on greedy texts of the models themselves."""
    rows = _rows("draft_heads.json", "accepted")
    most = max(len(r["right"]) for _, r in rows)
    columns = ("model", "head", "trained on", "text", ">tokens a round", *(f">{j + 1} right" for j in range(most)))
    return (
        "Share of places where the first guesses are all what the model says there, and tokens of a round; greedy texts of 256 "
        f"tokens. EAGLE-3's authors publish {EAGLE3} tokens a round, for 8B models and guesses in a tree.\n\n"
        + table(columns, [_accepted(device, r, most) for device, r in rows])
    )


def _accepted(device: str, row: Row, most: int) -> tuple[str, ...]:
    made = row["trained"]
    how = f"{made['tokens']:,} tokens, {made['seconds'] / 60:.0f} min, {device}" if made else ""
    shares = [f"{100 * a:.0f}%" for a in row["right"]]
    return row["model"], row["head"], how, row["kind"], f"{row['tokens_per_round']:.2f}", *shares, *[""] * (most - len(shares))


@part
def draft_speed() -> str:
    """Tokens per second of generate with drafts and without."""
    found = []
    for device, r in _rows("drafts.json", "speed"):
        with_drafts, without = f"{r['tokens_per_s']:,.0f}", f"{r['tokens_per_s_without']:,.0f}"
        processor = ""
        if "cpu_ms_per_token" in r:
            processor = f"{r['cpu_ms_per_token_without'] / r['cpu_ms_per_token']:.2f}"
        found.append((device, r["model"], r["draft"], r["kind"], without, with_drafts, f"{r['times']:.2f}", processor))
    columns = ("device", "model", "drafts", "text", ">tokens/s without", ">with", ">times", ">times by processor time")
    return table(columns, found)


@part
def draft_settings() -> str:
    """Processor time of the server's engine by sampling settings."""
    found = []
    for r in read("cpu/draft_settings.json")["rows"]:
        none, ngram = r["none"], r["ngram"]
        times, each = f"{none['processor'] / ngram['processor']:.2f}", ngram["tokens"] / ngram["passes"]
        texts = f"{none['tokens']:,}", f"{r['parted']}", f"{r['gap']:g}" if "logprobs" in r["settings"] else ""
        found.append((r["settings"], f"{none['processor']:.1f}", f"{ngram['processor']:.1f}", times, f"{each:.2f}", *texts))
    ms = ("settings", ">ms a token without", ">with n-grams", ">times", ">tokens a pass")
    columns = (*ms, ">tokens", ">texts that part", ">log-probabilities apart by")
    return table(columns, found)


@part
def draft_steps() -> str:
    """Milliseconds of processor time of steps on a CPU by the number of their rows."""
    (row,) = (r for _, r in _rows("drafts.json", "steps"))
    columns = ("", *(f">{w} row{'s' * (w > 1)}" for w in row["rows"]))
    ms = [(name, *(f"{each:.2f}" for each in row[key])) for name, key in (("median", "cpu_ms"), ("least", "cpu_ms_least"))]
    return table(columns, ms)


@part
def draft_same() -> str:
    """Greedy texts with drafts beside those without."""
    rows = [(device, r) for device, r in _rows("drafts_same.json", "same")]
    counts = (">tokens", ">equal until a text parts", ">guessed", ">of them right")
    columns = ("device", "model", "drafts by", ">prompts", *counts, ">texts that part", ">at a gap of at most")
    lines = []
    for device, r in rows:
        gaps, counted = r["parted_at_gaps"], (f"{r[n]:,}" for n in ("tokens", "equal", "drafted", "accepted"))
        model = r["model"] + ", deterministic" * r.get("deterministic", False)
        parted = len(gaps), f"{max(gaps):.4f}" if gaps else ""
        lines.append((device, model, r["draft"], r["prompts"], *counted, *parted))
    return table(columns, lines)


@part
def draft_follow() -> str:
    """Tokens per second of n-grams with large models' shapes that write a small model's texts."""
    found = []
    for device, r in _rows("draft_follow.json", "generate"):
        speeds = f"{r['tokens_per_s_without']:,.0f}", f"{r['tokens_per_s']:,.0f}", f"{r['times']:.2f}"
        found.append(
            (device, r["model"].upper(), r["variant"].split("h")[0], r["kind"], *speeds, f"{r['tokens_per_pass']:.2f}")
        )
    return table(("device", "model", ">bits", "text", ">tokens/s without", ">with", ">times", ">tokens a step"), found)


@part
def draft_first() -> str:
    """The first texts of a process, recordings included, and later ones: the speed with n-grams in that of plain steps."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for device, r in _rows("draft_first.json", "first"):
        groups.setdefault((device, r["model"].upper(), r["kind"], r["new"]), []).append(r)
    found = []
    for key, rows in groups.items():
        times = {state: [r["times"] for r in rows if r["state"] == state] for state in ("first", "later")}
        found.append((*key, f"{1e6 / rows[0]['us_plain']:,.0f}", *(" ".join(f"{x:.2f}" for x in times[s]) for s in times)))
    return table(("device", "model", "text", ">tokens", ">tokens/s without", "first texts", "later texts"), found)


@part
def draft_users() -> str:
    """The same in the server: tokens per second and the 99th percentile of waits for a token."""
    rows = {(d, r["users"], r["load"], r["draft"]): r for d, r in _rows("draft_follow.json", "serve")}
    found = []
    for device, users, load in sorted({key[:3] for key in rows}):
        none, ngram = (rows[device, users, load, draft] for draft in ("none", "ngram"))
        speeds = f"{none['tokens_per_s']:,.0f}", f"{ngram['tokens_per_s']:,.0f}"
        times = f"{ngram['tokens_per_s'] / none['tokens_per_s']:.2f}"
        found.append((device, users, load, *speeds, times, f"{none['p99_ms']:.1f}", f"{ngram['p99_ms']:.1f}"))
    return table(("device", ">users", "load", ">tokens/s without", ">with", ">times", ">p99 ms without", ">with"), found)


ORDERED = (("never", "ahead"), ("balance", "wait"), ("balance", "ahead"), ("always", "wait"), ("always", "ahead"))


@part
def draft_ahead() -> str:
    """Tokens per second where passes are launched ahead of results or after them; means of all turns."""
    found = []
    for device in (d for d in DEVICES if (RESULTS / d / "draft_ahead.json").is_file()):
        rows = [r for r in read(f"{device}/draft_ahead.json")["rows"] if "users" in r]
        for users, load in sorted({(r["users"], r["load"]) for r in rows}):
            of = [[r for r in rows if (r["users"], r["load"], r["mode"], r["order"]) == (users, load, *way)] for way in ORDERED]
            mean = lambda some, what: sum(r[what] for r in some) / len(some)  # noqa: E731
            speeds = [f"{mean(some, 'tokens_per_s'):,.0f}" if some else "" for some in of]
            found.append((device, users, load, *speeds, *(f"{mean(some, 'p99_ms'):.1f}" if some else "" for some in of[:3])))
    ways = (">tokens/s without", ">balance, after", ">balance, ahead", ">always, after", ">always, ahead")
    return table(("device", ">users", "load", *ways, ">p99 ms without", ">after", ">ahead"), found)


@part
def draft_rows() -> str:
    """Milliseconds of steps by the number of their rows."""
    rows = _rows("drafts.json", "rows")
    widths = sorted({r["rows"] for _, r in rows})
    ms = {(device, r["variant"][0], r["context"], r["rows"]): r["ms"] for device, r in rows}
    columns = ("device", ">bits", ">tokens before", *(f">{w} row{'s' * (w > 1)}" for w in widths))
    kinds = dict.fromkeys(each[:3] for each in ms)
    return table(columns, [(*kind[:2], f"{kind[2]:,}", *(f"{ms[*kind, w]:.2f}" for w in widths)) for kind in kinds])


# of a request's mean times a token, and of the times between what comes at once
WAITS = (("token_ms", "p50"), ("token_ms", "p99"), ("event_ms", "p99"))
MODELS = {"8b": "8B", "whole:qwen3_5": "Qwen3.5-27B"}  # the shapes of draft_rounds.json


@part
def draft_rounds() -> str:
    """Tokens per second of a head at given numbers of tokens a round."""
    rows = [
        (d, r) for d in DEVICES if (RESULTS / d / "draft_rounds.json").is_file() for r in read(f"{d}/draft_rounds.json")["rows"]
    ]
    plain = {(d, r["model"], r["variant"]): r["tokens_per_s_without"] for d, r in rows if "rows" not in r and "head" not in r}
    timed = {(d, r["model"], r["variant"], r["rows"], r["tokens_per_round"]): r for d, r in rows if "rows" in r}
    lengths = sorted({key[-1] for key in timed})
    lines = []
    for d, model, variant, T in dict.fromkeys(key[:-1] for key in timed):
        each = [timed.get((d, model, variant, T, n)) for n in lengths]
        ms = next(r["ms_per_round"] for r in each if r)
        speeds = [f"{r['tokens_per_s']:,.0f}" if r else "" for r in each]
        lines.append((d, MODELS[model], variant[0], f"{plain[d, model, variant]:,.0f}", T - 1, f"{ms:.2f}", *speeds))
    columns = (
        "device",
        "shape",
        ">bits",
        ">tokens/s without",
        ">guesses",
        ">ms a round",
        *(f">{n:g} tokens a round" for n in lengths),
    )
    return table(columns, lines)


@part
def draft_serving() -> str:
    """Tokens per second and waits of a server's users, with drafts and without."""
    rows = {(r["users"], r["load"], r["draft"]): r for _, r in _rows("drafts.json", "serve")}
    found = []
    for users, load in dict.fromkeys((u, load) for u, load, _ in rows):
        ways = [rows[users, load, draft] for draft in ("none", "ngram", "forced")]
        found.append((users, load, *(f"{r['tokens_per_s']:,.0f}" for r in ways), *(f"{r['p99_ms']:.1f}" for r in ways)))
    columns = (">users", "load", ">tokens/s without", ">by the balance", ">always", ">p99 ms without", ">balance", ">always")
    return table(columns, found)


@part
def draft_vllm() -> str:
    """Tokens per second over HTTP of lowq's and vLLM's servers, with drafts and without."""
    found = []
    file = "draft_http_eagle3.json"
    kinds = ("n-grams", "draft_http.json", "ngram"), ("EAGLE-3", file, "eagle3"), ("EAGLE-3, 4 bits", file, "eagle3-4bit")
    for device, (name, file, kind) in product(DEVICES, kinds):
        if not (RESULTS / device / file).is_file():
            continue
        measured = [r for r in read(f"{device}/{file}")["rows"] if "users" in r]
        rows = {(r["users"], r["load"], r["server"]): r for r in measured}
        for users, load in sorted({key[:2] for key in rows}):
            each = [rows.get((users, load, server)) for server in ("lowq", f"lowq-{kind}", "vllm", f"vllm-{kind}")]
            speeds = [f"{r['tokens_per_s']:,.0f}" if r else "" for r in each]
            found.append((device, name, users, load, *speeds, *(f"{r['token_ms']['p99']:.1f}" if r else "" for r in each)))
    servers = [(f">{what}, {whose}", ">with drafts") for what in ("tokens/s", "p99 ms") for whose in ("lowq", "vLLM")]
    return table(("device", "drafts", ">users", "load", *chain.from_iterable(servers)), found)


@part
def draft_served() -> str:
    """Tokens per second over HTTP with n-grams and without, and what single requests and tokens wait."""
    found = []
    for device in (d for d in DEVICES if (RESULTS / d / "draft_served.json").is_file()):
        measured = [r for r in read(f"{device}/draft_served.json")["rows"] if "users" in r]
        rows = {(r["users"], r["load"], r["turn"], r["server"]): r for r in measured}
        for users, load, turn in sorted({key[:3] for key in rows}):
            none, ngram = (rows[users, load, turn, server] for server in ("lowq", "lowq-ngram"))
            speeds = f"{none['tokens_per_s']:,.0f}", f"{ngram['tokens_per_s']:,.0f}"
            waits = [f"{r[what][q]:.1f}" for what, q in WAITS for r in (none, ngram)]
            found.append((device, users, load, *speeds, f"{ngram['tokens_per_s'] / none['tokens_per_s']:.2f}", *waits))
    each = chain.from_iterable(
        (f">{q} ms, {name}", ">with n-grams") for name, q in (("a token", "p50"), ("a token", "p99"), ("between events", "p99"))
    )
    return table(("device", ">users", "load", ">tokens/s", ">with n-grams", ">times", *each), found)
