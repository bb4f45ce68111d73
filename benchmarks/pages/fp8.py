"""docs/fp8.md: quantizer, products, 8-bit activations, accuracy.

Results: h100/fp8.json (fp8.py), h200/act_products.json (act_products.py), h200 and cpu/act_quality.json (act_quality.py),
h200/experts_8bit.json and experts_mxfp4.json (experts_speed.py), cpu/act_tasks.json (act_tasks.py).
"""

from math import sqrt
from statistics import geometric_mean

from pages import Row, part, read, shown, table

MODES = ("int8", "int8, down in 16 bits", "fp8", "fp8, down in 16 bits")
TEXTS = {"wikitext2_test": "WikiText-2", "mix_valid_sample": "mix"}
TASKS = {"word": "next word", "choice": "word of four"}


@part
def fp8_head() -> str:
    """What was measured, where and when."""
    runs = read("h100/fp8.json")["runs"].values()
    told = sorted({f"{r['gpu']}, torch {r['torch']}, triton {r['triton']}, {r['date']}" for r in runs})
    return "; ".join(told) + ".\n"


@part
def fp8_quantizer() -> str:
    """us per size, and how far from the cast that moves the same bytes."""
    peers = {"cast": "cast", "torch.compile": "compile"} | {n: n for n in ("tile, 4 warps", "tile, 8 warps", "walk, 32x32")}
    rows = sorted(read("h100/fp8.json")["quantizer"], key=lambda r: r["n"])
    lines = []
    for r in rows:
        n, ours = r["n"], r["ours"]
        rate, share = f"{3 * n * n / ours / 1e3:,.0f}", f"{100 * r['cast'] / ours:.0f}%"
        lines.append((f"{n} x {n}", shown(ours), *(shown(r.get(key)) for key in peers.values()), rate, share))
    means = {p: geometric_mean([r[key] / r["ours"] for r in rows if key in r]) for p, key in peers.items() if p != "cast"}
    told = ", ".join(f"{m:.2f} ({p})" for p, m in means.items())
    columns = ("bf16 in", ">ours", *(f">{p}" for p in peers), ">GB/s", ">of the cast")
    return table(columns, lines) + f"\nGeometric means of their time over ours: {told}.\n"


@part
def fp8_gemm() -> str:
    """us per shape and M."""
    rows = sorted(read("h100/fp8.json")["gemm"], key=lambda r: (-r["N"] * r["K"], -r["N"], r["M"]))
    names = ("128x128", "256x256", "per channel", "triton", "torch, 128x128", "torch, per channel")
    lines = []
    for r in rows:
        rate = f"{2 * r['M'] * r['N'] * r['K'] / r['us']['128x128'] / 1e6:,.0f}"
        lines.append((f"{r['N']} x {r['K']}", r["M"], *(shown(r["us"].get(n)) for n in names), rate))

    def ratio(theirs: str, ours: str, rows: list[Row]) -> str:
        return f"{geometric_mean([r['us'][theirs] / r['us'][ours] for r in rows if theirs in r['us'] and ours in r['us']]):.2f}"

    small, large = [r for r in rows if r["M"] <= 64], [r for r in rows if r["M"] >= 1024]
    block = "torch, 128x128"
    found = [r["us"][block] / r["us"]["128x128"] for r in large]
    told = (
        f"Geometric means of their time over ours. M <= 64: {ratio('triton', '128x128', small)} (our Triton SplitK kernel), "
        f"{ratio(block, '128x128', small)} (torch). M >= 1024: {ratio(block, '128x128', large)} ({min(found):.2f} to "
        f"{max(found):.2f}) with blocks of 128x128, {ratio(block, '256x256', large)} with 256x256 (against torch's 128x128), "
        f"{ratio('torch, per channel', 'per channel', large)} per channel."
    )
    worst = max(v for r in rows for k, v in r["error"].items() if k in names[:3])
    told += f" Largest relative error of ours against fp32: {worst:.1e} (bf16 output).\n"
    return table(("N x K", ">M", *(f">{n}" for n in names), ">TFLOP/s"), lines) + "\n" + told


@part
def fp8_codes() -> str:
    """us of 8-bit activations times packed codes, compared with 16-bit activations."""
    lines = []
    for r in sorted(read("h100/fp8.json")["codes"], key=lambda r: (-r["N"] * r["K"], r["N"], -r["bits"], -r["group"], r["M"])):
        times = {"fp8": r.get("fp8"), "int8": r.get("int8"), "16 bits": r["a16"], "cuBLAS": r["cublas"]}
        fastest = min((t, name) for name, t in times.items() if t is not None)[1]
        rounding = max(r["rounding"].values()) if "rounding" in r else None
        shape = (f"{r['N']} x {r['K']}", f"{r['bits']}-bit g{r['group']}", r["M"])
        us = (times["int8"], times["fp8"], times["16 bits"], rounding, r["cublas"])
        lines.append((*shape, *map(shown, us), fastest))
    columns = ("N x K", "codes", ">M", ">int8 x", ">fp8 x", ">16-bit x", ">rounding alone", ">cuBLAS fp16", "fastest")
    return table(columns, lines)


