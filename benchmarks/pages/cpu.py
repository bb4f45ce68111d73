"""docs/cpu.md: the price of sampling, and lowq compared with llama.cpp.

Results in cpu/: sampling.json, of sampling_cpu.py; llamacpp_1b*.json, of cpu_llamacpp.py; hybrids.json, of hybrids_cpu.py;
act_speed.json, of act_cpu.py.
"""

from collections.abc import Iterator
from statistics import median
from typing import Any

from pages import ROOT, part, read, table

RESULTS = ("cpu/llamacpp_1b.json", "cpu/llamacpp_1b_avx2.json")
Rounds = list[dict[str, dict[str, float]]]


def _best(found: Rounds, who: str, what: str) -> float:
    return max(r[who][what] for r in found)


def _pair(found: Rounds, what: str) -> tuple[str, str, str]:
    """Both's best round, the ratio of these, and the median of the rounds' own."""
    theirs, ours = _best(found, "llama.cpp", what), _best(found, "lowq", what)
    middle = median(r["lowq"][what] / r["llama.cpp"][what] for r in found)
    return f"{theirs:.1f} / {ours:.1f}", f"{ours / theirs:.2f}", f"{middle:.2f}"


def _about(report: dict[str, Any]) -> str:
    m, v = report["machine"], report["versions"]
    about = (
        f"1B of Llama 3.2's shape, random weights, 16-bit embedding and head in both; {m['cpu']}, {m['threads']} threads on "
    )
    isa = {r["lowq"].get("isa", "avx512") for found in report["rounds"].values() for r in found}
    about += (
        f"{m['cores']} cores ({', '.join(sorted(isa))}), by the clock, load {min(m['load'])} to {max(m['load'])} before a run, "
    )
    about += f"{report['date'][:10]} (torch {v['torch']}, llama.cpp {v['llama.cpp']}). Prompt of {report['prompt']} tokens, "
    return about + f"{report['new']} new ones after an empty context; tokens a second, the best round of each:"


@part
def cpu_llamacpp() -> str:
    """Of each machine that was measured: `_machine`."""
    return "\n\n".join(_machine(read(f)) for f in RESULTS if (ROOT / "benchmarks/results" / f).exists())


@part
def sampling_cpu() -> str:
    """Milliseconds a token by vocabulary and setting, of one sequence and of each of eight."""
    report = read("cpu/sampling.json")
    by_size: dict[tuple[str, int], list[str]] = {}
    for row in report["rows"]:
        by_size.setdefault((row["vocabulary"], row["V"]), []).append(f"{row['alone_ms']:.2f} / {row['of_eight_ms']:.2f}")
    first = [row for row in report["rows"] if row["V"] == report["rows"][0]["V"]]
    heads = [f">T {r['temperature']}, k {r['top_k']}, p {r['top_p']}" if r["temperature"] else ">greedy" for r in first]
    lines = table(("vocabulary", ">tokens", *heads), [(name, f"{V:,}", *cells) for (name, V), cells in by_size.items()])
    about = f"one thread, {report['cpu']}, torch {report['torch']}, numpy {report['numpy']}"
    return f"Milliseconds of a core a token: one sequence / each of eight. Measured {report['measured']}, {about}.\n\n{lines}"


@part
def cpu_act() -> str:
    """Seconds of prompts with and without --act int8."""
    rows, tasks = read("cpu/act_speed.json")["rows"], {"eval": "`eval`", "prompts": "`generate --prompts`"}
    lines = [
        (f"`{r['model']}`", told, r["texts"], *(f"{r[task][what]:.2f}" for what in ("none", "int8", "ratio")))
        for r in sorted(rows, key=lambda r: str(r["model"]))
        for task, told in tasks.items()
    ]
    columns = ("model", "command", ">texts of 900 tokens", ">16 bits, s", ">int8, s", ">ratio, median of rounds")
    about = [f"`{r['model']}`: {r['processor']}, {r['cpu']}, {r['rounds']} rounds, load {r['load']}, {r['date']}" for r in rows]
    return table(columns, lines) + f"\nCPU time of one thread, the least of all rounds. {'; '.join(about)}.\n"


