"""docs/cpu.md: lowq beside llama.cpp. Results: cpu/llamacpp_1b.json, of cpu_llamacpp.py."""

from statistics import median
from typing import Any

from pages import part, read, table

RESULT = "cpu/llamacpp_1b.json"
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
    about += f"{m['cores']} cores, by the clock, most other work paused but not all (rounds differ by up to two), "
    about += f"{report['date'][:10]} (torch {v['torch']}, llama.cpp {v['llama.cpp']}). Prompt of {report['prompt']} tokens, "
    return about + f"{report['new']} new ones after an empty context; tokens a second, the best round of each:"


@part
def cpu_llamacpp() -> str:
    """Tokens a second and peak memory of both, eight texts at once, seconds to the first token."""
    report = read(RESULT)
    rows, many = [], []
    for name, found in report["rounds"].items():
        one, batch = _best(found, "lowq", "decode"), _best(found, "lowq", "batch")
        many.append((name.split(" /")[0], f"{one:.1f}", f"{batch:.1f}", f"{batch / one:.1f}"))
        theirs, ours = (_best(found, who, "peak_mb") for who in ("llama.cpp", "lowq"))
        memory = f"{theirs:,.0f} / {ours:,.0f}", f"{ours / theirs:.2f}"
        rows.append((name, len(found), *_pair(found, "decode"), *_pair(found, "prompt"), *memory))
    speeds = [c for what in ("decoding", "prompt") for c in (f">{what}: llama.cpp / lowq", ">ratio", ">median of rounds")]
    heads = ("lowq, llama.cpp", ">rounds", *speeds, ">peak MB", ">ratio")
    batches = table(("lowq", ">one text", f">{report['batch']} texts", ">times"), many)
    lines = f"{_about(report)}\n\n{table(heads, rows)}\n\nSeveral texts at once, tokens a second in all:\n\n{batches}"
    for name, found in report["first"].items():
        ours, bare = (min(r[k] for r in found) for k in ("first_s", "torch_s"))
        lines += f"\n\nFrom the shell to the first token, {name}: {ours:.2f} s, of which `import torch` {bare:.2f} s."
    return lines