@part
def fp8_error() -> str:
    """Relative error on real activations."""
    names = {n: n for n in ("1x128, 128x128", "kernel", "256x256", "per token, channel", "int8 x alone")}
    names["kernel"] = "the same by kernel"
    names |= {f"4 bits, {act}": f"4-bit W, {'16-bit' if act == 'none' else act} x" for act in ("none", "int8", "fp8")}
    lines = [
        (r["layer"], f"{r['N']} x {r['K']}", f"{r['largest_over_rms']:.0f}", *(f"{r[n]:.4f}" if n in r else "" for n in names))
        for r in read("h100/fp8.json")["error"]
    ]
    return table(("layer", "N x K", ">largest / rms of x", *(f">{n}" for n in names.values())), lines)


@part
def fp8_perplexity() -> str:
    """Perplexity per format and mode."""
    report = read("h100/fp8.json")
    rows, run = report["perplexity"], report["runs"]["perplexity"]
    tokens = next(r["tokens"] for r in rows if "tokens" in r)
    base = next(r["none"] for r in rows if r["format"] == "unquantized")
    lines = []
    for r in rows:
        cells = [f"{r[m]:.3f} ({100 * (r[m] / base - 1):+.2f}%)" if m in r else "" for m in ("none", "int8", "fp8")]
        lines.append((r["format"], *cells))
    found = table(("weights", ">activations 16 bits", ">int8", ">fp8"), lines)
    return found + f"\nAll {tokens:,} tokens of {run['text']}, on the {run['gpu']}.\n"


@part
def act_products() -> str:
    """Products at prompts' rows compared with cuBLAS."""
    run = read("h200/act_products.json")
    names = {"none": "16-bit x", "int8": "int8 x", "fp8": "fp8 x", "rounding fp8": "rounding alone"}
    names |= {"cublas fp16": "cuBLAS fp16", "cublas fp8": "cuBLAS fp8"}
    lines = []
    for r in sorted(run["rows"], key=lambda r: (-r["bits"], -r["N"] * r["K"], -r["N"], r["M"])):
        if r["M"] == 4096:
            us, best = r["us"], min(r["us"].get(act, 1e9) for act in ("int8", "fp8"))
            lines.append(
                (f"{r['N']} x {r['K']}", r["bits"], *(shown(us.get(n)) for n in names), f"{us['cublas fp16'] / best:.2f}")
            )
    columns = ("N x K", ">bits", *(f">{n}" for n in names.values()), ">over cuBLAS fp16")
    return table(columns, lines) + f"\n{run['device']}, {run['date']}.\n"


@part
def act_experts() -> str:
    """Layers of experts in 16 and in 8 bits."""
    run, mx = read("h200/experts_8bit.json"), read("h200/experts_mxfp4.json")
    names = {"qwen3-30b-a3b": "Qwen3-30B-A3B, 4 bits g128", "gpt-oss-20b-codes": "gpt-oss-20b's shape, 4 bits g64"}
    names["gpt-oss-20b"] = "gpt-oss-20b, MXFP4"
    rows, lines = [r for r in run["rows"] if "grouped_us" in r and "fp8_us" in r], []
    # fewer tokens were timed by tiles of 64 rows, which dispatch does not choose for MXFP4
    rows += [r for r in mx["rows"] if r["model"] == "gpt-oss-20b" and r["tokens"] >= 2048]
    for r in sorted(rows, key=lambda r: (list(names).index(r["model"]), r["tokens"])):
        wide, narrow = r["grouped_us"], r["fp8_us"]
        lines.append((names[r["model"]], f"{r['tokens']:,}", shown(wide), shown(narrow), f"{wide / narrow:.2f}"))
    columns = ("layer of experts", ">tokens", ">16 bits", ">fp8", ">16 bits over fp8")
    return table(columns, lines) + f"\n{run['device']}, {run['date'][:10]}; MXFP4 {mx['date'][:10]}.\n"


@part
def act_prompts() -> str:
    """Milliseconds of whole prompts, with activations of 16 bits and of 8."""
    run = read("h200/prompt_act.json")
    names = {"8b": "8B, 4 bits", "30b-a3b": "Qwen3-30B-A3B, 4 bits", "gpt-oss-20b": "gpt-oss-20b, MXFP4"}
    loads = {"1x4096": "one", "8x4096": "eight at once"}
    rows, lines = {(r["shape"], r["act"]): r for r in run["rows"]}, []
    for shape, name in names.items():
        for load, how in loads.items():
            wide, narrow = (rows[shape, act][load] for act in ("none", "fp8"))
            lines.append((name, how, f"{wide:.1f}", f"{narrow:.1f}", f"{wide / narrow:.2f}"))
    columns = ("model", "prompts of 4,096 tokens", ">ms, 16 bits", ">`--act fp8`", ">16 bits over fp8")
    return table(columns, lines) + f"\n{run['device']}, {run['date'][:10]}, torch {run['torch']}, one run.\n"