def _machine(report: dict[str, Any]) -> str:
    """Tokens a second and peak memory of both, eight texts at once, seconds to the first token."""
    rows, many = [], []
    for name, found in report["rounds"].items():
        one, batch = _best(found, "lowq", "decode"), _best(found, "lowq", "batch")
        gbs, loop = one * found[0]["lowq"]["read_bytes"] / 1e9, max(r["lowq"].get("read_gbs", 0) for r in found)
        share = f"{gbs:.1f}", f"{100 * gbs / loop:.0f}%" if loop else "-"
        many.append((name.split(" /")[0], f"{one:.1f}", *share, f"{batch:.1f}", f"{batch / one:.1f}"))
        if "llama.cpp" not in found[0]:
            continue
        theirs, ours = (_best(found, who, "peak_mb") for who in ("llama.cpp", "lowq"))
        memory = f"{theirs:,.0f} / {ours:,.0f}", f"{ours / theirs:.2f}"
        rows.append((name, len(found), *_pair(found, "decode"), *_pair(found, "prompt"), *memory))
    speeds = [c for what in ("decoding", "prompt") for c in (f">{what}: llama.cpp / lowq", ">ratio", ">median of rounds")]
    heads = ("lowq, llama.cpp", ">rounds", *speeds, ">peak MB", ">ratio")
    widths = ("lowq", ">one text", ">reads GB/s", ">of a plain loop's", f">{report['batch']} texts", ">times")
    lines = f"{_about(report)}\n\n{table(heads, rows)}\n\nEvery width, tokens a second in all:\n\n{table(widths, many)}"
    for name, found in report["first"].items():
        ours, bare = (min(r[k] for r in found) for k in ("first_s", "torch_s"))
        lines += f"\n\nFrom the shell to the first token, {name}: {ours:.2f} s, of which `import torch` {bare:.2f} s."
    return lines


@part
def cpu_hybrids() -> str:
    """Hybrids next to a Llama of as many weights, in lowq and in llama.cpp."""
    found, cells = read("cpu/hybrids.json"), list[tuple[object, ...]]()
    for row in found["rows"]:
        more = row["weights"] / row["llama_weights"]
        cells.append((f"`{row['family']}`", f"lowq, {row['form']}", row["rounds"], *_hybrid(row, more), "", ""))
        if theirs := row.get("llama.cpp"):
            over = {key: f"{theirs[key] / row[key]:.2f}" for key in theirs if key.endswith(("_s", "_ms"))}
            times = (f"{over[key]} / {over[f'llama_{key}']}" for key in ("prompt_s", "step_ms"))
            cells.append(("", f"llama.cpp, {theirs['file']}", "", *_hybrid(theirs, more), *times))
    told = f"{found['processor']}, {found['cpu']}, {found['threads']} thread, CPU time, the least of all rounds, load "
    told += (
        f"{min(found['load'])} to {max(found['load'])} before a run, {found['measured']} (torch {found['torch']}, llama.cpp of "
    )
    told += f"{found['llama_cpp']}).\n\n"
    logits = [(row["family"], row["llama.cpp"]["apart"]) for row in found["rows"] if "apart" in row.get("llama.cpp", {})]
    told += "".join(
        f"Logits of `{family}` in fp32 differ by {a:.1g}, of the Llama by {b:.1g}.\n\n" for family, (a, b) in logits
    )
    heads = (
        "hybrid",
        "",
        ">rounds",
        ">MB a step reads",
        ">prompt, s: hybrid / Llama",
        ">ratio",
        ">step, ms: hybrid / Llama",
        ">ratio",
    )
    return told + table((*heads, ">prompt over lowq's: hybrid / Llama", ">step over lowq's"), cells)


def _hybrid(row: dict[str, Any], more: float) -> Iterator[str]:
    """One program's times of both models, and the hybrid's over the Llama's by weight, of which it has `more`."""
    yield " / ".join(f"{x:.0f}" for x in row["mb"])
    for key, form in (("prompt_s", ".2f"), ("step_ms", ".1f")):
        hybrid, llama = row[key], row[f"llama_{key}"]
        yield f"{hybrid:{form}} / {llama:{form}}"
        yield f"{hybrid / llama / more:.2f}"