@part
def act_file() -> str:
    """Seconds of a file of prompts, with activations of 16 bits and of 8."""
    run = read("h200/prompts_file.json")
    found = {act: [r for r in run["rows"] if r["act"] == act] for act in ("none", "fp8")}
    wide, narrow = (
        {what: sum(r[what] for r in rows) / len(rows) for what in ("answers_s", "seconds")} for rows in found.values()
    )
    names = {"answers_s": "the answers", "seconds": "the whole process"}
    lines = [(n, f"{wide[w]:.1f}", f"{narrow[w]:.1f}", f"{wide[w] / narrow[w]:.2f}") for w, n in names.items()]
    columns = ("seconds of", ">16 bits", ">`--act fp8`", ">16 bits over fp8")
    return table(columns, lines) + f"\n{run['device']}, {run['date'][:10]}, torch {run['torch']}, one run.\n"


@part
def act_quality() -> str:
    """What rounding costs in predictions, by width and mode."""
    runs, lines = [read(f"{where}/act_quality.json") for where in ("h200", "cpu")], []
    modes = (*MODES, "auto")
    rows = runs[0]["rows"] + [r for r in runs[1]["rows"] if r["model"] == "story"]
    for r in sorted(rows, key=lambda r: (r["model"], -r["bits"])):
        for name, text in TEXTS.items():
            found = r[name]
            plain = found["none"]["ppl"]
            costs = [
                f"{100 * (found[m]['ppl'] / plain - 1):+.2f}% / {found[m]['kl']:.4f}" if "kl" in found[m] else "" for m in modes
            ]
            took = f"{r['auto']['act']}, {r['auto']['share']:.0%}"
            lines.append((r["model"], r["bits"], text, f"{plain:.2f}", *costs, took))
    columns = ("model", ">bits", "text", ">perplexity, 16 bits", *(f">{m}" for m in modes), "auto took")
    dates = {m: " and ".join(sorted({r["date"] for r in rows if r["model"] == m})) for m in ("base", "story")}
    where = "; ".join(f"{m}: {run['device']}, {dates[m]}" for m, run in zip(dates, runs, strict=True))
    told = f"Perplexity against 16-bit activations and KL divergence, nats a token; {where}."
    return table(columns, lines) + f"\n{told}\n"


Share = tuple[float, float]  # and its standard error, both of 1


def _pooled(shares: list[tuple[int, Share]]) -> Share:
    """The mean of shares of independent draws, weighted by their numbers of questions."""
    n = sum(count for count, _ in shares)
    return sum(count * share for count, (share, _) in shares) / n, sqrt(sum((count * se) ** 2 for count, (_, se) in shares)) / n


def _of_task(row: Row, task: str, mode: str, what: str, error: str) -> Share:
    """A share of both texts."""
    texts = [row[name][task] for name in TEXTS]
    return _pooled([(t["questions"], (t[mode][what], t[mode][error])) for t in texts])


def _points(share: Share, form: str = "+.2f") -> str:
    return f"{100 * share[0]:{form}} ± {100 * share[1]:.2f}"


@part
def act_tasks() -> str:
    """What rounding costs in answers, by width and mode."""
    run, lines = read("cpu/act_tasks.json"), []
    rows = sorted((r for r in run["rows"] if r["bits"] < 16), key=lambda r: (r["model"], -r["bits"]))
    every: dict[str, list[tuple[int, Share]]] = {mode: [] for mode in MODES}
    for row in rows:
        for task, told in TASKS.items():
            n = sum(row[name][task]["questions"] for name in TEXTS)
            changes = {mode: _of_task(row, task, mode, "difference", "difference_se") for mode in ("none", *MODES)}
            for mode in MODES:
                every[mode].append((n, changes[mode]))
            right = _points(_of_task(row, task, "none", "right", "se"), ".1f")
            lines.append((row["model"], row["bits"], told, f"{n:,}", right, *map(_points, changes.values())))
    columns = ("model", ">bits", "task", ">questions", ">right, %", ">codes", *(f">{mode}" for mode in MODES))
    means = ", ".join(f"{mode} {_points(_pooled(shares))}" for mode, shares in every.items())
    where = f"{run['device']}, torch {rows[0]['torch']}, {max(r['date'] for r in rows)}"
    return table(columns, lines) + f"\nAll rows together: {means}. {where}.\n"
